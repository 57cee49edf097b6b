//! [`Shared`]: the state of a node that its handles, its heartbeat, its watch over others and its workers share.
//!
//! The state includes the [`Roles`] that the node has entered, and which of them must still be published to other nodes. The cost of a
//! change does not grow with the number of roles.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fmt,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot, watch};

use super::{NodeOptions, leases::Stop, roles::Versions};
use crate::{
    base::error::{Error, Result},
    state::{
        keys::{Config, Keys, NodeId, NodeRow, Role},
        last_seen::NodesSeen,
        polls::Polls,
        stats::Stats,
    },
    store::{Isolation, Store, Transaction},
};

/// The membership of the node: the token under which it is a member, or `None` while it is not one.
pub(super) type Registration = Option<[u8; 16]>;

/// A request to the heartbeat.
pub(super) enum Command {
    /// Write a heartbeat now if the roles have changed, so that other nodes see them.
    Publish(oneshot::Sender<Result<()>>),
    /// Remove the row, and end.
    Leave(oneshot::Sender<Result<()>>),
}

/// A role that the node has entered.
#[derive(Debug)]
pub(super) struct Entered {
    /// The maximum number of resources that the node may own in this role.
    pub max: u32,
    /// The key that marks the role as vacant, if the pool keeps one.
    pub idle: Option<Bytes>,
    /// `None` for a role that ends as soon as its guard is dropped.
    pub worker: Option<EnteredWorker>,
}

/// The worker of a role.
#[derive(Debug)]
pub(super) struct EnteredWorker {
    /// Requested once the worker is dropped or shuts down.
    pub stop: Stop,
    /// The slot in which the version of the worker's pool is stored.
    pub slot: u16,
    /// How often the worker polls the version of its pool.
    pub interval: Duration,
}

/// What must be stored for a role: [`Entered::max`] and [`Entered::idle`], or nothing if the node has left the role.
pub(super) type News = (Role, Option<(u32, Option<Bytes>)>);

#[derive(Debug, Default)]
pub(super) struct Roles {
    entered: BTreeMap<Role, Entered>,
    /// Roles whose stored state may differ from the current one.
    unpublished: BTreeSet<Role>,
}

impl Roles {
    pub fn get(&self, role: &Role) -> Option<&Entered> {
        self.entered.get(role)
    }

    /// Enters `role`. Returns false if the node already has it.
    pub fn enter(&mut self, role: &Role, entered: Entered) -> bool {
        let Entry::Vacant(vacant) = self.entered.entry(role.clone()) else { return false };
        vacant.insert(entered);
        self.unpublished.insert(role.clone());
        true
    }

    pub fn leave(&mut self, role: &Role) {
        if self.entered.remove(role).is_some() {
            self.unpublished.insert(role.clone());
        }
    }

    /// Sets [`Entered::max`] of `role`, which the node must have, to 0. Returns whether that is a change.
    pub fn give_up(&mut self, role: &Role) -> bool {
        let entered = self.entered.get_mut(role).expect("the node has the role");
        let is_news = std::mem::take(&mut entered.max) > 0;
        if is_news {
            self.unpublished.insert(role.clone());
        }
        is_news
    }

    /// Sets how often the worker of `role` polls. Returns whether that is a change.
    pub fn set_interval(&mut self, role: &Role, interval: Duration) -> bool {
        let worker = self.entered.get_mut(role).and_then(|entered| entered.worker.as_mut());
        worker.is_some_and(|worker| std::mem::replace(&mut worker.interval, interval) != interval)
    }

    /// Returns the workers of the node.
    pub fn workers(&self) -> impl Iterator<Item = &EnteredWorker> {
        self.entered.values().filter_map(|entered| entered.worker.as_ref())
    }

    /// Marks all roles as not stored, because the node joins.
    pub fn forget_published(&mut self) {
        self.unpublished.extend(self.entered.keys().cloned());
    }

    pub fn is_published(&self) -> bool {
        self.unpublished.is_empty()
    }

    /// Returns what must be stored next, for at most `limit` roles.
    pub fn news(&self, limit: usize) -> Vec<News> {
        self.unpublished.iter().take(limit).map(|role| (role.clone(), self.to_store(role))).collect()
    }

    fn to_store(&self, role: &Role) -> Option<(u32, Option<Bytes>)> {
        self.entered.get(role).map(|entered| (entered.max, entered.idle.clone()))
    }

