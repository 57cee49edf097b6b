//! Dropping closed topology entries whose shards are empty.
//!
//! Nothing is ever added to a closed shard, so one that is empty stays so. Whoever is about to read it learns from the
//! shards that are left where to go on.

use futures_util::future::try_join_all;

use super::Pass;
use crate::{
    encoding::Sequence,
    error::Result,
    feed::{RawFeed, SHARDS_READ_AT_ONCE},
    keys::{FeedId, TopologyRow},
    store::{Isolation, RangeRead, Transaction},
};

impl Pass<'_> {
    /// Drops the closed entries of all feeds whose shards are empty. Returns how many.
    pub async fn drop_topologies(&self) -> Result<u64> {
        let keys = &self.context.keys;
        let mut dropped = 0;
        let mut rest = Some(RangeRead::new(keys.all_topologies()).limit(1_000));
        while let Some(read) = rest {
            let page = self.read(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
            for row in &page.rows {
                let (feed, entry) = match keys.topology_row(row) {
                    Ok(read) => read,
                    Err(error) => {
                        tracing::error!(%error, "a topology entry cannot be read");
                        continue;
                    }
                };
                if entry.closed && self.is_empty(&feed, &entry).await? {
                    dropped +=
                        u64::from(self.write(async |tx| self.drop_entry(&tx, &feed, &entry).await).await?);
                }
            }
            rest = read.after(&page);
        }
        Ok(dropped)
    }

    /// Whether no shard of `entry`, which is closed, has a row.
    async fn is_empty(&self, feed: &FeedId, entry: &TopologyRow) -> Result<bool> {
        let raw = RawFeed::new(self.context, feed);
        let spaces: Vec<_> = raw.spaces(entry).collect();
        for spaces in spaces.chunks(SHARDS_READ_AT_ONCE) {
            let has_row = async |tx: Transaction| {
                let reads = spaces.iter().map(|space| {
                    let read = RangeRead::new(space.rows(Sequence::MIN, Sequence::MAX)).limit(1);
                    let tx = &tx;
                    async move { tx.get_range(&read, Isolation::Snapshot).await }
                });
                Ok(try_join_all(reads).await?.iter().any(|page| !page.rows.is_empty()))
            };
            if self.read(has_row).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Drops `entry`, unless that has happened already.
    async fn drop_entry(&self, tx: &Transaction, feed: &FeedId, entry: &TopologyRow) -> Result<bool> {
        let keys = &self.context.keys;
        let key = keys.topology(feed, entry.first);
        if tx.get(&key, Isolation::Serializable).await?.as_deref() != Some(&entry.to_bytes()[..]) {
            return Ok(false);
        }
        tx.clear(&key);
        let mut shards = entry.shards();
        if let Some(first) = shards.next() {
            tx.clear_range(&keys.heads(feed, first, shards.last().unwrap_or(first)));
        }
        Ok(true)
    }
}
