//! [`Ring`]: the recent batches of the tail, in memory, shared by all that walk it.
//!
//! # Invariants
//!
//! 1. The batches hold all rows between the two ends of the ring, the second of which is the position of the tail:
//!    between two batches, and after the last one, there was nothing to read.
//! 2. A batch holds every row of the feed between its ends that had no newer row when it was read. Of a row that had one,
//!    the events are told by the newer one: in the same batch if that is complete, else in a later one.

use std::{
    collections::VecDeque,
    sync::{Arc, RwLock, RwLockReadGuard},
};

use tokio::sync::watch;

use crate::{encoding::Sequence, notification::Notification};

/// A part of the feed, as the tail or a lagging subscriber has read it.
#[derive(Debug)]
pub(super) struct Batch {
    /// The rows, in order, each after `from` and not after `to`.
    pub rows: Vec<Arc<Notification>>,
    /// Where the batch begins.
    pub from: Sequence,
    /// Where it ends.
    pub to: Sequence,
    /// Whether it ends at the end of what there was to read, so that who has walked it knows all that happened up to
    /// there.
    pub is_complete: bool,
}

/// What follows a cursor.
pub(super) enum Next {
    /// The batch that holds what comes after it.
    Batch(Arc<Batch>),
    /// Nothing yet.
    UpToDate,
    /// The ring no longer holds it; the oldest position that it does hold is given.
    Behind(Sequence),
}

/// The recent batches.
#[derive(Debug)]
pub(super) struct Ring {
    /// The batches, oldest first.
    batches: RwLock<Batches>,
    /// The most rows that they hold together.
    rows_max: usize,
    /// Counts the batches pushed, and wakes the walkers; `None` once the ring is closed.
    pushed: watch::Sender<Option<u64>>,
}

/// The part of a ring behind its lock.
#[derive(Debug)]
struct Batches {
    /// The batches, oldest first.
    queue: VecDeque<Arc<Batch>>,
    /// Their rows together.
    rows: usize,
    /// Where the oldest begins.
    from: Sequence,
    /// Where the newest ends.
    to: Sequence,
}

impl Ring {
    /// An empty ring at `start`.
    pub fn new(start: Sequence, rows_max: usize) -> Self {
        let batches = Batches { queue: VecDeque::new(), rows: 0, from: start, to: start };
        Self { batches: RwLock::new(batches), rows_max, pushed: watch::Sender::new(Some(0)) }
    }

    /// The batches. No holder of the lock can panic with them half changed.
    fn read(&self) -> RwLockReadGuard<'_, Batches> {
        self.batches.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Appends a batch, which begins where the ring ends, and drops the oldest ones above the limit. A batch without rows
    /// only moves the end, and takes up no room.
    pub fn push(&self, batch: Arc<Batch>) {
        let is_empty = batch.rows.is_empty();
        {
            let mut batches = self.batches.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            assert_eq!(batches.to, batch.from, "batches follow each other without a gap");
            batches.to = batch.to;
            if !is_empty {
                batches.rows += batch.rows.len();
                batches.queue.push_back(batch);
            }
            while batches.queue.len() > 1 && batches.rows > self.rows_max {
                let oldest = batches.queue.pop_front().expect("there are at least two");
                batches.rows -= oldest.rows.len();
                batches.from = oldest.to;
            }
        }
        if !is_empty {
            self.pushed.send_modify(|count| *count = count.map(|count| count.wrapping_add(1)));
        }
    }

    /// Goes on at `to`, without what lies between: whoever has not walked so far is behind.
    pub fn skip_to(&self, to: Sequence) {
        {
            let mut batches = self.batches.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            *batches = Batches { queue: VecDeque::new(), rows: 0, from: to, to };
        }
        self.pushed.send_modify(|count| *count = count.map(|count| count.wrapping_add(1)));
    }

    /// What follows `cursor`.
    pub fn after(&self, cursor: Sequence) -> Next {
        let batches = self.read();
        if cursor < batches.from {
            return Next::Behind(batches.from);
        }
        let place = batches.queue.partition_point(|batch| batch.to <= cursor);
        match batches.queue.get(place) {
            Some(batch) => Next::Batch(Arc::clone(batch)),
            None => Next::UpToDate,
        }
    }

    /// Where the newest batch ends.
    pub fn position(&self) -> Sequence {
        self.read().to
    }

    /// Wakes at every push.
    pub fn pushes(&self) -> watch::Receiver<Option<u64>> {
        self.pushed.subscribe()
    }

    /// Ends the walkers once they have walked what there is.
    pub fn close(&self) {
        self.pushed.send_replace(None);
    }

    /// Whether the ring is closed.
    pub fn is_closed(&self) -> bool {
        self.pushed.borrow().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoding::{Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    fn batch(from: u64, to: u64, rows: usize) -> Arc<Batch> {
        let row = Arc::new(crate::notification::tests::row(at(to)));
        let rows = (0..rows).map(|_| Arc::clone(&row)).collect();
        Arc::new(Batch { rows, from: at(from), to: at(to), is_complete: true })
    }

    #[test]
    fn a_cursor_finds_its_batch_or_learns_that_it_is_behind() {
        let ring = Ring::new(at(10), 4);
        assert!(matches!(ring.after(at(10)), Next::UpToDate));
        assert!(matches!(ring.after(at(9)), Next::Behind(from) if from == at(10)));
        ring.push(batch(10, 20, 2));
        ring.push(batch(20, 30, 2));
        assert!(matches!(ring.after(at(10)), Next::Batch(found) if found.to == at(20)));
        assert!(matches!(ring.after(at(25)), Next::Batch(found) if found.to == at(30)));
        ring.push(batch(30, 40, 1));
        assert!(matches!(ring.after(at(15)), Next::Behind(from) if from == at(20)));
        assert!(matches!(ring.after(at(20)), Next::Batch(found) if found.to == at(30)));
        assert!(matches!(ring.after(at(40)), Next::UpToDate));
    }

    #[test]
    fn a_batch_larger_than_the_ring_is_kept_alone() {
        let ring = Ring::new(at(10), 1);
        ring.push(batch(10, 20, 5));
        assert!(matches!(ring.after(at(10)), Next::Batch(_)));
        ring.push(batch(20, 30, 1));
        assert!(matches!(ring.after(at(10)), Next::Behind(_)));
    }

    #[test]
    fn empty_batches_move_the_end_and_nothing_else() {
        let ring = Ring::new(at(10), 2);
        ring.push(batch(10, 20, 2));
        let pushes = ring.pushes();
        for n in 2..10 {
            ring.push(batch(n * 10, n * 10 + 10, 0));
        }
        assert_eq!(ring.position(), at(100));
        assert!(!pushes.has_changed().unwrap());
        assert!(matches!(ring.after(at(10)), Next::Batch(found) if found.to == at(20)));
        assert!(matches!(ring.after(at(20)), Next::UpToDate));
        ring.push(batch(100, 110, 1));
        assert!(matches!(ring.after(at(20)), Next::Batch(found) if found.to == at(110)));
    }
}
