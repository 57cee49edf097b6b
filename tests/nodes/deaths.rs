//! Nodes that die: when the others learn of it, and how soon their work continues.

use std::time::Duration;

use notibus::{
    Bus, BusOptions, NodeOptions, Notifier, NotifierOptions,
    store::{
        Store, StoreError,
        testing::{Attempt, CommitFault, Faults, Gate, Operation},
    },
};

use super::fixture::{EXPIRY, INTERVAL, NODES, is_even, removes, shares, writes};
use crate::{
    common::{joined, unpolled, until, wide_bus},
    disk::SimulatedDisk,
};

/// Starts `count` notifiers one by one. Each opens the bus for itself, as a process does, so none knows what another one has seen.
async fn processes(store: &Store, count: usize) -> Vec<Notifier> {
    let mut notifiers = Vec::new();
    for _ in 0..count {
        notifiers.push(joined(&wide_bus(store).await).await.notifier(unpolled()).await.unwrap());
    }
    notifiers
}

/// Starts a notifier, and 80 notifiers after it.
async fn one_beside_80(store: &Store) -> (Notifier, Vec<Notifier>) {
    let mut notifiers = processes(store, 81).await;
    (notifiers.remove(0), notifiers)
}

#[tokio::test(start_paused = true)]
async fn a_dead_node_is_replaced_after_the_expiry_and_one_balance_interval() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let a = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let b = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    drop(a);
    tokio::time::sleep(Duration::from_millis(2_999)).await;
    assert_eq!(shares(&[&b]), [32], "it may be alive");
    tokio::time::sleep(INTERVAL * 2).await;
    assert_eq!(shares(&[&b]), [64]);
    assert_eq!(bus.nodes().await.unwrap().len(), 1, "the row of the dead one is removed");
}

/// If all nodes are dead, the next one has to wait, because it cannot know when they died.
#[tokio::test(start_paused = true)]
async fn a_node_that_finds_only_dead_ones_takes_over_after_the_expiry() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    drop(joined(&bus).await.notifier(unpolled()).await.unwrap());
    tokio::time::sleep(Duration::from_mins(1)).await;
    let b = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(4_900)).await;
    assert_eq!(shares(&[&b]), [0], "it may be alive");
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(shares(&[&b]), [64]);
}

/// A node watches 8 others, whatever their number; and even if many die at once, the last is found as soon as the first.
#[tokio::test(start_paused = true)]
async fn a_third_of_many_nodes_dies_at_once() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let mut notifiers = processes(&store, 60).await;
    tokio::time::sleep(INTERVAL * 4).await;
    let even = |notifiers: &[Notifier]| is_even(&notifiers.iter().collect::<Vec<_>>(), 64);
    assert!(even(&notifiers));
    let mut number = 0;
    notifiers.retain(|_| {
        number += 1;
        number % 3 != 0
    });
    tokio::time::sleep(EXPIRY + INTERVAL).await;
    assert_eq!(bus.nodes().await.unwrap().len(), 40);
    tokio::time::sleep(INTERVAL * 2).await;
    assert!(even(&notifiers), "{:?}", shares(&notifiers.iter().collect::<Vec<_>>()));
}

/// Regression: the only surviving node removed the eight dead nodes that it watched, and then waited an expiry before each next eight.
#[tokio::test(start_paused = true)]
async fn the_only_node_that_is_left_finds_all_dead_ones_soon() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let mut notifiers = processes(&store, 40).await;
    tokio::time::sleep(INTERVAL * 4).await;
    notifiers.truncate(1);
    tokio::time::sleep((EXPIRY + INTERVAL) * 2 + INTERVAL).await;
    assert_eq!(bus.nodes().await.unwrap().len(), 1);
    assert_eq!(shares(&[&notifiers[0]]), [64]);
}

/// Regression: the only surviving node removed all dead nodes in one transaction, so on a store where so many reads in one transaction
/// cannot succeed, it tried for a minute, and then watched only its neighbours again.
#[tokio::test(start_paused = true)]
async fn dead_nodes_are_removed_although_large_transactions_fail() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
    let (notifier, others) = one_beside_80(&faults.store()).await;
    tokio::time::sleep(INTERVAL * 4).await;
    faults.plan_commits(|attempt| {
        let is_large = writes(attempt, NODES) && attempt.reads().count() > 40;
        is_large.then_some(CommitFault::Before(StoreError::TRANSACTION_TOO_OLD))
    });
    drop(others);
    tokio::time::sleep((EXPIRY + INTERVAL) * 2 + INTERVAL).await;
    assert_eq!(bus.nodes().await.unwrap().len(), 1);
    assert_eq!(shares(&[&notifier]), [64]);
}

/// Regression: a node that could not remove a dead one did not pass on to its workers what else it had read, so partitions that another
/// node had released had no owner for as long as the removal failed.
#[tokio::test(start_paused = true)]
async fn removals_that_fail_hold_up_no_worker() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (bus_a, bus_b) = (wide_bus(&store).await, wide_bus(&faults.store()).await);
    let a = joined(&bus_a).await.notifier(unpolled()).await.unwrap();
    let b = joined(&bus_b).await.notifier(unpolled()).await.unwrap();
    until("they share", async || is_even(&[&a, &b], 64)).await;
    faults.plan_commits(|attempt| {
        removes(attempt, NODES).then_some(CommitFault::Before(StoreError::NOT_COMMITTED))
    });
    let dead = joined(&bus_a).await;
    let id = dead.id();
    tokio::time::sleep(INTERVAL).await;
    drop(dead);
    // Node A leaves before it could find the dead node, so node B is left alone with it.
    tokio::time::sleep(EXPIRY.saturating_sub(INTERVAL)).await;
    a.shutdown().await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    assert!(bus_b.nodes().await.unwrap().iter().any(|node| node.id == id), "it cannot be removed");
    assert_eq!(shares(&[&b]), [64]);
}

