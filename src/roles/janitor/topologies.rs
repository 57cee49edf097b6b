//! Deletes closed topology entries whose shards are empty.
//!
//! Rows are never added to a closed shard, so an empty one stays empty. A reader that was about to read it learns from the
//! remaining shards where to continue.

use futures_util::future::try_join_all;

use super::pass::{Failed, Pass};
use crate::{
    base::{encoding::Sequence, error::Result},
    state::{
        feed::{RawFeed, SHARDS_READ_AT_ONCE},
        keys::{FeedId, TopologyRow},
    },
    store::{Isolation, RangeRead, Transaction},
};

impl Pass<'_> {
    /// Deletes the closed entries of all feeds whose shards are empty. An entry that cannot be deleted does not keep others from
    /// being deleted.
    pub async fn drop_topologies(&self) -> Result<()> {
        let keys = &self.context.keys;
        let mut failed = Failed::default();
        let mut rest = Some(RangeRead::new(keys.all_topologies()).limit(1_000));
        while let Some(read) = rest {
            let page = self.read(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
            let mut closed = Vec::new();
            for row in &page.rows {
                let (feed, entry) = keys.topology_row(row).map_err(|error| error.at(&row.0))?;
                if entry.closed {
                    closed.push((feed, entry));
                }
            }
            for (feed, entry) in self.empty(&closed).await? {
                let dropped = self.write(async |tx| self.drop_entry(&tx, feed, entry).await).await;
                if failed.note(dropped)? == Some(true) {
                    self.context.stats.topologies_dropped.add(1);
                }
            }
            rest = read.after(&page);
        }
        failed.end()
    }

    /// Those of `entries` of which no shard has a row. One transaction reads shards of several entries, because most of many feeds have
    /// few shards.
    async fn empty<'e>(
        &self,
        entries: &'e [(FeedId, TopologyRow)],
    ) -> Result<impl Iterator<Item = &'e (FeedId, TopologyRow)>> {
        let spaces = entries.iter().enumerate().flat_map(|(index, (feed, entry))| {
            RawFeed::new(self.context, feed).spaces(entry).map(move |space| (index, space))
        });
        let (mut spaces, mut has_row) = (spaces, vec![false; entries.len()]);
        loop {
            let unknown = spaces.by_ref().filter(|(index, _)| !has_row[*index]);
            let some: Vec<_> = unknown.take(SHARDS_READ_AT_ONCE).collect();
            if some.is_empty() {
                break;
            }
            let read = async |tx: Transaction| {
                let reads = some.iter().map(|(_, space)| {
                    let read = RangeRead::new(space.rows(Sequence::MIN, Sequence::MAX)).limit(1);
                    let tx = &tx;
                    async move { tx.get_range(&read, Isolation::Snapshot).await }
                });
                try_join_all(reads).await
            };
            for ((index, _), page) in some.iter().zip(self.read(read).await?) {
                has_row[*index] |= !page.rows.is_empty();
            }
        }
        Ok(entries.iter().zip(has_row).filter(|(_, has_row)| !has_row).map(|(entry, _)| entry))
    }

    /// Deletes `entry`. Returns `false` if it has changed or is in use.
    async fn drop_entry(&self, tx: &Transaction, feed: &FeedId, entry: &TopologyRow) -> Result<bool> {
        let keys = &self.context.keys;
        let key = keys.topology(feed, entry.first);
        if tx.get(&key, Isolation::Serializable).await?.as_deref() != Some(&entry.to_bytes()[..]) {
            return Ok(false);
        }
        let mut shards = entry.shards();
        let ends = shards.next().map(|first| (first, shards.last().unwrap_or(first)));
        if let Some((first, last)) = ends {
            tx.clear_range(&keys.row_counts(feed, first, last));
        }
        tx.clear(&key);
        Ok(true)
    }
}
