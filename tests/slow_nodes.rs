//! Nodes whose heartbeats, removals or starts are held up: nothing of the rest of the node, nor of other nodes, waits for that.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::Duration;

use common::{joined, narrow_bus, unpolled, wide_bus};
use notibus::{
    node::Role,
    store::{
        Database,
        testing::{CommitFault, Faults, Gate, Operation},
    },
};

/// Longer than the default heartbeat and balance interval.
const INTERVAL: Duration = Duration::from_secs(3);

/// The prefix of the keys of nodes, after the default prefix.
const NODES: &[u8] = b"notibus\x15\x0a";

/// The prefix of the keys of leases.
const LEASES: &[u8] = b"notibus\x15\x0b";

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

/// How long the only survivor of 80 takes to replace the others, if each commit of a removal takes `takes`.
async fn time_to_replace(takes: Duration) -> Duration {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let mut others = Vec::new();
    for _ in 0..80 {
        others.push(joined(&bus).await.notifier(unpolled()).await.unwrap());
    }
    tokio::time::sleep(INTERVAL * 4).await;
    faults.plan_commits(move |attempt| {
        let removes = attempt
            .mutations()
            .any(|mutation| matches!(mutation, Operation::Clear { key } if key.starts_with(NODES)));
        removes.then(|| {
            let gate = Gate::default();
            let opened = gate.clone();
            tokio::spawn(async move {
                tokio::time::sleep(takes).await;
                opened.open();
            });
            CommitFault::Hold(gate)
        })
    });
    let began = tokio::time::Instant::now();
    drop(others);
    while notifier.partitions().len() < 64 && began.elapsed() < Duration::from_mins(20) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    began.elapsed()
}

/// Regression: while the removal of ten dead nodes took 4 s, the watch forgot since when the others were silent, and waited for
/// another expiry for each ten.
#[tokio::test(start_paused = true)]
async fn slow_removals_do_not_begin_again() {
    let at_once = time_to_replace(Duration::ZERO).await;
    let slow = time_to_replace(Duration::from_secs(4)).await;
    let most = at_once + Duration::from_secs(8 * 4) + INTERVAL * 2;
    assert!(slow < most, "80 nodes are 8 removals; they take {at_once:?}, and {slow:?} at 4 s each");
}

/// Regression: each step of a shutdown waits 10 s for the store at most, but the shutdown of a node waited without a limit for a role
/// whose start hung, because the start was not informed.
#[tokio::test(start_paused = true)]
async fn a_node_leaves_although_the_start_of_a_role_hangs() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let node = joined(&bus).await;
    let gate = Gate::default();
    let held = gate.clone();
    faults.plan_commits(move |attempt| {
        let claims = attempt
            .mutations()
            .any(|mutation| matches!(mutation, Operation::Set { key, .. } if key.starts_with(LEASES)));
        claims.then(|| CommitFault::Hold(held.clone()))
    });
    let starting = tokio::spawn({
        let node = node.clone();
        async move { node.notifier(unpolled()).await.map(drop) }
    });
    gate.reached().await;
    let left = tokio::time::timeout(Duration::from_mins(1), node.shutdown()).await;
    assert!(left.is_ok(), "it waits for longer than a minute");
    let started = starting.await.unwrap().unwrap_err();
    assert!(started.to_string().contains("shut down"), "{started}");
}
