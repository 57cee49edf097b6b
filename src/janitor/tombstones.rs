//! Dropping the rows of databases that were deleted long ago.
//!
//! # Age
//!
//! No clocks are compared, so a row's age cannot be read off it. Instead the janitor puts down from time to time where the
//! feed stands, under the time that janitors have worked until then, one after the other. What stood there already a
//! retention of such time ago is old. While no janitor works, nothing ages: tombstones stay longer then, never shorter.

use std::time::Duration;

use super::Pass;
use crate::{
    encoding::Sequence,
    error::{Error, Result},
    feed::{PAGE_ROWS_MAX, RawFeed},
    keys::{AgeMark, checkpoint_position},
    notification::Notification,
    store::{Isolation, RangeRead, Transaction},
};

/// How many marks divide a retention: what is dropped is at most that part older than it need be.
const MARKS: u32 = 16;

/// The most tombstones that are dropped in one transaction.
const DROPS_MAX: usize = 500;

/// The janitors' own time, as one of them goes on with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Age {
    /// For how long others had worked before.
    earlier: Duration,
    /// The last mark, if there is one.
    marked: Option<Duration>,
    /// When this one began, on its own clock.
    began: Duration,
}

impl Pass<'_> {
    /// Goes on with the time of those who worked before.
    pub async fn begin_age(&self) -> Result<Age> {
        let keys = &self.context.keys;
        let last = RangeRead::new(keys.age_marks()).limit(1).reverse();
        let page = self.read(async |tx| tx.get_range(&last, Isolation::Snapshot).await).await?;
        let last = page.rows.first().map(|row| keys.age_mark_of(row)).transpose()?;
        let marked = last.map(|mark| Duration::from_millis(mark.worked_ms));
        Ok(Age { earlier: marked.unwrap_or_default(), marked, began: self.context.env().now() })
    }

    /// Puts down where the feed stands, if that is due; returns up to where it is older than the retention.
    pub async fn old_up_to(&self, age: &mut Age) -> Result<Sequence> {
        let keys = &self.context.keys;
        let feed = RawFeed::notifications(self.context);
        let retention = self.options.tombstone_retention;
        let worked = age.earlier + self.context.env().now().saturating_sub(age.began);
        let step = (retention / MARKS).max(Duration::from_millis(1));
        let is_due = age.marked.is_none_or(|marked| worked.saturating_sub(marked) >= step);
        let worked_ms = u64::try_from(worked.as_millis()).expect("nobody works for so long");
        let old = self
            .write(async |tx| {
                let page = tx.get_range(&RangeRead::new(keys.age_marks()), Isolation::Snapshot).await?;
                let marks = page.rows.iter().map(|row| keys.age_mark_of(row)).collect::<Result<Vec<_>>>()?;
                let now = AgeMark { worked_ms, at: feed.last_readable(&tx).await? };
                if is_due {
                    tx.set(&keys.age_mark(worked_ms), now.at.as_bytes());
                }
                let is_old = |mark: &&AgeMark| {
                    let age = worked_ms.checked_sub(mark.worked_ms).map(Duration::from_millis);
                    age.is_some_and(|age| age >= retention)
                };
                let old = marks.iter().chain([&now]).filter(is_old);
                let Some(old) = old.max_by_key(|mark| mark.worked_ms) else { return Ok(Sequence::ZERO) };
                // Those before it tell nothing any more.
                for mark in marks.iter().filter(|mark| mark.worked_ms < old.worked_ms) {
                    tx.clear(&keys.age_mark(mark.worked_ms));
                }
                Ok(old.at)
            })
            .await?;
        if is_due {
            age.marked = Some(worked);
        }
        Ok(old)
    }

    /// Drops the tombstones after `from` and up to `old` that every group has passed. Returns how many, and up to where none
    /// is left.
    pub async fn drop_tombstones(&self, from: Sequence, old: Sequence) -> Result<(u64, Sequence)> {
        let feed = RawFeed::notifications(self.context);
        let (mut dropped, mut after) = (0, from);
        while after < old {
            let page = match self.read(async |tx| feed.page(&tx, after, PAGE_ROWS_MAX).await).await {
                // What it was about to look at was dropped by another.
                Err(Error::Expired { horizon }) => {
                    after = horizon;
                    continue;
                }
                page => page?,
            };
            let mut tombstones = Vec::new();
            for row in page.rows.iter().take_while(|row| row.sequence <= old) {
                let row = Notification::from_bytes(row.sequence, &row.value)?;
                if row.is_deleted() {
                    tombstones.push(row);
                }
            }
            for some in tombstones.chunks(DROPS_MAX) {
                let kept = self.write(async |tx| self.drop_some(&tx, some).await).await?;
                dropped += (some.len() - kept) as u64;
                if kept > 0 {
                    return Ok((dropped, some[some.len() - kept].sequence.before()));
                }
            }
            after = page.to.min(old);
        }
        Ok((dropped, after))
    }

    /// Drops `tombstones`, and raises the horizon. Returns how many of them, the last ones, a group has still to pass.
    async fn drop_some(&self, tx: &Transaction, tombstones: &[Notification]) -> Result<usize> {
        let keys = &self.context.keys;
        let feed = RawFeed::notifications(self.context);
        let passed = self.passed_by_groups(tx).await?;
        let topology = feed.topology(tx).await?;
        let horizon = feed.horizon(tx, Isolation::Serializable).await?;
        let mut last = None;
        let passed = tombstones.partition_point(|row| row.sequence <= passed);
        for row in &tombstones[..passed] {
            let id = row.name.as_str().as_bytes();
            let newest = keys.newest(feed.id, id);
            // A name that was used again meanwhile has another row, and the notifier has removed this one.
            let stored = tx.get(&newest, Isolation::Serializable).await?;
            if stored.as_deref() == Some(&row.sequence.as_bytes()[..]) {
                tx.clear(&newest);
                tx.clear(&topology.space_at(feed, row.sequence, id)?.row(row.sequence));
                last = Some(row.sequence);
            }
        }
        if let Some(last) = last.filter(|last| *last > horizon) {
            tx.set(&keys.horizon(feed.id), last.as_bytes());
        }
        Ok(tombstones.len() - passed)
    }

    /// Up to where every group has come. Makes `tx` fail if a group begins or is reset before its commit.
    async fn passed_by_groups(&self, tx: &Transaction) -> Result<Sequence> {
        let keys = &self.context.keys;
        let feed = &self.context.feed;
        tx.add_read_conflict(&keys.groups(feed));
        let mut passed = Sequence::MAX;
        let mut pages = tx.pages(RangeRead::new(keys.checkpoints(feed)), Isolation::Snapshot);
        while let Some(rows) = pages.next().await? {
            for (_, value) in &rows {
                passed = passed.min(checkpoint_position(value)?);
            }
        }
        Ok(passed)
    }
}
