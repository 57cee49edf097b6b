//! `ready` is derived from facts, and says which part of a bus does not work; here on folders. `tests/foundationdb` tests the same on a
//! cluster.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../disk/mod.rs"]
mod disk;
mod parts;
mod snapshot;

use std::{collections::BTreeMap, time::Duration};

use disk::{DiskFault, DiskOperation, SimulatedDisk};
use notibus::{
    Bus, BusOptions, DispatcherOptions, StartOptions,
    http::{Api, ApiOptions},
    store::{
        AtomicOp, Store, StoreError,
        testing::{CommitFault, Faults, Gate},
    },
};
use parts::{Claim, SOON, a_dead_notifier_is_named, a_dead_tail_is_named};

const PREFIX: &[u8] = b"notibus";

#[tokio::test]
async fn ready_names_a_dead_notifier() {
    let folder = tempfile::tempdir().unwrap();
    a_dead_notifier_is_named(&Store::open_dir(folder.path()).unwrap(), PREFIX).await;
}

#[tokio::test]
async fn ready_names_a_dead_tail() {
    let folder = tempfile::tempdir().unwrap();
    a_dead_tail_is_named(&Store::open_dir(folder.path()).unwrap(), PREFIX).await;
}

#[tokio::test]
async fn ready_names_a_store_whose_disk_has_failed() {
    let disk = SimulatedDisk::new(4_096);
    let asked = Claim::start(&disk.open().unwrap(), PREFIX, StartOptions::default()).await;
    asked.until_ready().await;
    // The next heartbeat finds the failure.
    let is_sync = |operation: &DiskOperation| matches!(operation, DiskOperation::Sync(_));
    disk.plan(move |operation| is_sync(operation).then_some(DiskFault::Fails(DiskFault::IO)));
    asked.names("store", SOON).await;
}

#[tokio::test]
async fn ready_names_a_store_that_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::new(&Store::open_dir(folder.path()).unwrap());
    let asked = Claim::start(&faults.store(), PREFIX, StartOptions::default()).await;
    asked.until_ready().await;
    faults.plan_reads(|_| Some(StoreError::TRANSACTION_TIMED_OUT));
    asked.names("store", SOON).await;
    faults.heal();
    asked.until_ready().await;
    asked.end().await;
}

/// The tail of a dispatcher that polls rarely does not reach the end of a quiet feed before its next poll. Regression: such a tail counted
/// as behind after 3 s, so a healthy node was not ready.
#[tokio::test(start_paused = true)]
async fn a_dispatcher_that_polls_rarely_is_ready() {
    let rarely = DispatcherOptions::default().poll_interval(Duration::from_secs(20));
    let asked = Claim::start(&Store::memory(), PREFIX, StartOptions::default().dispatcher(rarely)).await;
    asked.until_ready().await;
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let last = asked.ready().await;
        assert_eq!(last["status"], "ok", "{last}");
    }
    asked.end().await;
}

/// A fold that hangs reports no failure, and its notifier is alive and owns all partitions: only the age of the events shows it.
#[tokio::test(start_paused = true)]
async fn ready_names_a_notifier_that_hangs() {
    let faults = Faults::new(&Store::memory());
    let asked = Claim::start(&faults.store(), PREFIX, StartOptions::default()).await;
    asked.until_ready().await;
    let (gate, is_fold) = (Gate::default(), AtomicOp::CompareAndClear);
    let held = gate.clone();
    faults.plan_commits(move |attempt| attempt.applies(is_fold).then(|| CommitFault::Hold(held.clone())));
    asked.record("waits").await;
    let mut last = asked.ready().await;
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        last = asked.ready().await;
    }
    assert_eq!((&last["part"], &last["cause"]), (&"notifier".into(), &"waiting".into()), "{last}");
    faults.heal();
    gate.open();
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        last = asked.ready().await;
    }
    assert_eq!(last["status"], "ok", "{last}");
    asked.end().await;
}

