//! Nodes: how they share work while nodes come, go, die, and wake up after they were taken for dead.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use common::{
    counts, db, eager, joined, narrow_bus, record, row_with, rows, unpolled, until, waiting, wide_bus, within,
};
use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Bus, BusOptions, Error, JanitorOptions, NodeOptions, Notifier, NotifierOptions,
    event::Counters,
    node::{BalanceOptions, NodeId, Role},
    store::{
        AtomicOp, Database, Env, Environment, Isolation, KeyRange, RangeRead, StoreError,
        testing::{Attempt, CommitFault, Faults, Gate, Operation},
    },
};

/// The default heartbeat, which is longer than the balance interval.
const INTERVAL: Duration = Duration::from_secs(2);

/// The default expiry.
const EXPIRY: Duration = Duration::from_secs(5);

/// The prefix of the keys of nodes, after the default prefix.
const NODES: &[u8] = b"notibus\x15\x0a";

/// The prefix of the keys of leases.
const LEASES: &[u8] = b"notibus\x15\x0b";

/// Whether an attempt writes a key that starts with `prefix`.
fn writes(attempt: &Attempt, prefix: &[u8]) -> bool {
    attempt.mutations().any(|mutation| match mutation {
        Operation::Set { key, .. } | Operation::Clear { key } => key.starts_with(prefix),
        _ => false,
    })
}

/// Whether an attempt is a fold.
fn is_fold(attempt: &Attempt) -> bool {
    attempt.applies(AtomicOp::CompareAndClear)
}

/// How many partitions each works on.
fn shares(notifiers: &[&Notifier]) -> Vec<usize> {
    notifiers.iter().map(|notifier| notifier.partitions().len()).collect()
}

/// Whether the notifiers work on each of `all` partitions exactly once, and on as many each, give or take one.
fn is_even(notifiers: &[&Notifier], all: u32) -> bool {
    let mut partitions: Vec<_> = notifiers.iter().flat_map(|notifier| notifier.partitions()).collect();
    partitions.sort_unstable();
    let shares = shares(notifiers);
    partitions.into_iter().eq(0..all) && shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1
}

/// The rows whose keys start with `prefix`.
async fn stored(store: &Database, prefix: &'static [u8]) -> Vec<(Bytes, Bytes)> {
    let read = RangeRead::new(KeyRange::prefix(prefix));
    store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows
}

/// Number of owned leases: such a row has a node and a token after the epoch.
async fn owned(store: &Database) -> usize {
    stored(store, LEASES).await.iter().filter(|(_, value)| value.len() == 40).count()
}

#[tokio::test(start_paused = true)]
async fn a_node_alone_has_all_partitions_at_once() {
    let store = Database::memory();
    let options = BusOptions { partitions: 2_500, ..BusOptions::default() };
    let bus = Bus::open(&store, options).await.unwrap();
    let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    assert!(is_even(&[&notifier], 2_500));
    assert_eq!(bus.stats().leases_acquired, 2_500);
}

#[tokio::test(start_paused = true)]
async fn a_new_node_has_its_share_after_the_balance_interval() {
    let store = Database::memory();
    let buses = [wide_bus(&store).await, wide_bus(&store).await, wide_bus(&store).await];
    let a = joined(&buses[0]).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    let b = joined(&buses[1]).await.notifier(unpolled()).await.unwrap();
    // The owner polls within the interval, the new node an eighth of it later.
    tokio::time::sleep(INTERVAL + INTERVAL / 8).await;
    assert!(is_even(&[&a, &b], 64), "{:?}", shares(&[&a, &b]));
    let c = joined(&buses[2]).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(INTERVAL + INTERVAL / 8).await;
    assert!(is_even(&[&a, &b, &c], 64), "{:?}", shares(&[&a, &b, &c]));
    let moved = |bus: &Bus| bus.stats().leases_acquired;
    let before: Vec<_> = buses.iter().map(moved).collect();
    assert_eq!(before, [64, 32, 21], "nothing moves twice");
    tokio::time::sleep(Duration::from_mins(5)).await;
    assert_eq!(buses.iter().map(moved).collect::<Vec<_>>(), before, "then nothing moves");
}

