//! [`Watches`]: the watches that wait for keys to change.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use foldhash::fast::FixedState;
use tokio::sync::oneshot;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    base::error::StoreError,
    store::{KeyRange, types::WATCHES_MAX},
};

/// A watch of a transaction, which its commit will arm.
#[derive(Debug)]
pub(super) struct Pending {
    pub key: Bytes,
    /// The value that the transaction saw.
    pub seen: ValueHash,
    /// Completes the watch.
    pub fire: oneshot::Sender<Result<(), StoreError>>,
    /// The slot that this watch takes within the client's limit.
    pub _place: WatchPermit,
}

/// A hash of the value that a watch saw. A hash is enough for a hint, while the values of 10,000 watches could take 1 GB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ValueHash(Option<u64>);

impl ValueHash {
    pub fn of(value: Option<&[u8]>) -> Self {
        Self(value.map(xxh3_64))
    }
}

/// A slot within the client's limit on watches, taken until it is dropped.
#[derive(Debug)]
pub(super) struct WatchPermit {
    /// Shared by all slots, so that the reference count shows how many are taken.
    _taken: Arc<()>,
}

/// Fails the watches of a commit that failed with `error`.
pub(super) fn fail(watches: Vec<Pending>, error: &StoreError) {
    for watch in watches {
        // The receiver may be gone.
        let _ = watch.fire.send(Err(error.clone()));
    }
}

/// The armed watches of a store.
#[derive(Debug, Default)]
pub(super) struct Watches {
    armed: HashMap<Bytes, Vec<Pending>, FixedState>,
    /// Held once by each [`WatchPermit`].
    places: Arc<()>,
}

impl Watches {
    /// Arms `watch`, or fires it immediately if the key no longer has the value that the transaction saw.
    pub fn arm(&mut self, watch: Pending, now: Option<&[u8]>) {
        if watch.seen != ValueHash::of(now) {
            // The receiver may be gone.
            let _ = watch.fire.send(Ok(()));
            return;
        }
        // The watch may have been dropped before its transaction was committed.
        if !watch.fire.is_closed() {
            self.armed.entry(watch.key.clone()).or_default().push(watch);
        }
    }

    /// Returns a slot for another watch, if the client's limit allows it.
    pub fn place(&self) -> Option<WatchPermit> {
        (self.taken() < WATCHES_MAX).then(|| WatchPermit { _taken: Arc::clone(&self.places) })
    }

    fn taken(&self) -> usize {
        Arc::strong_count(&self.places) - 1
    }

    /// Fires the watches on `key` that saw a value other than `now`.
    pub fn key_changed(&mut self, key: &[u8], now: Option<&[u8]>) {
        let Some(waiting) = self.armed.get_mut(key) else {
            return;
        };
        let now = ValueHash::of(now);
        for watch in waiting.extract_if(.., |watch| watch.seen != now) {
            let _ = watch.fire.send(Ok(()));
        }
        if waiting.is_empty() {
            self.armed.remove(key);
        }
    }

    /// Forgets the watches on `key` that were dropped.
    pub fn disarm(&mut self, key: &[u8]) {
        if let Some(waiting) = self.armed.get_mut(key) {
            waiting.retain(|watch| !watch.fire.is_closed());
            if waiting.is_empty() {
                self.armed.remove(key);
            }
        }
    }

    /// Returns the keys of `range` that have armed watches.
    pub fn keys(&self, range: &KeyRange) -> Vec<Bytes> {
        self.armed.keys().filter(|key| range.contains(key)).cloned().collect()
    }

    /// Whether no watch is armed.
    pub fn is_empty(&self) -> bool {
        self.armed.is_empty()
    }
}
