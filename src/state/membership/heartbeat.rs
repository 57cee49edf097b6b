//! [`Heartbeat`]: the one task that writes the row of a node, and its roles.
//!
//! It also judges the node itself. If it has not committed a beat for as long as its row allows, or if its row is
//! gone, the node has fallen out. Then the node's workers end everything, and the task writes the row again, with a
//! new token.
//!
//! The token distinguishes two processes under one id: a row with an unknown token belongs to another process, and is
//! only replaced after it has not changed for as long as that row allows.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures_util::FutureExt;
use tokio::sync::{mpsc, oneshot, watch};

use super::{
    NodeOptions,
    entered::{News, Roles},
    last_seen::LastSeen,
    roles::{ROLES_MAX, clear_page, clear_role, members_changed, set_role, stored_roles},
};
use crate::{
    base::{
        env::Env,
        error::{Error, Result, panic_text},
        tasks::Ended,
    },
    state::{
        keys::{Config, Keys, NodeId, NodeRow},
        stats::Stats,
    },
    store::{Database, Isolation, RetryPolicy, Transaction},
};

/// The name of the heartbeat in reports of trouble.
const HEARTBEAT: &str = "heartbeat of a node";

/// The membership of the node: the token under which it is a member, or `None` while it has fallen out.
pub(super) type Registration = Option<[u8; 16]>;

/// The roles, shared by the heartbeat and the guards of the roles.
pub(super) type SharedRoles = watch::Sender<Roles>;

/// 16 random bytes.
pub(super) fn draw(env: &Env) -> [u8; 16] {
    NodeId::random(env).0
}

pub(super) enum Command {
    /// Beat now if the roles have changed, so that other nodes see them.
    Publish(oneshot::Sender<Result<()>>),
    /// Remove the row, and end.
    Leave(oneshot::Sender<Result<()>>),
}

/// The result of a write of the node's row.
pub(super) enum Claim {
    /// The node is a member.
    Joined,
    /// The row of the member is gone, or another process may live under the id.
    Taken {
        /// Whether the row of the other process has changed since the last attempt.
        changed: bool,
    },
}

pub(super) struct Heartbeat {
    id: NodeId,
    db: Database,
    keys: Keys,
    /// The configuration that the bus was opened with; `None` if it is not compared.
    config: Option<Config>,
    stats: Arc<Stats>,
    options: NodeOptions,
    roles: SharedRoles,
    registration: watch::Sender<Registration>,
    /// The last written row, or the one to be written.
    row: NodeRow,
    /// The token of a claim whose result is not certain yet.
    claiming: Option<[u8; 16]>,
    /// When the row was written, or a little before: after the reads of the first attempt, and before any commit. Nobody
    /// else can have seen the row sooner. However long the store let those reads wait, the expiry begins after them: a
    /// node once joined a recovering cluster, and took itself for dead a moment later.
    beaten: Duration,
    /// The row of another process under its id, if it has seen one.
    strangers: LastSeen<(), NodeRow>,
}

impl Heartbeat {
    /// The heartbeat of node `id`, which has not joined yet.
    pub fn new(
        (db, keys, config): (&Database, &Keys, Option<Config>),
        stats: &Arc<Stats>,
        id: NodeId,
        options: &NodeOptions,
        roles: &SharedRoles,
        registration: watch::Sender<Registration>,
    ) -> Self {
        let row = NodeRow { beat: 0, token: draw(db.env()), started_ms: 0, expiry_ms: options.expiry_ms() };
        Self {
            id,
            db: db.clone(),
            keys: keys.clone(),
            config,
            stats: Arc::clone(stats),
            options: options.clone(),
            roles: roles.clone(),
            registration,
            row,
            claiming: None,
            beaten: db.env().now(),
            strangers: LastSeen::default(),
        }
    }

