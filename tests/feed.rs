//! The feed: one row per database, one total order over all shards, read in pages of any size.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{collections::BTreeMap, time::Duration};

use common::{
    counts, db, eager, joined, narrow_bus, record, row_with, rows, rows_in_pages, until, wide_bus, within,
};
use notibus::{
    Bus, BusOptions, Cursor, Db, Error, EventKind, Sequence,
    consumer::ConsumerSettings,
    event::{Incarnation, Versionstamp},
    feed::ShardId,
    store::Store,
};
use proptest::prelude::*;

/// Makes a bus with `shards` shards in which each of `names`, taken modulo 30, was updated in turn.
async fn history(shards: u32, names: &[u8]) -> (Store, Bus) {
    let store = Store::memory();
    let options = BusOptions::default().partitions(4).shards(shards);
    let bus = Bus::open(&store, options).await.unwrap();
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    for (step, name) in names.iter().enumerate() {
        record(&store, &bus, &db(&format!("db{}", name % 30), 1), [0, 0, 1, 0]).await;
        if step % 3 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    until("all are folded", async || bus.stats().folded.updated == names.len() as u64).await;
    (store, bus)
}

/// Runs `test` with paused time.
fn paused(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(test);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn each_database_is_in_the_feed_once_and_in_one_order(
        shards in 1_u32..=16,
        names in prop::collection::vec(any::<u8>(), 1..80),
    ) {
        paused(async {
            let (_store, bus) = history(shards, &names).await;
            let rows = rows(&bus).await;
            assert!(rows.is_sorted_by(|a, b| a.sequence < b.sequence));
            let mut expected = BTreeMap::<_, u64>::new();
            for name in &names {
                *expected.entry(format!("db{}", name % 30)).or_default() += 1;
            }
            let found: BTreeMap<_, _> = rows
                .iter()
                .map(|row| (row.name.as_str().to_owned(), row.totals.updated))
                .collect();
            assert_eq!(found.len(), rows.len());
            assert_eq!(found, expected);
            for row in &rows {
                assert_eq!(bus.feed().newest(&row.name).await.unwrap().as_ref(), Some(&**row));
            }
        });
    }

    #[test]
    fn pages_never_skip_or_repeat_a_row(
        shards in 1_u32..=16,
        names in prop::collection::vec(any::<u8>(), 1..80),
        limits in prop::collection::vec(1_usize..12, 1..20),
        start in any::<prop::sample::Index>(),
    ) {
        paused(async {
            let (_store, bus) = history(shards, &names).await;
            let all = rows(&bus).await;
            // From the start, from a row, and from between two rows.
            let place = start.index(all.len());
            let between = bus.feed().page(all[place].sequence, 1).await.unwrap().to;
            for since in [Sequence::MIN, all[place].sequence, between] {
                let expected: Vec<_> = all.iter().filter(|row| row.sequence > since).cloned().collect();
                let mut found = Vec::new();
                let mut from = since;
                for limit in limits.iter().cycle() {
                    let page = bus.feed().page(from, *limit).await.unwrap();
                    assert!(page.rows.iter().all(|row| from < row.sequence && row.sequence <= page.to));
                    found.extend(page.rows);
                    from = page.to;
                    if !page.more {
                        break;
                    }
                }
                assert_eq!(found, expected);
            }
        });
    }
}

/// Rows move to the end while a reader reads page by page: it still sees every database's last row, and no row twice.
#[tokio::test(start_paused = true)]
async fn a_reader_that_pages_while_rows_move_meets_every_last_row() {
    let names: Vec<u8> = (0..30).collect();
    let (store, bus) = history(5, &names).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let mut random = common::dice();
    let mut seen = BTreeMap::new();
    let mut from = Sequence::MIN;
    let mut recorded = 30;
    loop {
        let page = bus.feed().page(from, random.usize(1..4)).await.unwrap();
        for row in page.rows {
            assert!(row.sequence > from);
            from = row.sequence;
            seen.insert(row.name.clone(), row);
        }
        from = page.to;
        if recorded < 200 {
            record(&store, &bus, &db(&format!("db{}", random.u8(..30)), 1), [0, 0, 1, 0]).await;
            recorded += 1;
        } else if !page.more && bus.stats().folded.updated == recorded {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let page = bus.feed().page(from, 10_000).await.unwrap();
    seen.extend(page.rows.into_iter().map(|row| (row.name.clone(), row)));
    let mut last: Vec<_> = seen.into_values().collect();
    last.sort_by_key(|row| row.sequence);
    assert_eq!(last, rows(&bus).await);
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_stays_in_the_feed_until_the_name_is_used_again() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 1, 0, 0]).await;
    let tombstone = row_with(&bus, &db("a", 1), [1, 1, 0, 0]).await;
    assert!(tombstone.is_deleted());
    assert_eq!(*rows(&bus).await[0], tombstone);
    record(&store, &bus, &db("a", 2), [1, 0, 0, 0]).await;
    row_with(&bus, &db("a", 2), [1, 0, 0, 0]).await;
    let rows = rows(&bus).await;
    assert!(rows.len() == 1 && !rows[0].is_deleted());
}

#[tokio::test(start_paused = true)]
async fn a_start_at_now_gets_what_comes_and_nothing_before() {
    let (store, bus) = history(4, &[1, 2, 3]).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let now = bus.feed().now().await.unwrap();
    let page = bus.feed().page(now, 10).await.unwrap();
    assert_eq!((page.rows.len(), page.to, page.more), (0, now, false));
    record(&store, &bus, &db("db1", 1), [0, 0, 1, 0]).await;
    let row = row_with(&bus, &db("db1", 1), [0, 0, 2, 0]).await;
    assert_eq!(*bus.feed().page(now, 10).await.unwrap().rows[0], row);
}

/// Regression: a cursor ahead of the store was treated as one at its end, so a reader with the cursor of another bus got nothing, and
/// missed everything that was written until the store reached that position. Later the cursor was refused as invalid, which did not help a
/// reader of a folder that was restored from a copy.
#[tokio::test(start_paused = true)]
async fn a_cursor_ahead_of_the_store_is_a_typed_error() {
    let (_store, bus) = history(4, &[1, 2, 3]).await;
    let now = bus.feed().now().await.unwrap();
    let ahead = Versionstamp::new(now.versionstamp().version() + 1_000_000, 0);
    let never_given_out = bus.feed().page(Sequence::new(Incarnation(0), ahead, 0), 10).await;
    assert!(matches!(never_given_out, Err(Error::Expired { .. })), "{never_given_out:?}");
    for bad in [Sequence::new(Incarnation(1), Versionstamp::new(1, 0), 0), Sequence::MAX] {
        let refused = bus.feed().page(bad, 10).await;
        assert!(matches!(refused, Err(Error::Invalid { what: "sequence", .. })), "{bad}: {refused:?}");
    }
}

/// Bug: only the position of a cursor was checked, not where its reading began, so a cursor that began in a later incarnation, or ahead of
/// the store, was accepted, and its reader never got a deletion that had been dropped. Fix: one function checks all of its positions.
#[tokio::test(start_paused = true)]
async fn every_position_of_a_cursor_is_checked() {
    let (_store, bus) = history(2, &[1, 2, 3]).await;
    let feed = bus.feed();
    let now = feed.now().await.unwrap();
    let later = Sequence::new(Incarnation(now.incarnation().0 + 1), Versionstamp::new(7, 0), 0);
    let version = now.versionstamp().version() + 1_000_000_000;
    let ahead = Sequence::new(now.incarnation(), Versionstamp::new(version, 0), 0);
    for wrong in [later, ahead] {
        for text in [
            format!("{wrong}"),
            format!("{now}-{wrong}"),
            format!("{now}-{now}-{wrong}"),
            format!("{wrong}-{now}"),
        ] {
            let Ok(cursor) = text.parse::<Cursor>() else { continue };
            let shard = feed.shards().await.unwrap()[0];
            let page = feed.page(cursor, 10).await.map(drop);
            let of_shard = feed.shard_page(shard, cursor, 10).await.map(drop);
            let topology = feed.topology_at(cursor).await.map(drop);
            let consumer = bus.consumer("audit").unwrap();
            let created = consumer.create(&ConsumerSettings::default().start(cursor.into())).await.map(drop);
            for answer in [page, of_shard, topology, created] {
                assert!(
                    matches!(answer, Err(Error::Invalid { .. } | Error::Expired { .. })),
                    "{text}: {answer:?}"
                );
            }
            assert!(bus.consumers().await.unwrap().is_empty(), "{text}");
        }
    }
}

#[tokio::test]
async fn page_limits_out_of_bounds_are_typed_errors() {
    let bus = narrow_bus(&Store::memory()).await;
    for limit in [0, 10_001] {
        let refused = bus.feed().page(Cursor::BEGINNING, limit).await;
        assert!(matches!(refused, Err(Error::Invalid { what: "limit", .. })));
    }
    assert!(bus.feed().page(Cursor::BEGINNING, 1).await.is_ok());
    assert!(bus.feed().page(Cursor::BEGINNING, 10_000).await.is_ok());
}

/// This holds with and without an existing bus. Regression: an existing bus was opened even with an invalid number of shards.
#[tokio::test]
async fn bus_options_out_of_their_limits_are_typed_errors_and_change_nothing() {
    for exists in [false, true] {
        let store = Store::memory();
        if exists {
            wide_bus(&store).await;
        }
        let version = store.begin().read_version().await.unwrap();
        let good = BusOptions::default;
        for bad in [
            good().partitions(0),
            good().partitions(4_097),
            good().shards(0),
            good().shards(10_001),
            good().prefix(vec![b'p'; 257]),
            good().prefix(vec![0xff]),
        ] {
            let refused = Bus::open(&store, bad.clone()).await;
            assert!(matches!(refused, Err(Error::Invalid { .. })), "{exists}: {bad:?}");
        }
        assert_eq!(store.begin().read_version().await.unwrap(), version);
    }
}

#[tokio::test]
async fn a_bus_is_opened_with_the_partitions_that_it_was_created_with() {
    let store = Store::memory();
    wide_bus(&store).await;
    let options = BusOptions::default().partitions(32);
    let refused = Bus::open(&store, options).await;
    assert!(matches!(refused, Err(Error::ConfigMismatch { what: "partitions", stored: 64, requested: 32 })));
    wide_bus(&store).await;
}

#[tokio::test(start_paused = true)]
async fn an_existing_feed_keeps_its_shards() {
    let (store, bus) = history(3, &[1, 2, 3, 4, 5, 6]).await;
    let before = rows(&bus).await;
    let options = BusOptions::default().partitions(4).shards(9);
    let again = Bus::open(&store, options).await.unwrap();
    let _notifier = joined(&again).await.notifier(eager()).await.unwrap();
    assert_eq!(rows(&again).await, before);
    record(&store, &again, &db("db1", 1), [0, 0, 1, 0]).await;
    row_with(&bus, &db("db1", 1), [0, 0, 2, 0]).await;
    assert_eq!(rows(&bus).await.len(), 6);
}

#[tokio::test(start_paused = true)]
async fn buses_under_different_prefixes_do_not_meet() {
    let store = Store::memory();
    let mut buses = Vec::new();
    let mut notifiers = Vec::new();
    for prefix in ["a", "ab"] {
        let options = BusOptions::default().prefix(prefix.into());
        let bus = Bus::open(&store, options).await.unwrap();
        notifiers.push(joined(&bus).await.notifier(eager()).await.unwrap());
        buses.push(bus);
    }
    record(&store, &buses[0], &db("x", 1), [1, 0, 0, 0]).await;
    record(&store, &buses[1], &db("x", 2), [0, 0, 5, 0]).await;
    row_with(&buses[0], &db("x", 1), [1, 0, 0, 0]).await;
    row_with(&buses[1], &db("x", 2), [0, 0, 5, 0]).await;
    assert!(rows(&buses[0]).await.len() == 1 && rows(&buses[1]).await.len() == 1);
}

/// Opens the store in `folder` once the doorbell ringer of the last round has closed it.
async fn opened(folder: &std::path::Path) -> Store {
    let mut opened = Store::open_dir(folder);
    for _ in 0..1_000 {
        if opened.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
        opened = Store::open_dir(folder);
    }
    opened.unwrap()
}

#[tokio::test]
async fn a_durable_bus_keeps_everything_and_its_sequences_grow() {
    let folder = tempfile::tempdir().unwrap();
    let mut last = Sequence::MIN;
    let mut kept = Vec::new();
    for round in 1..=3_u64 {
        let store = opened(folder.path()).await;
        let bus = narrow_bus(&store).await;
        assert_eq!(rows_in_pages(&bus, 1).await, kept, "round {round}");
        // The event that the last round recorded after its notifier had ended is there too.
        let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
        let row = row_with(&bus, &db("a", 1), [0, 0, 2 * round - 1, 0]).await;
        assert!(row.sequence > last);
        last = row.sequence;
        notifier.shutdown().await.unwrap();
        record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
        kept = rows(&bus).await;
        assert_eq!(kept.len(), 1);
        assert_eq!(row.totals, counts([0, 0, 2 * round - 1, 0]));
        assert!(common::row(&bus, &db("a", 1)).await.is_some());
    }
}

/// The news that a reader derives from the position where it began to read is complete, whatever the size of its pages; news derived from
/// the end of each page would not be.
#[tokio::test(start_paused = true)]
async fn news_is_derived_from_where_the_first_page_began() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let names: Vec<_> = (0..10).map(|n| format!("db{n}")).collect();
    for (lanes, totals) in [([1, 0, 0, 0], [1, 0, 0, 0]), ([0, 0, 1, 0], [1, 0, 1, 0])] {
        for name in &names {
            record(&store, &bus, &db(name, 1), lanes).await;
            row_with(&bus, &db(name, 1), totals).await;
        }
    }
    for row in rows_in_pages(&bus, 1).await {
        let kinds = row.news_since(Sequence::MIN).kinds();
        assert!(kinds.contains(EventKind::Created) && kinds.contains(EventKind::Updated), "{row:?}");
    }
}

