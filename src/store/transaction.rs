//! [`Transaction`]: the reads and writes of a layer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::{
    AtomicOp, Isolation, KeyRange, Mutation, Page, RangeRead, Row, TransactionOption, Watch,
    backend::TransactionBackend,
    extension::{Extension, Extensions},
    types,
};
use crate::base::{
    encoding::Versionstamp,
    error::{Error, Result, StoreError},
};

/// The commit of a transaction that wrote something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The stamp in the versionstamped keys and values of the transaction.
    pub versionstamp: Versionstamp,
}

/// A transaction. Its reads are all at one version, and its writes happen together at its commit, or not at all.
///
/// Clones are handles to the same transaction, and all methods take `&self`, so that many parts of a layer can share it. Dropping the last
/// handle discards its writes. [`Store::run`](super::Store::run) commits and retries automatically.
///
/// # Errors
///
/// Mutations do not fail immediately: a key or value over its limit, or a key at or beyond `0xff`, makes later reads and the commit fail.
/// Reads and the commit fail with the codes of [`StoreError`](crate::store::StoreError).
///
/// # Cancel safety
///
/// A read that is dropped has no effect, except that it may already be in the read-conflict set. A commit that is dropped may or may not
/// happen.
#[derive(Clone)]
pub struct Transaction(Arc<Inner>);

/// A transaction, shared by its handles.
struct Inner {
    backend: Box<dyn TransactionBackend>,
    held: Mutex<Held>,
    /// A random number for this transaction. Callers use it to spread their load.
    salt: u64,
    resets: AtomicU64,
    /// Whether an earlier attempt of the run may have been committed.
    in_doubt: AtomicBool,
}

/// A listener for the commit of a transaction.
pub(crate) trait AfterCommit: Send + Sync {
    /// Called after the commit succeeded or, if not `is_certain`, may have succeeded. Must not block.
    fn committed(&self, token: u32, is_certain: bool);
}

/// A set of small numbers, with one bit for each.
#[derive(Default)]
struct Tokens(SmallVec<[u64; 1]>);

impl Tokens {
    fn insert(&mut self, token: u32) {
        let (word, bit) = (token as usize / 64, token % 64);
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << bit;
    }

    fn iter(&self) -> impl Iterator<Item = u32> {
        let words = (0_u32..).step_by(64).zip(&self.0);
        words.flat_map(|(first, word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit)
        })
    }
}

/// The state that a transaction keeps until its commit.
#[derive(Default)]
struct Held {
    extensions: Extensions,
    /// The listeners for the commit, each with its tokens.
    listeners: Vec<(Arc<dyn AfterCommit>, Tokens)>,
}

impl Transaction {
    /// The maximum length of a key, in bytes.
    pub const KEY_LEN_MAX: usize = types::KEY_LEN_MAX;
    /// The maximum length of a value, in bytes.
    pub const VALUE_LEN_MAX: usize = types::VALUE_LEN_MAX;
    /// The maximum size of a transaction: the bytes of its keys, values and conflict ranges.
    pub const LEN_MAX: usize = types::TRANSACTION_LEN_MAX;
    /// How long a transaction can read and commit.
    pub const LIFETIME: Duration = types::TRANSACTION_LIFETIME;

    pub(crate) fn new(backend: Box<dyn TransactionBackend>, salt: u64) -> Self {
        let (resets, in_doubt) = (AtomicU64::new(0), AtomicBool::new(false));
        Self(Arc::new(Inner { backend, held: Mutex::default(), salt, resets, in_doubt }))
    }

    /// Returns the value of `key`.
    pub async fn get(&self, key: &[u8], isolation: Isolation) -> Result<Option<Bytes>> {
        self.0.backend.get(key, isolation).await
    }

    /// Reads one page of rows. See [`Transaction::pages`] for all of them.
    ///
    /// A serializable read adds the part that was read to the read-conflict set: the whole range, or up to the last row if a limit ended
    /// the page.
    pub async fn get_range(&self, read: &RangeRead, isolation: Isolation) -> Result<Page> {
        self.0.backend.get_range(read, isolation).await
    }

