//! What a role provides to its node: the options for heartbeats and for the share of a [`Pool`], and the [`Work`] on the pool's resources,
//! under leases that are [`Held`].

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, Lease, NodeId, Owner},
    store::{Isolation, Transaction},
};

/// The maximum time between two polls of other nodes.
const PACE_MAX: Duration = Duration::from_secs(3);

/// A pool of resources that nodes divide.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    /// The name of the pool in the keys of its leases. The nodes that divide it have the role [`role_of_pool`].
    pub name: Arc<str>,
    /// The key that marks the role as vacant, if the pool keeps one. Publishing the role clears the key, so no node joins unnoticed.
    pub idle: Option<Bytes>,
}

/// How a node shows that it is alive. The nodes of a bus can use different times, because each node stores how long others must wait for
/// it. [`Duration::MAX`] means "never".
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeOptions {
    /// The id of the node; no other process may use it at the same time. Default: a random one.
    pub id: Option<NodeId>,
    /// How often the node writes its heartbeat. Default: 2 s.
    pub heartbeat: Duration,
    /// How long the node may go without a heartbeat before others consider it dead, by the observer's clock; at least twice the heartbeat.
    /// With a shorter expiry others take over its work sooner, but also more often by mistake. Default: 5 s.
    pub expiry: Duration,
}

crate::base::macros::setters!(NodeOptions { id: Option<NodeId>, heartbeat: Duration, expiry: Duration });

impl Default for NodeOptions {
    fn default() -> Self {
        Self { id: None, heartbeat: Duration::from_secs(2), expiry: Duration::from_secs(5) }
    }
}

impl NodeOptions {
    /// Fails if an option is outside its limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.heartbeat < Duration::from_millis(1) {
            return Err(Error::invalid("heartbeat", "it is less than 1 ms"));
        }
        if self.expiry < self.heartbeat.saturating_mul(2) {
            return Err(Error::invalid(
                "expiry",
                format!("{:?} is less than twice the heartbeat of {:?}", self.expiry, self.heartbeat),
            ));
        }
        Ok(())
    }

    /// The stored form of [`NodeOptions::expiry`]: `u64::MAX` means never.
    pub(super) fn expiry_ms(&self) -> u64 {
        u64::try_from(self.expiry.as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns how often the node polls other nodes, however rarely it writes a heartbeat.
    pub(super) fn pace(&self) -> Duration {
        self.heartbeat.min(PACE_MAX)
    }
}

/// A node's share of the work: as many leases as any other node, give or take one. If it is not allowed that many, other nodes get more.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BalanceOptions {
    /// How often the node checks whether nodes or leases have changed, at least 1 ms. Default: 1 s.
    pub interval: Duration,
    /// How long an owner may take to end its work when another node should own the lease. After that, the other node takes the lease
    /// anyway. Default: 10 s. [`Duration::MAX`] means "never".
    pub handover: Duration,
    /// The maximum number of leases that the node takes. Resources beyond all nodes' limits have no owner. Default: no limit.
    pub leases_max: Option<u32>,
}

crate::base::macros::setters!(BalanceOptions { interval: Duration, handover: Duration, leases_max: Option<u32> });

impl Default for BalanceOptions {
    fn default() -> Self {
        Self { interval: Duration::from_secs(1), handover: Duration::from_secs(10), leases_max: None }
    }
}

impl BalanceOptions {
    /// Fails if an option is outside its limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.interval < Duration::from_millis(1) {
            return Err(Error::invalid("balance interval", "it is less than 1 ms"));
        }
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    key: Vec<u8>,
    /// The pool of the resource, for messages.
    pool: Arc<str>,
    pub resource: u64,
    /// The epoch of the acquisition.
    pub epoch: u64,
    /// The node and the token of the acquisition.
    pub(super) owner: Owner,
}

impl Held {
    pub(super) fn new(keys: &Keys, pool: &Arc<str>, resource: u64, epoch: u64, owner: Owner) -> Self {
        Self { key: keys.lease(pool, resource), pool: Arc::clone(pool), resource, epoch, owner }
    }

    /// Returns the lease as it is stored.
    pub(super) fn stored(&self) -> Lease {
        Lease { epoch: self.epoch, owner: Some(self.owner) }
    }

    /// Fails with [`Error::LeaseLost`] if the lease is no longer held, and makes `tx` fail if it is lost before the
    /// commit.
    pub async fn check(&self, tx: &Transaction) -> Result<()> {
        let found = tx.get(&self.key, Isolation::Serializable).await?;
        let found = found.map(|value| Lease::from_bytes(&value)).transpose();
        match found.map_err(|error| error.at(&self.key))? {
            Some(lease) if lease == self.stored() => Ok(()),
            found => Err(Error::LeaseLost {
                resource: format!("{} {}", self.pool, self.resource),
                held: self.epoch,
                found: found.map_or(0, |lease| lease.epoch),
            }),
        }
    }
}

/// A request to end the work at the next good moment.
#[derive(Debug, Clone)]
pub(crate) struct Stop(watch::Receiver<bool>);

impl Stop {
    /// Creates a request, and the sender that makes it. Dropping the sender also makes the request.
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Waits until the work should end. Cancel safe.
    pub async fn requested(&mut self) {
        // A dropped sender is a request, too.
        let _ = self.0.wait_for(|stop| *stop).await;
    }

    /// Whether the work was asked to end, rather than aborted.
    pub fn was_given(&self) -> bool {
        *self.0.borrow()
    }

    /// Whether the work should end.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }
}

/// The work on the resources of a pool.
pub(crate) trait Work: Send + Sync + 'static {
    /// Returns the resources, each once, from snapshot reads in the transaction of a round. Code that changes them calls
    /// [`changed`](super::changed). If a resource disappears, its work is dropped and its lease is removed. So the same resource must never
    /// appear again, or the owner alone, without the epoch, must be enough to fence its work. [`Error::NoConsumer`] means that the pool no
    /// longer belongs to this work: then the worker ends, so that other nodes own its share.
    fn resources<'a>(&'a self, tx: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>>;

    /// Called after a round has read the resources. The pool last changed at version `changed` of the store.
    fn settled(&self, _changed: u64) {}

    /// Writes the data that belongs to the acquisition of `resource` under `epoch`, in the same transaction.
    fn acquired(&self, _tx: &Transaction, _resource: u64, _epoch: u64) {}

    /// Works on the resource of `lease`. Every transaction calls [`Held::check`] first. Once `stop` requests it, the work saves its
    /// progress and ends soon, so that another node can continue. It is dropped if that takes too long, or at once if the lease is lost.
    ///
    /// Any other end, even a panic, is reported, and the resource is acquired again with the next epoch, after a pause that doubles with
    /// each failure.
    fn run(self: Arc<Self>, lease: Held, stop: Stop) -> BoxFuture<'static, Result<()>>;
}