#[tokio::test(start_paused = true)]
async fn nodes_that_start_together_share_evenly() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let start = (0..10).map(|_| async { joined(&bus).await.notifier(unpolled()).await });
    let notifiers: Vec<_> =
        futures_util::future::join_all(start).await.into_iter().map(Result::unwrap).collect();
    tokio::time::sleep(INTERVAL * 3).await;
    let all: Vec<_> = notifiers.iter().collect();
    assert!(is_even(&all, 64), "{:?}", shares(&all));
}

/// More nodes than partitions: some have nothing to do, and take over when others leave.
#[tokio::test(start_paused = true)]
async fn a_shutdown_frees_everything_at_once() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let a = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let b = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(shares(&[&a, &b]), [1, 0]);
    a.shutdown().await.unwrap();
    assert_eq!((owned(&store).await, stored(&store, NODES).await.len()), (0, 3), "a row, and a role twice");
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(shares(&[&b]), [1]);
    b.shutdown().await.unwrap();
    assert_eq!((owned(&store).await, stored(&store, NODES).await.len()), (0, 0));
    let c = joined(&bus).await.notifier(unpolled()).await.unwrap();
    assert_eq!(shares(&[&c]), [1], "nobody has to be waited for");
}

#[tokio::test(start_paused = true)]
async fn a_dead_node_is_replaced_after_the_expiry_and_one_balance_interval() {
    let store = Database::memory();
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

/// Regression: a node whose bus was wiped wrote itself into the new bus, and failed at each partition 65 times a second; one whose
/// incarnation was raised continued to write sequences of the old one.
#[tokio::test(start_paused = true)]
async fn a_node_stops_its_roles_once_its_bus_is_gone() {
    for is_wiped in [true, false] {
        let store = Database::memory();
        let bus = wide_bus(&store).await;
        let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
        if is_wiped {
            let wipe = store.run(async |tx| {
                tx.clear_range(&KeyRange::prefix(""));
                Ok(())
            });
            wipe.await.unwrap();
        } else {
            // As by an operator who has not stopped all processes: the configuration changes from here on.
            let raise = store.run(async |tx| {
                let config = stored(&store, b"notibus").await[0].clone();
                let raised = [&config.1[..6], &[1]].concat();
                tx.set(&config.0, &raised);
                Ok(())
            });
            raise.await.unwrap();
        }
        tokio::time::sleep(INTERVAL * 2).await;
        assert!(notifier.partitions().is_empty(), "it gives everything up");
        let left = stored(&store, b"").await;
        tokio::time::sleep(EXPIRY * 10).await;
        assert_eq!(stored(&store, b"").await, left, "and writes nothing any more");
        notifier.shutdown().await.unwrap();
        let error = bus.node(NodeOptions::default()).await.unwrap_err();
        assert!(matches!(error, Error::BusGone { .. }), "{error}");
    }
}

/// If all nodes have died, the next one has to wait, because it cannot know when they did.
#[tokio::test(start_paused = true)]
async fn a_node_that_finds_only_dead_ones_takes_over_after_the_expiry() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    drop(joined(&bus).await.notifier(unpolled()).await.unwrap());
    tokio::time::sleep(Duration::from_mins(1)).await;
    let b = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(4_900)).await;
    assert_eq!(shares(&[&b]), [0], "it may be alive");
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(shares(&[&b]), [64]);
}

