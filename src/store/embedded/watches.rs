//! [`Watches`]: who waits for which key to change.

use std::collections::BTreeMap;

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::store::WATCHES_MAX;

/// A watch that its transaction has asked for and its commit will arm.
#[derive(Debug)]
pub(super) struct Pending {
    /// The key.
    pub key: Bytes,
    /// What the transaction saw there.
    pub seen: Option<Bytes>,
    /// Completes the watch.
    pub fire: oneshot::Sender<()>,
}

/// The armed watches of a store.
#[derive(Debug, Default)]
pub(super) struct Watches {
    /// By key.
    armed: BTreeMap<Bytes, Vec<Pending>>,
    /// How many there are, dropped ones included until they are found.
    count: usize,
}

impl Watches {
    /// Arms `watch`, or fires it at once if the key no longer holds what it saw.
    pub fn arm(&mut self, watch: Pending, now: Option<&Bytes>) {
        if watch.seen.as_ref() != now {
            // The receiver may be gone; then nobody waits.
            let _ = watch.fire.send(());
            return;
        }
        let waiting = self.armed.entry(watch.key.clone()).or_default();
        let before = waiting.len();
        waiting.retain(|other| !other.fire.is_closed());
        waiting.push(watch);
        self.count = self.count + waiting.len() - before;
    }

    /// Whether another watch fits below the client's limit.
    pub fn has_room(&mut self) -> bool {
        if self.count >= WATCHES_MAX {
            self.armed.retain(|_, waiting| {
                waiting.retain(|watch| !watch.fire.is_closed());
                !waiting.is_empty()
            });
            self.count = self.armed.values().map(Vec::len).sum();
        }
        self.count < WATCHES_MAX
    }

    /// Fires the watches on `key` that saw something else than `now`.
    pub fn key_changed(&mut self, key: &Bytes, now: Option<&Bytes>) {
        let Some(waiting) = self.armed.get_mut(key) else {
            return;
        };
        let before = waiting.len();
        for watch in waiting.extract_if(.., |watch| watch.seen.as_ref() != now || watch.fire.is_closed()) {
            let _ = watch.fire.send(());
        }
        self.count -= before - waiting.len();
        if waiting.is_empty() {
            self.armed.remove(key);
        }
    }

    /// Whether nobody waits for anything.
    pub fn is_empty(&self) -> bool {
        self.armed.is_empty()
    }
}
