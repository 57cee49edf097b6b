//! Nodes that divide the resources of a test's own pool, without a bus.

use std::sync::Arc;

use futures_util::{FutureExt, future::BoxFuture};

use crate::{
    base::error::Result,
    state::{
        keys::{Keys, NodeId},
        membership::{self, BalanceOptions, Held, Member, NodeOptions, Pool, Stop, Work, Worker},
        polls::Polls,
        stats::{Stats, StatsSnapshot},
    },
    store::{Store, Transaction},
};

/// Returns which member should own each of `resources`, in order. A resource comes with its current owner, a member with its maximum.
pub fn assign(resources: &[(u64, Option<NodeId>)], members: &[(NodeId, u32)]) -> Vec<(u64, Option<NodeId>)> {
    membership::assign(resources, members)
}

/// The work on a pool.
pub trait PoolWork: Send + Sync + 'static {
    /// Returns the resources of the pool.
    fn resources(&self) -> Result<Vec<u64>>;

    /// Works on the resource of `lease` until `stop` completes.
    fn run(&self, lease: PoolLease, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, Result<()>>;
}

/// A held lease.
#[derive(Debug, Clone)]
pub struct PoolLease(Held);

impl PoolLease {
    /// Returns the resource, and the epoch of the acquisition.
    pub fn resource_and_epoch(&self) -> (u64, u64) {
        (self.0.resource, self.0.epoch)
    }

    /// Fails with [`Error::LeaseLost`](crate::Error::LeaseLost) if the lease is no longer held, and makes `tx` fail if the lease is lost
    /// before the commit.
    pub async fn check(&self, tx: &Transaction) -> Result<()> {
        self.0.check(tx).await
    }
}

/// Adapts a test's work to the worker.
struct Tested<W>(Arc<W>);

impl<W: PoolWork> Work for Tested<W> {
    fn resources<'a>(&'a self, _: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        async { self.0.resources() }.boxed()
    }

    fn run(self: Arc<Self>, lease: Held, mut stop: Stop) -> BoxFuture<'static, Result<()>> {
        self.0.run(PoolLease(lease), async move { stop.requested().await }.boxed())
    }
}

/// A node under a prefix, which may or may not have a bus.
#[derive(Debug)]
pub struct PoolNode {
    member: Arc<Member>,
    stats: Arc<Stats>,
}

impl PoolNode {
    /// Joins the nodes under `prefix`. Fails with [`Error::Invalid`](crate::Error::Invalid) if the prefix is too long.
    pub async fn join(store: &Store, prefix: &[u8], options: NodeOptions) -> Result<Self> {
        let (keys, stats, polls) = (Keys::new(prefix)?, Arc::default(), Polls::new(store.env()));
        let member = Member::join(store, &keys, None, (&stats, &polls, &Arc::default()), options).await?;
        Ok(Self { member, stats })
    }

    /// Returns the id of the node.
    pub fn id(&self) -> NodeId {
        self.member.id()
    }

    /// Returns what the node has counted.
    pub fn stats(&self) -> StatsSnapshot {
        self.stats.snapshot()
    }

    /// Starts `work` on the node's share of `pool`.
    pub async fn start<W: PoolWork>(
        &self,
        pool: &str,
        work: &Arc<W>,
        options: BalanceOptions,
    ) -> Result<PoolWorker> {
        let (pool, work) = (Pool { name: pool.into(), idle: None }, Tested(Arc::clone(work)));
        Ok(PoolWorker(Worker::start(&self.member, pool, Arc::new(work), options).await?))
    }
}

/// A node's share of a pool. Dropping the share stops its work at once.
#[derive(Debug)]
#[must_use = "dropping it stops the work"]
pub struct PoolWorker(Worker);

impl PoolWorker {
    /// Ends the work, and releases all leases.
    pub async fn shutdown(self) -> Result<()> {
        self.0.shutdown().await
    }
}
