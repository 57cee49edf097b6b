//! [`Heartbeat`]: the only task that writes the row of a node, and its roles.
//!
//! The task also judges its own node. If it has not committed a heartbeat for as long as the row allows, or if the row is gone, the node is
//! no longer a member. Then the node's workers end all work, and the task writes the row again, with a new token.
//!
//! A heartbeat reads nothing. Its transaction reads at the version of the previous heartbeat, with the node's row and the configuration of
//! the bus in its conflict set, so it is committed if neither was written since. If either was, or if the store no longer remembers that
//! version, the next attempt reads both.
//!
//! The token distinguishes two processes with the same id. A row with an unknown token belongs to another process, and is replaced only
//! once it has stayed unchanged for as long as it allows.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::{
    roles::{ROLES_MAX, clear_role, members_changed, remove_page, set_role},
    shared::{Command, News, Registration, Roles, Shared},
};
use crate::{
    base::{
        env::Env,
        error::{Error, Result, panic_text},
        tasks::Ended,
    },
    state::keys::{NodeId, NodeRow},
    store::{Isolation, KeyRange, RetryPolicy, Transaction},
};

/// The name under which failures of the heartbeat are logged.
const HEARTBEAT: &str = "heartbeat of a node";

/// How long after a heartbeat the next one can still rely on its version. The store remembers versions for a little longer.
const REMEMBERED: Duration = Duration::from_secs(4);

/// Returns 16 random bytes.
pub(super) fn draw(env: &Env) -> [u8; 16] {
    NodeId::random(env).0
}

/// The result of writing the node's row.
pub(super) enum Claim {
    /// The node is a member.
    Joined,
    /// The member's row is gone, or another process may be alive under the id.
    Taken {
        /// Whether the row of the other process has changed since the last attempt.
        changed: bool,
    },
}

pub(super) struct Heartbeat {
    shared: Arc<Shared>,
    /// The last row that was written, or the next one to write.
    row: NodeRow,
    /// The token of a claim whose result is not certain yet.
    claiming: Option<[u8; 16]>,
    /// When the row was written, or a little before: after the reads of the first attempt, and before any commit. Nobody else can have seen
    /// the row sooner. However long the store delayed those reads, the expiry begins after them. Otherwise a node that joins a recovering
    /// cluster would consider itself dead a moment later.
    beaten: Duration,
    /// The version of the last write of the row.
    version: Option<u64>,
    /// The row of another process under the node's id, as the last attempt found it.
    stranger: Option<NodeRow>,
}

/// The effect of an attempt to write the node's row.
enum Written {
    Row,
    /// A page of the roles of a dead process under the node's id was removed.
    Page,
    /// Nothing: another process may be alive under the id, or the member's row is gone.
    Nothing(Option<NodeRow>),
}

impl Heartbeat {
    /// Creates the heartbeat of a node that has not joined yet.
    pub fn new(shared: &Arc<Shared>) -> Self {
        let (env, expiry_ms) = (shared.store.env(), shared.options.expiry_ms());
        Self {
            shared: Arc::clone(shared),
            row: NodeRow { beat: 0, token: draw(env), started_ms: 0, expiry_ms },
            claiming: None,
            beaten: env.now(),
            version: None,
            stranger: None,
        }
    }

