//! Reads of single keys: they see one version, and no writes of other transactions before their commits.

use notibus::{
    Result,
    store::Isolation::{Serializable, Snapshot},
};

use crate::{
    fixture::{Fixture, conflicts, soon},
    moved::moved,
};

pub(crate) async fn a_missing_key_reads_as_none(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    assert_eq!(tx.get(&f.key("k"), Serializable).await?, None);
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?, None);
    Ok(())
}

pub(crate) async fn a_committed_value_is_read_by_later_transactions(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = f.store.begin();
    assert_eq!(tx.get(&f.key("k"), Serializable).await?.as_deref(), Some(&b"v"[..]));
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&b"v"[..]));
    Ok(())
}

pub(crate) async fn an_empty_value_is_not_a_missing_one(f: &Fixture) -> Result<()> {
    f.put("k", "").await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&b""[..]));
    Ok(())
}

pub(crate) async fn keys_differ_by_every_byte(f: &Fixture) -> Result<()> {
    for (suffix, value) in [(&b"k"[..], "1"), (b"k\0", "2"), (b"k\xff", "3"), (b"", "4")] {
        f.put(suffix, value).await?;
    }
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"1"[..]));
    assert_eq!(f.value("k\0").await?.as_deref(), Some(&b"2"[..]));
    assert_eq!(f.value(b"k\xff").await?.as_deref(), Some(&b"3"[..]));
    assert_eq!(f.value("").await?.as_deref(), Some(&b"4"[..]));
    assert_eq!(f.value("k\0\0").await?, None);
    Ok(())
}

pub(crate) async fn values_keep_every_byte(f: &Fixture) -> Result<()> {
    let value: Vec<u8> = (0..=255).collect();
    f.put("k", &value).await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&value[..]));
    Ok(())
}

pub(crate) async fn a_transaction_keeps_reading_its_version(f: &Fixture) -> Result<()> {
    f.put("k", "old").await?;
    let tx = f.started().await?;
    f.put("k", "new").await?;
    f.put("l", "new").await?;
    assert_eq!(tx.get(&f.key("k"), Serializable).await?.as_deref(), Some(&b"old"[..]));
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&b"old"[..]));
    assert_eq!(tx.get(&f.key("l"), Snapshot).await?, None);
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"new"[..]));
    Ok(())
}

pub(crate) async fn a_removed_key_is_still_read_at_an_older_version(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    let tx = f.started().await?;
    f.remove("k").await?;
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&b"v"[..]));
    assert_eq!(f.value("k").await?, None);
    Ok(())
}

pub(crate) async fn an_uncommitted_write_is_invisible_to_others(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("k"), b"v");
    assert_eq!(tx.get(&f.key("k"), Snapshot).await?.as_deref(), Some(&b"v"[..]));
    assert_eq!(f.value("k").await?, None);
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"v"[..]));
    Ok(())
}

pub(crate) async fn a_dropped_transaction_leaves_nothing(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.set(&f.key("k"), b"v");
    drop(tx);
    assert_eq!(f.value("k").await?, None);
    Ok(())
}

pub(crate) async fn a_failed_commit_leaves_nothing(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.get(&f.key("read"), Serializable).await?;
    tx.set(&f.key("a"), b"v");
    tx.set(&f.key("b"), b"v");
    f.put("read", "changed").await?;
    conflicts(&tx).await;
    assert_eq!(f.suffixes().await?, ["read"]);
    Ok(())
}

pub(crate) async fn a_commit_is_seen_whole(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b", "c"]).await?;
    let before = f.started().await?;
    let tx = f.store.begin();
    tx.set(&f.key("a"), b"new");
    tx.clear(&f.key("b"));
    tx.set(&f.key("d"), b"new");
    tx.commit().await?;
    assert_eq!(before.get(&f.key("a"), Snapshot).await?.as_deref(), Some(&b"a"[..]));
    assert_eq!(before.get(&f.key("b"), Snapshot).await?.as_deref(), Some(&b"b"[..]));
    assert_eq!(before.get(&f.key("d"), Snapshot).await?, None);
    assert_eq!(f.suffixes().await?, ["a", "c", "d"]);
    assert_eq!(f.value("a").await?.as_deref(), Some(&b"new"[..]));
    Ok(())
}

/// Regression: on a cluster, one in a thousand futures that moved to another waker missed its wake-up, so it waited forever.
pub(crate) async fn a_future_can_be_moved_between_wakers(f: &Fixture) -> Result<()> {
    f.put("k", "v").await?;
    for n in 0..1_000 {
        let tx = f.store.begin();
        let polls = fastrand::u32(..2_000);
        let value = soon(moved(tx.get(&f.key("k"), Snapshot), polls)).await?;
        assert_eq!(value.as_deref(), Some(&b"v"[..]));
        if n % 10 == 0 {
            tx.set(&f.key("l"), b"v");
            soon(moved(tx.commit(), polls)).await?;
            let tx = f.store.begin();
            let watch = tx.watch(&f.key("m")).await?;
            tx.commit().await?;
            f.put("m", n.to_string()).await?;
            soon(moved(watch, polls)).await?;
        }
    }
    Ok(())
}
