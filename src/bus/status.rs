//! [`BusStatus`]: the status of a bus, for human readers and for programs.

use std::time::Duration;

use serde::Serialize;

use super::{
    Bus,
    snapshot::{Snapshot, Unanswered},
};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    roles::{
        consumer::{ConsumerLag, ConsumerStatus},
        notifier::Backlog,
    },
    state::{feed::TopologyEntry, membership::NodeStatus, skipped::SkippedRow, stats::StatsSnapshot},
};

/// The status of a bus. Parts that the store did not answer in time are `None`, and named in [`BusStatus::unanswered`].
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct BusStatus {
    /// The version of this program.
    pub version: &'static str,
    /// Why the store takes no more writes, or none at the moment; `None` if it takes writes.
    pub failure: Option<String>,
    /// How many times the bus has moved to another cluster.
    pub incarnation: u8,
    /// The number of partitions of the counters.
    pub partitions: u32,
    /// The notification feed.
    pub feed: Option<FeedStatus>,
    /// Recorded events that are not folded yet.
    pub backlog: Option<Backlog>,
    /// The nodes that have joined and not left.
    pub nodes: Option<Vec<NodeStatus>>,
    /// The consumers, in the order of their names.
    pub consumers: Option<Vec<ConsumerReport>>,
    /// The missing parts, and why they are missing.
    pub unanswered: Vec<Unanswered>,
    /// The rows that this process cannot decode.
    pub skipped_rows: Vec<SkippedRow>,
    /// What the roles of this process have counted.
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

/// A consumer and its lag.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ConsumerReport {
    /// The consumer.
    #[serde(flatten)]
    pub consumer: ConsumerStatus,
    /// The lag in each shard; `None` if the store took too long to answer, if the feed is gone, or if the feed is beyond the first 100.
    pub lag: Option<Vec<ConsumerLag>>,
}

impl Bus {
    /// Returns the status of the bus: its feed, its backlog, its nodes, and its consumers with their lag. It is meant for human readers,
    /// who can wait: the amount of data that it reads grows with the bus, and a part may take up to 2 s.
    ///
    /// Fails only if the store answers for no part, with the error for one of them.
    pub async fn status(&self) -> Result<BusStatus> {
        let now = Duration::ZERO;
        let (mut snapshot, last_row) = tokio::join!(self.snapshot(now), self.seen.last_row(now));
        let last_row = snapshot.take("last row", last_row);
        let Snapshot { members, holdings, ends, ages, backlog, consumers, deferred, lags, unanswered } =
            snapshot;
        if members.is_none() && ends.is_none() && backlog.is_none() && consumers.is_none() {
            let error = unanswered.into_iter().next();
            return Err(error.expect("it says what is missing").1);
        }
        let consumers = consumers.zip(holdings.as_ref()).zip(deferred);
        let consumers =
            consumers.map(|((stored, holdings), deferred)| self.seen.complete(&stored, holdings, &deferred));
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
            failure: self
                .store()
                .failure()
                .or_else(|| self.store().shortage())
                .map(|error| error.to_string()),
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
}
