//! [`Sightings`]: since when something has been seen unchanged, by the clock of the one who looks.

use std::{collections::BTreeMap, time::Duration};

/// What was seen under each key, and since when.
#[derive(Debug, Clone)]
pub(super) struct Sightings<K, V>(BTreeMap<K, (V, Duration)>);

impl<K, V> Default for Sightings<K, V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord, V: PartialEq> Sightings<K, V> {
    /// For how long `value` has been seen under `key`; zero if it was not, the last time.
    ///
    /// `now` is to be read before the store is: what has changed since then looks too young, never too old.
    pub fn age(&self, key: &K, value: &V, now: Duration) -> Duration {
        match self.0.get(key) {
            Some((seen, since)) if seen == value => now.saturating_sub(*since),
            _ => Duration::ZERO,
        }
    }

    /// Adopts all that `found` says, and forgets the rest. `now` is to be read after the store was.
    pub fn adopt(&mut self, found: impl IntoIterator<Item = (K, V)>, now: Duration) {
        let mut before = std::mem::take(&mut self.0);
        self.0 = found
            .into_iter()
            .map(|(key, value)| match before.remove(&key) {
                Some((seen, since)) if seen == value => (key, (seen, since)),
                _ => (key, (value, now)),
            })
            .collect();
    }

    /// Since when each has been seen unchanged.
    pub fn times(&self) -> impl Iterator<Item = (&K, Duration)> {
        self.0.iter().map(|(key, (_, since))| (key, *since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_what_does_not_change_grows_old() {
        let mut seen = Sightings::default();
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
}
