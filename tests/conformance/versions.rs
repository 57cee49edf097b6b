//! Read versions: which state a transaction reads, and for how long.

use notibus::{
    Result,
    store::{
        Isolation::{Serializable, Snapshot},
        RangeRead, StoreError,
    },
};

use crate::fixture::{Fixture, conflicts, fails};

pub(crate) async fn read_versions_never_go_back(f: &Fixture) -> Result<()> {
    let mut last = 0;
    for n in 0..10_u8 {
        let version = f.store.begin().read_version().await?;
        assert!(version >= last);
        last = version;
        if n % 2 == 0 {
            f.put("k", [n]).await?;
        }
    }
    Ok(())
}

pub(crate) async fn a_commit_raises_the_read_version(f: &Fixture) -> Result<()> {
    let before = f.store.begin().read_version().await?;
    let committed = f.put("k", "v").await?.versionstamp.version();
    let after = f.store.begin().read_version().await?;
    assert!(before < committed && committed <= after);
    Ok(())
}

pub(crate) async fn a_transaction_has_one_read_version(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let version = tx.read_version().await?;
    f.put("k", "v").await?;
    tx.get(&f.key("k"), Snapshot).await?;
    assert_eq!(tx.read_version().await?, version);
    Ok(())
}

pub(crate) async fn an_older_version_shows_the_state_of_then(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b"]).await?;
    let version = f.store.begin().read_version().await?;
    f.put("a", "new").await?;
    f.remove("b").await?;
    f.put("c", "new").await?;
    let tx = f.store.begin();
    tx.set_read_version(version);
    assert_eq!(tx.read_version().await?, version);
    assert_eq!(tx.get(&f.key("a"), Serializable).await?.as_deref(), Some(&b"a"[..]));
    assert_eq!(f.suffixes_in(&tx, RangeRead::new(f.all())).await?, ["a", "b"]);
    Ok(())
}

pub(crate) async fn every_version_in_between_can_be_read(f: &Fixture) -> Result<()> {
    let mut versions = Vec::new();
    for n in 0..10_u8 {
        versions.push((n, f.put("k", [n]).await?.versionstamp.version()));
    }
    for (n, version) in versions.into_iter().rev() {
        let tx = f.store.begin();
        tx.set_read_version(version);
        assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&[n][..]));
    }
    Ok(())
}

pub(crate) async fn a_version_before_a_commit_does_not_show_it(f: &Fixture) -> Result<()> {
    f.put("k", "old").await?;
    let version = f.put("k", "new").await?.versionstamp.version();
    let tx = f.store.begin();
    tx.set_read_version(version - 1);
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&b"old"[..]));
    Ok(())
}

pub(crate) async fn a_version_before_a_commit_shows_nothing_of_its_steps(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b", "c"]).await?;
    let version = f.store.begin().read_version().await?;
    let tx = f.store.begin();
    tx.set(&f.key("a"), b"1");
    tx.set(&f.key("a"), b"2");
    tx.clear(&f.key("b"));
    tx.set(&f.key("b"), b"1");
    tx.clear_range(&f.all());
    tx.set(&f.key("c"), b"1");
    tx.commit().await?;
    let old = f.store.begin();
    old.set_read_version(version);
    for suffix in ["a", "b", "c"] {
        let value = old.get(&f.key(suffix), Snapshot).await?;
        assert_eq!(value.as_deref(), Some(suffix.as_bytes()));
    }
    Ok(())
}

pub(crate) async fn writes_since_an_older_version_conflict(f: &Fixture) -> Result<()> {
    f.put("k", "old").await?;
    let version = f.store.begin().read_version().await?;
    f.put("k", "new").await?;
    let tx = f.store.begin();
    tx.set_read_version(version);
    tx.get(&f.key("k"), Serializable).await?;
    tx.set(&f.key("l"), b"v");
    conflicts(&tx).await;
    let other = f.store.begin();
    other.set_read_version(version);
    other.get(&f.key("m"), Serializable).await?;
    other.set(&f.key("l"), b"v");
    other.commit().await.map(drop)
}

pub(crate) async fn own_writes_lie_over_an_older_version(f: &Fixture) -> Result<()> {
    f.put("k", [1]).await?;
    let version = f.store.begin().read_version().await?;
    f.put("k", [100]).await?;
    let tx = f.store.begin();
    tx.set_read_version(version);
    tx.atomic(notibus::store::AtomicOp::Add, &f.key("k"), &[1]);
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&[2][..]));
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&[101][..]), "it is applied to the newest value");
    Ok(())
}

pub(crate) async fn a_version_to_come_cannot_be_read(f: &Fixture) -> Result<()> {
    let version = f.store.begin().read_version().await?;
    let tx = f.store.begin();
    tx.set_read_version(version + 1_000_000_000_000);
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::FUTURE_VERSION);
    Ok(())
}

pub(crate) async fn an_old_transaction_cannot_read(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = f.store.begin();
    assert!(tx.get(&f.key("k"), Snapshot).await?.is_some());
    f.put("k", "w").await?;
    f.outlive().await;
    f.put("k", "x").await?;
    fails(tx.get(&f.key("other"), Snapshot).await, &StoreError::TRANSACTION_TOO_OLD);
    let read = RangeRead::new(f.all());
    fails(tx.get_range(&read, Snapshot).await, &StoreError::TRANSACTION_TOO_OLD);
    tx.reset();
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&b"x"[..]));
    Ok(())
}

