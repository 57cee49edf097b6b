//! The types of the seam: ranges and pages, writes, options, watches; and the limits of all backends. Users see the limits as constants of
//! [`Transaction`](super::Transaction) and [`Store`](super::Store).

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::base::error::Result;

/// The maximum length of a key, in bytes.
pub(crate) const KEY_LEN_MAX: usize = 10_000;

/// The maximum length of a value, in bytes.
pub(crate) const VALUE_LEN_MAX: usize = 100_000;

/// The maximum size of a transaction: the bytes of its keys, values and conflict ranges.
pub(crate) const TRANSACTION_LEN_MAX: usize = 10_000_000;

/// How long a transaction can read and commit.
pub(crate) const TRANSACTION_LIFETIME: Duration = Duration::from_secs(5);

/// The maximum number of watches that a client can have at once.
pub(super) const WATCHES_MAX: usize = 10_000;

/// A key and its value.
pub type Row = (Bytes, Bytes);

/// The keys from `begin` up to but not including `end`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeyRange {
    /// The first key.
    pub begin: Bytes,
    /// The key after the last one.
    pub end: Bytes,
}

impl KeyRange {
    /// Makes the range of the keys from `begin` up to but not including `end`.
    pub fn new(begin: impl Into<Bytes>, end: impl Into<Bytes>) -> Self {
        Self { begin: begin.into(), end: end.into() }
    }

    /// Returns the range of the keys that start with `prefix`, including `prefix` itself. If `prefix` has only `0xff` bytes, no key comes
    /// right after the range, so it ends where the key space of layers ends.
    pub fn prefix(prefix: impl Into<Bytes>) -> Self {
        let begin = prefix.into();
        let kept = begin.iter().rposition(|&byte| byte != 0xff).map_or(0, |last| last + 1);
        let mut end = begin[..kept].to_vec();
        match end.last_mut() {
            Some(last) => *last += 1,
            None => end.push(0xff),
        }
        Self { begin, end: end.into() }
    }

    /// Returns the range that contains only `key`.
    pub fn key(key: &[u8]) -> Self {
        Self { begin: Bytes::copy_from_slice(key), end: key_after(key) }
    }

    /// Whether `key` lies within the range.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.begin <= key && key < self.end
    }

    /// Whether a key can lie within both ranges.
    pub(crate) fn intersects(&self, other: &Self) -> bool {
        (&self.begin).max(&other.begin) < (&self.end).min(&other.end)
    }

    /// Whether no key can lie within the range.
    pub fn is_empty(&self) -> bool {
        self.begin >= self.end
    }
}

/// Returns the smallest key greater than `key`.
pub(crate) fn key_after(key: &[u8]) -> Bytes {
    let mut after = Vec::with_capacity(key.len() + 1);
    after.extend_from_slice(key);
    after.push(0);
    after.into()
}

/// Which rows to read, and how many at once.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::store::{Store, Isolation, KeyRange, RangeRead};
///
/// let store = Store::memory();
/// store.run(async |tx| {
///     for n in 0..10_u8 {
///         tx.set(&[b'k', n], &[n]);
///     }
///     Ok(())
/// })
/// .await?;
/// let last = RangeRead::new(KeyRange::prefix("k")).limit(3).reverse();
/// let page = store.begin().get_range(&last, Isolation::Snapshot).await?;
/// assert_eq!(page.rows.len(), 3);
/// assert_eq!(page.rows[0].1[0], 9);
/// assert!(page.more);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RangeRead {
    /// The keys to read.
    pub range: KeyRange,
    /// The maximum number of rows in a page.
    pub limit: usize,
    /// The page ends with the row that brings its keys and values to this many bytes.
    pub target_bytes: usize,
    /// Whether to read from the end to the beginning.
    pub reverse: bool,
}

impl RangeRead {
    /// Reads all of `range`, in pages of at most 10,000 rows or about 1 MB.
    pub fn new(range: KeyRange) -> Self {
        Self { range, limit: 10_000, target_bytes: 1_000_000, reverse: false }
    }

    /// Limits each page to `limit` rows.
    #[must_use]
    pub fn limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Limits each page to about `target_bytes`.
    #[must_use]
    pub fn target_bytes(self, target_bytes: usize) -> Self {
        Self { target_bytes, ..self }
    }

    /// Reads from the end to the beginning.
    #[must_use]
    pub fn reverse(self) -> Self {
        Self { reverse: true, ..self }
    }

    /// Returns what is left to read after `page`; `None` if `page` was the last one.
    pub(crate) fn after(mut self, page: &Page) -> Option<Self> {
        let (last, _) = page.rows.last().filter(|_| page.more)?;
        if self.reverse {
            self.range.end = last.clone();
        } else {
            self.range.begin = key_after(last);
        }
        (!self.range.is_empty()).then_some(self)
    }
}

