//! Deletes the row of a deleted database once it is older than [`tombstone_retention`](super::JanitorOptions::tombstone_retention) and
//! every consumer of the notifications has passed it, judged by its low watermark, or by its start if it has none.
//!
//! The age of a tombstone counts only time during which a janitor worked ([`clock`](super::clock)). No tombstone is dropped if its name was
//! used again, or while the store is older than its own rows.

use futures_util::future::try_join_all;

use super::pass::Pass;
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        notification::Notification,
    },
    state::{
        feed::{RawFeed, remove},
        keys::Partition,
        skipped::SkippedAt,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// How many rows are read in one transaction. A second transaction deletes the tombstones among them.
const PAGE_ROWS: usize = 500;

impl Pass<'_> {
    /// Deletes the tombstones after `from` and up to `old` that every consumer has passed. Returns how many were deleted, and the sequence
    /// up to which no tombstone is left.
    pub async fn drop_tombstones(&self, from: Sequence, old: Sequence) -> Result<(u64, Sequence)> {
        let feed = RawFeed::notifications(self.context);
        let (mut dropped, mut cursor) = (0, Cursor::from(from));
        while cursor.position() < old {
            let page = match self.read(async |tx| feed.page(&tx, cursor, PAGE_ROWS).await).await {
                // Another janitor has deleted the rows at the cursor, or a restore has lost the part that the cursor is in. There may be
                // tombstones before and after it.
                Err(Error::Expired { .. }) => {
                    cursor = Cursor::BEGINNING;
                    continue;
                }
                page => page?,
            };
            let mut tombstones = Vec::new();
            for row in page.rows.iter().take_while(|row| row.sequence <= old) {
                match Notification::from_bytes(row.sequence, &row.value) {
                    Ok(row) if row.is_deleted() => tombstones.push(row),
                    Ok(_) => {}
                    Err(error) => {
                        let place = SkippedAt::Row(feed.id.clone(), row.sequence);
                        self.context.skip(&place, &error);
                    }
                }
            }
            if !tombstones.is_empty() {
                let (some, kept) = self.write(async |tx| self.drop_some(&tx, &tombstones).await).await?;
                dropped += some;
                if kept > 0 {
                    return Ok((dropped, tombstones[tombstones.len() - kept].sequence.before()));
                }
            }
            cursor = page.next;
        }
        Ok((dropped, cursor.position().min(old)))
    }

    /// Deletes `tombstones` and raises the horizon. Returns how many it deleted, and how many of the last ones a consumer has not passed.
    async fn drop_some(&self, tx: &Transaction, tombstones: &[Notification]) -> Result<(u64, usize)> {
        let keys = &self.context.keys;
        let feed = RawFeed::notifications(self.context);
        tx.add_read_conflict(&keys.beginnings(feed.id));
        let passed = self.passed_by_consumers(tx).await?;
        let topology = feed.topology(tx).await?;
        let horizon = feed.horizon(tx, Isolation::Serializable).await?;
        let passed = tombstones.partition_point(|row| row.sequence <= passed);
        let newest = tombstones[..passed].iter().map(|row| async move {
            let newest = keys.newest(feed.id, row.name.as_str().as_bytes());
            let partition = Partition::of(row.name.as_str(), self.context.config.partitions);
            let waiting = RangeRead::new(keys.drains_of_db(partition, &row.db())).limit(1);
            let (stored, waiting) = tokio::try_join!(
                tx.get(&newest, Isolation::Serializable),
                tx.get_range(&waiting, Isolation::Serializable)
            )?;
            Ok::<_, Error>((stored.filter(|_| waiting.rows.is_empty()), newest))
        });
        let (mut dropped, mut last) = (0, horizon);
        for (row, (stored, newest)) in tombstones.iter().zip(try_join_all(newest).await?) {
            // If the name was used again meanwhile, the notifier has replaced this row with a newer one. If events of the database wait to
            // be folded, the row must stay: without it, they would bring the database back.
            if stored.as_deref() != Some(&row.sequence.as_bytes()[..]) {
                continue;
            }
            if let Err(error) = remove(tx, feed, &topology, row.name.as_str().as_bytes(), row.sequence) {
                tracing::error!(name = %row.name, %error, "a tombstone cannot be deleted");
                continue;
            }
            tx.clear(&newest);
            dropped += 1;
            last = last.max(row.sequence);
        }
        if last > horizon {
            tx.set(&keys.horizon(feed.id), last.as_bytes());
        }
        Ok((dropped, tombstones.len() - passed))
    }
}
