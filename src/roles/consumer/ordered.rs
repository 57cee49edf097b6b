//! [`Ordered`]: the rows of a shard that wait for their batch. It knows no store and no clock.
//!
//! One batch runs at a time. If it fails, what waits is forgotten and read again, so that each attempt has the newest rows. Perhaps only
//! one of its rows fails, so they are tried one by one then.

use std::{collections::VecDeque, time::Duration};

use super::{ConsumerOptions, FailurePolicy};
use crate::{base::encoding::Sequence, state::feed::FeedRow};

pub(super) struct Ordered<R> {
    /// Rows that were read, each with the number of its stored bytes.
    queue: VecDeque<(R, usize)>,
    /// The first row of the batch that runs.
    running: Option<Sequence>,
    /// Rows up to here are tried one by one, because a batch of them has failed.
    careful_to: Sequence,
    /// The first row of the batch that has failed last, and how often it has.
    failed: (Sequence, u32),
    /// When the next batch may run.
    pub resume_at: Duration,
    /// Whether a deferred id ran last, so that rows are next.
    pub was_deferred: bool,
}

impl<R: FeedRow> Ordered<R> {
    pub fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            running: None,
            careful_to: Sequence::MIN,
            failed: (Sequence::MIN, 0),
            resume_at: Duration::ZERO,
            was_deferred: false,
        }
    }

    pub fn push(&mut self, row: R, len: usize) {
        self.queue.push_back((row, len));
    }

    /// Whether every row that was read is worked on.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.running.is_none()
    }

    /// Whether rows wait for their batch.
    pub fn has_rows(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether a row of `id` waits for its batch.
    pub fn contains(&self, id: &[u8]) -> bool {
        self.queue.iter().any(|(row, _)| row.id() == id)
    }

    /// Everything up to here is worked on.
    pub fn watermark(&self, read: Sequence) -> Sequence {
        let first = self.running.or_else(|| self.queue.front().map(|(row, _)| row.sequence()));
        first.map_or(read, |first| first.before().min(read))
    }

    /// Whether rows up to `read` are to be read again as they are now.
    pub fn is_careful(&self, read: Sequence) -> bool {
        self.failed.1 > 0 || read < self.careful_to
    }

    /// Starts the next batch: its rows, how often they have failed, and whether they are the last that were read.
    pub fn start(&mut self, options: &ConsumerOptions) -> (Vec<R>, u32, bool) {
        let first = self.queue.front().expect("rows wait").0.sequence();
        let limit = if first <= self.careful_to { 1 } else { options.batch_rows_max };
        let mut bytes = 0;
        let fits = |(_, len): &&(R, usize)| {
            let fits = bytes < options.batch_bytes_max;
            bytes += len;
            fits
        };
        let count = self.queue.iter().take(limit).take_while(fits).count();
        let rows = self.queue.drain(..count).map(|(row, _)| row).collect();
        if self.failed.0 != first {
            self.failed = (first, 0);
        }
        (self.running, self.was_deferred) = (Some(first), false);
        (rows, self.failed.1, self.queue.is_empty())
    }

    /// The batch that runs is finished, or its row is deferred.
    pub fn done(&mut self) {
        (self.running, self.failed.1) = (None, 0);
    }

    /// A part of the batch that runs is finished: the rest is read again.
    pub fn forget(&mut self) {
        self.running = None;
        self.queue.clear();
    }

    /// The batch that runs, of `rows` and up to `last`, has failed once more. Returns whether it is one row, which has failed too often;
    /// otherwise its rows are read again.
    pub fn is_given_up(
        &mut self,
        (rows, last): (usize, Sequence),
        is_stall: bool,
        options: &ConsumerOptions,
    ) -> bool {
        self.failed.1 = self.failed.1.saturating_add(1);
        let attempts = self.failed.1;
        let is_exhausted = is_stall || attempts >= options.attempts_max;
        if rows > 1 && (is_exhausted || attempts == 1) {
            (self.careful_to, self.failed.1) = (last, 0);
        } else if is_exhausted && options.failure == FailurePolicy::Defer {
            return true;
        }
        self.forget();
        false
    }

    /// How often the batch that runs has failed.
    pub fn attempts(&self) -> u32 {
        self.failed.1
    }
}
