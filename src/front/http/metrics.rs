//! Encodes all counts of the process for Prometheus.

use std::{sync::atomic::AtomicU64, time::Duration};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet, text},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::{Registry, Unit},
};

use tokio::runtime::Handle;

use super::{
    Inner,
    answer_counts::{AnswerCounts, Labels},
    refusals::Refusals,
};
use crate::{
    base::{durations::Durations, event::EventKind},
    bus::snapshot::Snapshot,
    roles::consumer::ConsumerShard,
};

/// The most consumers that are reported one by one.
const CONSUMERS_MAX: usize = 1_000;

/// The most runs of partitions that are reported one by one.
const RUNS_MAX: u32 = 16;

/// Registers what the process counts of the store and of its work.
fn register_bus(registry: &mut Registry, inner: &Inner) {
    let (db, stats) = (inner.bus.store(), &inner.feed.context.stats);
    let (commits, retries) = db.runs();
    registry.register("store_commits", "Transactions that were committed", ConstCounter::new(commits));
    registry.register(
        "store_retries",
        "Attempts of transactions that were made again",
        ConstCounter::new(retries),
    );
    let failed = gauge(db.failure().is_some());
    registry.register("store_failed", "Whether the store takes no more writes", failed);
    let troubles = gauge(stats.health.troubles().len());
    registry.register("troubles", "Things that fail now, and are tried again", troubles);
    registry.register("partitions", "Partitions of the bus", gauge(inner.feed.context.config.partitions));
    let folds = Histogram::of(&stats.fold_durations);
    registry.register_with_unit(
        "fold",
        "How long folds took that have written something",
        Unit::Seconds,
        folds,
    );
}

/// A gauge with this value.
fn gauge(value: impl TryInto<i64>) -> ConstGauge<i64> {
    ConstGauge::new(value.try_into().unwrap_or(i64::MAX))
}

/// Values of a gauge by their labels.
struct Gauges(Family<Labels, Gauge>);

impl Gauges {
    fn new() -> Self {
        Self(Family::default())
    }

    fn set(&self, label: &'static str, of: impl Into<String>, value: u64) {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        self.0.get_or_create(&vec![(label, of.into())]).set(value);
    }
}

/// Registers what is known of the whole bus, and of the tail of this process. What the store has not answered is left out.
fn register_snapshot(registry: &mut Registry, inner: &Inner, snapshot: &Snapshot) {
    let what = "Parts of the figures of the bus that are missing, because the store has not answered them";
    registry.register("unanswered", what, gauge(snapshot.unanswered.len()));
    if let Some(members) = &snapshot.members {
        let nodes = Gauges::new();
        let silent = members.silent.values().filter(|(_, is_silent)| *is_silent).count() as u64;
        nodes.set("state", "living", members.nodes.len() as u64 - silent);
        nodes.set("state", "silent", silent);
        registry.register("nodes", "Nodes of the bus, by whether their heartbeat goes on", nodes.0);
    }
    register_leases(registry, inner, snapshot);
    if let Some(ends) = &snapshot.ends {
        registry.register_with_unit(
            "tail_lag",
            "For how long the tail of the dispatcher has not reached an end of the feed that this process has seen",
            Unit::Seconds,
            ConstGauge::new(inner.dispatcher.lag(ends.now).as_secs_f64()),
        );
    }
    register_backlog(registry, inner, snapshot);
    register_consumers(registry, inner, snapshot);
}

/// Registers the leases of what is divided.
fn register_leases(registry: &mut Registry, inner: &Inner, snapshot: &Snapshot) {
    let (held, wanted) = (Gauges::new(), Gauges::new());
    if let Some(members) = &snapshot.members {
        let owned = members.owners.values().filter(|(owner, _)| owner.is_some()).count();
        held.set("pool", "partition", owned as u64);
    }
    if let Some(holdings) = &snapshot.holdings {
        held.set("pool", "janitor", holdings.count(|pool| pool == "janitor"));
        held.set("pool", "consumers", holdings.count(|pool| pool != "partition" && pool != "janitor"));
    }
    wanted.set("pool", "partition", inner.feed.context.config.partitions.into());
    wanted.set("pool", "janitor", 1);
    if let Some(consumers) = &snapshot.consumers {
        let shards = consumers.values().map(|consumer| consumer.shards.len()).sum::<usize>();
        wanted.set("pool", "consumers", shards as u64);
    }
    registry.register("leases", "Leases that nodes hold, by what is divided", held.0);
    registry.register("leases_wanted", "What there is to divide, each of which needs a lease", wanted.0);
}

/// Registers the events that wait to be folded, by runs of partitions that are as long as each other.
fn register_backlog(registry: &mut Registry, inner: &Inner, snapshot: &Snapshot) {
    let (rows, oldest) = (Gauges::new(), Family::<Labels, Gauge<f64, AtomicU64>>::default());
    let partitions = inner.feed.context.config.partitions;
    let length = partitions.div_ceil(RUNS_MAX);
    for first in (0..partitions).step_by(length as usize) {
        let last = (first + length).min(partitions) - 1;
        let run = if first == last { first.to_string() } else { format!("{first}-{last}") };
        if let Some(backlog) = &snapshot.backlog {
            let here = backlog.partitions.iter().filter(|one| (first..=last).contains(&one.partition));
            rows.set("partitions", run.clone(), here.map(|one| one.rows).sum());
        }
        if let Some(ages) = &snapshot.ages {
            let age = ages.range(first..=last).map(|(_, age)| *age).max().unwrap_or_default();
            oldest.get_or_create(&vec![("partitions", run)]).set(age.as_secs_f64());
        }
    }
    registry.register(
        "backlog_rows",
        "Databases with events that wait to be folded, by runs of partitions; the first 10,000 are counted",
        rows.0,
    );
    registry.register_with_unit(
        "backlog_oldest",
        "For how long this process has seen events wait without a fold of their partition, by runs of partitions; it begins with the \
         first look after the start of the process",
        Unit::Seconds,
        oldest,
    );
}

