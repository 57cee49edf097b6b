//! [`Watch`]: facts about a bus that take more than one read: which nodes live, and which events wait for too long.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{Bus, status::Backlog};
use crate::{
    base::{error::Result, tasks::within},
    roles::{consumer::ConsumerStatus, dispatcher::Dispatcher},
    state::{
        keys::NodeId,
        membership::{LastSeen, NodeStatus},
    },
};

/// How long an observation is reused, because it costs some reads.
const FRESH_FOR: Duration = Duration::from_secs(5);

/// How long the store may take to answer each part.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// The most consumers that are reported one by one.
const CONSUMERS_MAX: usize = 100;

/// The most deferred ids of a consumer that are counted.
const DEFERRED_MAX: usize = 1_000;

/// The most runs of partitions that are reported one by one.
const RUNS_MAX: u32 = 16;

#[derive(Debug, Clone, Default)]
pub(crate) struct Observed {
    /// Nodes whose heartbeat changes.
    pub living: usize,
    /// Nodes whose heartbeat has paused for longer than their expiry.
    pub silent: usize,
    /// Leases that nodes hold, and resources that they have to divide.
    pub leases: [(&'static str, u64, u64); 3],
    /// Events that wait to be folded, by runs of partitions.
    pub runs: Vec<Run>,
    /// For how long the tail of the dispatcher has not reached an end of the feed.
    pub tail_lag: Duration,
    /// Consumers of the notifications.
    pub consumers: Vec<ObservedConsumer>,
}

/// A consumer of the notifications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ObservedConsumer {
    pub name: String,
    /// What takes reads of its own; `None` if the store took too long to answer.
    pub behind: Option<Behind>,
    /// Nodes that run it. Some may have died.
    pub members: u64,
    /// Shards without an owner.
    pub unowned: u64,
}

/// What a consumer has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Behind {
    /// The rows after its checkpoints, in all shards.
    pub rows: u64,
    /// The age of the oldest of these rows, by wall clocks.
    pub age: Duration,
    /// Ids that are deferred, up to [`DEFERRED_MAX`].
    pub deferred: u64,
}

/// Adjacent partitions, and the events that wait in them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    pub first: u32,
    pub last: u32,
    /// Databases with events that wait to be folded.
    pub rows: u64,
    /// For how long this process has seen the oldest backlog wait without a fold of its partition.
    pub oldest: Duration,
}

/// State between observations.
#[derive(Debug, Default)]
struct WatchState {
    /// The last observation and its time.
    last: Option<(Duration, Arc<Observed>)>,
    /// The start and heartbeat count of each node.
    beats: LastSeen<NodeId, (u64, u64)>,
}

/// Observes a bus, at most every few seconds.
#[derive(Debug, Default)]
pub(crate) struct Watch(Mutex<WatchState>);

impl Watch {
    /// An observation of `bus`, at most a few seconds old; `None` if the store does not answer in time.
    pub async fn observe(&self, bus: &Bus, dispatcher: &Dispatcher) -> Option<Arc<Observed>> {
        let env = bus.store().env();
        let last = self.0.lock().last.clone();
        if let Some((_, seen)) = last.filter(|(at, _)| env.now().saturating_sub(*at) < FRESH_FOR) {
            return Some(seen);
        }
        let (read, consumers) = tokio::join!(
            within(env, ANSWER_MAX, "observation", read(bus, dispatcher)),
            within(env, ANSWER_MAX, "list of consumers", bus.consumers()),
        );
        let consumers = consumers.unwrap_or_else(|error| {
            bus.context.stats.health.complain(env, "observation of consumers", &error);
            Vec::new()
        });
        let shards = consumers.iter().map(|consumer| consumer.shards.len() as u64).sum();
        let consumers = observe_consumers(bus, consumers).await;
        match read.map(|read| Read { shards, consumers, ..read }) {
            Ok(read) => Some(self.0.lock().see(env.now(), read)),
            Err(error) => {
                bus.context.stats.health.complain(env, "observation of the bus", &error);
                None
            }
        }
    }
}

