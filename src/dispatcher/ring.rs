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

use super::wake;
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
    /// Nothing yet. Whoever has walked so far knows everything up to the position that is given.
    UpToDate(Sequence),
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
    /// Counts how often the walkers were woken, and wakes them; `None` once the ring is closed.
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
    /// Where the newest ends after which there was nothing more to read.
    complete_to: Sequence,
}

impl Batches {
    /// None, at `at`.
    fn empty(at: Sequence) -> Self {
        Self { queue: VecDeque::new(), rows: 0, from: at, to: at, complete_to: at }
    }
}

impl Ring {
    /// An empty ring at `start`.
    pub fn new(start: Sequence, rows_max: usize) -> Self {
        let batches = Batches::empty(start);
        Self { batches: RwLock::new(batches), rows_max, pushed: watch::Sender::new(Some(0)) }
    }

    /// The batches. No holder of the lock can panic with them half changed.
    fn read(&self) -> RwLockReadGuard<'_, Batches> {
        self.batches.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Appends a batch, which begins where the ring ends, and drops the oldest ones above the limit. A batch without rows
    /// only moves the end, and takes up no room. Nobody is woken.
    pub fn push(&self, batch: Arc<Batch>) {
        let mut batches = self.batches.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        assert_eq!(batches.to, batch.from, "batches follow each other without a gap");
        batches.to = batch.to;
        if batch.is_complete {
            batches.complete_to = batch.to;
        }
        if !batch.rows.is_empty() {
            batches.rows += batch.rows.len();
            batches.queue.push_back(batch);
        }
        while batches.queue.len() > 1 && batches.rows > self.rows_max {
            let oldest = batches.queue.pop_front().expect("there are at least two");
            batches.rows -= oldest.rows.len();
            batches.from = oldest.to;
        }
    }

    /// Goes on at `to`, without what lies between: whoever has not walked so far is behind. Nobody is woken.
    pub fn skip_to(&self, to: Sequence) {
        let mut batches = self.batches.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        *batches = Batches::empty(to);
    }

    /// Wakes the walkers, once all that they are woken for is done. Whether all were: if the waker of one panics, others are
    /// left asleep.
    pub fn wake(&self) -> bool {
        wake::guarded(|| self.pushed.send_modify(|count| *count = count.map(|count| count.wrapping_add(1))))
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
            None => Next::UpToDate(batches.complete_to),
        }
    }

    /// All batches that follow `cursor`, and the position up to which whoever has walked them knows everything; or what
    /// [`Ring::after`] says.
    pub fn all_after(&self, cursor: Sequence) -> Result<(Vec<Arc<Batch>>, Sequence), Next> {
        let batches = self.read();
        if cursor < batches.from {
            return Err(Next::Behind(batches.from));
        }
        let place = batches.queue.partition_point(|batch| batch.to <= cursor);
        let found = batches.queue.range(place..).take_while(|batch| batch.to <= batches.complete_to);
        let found: Vec<_> = found.cloned().collect();
        if found.is_empty() {
            Err(Next::UpToDate(batches.complete_to))
        } else {
            Ok((found, batches.complete_to))
        }
    }

    /// Where the newest batch ends.
    pub fn position(&self) -> Sequence {
        self.read().to
    }

    /// Whether there was nothing more to read after the newest batch.
    pub fn is_complete(&self) -> bool {
        let batches = self.read();
        batches.to == batches.complete_to
    }

    /// Wakes at every push.
    pub fn pushes(&self) -> watch::Receiver<Option<u64>> {
        self.pushed.subscribe()
    }

    /// Ends the walkers once they have walked what there is. Says what [`Ring::wake`] does.
    pub fn close(&self) -> bool {
        wake::guarded(|| _ = self.pushed.send_replace(None))
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
        assert!(matches!(ring.after(at(10)), Next::UpToDate(_)));
        assert!(matches!(ring.after(at(9)), Next::Behind(from) if from == at(10)));
        ring.push(batch(10, 20, 2));
        ring.push(batch(20, 30, 2));
        assert!(matches!(ring.after(at(10)), Next::Batch(found) if found.to == at(20)));
        assert!(matches!(ring.after(at(25)), Next::Batch(found) if found.to == at(30)));
        ring.push(batch(30, 40, 1));
        assert!(matches!(ring.after(at(15)), Next::Behind(from) if from == at(20)));
        assert!(matches!(ring.after(at(20)), Next::Batch(found) if found.to == at(30)));
        assert!(matches!(ring.after(at(40)), Next::UpToDate(_)));
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
    fn what_is_not_complete_is_not_known() {
        let ring = Ring::new(at(10), 10);
        let part = |from, to, is_complete| {
            Arc::new(Batch { is_complete, ..Arc::into_inner(batch(from, to, 1)).unwrap() })
        };
        ring.push(part(10, 20, true));
        ring.push(part(20, 30, false));
        assert!(matches!(ring.after(at(30)), Next::UpToDate(known) if known == at(20)));
        let (batches, known) = ring.all_after(at(10)).ok().unwrap();
        assert_eq!((batches.len(), known), (1, at(20)));
        assert!(matches!(ring.all_after(at(20)), Err(Next::UpToDate(known)) if known == at(20)));
        ring.push(part(30, 40, true));
        let (batches, known) = ring.all_after(at(20)).ok().unwrap();
        assert_eq!((batches.len(), known), (2, at(40)));
        ring.push(batch(40, 50, 0));
        assert!(matches!(ring.after(at(40)), Next::UpToDate(known) if known == at(50)));
    }

    #[test]
    fn empty_batches_move_the_end_and_nothing_else() {
        let ring = Ring::new(at(10), 2);
        ring.push(batch(10, 20, 2));
        for n in 2..10 {
            ring.push(batch(n * 10, n * 10 + 10, 0));
        }
        assert_eq!(ring.position(), at(100));
        assert!(matches!(ring.after(at(10)), Next::Batch(found) if found.to == at(20)));
        assert!(matches!(ring.after(at(20)), Next::UpToDate(_)));
        ring.push(batch(100, 110, 1));
        assert!(matches!(ring.after(at(20)), Next::Batch(found) if found.to == at(110)));
    }
}
