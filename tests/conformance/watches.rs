//! Watches are hints: no case relies on a watch that does not fire, except for a short while.

use std::time::Duration;

use futures_util::future::select_all;
use notibus::{
    Result,
    store::{AtomicOp, Isolation::Serializable, Store, StoreError, Transaction, Watch},
};

use crate::fixture::{Fixture, conflicts, fails, soon, still_waits};

async fn armed(f: &Fixture, suffix: &str) -> Result<Watch> {
    let tx = f.store.begin();
    let watch = tx.watch(&f.key(suffix)).await?;
    assert_eq!(tx.commit().await?, None);
    Ok(watch)
}

pub(crate) async fn a_watch_fires_when_its_key_is_set(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let mut watch = armed(f, "k").await?;
    assert!(still_waits(&mut watch).await);
    f.put("k", "w").await?;
    soon(watch).await
}

pub(crate) async fn a_watch_fires_when_its_key_is_created(f: &Fixture) -> Result<()> {
    let watch = armed(f, "k").await?;
    f.put("k", "v").await?;
    soon(watch).await
}

pub(crate) async fn a_watch_fires_when_its_key_is_cleared(f: &Fixture) -> Result<()> {
    f.fill(&["k", "l"]).await?;
    let (one, other) = (armed(f, "k").await?, armed(f, "l").await?);
    f.remove("k").await?;
    soon(one).await?;
    let tx = f.store.begin();
    tx.clear_range(&f.range("l", "m"));
    tx.commit().await?;
    soon(other).await
}

pub(crate) async fn a_watch_fires_when_an_operation_changes_its_key(f: &Fixture) -> Result<()> {
    f.put("k", [1]).await?;
    let watch = armed(f, "k").await?;
    f.operate(AtomicOp::Add, "k", &[1]).await?;
    soon(watch).await
}

pub(crate) async fn a_watch_fires_when_its_key_gets_a_stamp(f: &Fixture) -> Result<()> {
    let watch = armed(f, "k").await?;
    f.operate(AtomicOp::SetVersionstampedValue, "k", &[0; 14]).await?;
    soon(watch).await
}

pub(crate) async fn a_watch_ignores_other_keys(f: &Fixture) -> Result<()> {
    let mut watch = armed(f, "k").await?;
    f.fill(&["j", "k\0", "l"]).await?;
    assert!(still_waits(&mut watch).await);
    f.put("k", "v").await?;
    soon(watch).await
}

pub(crate) async fn a_watch_fires_if_its_key_changed_before_the_commit(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = f.store.begin();
    let watch = tx.watch(&f.key("k")).await?;
    f.put("k", "w").await?;
    tx.commit().await?;
    soon(watch).await
}

pub(crate) async fn a_watch_outlives_its_transaction(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let mut watch = tx.watch(&f.key("k")).await?;
    tx.commit().await?;
    tx.reset();
    tx.cancel();
    drop(tx);
    assert!(still_waits(&mut watch).await);
    f.put("k", "v").await?;
    soon(watch).await
}

pub(crate) async fn a_watch_fails_with_its_dropped_transaction(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let watch = tx.watch(&f.key("k")).await?;
    drop(tx);
    fails(soon(watch).await, &StoreError::OPERATION_CANCELLED);
    Ok(())
}

pub(crate) async fn a_watch_fails_with_its_reset_transaction(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let watch = tx.watch(&f.key("k")).await?;
    tx.reset();
    fails(soon(watch).await, &StoreError::OPERATION_CANCELLED);
    Ok(())
}

pub(crate) async fn a_failed_commit_arms_no_watch(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get(&f.key("read"), Serializable).await?;
    let watch = tx.watch(&f.key("k")).await?;
    tx.set(&f.key("out"), b"v");
    f.put("read", "changed").await?;
    conflicts(&tx).await;
    fails(soon(watch).await, &StoreError::NOT_COMMITTED);
    Ok(())
}

/// Regression: the embedded engine did not end the watches of a commit that it refused for its size, so they waited forever.
pub(crate) async fn a_refused_commit_arms_no_watch(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let watch = tx.watch(&f.key("k")).await?;
    let value = vec![0; Transaction::VALUE_LEN_MAX];
    for n in 0..110_u8 {
        tx.set(&f.key([b'v', n]), &value);
    }
    fails(tx.commit().await, &StoreError::TRANSACTION_TOO_LARGE);
    fails(soon(watch).await, &StoreError::TRANSACTION_TOO_LARGE);
    Ok(())
}

/// Setting a watch reads its key, so a transaction that also writes conflicts when the key changes.
pub(crate) async fn a_watch_is_a_serializable_read(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    let watch = tx.watch(&f.key("k")).await?;
    tx.set(&f.key("out"), b"v");
    f.put("k", "v").await?;
    conflicts(&tx).await;
    assert!(soon(watch).await.is_err());
    Ok(())
}

/// A watch may or may not notice a value that changes and changes back, but it notices a later change.
pub(crate) async fn a_change_after_a_change_back_is_noticed(f: &Fixture) -> Result<()> {
    f.put("k", "a").await?;
    let watch = armed(f, "k").await?;
    f.put("k", "b").await?;
    f.put("k", "a").await?;
    f.put("k", "c").await?;
    soon(watch).await
}

pub(crate) async fn all_watches_of_a_key_fire(f: &Fixture) -> Result<()> {
    let mut watches = Vec::new();
    for _ in 0..20 {
        watches.push(armed(f, "k").await?);
    }
    f.put("k", "v").await?;
    for watch in watches {
        soon(watch).await?;
    }
    Ok(())
}

