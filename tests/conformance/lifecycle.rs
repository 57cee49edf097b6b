//! Operations on a transaction before, after and instead of its commit.

use std::sync::{
    OnceLock,
    atomic::{AtomicU32, Ordering},
};

use futures_util::FutureExt;
use notibus::{
    Result,
    store::{
        Isolation::{Serializable, Snapshot},
        RangeRead, StoreError, Transaction,
    },
};

use crate::fixture::{Fixture, conflicts, fails, soon};

pub(crate) async fn a_commit_of_nothing_has_no_stamp(f: &Fixture) -> Result<()> {
    assert_eq!(f.store.begin().commit().await?, None);
    Ok(())
}

pub(crate) async fn a_read_only_commit_has_no_stamp(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.get(&f.key("k"), Serializable).await?;
    tx.get_range(&RangeRead::new(f.all()), Serializable).await?;
    tx.add_read_conflict(&f.all());
    assert_eq!(tx.commit().await?, None);
    Ok(())
}

pub(crate) async fn a_declared_write_is_something_to_commit(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.add_write_conflict(&f.all());
    assert!(tx.commit().await?.is_some());
    Ok(())
}

pub(crate) async fn a_committed_transaction_is_used_up(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("k"), b"v");
    tx.commit().await?;
    let expected = &StoreError::USED_DURING_COMMIT;
    fails(tx.get(&f.key("k"), Snapshot).await, expected);
    fails(tx.get_range(&RangeRead::new(f.all()), Snapshot).await, expected);
    fails(tx.watch(&f.key("k")).await, expected);
    fails(tx.commit().await, expected);
    Ok(())
}

pub(crate) async fn a_read_only_transaction_is_used_up_by_its_commit(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.get(&f.key("k"), Snapshot).await?;
    tx.commit().await?;
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::USED_DURING_COMMIT);
    Ok(())
}

pub(crate) async fn a_failed_commit_uses_the_transaction_up(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get(&f.key("k"), Serializable).await?;
    tx.set(&f.key("k"), b"v");
    f.put("k", "w").await?;
    conflicts(&tx).await;
    fails(tx.commit().await, &StoreError::USED_DURING_COMMIT);
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::USED_DURING_COMMIT);
    Ok(())
}

pub(crate) async fn a_write_after_the_commit_is_lost(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("a"), b"v");
    tx.commit().await?;
    tx.set(&f.key("b"), b"v");
    tx.clear(&f.key("a"));
    fails(tx.commit().await, &StoreError::USED_DURING_COMMIT);
    assert_eq!(f.suffixes().await?, ["a"]);
    Ok(())
}

pub(crate) async fn a_reset_makes_a_committed_transaction_new(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("a"), b"v");
    let first = tx.commit().await?.expect("it writes");
    tx.reset();
    assert!(tx.get(&f.key("a"), Serializable).await?.is_some());
    tx.set(&f.key("b"), b"v");
    let second = tx.commit().await?.expect("it writes");
    assert!(second.versionstamp > first.versionstamp);
    assert_eq!(f.suffixes().await?, ["a", "b"]);
    Ok(())
}

pub(crate) async fn a_reset_forgets_reads_and_writes(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get(&f.key("read"), Serializable).await?;
    tx.set(&f.key("a"), b"v");
    tx.add_write_conflict(&f.all());
    tx.reset();
    assert_eq!(tx.get(&f.key("a"), Snapshot).await?, None);
    tx.set(&f.key("b"), b"v");
    f.put("read", "changed").await?;
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["b", "read"]);
    Ok(())
}

pub(crate) async fn a_reset_forgets_the_read_version(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    f.put("k", "v").await?;
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?, None);
    tx.reset();
    assert!(tx.get(&f.key("k"), Snapshot).await?.is_some());
    Ok(())
}

pub(crate) async fn a_reset_forgets_a_set_read_version(f: &Fixture) -> Result<()> {
    f.put("k", "old").await?;
    let version = f.store.begin().read_version().await?;
    f.put("k", "new").await?;
    let tx = f.store.begin();
    tx.set_read_version(version);
    tx.reset();
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&b"new"[..]));
    Ok(())
}

pub(crate) async fn a_reset_forgets_a_bad_write(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(b"\xff", b"v");
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::KEY_OUTSIDE_LEGAL_RANGE);
    tx.reset();
    tx.set(&f.key("k"), b"v");
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["k"]);
    Ok(())
}

pub(crate) async fn a_cancelled_transaction_fails(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("k"), b"v");
    tx.cancel();
    let expected = &StoreError::TRANSACTION_CANCELLED;
    fails(tx.get(&f.key("k"), Snapshot).await, expected);
    fails(tx.get_range(&RangeRead::new(f.all()), Snapshot).await, expected);
    fails(tx.read_version().await, expected);
    fails(tx.watch(&f.key("k")).await, expected);
    fails(tx.commit().await, expected);
    assert!(f.suffixes().await?.is_empty());
    Ok(())
}

pub(crate) async fn a_reset_makes_a_cancelled_transaction_new(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("a"), b"v");
    tx.cancel();
    tx.reset();
    tx.set(&f.key("b"), b"v");
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["b"]);
    Ok(())
}

