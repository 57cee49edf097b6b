//! [`NeighbourWatch`]: finds dead nodes and changed versions, once for all roles of a node.
//!
//! Nodes form a ring in the order of their ids. Each watches the beats of the next few, so what a node reads does not
//! grow with the number of nodes, and several nodes watch each node. A node whose row has not changed for as long as
//! the row allows, by the observer's clock, is dead; the observer removes its row and its roles. After a removal the
//! observer watches all nodes until an expiry has passed without another one. So when many die at once, the last is
//! found about as soon as the first, even by the only survivor.
//!
//! In the same transaction it reads whether members or pools have changed, for the workers of the node.

use std::{collections::BTreeMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::sync::watch;

use super::{
    changes::{Versions, members_changed},
    heartbeat::Registration,
    last_seen::LastSeen,
    roles::clear_roles,
};
use crate::{
    base::{
        env::Env,
        error::{Error, Result, panic_text},
    },
    state::{
        keys::{Keys, NodeId, NodeRow},
        polls::{self, Poll, Polls},
        stats::Stats,
    },
    store::{Database, Isolation, KeyRange, RangeRead, Transaction, key_after},
};

/// How many nodes each one watches.
const NEIGHBOURS: usize = 8;

/// The most nodes that are removed in one transaction.
const REMOVALS_MAX: usize = 100;

/// How much shorter than its pace the least pause of the watch is.
const HASTE: u32 = 32;

/// The pools of the workers of a node, by the workers' numbers, and how often each polls.
pub(super) type Interests = BTreeMap<u64, (Arc<str>, Duration)>;

/// The values that show that a node lives: its token and its beat.
type Beat = ([u8; 16], u64);

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
    seen: LastSeen<NodeId, Beat>,
    /// How long each of them may be silent.
    expiries: BTreeMap<NodeId, Duration>,
    /// Until when it watches all nodes.
    all_until: Duration,
    /// The last pause.
    pause: Duration,
    /// The last versions that were read.
    versions: Arc<Versions>,
}

