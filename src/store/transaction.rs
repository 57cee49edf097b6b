//! [`Transaction`]: what layers read and write through.

use std::sync::{Mutex, PoisonError};

use bytes::Bytes;

use super::{
    AtomicOp, KeyRange, Page, Pages, RangeRead, Watch, backend::TransactionBackend,
    mutation::Mutation,
};
use crate::{encoding::Versionstamp, error::Result};

/// Whether a read can make the transaction conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isolation {
    /// The commit fails if what was read has been written since.
    Serializable,
    /// The read conflicts with nothing.
    Snapshot,
}

/// What a commit made of a transaction that wrote something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The stamp that the versionstamped keys and values of the transaction carry.
    pub versionstamp: Versionstamp,
}

/// A transaction: reads at one version, writes at its commit, or not at all.
///
/// All methods take `&self`, so that a transaction can be lent to many parts of a layer. Dropping it forgets its writes.
/// [`Database::run`](super::Database::run) commits and retries by itself.
///
/// # Errors
///
/// Mutations do not fail at once; a key or value over its limit, or a key beyond `0xff`, fails the reads that follow and
/// the commit. Reads and the commit fail with the codes of [`StoreError`](crate::StoreError).
///
/// # Cancel safety
///
/// A read that is dropped has no effect, but may already have added to the read-conflict set. A commit that is dropped may
/// or may not happen.
pub struct Transaction {
    /// What the store does for it.
    backend: Box<dyn TransactionBackend>,
    /// `ADD`s that wait for the commit, one per key.
    merged: Mutex<Merged>,
    /// A number drawn for this transaction, by which producers spread their load.
    salt: u64,
}

/// What a transaction holds back until its commit.
#[derive(Default)]
struct Merged {
    /// Keys and the lanes to add to each.
    additions: Vec<(Bytes, [u64; 4])>,
    /// What to do once the commit has succeeded.
    on_commit: Vec<Box<dyn FnOnce() + Send>>,
}

impl Transaction {
    /// The face of `backend`.
    pub(crate) fn new(backend: Box<dyn TransactionBackend>, salt: u64) -> Self {
        Self {
            backend,
            merged: Mutex::default(),
            salt,
        }
    }

    /// The value of `key`.
    pub async fn get(&self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>> {
        self.backend.get(key, isolation).await
    }

    /// One page of rows. See [`Transaction::pages`] for all of them.
    ///
    /// A serializable read adds what it has read to the read-conflict set: the whole range, or up to the last row when a
    /// limit ended the page.
    pub async fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Result<Page> {
        self.backend.get_range(read, isolation).await
    }

    /// All pages of `read`, fetched one at a time.
    pub fn pages(&self, read: RangeRead, isolation: Isolation) -> Pages<'_> {
        Pages::new(self, read, isolation)
    }

    /// Sets `key` to `value`.
    pub fn set(&self, key: &[u8], value: &[u8]) {
        self.backend.mutate(Mutation::Set(
            Bytes::copy_from_slice(key),
            Bytes::copy_from_slice(value),
        ));
    }

    /// Removes `key`.
    pub fn clear(&self, key: &[u8]) {
        self.backend
            .mutate(Mutation::Clear(Bytes::copy_from_slice(key)));
    }

    /// Removes the keys of `range`. An inverted range fails the commit with `inverted_range` (2005).
    pub fn clear_range(&self, range: &KeyRange) {
        self.backend
            .mutate(Mutation::ClearRange(range.begin.clone(), range.end.clone()));
    }

    /// Applies `op` to `key` at the commit.
    pub fn atomic(&self, op: AtomicOp, key: &[u8], operand: &[u8]) {
        let operand = Bytes::copy_from_slice(operand);
        self.backend
            .mutate(Mutation::Atomic(op, Bytes::copy_from_slice(key), operand));
    }

