//! Writes all metrics of the process for Prometheus, in the text format of `OpenMetrics`.

use std::{
    collections::BTreeMap,
    fmt::{Display, Write as _},
    time::Duration,
};

use tokio::runtime::Handle;

use super::Inner;
use crate::{
    base::{durations::Durations, event::EventKind},
    bus::snapshot::Snapshot,
    roles::consumer::ConsumerShard,
};

/// Metrics as text.
struct Text(String);

/// The values of a gauge, by the value of its only label.
type Values<T = u64> = BTreeMap<String, T>;

impl Text {
    fn line(&mut self, line: impl Display) {
        writeln!(self.0, "{line}").expect("a string takes all text");
    }

    /// Writes the lines that describe a metric. The name of a metric ends with its unit.
    fn head(&mut self, kind: &str, name: &str, what: &str) {
        self.line(format_args!("# HELP notibus_{name} {}.", what.trim().trim_end_matches('.')));
        self.line(format_args!("# TYPE notibus_{name} {kind}"));
        if name.ends_with("_seconds") {
            self.line(format_args!("# UNIT notibus_{name} seconds"));
        }
    }

    fn gauge(&mut self, name: &str, what: &str, value: impl Display) {
        self.head("gauge", name, what);
        self.line(format_args!("notibus_{name} {value}"));
    }

    fn gauges<T: Display>(&mut self, name: &str, what: &str, label: &str, values: &Values<T>) {
        self.head("gauge", name, what);
        for (of, value) in values {
            self.line(format_args!("notibus_{name}{{{label}=\"{}\"}} {value}", escaped(of)));
        }
    }

    fn count(&mut self, name: &str, what: &str, value: u64) {
        self.head("counter", name, what);
        self.line(format_args!("notibus_{name}_total {value}"));
    }

    fn histogram(&mut self, name: &str, what: &str, durations: &Durations) {
        self.head("histogram", name, what);
        let ((sum, counts), mut count) = (durations.snapshot(), 0);
        self.line(format_args!("notibus_{name}_sum {sum:?}"));
        let buckets: Vec<_> = counts
            .iter()
            .map(|(bound, fell)| {
                count += fell;
                let bound = if *bound < f64::MAX { format!("{bound:?}") } else { "+Inf".to_owned() };
                format!("notibus_{name}_bucket{{le=\"{bound}\"}} {count}")
            })
            .collect();
        self.line(format_args!("notibus_{name}_count {count}"));
        for bucket in buckets {
            self.line(bucket);
        }
    }
}

/// Escapes `text` for use as the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// The maximum number of consumers that are reported individually.
const CONSUMERS_MAX: usize = 1_000;

/// The maximum number of runs of partitions that are reported individually.
const RUNS_MAX: u32 = 16;

/// Writes what the process counts about the store and about its own work.
fn write_bus(text: &mut Text, inner: &Inner) {
    let (db, stats) = (inner.bus.store(), &inner.feed.context.stats);
    let (commits, retries) = db.runs();
    text.count("store_commits", "Committed transactions", commits);
    text.count("store_retries", "Transaction attempts that were repeated", retries);
    let failed = u8::from(db.failure().is_some());
    text.gauge("store_failed", "Whether the store takes no more writes", failed);
    text.gauge("troubles", "Things that currently fail and are tried again", stats.health.troubles().len());
    text.gauge("partitions", "Partitions of the bus", inner.feed.context.config.partitions);
    text.histogram("fold_seconds", "How long folds that wrote something took", &stats.fold_durations);
}

/// Writes what is known about the whole bus, and about the tail of this process. Parts that could not be read from the store are left out.
fn write_snapshot(text: &mut Text, inner: &Inner, snapshot: &Snapshot) {
    let what = "Parts of the bus figures that are missing, because the store did not answer";
    text.gauge("unanswered", what, snapshot.unanswered.len());
    if let Some(members) = &snapshot.members {
        let silent = members.silent.values().filter(|(_, is_silent)| *is_silent).count();
        let nodes =
            Values::from([("living".into(), members.nodes.len() - silent), ("silent".into(), silent)]);
        text.gauges("nodes", "Nodes of the bus, by whether their heartbeats continue", "state", &nodes);
    }
    write_leases(text, inner, snapshot);
    if let Some(ends) = &snapshot.ends {
        let what = "How long the tail of the dispatcher has not reached an end of the feed that this process has seen";
        let lag = inner.dispatcher.lag(ends.now).as_secs_f64();
        text.gauge("tail_lag_seconds", what, format_args!("{lag:?}"));
    }
    write_backlog(text, inner, snapshot);
    write_consumers(text, inner, snapshot);
    write_document_consumers(text, inner, snapshot);
}

