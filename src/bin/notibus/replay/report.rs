//! The report of a replay.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use notibus::{DbInstance, DbName, Kinds, Sequence, event::Counters, node::StatsSnapshot};
use serde::Serialize;

use super::{check::FinalFeed, history::History, load::Loaded, observer::Latencies, observers::Observers};
use crate::{failure::Failure, out::private_file};

/// The result of a replay.
pub struct Replayed<'a> {
    pub history: &'a History,
    /// The result of the load.
    pub loaded: &'a Loaded,
    /// The final feed.
    pub feed: &'a FinalFeed,
    pub observers: &'a Observers,
    pub latencies: &'a Latencies,
    pub folded: Counters,
    pub reshards: u64,
    /// The counts of the bus before the replay.
    pub before: StatsSnapshot,
    /// The counts of the bus after the replay.
    pub after: StatsSnapshot,
}

/// The summary of a replay; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Report {
    transactions: usize,
    /// Events recorded, by kind.
    recorded: Counters,
    /// Events folded, by kind.
    folded: Counters,
    /// Rows written to the feed.
    notifications: u64,
    feed: Rows,
    reshards: u64,
    delivered: Delivered,
    /// Attempts of the producers' transactions that failed by a conflict.
    producer_conflicts: u64,
    /// Attempts of folds that were tried again.
    fold_retries: u64,
    /// Leases that the notifiers have lost to each other or to other nodes.
    leases_lost: u64,
    /// How often a node of the replay has fallen out of the bus.
    nodes_fallen_out: u64,
    /// The most memory that the process has had, in bytes, where the system says so.
    peak_memory_bytes: Option<u64>,
    /// From the first transaction to the last delivery.
    seconds: f64,
    /// Events recorded and delivered per second.
    events_per_second: f64,
    /// From the commit of an event to its delivery to `db_updates`, in microseconds.
    latency_us: Latency,
}

#[derive(Debug, Serialize)]
struct Rows {
    live: usize,
    /// Of databases that are deleted.
    tombstones: usize,
}

#[derive(Debug, Serialize)]
struct Delivered {
    /// Updates of every database.
    indexer: u64,
    /// Databases whose name contains "replicator".
    replicator: u64,
    db_updates: u64,
}

/// Latencies, in microseconds.
#[derive(Debug, Serialize)]
struct Latency {
    /// Half of the events were faster.
    p50: u64,
    /// 99 of 100 events were faster.
    p99: u64,
    /// The slowest event.
    max: u64,
}

impl Report {
    pub fn new(outcome: &Replayed<'_>) -> Self {
        let Replayed { history, loaded, feed, observers, latencies, folded, reshards, before, after } =
            outcome;
        let last = observers.all().iter().filter_map(|observer| observer.last()).max();
        let seconds = last.map_or(Duration::ZERO, |last| last.duration_since(loaded.started)).as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a history has far fewer than 2^53 events")]
        let events = history.recorded.total() as f64;
        let tombstones = feed.rows.iter().filter(|row| row.is_deleted()).count();
        Self {
            transactions: history.transactions.len(),
            recorded: history.recorded,
            folded: *folded,
            notifications: after.notifications - before.notifications,
            feed: Rows { live: feed.rows.len() - tombstones, tombstones },
            reshards: *reshards,
            delivered: Delivered {
                indexer: observers.indexer.deliveries(),
                replicator: observers.replicator.deliveries(),
                db_updates: observers.db_updates.deliveries(),
            },
            producer_conflicts: loaded.conflicts,
            fold_retries: after.fold_retries - before.fold_retries,
            leases_lost: after.leases_lost - before.leases_lost,
            nodes_fallen_out: after.nodes_fallen_out - before.nodes_fallen_out,
            peak_memory_bytes: peak_memory(),
            seconds,
            events_per_second: if seconds > 0.0 { events / seconds } else { 0.0 },
            latency_us: Latency {
                p50: latencies.quantile(0.5),
                p99: latencies.quantile(0.99),
                max: latencies.max(),
            },
        }
    }

    /// Prints the summary, as JSON or for people.
    pub fn print(&self, json: bool) -> Result<(), Failure> {
        let text = if json {
            serde_json::to_string(self).expect("the report has only plain fields")
        } else {
            self.readable()
        };
        writeln!(io::stdout(), "{text}").map_err(crate::out::failed)
    }

    /// The summary for people.
    fn readable(&self) -> String {
        let kinds = |counters: &Counters| {
            let Counters { created, deleted, updated, ddoc_updated } = counters;
            let total = counters.total();
            format!(
                "{total} events: {created} created, {deleted} deleted, {updated} updated, {ddoc_updated} ddoc_updated"
            )
        };
        let Delivered { indexer, replicator, db_updates } = self.delivered;
        let Latency { p50, p99, max } = self.latency_us;
        let reshards = match self.reshards {
            0 => String::new(),
            some => format!(", {some} reshards"),
        };
        let memory = self
            .peak_memory_bytes
            .map(|bytes| format!("memory     {} MB at most", bytes.div_ceil(1_000_000)));
        [
            format!("recorded   {} in {} transactions", kinds(&self.recorded), self.transactions),
            format!("folded     {} into {} notifications", kinds(&self.folded), self.notifications),
            format!(
                "feed       {} live databases, {} tombstones{reshards}",
                self.feed.live, self.feed.tombstones
            ),
            format!(
                "delivered  {indexer} to indexer, {replicator} to replicator, {db_updates} to db_updates"
            ),
            format!("conflicts  {} of producers, {} of folds", self.producer_conflicts, self.fold_retries),
            format!("latency    p50 {p50} µs, p99 {p99} µs, max {max} µs from commit to delivery"),
            format!(
                "nodes      {} leases lost, {} nodes fallen out",
                self.leases_lost, self.nodes_fallen_out
            ),
            format!("took       {:.3} s, {:.0} events per second", self.seconds, self.events_per_second),
        ]
        .into_iter()
        .chain(memory)
        .collect::<Vec<_>>()
        .join("\n")
    }
}

/// The most memory that this process has had at once, in bytes, if the system says so as Linux does.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    kilobytes?.trim().parse().ok().map(|kilobytes: u64| kilobytes * 1_024)
}

#[derive(Serialize)]
struct DumpedRow<'a> {
    /// Where it stands.
    seq: Sequence,
    db: &'a DbName,
    instance: DbInstance,
    /// Whether the database is deleted.
    deleted: bool,
    /// The kinds of events since the row before.
    kinds: Kinds,
    /// The events of the instance.
    totals: Counters,
}

/// A file for the feed, created before the replay begins.
pub struct Dump {
    /// Its path, for messages.
    path: PathBuf,
    file: File,
}

impl Dump {
    /// Makes the file.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let fail = |error: io::Error| Failure::BadInput(format!("{}: {error}", path.display()));
        Ok(Self { path: path.to_owned(), file: private_file(path, false).map_err(fail)? })
    }

    /// Writes the feed, one JSON object per line.
    pub fn write(self, feed: &FinalFeed) -> Result<(), Failure> {
        let fail = |error: io::Error| Failure::Failed(format!("{}: {error}", self.path.display()));
        let mut out = BufWriter::new(&self.file);
        for row in &feed.rows {
            let dumped = DumpedRow {
                seq: row.sequence,
                db: &row.name,
                instance: row.instance,
                deleted: row.is_deleted(),
                kinds: row.kinds,
                totals: row.totals,
            };
            serde_json::to_writer(&mut out, &dumped).map_err(|error| fail(error.into()))?;
            out.write_all(b"\n").map_err(fail)?;
        }
        out.flush().map_err(fail)
    }
}