/// Node A hangs in all its commits while B takes over. A cannot commit its pending work any more, and takes part
/// again.
#[tokio::test(start_paused = true)]
async fn a_zombie_cannot_commit_and_joins_again() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus_a = wide_bus(&faults.database()).await;
    let bus_b = wide_bus(&store).await;
    let a = joined(&bus_a).await.notifier(unpolled()).await.unwrap();
    let gate = Gate::default();
    let held = gate.clone();
    faults.plan_commits(move |attempt| {
        (is_fold(attempt) || writes(attempt, NODES)).then(|| CommitFault::Hold(held.clone()))
    });
    record(&store, &bus_b, &db("a", 1), [1, 0, 0, 0]).await;
    within("A to fold", gate.reached()).await;

    let b = joined(&bus_b).await.notifier(unpolled()).await.unwrap();
    row_with(&bus_b, &db("a", 1), [1, 0, 0, 0]).await;
    until("B has everything", async || b.partitions().len() == 64).await;
    faults.heal();
    gate.open();
    record(&store, &bus_b, &db("a", 1), [0, 0, 1, 0]).await;
    row_with(&bus_b, &db("a", 1), [1, 0, 1, 0]).await;
    assert_eq!(bus_a.stats().folds, 0);
    assert_eq!(bus_b.stats().folded, counts([1, 0, 1, 0]));

    until("A has its share again", async || is_even(&[&a, &b], 64)).await;
    for n in 0..50 {
        record(&store, &bus_b, &db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
        row_with(&bus_b, &db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
    }
    assert!(bus_a.stats().folds > 0);
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
    assert_eq!((owned(&store).await, stored(&store, NODES).await.len()), (0, 0));
}

/// A process is stopped in the middle of a commit and continues after another one has taken over. Its runtime does not run
/// meanwhile, and its heartbeat is not due, so it cannot know. Only the lease makes the commit fail.
#[test]
fn a_paused_process_wakes_as_a_zombie_and_is_fenced_off() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (paused, awake) = (runtime(), runtime());
    let store = Database::memory();
    let faults = Faults::new(&store);
    let gate = Gate::default();
    let (bus_a, a) = paused.block_on(async {
        let bus = narrow_bus(&faults.database()).await;
        let (heartbeat, expiry) = (Duration::from_hours(1), Duration::from_hours(2));
        let rarely = NodeOptions { heartbeat, expiry, ..NodeOptions::default() };
        let notifier = bus.node(rarely).await.unwrap().notifier(unpolled()).await.unwrap();
        let held = gate.clone();
        faults.plan_commits(move |attempt| is_fold(attempt).then(|| CommitFault::Hold(held.clone())));
        record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
        within("A to fold", gate.reached()).await;
        (bus, notifier)
    });
    awake.block_on(async {
        let bus = narrow_bus(&store).await;
        // Another node has taken A for dead.
        store
            .run(async |tx| {
                tx.clear_range(&KeyRange::prefix(NODES));
                Ok(())
            })
            .await
            .unwrap();
        let b = joined(&bus).await.notifier(unpolled()).await.unwrap();
        row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
        b.shutdown().await.unwrap();
    });
    gate.open();
    paused.block_on(async {
        until("A has found out", async || bus_a.stats().leases_lost == 1).await;
        assert_eq!((a.partitions(), bus_a.stats().folds), (vec![], 0));
        row_with(&bus_a, &db("a", 1), [1, 0, 0, 0]).await;
        a.shutdown().await.unwrap();
    });
}

/// A node that cannot send heartbeats for as long as the expiry gives up by itself, even if no other takes over.
#[tokio::test(start_paused = true)]
async fn a_node_that_cannot_beat_gives_everything_up() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let fails = |attempt: &Attempt| {
        writes(attempt, NODES).then_some(CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT))
    };
    faults.plan_commits(fails);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(shares(&[&notifier]), [64]);
    tokio::time::sleep(INTERVAL * 2).await;
    assert_eq!(shares(&[&notifier]), [0]);
    faults.heal();
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(shares(&[&notifier]), [64]);
    assert_eq!(bus.stats().leases_acquired, 128, "all were acquired again");
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
}

/// An idle node that was fenced off learns that from its heartbeat. Rings in its process from then on
/// reach the new owner.
#[tokio::test(start_paused = true)]
async fn the_wake_up_of_a_fenced_notifier_is_passed_on() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let (bus_a, bus_b) = (narrow_bus(&faults.database()).await, narrow_bus(&store).await);
    let a = joined(&bus_a).await.notifier(unpolled()).await.unwrap();
    let b = joined(&bus_b).await.notifier(unpolled()).await.unwrap();
    let fails = |attempt: &Attempt| {
        writes(attempt, NODES).then_some(CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT))
    };
    faults.plan_commits(fails);
    until("B has taken over", async || b.partitions() == [0]).await;
    record(&store, &bus_a, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&bus_b, &db("a", 1), [1, 0, 0, 0]).await;
    assert_eq!((bus_a.stats().folds, bus_b.stats().folds), (0, 1));
    assert_eq!(shares(&[&a]), [0]);
}

