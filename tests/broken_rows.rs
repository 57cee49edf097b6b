//! Rows that cannot be decoded, because they are damaged or were written by a later version of the program: each is skipped,
//! counted and listed, and nothing waits for it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::{
    counts, db, eager, forgetful, joined, narrow_bus, next_news, record, row, row_with, rows, set, stored,
    until, wide_bus, within,
};
use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, DispatcherOptions, Error, Filter, JanitorOptions, Sequence,
    changes::{ChangesOptions, DocId, DocSummary, Revision},
    feed::ShardEvent,
    group::{ConsumerOptions, GroupBatch, GroupOptions},
    node::Role,
    store::{
        Database, Transaction,
        testing::{Faults, WatchFault},
    },
};

/// The key prefixes of nodes and of their roles.
const NODES: &[u8] = b"notibus\x15\x0a\x02main\x00\x14";
const ROLES: &[u8] = b"notibus\x15\x0a\x02main\x00\x15";

/// The key prefix of counters in a bus with the default prefix.
const COUNTERS: &[u8] = b"notibus\x15\x01";
const FOLD_MARKS: &[u8] = b"notibus\x15\x03";
const ROWS: &[u8] = b"notibus\x15\x04";
const NEWEST: &[u8] = b"notibus\x15\x05";
const TOPOLOGIES: &[u8] = b"notibus\x15\x07";
const HORIZONS: &[u8] = b"notibus\x15\x08";
const LEASES: &[u8] = b"notibus\x15\x0b";

/// Records the creation of `name`, and breaks its counters. Returns their key and their old value.
async fn broken_counters(store: &Database, bus: &Bus, name: &str) -> (Bytes, Bytes) {
    record(store, bus, &db(name, 1), [1, 0, 0, 0]).await;
    let [(key, value)] = &stored(store, COUNTERS).await[..] else { panic!("one row waits") };
    set(store, key, b"junk").await;
    (key.clone(), value.clone())
}

/// Regression: one broken row of counters stopped all folds of its partition, and blinded the poll for all later partitions: an event
/// there whose ring was lost was not folded an hour later.
#[tokio::test(start_paused = true)]
async fn broken_counters_stop_neither_their_partition_nor_the_poll() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let (producing, folding) = (wide_bus(&store).await, wide_bus(&faults.database()).await);
    let (key, value) = broken_counters(&store, &producing, "broken").await;
    // Every ring is lost.
    faults.plan_watches(|_| Some(WatchFault::Drop));
    let _notifier = joined(&folding).await.notifier(eager()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    for n in 0..200 {
        record(&store, &producing, &db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
    }
    until("all others are folded", async || folding.stats().folded.created == 200).await;
    assert_eq!(row(&folding, &db("broken", 1)).await, None);

    let skipped = folding.skipped_rows().await.unwrap();
    assert_eq!(skipped.len(), 1);
    assert!(skipped[0].place.contains("broken") && skipped[0].reason.contains("4 bytes"), "{skipped:?}");
    assert!(folding.stats().rows_skipped > 0);

    // A repaired row is folded, and not listed any more.
    set(&store, &key, &value).await;
    row_with(&folding, &db("broken", 1), [1, 0, 0, 0]).await;
    assert_eq!(folding.skipped_rows().await.unwrap(), []);
}

/// Regression: a damaged fold mark stopped its partition forever.
#[tokio::test(start_paused = true)]
async fn a_damaged_fold_mark_is_replaced_and_stops_nothing() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
    let [(key, good)] = &stored(&store, FOLD_MARKS).await[..] else { panic!("one partition has one mark") };
    let contradictory = [good.clone(), good.clone()].concat()[8..24].to_vec();
    let damages: [&[u8]; 4] = [b"junk", b"", &[0; 16], &contradictory];
    for (n, damage) in (1..).zip(damages) {
        set(&store, key, damage).await;
        record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
        row_with(&bus, &db("a", 1), [1, 0, n, 0]).await;
        assert_eq!(bus.stats().rows_skipped, n, "{damage:?}");
    }
    store
        .run(async |tx: Transaction| {
            tx.clear(key);
            Ok(())
        })
        .await
        .unwrap();
    record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
    row_with(&bus, &db("a", 1), [1, 0, 5, 0]).await;
    let skipped = bus.skipped_rows().await.unwrap();
    assert_eq!((skipped.len(), skipped[0].times), (1, 5), "{skipped:?}");
    assert!(skipped[0].place.contains("notibus") && skipped[0].reason.contains("fold mark"), "{skipped:?}");
    // The new mark is valid for this notifier and for the next.
    let _other = joined(&bus).await.notifier(eager()).await.unwrap();
    for n in 6..10 {
        record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
        row_with(&bus, &db("a", 1), [1, 0, n, 0]).await;
    }
    assert_eq!(bus.stats().rows_skipped, 5);
}

