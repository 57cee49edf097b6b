//! Versionstamps: the stamps that a commit writes, and reads that fail before the commit.

use notibus::{
    Result,
    event::Versionstamp,
    store::{
        AtomicOp,
        Isolation::{Serializable, Snapshot},
        KeyRange, RangeRead, StoreError, Transaction,
    },
};

use crate::fixture::{Fixture, conflicts, fails};

/// Returns `before`, the room for a stamp, `after`, and the offset of that room.
fn operand(before: &[u8], after: &[u8]) -> Vec<u8> {
    let place = u32::try_from(before.len()).expect("operands are short");
    [before, &[0; 10], after, &place.to_le_bytes()].concat()
}

/// Sets the key that is `suffix` followed by a stamp to `value`.
fn append(f: &Fixture, tx: &Transaction, suffix: &str, value: &[u8]) {
    let key = operand(&f.key(suffix), b"");
    tx.atomic(AtomicOp::SetVersionstampedKey, &key, value);
}

/// Sets the key `suffix` to a stamp.
fn stamp_value(f: &Fixture, tx: &Transaction, suffix: &str) {
    let value = operand(b"", b"");
    tx.atomic(AtomicOp::SetVersionstampedValue, &f.key(suffix), &value);
}

/// Commits `tx` and returns its stamp.
async fn stamp(tx: &Transaction) -> Result<Versionstamp> {
    let committed = tx.commit().await?.expect("it writes");
    Ok(committed.versionstamp)
}

pub(crate) async fn a_key_carries_the_stamp_of_its_commit(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    append(f, &tx, "k", b"v");
    let stamp = stamp(&tx).await?;
    let page = f.store.begin().get_range(&RangeRead::new(f.all()), Snapshot).await?;
    assert_eq!(page.rows.len(), 1);
    assert_eq!(&page.rows[0].0[..], [&f.key("k")[..], &stamp.0].concat());
    assert_eq!(&page.rows[0].1[..], b"v");
    Ok(())
}

pub(crate) async fn a_value_carries_the_stamp_of_its_commit(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    stamp_value(f, &tx, "k");
    let stamp = stamp(&tx).await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&stamp.0[..]));
    Ok(())
}

pub(crate) async fn a_stamp_lies_at_its_place(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let key = operand(&f.key("a"), b"z");
    tx.atomic(AtomicOp::SetVersionstampedKey, &key, b"");
    let value = operand(b"before", b"after");
    tx.atomic(AtomicOp::SetVersionstampedValue, &f.key("b"), &value);
    let stamp = stamp(&tx).await?;
    let suffix = [b"a", &stamp.0[..], b"z"].concat();
    assert_eq!(f.value(suffix).await?.as_deref(), Some(&b""[..]));
    let expected = [b"before", &stamp.0[..], b"after"].concat();
    assert_eq!(f.value("b").await?.as_deref(), Some(&expected[..]));
    Ok(())
}

pub(crate) async fn a_transaction_has_one_stamp(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    append(f, &tx, "a", b"");
    append(f, &tx, "b", b"");
    stamp_value(f, &tx, "c");
    stamp_value(f, &tx, "d");
    let stamp = stamp(&tx).await?;
    for suffix in [&b"a"[..], b"b"] {
        assert!(f.value([suffix, &stamp.0].concat()).await?.is_some());
    }
    assert_eq!(f.value("c").await?.as_deref(), Some(&stamp.0[..]));
    assert_eq!(f.value("d").await?.as_deref(), Some(&stamp.0[..]));
    Ok(())
}

pub(crate) async fn stamps_grow_from_commit_to_commit(f: &Fixture) -> Result<()> {
    let mut last = f.put("k", "v").await?.versionstamp;
    for _ in 0..20 {
        let tx = f.store.begin();
        append(f, &tx, "k", b"");
        let stamp = stamp(&tx).await?;
        assert!(stamp > last, "{stamp:?} after {last:?}");
        last = stamp;
    }
    Ok(())
}

pub(crate) async fn concurrent_commits_have_stamps_of_their_own(f: &Fixture) -> Result<()> {
    let open: Vec<_> = (0..30).map(|_| f.store.begin()).collect();
    for tx in &open {
        append(f, tx, "k", b"");
    }
    let commits = open.iter().map(stamp);
    let mut stamps = Vec::new();
    for result in futures_util::future::join_all(commits).await {
        stamps.push([&f.key("k")[..], &result?.0].concat());
    }
    stamps.sort();
    let page = f.store.begin().get_range(&RangeRead::new(f.all()), Snapshot).await?;
    let stored: Vec<_> = page.rows.iter().map(|(key, _)| key.to_vec()).collect();
    assert_eq!(stored, stamps);
    assert_eq!(stored.len(), 30);
    Ok(())
}

