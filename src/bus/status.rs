//! [`BusStatus`]: the status of a bus, for people and for programs.

use std::time::Duration;

use serde::Serialize;

use super::{
    Bus,
    snapshot::{Snapshot, Unanswered, answer},
    waiting::Ages,
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    roles::consumer::{ConsumerLag, ConsumerStatus},
    state::{
        context::Context, feed::TopologyEntry, keys::Partition, membership::NodeStatus, skipped::SkippedRow,
        stats::StatsSnapshot,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// The status of a bus. Parts that the store has not answered in time are `None`, and named in [`BusStatus::unanswered`].
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct BusStatus {
    /// The version of this program.
    pub version: &'static str,
    /// Why the store takes no more writes, if so.
    pub failure: Option<String>,
    /// How often the bus has moved to another cluster.
    pub incarnation: u8,
    /// Number of partitions of the counters.
    pub partitions: u32,
    /// The notification feed.
    pub feed: Option<FeedStatus>,
    /// Recorded events that are not folded yet.
    pub backlog: Option<Backlog>,
    /// The nodes that have joined and not left.
    pub nodes: Option<Vec<NodeStatus>>,
    /// The consumers, in the order of their names.
    pub consumers: Option<Vec<ConsumerReport>>,
    /// What is missing, and why.
    pub unanswered: Vec<Unanswered>,
    /// The rows that this process cannot decode.
    pub skipped_rows: Vec<SkippedRow>,
    /// Counts of the roles of this process.
    pub stats: StatsSnapshot,
}

/// The status of the notification feed.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct FeedStatus {
    /// The position of a reader that wants only future rows.
    pub now: Sequence,
    /// The last row; `None` if there is none.
    pub last_seq: Option<Sequence>,
    /// The oldest position from which a reader misses nothing.
    pub horizon: Sequence,
    /// The shards of the feed over time.
    pub topology: Vec<TopologyEntry>,
}

/// Recorded events that are not folded yet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Backlog {
    /// Number of waiting rows of counters: one for each database with events, and some for design documents.
    pub rows: u64,
    /// Whether `rows` is exact; otherwise there are more than [`Backlog::ROWS_MAX`], and the count stopped there.
    pub is_exact: bool,
    /// The rows of each partition that has any.
    pub partitions: Vec<PartitionBacklog>,
    /// For how long this process has seen events of a partition wait without a fold, in milliseconds; the longest of all partitions.
    /// Counters store no time, so this is a lower bound: it begins with the first look after the start of the process.
    pub oldest_ms: u64,
}

impl Backlog {
    /// The most rows of counters that are counted.
    pub const ROWS_MAX: usize = 10_000;
}

/// The backlog of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PartitionBacklog {
    /// Its number.
    pub partition: u32,
    /// Number of waiting rows of counters.
    pub rows: u64,
}

/// A consumer and its lag.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ConsumerReport {
    /// The consumer.
    #[serde(flatten)]
    pub consumer: ConsumerStatus,
    /// The lag in each shard; `None` if the store took too long to answer, if the feed is gone, or if it is beyond the first 100 feeds.
    pub lag: Option<Vec<ConsumerLag>>,
}

impl Bus {
    /// The status of the bus: its feed, its backlog, its nodes, and its consumers with their lag. It is for people: what it reads grows with
    /// all that the bus has, and a part may take up to 2 s.
    ///
    /// Fails if the store answers no part, with the reason of one.
    pub async fn status(&self) -> Result<BusStatus> {
        let now = Duration::ZERO;
        let (mut snapshot, last_row) = tokio::join!(self.snapshot(now), self.last_row(now));
        let last_row = answer(&mut snapshot.unanswered, "last row", last_row);
        let consumers = snapshot.full_consumers(&self.context);
        let Snapshot { members, holdings, ends, ages, backlog, lags, unanswered, .. } = snapshot;
        if members.is_none() && ends.is_none() && backlog.is_none() && consumers.is_none() {
            let error = unanswered.into_iter().next();
            return Err(error.expect("it says what is missing").1);
        }
        let report = |consumer: ConsumerStatus| {
            let lag = lags.as_ref().and_then(|lags| lags.get(&consumer.name).cloned());
            ConsumerReport { consumer, lag }
        };
        let feed = ends.zip(last_row).map(|(ends, last_seq)| FeedStatus {
            now: ends.now,
            last_seq: *last_seq,
            horizon: ends.horizon,
            topology: ends.topology.entries().iter().map(TopologyEntry::from).collect(),
        });
        let named = |(part, error): (&'static str, Error)| Unanswered { part, reason: error.to_string() };
        Ok(BusStatus {
            version: env!("CARGO_PKG_VERSION"),
            failure: self.store().failure().map(|error| error.to_string()),
            incarnation: self.incarnation().0,
            partitions: self.context.config.partitions,
            feed,
            backlog: backlog.zip(ages).map(|(backlog, ages)| backlog.aged(&ages)),
            nodes: members.zip(holdings).map(|(members, holdings)| members.statuses(&holdings)),
            consumers: consumers.map(|consumers| consumers.into_iter().map(report).collect()),
            unanswered: unanswered.into_iter().map(named).collect(),
            skipped_rows: self.skipped_rows(),
            stats: self.stats(),
        })
    }

    /// Reads the recorded events that are not folded yet. It counts at most [`Backlog::ROWS_MAX`] rows, from the lowest partition on. Fails if the
    /// store does not answer within 2 s.
    pub async fn backlog(&self) -> Result<Backlog> {
        let (backlog, ages) = tokio::try_join!(self.backlog_rows(Duration::ZERO), self.ages(Duration::ZERO))?;
        Ok(backlog.aged(&ages))
    }
}

impl Backlog {
    /// Counts the events that wait, by snapshot.
    pub(super) async fn read(context: &Context, tx: &Transaction) -> Result<Self> {
        let (keys, last) = (&context.keys, Partition(context.config.partitions - 1));
        let mut backlog = Self::default();
        let mut rest = Some(RangeRead::new(keys.drains(Partition(0), last)).limit(1_000));
        while let Some(read) = rest.take_if(|_| (backlog.rows as usize) < Self::ROWS_MAX) {
            let page = tx.get_range(&read, Isolation::Snapshot).await?;
            for (key, _) in &page.rows {
                // A key that is not ours counts for the partition in whose range it lies.
                let (partition, _) = keys.partition_at(key, Partition(0), last);
                backlog.rows += 1;
                match backlog.partitions.last_mut() {
                    Some(counted) if counted.partition == partition.0 => counted.rows += 1,
                    _ => backlog.partitions.push(PartitionBacklog { partition: partition.0, rows: 1 }),
                }
            }
            rest = read.after(&page);
        }
        backlog.is_exact = rest.is_none();
        Ok(backlog)
    }

    /// With the age of the oldest events.
    fn aged(&self, ages: &Ages) -> Self {
        let oldest = ages.values().max().copied().unwrap_or_default();
        let oldest_ms = u64::try_from(oldest.as_millis()).unwrap_or(u64::MAX);
        Self { oldest_ms, ..self.clone() }
    }
}
