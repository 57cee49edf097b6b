//! Reading ranges: order, limits, pages.

use notibus::{
    Result,
    store::{
        Isolation::{Serializable, Snapshot},
        KeyRange, Page, RangeRead, StoreError,
    },
};

use crate::fixture::{Fixture, fails};

/// Five rows in order.
const FIVE: [&str; 5] = ["a", "b", "c", "d", "e"];

pub(crate) async fn rows_come_in_the_order_of_bytes(f: &Fixture) -> Result<()> {
    f.fill(&["b", "a\u{7f}", "a", "aa", "a\0", "B"]).await?;
    assert_eq!(f.suffixes().await?, ["B", "a", "a\0", "aa", "a\u{7f}", "b"]);
    Ok(())
}

pub(crate) async fn rows_carry_their_values(f: &Fixture) -> Result<()> {
    f.put("a", "1").await?;
    f.put("b", "").await?;
    let page = f.store.begin().get_range(&RangeRead::new(f.all()), Snapshot).await?;
    let rows: Vec<_> = page.rows.iter().map(|(k, v)| (f.suffix(k), &v[..])).collect();
    assert_eq!(rows, [("a".to_owned(), &b"1"[..]), ("b".to_owned(), b"")]);
    Ok(())
}

pub(crate) async fn reverse_turns_the_order_around(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let read = RangeRead::new(f.all()).reverse();
    assert_eq!(f.suffixes_in(&f.store.begin(), read).await?, ["e", "d", "c", "b", "a"]);
    Ok(())
}

pub(crate) async fn the_begin_is_included_and_the_end_is_not(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let tx = f.store.begin();
    let read = RangeRead::new(f.range("b", "d"));
    assert_eq!(f.suffixes_in(&tx, read.clone()).await?, ["b", "c"]);
    assert_eq!(f.suffixes_in(&tx, read.reverse()).await?, ["c", "b"]);
    let between = RangeRead::new(f.range("b\0", "d\0"));
    assert_eq!(f.suffixes_in(&tx, between).await?, ["c", "d"]);
    Ok(())
}

pub(crate) async fn a_limit_ends_the_page_and_says_so(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let read = RangeRead::new(f.all()).limit(2);
    let page = f.store.begin().get_range(&read, Snapshot).await?;
    assert!(page.more);
    assert_eq!(page.rows.len(), 2);
    assert_eq!(f.suffix(&page.rows[1].0), "b");
    Ok(())
}

pub(crate) async fn a_reverse_limit_takes_the_last_rows(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let read = RangeRead::new(f.all()).limit(2).reverse();
    let page = f.store.begin().get_range(&read, Snapshot).await?;
    assert!(page.more);
    assert_eq!(f.suffix(&page.rows[0].0), "e");
    assert_eq!(f.suffix(&page.rows[1].0), "d");
    Ok(())
}

pub(crate) async fn a_page_below_its_limit_is_the_last(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let page = f.store.begin().get_range(&RangeRead::new(f.all()).limit(6), Snapshot).await?;
    assert_eq!((page.rows.len(), page.more), (5, false));
    Ok(())
}

/// A page that is exactly full may or may not say that there is more; either way the pages have every row once.
pub(crate) async fn an_exactly_full_page_loses_and_repeats_nothing(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let tx = f.store.begin();
    let mut pages = tx.pages(RangeRead::new(f.all()).limit(5), Snapshot);
    assert_eq!(pages.next().await?.map(|rows| rows.len()), Some(5));
    assert_eq!(pages.next().await?, None);
    Ok(())
}

pub(crate) async fn an_empty_range_has_no_rows(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let tx = f.store.begin();
    for range in [f.range("b", "b"), f.range("b\0", "c"), f.range("x", "z")] {
        let page = tx.get_range(&RangeRead::new(range), Serializable).await?;
        assert!(page.rows.is_empty() && !page.more);
    }
    Ok(())
}

pub(crate) async fn an_inverted_range_reads_as_empty(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let tx = f.store.begin();
    let read = RangeRead::new(f.range("d", "b"));
    assert!(f.suffixes_in(&tx, read.clone()).await?.is_empty());
    assert!(f.suffixes_in(&tx, read.reverse()).await?.is_empty());
    Ok(())
}

pub(crate) async fn a_prefix_range_holds_just_its_keys(f: &Fixture) -> Result<()> {
    f.fill(&["o", "p", "p\0", "pz", "q"]).await?;
    let read = RangeRead::new(KeyRange::prefix(f.key("p")));
    assert_eq!(f.suffixes_in(&f.store.begin(), read).await?, ["p", "p\0", "pz"]);
    Ok(())
}

/// Sets 20 rows of about 1,000 bytes each.
async fn fill_wide(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    for n in 0..20 {
        tx.set(&f.key(format!("{n:02}")), &[n; 1_000]);
    }
    tx.commit().await.map(drop)
}

