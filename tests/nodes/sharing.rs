//! How nodes divide the partitions, alone, together, and while nodes join and leave.

use std::time::Duration;

use notibus::{
    Bus, BusOptions, NodeOptions, NotifierOptions,
    event::Counters,
    node::BalanceOptions,
    store::{
        Store, StoreError, Transaction,
        testing::{CommitFault, Faults},
    },
};

use super::fixture::{INTERVAL, LEASES, forget_nodes, is_even, owned, shares, started_at_once, writes};
use crate::{
    common,
    common::{counts, db, eager, joined, record, row_with, rows, unpolled, until, waiting, wide_bus},
};

#[tokio::test(start_paused = true)]
async fn a_node_alone_has_all_partitions_at_once() {
    let store = Store::memory();
    let options = BusOptions::default().partitions(2_500);
    let bus = Bus::open(&store, options).await.unwrap();
    let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    assert!(is_even(&[&notifier], 2_500));
    assert_eq!(bus.stats().leases_acquired, 2_500);
}

#[tokio::test(start_paused = true)]
async fn a_new_node_has_its_share_after_the_balance_interval() {
    let store = Store::memory();
    let buses = [wide_bus(&store).await, wide_bus(&store).await, wide_bus(&store).await];
    let a = joined(&buses[0]).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    let b = joined(&buses[1]).await.notifier(unpolled()).await.unwrap();
    // The owner polls within the interval, and the new node an eighth of the interval later.
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
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let notifiers = started_at_once(&bus, 10).await;
    tokio::time::sleep(INTERVAL * 3).await;
    let all: Vec<_> = notifiers.iter().collect();
    assert!(is_even(&all, 64), "{:?}", shares(&all));
}

/// Regression: each node assumed equal shares for all nodes, so when one node could take only one partition, the other took 4 of 8, and no
/// node folded the other three.
#[tokio::test(start_paused = true)]
async fn what_a_node_may_not_take_the_others_do() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let with = |leases_max| {
        let balance = BalanceOptions::default().leases_max(Some(leases_max));
        unpolled().balance(balance)
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

/// Durations that mean "never" work everywhere.
#[tokio::test(start_paused = true)]
async fn a_node_that_never_beats_and_never_takes_over_works() {
    let bus = wide_bus(&Store::memory()).await;
    let never = NodeOptions::default().heartbeat(Duration::MAX).expiry(Duration::MAX);
    let balance = BalanceOptions::default().handover(Duration::MAX).interval(Duration::MAX);
    let node = bus.node(never).await.unwrap();
    let a = node.notifier(unpolled().balance(balance)).await.unwrap();
    let b = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert_eq!(shares(&[&a, &b]), [32, 32]);
    a.shutdown().await.unwrap();
    node.shutdown().await.unwrap();
}

/// Each node publishes its expiry. Regression: each node judged all others by its own expiry, so it presumed nodes with slow heartbeats
/// dead.
#[tokio::test(start_paused = true)]
async fn nodes_with_different_heartbeats_live_side_by_side() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let node = |heartbeat| {
        let heartbeat = Duration::from_secs(heartbeat);
        NodeOptions::default().heartbeat(heartbeat).expiry(heartbeat * 4)
    };
    let slow = bus.node(node(60)).await.unwrap().notifier(unpolled()).await.unwrap();
    let quick = bus.node(node(1)).await.unwrap();
    let notifier = quick.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert!(is_even(&[&slow, &notifier], 64), "{:?}", shares(&[&slow, &notifier]));
    assert_eq!(bus.stats().leases_acquired, 64 + 32, "nobody was taken for dead");
    // The quick one dies: the slow one notices after the quick one's expiry.
    drop((quick, notifier));
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(shares(&[&slow]), [64]);
    // The slow one dies: the quick one notices after the slow one's expiry.
    let quick = bus.node(node(1)).await.unwrap().notifier(unpolled()).await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    drop(slow);
    tokio::time::sleep(Duration::from_secs(170)).await;
    assert_eq!(shares(&[&quick]), [32]);
    tokio::time::sleep(Duration::from_secs(80)).await;
    assert_eq!(shares(&[&quick]), [64]);
}

/// Partitions that have moved remain adjacent, so the poll, which reads one key per run of partitions, remains cheap.
#[tokio::test(start_paused = true)]
async fn idle_nodes_cost_little_whatever_has_moved() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
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

/// Makes some acquisitions and releases have unknown results from now on.
fn fail_at_random(faults: &Faults, mut dice: fastrand::Rng) {
    faults.plan_commits(move |attempt| match dice.u8(..20) {
        0 if writes(attempt, LEASES) => Some(CommitFault::Before(StoreError::COMMIT_UNKNOWN_RESULT)),
        1 if writes(attempt, LEASES) => Some(CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT)),
        2 if writes(attempt, LEASES) => Some(CommitFault::After(StoreError::TRANSACTION_TIMED_OUT)),
        _ => None,
    });
}

/// Nodes join, leave, die and are presumed dead under load, and their commits on leases may have unknown results. Every event is folded
/// exactly once, and in the end the live nodes share all partitions.
async fn churn(mut random: fastrand::Rng) {
    let store = Store::memory();
    let producing = wide_bus(&store).await;
    let mut buses = Vec::new();
    let (mut notifiers, mut troubled) = (Vec::new(), Vec::<Faults>::new());
    let mut expected = vec![Counters::ZERO; 40];
    for step in 0..120 {
        if step % 8 == 0 && notifiers.len() < 4 {
            let faults = Faults::new(&store);
            let bus = wide_bus(&faults.store()).await;
            notifiers.push(joined(&bus).await.notifier(eager()).await.unwrap());
            buses.push(bus);
            troubled.push(faults.clone());
            fail_at_random(&faults, fastrand::Rng::with_seed(random.u64(..)));
        }
        match random.u8(..20) {
            0 if !notifiers.is_empty() => drop(notifiers.swap_remove(random.usize(..notifiers.len()))),
            1 if !notifiers.is_empty() => {
                let leaving = notifiers.swap_remove(random.usize(..notifiers.len()));
                // The node's last commit may have an unknown result, too.
                let _ = leaving.shutdown().await;
            }
            // All nodes are presumed dead.
            2 => {
                let forget = async |tx: Transaction| {
                    forget_nodes(&tx);
                    Ok(())
                };
                store.run(forget).await.unwrap();
            }
            _ => {}
        }
        for _ in 0..random.usize(1..10) {
            let place = random.usize(..expected.len());
            let lanes = [0, 0, random.u64(1..4), random.u64(..2)];
            // Any process may record the events.
            let bus = if buses.is_empty() { &producing } else { &buses[random.usize(..buses.len())] };
            record(&store, bus, &db(&format!("db{place}"), 1), lanes).await;
            expected[place] += counts(lanes);
        }
        tokio::time::sleep(Duration::from_millis(random.u64(..2_000))).await;
    }
    for faults in &troubled {
        faults.heal();
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
