//! The janitor: deletes what is no longer needed.
//!
//! - tombstones of databases that were deleted long ago ([`tombstones`]); the horizon informs readers that were away for longer;
//! - closed topology entries without rows, which no consumer needs ([`topologies`]);
//! - consumers that have had no member for longer than their expiry ([`consumers`]);
//! - old results of runs that were committed exactly once.
//!
//! The janitor works in bounded transactions at batch priority, which a busy cluster defers.

mod clock;
mod consumers;
mod pass;
mod tombstones;
mod topologies;

use std::sync::Arc;

use futures_util::{FutureExt, future::BoxFuture};

pub use self::pass::JanitorOptions;
use self::{clock::JanitorClock, pass::Pass};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        exactly_once::{RETENTION, swept_version},
        history::{Claim, History},
        keys::RunResult,
        membership::{Held, Member, Pool, Stop, Work, Worker},
    },
    store::{Isolation, RangeRead, Transaction},
};

/// A node that can be the janitor. Only one such node works at a time; another takes over when it leaves. Dropping the janitor stops it at
/// once; [`Janitor::shutdown`] also releases its lease.
#[derive(Debug)]
#[must_use = "dropping it stops it"]
pub struct Janitor {
    worker: Worker,
}

impl Janitor {
    pub(crate) async fn start(
        context: &Arc<Context>,
        member: &Arc<Member>,
        options: JanitorOptions,
    ) -> Result<Self> {
        options.check()?;
        let pool = Pool { name: "janitor".into(), idle: None };
        let balance = options.balance.clone();
        let cleaning = Arc::new(Cleaning { context: Arc::clone(context), options });
        Ok(Self { worker: Worker::start(member, pool, cleaning, balance).await? })
    }

    /// Stops the work and releases the lease. If this was the last handle on the node, the node leaves the bus.
    pub async fn shutdown(self) -> Result<()> {
        self.worker.shutdown().await
    }
}

/// The work of the janitor. It is a single resource, so that only one node does it.
struct Cleaning {
    context: Arc<Context>,
    options: JanitorOptions,
}

impl Work for Cleaning {
    fn resources<'a>(&'a self, _: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        std::future::ready(Ok(vec![0])).boxed()
    }

    fn run(self: Arc<Self>, lease: Held, mut stop: Stop) -> BoxFuture<'static, Result<()>> {
        let work = async move {
            let pass = Pass { context: &self.context, lease: &lease, options: &self.options };
            let mut clock = pass.begin_clock().await?;
            let mut clean_to = Sequence::MIN;
            loop {
                match pass.run(clock, &mut clean_to).await {
                    Ok(()) => {}
                    Err(error @ Error::LeaseLost { .. }) => return Err(error),
                    Err(error) => {
                        self.context.stats.health.complain(self.context.env(), "pass of the janitor", &error);
                    }
                }
                self.context.env().sleep(self.options.interval).await;
                clock.next_pass(self.context.env());
            }
        };
        // Each transaction of a pass is complete in itself, so the work can stop between any two of them.
        async move {
            tokio::select! {
                biased;
                () = stop.requested() => Ok(()),
                ended = work => ended,
            }
        }
        .boxed()
    }
}

impl Pass<'_> {
    /// Deletes what can be deleted. `clean_to` is the sequence up to which the last pass left no tombstone.
    async fn run(&self, clock: JanitorClock, clean_to: &mut Sequence) -> Result<()> {
        // While the store is older than its own rows, no pass can tell what is old.
        self.read(async |tx| History::of(self.context).check(&tx, Claim::Rows).await).await?;
        // Each step runs even if another failed. Consumers come first, because their low watermarks hold back the deletion of tombstones.
        let consumers = self.expire_consumers(clock).await;
        let tombstones = self.run_tombstones(clock, clean_to).await;
        let topologies = self.drop_topologies().await;
        let runs = self.forget_runs().await;
        consumers.and(tombstones).and(topologies).and(runs)
    }

    async fn run_tombstones(&self, clock: JanitorClock, clean_to: &mut Sequence) -> Result<()> {
        let old = self.old_up_to(clock).await?;
        let (dropped, to) = self.drop_tombstones(*clean_to, old).await?;
        *clean_to = to;
        self.context.stats.tombstones_dropped.add(dropped);
        Ok(())
    }
}

/// How many results of runs are read at once.
const PAGE_ROWS: usize = 1_000;

impl Pass<'_> {
    /// Clears the results that are older than [`RETENTION`], in pages.
    pub async fn forget_runs(&self) -> Result<()> {
        let keys = &self.context.keys;
        let horizon = keys.runs_swept();
        let mut rest = Some(RangeRead::new(keys.run_results()).limit(PAGE_ROWS));
        while let Some(read) = rest {
            let page = self
                .write(async |tx| {
                    let (page, swept) = tokio::try_join!(
                        tx.get_range(&read, Isolation::Snapshot),
                        // Serializable: a late commit of an earlier attempt must not clear the result of a key's next run.
                        tx.get(&horizon, Isolation::Serializable)
                    )?;
                    let old = tx.read_version().await?.saturating_sub(RETENTION);
                    let mut cleared = 0;
                    for (key, value) in &page.rows {
                        let result = RunResult::from_bytes(value).map_err(|error| error.at(key))?;
                        if result.versionstamp.version() < old {
                            tx.clear(key);
                            cleared += 1;
                        }
                    }
                    if cleared > 0 {
                        let swept =
                            swept_version(swept.as_deref()).map_err(|error| error.at(&horizon))?.max(old);
                        tx.set(&horizon, &swept.to_be_bytes());
                    }
                    Ok(page)
                })
                .await?;
            rest = read.after(&page);
        }
        Ok(())
    }
}