/// The poll becomes more frequent while it finds lost rings. A row that cannot be folded is no lost ring.
#[tokio::test(start_paused = true)]
async fn a_broken_row_does_not_keep_the_poll_in_haste() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = narrow_bus(&faults.database()).await;
    broken_counters(&store, &bus, "broken").await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    let before = bus.stats().rows_skipped;
    tokio::time::sleep(Duration::from_mins(1)).await;
    let met = bus.stats().rows_skipped - before;
    assert!((55..=65).contains(&met), "it was met {met} times in a minute");
}

/// A page with only broken rows, and the pages around it.
#[tokio::test(start_paused = true)]
async fn a_page_of_broken_counters_is_passed() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    for n in 100..300 {
        record(&store, &bus, &db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
    }
    for (key, _) in &stored(&store, COUNTERS).await[50..150] {
        set(&store, key, &[0xff; 40]).await;
    }
    let _notifier = joined(&bus).await.notifier(eager().fold_rows_max(10)).await.unwrap();
    until("the others are folded", async || bus.stats().folded.created == 100).await;
    assert_eq!(bus.skipped_rows().await.unwrap().len(), 100);
    assert_eq!(rows(&bus).await.len(), 100);
}

/// Regression: one row of a feed that could not be decoded stopped all of its readers forever, and the folds of its partition. A
/// rolling upgrade to another format of rows does exactly this.
#[tokio::test(start_paused = true)]
async fn a_row_of_a_later_version_stops_neither_readers_nor_folds() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let names = ["a", "b", "c"];
    for name in names {
        record(&store, &bus, &db(name, 1), [1, 0, 0, 0]).await;
        row_with(&bus, &db(name, 1), [1, 0, 0, 0]).await;
    }
    let of_b = |(_, value): &&(Bytes, Bytes)| value[3] == b'b';
    let (key, value) = stored(&store, ROWS).await.iter().find(of_b).unwrap().clone();
    let mut later = value.to_vec();
    later[0] += 1;
    set(&store, &key, &later).await;

    let names_of = |rows: &[std::sync::Arc<notibus::Notification>]| -> Vec<String> {
        rows.iter().map(|row| row.name.as_str().to_owned()).collect()
    };
    assert_eq!(names_of(&rows(&bus).await), ["a", "c"]);
    let feed = bus.feed();
    assert_eq!(names_of(&feed.page_before(Sequence::MAX, 2).await.unwrap().rows), ["c"]);
    // Pages of one row: a page whose row cannot be decoded is not the end.
    let mut tail = feed.tail(Cursor::NOTHING).with_limit(1);
    let mut tailed = Vec::new();
    while tailed.len() < 2 {
        tailed.extend(names_of(&within("a page", tail.next()).await.unwrap().rows));
    }
    assert_eq!(tailed, ["a", "c"]);
    let mut sharded = Vec::new();
    for shard in feed.shards().await.unwrap() {
        let mut reader = feed.shard_reader(shard, Cursor::NOTHING).with_limit(1);
        while let Some(ShardEvent::Rows(page)) = reader.try_next().await.unwrap() {
            sharded.extend(names_of(&page.rows));
        }
    }
    sharded.sort();
    assert_eq!(sharded, ["a", "c"]);
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let wanted = Filter::any([Filter::name("b").unwrap(), Filter::name("c").unwrap()]).unwrap();
    let mut all = dispatcher.subscribe(Filter::all()).since(Cursor::NOTHING).stream();
    let mut some = dispatcher.subscribe(wanted).since(Cursor::NOTHING).stream();
    for (subscription, expected) in [(&mut all, &["a", "c"][..]), (&mut some, &["c"][..])] {
        for name in expected {
            let delivery = within("a delivery", next_news(subscription)).await.unwrap().unwrap();
            assert_eq!(delivery.notification().name.as_str(), *name);
        }
    }

    // Its neighbours are folded and delivered; its own events wait for a program that knows the format.
    for name in names {
        record(&store, &bus, &db(name, 1), [0, 0, 1, 0]).await;
    }
    for name in ["a", "c"] {
        row_with(&bus, &db(name, 1), [1, 0, 1, 0]).await;
    }
    assert!(!bus.is_drained().await.unwrap());
    let skipped = bus.skipped_rows().await.unwrap();
    assert!(skipped.len() == 1 && skipped[0].reason.contains("format 2"), "{skipped:?}");
    set(&store, &key, &value).await;
    row_with(&bus, &db("b", 1), [1, 0, 1, 0]).await;
    assert_eq!(bus.skipped_rows().await.unwrap(), []);
    let mut delivered = Vec::new();
    for _ in names {
        let delivery = within("a delivery", next_news(&mut all)).await.unwrap().unwrap();
        delivered.push(delivery.notification().name.as_str().to_owned());
    }
    delivered.sort();
    assert_eq!(delivered, names);
}

