//! [`Snapshot`]: what is known of a bus, read in one place. `ready`, the status, the metrics and the lists of nodes and consumers share it.
//!
//! It has parts. Each is one transaction with a limit of its own, so that what the store does not answer in time, or what is damaged, is missing
//! from an answer, and the rest is there. Those who ask for a part at the same time share one read.
//!
//! Who lives is known here as well, by one [`LastSeen`]: a node whose row has not changed for its expiry is silent. A node removes its dead
//! neighbours by the same rule.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use serde::Serialize;

use super::{
    Bus,
    status::Backlog,
    waiting::{Ages, Waiting},
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    roles::consumer::{self, ConsumerLag, ConsumerStatus, Consumers},
    state::{
        context::Context,
        feed::{RawFeed, Topology},
        keys::{ConsumerName, NodeId, NodeRow, Role},
        membership::{Holdings, LastSeen, NodeStatus, all_nodes, members},
    },
    store::{Isolation, RetryPolicy, Transaction},
};

/// How long the store may take to answer each part.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// A part, and its last read.
#[derive(Debug)]
struct Part<T> {
    /// How many reads have begun.
    begun: AtomicU64,
    last: tokio::sync::Mutex<Option<PartRead<T>>>,
}

#[derive(Debug)]
struct PartRead<T> {
    number: u64,
    at: Duration,
    answer: Result<Arc<T>>,
}

impl<T> Default for Part<T> {
    fn default() -> Self {
        Self { begun: AtomicU64::new(0), last: tokio::sync::Mutex::default() }
    }
}

impl<T> Part<T> {
    /// The last answer if it is younger than `age_max`, or if its read began after this was called. Otherwise reads.
    async fn get(
        &self,
        bus: &Bus,
        age_max: Duration,
        read: impl Future<Output = Result<T>>,
    ) -> Result<Arc<T>> {
        let (env, begun) = (bus.context.env(), self.begun.load(Ordering::SeqCst));
        let mut last = self.last.lock().await;
        let is_young = |at: Duration| env.now().saturating_sub(at) < age_max;
        match &*last {
            Some(read) if read.number > begun || read.answer.is_ok() && is_young(read.at) => {
                return read.answer.clone();
            }
            _ => {}
        }
        let (number, at) = (self.begun.fetch_add(1, Ordering::SeqCst) + 1, env.now());
        let answer = read.await.map(Arc::new);
        *last = Some(PartRead { number, at, answer: answer.clone() });
        answer
    }
}

/// What this process has seen of the bus.
#[derive(Debug, Default)]
pub(super) struct Observations {
    /// Since when the rows of nodes have not changed.
    last_seen: Mutex<LastSeen<NodeId, NodeRow>>,
    waiting: Waiting,
    #[cfg(feature = "http")]
    pub handovers: super::ownership::Handovers,
    members: Part<Members>,
    holdings: Part<Holdings>,
    ends: Part<FeedEnds>,
    last_row: Part<Option<Sequence>>,
    ages: Part<Ages>,
    backlog: Part<Backlog>,
    consumers: Part<Consumers>,
    deferred: Part<BTreeMap<ConsumerName, u64>>,
    lags: Part<BTreeMap<ConsumerName, Vec<ConsumerLag>>>,
}

/// The nodes of the bus, and the owners of its partitions.
#[derive(Debug, Default)]
#[cfg_attr(not(feature = "http"), expect(dead_code, reason = "`ready` reads the rest"))]
pub(crate) struct Members {
    /// The rows of all nodes.
    pub nodes: BTreeMap<NodeId, NodeRow>,
    /// For how long each has been seen without a heartbeat, and whether that is as long as its expiry.
    pub silent: BTreeMap<NodeId, (Duration, bool)>,
    /// The nodes with a notifier.
    pub notifiers: BTreeSet<NodeId>,
    /// The owner of each partition, if it has one, and the epoch of its lease.
    pub owners: BTreeMap<u32, (Option<NodeId>, u64)>,
}

impl Members {
    /// Reads by snapshot. Fails with [`Error::BusGone`] if the store has another bus, or none.
    async fn read(context: &Context, tx: &Transaction) -> Result<Self> {
        let keys = &context.keys;
        let config = keys.config();
        let (config, nodes, notifiers, leases) = tokio::try_join!(
            tx.get(&config, Isolation::Snapshot),
            all_nodes(tx, keys, Isolation::Snapshot),
            members(tx, keys, &Role::NOTIFIER),
            tx.all_rows(keys.leases("partition"), Isolation::Snapshot),
        )?;
        context.config.check_stored(config.as_deref())?;
        let mut owners = BTreeMap::new();
        for (key, value) in leases {
            let (_, partition, lease) = keys.lease_row(&key, &value)?;
            if let Ok(partition) = u32::try_from(partition) {
                owners.insert(partition, (lease.owner.map(|owner| owner.node), lease.epoch));
            }
        }
        let notifiers = notifiers.into_iter().map(|(node, _)| node).collect();
        Ok(Self { nodes, silent: BTreeMap::new(), notifiers, owners })
    }

