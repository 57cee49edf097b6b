//! When a node beats, and what counts as silence.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use notibus::{
    Error, NodeOptions,
    node::Role,
    store::{
        Database, Env, Environment,
        testing::{Faults, Operation},
    },
};

use super::fixture::NODES;
use crate::common::{joined, narrow_bus, wide_bus};

#[tokio::test(start_paused = true)]
async fn bad_times_of_a_node_are_typed_errors() {
    let bus = wide_bus(&Database::memory()).await;
    for (heartbeat, expiry) in [(0, 10), (3, 5)] {
        let (heartbeat, expiry) = (Duration::from_secs(heartbeat), Duration::from_secs(expiry));
        let refused = bus.node(NodeOptions { heartbeat, expiry, ..NodeOptions::default() }).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{heartbeat:?} {expiry:?}");
    }
}

/// An environment whose clock can be put forward.
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

/// Regression: a node that joined while the cluster recovered waited for its first read for almost an expiry, counted its own expiry
/// from before that, and fell out 0.4 s after it had joined.
#[tokio::test(start_paused = true)]
async fn waiting_for_the_store_does_not_count_as_silence() {
    let skew = Arc::new(AtomicU64::new(0));
    let faults = Faults::new(&Database::memory_in(Env::new(Skewed(Env::system(), Arc::clone(&skew)))));
    let bus = wide_bus(&faults.database()).await;
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
    let options = NodeOptions { heartbeat: times, expiry: times * 2, ..NodeOptions::default() };
    let node = bus.node(options).await.unwrap();
    tokio::time::sleep(times * 2).await;
    assert_eq!(bus.stats().nodes_fallen_out, 0);
    node.shutdown().await.unwrap();
}

/// Regression: a publication of roles that had nothing to write put the next beat off by an eighth of the heartbeat. A node that
/// dropped a role and listed it again every 300 ms never beat, fell out, and was taken for dead.
#[tokio::test(start_paused = true)]
async fn a_node_that_lists_a_role_again_and_again_goes_on_beating() {
    let store = Database::memory();
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
