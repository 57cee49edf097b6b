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

use super::{batch::Batch, patterns::Pattern};
use crate::base::{cursor::Cursor, encoding::Sequence};

#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub batch_number: u64,
    /// The cursor of a subscriber that knew everything before and was delivered all its rows of the ring.
    pub cursor: Cursor,
}

struct Kept {
    to: Sequence,
    rows: usize,
    patterns: Vec<Arc<Pattern>>,
}

pub(super) struct Ring {
    /// The batches with rows, oldest first.
    queue: VecDeque<Kept>,
    rows: usize,
    rows_max: usize,
    /// The oldest place: the number of the oldest batch, and the position before it.
    pub begin: (u64, Sequence),
    pub end: End,
    /// The last row that one of the ring has taken the place of, whether it was in the ring or not: the rows after it are of different
    /// names.
    pub superseded: Sequence,
}

impl Ring {
    pub fn new(start: Sequence, rows_max: usize) -> Self {
        let end = End { batch_number: 0, cursor: start.into() };
        Self { queue: VecDeque::new(), rows: 0, rows_max, begin: (0, start), end, superseded: Sequence::MIN }
    }

    /// Appends a batch that all logs have, and drops the oldest ones above the limit. `patterns` match the batch. Returns the
    /// patterns that matched a batch which has left the ring.
    pub fn push(&mut self, batch: &Batch, patterns: Vec<Arc<Pattern>>) -> Vec<Arc<Pattern>> {
        self.end.cursor = batch.cursor_after(batch.since);
        let superseded = batch.rows.iter().filter_map(|row| row.previous).max();
        self.superseded = self.superseded.max(superseded.unwrap_or(Sequence::MIN));
        if !batch.rows.is_empty() {
            self.end.batch_number += 1;
            self.rows += batch.rows.len();
            self.queue.push_back(Kept { to: batch.to, rows: batch.rows.len(), patterns });
        }
        let mut pruned = Vec::new();
        while self.queue.len() > 1 && self.rows > self.rows_max {
            let oldest = self.queue.pop_front().expect("there are at least two");
            self.rows -= oldest.rows;
            self.begin = (self.begin.0 + 1, oldest.to);
            pruned.extend(oldest.patterns);
        }
        pruned
    }

    /// Continues at `to` with batch number `next`, which is after the next one. Drops everything before.
    pub fn skip_to(&mut self, next: u64, to: Sequence) {
        (self.begin, self.end) = ((next, to), End { batch_number: next, cursor: to.into() });
        (self.rows, self.queue) = (0, VecDeque::new());
    }

    /// The place of the first batch with rows after `position`; `None` if such rows have left the ring. If `may_be_ahead`, a position
    /// ahead of the ring has its place at the end.
    pub fn batch_after(&self, position: Sequence, may_be_ahead: bool) -> Option<u64> {
        if position < self.begin.1 || (position > self.end.cursor.position() && !may_be_ahead) {
            return None;
        }
        let after = self.queue.partition_point(|batch| batch.to <= position);
        Some(self.begin.0 + after as u64)
    }

    pub fn position(&self) -> Sequence {
        self.end.cursor.position()
    }
}
