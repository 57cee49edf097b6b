//! [`Tally`]: how much of something each of many has, and may have.

use std::{fmt::Debug, hash::Hash, sync::Arc};

use dashmap::DashMap;

/// How much each has.
#[derive(Debug)]
pub(super) struct Tally<K: Eq + Hash>(DashMap<K, usize>);

/// One of what somebody has, until it is dropped.
#[derive(Debug)]
pub(super) struct Place<K: Eq + Hash> {
    /// Where it is given back.
    tally: Arc<Tally<K>>,
    whose: K,
}

impl<K: Clone + Debug + Eq + Hash> Tally<K> {
    /// Nobody has anything.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(DashMap::new()))
    }

    /// One more for `whose`, who may have `most`. Fails with how many it has.
    pub fn enter(self: &Arc<Self>, whose: K, most: usize) -> Result<Place<K>, usize> {
        let mut count = self.0.entry(whose.clone()).or_default();
        if *count >= most {
            return Err(*count);
        }
        *count += 1;
        drop(count);
        Ok(Place { tally: Arc::clone(self), whose })
    }

    /// How much all have.
    pub fn total(&self) -> usize {
        self.0.iter().map(|entry| *entry.value()).sum()
    }
}

impl<K: Eq + Hash> Drop for Place<K> {
    fn drop(&mut self) {
        self.tally.0.remove_if_mut(&self.whose, |_, count| {
            *count -= 1;
            *count == 0
        });
    }
}
