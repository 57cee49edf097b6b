//! Atomic operations. Each rule is checked twice: on the result of the commit, and on what the transaction itself reads.

use notibus::{
    Result,
    store::{AtomicOp, Isolation::Snapshot},
};

use crate::fixture::Fixture;

/// Asserts the result of `op` on `stored`, as read within the transaction and after its commit.
async fn check(
    f: &Fixture,
    op: AtomicOp,
    stored: Option<&[u8]>,
    operand: &[u8],
    expected: Option<&[u8]>,
) -> Result<()> {
    match stored {
        Some(value) => drop(f.put("k", value).await?),
        None => f.remove("k").await?,
    }
    let tx = f.store.begin();
    tx.atomic(op, &f.key("k"), operand);
    let own = tx.get(&f.key("k"), Snapshot).await?;
    assert_eq!(own.as_deref(), expected, "{op:?} {operand:?} over {stored:?}, own");
    tx.commit().await?;
    let left = f.value("k").await?;
    assert_eq!(left.as_deref(), expected, "{op:?} {operand:?} over {stored:?}, committed");

    // The same holds for a value that the transaction has set itself.
    let tx = f.store.begin();
    match stored {
        Some(value) => tx.set(&f.key("k"), value),
        None => tx.clear(&f.key("k")),
    }
    tx.atomic(op, &f.key("k"), operand);
    let own = tx.get(&f.key("k"), Snapshot).await?;
    assert_eq!(own.as_deref(), expected, "{op:?} {operand:?} over own {stored:?}");
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), expected);
    Ok(())
}

/// Does the same as [`check`], for an operation that leaves a value.
async fn leaves(f: &Fixture, op: AtomicOp, stored: &[u8], operand: &[u8], left: &[u8]) -> Result<()> {
    check(f, op, Some(stored), operand, Some(left)).await
}

pub(crate) async fn add_starts_a_missing_key(f: &Fixture) -> Result<()> {
    check(f, AtomicOp::Add, None, &[7, 0, 1], Some(&[7, 0, 1])).await
}

pub(crate) async fn add_carries(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Add, &[255, 255, 0], &[1, 0, 0], &[0, 0, 1]).await
}

pub(crate) async fn add_wraps(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Add, &[255, 255], &[2, 0], &[1, 0]).await
}

pub(crate) async fn add_of_minus_one_subtracts(f: &Fixture) -> Result<()> {
    let minus_one = (-1_i64).to_le_bytes();
    leaves(f, AtomicOp::Add, &1_000_u64.to_le_bytes(), &minus_one, &999_u64.to_le_bytes()).await
}

pub(crate) async fn add_extends_a_shorter_value(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Add, &[255], &[1, 0, 0], &[0, 1, 0]).await
}

pub(crate) async fn add_cuts_a_longer_value(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Add, &[1, 2, 3], &[255], &[0]).await
}

pub(crate) async fn add_over_an_empty_value_is_the_operand(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Add, b"", &[1, 2], &[1, 2]).await
}

pub(crate) async fn add_of_nothing_leaves_an_empty_value(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Add, &[1, 2], b"", b"").await
}

/// The numbers are longer than any word in which a store may compute their sum.
pub(crate) async fn add_carries_through_long_numbers(f: &Fixture) -> Result<()> {
    let (mut ones, mut one, mut carried) = ([0xff; 19], [0; 19], [0; 19]);
    one[0] = 1;
    leaves(f, AtomicOp::Add, &ones, &one, &[0; 19]).await?;
    ones[18] = 0;
    carried[18] = 1;
    leaves(f, AtomicOp::Add, &ones, &one, &carried).await?;
    let mut extended = [0; 19];
    extended[9] = 1;
    leaves(f, AtomicOp::Add, &ones[..9], &one, &extended).await?;
    leaves(f, AtomicOp::Add, &ones, &[1, 2], &[0, 2]).await
}

pub(crate) async fn max_keeps_the_greater_number(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Max, &[0, 1], &[255, 0], &[0, 1]).await?;
    leaves(f, AtomicOp::Max, &[255, 0], &[0, 1], &[0, 1]).await?;
    leaves(f, AtomicOp::Max, &[5], &[5], &[5]).await
}

pub(crate) async fn max_on_a_missing_key_is_the_operand(f: &Fixture) -> Result<()> {
    check(f, AtomicOp::Max, None, &[0, 0], Some(&[0, 0])).await
}

pub(crate) async fn max_has_the_length_of_the_operand(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Max, &[9, 9], &[5], &[9]).await?;
    leaves(f, AtomicOp::Max, &[9], &[5, 0], &[9, 0]).await?;
    leaves(f, AtomicOp::Max, &[9], &[5, 1], &[5, 1]).await
}

pub(crate) async fn min_keeps_the_smaller_number(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Min, &[0, 1], &[255, 0], &[255, 0]).await?;
    leaves(f, AtomicOp::Min, &[255, 0], &[0, 1], &[255, 0]).await?;
    leaves(f, AtomicOp::Min, &[5], &[5], &[5]).await
}

pub(crate) async fn min_on_a_missing_key_is_the_operand(f: &Fixture) -> Result<()> {
    check(f, AtomicOp::Min, None, &[5, 1], Some(&[5, 1])).await
}

pub(crate) async fn min_takes_an_empty_value_for_zero(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Min, b"", &[5, 1], &[0, 0]).await
}

pub(crate) async fn min_has_the_length_of_the_operand(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::Min, &[3, 9], &[5], &[3]).await?;
    leaves(f, AtomicOp::Min, &[3], &[5, 0], &[3, 0]).await?;
    leaves(f, AtomicOp::Min, &[7, 9], &[5], &[5]).await
}