/// Regression: if the newest row of a database was gone, its partition stopped.
#[tokio::test(start_paused = true)]
async fn a_pointer_to_nothing_stops_no_other_database() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
    let gone = &stored(&store, ROWS).await[0];
    store
        .run(async |tx| {
            let _: () = tx.clear(&gone.0);
            Ok(())
        })
        .await
        .unwrap();
    for name in ["a", "b"] {
        record(&store, &bus, &db(name, 1), [0, 0, 1, 0]).await;
    }
    row_with(&bus, &db("b", 1), [0, 0, 1, 0]).await;
    assert!(bus.skipped_rows().await.unwrap()[0].reason.contains("no row"));
}

/// Regression: a thousand deletions with a long prefix and many shards exceeded the 10 MB of a transaction. The fold
/// took all or nothing, so its partition stopped forever.
#[tokio::test(start_paused = true)]
async fn a_fold_commits_before_it_gets_too_large() {
    let store = Database::memory();
    let options = BusOptions::default().prefix(vec![b'p'; 256]).partitions(1).shards(5_000);
    let bus = Bus::open(&store, options).await.unwrap();
    let dbs: Vec<_> = (0..1_990).map(|n| db(&format!("{n:04}{}", "x".repeat(200)), 1)).collect();
    let options = eager().fold_rows_max(10_000);
    for lanes in [[1, 0, 0, 0], [0, 1, 0, 0]] {
        for some in dbs.chunks(100) {
            let record = async |tx: Transaction| {
                for db in some {
                    bus.producer().record_all(&tx, db, &counts(lanes))?;
                }
                Ok(())
            };
            store.run(record).await.unwrap();
        }
        let notifier = joined(&bus).await.notifier(options.clone()).await.unwrap();
        until("all are folded", async || bus.is_drained().await.unwrap()).await;
        notifier.shutdown().await.unwrap();
    }
    assert_eq!(bus.stats().folded, counts([1_990, 1_990, 0, 0]));
    assert!((4..100).contains(&bus.stats().folds), "{} folds", bus.stats().folds);
    assert!(rows(&bus).await.iter().all(|row| row.is_deleted()));
}