/// Writes the leases on everything that is divided among nodes.
fn write_leases(text: &mut Text, inner: &Inner, snapshot: &Snapshot) {
    let (mut held, mut wanted) = (Values::new(), Values::new());
    if let Some(members) = &snapshot.members {
        let owned = members.owners.values().filter(|(owner, _)| owner.is_some()).count();
        held.insert("partition".into(), owned as u64);
    }
    if let Some(holdings) = &snapshot.holdings {
        held.insert("janitor".into(), holdings.count(|pool| pool == "janitor"));
        held.insert("consumers".into(), holdings.count(|pool| pool != "partition" && pool != "janitor"));
    }
    wanted.insert("partition".into(), u64::from(inner.feed.context.config.partitions));
    wanted.insert("janitor".into(), 1);
    if let Some(consumers) = &snapshot.consumers {
        let shards = consumers.values().map(|consumer| consumer.shards.len()).sum::<usize>();
        wanted.insert("consumers".into(), shards as u64);
    }
    text.gauges("leases", "Leases held by nodes, by what is divided", "pool", &held);
    text.gauges("leases_wanted", "Resources to divide, each of which needs a lease", "pool", &wanted);
}

/// Writes the backlog, the events that wait to be folded, by equally long runs of partitions.
fn write_backlog(text: &mut Text, inner: &Inner, snapshot: &Snapshot) {
    let (mut rows, mut oldest) = (Values::new(), Values::new());
    let partitions = inner.feed.context.config.partitions;
    let length = partitions.div_ceil(RUNS_MAX);
    for first in (0..partitions).step_by(length as usize) {
        let last = (first + length).min(partitions) - 1;
        let run = if first == last { first.to_string() } else { format!("{first}-{last}") };
        if let Some(backlog) = &snapshot.backlog {
            let here = backlog.partitions.iter().filter(|one| (first..=last).contains(&one.partition));
            rows.insert(run.clone(), here.map(|one| one.rows).sum::<u64>());
        }
        if let Some(ages) = &snapshot.ages {
            let age = ages.range(first..=last).map(|(_, age)| *age).max().unwrap_or_default();
            oldest.insert(run, age.as_secs_f64());
        }
    }
    let what =
        "Databases with events that wait to be folded, by runs of partitions; the first 10,000 are counted";
    text.gauges("backlog_rows", what, "partitions", &rows);
    let what = "How long this process has seen events wait without a fold of their partition, by runs of partitions; it begins \
                with the first poll after the start of the process";
    text.gauges("backlog_oldest_seconds", what, "partitions", &oldest);
}

/// Writes how many consumers of documents need attention: there may be one for each database, so they are not reported individually.
fn write_document_consumers(text: &mut Text, inner: &Inner, snapshot: &Snapshot) {
    let Some(consumers) = &snapshot.consumers else { return };
    let (mut deferred, mut failing, mut unowned) = (0_u64, 0_u64, 0_u64);
    for status in consumers.values().filter(|status| status.instance.is_some()) {
        deferred += u64::from(status.has_deferred);
        let Some(holdings) = &snapshot.holdings else { continue };
        let mut status = status.clone();
        status.add(&inner.feed.context, holdings, 0);
        failing += u64::from(status.shards.iter().any(|shard| shard.failing.is_some()));
        unowned += u64::from(status.shards.iter().any(|shard| shard.owner.is_none()));
    }
    let mut counts = Values::from([("deferred".to_owned(), deferred)]);
    if snapshot.holdings.is_some() {
        counts.extend([("failing".to_owned(), failing), ("unowned".to_owned(), unowned)]);
    }
    let what = "Consumers of documents with deferred ids, with shards in this process whose work keeps failing, \
                or with shards that no node works on";
    text.gauges("document_consumers", what, "trouble", &counts);
}

