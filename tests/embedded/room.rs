//! A folder on a small disk: how much room it needs, and what happens when there is not enough.

use std::{
    collections::BTreeMap,
    sync::{Arc, mpsc},
};

use crate::disk::{DiskFault, DiskOperation, SimulatedDisk};
use notibus::{
    Result,
    store::{Isolation, KeyRange, RangeRead, Store, StoreError, Transaction},
};

/// The length of the journals at which a snapshot is written.
const JOURNAL_LEN: u64 = 20_000;

/// The number and the length of the rows that are overwritten again and again.
const ROWS: usize = 100;
const ROW_LEN: usize = 1_000;

/// The size of the rows in a snapshot, with what each record adds.
const ROWS_LEN: usize = ROWS * (ROW_LEN + 16) + 500;

/// The room that docs/limits.md promises to be enough: four times the rows, and the largest group of commits, which is one commit here.
const ROOM: usize = 4 * ROWS_LEN + 2 * ROW_LEN;

async fn overwrite(store: &Store, number: usize) -> Result<()> {
    store
        .run(async |tx: Transaction| {
            let value = [&number.to_be_bytes()[..], &[7; ROW_LEN - 8]].concat();
            tx.set(&(number % ROWS).to_be_bytes(), &value);
            Ok(())
        })
        .await
}

async fn rows(store: &Store) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let tx = store.begin();
    let all = RangeRead::new(KeyRange::prefix("")).limit(100_000).target_bytes(usize::MAX);
    let page = tx.get_range(&all, Isolation::Snapshot).await.unwrap();
    page.rows.iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

/// Asserts that a commit failed for lack of room, and did not happen.
fn had_no_room(result: Result<()>) {
    let error = result.unwrap_err();
    assert_eq!(error.code(), Some(StoreError::NO_ROOM.code()), "{error}");
    assert!(!error.is_maybe_committed() && !error.is_retryable(), "{error}");
}

/// Bug: journals grew for as long as snapshots failed or were being written, so the size of a folder had no limit, and the room that it
/// needs was not documented. Fix: commits wait for an overdue snapshot.
#[tokio::test]
async fn a_folder_needs_four_times_its_rows() {
    let disk = SimulatedDisk::new(4_096);
    let db = disk.open_small(JOURNAL_LEN).unwrap();
    disk.resize(Some(ROOM));
    // Most attempts to write a snapshot fail, so that the journals reach their maximum length, and commits have to wait.
    let mut attempts = 0;
    disk.plan(move |operation| match operation {
        DiskOperation::Open(name) if name.starts_with("snapshot-") => {
            attempts += 1;
            (attempts % 16 != 0).then_some(DiskFault::Fails(DiskFault::TOO_MANY_FILES))
        }
        _ => None,
    });
    let mut most = 0;
    for number in 0..20 * ROWS {
        let mut refused = 0;
        while let Err(error) = overwrite(&db, number).await {
            refused += 1;
            assert!(error.code() == Some(StoreError::NO_ROOM.code()) && refused < 16, "{number}: {error}");
        }
        most = most.max(disk.used());
    }
    assert!(most > 5 * ROWS_LEN / 2 && db.shortage().is_none(), "{most} of {ROOM}");
    assert_eq!(rows(&disk.copied().open().unwrap()).await, rows(&db).await);
}

/// Bug: a snapshot filled the disk, so the store and its next three openings failed. Fix: a commit without room fails as one that did not
/// happen, an opening needs no room, and everything works again once there is room.
#[tokio::test]
async fn no_room_ends_nothing() {
    let disk = SimulatedDisk::new(4_096);
    let db = disk.open_small(JOURNAL_LEN).unwrap();
    for number in 0..ROWS {
        overwrite(&db, number).await.unwrap();
    }
    // This is not enough for a second snapshot in addition to the current one and the journals.
    disk.resize(Some(2 * ROWS_LEN));
    let mut number = ROWS;
    while overwrite(&db, number).await.is_ok() {
        number += 1;
        assert!(number < 20 * ROWS, "nothing limits it");
    }
    let expected = rows(&db).await;
    // Repeat the attempt, as in an hour without room.
    let files = disk.names().len();
    for _ in 0..3_600 {
        had_no_room(overwrite(&db, number).await);
    }
    assert!(disk.names().len() <= files + 1, "{:?}", disk.names());
    assert!(db.failure().is_none(), "it has not failed");
    assert_eq!(db.shortage().unwrap().code(), Some(StoreError::NO_ROOM.code()));
    assert_eq!(rows(&db).await, expected, "reading goes on");

    // A process that is started on this disk finds all rows, and works in the same way.
    for size in [Some(disk.used()), Some(2 * ROWS_LEN)] {
        let other = disk.copied();
        other.resize(size);
        for _ in 0..3 {
            let db = other.open_small(JOURNAL_LEN).unwrap();
            assert_eq!(rows(&db).await, expected);
            had_no_room(overwrite(&db, number).await);
        }
        other.resize(None);
        let db = other.open_small(JOURNAL_LEN).unwrap();
        overwrite(&db, number).await.unwrap();
    }
    disk.resize(Some(ROOM));
    for number in number..number + 5 * ROWS {
        overwrite(&db, number).await.unwrap_or_else(|error| panic!("{number}: {error}"));
    }
    assert!(db.shortage().is_none(), "it goes on");
    assert_eq!(rows(&disk.copied().open().unwrap()).await, rows(&db).await);
}

