//! [`Ordered`]: the rows of a shard that wait for their batch. It knows no store and no clock.
//!
//! One batch runs at a time. If it fails, what waits is forgotten and read again, so that each attempt has the newest rows. Perhaps only
//! one of its rows fails, so their ids are tried one by one then, until each is finished. Failures are counted by id: updates of an id that
//! always fails do not keep it from being deferred.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::{ConsumerOptions, FailurePolicy, known_keys::hash_of};
use crate::{base::encoding::Sequence, state::feed::FeedRow};

/// The most ids that are tried one by one; with more, all are taken for good again.
const SUSPECTS_MAX: usize = 100_000;

pub(super) struct Ordered<R> {
    /// Rows that were read, each with the number of its stored bytes.
    queue: VecDeque<(R, usize)>,
    /// The first row of the batch that runs.
    running: Option<Sequence>,
    /// The hashes of its ids.
    running_ids: Vec<u64>,
    /// Hashes of the ids of failed batches that were not finished since, each with how often it has failed alone.
    suspects: HashMap<u64, u32, foldhash::fast::FixedState>,
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
            running_ids: Vec::new(),
            suspects: HashMap::default(),
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

    /// Whether the last batch has failed, so that the waiting rows must be read again in their newest versions.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Starts the next batch: its rows, how often they have failed, and whether they are the last that were read.
    pub fn start(&mut self, options: &ConsumerOptions) -> (Vec<R>, u32, bool) {
        let first = &self.queue.front().expect("rows wait").0;
        let (at, failed) = (first.sequence(), self.failures_of(first));
        let limit = if failed.is_some() { 1 } else { options.batch_rows_max };
        let mut bytes = 0;
        let fits = |(row, len): &&(R, usize)| {
            let fits = bytes < options.batch_bytes_max && (bytes == 0 || self.failures_of(row).is_none());
            bytes += len;
            fits
        };
        let count = self.queue.iter().take(limit).take_while(fits).count();
        let rows: Vec<_> = self.queue.drain(..count).map(|(row, _)| row).collect();
        self.running_ids = rows.iter().map(|row| hash_of(row.id())).collect();
        (self.running, self.was_deferred, self.has_failed) = (Some(at), false, false);
        (rows, failed.unwrap_or_default(), self.queue.is_empty())
    }

    /// How often the work on the id of `row` has failed alone; `None` if it is not suspected.
    fn failures_of(&self, row: &R) -> Option<u32> {
        if self.suspects.is_empty() { None } else { self.suspects.get(&hash_of(row.id())).copied() }
    }

    /// The batch that runs is finished, or its row is deferred.
    pub fn done(&mut self) {
        self.running = None;
        for id in self.running_ids.drain(..) {
            self.suspects.remove(&id);
        }
    }

    /// A part of the batch that runs is finished: the rest is read again.
    pub fn forget(&mut self) {
        (self.running, self.has_failed) = (None, true);
        self.queue.clear();
    }

    /// The batch that runs has failed, alone for the `attempts`-th time if it is one row. Returns whether that was too often; otherwise the rows
    /// are read again.
    pub fn is_given_up(&mut self, attempts: u32, is_stall: bool, options: &ConsumerOptions) -> bool {
        if let [id] = self.running_ids[..] {
            let is_exhausted = is_stall || attempts >= options.attempts_max;
            if is_exhausted && options.failure == FailurePolicy::Defer {
                return true;
            }
            self.suspects.insert(id, attempts);
        } else {
            for id in self.running_ids.drain(..) {
                self.suspects.entry(id).or_default();
            }
        }
        if self.suspects.len() > SUSPECTS_MAX {
            self.suspects.clear();
        }
        self.forget();
        false
    }
}
