//! [`Notifier`]: the role that folds counters into the feed.
//!
//! The partitions are divided among all nodes that are notifiers ([`membership`](crate::state::membership)). Each partition whose lease the
//! notifier holds has one task ([`partition`]). The task sleeps until it is woken by a producer of the same process, by the partition's
//! doorbell, or by the notifier's poll ([`poll`]), which finds events whose hints were lost. A fold ([`fold`]) is one transaction; a pure
//! function ([`algorithm`]) decides how it changes a database's row.

mod algorithm;
mod backlog;
mod drain;
mod fold;
#[cfg(test)]
mod model;
mod options;
mod pace;
mod partition;
mod poll;

use std::sync::Arc;

pub(crate) use self::backlog::{Ages, Waiting};
pub use self::backlog::{Backlog, PartitionBacklog};
#[cfg(feature = "http")]
pub(crate) use self::fold::row_if_folded;
pub use self::options::NotifierOptions;
use self::partition::HeldPartitions;
use futures_util::{FutureExt, future::BoxFuture};
use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    base::error::Result,
    state::{
        context::Context,
        keys::{FoldMark, Partition},
        membership::{Held, Member, Pool, Stop, Work, Worker},
    },
    store::Transaction,
};

/// The maximum number of long folds that a notifier runs at the same time.
const LONG_FOLDS_MAX: usize = 8;

#[derive(Debug)]
struct Folding {
    context: Arc<Context>,
    options: NotifierOptions,
    partitions: HeldPartitions,
    turns: Arc<Semaphore>,
}

impl Work for Folding {
    fn resources<'a>(&'a self, _: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        std::future::ready(Ok((0..self.context.config.partitions.into()).collect())).boxed()
    }

    /// Resets the fold mark for the new epoch.
    fn acquired(&self, tx: &Transaction, resource: u64, epoch: u64) {
        let mark = FoldMark { epoch, fold: 0 };
        tx.set(&self.context.keys.fold_mark(Partition(resource as u32)), &mark.to_bytes());
    }

    fn run(self: Arc<Self>, lease: Held, stop: Stop) -> BoxFuture<'static, Result<()>> {
        let context = Arc::clone(&self.context);
        partition::Task::new(context, lease, self.options.clone(), &self.partitions, &self.turns)
            .run(stop)
            .boxed()
    }
}

/// A running notifier. Dropping it stops it at once; [`Notifier::shutdown`] also releases its leases, so that other nodes do not have to
/// wait until its node expires.
#[derive(Debug)]
#[must_use = "dropping a notifier stops it: it no longer folds"]
pub struct Notifier {
    partitions: HeldPartitions,
    worker: Worker,
    poll: JoinSet<()>,
}

impl Notifier {
    /// Starts a notifier on `member`. The notifier takes its share of the partitions as far as they are free.
    pub(crate) async fn start(
        context: &Arc<Context>,
        member: &Arc<Member>,
        options: NotifierOptions,
    ) -> Result<Self> {
        options.check()?;
        let partitions = HeldPartitions::default();
        let (polled, held, interval) = (Arc::clone(context), partitions.clone(), options.poll_interval);
        let polling = move || poll::run(Arc::clone(&polled), held.clone(), interval);
        let polling = context.stats.supervised(context.env(), poll::POLL, polling);
        let balance = options.balance.clone();
        let turns = Arc::new(Semaphore::new(LONG_FOLDS_MAX));
        let folding =
            Folding { context: Arc::clone(context), options, partitions: partitions.clone(), turns };
        let divided = Pool { name: "partition".into(), idle: None };
        let worker = Worker::start(member, divided, Arc::new(folding), balance).await?;
        let mut poll = JoinSet::new();
        poll.spawn(polling);
        Ok(Self { partitions, worker, poll })
    }

    /// The numbers of the partitions that the notifier works on at the moment, in order.
    pub fn partitions(&self) -> Vec<u32> {
        self.partitions.numbers()
    }

    /// Ends each task after its current fold, and releases the leases. If this was the last handle on the node, the node leaves the bus.
    pub async fn shutdown(mut self) -> Result<()> {
        let ended = self.worker.shutdown().await;
        self.poll.shutdown().await;
        ended
    }
}
