//! The state of consumers, as it is stored: what has trouble is what has a key, or a shard that waits.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;

use super::ConsumerHandle;
use crate::{
    base::{
        cursor::Cursor, encoding::Sequence, error::Result, event::DbInstance, notification::Notification,
    },
    state::{
        context::Context,
        feed::{FeedRow, RawFeed, SHARDS_READ_AT_ONCE},
        keys::{
            ConsumerName, ConsumerRow, DeferredRow, Due, FeedId, MemberlessSince, NodeId, ShardId, watermark,
        },
        membership::members,
    },
    store::{Isolation, KeyRange, RangeRead, Transaction},
};

/// How many keys are looked at to find whether ids are deferred: those of finished ids stay until the checkpoint has passed them.
const KEYS_MAX: usize = 10_000;

/// The stored state of a consumer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConsumerStatus {
    /// Its name.
    pub name: ConsumerName,
    /// The database whose documents it follows; `None` if it follows the notifications.
    pub instance: Option<DbInstance>,
    /// Its filter, for people.
    pub filter: String,
    /// Where it began when it was created, or was last reset.
    pub start: Cursor,
    /// 1 at its creation, raised by each reset.
    pub generation: u64,
    /// Whether it is paused.
    pub is_paused: bool,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: u64,
    /// The milliseconds without a member after which it is deleted; `None` for never.
    pub expiry_ms: Option<u64>,
    /// How many of those milliseconds have passed, as far as the janitor has counted.
    pub memberless_ms: u64,
    /// The nodes that are its members. Some may have died.
    pub members: Vec<NodeId>,
    /// The shards that it reads, in the order of their ids.
    pub shards: Vec<ConsumerShard>,
    /// A position that it has passed in all shards; tombstones after it are kept.
    pub low_watermark: Sequence,
    /// Whether it has deferred ids.
    pub has_deferred: bool,
}

/// A shard that a consumer reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConsumerShard {
    /// The shard.
    pub shard: ShardId,
    /// The node that owns it, alive or not; `None` if none does.
    pub owner: Option<NodeId>,
    /// Everything up to here is finished, or deferred.
    pub checkpoint: Sequence,
}

/// How far a consumer is behind in a shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConsumerLag {
    /// The shard.
    pub shard: ShardId,
    /// The number of rows behind the checkpoint, wanted or not.
    pub rows: u64,
    /// Whether `rows` is exact; otherwise there are more than [`ConsumerLag::ROWS_MAX`].
    pub is_exact: bool,
    /// The age of the oldest of these rows in milliseconds, by the wall clocks of the notifier and of this process. `None` if there is none,
    /// and for rows without a time, such as documents.
    pub age_ms: Option<u64>,
}

impl ConsumerLag {
    /// The most rows of a shard that are counted.
    pub const ROWS_MAX: u64 = 10_000;
}

impl ConsumerStatus {
    fn new(name: ConsumerName, row: ConsumerRow) -> Self {
        Self {
            name,
            instance: row.feed.instance(),
            filter: row.filter_text,
            start: if row.start.knew_nothing() { Cursor::NOTHING } else { row.start },
            generation: row.generation,
            is_paused: row.is_paused,
            created_ms: row.created_ms,
            expiry_ms: Some(row.expiry_ms).filter(|ms| *ms > 0),
            memberless_ms: 0,
            members: Vec::new(),
            shards: Vec::new(),
            low_watermark: row.start.position(),
            has_deferred: false,
        }
    }

    /// What needs attention, in words.
    pub fn troubles(&self) -> Vec<String> {
        let mut troubles = Vec::new();
        if self.is_paused {
            troubles.push("it is paused: nothing is worked on until it is resumed".to_owned());
        } else if self.members.is_empty() {
            troubles
                .push("no node works for it, and it keeps the tombstones after its low watermark".to_owned());
        } else {
            let without = self.shards.iter().filter(|shard| shard.owner.is_none()).count();
            if without > 0 {
                troubles.push(format!("{without} of {} shards have no owner", self.shards.len()));
            }
        }
        if self.has_deferred {
            troubles.push("ids are deferred: their errors are in the list of deferred ids".to_owned());
        }
        troubles
    }
}