/// Registers the consumers of the notifications, one by one.
fn register_consumers(registry: &mut Registry, inner: &Inner, snapshot: &Snapshot) {
    let ages = Family::<Labels, Gauge<f64, AtomicU64>>::default();
    let [rows, deferred, members, unowned, failing] = [(); 5].map(|()| Gauges::new());
    let consumers = snapshot.consumers.iter().flat_map(|consumers| consumers.values());
    for status in consumers.filter(|status| status.instance.is_none()).take(CONSUMERS_MAX) {
        let name = status.name.as_str();
        let mut status = status.clone();
        if let Some(holdings) = &snapshot.holdings {
            status.add(&inner.feed.context, holdings, 0);
            members.set("consumer", name, status.members.len() as u64);
            let count =
                |is: fn(&ConsumerShard) -> bool| status.shards.iter().filter(|shard| is(shard)).count();
            unowned.set("consumer", name, count(|shard| shard.owner.is_none()) as u64);
            failing.set("consumer", name, count(|shard| shard.failing.is_some()) as u64);
        }
        if let Some(counts) = &snapshot.deferred {
            deferred.set("consumer", name, counts.get(&status.name).copied().unwrap_or_default());
        }
        if let Some(lag) = snapshot.lags.as_ref().and_then(|lags| lags.get(&status.name)) {
            rows.set("consumer", name, lag.iter().map(|shard| shard.rows).sum());
            let age_ms = lag.iter().filter_map(|shard| shard.age_ms).max().unwrap_or_default();
            let age = Duration::from_millis(age_ms).as_secs_f64();
            ages.get_or_create(&vec![("consumer", name.to_owned())]).set(age);
        }
    }
    let what =
        "Rows that consumers of the notifications are behind; of the newest 40,000 of the feed at least";
    registry.register("consumer_lag_rows", what, rows.0);
    registry.register_with_unit(
        "consumer_lag",
        "For how long the oldest of the rows that a consumer is behind has waited, by wall clocks",
        Unit::Seconds,
        ages,
    );
    let what = "Ids that a consumer has deferred; the first 1,000 are counted";
    registry.register("consumer_deferred_ids", what, deferred.0);
    registry.register("consumer_members", "Nodes that run a consumer", members.0);
    registry.register("consumer_shards_unowned", "Shards of a consumer that no node works on", unowned.0);
    let what = "Shards of a consumer that this process works on, and that wait for a row whose work fails";
    registry.register("consumer_shards_failing", what, failing.0);
}

/// A snapshot of durations.
#[derive(Debug)]
struct Histogram {
    /// The sum of the durations in seconds.
    sum: f64,
    /// How many durations fall under each bound.
    counts: Vec<(f64, u64)>,
}

impl Histogram {
    /// Takes a snapshot.
    fn of(durations: &Durations) -> Self {
        let (sum, counts) = durations.snapshot();
        Self { sum, counts }
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        let count = self.counts.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(self.sum, count, &self.counts, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Encodes all counts of the process. If our own listener received the request, its refusals are counted, too.
pub(super) fn encode(inner: &Inner, refusals: Option<&Refusals>, snapshot: &Snapshot) -> String {
    let mut registry = Registry::with_prefix("notibus");
    register_bus(&mut registry, inner);
    register_snapshot(&mut registry, inner, snapshot);
    let stats = inner.bus.stats();
    for (name, what, count) in stats.each() {
        registry.register(name, what.trim().trim_end_matches('.'), ConstCounter::new(count));
    }
    let folded = Family::<Labels, Counter>::default();
    for (kind, count) in [EventKind::Created, EventKind::Deleted, EventKind::Updated, EventKind::DdocUpdated]
        .into_iter()
        .zip(stats.folded.lanes())
    {
        folded.get_or_create(&vec![("kind", kind.as_str().to_owned())]).inc_by(count);
    }
    registry.register("events_folded", "Events folded into notifications, by kind", folded);

    let AnswerCounts { answers, rows, bytes, failures } = inner.metrics.clone();
    registry.register("http_answers", "Answers, by route, method and status", answers);
    registry.register("http_feed_rows", "Rows sent by feeds", rows);
    registry.register("http_feed_bytes", "Bytes of feeds handed to connections", bytes);
    registry.register("http_feed_failures", "Feeds that were cut off by a failure", failures);
    if let Some(Refusals { counts, .. }) = refusals {
        let what =
            "Requests refused for the name in Host or the page in Origin, and connections for lack of room";
        registry.register("http_refused", what, counts.clone());
    }
    registry.register("http_feeds", "Feeds that are open", gauge(inner.admission.feeds()));
    // Requests always come within a runtime.
    let tasks = Handle::try_current().map_or(0, |runtime| runtime.metrics().num_alive_tasks());
    registry.register("tasks", "Tasks that live in the runtime", gauge(tasks));
    registry.register("subscribers", "Subscriptions in the process", gauge(inner.dispatcher.subscribers()));

    let mut out = String::new();
    text::encode(&mut out, &registry).expect("a string takes all text");
    out
}
