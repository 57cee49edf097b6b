//! A transaction sees its own writes on top of the stored rows.

use notibus::{
    Result,
    store::{
        AtomicOp,
        Isolation::{self, Serializable, Snapshot},
        RangeRead, Transaction,
    },
};

use crate::fixture::{Fixture, conflicts};

/// Returns the value that `tx` reads at `suffix`, which must not depend on the isolation.
async fn own(f: &Fixture, tx: &Transaction, suffix: &str) -> Result<Option<Vec<u8>>> {
    let value = tx.get(&f.key(suffix), Serializable).await?;
    assert_eq!(tx.get(&f.key(suffix), Snapshot).await?, value);
    Ok(value.map(|value| value.to_vec()))
}

/// Returns the rows that `tx` reads, as text.
async fn rows(f: &Fixture, tx: &Transaction, read: &RangeRead, isolation: Isolation) -> Result<String> {
    let page = tx.get_range(read, isolation).await?;
    let rows: Vec<_> = page
        .rows
        .iter()
        .map(|(key, value)| format!("{}={}", f.suffix(key), String::from_utf8_lossy(value)))
        .collect();
    Ok(rows.join(" "))
}

/// Stores the rows a, c, e and g, and returns a transaction that has set b and e, cleared c, and added to g.
async fn mixed(f: &Fixture) -> Result<Transaction> {
    f.fill(&["a", "c", "e", "g"]).await?;
    let tx = f.store.begin();
    tx.set(&f.key("b"), b"new");
    tx.set(&f.key("e"), b"new");
    tx.clear(&f.key("c"));
    tx.atomic(AtomicOp::Add, &f.key("g"), &[1]);
    Ok(tx)
}

pub(crate) async fn a_set_is_read(f: &Fixture) -> Result<()> {
    f.put("k", "stored").await?;
    let tx = f.store.begin();
    tx.set(&f.key("k"), b"own");
    tx.set(&f.key("l"), b"own");
    assert_eq!(own(f, &tx, "k").await?, Some(b"own".to_vec()));
    assert_eq!(own(f, &tx, "l").await?, Some(b"own".to_vec()));
    Ok(())
}

pub(crate) async fn a_write_after_a_read_is_read(f: &Fixture) -> Result<()> {
    f.put("k", "stored").await?;
    let tx = f.store.begin();
    assert_eq!(own(f, &tx, "k").await?, Some(b"stored".to_vec()));
    tx.set(&f.key("k"), b"own");
    assert_eq!(own(f, &tx, "k").await?, Some(b"own".to_vec()));
    tx.clear(&f.key("k"));
    assert_eq!(own(f, &tx, "k").await?, None);
    Ok(())
}

pub(crate) async fn cleared_keys_read_as_missing(f: &Fixture) -> Result<()> {
    f.fill(&["k", "l", "m"]).await?;
    let tx = f.store.begin();
    tx.clear(&f.key("k"));
    tx.clear_range(&f.range("l", "m"));
    assert_eq!(own(f, &tx, "k").await?, None);
    assert_eq!(own(f, &tx, "l").await?, None);
    assert_eq!(own(f, &tx, "m").await?, Some(b"m".to_vec()));
    Ok(())
}

pub(crate) async fn an_operation_on_an_unread_key_is_read_over_what_is_stored(f: &Fixture) -> Result<()> {
    f.put("k", [5]).await?;
    let tx = f.store.begin();
    tx.atomic(AtomicOp::Add, &f.key("k"), &[2]);
    tx.atomic(AtomicOp::Add, &f.key("l"), &[2]);
    assert_eq!(own(f, &tx, "k").await?, Some(vec![7]));
    assert_eq!(own(f, &tx, "l").await?, Some(vec![2]));
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    assert_eq!(own(f, &tx, "k").await?, Some(vec![8]));
    Ok(())
}

