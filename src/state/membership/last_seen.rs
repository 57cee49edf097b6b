//! [`LastSeen`]: since when a value has been seen unchanged, by the observer's clock.

use std::{collections::BTreeMap, time::Duration};

use crate::state::keys::{NodeId, NodeRow};

/// The values seen under each key, and since when.
#[derive(Debug, Clone)]
pub(crate) struct LastSeen<K, V> {
    /// Each value, and when it was first seen.
    seen: BTreeMap<K, (V, Duration)>,
    /// When all of them were last read.
    polled: Duration,
}

impl<K, V> Default for LastSeen<K, V> {
    fn default() -> Self {
        Self { seen: BTreeMap::new(), polled: Duration::ZERO }
    }
}

impl<K: Ord, V: PartialEq> LastSeen<K, V> {
    /// How long `value` has been seen under `key`; zero if the last read had another value.
    ///
    /// Read `now` before the store: then a change in between looks too young, never too old.
    pub fn age(&self, key: &K, value: &V, now: Duration) -> Duration {
        match self.seen.get(key) {
            Some((seen, since)) if seen == value => now.saturating_sub(*since),
            _ => Duration::ZERO,
        }
    }

    /// Adopts all of `found`, and forgets the rest. Read `now` after the store.
    pub fn adopt(&mut self, found: impl IntoIterator<Item = (K, V)>, now: Duration) {
        let mut before = std::mem::take(&mut self.seen);
        self.polled = now;
        self.seen = found
            .into_iter()
            .map(|(key, value)| match before.remove(&key) {
                Some((seen, since)) if seen == value => (key, (seen, since)),
                _ => (key, (value, now)),
            })
            .collect();
    }

    /// Forgets what was seen under `key`.
    pub fn forget(&mut self, key: &K) {
        self.seen.remove(key);
    }

    /// Forgets everything if the last read was longer ago than `gap`: an observer that was paused, or without the
    /// store, cannot know whether it missed a change.
    pub fn forget_after(&mut self, gap: Duration, now: Duration) {
        if now.saturating_sub(self.polled) > gap {
            self.seen.clear();
        }
    }

    /// Makes the last read count as one at `now`.
    pub fn keep(&mut self, now: Duration) {
        self.polled = now;
    }

    /// All values, each with since when it has been seen unchanged.
    pub fn iter(&self) -> impl Iterator<Item = (&V, Duration)> {
        self.seen.values().map(|(value, since)| (value, *since))
    }
}

impl LastSeen<NodeId, NodeRow> {
    /// Whether the node is dead, as far as this observer has seen: no beat for as long as its row declares, or its removal has begun.
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
    fn who_did_not_look_knows_nothing() {
        let mut seen = LastSeen::default();
        seen.adopt([('a', 1)], SECOND);
        seen.forget_after(3 * SECOND, 4 * SECOND);
        assert_eq!(seen.iter().next(), Some((&1, SECOND)));
        seen.forget_after(3 * SECOND, 5 * SECOND);
        assert_eq!(seen.iter().next(), None);
    }
}
