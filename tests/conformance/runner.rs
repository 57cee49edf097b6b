//! The retry runner: what it retries, how many times, and its result.

use std::{
    cell::{Cell, RefCell},
    time::Duration,
};

use futures_util::FutureExt;
use notibus::{
    Error, Result,
    store::{
        AtomicOp,
        Isolation::{Serializable, Snapshot},
        RetryPolicy, Store, StoreError, Transaction,
    },
};

use crate::fixture::{Fixture, fails, own_error, soon};

/// Runs a body that reads and writes "k", which another transaction always changes before the commit.
async fn always_conflicting(f: &Fixture, store: &Store, policy: &RetryPolicy) -> (Result<()>, u32) {
    let runs = Cell::new(0);
    let result = store
        .run_with(policy, async |tx| {
            runs.set(runs.get() + 1);
            tx.get(&f.key("k"), Serializable).await?;
            f.put("k", "other").await?;
            tx.set(&f.key("k"), b"mine");
            Ok(())
        })
        .await;
    (result, runs.get())
}

pub(crate) async fn a_body_is_committed_and_its_value_returned(f: &Fixture) -> Result<()> {
    let answer = f
        .store
        .run(async |tx| {
            tx.set(&f.key("k"), b"v");
            Ok(42)
        })
        .await?;
    assert_eq!(answer, 42);
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"v"[..]));
    Ok(())
}

pub(crate) async fn a_conflict_is_tried_again_on_the_new_state(f: &Fixture) -> Result<()> {
    f.put("k", "old").await?;
    let seen = RefCell::new(Vec::new());
    f.store
        .run(async |tx| {
            let value = tx.get(&f.key("k"), Serializable).await?.expect("it is set");
            let first = seen.borrow().is_empty();
            seen.borrow_mut().push(value);
            if first {
                f.put("k", "new").await?;
            }
            tx.set(&f.key("out"), b"v");
            Ok(())
        })
        .await?;
    assert_eq!(*seen.borrow(), [&b"old"[..], b"new"]);
    assert!(f.value("out").await?.is_some());
    Ok(())
}

pub(crate) async fn writes_of_failed_attempts_are_forgotten(f: &Fixture) -> Result<()> {
    let runs = Cell::new(0_u8);
    f.store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            tx.set(&f.key([b'a' + runs.get()]), b"v");
            if runs.get() < 4 {
                return Err(StoreError::NOT_COMMITTED.into());
            }
            Ok(())
        })
        .await?;
    assert_eq!(f.suffixes().await?, ["e"]);
    Ok(())
}

pub(crate) async fn the_limit_of_attempts_ends_it(f: &Fixture) -> Result<()> {
    let policy = RetryPolicy::default().attempts_max(Some(3));
    let (result, runs) = always_conflicting(f, &f.store, &policy).await;
    match result {
        Err(Error::RetriesExhausted { attempts: 3, last }) => {
            assert_eq!(last.code(), StoreError::NOT_COMMITTED.code());
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(runs, 3);
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"other"[..]));
    Ok(())
}

pub(crate) async fn the_limit_of_time_ends_it(f: &Fixture) -> Result<()> {
    let policy = RetryPolicy::default().elapsed_max(Some(Duration::from_millis(50)));
    let (result, runs) = soon(always_conflicting(f, &f.store, &policy)).await;
    assert!(matches!(result, Err(Error::RetriesExhausted { attempts, .. }) if attempts == runs));
    Ok(())
}

pub(crate) async fn a_policy_of_one_attempt_tries_once(f: &Fixture) -> Result<()> {
    let policy = RetryPolicy::default().attempts_max(Some(1)).elapsed_max(None);
    let (result, runs) = always_conflicting(f, &f.store, &policy).await;
    assert!(matches!(result, Err(Error::RetriesExhausted { attempts: 1, .. })));
    assert_eq!(runs, 1);
    Ok(())
}

pub(crate) async fn an_error_of_the_body_is_returned_at_once(f: &Fixture) -> Result<()> {
    let runs = Cell::new(0);
    let result: Result<()> = f
        .store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            tx.set(&f.key("k"), b"v");
            Err(own_error())
        })
        .await;
    assert!(matches!(result, Err(Error::Invalid { what: "body", .. })));
    assert_eq!(runs.get(), 1);
    assert_eq!(f.value("k").await?, None);
    Ok(())
}

pub(crate) async fn a_final_error_of_the_commit_is_returned_at_once(f: &Fixture) -> Result<()> {
    let runs = Cell::new(0);
    let result = f
        .store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            tx.set(&vec![b'k'; Transaction::KEY_LEN_MAX + 1], b"v");
            Ok(())
        })
        .await;
    fails(result, &StoreError::KEY_TOO_LARGE);
    assert_eq!(runs.get(), 1);
    Ok(())
}

