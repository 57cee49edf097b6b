//! [`Hub`]: what has come lately, in memory, shared by all live feeds of `_db_updates`.
//!
//! One task subscribes to everything and puts what it is told into batches. A live feed walks them with a position of its own;
//! the bytes of a batch are made once for all feeds that look alike, and a feed that waits costs nothing but its memory. A feed
//! that falls behind reads the store, where each database has one row, and comes back.

use std::{
    collections::VecDeque,
    sync::{Arc, RwLock, RwLockReadGuard},
    time::Duration,
};

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio_stream::StreamExt;

use super::row::{Batch, Reading};
use crate::{
    dispatcher::{Delivery, Interruption, Subscription},
    encoding::Sequence,
    env::Env,
    notification::Notification,
};

/// The most rows that are put into one batch before others get their turn.
const BATCH_ROWS_MAX: usize = 4_096;

/// How long the task pauses when the feed could not be read.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// What follows a position.
pub(super) enum Next {
    /// The batch that holds what comes after it.
    Batch(Arc<Batch>),
    /// Nothing yet.
    UpToDate,
    /// It is no longer held: read the store.
    Behind,
}

/// The recent batches.
#[derive(Debug)]
pub(super) struct Hub {
    /// The batches.
    batches: RwLock<Batches>,
    /// The most rows that they hold together.
    rows_max: usize,
    /// Counts changes, and wakes those who wait.
    changed: watch::Sender<u64>,
}

/// The part of a hub behind its lock.
#[derive(Debug)]
struct Batches {
    /// The batches, oldest first; each begins where the one before ends.
    queue: VecDeque<Arc<Batch>>,
    /// Their rows together.
    rows: usize,
    /// Where the oldest begins.
    from: Sequence,
    /// Where the newest ends.
    to: Sequence,
}

impl Hub {
    /// A hub that begins at `start`, and holds at most `rows_max` rows, or one batch.
    pub fn new(start: Sequence, rows_max: usize) -> Self {
        let batches = Batches { queue: VecDeque::new(), rows: 0, from: start, to: start };
        Self { batches: RwLock::new(batches), rows_max, changed: watch::Sender::new(0) }
    }

    /// The batches. No holder of the lock can panic with them half changed.
    fn read(&self) -> RwLockReadGuard<'_, Batches> {
        self.batches.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// What follows `position`.
    pub fn after(&self, position: Sequence) -> Next {
        let batches = self.read();
        if position < batches.from {
            return Next::Behind;
        }
        let place = batches.queue.partition_point(|batch| batch.to <= position);
        batches.queue.get(place).map_or(Next::UpToDate, |batch| Next::Batch(Arc::clone(batch)))
    }