pub(crate) async fn byte_max_keeps_the_greater_text(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::ByteMax, b"b", b"ab", b"b").await?;
    leaves(f, AtomicOp::ByteMax, b"ab", b"b", b"b").await?;
    leaves(f, AtomicOp::ByteMax, b"a", b"a\0", b"a\0").await?;
    leaves(f, AtomicOp::ByteMax, b"a", b"", b"a").await
}

pub(crate) async fn byte_min_keeps_the_smaller_text(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::ByteMin, b"b", b"ab", b"ab").await?;
    leaves(f, AtomicOp::ByteMin, b"ab", b"b", b"ab").await?;
    leaves(f, AtomicOp::ByteMin, b"a", b"a\0", b"a").await?;
    leaves(f, AtomicOp::ByteMin, b"", b"a", b"").await
}

pub(crate) async fn byte_max_and_min_on_a_missing_key_are_the_operand(f: &Fixture) -> Result<()> {
    check(f, AtomicOp::ByteMax, None, b"x", Some(b"x")).await?;
    check(f, AtomicOp::ByteMin, None, b"x", Some(b"x")).await
}

pub(crate) async fn compare_and_clear_clears_what_is_equal(f: &Fixture) -> Result<()> {
    check(f, AtomicOp::CompareAndClear, Some(b"x"), b"x", None).await?;
    check(f, AtomicOp::CompareAndClear, Some(b""), b"", None).await
}

pub(crate) async fn compare_and_clear_keeps_what_differs(f: &Fixture) -> Result<()> {
    leaves(f, AtomicOp::CompareAndClear, b"x", b"y", b"x").await?;
    leaves(f, AtomicOp::CompareAndClear, b"x\0", b"x", b"x\0").await?;
    leaves(f, AtomicOp::CompareAndClear, b"x", b"", b"x").await
}

pub(crate) async fn compare_and_clear_leaves_a_missing_key_missing(f: &Fixture) -> Result<()> {
    check(f, AtomicOp::CompareAndClear, None, b"x", None).await?;
    check(f, AtomicOp::CompareAndClear, None, b"", None).await
}

pub(crate) async fn operations_apply_in_their_order(f: &Fixture) -> Result<()> {
    f.put("k", [1]).await?;
    let tx = f.store.begin();
    tx.atomic(AtomicOp::Add, &f.key("k"), &[4]);
    tx.atomic(AtomicOp::Max, &f.key("k"), &[3]);
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    tx.atomic(AtomicOp::Min, &f.key("k"), &[200]);
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1, 1]);
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&[7, 1][..]));
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&[7, 1][..]));
    Ok(())
}

/// Two `ADD`s are not the same as one `ADD` of their sum: the result has the length of the operand, so a short operand truncates it.
pub(crate) async fn operations_of_other_lengths_are_not_merged(f: &Fixture) -> Result<()> {
    f.put("k", [255, 255, 255]).await?;
    let tx = f.store.begin();
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1, 0]);
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&[1, 0][..]));
    Ok(())
}

pub(crate) async fn an_operation_after_a_clear_starts_again(f: &Fixture) -> Result<()> {
    f.put("k", [9]).await?;
    f.put("l", [9]).await?;
    let tx = f.store.begin();
    tx.clear(&f.key("k"));
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    tx.clear_range(&f.range("l", "m"));
    tx.atomic(AtomicOp::Max, &f.key("l"), &[2]);
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&[1][..]));
    assert_eq!(f.value("l").await?.as_deref(), Some(&[2][..]));
    Ok(())
}

/// Subtracts `n` from the counter at "k", and removes the counter if nothing is left.
async fn drain(f: &Fixture, n: u64) -> Result<()> {
    let tx = f.store.begin();
    tx.atomic(AtomicOp::Add, &f.key("k"), &n.wrapping_neg().to_le_bytes());
    tx.atomic(AtomicOp::CompareAndClear, &f.key("k"), &[0; 8]);
    tx.commit().await.map(drop)
}

pub(crate) async fn the_drain_pair_removes_an_empty_counter(f: &Fixture) -> Result<()> {
    f.operate(AtomicOp::Add, "k", &5_u64.to_le_bytes()).await?;
    drain(f, 5).await?;
    assert_eq!(f.value("k").await?, None);
    Ok(())
}

pub(crate) async fn the_drain_pair_keeps_what_came_in_between(f: &Fixture) -> Result<()> {
    f.operate(AtomicOp::Add, "k", &5_u64.to_le_bytes()).await?;
    let tx = f.store.begin();
    let seen = tx.get(&f.key("k"), Snapshot).await?.expect("it was counted");
    assert_eq!(&seen[..], &5_u64.to_le_bytes());
    f.operate(AtomicOp::Add, "k", &2_u64.to_le_bytes()).await?;
    tx.atomic(AtomicOp::Add, &f.key("k"), &5_u64.wrapping_neg().to_le_bytes());
    tx.atomic(AtomicOp::CompareAndClear, &f.key("k"), &[0; 8]);
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&2_u64.to_le_bytes()[..]));
    drain(f, 2).await?;
    assert_eq!(f.value("k").await?, None);
    Ok(())
}

pub(crate) async fn every_concurrent_add_counts(f: &Fixture) -> Result<()> {
    let open: Vec<_> = (0..50).map(|_| f.store.begin()).collect();
    for tx in &open {
        tx.get(&f.key("k"), Snapshot).await?;
        tx.atomic(AtomicOp::Add, &f.key("k"), &1_u64.to_le_bytes());
    }
    let commits = open.iter().map(notibus::store::Transaction::commit);
    for result in futures_util::future::join_all(commits).await {
        result?;
    }
    assert_eq!(f.value("k").await?.as_deref(), Some(&50_u64.to_le_bytes()[..]));
    Ok(())
}