/// Writes the consumers of the notifications individually.
fn write_consumers(text: &mut Text, inner: &Inner, snapshot: &Snapshot) {
    let mut ages = Values::new();
    let [mut rows, mut deferred] = [(); 2].map(|()| Values::new());
    let [mut members, mut unowned, mut failing] = [(); 3].map(|()| Values::new());
    let consumers = snapshot.consumers.iter().flat_map(|consumers| consumers.values());
    for status in consumers.filter(|status| status.instance.is_none()).take(CONSUMERS_MAX) {
        let name = || status.name.as_str().to_owned();
        let mut status = status.clone();
        if let Some(holdings) = &snapshot.holdings {
            status.add(&inner.feed.context, holdings, 0);
            members.insert(name(), status.members.len());
            let count =
                |is: fn(&ConsumerShard) -> bool| status.shards.iter().filter(|shard| is(shard)).count();
            unowned.insert(name(), count(|shard| shard.owner.is_none()));
            failing.insert(name(), count(|shard| shard.failing.is_some()));
        }
        if let Some(counts) = &snapshot.deferred {
            deferred.insert(name(), counts.get(&status.name).copied().unwrap_or_default());
        }
        if let Some(lag) = snapshot.lags.as_ref().and_then(|lags| lags.get(&status.name)) {
            rows.insert(name(), lag.iter().map(|shard| shard.rows).sum::<u64>());
            let age_ms = lag.iter().filter_map(|shard| shard.age_ms).max().unwrap_or_default();
            ages.insert(name(), Duration::from_millis(age_ms).as_secs_f64());
        }
    }
    let what = "How many rows the consumers of the notifications are behind; at least the newest 40,000 of the feed are counted";
    text.gauges("consumer_lag_rows", what, "consumer", &rows);
    let what = "How long the oldest row that a consumer has yet to work on has waited, by wall clocks";
    text.gauges("consumer_lag_seconds", what, "consumer", &ages);
    let what = "Ids deferred by a consumer; the first 1,000 are counted";
    text.gauges("consumer_deferred_ids", what, "consumer", &deferred);
    text.gauges("consumer_members", "Nodes that run a consumer", "consumer", &members);
    let what = "Shards of a consumer that no node works on";
    text.gauges("consumer_shards_unowned", what, "consumer", &unowned);
    let what =
        "Shards of a consumer that this process works on, and that wait for a row whose work keeps failing";
    text.gauges("consumer_shards_failing", what, "consumer", &failing);
}

/// Writes all metrics of the process.
pub(super) fn encode(inner: &Inner, snapshot: &Snapshot) -> String {
    let mut text = Text(String::new());
    write_bus(&mut text, inner);
    write_snapshot(&mut text, inner, snapshot);
    let stats = inner.bus.stats();
    for (name, what, count) in stats.each() {
        text.count(name, what, count);
    }
    let kinds = [EventKind::Created, EventKind::Deleted, EventKind::Updated, EventKind::DdocUpdated];
    text.head("counter", "events_folded", "Events folded into notifications, by kind");
    for (kind, count) in kinds.into_iter().zip(stats.folded.lanes()) {
        text.line(format_args!("notibus_events_folded_total{{kind=\"{}\"}} {count}", kind.as_str()));
    }
    text.head("counter", "http_answers", "Answers, by route, method and status");
    for ((route, method, status), count) in &*inner.answers.lock() {
        let labels = format_args!("route=\"{}\",method=\"{method}\",status=\"{status}\"", escaped(route));
        text.line(format_args!("notibus_http_answers_total{{{labels}}} {count}"));
    }
    text.gauge("http_feeds", "Open feeds", inner.feeds.count());
    // Requests are always handled within a runtime.
    let tasks = Handle::try_current().map_or(0, |runtime| runtime.metrics().num_alive_tasks());
    text.gauge("tasks", "Tasks that are alive in the runtime", tasks);
    text.gauge("subscribers", "Subscriptions in the process", inner.dispatcher.subscribers());
    text.line("# EOF");
    text.0
}
