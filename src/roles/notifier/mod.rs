//! [`Notifier`]: the role that folds counters into the feed.
//!
//! The partitions are divided among all nodes that are notifiers ([`membership`](crate::state::membership)). For each partition whose lease
//! it holds there is one task ([`partition`]). It sleeps until it is woken: directly by a
//! producer of the same process, by the partition's doorbell, or by the poll of the notifier ([`poll`]), which makes good
//! what hints have missed. A fold ([`fold`]) is one transaction; what it makes of a database's counters is decided by a
//! pure function ([`algorithm`]).

mod algorithm;
mod drain;
mod fold;
mod pace;
mod partition;
mod poll;
#[cfg(feature = "http")]
mod standing;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

#[cfg(feature = "http")]
pub(crate) use self::standing::standing;
use futures_util::{FutureExt, future::BoxFuture};
use tokio::task::JoinSet;

use crate::{
    base::error::{Error, Result},
    state::{
        context::Context,
        keys::{FoldMark, Partition, Role},
        membership::{BalanceOptions, Held, Member, Pool, Stop, Work, Worker},
    },
    store::Transaction,
};

/// How a notifier works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotifierOptions {
    /// How it takes its part of the partitions.
    pub balance: BalanceOptions,
    /// The most of its time that a partition is folded, in percent, 1 to 100: after a fold it pauses accordingly, so that a slow
    /// store coalesces more. Default: 25.
    pub fold_percent: u8,
    /// The longest such pause. Zero folds without a pause. Default: 25 ms.
    pub fold_interval_max: Duration,
    /// How often it looks for events whose ring never came. Default: 1 s.
    pub poll_interval: Duration,
    /// The most rows of counters that one fold reads. Default: 1,000.
    pub fold_rows_max: usize,
}

impl Default for NotifierOptions {
    fn default() -> Self {
        Self {
            balance: BalanceOptions::default(),
            fold_percent: 25,
            fold_interval_max: Duration::from_millis(25),
            poll_interval: Duration::from_secs(1),
            fold_rows_max: 1_000,
        }
    }
}

impl NotifierOptions {
    /// Fails if an option is out of its limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll interval", "it is zero"));
        }
        if !(1..=100).contains(&self.fold_percent) {
            return Err(Error::invalid("fold percent", format!("{} is not 1 to 100", self.fold_percent)));
        }
        self.balance.check()?;
        // One database can have a row of counters, one of its last update and a design document; a fold must get on.
        if !(10..=10_000).contains(&self.fold_rows_max) {
            return Err(Error::invalid("fold rows", format!("{} is not 10 to 10,000", self.fold_rows_max)));
        }
        Ok(())
    }
}

/// The partitions on which a notifier works at the moment, each with the epoch of its lease, and whether its last pass has left
/// rows where they are, because they cannot be decoded.
#[derive(Debug, Clone, Default)]
struct HeldPartitions(Arc<Mutex<BTreeMap<(Partition, u64), bool>>>);

impl HeldPartitions {
    /// The set. A panic elsewhere cannot leave it half changed, so a poisoned lock is fine.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(Partition, u64), bool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The numbers of the partitions, in order.
    fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<_> = self.lock().keys().map(|(partition, _)| partition.0).collect();
        numbers.dedup();
        numbers
    }

    /// Whether the last pass of `partition` has left rows where they are.
    fn has_left(&self, partition: Partition) -> bool {
        self.lock().range((partition, 0)..=(partition, u64::MAX)).any(|(_, has_left)| *has_left)
    }
}

/// The work on the partitions.
#[derive(Debug)]
struct Folding {
    /// What the roles share.
    context: Arc<Context>,
    /// How to work.
    options: NotifierOptions,
    /// What it works on.
    partitions: HeldPartitions,
}

impl Work for Folding {
    fn resources<'a>(&'a self, _: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        std::future::ready(Ok((0..self.context.config.partitions.into()).collect())).boxed()
    }

    /// The fold mark starts again with each acquisition.
    fn acquired(&self, tx: &Transaction, resource: u64, epoch: u64) {
        let mark = FoldMark { epoch, fold: 0 };
        tx.set(&self.context.keys.fold_mark(Partition(resource as u32)), &mark.to_bytes());
    }

    fn run(self: Arc<Self>, lease: Held, stop: Stop) -> BoxFuture<'static, Result<()>> {
        let context = Arc::clone(&self.context);
        partition::Task::new(context, lease, self.options.clone(), &self.partitions).run(stop).boxed()
    }
}

/// A running notifier. Dropping it stops it at once; [`Notifier::shutdown`] also releases its leases, so that others need
/// not wait until its node is taken for dead.
#[derive(Debug)]
#[must_use = "dropping it stops it: it folds nothing any more"]
pub struct Notifier {
    /// What it works on.
    partitions: HeldPartitions,
    /// Takes and gives back partitions.
    worker: Worker,
    /// The poll.
    poll: JoinSet<()>,
    /// The node, if it has no other role.
    node: Option<Arc<Member>>,
}

impl Notifier {
    /// Starts it on `member`, and takes its part of the partitions as far as it can be had at once.
    pub(crate) async fn start(
        context: &Arc<Context>,
        member: &Arc<Member>,
        options: NotifierOptions,
    ) -> Result<Self> {
        options.check()?;
        let partitions = HeldPartitions::default();
        let looking = poll::run(Arc::clone(context), partitions.clone(), options.poll_interval);
        let balance = options.balance.clone();
        let folding = Folding { context: Arc::clone(context), options, partitions: partitions.clone() };
        let divided = Pool { name: "partition".into(), role: Role::NOTIFIER };
        let worker = Worker::start(member, divided, Arc::new(folding), balance).await?;
        let mut poll = JoinSet::new();
        poll.spawn(looking);
        Ok(Self { partitions, worker, poll, node: None })
    }

    /// Starts it as a node of its own.
    pub(crate) async fn start_alone(
        context: &Arc<Context>,
        member: Arc<Member>,
        options: NotifierOptions,
    ) -> Result<Self> {
        let notifier = member.or_leave(Self::start(context, &member, options).await).await?;
        Ok(Self { node: Some(member), ..notifier })
    }

    /// The numbers of the partitions on which it works at the moment, in order.
    pub fn partitions(&self) -> Vec<u32> {
        self.partitions.numbers()
    }

    /// Ends the tasks after the fold that each is doing, and releases the leases; leaves the bus if it was a node of its
    /// own.
    pub async fn shutdown(mut self) -> Result<()> {
        let ended = self.worker.shutdown().await;
        self.poll.abort_all();
        while let Some(ended) = self.poll.join_next().await {
            if let Err(error) = ended
                && error.is_panic()
            {
                tracing::error!(%error, "the poll of the notifier has panicked");
            }
        }
        let left = match self.node {
            Some(node) => node.leave().await,
            None => Ok(()),
        };
        ended.and(left)
    }
}