/// Nodes come, leave and die under load. Every event is folded exactly once.
async fn churn(mut random: fastrand::Rng) {
    let store = Database::memory();
    let producing = wide_bus(&store).await;
    let mut buses = Vec::new();
    let mut notifiers = Vec::new();
    let mut expected = vec![Counters::ZERO; 40];
    for step in 0..120 {
        if step % 8 == 0 && notifiers.len() < 4 {
            let bus = wide_bus(&store).await;
            notifiers.push(joined(&bus).await.notifier(eager()).await.unwrap());
            buses.push(bus);
        }
        match random.u8(..20) {
            0 if !notifiers.is_empty() => drop(notifiers.swap_remove(random.usize(..notifiers.len()))),
            1 if !notifiers.is_empty() => {
                let leaving = notifiers.swap_remove(random.usize(..notifiers.len()));
                leaving.shutdown().await.unwrap();
            }
            _ => {}
        }
        for _ in 0..random.usize(1..10) {
            let place = random.usize(..expected.len());
            let lanes = [0, 0, random.u64(1..4), random.u64(..2)];
            // Any process records.
            let bus = if buses.is_empty() { &producing } else { &buses[random.usize(..buses.len())] };
            record(&store, bus, &db(&format!("db{place}"), 1), lanes).await;
            expected[place] += counts(lanes);
        }
        tokio::time::sleep(Duration::from_millis(random.u64(..2_000))).await;
    }
    if notifiers.is_empty() {
        notifiers.push(joined(&producing).await.notifier(eager()).await.unwrap());
    }
    for (place, counters) in expected.iter().enumerate() {
        row_with(&producing, &db(&format!("db{place}"), 1), counters.lanes()).await;
    }
    let all: Vec<_> = notifiers.iter().collect();
    until("shares are even", async || is_even(&all, 64)).await;
    buses.push(producing);
    let mut folded = Counters::ZERO;
    for bus in &buses {
        folded += bus.stats().folded;
    }
    let mut recorded = Counters::ZERO;
    for counters in &expected {
        recorded += *counters;
    }
    assert_eq!(folded, recorded);
    assert_eq!((waiting(&store).await, rows(&buses[0]).await.len()), (0, 40));
    for notifier in notifiers {
        notifier.shutdown().await.unwrap();
    }
    assert_eq!(owned(&store).await, 0);
}

#[tokio::test(start_paused = true)]
async fn every_event_is_folded_once_while_nodes_come_and_go() {
    for _ in 0..6 {
        churn(common::dice()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn two_processes_cannot_live_under_one_id() {
    let store = Database::memory();
    let (bus_a, bus_b) = (wide_bus(&store).await, wide_bus(&store).await);
    let options = || NodeOptions { id: Some(NodeId([7; 16])), ..NodeOptions::default() };
    let a = bus_a.node(options()).await.unwrap();
    assert_eq!(a.id(), NodeId([7; 16]));
    let error = bus_b.node(options()).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { what: "node id", .. }), "{error}");

    // Once the first one has died, another can have the id, as soon as that is certain.
    drop(a);
    let began = tokio::time::Instant::now();
    let b = bus_b.node(options()).await.unwrap();
    assert!(began.elapsed() >= EXPIRY && began.elapsed() <= EXPIRY + INTERVAL, "{:?}", began.elapsed());
    // Or at once if the first one has left.
    b.shutdown().await.unwrap();
    let began = tokio::time::Instant::now();
    drop(bus_a.node(options()).await.unwrap());
    assert!(began.elapsed().is_zero());
}

#[tokio::test(start_paused = true)]
async fn one_heartbeat_serves_all_roles_of_a_node() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let node = bus.node(NodeOptions::default()).await.unwrap();
    assert!(bus.nodes().await.unwrap()[0].roles.is_empty());
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    let (dispatcher, http) = (Role::DISPATCHER, Role::HTTP);
    let listed = (node.announce(dispatcher).await.unwrap(), node.announce(http).await.unwrap());
    let twice = node.notifier(NotifierOptions::default()).await.unwrap_err();
    assert!(matches!(twice, Error::Invalid { what: "role", .. }), "{twice}");
    let [status] = &bus.nodes().await.unwrap()[..] else { panic!("there is one") };
    assert_eq!(status.roles, [Role::DISPATCHER, Role::HTTP, Role::NOTIFIER]);
    assert_eq!((status.id, status.leases["partition"]), (node.id(), 64));

    let before = (faults.counts().write_commits, status.beat);
    tokio::time::sleep(INTERVAL * 100).await;
    let written = faults.counts().write_commits - before.0;
    assert!((99..=101).contains(&written), "{written}");
    drop(listed);
    tokio::time::sleep(INTERVAL * 2).await;
    let [status] = &bus.nodes().await.unwrap()[..] else { panic!("there is one") };
    assert_eq!(status.roles, [Role::NOTIFIER]);
    assert!(status.beat >= before.1 + 99);

    // A role can be ended and started again, and the node ends what is left.
    notifier.shutdown().await.unwrap();
    assert_eq!(owned(&store).await, 0);
    assert!(bus.nodes().await.unwrap()[0].roles.is_empty());
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    let rest = node.clone();
    node.shutdown().await.unwrap();
    assert_eq!((owned(&store).await, stored(&store, NODES).await.len()), (0, 0));
    notifier.shutdown().await.unwrap();
    let late = rest.notifier(NotifierOptions::default()).await.unwrap_err();
    assert!(matches!(late, Error::Invalid { what: "node", .. }), "{late}");
}

