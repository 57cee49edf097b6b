//! The canary: each node regularly records an event of its own, and waits until its dispatcher has read the row.
//!
//! So `ready` knows that what is recorded now is delivered, and a metric has the time from commit to delivery. All nodes share one
//! database for it, [`CANARY`], whose row readers of the feed leave out. Each time costs one transaction, one fold and one row.

use std::time::Duration;

use super::Bus;
use crate::{
    base::{
        error::{Error, Result},
        event::{Db, DbInstance},
        notification::CANARY,
    },
    roles::dispatcher::Dispatcher,
    state::{keys::Role, membership::members},
    store::{Isolation, RetryPolicy, Transaction},
};

/// The name of its failure in `ready`.
pub(super) const WHAT: &str = "delivery of the canary";

/// An event counts as lost after this time. Other nodes need some of it to take over from a dead one.
const LIMIT: Duration = Duration::from_secs(15);

/// The longest pause after an event that was lost.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);

/// With more nodes each node waits longer, so that all together record no more events.
const NODES_MAX: usize = 100;

/// Records an event about every `interval`, without end, and counts the time from the commit to the delivery. A lost event keeps
/// the node from being ready until one is delivered.
pub(super) async fn run(bus: Bus, dispatcher: Dispatcher, interval: Duration) {
    let context = &bus.context;
    let (env, health) = (context.env(), &context.stats.health);
    loop {
        let sent = tokio::select! {
            biased;
            sent = send(&bus, &dispatcher) => sent,
            () = env.sleep(LIMIT) => Err(Error::GaveUp { what: "waiting for the canary", after: LIMIT }),
        };
        let pause = match sent {
            Ok((took, nodes)) => {
                context.stats.deliveries.add(took);
                health.works(WHAT, 0);
                interval.saturating_mul(u32::try_from(nodes.div_ceil(NODES_MAX)).unwrap_or(u32::MAX).max(1))
            }
            // The dispatcher has ended, or the bus is gone and the roles end.
            Err(Error::NoSubscriber { .. } | Error::BusGone { .. }) => return,
            Err(error) => {
                health.failed(env, WHAT, 0, &error);
                interval.min(RETRY_PAUSE_MAX)
            }
        };
        env.sleep(env.spread(pause, 0.75, 1.0)).await;
    }
}

/// Records one event. Fails with [`Error::BusGone`] if the store has no such bus any more. Returns the time from the commit until its row was read here, and how many nodes do the same.
async fn send(bus: &Bus, dispatcher: &Dispatcher) -> Result<(Duration, usize)> {
    let db = Db::new(CANARY.parse().expect("it is a name"), DbInstance([0; 16]));
    let keys = &bus.context.keys;
    let record = async |tx: Transaction| {
        // An event is blind: without this read it would be written into whatever has replaced the bus.
        let stored = tx.get(&keys.config(), Isolation::Serializable).await?;
        bus.context.config.check_stored(stored.as_deref())?;
        let nodes = members(&tx, keys, &Role::DISPATCHER, |_, _| {}).await?.len();
        bus.producer().updated(&tx, &db);
        Ok(nodes)
    };
    // It may be recorded twice, which changes nothing.
    let (nodes, committed) = bus.store().run_committed(&RetryPolicy::default(), record).await?;
    let began = bus.context.env().now();
    if let Some(committed) = committed {
        dispatcher.reached(committed.versionstamp.version()).await?;
    }
    Ok((bus.context.env().now().saturating_sub(began), nodes))
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    use super::*;
    use crate::{
        base::error::StoreError,
        bus::{BusOptions, running::Roles},
        roles::dispatcher::DispatcherOptions,
        store::{
            AtomicOp, Database, KeyRange,
            testing::{CommitFault, Faults, Gate, Operation},
        },
    };

    /// A fold that hangs fails nowhere, and its notifier still owns all partitions.
    #[tokio::test(start_paused = true)]
    async fn a_node_whose_canary_does_not_come_back_is_not_ready() {
        let faults = Faults::new(&Database::memory());
        let bus = Bus::open(&faults.database(), BusOptions::default()).await.unwrap();
        let running = bus.start(Roles::default()).await.unwrap();
        let trouble = || bus.context.stats.health.troubles().first().map(|trouble| trouble.what);
        let minutes = async |count| tokio::time::sleep(Duration::from_mins(count)).await;
        minutes(10).await;
        let delivered = bus.context.stats.deliveries.snapshot().1.iter().map(|(_, count)| count).sum::<u64>();
        assert!((10..=14).contains(&delivered) && trouble().is_none(), "{delivered}, {:?}", trouble());
        let gate = Gate::default();
        let held = gate.clone();
        let is_fold = AtomicOp::CompareAndClear;
        faults.plan_commits(move |attempt| attempt.applies(is_fold).then(|| CommitFault::Hold(held.clone())));
        minutes(2).await;
        assert_eq!(trouble(), Some(WHAT));
        faults.heal();
        gate.open();
        minutes(1).await;
        assert_eq!(trouble(), None);
        running.shutdown().await.unwrap();
    }

    /// Regression: a canary was recorded in one attempt, and the next one came 4 s later. A single conflict, which any other
    /// transaction meets with another attempt, made a healthy node count as not ready.
    #[tokio::test(start_paused = true)]
    async fn a_commit_of_the_canary_that_fails_once_is_tried_again() {
        let faults = Faults::new(&Database::memory());
        let bus = Bus::open(&faults.database(), BusOptions::default()).await.unwrap();
        let running = bus.start(Roles::default()).await.unwrap();
        tokio::time::sleep(Duration::from_mins(1)).await;
        for fault in
            [StoreError::NOT_COMMITTED, StoreError::TRANSACTION_TOO_OLD, StoreError::COMMIT_UNKNOWN_RESULT]
        {
            let failed = Arc::new(AtomicBool::new(false));
            let fails = Arc::clone(&failed);
            // No other transaction of an idle bus reads the configuration serializably.
            let config = bus.context.keys.config();
            faults.plan_commits(move |attempt| {
                let reads_config =
                    |of: &Operation| matches!(of, Operation::Get { key, .. } if key[..] == config[..]);
                let is_canary = attempt.read_conflicts().any(reads_config) && attempt.writes();
                (is_canary && !fails.swap(true, Ordering::Relaxed))
                    .then(|| CommitFault::Before(fault.clone()))
            });
            while !failed.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            tokio::time::sleep(Duration::from_millis(3_500)).await;
            let troubles = bus.context.stats.health.troubles();
            assert!(troubles.is_empty(), "{troubles:?}");
        }
        running.shutdown().await.unwrap();
    }

    /// Regression: a canary whose event was on its way while the bus was wiped recorded the next one into the empty store.
    #[tokio::test(start_paused = true)]
    async fn a_canary_records_nothing_in_a_store_without_its_bus() {
        let store = Database::memory();
        let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let all = KeyRange::new(&b""[..], &b"\xff"[..]);
        let wipe = async |tx: Transaction| {
            tx.clear_range(&all);
            Ok(())
        };
        store.run(wipe).await.unwrap();
        let canary = run(bus, dispatcher.subscriptions(), Duration::from_mins(1));
        tokio::time::timeout(Duration::from_mins(10), canary).await.expect("it ends");
        let left = store.run(async |tx| tx.all_rows(all.clone(), Isolation::Snapshot).await).await.unwrap();
        assert!(left.is_empty(), "{left:?}");
    }
}
