//! Counts the rows after a position, without reading all of them.
//!
//! Writers count the rows of each shard ([`append`](super::append)), so the number of rows of a topology entry is known. A count reads only
//! the rows between the position and a mark, which is a position with a known count: the beginning of the entry, its end, or a position
//! that was counted since the last append. It reads on both sides of the position in turn, so its cost depends on the nearer mark. A count
//! at the beginning or the end costs next to nothing, and a count for the next page reads only the rows of one page.

use std::mem;

use super::{Feed, FeedRow, RawFeed, SHARDS_READ_AT_ONCE, Topology};
use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result},
    state::keys::{RowSpace, ShardId, TopologyRow, row_count},
    store::{Isolation, Transaction},
};

/// About how many rows the first step reads on each side of the position. Each further step reads twice as many.
const STEP_ROWS: usize = 512;

/// About how many rows a single transaction reads on each side of the position.
const TRANSACTION_ROWS: usize = 100_000;

/// How many times a count over several transactions may start again because of an append. The last count may be off by the number of rows
/// that move during the count.
const RESTARTS_MAX: u32 = 3;

/// A position, and the number of rows after it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    pub at: Sequence,
    pub behind: u64,
}

/// Marks of earlier counts. They are valid as long as the newest row stays the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownMarks {
    /// The position of the newest row.
    pub newest: Sequence,
    /// The last mark at or before the position.
    pub below: Option<Mark>,
    /// The first mark after the position.
    pub above: Option<Mark>,
}

/// The result of a count.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "http"),
    expect(dead_code, reason = "only feeds over HTTP remember what was counted")
)]
pub(crate) struct Counted {
    /// The number of rows after the position.
    pub behind: u64,
    /// The position of the newest row of the feed when the rows were counted; the smallest sequence if there was none.
    pub newest: Sequence,
}

/// The rows between the position and one of the marks around it.
#[derive(Debug, Clone)]
struct Side {
    /// The number of rows after the mark.
    behind: u64,
    /// The number of rows counted so far.
    count: u64,
    /// The shards that are still to be counted, each with the sequence after which to continue.
    rest: Vec<(RowSpace, Sequence)>,
    last: Sequence,
}

impl Side {
    /// Counts up to `limit` more rows. Returns whether all are counted.
    async fn step(&mut self, tx: &Transaction, feed: RawFeed<'_>, limit: usize) -> Result<bool> {
        let limit = limit / self.rest.len().max(1) + 1;
        for some in mem::take(&mut self.rest).chunks(SHARDS_READ_AT_ONCE) {
            let counts = feed.count(tx, some, self.last, limit).await?;
            for ((space, _), (count, rest)) in some.iter().zip(counts) {
                self.count += count as u64;
                self.rest.extend(rest.map(|after| (space.clone(), after)));
            }
        }
        Ok(self.rest.is_empty())
    }
}

/// A count in progress.
#[derive(Debug, Clone)]
struct Counting {
    /// The position of the newest row of the feed.
    newest: Sequence,
    /// The rows before the position.
    before: Side,
    /// The rows after the position.
    after: Side,
}

impl Counting {
    /// Continues the count. Returns the number of rows after the position, once it is known.
    async fn go_on(&mut self, tx: &Transaction, feed: RawFeed<'_>) -> Result<Option<u64>> {
        let (mut limit, mut left) = (STEP_ROWS, TRANSACTION_ROWS);
        while left > 0 {
            if self.before.step(tx, feed, limit).await? {
                return Ok(Some(self.before.behind.saturating_sub(self.before.count)));
            }
            if self.after.step(tx, feed, limit).await? {
                return Ok(Some(self.after.behind + self.after.count));
            }
            left = left.saturating_sub(limit);
            limit *= 2;
        }
        Ok(None)
    }
}

