//! [`Ordered`]: the rows of a shard that wait for their batch. It uses neither the store nor a clock.
//!
//! One batch runs at a time. If it fails, the waiting rows are forgotten and read again, so that each attempt has the newest rows. The
//! cause may be a single row, so the ids of the batch are then tried one by one until each is finished. Failures are counted by id, so that
//! an id that always fails is deferred even if it keeps changing.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::{ConsumerOptions, FailurePolicy, known_keys::hash_of};
use crate::{base::encoding::Sequence, state::feed::FeedRow};

/// The maximum number of ids that are tried one by one. If there are more, no id is suspected any longer.
const SUSPECTS_MAX: usize = 100_000;

pub(super) struct Ordered<R> {
    /// Rows that were read, each with the number of its stored bytes.
    queue: VecDeque<(R, usize)>,
    /// The first row of the running batch.
    running: Option<Sequence>,
    /// The hashes of the ids in the running batch.
    running_ids: Vec<u64>,
    /// The hashes of ids that were in failed batches and have not been finished since, each with how many times the id failed alone.
    suspects: HashMap<u64, u32, foldhash::fast::FixedState>,
    /// Whether the last batch failed.
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

    /// Whether no row waits for its batch, and no batch runs.
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

    /// Returns the position up to which no row waits or is being worked on. Rows were read up to `read`.
    pub fn watermark(&self, read: Sequence) -> Sequence {
        let first = self.running.or_else(|| self.queue.front().map(|(row, _)| row.sequence()));
        first.map_or(read, |first| first.before().min(read))
    }

    /// Whether the last batch failed, so that the waiting rows must be read again in their newest versions.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Starts the next batch. Returns its rows, how many times they have failed, and whether they are the last rows that were read.
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

    /// Returns how many times the id of `row` failed alone; `None` if the id is not suspected.
    fn failures_of(&self, row: &R) -> Option<u32> {
        if self.suspects.is_empty() { None } else { self.suspects.get(&hash_of(row.id())).copied() }
    }

    /// Notes that the running batch is finished, or that its row is deferred.
    pub fn done(&mut self) {
        self.running = None;
        for id in self.running_ids.drain(..) {
            self.suspects.remove(&id);
        }
    }

    /// Forgets the running batch and the waiting rows. Unfinished rows are read again.
    pub fn forget(&mut self) {
        (self.running, self.has_failed) = (None, true);
        self.queue.clear();
    }

    /// Accounts for the failure of the running batch. If the batch has one row, that row has failed alone `attempts` times. Returns whether
    /// to give the row up; if not, the rows are read again.
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