    /// Finds out who lives from what was seen before. The rows were read from `began` to `now`.
    pub fn judge(&mut self, seen: &mut LastSeen<NodeId, NodeRow>, (began, now): (Duration, Duration)) {
        let judged = |(node, row): (&NodeId, &NodeRow)| {
            (*node, (seen.age(node, row, began), seen.is_silent(node, row, began)))
        };
        self.silent = self.nodes.iter().map(judged).collect();
        seen.adopt(self.nodes.iter().map(|(node, row)| (*node, *row)), now);
    }

    /// The states of all nodes, in the order of their ids.
    pub fn statuses(&self, holdings: &Holdings) -> Vec<NodeStatus> {
        let mut held = holdings.by_node();
        let nodes = self.nodes.iter().map(|(&id, row)| {
            let (roles, leases) = held.remove(&id).unwrap_or_default();
            let (silent, is_silent) = self.silent.get(&id).copied().unwrap_or_default();
            NodeStatus::new(id, row, (silent, is_silent), roles, leases)
        });
        nodes.collect()
    }
}

/// Where the feed begins and ends.
#[derive(Debug)]
pub(crate) struct FeedEnds {
    /// The position of a reader that wants only future rows.
    pub now: Sequence,
    pub horizon: Sequence,
    pub topology: Topology,
}

/// A part of the status that is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Unanswered {
    /// The part, in words.
    pub part: &'static str,
    /// Why it is missing.
    pub reason: String,
}

/// What is known of a bus: the parts that the store has answered.
pub(crate) struct Snapshot {
    pub members: Option<Arc<Members>>,
    pub holdings: Option<Arc<Holdings>>,
    pub ends: Option<Arc<FeedEnds>>,
    pub ages: Option<Arc<Ages>>,
    pub backlog: Option<Arc<Backlog>>,
    pub consumers: Option<Arc<Consumers>>,
    pub deferred: Option<Arc<BTreeMap<ConsumerName, u64>>>,
    pub lags: Option<Arc<BTreeMap<ConsumerName, Vec<ConsumerLag>>>>,
    /// The other parts, and why.
    pub unanswered: Vec<(&'static str, Error)>,
}

impl Bus {
    /// The snapshot, with parts that were read less than `age_max` ago.
    pub(crate) async fn snapshot(&self, age_max: Duration) -> Snapshot {
        let consumers = async {
            match self.stored_consumers(age_max).await {
                Ok(stored) => {
                    let more = tokio::join!(self.deferred(age_max, &stored), self.lags(age_max, &stored));
                    (Ok(stored), more.0, more.1)
                }
                Err(error) => (Err(error.clone()), Err(error.clone()), Err(error)),
            }
        };
        let (members, holdings, ends, ages, backlog, (consumers, deferred, lags)) = tokio::join!(
            self.members(age_max),
            self.holdings(age_max),
            self.ends(age_max),
            self.ages(age_max),
            self.backlog_rows(age_max),
            consumers,
        );
        let mut unanswered = Vec::new();
        Snapshot {
            members: answer(&mut unanswered, "nodes", members),
            holdings: answer(&mut unanswered, "roles and leases", holdings),
            ends: answer(&mut unanswered, "feed", ends),
            ages: answer(&mut unanswered, "age of the backlog", ages),
            backlog: answer(&mut unanswered, "backlog", backlog),
            consumers: answer(&mut unanswered, "consumers", consumers),
            deferred: answer(&mut unanswered, "deferred ids", deferred),
            lags: answer(&mut unanswered, "lag of consumers", lags),
            unanswered,
        }
    }

    /// The nodes and the owners of partitions, and who lives.
    pub(super) async fn members(&self, age_max: Duration) -> Result<Arc<Members>> {
        let read = async {
            let env = self.context.env();
            let began = env.now();
            let mut found = self.answered(async |tx| Members::read(&self.context, &tx).await).await?;
            found.judge(&mut self.seen.last_seen.lock(), (began, env.now()));
            Ok(found)
        };
        self.seen.members.get(self, age_max, read).await
    }

    pub(super) async fn holdings(&self, age_max: Duration) -> Result<Arc<Holdings>> {
        let read = self.answered(async |tx| Holdings::read(&tx, &self.context.keys, None).await);
        self.seen.holdings.get(self, age_max, read).await
    }

    pub(super) async fn ends(&self, age_max: Duration) -> Result<Arc<FeedEnds>> {
        let feed = RawFeed::notifications(&self.context);
        let read = self.answered(async |tx| {
            let (now, horizon) = (feed.last_readable(&tx), feed.horizon(&tx, Isolation::Snapshot));
            let (now, horizon, topology) = tokio::try_join!(now, horizon, feed.topology(&tx))?;
            Ok(FeedEnds { now, horizon, topology })
        });
        self.seen.ends.get(self, age_max, read).await
    }

