//! The bell ringer: one task per process that tells notifiers of other processes where events wait.
//!
//! Doorbells are rung after the commits, coalesced: however many transactions have recorded events, there is at most one
//! small transaction every few milliseconds for all their partitions.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use crate::{
    state::{context::Context, keys::Partition, signals::Signals},
    store::{AtomicOp, RetryPolicy},
};

/// The least time between two transactions of the ringer.
const RING_INTERVAL: Duration = Duration::from_millis(5);

/// Rings doorbells until it is dropped, or the bus is. It keeps the store only while it rings: whoever drops the last
/// handle on a folder can open it again at once.
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

/// Rings the doorbells of `partitions` in one transaction. A ring that fails is made good by the notifier's poll.
async fn ring(context: &Context, partitions: &[Partition]) {
    if context.stats.health.ended().is_some() {
        // The bus is gone: there must not be anything of it.
        return;
    }
    let policy = RetryPolicy { attempts_max: Some(3), ..RetryPolicy::default() };
    let rung = context
        .db
        .run_with(&policy, async |tx| {
            for &partition in partitions {
                tx.atomic(AtomicOp::Add, &context.keys.doorbell(partition), &1_u64.to_le_bytes());
            }
            Ok(())
        })
        .await;
    match rung {
        Ok(()) => context.stats.bells.add(partitions.len() as u64),
        Err(error) => context.stats.health.complain(context.env(), "ringing of doorbells", &error),
    }
}