/// `ready` names the key of a damaged row.
#[tokio::test(start_paused = true)]
async fn ready_names_the_key_of_damage() {
    let store = Store::memory();
    let asked = Claim::start(&store, PREFIX, StartOptions::default()).await;
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    asked.until_ready().await;
    // The first lease of a partition, the topology, and the first fold mark.
    let lease = &b"\x15\x0b\x02main\x00\x02partition\x00"[..];
    for (family, part) in [(lease, "store"), (b"\x15\x07", "store"), (b"\x15\x03", "notifier")] {
        let first = common::stored(&store, &[PREFIX, family].concat()).await.remove(0);
        common::set(&store, &first.0, b"junk").await;
        if part == "notifier" {
            for n in 0..500 {
                common::record(&store, &bus, &common::db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
            }
        }
        let mut last = asked.ready().await;
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            last = asked.ready().await;
        }
        assert_eq!(last["part"], part, "{last}");
        let reason = last["reason"].as_str().unwrap();
        assert!(reason.contains(&first.0.escape_ascii().to_string()), "{reason}");
        common::set(&store, &first.0, &first.1).await;
        tokio::time::sleep(Duration::from_mins(1)).await;
        assert_eq!(asked.ready().await["status"], "ok");
    }
    asked.end().await;
}

/// Rows that cannot be decoded stay until they are repaired, and nothing waits for them.
#[tokio::test(start_paused = true)]
async fn what_no_fold_can_decode_keeps_nobody_from_being_ready() {
    let store = Store::memory();
    let asked = Claim::start(&store, PREFIX, StartOptions::default()).await;
    common::set(&store, &[PREFIX, b"\x15\x01\x14junk"].concat(), b"junk").await;
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(asked.ready().await["status"], "ok");
    }
    asked.end().await;
}

/// Returns the gauges of `/_notibus/metrics` that are not zero and whose names begin with one of `names`.
async fn gauges(api: &Api, names: &[&str]) -> BTreeMap<String, f64> {
    let answer = parts::get(api, "/_notibus/metrics").await.1;
    let of = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        let value: f64 = value.parse().ok()?;
        (names.iter().any(|wanted| name.starts_with(wanted)) && value > 0.0).then(|| (name.to_owned(), value))
    };
    answer.lines().filter_map(of).collect()
}

/// Without a notifier the backlog ages for as long as it is observed; a node whose heartbeat stops counts as silent after its expiry.
/// Regression: only the first 100 partitions with a backlog aged, so the alert did not fire while a later one was stuck.
#[tokio::test(start_paused = true)]
async fn the_backlog_of_each_partition_ages_until_it_is_folded() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default().partitions(320)).await.unwrap();
    let create = async |tx| {
        for number in 0..2_000 {
            bus.producer().created(&tx, &common::db(&format!("db{number}"), 1));
        }
        Ok(())
    };
    store.run(create).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
    let rows = gauges(&api, &["notibus_backlog_rows"]).await;
    assert!(rows.len() == 16 && (rows.values().sum::<f64>() - 2_000.0).abs() < 0.5, "{rows:?}");
    assert!(gauges(&api, &["notibus_backlog_oldest", "notibus_nodes"]).await.is_empty());
    tokio::time::sleep(Duration::from_mins(1)).await;
    let ages = gauges(&api, &["notibus_backlog_oldest"]).await;
    assert!(ages.len() == 16 && ages.values().all(|age| *age >= 60.0), "{ages:?}");
    assert!(bus.status().await.unwrap().backlog.unwrap().oldest_ms >= 60_000);

    let running = bus.start(StartOptions::default()).await.unwrap();
    common::until("all to be folded", async || bus.is_drained().await.unwrap()).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(gauges(&api, &["notibus_backlog"]).await.is_empty());
    assert_eq!(bus.status().await.unwrap().backlog.unwrap().oldest_ms, 0);
    let nodes = gauges(&api, &["notibus_nodes"]).await;
    assert_eq!(nodes, BTreeMap::from([("notibus_nodes{state=\"living\"}".to_owned(), 1.0)]));

    drop(running);
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_mins(1)).await;
        gauges(&api, &["notibus_nodes"]).await;
    }
    let nodes = gauges(&api, &["notibus_nodes"]).await;
    assert_eq!(
        nodes,
        BTreeMap::from([("notibus_nodes{state=\"silent\"}".to_owned(), 1.0)]),
        "nobody is left to remove it"
    );
    let nodes = bus.nodes().await.unwrap();
    assert!(nodes[0].is_silent && nodes[0].silent_ms >= 120_000, "the list reads the same: {nodes:?}");
}

