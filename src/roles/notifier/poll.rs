//! The poll of a notifier: finds events whose doorbell was lost.
//!
//! While no events wait, a poll is one read of at most one key, regardless of the number of databases and of the partitions that the
//! notifier holds. If a poll finds events, hints are being lost, so the notifier polls more often for a while.

use std::{sync::Arc, time::Duration};

use super::partition::HeldPartitions;
use crate::{
    base::error::Result,
    state::{context::Context, keys::Partition},
    store::{Isolation, RangeRead, Transaction},
};

/// The name under which failures of the poll are reported.
pub(super) const POLL: &str = "poll of a notifier";

/// The maximum factor by which a pause can be shorter than the poll interval.
const HASTE_MAX: u32 = 16;

/// Polls the held partitions until the future is dropped.
pub(super) async fn run(context: Arc<Context>, partitions: HeldPartitions, interval: Duration) {
    let mut pause = interval;
    let health = &context.stats.health;
    loop {
        let poll = context.polls.due(pause).await;
        let held = partitions.numbers();
        let mut polled = occupied(&context, &poll.transaction(&context.store), &held).await;
        if polled.is_err() {
            // A read that fails in the shared transaction may well succeed in one of its own.
            polled = occupied(&context, &context.store.begin(), &held).await;
        }
        let mut has_found = false;
        match polled {
            Ok(waiting) => {
                for partition in waiting {
                    context.signals.wake(partition);
                    // Rows that cannot be decoded stay until they are repaired; they do not show that events were missed.
                    has_found |= !partitions.has_left(partition);
                }
                health.works(POLL, 0);
            }
            Err(error) => health.failed(context.env(), POLL, 0, &error),
        }
        pause = if has_found {
            (pause / 2).max(interval / HASTE_MAX)
        } else {
            pause.saturating_mul(2).min(interval)
        };
    }
}

/// Returns which of `partitions` have rows of counters, in ascending order. It reads only keys, at most one per partition, so rows that
/// cannot be decoded do not stop it. It also reads across partitions that were not asked for, so that all partitions without rows cost one
/// read.
pub(super) async fn occupied(
    context: &Context,
    tx: &Transaction,
    mut partitions: &[u32],
) -> Result<Vec<Partition>> {
    let mut found = Vec::new();
    while let [first, ..] = partitions {
        let (first, last) = (Partition(*first), Partition(partitions[partitions.len() - 1]));
        let range = context.keys.drains(first, last);
        let page = tx.get_range(&RangeRead::new(range).limit(1), Isolation::Snapshot).await?;
        let Some((key, _)) = page.rows.into_iter().next() else { break };
        // A key between two partitions belongs to none.
        let (at, is_within) = context.keys.partition_at(&key, first, last);
        if is_within && partitions.binary_search(&at.0).is_ok() {
            found.push(at);
        }
        partitions = &partitions[partitions.partition_point(|number| *number <= at.0)..];
    }
    Ok(found)
}