impl NeighbourWatch {
    pub fn new(
        (db, keys, stats, polls): (&Database, &Keys, &Arc<Stats>, &Arc<Polls>),
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
            expiries: BTreeMap::new(),
            all_until: Duration::ZERO,
            pause: pace,
            versions: Arc::default(),
        }
    }

    fn env(&self) -> &Env {
        self.db.env()
    }

    /// Watches until the node ends, and publishes the versions to its workers.
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
            let pools: Vec<_> = {
                let interests = interests.borrow();
                let mut pools: Vec<_> = interests.values().map(|(pool, _)| Arc::clone(pool)).collect();
                pools.sort_unstable();
                pools.dedup();
                pools
            };
            match AssertUnwindSafe(self.poll(poll, pools)).catch_unwind().await {
                Ok(Ok(has_removed)) => {
                    seen.send_replace(Some(Arc::clone(&self.versions)));
                    // A node that has removed another is the first that can take over.
                    if has_removed {
                        (polled, due) = (env.now(), env.now());
                        continue;
                    }
                }
                Ok(Err(error)) => self.stats.health.complain(&env, "watch other nodes", &error),
                Err(panic) => {
                    let panic = panic_text(&*panic);
                    tracing::error!(panic, "the watch over other nodes has panicked and goes on");
                }
            }
            polled = env.now();
            due = polled.saturating_add(self.pace).min(self.next_expiry(polled));
            self.pause = due.saturating_sub(polled);
        }
    }

    /// Polls once, and removes dead nodes. Returns whether there were any.
    async fn poll(&mut self, poll: Poll, pools: Vec<Arc<str>>) -> Result<bool> {
        let (began, now) = (poll.at, self.env().now());
        let watches_all = began < self.all_until;
        let read = async |tx: Transaction| {
            let nodes = async { if watches_all { self.all(&tx).await } else { self.neighbours(&tx).await } };
            tokio::try_join!(nodes, Versions::read(&tx, &self.keys, pools.clone(), &self.versions))
        };
        let (nodes, versions) = polls::read(Some(poll), &self.db, read).await?;
        if versions != *self.versions {
            self.versions = Arc::new(versions);
        }
        if self.registration.borrow().is_none() {
            self.seen = LastSeen::default();
            return Ok(false);
        }
        self.seen.forget_after(self.pause.saturating_mul(2).saturating_add(self.pace), now);
        let is_dead = |(node, row): &&(NodeId, NodeRow)| {
            self.seen.age(node, &(row.token, row.beat), began) >= row.expiry()
        };
        let dead: Vec<_> = nodes.iter().filter(is_dead).copied().collect();
        let now = self.env().now();
        self.seen.adopt(nodes.iter().map(|(node, row)| (*node, (row.token, row.beat))), now);
        self.expiries = nodes.iter().map(|(node, row)| (*node, row.expiry())).collect();
        for dead in dead.chunks(REMOVALS_MAX) {
            self.remove(dead).await?;
        }
        if let Some(longest) = dead.iter().map(|(_, row)| row.expiry()).max() {
            // A node seen for the first time can expire an expiry from now, and must be read once more then.
            self.all_until = now.saturating_add(longest).saturating_add(self.pace.saturating_mul(2));
        }
        Ok(!dead.is_empty())
    }

    /// The next nodes in the ring, read by snapshot.
    async fn neighbours(&self, tx: &Transaction) -> Result<Vec<(NodeId, NodeRow)>> {
        let (all, mine) = (self.keys.nodes(), self.keys.node(self.me));
        if self.expiries.len() < NEIGHBOURS {
            // They were few the last time; as long as they are, one read has them all.
            let mut nodes = self.rows(tx, all.clone(), NEIGHBOURS + 2).await?;
            if nodes.len() <= NEIGHBOURS + 1 {
                nodes.retain(|(node, _)| *node != self.me);
                return Ok(nodes);
            }
        }
        let after = KeyRange { begin: key_after(&mine), end: all.end };
        let mut nodes = self.rows(tx, after, NEIGHBOURS).await?;
        if nodes.len() < NEIGHBOURS {
            let before = KeyRange { begin: all.begin, end: mine.into() };
            let more = self.rows(tx, before, NEIGHBOURS - nodes.len()).await?;
            nodes.extend(more);
        }
        Ok(nodes)
    }

    /// Up to `limit` nodes in `range`.
    async fn rows(&self, tx: &Transaction, range: KeyRange, limit: usize) -> Result<Vec<(NodeId, NodeRow)>> {
        let page = tx.get_range(&RangeRead::new(range).limit(limit), Isolation::Snapshot).await?;
        page.rows
            .iter()
            .map(|(key, value)| Ok((self.keys.node_of(key)?, NodeRow::from_bytes(value)?)))
            .collect()
    }

    /// All other nodes, read by snapshot.
    async fn all(&self, tx: &Transaction) -> Result<Vec<(NodeId, NodeRow)>> {
        let rows = tx.all_rows(self.keys.nodes(), Isolation::Snapshot).await?;
        let nodes =
            rows.iter().map(|(key, value)| Ok((self.keys.node_of(key)?, NodeRow::from_bytes(value)?)));
        nodes.filter(|node| node.as_ref().map_or(true, |(node, _)| *node != self.me)).collect()
    }

    /// When the next node expires, unless its row changes until then.
    fn next_expiry(&self, now: Duration) -> Duration {
        let dues = self
            .expiries
            .iter()
            .filter_map(|(node, expiry)| Some(self.seen.since(node)?.saturating_add(*expiry)));
        dues.min().map_or(Duration::MAX, |due| due.max(now.saturating_add(self.pace / HASTE)))
    }

    /// Removes those of `dead` whose rows are unchanged. Their resources are free from then on.
    async fn remove(&self, dead: &[(NodeId, NodeRow)]) -> Result<()> {
        let keys = &self.keys;
        let removed = self.db.run(async |tx| {
            let remove = dead.iter().map(|(node, seen)| {
                let tx = &tx;
                async move {
                    let key = keys.node(*node);
                    let row = tx.get(&key, Isolation::Serializable).await?;
                    let is_as_seen = row.is_some_and(|row| row[..] == seen.to_bytes()[..]);
                    if is_as_seen {
                        tx.clear(&key);
                        clear_roles(tx, keys, *node).await?;
                    }
                    Ok::<_, Error>(u64::from(is_as_seen))
                }
            });
            let removed: u64 = futures_util::future::try_join_all(remove).await?.into_iter().sum();
            if removed > 0 {
                members_changed(&tx, keys);
            }
            Ok(removed)
        });
        let removed = removed.await?;
        if removed > 0 {
            tracing::warn!(removed, "removed dead nodes");
        }
        Ok(())
    }
}

/// Removes the rows of all nodes, which are known to be dead. Their resources are free from then on.
pub(crate) async fn forget_nodes(tx: &Transaction, keys: &Keys) -> Result<()> {
    let all = keys.all_of_nodes();
    if !tx.get_range(&RangeRead::new(all.clone()).limit(1), Isolation::Serializable).await?.rows.is_empty() {
        tx.clear_range(&all);
        members_changed(tx, keys);
    }
    Ok(())
}
