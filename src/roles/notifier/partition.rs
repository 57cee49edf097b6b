//! The task of one partition: waits until there may be events, and folds until none are left.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Semaphore, SemaphorePermit};

use super::{
    fold::{Done, Folder, SIZE_MAX, SIZE_MIN},
    options::NotifierOptions,
    pace::Pace,
};
use crate::{
    base::{
        backoff::FAILURE_PAUSE,
        encoding::Sequence,
        error::{Error, Result, StoreError},
    },
    state::{
        context::Context,
        keys::Partition,
        membership::{Held, Stop},
    },
    store::Watch,
};

const FOLD: &str = "fold of a partition";

/// The maximum time that a long fold waits for its turn.
const TURN_WAIT_MAX: Duration = Duration::from_millis(100);

/// How many times in a row a doorbell may ring for nothing: a few extra rings for the events of one fold are no sign of trouble.
const USELESS_MAX: u32 = 4;

pub(super) struct Task {
    context: Arc<Context>,
    partition: Partition,
    lease: Held,
    options: NotifierOptions,
    /// How many folds were committed under the lease.
    folds: u64,
    /// The outcome of the last fold, if it failed but may have committed.
    unsettled: Done,
    /// Fires when another process rings; `None` if it has fired or could not be set.
    doorbell: Option<Watch>,
    /// Whether the doorbell caused this pass, and how many times in a row it has rung for nothing.
    has_rung: bool,
    useless: u32,
    /// The size of a fold's transaction, in bytes, at which the fold ends.
    size_max: usize,
    /// Decides how long to rest between passes.
    pace: Pace,
    /// Limits how many partitions run long folds at the same time.
    turns: Arc<Semaphore>,
    present: Present,
}

/// While this value exists, the producers of this process and the poll of the notifier see that a task works on the partition.
struct Present {
    context: Arc<Context>,
    partitions: HeldPartitions,
    /// The partition, and the epoch of its lease.
    lease: (Partition, u64),
}

impl Present {
    /// Records for the poll whether the last pass left rows in place.
    fn set_left(&self, has_left: bool) {
        self.partitions.lock().insert(self.lease, has_left);
    }

    fn enter(context: &Arc<Context>, partitions: &HeldPartitions, partition: Partition, epoch: u64) -> Self {
        context.signals.enter(partition);
        let lease = (partition, epoch);
        partitions.lock().insert(lease, false);
        Self { context: Arc::clone(context), partitions: partitions.clone(), lease }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        self.partitions.lock().remove(&self.lease);
        self.context.signals.leave(self.lease.0);
        self.context.stats.health.works(FOLD, self.lease.0.0.into());
    }
}

impl Task {
    pub fn new(
        context: Arc<Context>,
        lease: Held,
        options: NotifierOptions,
        partitions: &HeldPartitions,
        turns: &Arc<Semaphore>,
    ) -> Self {
        let partition = Partition(lease.resource as u32);
        Self {
            present: Present::enter(&context, partitions, partition, lease.epoch),
            context,
            partition,
            lease,
            options,
            folds: 0,
            unsettled: Done::default(),
            doorbell: None,
            has_rung: false,
            useless: 0,
            size_max: SIZE_MAX,
            pace: Pace::default(),
            turns: Arc::clone(turns),
        }
    }

    /// Folds until the task is asked to stop; fails if the lease is lost.
    pub async fn run(mut self, mut stop: Stop) -> Result<()> {
        loop {
            let folds = self.folds;
            let passed = self.pass(&stop).await;
            self.has_passed(self.folds > folds);
            match passed {
                Ok(()) => self.context.stats.health.works(FOLD, self.partition.0.into()),
                Err(error @ Error::LeaseLost { .. }) => return Err(error),
                Err(error) => {
                    // The remaining events wait for the failure to end, not for a ring.
                    self.present.set_left(true);
                    let Context { stats, .. } = &*self.context;
                    stats.health.failed(self.context.env(), FOLD, self.partition.0.into(), &error);
                    tokio::select! {
                        biased;
                        () = stop.requested() => return Ok(()),
                        () = self.context.env().sleep(FAILURE_PAUSE) => self.context.signals.wake(self.partition),
                    }
                }
            }
            tokio::select! {
                biased;
                () = stop.requested() => return Ok(()),
                () = self.wait() => {}
            }
        }
    }

    /// Folds all waiting events, unless the task is asked to stop in between.
    async fn pass(&mut self, stop: &Stop) -> Result<()> {
        if self.doorbell.is_none() && self.useless < USELESS_MAX {
            self.doorbell = listen(&self.context, self.partition).await;
        }
        let mut from = None;
        let mut settles = self.unsettled.committed;
        let mut has_left = false;
        loop {
            let folder = Folder {
                context: &self.context,
                partition: self.partition,
                lease: &self.lease,
                rows_max: self.options.fold_rows_max,
                size_max: self.size_max,
            };
            let env = self.context.env().clone();
            let turn = if self.pace.is_long() { turn(&self.context, &self.turns).await } else { None };
            let began = env.now();
            let folding = folder.fold(self.folds, from.as_ref(), &mut self.unsettled);
            let (outcome, computed) = env.measured(folding).await;
            drop(turn);
            self.pace.folded((began, env.now()), computed, &self.options);
            let done = match outcome {
                Err(error) if self.shrink(&error) => continue,
                done => done?,
            };
            self.size_max = self.size_max.saturating_add(self.size_max / 16).min(SIZE_MAX);
            has_left |= !done.skipped.is_empty();
            if done.committed {
                self.context.stats.fold_durations.add(self.context.env().now().saturating_sub(began));
            }
            self.account(&done);
            match done.next {
                Some(next) if !stop.is_requested() => from = Some(next),
                // The first fold may only have settled one of the last pass, whose events were read before this pass woke. Read again.
                None if settles && !stop.is_requested() => {
                    from = None;
                    settles = false;
                }
                _ => {
                    self.present.set_left(has_left);
                    return Ok(());
                }
            }
        }
    }