/// If snapshots failed in one process, the next opening writes the overdue snapshot before any further commits.
#[tokio::test]
async fn an_opening_writes_an_overdue_snapshot_first() {
    let disk = SimulatedDisk::new(4_096);
    let db = disk.open_small(JOURNAL_LEN).unwrap();
    let is_snapshot = |name: &str| name.starts_with("snapshot-");
    disk.plan(move |operation| match operation {
        DiskOperation::Open(name) if is_snapshot(name) => Some(DiskFault::Fails(DiskFault::TOO_MANY_FILES)),
        _ => None,
    });
    let mut number = 0;
    while overwrite(&db, number).await.is_ok() {
        number += 1;
    }
    let (expected, before) = (rows(&db).await, disk.used());
    let other = disk.copied();
    let opened = other.open_small(JOURNAL_LEN).unwrap();
    assert_eq!(rows(&opened).await, expected);
    assert!(other.used() < before, "{} of {before}", other.used());
    assert_eq!(other.names().iter().filter(|name| name.starts_with("journal-")).count(), 1);
}

/// If the store has its own threads, commits wait for a while before they fail.
#[tokio::test]
async fn commits_wait_and_then_fail_beside_threads() {
    let disk = SimulatedDisk::new(4_096);
    let db = disk.open_with_threads(JOURNAL_LEN).unwrap();
    for number in 0..ROWS {
        overwrite(&db, number).await.unwrap();
    }
    disk.resize(Some(disk.used() + ROWS_LEN / 2));
    let mut number = ROWS;
    let refused = loop {
        match overwrite(&db, number).await {
            Ok(()) => number += 1,
            refused => break refused,
        }
        assert!(number < 20 * ROWS, "nothing limits it");
    };
    had_no_room(refused);
    disk.resize(None);
    overwrite(&db, number).await.unwrap();
    assert!(db.failure().is_none() && db.shortage().is_none());
}

/// Bug: a group had a limit only on commits, so the bytes of up to 4,096 commits were held, and written at once. Fix: it also has a limit
/// on bytes.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_commits_has_a_bound_in_bytes() {
    let disk = SimulatedDisk::new(4_096);
    let db = disk.open().unwrap();
    let (begins, reached) = mpsc::channel();
    let (goes, go) = mpsc::channel::<()>();
    let (lens, written) = mpsc::channel();
    let mut is_first = true;
    disk.plan(move |operation| {
        match operation {
            DiskOperation::Sync(_) if std::mem::take(&mut is_first) => {
                begins.send(()).unwrap();
                go.recv().unwrap();
            }
            DiskOperation::Write(_, len) => lens.send(*len).unwrap(),
            _ => {}
        }
        None
    });
    let db = Arc::new(db);
    let commit = |number: usize, len: usize| {
        let db = Arc::clone(&db);
        tokio::spawn(async move {
            let tx = db.begin();
            for part in 0..len / 50_000 {
                tx.set(&[number.to_be_bytes(), part.to_be_bytes()].concat(), &vec![7; 50_000]);
            }
            tx.commit().await.map(drop)
        })
    };
    let first = commit(0, 50_000);
    tokio::task::block_in_place(|| reached.recv().unwrap());
    // All of these wait in the queue.
    let waiting: Vec<_> = (1..30).map(|number| commit(number, 1_000_000)).collect();
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    goes.send(()).unwrap();
    first.await.unwrap().unwrap();
    for commit in waiting {
        commit.await.unwrap().unwrap();
    }
    let most = written.try_iter().max().unwrap();
    assert!((1_000_000..=(4 << 20) + 1_100_000).contains(&most), "a group of {most} bytes");
}

/// Regression: a store that had no room to note its opening, but room when it was closed, noted the close with the version of that opening,
/// which the journal did not have, so the next opening reported damage.
#[tokio::test]
async fn a_close_after_an_opening_without_room_is_no_damage() {
    let disk = SimulatedDisk::new(4_096);
    let db = disk.open().unwrap();
    overwrite(&db, 1).await.unwrap();
    let expected = rows(&db).await;
    drop(db);
    // The opening cuts off the mark at the end of the journal, and other data on the full disk takes that room.
    let mut is_cut = false;
    disk.plan(move |operation| {
        is_cut |= matches!(operation, DiskOperation::Cut(_));
        (is_cut && matches!(operation, DiskOperation::Write(..))).then_some(DiskFault::Fails(DiskFault::FULL))
    });
    let db = disk.open().unwrap();
    assert_eq!(rows(&db).await, expected);
    // The operator makes room, and the store is closed before its next commit.
    disk.mend();
    drop(db);
    assert_eq!(rows(&disk.open().unwrap()).await, expected);
}