/// The stored states of all consumers, in the order of their names.
pub(crate) async fn statuses(context: &Arc<Context>) -> Result<Vec<ConsumerStatus>> {
    let keys = &context.keys;
    let ranges = [keys.consumers(), keys.all_consumer_checkpoints(), keys.low_watermarks()];
    let rest = read_rows(context, ranges).await?.into_values().map(|status| async move {
        let handle = &ConsumerHandle { context: Arc::clone(context), name: status.name.clone() };
        let status = &status;
        context.db.run(async |tx| handle.fill_in(&tx, status.clone()).await).await
    });
    // Collected first, because the compiler cannot name the type of the futures otherwise.
    let rest: Vec<_> = rest.collect();
    stream::iter(rest).buffered(SHARDS_READ_AT_ONCE).try_collect().await
}

/// The consumers with rows, checkpoints and low watermarks in these ranges, which are read a page at a time.
async fn read_rows(
    context: &Context,
    [rows, checkpoints, low]: [KeyRange; 3],
) -> Result<BTreeMap<ConsumerName, ConsumerStatus>> {
    let keys = &context.keys;
    let mut statuses = BTreeMap::new();
    for (key, value) in all_rows(context, rows).await? {
        let row = ConsumerRow::from_bytes(&value).map_err(|error| error.at(&key))?;
        let name = keys.consumer_of(&key)?;
        statuses.insert(name.clone(), ConsumerStatus::new(name, row));
    }
    for (key, value) in all_rows(context, checkpoints).await? {
        let (name, shard) = keys.consumer_checkpoint_of(&key)?;
        let checkpoint = Cursor::from_bytes(&value).map_err(|error| error.at(&key))?.position();
        if let Some(status) = statuses.get_mut(&name) {
            status.shards.push(ConsumerShard { shard, owner: None, checkpoint });
        }
    }
    for (key, value) in all_rows(context, low).await? {
        if let Some(status) = statuses.get_mut(&keys.consumer_of(&key)?) {
            status.low_watermark = watermark(&value).map_err(|error| error.at(&key))?;
        }
    }
    Ok(statuses)
}

