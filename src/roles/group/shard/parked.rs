//! The parked ids of a shard: the observer has failed too often with one of their rows, and they are tried again after pauses. And the
//! rows of the shard that become dead letters.
//!
//! ```text
//!                     it fails too often                  a checkpoint past its row
//!  a row of the id ─────────────────────► pending ──────────────────────────────────► parked ──► tried again
//!                                            ▲     its later rows, in place of those before  │
//!                                            └───────────────────────────────────────────────┘
//! ```
//!
//! Pending rows are only in memory: as long as the checkpoint is not past such a row, the row is in the feed, and comes again after a
//! crash. The transaction that moves the checkpoint past it parks it, be it a transaction of the consumer or of its observer
//! ([`Parks`]). A retry always uses the stored row. The same transactions write dead letters.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;

use crate::{
    base::{encoding::Sequence, env::Env},
    roles::group::batch::Parks,
    state::keys::{DeadLetterRow, GroupParkedRow},
    store::RetryPolicy,
};

/// The most rows of a shard that wait for a checkpoint to become dead letters: they have to fit into one transaction.
const LETTERS_MAX: usize = 100;

/// The parked ids of a shard's task, and its rows that become dead letters.
#[derive(Default)]
pub(super) struct Parking {
    /// When each parked id is to be tried again.
    pub parked: HashMap<Bytes, Duration>,
    /// Rows that the next checkpoints park.
    pub parks: Arc<Parks>,
    /// Ids that a transaction with an unknown result may park even later.
    pub doubted: BTreeSet<Bytes>,
    /// Parked rows that a newer row has replaced in the feed before this task knew that they are parked. If the newer row was delivered
    /// by then, they must not follow it. Else it comes, and takes their place.
    pub replaced: HashMap<Bytes, Replaced>,
    /// Number of parked ids of the group when they were last read.
    pub all: usize,
    /// Whether they are to be read again.
    pub is_stale: bool,
}

/// A parked row that is not in the feed any more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Replaced {
    pub sequence: Sequence,
    /// A newer row of the id is at most here.
    pub by: Sequence,
}

/// What is to be done with a parked row that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// It is tried again.
    Try,
    /// A newer row of its id is about to take its place.
    Wait,
    /// A newer row of its id was delivered already.
    Overtaken,
}

impl Parking {
    /// What to do with the parked row of `id` at `sequence`, after everything up to `passed` was passed on.
    pub fn turn(&mut self, id: &Bytes, sequence: Sequence, passed: Sequence) -> Turn {
        match self.replaced.get(id) {
            Some(replaced) if sequence == replaced.sequence => {
                if passed < replaced.by || self.parks.pending.contains_key(id) {
                    return Turn::Wait;
                }
                self.replaced.remove(id);
                Turn::Overtaken
            }
            _ => {
                self.replaced.remove(id);
                Turn::Try
            }
        }
    }

    pub fn parks(&self) -> &Arc<Parks> {
        &self.parks
    }

    /// Whether there are rows that the next checkpoints have to park.
    pub fn has_pending(&self) -> bool {
        !self.parks.pending.is_empty() || !self.parks.letters.is_empty()
    }

    /// Makes the row at `sequence` a dead letter with the next checkpoint past it. Returns false if too many wait for one.
    pub fn give_up(&mut self, sequence: Sequence, letter: DeadLetterRow) -> bool {
        let has_room = self.parks.letters.len() < LETTERS_MAX || self.parks.letters.contains_key(&sequence);
        if has_room {
            Arc::make_mut(&mut self.parks).letters.insert(sequence, letter);
        }
        has_room
    }

    /// Whether rows of `id` have to wait behind others.
    pub fn holds(&self, id: &[u8]) -> bool {
        self.parked.contains_key(id) || self.parks.pending.contains_key(id)
    }

    /// Adds `row` of `id`, to be parked by the next checkpoint past it.
    pub fn add(&mut self, id: Bytes, row: GroupParkedRow) {
        self.doubted.remove(&id);
        let parks = Arc::make_mut(&mut self.parks);
        parks.overtaken.remove(&id);
        match parks.pending.get_mut(&id) {
            Some(before) if before.sequence >= row.sequence => {}
            Some(before) => {
                (before.sequence, before.shard, before.row) = (row.sequence, row.shard, row.row);
            }
            None => drop(parks.pending.insert(id, row)),
        }
    }

    /// Moves pending rows up to `stored` to the parked ones. `due` says when to try those that were not parked before.
    pub fn settle(&mut self, stored: Sequence, due: impl Fn(u32) -> Duration) {
        let is_settled = |at: &Sequence| *at <= stored;
        if self.parks.overtaken.values().any(is_settled) {
            // The earlier transaction may have saved it, and parked the row.
            Arc::make_mut(&mut self.parks).overtaken.retain(|_, at| !is_settled(at));
            self.is_stale = true;
        }
        let mut pending = self.parks.pending.values().map(|row| &row.sequence);
        if !pending.any(is_settled) && !self.parks.letters.keys().any(is_settled) {
            return;
        }
        let parks = Arc::make_mut(&mut self.parks);
        parks.letters.retain(|at, _| !is_settled(at));
        let pending = std::mem::take(&mut parks.pending);
        for (id, row) in pending {
            if row.sequence <= stored {
                self.parked.entry(id).or_insert_with(|| due(row.attempts));
            } else {
                parks.pending.insert(id, row);
            }
        }
    }

    /// Forgets the pending rows, which come again. A transaction that is under way may still park them.
    pub fn forget_pending(&mut self) {
        let pending = std::mem::take(&mut Arc::make_mut(&mut self.parks).pending);
        self.doubted.extend(pending.into_keys());
        self.is_stale = true;
    }

    /// Forgets the rows that wait to become dead letters.
    pub fn forget_letters(&mut self) {
        if !self.parks.letters.is_empty() {
            Arc::make_mut(&mut self.parks).letters.clear();
        }
    }

    /// Notes a checkpoint: earlier transactions conflict with it, so nothing is in doubt any more. What they have done before is in the
    /// store: [`Parking::settle`] looks at it for rows in hand, and what else was in doubt is read from there again.
    pub fn was_written(&mut self) {
        self.is_stale |= !self.doubted.is_empty();
        self.doubted.clear();
    }

    pub fn next_due(&self) -> Option<Duration> {
        self.parked.values().min().copied()
    }

    /// An id that is due, if there is one.
    pub fn due(&self, now: Duration) -> Option<Bytes> {
        let (id, _) =
            self.parked.iter().filter(|(_, due)| **due <= now).min_by_key(|(id, due)| (**due, *id))?;
        Some(id.clone())
    }
}

/// When an id is to be tried again after `attempts` attempts.
pub(super) fn due_after(env: &Env, retry: &RetryPolicy, attempts: u32) -> Duration {
    let pause = if attempts == 0 { Duration::ZERO } else { retry.backoff(attempts, env) };
    env.now().saturating_add(pause)
}
