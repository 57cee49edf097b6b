//! Merging the shards of one topology entry by sequence.
//!
//! Each shard has a buffer. The smallest head of all buffers is the next row; a buffer that runs empty is filled before
//! the merge goes on. A scheme spreads ids evenly, so the first fill asks each shard for its share and little more, and
//! what is read in vain is a small part whatever the number of shards.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use futures_util::future::try_join_all;

use super::reader::StoredRow;
use crate::{
    encoding::Sequence,
    error::Result,
    keys::RowSpace,
    store::{Isolation, RangeRead, Transaction},
};

/// In which order rows are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Older ones first.
    Ascending,
    /// Newer ones first.
    Descending,
}

impl Direction {
    /// Smaller for what comes first.
    fn rank(self, sequence: Sequence) -> [u8; 13] {
        match self {
            Self::Ascending => *sequence.as_bytes(),
            Self::Descending => sequence.as_bytes().map(|byte| !byte),
        }
    }
}

/// What is read of one shard.
struct Source {
    /// Where its rows are.
    space: RowSpace,
    /// What is still to be read; `None` if nothing is.
    rest: Option<RangeRead>,
    /// Rows that were read and are not merged yet.
    buffer: VecDeque<StoredRow>,
}

impl Source {
    /// Reads on.
    async fn fill(&mut self, tx: &Transaction) -> Result<()> {
        while self.buffer.is_empty() {
            let Some(read) = self.rest.take() else { return Ok(()) };
            let page = tx.get_range(&read, Isolation::Snapshot).await?;
            self.rest = read.after(&page);
            for (key, value) in page.rows {
                self.buffer.push_back(StoredRow { sequence: self.space.sequence(&key)?, value });
            }
        }
        Ok(())
    }
}

/// The rows of `spaces` after `after` and up to `last`, at most `limit`, which is at least 1; and whether there are more.
pub(super) async fn merged(
    tx: &Transaction,
    spaces: impl ExactSizeIterator<Item = RowSpace>,
    (after, last): (Sequence, Sequence),
    limit: usize,
    direction: Direction,
) -> Result<(Vec<StoredRow>, bool)> {
    let share = match spaces.len() {
        1 => limit,
        count => (limit / count + limit / count / 4 + 8).min(limit),
    };
    let source = |space: RowSpace| {
        let read = RangeRead::new(space.rows(after, last)).limit(share);
        let read = if direction == Direction::Descending { read.reverse() } else { read };
        Source { space, rest: Some(read), buffer: VecDeque::new() }
    };
    let mut sources: Vec<_> = spaces.map(source).collect();
    try_join_all(sources.iter_mut().map(|source| source.fill(tx))).await?;

    let rank = |row: &StoredRow| direction.rank(row.sequence);
    let heads = sources.iter().enumerate();
    let heads = heads.filter_map(|(place, source)| Some(Reverse((rank(source.buffer.front()?), place))));
    let mut heads: BinaryHeap<_> = heads.collect();
    let mut rows = Vec::with_capacity(limit.min(1_024));
    while let Some(Reverse((_, place))) = heads.pop() {
        if rows.len() == limit {
            return Ok((rows, true));
        }
        let source = &mut sources[place];
        rows.extend(source.buffer.pop_front());
        // Rows that would not fit are not read.
        if source.buffer.is_empty() && rows.len() < limit {
            source.fill(tx).await?;
        }
        if let Some(row) = source.buffer.front() {
            heads.push(Reverse((rank(row), place)));
        } else if source.rest.is_some() {
            return Ok((rows, true));
        }
    }
    Ok((rows, false))
}