    /// Writes heartbeats until the command to leave arrives.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let (env, interval) = (self.shared.store.env().clone(), self.shared.options.heartbeat);
        // A fixed time, so that commands that write nothing do not postpone the heartbeat.
        let mut next = env.now().saturating_add(interval);
        loop {
            tokio::select! {
                biased;
                Some(command) = commands.recv() => match command {
                    Command::Publish(reply) => {
                        if self.is_published() {
                            let _ = reply.send(Ok(()));
                            continue;
                        }
                        // The caller may be gone.
                        let _ = reply.send(self.beat().await);
                    }
                    Command::Leave(reply) => {
                        let left = self.leave().await;
                        // After the reply the caller may close the store at once, and open it again.
                        drop(self);
                        let _ = reply.send(left);
                        return;
                    }
                },
                () = env.sleep(next.saturating_sub(env.now())) => {
                    let beaten = self.beat().await;
                    let health = &self.shared.stats.health;
                    match beaten {
                        Ok(()) => health.works(HEARTBEAT, 0),
                        Err(error) => health.failed(&env, HEARTBEAT, 0, &error),
                    }
                }
            }
            // Do not repeat a failed heartbeat at once.
            let soonest = env.now().saturating_add(interval / 8);
            next = self.beaten.saturating_add(interval).max(soonest);
        }
    }

    /// Whether the stored roles are up to date.
    fn is_published(&self) -> bool {
        self.shared.is_member() && self.shared.roles.borrow().is_published()
    }

    /// Writes heartbeats until all roles are stored. A panic costs one heartbeat, which counts as failed.
    async fn beat(&mut self) -> Result<()> {
        loop {
            let pulse = AssertUnwindSafe(self.pulse()).catch_unwind().await;
            pulse.unwrap_or_else(|panic| {
                let panic = panic_text(&*panic).to_owned();
                self.shared.stats.panicked(self.shared.store.env(), HEARTBEAT, &panic);
                let source = Arc::new(Ended::Panicked(panic));
                Err(Error::Task { shard: None, attempts: 1, source })
            })?;
            if self.is_published() {
                return Ok(());
            }
        }
    }

    /// Writes a heartbeat, or joins again if the node is no longer a member. Once the bus is gone, does neither.
    async fn pulse(&mut self) -> Result<()> {
        if let Some(ended) = self.shared.stats.health.ended() {
            return Err(ended.clone());
        }
        let beaten = self.beat_or_join().await;
        if let Err(gone @ Error::BusGone { .. }) = &beaten {
            self.shared.stats.health.end(gone.clone());
            self.drop_out("its bus is gone");
        }
        beaten
    }

    /// Writes a heartbeat, or joins again if the node is no longer a member. Fails unless the node is a member afterwards.
    async fn beat_or_join(&mut self) -> Result<()> {
        let shared = Arc::clone(&self.shared);
        if shared.is_member() {
            let env = shared.store.env();
            let left = self.beaten.saturating_add(shared.options.expiry).saturating_sub(env.now());
            let beaten = tokio::select! {
                biased;
                () = env.sleep(left) => None,
                beaten = self.write() => Some(beaten?),
            };
            match beaten {
                Some(Claim::Joined) => return Ok(()),
                Some(Claim::Taken { .. }) => self.drop_out("its row is gone"),
                None => self.drop_out("it has sent no heartbeat for too long"),
            }
        }
        match self.write().await? {
            // Logged at the same level as the loss of the membership, so that a log shows both lines or neither.
            Claim::Joined => tracing::warn!(node = %shared.id, "node is a member again"),
            Claim::Taken { .. } => {
                let reason = format!(
                    "node {}'s row belongs to another process: if it is alive, give each its own id",
                    shared.id
                );
                return Err(Error::invalid("node id", reason));
            }
        }
        Ok(())
    }

    /// Fails with [`Error::BusGone`] if the bus is not the one that was opened, because a node must not write into another bus.
    async fn check_bus(&self, tx: &Transaction) -> Result<()> {
        let Some(config) = self.shared.config else { return Ok(()) };
        let stored = tx.get(&self.shared.keys.config(), Isolation::Snapshot).await?;
        config.check_stored(stored.as_deref())
    }

    /// Writes the changed roles.
    fn publish(&self, tx: &Transaction, news: &[News]) {
        let Shared { id, keys, .. } = &*self.shared;
        members_changed(tx, keys, news.iter().map(|(role, _)| role));
        for (role, now) in news {
            let Some((max, idle)) = now else {
                clear_role(tx, keys, *id, role);
                continue;
            };
            set_role(tx, keys, *id, role, *max);
            if let Some(key) = idle {
                tx.clear(key);
            }
        }
    }

    /// Changes which roles are unpublished, without waking anybody, because nobody waits for such a change.
    fn change_roles(&self, change: impl FnOnce(&mut Roles)) {
        self.shared.roles.send_if_modified(|roles| {
            change(roles);
            false
        });
    }

    /// Notes the token under which the node is a member, or that it is not one, and informs its workers and `ready`.
    fn register(&self, token: Registration) {
        self.shared.registration.send_replace(token);
        self.shared.stats.health.set_membership(self.shared.id.0, token);
    }

    /// Notes that the node is no longer a member.
    fn drop_out(&self, reason: &'static str) {
        tracing::warn!(node = %self.shared.id, reason, "node has dropped out and gives up all its work");
        self.shared.stats.nodes_dropped_out.add(1);
        self.register(None);
    }

    /// Writes the next heartbeat, and at most [`ROLES_MAX`] roles that have changed; the others follow at once in the next heartbeats. A
    /// member overwrites only its own row. A node that is not a member joins: it writes under a new token, unless another process may be
    /// alive under the id. Anything that a dead process left under the id is removed first.
    pub async fn write(&mut self) -> Result<Claim> {
        let shared = Arc::clone(&self.shared);
        let env = shared.store.env();
        let (before, began, is_member) = (self.row.token, env.now(), shared.is_member());
        if !is_member {
            self.change_roles(Roles::forget_published);
        }
        let news = shared.roles.borrow().news(ROLES_MAX);
        // The beat grows even if the commit fails, because other nodes may have seen it.
        self.row.beat += 1;
        let mut row = self.row;
        if !is_member {
            // The token stays the same until a claim succeeds, so that a claim that was committed without an answer is recognised.
            row.token = *self.claiming.get_or_insert_with(|| draw(env));
            row.started_ms = env.wall_ms();
        }
        // No attempt begins once the next heartbeat is due.
        let policy = RetryPolicy { elapsed_max: Some(shared.options.heartbeat), ..RetryPolicy::default() };
        let is_fresh = is_member && began.saturating_sub(self.beaten) < REMEMBERED;
        let (known, time) = (Mutex::new(self.version.filter(|_| is_fresh)), OnceLock::new());
        let write = async |tx: Transaction| {
            let known = known.lock().take();
            if let Some(version) = known {
                tx.set_read_version(version);
                let config = shared.config.map(|_| shared.keys.config());
                for key in config.into_iter().chain([shared.keys.node(shared.id)]) {
                    tx.add_read_conflict(&KeyRange::key(&key));
                }
            } else if let Some(instead) = self.found(&tx, [before, row.token], began).await? {
                return Ok(instead);
            }
            tx.set(&shared.keys.node(shared.id), &row.to_bytes());
            self.publish(&tx, &news);
            time.get_or_init(|| env.now());
            Ok(Written::Row)
        };
        let committed = loop {
            match shared.store.run_committed(&policy, &write).await? {
                (Written::Page, _) => {}
                (Written::Row, committed) => break committed,
                (Written::Nothing(found), _) => {
                    shared.seen.lock().note(found.map(|found| (shared.id, found)), env.now());
                    let changed = found.is_some() && found != self.stranger;
                    self.stranger = found;
                    return Ok(Claim::Taken { changed });
                }
            }
        };
        self.version = committed.map(|committed| committed.versionstamp.version());
        (self.row, self.claiming) = (row, None);
        self.change_roles(|roles| roles.were_published(&news));
        self.beaten = time.into_inner().expect("the row was written");
        if !is_member {
            self.register(Some(row.token));
        }
        Ok(Claim::Joined)
    }

    /// Reads the row under the node's id. `tokens` are those under which this process may have written the row. Returns what to do instead
    /// of writing the row, if anything.
    async fn found(
        &self,
        tx: &Transaction,
        tokens: [[u8; 16]; 2],
        began: Duration,
    ) -> Result<Option<Written>> {
        let Shared { id, keys, seen, .. } = &*self.shared;
        self.check_bus(tx).await?;
        match self.shared.row(tx, Isolation::Serializable).await? {
            found if self.shared.is_member() => {
                let is_own = found.is_some_and(|found| found.token == self.row.token);
                Ok((!is_own).then_some(Written::Nothing(found)))
            }
            // A row that this process wrote stays, and so do its roles: the node knows which of them have changed.
            Some(found) if !tokens.contains(&found.token) => {
                if !seen.lock().is_silent(id, &found, began) {
                    return Ok(Some(Written::Nothing(Some(found))));
                }
                remove_page(tx, keys, *id, &found).await?;
                Ok(Some(Written::Page))
            }
            _ => Ok(None),
        }
    }

    /// Removes the node's row and roles, if they belong to this process.
    async fn leave(&mut self) -> Result<()> {
        let Shared { id, store, keys, stats, registration, .. } = &*self.shared;
        registration.send_replace(None);
        if stats.health.ended().is_some() {
            return Ok(());
        }
        let leave_page = async |tx: Transaction| match self.shared.row(&tx, Isolation::Serializable).await? {
            Some(found) if [self.row.token, NodeRow::CONDEMNED].contains(&found.token) => {
                remove_page(&tx, keys, *id, &found).await
            }
            _ => Ok(true),
        };
        while !store.run(leave_page).await? {}
        Ok(())
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.shared.stats.health.left(self.shared.id.0);
    }
}
