//! `ready` is derived from facts, and says which part of a bus does not work; here on folders. `tests/foundationdb` has the same on a
//! cluster.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;
mod parts;

use std::time::Duration;

use notibus::{
    Bus, BusOptions, Roles,
    store::{
        AtomicOp, Database, StoreError,
        testing::{CommitFault, DiskFault, DiskOperation, Faults, Gate, SimulatedDisk},
    },
};
use parts::{Asked, SOON, a_dead_notifier_is_named, a_dead_tail_is_named};

const PREFIX: &[u8] = b"notibus";

#[tokio::test]
async fn ready_names_a_dead_notifier() {
    let folder = tempfile::tempdir().unwrap();
    a_dead_notifier_is_named(&Database::open_dir(folder.path()).unwrap(), PREFIX).await;
}

#[tokio::test]
async fn ready_names_a_dead_tail() {
    let folder = tempfile::tempdir().unwrap();
    a_dead_tail_is_named(&Database::open_dir(folder.path()).unwrap(), PREFIX).await;
}

#[tokio::test]
async fn ready_names_a_store_whose_disk_has_failed() {
    let disk = SimulatedDisk::new(4_096);
    let asked = Asked::start(&disk.open().unwrap(), PREFIX, Roles::default()).await;
    asked.until_ready().await;
    // The next heartbeat finds it.
    let is_sync = |operation: &DiskOperation| matches!(operation, DiskOperation::Sync(_));
    disk.plan(move |operation| is_sync(operation).then_some(DiskFault::Fails(DiskFault::IO)));
    asked.names("store", SOON).await;
}

#[tokio::test]
async fn ready_names_a_store_that_does_not_answer() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::new(&Database::open_dir(folder.path()).unwrap());
    let asked = Asked::start(&faults.database(), PREFIX, Roles::default()).await;
    asked.until_ready().await;
    faults.plan_reads(|_| Some(StoreError::TRANSACTION_TIMED_OUT));
    asked.names("store", SOON).await;
    faults.heal();
    asked.until_ready().await;
    asked.end().await;
}

/// A fold that hangs fails nowhere, and its notifier lives and owns all partitions: only the age of the events shows it.
#[tokio::test(start_paused = true)]
async fn ready_names_a_notifier_that_hangs() {
    let faults = Faults::new(&Database::memory());
    let asked = Asked::start(&faults.database(), PREFIX, Roles::default()).await;
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

/// What is damaged is named by its key.
#[tokio::test(start_paused = true)]
async fn ready_names_the_key_of_damage() {
    let store = Database::memory();
    let asked = Asked::start(&store, PREFIX, Roles::default()).await;
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