pub(crate) async fn target_bytes_end_a_page(f: &Fixture) -> Result<()> {
    fill_wide(f).await?;
    let read = RangeRead::new(f.all()).target_bytes(5_000);
    let page = f.store.begin().get_range(&read, Snapshot).await?;
    assert!(page.more);
    assert!((2..15).contains(&page.rows.len()), "{} rows", page.rows.len());
    Ok(())
}

pub(crate) async fn a_page_has_a_row_even_if_it_is_over_the_target(f: &Fixture) -> Result<()> {
    fill_wide(f).await?;
    let read = RangeRead::new(f.all()).target_bytes(1);
    let page = f.store.begin().get_range(&read, Snapshot).await?;
    assert!(page.more && !page.rows.is_empty());
    Ok(())
}

pub(crate) async fn pages_of_target_bytes_have_every_row_once(f: &Fixture) -> Result<()> {
    fill_wide(f).await?;
    let tx = f.store.begin();
    let mut pages = tx.pages(RangeRead::new(f.all()).target_bytes(3_000), Snapshot);
    let mut seen = Vec::new();
    while let Some(rows) = pages.next().await? {
        seen.extend(rows.iter().map(|(key, _)| f.suffix(key)));
    }
    let expected: Vec<_> = (0..20).map(|n| format!("{n:02}")).collect();
    assert_eq!(seen, expected);
    Ok(())
}

pub(crate) async fn pages_go_through_a_range(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let tx = f.store.begin();
    for (reverse, expected) in [(false, "abcde"), (true, "edcba")] {
        let mut read = RangeRead::new(f.all()).limit(2);
        read.reverse = reverse;
        let mut pages = tx.pages(read, Serializable);
        let mut seen = String::new();
        while let Some(rows) = pages.next().await? {
            assert!(rows.len() <= 2);
            seen.extend(rows.iter().map(|(key, _)| f.suffix(key)));
        }
        assert_eq!(seen, expected);
    }
    Ok(())
}

pub(crate) async fn pages_of_nothing_end_at_once(f: &Fixture) -> Result<()> {
    let tx = f.store.begin();
    let mut pages = tx.pages(RangeRead::new(f.all()), Serializable);
    assert_eq!(pages.next().await?, None);
    assert_eq!(pages.next().await?, None);
    Ok(())
}

pub(crate) async fn pages_read_at_one_version(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let tx = f.store.begin();
    let mut pages = tx.pages(RangeRead::new(f.all()).limit(2), Snapshot);
    let first = pages.next().await?.expect("there are rows");
    assert_eq!(first.len(), 2);
    f.put("cc", "later").await?;
    f.remove("d").await?;
    let mut seen = String::new();
    while let Some(rows) = pages.next().await? {
        seen.extend(rows.iter().map(|(key, _)| f.suffix(key)));
    }
    assert_eq!(seen, "cde");
    Ok(())
}

pub(crate) async fn a_range_keeps_reading_its_version(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    let tx = f.started().await?;
    let clearing = f.store.begin();
    clearing.clear_range(&f.range("b", "d"));
    clearing.set(&f.key("f"), b"f");
    clearing.commit().await?;
    assert_eq!(f.suffixes_in(&tx, RangeRead::new(f.all())).await?, FIVE);
    assert_eq!(f.suffixes().await?, ["a", "d", "e", "f"]);
    Ok(())
}

/// Regression: the cluster's backend answered empty reads without asking the client, so it missed errors that the client reports.
pub(crate) async fn a_read_of_nothing_fails_as_any_other(f: &Fixture) -> Result<()> {
    let version = f.put("a", "v").await?.versionstamp.version();
    for read in [
        RangeRead::new(f.range("a", "a")),
        RangeRead::new(f.range("b", "a")),
        RangeRead::new(f.all()).limit(0),
    ] {
        let tx = f.started().await?;
        tx.set_read_version(version);
        fails(tx.get_range(&read, Snapshot).await, &StoreError::READ_VERSION_ALREADY_SET);
        let tx = f.store.begin();
        tx.set(b"\xffk", b"v");
        fails(tx.get_range(&read, Snapshot).await, &StoreError::KEY_OUTSIDE_LEGAL_RANGE);
        let tx = f.store.begin();
        assert_eq!(tx.get_range(&read, Serializable).await?, Page::default());
        tx.set(&f.key("out"), b"v");
        f.put("a", "w").await?;
        tx.commit().await?;
    }
    Ok(())
}

/// Regression: on a cluster, a target of zero bytes counted as no target, so a page had all rows.
pub(crate) async fn a_target_of_no_bytes_gives_one_row_a_page(f: &Fixture) -> Result<()> {
    f.fill(&FIVE).await?;
    for reverse in [false, true] {
        let read = RangeRead { reverse, ..RangeRead::new(f.all()).target_bytes(0) };
        let page = f.store.begin().get_range(&read, Snapshot).await?;
        assert_eq!((page.rows.len(), page.more), (1, true));
        let tx = f.store.begin();
        let mut pages = tx.pages(read, Snapshot);
        let mut rows = 0;
        while let Some(page) = pages.next().await? {
            assert_eq!(page.len(), 1);
            rows += 1;
        }
        assert_eq!(rows, FIVE.len());
    }
    Ok(())
}