/// Some rows of a range, in the order of the read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// The rows.
    pub rows: Vec<Row>,
    /// Whether a limit ended the page, so that there may be more.
    pub more: bool,
}

/// An operation that the store applies to whatever a key holds when the transaction commits. The operation reads nothing and conflicts with
/// nothing. Operations on the same key are applied in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AtomicOp {
    /// Adds little-endian numbers of the operand's length: a longer value is cut to that length, a shorter or missing one is extended with
    /// zeros, and the sum wraps around.
    Add,
    /// Keeps the greater of value and operand, compared as little-endian numbers of the operand's length.
    Max,
    /// Keeps the smaller of value and operand, compared as little-endian numbers of the operand's length. A missing
    /// value becomes the operand.
    Min,
    /// Keeps the greater of value and operand, compared byte by byte. A missing value becomes the operand.
    ByteMax,
    /// Keeps the smaller of value and operand, compared byte by byte. A missing value becomes the operand.
    ByteMin,
    /// Removes the key if its value equals the operand.
    CompareAndClear,
    /// Sets a key in which the versionstamp replaces 10 bytes. The last 4 bytes of the given key are the offset of
    /// the stamp, little-endian, and are cut off. The operand is the value.
    SetVersionstampedKey,
    /// Sets a value in which the versionstamp replaces 10 bytes. The last 4 bytes of the operand are the offset of
    /// the stamp, little-endian, and are cut off.
    SetVersionstampedValue,
}

/// One write of a transaction, with everything that is needed to apply it later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// Sets `key` to `value`.
    Set(Bytes, Bytes),
    /// Removes `key`.
    Clear(Bytes),
    /// Removes the keys from `begin` up to but not including `end`.
    ClearRange(Bytes, Bytes),
    /// Applies the operation to `key` with the operand.
    Atomic(AtomicOp, Bytes, Bytes),
}

/// Returns how many bytes a store counts for a write of `operand_len` bytes to a key of `key_len` bytes.
pub(crate) fn write_len(key_len: usize, operand_len: usize) -> usize {
    /// The bytes that a store counts for a write and its conflict range in addition to the bytes of both.
    const OVERHEAD: usize = 64;
    OVERHEAD + 3 * key_len + operand_len
}

/// Whether a read can make the transaction conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isolation {
    /// The commit fails if the keys that were read have been written since.
    Serializable,
    /// The read conflicts with nothing.
    Snapshot,
}

/// An option of one transaction. Options last until the transaction is reset; later attempts of
/// [`Store::run`](super::Store::run) keep them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransactionOption {
    /// All operations fail with `transaction_timed_out` (1031) this long after the transaction was created or reset. A commit that is under
    /// way at that time may still happen.
    Timeout(Duration),
    /// The size in bytes above which the commit fails with `transaction_too_large` (2101). At most 10 MB.
    SizeLimit(usize),
    /// How urgent the transaction is. The embedded store treats all transactions alike.
    Priority(Priority),
    /// Keeps the ranges on which a commit conflicted, for [`Transaction::conflicting_ranges`](super::Transaction::conflicting_ranges).
    ReportConflicts,
}

/// Options of a store in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FolderOptions {
    /// How long commits wait while the disk has no room for an overdue snapshot. After that they fail with
    /// [`StoreError::NO_ROOM`](super::StoreError::NO_ROOM), and have no effect. Default: 3 s.
    pub no_room_wait: Duration,
}

crate::base::macros::setters!(FolderOptions { no_room_wait: Duration });

impl Default for FolderOptions {
    fn default() -> Self {
        Self { no_room_wait: Duration::from_secs(3) }
    }
}

/// How urgent a transaction is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// The usual priority. Setting it does not undo a priority that was set before.
    #[default]
    Default,
    /// Work that can wait: a loaded cluster throttles it first, and may not let it through at all.
    Batch,
    /// Work that comes before everything else and is never throttled. Not meant for layers.
    System,
}

/// Completes when the value of a key is no longer the one that the watching transaction saw.
///
/// A watch is armed when its transaction commits, and even then may still fail with `too_many_watches` (1032). If the commit fails, the
/// watch fails with the same error; if the transaction is never committed, with `operation_cancelled` (1101). A watch may fire late, or
/// without a change, or not at all if the value changes back in between: rescan after it fires, and keep a poll as a fallback. Dropping a
/// watch disarms it. Setting a watch is a serializable read of the key, so do not set one in a transaction that writes.
#[must_use = "a watch that is dropped is disarmed"]
pub struct Watch(BoxFuture<'static, Result<()>>);

impl Watch {
    /// Makes a watch that fires when `future` succeeds, and fails with its error. Backends, and code that wraps a store, use it.
    pub fn new(future: impl Future<Output = Result<()>> + Send + 'static) -> Self {
        Self(Box::pin(future))
    }
}

impl Future for Watch {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}
