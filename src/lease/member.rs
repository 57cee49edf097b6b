//! [`Member`]: a node, as its own process knows it; and its heartbeat.
//!
//! One task writes the node's row, whatever the node does. It also judges the node itself: if it has not got a beat through
//! for as long as others wait before they take a node for dead, or if its row is gone, the node has fallen out. Then its
//! workers end everything, and the task writes the row again, with a new token.
//!
//! The token tells two processes under one id apart: a row with a token that the process does not know belongs to another
//! one, and is only replaced after it has not changed for as long as a dead node's would.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::{
    NodeOptions,
    glance::{self, Glance, changed},
    sightings::Sightings,
};
use crate::{
    env::Env,
    error::{Error, Result},
    keys::{Keys, NodeId, NodeRow, Role, Roles},
    stats::Stats,
    store::{Database, Isolation, RetryPolicy, Transaction},
};

/// Commands that wait for the heartbeat; who gives one more waits.
const COMMANDS_MAX: usize = 16;

/// The most roles of a node: one value must have room for them.
const ROLES_MAX: usize = 300;

/// How the node stands: the token under which it takes part, or `None` while it has fallen out.
pub(super) type Standing = Option<[u8; 16]>;

/// Roles, shared by the heartbeat and those who have them.
type SharedRoles = Arc<Mutex<BTreeSet<Role>>>;

/// Locks `mutex`. A panic elsewhere cannot leave what it guards half changed, so a poisoned lock is fine.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A node, as its own process knows it. Dropping it ends the heartbeat at once: others take it for dead after a while.
pub(crate) struct Member {
    /// Which node it is.
    id: NodeId,
    /// The store.
    pub(super) db: Database,
    /// The keys of the bus.
    pub keys: Keys,
    /// What the roles of the process have done.
    pub(super) stats: Arc<Stats>,
    /// How it lives.
    pub(super) options: NodeOptions,
    /// What it does.
    roles: SharedRoles,
    /// Tells the heartbeat what to do.
    commands: mpsc::Sender<Command>,
    /// How it stands.
    standing: watch::Receiver<Standing>,
    /// Tells its workers to end.
    stop: watch::Sender<bool>,
    /// How often each of its workers wants to know of changes.
    workers: watch::Sender<Vec<Duration>>,
    /// What was last seen of the other nodes.
    glances: watch::Receiver<Option<Arc<Glance>>>,
    /// The heartbeat, and the task that looks at the other nodes.
    tasks: Mutex<JoinSet<()>>,
}

/// What the heartbeat is told to do.
enum Command {
    /// Beat now, so that others see the roles as they are.
    Tell(oneshot::Sender<Result<()>>),
    /// Remove the row, and end.
    Leave(oneshot::Sender<Result<()>>),
}

/// A role of a node, until it is dropped.
#[derive(Debug)]
pub(crate) struct RoleGuard {
    /// The roles of the node.
    roles: SharedRoles,
    /// This one.
    role: Role,
}

impl Drop for RoleGuard {
    fn drop(&mut self) {
        lock(&self.roles).remove(&self.role);
    }
}

/// A worker of a node, until it is dropped.
pub(super) struct WorkerGuard {
    /// How often each worker of the node wants to know of changes.
    workers: watch::Sender<Vec<Duration>>,
    /// How often this one does.
    interval: Duration,
}

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        self.workers.send_modify(|intervals| {
            let place = intervals.iter().position(|interval| *interval == self.interval);
            intervals.swap_remove(place.expect("it was added"));
        });
    }
}