/// Regression: adopted rows were not checked, and the first bad one stopped all readers.
#[tokio::test]
async fn a_legacy_range_is_read_before_it_is_taken_over() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let life = Db::new("x".parse().unwrap(), DbInstance([1; 16]));
    // Rows of another database, whose format is the same.
    let changes = bus.changes();
    let other = db("y", 2);
    store.run(async |tx| changes.create(&tx, &other, &ChangesOptions::default()).await).await.unwrap();
    for n in 0..3 {
        let write = async |tx: Transaction| {
            let revision = format!("1-{n:032x}").parse()?;
            let doc =
                DocSummary { id: DocId::new(&format!("d{n}"))?, revision, branches: 1, is_deleted: false };
            changes.writer(&tx, &other).await?.record(&doc, None)?;
            Ok(())
        };
        store.run(write).await.unwrap();
    }
    let rows: Vec<_> = stored(&store, ROWS).await;
    // The position is the last 15 bytes: incarnation and versionstamp.
    let key = |key: &Bytes| [b"legacy/", &key[key.len() - 14..]].concat();
    for (at, value) in &rows {
        set(&store, &key(at), value).await;
    }
    set(&store, &key(&rows[1].0), b"junk").await;
    let refused = changes.adopt(&life, b"legacy/", &ChangesOptions::default()).await.unwrap_err();
    assert!(matches!(&refused, Error::Corrupt { reason, .. } if reason.contains("legacy/")), "{refused}");
    assert!(matches!(changes.feed(&life).topology().await, Err(Error::NoFeed { .. })), "nothing was changed");

    set(&store, &key(&rows[1].0), &rows[1].1).await;
    changes.adopt(&life, b"legacy/", &ChangesOptions::default()).await.unwrap();
    let page = changes.feed(&life).page(Cursor::NOTHING, 10).await.unwrap();
    assert_eq!(page.rows.len(), 3);
    // A row that breaks later is skipped.
    set(&store, &key(&rows[1].0), b"junk").await;
    let page = changes.feed(&life).page(Cursor::NOTHING, 10).await.unwrap();
    assert_eq!((page.rows.len(), bus.skipped_rows().await.unwrap().len()), (2, 1));
}

/// Regression: one row of a node that could not be decoded stopped the watch of every node: none saw any more that others left,
/// came or died, and the bus listed no nodes. A damaged limit of a role stopped the rounds of its pool.
#[tokio::test(start_paused = true)]
async fn a_damaged_row_of_a_node_stops_no_watch() {
    for (damaged, junk) in [(NODES, &b"junk"[..]), (ROLES, b"limit")] {
        let store = Database::memory();
        let buses = [wide_bus(&store).await, wide_bus(&store).await, wide_bus(&store).await];
        let a = joined(&buses[0]).await.notifier(eager()).await.unwrap();
        let b = joined(&buses[1]).await.notifier(eager()).await.unwrap();
        until("they share", async || a.partitions().len() == 32 && b.partitions().len() == 32).await;
        let third = joined(&buses[2]).await;
        let (id, idle) = (third.id(), third.announce(Role::HTTP).await.unwrap());
        let rows = stored(&store, damaged).await;
        // As the tuple encoding has it.
        let packed: Vec<u8> =
            id.0.iter().flat_map(|&byte| if byte == 0 { vec![0, 0xff] } else { vec![byte] }).collect();
        let is_of_node = |key: &Bytes| match damaged {
            NODES => key.windows(packed.len()).any(|part| part == packed),
            _ => key.windows(8).any(|part| part == b"notifier"),
        };
        let keys: Vec<_> = rows.iter().map(|(key, _)| key).filter(|key| is_of_node(key)).collect();
        assert!(!keys.is_empty());
        drop((third, idle));
        for key in &keys {
            set(&store, key, junk).await;
        }
        a.shutdown().await.unwrap();
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(b.partitions().len(), 64, "a node that has left in order is replaced");
        assert_eq!(buses[1].nodes().await.unwrap().len(), 1);
        let skipped = buses[1].skipped_rows().await.unwrap();
        let is_listed =
            |key: &&Bytes| skipped.iter().any(|row| row.place.contains(&key.escape_ascii().to_string()));
        assert!(keys.iter().any(is_listed), "{skipped:?}");
    }
}