struct Read {
    partitions: u32,
    /// Shards that consumers have to work on.
    shards: u64,
    nodes: Vec<NodeStatus>,
    backlog: Backlog,
    /// How long events of partitions were seen to wait.
    ages: BTreeMap<u32, Duration>,
    tail_lag: Duration,
    consumers: Vec<ObservedConsumer>,
}

/// Everything but consumers.
async fn read(bus: &Bus, dispatcher: &Dispatcher) -> Result<Read> {
    let feed = bus.feed();
    let (nodes, backlog, ages, end) =
        tokio::try_join!(bus.nodes(), bus.backlog(), bus.waiting(), feed.now())?;
    let (tail_lag, partitions) = (dispatcher.lag(end), bus.context.config.partitions);
    Ok(Read { partitions, shards: 0, nodes, backlog, ages, tail_lag, consumers: Vec::new() })
}

/// Consumers of the notifications. What the store does not say in time is left out.
async fn observe_consumers(bus: &Bus, mut consumers: Vec<ConsumerStatus>) -> Vec<ObservedConsumer> {
    consumers.retain(|consumer| consumer.instance.is_none());
    consumers.truncate(CONSUMERS_MAX);
    let behind = bus.of_each(&consumers, ANSWER_MAX, async |handle, status| {
        let lag = handle.lag().await?;
        let deferred = if status.has_deferred { handle.deferred(None, DEFERRED_MAX).await?.len() } else { 0 };
        let age_ms = lag.iter().filter_map(|shard| shard.age_ms).max();
        Ok(Behind {
            rows: lag.iter().map(|shard| shard.rows).sum(),
            age: Duration::from_millis(age_ms.unwrap_or_default()),
            deferred: deferred as u64,
        })
    });
    let behind = behind.await;
    let observed = consumers.into_iter().zip(behind).map(|(status, behind)| ObservedConsumer {
        name: status.name.to_string(),
        behind,
        members: status.members.len() as u64,
        unowned: status.shards.iter().filter(|shard| shard.owner.is_none()).count() as u64,
    });
    observed.collect()
}

impl WatchState {
    /// Derives an observation at `now` from `read` and the earlier reads.
    fn see(&mut self, now: Duration, read: Read) -> Arc<Observed> {
        let Read { partitions, shards, nodes, backlog, ages, tail_lag, consumers } = read;
        let mut observed =
            Observed { runs: runs(partitions, &backlog, &ages), tail_lag, consumers, ..Observed::default() };
        self.beats.adopt(nodes.iter().map(|node| (node.id, (node.started_ms, node.beat))), now);
        for node in &nodes {
            let silent = self.beats.age(&node.id, &(node.started_ms, node.beat), now);
            let is_silent = silent > Duration::from_millis(node.expiry_ms);
            *(if is_silent { &mut observed.silent } else { &mut observed.living }) += 1;
        }
        let leases = |is_of: fn(&str) -> bool| {
            let held = nodes.iter().flat_map(|node| &node.leases).filter(|(pool, _)| is_of(pool));
            held.map(|(_, count)| count).sum()
        };
        observed.leases = [
            ("partition", leases(|pool| pool == "partition"), partitions.into()),
            ("janitor", leases(|pool| pool == "janitor"), 1),
            ("consumers", leases(|pool| pool != "partition" && pool != "janitor"), shards),
        ];
        let observed = Arc::new(observed);
        self.last = Some((now, Arc::clone(&observed)));
        observed
    }
}

/// The backlog of runs that are as long as each other.
fn runs(partitions: u32, backlog: &Backlog, ages: &BTreeMap<u32, Duration>) -> Vec<Run> {
    let length = partitions.div_ceil(RUNS_MAX);
    let firsts = (0..partitions).step_by(length as usize);
    let run = |first: u32| {
        let last = (first + length).min(partitions) - 1;
        let here = backlog.partitions.iter().filter(|one| (first..=last).contains(&one.partition));
        let oldest = ages.range(first..=last).map(|(_, age)| *age).max().unwrap_or_default();
        Run { first, last, rows: here.map(|one| one.rows).sum(), oldest }
    };
    firsts.map(run).collect()
}