#[tokio::test]
async fn shards_divide_the_rows_and_each_is_read_in_pages() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default().shards(5)).await.unwrap();
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    for n in 0..60 {
        row_with(&bus, &recorded(&store, &bus, n).await, [0, 0, 1, 0]).await;
    }
    let feed = bus.feed();
    let shards = feed.shards().await.unwrap();
    assert_eq!(shards.len(), 5);
    let mut found = Vec::new();
    for &shard in &shards {
        let mut after = Sequence::MIN;
        loop {
            let page = feed.shard_page(shard, after, 3).await.unwrap();
            assert!(page.rows.len() <= 3 && page.rows.iter().all(|row| row.sequence > after));
            found.extend(page.rows);
            after = page.to;
            if !page.more {
                break;
            }
        }
    }
    assert!(!found.is_sorted_by_key(|row| row.sequence), "the rows are spread");
    found.sort_by_key(|row| row.sequence);
    assert_eq!(found, feed.page(Cursor::BEGINNING, 100).await.unwrap().rows);

    let unknown = feed.shard_page(ShardId(6), Sequence::MIN, 3).await.unwrap_err();
    assert!(matches!(unknown, Error::NoShard { shard: 6, is_trimmed: false }), "{unknown}");
    notifier.shutdown().await.unwrap();
}

