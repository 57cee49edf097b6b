//! One fold: a transaction that takes counters and leaves notifications.
//!
//! It commits at most once, whatever happens: the lease and the fold mark are in its read-conflict set, so neither a
//! notifier that has lost the partition nor a second copy of the same fold can commit; and after an unknown result the
//! mark tells whether the first copy did. A commit that has timed out may even happen later: then it is the next attempt,
//! or the next call, that finds the mark moved.
//!
//! Nothing that stands in the store stops it. It asks the store how large it has become, and leaves to the next one what would make
//! it too large; and it goes on without what cannot be decoded: a row of counters, or a name whose present row is none. A mark
//! that says nothing that could be is replaced: whatever it should have said, what was folded was subtracted, and a copy of a fold
//! that is still under way has the mark in its read-conflict set.

use std::sync::Mutex;

use bytes::Bytes;
use futures_util::future::try_join_all;
use tokio::task::coop;

use super::{
    algorithm,
    drain::{Drain, Waiting},
};
use crate::{
    base::{
        bugs::{Bug, is_on},
        encoding::Counters,
        error::{Error, Result},
        event::DbName,
        notification::Notification,
    },
    state::{
        context::Context,
        feed::{FeedWriter, RawFeed, Topology},
        keys::{FoldMark, Partition, sequence_operand},
        membership::Held,
        skipped::Place,
    },
    store::{AtomicOp, Isolation, KeyRange, TRANSACTION_LEN_MAX, Transaction},
};

/// Bytes at which a fold ends: half of what a transaction may have, so that the name in hand has room in any case.
pub(super) const SIZE_MAX: usize = TRANSACTION_LEN_MAX / 2;

/// The least size at which a fold that was too large is tried again.
pub(super) const SIZE_MIN: usize = 1_000;

/// How often a row that is read is written at least: its key stands in two operations, and the store counts each key of an
/// operation three times. To read more than can be written would be in vain.
const WRITTEN_MIN: usize = 6;

/// How often a fold is tried before it is tried at half the size.
const TRIES_OF_A_SIZE: u64 = 4;

/// After how many bytes of rows that were folded it asks for its size, which costs a cluster's client a turn of its thread.
const MEASURED_BYTES: usize = 16_384;

/// What one fold has done, or would have done if nothing waited.
#[derive(Debug, Clone, Default)]
pub(super) struct Done {
    /// Events subtracted from the counters.
    pub folded: Counters,
    /// Those of them that belonged to instances replaced before.
    pub stale: Counters,
    /// Rows written.
    pub rows: u16,
    /// From where the next fold goes on; `None` if nothing was left.
    pub next: Option<Bytes>,
    /// Whether anything was written at all.
    pub committed: bool,
    /// Why it has replaced the fold mark, if it has.
    pub replaced_mark: Option<Error>,
    /// Rows that it went on without, as they cannot be decoded.
    pub skipped: Vec<(Place, Error)>,
    /// Attempts that failed before.
    pub retries: u64,
}

/// What the fold mark says of the fold in hand.
enum Mark {
    /// The one before it was the last.
    Before,
    /// It was committed.
    Committed,
    /// Nothing that could be.
    Damaged(Error),
}

/// Folds one partition, page by page.
#[derive(Clone, Copy)]
pub(super) struct Folder<'a> {
    pub context: &'a Context,
    pub partition: Partition,
    /// The right to fold it.
    pub lease: &'a Held,
    /// The most rows of counters that one fold reads.
    pub rows_max: usize,
    /// Bytes of the transaction at which it ends.
    pub size_max: usize,
}

