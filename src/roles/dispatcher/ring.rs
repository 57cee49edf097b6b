//! [`Ring`]: which of the tail's batches are in memory. The batches themselves are in the logs of the patterns that match them; the
//! pattern that matches everything has all of them.
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
//! 3. The end moves only after every log has the batches before it: first the logs, then [`Ring::push`].

use std::{collections::VecDeque, sync::Arc};

use parking_lot::RwLock;

use super::{batch::Batch, patterns::Pattern};
use crate::base::{cursor::Cursor, encoding::Sequence};

/// The end of the ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub place: u64,
    /// The cursor of a subscriber that knew everything before and was delivered all its rows of the ring.
    pub cursor: Cursor,
}

/// The recent batches.
pub(super) struct Ring {
    batches: RwLock<Batches>,
    rows_max: usize,
}

/// A batch in the ring.
struct Kept {
    to: Sequence,
    rows: usize,
    /// The patterns that match it.
    patterns: Vec<Arc<Pattern>>,
}

struct Batches {
    /// The batches with rows, oldest first.
    queue: VecDeque<Kept>,
    rows: usize,
    /// The number of the oldest batch, and the position before it.
    begin: (u64, Sequence),
    end: End,
}

impl Ring {
    pub fn new(start: Sequence, rows_max: usize) -> Self {
        let end = End { place: 0, cursor: start.into() };
        let batches = Batches { queue: VecDeque::new(), rows: 0, begin: (0, start), end };
        Self { batches: RwLock::new(batches), rows_max }
    }

    /// Appends a batch that all logs have, and drops the oldest ones above the limit. `patterns` match the batch. Returns the oldest
    /// place in the ring, and the patterns that matched a batch which has left it. For one caller at a time.
    pub fn push(&self, batch: &Batch, patterns: Vec<Arc<Pattern>>) -> (u64, Vec<Arc<Pattern>>) {
        let mut batches = self.batches.write();
        batches.end.cursor = batch.cursor_after(batch.since);
        if !batch.rows.is_empty() {
            batches.end.place += 1;
            batches.rows += batch.rows.len();
            batches.queue.push_back(Kept { to: batch.to, rows: batch.rows.len(), patterns });
        }
        let mut pruned = Vec::new();
        while batches.queue.len() > 1 && batches.rows > self.rows_max {
            let oldest = batches.queue.pop_front().expect("there are at least two");
            batches.rows -= oldest.rows;
            batches.begin = (batches.begin.0 + 1, oldest.to);
            pruned.extend(oldest.patterns);
        }
        (batches.begin.0, pruned)
    }

    /// Continues at `to` with batch number `next`, which is after the next one. Drops everything before.
    pub fn skip_to(&self, next: u64, to: Sequence) {
        let mut batches = self.batches.write();
        let end = End { place: next, cursor: to.into() };
        *batches = Batches { queue: VecDeque::new(), rows: 0, begin: (next, to), end };
    }

    pub fn end(&self) -> End {
        self.batches.read().end
    }

    /// The oldest place in the ring, and the position before it.
    pub fn begin(&self) -> (u64, Sequence) {
        self.batches.read().begin
    }

    /// The place of the first batch with rows after `position`; `None` if such rows have left the ring. If `may_be_ahead`, a position
    /// ahead of the ring has its place at the end.
    pub fn place_after(&self, position: Sequence, may_be_ahead: bool) -> Option<u64> {
        let batches = self.batches.read();
        if position < batches.begin.1 || (position > batches.end.cursor.position() && !may_be_ahead) {
            return None;
        }
        let after = batches.queue.partition_point(|batch| batch.to <= position);
        Some(batches.begin.0 + after as u64)
    }

    /// The position of the tail.
    pub fn position(&self) -> Sequence {
        self.end().cursor.position()
    }
}