/// Regression: one row of one group that could not be decoded hid all groups, and stopped three of the four steps of the janitor: no
/// group expired any more, no tombstone and no topology entry went. The group could not even be deleted.
#[tokio::test(start_paused = true)]
async fn a_damaged_row_of_a_group_hides_no_other_group_and_stops_no_pass() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let node = joined(&bus).await;
    let _notifier = node.notifier(eager()).await.unwrap();
    let options = GroupOptions::default().expire_after(Duration::from_mins(1));
    for (name, options) in [("damaged", &GroupOptions::default()), ("expiring", &options)] {
        assert!(bus.group(name).unwrap().create(options).await.unwrap());
    }
    let gone = db("gone", 1);
    for lanes in [[1, 0, 0, 0], [0, 1, 0, 0]] {
        record(&store, &bus, &gone, lanes).await;
        until("it is folded", async || bus.is_drained().await.unwrap()).await;
    }
    let key = stored(&store, b"notibus\x15\x0c\x01n\x00\x14\x02damaged\x00").await.remove(0).0;
    set(&store, &key, b"junk").await;

    let names = async || -> Vec<_> {
        let groups = bus.status().await.unwrap().groups;
        groups.into_iter().map(|group| group.group.name.to_string()).collect()
    };
    assert_eq!(names().await, ["expiring"]);
    let skipped = bus.skipped_rows().await.unwrap();
    assert!(skipped.len() == 1 && skipped[0].place.contains("damaged"), "{skipped:?}");

    let often = Duration::from_secs(1);
    let options = JanitorOptions::default().interval(often).tombstone_retention(Duration::ZERO);
    let _janitor = node.janitor(options).await.unwrap();
    tokio::time::sleep(Duration::from_mins(2)).await;
    assert!(names().await.is_empty(), "the other group has expired");
    assert!(row(&bus, &gone).await.is_some(), "nobody knows what the damaged group has read");
    bus.group("damaged").unwrap().delete(true).await.unwrap();
    until("the tombstone is dropped", async || row(&bus, &gone).await.is_none()).await;
    assert_eq!(bus.skipped_rows().await.unwrap(), []);
}

/// A key of a group that could not be decoded hid all groups of its feed behind it: from the status, and from their expiry.
#[tokio::test]
async fn a_damaged_key_of_a_group_hides_no_other_group() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    for name in ["a", "c"] {
        bus.group(name).unwrap().create(&GroupOptions::default()).await.unwrap();
    }
    let key = [&b"notibus\x15\x0c\x01n\x00\x14\x02"[..], &[b'b'; 300], b"\x00"].concat();
    store
        .run(async |tx| {
            tx.set(&key, b"of a later version");
            Ok(())
        })
        .await
        .unwrap();
    let groups = bus.groups().await.unwrap();
    let names: Vec<_> = groups.iter().map(|group| group.name.as_str()).collect();
    assert_eq!(names, ["a", "c"]);
    assert_eq!(bus.skipped_rows().await.unwrap().len(), 1);
}

/// The names in `rows`, in order.
fn names_of(rows: &[std::sync::Arc<notibus::Notification>]) -> Vec<String> {
    rows.iter().map(|row| row.name.as_str().to_owned()).collect()
}

/// Creates `name`, and returns the position of its row.
async fn created(store: &Database, bus: &Bus, name: &str) -> Sequence {
    record(store, bus, &db(name, 1), [1, 0, 0, 0]).await;
    row_with(bus, &db(name, 1), [1, 0, 0, 0]).await.sequence
}

