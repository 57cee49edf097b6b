//! [`NeighbourWatch`]: finds dead nodes and changed versions, once for all roles of a node.
//!
//! Nodes form a ring in the order of their ids. Each node watches the heartbeats of the next few, so the number of its reads does not grow
//! with the number of nodes, and several nodes watch each node. A node whose row has not changed for as long as the row allows, by the
//! observer's clock, is dead. The observer removes its roles, one page per transaction, and its row last. After a removal the observer
//! watches eight more nodes for each one that it removed, until an expiry has passed without another removal. So when many nodes die at
//! once, the last is found about as soon as the first, even if it comes after many other dead ones, and the total number of reads grows
//! with the number of dead nodes, not with the square of the number of nodes.
//!
//! For the workers of the node, the same transaction also reads whether pools have changed. While there are few nodes, one read returns all
//! of their rows and these changes.

use std::{collections::BTreeSet, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::{FutureExt, StreamExt, stream};

use super::{
    roles::{Versions, node_rows, remove_page},
    shared::Shared,
};
use crate::{
    base::{
        env::Env,
        error::{Result, panic_text},
    },
    state::{
        keys::{Keys, NodeId, NodeRow},
        polls::{self, Poll, Polled},
    },
    store::{Isolation, KeyRange, RangeRead, RetryPolicy, Transaction, key_after},
};

/// The name under which failures of the watch are logged.
const WATCH: &str = "watch over other nodes";

/// How many nodes each node watches, unless it has just removed some.
const NEIGHBOURS: usize = 8;

/// The maximum number of nodes that are removed at once, each in its own transactions.
const REMOVALS_MAX: usize = 10;

/// The shortest pause of the watch is its pace divided by this.
const HASTE: u32 = 32;

/// The watch of a node over other nodes.
pub(super) struct NeighbourWatch {
    shared: Arc<Shared>,
    /// How often the watch polls, unless a worker wants it to poll more often.
    pace: Duration,
    /// The watched nodes, as they were last read.
    watched: Vec<(NodeId, NodeRow)>,
    /// When the watch began to poll without a gap. Anything seen before does not count: a watch that was paused, or could not reach the
    /// store, cannot know which nodes tried to write but could not.
    steady_since: Duration,
    polled: Duration,
    /// How many nodes the watch covers, and until when these may be more than [`NEIGHBOURS`].
    width: usize,
    wide_until: Duration,
    /// The last pause.
    pause: Duration,
}

impl NeighbourWatch {
    pub fn new(shared: &Arc<Shared>) -> Self {
        let pace = shared.options.pace();
        Self {
            shared: Arc::clone(shared),
            pace,
            watched: Vec::new(),
            steady_since: Duration::ZERO,
            polled: Duration::ZERO,
            width: NEIGHBOURS,
            wide_until: Duration::ZERO,
            pause: pace,
        }
    }

    fn env(&self) -> &Env {
        self.shared.store.env()
    }

    /// Watches until the node ends, or the bus is gone, and publishes the versions to its workers.
    pub async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let (env, health, mut roles) = (self.env().clone(), &shared.stats.health, shared.roles.subscribe());
        let mut polled = env.now();
        let mut due = polled.saturating_add(self.pace);
        loop {
            let wanted = roles.borrow_and_update().workers().map(|worker| worker.interval).min();
            let pace = wanted.map_or(self.pace, |wanted| wanted.min(self.pace));
            due = due.min(polled.saturating_add(pace));
            let poll = tokio::select! {
                biased;
                Ok(()) = roles.changed() => continue,
                poll = shared.polls.due(due.saturating_sub(env.now())) => poll,
            };
            if health.ended().is_some() {
                // The rows that are now in the store belong to another bus.
                return;
            }
            let slots = roles.borrow().workers().map(|worker| worker.slot).collect();
            let result = AssertUnwindSafe(self.poll(poll, slots)).catch_unwind().await;
            polled = env.now();
            due = polled.saturating_add(self.pace);
            match result {
                // A node that has removed another one can be the first to take over, so poll again at once.
                Ok(Ok(true)) => due = polled,
                Ok(Ok(false)) => due = due.min(self.next_expiry(polled)),
                // Ignore expiries here: as long as polls fail, an expiry that has passed would make every further poll due at once.
                Ok(Err(error)) => health.complain(&env, WATCH, &error),
                Err(panic) => shared.stats.panicked(&env, WATCH, panic_text(&*panic)),
            }
            self.pause = due.saturating_sub(polled);
        }
    }

    /// Polls once, publishes the versions of the pools in `slots`, and removes dead nodes. Returns whether there were dead nodes.
    async fn poll(&mut self, poll: Poll, slots: BTreeSet<u16>) -> Result<bool> {
        let (began, shared) = (poll.at, Arc::clone(&self.shared));
        if began >= self.wide_until {
            self.width = NEIGHBOURS;
        }
        let before = Arc::clone(&*shared.versions.borrow());
        let read = async |poll: Poll| {
            let (tx, polled) =
                (poll.transaction(&shared.store), poll.polled(&shared.store, &shared.keys).await?);
            let versions = Versions::read(&tx, &shared.keys, &slots, &before, polled.common.clone());
            tokio::try_join!(self.neighbours(&tx, &polled), versions)
        };
        let (nodes, versions) = polls::read(poll, &shared.store, read).await?;
        // The versions are published first, because removals may fail repeatedly.
        shared.versions.send_replace(if versions == *before { before } else { Arc::new(versions) });
        let now = self.env().now();
        let gap_max = self.pause.saturating_mul(2).saturating_add(self.pace);
        if !shared.is_member() || now.saturating_sub(self.polled) > gap_max {
            // A node that is not a member removes no other nodes.
            self.steady_since = now;
        }
        (self.polled, self.watched) = (now, nodes);
        let dead = {
            let mut seen = shared.seen.lock();
            seen.note(self.watched.iter().copied(), now);
            let steady = began.saturating_sub(self.steady_since);
            let is_dead = |(node, row): &&(NodeId, NodeRow)| {
                let is_steady = steady >= row.expiry() || row.token == NodeRow::CONDEMNED;
                shared.is_member() && is_steady && seen.is_silent(node, row, began)
            };
            self.watched.iter().filter(is_dead).copied().collect::<Vec<_>>()
        };
        let Some(longest) = dead.iter().map(|(_, row)| row.expiry()).max() else { return Ok(false) };
        self.width = self.width.max(NEIGHBOURS * (1 + dead.len()));
        let removed = self.remove_all(dead).await;
        let now = self.env().now();
        // A node that was first seen just now can expire one expiry from now, and must be read again then.
        self.wide_until = now.saturating_add(longest).saturating_add(self.pace.saturating_mul(2));
        removed?;
        // However long the removals took, the store has answered by now.
        self.polled = now;
        Ok(true)
    }

    /// Returns all other nodes if they were `polled`, and otherwise the next ones in the ring, from a snapshot read.
    async fn neighbours(&self, tx: &Transaction, polled: &Polled) -> Result<Vec<(NodeId, NodeRow)>> {
        let Shared { id, keys, polls, .. } = &*self.shared;
        if let Some(rows) = &polled.nodes {
            let mut nodes = node_rows(keys, rows)?;
            nodes.retain(|(node, _)| node != id);
            return Ok(nodes);
        }
        let rows = async |range: KeyRange, limit| {
            let range = RangeRead::new(range).limit(limit);
            node_rows(keys, &tx.get_range(&range, Isolation::Snapshot).await?.rows)
        };
        let (all, mine) = (keys.nodes(), keys.node(*id));
        let mut nodes = rows(KeyRange { begin: key_after(&mine), end: all.end }, self.width).await?;
        if nodes.len() < self.width {
            let left = self.width - nodes.len();
            nodes.extend(rows(KeyRange { begin: all.begin, end: mine.into() }, left).await?);
        }
        polls.found_nodes(nodes.len());
        Ok(nodes)
    }

    /// Returns when the next node will expire, unless its row changes before that.
    fn next_expiry(&self, now: Duration) -> Duration {
        let seen = self.shared.seen.lock();
        let dues = self.watched.iter().map(|(node, row)| {
            let age = seen.age(node, row, now).min(now.saturating_sub(self.steady_since));
            now.saturating_add(row.expiry().saturating_sub(age))
        });
        dues.min().map_or(Duration::MAX, |due| due.max(now.saturating_add(self.pace / HASTE)))
    }

    /// Removes a page of each of `dead`, until it is time for the next poll, which finds the rest. Each call begins with a random node, so
    /// that nodes that cannot be removed do not keep the others from being removed.
    async fn remove_all(&self, mut dead: Vec<(NodeId, NodeRow)>) -> Result<()> {
        let env = self.env();
        let end = env.now().saturating_add(self.pace / 2);
        let first = env.random() % dead.len() as u64;
        dead.rotate_left(first as usize);
        let removals = dead.into_iter().map(|(node, row)| async move {
            let left = end.saturating_sub(env.now());
            if left.is_zero() { Ok(()) } else { self.remove(node, &row, left).await }
        });
        stream::iter(removals)
            .buffer_unordered(REMOVALS_MAX)
            .fold(Ok(()), async |all, one| Result::and(all, one))
            .await
    }

    /// Removes a page of the roles of `node`, and its row together with the last page, if `seen` is still its row. The node's resources are
    /// free from then on. Begins no attempt after `limit`.
    async fn remove(&self, node: NodeId, seen: &NodeRow, limit: Duration) -> Result<()> {
        let Shared { store, keys, .. } = &*self.shared;
        let (key, policy) =
            (keys.node(node), RetryPolicy { elapsed_max: Some(limit), ..RetryPolicy::default() });
        let remove_page = async |tx: Transaction| {
            let row = tx.get(&key, Isolation::Serializable).await?;
            let is_seen = row.is_some_and(|row| row[..] == seen.to_bytes()[..]);
            Ok(is_seen && remove_page(&tx, keys, node, seen).await?)
        };
        if store.run_with(&policy, remove_page).await? {
            tracing::warn!(%node, "removed a dead node");
        }
        Ok(())
    }
}

/// Removes the rows of all nodes, which are known to be dead. The nodes' resources are free from then on.
pub(crate) async fn forget_nodes(tx: &Transaction, keys: &Keys) -> Result<()> {
    for all in keys.all_of_nodes() {
        // Conflicts with any node that joins meanwhile, not just with the first row.
        tx.add_read_conflict(&all);
        let first = RangeRead::new(all.clone()).limit(1);
        if !tx.get_range(&first, Isolation::Serializable).await?.rows.is_empty() {
            // The roles need no new versions: no process has read versions yet, because this is the first use of the store.
            tx.clear_range(&all);
        }
    }
    Ok(())
}
