//! How many rows stand behind a position, without reading all of them.
//!
//! The rows of each shard are counted as they are written ([`append`](super::append)), so all rows of a topology entry are known by
//! number. What has to be read are the rows between the position and a place whose number is known: the beginning of the entry, its
//! end, or a place where somebody has counted since the last row was appended. Both sides are read in turn, so the nearer one
//! decides: a page at the beginning or at the end costs next to nothing, and one behind another page costs the rows between them.

use std::mem;

use super::{Feed, FeedRow, RawFeed, SHARDS_READ_AT_ONCE, Topology};
use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result},
    state::keys::{RowSpace, ShardId, TopologyRow, row_count},
    store::{Isolation, Transaction},
};

/// How many rows of one side are read in the first step. Each further one reads twice as many.
const STEP_ROWS: usize = 512;

/// How many rows of one side are read by one transaction.
const TRANSACTION_ROWS: usize = 100_000;

/// How often a count that takes several transactions begins again because something was written meanwhile. The next one is off by
/// what moves while it takes.
const RESTARTS_MAX: u32 = 3;

/// A place, and how many rows stand behind it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    /// The place.
    pub at: Sequence,
    /// How many rows stand behind it.
    pub behind: u64,
}

/// What was counted before, and holds as long as the newest row is the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    /// Where the newest row stood.
    pub newest: Sequence,
    /// The last place at the position or before it.
    pub below: Option<Mark>,
    /// The first place behind it.
    pub above: Option<Mark>,
}

/// What was counted.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "http"),
    expect(dead_code, reason = "only feeds over HTTP remember what was counted")
)]
pub(crate) struct Counted {
    /// How many rows stand behind the position.
    pub behind: u64,
    /// Where the newest row of the feed stood then; the smallest sequence if there was none.
    pub newest: Sequence,
}

/// The rows between the position and one of the places around it.
#[derive(Debug, Clone)]
struct Side {
    /// How many rows stand behind the place.
    behind: u64,
    /// How many rows were counted.
    count: u64,
    /// What has still to be counted: shards, each with where to go on.
    rest: Vec<(RowSpace, Sequence)>,
    /// Where the side ends.
    last: Sequence,
}

impl Side {
    /// Counts on, some `limit` rows more; whether all are counted.
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

/// A count that is under way.
#[derive(Debug, Clone)]
struct Counting {
    /// Where the newest row of the feed stands.
    newest: Sequence,
    /// The rows before the position.
    before: Side,
    /// The rows behind it.
    after: Side,
}

impl Counting {
    /// Counts on; how many rows stand behind the position, once that is known.
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
    /// How many rows the shards from `first` to the last of `entries`, the last ones of the topology, have.
    async fn rows_in(self, tx: &Transaction, entries: &[TopologyRow]) -> Result<u64> {
        let mut shards = entries.iter().flat_map(TopologyRow::shards);
        let Some(first) = shards.next() else { return Ok(0) };
        let range = self.context.keys.row_counts(self.id, first, shards.last().unwrap_or(first));
        let rows = tx.all_rows(range, Isolation::Snapshot).await?;
        rows.iter().map(|(_, value)| row_count(Some(value))).sum()
    }

    /// How many rows `shard` has.
    async fn row_count(self, tx: &Transaction, shard: ShardId) -> Result<u64> {
        let stored = tx.get(&self.context.keys.row_count(self.id, shard), Isolation::Snapshot).await?;
        row_count(stored.as_deref())
    }

    /// A count of the rows of the feed, or of `shard`, behind `position` that is about to begin.
    async fn counting(
        self,
        tx: &Transaction,
        (topology, newest): (&Topology, Sequence),
        shard: Option<ShardId>,
        position: Sequence,
        known: Option<Known>,
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
    /// How many rows stand after `cursor`: what a reader there has still to read. It is exact, as of one version of the store,
    /// where at most 100,000 rows stand between the cursor and an end of its topology entry; else what moves while it is counted may
    /// be missed, as a reader would not meet it there.
    ///
    /// Fails as [`Feed::page`] does.
    pub async fn pending(&self, cursor: impl Into<Cursor>) -> Result<u64> {
        let cursor = cursor.into();
        self.topology_at(cursor).await?;
        Ok(self.behind(None, cursor.position(), None).await?.behind)
    }

    /// How many rows `shard` has. A shard that was dropped has none.
    ///
    /// Fails with [`Error::NoShard`](crate::Error::NoShard) if there never was such a shard, and with [`Error::NoFeed`](crate::Error::NoFeed) if there is no such feed.
    pub async fn shard_rows(&self, shard: ShardId) -> Result<u64> {
        let feed = self.raw();
        let read = async |tx| match feed.space_of_shard(&tx, shard).await? {
            None => Ok(0),
            Some(_) => feed.row_count(&tx, shard).await,
        };
        self.context.db.run(read).await
    }

    /// How many rows of the feed, or of `shard`, stand behind `position`, which nobody checks.
    pub(crate) async fn behind(
        &self,
        shard: Option<ShardId>,
        position: Sequence,
        known: Option<Known>,
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
            let (behind, newest, counting) = self.context.db.run(step).await?;
            if let Some(behind) = behind {
                return Ok(Counted { behind, newest });
            }
            restarts += u32::from(begun.is_some_and(|begun| begun.newest != counting.newest));
            begun = Some(counting);
        }
    }
}
