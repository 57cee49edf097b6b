//! Merges the shards of one topology entry by sequence.
//!
//! Each shard has a buffer. The smallest head of all buffers is the next row; a buffer that runs empty is filled before the merge
//! continues. A scheme spreads ids evenly, so the first fill reads little more than each shard's share, and few rows are read
//! unnecessarily, whatever the number of shards.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque, binary_heap::PeekMut},
};

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::{
    base::{encoding::Sequence, error::Result},
    state::keys::RowSpace,
    store::{Isolation, RangeRead, Transaction},
};

/// A stored row of a feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredRow {
    pub sequence: Sequence,
    /// The content of the row, which the users of the feed decode.
    pub value: Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Oldest first.
    Ascending,
    /// Newest first.
    Descending,
}

impl Direction {
    /// Returns a rank that grows in the order of the merge. The rank is a number because it is compared several times per row.
    fn rank(self, sequence: Sequence) -> u128 {
        let mut wide = [0; 16];
        wide[3..].copy_from_slice(sequence.as_bytes());
        match self {
            Self::Ascending => u128::from_be_bytes(wide),
            Self::Descending => !u128::from_be_bytes(wide),
        }
    }
}

/// The unread rows of one shard.
struct Source {
    space: RowSpace,
    /// The rest of the range; `None` once it is read.
    rest: Option<RangeRead>,
    /// Rows that were read but not yet merged.
    buffer: VecDeque<StoredRow>,
}

impl Source {
    /// Reads up to `limit` more rows if the buffer is empty.
    async fn fill(&mut self, tx: &Transaction, limit: usize) -> Result<()> {
        while self.buffer.is_empty() {
            let Some(read) = self.rest.take().map(|read| read.limit(limit)) else { return Ok(()) };
            let page = tx.get_range(&read, Isolation::Snapshot).await?;
            self.rest = read.after(&page);
            self.buffer.reserve(page.rows.len());
            for (key, value) in page.rows {
                self.buffer.push_back(StoredRow { sequence: self.space.sequence(&key)?, value });
            }
        }
        Ok(())
    }
}

/// Returns how many rows to read from each of `sources` shards for `rows` merged rows.
fn share(rows: usize, sources: usize) -> usize {
    match sources {
        1 => rows,
        count => (rows / count + rows / count / 4 + 8).min(rows),
    }
}

/// Returns the rows of `spaces` after `after` and up to `last`, at most `limit`, which is at least 1; and whether there are more.
pub(super) async fn merged(
    tx: &Transaction,
    spaces: impl ExactSizeIterator<Item = RowSpace>,
    (after, last): (Sequence, Sequence),
    limit: usize,
    direction: Direction,
) -> Result<(Vec<StoredRow>, bool)> {
    let source = |space: RowSpace| {
        let read = RangeRead::new(space.rows(after, last));
        let read = if direction == Direction::Descending { read.reverse() } else { read };
        Source { space, rest: Some(read), buffer: VecDeque::new() }
    };
    let mut sources: Vec<_> = spaces.map(source).collect();
    let count = sources.len();
    try_join_all(sources.iter_mut().map(|source| source.fill(tx, share(limit, count)))).await?;
    if let [source] = &mut sources[..] {
        return alone(tx, source, limit).await;
    }

    let rank = |row: &StoredRow| direction.rank(row.sequence);
    let heads = sources.iter().enumerate();
    let heads = heads.filter_map(|(place, source)| Some(Reverse((rank(source.buffer.front()?), place))));
    let mut heads: BinaryHeap<_> = heads.collect();
    let mut rows = Vec::with_capacity(limit.min(1_024));
    while let Some(mut head) = heads.peek_mut() {
        if rows.len() == limit {
            return Ok((rows, true));
        }
        let Reverse((_, place)) = *head;
        let source = &mut sources[place];
        rows.extend(source.buffer.pop_front());
        // Do not read rows for which the page has no room.
        if source.buffer.is_empty() && rows.len() < limit {
            source.fill(tx, share(limit - rows.len(), count)).await?;
        }
        if let Some(row) = source.buffer.front() {
            // Replacing the head costs less than a pop and a push.
            *head = Reverse((rank(row), place));
        } else if source.rest.is_some() {
            return Ok((rows, true));
        } else {
            PeekMut::pop(head);
        }
    }
    Ok((rows, false))
}

/// Returns the rows of a single source, which needs no merging.
async fn alone(tx: &Transaction, source: &mut Source, limit: usize) -> Result<(Vec<StoredRow>, bool)> {
    let mut rows = Vec::from(std::mem::take(&mut source.buffer));
    while rows.len() < limit && source.rest.is_some() {
        source.fill(tx, limit - rows.len()).await?;
        rows.extend(source.buffer.drain(..));
    }
    Ok((rows, source.rest.is_some()))
}