pub(crate) async fn a_stamp_is_the_version_of_its_commit(f: &Fixture) -> Result<()> {
    let before = f.store.begin().read_version().await?;
    let stamp = f.put("k", "v").await?.versionstamp;
    let after = f.store.begin().read_version().await?;
    assert!(before < stamp.version() && stamp.version() <= after);
    Ok(())
}

pub(crate) async fn a_pending_value_cannot_be_read(f: &Fixture) -> Result<()> {
    f.fill(&["a", "k", "z"]).await?;
    let tx = f.store.begin();
    stamp_value(f, &tx, "k");
    fails(tx.get(&f.key("k"), Serializable).await, &StoreError::ACCESSED_UNREADABLE);
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::ACCESSED_UNREADABLE);
    assert!(tx.get(&f.key("a"), Serializable).await?.is_some());
    // On a cluster, a failed read makes the commit fail. Regression: the embedded engine committed the transaction.
    fails(tx.commit().await, &StoreError::ACCESSED_UNREADABLE);
    Ok(())
}

pub(crate) async fn a_range_with_a_pending_value_cannot_be_read(f: &Fixture) -> Result<()> {
    f.fill(&["a", "k", "z"]).await?;
    let tx = f.store.begin();
    stamp_value(f, &tx, "k");
    let all = RangeRead::new(f.all());
    fails(tx.get_range(&all, Snapshot).await, &StoreError::ACCESSED_UNREADABLE);
    fails(tx.get_range(&all.reverse(), Serializable).await, &StoreError::ACCESSED_UNREADABLE);
    assert_eq!(f.suffixes_in(&tx, RangeRead::new(f.range("a", "k"))).await?, ["a"]);
    assert_eq!(f.suffixes_in(&tx, RangeRead::new(f.range("l", "zz"))).await?, ["z"]);
    Ok(())
}

pub(crate) async fn a_range_with_a_pending_key_cannot_be_read(f: &Fixture) -> Result<()> {
    f.fill(&["a", "z"]).await?;
    let tx = f.store.begin();
    append(f, &tx, "k", b"");
    let all = RangeRead::new(f.all());
    fails(tx.get_range(&all, Serializable).await, &StoreError::ACCESSED_UNREADABLE);
    fails(tx.get_range(&all.reverse(), Snapshot).await, &StoreError::ACCESSED_UNREADABLE);
    assert_eq!(f.suffixes_in(&tx, RangeRead::new(f.range("a", "k"))).await?, ["a"]);
    assert_eq!(f.suffixes_in(&tx, RangeRead::new(f.range("l", "zz"))).await?, ["z"]);
    Ok(())
}

pub(crate) async fn a_key_where_a_pending_one_may_lie_cannot_be_read(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    append(f, &tx, "k", b"");
    let possible = f.key([b"k", &[0x7f; 10][..]].concat());
    fails(tx.get(&possible, Snapshot).await, &StoreError::ACCESSED_UNREADABLE);
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?, None);
    assert_eq!(tx.get(&f.key("l"), Snapshot).await?, None);
    Ok(())
}

/// A transaction that has appended to a feed can still read the rows before its read version, which cannot be the new row.
pub(crate) async fn rows_before_the_read_version_are_readable_beside_a_pending_key(
    f: &Fixture,
) -> Result<()> {
    let first = f.store.begin();
    append(f, &first, "k", b"1");
    let first = f.key([b"k", &stamp(&first).await?.0[..]].concat());
    // Stamps also have an order within a version, so the first row is certain to be older only if the read version is greater.
    f.put("other", "v").await?;
    let tx = f.started().await?;
    append(f, &tx, "k", b"2");
    assert_eq!(tx.get(&first, Snapshot).await?.as_deref(), Some(&b"1"[..]));
    let old = RangeRead::new(KeyRange::new(f.key("k"), [&first[..], &[0]].concat()));
    assert_eq!(tx.get_range(&old, Snapshot).await?.rows.len(), 1);
    let all = RangeRead::new(f.all());
    fails(tx.get_range(&all, Snapshot).await, &StoreError::ACCESSED_UNREADABLE);
    Ok(())
}

pub(crate) async fn a_set_does_not_make_a_pending_value_readable(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    stamp_value(f, &tx, "k");
    tx.set(&f.key("k"), b"v");
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&[b'v' + 1][..]));
    let tx = f.store.begin();
    stamp_value(f, &tx, "k");
    tx.set(&f.key("k"), b"v");
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::ACCESSED_UNREADABLE);
    Ok(())
}

