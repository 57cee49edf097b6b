//! The roles of a node: how they start, are dropped, and end with the node.

use std::{future::poll_fn, time::Duration};

use futures_util::FutureExt;
use notibus::{
    Error, JanitorOptions, NodeOptions, NotifierOptions,
    node::Role,
    store::{
        Store, StoreError,
        testing::{CommitFault, Faults, Gate, Operation},
    },
};

use super::fixture::{INTERVAL, LEASES, of_nodes, owned, shares, writes};
use crate::common::{joined, narrow_bus, unpolled, wide_bus};

/// With more nodes than partitions some nodes have nothing to do, and take over when others leave.
#[tokio::test(start_paused = true)]
async fn a_shutdown_frees_everything_at_once() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let a = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let b = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(shares(&[&a, &b]), [1, 0]);
    a.shutdown().await.unwrap();
    assert_eq!((owned(&store).await, of_nodes(&store).await.len()), (0, 3), "a row, and a role twice");
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(shares(&[&b]), [1]);
    b.shutdown().await.unwrap();
    assert_eq!((owned(&store).await, of_nodes(&store).await.len()), (0, 0));
    let c = joined(&bus).await.notifier(unpolled()).await.unwrap();
    assert_eq!(shares(&[&c]), [1], "nobody has to be waited for");
}

#[tokio::test(start_paused = true)]
async fn one_heartbeat_serves_all_roles_of_a_node() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
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

    // A role can be shut down and started again, and the node ends the roles that are left.
    notifier.shutdown().await.unwrap();
    assert_eq!(owned(&store).await, 0);
    assert!(bus.nodes().await.unwrap()[0].roles.is_empty());
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    let rest = node.clone();
    node.shutdown().await.unwrap();
    assert_eq!((owned(&store).await, of_nodes(&store).await.len()), (0, 0));
    notifier.shutdown().await.unwrap();
    let late = rest.notifier(NotifierOptions::default()).await.unwrap_err();
    assert!(matches!(late, Error::Invalid { what: "node", .. }), "{late}");
}

/// A program may shut down its node first, and then roles that it still has handles to: these have nothing left to release.
#[tokio::test(start_paused = true)]
async fn a_role_ends_well_after_its_node() {
    let bus = narrow_bus(&Store::memory()).await;
    let node = joined(&bus).await;
    let notifier = node.notifier(unpolled()).await.unwrap();
    node.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
    assert!(bus.nodes().await.unwrap().is_empty());
}

/// Regression: the task of a dropped role kept a handle to its node until the task had ended, so the shutdown of the last role assumed that
/// the node was still in use, and the node remained listed until its expiry.
#[tokio::test(start_paused = true)]
async fn a_dropped_role_does_not_keep_its_node_listed() {
    let bus = narrow_bus(&Store::memory()).await;
    let node = joined(&bus).await;
    let mut janitor = Some(node.janitor(JanitorOptions::default()).await.unwrap());
    let notifier = node.notifier(unpolled()).await.unwrap();
    drop(node);
    let mut shutdown = Box::pin(notifier.shutdown());
    let mut polls = 0;
    // The shutdown is polled again once the notifier's own task has ended.
    let ended = poll_fn(|cx| {
        polls += 1;
        drop(if polls == 2 { janitor.take() } else { None });
        shutdown.poll_unpin(cx)
    });
    ended.await.unwrap();
    assert!(janitor.is_none());
    assert!(bus.nodes().await.unwrap().is_empty());
}

/// Regression: a node published a dropped role only with its next heartbeat, so the role's work waited up to a heartbeat longer.
#[tokio::test(start_paused = true)]
async fn a_dropped_role_is_off_the_list_at_once() {
    let bus = narrow_bus(&Store::memory()).await;
    let node = joined(&bus).await;
    let (notifier, listed) =
        (node.notifier(unpolled()).await.unwrap(), node.announce(Role::HTTP).await.unwrap());
    drop(notifier);
    drop(listed);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(bus.nodes().await.unwrap()[0].roles.is_empty());
}

/// Regression: a node kept the role of a dropped notifier until its aborted tasks had ended, so it refused to start the role again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_is_dropped_or_ends_can_be_started_again_at_once() {
    let bus = wide_bus(&Store::memory()).await;
    let node = joined(&bus).await;
    for _ in 0..20 {
        drop(node.notifier(unpolled()).await.unwrap());
        let notifier = node.notifier(unpolled()).await.unwrap();
        assert_eq!(shares(&[&notifier]), [64]);
        let (ended, again) = tokio::join!(notifier.shutdown(), node.notifier(unpolled()));
        ended.unwrap();
        again.unwrap().shutdown().await.unwrap();
    }
}

/// A failed start leaves no lease and no role behind, whether or not its transaction was committed.
#[tokio::test(start_paused = true)]
async fn a_start_that_fails_leaves_nothing_behind() {
    for fault in [CommitFault::Before, CommitFault::After] {
        let store = Store::memory();
        let faults = Faults::new(&store);
        let bus = wide_bus(&faults.store()).await;
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

/// Each step of a shutdown waits for the store for at most 10 s. Regression: the shutdown of a node did not notify a role whose start hung,
/// so it waited for the start without a time limit.
#[tokio::test(start_paused = true)]
async fn a_node_leaves_although_the_start_of_a_role_hangs() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
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