pub(crate) async fn an_old_transaction_cannot_commit_what_it_has_read(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.get(&f.key("k"), Serializable).await?;
    tx.set(&f.key("l"), b"v");
    f.put("m", "v").await?;
    f.outlive().await;
    f.put("m", "w").await?;
    fails(tx.commit().await, &StoreError::TRANSACTION_TOO_OLD);
    assert_eq!(f.suffixes().await?, ["m"]);
    Ok(())
}

/// To learn the result of a commit, FoundationDB adds a read conflict to every transaction whose reads and writes do not overlap; so even a
/// blind write is too old once its transaction has a read version.
pub(crate) async fn an_old_transaction_cannot_write_blindly(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.set(&f.key("l"), b"v");
    f.put("m", "v").await?;
    f.outlive().await;
    f.put("m", "w").await?;
    fails(tx.commit().await, &StoreError::TRANSACTION_TOO_OLD);
    assert_eq!(f.value("l").await?, None);
    Ok(())
}

pub(crate) async fn a_transaction_that_has_read_nothing_does_not_age(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("k"), b"v");
    f.outlive().await;
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"v"[..]));
    Ok(())
}

pub(crate) async fn an_old_version_cannot_be_read(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let version = f.store.begin().read_version().await?;
    f.put("k", "w").await?;
    f.outlive().await;
    f.put("k", "x").await?;
    let tx = f.store.begin();
    tx.set_read_version(version);
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::TRANSACTION_TOO_OLD);
    Ok(())
}

pub(crate) async fn an_old_version_cannot_be_written_at(f: &Fixture) -> Result<()> {
    let version = f.put("k", "v").await?.versionstamp.version();
    f.outlive().await;
    f.put("k", "w").await?;
    let tx = f.store.begin();
    tx.set_read_version(version - 1);
    tx.set(&f.key("l"), b"v");
    fails(tx.commit().await, &StoreError::TRANSACTION_TOO_OLD);
    assert_eq!(f.value("l").await?, None);
    Ok(())
}

pub(crate) async fn an_old_read_only_transaction_still_commits(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.get(&f.key("k"), Serializable).await?;
    f.outlive().await;
    f.put("k", "v").await?;
    assert_eq!(tx.commit().await?, None);
    Ok(())
}

pub(crate) async fn a_version_is_set_only_once_and_before_the_first_read(f: &Fixture) -> Result<()> {
    let expected = &StoreError::READ_VERSION_ALREADY_SET;
    let version = f.put("k", "v").await?.versionstamp.version();
    let twice = f.store.begin();
    twice.set_read_version(version);
    twice.set_read_version(version);
    fails(twice.get(&f.key("k"), Snapshot).await, expected);
    let late = f.started().await?;
    late.set_read_version(version);
    fails(late.get(&f.key("k"), Snapshot).await, expected);
    late.set(&f.key("k"), b"late");
    fails(late.commit().await, expected);
    late.reset();
    late.set_read_version(version);
    assert!(late.get(&f.key("k"), Snapshot).await?.is_some());
    Ok(())
}

pub(crate) async fn version_zero_does_not_exist(f: &Fixture) -> Result<()> {
    assert!(f.store.begin().read_version().await? > 0);
    let tx = f.store.begin();
    tx.set_read_version(0);
    fails(tx.get(&f.key("k"), Snapshot).await, &StoreError::VERSION_INVALID);
    Ok(())
}

pub(crate) async fn a_version_can_be_set_after_writes_and_declared_reads(f: &Fixture) -> Result<()> {
    f.put("k", "old").await?;
    let version = f.store.begin().read_version().await?;
    f.put("k", "new").await?;
    let tx = f.store.begin();
    tx.set(&f.key("out"), b"v");
    tx.add_read_conflict(&f.range("k", "l"));
    tx.set_read_version(version);
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&b"old"[..]));
    conflicts(&tx).await;
    Ok(())
}

pub(crate) async fn declared_reads_alone_are_compared_with_the_state_of_the_commit(
    f: &Fixture,
) -> Result<()> {
    let tx = f.store.begin();
    tx.add_read_conflict(&f.range("k", "l"));
    tx.set(&f.key("out"), b"v");
    f.put("k", "new").await?;
    tx.commit().await.map(drop)
}

/// On a cluster, versions advance by themselves. Regression: those of the embedded store did not, so it accepted a version of any age as
/// long as nothing had been written since.
pub(crate) async fn a_version_gets_old_also_if_nothing_is_written(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let version = f.store.begin().read_version().await?;
    f.outlive().await;
    let tx = f.store.begin();
    tx.set_read_version(version);
    tx.set(&f.key("l"), b"v");
    fails(tx.commit().await, &StoreError::TRANSACTION_TOO_OLD);
    assert_eq!(f.value("l").await?, None);
    // A new read version is not too old.
    let version = f.store.begin().read_version().await?;
    let tx = f.store.begin();
    tx.set_read_version(version);
    assert!(tx.get(&f.key("k"), Serializable).await?.is_some());
    tx.set(&f.key("l"), b"v");
    tx.commit().await.map(drop)
}