/// Regression: the task of a dropped role was a handle on its node until it had ended. So the shutdown of the last role took the node
/// for one that goes on, and it was listed until its expiry.
#[tokio::test(start_paused = true)]
async fn a_dropped_role_does_not_keep_its_node_listed() {
    let bus = narrow_bus(&Database::memory()).await;
    let node = joined(&bus).await;
    let mut janitor = Some(node.janitor(JanitorOptions::default()).await.unwrap());
    let notifier = node.notifier(unpolled()).await.unwrap();
    drop(node);
    let mut shutdown = Box::pin(notifier.shutdown());
    let mut polls = 0;
    // It is polled again once the notifier's own task has ended.
    let ended = poll_fn(|cx| {
        polls += 1;
        drop(if polls == 2 { janitor.take() } else { None });
        shutdown.poll_unpin(cx)
    });
    ended.await.unwrap();
    assert!(janitor.is_none());
    assert!(bus.nodes().await.unwrap().is_empty());
}

/// Regression: the others heard of a dropped role with the next heartbeat only, so its work waited for up to a heartbeat longer.
#[tokio::test(start_paused = true)]
async fn a_dropped_role_is_off_the_list_at_once() {
    let bus = narrow_bus(&Database::memory()).await;
    let node = joined(&bus).await;
    let (notifier, listed) =
        (node.notifier(unpolled()).await.unwrap(), node.announce(Role::HTTP).await.unwrap());
    drop(notifier);
    drop(listed);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(bus.nodes().await.unwrap()[0].roles.is_empty());
}

/// A start that fails leaves no lease and no role behind, whether its transaction was committed or not.
#[tokio::test(start_paused = true)]
async fn a_start_that_fails_leaves_nothing_behind() {
    for fault in [CommitFault::Before, CommitFault::After] {
        let store = Database::memory();
        let faults = Faults::new(&store);
        let bus = wide_bus(&faults.database()).await;
        let mut fault = Some(fault(StoreError::TRANSACTION_TIMED_OUT));
        faults.plan_commits(move |attempt| writes(attempt, LEASES).then(|| fault.take()).flatten());
        let node = joined(&bus).await;
        let error = node.notifier(unpolled()).await.unwrap_err();
        assert_eq!(error.code(), Some(1031));
        assert_eq!((owned(&store).await, bus.nodes().await.unwrap()[0].roles.len()), (0, 0));
        let notifier = node.notifier(unpolled()).await.unwrap();
        assert_eq!(shares(&[&notifier]), [64]);
    }
}

/// An acquisition that times out and commits later leaves a lease that its owner does not know. The owner finds it.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_owned_without_knowledge_is_found() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let a = joined(&wide_bus(&store).await).await.notifier(unpolled()).await.unwrap();
    let b = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let mut fault = Some(CommitFault::After(StoreError::TRANSACTION_TIMED_OUT));
    faults.plan_commits(move |attempt| writes(attempt, LEASES).then(|| fault.take()).flatten());
    a.shutdown().await.unwrap();
    tokio::time::sleep(INTERVAL + Duration::from_secs(1)).await;
    assert_eq!(shares(&[&b]), [64]);
    assert_eq!(owned(&store).await, 64);
}