impl Member {
    /// Joins the nodes of the bus. Fails with [`Error::Invalid`] if another process lives under the same id; if one has
    /// died under it, waits until that is certain.
    pub async fn join(
        db: &Database,
        keys: &Keys,
        stats: &Arc<Stats>,
        options: NodeOptions,
    ) -> Result<Arc<Self>> {
        options.check()?;
        let id = options.id.unwrap_or_else(|| NodeId::random(db.env()));
        let roles = SharedRoles::default();
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let (standing, observed) = watch::channel(None);
        let mut heart = Heart {
            id,
            db: db.clone(),
            keys: keys.clone(),
            options: options.clone(),
            roles: Arc::clone(&roles),
            standing,
            row: NodeRow { beat: 0, token: draw(db.env()), started_ms: 0 },
            told: Roles::default(),
            beaten: db.env().now(),
            strangers: Sightings::default(),
        };
        let mut known = false;
        while let Some(changed) = heart.claim().await? {
            if known && changed {
                return Err(Error::invalid(
                    "node id",
                    format!("another process lives as node {id}: give each its own, or have one drawn"),
                ));
            }
            known = true;
            db.env().sleep(options.heartbeat).await;
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(heart.run(received));
        let (workers, (seen, glances)) = (watch::Sender::new(Vec::new()), watch::channel(None));
        tasks.spawn(glance::look(db.clone(), keys.clone(), workers.subscribe(), seen));
        Ok(Arc::new(Self {
            id,
            db: db.clone(),
            keys: keys.clone(),
            stats: Arc::clone(stats),
            options,
            roles,
            commands,
            standing: observed,
            stop: watch::Sender::new(false),
            workers,
            glances,
            tasks: Mutex::new(tasks),
        }))
    }

    /// Which node it is.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Lists `role`, so that others see it when this returns. Fails with [`Error::Invalid`] if the node has it already.
    pub async fn enter(&self, role: Role) -> Result<RoleGuard> {
        let count = {
            let mut roles = lock(&self.roles);
            if !roles.insert(role.clone()) {
                return Err(Error::invalid(
                    "role",
                    format!("node {} is {role} already: start it on another node", self.id),
                ));
            }
            roles.len()
        };
        let guard = RoleGuard { roles: Arc::clone(&self.roles), role };
        if count > ROLES_MAX {
            return Err(Error::invalid("role", format!("a node has at most {ROLES_MAX} roles")));
        }
        self.tell().await?;
        Ok(guard)
    }

    /// Has the row say what the roles are now.
    pub(super) async fn tell(&self) -> Result<()> {
        self.command(Command::Tell).await
    }

    /// Ends the workers of the node, which release what they hold, and removes its row.
    pub async fn leave(&self) -> Result<()> {
        self.stop.send_replace(true);
        let mut workers = self.workers.subscribe();
        workers.wait_for(Vec::is_empty).await.expect("the sender is in self");
        let left = self.command(Command::Leave).await;
        // Whoever has left may close the store at once, and open it again.
        let mut tasks = std::mem::take(&mut *lock(&self.tasks));
        tasks.shutdown().await;
        left
    }

    /// What came of starting a role for which the node has joined: if that failed, it leaves.
    pub async fn or_leave<T>(&self, started: Result<T>) -> Result<T> {
        if started.is_err()
            && let Err(error) = self.leave().await
        {
            tracing::warn!(%error, "the node is left to expire");
        }
        started
    }

    /// Has the heartbeat do something, and waits until it is done. A heartbeat that has ended does nothing.
    async fn command(&self, command: impl FnOnce(oneshot::Sender<Result<()>>) -> Command) -> Result<()> {
        let (reply, done) = oneshot::channel();
        if self.commands.send(command(reply)).await.is_err() {
            return Err(has_left());
        }
        done.await.unwrap_or_else(|_| Err(has_left()))
    }

    /// How it stands, to be watched. Once the heartbeat has ended there is no sender.
    pub(super) fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
    }

    /// Whether its workers are to end, to be watched.
    pub(super) fn stop(&self) -> watch::Receiver<bool> {
        self.stop.subscribe()
    }

    /// Counts a worker that wants to know of changes once per `interval`.
    pub(super) fn add_worker(&self, interval: Duration) -> WorkerGuard {
        self.workers.send_modify(|intervals| intervals.push(interval));
        WorkerGuard { workers: self.workers.clone(), interval }
    }

    /// What was last seen of the other nodes, to be watched.
    pub(super) fn glances(&self) -> watch::Receiver<Option<Arc<Glance>>> {
        self.glances.clone()
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Member").field(&self.id).finish()
    }
}

/// What is asked of a node that has left.
fn has_left() -> Error {
    Error::invalid("node", "it has been shut down: join with another one")
}

/// 16 random bytes.
pub(super) fn draw(env: &Env) -> [u8; 16] {
    NodeId::random(env).0
}

/// The heartbeat of a node.
struct Heart {
    /// Which node it is.
    id: NodeId,
    /// The store.
    db: Database,
    /// The keys of the bus.
    keys: Keys,
    /// How it lives.
    options: NodeOptions,
    /// What it does.
    roles: SharedRoles,
    /// How it stands.
    standing: watch::Sender<Standing>,
    /// What it has last written, or the token under which it has.
    row: NodeRow,
    /// The roles that it has last written.
    told: Roles,
    /// When it began to write that.
    beaten: Duration,
    /// The row of another process under its id, if it has seen one.
    strangers: Sightings<(), ([u8; 16], u64)>,
}

