//! [`LastSeen`]: how long values have been seen unchanged, by the observer's clock.
//!
//! A process has one for nodes, [`NodesSeen`]. The watch over the neighbours, readiness, the status and the metrics record in it the rows
//! of nodes that they read, and ask it which nodes are alive.

use std::{collections::BTreeMap, time::Duration};

use parking_lot::Mutex;

use crate::state::keys::{NodeId, NodeRow};

/// A value that was not read for this long is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_hours(1);

/// The rows of nodes that a process has seen.
pub(crate) type NodesSeen = Mutex<LastSeen<NodeId, NodeRow>>;

/// The values seen under each key.
#[derive(Debug)]
pub(crate) struct LastSeen<K, V>(BTreeMap<K, Unchanged<V>>);

#[derive(Debug)]
struct Unchanged<V> {
    value: V,
    /// When the value was first read, and when it was last read.
    since: Duration,
    read: Duration,
}

impl<K, V> Default for LastSeen<K, V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord, V: PartialEq> LastSeen<K, V> {
    /// Returns how long `value` has been seen under `key`; zero if the last read found another value.
    ///
    /// Take `now` before reading the store, so that a value that changes in between looks too young, never too old.
    pub fn age(&self, key: &K, value: &V, now: Duration) -> Duration {
        let seen = self.0.get(key).filter(|seen| seen.value == *value);
        seen.map_or(Duration::ZERO, |seen| now.saturating_sub(seen.since))
    }

    /// Adopts all of `found`, and forgets the rest. Take `now` after reading the store.
    pub fn adopt(&mut self, found: impl IntoIterator<Item = (K, V)>, now: Duration) {
        let mut all = Self::default();
        std::mem::swap(self, &mut all);
        for (key, value) in found {
            let before = all.0.remove(&key);
            self.insert(key, value, before, now);
        }
    }

    /// Adopts all of `found`, and keeps other values that were read recently.
    pub fn note(&mut self, found: impl IntoIterator<Item = (K, V)>, now: Duration) {
        for (key, value) in found {
            let before = self.0.remove(&key);
            self.insert(key, value, before, now);
        }
        self.0.retain(|_, seen| now.saturating_sub(seen.read) < FORGOTTEN_AFTER);
    }

    fn insert(&mut self, key: K, value: V, before: Option<Unchanged<V>>, now: Duration) {
        let since = before.filter(|seen| seen.value == value).map_or(now, |seen| seen.since);
        self.0.insert(key, Unchanged { value, since, read: now });
    }

    /// Forgets what was seen under `key`.
    pub fn forget(&mut self, key: &K) {
        self.0.remove(key);
    }

    /// Returns the time since which each value has been seen unchanged.
    pub fn since(&self) -> impl Iterator<Item = Duration> {
        self.0.values().map(|seen| seen.since)
    }
}

impl LastSeen<NodeId, NodeRow> {
    /// Whether this observer considers the node dead: it saw no heartbeat for as long as the row declares, or the node's removal has begun.
    pub fn is_silent(&self, node: &NodeId, row: &NodeRow, now: Duration) -> bool {
        row.token == NodeRow::CONDEMNED || self.age(node, row, now) >= row.expiry()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_what_does_not_change_grows_old() {
        let mut seen = LastSeen::default();
        assert_eq!(seen.age(&'a', &1, 5 * SECOND), Duration::ZERO, "it was never seen");
        seen.adopt([('a', 1), ('b', 1)], SECOND);
        seen.adopt([('a', 1), ('b', 2)], 3 * SECOND);
        assert_eq!(seen.age(&'a', &1, 5 * SECOND), 4 * SECOND);
        assert_eq!(seen.age(&'b', &2, 5 * SECOND), 2 * SECOND);
        assert_eq!(seen.age(&'b', &3, 5 * SECOND), Duration::ZERO, "it has changed since");
        seen.adopt([('b', 2)], 4 * SECOND);
        seen.adopt([('a', 1)], 5 * SECOND);
        assert_eq!(seen.age(&'a', &1, 5 * SECOND), Duration::ZERO, "it was gone in between");
    }

    #[test]
    fn a_part_that_is_read_hides_no_other() {
        let mut seen = LastSeen::default();
        seen.adopt([('a', 1), ('b', 1)], SECOND);
        seen.note([('b', 1)], 3 * SECOND);
        assert_eq!(
            [('a', 1), ('b', 1)].map(|(key, value)| seen.age(&key, &value, 5 * SECOND)),
            [4 * SECOND; 2]
        );
        seen.note([('b', 2)], SECOND + FORGOTTEN_AFTER);
        assert_eq!(
            seen.since().collect::<Vec<_>>(),
            [SECOND + FORGOTTEN_AFTER],
            "the other was not read for an hour"
        );
    }
}
