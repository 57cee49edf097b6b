//! [`Ring`]: the recent batches of the tail, in memory, shared by all subscribers.
//!
//! Each batch with rows that is appended to the ring gets the next number. A place in the ring is a number: that of the first batch
//! after it.
//!
//! # Invariants
//!
//! 1. The batches hold all rows between the begin and the end of the ring; the end is the position of the tail.
//!    Between two batches, and after the last one, there was nothing to read.
//! 2. A batch holds every row of the feed in its range that had no newer row when it was read. If a row had a newer one,
//!    the newer one delivers its events: in the same batch if that is complete, else in a later one.
//! 3. The end moves only after every log has the batches before it: [`Ring::push`], then the logs, then [`Ring::settle`].

use std::{
    collections::VecDeque,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use super::{batch::Batch, patterns::Pattern};
use crate::base::{
    cursor::{Cursor, Knowledge},
    encoding::Sequence,
    notification::Notification,
};

/// The end of the ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub place: u64,
    /// The cursor of a subscriber that knew everything before and was delivered all its rows of the ring.
    pub cursor: Cursor,
}

/// The result of appending a batch.
pub(super) struct Pushed {
    pub number: u64,
    /// The number of the oldest batch in the ring.
    pub begin: u64,
    /// Patterns that matched a batch which has left the ring.
    pub pruned: Vec<Arc<Pattern>>,
}

/// The recent batches.
pub(super) struct Ring {
    batches: RwLock<Batches>,
    rows_max: usize,
}

struct Batches {
    /// The batches, oldest first, all with rows, and the patterns that match each.
    queue: VecDeque<(Arc<Batch>, Vec<Arc<Pattern>>)>,
    /// The number of the oldest batch, and the position before it.
    begin: (u64, Sequence),
    next: u64,
    rows: usize,
    to: Sequence,
    /// The position at which the tail last reached the end of the feed.
    complete_to: Sequence,
    end: End,
}

impl Ring {
    pub fn new(start: Sequence, rows_max: usize) -> Self {
        let batches = Batches {
            queue: VecDeque::new(),
            begin: (0, start),
            next: 0,
            rows: 0,
            to: start,
            complete_to: start,
            end: End { place: 0, cursor: start.into() },
        };
        Self { batches: RwLock::new(batches), rows_max }
    }

    /// No holder of the lock can panic with the batches half changed.
    fn read(&self) -> RwLockReadGuard<'_, Batches> {
        self.batches.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Batches> {
        self.batches.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a batch of the rows that follow the last batch, up to `to`. `is_complete` says that the feed ended there.
    pub fn batch(&self, rows: Vec<Arc<Notification>>, to: Sequence, is_complete: bool) -> Batch {
        Batch::new(rows, self.read().complete_to.into(), to, is_complete)
    }

    /// Appends a batch, and drops the oldest ones above the limit. For one caller at a time.
    pub fn push(&self, batch: &Arc<Batch>) -> Pushed {
        let mut batches = self.write();
        let number = batches.next;
        batches.to = batch.to;
        if batch.is_complete {
            batches.complete_to = batch.to;
        }
        if !batch.rows.is_empty() {
            batches.next += 1;
            batches.rows += batch.rows.len();
            batches.queue.push_back((Arc::clone(batch), Vec::new()));
        }
        let mut pruned = Vec::new();
        while batches.queue.len() > 1 && batches.rows > self.rows_max {
            let (oldest, patterns) = batches.queue.pop_front().expect("there are at least two");
            batches.rows -= oldest.rows.len();
            batches.begin = (batches.begin.0 + 1, oldest.to);
            pruned.extend(patterns);
        }
        Pushed { number, begin: batches.begin.0, pruned }
    }

    /// Moves the end of the ring behind all batches, once all logs have them. `patterns` are those of the last batch.
    /// Returns the cursor at the end.
    pub fn settle(&self, patterns: Vec<Arc<Pattern>>) -> Cursor {
        let mut batches = self.write();
        if let Some((_, of_last)) = batches.queue.back_mut()
            && !patterns.is_empty()
        {
            *of_last = patterns;
        }
        let cursor = Cursor::resumed(Knowledge::UpTo(batches.complete_to), batches.to, batches.to);
        batches.end = End { place: batches.next, cursor };
        cursor
    }

    /// Continues at `to`, and drops everything before. Returns the number of the next batch: subscribers before it are behind.
    pub fn skip_to(&self, to: Sequence) -> u64 {
        let mut batches = self.write();
        batches.queue.clear();
        batches.rows = 0;
        // One number is left out, so that a subscriber at the end is behind as well.
        batches.next += 1;
        (batches.to, batches.complete_to, batches.begin) = (to, to, (batches.next, to));
        batches.next
    }

    pub fn end(&self) -> End {
        self.read().end
    }

    /// The oldest place in the ring, and the position before it.
    pub fn begin(&self) -> (u64, Sequence) {
        self.read().begin
    }

    /// The place of the first batch with rows after `position`; `None` if such rows have left the ring. If `may_be_ahead`, a position
    /// ahead of the ring has its place at the end.
    pub fn place_after(&self, position: Sequence, may_be_ahead: bool) -> Option<u64> {
        let batches = self.read();
        if position < batches.begin.1 || (position > batches.to && !may_be_ahead) {
            return None;
        }
        let after = batches.queue.partition_point(|(batch, _)| batch.to <= position);
        Some(batches.begin.0 + after as u64)
    }

    /// The position of the tail.
    pub fn position(&self) -> Sequence {
        self.read().to
    }
}
