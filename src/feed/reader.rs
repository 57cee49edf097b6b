//! Reading a feed: one shard, or all of them merged in the order of their sequences.

use bytes::Bytes;
use futures_util::future::try_join_all;

use super::Topology;
use crate::{
    encoding::{Incarnation, Sequence},
    error::{Error, Result},
    keys::{FeedId, Keys, ShardId},
    store::{Isolation, RangeRead, Transaction},
};

/// A row of a feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FeedRow {
    /// Where it stands.
    pub sequence: Sequence,
    /// Its content, which its feed's users decode.
    pub value: Bytes,
}

/// Some rows of a feed, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FeedPage {
    /// The rows.
    pub rows: Vec<FeedRow>,
    /// Everything up to here was read: no row will ever be added at or before it.
    pub to: Sequence,
    /// Whether there is more to read at this read version.
    pub more: bool,
}

/// The last sequence that `tx` can see.
pub(crate) async fn last_readable(tx: &Transaction, incarnation: Incarnation) -> Result<Sequence> {
    Ok(Sequence::last_at(incarnation, tx.read_version().await?))
}

/// The last sequence that `tx` can see; fails if `after` lies beyond it.
async fn check_readable(tx: &Transaction, incarnation: Incarnation, after: Sequence) -> Result<Sequence> {
    let last = last_readable(tx, incarnation).await?;
    if after > last {
        // Read versions never go back, so no reader of this feed can have come so far.
        return Err(Error::invalid("sequence", format!("{after} is ahead of the store, which is at {last}")));
    }
    Ok(last)
}

/// The rows of `shard` after `after`, at most `limit`.
pub(crate) async fn shard_page(
    tx: &Transaction,
    keys: &Keys,
    feed: &FeedId,
    incarnation: Incarnation,
    shard: ShardId,
    after: Sequence,
    limit: usize,
) -> Result<FeedPage> {
    let last = check_readable(tx, incarnation, after).await?;
    let (rows, more) = shard_rows(tx, keys, feed, shard, (after, last), limit).await?;
    let to = rows.last().filter(|_| more).map_or(last, |row| row.sequence);
    Ok(FeedPage { rows, to, more: to < last })
}

/// The rows of `shard` after `after` and up to `last`, at most `limit`; and whether there are more.
async fn shard_rows(
    tx: &Transaction,
    keys: &Keys,
    feed: &FeedId,
    shard: ShardId,
    (after, last): (Sequence, Sequence),
    limit: usize,
) -> Result<(Vec<FeedRow>, bool)> {
    let read = RangeRead::new(keys.entries(feed, shard, after, last)).limit(limit);
    let page = tx.get_range(&read, Isolation::Snapshot).await?;
    let rows = page
        .rows
        .into_iter()
        .map(|(key, value)| Ok(FeedRow { sequence: keys.entry_sequence(&key)?, value }))
        .collect::<Result<_>>()?;
    Ok((rows, page.more))
}

/// The rows of all shards after `after`, at most `limit` of each shard and in one total order. All shards are read at the
/// read version of `tx`, so no row is missed between them.
///
/// A shard that has more rows than fit ends the page for all: rows behind its last one wait for the next page.
///
/// Fails with [`Error::Invalid`] if `after` is ahead of what `tx` can read.
pub(crate) async fn page(
    tx: &Transaction,
    keys: &Keys,
    feed: &FeedId,
    incarnation: Incarnation,
    after: Sequence,
    limit: usize,
) -> Result<FeedPage> {
    let last = check_readable(tx, incarnation, after).await?;
    if after == last {
        return Ok(FeedPage { rows: Vec::new(), to: after, more: false });
    }
    let topology = Topology::read(tx, keys, feed, Isolation::Snapshot).await?;
    let shards = topology.shards().map(|shard| shard_rows(tx, keys, feed, shard, (after, last), limit));
    let mut rows = Vec::new();
    let mut to = last;
    for (shard_rows, more) in try_join_all(shards).await? {
        if let Some(row) = shard_rows.last().filter(|_| more) {
            to = to.min(row.sequence);
        }
        rows.extend(shard_rows);
    }
    rows.retain(|row| row.sequence <= to);
    rows.sort_unstable_by_key(|row| row.sequence);
    Ok(FeedPage { rows, to, more: to < last })
}

/// The newest row of `id`, if it has one.
pub(crate) async fn newest_of(
    tx: &Transaction,
    keys: &Keys,
    feed: &FeedId,
    topology: &Topology,
    id: &[u8],
) -> Result<Option<FeedRow>> {
    let Some(newest) = tx.get(&keys.newest(feed, id), Isolation::Snapshot).await? else {
        return Ok(None);
    };
    let sequence = Sequence::from_bytes(&newest)?;
    let shard = topology.shard_at(sequence, id)?;
    let value = tx.get(&keys.entry(feed, shard, sequence), Isolation::Snapshot).await?;
    let value = value
        .ok_or_else(|| Error::corrupt("newest", format!("it points at {sequence}, where there is no row")))?;
    Ok(Some(FeedRow { sequence, value }))
}
