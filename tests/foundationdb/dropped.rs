//! Operations that are dropped, cancelled or reset while the cluster is still working on them. Nothing
//! crashes, nothing hangs, and the transaction can be used again.

use std::{sync::Arc, time::Duration};

use futures_util::{FutureExt, future::join_all};
use notibus::store::{AtomicOp, Isolation, KeyRange, RangeRead, Store, StoreError, Transaction};

use crate::{common::within, fixture};

/// Polls `future` once and drops it.
fn give_up<T>(future: impl Future<Output = T>) {
    drop(future.now_or_never());
}

/// Opens a store, and writes a few hundred rows below a new prefix. Returns the store, the prefix and the range of the rows.
async fn filled(name: &str) -> (Store, Vec<u8>, RangeRead) {
    let store = fixture::open(fixture::shared()).await;
    let prefix = fixture::prefix(name);
    store
        .run(async |tx| {
            for n in 0..500_u32 {
                tx.set(&[&prefix[..], &n.to_be_bytes()].concat(), &[7; 1_000]);
            }
            Ok(())
        })
        .await
        .unwrap();
    let read = RangeRead::new(KeyRange::prefix(prefix.clone()));
    (store, prefix, read)
}

/// Begins one operation of each kind and drops it.
fn begin_everything(tx: &Transaction, prefix: &[u8], read: &RangeRead) {
    give_up(tx.read_version());
    give_up(tx.get(prefix, Isolation::Serializable));
    give_up(tx.get_range(read, Isolation::Serializable));
    give_up(tx.watch(prefix));
    give_up(tx.approximate_size());
}

/// Reads, watches and size queries that are dropped disturb nothing.
pub(crate) async fn dropped_reads_disturb_nothing() {
    let (store, prefix, read) = filled("dropped").await;
    for n in 0..50 {
        let tx = store.begin();
        begin_everything(&tx, &prefix, &read);
        match n % 4 {
            0 => assert_eq!(tx.get_range(&read, Isolation::Snapshot).await.unwrap().rows.len(), 500),
            1 => tx.reset(),
            2 => tx.cancel(),
            _ => drop(tx),
        }
    }
    assert!(store.begin().get(&prefix, Isolation::Snapshot).await.unwrap().is_none());
}

/// A dropped commit may or may not take place, and its transaction cannot be used until it is reset.
pub(crate) async fn a_dropped_commit_happens_or_not() {
    let (store, prefix, _) = filled("commits").await;
    let key = [&prefix[..], b"count"].concat();
    let tx = store.begin();
    for n in 0..100 {
        tx.atomic(AtomicOp::Add, &key, &1_u64.to_le_bytes());
        give_up(tx.commit());
        let late = tx.get(&key, Isolation::Snapshot).await;
        assert_eq!(late.unwrap_err().code(), Some(StoreError::USED_DURING_COMMIT.code()));
        if n % 2 == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tx.reset();
    }
    tx.atomic(AtomicOp::Add, &key, &1_u64.to_le_bytes());
    tx.commit().await.unwrap();
    let count = store.begin().get(&key, Isolation::Snapshot).await.unwrap().unwrap();
    let count = u64::from_le_bytes(count[..].try_into().unwrap());
    assert!((1..=101).contains(&count), "{count}");
}

/// Pending reads of other tasks fail when the transaction is cancelled or reset.
pub(crate) async fn pending_reads_end_with_their_transaction() {
    let (store, prefix, read) = filled("pending").await;
    for n in 0..60 {
        let tx = store.begin();
        let readers = (0..8).map(|_| {
            let (tx, prefix, read) = (tx.clone(), prefix.clone(), read.clone());
            tokio::spawn(async move {
                let one = tx.get(&prefix, Isolation::Serializable).await.map(drop);
                let many = tx.get_range(&read, Isolation::Serializable).await.map(drop);
                [one, many]
            })
        });
        let readers: Vec<_> = readers.collect();
        if n % 3 > 0 {
            tokio::time::sleep(Duration::from_micros(100 * n)).await;
        }
        if n % 2 == 0 {
            tx.cancel();
        } else {
            tx.reset();
        }
        for results in within("the readers", join_all(readers)).await {
            for error in results.unwrap().into_iter().filter_map(Result::err) {
                assert_eq!(error.code(), Some(StoreError::TRANSACTION_CANCELLED.code()), "{error}");
            }
        }
        tx.reset();
        tx.set(&prefix, b"v");
        tx.clear(&prefix);
        tx.commit().await.unwrap();
    }
}

/// Many tasks use one transaction at once, and some commit, reset and cancel it.
pub(crate) async fn a_transaction_bears_any_disorder() {
    let (store, prefix, read) = filled("disorder").await;
    for _ in 0..20 {
        let tx = Arc::new(store.begin());
        let tasks = (0..12).map(|task| {
            let (tx, prefix, read) = (Arc::clone(&tx), prefix.clone(), read.clone());
            tokio::spawn(async move {
                for _ in 0..5 {
                    // Any result is allowed.
                    match (task + fastrand::u32(..3)) % 12 {
                        0 => tx.reset(),
                        1 => tx.cancel(),
                        2 | 3 => drop(tx.commit().await),
                        4 => give_up(tx.commit()),
                        5 => drop(tx.watch(&prefix).await),
                        6 => drop(tx.conflicting_ranges().await),
                        7 => tx.clear_range(&KeyRange::new(&b"b"[..], &b"a"[..])),
                        8 => drop(tx.read_version().await),
                        9 => tx.set(&prefix, b"v"),
                        _ => drop(tx.get_range(&read, Isolation::Serializable).await),
                    }
                }
            })
        });
        for task in within("all tasks", join_all(tasks)).await {
            task.unwrap();
        }
        tx.reset();
        tx.get(&prefix, Isolation::Snapshot).await.unwrap();
    }
}

/// A dropped run leaves nothing behind that could disturb the next one.
pub(crate) async fn a_dropped_run_disturbs_nothing() {
    let (store, prefix, read) = filled("runs").await;
    for n in 0..100 {
        let run = store.run(async |tx| {
            tx.get_range(&read, Isolation::Serializable).await?;
            tx.set(&prefix, &[n]);
            if n % 3 == 0 { Err(StoreError::NOT_COMMITTED.into()) } else { Ok(()) }
        });
        // The run may or may not complete in this time.
        let _ = tokio::time::timeout(Duration::from_micros(150 * u64::from(n)), run).await;
    }
    store.run(async |tx| tx.get(&prefix, Isolation::Serializable).await).await.unwrap();
}
