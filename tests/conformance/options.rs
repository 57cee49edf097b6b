//! Options of transactions: limits on time, size and tries, and the report of conflicts.

use std::{
    cell::{Cell, RefCell},
    time::Duration,
};

use futures_util::FutureExt;
use notibus::{
    Result,
    store::{
        AtomicOp,
        Isolation::{Serializable, Snapshot},
        KeyRange, Priority, RangeRead, RetryPolicy, StoreError, Transaction, TransactionOption,
    },
};

use crate::fixture::{Fixture, conflicts, fails, soon};

/// Sets a short time limit.
const SHORT: TransactionOption = TransactionOption::Timeout(Duration::from_millis(20));

/// Waits until the time limit of `SHORT` is over.
async fn outlast() {
    tokio::time::sleep(Duration::from_millis(200)).await;
}

pub(crate) async fn everything_fails_after_the_time_limit(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set_option(SHORT);
    tx.set(&f.key("k"), b"v");
    outlast().await;
    let expected = &StoreError::TRANSACTION_TIMED_OUT;
    fails(tx.read_version().await, expected);
    fails(tx.get(&f.key("k"), Snapshot).await, expected);
    fails(tx.get_range(&RangeRead::new(f.all()), Snapshot).await, expected);
    fails(tx.commit().await, expected);
    assert!(f.suffixes().await?.is_empty());
    Ok(())
}

pub(crate) async fn a_time_limit_counts_from_when_the_transaction_was_made(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    outlast().await;
    tx.get(&f.key("k"), Snapshot).await?;
    tx.set_option(SHORT);
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::TRANSACTION_TIMED_OUT);
    Ok(())
}

pub(crate) async fn a_bad_write_counts_more_than_the_time_limit(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set_option(SHORT);
    tx.set(b"\xffk", b"v");
    outlast().await;
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::KEY_OUTSIDE_LEGAL_RANGE);
    fails(tx.commit().await, &StoreError::KEY_OUTSIDE_LEGAL_RANGE);
    Ok(())
}

pub(crate) async fn a_reset_forgets_the_time_limit(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set_option(SHORT);
    outlast().await;
    tx.reset();
    outlast().await;
    tx.set(&f.key("k"), b"v");
    tx.commit().await.map(drop)
}

/// Runs a body that always fails with a retryable error. Returns the result and the number of runs.
async fn always(f: &Fixture, option: TransactionOption) -> (Result<()>, u32) {
    let runs = Cell::new(0);
    let policy = RetryPolicy::default().elapsed_max(None);
    let running = f.store.run_with(&policy, async |tx| {
        runs.set(runs.get() + 1);
        tx.set_option(option.clone());
        tx.set(&f.key("k"), b"v");
        Err(StoreError::NOT_COMMITTED.into())
    });
    (soon(running).await, runs.get())
}

/// The limit holds for all tries together, even if each one sets it again.
pub(crate) async fn a_time_limit_ends_a_run(f: &Fixture) -> Result<()> {
    let (result, runs) = always(f, TransactionOption::Timeout(Duration::from_millis(100))).await;
    fails(result, &StoreError::TRANSACTION_TIMED_OUT);
    assert!(runs > 1);
    Ok(())
}

pub(crate) async fn a_transaction_over_its_own_limit_is_refused(f: &Fixture) -> Result<()> {
    for (len, fits) in [(100, true), (2_000, false)] {
        let tx = f.store.begin();
        tx.set_option(TransactionOption::SizeLimit(1_500));
        tx.set(&f.key("k"), &vec![0; len]);
        if fits {
            tx.commit().await?;
        } else {
            fails(tx.commit().await, &StoreError::TRANSACTION_TOO_LARGE);
        }
    }
    assert_eq!(f.value("k").await?.map(|value| value.len()), Some(100));
    Ok(())
}

/// Sets `option`, and asserts that following operations fail with `expected`.
async fn refused(f: &Fixture, option: TransactionOption, expected: &StoreError) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("k"), b"v");
    tx.set_option(option);
    fails(tx.get(&f.key("k"), Snapshot).await, expected);
    fails(tx.commit().await, expected);
    tx.reset();
    tx.get(&f.key("k"), Snapshot).await.map(drop)
}

