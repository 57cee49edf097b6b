//! Nodes with many roles.

use notibus::{
    Bus, BusOptions, NodeOptions,
    node::Role,
    store::{
        Database, StoreError,
        testing::{CommitFault, Faults, Operation},
    },
};

use super::fixture::{EXPIRY, INTERVAL, shares, started_at_once};
use crate::common::{joined, unpolled, until, wide_bus};

/// Bug: each change of a role wrote all roles of the node in the transaction of its beat, so that a node with thousands of consumers could
/// not start, and fell out when it stopped one. Fix: write the difference.
#[tokio::test(start_paused = true)]
async fn a_change_of_roles_costs_the_same_however_many_there_are() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = Bus::open(&faults.database(), BusOptions::default()).await.unwrap();
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let role = |n: usize| Role::new(format!("role{n}")).unwrap();
    let mutations = || faults.counts().mutations;
    let mut roles = Vec::new();
    let before = mutations();
    for n in 0..100 {
        roles.push(node.announce(role(n)).await.unwrap());
    }
    let first = mutations() - before;
    for n in 100..1_100 {
        roles.push(node.announce(role(n)).await.unwrap());
    }
    let before = mutations();
    for n in 1_100..1_200 {
        roles.push(node.announce(role(n)).await.unwrap());
    }
    let last = mutations() - before;
    assert!(last <= first + first / 10, "{first} mutations for the first hundred, {last} for the last");
    drop(roles);
    until("all are gone", async || bus.nodes().await.unwrap()[0].roles.is_empty()).await;
    node.shutdown().await.unwrap();
}

/// Bug: ten dead nodes were removed with all of their roles in one transaction, and never fewer, so that the partitions of nodes beside one
/// with very many roles had no owner. Fix: each node by itself, its roles in pages, and its row last.
#[tokio::test(start_paused = true)]
async fn a_dead_node_with_many_roles_keeps_no_other_from_going() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&store).await;
    let crowded = joined(&bus).await;
    let announce = (0..1_700).map(|n| crowded.announce(Role::new(format!("role{n}")).unwrap()));
    let roles = futures_util::future::try_join_all(announce).await.unwrap();
    let dying = started_at_once(&bus, 3).await;
    let left = joined(&wide_bus(&faults.database()).await).await.notifier(unpolled()).await.unwrap();
    until("they share", async || shares(&[&left]) == [16]).await;
    // Large transactions fail, and so does every one for the crowded node but for its first page.
    let mut pages = 0;
    faults.plan_commits(move |attempt| {
        let cleared =
            attempt.mutations().filter(|mutation| matches!(mutation, Operation::Clear { .. })).count();
        pages += usize::from(cleared > 100);
        (cleared > 1_000 || cleared > 100 && pages > 1)
            .then_some(CommitFault::Before(StoreError::TRANSACTION_TOO_OLD))
    });
    let id = crowded.id();
    drop((dying, crowded));
    drop(roles);
    tokio::time::sleep((EXPIRY + INTERVAL) * 2).await;
    assert_eq!(shares(&[&left]), [64]);
    let is_there = async || bus.nodes().await.unwrap().iter().any(|node| node.id == id);
    assert!(is_there().await, "its row is the last to go");
    faults.heal();
    tokio::time::sleep(INTERVAL * 3).await;
    assert!(!is_there().await);
}
