//! [`Held`]: a held lease, and [`Work`]: the work on a resource.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::watch;

use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, Lease, Owner},
    store::{Isolation, Transaction},
};

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

    /// The lease as it is stored.
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

/// Asks work to end at the next good moment.
#[derive(Debug, Clone)]
pub(crate) struct Stop(watch::Receiver<bool>);

impl Stop {
    /// A signal, and its sender. Dropping the sender gives the signal.
    pub fn new() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Completes when the work should end. Cancel safe.
    pub async fn requested(&mut self) {
        // A dropped sender is a request as well.
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
    /// The resources, each once. Read by snapshot in the transaction of a round; each change of them calls
    /// [`changed`](super::changed). If a resource disappears, its work is dropped and its lease is removed. So the same resource must
    /// never appear again, or its work must be safe with only the owner as its fence. With [`Error::NoConsumer`] the pool is no longer that
    /// of this work: the worker ends, so that others own what it would.
    fn resources<'a>(&'a self, tx: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>>;

    /// Writes what belongs to the acquisition of `resource` under `epoch`, in its transaction.
    fn acquired(&self, _tx: &Transaction, _resource: u64, _epoch: u64) {}

    /// Works on the resource of `lease`: every transaction calls [`Held::check`] first. Ends soon after `stop` is
    /// given, once it has saved its progress, so that another node can go on. It is dropped if that takes too long,
    /// and at once if the lease is lost.
    ///
    /// Any other end, even a panic, is reported, and the resource is taken again with the next epoch, after a pause
    /// that doubles with each failure.
    fn run(self: Arc<Self>, lease: Held, stop: Stop) -> BoxFuture<'static, Result<()>>;
}
