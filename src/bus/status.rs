//! [`BusStatus`]: the status of a bus, for people and for programs.

use std::{collections::BTreeMap, time::Duration};

use futures_util::{StreamExt, stream};
use serde::Serialize;

use super::Bus;
use crate::{
    base::{encoding::Sequence, error::Result},
    roles::consumer::{ConsumerHandle, ConsumerLag, ConsumerStatus},
    state::{
        feed::TopologyEntry, keys::Partition, membership::NodeStatus, skipped::SkippedRow,
        stats::StatsSnapshot,
    },
    store::{Isolation, KeyRange, RangeRead},
};

/// The status of a bus.
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
    pub feed: FeedStatus,
    /// Recorded events that are not folded yet.
    pub backlog: Backlog,
    /// The nodes that have joined and not left.
    pub nodes: Vec<NodeStatus>,
    /// The consumers, in the order of their names.
    pub consumers: Vec<ConsumerReport>,
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
    /// The lag in each shard; `None` if the consumer was deleted meanwhile, or the store took too long to answer.
    pub lag: Option<Vec<ConsumerLag>>,
}

/// How long the lags of all consumers may take.
const LAGS_MAX: Duration = Duration::from_secs(10);

/// About how many consumers are asked at once.
const ASKED_AT_ONCE: usize = 16;

impl Bus {
    /// What `ask` says of each of `consumers`; `None` where it fails, and where it has not answered within `limit`.
    pub(super) async fn of_each<T>(
        &self,
        consumers: &[ConsumerStatus],
        limit: Duration,
        ask: impl AsyncFn(ConsumerHandle, &ConsumerStatus) -> Result<T>,
    ) -> Vec<Option<T>> {
        let ask = &ask;
        let asked = consumers.iter().map(|status| async move {
            let handle = self.consumer(status.name.as_str())?;
            ask(handle, status).await
        });
        // Collected first, because the compiler cannot name the type of the futures otherwise.
        let asked: Vec<_> = asked.collect();
        let in_time = stream::iter(asked).buffered(ASKED_AT_ONCE).take_until(self.store().env().sleep(limit));
        let mut answers: Vec<_> = in_time.map(Result::ok).collect().await;
        answers.resize_with(consumers.len(), || None);
        answers
    }

    /// The status of the bus: its feed, its backlog, its nodes, and its consumers with their lag. It costs some reads per consumer, and counts
    /// at most [`Backlog::ROWS_MAX`] rows of the backlog. It is for people: do not poll it.
    pub async fn status(&self) -> Result<BusStatus> {
        let feed = self.feed();
        let (now, last_seq, horizon, topology, nodes, consumers, backlog) = tokio::try_join!(
            feed.now(),
            feed.last_sequence(),
            feed.horizon(),
            feed.topology(),
            self.nodes(),
            self.consumers(),
            self.backlog(),
        )?;
        let lags = self.of_each(&consumers, LAGS_MAX, async |handle, _| handle.lag().await).await;
        let reports = consumers.into_iter().zip(lags);
        let reports = reports.map(|(consumer, lag)| ConsumerReport { consumer, lag }).collect();
        Ok(BusStatus {
            version: env!("CARGO_PKG_VERSION"),
            failure: self.store().failure().map(|error| error.to_string()),
            incarnation: self.incarnation().0,
            partitions: self.context.config.partitions,
            feed: FeedStatus { now, last_seq, horizon, topology },
            backlog,
            nodes,
            consumers: reports,
            skipped_rows: self.skipped_rows(),
            stats: self.stats(),
        })
    }

    /// The partitions in which events wait, and for how long this process has seen each of them wait without a fold.
    pub(super) async fn waiting(&self) -> Result<BTreeMap<u32, Duration>> {
        self.context.db.run(async |tx| self.seen.waiting.ages(&self.context, &tx).await).await
    }

    /// Reads the recorded events that are not folded yet. It counts at most [`Backlog::ROWS_MAX`] rows, from the lowest partition on.
    pub async fn backlog(&self) -> Result<Backlog> {
        let (keys, last) = (&self.context.keys, Partition(self.context.config.partitions - 1));
        let oldest = self.waiting().await?.into_values().max().unwrap_or_default();
        let oldest_ms = u64::try_from(oldest.as_millis()).unwrap_or(u64::MAX);
        let mut backlog = Backlog { oldest_ms, ..Backlog::default() };
        let mut rest = keys.drains(Partition(0), last);
        loop {
            let left = Backlog::ROWS_MAX - backlog.rows as usize;
            let wanted = &RangeRead::new(rest.clone()).limit(left.min(1_000));
            let page = self.store().run(async |tx| tx.get_range(wanted, Isolation::Snapshot).await).await?;
            for (key, _) in &page.rows {
                // A key that is not ours counts for the partition in whose range it lies.
                let (partition, _) = keys.partition_at(key, Partition(0), last);
                backlog.rows += 1;
                match backlog.partitions.last_mut() {
                    Some(counted) if counted.partition == partition.0 => counted.rows += 1,
                    _ => backlog.partitions.push(PartitionBacklog { partition: partition.0, rows: 1 }),
                }
            }
            let Some((key, _)) = page.rows.last().filter(|_| page.more) else {
                backlog.is_exact = true;
                return Ok(backlog);
            };
            if backlog.rows as usize >= Backlog::ROWS_MAX {
                return Ok(backlog);
            }
            rest = KeyRange::new([&key[..], &[0]].concat(), rest.end);
        }
    }
}