    /// The position of the last row of the feed, if there is one.
    pub(super) async fn last_row(&self, age_max: Duration) -> Result<Arc<Option<Sequence>>> {
        let feed = RawFeed::notifications(&self.context);
        let read = self.answered(async |tx| feed.last_row(&tx).await);
        self.seen.last_row.get(self, age_max, read).await
    }

    /// The partitions in which events wait, and for how long this process has seen each of them wait without a fold.
    pub(super) async fn ages(&self, age_max: Duration) -> Result<Arc<Ages>> {
        let read = self.answered(async |tx| self.seen.waiting.ages(&self.context, &tx).await);
        self.seen.ages.get(self, age_max, read).await
    }

    /// The events that wait, without their ages.
    pub(super) async fn backlog_rows(&self, age_max: Duration) -> Result<Arc<Backlog>> {
        let read = self.answered(async |tx| Backlog::read(&self.context, &tx).await);
        self.seen.backlog.get(self, age_max, read).await
    }

    async fn stored_consumers(&self, age_max: Duration) -> Result<Arc<Consumers>> {
        let read = self.answered(async |tx| consumer::stored(&tx, &self.context.keys, None).await);
        self.seen.consumers.get(self, age_max, read).await
    }

    /// How many ids each of `consumers` has deferred.
    async fn deferred(
        &self,
        age_max: Duration,
        consumers: &Consumers,
    ) -> Result<Arc<BTreeMap<ConsumerName, u64>>> {
        let names: &Vec<_> = &consumers.keys().collect();
        let read = self.answered(async |tx| consumer::deferred(&tx, &self.context.keys, names).await);
        self.seen.deferred.get(self, age_max, read).await
    }

    /// How far `consumers` are behind.
    async fn lags(
        &self,
        age_max: Duration,
        consumers: &Consumers,
    ) -> Result<Arc<BTreeMap<ConsumerName, Vec<ConsumerLag>>>> {
        let read = self.answered(async |tx| consumer::lags(&self.context, &tx, consumers).await);
        self.seen.lags.get(self, age_max, read).await
    }

    /// The state of all consumers, in the order of their names. Fails if the store does not answer within some seconds.
    pub async fn consumers(&self) -> Result<Vec<ConsumerStatus>> {
        let now = Duration::ZERO;
        let counted = async {
            let stored = self.stored_consumers(now).await?;
            let deferred = self.deferred(now, &stored).await?;
            Ok((stored, deferred))
        };
        let ((stored, deferred), holdings) = tokio::try_join!(counted, self.holdings(now))?;
        Ok(full(&self.context, &stored, &holdings, &deferred))
    }

    /// What the store answers to `read` in time. Its last error is the reason if it does not.
    async fn answered<T, F, R>(&self, read: F) -> Result<T>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        let (db, last) = (&self.context.db, &Mutex::new(None));
        let policy = RetryPolicy { elapsed_max: Some(ANSWER_MAX), ..RetryPolicy::default() };
        let run = db.run_with(&policy, |tx| {
            let read = read(tx);
            async move {
                let read = read.await;
                if let Err(Error::Store(error)) = &read {
                    *last.lock() = Some(error.clone());
                }
                read
            }
        });
        tokio::select! {
            biased;
            answer = run => answer,
            () = db.env().sleep(ANSWER_MAX) => {
                let gave_up = Error::GaveUp { what: "reading", after: ANSWER_MAX };
                Err(last.lock().take().map_or(gave_up, Error::Store))
            }
        }
    }
}

/// What was answered. Notes what was not.
pub(super) fn answer<T>(
    unanswered: &mut Vec<(&'static str, Error)>,
    part: &'static str,
    answer: Result<T>,
) -> Option<T> {
    answer.map_err(|error| unanswered.push((part, error))).ok()
}

impl Snapshot {
    /// The consumers with all that is stored of them, in the order of their names, if all parts are known.
    pub fn full_consumers(&self, context: &Context) -> Option<Vec<ConsumerStatus>> {
        let (stored, holdings, deferred) =
            (self.consumers.as_ref()?, self.holdings.as_ref()?, self.deferred.as_ref()?);
        Some(full(context, stored, holdings, deferred))
    }
}

/// The consumers, with who works for them, what fails in this process, and whether ids are deferred.
fn full(
    context: &Context,
    stored: &Consumers,
    holdings: &Holdings,
    deferred: &BTreeMap<ConsumerName, u64>,
) -> Vec<ConsumerStatus> {
    let full = stored.values().map(|status| {
        let mut status = status.clone();
        status.add(context, holdings, deferred.get(&status.name).copied().unwrap_or_default());
        status
    });
    full.collect()
}