/// Regression: one closed entry of a topology that could not be decoded stopped all folds and all readers of its feed. Now it hides
/// the rows under it. Nobody passes them in silence: readers from before expire, groups wait, and their databases are not folded.
#[tokio::test(start_paused = true)]
async fn a_damaged_closed_topology_entry_stops_only_what_needs_its_rows() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let node = joined(&bus).await;
    let _notifier = node.notifier(eager()).await.unwrap();
    let first = created(&store, &bus, "first").await;
    let group = bus.group("g").unwrap();
    group.create(&GroupOptions::default().start_from(first)).await.unwrap();
    bus.feed().reshard(2, None).await.unwrap();
    let inside = bus.feed().now().await.unwrap();
    let hidden = created(&store, &bus, "hidden").await;
    bus.feed().reshard(3, None).await.unwrap();
    created(&store, &bus, "last").await;
    let entries = stored(&store, TOPOLOGIES).await;
    let [_, (key, good), _] = &entries[..] else { panic!("{entries:?}") };
    set(&store, key, b"junk").await;

    for name in ["first", "hidden", "last"] {
        record(&store, &bus, &db(name, 1), [0, 0, 1, 0]).await;
    }
    created(&store, &bus, "new").await;
    for name in ["first", "last"] {
        row_with(&bus, &db(name, 1), [1, 0, 1, 0]).await;
    }
    assert!(!bus.is_drained().await.unwrap(), "the hidden row cannot be replaced");
    let feed = bus.feed();
    let mut known = names_of(&rows(&bus).await);
    known.sort();
    assert_eq!(known, ["first", "last", "new"], "one who knows nothing gets all that is left");
    for since in [first, inside] {
        let error = feed.page(since, 10).await.unwrap_err();
        let Error::Expired { horizon } = error else { panic!("{error}") };
        assert!(horizon >= hidden && feed.page(horizon, 10).await.unwrap().rows.len() == 3);
    }
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut all = dispatcher.subscribe(Filter::all()).since(Cursor::NOTHING).stream();
    within("a delivery", next_news(&mut all)).await.unwrap().unwrap();
    let skipped = bus.skipped_rows().await.unwrap();
    let place = key.escape_ascii().to_string();
    assert!(skipped.iter().any(|row| row.place.contains(&place)), "{skipped:?}");

    let received = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let got = std::sync::Arc::clone(&received);
    let observer = move |_| {
        let got = std::sync::Arc::clone(&got);
        move |batch: GroupBatch<notibus::Notification>| {
            got.lock().unwrap().extend(names_of(&batch.rows));
            async { Ok(()) }
        }
    };
    let consumer = node.consumer(&group, observer, ConsumerOptions::default()).await.unwrap();
    tokio::time::sleep(Duration::from_mins(2)).await;
    assert_eq!(*received.lock().unwrap(), [""; 0], "it would miss the hidden row");

    set(&store, key, good).await;
    row_with(&bus, &db("hidden", 1), [1, 0, 1, 0]).await;
    assert_eq!(feed.page(first, 10).await.unwrap().rows.len(), 4);
    let has_all = || {
        let received = received.lock().unwrap();
        ["first", "hidden", "last", "new"].iter().all(|name| received.iter().any(|other| other == name))
    };
    until("the group has received all", async || has_all()).await;
    assert_eq!(bus.skipped_rows().await.unwrap(), []);
    consumer.shutdown().await.unwrap();
}

/// Regression: a horizon that could not be decoded stopped every reader of its feed. Nobody knows how far it was, so a reader from
/// before the damage expires, once; and the janitor replaces it by one that is not before the old one.
#[tokio::test(start_paused = true)]
async fn a_damaged_horizon_hides_no_deletion_and_stops_nobody() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let node = joined(&bus).await;
    let _notifier = node.notifier(eager()).await.unwrap();
    let delete = async |name: &str| {
        record(&store, &bus, &db(name, 1), [0, 1, 0, 0]).await;
        row_with(&bus, &db(name, 1), [1, 1, 0, 0]).await;
    };
    let early = created(&store, &bus, "gone").await;
    delete("gone").await;
    let janitor = node.janitor(forgetful()).await.unwrap();
    until("the tombstone is dropped", async || row(&bus, &db("gone", 1)).await.is_none()).await;
    janitor.shutdown().await.unwrap();
    let [(key, good)] = &stored(&store, HORIZONS).await[..] else { panic!("one feed has one horizon") };
    set(&store, key, b"junk").await;

    let feed = bus.feed();
    let error = feed.page(early, 10).await.unwrap_err();
    let Error::Expired { horizon } = error else { panic!("{error}") };
    assert!(horizon.as_bytes()[..] >= good[..]);
    created(&store, &bus, "later").await;
    assert_eq!(names_of(&feed.page(horizon, 10).await.unwrap().rows), ["later"], "it expires only once");
    assert_eq!(bus.skipped_rows().await.unwrap().len(), 1);
    delete("later").await;
    let _janitor = node.janitor(forgetful()).await.unwrap();
    until("the tombstone is dropped", async || row(&bus, &db("later", 1)).await.is_none()).await;
    assert_eq!(bus.skipped_rows().await.unwrap(), []);
    assert!(feed.horizon().await.unwrap() > horizon);
    assert!(matches!(feed.page(early, 10).await, Err(Error::Expired { .. })));
}