pub(crate) async fn a_bad_size_limit_is_refused(f: &Fixture) -> Result<()> {
    for bad in [0, 31, Transaction::LEN_MAX + 1, usize::MAX] {
        refused(f, TransactionOption::SizeLimit(bad), &StoreError::INVALID_OPTION_VALUE).await?;
    }
    assert!(f.suffixes().await?.is_empty());
    Ok(())
}

pub(crate) async fn priorities_change_no_outcome(f: &Fixture) -> Result<()> {
    for priority in [Priority::Default, Priority::Batch, Priority::System] {
        let tx = f.store.begin();
        tx.set_option(TransactionOption::Priority(priority));
        soon(tx.get(&f.key("k"), Serializable)).await?;
        tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
        soon(tx.commit()).await?;
    }
    assert_eq!(f.value("k").await?.as_deref(), Some(&[3][..]));
    Ok(())
}

/// Returns a transaction that reports conflicts, and has read "a" and the range from "c" to "e".
async fn reporting(f: &Fixture) -> Result<Transaction> {
    let tx = f.store.begin();
    tx.set_option(TransactionOption::ReportConflicts);
    tx.get(&f.key("a"), Serializable).await?;
    tx.get_range(&RangeRead::new(f.range("c", "e")), Serializable).await?;
    tx.set(&f.key("out"), b"v");
    Ok(tx)
}

pub(crate) async fn conflicts_are_reported(f: &Fixture) -> Result<()> {
    for written in ["a", "d"] {
        let tx = reporting(f).await?;
        f.put(written, "v").await?;
        conflicts(&tx).await;
        let ranges = tx.conflicting_ranges().await?;
        assert!(ranges.iter().any(|range| range.contains(&f.key(written))), "{ranges:?}");
        assert!(!ranges.iter().any(|range| range.contains(&f.key("b"))), "{ranges:?}");
        assert_eq!(tx.conflicting_ranges().await?, ranges, "they can be asked for again");
        tx.reset();
        assert_eq!(tx.conflicting_ranges().await?, []);
    }
    let tx = reporting(f).await?;
    tx.commit().await?;
    assert_eq!(tx.conflicting_ranges().await?, []);
    Ok(())
}

pub(crate) async fn conflicts_are_reported_only_if_asked_for(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get(&f.key("a"), Serializable).await?;
    tx.set(&f.key("out"), b"v");
    f.put("a", "v").await?;
    conflicts(&tx).await;
    assert_eq!(tx.conflicting_ranges().await?, []);
    Ok(())
}

pub(crate) async fn of_many_conflicts_some_are_reported(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.set_option(TransactionOption::ReportConflicts);
    let mut long = f.key("");
    long.resize(4_000, b'k');
    let keys: Vec<_> = (0..400_u32).map(|n| [&long[..], &n.to_be_bytes()].concat()).collect();
    for key in &keys {
        tx.add_read_conflict(&KeyRange::key(key));
    }
    tx.set(&f.key("out"), b"v");
    let other = f.store.begin();
    other.clear_range(&f.all());
    other.commit().await?;
    conflicts(&tx).await;
    let ranges = tx.conflicting_ranges().await?;
    assert!(!ranges.is_empty());
    for range in ranges {
        assert!(keys.iter().any(|key| range.contains(key)), "{range:?}");
    }
    Ok(())
}

/// Regression: the cluster's client forgot all but two kinds of options at the first retry, so later tries ran without them.
pub(crate) async fn options_survive_retries(f: &Fixture) -> Result<()> {
    let runs = Cell::new(0);
    let result = f
        .store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            if runs.get() == 1 {
                tx.set_option(TransactionOption::SizeLimit(1_000));
                return Err(StoreError::NOT_COMMITTED.into());
            }
            tx.set(&f.key("k"), &[0; 2_000]);
            Ok(())
        })
        .await;
    fails(result, &StoreError::TRANSACTION_TOO_LARGE);
    assert_eq!(runs.get(), 2);
    Ok(())
}