/// Stolen partitions are adjacent, so that the poll, which reads a key per run of them, stays cheap.
#[tokio::test(start_paused = true)]
async fn idle_nodes_cost_little_whatever_has_moved() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let mut notifiers = Vec::new();
    for _ in 0..4 {
        notifiers.push(joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap());
        tokio::time::sleep(INTERVAL * 3).await;
    }
    let runs: usize = notifiers
        .iter()
        .map(|notifier| 1 + notifier.partitions().windows(2).filter(|pair| pair[0] + 1 != pair[1]).count())
        .sum();
    let before = faults.counts();
    tokio::time::sleep(Duration::from_mins(5)).await;
    let after = faults.counts();
    let (reads, writes) = (after.reads - before.reads, after.write_commits - before.write_commits);
    println!("4 nodes, 64 partitions in {runs} runs: {reads} reads, {writes} writes in 300 s");
    assert!((590..=606).contains(&writes), "{writes} writes");
    assert!(runs <= 20 && reads <= 300 * runs as u64 + 4 * 940, "{reads} reads of {runs} runs");
}

/// Regression: each node assumed an even share for all: beside a node that takes one partition, another one took 4 of 8, and no node
/// folded the other three.
#[tokio::test(start_paused = true)]
async fn what_a_node_may_not_take_the_others_do() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let with = |leases_max| {
        let balance = BalanceOptions { leases_max: Some(leases_max), ..BalanceOptions::default() };
        NotifierOptions { balance, ..unpolled() }
    };
    let a = joined(&bus).await.notifier(with(10)).await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    assert_eq!(shares(&[&a]), [10], "the rest is left to others");
    let b = joined(&bus).await.notifier(with(1)).await.unwrap();
    let c = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    assert_eq!(shares(&[&a, &b, &c]), [10, 1, 53]);
    let d = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    let mut rest = shares(&[&c, &d]);
    rest.sort_unstable();
    assert_eq!((shares(&[&a, &b]), rest), (vec![10, 1], vec![26, 27]));
}

/// Each node publishes how long others have to wait for it. Regression: each node judged all others by its own expiry, and took a node
/// with slow heartbeats for dead.
#[tokio::test(start_paused = true)]
async fn nodes_with_different_heartbeats_live_side_by_side() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let node = |heartbeat| {
        let heartbeat = Duration::from_secs(heartbeat);
        NodeOptions { heartbeat, expiry: heartbeat * 4, ..NodeOptions::default() }
    };
    let slow = bus.node(node(60)).await.unwrap().notifier(unpolled()).await.unwrap();
    let quick = bus.node(node(1)).await.unwrap();
    let notifier = quick.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert!(is_even(&[&slow, &notifier], 64), "{:?}", shares(&[&slow, &notifier]));
    assert_eq!(bus.stats().leases_acquired, 64 + 32, "nobody was taken for dead");
    // The quick one dies: the slow one notices in the time of the quick one.
    drop((quick, notifier));
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(shares(&[&slow]), [64]);
    // The slow one dies: that takes its own time.
    let quick = bus.node(node(1)).await.unwrap().notifier(unpolled()).await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    drop(slow);
    tokio::time::sleep(Duration::from_secs(170)).await;
    assert_eq!(shares(&[&quick]), [32]);
    tokio::time::sleep(Duration::from_secs(80)).await;
    assert_eq!(shares(&[&quick]), [64]);
}

/// A node watches 8 others, whatever their number; and if many die at once, the last is found as soon as the first.
#[tokio::test(start_paused = true)]
async fn a_third_of_many_nodes_dies_at_once() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let start = (0..60).map(|_| async { joined(&bus).await.notifier(unpolled()).await });
    let mut notifiers: Vec<_> =
        futures_util::future::join_all(start).await.into_iter().map(Result::unwrap).collect();
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

/// Regression: the only surviving node removed the eight dead ones that it watched, and the next eight an expiry later, and so on.
#[tokio::test(start_paused = true)]
async fn the_only_node_that_is_left_finds_all_dead_ones_soon() {
    let bus = wide_bus(&Database::memory()).await;
    let start = (0..40).map(|_| async { joined(&bus).await.notifier(unpolled()).await });
    let mut notifiers: Vec<_> =
        futures_util::future::join_all(start).await.into_iter().map(Result::unwrap).collect();
    tokio::time::sleep(INTERVAL * 4).await;
    notifiers.truncate(1);
    tokio::time::sleep((EXPIRY + INTERVAL) * 2 + INTERVAL).await;
    assert_eq!(bus.nodes().await.unwrap().len(), 1);
    assert_eq!(shares(&[&notifiers[0]]), [64]);
}