pub(crate) async fn a_clear_makes_a_pending_value_readable(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    stamp_value(f, &tx, "k");
    tx.clear(&f.key("k"));
    assert_eq!(tx.get(&f.key("k"), Serializable).await?, None);
    tx.set(&f.key("k"), b"v");
    assert_eq!(tx.get(&f.key("k"), Serializable).await?.as_deref(), Some(&b"v"[..]));
    assert_eq!(f.suffixes_in(&tx, RangeRead::new(f.all())).await?, ["k"]);
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"v"[..]));
    Ok(())
}

pub(crate) async fn clearing_the_range_takes_a_pending_key_back(f: &Fixture) -> Result<()> {
    f.fill(&["a", "z"]).await?;
    let tx = f.store.begin();
    append(f, &tx, "k", b"");
    tx.clear_range(&f.range("k", "l"));
    assert_eq!(f.suffixes_in(&tx, RangeRead::new(f.all())).await?, ["a", "z"]);
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["a", "z"]);
    Ok(())
}

pub(crate) async fn a_key_appended_after_a_clear_is_pending_and_stays(f: &Fixture) -> Result<()> {
    f.fill(&["a", "k1", "z"]).await?;
    let tx = f.store.begin();
    tx.clear_range(&f.all());
    append(f, &tx, "k", b"");
    tx.commit().await?;
    let all = RangeRead::new(f.all());
    assert_eq!(f.store.begin().get_range(&all, Snapshot).await?.rows.len(), 1);
    let tx = f.store.begin();
    tx.clear_range(&f.all());
    append(f, &tx, "k", b"");
    fails(tx.get_range(&all, Snapshot).await, &StoreError::ACCESSED_UNREADABLE);
    Ok(())
}

/// Commits an operation with `key` and `value` together with a valid write, and asserts that it is refused.
async fn refused(f: &Fixture, op: AtomicOp, key: &[u8], value: &[u8]) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("good"), b"v");
    tx.atomic(op, key, value);
    fails(tx.get(&f.key("a"), Snapshot).await, &StoreError::CLIENT_INVALID_OPERATION);
    fails(tx.commit().await, &StoreError::CLIENT_INVALID_OPERATION);
    assert!(f.suffixes().await?.is_empty(), "{op:?} {key:?}");
    Ok(())
}

pub(crate) async fn a_place_outside_the_key_is_refused(f: &Fixture) -> Result<()> {
    let room = u32::try_from(f.key("k").len()).expect("keys are short");
    for place in [room + 1, room + 11, u32::MAX] {
        let key = [&f.key("k")[..], &[0; 10], &place.to_le_bytes()].concat();
        refused(f, AtomicOp::SetVersionstampedKey, &key, b"").await?;
    }
    Ok(())
}

pub(crate) async fn a_place_outside_the_value_is_refused(f: &Fixture) -> Result<()> {
    for bad in [&b""[..], b"abc", &[0; 13], &[&[0; 10][..], &[1, 0, 0, 0]].concat(), &[0xff; 20]] {
        refused(f, AtomicOp::SetVersionstampedValue, &f.key("k"), bad).await?;
    }
    Ok(())
}

pub(crate) async fn appends_do_not_conflict_with_each_other(f: &Fixture) -> Result<()> {
    let (a, b) = (f.started().await?, f.started().await?);
    append(f, &a, "k", b"a");
    append(f, &b, "k", b"b");
    a.commit().await?;
    b.commit().await?;
    assert_eq!(f.suffixes().await?.len(), 2);
    Ok(())
}

pub(crate) async fn a_scan_conflicts_with_an_append_to_its_range(f: &Fixture) -> Result<()> {
    let appending = f.started().await?;
    append(f, &appending, "k", b"");
    let (tail, other) = (f.started().await?, f.started().await?);
    f.suffixes_in(&tail, RangeRead::new(f.range("k", "l"))).await?;
    f.suffixes_in(&other, RangeRead::new(f.range("l", "m"))).await?;
    tail.set(&f.key("a"), b"");
    other.set(&f.key("b"), b"");
    appending.commit().await?;
    conflicts(&tail).await;
    other.commit().await?;
    Ok(())
}

pub(crate) async fn a_reader_conflicts_with_a_stamped_value(f: &Fixture) -> Result<()> {
    let reader = f.store.begin();
    reader.get(&f.key("k"), Serializable).await?;
    reader.set(&f.key("a"), b"");
    let tx = f.store.begin();
    stamp_value(f, &tx, "k");
    tx.commit().await?;
    conflicts(&reader).await;
    Ok(())
}
