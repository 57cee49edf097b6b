//! [`Snapshot`]: what is known about a bus, read in one place for `ready`, the status, the metrics and the lists of nodes and consumers.
//!
//! A snapshot has parts. Each is read in one transaction with its own time limit, so if the store does not answer for a part in time, or
//! the part is damaged, only that part is missing. Callers that ask for a part at the same time share one read.
//!
//! The process's [`LastSeen`](crate::state::last_seen::LastSeen) shows which nodes are alive: a node whose row has not changed for its
//! expiry is silent. A node uses the same record to decide which dead neighbours to remove.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use serde::Serialize;

use crate::{
    base::{
        encoding::Sequence,
        env::Env,
        error::{Error, Result},
    },
    roles::{
        consumer::{self, ConsumerLag, ConsumerStatus, Consumers},
        notifier::{Ages, Backlog, Waiting},
    },
    state::{
        context::Context,
        feed::{RawFeed, Topology},
        history::{Claim, History},
        keys::ConsumerName,
        membership::{Holdings, Members, NodeStatus},
    },
    store::{Isolation, RetryPolicy, Transaction},
};

/// How long the store may take to answer for each part.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// A part of a snapshot, with its last read.
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
    /// Returns the last answer if it is younger than `age_max`, or if its read began after this call. The last failure is returned only if
    /// its read was under way when this call began, or began later. Otherwise reads the part.
    async fn get(
        &self,
        env: &Env,
        age_max: Duration,
        read: impl Future<Output = Result<T>>,
    ) -> Result<Arc<T>> {
        let (begun, is_under_way) = (self.begun.load(Ordering::SeqCst), self.last.try_lock().is_err());
        let mut last = self.last.lock().await;
        let now = env.now();
        if let Some(PartRead { number, at, answer }) = &*last {
            let is_young = now.saturating_sub(*at) < age_max;
            if *number > begun || if answer.is_ok() { is_young } else { is_under_way } {
                return answer.clone();
            }
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let answer = read.await.map(Arc::new);
        *last = Some(PartRead { number, at: now, answer: answer.clone() });
        answer
    }
}

type Deferred = BTreeMap<ConsumerName, u64>;
type Lags = BTreeMap<ConsumerName, Vec<ConsumerLag>>;

/// Reads the snapshot, and remembers facts that take more than one read to find out.
#[derive(Debug)]
pub(super) struct Observer {
    context: Arc<Context>,
    parts: Parts,
}

#[derive(Debug, Default)]
struct Parts {
    waiting: Waiting,
    members: Part<Members>,
    holdings: Part<Holdings>,
    ends: Part<FeedEnds>,
    last_row: Part<Option<Sequence>>,
    ages: Part<Ages>,
    backlog: Part<Backlog>,
    consumers: Part<Consumers>,
    deferred: Part<Deferred>,
    lags: Part<Lags>,
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
    /// The name of the part.
    pub part: &'static str,
    /// Why the part is missing.
    pub reason: String,
}

