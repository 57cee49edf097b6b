//! [`JanitorClock`]: the total time that janitors have worked, by which tombstones and consumers without members age.
//!
//! Nodes compare no clocks. While no janitor works, this clock stands still, so data may be kept for longer, never for less. That includes a
//! janitor whose process was stopped: between two passes, at most two intervals count.
//!
//! Each pass saves an age mark, which pairs the feed's position with this time. A row is old if it is before a mark that is at least one
//! retention old. The next janitor continues from the last mark, so a change of janitors loses at most the time since the last pass.

use std::time::Duration;

use super::pass::Pass;
use crate::{
    base::{encoding::Sequence, env::Env, error::Result},
    state::{feed::RawFeed, keys::AgeMark},
    store::{Isolation, RangeRead},
};

/// The number of parts into which age marks divide a retention. A tombstone is kept at most one such part, or one pass, too long.
const MARKS: u32 = 16;

/// The total time that janitors have worked, continued by the current one.
#[derive(Debug, Clone, Copy)]
pub(super) struct JanitorClock {
    /// The total time that janitors had worked when the current pass began.
    worked: Duration,
    /// When the current pass began, on the clock of its process.
    began: Duration,
    /// The longest time that counts from one pass to the next.
    counted_max: Duration,
}

impl JanitorClock {
    /// Begins the next pass.
    pub fn next_pass(&mut self, env: &Env) {
        (self.worked, self.began) = (self.now(env), env.now());
    }

    /// Returns the time worked until now, in milliseconds.
    pub fn now_ms(self, env: &Env) -> u64 {
        u64::try_from(self.now(env).as_millis()).unwrap_or(u64::MAX)
    }

    fn now(self, env: &Env) -> Duration {
        let passed = env.now().saturating_sub(self.began).min(self.counted_max);
        self.worked.saturating_add(passed)
    }
}

impl Pass<'_> {
    /// Starts a clock that continues the time of earlier janitors.
    pub async fn begin_clock(&self) -> Result<JanitorClock> {
        let (keys, env) = (&self.context.keys, self.context.env());
        let last = RangeRead::new(keys.age_marks()).limit(1).reverse();
        let page = self.read(async |tx| tx.get_range(&last, Isolation::Snapshot).await).await?;
        let last = page.rows.first().map(|row| keys.age_mark_of(row)).transpose()?;
        let worked = last.map_or(Duration::ZERO, |mark| Duration::from_millis(mark.worked_ms));
        Ok(JanitorClock { worked, began: env.now(), counted_max: self.options.interval.saturating_mul(2) })
    }

    /// Saves an age mark. Returns the sequence up to which rows are older than the retention.
    pub async fn old_up_to(&self, clock: JanitorClock) -> Result<Sequence> {
        let (keys, env) = (&self.context.keys, self.context.env());
        let feed = RawFeed::notifications(self.context);
        let retention = self.options.tombstone_retention;
        let saved = self.write(async |tx| {
            let page = tx.get_range(&RangeRead::new(keys.age_marks()), Isolation::Snapshot).await?;
            let marks = page.rows.iter().map(|row| keys.age_mark_of(row)).collect::<Result<Vec<_>>>()?;
            let at = feed.last_readable(&tx).await?;
            // Read the time after the position: however long the store took, the position is at least as old as the time says.
            let now = AgeMark { worked_ms: clock.now_ms(env), at };
            let age = |mark: &AgeMark| Duration::from_millis(now.worked_ms.saturating_sub(mark.worked_ms));
            let old = marks.iter().chain([&now]).rfind(|mark| age(mark) >= retention);
            let before_old =
                marks.iter().take_while(|mark| old.is_some_and(|old| mark.worked_ms < old.worked_ms));
            before_old.for_each(|mark| tx.clear(&keys.age_mark(mark.worked_ms)));
            // The last mark only continues the clock if the mark before it divides the retention finely enough.
            if let [.., before, last] = &marks[..]
                && age(before) < retention / MARKS
            {
                tx.clear(&keys.age_mark(last.worked_ms));
            }
            tx.set(&keys.age_mark(now.worked_ms), at.as_bytes());
            Ok(old.map_or(Sequence::MIN, |old| old.at))
        });
        saved.await
    }
}
