//! Which concurrent transactions may commit, and which conflict.

use notibus::{
    Result,
    store::{
        AtomicOp,
        Isolation::{Serializable, Snapshot},
        KeyRange, RangeRead, Transaction,
    },
};

use crate::fixture::{Fixture, conflicts};

/// Returns a transaction that writes the key "out", so that its commit is checked for conflicts.
async fn writer(f: &Fixture) -> Result<Transaction> {
    let tx = f.started().await?;
    tx.set(&f.key("out"), b"");
    Ok(tx)
}

/// Returns a [`writer`] that has read the key "k".
async fn reader(f: &Fixture) -> Result<Transaction> {
    let tx = writer(f).await?;
    tx.get(&f.key("k"), Serializable).await?;
    Ok(tx)
}

/// Returns a [`writer`] that has read the rows of `read`.
async fn scanner(f: &Fixture, read: RangeRead) -> Result<Transaction> {
    let tx = writer(f).await?;
    tx.get_range(&read, Serializable).await?;
    Ok(tx)
}

pub(crate) async fn a_changed_key_conflicts(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = reader(f).await?;
    f.put("k", "w").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_created_key_conflicts(f: &Fixture) -> Result<()> {
    let tx = reader(f).await?;
    f.put("k", "v").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_cleared_key_conflicts(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = reader(f).await?;
    f.remove("k").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_key_set_to_the_same_value_conflicts(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = reader(f).await?;
    f.put("k", "v").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_write_before_the_read_version_does_not_conflict(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = reader(f).await?;
    tx.commit().await.map(drop)
}

pub(crate) async fn a_write_elsewhere_does_not_conflict(f: &Fixture) -> Result<()> {
    let tx = reader(f).await?;
    f.fill(&["j", "k\0", "l"]).await?;
    tx.commit().await.map(drop)
}

pub(crate) async fn a_snapshot_read_does_not_conflict(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = writer(f).await?;
    tx.get(&f.key("k"), Snapshot).await?;
    tx.get_range(&RangeRead::new(f.range("a", "z")), Snapshot).await?;
    f.put("k", "w").await?;
    f.put("l", "w").await?;
    tx.commit().await.map(drop)
}

pub(crate) async fn a_read_only_transaction_does_not_conflict(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get(&f.key("k"), Serializable).await?;
    f.put("k", "v").await?;
    assert_eq!(tx.commit().await?, None);
    Ok(())
}

pub(crate) async fn a_phantom_in_a_range_conflicts(f: &Fixture) -> Result<()> {
    f.fill(&["b", "d"]).await?;
    let tx = scanner(f, RangeRead::new(f.range("a", "e"))).await?;
    f.put("c", "phantom").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_phantom_in_an_empty_range_conflicts(f: &Fixture) -> Result<()> {
    let tx = scanner(f, RangeRead::new(f.range("a", "e"))).await?;
    f.put("a", "phantom").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_row_cleared_from_a_range_conflicts(f: &Fixture) -> Result<()> {
    f.fill(&["b", "d"]).await?;
    let tx = scanner(f, RangeRead::new(f.range("a", "e"))).await?;
    f.remove("d").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_write_beside_a_range_does_not_conflict(f: &Fixture) -> Result<()> {
    let tx = scanner(f, RangeRead::new(f.range("b", "d"))).await?;
    f.fill(&["a", "d", "e"]).await?;
    tx.commit().await.map(drop)
}

pub(crate) async fn an_empty_range_never_conflicts(f: &Fixture) -> Result<()> {
    let tx = scanner(f, RangeRead::new(f.range("b", "b"))).await?;
    tx.get_range(&RangeRead::new(f.range("d", "b")), Serializable).await?;
    f.fill(&["b", "c"]).await?;
    tx.commit().await.map(drop)
}

/// With b, d and f stored, changes each key in `changes` after `read`, and asserts which changes conflict with `read`.
async fn conflict_where(f: &Fixture, read: &RangeRead, changes: [(&str, bool); 5]) -> Result<()> {
    f.fill(&["b", "d", "f"]).await?;
    for (changed, conflicting) in changes {
        let tx = scanner(f, read.clone()).await?;
        f.put(changed, "changed").await?;
        if conflicting {
            conflicts(&tx).await;
        } else {
            tx.commit().await?;
        }
        if !["b", "d", "f"].contains(&changed) {
            f.remove(changed).await?;
        }
    }
    Ok(())
}

pub(crate) async fn a_limited_read_conflicts_up_to_its_last_row(f: &Fixture) -> Result<()> {
    let read = RangeRead::new(f.range("a", "g")).limit(2);
    let changes = [("a", true), ("c", true), ("d", true), ("d\0", false), ("f", false)];
    conflict_where(f, &read, changes).await
}

pub(crate) async fn a_limited_reverse_read_conflicts_down_to_its_last_row(f: &Fixture) -> Result<()> {
    let read = RangeRead::new(f.range("a", "g")).limit(2).reverse();
    let changes = [("f\0", true), ("e", true), ("d", true), ("c", false), ("b", false)];
    conflict_where(f, &read, changes).await
}

pub(crate) async fn a_read_below_its_limit_conflicts_to_the_end(f: &Fixture) -> Result<()> {
    f.fill(&["b", "d"]).await?;
    let tx = scanner(f, RangeRead::new(f.range("a", "g")).limit(3)).await?;
    f.put("f", "phantom").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn blind_writes_do_not_conflict(f: &Fixture) -> Result<()> {
    let (a, b, c) = (f.started().await?, f.started().await?, f.started().await?);
    a.set(&f.key("k"), b"a");
    b.set(&f.key("k"), b"b");
    c.clear_range(&f.range("k", "l"));
    a.commit().await?;
    c.commit().await?;
    b.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"b"[..]));
    Ok(())
}

pub(crate) async fn atomic_operations_do_not_conflict(f: &Fixture) -> Result<()> {
    f.put("k", [1]).await?;
    for op in [
        AtomicOp::Add,
        AtomicOp::Max,
        AtomicOp::Min,
        AtomicOp::ByteMax,
        AtomicOp::ByteMin,
        AtomicOp::CompareAndClear,
    ] {
        let tx = f.started().await?;
        tx.atomic(op, &f.key("k"), &[1]);
        f.put("k", [1]).await?;
        tx.commit().await?;
    }
    Ok(())
}

pub(crate) async fn an_atomic_operation_makes_its_readers_conflict(f: &Fixture) -> Result<()> {
    f.put("k", [200]).await?;
    for op in [
        AtomicOp::Add,
        AtomicOp::Max,
        AtomicOp::Min,
        AtomicOp::ByteMax,
        AtomicOp::ByteMin,
        AtomicOp::CompareAndClear,
    ] {
        let tx = reader(f).await?;
        f.operate(op, "k", &[1]).await?;
        conflicts(&tx).await;
    }
    Ok(())
}

pub(crate) async fn a_cleared_range_makes_its_readers_conflict(f: &Fixture) -> Result<()> {
    let (inside, outside) = (writer(f).await?, writer(f).await?);
    inside.get(&f.key("b"), Serializable).await?;
    outside.get(&f.key("d"), Serializable).await?;
    let tx = f.store.begin();
    tx.clear_range(&f.range("b", "d"));
    tx.commit().await?;
    conflicts(&inside).await;
    outside.commit().await.map(drop)
}

pub(crate) async fn a_range_overlapping_a_cleared_range_conflicts(f: &Fixture) -> Result<()> {
    let begin = scanner(f, RangeRead::new(f.range("a", "b\0"))).await?;
    let middle = scanner(f, RangeRead::new(f.range("c", "cc"))).await?;
    let beside = scanner(f, RangeRead::new(f.range("d", "e"))).await?;
    let tx = f.store.begin();
    tx.clear_range(&f.range("b", "d"));
    tx.commit().await?;
    conflicts(&begin).await;
    conflicts(&middle).await;
    beside.commit().await.map(drop)
}

pub(crate) async fn an_explicit_read_conflict_counts_as_a_read(f: &Fixture) -> Result<()> {
    let (inside, outside) = (writer(f).await?, writer(f).await?);
    inside.add_read_conflict(&f.range("b", "d"));
    outside.add_read_conflict(&f.range("d", "f"));
    f.put("c", "v").await?;
    conflicts(&inside).await;
    outside.commit().await.map(drop)
}

pub(crate) async fn an_explicit_read_conflict_counts_after_a_snapshot_read(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = writer(f).await?;
    tx.get(&f.key("k"), Snapshot).await?;
    tx.add_read_conflict(&KeyRange::key(&f.key("k")));
    f.put("k", "w").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn an_explicit_read_conflict_skips_written_keys(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.set(&f.key("k"), b"v");
    tx.clear(&f.key("l"));
    tx.clear_range(&f.range("m", "o"));
    tx.add_read_conflict(&KeyRange::key(&f.key("k")));
    tx.add_read_conflict(&KeyRange::key(&f.key("l")));
    tx.add_read_conflict(&f.range("m", "o"));
    f.fill(&["k", "l", "n"]).await?;
    tx.commit().await.map(drop)
}

pub(crate) async fn an_explicit_read_conflict_skips_only_written_keys(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.set(&f.key("k"), b"v");
    tx.add_read_conflict(&f.range("a", "z"));
    f.put("k\0", "v").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn an_explicit_read_conflict_does_not_skip_operations(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    tx.add_read_conflict(&KeyRange::key(&f.key("k")));
    f.put("k", "v").await?;
    conflicts(&tx).await;
    Ok(())
}

/// If a key in a cleared range waits for its stamp, the content of the range is no longer known. Regression: the embedded engine still
/// treated the range as written by the transaction, so it ignored the conflict.
pub(crate) async fn an_explicit_read_conflict_does_not_skip_pending_keys(f: &Fixture) -> Result<()> {
    let append = |tx: &Transaction| {
        let key = f.key("k");
        let place = u32::try_from(key.len()).expect("keys are short");
        let key = [&key[..], &[0; 10], &place.to_le_bytes()].concat();
        tx.atomic(AtomicOp::SetVersionstampedKey, &key, b"");
    };
    let tx = f.started().await?;
    tx.clear_range(&f.range("a", "z"));
    append(&tx);
    tx.add_read_conflict(&f.range("k", "l"));
    let other = f.store.begin();
    append(&other);
    other.commit().await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn an_explicit_read_conflict_added_before_the_write_stays(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.add_read_conflict(&KeyRange::key(&f.key("k")));
    tx.set(&f.key("k"), b"v");
    f.put("k", "v").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_read_before_the_write_stays_a_read(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get(&f.key("k"), Serializable).await?;
    tx.set(&f.key("k"), b"v");
    f.put("k", "w").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn reading_an_own_write_does_not_conflict(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.set(&f.key("k"), b"v");
    tx.clear(&f.key("l"));
    tx.clear_range(&f.range("m", "o"));
    tx.get(&f.key("k"), Serializable).await?;
    tx.get(&f.key("l"), Serializable).await?;
    tx.get(&f.key("n"), Serializable).await?;
    tx.get_range(&RangeRead::new(f.range("m", "o")), Serializable).await?;
    f.fill(&["k", "l", "n"]).await?;
    tx.commit().await.map(drop)
}

pub(crate) async fn reading_an_own_operation_conflicts(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    tx.get(&f.key("k"), Serializable).await?;
    f.put("k", "v").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn an_operation_over_an_own_write_does_not_conflict(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.set(&f.key("k"), &[1]);
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    tx.get(&f.key("k"), Serializable).await?;
    f.put("k", [9]).await?;
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&[2][..]));
    Ok(())
}

pub(crate) async fn an_explicit_write_conflict_makes_readers_conflict(f: &Fixture) -> Result<()> {
    f.put("c", "v").await?;
    let (inside, outside) = (writer(f).await?, writer(f).await?);
    inside.get(&f.key("c"), Serializable).await?;
    outside.get(&f.key("d"), Serializable).await?;
    let tx = f.store.begin();
    tx.add_write_conflict(&f.range("b", "d"));
    tx.commit().await?;
    assert_eq!(f.value("c").await?.as_deref(), Some(&b"v"[..]), "nothing is written");
    conflicts(&inside).await;
    outside.commit().await.map(drop)
}

pub(crate) async fn an_explicit_write_conflict_can_itself_conflict(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get(&f.key("k"), Serializable).await?;
    tx.add_write_conflict(&f.range("b", "d"));
    f.put("k", "v").await?;
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn a_transaction_does_not_conflict_with_itself(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get_range(&RangeRead::new(f.all()), Serializable).await?;
    tx.set(&f.key("k"), b"v");
    tx.clear_range(&f.range("a", "c"));
    tx.add_write_conflict(&f.all());
    tx.add_read_conflict(&f.all());
    tx.commit().await.map(drop)
}

pub(crate) async fn write_skew_is_prevented(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b"]).await?;
    let (one, other) = (f.started().await?, f.started().await?);
    for tx in [&one, &other] {
        tx.get(&f.key("a"), Serializable).await?;
        tx.get(&f.key("b"), Serializable).await?;
    }
    one.clear(&f.key("a"));
    other.clear(&f.key("b"));
    one.commit().await?;
    conflicts(&other).await;
    assert_eq!(f.suffixes().await?, ["b"]);
    Ok(())
}

pub(crate) async fn of_transactions_committed_at_once_one_wins(f: &Fixture) -> Result<()> {
    let open = [f.started().await?, f.started().await?, f.started().await?];
    for tx in &open {
        tx.get(&f.key("k"), Serializable).await?;
        tx.set(&f.key("k"), b"v");
    }
    let outcomes = futures_util::future::join_all(open.iter().map(Transaction::commit)).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    assert!(
        outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).all(|error| error.code() == Some(1020))
    );
    Ok(())
}

pub(crate) async fn a_failed_transaction_makes_no_one_conflict(f: &Fixture) -> Result<()> {
    let failing = f.started().await?;
    failing.get(&f.key("a"), Serializable).await?;
    failing.set(&f.key("k"), b"v");
    f.put("a", "v").await?;
    let tx = reader(f).await?;
    conflicts(&failing).await;
    tx.commit().await.map(drop)
}

pub(crate) async fn a_conflict_is_found_long_after_the_write(f: &Fixture) -> Result<()> {
    let tx = reader(f).await?;
    f.put("k", "v").await?;
    for n in 0..50 {
        f.put(format!("other{n}"), "v").await?;
    }
    conflicts(&tx).await;
    Ok(())
}