/// Regression: the only surviving node removed all dead ones in one transaction, and tried that for a minute where so many reads do not
/// succeed together. Then it watched only its neighbours again. A test under random faults has found it, once in 70 runs.
#[tokio::test(start_paused = true)]
async fn dead_nodes_are_removed_although_large_transactions_fail() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let mut others = Vec::new();
    for _ in 0..80 {
        others.push(joined(&bus).await.notifier(unpolled()).await.unwrap());
    }
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

/// Regression: a node that could not remove a dead one did not inform its workers of what it had read besides, so partitions that
/// another node had given back had no owner for as long as the removal failed.
#[tokio::test(start_paused = true)]
async fn removals_that_fail_hold_up_no_worker() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let (bus_a, bus_b) = (wide_bus(&store).await, wide_bus(&faults.database()).await);
    let a = joined(&bus_a).await.notifier(unpolled()).await.unwrap();
    let b = joined(&bus_b).await.notifier(unpolled()).await.unwrap();
    until("they share", async || is_even(&[&a, &b], 64)).await;
    faults.plan_commits(|attempt| {
        let removes = attempt
            .mutations()
            .any(|mutation| matches!(mutation, Operation::Clear { key } if key.starts_with(NODES)));
        removes.then_some(CommitFault::Before(StoreError::NOT_COMMITTED))
    });
    let dead = joined(&bus_a).await;
    let id = dead.id();
    tokio::time::sleep(INTERVAL).await;
    drop(dead);
    // Node A does not see it die, so node B is left alone with it.
    tokio::time::sleep(EXPIRY.saturating_sub(INTERVAL)).await;
    a.shutdown().await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    assert!(bus_b.nodes().await.unwrap().iter().any(|node| node.id == id), "it cannot be removed");
    assert_eq!(shares(&[&b]), [64]);
}

#[tokio::test(start_paused = true)]
async fn bad_times_of_a_node_are_typed_errors() {
    let bus = wide_bus(&Database::memory()).await;
    for (heartbeat, expiry) in [(0, 10), (3, 5)] {
        let (heartbeat, expiry) = (Duration::from_secs(heartbeat), Duration::from_secs(expiry));
        let refused = bus.node(NodeOptions { heartbeat, expiry, ..NodeOptions::default() }).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{heartbeat:?} {expiry:?}");
    }
}

/// Regression: after a crash on a folder the next process waited for the dead node to expire, and delivered nothing for ten seconds.
#[tokio::test]
async fn the_nodes_of_a_folder_are_gone_when_it_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let crashed = std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let notifier = runtime.block_on(async {
            let store = Database::open_dir(&path).unwrap();
            let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
            let notifier = joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
            until("a lease", async || bus.nodes().await.unwrap().iter().any(|node| !node.leases.is_empty()))
                .await;
            notifier
        });
        // It ends without leaving.
        runtime.shutdown_timeout(Duration::from_secs(5));
        drop(notifier);
    });
    crashed.join().unwrap();
    let store = Database::open_dir(folder.path()).unwrap();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    assert_eq!(bus.nodes().await.unwrap(), []);
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let again = Bus::open(&store, BusOptions::default()).await.unwrap();
    assert_eq!(again.nodes().await.unwrap().len(), 1, "the second one of a process removes nobody");
    node.shutdown().await.unwrap();
}

/// Regression: a claim that was committed although it had timed out was taken for that of another process: for a whole expiry the node
/// had a row and took no work.
#[tokio::test(start_paused = true)]
async fn a_node_knows_its_own_claim_again() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let fails = |attempt: &Attempt| {
        writes(attempt, NODES).then_some(CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT))
    };
    faults.plan_commits(fails);
    tokio::time::sleep(EXPIRY + INTERVAL * 2).await;
    assert_eq!(shares(&[&notifier]), [0]);
    let mut once = Some(CommitFault::After(StoreError::TRANSACTION_TIMED_OUT));
    faults.plan_commits(move |attempt| writes(attempt, NODES).then(|| once.take()).flatten());
    tokio::time::sleep(INTERVAL * 2).await;
    assert_eq!(shares(&[&notifier]), [64]);
    notifier.shutdown().await.unwrap();
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