    /// Reads all rows of `range`, of which there must be only a few.
    pub(crate) async fn all_rows(&self, range: KeyRange, isolation: Isolation) -> Result<Vec<Row>> {
        let mut pages = self.pages(RangeRead::new(range), isolation);
        let mut rows = Vec::new();
        while let Some(page) = pages.next().await? {
            rows.extend(page);
        }
        Ok(rows)
    }

    /// Sets `key` to `value`.
    pub fn set(&self, key: &[u8], value: &[u8]) {
        self.0.backend.mutate(Mutation::Set(Bytes::copy_from_slice(key), Bytes::copy_from_slice(value)));
    }

    /// Removes `key`.
    pub fn clear(&self, key: &[u8]) {
        self.0.backend.mutate(Mutation::Clear(Bytes::copy_from_slice(key)));
    }

    /// Removes the keys of `range`. An inverted range fails the commit with `inverted_range` (2005).
    pub fn clear_range(&self, range: &KeyRange) {
        self.0.backend.mutate(Mutation::ClearRange(range.begin.clone(), range.end.clone()));
    }

    /// Applies `op` to `key` at the commit.
    pub fn atomic(&self, op: AtomicOp, key: &[u8], operand: &[u8]) {
        let operand = Bytes::copy_from_slice(operand);
        self.0.backend.mutate(Mutation::Atomic(op, Bytes::copy_from_slice(key), operand));
    }

    /// Makes the commit fail if `range` was written since the read version. Keys that the transaction has already written are skipped, as
    /// in FoundationDB: add the range before the write.
    pub fn add_read_conflict(&self, range: &KeyRange) {
        self.0.backend.add_read_conflict(range.clone());
    }

    /// Makes every other transaction that read within `range` fail, as if the range had been written.
    pub fn add_write_conflict(&self, range: &KeyRange) {
        self.0.backend.add_write_conflict(range.clone());
    }

    /// Sets a watch on `key`; see [`Watch`]. Fails with `too_many_watches` (1032) at the client's limit.
    pub async fn watch(&self, key: &[u8]) -> Result<Watch> {
        self.0.backend.watch(key).await
    }

    /// Returns the version at which this transaction reads.
    pub async fn read_version(&self) -> Result<u64> {
        self.0.backend.read_version().await
    }

    /// Returns the version that the clock of the store shows; see [`TransactionBackend::clock_version`].
    pub(crate) async fn clock_version(&self) -> Result<u64> {
        self.0.backend.clock_version().await
    }

    /// Reads at `version`, which another transaction returned. The reads fail with `transaction_too_old` (1007) if the store no longer
    /// keeps that version, and with `future_version` (1009) if the version has not been reached yet. If this is called after the first
    /// read, or a second time, all later operations fail with `read_version_already_set` (2010).
    pub fn set_read_version(&self, version: u64) {
        self.0.backend.set_read_version(version);
    }

    /// Commits the transaction. Returns `None` if there was nothing to write.
    pub async fn commit(&self) -> Result<Option<Committed>> {
        let Held { extensions, listeners } = std::mem::take(&mut *self.held());
        extensions.into_writes(|write| self.0.backend.mutate(write));
        let result = self.0.backend.commit().await;
        // An unknown result counts, too: the caller may find that the commit happened, and never try again.
        let is_certain = result.as_ref().is_ok_and(Option::is_some);
        if is_certain || result.as_ref().is_err_and(Error::is_maybe_committed) {
            for (listener, tokens) in listeners {
                tokens.iter().for_each(|token| listener.committed(token, is_certain));
            }
        }
        Ok(result?.map(|versionstamp| Committed { versionstamp }))
    }

    /// Returns the bytes of keys, values and conflict ranges so far. Above 10 MB the commit fails with `transaction_too_large` (2101).
    pub async fn approximate_size(&self) -> Result<usize> {
        let held = self.held().extensions.size();
        Ok(self.0.backend.approximate_size().await? + held)
    }