/// What is known about a bus: the parts that the store answered.
#[derive(Default)]
pub(crate) struct Snapshot {
    pub members: Option<Arc<Members>>,
    pub holdings: Option<Arc<Holdings>>,
    pub ends: Option<Arc<FeedEnds>>,
    pub ages: Option<Arc<Ages>>,
    pub backlog: Option<Arc<Backlog>>,
    pub consumers: Option<Arc<Consumers>>,
    /// How many ids each consumer has deferred.
    pub deferred: Option<Arc<Deferred>>,
    pub lags: Option<Arc<Lags>>,
    /// The missing parts, and why they are missing.
    pub unanswered: Vec<(&'static str, Error)>,
}

impl Snapshot {
    /// Returns the answer for a part, or records why it is missing.
    pub fn take<T>(&mut self, part: &'static str, answer: Result<T>) -> Option<T> {
        answer.map_err(|error| self.unanswered.push((part, error))).ok()
    }
}

impl Observer {
    pub fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), parts: Parts::default() }
    }

    /// Returns all parts, each read less than `age_max` ago.
    pub async fn snapshot(&self, age_max: Duration) -> Snapshot {
        let consumers = async {
            match self.consumers(age_max).await {
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
            self.backlog(age_max),
            consumers,
        );
        let mut known = Snapshot::default();
        known.members = known.take("nodes", members);
        known.holdings = known.take("roles and leases", holdings);
        known.ends = known.take("feed", ends);
        known.ages = known.take("age of the backlog", ages);
        known.backlog = known.take("backlog", backlog);
        known.consumers = known.take("consumers", consumers);
        known.deferred = known.take("deferred ids", deferred);
        known.lags = known.take("lag of consumers", lags);
        known
    }

    /// Returns the nodes, which of them are alive, and the owners of the partitions.
    pub async fn members(&self, age_max: Duration) -> Result<Arc<Members>> {
        let Context { keys, config, .. } = &*self.context;
        let read = async {
            let began = self.env().now();
            let mut found = self.answered(async |tx| Members::read(&tx, keys, *config).await).await?;
            found.judge(&mut self.context.nodes_seen.lock(), (began, self.env().now()));
            Ok(found)
        };
        self.parts.members.get(self.env(), age_max, read).await
    }

    pub async fn holdings(&self, age_max: Duration) -> Result<Arc<Holdings>> {
        let read = self.answered(async |tx| Holdings::read(&tx, &self.context.keys, None).await);
        self.parts.holdings.get(self.env(), age_max, read).await
    }

    pub async fn ends(&self, age_max: Duration) -> Result<Arc<FeedEnds>> {
        let feed = RawFeed::notifications(&self.context);
        let read = self.answered(async |tx| {
            let now = History::of(&self.context).check(&tx, Claim::Rows);
            let horizon = feed.horizon(&tx, Isolation::Snapshot);
            let (now, horizon, topology) = tokio::try_join!(now, horizon, feed.topology(&tx))?;
            Ok(FeedEnds { now, horizon, topology })
        });
        let read = async { self.context.note_history(read.await) };
        self.parts.ends.get(self.env(), age_max, read).await
    }

    /// Returns the position of the last row of the feed, if there is one.
    pub async fn last_row(&self, age_max: Duration) -> Result<Arc<Option<Sequence>>> {
        let feed = RawFeed::notifications(&self.context);
        let read = self.answered(async |tx| feed.last_row(&tx).await);
        self.parts.last_row.get(self.env(), age_max, read).await
    }

    /// Returns the partitions with waiting events, and how long this process has seen each of them wait without a fold.
    pub async fn ages(&self, age_max: Duration) -> Result<Arc<Ages>> {
        let read = self.answered(async |tx| self.parts.waiting.ages(&self.context, &tx).await);
        self.parts.ages.get(self.env(), age_max, read).await
    }

    /// Returns the backlog without the ages of its events.
    pub async fn backlog(&self, age_max: Duration) -> Result<Arc<Backlog>> {
        let read = self.answered(async |tx| Backlog::read(&self.context, &tx).await);
        self.parts.backlog.get(self.env(), age_max, read).await
    }

    /// Returns the consumers without their members, owners and deferred ids.
    async fn consumers(&self, age_max: Duration) -> Result<Arc<Consumers>> {
        let read = self.answered(async |tx| consumer::stored(&tx, &self.context.keys, None).await);
        self.parts.consumers.get(self.env(), age_max, read).await
    }

    async fn deferred(&self, age_max: Duration, consumers: &Consumers) -> Result<Arc<Deferred>> {
        let names: &Vec<_> = &consumers.keys().collect();
        let read = self.answered(async |tx| consumer::deferred(&tx, &self.context.keys, names).await);
        self.parts.deferred.get(self.env(), age_max, read).await
    }

    async fn lags(&self, age_max: Duration, consumers: &Consumers) -> Result<Arc<Lags>> {
        let read = self.answered(async |tx| consumer::lags(&self.context, &tx, consumers).await);
        self.parts.lags.get(self.env(), age_max, read).await
    }

    /// Returns the current states of all nodes.
    pub async fn nodes(&self) -> Result<Vec<NodeStatus>> {
        let now = Duration::ZERO;
        let (members, holdings) = tokio::try_join!(self.members(now), self.holdings(now))?;
        Ok(members.statuses(&holdings))
    }

    /// Returns the current states of all consumers.
    pub async fn all_of_consumers(&self) -> Result<Vec<ConsumerStatus>> {
        let now = Duration::ZERO;
        let counted = async {
            let stored = self.consumers(now).await?;
            let deferred = self.deferred(now, &stored).await?;
            Ok((stored, deferred))
        };
        let ((stored, deferred), holdings) = tokio::try_join!(counted, self.holdings(now))?;
        Ok(self.complete(&stored, &holdings, &deferred))
    }

    /// Completes `consumers` with their members and owners, what fails in this process, and how many ids are deferred.
    pub fn complete(
        &self,
        consumers: &Consumers,
        holdings: &Holdings,
        deferred: &Deferred,
    ) -> Vec<ConsumerStatus> {
        let complete = consumers.values().cloned().map(|mut status| {
            let deferred = deferred.get(&status.name).copied().unwrap_or_default();
            status.add(&self.context, holdings, deferred);
            status
        });
        complete.collect()
    }

    fn env(&self) -> &Env {
        self.context.env()
    }

    /// Returns the result of `read` if the store answers in time, or else fails with the store's last error.
    async fn answered<T, F, R>(&self, read: F) -> Result<T>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T>>,
    {
        let (store, last) = (&self.context.store, &Mutex::new(None));
        let policy = RetryPolicy { elapsed_max: Some(ANSWER_MAX), ..RetryPolicy::default() };
        let run = store.run_with(&policy, |tx| {
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
            () = store.env().sleep(ANSWER_MAX) => {
                let gave_up = Error::GaveUp { what: "reading", after: ANSWER_MAX };
                Err(last.lock().take().map_or(gave_up, Error::Store))
            }
        }
    }
}
