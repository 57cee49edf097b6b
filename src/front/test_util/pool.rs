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

/// Returns which member should own each of `resources`, in order. They are given with their current owners, and members with their maxima.
pub fn assign(resources: &[(u64, Option<NodeId>)], members: &[(NodeId, u32)]) -> Vec<(u64, Option<NodeId>)> {
    membership::assign(resources, members)
}

/// The work on a pool.
pub trait PoolWork: Send + Sync + 'static {
    /// The resources of the pool.
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

    /// Fails with [`Error::LeaseLost`](crate::Error::LeaseLost) if the lease is no longer held, and makes `tx` fail if it is lost before
    /// the commit.
    pub async fn check(&self, tx: &Transaction) -> Result<()> {
        self.0.check(tx).await
    }
}

/// Adapts the work of a test to the worker.
struct Tested<W>(Arc<W>);

impl<W: PoolWork> Work for Tested<W> {
    fn resources<'a>(&'a self, _: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        async { self.0.resources() }.boxed()
    }

    fn run(self: Arc<Self>, lease: Held, mut stop: Stop) -> BoxFuture<'static, Result<()>> {
        self.0.run(PoolLease(lease), async move { stop.requested().await }.boxed())
    }
}

/// A node under a prefix, with or without a bus there.
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

/// The share of a node in a pool. Dropping it stops the work at once.
#[derive(Debug)]
#[must_use = "dropping it stops the work"]
pub struct PoolWorker(Worker);

impl PoolWorker {
    /// Ends the work, and releases all leases.
    pub async fn shutdown(self) -> Result<()> {
        self.0.shutdown().await
    }
}
