//! When a node sends heartbeats, and what counts as silence.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use notibus::{
    Error, NodeOptions, NotifierOptions,
    node::Role,
    store::{
        Env, Environment, Store,
        testing::{Faults, Operation},
    },
};

use super::fixture::{NODES, writes};
use crate::common::{db, joined, narrow_bus, record, wide_bus};

#[tokio::test(start_paused = true)]
async fn bad_times_of_a_node_are_typed_errors() {
    let bus = wide_bus(&Store::memory()).await;
    for (heartbeat, expiry) in [(0, 10), (3, 5)] {
        let (heartbeat, expiry) = (Duration::from_secs(heartbeat), Duration::from_secs(expiry));
        let refused = bus.node(NodeOptions::default().heartbeat(heartbeat).expiry(expiry)).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{heartbeat:?} {expiry:?}");
    }
}

/// An environment whose clock can be set forward.
struct Skewed(Env, Arc<AtomicU64>);

impl Environment for Skewed {
    fn now(&self) -> Duration {
        self.0.now() + Duration::from_millis(self.1.load(Ordering::Relaxed))
    }

    fn wall_ms(&self) -> u64 {
        self.0.wall_ms()
    }

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.0.sleep(duration))
    }
}

/// Regression: a node that joined while the cluster recovered, and so waited almost a whole expiry for its first read, counted its own
/// expiry from before that read, so it dropped out 0.4 s after it had joined.
#[tokio::test(start_paused = true)]
async fn waiting_for_the_store_does_not_count_as_silence() {
    let skew = Arc::new(AtomicU64::new(0));
    let faults = Faults::new(&Store::memory_in(Env::new(Skewed(Env::system(), Arc::clone(&skew)))));
    let bus = wide_bus(&faults.store()).await;
    let mut waits = true;
    faults.plan_reads(move |operation| {
        if matches!(operation, Operation::Get { key, .. } if key.starts_with(NODES))
            && std::mem::take(&mut waits)
        {
            skew.store(11_900, Ordering::Relaxed);
        }
        None
    });
    let times = Duration::from_secs(6);
    let options = NodeOptions::default().heartbeat(times).expiry(times * 2);
    let node = bus.node(options).await.unwrap();
    tokio::time::sleep(times * 2).await;
    assert_eq!(bus.stats().nodes_dropped_out, 0);
    node.shutdown().await.unwrap();
}

/// Regression: each publication of roles that had nothing to write delayed the next heartbeat by an eighth of its interval, so a node that
/// dropped a role and listed it again every 300 ms never sent one, dropped out, and was presumed dead.
#[tokio::test(start_paused = true)]
async fn a_node_that_lists_a_role_again_and_again_goes_on_beating() {
    let store = Store::memory();
    let (bus, other) = (narrow_bus(&store).await, narrow_bus(&store).await);
    let node = joined(&bus).await;
    let _observer = joined(&other).await;
    let mut listed = node.announce(Role::HTTP).await.unwrap();
    let beat = async || {
        bus.nodes().await.unwrap().iter().find(|known| known.id == node.id()).map(|known| known.beat)
    };
    let before = beat().await;
    for _ in 0..100 {
        drop(listed);
        listed = node.announce(Role::HTTP).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let after = beat().await;
    assert!(after.is_some(), "30 s later the node is taken for dead; its beat was {before:?}");
    assert!(after > before);
}

/// An environment whose time advances only when a test adds to it.
struct Spent(Arc<AtomicU64>);

impl Environment for Spent {
    fn now(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }

    fn wall_ms(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn random(&self) -> u64 {
        fastrand::u64(..)
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        let (spent, until) = (Self(Arc::clone(&self.0)), self.now().saturating_add(duration));
        Box::pin(async move {
            while spent.now() < until {
                tokio::task::yield_now().await;
            }
        })
    }
}

/// Regression: operations of the store in memory never waited, so a producer in a loop starved everything else on its thread: events were
/// not folded, and the node missed its heartbeats and gave up its leases. Here each commit takes 1 ms of the only thread.
#[tokio::test]
async fn a_producer_that_never_waits_leaves_heartbeats_and_folds_their_turn() {
    let spent = Arc::new(AtomicU64::new(0));
    let faults = Faults::new(&Store::memory_in(Env::new(Spent(Arc::clone(&spent)))));
    let beats = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&beats);
    faults.plan_commits(move |attempt| {
        counted.fetch_add(u64::from(writes(attempt, NODES)), Ordering::Relaxed);
        None
    });
    let store = faults.store();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
    let before = beats.load(Ordering::Relaxed);
    let produce = async move {
        for _ in 0..20_000 {
            record(&store, &bus, &db("busy", 1), [0, 0, 1, 0]).await;
            spent.fetch_add(1, Ordering::Relaxed);
        }
        // This task has not yielded since its last operation, so these counts are those of the loop.
        (beats.load(Ordering::Relaxed) - before, bus.stats())
    };
    let (beats, stats) = tokio::spawn(produce).await.unwrap();
    assert!(beats >= 8, "{beats} beats in 20 s, of one each 2 s");
    assert!(stats.folds >= 100, "{} folds in 20 s", stats.folds);
    assert_eq!(stats.nodes_dropped_out, 0);
}
