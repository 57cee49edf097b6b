//! [`Waiting`]: for how long events were seen to wait to be folded.
//!
//! Counters store no time. So the age of a partition's backlog is for how long this process has seen it wait without a fold of the
//! partition, which would have moved the fold mark. It is a lower bound: it begins with the first look after the start of the
//! process, and only looks (`ready`, the status, the metrics) find that a backlog waits.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use futures_util::future::try_join_all;
use parking_lot::Mutex;

use crate::{
    base::error::Result,
    roles::notifier::{has_events, occupied},
    state::{context::Context, keys::Partition},
    store::{Isolation, Transaction},
};

/// For how long this process has seen events of each partition wait without a fold.
pub(super) type Ages = BTreeMap<u32, Duration>;

/// How many runs of partitions are searched at the same time.
const RUNS: u32 = 16;

/// A backlog of this age is read: rows that no fold can decode wait forever, and hold nothing else up.
const READ_FROM: Duration = Duration::from_secs(3);

/// The fold mark of each partition with a backlog, and since when the backlog was seen to wait with this mark.
#[derive(Debug, Default)]
pub(super) struct Waiting(Mutex<BTreeMap<u32, Backlog>>);

#[derive(Debug)]
struct Backlog {
    mark: Option<Bytes>,
    since: Duration,
    /// Whether no fold could decode a row of it at the last look. What has come since is not older than the present look.
    is_broken: bool,
}

impl Waiting {
    /// Notes the `marks` of all partitions with a backlog at `now`. Returns how long each has waited.
    fn see(&self, now: Duration, marks: BTreeMap<u32, Option<Bytes>>) -> BTreeMap<u32, Duration> {
        let mut known = self.0.lock();
        let waiting = marks.into_iter().map(|(partition, mark)| {
            let before = known.get(&partition).filter(|before| before.mark == mark && !before.is_broken);
            let since = before.map_or(now, |before| before.since);
            (partition, Backlog { mark, since, is_broken: false })
        });
        *known = waiting.collect();
        known.iter().map(|(partition, backlog)| (*partition, now.saturating_sub(backlog.since))).collect()
    }

    /// The partitions whose backlog had no row that a fold can decode.
    fn broken(&self) -> Vec<u32> {
        let known = self.0.lock();
        known.iter().filter(|(_, backlog)| backlog.is_broken).map(|(partition, _)| *partition).collect()
    }

    /// Notes that the backlog of `partition` has no row that a fold can decode.
    fn note_broken(&self, partition: u32) {
        if let Some(backlog) = self.0.lock().get_mut(&partition) {
            backlog.is_broken = true;
        }
    }

    /// The partitions in which events wait, and for how long this process has seen each of them wait without a fold. `tx` gets no read
    /// conflicts.
    pub async fn ages(&self, context: &Context, tx: &Transaction) -> Result<BTreeMap<u32, Duration>> {
        let partitions = context.config.partitions;
        let length = partitions.div_ceil(RUNS);
        let firsts = (0..partitions).step_by(length as usize);
        let found = firsts.map(|first| occupied(context, tx, (first, (first + length).min(partitions) - 1)));
        let (found, marks) = tokio::try_join!(
            try_join_all(found),
            tx.all_rows(context.keys.all_fold_marks(), Isolation::Snapshot)
        )?;
        let marks: BTreeMap<_, _> = marks.into_iter().collect();
        let mark_of = |partition: Partition| marks.get(&context.keys.fold_mark(partition)[..]).cloned();
        let found = found.into_iter().flatten().map(|partition| (partition.0, mark_of(partition))).collect();
        let broken = self.broken();
        let mut ages = self.see(context.env().now(), found);
        let is_read = |(partition, age): &(&u32, &Duration)| **age >= READ_FROM || broken.contains(partition);
        let doubtful: Vec<_> = ages.iter().filter(is_read).map(|(partition, _)| *partition).collect();
        let read = doubtful.iter().map(|partition| has_events(context, tx, Partition(*partition)));
        for (partition, has_events) in doubtful.iter().zip(try_join_all(read).await?) {
            if !has_events {
                self.note_broken(*partition);
                ages.remove(partition);
            }
        }
        Ok(ages)
    }
}