pub(crate) async fn a_retryable_error_of_the_body_is_tried_again(f: &Fixture) -> Result<()> {
    let runs = Cell::new(0);
    f.store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            tx.add_write_conflict(&f.range("a", "b"));
            match runs.get() {
                1 => Err(StoreError::TRANSACTION_TOO_OLD.into()),
                2 => Err(StoreError::NOT_COMMITTED.into()),
                _ => Ok(()),
            }
        })
        .await?;
    assert_eq!(runs.get(), 3);
    Ok(())
}

pub(crate) async fn a_read_only_body_is_run_once(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let runs = Cell::new(0);
    let value = f
        .store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            let value = tx.get(&f.key("k"), Serializable).await?;
            f.put("k", "w").await?;
            Ok(value)
        })
        .await?;
    assert_eq!(value.as_deref(), Some(&b"v"[..]));
    assert_eq!(runs.get(), 1);
    Ok(())
}

pub(crate) async fn concurrent_increments_are_not_lost(f: &Fixture) -> Result<()> {
    let increments = (0..10).map(|_| {
        f.store.run(async |tx| {
            let value = tx.get(&f.key("k"), Serializable).await?;
            tokio::task::yield_now().await;
            let count = value.map_or(0, |value| value[0]);
            tx.set(&f.key("k"), &[count + 1]);
            Ok(())
        })
    });
    for result in soon(futures_util::future::join_all(increments)).await {
        result?;
    }
    assert_eq!(f.value("k").await?.as_deref(), Some(&[10][..]));
    Ok(())
}

pub(crate) async fn a_body_reads_its_own_writes(f: &Fixture) -> Result<()> {
    f.put("k", [1]).await?;
    let value = f
        .store
        .run(async |tx| {
            tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
            tx.get(&f.key("k"), Snapshot).await
        })
        .await?;
    assert_eq!(value.as_deref(), Some(&[2][..]));
    Ok(())
}

pub(crate) async fn a_cancelled_body_is_not_tried_again(f: &Fixture) -> Result<()> {
    let runs = Cell::new(0);
    let result: Result<()> = f
        .store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            tx.cancel();
            Err(StoreError::NOT_COMMITTED.into())
        })
        .await;
    fails(result, &StoreError::TRANSACTION_CANCELLED);
    assert_eq!(runs.get(), 1);
    Ok(())
}

/// A body may commit by itself, drop its commit, or fail with an error other than that of its commit.
pub(crate) async fn a_body_that_commits_by_itself_is_tried_again(f: &Fixture) -> Result<()> {
    let runs = Cell::new(0_u8);
    f.store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
            match runs.get() {
                1 => drop(tx.commit().await?),
                // The commit is begun and dropped.
                2 => drop(tx.commit().now_or_never()),
                3 => {
                    tx.get(&f.key("k"), Serializable).await?;
                    f.put("k", "other").await?;
                    fails(tx.commit().await, &StoreError::NOT_COMMITTED);
                }
                _ => {
                    tx.set(&f.key("last"), b"v");
                    return Ok(());
                }
            }
            Err(StoreError::TRANSACTION_TOO_OLD.into())
        })
        .await?;
    assert_eq!(runs.get(), 4);
    assert!(f.value("last").await?.is_some());
    Ok(())
}

/// Regression: a run on a cluster treated 1039 from its body as final although it is retryable, so the run ended with it.
pub(crate) async fn whatever_the_store_calls_retryable_is_tried_again(f: &Fixture) -> Result<()> {
    for error in [
        StoreError::TRANSACTION_TOO_OLD,
        StoreError::FUTURE_VERSION,
        StoreError::NOT_COMMITTED,
        StoreError::COMMIT_UNKNOWN_RESULT,
        StoreError::PROCESS_BEHIND,
        StoreError::DATABASE_LOCKED,
        StoreError::CLUSTER_VERSION_CHANGED,
        StoreError::COMMIT_PROXY_MEMORY_LIMIT_EXCEEDED,
        StoreError::BATCH_TRANSACTION_THROTTLED,
        StoreError::GRV_PROXY_MEMORY_LIMIT_EXCEEDED,
        StoreError::TAG_THROTTLED,
        StoreError::PROXY_TAG_THROTTLED,
    ] {
        let runs = Cell::new(0);
        soon(f.store.run(async |_| {
            runs.set(runs.get() + 1);
            if runs.get() == 1 { Err(error.clone().into()) } else { Ok(()) }
        }))
        .await?;
        assert_eq!(runs.get(), 2, "{error}");
    }
    Ok(())
}
