//! [`NeighbourWatch`]: finds dead nodes and changed versions, once for all roles of a node.
//!
//! Nodes form a ring in the order of their ids. Each watches the beats of the next few, so what a node reads does not
//! grow with the number of nodes, and several nodes watch each node. A node whose row has not changed for as long as
//! the row allows, by the observer's clock, is dead; the observer removes its roles, a page in a transaction, and its
//! row last. After a removal the observer watches all nodes until an expiry has passed without another one. So when
//! many die at once, the last is found about as soon as the first, even by the only survivor.
//!
//! In the same transaction it reads whether pools have changed, for the workers of the node.

use std::{
    collections::{BTreeMap, BTreeSet},
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt, future::join_all};
use tokio::sync::watch;

use super::{
    heartbeat::Registration,
    last_seen::LastSeen,
    roles::{Versions, clear_page, node_rows},
};
use crate::{
    base::{
        env::Env,
        error::{Result, panic_text},
    },
    state::{
        keys::{Keys, NodeId, NodeRow},
        polls::{self, Poll, Polls},
        stats::Stats,
    },
    store::{Database, Isolation, KeyRange, RangeRead, RetryPolicy, Transaction, key_after},
};

/// The name of the watch in reports of trouble.
const WATCH: &str = "watch over other nodes";

/// How many nodes each one watches.
const NEIGHBOURS: usize = 8;

/// The most nodes that are removed at once, each in transactions of its own.
const REMOVALS_MAX: usize = 10;

/// How much shorter than its pace the least pause of the watch is.
const HASTE: u32 = 32;

/// The pools of the workers of a node, by the workers' numbers, and how often each polls.
pub(super) type Interests = BTreeMap<u64, (Arc<str>, Duration)>;

/// The watch of a node over others.
pub(super) struct NeighbourWatch {
    db: Database,
    keys: Keys,
    stats: Arc<Stats>,
    polls: Arc<Polls>,
    me: NodeId,
    /// How often it polls, unless a worker wants it more often.
    pace: Duration,
    /// The node's membership: a node that has fallen out removes no others.
    registration: watch::Receiver<Registration>,
    /// Since when the rows of the watched nodes have not changed.
    seen: LastSeen<NodeId, NodeRow>,
    /// Until when it watches all nodes.
    all_until: Duration,
    /// The last pause.
    pause: Duration,
    /// The last versions that were read.
    versions: Arc<Versions>,
}

impl NeighbourWatch {
    pub fn new(
        (db, keys): (&Database, &Keys),
        (stats, polls): (&Arc<Stats>, &Arc<Polls>),
        me: NodeId,
        pace: Duration,
        registration: watch::Receiver<Registration>,
    ) -> Self {
        Self {
            db: db.clone(),
            keys: keys.clone(),
            stats: Arc::clone(stats),
            polls: Arc::clone(polls),
            me,
            pace,
            registration,
            seen: LastSeen::default(),
            all_until: Duration::ZERO,
            pause: pace,
            versions: Arc::default(),
        }
    }

    fn env(&self) -> &Env {
        self.db.env()
    }

    /// Watches until the node ends, or the bus is gone, and publishes the versions to its workers.
    pub async fn run(
        mut self,
        mut interests: watch::Receiver<Interests>,
        seen: watch::Sender<Option<Arc<Versions>>>,
    ) {
        let env = self.env().clone();
        let mut polled = env.now();
        let mut due = polled.saturating_add(self.pace);
        loop {
            let wanted = interests.borrow_and_update().values().map(|(_, interval)| *interval).min();
            let pace = wanted.map_or(self.pace, |wanted| wanted.min(self.pace));
            due = due.min(polled.saturating_add(pace));
            let poll = tokio::select! {
                biased;
                changed = interests.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
                poll = self.polls.due(due.saturating_sub(env.now())) => poll,
            };
            if self.stats.health.ended().is_some() {
                // The rows that are there now belong to another bus.
                return;
            }
            let pools: BTreeSet<_> = interests.borrow().values().map(|(pool, _)| Arc::clone(pool)).collect();
            let result = AssertUnwindSafe(self.poll(poll, pools, &seen)).catch_unwind().await;
            polled = env.now();
            due = polled.saturating_add(self.pace);
            match result {
                // A node that has removed another is the first that can take over.
                Ok(Ok(true)) => due = polled,
                Ok(Ok(false)) => due = due.min(self.next_expiry(polled)),
                // What is due already would be due again at once, for as long as the poll fails.
                Ok(Err(error)) => self.stats.health.complain(&env, WATCH, &error),
                Err(panic) => self.stats.panicked(&env, WATCH, panic_text(&*panic)),
            }
            self.pause = due.saturating_sub(polled);
        }
    }

