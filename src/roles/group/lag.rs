//! How far a group is behind.

use std::collections::BTreeMap;

use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;

use super::Group;
use crate::{
    base::{encoding::Sequence, error::Result, notification::Notification},
    state::{
        feed::{FeedRow, SHARDS_READ_AT_ONCE},
        keys::{NodeId, ShardId, TopologyRow, checkpoint_position},
    },
    store::{Database, Isolation, Transaction},
};

/// How far a group is behind in a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ShardLag {
    /// The shard.
    pub shard: ShardId,
    /// The node that owns it, alive or not; `None` if none does.
    pub owner: Option<NodeId>,
    /// Everything up to here was worked on; `None` if the shard waits until the shards that it replaces are drained.
    pub checkpoint: Option<Sequence>,
    /// Number of rows that are not worked on.
    pub rows: u64,
    /// Whether `rows` is exact; otherwise there are more than [`ShardLag::ROWS_MAX`], and the count stopped there.
    pub is_exact: bool,
    /// The position of the oldest of these rows; `None` if there is none.
    pub oldest: Option<Sequence>,
    /// The age of the oldest of these rows in milliseconds, by the wall clocks of the notifier and of this process, so only people
    /// should use it. `None` if there is none, and for rows without a time, such as documents.
    pub age_ms: Option<u64>,
}

impl ShardLag {
    /// The most rows of a shard that are counted.
    pub const ROWS_MAX: u64 = 10_000;
}

impl<R> Group<R> {
    /// How far the group is behind in each shard that it has yet to read, in the order of their ids, even if no consumer
    /// runs. Successors after a reshard are included. At most [`ShardLag::ROWS_MAX`] rows of each shard are counted.
    ///
    /// The sum of `rows` is exact if each count is, and nothing is written meanwhile: all is read at one version,
    /// unless it takes longer than a transaction lives.
    ///
    /// Fails with [`Error::NoGroup`](crate::Error::NoGroup) and [`Error::NoFeed`](crate::Error::NoFeed).
    pub async fn lag(&self) -> Result<Vec<ShardLag>> {
        let db = &self.context.db;
        let (now, shards) = db.run(async |tx| self.unread(&tx).await).await?;
        let lags =
            stream::iter(shards).map(|shard| self.measure(db, shard, now)).buffered(SHARDS_READ_AT_ONCE);
        lags.try_collect().await
    }

    /// The shards that the group has yet to read, without counts, each with the position of its first unread row; and the position up to
    /// which rows are to be counted.
    async fn unread(&self, tx: &Transaction) -> Result<(Sequence, Vec<(ShardLag, Sequence)>)> {
        let keys = &self.context.keys;
        self.row(tx).await?.ok_or_else(|| self.missing())?;
        let (feed, pool) = (self.raw(), self.id.pool());
        let mut owners = BTreeMap::new();
        for (key, value) in tx.all_rows(keys.leases(&pool), Isolation::Snapshot).await? {
            let (_, resource, lease) = keys.lease_row(&key, &value)?;
            if let Some(owner) = lease.owner {
                owners.insert(ShardId(resource), owner.node);
            }
        }
        let lag = |shard, checkpoint| ShardLag {
            shard,
            owner: owners.get(&shard).copied(),
            checkpoint,
            rows: 0,
            is_exact: true,
            oldest: None,
            age_ms: None,
        };
        let mut shards = Vec::new();
        for (key, value) in tx.all_rows(keys.checkpoints_of(&self.id), Isolation::Snapshot).await? {
            let (shard, position) = (keys.checkpoint_shard(&key)?, checkpoint_position(&value)?);
            shards.push((lag(shard, Some(position)), position));
        }
        let last = shards.last().map_or(ShardId(0), |(lag, _)| lag.shard);
        let topology = feed.topology(tx).await?;
        let later = topology.entries().iter().flat_map(TopologyRow::shards).filter(|shard| *shard > last);
        shards.extend(later.map(|shard| (lag(shard, None), Sequence::MIN)));
        Ok((feed.last_readable(tx).await?, shards))
    }

    async fn measure(
        &self,
        db: &Database,
        (mut lag, begin): (ShardLag, Sequence),
        now: Sequence,
    ) -> Result<ShardLag> {
        let most = ShardLag::ROWS_MAX as usize;
        let mut next = Some(begin);
        while let Some(after) = next.filter(|_| lag.rows < ShardLag::ROWS_MAX) {
            let left = most - lag.rows as usize;
            let count = async |tx| self.raw().count_shard(&tx, lag.shard, (after, now), left).await;
            let (count, rest) = db.run(count).await?;
            lag.rows += count as u64;
            next = rest;
        }
        lag.is_exact = next.is_none();
        if lag.rows == 0 {
            return Ok(lag);
        }
        let oldest = db.run(async |tx| self.raw().oldest(&tx, lag.shard, (begin, now)).await).await?;
        if let Some(row) = oldest {
            lag.oldest = Some(row.sequence);
            // A row that cannot be decoded counts as behind, but has no time.
            if self.instance().is_none()
                && let Ok(row) = Notification::from_stored(row.sequence, &row.value)
            {
                lag.age_ms = Some(self.context.env().wall_ms().saturating_sub(row.written_ms));
            }
        }
        Ok(lag)
    }
}