/// Bug: the lag of the tail was counted from the first check that found it behind, so that check returned "ok". Fix: the tail notes the
/// time of each read.
#[tokio::test(start_paused = true)]
async fn a_tail_that_has_long_been_dead_is_named_by_the_first_question() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let asked = Claim::start(&faults.store(), PREFIX, StartOptions::default()).await;
    asked.record("delivered").await;
    asked.until_ready().await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    parts::fail_tail(&faults, PREFIX);
    asked.record("not delivered").await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    let answer = asked.ready().await;
    assert_eq!(answer["part"], "dispatcher", "{answer}");
}

/// Bug: two checks, each at the start of a different handover, were counted as one handover that lasted from the first to the second. Fix:
/// the epoch of the lease tells them apart.
#[tokio::test(start_paused = true)]
async fn two_handovers_are_not_one_long_one() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
    let other = Bus::open(&store, BusOptions::default()).await.unwrap();
    let notifier = other
        .node(notibus::NodeOptions::default())
        .await
        .unwrap()
        .notifier(notibus::NotifierOptions::default())
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(parts::ready(&api).await["status"], "ok");
    let lease = common::stored(&store, b"notibus\x15\x0b\x02main\x00\x02partition\x00").await.remove(0);
    for epoch in 2_u64..4 {
        // The lease is free for a moment, as it is once its owner has released it.
        common::set(&store, &lease.0, &epoch.to_be_bytes()).await;
        let answer = parts::ready(&api).await;
        common::set(&store, &lease.0, &lease.1).await;
        assert_eq!(answer["status"], "ok", "{answer}");
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    notifier.shutdown().await.unwrap();
}

/// Bug: only the first 100 rows were read, so if none of them could be decoded, no event seemed to wait.
#[tokio::test(start_paused = true)]
async fn an_event_behind_undecodable_rows_is_seen_to_wait() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let asked = Claim::start(&faults.store(), PREFIX, StartOptions::default()).await;
    asked.until_ready().await;
    let gate = Gate::default();
    let held = gate.clone();
    faults.plan_commits(move |attempt| {
        attempt.applies(AtomicOp::CompareAndClear).then(|| CommitFault::Hold(held.clone()))
    });
    // Partition 17, before "x".
    for n in 0..120 {
        common::set(&store, format!("notibus\x15\x01\x15\x11\x02a{n:03}\0").as_bytes(), b"junk").await;
    }
    asked.record("x").await;
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        asked.ready().await;
    }
    let rows = common::stored(&store, b"notibus\x15\x01\x15\x11\x02x").await;
    assert_eq!(rows.len(), 1, "the event waits");
    let answer = asked.ready().await;
    gate.open();
    assert_eq!(answer["part"], "notifier", "the event has waited for a minute: {answer}");
}

/// Bug: the observed state of tails was kept per bus, not per dispatcher, so a live tail reset the lag of a dead one.
#[tokio::test(start_paused = true)]
async fn a_dead_tail_is_not_excused_by_that_of_another_dispatcher() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let running = bus.start(StartOptions::default()).await.unwrap();
    let lives = running.api(ApiOptions::default()).unwrap();
    let other = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let other = other.suspend();
    let dead = Api::start(&bus, &other, ApiOptions::default()).unwrap();
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(parts::ready(&lives).await["status"], "ok");
        tokio::time::sleep(Duration::from_millis(500)).await;
        parts::ready(&dead).await;
    }
    assert_eq!(parts::ready(&dead).await["part"], "dispatcher");
    assert_eq!(parts::ready(&lives).await["status"], "ok");
    running.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_damaged_row_of_the_own_node_is_named_by_its_key() {
    let store = Store::memory();
    let asked = Claim::start(&store, PREFIX, StartOptions::default()).await;
    asked.until_ready().await;
    let row = common::stored(&store, b"notibus\x15\x0e\x02main\x00\x15\x04").await.remove(0);
    common::set(&store, &row.0, b"junk").await;
    let answer = asked.ready().await;
    assert!(answer["reason"].as_str().unwrap().contains(&row.0.escape_ascii().to_string()), "{answer}");
}
