//! Deletes closed topology entries whose shards are empty, and which no consumer needs.
//!
//! Rows are never added to a closed shard, so an empty one stays empty. A reader that was about to read it learns from the remaining shards
//! where to continue. Before it hands its keys over to the next entry, a consumer may still work on rows that were in the shard. So the
//! entry that the consumer is in is kept, and so are all later ones.

use std::slice;

use futures_util::future::try_join_all;

use super::pass::{Failed, Pass};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        feed::{RawFeed, SHARDS_READ_AT_ONCE},
        keys::{FeedId, TopologyRow},
        skipped::SkippedAt,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// How many entries one transaction deletes. The transaction reads all consumers once.
const DROPPED_AT_ONCE: usize = 100;

impl Pass<'_> {
    /// Deletes the closed entries of all feeds whose shards are empty, unless a consumer needs them. An entry that cannot be deleted does
    /// not keep others from being deleted.
    pub async fn drop_topologies(&self) -> Result<()> {
        let keys = &self.context.keys;
        let mut failed = Failed::default();
        let mut rest = Some(RangeRead::new(keys.all_topologies()).limit(1_000));
        while let Some(read) = rest {
            let page = self.read(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
            let mut closed = Vec::new();
            for row in &page.rows {
                match keys.topology_row(row) {
                    Ok((feed, entry)) if entry.closed => closed.push((feed, entry)),
                    Ok(_) => {}
                    Err(error) => self.context.skip(&SkippedAt::Key(row.0.clone()), &error),
                }
            }
            let empty: Vec<_> = self.empty(&closed).await?.collect();
            for some in empty.chunks(DROPPED_AT_ONCE) {
                if failed.note(self.drop_entries(some).await)?.is_none() {
                    for entry in some {
                        failed.note(self.drop_entries(slice::from_ref(entry)).await)?;
                    }
                }
            }
            rest = read.after(&page);
        }
        failed.end()
    }

    /// Returns those of `entries` whose shards have no rows. One transaction reads shards of several entries, because in a bus with many
    /// feeds, most feeds have few shards.
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

    /// Deletes those of `entries` that no consumer needs, in one transaction.
    async fn drop_entries(&self, entries: &[&(FeedId, TopologyRow)]) -> Result<()> {
        let dropped = self.write(async |tx| self.drop_in(&tx, entries).await).await?;
        self.context.stats.topologies_dropped.add(dropped);
        Ok(())
    }

    async fn drop_in(&self, tx: &Transaction, entries: &[&(FeedId, TopologyRow)]) -> Result<u64> {
        let keys = &self.context.keys;
        for (feed, _) in entries {
            tx.add_read_conflict(&keys.beginnings(feed));
        }
        let in_use = self.first_shards_in_use(tx, entries.iter().map(|(feed, _)| feed).collect()).await?;
        let unused = entries
            .iter()
            .filter(|(feed, entry)| in_use.get(feed).is_none_or(|first| *first >= entry.next_shard()));
        let reads = unused.map(|(feed, entry)| async move {
            let key = keys.topology(feed, entry.first);
            Ok::<_, Error>((tx.get(&key, Isolation::Serializable).await?, key, feed, entry))
        });
        let mut dropped = 0;
        for (stored, key, feed, entry) in try_join_all(reads).await? {
            // Another janitor has already deleted the entry.
            if stored.as_deref() != Some(&entry.to_bytes()[..]) {
                continue;
            }
            let mut shards = entry.shards();
            let ends = shards.next().map(|first| (first, shards.last().unwrap_or(first)));
            if let Some((first, last)) = ends {
                tx.clear_range(&keys.row_counts(feed, first, last));
            }
            tx.clear(&key);
            dropped += 1;
        }
        Ok(dropped)
    }
}