    /// Beats until it gets the command to leave.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let env = self.db.env().clone();
        // This is a fixed moment, so that commands which write nothing do not move it.
        let mut next = env.now().saturating_add(self.options.heartbeat);
        loop {
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(Command::Publish(reply)) => {
                        if self.is_published() {
                            let _ = reply.send(Ok(()));
                            continue;
                        }
                        // The caller may be gone.
                        let _ = reply.send(self.beat().await);
                    }
                    Some(Command::Leave(reply)) => {
                        let left = self.leave().await;
                        // After the answer the caller may close the store at once, and open it again.
                        drop(self);
                        let _ = reply.send(left);
                        return;
                    }
                    None => return,
                },
                () = env.sleep(next.saturating_sub(env.now())) => {
                    let beaten = self.beat().await;
                    let health = &self.stats.health;
                    match beaten {
                        Ok(()) => health.works(HEARTBEAT, 0),
                        Err(error) => health.failed(&env, HEARTBEAT, 0, &error),
                    }
                }
            }
            // A failed beat is not tried again at once.
            let soonest = env.now().saturating_add(self.options.heartbeat / 8);
            next = self.beaten.saturating_add(self.options.heartbeat).max(soonest);
        }
    }

    /// Whether the stored roles are the present ones.
    fn is_published(&self) -> bool {
        self.registration.borrow().is_some() && self.roles.borrow().is_published()
    }

    /// Beats until all roles are stored.
    async fn beat(&mut self) -> Result<()> {
        loop {
            self.guarded_pulse().await?;
            if self.is_published() {
                return Ok(());
            }
        }
    }

    /// [`Heartbeat::pulse`]; a panic in it costs one beat, which has failed.
    async fn guarded_pulse(&mut self) -> Result<()> {
        let pulse = AssertUnwindSafe(self.pulse()).catch_unwind().await;
        pulse.unwrap_or_else(|panic| {
            let panic = panic_text(&*panic).to_owned();
            self.stats.panicked(self.db.env(), HEARTBEAT, &panic);
            let source = Arc::new(Ended::Panicked(panic));
            Err(Error::Task { shard: None, attempts: 1, source })
        })
    }

    /// Beats, or joins again if the node has fallen out. Once the bus is gone it does neither.
    async fn pulse(&mut self) -> Result<()> {
        if let Some(ended) = self.stats.health.ended() {
            return Err(ended.clone());
        }
        let beaten = self.beat_or_join().await;
        if let Err(gone @ Error::BusGone { .. }) = &beaten {
            self.stats.health.end(gone.clone());
            self.fall_out("its bus is gone");
        }
        beaten
    }

    /// Beats, or joins again if the node has fallen out. Fails unless the node is a member afterwards.
    async fn beat_or_join(&mut self) -> Result<()> {
        let env = self.db.env().clone();
        if self.registration.borrow().is_some() {
            let left = self.beaten.saturating_add(self.options.expiry).saturating_sub(env.now());
            let beaten = tokio::select! {
                biased;
                () = env.sleep(left) => None,
                beaten = self.write() => Some(beaten?),
            };
            match beaten {
                Some(Claim::Joined) => return Ok(()),
                Some(Claim::Taken { .. }) => self.fall_out("its row is gone"),
                None => self.fall_out("it has sent no heartbeat for too long"),
            }
        }
        match self.write().await? {
            // This has the level of the line about the fall, so that a log shows both lines or none.
            Claim::Joined => tracing::warn!(node = %self.id, "node is a member again"),
            Claim::Taken { .. } => {
                let reason = format!(
                    "the row of node {} is of another process: if it lives, give each its own id",
                    self.id
                );
                return Err(Error::invalid("node id", reason));
            }
        }
        Ok(())
    }

    /// Fails with [`Error::BusGone`] if the bus is not the one that was opened: a node must not write into another
    /// bus.
    async fn check_bus(&self, tx: &Transaction) -> Result<()> {
        let Some(config) = self.config else { return Ok(()) };
        let stored = tx.get(&self.keys.config(), Isolation::Snapshot).await?;
        config.check_stored(stored.as_deref())
    }

    /// Writes what has changed of the roles.
    fn publish(&self, tx: &Transaction, news: &[News]) {
        members_changed(tx, &self.keys, news.iter().map(|news| &news.role));
        for News { role, now, .. } in news {
            let Some((max, idle)) = now else {
                clear_role(tx, &self.keys, self.id, role);
                continue;
            };
            set_role(tx, &self.keys, self.id, role, *max);
            if let Some(key) = idle {
                tx.clear(key);
            }
        }
    }

    /// Changes the roles. Nobody waits for that.
    fn change_roles(&self, change: impl FnOnce(&mut Roles)) {
        self.roles.send_if_modified(|roles| {
            change(roles);
            false
        });
    }

    /// Informs the workers that the node is no longer a member.
    fn fall_out(&mut self, reason: &'static str) {
        tracing::warn!(node = %self.id, reason, "node has fallen out and gives everything up");
        self.stats.nodes_fallen_out.add(1);
        self.registration.send_replace(None);
        self.stats.health.set_membership(self.id.0, None);
    }

    /// Writes the next beat, and at most [`ROLES_MAX`] roles that have changed, so that the others follow at once in the next beats. A member writes over its own row only. Another node joins: it writes under a new
    /// token, unless another process may live under the id.
    pub async fn write(&mut self) -> Result<Claim> {
        let (env, policy) = (self.db.env().clone(), self.policy());
        let (before, began) = (self.row.token, env.now());
        let is_member = self.registration.borrow().is_some();
        if !is_member {
            self.change_roles(Roles::forget_published);
        }
        let news = self.roles.borrow().news(ROLES_MAX);
        // The beat grows even if the commit fails here, because other nodes may have seen it.
        self.row.beat += 1;
        let mut row = self.row;
        if !is_member {
            // The token stays the same until a claim succeeds, so that a claim that was committed without an answer is
            // recognised.
            row.token = *self.claiming.get_or_insert_with(|| draw(&env));
            row.started_ms = env.wall_ms();
        }
        let written = OnceLock::new();
        let result = self.db.run_with(&policy, async |tx| {
            self.check_bus(&tx).await?;
            let key = self.keys.node(self.id);
            let found = read(&tx, &key).await?;
            let may_write = match &found {
                None => !is_member,
                Some(found) if is_member => found.token == row.token,
                Some(found) => {
                    [before, row.token, NodeRow::CONDEMNED].contains(&found.token)
                        || self.strangers.age(&(), found, began) >= found.expiry()
                }
            };
            if !may_write {
                return Ok(Err(found));
            }
            tx.set(&key, &row.to_bytes());
            let stored = if is_member { Vec::new() } else { stored_roles(&tx, &self.keys, self.id).await? };
            self.publish(&tx, &news);
            written.get_or_init(|| env.now());
            Ok(Ok(stored))
        });
        match result.await? {
            Ok(stored) => {
                (self.row, self.claiming) = (row, None);
                self.change_roles(|roles| {
                    roles.were_published(&news);
                    roles.found(stored);
                });
            }
            Err(found) => {
                let now = env.now();
                let changed = found.is_some_and(|found| self.strangers.age(&(), &found, now).is_zero());
                self.strangers.adopt(found.map(|found| ((), found)), now);
                return Ok(Claim::Taken { changed });
            }
        }
        self.beaten = written.into_inner().expect("the row was written");
        if !is_member {
            self.registration.send_replace(Some(row.token));
            self.stats.health.set_membership(self.id.0, Some(row.token));
        }
        Ok(Claim::Joined)
    }

    /// Removes the row and the roles, if they are those of this process.
    async fn leave(&mut self) -> Result<()> {
        self.registration.send_replace(None);
        if self.stats.health.ended().is_some() {
            return Ok(());
        }
        let key = self.keys.node(self.id);
        let leave_page = async |tx: Transaction| match read(&tx, &key).await? {
            Some(found) if found.token == self.row.token => clear_page(&tx, &self.keys, self.id).await,
            _ => Ok(true),
        };
        while !self.db.run(leave_page).await? {}
        Ok(())
    }

    /// A policy under which no attempt at a beat begins once the next beat is due.
    fn policy(&self) -> RetryPolicy {
        RetryPolicy { elapsed_max: Some(self.options.heartbeat), ..RetryPolicy::default() }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.stats.health.left(self.id.0);
    }
}

/// The row at `key`, read serializably.
async fn read(tx: &Transaction, key: &[u8]) -> Result<Option<NodeRow>> {
    let value = tx.get(key, Isolation::Serializable).await?;
    value.map(|value| NodeRow::from_bytes(&value).map_err(|error| error.at(key))).transpose()
}