pub(crate) async fn the_drain_pair_is_read(f: &Fixture) -> Result<()> {
    f.put("k", [5]).await?;
    let tx = f.store.begin();
    tx.atomic(AtomicOp::Add, &f.key("k"), &5_u8.wrapping_neg().to_le_bytes());
    assert_eq!(own(f, &tx, "k").await?, Some(vec![0]));
    tx.atomic(AtomicOp::CompareAndClear, &f.key("k"), &[0]);
    assert_eq!(own(f, &tx, "k").await?, None);
    tx.atomic(AtomicOp::Add, &f.key("k"), &[3]);
    assert_eq!(own(f, &tx, "k").await?, Some(vec![3]));
    tx.commit().await?;
    assert_eq!(f.value("k").await?.as_deref(), Some(&[3][..]));
    Ok(())
}

pub(crate) async fn a_set_hides_earlier_operations(f: &Fixture) -> Result<()> {
    f.put("k", [5]).await?;
    let tx = f.store.begin();
    tx.atomic(AtomicOp::Add, &f.key("k"), &[1]);
    tx.set(&f.key("k"), &[9]);
    assert_eq!(own(f, &tx, "k").await?, Some(vec![9]));
    Ok(())
}

pub(crate) async fn a_range_merges_own_and_stored_rows(f: &Fixture) -> Result<()> {
    let tx = mixed(f).await?;
    let read = RangeRead::new(f.all());
    for isolation in [Serializable, Snapshot] {
        assert_eq!(rows(f, &tx, &read, isolation).await?, "a=a b=new e=new g=h");
    }
    Ok(())
}

pub(crate) async fn a_reverse_range_merges_the_same_rows(f: &Fixture) -> Result<()> {
    let tx = mixed(f).await?;
    let read = RangeRead::new(f.all()).reverse();
    for isolation in [Serializable, Snapshot] {
        assert_eq!(rows(f, &tx, &read, isolation).await?, "g=h e=new b=new a=a");
    }
    Ok(())
}

pub(crate) async fn a_limit_counts_merged_rows(f: &Fixture) -> Result<()> {
    let tx = mixed(f).await?;
    let read = RangeRead::new(f.all()).limit(3);
    assert_eq!(rows(f, &tx, &read, Snapshot).await?, "a=a b=new e=new");
    let page = tx.get_range(&read, Snapshot).await?;
    assert!(page.more);
    let reverse = read.reverse();
    assert_eq!(rows(f, &tx, &reverse, Snapshot).await?, "g=h e=new b=new");
    Ok(())
}

pub(crate) async fn pages_go_through_merged_rows(f: &Fixture) -> Result<()> {
    let tx = mixed(f).await?;
    for (reverse, expected) in [(false, "abeg"), (true, "geba")] {
        let mut read = RangeRead::new(f.all()).limit(1);
        read.reverse = reverse;
        let mut pages = tx.pages(read, Serializable);
        let mut seen = String::new();
        while let Some(rows) = pages.next().await? {
            seen.extend(rows.iter().map(|(key, _)| f.suffix(key)));
        }
        assert_eq!(seen, expected);
    }
    Ok(())
}

pub(crate) async fn a_range_sees_just_its_part_of_own_writes(f: &Fixture) -> Result<()> {
    let tx = mixed(f).await?;
    let read = RangeRead::new(f.range("b\0", "g"));
    assert_eq!(rows(f, &tx, &read, Snapshot).await?, "e=new");
    Ok(())
}

pub(crate) async fn a_cleared_range_hides_rows_but_for_later_sets(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b", "c", "d", "e", "f"]).await?;
    let tx = f.store.begin();
    tx.set(&f.key("bb"), b"gone");
    tx.clear_range(&f.range("b", "f"));
    tx.set(&f.key("d"), b"new");
    let read = RangeRead::new(f.all());
    assert_eq!(rows(f, &tx, &read, Snapshot).await?, "a=a d=new f=f");
    assert_eq!(rows(f, &tx, &read.clone().reverse(), Snapshot).await?, "f=f d=new a=a");
    assert_eq!(rows(f, &tx, &read.clone().limit(2), Snapshot).await?, "a=a d=new");
    let inside = RangeRead::new(f.range("bb", "e"));
    assert_eq!(rows(f, &tx, &inside, Snapshot).await?, "d=new");
    assert_eq!(rows(f, &tx, &inside.reverse(), Snapshot).await?, "d=new");
    Ok(())
}