impl RawFeed<'_> {
    /// Returns the number of rows in the shards of `entries`, which are consecutive. If a layer named a wrong previous edit, the stored
    /// count may be too low. The result is never below 0.
    async fn rows_in(self, tx: &Transaction, entries: &[TopologyRow]) -> Result<u64> {
        let mut shards = entries.iter().flat_map(TopologyRow::shards);
        let Some(first) = shards.next() else { return Ok(0) };
        let range = self.context.keys.row_counts(self.id, first, shards.last().unwrap_or(first));
        let rows = tx.all_rows(range, Isolation::Snapshot).await?;
        let count: i64 = rows.iter().map(|(_, value)| row_count(Some(value))).sum::<Result<_>>()?;
        Ok(count.max(0).cast_unsigned())
    }

    async fn row_count(self, tx: &Transaction, shard: ShardId) -> Result<u64> {
        let stored = tx.get(&self.context.keys.row_count(self.id, shard), Isolation::Snapshot).await?;
        Ok(row_count(stored.as_deref())?.max(0).cast_unsigned())
    }

    /// Begins a count of the rows of the feed, or of `shard`, after `position`.
    async fn counting(
        self,
        tx: &Transaction,
        (topology, newest): (&Topology, Sequence),
        shard: Option<ShardId>,
        position: Sequence,
        known: Option<KnownMarks>,
    ) -> Result<Counting> {
        let entries = topology.after(position);
        let (spaces, later, all) = if let Some(shard) = shard {
            let space = self.space_of_shard(tx, shard).await?;
            (Vec::from_iter(space), 0, self.row_count(tx, shard).await?)
        } else {
            let (entry, later) = entries.split_first().expect("a topology is never empty");
            let own = self.rows_in(tx, std::slice::from_ref(entry));
            let (own, later) = tokio::try_join!(own, self.rows_in(tx, later))?;
            (self.spaces(entry).collect(), later, own + later)
        };
        let is_same = |mark: &Mark| shard.is_some() || topology.at(mark.at).first == entries[0].first;
        let known = known.filter(|known| known.newest == newest);
        let below = known.and_then(|known| known.below).filter(is_same);
        let above = known.and_then(|known| known.above).filter(is_same);
        let below = below.unwrap_or(Mark { at: Sequence::MIN, behind: all });
        let above = above.unwrap_or(Mark { at: Sequence::MAX, behind: later });
        let side = |behind, after: Sequence, last: Sequence| {
            let spaces = spaces.iter().filter(|_| after < last);
            Side { behind, count: 0, rest: spaces.map(|space| (space.clone(), after)).collect(), last }
        };
        let before = side(below.behind, below.at, position);
        let after = side(above.behind, position, above.at);
        Ok(Counting { newest, before, after })
    }
}

impl<R: FeedRow> Feed<R> {
    /// Returns the number of rows after `cursor`, which a reader at that position has yet to read. The number is exact at one version of
    /// the store if at most 100,000 rows are between the cursor and an end of its topology entry. Otherwise it may miss rows that move
    /// during the count.
    ///
    /// Fails as [`Feed::page`] does.
    pub async fn pending(&self, cursor: impl Into<Cursor>) -> Result<u64> {
        let cursor = cursor.into();
        self.topology_at(cursor).await?;
        Ok(self.behind(None, cursor.position(), None).await?.behind)
    }

    /// Returns the number of rows in `shard`. A shard that was dropped has none.
    ///
    /// Fails with [`Error::NoShard`](crate::Error::NoShard) if there never was such a shard, and with
    /// [`Error::NoFeed`](crate::Error::NoFeed) if there is no such feed.
    pub async fn shard_rows(&self, shard: ShardId) -> Result<u64> {
        let feed = self.raw();
        let read = async |tx| match feed.space_of_shard(&tx, shard).await? {
            None => Ok(0),
            Some(_) => feed.row_count(&tx, shard).await,
        };
        self.context.store.run(read).await
    }

    /// Returns the number of rows of the feed, or of `shard`, after `position`. The position is not checked.
    pub(crate) async fn behind(
        &self,
        shard: Option<ShardId>,
        position: Sequence,
        known: Option<KnownMarks>,
    ) -> Result<Counted> {
        let feed = self.raw();
        let (mut begun, mut restarts): (Option<Counting>, u32) = (None, 0);
        loop {
            let goes_on =
                |counting: &&Counting, newest| counting.newest == newest || restarts >= RESTARTS_MAX;
            let step = async |tx| {
                let topology = feed.topology(&tx).await?;
                let newest = feed.last_row_of(&tx, &topology).await?.unwrap_or(Sequence::MIN);
                let mut counting = match begun.as_ref().filter(|counting| goes_on(counting, newest)) {
                    Some(counting) => counting.clone(),
                    None => feed.counting(&tx, (&topology, newest), shard, position, known).await?,
                };
                let behind = counting.go_on(&tx, feed).await?;
                Ok((behind, newest, counting))
            };
            let (behind, newest, counting) = self.context.store.run(step).await?;
            if let Some(behind) = behind {
                return Ok(Counted { behind, newest });
            }
            restarts += u32::from(begun.is_some_and(|begun| begun.newest != counting.newest));
            begun = Some(counting);
        }
    }
}
