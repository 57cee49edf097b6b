//! The doorbell ringer: one task per process that signals to notifiers of other processes which partitions have waiting events.
//!
//! It rings after commits, and coalesces the rings: however many transactions recorded events, it commits at most one small transaction
//! every few milliseconds for all their partitions.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use crate::{
    state::{context::Context, keys::Partition, signals::Signals},
    store::{AtomicOp, RetryPolicy},
};

/// The name under which failures of the ringer are logged.
pub(crate) const RINGER: &str = "ringing of doorbells";

/// The minimum time between two transactions of the ringer.
const RING_INTERVAL: Duration = Duration::from_millis(5);

/// Rings doorbells until the future is dropped or the bus ends. It holds the store only while it rings, so that the folder of a store can
/// be opened again as soon as the last handle of the store is dropped.
pub(crate) async fn ringer(signals: Arc<Signals>, context: Weak<Context>) {
    loop {
        signals.dirtied().await;
        let pause = {
            let Some(context) = context.upgrade() else { return };
            let partitions = signals.take_dirty();
            if partitions.is_empty() {
                continue;
            }
            ring(&context, &partitions).await;
            context.env().sleep(RING_INTERVAL)
        };
        pause.await;
    }
}

/// Rings the doorbells of `partitions` in one transaction. If it fails, the notifier's poll finds the events.
async fn ring(context: &Context, partitions: &[Partition]) {
    if context.stats.health.ended().is_some() {
        // The bus is gone: ringing would leave a key behind.
        return;
    }
    let policy = RetryPolicy { attempts_max: Some(3), ..RetryPolicy::default() };
    let rung = context
        .store
        .run_with(&policy, async |tx| {
            for &partition in partitions {
                tx.atomic(AtomicOp::Add, &context.keys.doorbell(partition), &1_u64.to_le_bytes());
            }
            Ok(())
        })
        .await;
    match rung {
        Ok(()) => context.stats.doorbells.add(partitions.len() as u64),
        Err(error) => context.stats.health.complain(context.env(), RINGER, &error),
    }
}
