//! [`Member`]: a node in its own process, with its heartbeat and its watch over others.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::{
    NodeOptions, Pool,
    entered::{Entered, Roles},
    heartbeat::{Claim, Command, Heartbeat, Registration, SharedRoles},
    leases::Stop,
    neighbours::{Interests, NeighbourWatch},
    roles::Versions,
};
use crate::{
    base::{
        error::{Error, Result},
        tasks::in_time,
    },
    state::{
        keys::{Config, Keys, NodeId, Role},
        polls::Polls,
        stats::Stats,
    },
    store::Database,
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

/// What the handles on a node share with its workers.
pub(super) struct Shared {
    pub id: NodeId,
    pub db: Database,
    pub keys: Keys,
    pub stats: Arc<Stats>,
    roles: SharedRoles,
    commands: mpsc::Sender<Command>,
    /// The node's membership. Once the heartbeat has ended there is no sender.
    pub registration: watch::Receiver<Registration>,
    /// Whether its workers should end.
    pub stop: watch::Sender<bool>,
    /// The pools of its workers, and how often each worker polls.
    interests: watch::Sender<Interests>,
    next_worker: AtomicU64,
    /// The last versions that were read.
    pub versions: watch::Receiver<Option<Arc<Versions>>>,
}

/// A role of a node, until it is dropped. Others are informed at once.
#[derive(Debug)]
pub(crate) struct RoleGuard {
    roles: SharedRoles,
    role: Role,
    /// To the heartbeat, if it lives.
    commands: mpsc::WeakSender<Command>,
}

impl Drop for RoleGuard {
    fn drop(&mut self) {
        self.roles.send_modify(|roles| roles.leave(&self.role));
        if let Some(commands) = self.commands.upgrade() {
            // If the queue is full, the heartbeat publishes soon anyway.
            let _ = commands.try_send(Command::Publish(oneshot::channel().0));
        }
    }
}

/// A worker of a node, until it is dropped.
pub(super) struct WorkerGuard {
    /// The pools of all workers of the node.
    interests: watch::Sender<Interests>,
    number: u64,
}

impl WorkerGuard {
    /// Makes the worker poll once per `interval` from now on.
    pub fn set_interval(&self, interval: Duration) {
        self.interests.send_if_modified(|interests| {
            let (_, known) = interests.get_mut(&self.number).expect("it is there until this is dropped");
            let is_new = *known != interval;
            *known = interval;
            is_new
        });
    }
}

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        self.interests.send_modify(|interests| drop(interests.remove(&self.number)));
    }
}

impl Member {
    /// Joins the nodes of the bus, whose configuration must stay `config`. Fails with [`Error::Invalid`] if another
    /// process lives under the same id. If a process has died under it, waits until that is certain.
    pub async fn join(
        db: &Database,
        keys: &Keys,
        config: Option<Config>,
        reports @ (stats, _): (&Arc<Stats>, &Arc<Polls>),
        options: NodeOptions,
    ) -> Result<Arc<Self>> {
        options.check()?;
        let id = options.id.unwrap_or_else(|| NodeId::random(db.env()));
        let roles = SharedRoles::new(Roles::default());
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let (registration, observed) = watch::channel(None);
        let mut heartbeat = Heartbeat::new((db, keys, config), stats, id, &options, &roles, registration);
        let mut known = false;
        while let Claim::Taken { changed } = heartbeat.write().await? {
            if known && changed {
                return Err(Error::invalid(
                    "node id",
                    format!("another process lives as node {id}: give each its own, or have one drawn"),
                ));
            }
            known = true;
            db.env().sleep(options.pace()).await;
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(heartbeat.run(received));
        let (interests, (seen, versions)) = (watch::Sender::new(BTreeMap::new()), watch::channel(None));
        let watch = NeighbourWatch::new((db, keys), reports, id, options.pace(), observed.clone());
        tasks.spawn(watch.run(interests.subscribe(), seen));
        let shared = Arc::new(Shared {
            id,
            db: db.clone(),
            keys: keys.clone(),
            stats: Arc::clone(stats),
            roles,
            commands,
            registration: observed,
            stop: watch::Sender::new(false),
            interests,
            next_worker: AtomicU64::new(0),
            versions,
        });
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
        self.shared.enter(role, Entered { max: u32::MAX, stop: None, idle: None }).await
    }

    /// Ends the workers of the node, which release what they hold, and removes its row.
    pub async fn leave(&self) -> Result<()> {
        self.shared.stop.send_replace(true);
        let mut workers = self.shared.interests.subscribe();
        workers.wait_for(BTreeMap::is_empty).await.expect("the sender is in what is shared");
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
    pub async fn enter(&self, role: Role, entered: Entered) -> Result<RoleGuard> {
        let is_ending = |before: &Entered| before.stop.as_ref().is_some_and(Stop::is_requested);
        let mut roles = self.roles.subscribe();
        let ended = roles.wait_for(|roles| !roles.get(&role).is_some_and(is_ending)).await;
        drop(ended.expect("the sender is here"));
        let is_free = self.roles.send_if_modified(|roles| roles.enter(&role, entered));
        if !is_free {
            let reason = format!("node {} is {role} already: start it on another node", self.id);
            return Err(Error::invalid("role", reason));
        }
        let guard = RoleGuard { roles: self.roles.clone(), role, commands: self.commands.downgrade() };
        self.publish().await?;
        Ok(guard)
    }

    /// Publishes that the node may own `max` resources by `role`. With less than before, others take them as soon as
    /// they are released.
    pub async fn own_at_most(&self, role: &RoleGuard, max: u32) -> Result<()> {
        let is_news = self.roles.send_if_modified(|roles| roles.set_max(&role.role, max));
        if is_news { self.publish().await } else { Ok(()) }
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

    /// Adds a worker that polls changes of `pool` once per `interval`.
    pub fn add_worker(&self, pool: &Pool, interval: Duration) -> WorkerGuard {
        let number = self.next_worker.fetch_add(1, Ordering::Relaxed);
        self.interests.send_modify(|interests| {
            interests.insert(number, (Arc::clone(&pool.name), interval));
        });
        WorkerGuard { interests: self.interests.clone(), number }
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
