//! [`BusStatus`]: how a bus is, for people and for programs.

use serde::Serialize;

use super::Bus;
use crate::{
    base::{encoding::Sequence, error::Result},
    roles::group::{GroupStatus, ShardLag},
    state::{
        feed::TopologyEntry, keys::Partition, membership::NodeStatus, skipped::SkippedRow,
        stats::StatsSnapshot,
    },
    store::{Isolation, KeyRange, RangeRead},
};

/// Up to how many rows of counters are counted.
pub const BACKLOG_ROWS_MAX: usize = 10_000;

/// How a bus is.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct BusStatus {
    /// The version of this program.
    pub version: &'static str,
    /// Why the store takes no more writes, if so.
    pub failure: Option<String>,
    /// How often the bus has moved to another cluster.
    pub incarnation: u8,
    /// Into how many partitions the counters are divided.
    pub partitions: u32,
    /// The feed of notifications.
    pub feed: FeedStatus,
    /// What is recorded and not folded.
    pub backlog: Backlog,
    /// The nodes that have joined and not left.
    pub nodes: Vec<NodeStatus>,
    /// The groups of all feeds.
    pub groups: Vec<GroupLag>,
    /// The rows that this process cannot decode.
    pub skipped_rows: Vec<SkippedRow>,
    /// What the roles of this process have done.
    pub stats: StatsSnapshot,
}

/// How the feed of notifications is.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct FeedStatus {
    /// The position of a reader that wants only what comes.
    pub now: Sequence,
    /// The last row; `None` if there is none.
    pub last_seq: Option<Sequence>,
    /// The oldest position from which a reader misses nothing.
    pub horizon: Sequence,
    /// Which shards it is spread over.
    pub topology: Vec<TopologyEntry>,
}

/// What is recorded and not folded yet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Backlog {
    /// How many rows of counters wait: one for each database with events, and some for design documents.
    pub rows: u64,
    /// Whether that is all; else there are more than [`BACKLOG_ROWS_MAX`], and that many were counted.
    pub is_exact: bool,
    /// How many of them are in each partition that has any.
    pub partitions: Vec<PartitionBacklog>,
}

/// What waits in a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PartitionBacklog {
    /// Its number.
    pub partition: u32,
    /// How many rows of counters wait.
    pub rows: u64,
}

/// A group, and how far it is behind.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct GroupLag {
    /// The group.
    #[serde(flatten)]
    pub group: GroupStatus,
    /// How far it is behind in each shard; `None` if it was deleted meanwhile.
    pub lag: Option<Vec<ShardLag>>,
}

impl Bus {
    /// How the bus is: its feed, its backlog, its nodes, its groups with their lag. It takes some reads for each group, and counts at
    /// most [`BACKLOG_ROWS_MAX`] rows of the backlog: it is for people, and not to be asked all the time.
    pub async fn status(&self) -> Result<BusStatus> {
        let feed = self.feed();
        let (now, last_seq, horizon, topology, nodes, groups, backlog, skipped_rows) = tokio::try_join!(
            feed.now(),
            feed.last_sequence(),
            feed.horizon(),
            feed.topology(),
            self.nodes(),
            self.groups(),
            self.backlog(),
            self.skipped_rows(),
        )?;
        let mut with_lag = Vec::with_capacity(groups.len());
        for group in groups {
            // It may be deleted meanwhile.
            let lag = self.any_group(group.instance, group.name.as_str())?.lag().await.ok();
            with_lag.push(GroupLag { group, lag });
        }
        Ok(BusStatus {
            version: env!("CARGO_PKG_VERSION"),
            failure: self.store().failure().map(|error| error.to_string()),
            incarnation: self.incarnation().0,
            partitions: self.context.config.partitions,
            feed: FeedStatus { now, last_seq, horizon, topology },
            backlog,
            nodes,
            groups: with_lag,
            skipped_rows,
            stats: self.stats(),
        })
    }

    /// What is recorded and not folded yet. It counts at most [`BACKLOG_ROWS_MAX`] rows, those of the lowest partitions first.
    pub async fn backlog(&self) -> Result<Backlog> {
        let (keys, last) = (&self.context.keys, Partition(self.context.config.partitions - 1));
        let mut backlog = Backlog::default();
        let mut rest = keys.drains(Partition(0), last);
        loop {
            let left = BACKLOG_ROWS_MAX - backlog.rows as usize;
            let wanted = &RangeRead::new(rest.clone()).limit(left.min(1_000));
            let page = self.store().run(async |tx| tx.get_range(wanted, Isolation::Snapshot).await).await?;
            for (key, _) in &page.rows {
                // A key that is none of ours is counted where it stands.
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
            if backlog.rows as usize >= BACKLOG_ROWS_MAX {
                return Ok(backlog);
            }
            rest = KeyRange::new([&key[..], &[0]].concat(), rest.end);
        }
    }
}