pub(crate) async fn operations_in_a_range_are_read_over_stored_rows(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b", "c"]).await?;
    let tx = f.store.begin();
    tx.atomic(AtomicOp::ByteMax, &f.key("a"), b"z");
    tx.atomic(AtomicOp::CompareAndClear, &f.key("b"), b"b");
    tx.atomic(AtomicOp::CompareAndClear, &f.key("c"), b"other");
    tx.atomic(AtomicOp::CompareAndClear, &f.key("d"), b"d");
    tx.atomic(AtomicOp::ByteMin, &f.key("e"), b"new");
    let read = RangeRead::new(f.all());
    assert_eq!(rows(f, &tx, &read, Snapshot).await?, "a=z c=c e=new");
    tx.commit().await?;
    assert_eq!(rows(f, &f.store.begin(), &read, Snapshot).await?, "a=z c=c e=new");
    Ok(())
}

pub(crate) async fn a_limited_read_goes_past_what_operations_remove(f: &Fixture) -> Result<()> {
    f.fill(&["a", "b", "c"]).await?;
    let tx = f.store.begin();
    tx.atomic(AtomicOp::CompareAndClear, &f.key("a"), b"a");
    tx.clear(&f.key("b"));
    let read = RangeRead::new(f.all()).limit(1);
    assert_eq!(rows(f, &tx, &read, Snapshot).await?, "c=c");
    Ok(())
}

pub(crate) async fn own_rows_alone_make_a_range(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    tx.set(&f.key("b"), b"2");
    tx.set(&f.key("a"), b"1");
    let read = RangeRead::new(f.all());
    assert_eq!(rows(f, &tx, &read, Snapshot).await?, "a=1 b=2");
    Ok(())
}

/// The transaction's own row "c" ends the page, so only the range before "c" was read from the store.
pub(crate) async fn a_limited_read_that_ends_at_an_own_row_conflicts_up_to_it(f: &Fixture) -> Result<()> {
    f.fill(&["a", "e"]).await?;
    for (changed, conflicting) in [("b", true), ("c", false), ("d", false), ("e", false)] {
        let tx = f.started().await?;
        tx.set(&f.key("c"), b"own");
        let read = RangeRead::new(f.range("a", "z")).limit(2);
        assert_eq!(f.suffixes_in(&tx, read).await?, ["a", "c"]);
        f.put(changed, "changed").await?;
        if conflicting {
            conflicts(&tx).await;
            f.remove(changed).await?;
        } else {
            tx.commit().await?;
            f.remove("c").await?;
            f.remove("d").await?;
        }
    }
    Ok(())
}

pub(crate) async fn a_range_over_own_writes_conflicts_beside_them(f: &Fixture) -> Result<()> {
    let tx = f.started().await?;
    tx.clear_range(&f.range("b", "d"));
    tx.set(&f.key("f"), b"own");
    f.suffixes_in(&tx, RangeRead::new(f.range("a", "z"))).await?;
    let same = f.started().await?;
    same.clear_range(&f.range("b", "d"));
    same.set(&f.key("f"), b"own");
    f.suffixes_in(&same, RangeRead::new(f.range("a", "z"))).await?;
    f.fill(&["c", "f"]).await?;
    tx.commit().await?;
    // The commit of `tx` wrote only keys that `same` has written, too, so `same` has not read them from the store.
    same.commit().await?;
    let third = f.started().await?;
    third.clear_range(&f.range("b", "d"));
    f.suffixes_in(&third, RangeRead::new(f.range("a", "z"))).await?;
    f.put("d", "v").await?;
    conflicts(&third).await;
    Ok(())
}
