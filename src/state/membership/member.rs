//! [`Member`]: a node in its own process, with its heartbeat and its watch over others.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::{
    NodeOptions,
    entered::{Entered, Roles},
    heartbeat::{Claim, Command, Heartbeat, Registration},
    neighbours::NeighbourWatch,
    roles::Versions,
};
use crate::{
    base::{
        error::{Error, Result},
        tasks::in_time,
    },
    state::{
        keys::{Config, Keys, NodeId, NodeRow, Role},
        polls::Polls,
        stats::Stats,
    },
    store::{Database, Isolation, Transaction},
};

/// The most commands that wait for the heartbeat; a sender of one more waits.
const COMMANDS_MAX: usize = 16;

/// A node in its own process. Dropping it ends the heartbeat at once, and others take the node for dead after its
/// expiry.
///
/// Only handles own it. Tasks of the node own [`Shared`], so the drop of the last handle ends the node even if an aborted task
/// still runs.
pub(crate) struct Member {
    shared: Arc<Shared>,
    /// The heartbeat, and the watch over other nodes.
    tasks: Mutex<JoinSet<()>>,
}

/// What the handles on a node share with its tasks.
pub(super) struct Shared {
    pub id: NodeId,
    pub db: Database,
    pub keys: Keys,
    /// The configuration that the bus was opened with; `None` if it is not compared.
    pub config: Option<Config>,
    pub options: NodeOptions,
    pub stats: Arc<Stats>,
    pub polls: Arc<Polls>,
    pub roles: watch::Sender<Roles>,
    commands: mpsc::Sender<Command>,
    pub registration: watch::Sender<Registration>,
    /// Whether its workers should end.
    pub stop: watch::Sender<bool>,
    /// The last versions that were read.
    pub versions: watch::Sender<Arc<Versions>>,
}

/// A role of a node, until it is dropped. Others are informed at once.
pub(crate) struct RoleGuard {
    shared: Arc<Shared>,
    role: Role,
}

impl RoleGuard {
    /// Makes the node ask for changes of the pool once per `interval` from now on.
    pub(super) fn set_interval(&self, interval: Duration) {
        self.shared.roles.send_if_modified(|roles| roles.set_interval(&self.role, interval));
    }

    /// Publishes that the node may own nothing by the role, so that others take what it releases.
    pub(super) async fn give_up(&self) -> Result<()> {
        let is_news = self.shared.roles.send_if_modified(|roles| roles.give_up(&self.role));
        if is_news { self.shared.publish().await } else { Ok(()) }
    }
}

impl Drop for RoleGuard {
    fn drop(&mut self) {
        self.shared.roles.send_modify(|roles| roles.leave(&self.role));
        // If the queue is full, the heartbeat publishes soon anyway; if it has ended, nobody is to be informed.
        let _ = self.shared.commands.try_send(Command::Publish(oneshot::channel().0));
    }
}

impl fmt::Debug for RoleGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RoleGuard").field(&self.role).finish()
    }
}

impl Member {
    /// Joins the nodes of the bus, whose configuration must stay `config`. Fails with [`Error::Invalid`] if another
    /// process lives under the same id. If a process has died under it, waits until that is certain.
    pub async fn join(
        db: &Database,
        keys: &Keys,
        config: Option<Config>,
        (stats, polls): (&Arc<Stats>, &Arc<Polls>),
        options: NodeOptions,
    ) -> Result<Arc<Self>> {
        options.check()?;
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let shared = Arc::new(Shared {
            id: options.id.unwrap_or_else(|| NodeId::random(db.env())),
            db: db.clone(),
            keys: keys.clone(),
            config,
            options,
            stats: Arc::clone(stats),
            polls: Arc::clone(polls),
            roles: watch::Sender::new(Roles::default()),
            commands,
            registration: watch::Sender::new(None),
            stop: watch::Sender::new(false),
            versions: watch::Sender::default(),
        });
        let mut heartbeat = Heartbeat::new(&shared);
        let mut known = false;
        while let Claim::Taken { changed } = heartbeat.write().await? {
            if known && changed {
                let id = shared.id;
                return Err(Error::invalid(
                    "node id",
                    format!("another process lives as node {id}: give each its own, or have one drawn"),
                ));
            }
            known = true;
            db.env().sleep(shared.options.pace()).await;
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(heartbeat.run(received));
        tasks.spawn(NeighbourWatch::new(&shared).run());
        Ok(Arc::new(Self { shared, tasks: Mutex::new(tasks) }))
    }

    pub fn id(&self) -> NodeId {
        self.shared.id
    }

    pub fn keys(&self) -> &Keys {
        &self.shared.keys
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// [`Shared::enter`] without a limit or a worker.
    pub async fn enter(&self, role: Role) -> Result<RoleGuard> {
        self.shared.enter(role, Entered { max: u32::MAX, idle: None, worker: None }).await
    }

    /// Ends the workers of the node, which release what they hold, and removes its row.
    pub async fn leave(&self) -> Result<()> {
        self.shared.stop.send_replace(true);
        let mut roles = self.shared.roles.subscribe();
        let left = roles.wait_for(|roles| roles.workers().next().is_none()).await;
        drop(left.expect("the sender is in what is shared"));
        let left = in_time(
            self.shared.db.env(),
            "leaving the nodes of the bus",
            self.shared.command(Command::Leave),
        )
        .await;
        // After this returns the caller may close the store at once, and open it again.
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.shutdown().await;
        left
    }

    /// Whether it was asked to leave.
    pub fn has_left(&self) -> bool {
        *self.shared.stop.borrow()
    }
}

impl Shared {
    /// Publishes `role`, so that others see it when this returns. If the node has the role already, waits for the end of an ending worker,
    /// and else fails with [`Error::Invalid`].
    pub async fn enter(self: &Arc<Self>, role: Role, entered: Entered) -> Result<RoleGuard> {
        let is_ending =
            |before: &Entered| before.worker.as_ref().is_some_and(|worker| worker.stop.is_requested());
        let mut roles = self.roles.subscribe();
        let ended = roles.wait_for(|roles| !roles.get(&role).is_some_and(is_ending)).await;
        drop(ended.expect("the sender is here"));
        let is_free = self.roles.send_if_modified(|roles| roles.enter(&role, entered));
        if !is_free {
            let reason = format!("node {} is {role} already: start it on another node", self.id);
            return Err(Error::invalid("role", reason));
        }
        let guard = RoleGuard { shared: Arc::clone(self), role };
        self.publish().await?;
        Ok(guard)
    }

    /// Publishes the present roles.
    pub async fn publish(&self) -> Result<()> {
        self.command(Command::Publish).await
    }

    /// Sends a command to the heartbeat and waits for its result. A heartbeat that has ended does nothing.
    async fn command(&self, command: impl FnOnce(oneshot::Sender<Result<()>>) -> Command) -> Result<()> {
        let (reply, done) = oneshot::channel();
        if self.commands.send(command(reply)).await.is_err() {
            return Err(has_left());
        }
        done.await.unwrap_or_else(|_| Err(has_left()))
    }

    /// The stored row of the node.
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

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Member").field(&self.id()).finish()
    }
}

/// The error of calls on a node that has left.
pub(super) fn has_left() -> Error {
    Error::invalid("node", "it has been shut down: join with another one")
}