    /// Wakes when something has come since this was called.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Appends `rows`, told to one who knew everything up to `since`, and now knows everything up to `to`.
    fn push(&self, rows: Vec<Arc<Notification>>, since: Sequence, to: Sequence) {
        let mut batches = self.batches.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        let from = batches.to;
        if rows.is_empty() || to <= from {
            batches.to = from.max(to);
            return;
        }
        let reading = Reading { since, began: to, horizon: Sequence::ZERO, is_complete: true };
        batches.rows += rows.len();
        batches.queue.push_back(Arc::new(Batch::new(rows, to, reading)));
        batches.to = to;
        while batches.queue.len() > 1 && batches.rows > self.rows_max {
            let oldest = batches.queue.pop_front().expect("there are at least two");
            batches.rows -= oldest.len();
            batches.from = oldest.to;
        }
        drop(batches);
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Forgets everything, and goes on at `to`: whoever has not come so far reads the store.
    fn skip_to(&self, to: Sequence) {
        {
            let mut batches = self.batches.write().unwrap_or_else(std::sync::PoisonError::into_inner);
            let to = to.max(batches.to);
            *batches = Batches { queue: VecDeque::new(), rows: 0, from: to, to };
        }
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// What was told, and is not yet all that was to be told at once.
struct Told {
    /// The rows.
    rows: Vec<Arc<Notification>>,
    /// What was known before them.
    since: Sequence,
    /// Whether everything is being told anew, which the feeds read from the store.
    is_anew: bool,
}

impl Told {
    /// Adds what was told, after pushing what was told to one who knew less.
    fn add(&mut self, delivery: &Delivery, hub: &Hub) {
        if delivery.since() != self.since {
            self.finish(delivery.since(), hub);
        }
        if !self.is_anew {
            self.rows.push(Arc::clone(delivery.notification()));
        }
    }

    /// Pushes the rows: now everything up to `known` is known.
    fn finish(&mut self, known: Sequence, hub: &Hub) {
        if std::mem::take(&mut self.is_anew) {
            hub.skip_to(known);
        }
        hub.push(std::mem::take(&mut self.rows), self.since, known);
        self.since = known;
    }
}

/// Puts what `updates` tells into `hub`, until the dispatcher ends.
pub(super) async fn run(hub: Arc<Hub>, mut updates: Subscription, env: Env) {
    let mut told = Told { rows: Vec::new(), since: hub.read().to, is_anew: false };
    while let Some(first) = updates.next().await {
        let mut next = Some(first);
        while let Some(item) = next.take() {
            match item {
                Ok(delivery) => told.add(&delivery, &hub),
                Err(Interruption::Failed(error)) => {
                    tracing::error!(%error, "the feed cannot be read, trying again");
                    env.sleep(FAILURE_PAUSE).await;
                }
                // It begins anew, and tells what the feeds know already; they read the store until it has come so far.
                Err(Interruption::Expired { .. } | Interruption::Lagged { .. }) => {
                    told = Told { rows: Vec::new(), since: Sequence::ZERO, is_anew: true };
                }
            }
            if told.rows.len() < BATCH_ROWS_MAX {
                next = updates.next().now_or_never().flatten();
            }
        }
        let known = updates.position();
        let last = told.rows.last().map_or(Sequence::ZERO, |row| row.sequence);
        if known >= last && known > Sequence::ZERO {
            told.finish(known, &hub);
        } else if told.rows.len() >= hub.rows_max {
            // More than is kept: the feeds will read it.
            told.rows.clear();
            hub.skip_to(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        encoding::{Incarnation, Versionstamp},
        notification::tests::row,
    };

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    fn rows(versions: &[u64]) -> Vec<Arc<Notification>> {
        versions.iter().map(|&version| Arc::new(row(at(version)))).collect()
    }

    #[test]
    fn a_position_finds_its_batch_or_learns_that_it_is_behind() {
        let hub = Hub::new(at(10), 3);
        assert!(matches!(hub.after(at(10)), Next::UpToDate));
        assert!(matches!(hub.after(at(9)), Next::Behind));
        hub.push(rows(&[12, 14]), at(10), at(20));
        hub.push(Vec::new(), at(20), at(30));
        hub.push(rows(&[31]), at(30), at(40));
        assert!(
            matches!(hub.after(at(13)), Next::Batch(batch) if batch.to == at(20) && batch.place_after(at(13)) == 1)
        );
        assert!(matches!(hub.after(at(25)), Next::Batch(batch) if batch.to == at(40)));
        hub.push(rows(&[41]), at(40), at(50));
        assert!(matches!(hub.after(at(19)), Next::Behind), "the oldest batch has made room");
        assert!(matches!(hub.after(at(20)), Next::Batch(batch) if batch.to == at(40)));
        hub.skip_to(at(60));
        assert!(matches!(hub.after(at(50)), Next::Behind));
        assert!(matches!(hub.after(at(70)), Next::UpToDate));
    }

    #[test]
    fn those_who_wait_are_woken_by_rows_and_by_gaps_only() {
        let hub = Hub::new(at(10), 3);
        let mut changes = hub.changes();
        hub.push(Vec::new(), at(10), at(20));
        assert!(!changes.has_changed().unwrap());
        hub.push(rows(&[21]), at(20), at(30));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        hub.skip_to(at(40));
        assert!(changes.has_changed().unwrap());
    }

    #[test]
    fn feeds_that_look_alike_share_their_bytes() {
        use crate::{event::Kinds, http::form::Form};
        let hub = Hub::new(at(10), 3);
        hub.push(rows(&[21]), at(10), at(30));
        let Next::Batch(batch) = hub.after(at(10)) else { panic!() };
        let looks = [Form::Lines, Form::Lines, Form::Events].map(|form| batch.look(form, Kinds::ALL));
        assert_eq!(looks[0].bytes.as_ptr(), looks[1].bytes.as_ptr());
        assert_ne!(looks[0].bytes, looks[2].bytes);
        assert_eq!(looks[0].rows, 1);
    }
}
