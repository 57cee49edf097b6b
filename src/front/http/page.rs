//! [`PageSize`]: how many rows a feed reads at once, so that a client that does not read holds few bytes, however long the names.
//!
//! A page is cut off where its rows take too much memory, and what was cut off is read again later. The next pages are so much
//! shorter that this happens once, and grow again when there is room.

use crate::base::{cursor::Cursor, encoding::Sequence};

/// How many bytes of rows are kept, and one row.
const PAGE_BYTES: usize = 64 << 10;

/// The fewest rows of a first page: positions in the middle of what there is are longer than at its end, so a short feed is read
/// to its end in any case.
const FIRST_ROWS_MIN: usize = 16;

/// How many rows are read at once.
#[derive(Debug)]
pub(super) struct PageSize {
    /// The most rows, however short they are.
    most: usize,
    /// The rows of the next page.
    rows: usize,
}

impl PageSize {
    /// Pages of at most `most` rows.
    pub fn new(most: usize) -> Self {
        Self { most, rows: most }
    }

    /// The same for who wants no more than `limit` rows: the first page has few more, so that the price of one row is not that of
    /// a page.
    pub fn for_limit(most: usize, limit: u64) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Self { most, rows: limit.max(FIRST_ROWS_MIN).min(most) }
    }

    /// How many rows the next page has.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many rows of a page are kept, at least one, if they take `sizes` bytes of memory. The next page is about as long.
    pub fn keep(&mut self, sizes: impl ExactSizeIterator<Item = usize>) -> usize {
        let (rows, mut bytes) = (sizes.len(), 0);
        let kept = sizes
            .take_while(|size| {
                let fits = bytes < PAGE_BYTES;
                bytes += size;
                fits
            })
            .count();
        self.rows = if kept < rows { kept } else { self.rows.saturating_mul(2).min(self.most) };
        kept
    }
}

/// The cursor of the reading to which a page belongs that began at `from` and ended at `next`: it says when the reading began.
pub(super) fn reading(from: Cursor, next: Cursor) -> Cursor {
    from.begin(next.began().unwrap_or(next.position()))
}

/// Where to go on behind the row `at` of a page that began at `from` and ended at `next`.
pub(super) fn cut_at(from: Cursor, next: Cursor, at: Sequence) -> Cursor {
    reading(from, next).at(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_as_long_as_their_rows_allow() {
        let mut size = PageSize::new(256);
        assert_eq!(size.keep([100; 256].into_iter()), 256);
        let long = [PAGE_BYTES / 4 + 1; 256];
        assert_eq!((size.keep(long.into_iter()), size.rows()), (4, 4), "as many as fit");
        assert_eq!((size.keep(long[..4].iter().copied()), size.rows()), (4, 8));
        assert_eq!((size.keep([PAGE_BYTES * 9; 8].into_iter()), size.rows()), (1, 1), "one in any case");
        for _ in 0..9 {
            let rows = size.rows();
            assert_eq!(size.keep(std::iter::repeat_n(100, rows)), rows);
        }
        assert_eq!(size.rows(), 256, "it has grown again");
        assert_eq!(size.keep([].into_iter()), 0);
        let first = |limit| PageSize::for_limit(256, limit).rows();
        assert_eq!([first(0), first(1), first(100), first(u64::MAX)], [16, 16, 100, 256]);
    }
}
