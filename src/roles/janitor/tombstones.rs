//! Deletes the row of a deleted database once it is older than [`tombstone_retention`](super::JanitorOptions::tombstone_retention) and
//! every consumer of the notifications has passed it, judged by its low watermark, or by its start if it has none.
//!
//! # Age
//!
//! The janitor compares no clocks, so a row does not show its age. Instead the janitor saves age marks: each pairs the feed's position with
//! the total time that janitors had worked by then. A row is old if it is before a mark that is at least one retention old on this clock.
//! While no janitor works, nothing ages: tombstones stay longer, never shorter.

use std::time::Duration;

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
        keys::AgeMark,
        skipped::SkippedAt,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// The number of parts into which age marks divide a retention. A tombstone stays at most one such part longer than it has to.
const MARKS: u32 = 16;

/// How many rows are read in one transaction. A second transaction deletes the tombstones among them.
const PAGE_ROWS: usize = 500;

/// The total time that janitors have worked, continued by the current one.
#[derive(Debug, Clone, Copy)]
pub(super) struct JanitorClock {
    /// How long earlier janitors worked.
    earlier: Duration,
    /// The time of the last age mark, if there is one.
    marked: Option<Duration>,
    /// When this janitor began, on its own clock.
    began: Duration,
}

impl Pass<'_> {
    /// Starts a clock that continues the time of earlier janitors.
    pub async fn begin_age(&self) -> Result<JanitorClock> {
        let keys = &self.context.keys;
        let last = RangeRead::new(keys.age_marks()).limit(1).reverse();
        let page = self.read(async |tx| tx.get_range(&last, Isolation::Snapshot).await).await?;
        let last = page.rows.first().map(|row| keys.age_mark_of(row)).transpose()?;
        let marked = last.map(|mark| Duration::from_millis(mark.worked_ms));
        Ok(JanitorClock { earlier: marked.unwrap_or_default(), marked, began: self.context.env().now() })
    }

    /// Saves an age mark if one is due. Returns the sequence up to which rows are older than the retention.
    pub async fn old_up_to(&self, age: &mut JanitorClock) -> Result<Sequence> {
        let keys = &self.context.keys;
        let feed = RawFeed::notifications(self.context);
        let retention = self.options.tombstone_retention;
        let step = (retention / MARKS).max(Duration::from_millis(1));
        let known = *age;
        let (old, marked) = self
            .write(async |tx| {
                let page = tx.get_range(&RangeRead::new(keys.age_marks()), Isolation::Snapshot).await?;
                let marks = page.rows.iter().map(|row| keys.age_mark_of(row)).collect::<Result<Vec<_>>>()?;
                let at = feed.last_readable(&tx).await?;
                // Read the time after the position: however long the store took, the position is at least as old as the time says.
                let worked = known.earlier + self.context.env().now().saturating_sub(known.began);
                let worked_ms = u64::try_from(worked.as_millis()).expect("nobody works for so long");
                let is_due = known.marked.is_none_or(|marked| worked.saturating_sub(marked) >= step);
                if is_due {
                    tx.set(&keys.age_mark(worked_ms), at.as_bytes());
                }
                let is_old = |mark: &&AgeMark| {
                    let age = worked_ms.checked_sub(mark.worked_ms).map(Duration::from_millis);
                    age.is_some_and(|age| age >= retention)
                };
                let now = AgeMark { worked_ms, at };
                let old = marks.iter().chain([&now]).filter(is_old).max_by_key(|mark| mark.worked_ms);
                // A mark before the newest old one is no longer needed.
                let unneeded =
                    marks.iter().filter(|mark| old.is_some_and(|old| mark.worked_ms < old.worked_ms));
                unneeded.for_each(|mark| tx.clear(&keys.age_mark(mark.worked_ms)));
                Ok((old.map_or(Sequence::MIN, |old| old.at), is_due.then_some(worked)))
            })
            .await?;
        age.marked = marked.or(age.marked);
        Ok(old)
    }

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
        let newest = tombstones[..passed].iter().map(|row| {
            let newest = keys.newest(feed.id, row.name.as_str().as_bytes());
            async move { Ok::<_, Error>((tx.get(&newest, Isolation::Serializable).await?, newest)) }
        });
        let (mut dropped, mut last) = (0, horizon);
        for (row, (stored, newest)) in tombstones.iter().zip(try_join_all(newest).await?) {
            // If the name was used again meanwhile, the notifier has replaced this row with a newer one.
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
