//! Encodes all counts of the process for Prometheus.

use std::sync::atomic::AtomicU64;

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
    bus::observed::{Observed, Run},
};

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
    let failed = i64::from(db.failure().is_some());
    registry.register("store_failed", "Whether the store takes no more writes", ConstGauge::new(failed));
    let troubles = i64::try_from(stats.health.troubles().len()).unwrap_or(i64::MAX);
    registry.register("troubles", "Things that fail now, and are tried again", ConstGauge::new(troubles));
    let partitions = i64::from(inner.feed.context.config.partitions);
    registry.register("partitions", "Partitions of the bus", ConstGauge::new(partitions));
    let folds = Histogram::of(&stats.fold_durations);
    registry.register_with_unit(
        "fold",
        "How long folds took that have written something",
        Unit::Seconds,
        folds,
    );
}

/// Registers what was seen of the whole bus, and of the tail of this process.
fn register_observed(registry: &mut Registry, observed: &Observed) {
    let nodes = Family::<Labels, Gauge>::default();
    for (state, count) in [("living", observed.living), ("silent", observed.silent)] {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        nodes.get_or_create(&vec![("state", state.to_owned())]).set(count);
    }
    registry.register("nodes", "Nodes of the bus, by whether their heartbeat goes on", nodes);
    let (held, wanted) = (Family::<Labels, Gauge>::default(), Family::<Labels, Gauge>::default());
    for (pool, has, wants) in observed.leases {
        let labels = vec![("pool", pool.to_owned())];
        held.get_or_create(&labels).set(i64::try_from(has).unwrap_or(i64::MAX));
        wanted.get_or_create(&labels).set(i64::try_from(wants).unwrap_or(i64::MAX));
    }
    registry.register("leases", "Leases that nodes hold, by what is divided", held);
    registry.register("leases_wanted", "What there is to divide, each of which needs a lease", wanted);
    let waiting = Family::<Labels, Gauge>::default();
    let oldest = Family::<Labels, Gauge<f64, AtomicU64>>::default();
    for Run { first, last, rows, oldest: age } in &observed.runs {
        let run = if first == last { first.to_string() } else { format!("{first}-{last}") };
        let labels = vec![("partitions", run)];
        waiting.get_or_create(&labels).set(i64::try_from(*rows).unwrap_or(i64::MAX));
        oldest.get_or_create(&labels).set(age.as_secs_f64());
    }
    registry.register(
        "backlog_rows",
        "Databases with events that wait to be folded, by runs of partitions; the first 10,000 are counted",
        waiting,
    );
    registry.register_with_unit(
        "backlog_oldest",
        "For how long this process has seen events wait without a fold of their partition, by runs of partitions; it begins with the \
         first look after the start of the process",
        Unit::Seconds,
        oldest,
    );
    registry.register_with_unit(
        "tail_lag",
        "For how long the tail of the dispatcher has not reached an end of the feed that this process has seen",
        Unit::Seconds,
        ConstGauge::new(observed.tail_lag.as_secs_f64()),
    );
    register_consumers(registry, observed);
}

/// Registers the consumers of the notifications, one by one.
fn register_consumers(registry: &mut Registry, observed: &Observed) {
    let ages = Family::<Labels, Gauge<f64, AtomicU64>>::default();
    let [rows, deferred, members, unowned] = [(); 4].map(|()| Family::<Labels, Gauge>::default());
    for consumer in &observed.consumers {
        let labels = vec![("consumer", consumer.name.clone())];
        let set = |family: &Family<Labels, Gauge>, count: u64| {
            family.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        };
        set(&members, consumer.members);
        set(&unowned, consumer.unowned);
        if let Some(behind) = &consumer.behind {
            set(&rows, behind.rows);
            set(&deferred, behind.deferred);
            ages.get_or_create(&labels).set(behind.age.as_secs_f64());
        }
    }
    registry.register("consumer_lag_rows", "Rows that consumers of the notifications are behind", rows);
    registry.register_with_unit(
        "consumer_lag",
        "For how long the oldest of these rows has waited, by wall clocks",
        Unit::Seconds,
        ages,
    );
    registry.register(
        "consumer_deferred_ids",
        "Ids that a consumer has deferred; the first 1,000 are counted",
        deferred,
    );
    registry.register("consumer_members", "Nodes that run a consumer", members);
    registry.register("consumer_shards_unowned", "Shards of a consumer that no node works on", unowned);
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
pub(super) fn encode(inner: &Inner, refusals: Option<&Refusals>, observed: Option<&Observed>) -> String {
    let mut registry = Registry::with_prefix("notibus");
    register_bus(&mut registry, inner);
    if let Some(observed) = observed {
        register_observed(&mut registry, observed);
    }
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
    let gauge = |count: usize| ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
    registry.register("http_feeds", "Feeds that are open", gauge(inner.admission.feeds()));
    // Requests always come within a runtime.
    let tasks = Handle::try_current().map_or(0, |runtime| runtime.metrics().num_alive_tasks());
    registry.register("tasks", "Tasks that live in the runtime", gauge(tasks));
    registry.register("subscribers", "Subscriptions in the process", gauge(inner.dispatcher.subscribers()));

    let mut out = String::new();
    text::encode(&mut out, &registry).expect("a string takes all text");
    out
}
