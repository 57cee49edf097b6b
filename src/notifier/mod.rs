//! [`Notifier`]: the role that folds counters into the feed.
//!
//! For each partition whose lease it holds there is one task ([`partition`]). It sleeps until it is woken: directly by a
//! producer of the same process, by the partition's doorbell, or by the poll of the notifier ([`poll`]), which makes good
//! what hints have missed. A fold ([`fold`]) is one transaction; what it makes of a database's counters is decided by a
//! pure function ([`algorithm`]).

mod algorithm;
mod drain;
mod fold;
mod partition;
mod poll;

use std::{sync::Arc, time::Duration};

use futures_util::future::try_join_all;
use tokio::{sync::watch, task::JoinSet};

use crate::{
    context::Context,
    error::{Error, Result},
    keys::{FoldMark, Partition},
    lease::Held,
};

/// How a notifier works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotifierOptions {
    /// Which partitions it takes: those with `number % of == part`, so that several notifiers can share the work.
    /// Default: all, `(0, 1)`.
    pub share: (u32, u32),
    /// The least time between two folds of one partition. A shorter one tells sooner, a longer one coalesces more.
    /// Default: 25 ms.
    pub fold_interval: Duration,
    /// How often it looks for events whose ring never came. Default: 1 s.
    pub poll_interval: Duration,
    /// The most rows of counters that one fold reads. Default: 1,000.
    pub fold_rows_max: usize,
}

impl Default for NotifierOptions {
    fn default() -> Self {
        Self {
            share: (0, 1),
            fold_interval: Duration::from_millis(25),
            poll_interval: Duration::from_secs(1),
            fold_rows_max: 1_000,
        }
    }
}

impl NotifierOptions {
    /// Fails if an option is out of its limits.
    fn check(&self) -> Result<()> {
        let (part, of) = self.share;
        if part >= of {
            return Err(Error::invalid("share", format!("part {part} of {of} does not exist")));
        }
        if self.poll_interval.is_zero() {
            return Err(Error::invalid("poll interval", "it is zero"));
        }
        // One database can have a row of counters, one of its last update and a design document; a fold must get on.
        if !(10..=10_000).contains(&self.fold_rows_max) {
            return Err(Error::invalid("fold rows", format!("{} is not 10 to 10,000", self.fold_rows_max)));
        }
        Ok(())
    }
}

/// A running notifier. Dropping it stops it at once; [`Notifier::shutdown`] also releases its leases.
#[derive(Debug)]
pub struct Notifier {
    /// What the roles share.
    context: Arc<Context>,
    /// The leases it took, by partition.
    leases: Vec<(Partition, Held)>,
    /// Tells the tasks to end.
    stop: watch::Sender<bool>,
    /// The tasks.
    tasks: JoinSet<()>,
}

impl Notifier {
    /// Takes the leases of its partitions, whoever holds them, and starts the tasks. A former owner is fenced off: it
    /// cannot commit another fold, and stops.
    pub(crate) async fn start(context: Arc<Context>, options: NotifierOptions) -> Result<Self> {
        options.check()?;
        let (part, of) = options.share;
        let partitions: Vec<_> =
            (0..context.config.partitions).filter(|number| number % of == part).collect();
        let (stop, stopped) = watch::channel(false);
        let mut notifier = Self { leases: Vec::new(), stop, tasks: JoinSet::new(), context };
        notifier.leases =
            try_join_all(partitions.iter().map(|&number| notifier.acquire(Partition(number)))).await?;
        for (partition, lease) in &notifier.leases {
            let context = Arc::clone(&notifier.context);
            let task = partition::Task::new(context, *partition, lease.clone(), options.clone());
            notifier.tasks.spawn(task.run(stopped.clone()));
        }
        let poll = poll::run(Arc::clone(&notifier.context), partitions, options.poll_interval, stopped);
        notifier.tasks.spawn(poll);
        Ok(notifier)
    }

    /// Takes the lease of `partition`, and starts its fold mark anew in the same transaction.
    async fn acquire(&self, partition: Partition) -> Result<(Partition, Held)> {
        let Context { db, keys, .. } = &*self.context;
        let mark = keys.fold_mark(partition);
        let resource = format!("partition {}", partition.0);
        let lease = Held::acquire(db, keys.partition_lease(partition), resource, |tx, epoch| {
            tx.set(&mark, &FoldMark { epoch, fold: 0 }.to_bytes());
        })
        .await?;
        Ok((partition, lease))
    }

    /// Ends the tasks after the fold that each is doing, and releases the leases.
    pub async fn shutdown(mut self) -> Result<()> {
        self.stop.send_replace(true);
        while let Some(ended) = self.tasks.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a task of the notifier has panicked");
            }
        }
        try_join_all(self.leases.iter().map(|(_, lease)| lease.release(&self.context.db))).await?;
        Ok(())
    }
}