/// Returns how long the only survivor takes to replace 80 dead nodes, if each commit of a removal takes `takes`.
async fn time_to_replace(takes: Duration) -> Duration {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (notifier, others) = one_beside_80(&faults.store()).await;
    tokio::time::sleep(INTERVAL * 6).await;
    faults.plan_commits(move |attempt| {
        removes(attempt, NODES).then(|| {
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

/// Regression: the watch forgot how long other nodes had been silent while the removal of ten dead nodes took 4 s, so it waited another
/// expiry for each ten.
#[tokio::test(start_paused = true)]
async fn slow_removals_do_not_begin_again() {
    let at_once = time_to_replace(Duration::ZERO).await;
    let slow = time_to_replace(Duration::from_secs(4)).await;
    let most = at_once + Duration::from_secs(8 * 4) + INTERVAL * 3;
    assert!(slow < most, "80 nodes are 8 removals; they take {at_once:?}, and {slow:?} at 4 s each");
}

/// Regression: the first process on a folder after a crash waited for the dead node to expire, so it delivered nothing for 10 s.
#[tokio::test]
async fn the_nodes_of_a_folder_are_gone_when_it_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let crashed = std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let notifier = runtime.block_on(async {
            let store = Store::open_dir(&path).unwrap();
            let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
            let notifier = joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
            until("a lease", async || bus.nodes().await.unwrap().iter().any(|node| !node.leases.is_empty()))
                .await;
            notifier
        });
        // The process ends, but its node does not leave.
        runtime.shutdown_timeout(Duration::from_secs(5));
        drop(notifier);
    });
    crashed.join().unwrap();
    let store = Store::open_dir(folder.path()).unwrap();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    assert_eq!(bus.nodes().await.unwrap(), []);
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let again = Bus::open(&store, BusOptions::default()).await.unwrap();
    assert_eq!(again.nodes().await.unwrap().len(), 1, "the second one of a process removes nobody");
    node.shutdown().await.unwrap();
}

/// Whether an attempt removes all nodes.
fn forgets(attempt: &Attempt) -> bool {
    attempt
        .mutations()
        .any(|mutation| matches!(mutation, Operation::ClearRange { range } if range.begin.starts_with(NODES)))
}

/// Returns a disk with the folder of a bus whose process was killed while it had one node.
async fn disk_with_a_dead_node() -> SimulatedDisk {
    let disk = SimulatedDisk::new(512);
    let store = disk.open_small(1 << 30).unwrap();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let _node = joined(&bus).await;
    disk.copied()
}

/// Regression: the opening of a bus noted the dead nodes as removed before it had removed them, so if the removal failed, or the opening
/// was cancelled, these nodes kept their partitions until they expired.
#[tokio::test]
async fn an_opening_that_fails_leaves_the_dead_nodes_to_the_next_one() {
    let store = disk_with_a_dead_node().await.open_small(1 << 30).unwrap();
    let faults = Faults::new(&store);
    let db = faults.store();
    let gate = Gate::default();
    let held = gate.clone();
    faults.plan_commits(move |attempt| forgets(attempt).then(|| CommitFault::Hold(held.clone())));
    let cancelled = Bus::open(&db, BusOptions::default());
    assert!(
        tokio::time::timeout(Duration::from_millis(50), cancelled).await.is_err(),
        "it waits at the gate"
    );
    faults.plan_commits(|attempt| forgets(attempt).then_some(CommitFault::Before(StoreError::IO_ERROR)));
    Bus::open(&db, BusOptions::default()).await.unwrap_err();
    faults.plan_commits(|_| None);
    let bus = Bus::open_existing(&db, b"notibus").await.unwrap();
    assert_eq!(bus.nodes().await.unwrap(), []);
    drop(gate);
}

/// Regression: the first of two concurrent openings removed all nodes even if its commit was late, or conflicted and was retried, after the
/// second opening had returned and a node had joined, so it removed this live node.
#[tokio::test]
async fn of_two_openings_at_once_none_removes_a_living_node() {
    let store = disk_with_a_dead_node().await.open_small(1 << 30).unwrap();
    let faults = Faults::new(&store);
    let gate = Gate::default();
    let held = gate.clone();
    faults.plan_commits(move |attempt| forgets(attempt).then(|| CommitFault::Hold(held.clone())));
    let first_db = faults.store();
    let first = tokio::spawn(async move { Bus::open(&first_db, BusOptions::default()).await });
    gate.reached().await;
    let second = Bus::open(&store, BusOptions::default()).await.unwrap();
    let node = joined(&second).await;
    gate.open();
    let first = first.await.unwrap().unwrap();
    let ids = first.nodes().await.unwrap().into_iter().map(|node| node.id);
    assert_eq!(ids.collect::<Vec<_>>(), [node.id()], "the dead one is gone, the living one is there");
    node.shutdown().await.unwrap();
}
