//! Blind writes, and what is stored after their commit.

use notibus::{
    Result,
    store::{KeyRange, Transaction},
};

use crate::fixture::Fixture;

pub(crate) async fn a_set_replaces(f: &Fixture) -> Result<()> {
    f.put("k", "a longer value").await?;
    f.put("k", "v").await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&b"v"[..]));
    Ok(())
}

pub(crate) async fn a_clear_removes(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b"]).await?;
    f.remove("a").await?;
    assert_eq!(f.suffixes().await?, ["b"]);
    Ok(())
}

pub(crate) async fn clearing_a_missing_key_is_no_error(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.clear(&f.key("k"));
    assert!(tx.commit().await?.is_some(), "a clear is a write, whatever it finds");
    assert!(f.suffixes().await?.is_empty());
    Ok(())
}

pub(crate) async fn clear_range_removes_just_its_keys(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b", "b\0", "c", "c\0", "d"]).await?;
    let tx = f.store.begin();
    tx.clear_range(&f.range("b", "c"));
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["a", "c", "c\0", "d"]);
    Ok(())
}

pub(crate) async fn clearing_an_empty_range_removes_nothing(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b"]).await?;
    let tx = f.store.begin();
    tx.clear_range(&f.range("b", "b"));
    tx.set(&f.key("c"), b"c");
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["a", "b", "c"]);
    Ok(())
}

pub(crate) async fn the_last_write_of_a_key_wins(f: &Fixture) -> Result<()> {
    f.put("b", "stored").await?;
    let tx = f.store.begin();
    tx.set(&f.key("a"), b"1");
    tx.clear(&f.key("a"));
    tx.set(&f.key("a"), b"2");
    tx.set(&f.key("b"), b"1");
    tx.clear(&f.key("b"));
    tx.commit().await?;
    assert_eq!(f.value("a").await?.as_deref(), Some(&b"2"[..]));
    assert_eq!(f.value("b").await?, None);
    Ok(())
}

pub(crate) async fn a_set_after_clear_range_stays(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b", "c"]).await?;
    let tx = f.store.begin();
    tx.clear_range(&f.all());
    tx.set(&f.key("b"), b"new");
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["b"]);
    assert_eq!(f.value("b").await?.as_deref(), Some(&b"new"[..]));
    Ok(())
}

pub(crate) async fn a_set_before_clear_range_goes(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("a"), b"new");
    tx.set(&f.key("b"), b"new");
    tx.clear_range(&f.range("b", "c"));
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["a"]);
    Ok(())
}

pub(crate) async fn overlapping_clear_ranges_add_up(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b", "c", "d", "e"]).await?;
    let tx = f.store.begin();
    tx.clear_range(&f.range("b", "d"));
    tx.clear_range(&f.range("c", "e"));
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["a", "e"]);
    Ok(())
}

pub(crate) async fn the_longest_key_and_value_are_kept(f: &Fixture) -> Result<()> {
    let mut suffix = vec![b'k'; Transaction::KEY_LEN_MAX];
    suffix.truncate(Transaction::KEY_LEN_MAX - f.key("").len());
    let value = vec![7; Transaction::VALUE_LEN_MAX];
    assert_eq!(f.key(&suffix).len(), Transaction::KEY_LEN_MAX);
    f.put(&suffix, &value).await?;
    assert_eq!(f.value(&suffix).await?.as_deref(), Some(&value[..]));
    Ok(())
}

pub(crate) async fn a_single_key_range_clears_just_the_key(f: &Fixture) -> Result<()> {
    f.fill(&["a", "a\0", "b"]).await?;
    let tx = f.store.begin();
    tx.clear_range(&KeyRange::key(&f.key("a")));
    tx.commit().await?;
    assert_eq!(f.suffixes().await?, ["a\0", "b"]);
    Ok(())
}

pub(crate) async fn many_keys_commit_together(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    for n in 0..2_000_u32 {
        tx.set(&f.key(n.to_be_bytes()), &n.to_le_bytes());
    }
    tx.commit().await?;
    assert_eq!(f.suffixes().await?.len(), 2_000);
    assert_eq!(f.value(1_999_u32.to_be_bytes()).await?.as_deref(), Some(&1_999_u32.to_le_bytes()[..]));
    Ok(())
}
