//! The poll of a notifier: finds events whose doorbell was lost.
//!
//! While no events wait, it reads at most one key per run of adjacent partitions, whatever the number of databases. If it
//! finds events, hints are being lost, so it polls more often for a while.

use std::{sync::Arc, time::Duration};

use super::held::HeldPartitions;
use crate::{
    base::error::Result,
    state::{context::Context, keys::Partition},
    store::{Isolation, RangeRead, Transaction},
};

/// Its name in reports of trouble.
pub(super) const POLL: &str = "poll of a notifier";

/// How many times shorter than the poll interval a pause can get.
const HASTE_MAX: u32 = 16;

/// Polls the held partitions until it is dropped.
pub(super) async fn run(context: Arc<Context>, partitions: HeldPartitions, interval: Duration) {
    let mut pause = interval;
    let health = &context.stats.health;
    loop {
        let poll = context.polls.due(pause).await;
        let mut found = 0;
        for run in runs(&partitions.numbers()) {
            let mut polled = poll_run(&context, &poll.transaction(&context.db), run).await;
            if polled.is_err() {
                // What fails in the common transaction may well succeed in another one.
                polled = poll_run(&context, &context.db.begin(), run).await;
            }
            match polled {
                // Rows that cannot be decoded stay until somebody repairs them; they are no missed events.
                Ok(waiting) => {
                    found += waiting.iter().filter(|&&waiting| !partitions.has_left(waiting)).count();
                    health.works(POLL, 0);
                }
                Err(error) => health.failed(context.env(), POLL, 0, &error),
            }
        }
        pause = if found > 0 {
            (pause / 2).max(interval / HASTE_MAX)
        } else {
            pause.saturating_mul(2).min(interval)
        };
    }
}

/// The runs of adjacent numbers, each as its first and last number.
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

/// Wakes the partitions of a run in which events wait, and returns them.
async fn poll_run(context: &Context, tx: &Transaction, run: (u32, u32)) -> Result<Vec<Partition>> {
    let found = occupied(context, tx, run).await?;
    for partition in &found {
        context.signals.wake(*partition);
    }
    Ok(found)
}

/// The partitions from `first` to `last` that have rows of counters. It reads keys only, at most one of each partition, so rows that
/// cannot be decoded do not stop it.
pub(super) async fn occupied(
    context: &Context,
    tx: &Transaction,
    (first, last): (u32, u32),
) -> Result<Vec<Partition>> {
    let mut next = first;
    let mut found = Vec::new();
    while next <= last {
        let range = context.keys.drains(Partition(next), Partition(last));
        let page = tx.get_range(&RangeRead::new(range).limit(1), Isolation::Snapshot).await?;
        let Some((key, _)) = page.rows.into_iter().next() else { break };
        // A key between two partitions belongs to none.
        let (at, is_within) = context.keys.partition_at(&key, Partition(next), Partition(last));
        if is_within {
            found.push(at);
        }
        next = at.0 + 1;
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