    /// Reads all pages of `read`, one at a time.
    pub fn pages(&self, read: RangeRead, isolation: Isolation) -> Pages<'_> {
        Pages { transaction: self, rest: Some(read), isolation }
    }

    /// Sets an option of this transaction. An invalid option makes all later operations fail with `invalid_option_value` (2006).
    pub fn set_option(&self, option: TransactionOption) {
        self.0.backend.set_option(option);
    }

    /// For diagnosis: returns the ranges of the read-conflict set on which the last commit failed with `not_committed` (1020), if
    /// [`TransactionOption::ReportConflicts`] was set before. If there are many, a cluster returns only some. Call this before the
    /// transaction is reset.
    pub async fn conflicting_ranges(&self) -> Result<Vec<KeyRange>> {
        self.0.backend.conflicting_ranges().await
    }

    /// Makes all later operations fail with `transaction_cancelled` (1025), whatever state the transaction is in. A commit that is under
    /// way still returns its result; a run that is waiting for its next attempt ends with that error.
    pub fn cancel(&self) {
        self.0.backend.cancel();
    }

    /// Whether an earlier attempt of this run may have been committed, because the result of its commit is unknown (1021, 1039). If so, a
    /// body whose effects must not happen twice should first read what it is about to write.
    pub fn may_have_committed(&self) -> bool {
        self.0.in_doubt.load(Ordering::Relaxed)
    }

    /// Forgets all reads, writes and options, so that this becomes a new transaction.
    pub fn reset(&self) {
        self.0.resets.fetch_add(1, Ordering::Relaxed);
        self.0.in_doubt.store(false, Ordering::Relaxed);
        *self.held() = Held::default();
        self.0.backend.reset();
    }

    /// Whether, according to the store, the same transaction can succeed if it is tried again after `error`.
    pub(crate) fn is_retryable(&self, error: &StoreError) -> bool {
        self.0.backend.is_retryable(error)
    }

    /// Waits after `error` until the transaction can be tried again, and resets it. Fails with `error` if another attempt cannot help.
    /// `backoff` is the pause for backends without one of their own.
    pub(crate) async fn recover(
        &self,
        error: Error,
        backoff: futures_util::future::BoxFuture<'static, ()>,
    ) -> Result<()> {
        let resets = self.resets();
        let in_doubt = error.is_maybe_committed();
        self.0.backend.recover(error, backoff).await?;
        // If the transaction was reset meanwhile, it is a new one by now, with writes of its own.
        let again = resets + 1;
        if self.0.resets.compare_exchange(resets, again, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            *self.held() = Held::default();
            self.0.in_doubt.fetch_or(in_doubt, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Calls `with` with the transaction's extension of this type, which is created on first use. `with` must not use the transaction.
    pub(crate) fn extension<E: Extension, T>(&self, with: impl FnOnce(&mut E) -> T) -> T {
        with(self.held().extensions.get())
    }

    /// Registers `listener` to be called with `token`, a small number, after the commit succeeded or may have succeeded. The listener gets
    /// each token only once, however many times this is called with it.
    pub(crate) fn after_commit(&self, listener: &Arc<dyn AfterCommit>, token: u32) {
        let mut held = self.held();
        let known = held.listeners.iter_mut().find(|(other, _)| Arc::ptr_eq(other, listener));
        if let Some((_, tokens)) = known {
            tokens.insert(token);
        } else {
            let mut tokens = Tokens::default();
            tokens.insert(token);
            held.listeners.push((Arc::clone(listener), tokens));
        }
    }

    /// Returns how many times the transaction was reset. Reads from before a reset are no longer valid.
    pub(crate) fn resets(&self) -> u64 {
        self.0.resets.load(Ordering::Relaxed)
    }

    /// Returns a random number for this transaction. Callers use it to spread their load.
    pub(crate) fn salt(&self) -> u64 {
        self.0.salt
    }

    /// Locks the state that the transaction keeps until its commit. Code that holds the lock must not use the transaction.
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.held.lock()
    }
}

/// The pages of a range, read one at a time within one transaction.
pub struct Pages<'a> {
    transaction: &'a Transaction,
    rest: Option<RangeRead>,
    isolation: Isolation,
}

impl Pages<'_> {
    /// Returns the rows of the next page; `None` at the end. Cancel safe: a page that was not returned is read again.
    pub async fn next(&mut self) -> Result<Option<Vec<Row>>> {
        let Some(read) = &self.rest else {
            return Ok(None);
        };
        let page = self.transaction.get_range(read, self.isolation).await?;
        self.rest = self.rest.take().and_then(|read| read.after(&page));
        Ok((!page.rows.is_empty()).then_some(page.rows))
    }
}
