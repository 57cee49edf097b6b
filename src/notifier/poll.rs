//! The poll of a notifier: finds events whose ring never came.
//!
//! It reads at most one key per run of adjacent partitions while nothing waits, whatever the number of databases. Where it
//! finds something, hints are evidently being lost, so it looks more often for a while.

use std::{sync::Arc, time::Duration};

use super::HeldPartitions;
use crate::{
    bugs::{Bug, is_on},
    context::Context,
    error::Result,
    keys::Partition,
    store::{Isolation, RangeRead},
};

/// How much shorter than the poll interval a pause can get.
const HASTE_MAX: u32 = 16;

/// Polls the partitions that are held at the time, until it is dropped.
pub(super) async fn run(context: Arc<Context>, partitions: HeldPartitions, interval: Duration) {
    let mut pause = interval;
    loop {
        context.env().sleep(pause).await;
        let mut found = 0;
        for run in runs(&partitions.numbers()) {
            match look(&context, run).await {
                Ok(waiting) => found += waiting,
                Err(error) => tracing::warn!(%error, "poll failed"),
            }
        }
        pause = if found > 0 {
            (pause / 2).max(interval / HASTE_MAX)
        } else {
            pause.saturating_mul(2).min(interval)
        };
    }
}

/// The runs of adjacent numbers, as first and last.
fn runs(partitions: &[u32]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in partitions {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    runs
}

/// Wakes the partitions of a run in which something waits; returns how many.
async fn look(context: &Context, (first, last): (u32, u32)) -> Result<u32> {
    let mut first = first;
    let mut found = 0;
    if is_on(Bug::PollForgotten) {
        return Ok(0);
    }
    while first <= last {
        let range = context.keys.drains(Partition(first), Partition(last));
        let tx = context.db.begin();
        let page = tx.get_range(&RangeRead::new(range).limit(1), Isolation::Snapshot).await?;
        let Some(row) = page.rows.into_iter().next() else {
            break;
        };
        let (partition, _) = context.keys.drain_row(row)?;
        context.signals.wake(partition);
        found += 1;
        first = partition.0 + 1;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_partitions_are_one_run() {
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), [(0, 2), (5, 5), (7, 8)]);
        assert_eq!(runs(&[]), []);
    }
}