    /// Notes that `news` is stored, except for roles that have changed since.
    pub fn were_published(&mut self, news: &[News]) {
        for (role, stored) in news {
            if self.to_store(role) == *stored {
                self.unpublished.remove(role);
            }
        }
    }
}

/// What the handles to a node share with its tasks.
pub(super) struct Shared {
    pub id: NodeId,
    pub store: Store,
    pub keys: Keys,
    /// The configuration that the bus was opened with; `None` if it is not compared.
    pub config: Option<Config>,
    pub options: NodeOptions,
    pub stats: Arc<Stats>,
    pub polls: Arc<Polls>,
    pub seen: Arc<NodesSeen>,
    pub roles: watch::Sender<Roles>,
    pub commands: mpsc::Sender<Command>,
    pub registration: watch::Sender<Registration>,
    /// Whether the tasks of the node should end.
    pub stop: watch::Sender<bool>,
    /// The last versions that were read.
    pub versions: watch::Sender<Arc<Versions>>,
}

/// A role that a node lists until this guard or the node is dropped. Other nodes are informed at once.
#[must_use = "dropping it takes the role off the list"]
pub struct RoleGuard {
    shared: Arc<Shared>,
    role: Role,
}

impl RoleGuard {
    /// Makes the node check for changes to the pool once per `interval` from now on.
    pub(super) fn set_interval(&self, interval: Duration) {
        self.shared.roles.send_if_modified(|roles| roles.set_interval(&self.role, interval));
    }

    /// Publishes that the node may own nothing in this role, so that other nodes take what it releases.
    pub(super) async fn give_up(&self) -> Result<()> {
        let is_news = self.shared.roles.send_if_modified(|roles| roles.give_up(&self.role));
        if is_news { self.shared.publish().await } else { Ok(()) }
    }
}

impl Drop for RoleGuard {
    fn drop(&mut self) {
        self.shared.roles.send_modify(|roles| roles.leave(&self.role));
        // If the queue is full, the heartbeat publishes soon anyway. If the heartbeat has ended, nobody has to be informed.
        let _ = self.shared.commands.try_send(Command::Publish(oneshot::channel().0));
    }
}

impl fmt::Debug for RoleGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RoleGuard").field(&self.role).finish()
    }
}

impl Shared {
    /// Publishes `role`, so that other nodes see it when this returns. If the node already has the role, waits for its worker to end if the
    /// worker is stopping, and otherwise fails with [`Error::Invalid`].
    pub async fn enter(self: &Arc<Self>, role: Role, entered: Entered) -> Result<RoleGuard> {
        let is_ending =
            |before: &Entered| before.worker.as_ref().is_some_and(|worker| worker.stop.is_requested());
        let mut roles = self.roles.subscribe();
        let ended = roles.wait_for(|roles| !roles.get(&role).is_some_and(is_ending)).await;
        drop(ended.expect("the sender is here"));
        let is_free = self.roles.send_if_modified(|roles| roles.enter(&role, entered));
        if !is_free {
            let reason = format!("node {} already has the role {role}: start it on another node", self.id);
            return Err(Error::invalid("role", reason));
        }
        let guard = RoleGuard { shared: Arc::clone(self), role };
        self.publish().await?;
        Ok(guard)
    }

    /// Publishes the current roles.
    pub async fn publish(&self) -> Result<()> {
        self.command(Command::Publish).await
    }

    /// Sends a command to the heartbeat, and waits for the result. Fails if the heartbeat has ended.
    pub async fn command(&self, command: impl FnOnce(oneshot::Sender<Result<()>>) -> Command) -> Result<()> {
        let (reply, done) = oneshot::channel();
        if self.commands.send(command(reply)).await.is_err() {
            return Err(has_left());
        }
        done.await.unwrap_or_else(|_| Err(has_left()))
    }

    /// Returns the stored row of the node.
    pub async fn row(&self, tx: &Transaction, isolation: Isolation) -> Result<Option<NodeRow>> {
        let key = self.keys.node(self.id);
        let value = tx.get(&key, isolation).await?;
        value.map(|value| NodeRow::from_bytes(&value).map_err(|error| error.at(&key))).transpose()
    }

    /// Whether the node is a member, as far as it knows.
    pub fn is_member(&self) -> bool {
        self.registration.borrow().is_some()
    }
}

/// Returns the error for calls on a node that has left.
pub(super) fn has_left() -> Error {
    Error::invalid("node", "it has been shut down: join with a new one")
}
