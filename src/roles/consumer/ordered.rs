//! [`Ordered`]: the rows of a shard that wait for their batch. It knows no store and no clock.
//!
//! One batch runs at a time. If it fails, what waits is forgotten and read again, so that each attempt has the newest rows. Perhaps only
//! one of its rows fails, so they are tried one by one then. The failures of a row alone are counted by its id: updates of an id that always
//! fails do not keep it from being deferred.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use bytes::Bytes;

use super::{ConsumerOptions, FailurePolicy};
use crate::{base::encoding::Sequence, state::feed::FeedRow};

/// The most ids whose failures are counted; then the count begins anew.
const FAILING_MAX: usize = 1_000;

pub(super) struct Ordered<R> {
    /// Rows that were read, each with the number of its stored bytes.
    queue: VecDeque<(R, usize)>,
    /// The first row of the batch that runs.
    running: Option<Sequence>,
    /// Rows up to here are tried one by one, because a batch of them has failed.
    careful_to: Sequence,
    /// How often the work on ids has failed, alone, since it was finished last.
    failures: HashMap<Bytes, u32>,
    /// Those of them that are in the batch that runs.
    retried: Vec<Bytes>,
    /// Whether the last batch has failed.
    has_failed: bool,
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
            failures: HashMap::new(),
            retried: Vec::new(),
            has_failed: false,
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
        self.has_failed || read < self.careful_to
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
        let rows: Vec<_> = self.queue.drain(..count).map(|(row, _)| row).collect();
        let failing = rows.iter().filter_map(|row| self.failures.get_key_value(row.id()));
        let (ids, failed): (Vec<_>, Vec<_>) = failing.map(|(id, failed)| (id.clone(), *failed)).unzip();
        let failed = if rows.len() == 1 { failed.first().copied().unwrap_or_default() } else { 0 };
        self.retried = ids;
        (self.running, self.was_deferred, self.has_failed) = (Some(first), false, false);
        (rows, failed, self.queue.is_empty())
    }

    /// The batch that runs is finished, or its row is deferred.
    pub fn done(&mut self) {
        self.running = None;
        for id in self.retried.drain(..) {
            self.failures.remove(&id);
        }
    }

    /// A part of the batch that runs is finished: the rest is read again.
    pub fn forget(&mut self) {
        (self.running, self.has_failed) = (None, true);
        self.queue.clear();
    }

    /// The batch that runs, up to `last`, has failed; it was the row of `only` alone, for the `attempts`-th time, or several rows.
    /// Returns whether that was too often; otherwise the rows are read again.
    pub fn is_given_up(
        &mut self,
        (only, last): (Option<&[u8]>, Sequence),
        (attempts, is_stall): (u32, bool),
        options: &ConsumerOptions,
    ) -> bool {
        match only {
            None => self.careful_to = last,
            Some(_)
                if (is_stall || attempts >= options.attempts_max)
                    && options.failure == FailurePolicy::Defer =>
            {
                return true;
            }
            Some(id) => {
                if self.failures.len() >= FAILING_MAX && !self.failures.contains_key(id) {
                    self.failures.clear();
                }
                self.failures.insert(Bytes::copy_from_slice(id), attempts);
            }
        }
        self.forget();
        false
    }
}