/// Regression: the folds of a partition whose lease could not be decoded failed until somebody repaired the lease.
#[tokio::test(start_paused = true)]
async fn a_damaged_lease_is_replaced_and_its_partition_goes_on() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    created(&store, &bus, "a").await;
    let [(key, good)] = &stored(&store, LEASES).await[..] else { panic!("one partition has one lease") };
    for (n, damage) in (1..).zip([&b"junk"[..], b"", &good[..20]]) {
        set(&store, key, damage).await;
        record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
        row_with(&bus, &db("a", 1), [1, 0, n, 0]).await;
        let lease = stored(&store, LEASES).await.remove(0).1;
        assert!(lease.len() == good.len() && lease[..8] > good[..8], "a higher epoch: {lease:?}");
    }
    assert!(bus.stats().rows_skipped >= 3);
    assert_eq!(bus.skipped_rows().await.unwrap(), []);
}

/// Regression: a row that was found by its key was listed until a restart, although somebody had repaired it.
#[tokio::test(start_paused = true)]
async fn a_repaired_row_is_not_listed_any_more() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    created(&store, &bus, "a").await;
    bus.group("g").unwrap().create(&GroupOptions::default()).await.unwrap();
    let group = stored(&store, b"notibus\x15\x0c\x01n\x00\x14\x02g\x00").await;
    for (row, is_met_by_folds) in [(&stored(&store, NEWEST).await[0], true), (&group[0], false)] {
        set(&store, &row.0, b"junk").await;
        if is_met_by_folds {
            record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
        }
        let is_listed = async || {
            let listed = bus.status().await.unwrap().skipped_rows;
            listed.iter().any(|skipped| skipped.place.contains(&row.0.escape_ascii().to_string()))
        };
        until("it is met", &is_listed).await;
        set(&store, &row.0, &row.1).await;
        assert!(!is_listed().await, "{row:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_broken_row_of_documents_stops_no_reader_and_is_named() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let (changes, life) = (bus.changes(), db("a", 1));
    store.run(async |tx| changes.create(&tx, &life, &ChangesOptions::default()).await).await.unwrap();
    for number in 0..3 {
        let id = DocId::new(&format!("doc{number}")).unwrap();
        let revision = Revision { position: 1, hash: [0; 16] };
        let doc = DocSummary { id, revision, branches: 1, is_deleted: false };
        store.run(async |tx| changes.writer(&tx, &life).await?.record(&doc, None).map(drop)).await.unwrap();
    }
    let [_, (key, _), _] = &stored(&store, ROWS).await[..] else { panic!("each document has a row") };
    set(&store, key, b"junk").await;

    let page = changes.feed(&life).page(Cursor::NOTHING, 10).await.unwrap();
    assert_eq!(page.rows.len(), 2);
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let tailed = within("a page", changes.tail(&dispatcher, &life, Cursor::NOTHING).next()).await.unwrap();
    assert_eq!(tailed.rows, page.rows);
    let mut sharded = 0;
    for shard in changes.feed(&life).shards().await.unwrap() {
        let mut reader = changes.feed(&life).shard_reader(shard, Cursor::NOTHING);
        while let Some(ShardEvent::Rows(page)) = reader.try_next().await.unwrap() {
            sharded += page.rows.len();
        }
    }
    assert_eq!(sharded, 2);
    let skipped = bus.skipped_rows().await.unwrap();
    assert_eq!(skipped.len(), 1, "{skipped:?}");
}