pub(crate) async fn watches_of_many_keys_fire_each_for_its_own(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let mut watches = Vec::new();
    for n in 0..50_u8 {
        watches.push(tx.watch(&f.key([n])).await?);
    }
    tx.commit().await?;
    let mut quiet = Vec::new();
    for (n, watch) in (0..50_u8).zip(watches) {
        if n % 2 == 0 {
            f.put([n], "v").await?;
            soon(watch).await?;
        } else {
            quiet.push((n, watch));
        }
    }
    for (_, watch) in &mut quiet {
        assert!(tokio::time::timeout(Duration::from_millis(1), watch).await.is_err());
    }
    for (n, watch) in quiet {
        f.put([n], "v").await?;
        soon(watch).await?;
    }
    Ok(())
}

pub(crate) async fn a_task_can_wait_for_a_watch(f: &Fixture) -> Result<()> {
    let watch = armed(f, "k").await?;
    let waiting = tokio::spawn(watch);
    tokio::task::yield_now().await;
    f.put("k", "v").await?;
    soon(waiting).await.expect("the task does not panic")
}

pub(crate) async fn a_dropped_watch_disturbs_no_one(f: &Fixture) -> Result<()> {
    let dropped = armed(f, "k").await?;
    let kept = armed(f, "k").await?;
    drop(dropped);
    f.put("k", "v").await?;
    soon(kept).await
}

pub(crate) async fn a_key_beyond_the_key_space_cannot_be_watched(f: &Fixture) -> Result<()> {
    fails(f.store.begin().watch(b"\xff").await, &StoreError::KEY_OUTSIDE_LEGAL_RANGE);
    Ok(())
}

/// Returns the result of a watch on `key`, which may be refused at once, or fail later.
async fn watched(tx: &Transaction, key: &[u8]) -> Result<()> {
    soon(tx.watch(key).await?).await
}

/// The number of watches that a transaction sets: so few that it does not become too old, however busy the machine is.
const WATCHES_AT_ONCE: usize = 500;

/// Watches count towards the limit from when they are set, not from the commit that arms them.
pub(crate) async fn there_are_only_so_many_watches(f: &Fixture) -> Result<()> {
    let set = async |tx: Transaction| {
        let mut some = Vec::new();
        for _ in 0..WATCHES_AT_ONCE {
            some.push(tx.watch(&f.key("k")).await?);
        }
        Ok(some)
    };
    let mut watches = Vec::new();
    while watches.len() < Store::WATCHES_MAX - WATCHES_AT_ONCE {
        watches.extend(f.store.run(set).await?);
    }
    let tx = f.store.begin();
    watches.extend(set(tx.clone()).await?);
    // This watch is one too many: the store decides which watch is refused, and when.
    let refused = match tx.watch(&f.key("k")).await {
        Err(error) => Err(error),
        Ok(watch) => {
            watches.push(watch);
            let (refused, _, kept) = soon(select_all(watches)).await;
            watches = kept;
            refused
        }
    };
    fails(refused, &StoreError::TOO_MANY_WATCHES);
    tx.commit().await?;
    let other = f.store.begin();
    fails(watched(&other, &f.key("l")).await, &StoreError::TOO_MANY_WATCHES);
    watches.truncate(Store::WATCHES_MAX / 2);
    other.reset();
    let watch = other.watch(&f.key("l")).await?;
    other.commit().await?;
    f.fill(&["k", "l"]).await?;
    soon(watch).await?;
    for watch in watches {
        soon(watch).await?;
    }
    Ok(())
}

/// Regression: the embedded store refused such a watch at once, so it differed from a cluster, which reports the error through the watch.
pub(crate) async fn a_pending_stamp_cannot_be_watched(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.atomic(AtomicOp::SetVersionstampedValue, &f.key("k"), &[0; 14]);
    let watch = tx.watch(&f.key("k")).await?;
    fails(soon(watch).await, &StoreError::ACCESSED_UNREADABLE);
    let watch = tx.watch(&f.key("k")).await?;
    assert!(tx.commit().await?.is_some(), "it is the watch that fails, and nothing else");
    fails(soon(watch).await, &StoreError::ACCESSED_UNREADABLE);

    // Any key that may become the stamped key is unreadable, too.
    let tx = f.store.begin();
    let place = u32::try_from(f.key("k").len()).expect("keys are short");
    let stamped = [&f.key("k")[..], &[0; 10], &place.to_le_bytes()].concat();
    tx.atomic(AtomicOp::SetVersionstampedKey, &stamped, b"v");
    let within = [&f.key("k")[..], &[0xff; 9]].concat();
    let watch = tx.watch(&within).await?;
    fails(soon(watch).await, &StoreError::ACCESSED_UNREADABLE);
    let beside = tx.watch(&f.key("l")).await?;
    assert!(tx.commit().await?.is_some(), "it is the watch that fails, and nothing else");
    f.fill(&["l"]).await?;
    soon(beside).await
}

/// Regression: the embedded store refused such a watch at once, unlike a cluster, which reports the error through the watch.
pub(crate) async fn a_watch_reports_that_its_transaction_cannot_read(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let version = tx.read_version().await?;
    tx.set_read_version(version);
    let watch = tx.watch(&f.key("k")).await?;
    fails(soon(watch).await, &StoreError::READ_VERSION_ALREADY_SET);
    Ok(())
}
