//! The task of one partition: waits until events may be there, and folds until none are left.

use std::{sync::Arc, time::Duration};

use super::{
    Held, HeldPartitions, NotifierOptions,
    fold::{Done, Folder},
};
use crate::{
    context::Context,
    error::{Error, Result},
    keys::Partition,
    membership::Stop,
    store::Watch,
};

/// How long a task pauses after a failure that its transaction could not mend.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// The task of one partition.
pub(super) struct Task {
    /// What the roles share.
    context: Arc<Context>,
    /// The partition.
    partition: Partition,
    /// The right to fold it.
    lease: Held,
    /// How to work.
    options: NotifierOptions,
    /// Folds committed under the lease.
    folds: u64,
    /// What the last fold has done, if it failed and may have been committed all the same.
    unsettled: Done,
    /// Fires when another process rings; `None` if it has, or could not be set.
    doorbell: Option<Watch>,
    /// When the last pass began.
    passed: Option<Duration>,
    /// Tells others of the task as long as it is there.
    _present: Present,
}

/// Tells producers of this process, and the poll of the notifier, that a task works on the partition.
struct Present {
    /// What the roles share.
    context: Arc<Context>,
    /// What the notifier holds.
    partitions: HeldPartitions,
    /// The partition, and the epoch of its lease.
    lease: (Partition, u64),
}

impl Present {
    /// From now on, until it is dropped.
    fn enter(context: &Arc<Context>, partitions: &HeldPartitions, partition: Partition, epoch: u64) -> Self {
        context.signals.enter(partition);
        let lease = (partition, epoch);
        partitions.lock().insert(lease);
        Self { context: Arc::clone(context), partitions: partitions.clone(), lease }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        self.partitions.lock().remove(&self.lease);
        self.context.signals.leave(self.lease.0);
    }
}

impl Task {
    /// A task that holds `lease`.
    pub fn new(
        context: Arc<Context>,
        lease: Held,
        options: NotifierOptions,
        partitions: &HeldPartitions,
    ) -> Self {
        let partition = Partition(lease.resource as u32);
        Self {
            _present: Present::enter(&context, partitions, partition, lease.epoch),
            context,
            partition,
            lease,
            options,
            folds: 0,
            unsettled: Done::default(),
            doorbell: None,
            passed: None,
        }
    }

    /// Folds until it is told to stop; fails when it has lost the lease.
    pub async fn run(mut self, mut stop: Stop) -> Result<()> {
        loop {
            match self.pass(&stop).await {
                Ok(()) => {}
                Err(error @ Error::LeaseLost { .. }) => return Err(error),
                Err(error) => {
                    tracing::error!(partition = self.partition.0, %error, "fold failed, trying again");
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

    /// Folds everything that waits, unless it is told to stop in between.
    async fn pass(&mut self, stop: &Stop) -> Result<()> {
        let env = self.context.env().clone();
        self.passed = Some(env.now());
        if self.doorbell.is_none() {
            self.doorbell = listen(&self.context, self.partition).await;
        }
        let mut from = None;
        let mut settles = self.unsettled.committed;
        loop {
            let folder = Folder {
                context: &self.context,
                partition: self.partition,
                lease: &self.lease,
                rows_max: self.options.fold_rows_max,
            };
            let done = folder.fold(self.folds, from.as_ref(), &mut self.unsettled).await?;
            self.account(&done);
            match done.next {
                Some(next) if !stop.is_requested() => from = Some(next),
                // The first fold may have been that of the last pass, which did not see what has woken this one.
                None if settles && !stop.is_requested() => {
                    from = None;
                    settles = false;
                }
                _ => return Ok(()),
            }
        }
    }

    /// Counts what a fold has done, and tells readers of the feed.
    fn account(&mut self, done: &Done) {
        let Context { stats, signals, .. } = &*self.context;
        stats.fold_retries.add(done.retries);
        if !done.committed {
            return;
        }
        self.folds += 1;
        stats.folds.add(1);
        stats.add_folded(&done.folded);
        stats.stale_events.add(done.stale.total());
        stats.notifications.add(done.rows.into());
        if done.stale.total() > 0 {
            tracing::warn!(
                partition = self.partition.0,
                events = done.stale.total(),
                "events of replaced databases"
            );
        }
        if done.rows > 0 {
            signals.appended();
        }
    }

    /// Completes when events may be there and the pace allows a fold.
    async fn wait(&mut self) {
        self.hint().await;
        if let Some(passed) = self.passed {
            let env = self.context.env();
            let pause = passed.saturating_add(self.options.fold_interval).saturating_sub(env.now());
            if !pause.is_zero() {
                env.sleep(pause).await;
            }
        }
    }

    /// Completes when events may be there.
    async fn hint(&mut self) {
        match &mut self.doorbell {
            None => self.context.signals.woken(self.partition).await,
            Some(doorbell) => tokio::select! {
                () = self.context.signals.woken(self.partition) => {}
                rung = doorbell => {
                    self.doorbell = None;
                    if let Err(error) = rung {
                        // A watch can be refused as late as this. Asking for another at once would go round and round;
                        // the poll finds what rings.
                        tracing::warn!(partition = self.partition.0, %error, "no watch, polling instead");
                        self.context.signals.woken(self.partition).await;
                    }
                }
            },
        }
    }
}

/// Sets a watch on the doorbell of `partition`, in a transaction that writes nothing. Without one, the poll finds what
/// rings.
async fn listen(context: &Context, partition: Partition) -> Option<Watch> {
    let key = &context.keys.doorbell(partition);
    let watch = context.db.run(async |tx| tx.watch(key).await).await;
    watch
        .inspect_err(|error| tracing::warn!(partition = partition.0, %error, "no watch, polling instead"))
        .ok()
}