    /// Makes folds smaller if `error` says that one was too large or took too long. Returns whether the fold can be tried again.
    fn shrink(&mut self, error: &Error) -> bool {
        let codes = [StoreError::TRANSACTION_TOO_LARGE.code(), StoreError::TRANSACTION_TOO_OLD.code()];
        let is_too_much = error.code().is_some_and(|code| codes.contains(&code));
        if !is_too_much || self.size_max == SIZE_MIN {
            return false;
        }
        self.size_max = (self.size_max / 2).max(SIZE_MIN);
        true
    }

    /// Counts the outcome of a fold, and wakes readers of the feed.
    fn account(&mut self, done: &Done) {
        let Context { stats, wakeups, config, .. } = &*self.context;
        stats.fold_retries.add(done.retries);
        for (place, error) in &done.skipped {
            self.context.skip(place, error);
        }
        if !done.committed {
            return;
        }
        self.folds += 1;
        stats.folds.add(1);
        stats.add_folded(&done.folded);
        stats.stale_events.add(done.stale.total());
        stats.notifications.add(done.rows.into());
        if done.stale.total() > 0
            && let Some(unsaid) = stats.health.remark(self.context.env(), "stale events")
        {
            tracing::warn!(
                partition = self.partition.0,
                events = done.stale.total(),
                unsaid,
                "stale events are not delivered: their databases were replaced, or recorded under an instance that was never created"
            );
        }
        if done.rows > 0 {
            match done.version {
                Some(version) => wakeups.appended(done.lanes, Sequence::last_at(config.incarnation, version)),
                None => wakeups.look(),
            }
        }
    }

    /// Completes when events may be waiting and the pace allows a fold.
    async fn wait(&mut self) {
        self.hint().await;
        let env = self.context.env();
        let pause = self.pace.pause(env.now());
        if !pause.is_zero() {
            env.sleep(pause).await;
        }
    }

    /// Completes when events may be waiting.
    async fn hint(&mut self) {
        let context = &self.context;
        let env = context.env();
        let Some(doorbell) = &mut self.doorbell else {
            return context.signals.woken(self.partition).await;
        };
        tokio::select! {
            () = context.signals.woken(self.partition) => {}
            rung = doorbell => {
                self.doorbell = None;
                self.has_rung = rung.is_ok();
                if let Err(error) = rung {
                    // A watch can be refused even this late. Another watch might fail at once and cause a busy loop; the poll will find the
                    // events.
                    context.stats.health.complain(env, "watch of a doorbell", &error);
                    context.signals.woken(self.partition).await;
                }
            }
        }
    }

    /// Records the end of a pass. A doorbell that has rung for nothing too often is ignored until events are found without it.
    fn has_passed(&mut self, has_folded: bool) {
        if has_folded && self.useless >= USELESS_MAX {
            // Start another pass, which watches the doorbell again.
            self.context.signals.wake(self.partition);
        }
        let has_rung = std::mem::take(&mut self.has_rung);
        self.useless = if has_folded { 0 } else { self.useless + u32::from(has_rung) };
    }
}

/// Waits until a long fold may begin. If long folds share the processor, each takes as long as all of them together; if they take turns,
/// most finish sooner. Returns `None` if the others take too long, because they may be waiting for a part of the store.
async fn turn<'a>(context: &Context, turns: &'a Semaphore) -> Option<SemaphorePermit<'a>> {
    tokio::select! {
        biased;
        turn = turns.acquire() => turn.ok(),
        () = context.env().sleep(TURN_WAIT_MAX) => None,
    }
}

/// Sets a watch on the doorbell of `partition`, in a transaction that writes nothing. Tries only once: without a watch, the poll finds the
/// events.
async fn listen(context: &Context, partition: Partition) -> Option<Watch> {
    let (key, tx) = (context.keys.doorbell(partition), context.store.begin());
    let set = async {
        let watch = tx.watch(&key).await?;
        tx.commit().await?;
        Ok::<_, Error>(watch)
    };
    set.await
        .inspect_err(|error| context.stats.health.complain(context.env(), "watch of a doorbell", error))
        .ok()
}

/// The partitions on which a notifier works at the moment. Each has the epoch of its lease, and whether its last pass left rows in place
/// because they cannot be decoded.
#[derive(Debug, Clone, Default)]
pub(super) struct HeldPartitions(Arc<Mutex<BTreeMap<(Partition, u64), bool>>>);

impl HeldPartitions {
    /// Locks the map.
    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<(Partition, u64), bool>> {
        self.0.lock()
    }

    pub fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<_> = self.lock().keys().map(|(partition, _)| partition.0).collect();
        numbers.dedup();
        numbers
    }

    /// Whether the last pass of `partition` left rows in place.
    pub fn has_left(&self, partition: Partition) -> bool {
        self.lock().range((partition, 0)..=(partition, u64::MAX)).any(|(_, has_left)| *has_left)
    }
}
