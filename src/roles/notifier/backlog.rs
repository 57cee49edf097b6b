//! [`Backlog`]: the events that wait to be folded, and [`Waiting`]: how long this process has seen them wait.
//!
//! Counters store no time. So the age of a partition's backlog is how long this process has seen the backlog wait without a fold of the
//! partition, which would have moved the fold mark. The age is a lower bound: it begins with the first check after the start of the
//! process, and only checks (`ready`, the status, the metrics) notice that a backlog waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use serde::Serialize;

use super::{fold::has_events, poll::occupied};
use crate::{
    base::error::Result,
    state::{context::Context, keys::Partition, last_seen::LastSeen},
    store::{Isolation, RangeRead, Transaction},
};

/// How many runs of partitions are searched at the same time.
const RUNS: u32 = 16;

/// The age from which the rows of a backlog are read, because rows that no fold can decode wait forever, but hold nothing else up.
const READ_FROM: Duration = Duration::from_secs(3);

/// How long this process has seen the events of each partition wait without a fold.
pub(crate) type Ages = BTreeMap<u32, Duration>;

/// Recorded events that are not folded yet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Backlog {
    /// The number of waiting rows of counters: one for each database with events, and some for design documents.
    pub rows: u64,
    /// Whether `rows` is exact; otherwise there are more than [`Backlog::ROWS_MAX`], and the count stopped there.
    pub is_exact: bool,
    /// The backlogs of the partitions that have one.
    pub partitions: Vec<PartitionBacklog>,
    /// How long this process has seen events of a partition wait without a fold, in milliseconds; the longest time of all partitions.
    /// Counters store no time, so this is a lower bound: it begins with the first check after the start of the process.
    pub oldest_ms: u64,
}

/// The backlog of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PartitionBacklog {
    /// The number of the partition.
    pub partition: u32,
    /// The number of waiting rows of counters.
    pub rows: u64,
}

impl Backlog {
    /// The maximum number of rows of counters that are counted.
    pub const ROWS_MAX: usize = 10_000;

    /// Counts the rows of waiting events, with snapshot reads.
    pub(crate) async fn read(context: &Context, tx: &Transaction) -> Result<Self> {
        let (keys, last) = (&context.keys, Partition(context.config.partitions - 1));
        let mut backlog = Self::default();
        let mut rest = Some(RangeRead::new(keys.drains(Partition(0), last)).limit(1_000));
        while let Some(read) = rest.take_if(|_| (backlog.rows as usize) < Self::ROWS_MAX) {
            let page = tx.get_range(&read, Isolation::Snapshot).await?;
            for (key, _) in &page.rows {
                // A foreign key counts for the partition whose range it is in.
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

    /// Returns the backlog with the age of its oldest events.
    pub(crate) fn aged(&self, ages: &Ages) -> Self {
        let oldest = ages.values().max().copied().unwrap_or_default();
        let oldest_ms = u64::try_from(oldest.as_millis()).unwrap_or(u64::MAX);
        Self { oldest_ms, ..self.clone() }
    }
}

/// The partitions in which this process has seen events wait.
#[derive(Debug, Default)]
pub(crate) struct Waiting(Mutex<WaitingState>);

#[derive(Debug, Default)]
struct WaitingState {
    /// The fold mark of each partition with a backlog.
    marks: LastSeen<u32, Option<Bytes>>,
    /// Partitions whose backlog, at the last check, had no row that a fold could decode. Events added since are no older than that check.
    broken: BTreeSet<u32>,
}

impl WaitingState {
    /// Records the `marks` of all partitions with a backlog at `now`. Returns how long each has waited.
    fn see(&mut self, marks: &BTreeMap<u32, Option<Bytes>>, now: Duration) -> Ages {
        for partition in std::mem::take(&mut self.broken) {
            self.marks.forget(&partition);
        }
        self.marks.adopt(marks.clone(), now);
        marks.iter().map(|(partition, mark)| (*partition, self.marks.age(partition, mark, now))).collect()
    }
}

impl Waiting {
    /// Returns the partitions in which events wait, and how long this process has seen each of them wait without a fold. `tx` gets no read
    /// conflicts.
    pub async fn ages(&self, context: &Context, tx: &Transaction) -> Result<Ages> {
        let partitions = context.config.partitions;
        let length = partitions.div_ceil(RUNS);
        let all: Vec<_> = (0..partitions).collect();
        let found = all.chunks(length as usize).map(|run| occupied(context, tx, run));
        let (found, marks) = tokio::try_join!(
            try_join_all(found),
            tx.all_rows(context.keys.all_fold_marks(), Isolation::Snapshot)
        )?;
        let marks: BTreeMap<_, _> = marks.into_iter().collect();
        let mark_of = |partition: Partition| marks.get(&context.keys.fold_mark(partition)[..]).cloned();
        let found = found.into_iter().flatten().map(|partition| (partition.0, mark_of(partition))).collect();
        let (mut ages, broken) = {
            let mut state = self.0.lock();
            let broken = state.broken.clone();
            (state.see(&found, context.env().now()), broken)
        };
        let is_read = |(partition, age): &(&u32, &Duration)| **age >= READ_FROM || broken.contains(partition);
        let doubtful: Vec<_> = ages.iter().filter(is_read).map(|(partition, _)| *partition).collect();
        let read = doubtful.iter().map(|partition| has_events(context, tx, Partition(*partition)));
        for (partition, has_events) in doubtful.iter().zip(try_join_all(read).await?) {
            if !has_events {
                self.0.lock().broken.insert(*partition);
                ages.remove(partition);
            }
        }
        Ok(ages)
    }
}