/// All rows of `range`, of as many transactions as needed.
async fn all_rows(context: &Context, range: KeyRange) -> Result<Vec<(Bytes, Bytes)>> {
    let (mut rest, mut found) = (Some(RangeRead::new(range).limit(1_000)), Vec::new());
    while let Some(read) = rest {
        let page = context.db.run(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
        rest = read.after(&page);
        found.extend(page.rows);
    }
    Ok(found)
}

impl ConsumerHandle {
    /// The stored state of the consumer. Fails with [`Error::NoConsumer`](crate::Error::NoConsumer).
    pub async fn status(&self) -> Result<ConsumerStatus> {
        let keys = &self.context.keys;
        let key = |key: Vec<u8>| KeyRange::key(&key);
        let (row, low) = (key(keys.consumer(&self.name)), key(keys.low_watermark(&self.name)));
        let ranges = [row, keys.consumer_checkpoints(&self.name), low];
        let status = read_rows(&self.context, ranges).await?.remove(&self.name);
        let status = &status.ok_or_else(|| self.missing())?;
        self.context.db.run(async |tx| self.fill_in(&tx, status.clone()).await).await
    }

    /// Adds members, owners and deferred ids.
    async fn fill_in(&self, tx: &Transaction, mut status: ConsumerStatus) -> Result<ConsumerStatus> {
        let keys = &self.context.keys;
        for (key, value) in tx.all_rows(keys.leases(&self.name.pool()), Isolation::Snapshot).await? {
            let (_, resource, lease) = keys.lease_row(&key, &value)?;
            let shard = status.shards.iter_mut().find(|status| status.shard == ShardId(resource));
            if let Some(shard) = shard {
                shard.owner = lease.owner.map(|owner| owner.node);
            }
        }
        let members = members(tx, keys, &self.name.role()).await?;
        status.members = members.into_iter().map(|(node, _)| node).collect();
        let key = keys.consumer_idle(&self.name);
        if let Some(value) = tx.get(&key, Isolation::Snapshot).await? {
            status.memberless_ms =
                MemberlessSince::from_bytes(&value).map_err(|error| error.at(&key))?.idle_ms;
        }
        let mut left = KEYS_MAX;
        let mut rest = Some(RangeRead::new(keys.deferred_of(&self.name, None)).limit(100));
        while let Some(read) = rest.filter(|_| !status.has_deferred && left > 0) {
            let page = tx.get_range(&read, Isolation::Snapshot).await?;
            for (key, value) in &page.rows {
                let row = DeferredRow::from_bytes(value).map_err(|error| error.at(key))?;
                status.has_deferred |= row.due != Due::Never;
            }
            left = left.saturating_sub(page.rows.len());
            rest = read.after(&page).map(|read| read.limit(1_000));
        }
        Ok(status)
    }

    /// How far the consumer is behind in each shard that it reads, or will read after a reshard, in the order of their ids, even if no node
    /// works for it.
    /// Fails with [`Error::NoConsumer`](crate::Error::NoConsumer) and [`Error::NoFeed`](crate::Error::NoFeed).
    pub async fn lag(&self) -> Result<Vec<ConsumerLag>> {
        let read = async |tx: Transaction| {
            let row = self.row(&tx, Isolation::Snapshot).await?.ok_or_else(|| self.missing())?;
            let feed = RawFeed::new(&self.context, &row.feed);
            let (now, topology) = (feed.last_readable(&tx).await?, feed.topology(&tx).await?);
            Ok((row.feed, now, topology))
        };
        let (feed, now, topology) = self.context.db.run(read).await?;
        let status = self.status().await?;
        let low = status.low_watermark;
        let mut shards: Vec<_> =
            status.shards.iter().map(|shard| (shard.shard, shard.checkpoint.max(low))).collect();
        // Rows of entries that it has not begun wait as well.
        if let Some((last, _)) = shards.last().copied() {
            let later = topology.entries().iter().filter(|entry| entry.shards().all(|shard| shard > last));
            shards.extend(later.flat_map(|entry| entry.shards().map(|shard| (shard, entry.first.before()))));
        }
        let lags: Vec<_> =
            shards.into_iter().map(|(shard, after)| self.measure(&feed, shard, (after, now))).collect();
        stream::iter(lags).buffered(SHARDS_READ_AT_ONCE).try_collect().await
    }

    async fn measure(
        &self,
        feed: &FeedId,
        shard: ShardId,
        (begin, now): (Sequence, Sequence),
    ) -> Result<ConsumerLag> {
        let (db, most) = (&self.context.db, ConsumerLag::ROWS_MAX as usize);
        let raw = RawFeed::new(&self.context, feed);
        let (mut rows, mut next) = (0, Some(begin));
        while let Some(after) = next.filter(|_| rows < most) {
            let count = async |tx| raw.count_shard(&tx, shard, (after, now), most - rows).await;
            let (count, rest) = db.run(count).await?;
            rows += count;
            next = rest;
        }
        let mut lag = ConsumerLag { shard, rows: rows as u64, is_exact: next.is_none(), age_ms: None };
        if rows > 0 && feed.instance().is_none() {
            let oldest = db.run(async |tx| raw.oldest(&tx, shard, (begin, now)).await).await?;
            // A row that cannot be decoded counts as behind, but has no time.
            lag.age_ms = oldest
                .and_then(|row| Notification::from_stored(row.sequence, &row.value).ok())
                .map(|row| self.env().wall_ms().saturating_sub(row.written_ms));
        }
        Ok(lag)
    }
}