pub(crate) async fn the_last_try_of_a_run_reports_its_conflicts(f: &Fixture) -> Result<()> {
    let last = RefCell::new(None);
    let policy = RetryPolicy::default().attempts_max(Some(3));
    let result: Result<()> = f
        .store
        .run_with(&policy, async |tx| {
            if last.borrow().is_none() {
                tx.set_option(TransactionOption::ReportConflicts);
            }
            tx.get(&f.key("a"), Serializable).await?;
            f.put("a", "v").await?;
            tx.set(&f.key("out"), b"v");
            *last.borrow_mut() = Some(tx);
            Ok(())
        })
        .await;
    fails(result, &StoreError::NOT_COMMITTED);
    let tx = last.take().expect("it has run");
    let ranges = tx.conflicting_ranges().await?;
    assert!(ranges.iter().any(|range| range.contains(&f.key("a"))), "{ranges:?}");
    Ok(())
}

/// Regression: an answer that arrived after the transaction had been reset replaced the new transaction, so its writes were lost.
pub(crate) async fn asking_for_conflicts_disturbs_no_later_transaction(f: &Fixture) -> Result<()> {
    let tx = reporting(f).await?;
    f.put("a", "v").await?;
    conflicts(&tx).await;
    let mut asked = Box::pin(tx.conflicting_ranges());
    let begun = (&mut asked).now_or_never();
    // A second request at the same time gets the same answer.
    let again = tx.conflicting_ranges().await?;
    assert!(again.iter().any(|range| range.contains(&f.key("a"))), "{again:?}");
    tx.reset();
    tx.set(&f.key("new"), b"v");
    let ranges = match begun {
        Some(ranges) => ranges?,
        None => soon(asked).await?,
    };
    assert_eq!(ranges, again);
    assert!(tx.commit().await?.is_some());
    assert!(f.value("new").await?.is_some());
    Ok(())
}

/// Makes the commit of a body conflict, and fails with another error.
async fn commit_in_vain(f: &Fixture, tx: &Transaction) -> Result<()> {
    tx.get(&f.key("k"), Serializable).await?;
    f.put("k", "other").await?;
    tx.set(&f.key("k"), b"mine");
    conflicts(tx).await;
    Err(StoreError::TRANSACTION_TOO_OLD.into())
}

/// Regression: on a cluster, the time limit started again after each try whose body had committed by itself, so a run that was limited to 1
/// s took 6.3 s.
pub(crate) async fn a_body_that_commits_by_itself_has_the_same_limit(f: &Fixture) -> Result<()> {
    let policy = RetryPolicy::default().attempts_max(Some(30));
    let run = f.store.run_with(&policy, async |tx| {
        tx.set_option(TransactionOption::Timeout(Duration::from_millis(300)));
        // Each try alone takes less than the limit; only all of them together exceed it.
        tx.set(&f.key("l"), b"v");
        match tx.commit().await {
            Ok(_) => Err(StoreError::TRANSACTION_TOO_OLD.into()),
            Err(error) => Err::<(), _>(error),
        }
    });
    fails(soon(run).await, &StoreError::TRANSACTION_TIMED_OUT);
    Ok(())
}

/// The same as `options_survive_retries`, but for a body that commits by itself, drops its commit, or fails.
pub(crate) async fn options_survive_whatever_a_body_does(f: &Fixture) -> Result<()> {
    let runs = Cell::new(0);
    let result = f
        .store
        .run(async |tx| {
            runs.set(runs.get() + 1);
            tx.atomic(AtomicOp::Add, &f.key("n"), &[1]);
            match runs.get() {
                1 => tx.set_option(TransactionOption::SizeLimit(1_000)),
                2 => drop(tx.commit().await?),
                3 => drop(tx.commit().now_or_never()),
                4 => return commit_in_vain(f, &tx).await,
                _ => {
                    tx.set(&f.key("k"), &[0; 2_000]);
                    return Ok(());
                }
            }
            Err(StoreError::NOT_COMMITTED.into())
        })
        .await;
    fails(result, &StoreError::TRANSACTION_TOO_LARGE);
    assert_eq!(runs.get(), 5);
    Ok(())
}
