//! Nodes with many roles.

use notibus::{
    Bus, BusOptions, NodeOptions,
    node::Role,
    store::{Database, testing::Faults},
};

use crate::common::until;

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