pub(crate) async fn a_commit_undoes_no_cancel(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.cancel();
    tx.set(&f.key("a"), b"v");
    fails(tx.commit().await, &StoreError::TRANSACTION_CANCELLED);
    fails(tx.commit().await, &StoreError::TRANSACTION_CANCELLED);
    assert!(f.suffixes().await?.is_empty());
    Ok(())
}

/// Regression: the cluster's backend lost a cancellation during a commit, so the transaction could be used afterwards.
pub(crate) async fn a_cancel_during_the_commit_holds(f: &Fixture) -> Result<()> {
    for n in 0..20_u8 {
        let tx = f.store.begin();
        tx.set(&f.key([b'a', n]), b"v");
        let mut commit = Box::pin(tx.commit());
        // The commit begins, and gets as far as it can without waiting.
        let begun = (&mut commit).now_or_never();
        tx.cancel();
        let committed = match begun {
            Some(committed) => committed,
            None => soon(commit).await,
        };
        assert!(committed?.is_some(), "it goes on, and returns its result");
        is_cancelled(f, &tx).await?;
        assert!(f.value([b'a', n]).await?.is_some());
    }
    Ok(())
}

pub(crate) async fn a_cancel_after_the_commit_holds(f: &Fixture) -> Result<()> {
    let done = f.store.begin();
    done.set(&f.key("a"), b"v");
    done.commit().await?;
    let failed = f.started().await?;
    failed.get(&f.key("a"), Serializable).await?;
    failed.set(&f.key("b"), b"v");
    f.put("a", "changed").await?;
    conflicts(&failed).await;
    for tx in [done, failed] {
        tx.cancel();
        is_cancelled(f, &tx).await?;
    }
    Ok(())
}

/// Asserts that `tx` cannot be used until it is reset.
async fn is_cancelled(f: &Fixture, tx: &Transaction) -> Result<()> {
    let expected = &StoreError::TRANSACTION_CANCELLED;
    fails(tx.get(&f.key("k"), Snapshot).await, expected);
    tx.set(&f.key("never"), b"v");
    fails(tx.commit().await, expected);
    fails(tx.read_version().await, expected);
    assert!(tx.conflicting_ranges().await?.is_empty());
    tx.reset();
    assert_eq!(tx.get(&f.key("never"), Snapshot).await?, None);
    tx.set(&f.key("after"), b"v");
    assert!(tx.commit().await?.is_some());
    Ok(())
}

/// Regression: a run on a cluster did not notice that its transaction was cancelled during back-off, so it continued.
pub(crate) async fn a_cancel_during_the_pause_before_the_next_try_ends_the_run(f: &Fixture) -> Result<()> {
    let (tried, attempts) = (OnceLock::new(), AtomicU32::new(0));
    let run = f.store.run(async |tx| {
        tried.get_or_init(|| tx.clone());
        match attempts.fetch_add(1, Ordering::SeqCst) {
            0 => Err(StoreError::NOT_COMMITTED.into()),
            _ => Ok(()),
        }
    });
    let mut run = Box::pin(run);
    assert!((&mut run).now_or_never().is_none(), "it pauses");
    tried.get().expect("it was tried").cancel();
    fails(soon(run).await, &StoreError::TRANSACTION_CANCELLED);
    assert_eq!(attempts.load(Ordering::SeqCst), 1);
    Ok(())
}

pub(crate) async fn clones_of_a_database_share_it(f: &Fixture) -> Result<()> {
    let clone = f.store.clone();
    f.put("k", "v").await?;
    assert!(clone.begin().get(&f.key("k"), Snapshot).await?.is_some());
    Ok(())
}

pub(crate) async fn a_transaction_can_be_used_from_many_tasks(f: &Fixture) -> Result<()> {
    let tx = std::sync::Arc::new(f.started().await?);
    let tasks: Vec<_> = (0..10_u8)
        .map(|n| {
            let (tx, key) = (std::sync::Arc::clone(&tx), f.key([b'k', n]));
            tokio::spawn(async move {
                tx.set(&key, &[n]);
                tx.get(&key, Serializable).await
            })
        })
        .collect();
    for (n, task) in (0..10_u8).zip(tasks) {
        let value = task.await.expect("the task does not panic")?;
        assert_eq!(value.as_deref(), Some(&[n][..]));
    }
    tx.commit().await?;
    assert_eq!(f.suffixes().await?.len(), 10);
    Ok(())
}

/// Regression: on a cluster, a commit that returned after its transaction had been reset replaced the new transaction, so the write of the
/// new one was lost, and its commit failed with 2017.
pub(crate) async fn a_commit_that_ends_after_a_reset_disturbs_nothing(f: &Fixture) -> Result<()> {
    for n in 0..20_u8 {
        let tx = f.store.begin();
        tx.set(&f.key([b'a', n]), b"v");
        let mut commit = Box::pin(tx.commit());
        // The commit begins, and gets as far as it can without waiting.
        let begun = (&mut commit).now_or_never();
        tx.reset();
        tx.set(&f.key([b'b', n]), b"v");
        match begun {
            Some(committed) => drop(committed?),
            // The reset may abort a pending commit, whose result does not matter here.
            None => drop(soon(commit).await),
        }
        assert!(tx.get(&f.key([b'b', n]), Snapshot).await?.is_some(), "it still has its own write");
        assert!(tx.commit().await?.is_some());
        assert!(f.value([b'b', n]).await?.is_some());
    }
    Ok(())
}