    /// Makes the commit fail if `range` was written since the read version. Keys that the transaction has already
    /// written are skipped, as in FoundationDB: add the range before the write.
    pub fn add_read_conflict(&self, range: &KeyRange) {
        self.backend.add_read_conflict(range.clone());
    }

    /// Makes every other transaction that has read within `range` fail, as if the range had been written.
    pub fn add_write_conflict(&self, range: &KeyRange) {
        self.backend.add_write_conflict(range.clone());
    }

    /// A watch on `key`; see [`Watch`]. Fails with `too_many_watches` (1032) at the client's limit.
    pub async fn watch(&self, key: &[u8]) -> Result<Watch> {
        self.backend.watch(key).await
    }

    /// The version at which this transaction reads.
    pub async fn read_version(&self) -> Result<u64> {
        self.backend.read_version().await
    }

    /// Reads at `version`, which another transaction has told. Call it before the first read. The reads fail with
    /// `transaction_too_old` (1007) if the store no longer keeps that version, `future_version` (1009) if it is to come.
    pub fn set_read_version(&self, version: u64) {
        self.backend.set_read_version(version);
    }

    /// Commits. Returns `None` if there was nothing to write.
    pub async fn commit(&self) -> Result<Option<Committed>> {
        let on_commit = {
            let mut merged = self.merged();
            for (key, lanes) in merged.additions.drain(..) {
                let operand = Bytes::copy_from_slice(
                    &crate::encoding::Counters::from_lanes(lanes).to_bytes(),
                );
                self.backend
                    .mutate(Mutation::Atomic(AtomicOp::Add, key, operand));
            }
            std::mem::take(&mut merged.on_commit)
        };
        let versionstamp = self.backend.commit().await?;
        on_commit.into_iter().for_each(|action| action());
        Ok(versionstamp.map(|versionstamp| Committed { versionstamp }))
    }

    /// Bytes of keys, values and conflict ranges so far; the commit fails with `transaction_too_large` (2101) over 10 MB.
    pub fn approximate_size(&self) -> usize {
        self.backend.approximate_size()
    }

    /// Makes everything that follows fail with `transaction_cancelled` (1025).
    pub fn cancel(&self) {
        self.backend.cancel();
    }

    /// Forgets all reads and writes: a new transaction.
    pub fn reset(&self) {
        *self.merged() = Merged::default();
        self.backend.reset();
    }

    /// Waits after `error` until the transaction can be tried again, and resets it; returns `error` if that cannot help.
    /// `backoff` is the pause where the backend brings none.
    pub(crate) async fn recover(
        &self,
        error: crate::Error,
        backoff: futures_util::future::BoxFuture<'static, ()>,
    ) -> Result<()> {
        self.backend.recover(error, backoff).await?;
        self.reset();
        Ok(())
    }

    /// Adds `lanes` to the counters at `key` with the commit. However often it is called for one key, the commit has one
    /// `ADD` for it. Reads of this transaction do not see it.
    pub(crate) fn add_merged(&self, key: Bytes, lanes: [u64; 4]) {
        let mut merged = self.merged();
        // Newest first: a transaction that records many events mostly records the same database again.
        if let Some((_, sum)) = merged
            .additions
            .iter_mut()
            .rev()
            .find(|(existing, _)| *existing == key)
        {
            for (sum, lane) in sum.iter_mut().zip(lanes) {
                *sum += lane;
            }
        } else {
            merged.additions.push((key, lanes));
        }
    }

    /// Runs `action` once the commit has succeeded.
    pub(crate) fn on_commit(&self, action: impl FnOnce() + Send + 'static) {
        self.merged().on_commit.push(Box::new(action));
    }

    /// A number drawn for this transaction, by which producers spread their load.
    pub(crate) fn salt(&self) -> u64 {
        self.salt
    }

    /// What waits for the commit. A panic elsewhere cannot leave it half changed, so a poisoned lock is fine.
    fn merged(&self) -> std::sync::MutexGuard<'_, Merged> {
        self.merged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
