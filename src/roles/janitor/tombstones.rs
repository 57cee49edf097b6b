//! Dropping the rows of databases that were deleted long ago.
//!
//! # Age
//!
//! No clocks are compared, so a row's age cannot be read off it. Instead the janitor saves from time to time where the
//! feed stands, under the time that janitors have worked until then, one after the other. What stood there already a
//! retention of such time ago is old. While no janitor works, nothing ages: tombstones stay longer then, never shorter.

use std::time::Duration;

use futures_util::future::try_join_all;

use super::Pass;
use crate::{
    base::{
        bugs::{Bug, is_on},
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        notification::Notification,
    },
    state::{
        feed::{RawFeed, remove},
        keys::{AgeMark, checkpoint_position},
        skipped::Place,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// How many marks divide a retention: what is dropped is at most that part older than it need be.
const MARKS: u32 = 16;

/// How many rows are read in one transaction. The tombstones among them are dropped in another.
const PAGE_ROWS: usize = 500;

/// The janitors' own time, as one of them goes on with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct JanitorClock {
    /// For how long others had worked before.
    earlier: Duration,
    /// The last mark, if there is one.
    marked: Option<Duration>,
    /// When this one began, on its own clock.
    began: Duration,
}

impl Pass<'_> {
    /// Goes on with the time of those who worked before.
    pub async fn begin_age(&self) -> Result<JanitorClock> {
        let keys = &self.context.keys;
        let last = RangeRead::new(keys.age_marks()).limit(1).reverse();
        let page = self.read(async |tx| tx.get_range(&last, Isolation::Snapshot).await).await?;
        let last = page.rows.first().map(|row| keys.age_mark_of(row)).transpose()?;
        let marked = last.map(|mark| Duration::from_millis(mark.worked_ms));
        Ok(JanitorClock { earlier: marked.unwrap_or_default(), marked, began: self.context.env().now() })
    }

    /// Saves where the feed stands, if that is due; returns up to where it is older than the retention.
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
                // Afterwards: what is read by then is as old as this or older, however long the store has taken.
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
                // Those before it tell nothing any more.
                let told = marks.iter().filter(|mark| old.is_some_and(|old| mark.worked_ms < old.worked_ms));
                told.for_each(|mark| tx.clear(&keys.age_mark(mark.worked_ms)));
                Ok((old.map_or(Sequence::MIN, |old| old.at), is_due.then_some(worked)))
            })
            .await?;
        age.marked = marked.or(age.marked);
        Ok(old)
    }

    /// Drops the tombstones after `from` and up to `old` that every group has passed. Returns how many, and up to where none
    /// is left.
    pub async fn drop_tombstones(&self, from: Sequence, old: Sequence) -> Result<(u64, Sequence)> {
        let feed = RawFeed::notifications(self.context);
        let (mut dropped, mut cursor) = (0, Cursor::from(from));
        while cursor.position() < old {
            let page = match self.read(async |tx| feed.page(&tx, cursor, PAGE_ROWS).await).await {
                // What it was about to look at was dropped by another.
                Err(Error::Expired { horizon }) => {
                    cursor = horizon.into();
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
                        let place = Place::Row(feed.id.clone(), row.sequence);
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

    /// Drops `tombstones`, and raises the horizon. Returns how many, and how many, the last ones, a group has still to pass.
    async fn drop_some(&self, tx: &Transaction, tombstones: &[Notification]) -> Result<(u64, usize)> {
        let keys = &self.context.keys;
        let feed = RawFeed::notifications(self.context);
        let passed = self.passed_by_groups(tx).await?;
        let topology = feed.topology(tx).await?;
        let horizon = feed.horizon(tx, Isolation::Serializable).await?;
        let passed = tombstones.partition_point(|row| row.sequence <= passed);
        let newest = tombstones[..passed].iter().map(|row| {
            let newest = keys.newest(feed.id, row.name.as_str().as_bytes());
            async move { Ok::<_, Error>((tx.get(&newest, Isolation::Serializable).await?, newest)) }
        });
        let (mut dropped, mut last) = (0, horizon);
        for (row, (stored, newest)) in tombstones.iter().zip(try_join_all(newest).await?) {
            // A name that was used again meanwhile has another row, and the notifier has removed this one.
            if stored.as_deref() != Some(&row.sequence.as_bytes()[..]) {
                continue;
            }
            if let Err(error) = remove(tx, feed, &topology, row.name.as_str().as_bytes(), row.sequence) {
                tracing::error!(name = %row.name, %error, "a tombstone cannot be dropped");
                continue;
            }
            tx.clear(&newest);
            dropped += 1;
            last = last.max(row.sequence);
        }
        if last > horizon && !is_on(Bug::HorizonNotRaised) {
            tx.set(&keys.horizon(feed.id), last.as_bytes());
        }
        Ok((dropped, tombstones.len() - passed))
    }

    /// Up to where every group has come. Makes `tx` fail if a group begins or is reset before its commit.
    async fn passed_by_groups(&self, tx: &Transaction) -> Result<Sequence> {
        let keys = &self.context.keys;
        let feed = &self.context.feed;
        if !is_on(Bug::JanitorMissesNewGroup) {
            tx.add_read_conflict(&keys.groups(feed));
        }
        let mut passed = Sequence::MAX;
        if is_on(Bug::JanitorIgnoresGroups) {
            return Ok(passed);
        }
        let mut pages = tx.pages(RangeRead::new(keys.checkpoints(feed)), Isolation::Snapshot);
        while let Some(rows) = pages.next().await? {
            for (_, value) in &rows {
                passed = passed.min(checkpoint_position(value)?);
            }
        }
        Ok(passed)
    }
}
