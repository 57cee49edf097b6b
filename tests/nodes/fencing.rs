//! Nodes that were presumed dead, or whose claims were late: what they may still do, and how they rejoin.

use std::time::Duration;

use notibus::{
    Error, NodeOptions,
    node::{NodeId, Role},
    store::{
        KeyRange, Store, StoreError, Transaction,
        testing::{Attempt, CommitFault, Faults, Gate},
    },
};

use super::fixture::{
    EXPIRY, INTERVAL, LEASES, NODES, forget_nodes, is_even, is_fold, of_nodes, owned, shares, writes,
};
use crate::common::{
    counts, db, joined, narrow_bus, record, row_with, set, stored, unpolled, until, wide_bus, within,
};

/// Node A hangs in all its commits while node B takes over. A can no longer commit its pending work, and then rejoins.
#[tokio::test(start_paused = true)]
async fn a_zombie_cannot_commit_and_joins_again() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus_a = wide_bus(&faults.store()).await;
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
    assert_eq!((owned(&store).await, of_nodes(&store).await.len()), (0, 0));
}

/// A process is stopped in the middle of a commit, and continues after another one has taken over. Its runtime does not run in between, and
/// its heartbeat is not due, so it cannot know about the takeover. Only the lease makes the commit fail.
#[test]
fn a_paused_process_wakes_as_a_zombie_and_is_fenced_off() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (paused, awake) = (runtime(), runtime());
    let store = Store::memory();
    let faults = Faults::new(&store);
    let gate = Gate::default();
    let (bus_a, a) = paused.block_on(async {
        let bus = narrow_bus(&faults.store()).await;
        let (heartbeat, expiry) = (Duration::from_hours(1), Duration::from_hours(2));
        let rarely = NodeOptions::default().heartbeat(heartbeat).expiry(expiry);
        let notifier = bus.node(rarely).await.unwrap().notifier(unpolled()).await.unwrap();
        let held = gate.clone();
        faults.plan_commits(move |attempt| is_fold(attempt).then(|| CommitFault::Hold(held.clone())));
        record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
        within("A to fold", gate.reached()).await;
        (bus, notifier)
    });
    awake.block_on(async {
        let bus = narrow_bus(&store).await;
        // Another node has presumed A dead.
        store
            .run(async |tx| {
                forget_nodes(&tx);
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

/// A node that cannot send heartbeats for its expiry gives up all work by itself, even if no other node takes over.
#[tokio::test(start_paused = true)]
async fn a_node_that_cannot_beat_gives_everything_up() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
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

/// An idle node that was fenced off learns this from its heartbeat. From then on, rings in its process reach the new owner.
#[tokio::test(start_paused = true)]
async fn the_wake_up_of_a_fenced_notifier_is_passed_on() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (bus_a, bus_b) = (narrow_bus(&faults.store()).await, narrow_bus(&store).await);
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

#[tokio::test(start_paused = true)]
async fn two_processes_cannot_live_under_one_id() {
    let store = Store::memory();
    let (bus_a, bus_b) = (wide_bus(&store).await, wide_bus(&store).await);
    let options = || NodeOptions::default().id(Some(NodeId([7; 16])));
    let a = bus_a.node(options()).await.unwrap();
    assert_eq!(a.id(), NodeId([7; 16]));
    let error = bus_b.node(options()).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { what: "node id", .. }), "{error}");

    // Another process can have the id as soon as the death of the first one is certain.
    drop(a);
    let began = tokio::time::Instant::now();
    let b = bus_b.node(options()).await.unwrap();
    assert!(began.elapsed() >= EXPIRY && began.elapsed() <= EXPIRY + INTERVAL, "{:?}", began.elapsed());
    // If the first one leaves, another can have the id at once.
    b.shutdown().await.unwrap();
    let began = tokio::time::Instant::now();
    drop(bus_a.node(options()).await.unwrap());
    assert!(began.elapsed().is_zero());
}

/// An acquisition that times out but is committed leaves a lease that its owner does not know about. The owner finds the lease.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_owned_without_knowledge_is_found() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
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

/// Regression: a node mistook its own claim, which had timed out but was committed, for the claim of another process, so for a whole expiry
/// it had a row but took no work.
#[tokio::test(start_paused = true)]
async fn a_node_knows_its_own_claim_again() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
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

/// Regression: a node whose bus was wiped did not stop its roles, so it wrote itself into the new bus, and failed at each partition 65
/// times a second; a node whose incarnation was raised continued to write sequences of the old one.
#[tokio::test(start_paused = true)]
async fn a_node_stops_its_roles_once_its_bus_is_gone() {
    for is_wiped in [true, false] {
        let store = Store::memory();
        let bus = wide_bus(&store).await;
        let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
        if is_wiped {
            let wipe = store.run(async |tx| {
                tx.clear_range(&KeyRange::prefix(""));
                Ok(())
            });
            wipe.await.unwrap();
        } else {
            // This raises the incarnation in the configuration, like an operator who has not stopped all processes.
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

/// Another process runs under the id of a node that has dropped out. Regression: the node logged this four times a second forever, but did
/// not treat it as a failure, so a role that it entered meanwhile counted as published.
#[tokio::test(start_paused = true)]
async fn a_node_whose_id_another_process_has_enters_no_role() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let node = joined(&bus).await;
    let (key, row) = stored(&store, NODES).await[0].clone();
    let other = store.clone();
    let living = tokio::spawn(async move {
        // The first 8 bytes of a row are its beat, the next 16 the token of its process.
        for beat in 0_u64.. {
            set(&other, &key, &[&beat.to_be_bytes()[..], &[9; 16], &row[24..]].concat()).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(bus.stats().nodes_dropped_out, 1);
    let refused = node.announce(Role::HTTP).await.unwrap_err();
    assert!(matches!(refused, Error::Invalid { what: "node id", .. }), "{refused}");
    living.abort();
    tokio::time::sleep(Duration::from_mins(1)).await;
    let _role = node.announce(Role::HTTP).await.unwrap();
}

/// A node that was presumed dead because of a clock that runs too fast, and has lost some of its roles, lists all of them again.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_condemned_joins_again_with_all_roles() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let node = joined(&bus).await;
    let _role = node.announce(Role::HTTP).await.unwrap();
    let rows = stored(&store, NODES).await;
    let condemn = async |tx: Transaction| {
        forget_nodes(&tx);
        let (key, row) = &rows[0];
        tx.set(key, &[&row[..8], &[0; 16], &row[24..]].concat());
        Ok(())
    };
    store.run(condemn).await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    assert_eq!(bus.nodes().await.unwrap()[0].roles, [Role::HTTP]);
    assert_eq!(bus.stats().nodes_dropped_out, 1);
}

/// A lease that cannot be decoded is neither replaced nor guessed: everything that needs it fails with an error that names its key until it
/// is repaired.
#[tokio::test(start_paused = true)]
async fn a_damaged_lease_is_named_and_stays() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let a = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let (key, good) = stored(&store, LEASES).await[4].clone();
    set(&store, &key, b"broken").await;
    let refused = joined(&bus).await.notifier(unpolled()).await.unwrap_err();
    assert!(matches!(refused, Error::Corrupt { .. }), "{refused}");
    assert!(refused.to_string().contains(&key.escape_ascii().to_string()), "{refused}");
    tokio::time::sleep(INTERVAL * 10).await;
    assert_eq!(&stored(&store, LEASES).await[4].1[..], b"broken");
    set(&store, &key, &good).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(owned(&store).await, 64);
    a.shutdown().await.unwrap();
}
