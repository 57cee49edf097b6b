//! One fold: a transaction that takes counters and leaves notifications.
//!
//! It commits at most once, whatever happens: the lease and the fold mark are in its read-conflict set, so neither a
//! notifier that has lost the partition nor a second copy of the same fold can commit; and after an unknown result the
//! mark tells whether the first copy did. A commit that has timed out may even happen later: then it is the next attempt,
//! or the next call, that finds the mark moved.

use std::sync::Mutex;

use bytes::Bytes;
use futures_util::future::try_join_all;

use super::{algorithm, drain::Drain};
use crate::{
    bugs::{Bug, is_on},
    context::Context,
    encoding::Counters,
    error::{Error, Result},
    feed::{FeedWriter, RawFeed, Topology},
    keys::{FoldMark, Partition, sequence_operand},
    membership::Held,
    notification::Notification,
    store::{AtomicOp, Isolation, Transaction},
};

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
    /// Attempts that failed before.
    pub retries: u64,
}

/// Folds one partition, page by page.
pub(super) struct Folder<'a> {
    /// What the roles share.
    pub context: &'a Context,
    /// The partition.
    pub partition: Partition,
    /// The right to fold it.
    pub lease: &'a Held,
    /// The most rows of counters that one fold reads.
    pub rows_max: usize,
}

impl Folder<'_> {
    /// Folds what waits from the key `from` on, as fold number `fold + 1` of the lease's epoch.
    ///
    /// `unsettled` is what the last attempt at that number has done, if it failed and may have been committed all the
    /// same. After a failure it is again to be given to the next call.
    pub async fn fold(&self, fold: u64, from: Option<&Bytes>, unsettled: &mut Done) -> Result<Done> {
        let attempts = Mutex::new((0, std::mem::take(unsettled)));
        let result = self
            .context
            .db
            .run(async |tx| {
                attempts.lock().expect("no attempt panics").0 += 1;
                if self.is_committed(&tx, fold).await? {
                    // The last attempt was committed although its result was unknown.
                    let done = attempts.lock().expect("no attempt panics").1.clone();
                    return Ok(Done { committed: true, ..done });
                }
                let done = self.attempt(&tx, fold, from).await?;
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

    /// Whether fold number `fold + 1` was committed. Fails if the partition is another's.
    async fn is_committed(&self, tx: &Transaction, fold: u64) -> Result<bool> {
        let key = self.context.keys.fold_mark(self.partition);
        let isolation =
            if is_on(Bug::FoldWithoutMark) { Isolation::Snapshot } else { Isolation::Serializable };
        let (lease, mark) = tokio::join!(self.lease.check(tx), tx.get(&key, isolation));
        lease?;
        if is_on(Bug::FoldWithoutMark) {
            return Ok(false);
        }
        let mark = mark?.ok_or_else(|| Error::corrupt("fold mark", "it is missing"))?;
        match FoldMark::from_bytes(&mark)? {
            FoldMark { epoch, fold: found } if epoch == self.lease.epoch && found == fold => Ok(false),
            FoldMark { epoch, fold: found } if epoch == self.lease.epoch && found == fold + 1 => Ok(true),
            mark => Err(Error::corrupt(
                "fold mark",
                format!("it is at {mark:?}, the owner at fold {fold} of epoch {}", self.lease.epoch),
            )),
        }
    }

    /// One attempt, up to its commit.
    async fn attempt(&self, tx: &Transaction, fold: u64, from: Option<&Bytes>) -> Result<Done> {
        let Context { keys, config, .. } = self.context;
        let feed = RawFeed::notifications(self.context);
        let isolation =
            if is_on(Bug::TopologyNotInConflictSet) { Isolation::Snapshot } else { Isolation::Serializable };
        let (drain, topology) = tokio::join!(
            Drain::read(tx, keys, self.partition, from, self.rows_max),
            Topology::read(tx, feed, isolation),
        );
        let (drain, topology) = (drain?, topology?);
        let mut done = Done { next: drain.next.clone(), folded: drain.total(), ..Done::default() };
        if drain.names.is_empty() {
            return Ok(done);
        }

        let present =
            drain.names.iter().map(|(name, _)| feed.newest_of(tx, &topology, name.as_str().as_bytes()));
        let present = try_join_all(present).await?;
        let mut writer = FeedWriter::new(tx, feed, &topology);
        for ((name, waiting), present) in drain.names.into_iter().zip(present) {
            waiting.subtract(tx);
            let previous = present.as_ref().map(|row| row.sequence);
            let present =
                present.map(|row| Notification::from_bytes(row.sequence, &row.value)).transpose()?;
            let before = present.as_ref().map(Notification::db);
            let observed = waiting.observed.clone().into_iter().collect();
            let folded = algorithm::fold(&name, present, observed, self.context.env().wall_ms());
            done.stale += folded.stale;
            let Some(row) = folded.row else { continue };
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
        }
        done.rows = writer.finish();
        if is_on(Bug::WatchInWritingTransaction) {
            drop(tx.watch(&keys.doorbell(self.partition)).await?);
        }
        let mark = FoldMark { epoch: self.lease.epoch, fold: fold + 1 };
        tx.set(&keys.fold_mark(self.partition), &mark.to_bytes());
        done.committed = true;
        Ok(done)
    }
}