impl Folder<'_> {
    /// Folds what waits from the key `from` on, as fold number `fold + 1` of the lease's epoch.
    ///
    /// `unsettled` is what the last attempt at that number has done, if it failed and may have been committed all the
    /// same. After a failure it is again to be given to the next call.
    pub async fn fold(&self, fold: u64, from: Option<&Bytes>, unsettled: &mut Done) -> Result<Done> {
        let attempts = Mutex::new((0_u64, std::mem::take(unsettled)));
        let result = self
            .context
            .db
            .run(async |tx| {
                let earlier = attempts.lock().expect("no attempt panics").0;
                attempts.lock().expect("no attempt panics").0 += 1;
                let replaced_mark = match self.mark(&tx, fold).await? {
                    Mark::Before => None,
                    Mark::Committed => {
                        // The last attempt was committed although its result was unknown.
                        let done = attempts.lock().expect("no attempt panics").1.clone();
                        return Ok(Done { committed: true, ..done });
                    }
                    Mark::Damaged(error) => Some(error),
                };
                // One that takes too long must become shorter at some time.
                let size_max = (self.size_max >> (earlier / TRIES_OF_A_SIZE).min(16)).max(SIZE_MIN);
                let done = Folder { size_max, ..*self }.attempt(&tx, fold, from, replaced_mark).await?;
                attempts.lock().expect("no attempt panics").1 = done.clone();
                Ok(done)
            })
            .await;
        let (attempts, last) = attempts.into_inner().expect("no attempt panics");
        match result {
            Ok(done) => Ok(Done { retries: attempts - 1, ..done }),
            Err(error) => {
                *unsettled = last;
                Err(error)
            }
        }
    }

    /// What the mark says of fold number `fold + 1`. Fails if the partition is another's.
    async fn mark(&self, tx: &Transaction, fold: u64) -> Result<Mark> {
        let key = self.context.keys.fold_mark(self.partition);
        let isolation =
            if is_on(Bug::FoldWithoutMark) { Isolation::Snapshot } else { Isolation::Serializable };
        let (lease, mark) = tokio::join!(self.lease.check(tx), tx.get(&key, isolation));
        lease?;
        if is_on(Bug::FoldWithoutMark) {
            return Ok(Mark::Before);
        }
        let damaged = |reason: String| Mark::Damaged(Error::corrupt("fold mark", reason));
        let Some(mark) = mark? else { return Ok(damaged("it is missing".to_owned())) };
        Ok(match FoldMark::from_bytes(&mark) {
            Ok(FoldMark { epoch, fold: found }) if epoch == self.lease.epoch && found == fold => Mark::Before,
            Ok(FoldMark { epoch, fold: found }) if epoch == self.lease.epoch && found == fold + 1 => {
                Mark::Committed
            }
            Ok(mark) => {
                damaged(format!("it is at {mark:?}, the owner at fold {fold} of epoch {}", self.lease.epoch))
            }
            Err(error) => Mark::Damaged(error),
        })
    }

    /// One attempt, up to its commit.
    async fn attempt(
        &self,
        tx: &Transaction,
        fold: u64,
        from: Option<&Bytes>,
        replaced_mark: Option<Error>,
    ) -> Result<Done> {
        let Context { keys, .. } = self.context;
        let feed = RawFeed::notifications(self.context);
        let isolation =
            if is_on(Bug::TopologyNotInConflictSet) { Isolation::Snapshot } else { Isolation::Serializable };
        let bytes_max = (self.size_max / WRITTEN_MIN).max(1);
        let (drain, topology) = tokio::join!(
            Drain::read(tx, keys, self.partition, from, (self.rows_max, bytes_max)),
            Topology::read(tx, feed, isolation),
        );
        let (drain, topology) = (drain?, topology?);
        let committed = replaced_mark.is_some();
        let mut done = Done { next: drain.next, committed, replaced_mark, ..Done::default() };
        done.skipped.extend(drain.broken.into_iter().map(|(key, error)| (Place::Key(key), error)));
        let present = drain.names.iter().map(|(name, _)| self.present(tx, &topology, name));
        let present = try_join_all(present).await?;

        let mut writer = FeedWriter::new(tx, feed, &topology);
        let (mut unmeasured, mut is_full) = (0, false);
        for ((name, waiting), present) in drain.names.into_iter().zip(present) {
            if is_full {
                done.next = Some(keys.drains_of(self.partition, &name).begin);
                break;
            }
            let present = match present {
                Ok(present) => present,
                Err(skipped) => {
                    done.skipped.push(skipped);
                    continue;
                }
            };
            // Nothing of this waits for the store, and others must have their turn.
            coop::consume_budget().await;
            self.fold_name(tx, &mut writer, (&name, &waiting), present, &mut done)?;
            done.committed = true;
            unmeasured += waiting.len();
            if unmeasured >= MEASURED_BYTES.min(bytes_max) && !is_on(Bug::FoldNotMeasured) {
                is_full = tx.approximate_size().await? >= self.size_max;
                unmeasured = 0;
            }
        }
        if !done.committed {
            return Ok(done);
        }
        done.rows = writer.finish();
        if is_on(Bug::WatchInWritingTransaction) {
            drop(tx.watch(&keys.doorbell(self.partition)).await?);
        }
        let mark = FoldMark { epoch: self.lease.epoch, fold: fold + 1 };
        tx.set(&keys.fold_mark(self.partition), &mark.to_bytes());
        Ok(done)
    }

    /// The present row of `name`, if it has one; or, inside, where there is something that cannot be decoded.
    async fn present(
        &self,
        tx: &Transaction,
        topology: &Topology,
        name: &DbName,
    ) -> Result<Result<Option<Notification>, (Place, Error)>> {
        let feed = RawFeed::notifications(self.context);
        let id = name.as_str().as_bytes();
        let (place, error) = match feed.newest_of(tx, topology, id).await {
            Ok(None) => return Ok(Ok(None)),
            Ok(Some(row)) => match Notification::from_bytes(row.sequence, &row.value) {
                Ok(row) => return Ok(Ok(Some(row))),
                Err(error) => (Place::Row(feed.id.clone(), row.sequence), error),
            },
            Err(error @ Error::Corrupt { .. }) => {
                (Place::Key(self.context.keys.newest(feed.id, id).into()), error)
            }
            Err(error) => return Err(error),
        };
        if is_on(Bug::BrokenRowStops) { Err(error) } else { Ok(Err((place, error))) }
    }

    /// Folds what waits for `name` into its `present` row.
    fn fold_name(
        &self,
        tx: &Transaction,
        writer: &mut FeedWriter<'_>,
        (name, waiting): (&DbName, &Waiting),
        present: Option<Notification>,
        done: &mut Done,
    ) -> Result<()> {
        let Context { keys, config, .. } = self.context;
        waiting.subtract(tx);
        done.folded += waiting.total();
        let previous = present.as_ref().map(|row| row.sequence);
        if present.as_ref().is_some_and(Notification::is_deleted) {
            // A janitor may be about to drop it. Who removes a row counts it off, so only one of the two may.
            let newest = keys.newest(&self.context.feed, name.as_str().as_bytes());
            tx.add_read_conflict(&KeyRange::key(&newest));
        }
        let before = present.as_ref().map(Notification::db);
        let observed = waiting.observed.clone().into_iter().collect();
        let folded = algorithm::fold(name, present, observed, self.context.env().wall_ms());
        done.stale += folded.stale;
        let Some(row) = folded.row else { return Ok(()) };
        let order = writer.replace(name.as_str().as_bytes(), previous, &row.to_bytes())?;
        // What is told of design documents lasts as long as their database.
        let gone = before.filter(|before| row.is_deleted() || before.instance != row.instance);
        if let Some(before) = gone.filter(|_| !is_on(Bug::DdocsLeft)) {
            tx.clear_range(&keys.ddocs(&before));
        }
        let db = row.db();
        for id in waiting.ddocs_of(&db).filter(|_| !row.is_deleted()) {
            let told = sequence_operand(config.incarnation, order);
            tx.atomic(AtomicOp::SetVersionstampedValue, &keys.ddoc(&db, id), &told);
        }
        Ok(())
    }
}
