//! [`Tally`] counts how many places each key holds, and limits them.

use std::{fmt::Debug, hash::Hash, sync::Arc};

use dashmap::DashMap;

/// How many places each key holds.
#[derive(Debug)]
pub(super) struct Tally<K: Eq + Hash>(DashMap<K, usize>);

/// One place of a key. Dropping it gives the place back.
#[derive(Debug)]
pub(super) struct FeedPermit<K: Eq + Hash> {
    tally: Arc<Tally<K>>,
    whose: K,
}

impl<K: Clone + Debug + Eq + Hash> Tally<K> {
    pub fn new() -> Arc<Self> {
        Arc::new(Self(DashMap::new()))
    }

    /// Takes a place for `whose`, which may hold `most` places. Fails with the number that it holds.
    pub fn enter(self: &Arc<Self>, whose: K, most: usize) -> Result<FeedPermit<K>, usize> {
        let mut count = self.0.entry(whose.clone()).or_default();
        if *count >= most {
            return Err(*count);
        }
        *count += 1;
        drop(count);
        Ok(FeedPermit { tally: Arc::clone(self), whose })
    }

    /// Returns how many places all keys hold.
    pub fn total(&self) -> usize {
        self.0.iter().map(|entry| *entry.value()).sum()
    }
}

impl<K: Eq + Hash> Drop for FeedPermit<K> {
    fn drop(&mut self) {
        self.tally.0.remove_if_mut(&self.whose, |_, count| {
            *count -= 1;
            *count == 0
        });
    }
}