/// A page first takes about the same number of rows from each shard, although the next rows may all be in one of them.
#[tokio::test]
async fn a_page_is_full_although_one_shard_has_its_rows() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default().shards(5)).await.unwrap();
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    for n in 0..200 {
        recorded(&store, &bus, n).await;
    }
    until("all are folded", async || bus.is_drained().await.unwrap()).await;
    let feed = bus.feed();
    let end = feed.page(Cursor::BEGINNING, 1_000).await.unwrap().to;
    let first = feed.shards().await.unwrap()[0];
    let of_first = feed.shard_page(first, Cursor::BEGINNING, 25).await.unwrap().rows;
    for row in &of_first {
        record(&store, &bus, &row.db(), [0, 0, 1, 0]).await;
    }
    until("all are folded", async || bus.is_drained().await.unwrap()).await;
    assert_eq!(of_first.len(), 25);
    let page = feed.page(end, 20).await.unwrap();
    assert_eq!((page.rows.len(), page.more), (20, true));
    let rest = feed.page(page.next, 20).await.unwrap();
    assert_eq!((rest.rows.len(), rest.more), (5, false));
    notifier.shutdown().await.unwrap();
}

/// Records an event of database number `n`.
async fn recorded(store: &Store, bus: &Bus, n: u8) -> Db {
    let db = db(&format!("db-{n}"), 1);
    record(store, bus, &db, [0, 0, 1, 0]).await;
    db
}