impl Heart {
    /// Beats until it is told to leave.
    async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut next = self.options.heartbeat;
        loop {
            let env = self.db.env().clone();
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(Command::Tell(reply)) => {
                        let told = self.pulse().await;
                        // Who asked may be gone.
                        let _ = reply.send(told);
                    }
                    Some(Command::Leave(reply)) => {
                        let left = self.leave().await;
                        // Whoever has left may close the store at once, and open it again.
                        drop(self);
                        let _ = reply.send(left);
                        return;
                    }
                    None => return,
                },
                () = env.sleep(next) => {
                    if let Err(error) = self.pulse().await {
                        tracing::warn!(node = %self.id, %error, "heartbeat failed");
                    }
                }
            }
            let due = self.beaten.saturating_add(self.options.heartbeat).saturating_sub(env.now());
            // A beat that has failed is not tried again at once.
            next = due.max(self.options.heartbeat / 8);
        }
    }

    /// Beats, or joins again if the node has fallen out.
    async fn pulse(&mut self) -> Result<()> {
        let env = self.db.env().clone();
        if self.standing.borrow().is_some() {
            let left = self.beaten.saturating_add(self.options.expiry).saturating_sub(env.now());
            if left.is_zero() {
                self.fall_out("it has not beaten for too long");
            } else {
                let began = env.now();
                let beaten = tokio::select! {
                    beaten = self.beat() => Some(beaten?),
                    () = env.sleep(left) => None,
                };
                match beaten {
                    Some(Some((row, roles))) => {
                        (self.row, self.told) = (row, roles);
                        self.beaten = began;
                        return Ok(());
                    }
                    Some(None) => self.fall_out("its row is gone"),
                    None => self.fall_out("it cannot beat"),
                }
            }
        }
        if self.claim().await?.is_some() {
            tracing::error!(node = %self.id, "another process runs under the id of this node");
        } else {
            tracing::info!(node = %self.id, "node has joined again");
        }
        Ok(())
    }

    /// Writes the next beat; returns it, or `None` if the row is not that of this process any more.
    async fn beat(&self) -> Result<Option<(NodeRow, Roles)>> {
        let roles = Roles(lock(&self.roles).clone());
        let row = NodeRow { beat: self.row.beat + 1, ..self.row };
        let key = self.keys.node(self.id);
        let policy = self.policy();
        let beaten = self.db.run_with(&policy, async |tx| {
            let is_mine = read(&tx, &key).await?.is_some_and(|found| found.token == row.token);
            if is_mine {
                tx.set(&key, &row.to_bytes());
                if roles != self.told {
                    self.tell_roles(&tx, &roles);
                }
            }
            Ok(is_mine)
        });
        Ok(beaten.await?.then_some((row, roles)))
    }

    /// Writes the roles, and has others look at them.
    fn tell_roles(&self, tx: &Transaction, roles: &Roles) {
        tx.set(&self.keys.roles(self.id), &roles.to_bytes());
        changed(tx, &self.keys);
    }

    /// Tells the workers that the node does not take part any more.
    fn fall_out(&mut self, reason: &'static str) {
        tracing::warn!(node = %self.id, reason, "node has fallen out and gives everything up");
        self.standing.send_replace(None);
    }

    /// Writes the row under a new token, unless another process lives under the id: then returns whether its row has
    /// changed.
    async fn claim(&mut self) -> Result<Option<bool>> {
        let env = self.db.env().clone();
        let (known, token, began) = (self.row.token, draw(&env), env.now());
        let roles = Roles(lock(&self.roles).clone());
        let row = NodeRow { beat: 1, token, started_ms: env.wall_ms() };
        let key = self.keys.node(self.id);
        let strangers = &self.strangers;
        let (expiry, policy) = (self.options.expiry, self.policy());
        let claimed = self.db.run_with(&policy, async |tx| {
            let stranger =
                read(&tx, &key).await?.filter(|found| found.token != known && found.token != row.token);
            let stranger = stranger.map(|found| (found.token, found.beat));
            match stranger {
                Some(stranger) if strangers.age(&(), &stranger, began) < expiry => Ok(Some(stranger)),
                _ => {
                    tx.set(&key, &row.to_bytes());
                    self.tell_roles(&tx, &roles);
                    Ok(None)
                }
            }
        });
        if let Some(stranger) = claimed.await? {
            let changed = self.strangers.age(&(), &stranger, env.now()).is_zero();
            self.strangers.adopt([((), stranger)], env.now());
            return Ok(Some(changed));
        }
        (self.row, self.told) = (row, roles);
        self.beaten = began;
        self.standing.send_replace(Some(token));
        Ok(None)
    }

    /// Removes the row, if it is that of this process.
    async fn leave(&mut self) -> Result<()> {
        self.standing.send_replace(None);
        let key = self.keys.node(self.id);
        let left = self.db.run(async |tx| {
            if read(&tx, &key).await?.is_some_and(|found| found.token == self.row.token) {
                tx.clear(&key);
                tx.clear(&self.keys.roles(self.id));
            }
            Ok(())
        });
        left.await
    }

    /// No attempt at a beat begins when the next beat is due.
    fn policy(&self) -> RetryPolicy {
        RetryPolicy { elapsed_max: Some(self.options.heartbeat), ..RetryPolicy::default() }
    }
}

/// The row at `key`, read so that its change makes `tx` fail.
async fn read(tx: &Transaction, key: &[u8]) -> Result<Option<NodeRow>> {
    tx.get(key, Isolation::Serializable).await?.map(|value| NodeRow::from_bytes(&value)).transpose()
}