    /// Polls once, publishes the versions of `pools`, and removes dead nodes. Returns whether there were any.
    async fn poll(
        &mut self,
        poll: Poll,
        pools: BTreeSet<Arc<str>>,
        seen: &watch::Sender<Option<Arc<Versions>>>,
    ) -> Result<bool> {
        let began = poll.at;
        let watches_all = began < self.all_until;
        let read = async |tx: Transaction| {
            let nodes = async { if watches_all { self.all(&tx).await } else { self.neighbours(&tx).await } };
            tokio::try_join!(nodes, Versions::read(&tx, &self.keys, pools.clone(), &self.versions))
        };
        let (nodes, versions) = polls::read(Some(poll), &self.db, read).await?;
        if versions != *self.versions {
            self.versions = Arc::new(versions);
        }
        // The versions are published first, because removals may fail again and again.
        seen.send_replace(Some(Arc::clone(&self.versions)));
        if self.registration.borrow().is_none() {
            self.seen = LastSeen::default();
            return Ok(false);
        }
        let now = self.env().now();
        self.seen.forget_after(self.pause.saturating_mul(2).saturating_add(self.pace), now);
        let is_dead = |(node, row): &&(NodeId, NodeRow)| {
            row.token == NodeRow::CONDEMNED || self.seen.age(node, row, began) >= row.expiry()
        };
        let dead: Vec<_> = nodes.iter().filter(is_dead).copied().collect();
        self.seen.adopt(nodes, now);
        let Some(longest) = dead.iter().map(|(_, row)| row.expiry()).max() else { return Ok(false) };
        let removed = self.remove_all(&dead).await;
        let now = self.env().now();
        // A node seen for the first time can expire an expiry from now, and must be read once more then.
        self.all_until = now.saturating_add(longest).saturating_add(self.pace.saturating_mul(2));
        removed?;
        // However long the removals took, the store has answered meanwhile.
        self.seen.keep(now);
        Ok(true)
    }

    /// The next nodes in the ring, read by snapshot.
    async fn neighbours(&self, tx: &Transaction) -> Result<Vec<(NodeId, NodeRow)>> {
        let (all, mine) = (self.keys.nodes(), self.keys.node(self.me));
        if self.seen.iter().count() < NEIGHBOURS {
            // While there are few nodes, as at the last poll, one read returns all of them.
            let rows = self.rows(tx, all.clone(), NEIGHBOURS + 2).await?;
            if rows.len() <= NEIGHBOURS + 1 {
                let mut nodes = node_rows(&self.keys, &rows)?;
                nodes.retain(|(node, _)| *node != self.me);
                return Ok(nodes);
            }
        }
        let after = KeyRange { begin: key_after(&mine), end: all.end };
        let mut rows = self.rows(tx, after, NEIGHBOURS).await?;
        if rows.len() < NEIGHBOURS {
            let before = KeyRange { begin: all.begin, end: mine.into() };
            let more = self.rows(tx, before, NEIGHBOURS - rows.len()).await?;
            rows.extend(more);
        }
        node_rows(&self.keys, &rows)
    }

    /// Up to `limit` rows of nodes in `range`.
    async fn rows(&self, tx: &Transaction, range: KeyRange, limit: usize) -> Result<Vec<(Bytes, Bytes)>> {
        Ok(tx.get_range(&RangeRead::new(range).limit(limit), Isolation::Snapshot).await?.rows)
    }

    /// All other nodes, read by snapshot.
    async fn all(&self, tx: &Transaction) -> Result<Vec<(NodeId, NodeRow)>> {
        let rows = tx.all_rows(self.keys.nodes(), Isolation::Snapshot).await?;
        let mut nodes = node_rows(&self.keys, &rows)?;
        nodes.retain(|(node, _)| *node != self.me);
        Ok(nodes)
    }

    /// When the next node expires, unless its row changes until then.
    fn next_expiry(&self, now: Duration) -> Duration {
        let dues = self.seen.iter().map(|(row, since)| since.saturating_add(row.expiry()));
        dues.min().map_or(Duration::MAX, |due| due.max(now.saturating_add(self.pace / HASTE)))
    }

    /// Removes a page of each of `dead`, until it is time for the next poll: it finds the rest. If some cannot be removed, the others
    /// are removed nevertheless.
    async fn remove_all(&self, dead: &[(NodeId, NodeRow)]) -> Result<()> {
        let end = self.env().now().saturating_add(self.pace / 2);
        let mut removed = Ok(());
        for some in dead.chunks(REMOVALS_MAX) {
            let left = end.saturating_sub(self.env().now());
            if left.is_zero() {
                break;
            }
            let pages = join_all(some.iter().map(|(node, row)| self.remove(*node, row, left))).await;
            removed = pages.into_iter().fold(removed, Result::and);
        }
        removed
    }

    /// Removes a page of the roles of `node`, and its row with the last one, if `seen` is still its row. Its resources are free from then
    /// on. A row that stays is condemned: its roles are no longer complete, so nobody may take the node for living. Begins no attempt
    /// after `limit`.
    async fn remove(&self, node: NodeId, seen: &NodeRow, limit: Duration) -> Result<()> {
        let key = self.keys.node(node);
        let policy = RetryPolicy { elapsed_max: Some(limit), ..RetryPolicy::default() };
        let remove_page = async |tx: Transaction| {
            let row = tx.get(&key, Isolation::Serializable).await?;
            if row.is_none_or(|row| row[..] != seen.to_bytes()[..]) {
                return Ok(false);
            }
            let is_last = clear_page(&tx, &self.keys, node).await?;
            if !is_last {
                tx.set(&key, &NodeRow { token: NodeRow::CONDEMNED, ..*seen }.to_bytes());
            }
            Ok(is_last)
        };
        if self.db.run_with(&policy, remove_page).await? {
            tracing::warn!(%node, "removed a dead node");
        }
        Ok(())
    }
}

/// Removes the rows of all nodes, which are known to be dead. Their resources are free from then on.
pub(crate) async fn forget_nodes(tx: &Transaction, keys: &Keys) -> Result<()> {
    let all = keys.all_of_nodes();
    // It conflicts with any node that joins meanwhile, not just with the first row.
    tx.add_read_conflict(&all);
    if !tx.get_range(&RangeRead::new(all.clone()).limit(1), Isolation::Serializable).await?.rows.is_empty() {
        // Their roles need no new versions: no process has read them yet, because this is the first use of the store.
        tx.clear_range(&all);
    }
    Ok(())
}
