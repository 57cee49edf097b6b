//! Key ranges, and how to read them.

use bytes::Bytes;

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
    /// The keys from `begin` up to but not including `end`.
    pub fn new(begin: impl Into<Bytes>, end: impl Into<Bytes>) -> Self {
        Self { begin: begin.into(), end: end.into() }
    }

    /// The keys that start with `prefix`, itself included. A prefix of only `0xff` bytes has no end; the range then
    /// reaches to the end of the space that layers may use.
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

    /// Exactly `key`.
    pub fn key(key: &[u8]) -> Self {
        Self { begin: Bytes::copy_from_slice(key), end: key_after(key) }
    }

    /// Whether `key` lies within.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.begin <= key && key < self.end
    }

    /// Whether a key can lie within both.
    pub(crate) fn intersects(&self, other: &Self) -> bool {
        (&self.begin).max(&other.begin) < (&self.end).min(&other.end)
    }

    /// Whether no key lies within.
    pub fn is_empty(&self) -> bool {
        self.begin >= self.end
    }
}

/// The smallest key greater than `key`.
pub(crate) fn key_after(key: &[u8]) -> Bytes {
    let mut after = Vec::with_capacity(key.len() + 1);
    after.extend_from_slice(key);
    after.push(0);
    after.into()
}

/// The rows to read, and how many at once.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::store::{Database, Isolation, KeyRange, RangeRead};
///
/// let db = Database::memory();
/// db.run(async |tx| {
///     for n in 0..10_u8 {
///         tx.set(&[b'k', n], &[n]);
///     }
///     Ok(())
/// })
/// .await?;
/// let last = RangeRead::new(KeyRange::prefix("k")).limit(3).reverse();
/// let page = db.begin().get_range(&last, Isolation::Snapshot).await?;
/// assert_eq!(page.rows.len(), 3);
/// assert_eq!(page.rows[0].1[0], 9);
/// assert!(page.more);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct RangeRead {
    /// The keys to read.
    pub range: KeyRange,
    /// The most rows of one page.
    pub limit: usize,
    /// The page ends with the row that brings its keys and values to this many bytes.
    pub target_bytes: usize,
    /// Whether to read from the end to the beginning.
    pub reverse: bool,
}

impl RangeRead {
    /// All of `range`, in pages of at most 10,000 rows or 1 MB.
    pub fn new(range: KeyRange) -> Self {
        Self { range, limit: 10_000, target_bytes: 1_000_000, reverse: false }
    }

    /// At most `limit` rows a page.
    #[must_use]
    pub fn limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// About `target_bytes` a page.
    #[must_use]
    pub fn target_bytes(self, target_bytes: usize) -> Self {
        Self { target_bytes, ..self }
    }

    /// From the end to the beginning.
    #[must_use]
    pub fn reverse(self) -> Self {
        Self { reverse: true, ..self }
    }

    /// The rest after `page`; `None` if `page` was the last one.
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