#[tokio::test]
async fn a_tail_returns_what_comes_and_nothing_twice() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let first = recorded(&store, &bus, 1).await;
    row_with(&bus, &first, [0, 0, 1, 0]).await;

    let mut tail = bus.feed().tail(Cursor::BEGINNING).with_limit(10);
    let mut last = Sequence::MIN;
    for n in 1..6 {
        if n > 1 {
            recorded(&store, &bus, n).await;
        }
        let page = within("a page", tail.next()).await.unwrap();
        let names: Vec<_> = page.rows.iter().map(|row| row.name.as_str().to_owned()).collect();
        assert_eq!(names, [format!("db-{n}")]);
        assert!(page.rows[0].sequence > last && page.to >= page.rows[0].sequence);
        last = page.to;
    }
    notifier.shutdown().await.unwrap();
}

#[tokio::test]
async fn an_existing_bus_is_opened_with_what_it_was_created_with() {
    let store = Store::memory();
    let missing = Bus::open_existing(&store, b"notibus").await.unwrap_err();
    assert!(matches!(missing, Error::Invalid { what: "prefix", .. }), "{missing}");
    let created = Bus::open(&store, BusOptions::default().partitions(7)).await.unwrap();
    let notifier = joined(&created).await.notifier(eager()).await.unwrap();
    let db = recorded(&store, &created, 1).await;
    let found = Bus::open_existing(&store, b"notibus").await.unwrap();
    row_with(&found, &db, [0, 0, 1, 0]).await;
    notifier.shutdown().await.unwrap();
}
