//! [`PageSize`] decides how many rows a feed reads at once, so that a client that does not read costs little memory, even with long names.
//!
//! If the rows of a page take too much memory, the page is cut off, and the feed reads the rest again later. The next pages are shorter, so
//! that this happens only once. They grow again when there is room.

use crate::base::{
    cursor::Cursor,
    encoding::Sequence,
    error::{Error, Result},
    tasks::Task,
};

/// A page keeps rows until they take this many bytes. The row that exceeds the limit is kept, too.
const PAGE_BYTES: usize = 64 << 10;

/// The minimum number of rows in a first page. With that many, the page reaches the end of a short feed, where positions are shorter than
/// in the middle of a reading.
const FIRST_ROWS_MIN: usize = 16;

/// How many rows the next page reads.
#[derive(Debug)]
pub(super) struct PageSize {
    /// The maximum number of rows in a page.
    most: usize,
    rows: usize,
}

impl PageSize {
    pub fn new(most: usize) -> Self {
        Self { most, rows: most }
    }

    /// Does the same as [`PageSize::new`], for a reader that wants at most `limit` rows. The first page has hardly more rows than `limit`,
    /// so a request for one row does not cost a whole page.
    pub fn for_limit(most: usize, limit: u64) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Self { most, rows: limit.max(FIRST_ROWS_MIN).min(most) }
    }

    /// Returns how many rows the next page reads.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Cuts off the rows of a page where they take too much memory, but keeps at least the first. Returns whether rows were cut off. The
    /// next page then has as many rows as were kept.
    pub fn cut<T>(&mut self, rows: &mut Vec<T>, size_of: impl Fn(&T) -> usize) -> bool {
        let mut bytes = 0;
        let fits = |row: &&T| {
            let fits = bytes < PAGE_BYTES;
            bytes += size_of(row);
            fits
        };
        let kept = rows.iter().take_while(fits).count();
        let is_cut = kept < rows.len();
        rows.truncate(kept);
        if is_cut {
            rows.shrink_to_fit();
        }
        self.rows = if is_cut { kept } else { self.rows.saturating_mul(2).min(self.most) };
        is_cut
    }
}

/// A read of the store in its own task. The read continues even if the client is slow, and then releases its permit.
pub(super) struct Load<T: Send + 'static>(Task<Result<T>>);

impl<T: Send + 'static> Load<T> {
    pub fn begin(read: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        Self(Task::spawn(read))
    }

    /// Waits for the page. Cancel safe.
    pub async fn done(&mut self) -> Result<T> {
        (&mut self.0).await.unwrap_or_else(|error| Err(Error::corrupt("page", error.to_string())))
    }
}

/// Returns the cursor of a reading whose page began at `from` and ended at `next`. The cursor records how far the page could read.
pub(super) fn reading(from: Cursor, next: Cursor) -> Cursor {
    from.begin(next.readable().unwrap_or(next.position()))
}

/// Returns where to continue after the row `at` of a page that began at `from` and ended at `next`.
pub(super) fn cut_at(from: Cursor, next: Cursor, at: Sequence) -> Cursor {
    reading(from, next).at(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_as_long_as_their_rows_allow() {
        let mut size = PageSize::new(256);
        let mut kept = |rows: usize, bytes: usize| {
            let mut page = vec![bytes; rows];
            assert_eq!(size.cut(&mut page, |bytes| *bytes), page.len() < rows);
            (page.len(), size.rows())
        };
        assert_eq!(kept(256, 100), (256, 256));
        assert_eq!(kept(256, PAGE_BYTES / 4 + 1), (4, 4), "as many as fit");
        assert_eq!(kept(4, PAGE_BYTES / 4 + 1), (4, 8));
        assert_eq!(kept(8, PAGE_BYTES * 9), (1, 1), "one in any case");
        let mut rows = 1;
        for _ in 0..9 {
            rows = kept(rows, 100).1;
        }
        assert_eq!(rows, 256, "it has grown again");
        assert_eq!(kept(0, 0).0, 0);
        let first = |limit| PageSize::for_limit(256, limit).rows();
        assert_eq!([first(0), first(1), first(100), first(u64::MAX)], [16, 16, 100, 256]);
    }
}
