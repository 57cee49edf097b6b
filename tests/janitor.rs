//! The janitor: old tombstones are deleted, readers that were away for longer expire, and empty shards are forgotten.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::{
    db, forgetful, joined, record, row, row_with, rows, rows_in_pages, unpolled, until, wide_bus, within,
};
use notibus::{
    Bus, BusOptions, Cursor, DispatcherOptions, Error, Filter, Janitor, JanitorOptions, Notification,
    Sequence,
    changes::{ChangesOptions, DocId, DocSummary, Revision},
    consumer::{ConsumerSettings, ParallelBatch, ParallelJob, ParallelJobOptions},
    cursor::Start,
    dispatcher::Item,
    feed::{HashingScheme, SchemeId, Schemes, ShardEvent},
    store::{
        Isolation, KeyRange, RangeRead, Store, StoreError,
        testing::{CommitFault, Faults, Operation},
    },
};
use tokio::sync::Notify;
use tokio_stream::StreamExt;

/// How long tombstones stay.
const RETENTION: Duration = Duration::from_mins(8);

/// Starts a janitor that works often.
async fn frequent(bus: &Bus) -> Janitor {
    let options = JanitorOptions::default().interval(RETENTION / 60).tombstone_retention(RETENTION);
    joined(bus).await.janitor(options).await.unwrap()
}

/// Creates and deletes `name`; returns the sequence of its tombstone.
async fn deleted(store: &Store, bus: &Bus, name: &str) -> Sequence {
    record(store, bus, &db(name, 1), [1, 0, 0, 0]).await;
    row_with(bus, &db(name, 1), [1, 0, 0, 0]).await;
    record(store, bus, &db(name, 1), [0, 1, 0, 0]).await;
    row_with(bus, &db(name, 1), [1, 1, 0, 0]).await.sequence
}

/// Lets paused time pass.
async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

/// Regression: a janitor counted the time during which its process was stopped, so it dropped tombstones and deleted consumers too early.
#[tokio::test(start_paused = true)]
async fn the_time_in_which_a_janitor_is_stopped_does_not_count() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let consumer = bus.consumer("mailer").unwrap();
    consumer.create(&ConsumerSettings::default().expiry(Some(RETENTION))).await.unwrap();
    deleted(&store, &bus, "a").await;
    let _janitor = frequent(&bus).await;
    pass(RETENTION / 2).await;
    // As if the process were stopped: no timer fires meanwhile.
    tokio::time::advance(RETENTION * 10).await;
    pass(RETENTION / 4).await;
    assert_eq!((bus.stats().tombstones_dropped, bus.consumers().await.unwrap().len()), (0, 1));
    pass(RETENTION / 2).await;
    assert!(bus.consumers().await.unwrap().is_empty());
    pass(RETENTION).await;
    assert_eq!(bus.stats().tombstones_dropped, 1);
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_goes_once_it_is_old_and_living_databases_stay() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let janitor = frequent(&bus).await;
    record(&store, &bus, &db("lives", 1), [1, 0, 0, 0]).await;
    let tombstone = deleted(&store, &bus, "gone").await;
    pass(RETENTION * 59 / 60).await;
    assert!(row(&bus, &db("gone", 1)).await.is_some(), "it is not old yet");
    pass(RETENTION / 6).await;
    assert_eq!(row(&bus, &db("gone", 1)).await, None);
    assert_eq!(rows(&bus).await.len(), 1);
    assert_eq!(bus.feed().horizon().await.unwrap(), tombstone);
    assert_eq!(bus.stats().tombstones_dropped, 1);
    let counts = bus
        .feed()
        .shards()
        .await
        .unwrap()
        .into_iter()
        .map(async |shard| bus.feed().shard_rows(shard).await.unwrap());
    assert_eq!(
        futures_util::future::join_all(counts).await.iter().sum::<u64>(),
        1,
        "a dropped row is not counted"
    );
    janitor.shutdown().await.unwrap();

    // The name can be used again, as if it had never existed.
    record(&store, &bus, &db("gone", 2), [1, 0, 0, 0]).await;
    let row = row_with(&bus, &db("gone", 2), [1, 0, 0, 0]).await;
    assert_eq!(row.replaced, None);
}

#[tokio::test(start_paused = true)]
async fn a_database_that_is_created_again_keeps_its_row() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let _janitor = frequent(&bus).await;
    deleted(&store, &bus, "again").await;
    pass(RETENTION / 2).await;
    record(&store, &bus, &db("again", 2), [1, 0, 0, 0]).await;
    pass(RETENTION).await;
    assert!(row(&bus, &db("again", 2)).await.unwrap().replaced.is_some());
    assert_eq!(bus.stats().tombstones_dropped, 0);
}

#[tokio::test(start_paused = true)]
async fn only_time_in_which_a_janitor_works_makes_old() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let janitor = frequent(&bus).await;
    pass(RETENTION / 6).await;
    deleted(&store, &bus, "gone").await;
    pass(RETENTION / 2).await;
    janitor.shutdown().await.unwrap();
    pass(RETENTION * 4).await;
    // Another janitor continues from the time of the first.
    let _janitor = frequent(&bus).await;
    pass(RETENTION / 3).await;
    assert!(row(&bus, &db("gone", 1)).await.is_some(), "time alone does not count");
    pass(RETENTION / 3).await;
    assert_eq!(row(&bus, &db("gone", 1)).await, None);
}

/// Regression: a janitor saved an age mark only once per sixteenth of the retention, and the next one continued from the last mark. So if
/// no janitor worked for that long, no tombstone was ever dropped.
#[tokio::test(start_paused = true)]
async fn tombstones_age_although_each_janitor_works_for_a_short_time() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    deleted(&store, &bus, "gone").await;
    let mut janitors = 0;
    while row(&bus, &db("gone", 1)).await.is_some() {
        let janitor = frequent(&bus).await;
        pass(RETENTION / 40).await;
        janitor.shutdown().await.unwrap();
        janitors += 1;
        assert!(janitors < 70, "each of them has worked for an interval of a 60th of the retention");
    }
    assert!(janitors >= 40, "{janitors} have worked for a 40th of the retention each");
}

#[tokio::test(start_paused = true)]
async fn of_two_janitors_one_works_and_the_other_takes_over() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let (first, _second) = (frequent(&bus).await, frequent(&bus).await);
    deleted(&store, &bus, "one").await;
    pass(RETENTION * 9 / 8).await;
    until("the tombstone is dropped", async || bus.stats().tombstones_dropped == 1).await;
    drop(first);
    deleted(&store, &bus, "two").await;
    pass(RETENTION * 5 / 4).await;
    until("the other has taken over", async || bus.stats().tombstones_dropped == 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_reader_below_the_horizon_expires() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let _janitor = frequent(&bus).await;
    record(&store, &bus, &db("lives", 1), [1, 0, 0, 0]).await;
    let before = row_with(&bus, &db("lives", 1), [1, 0, 0, 0]).await.sequence;
    let tombstone = deleted(&store, &bus, "gone").await;
    pass(RETENTION * 5 / 4).await;
    let feed = bus.feed();
    let expired = feed.page(before, 10).await.unwrap_err();
    assert!(matches!(expired, Error::Expired { horizon } if horizon == tombstone), "{expired}");
    let shard = feed.shards().await.unwrap()[0];
    assert!(matches!(feed.shard_page(shard, before, 10).await, Err(Error::Expired { .. })));
    assert!(matches!(feed.shard_reader(shard, before).try_next().await, Err(Error::Expired { .. })));
    assert!(matches!(feed.pending(before).await, Err(Error::Expired { .. })));
    assert_eq!(
        feed.page(tombstone, 10).await.unwrap().rows.len(),
        0,
        "who has seen the tombstone misses nothing"
    );
    assert_eq!(feed.page(Cursor::BEGINNING, 10).await.unwrap().rows.len(), 1, "nor does who knows nothing");
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_was_away_for_too_long_expires_and_starts_again() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let _janitor = frequent(&bus).await;
    let lives = db("lives", 1);
    record(&store, &bus, &lives, [1, 0, 0, 0]).await;
    let since = row_with(&bus, &lives, [1, 0, 0, 0]).await.sequence;
    deleted(&store, &bus, "gone").await;
    pass(RETENTION * 5 / 4).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let names = Filter::names(["lives", "gone"].map(|name| name.parse().unwrap())).unwrap();
    for filter in [Filter::all(), names] {
        let mut updates = dispatcher.subscribe(filter).since(Start::from(since)).stream();
        let first = within("it expires", updates.next()).await.unwrap();
        assert!(matches!(first, Item::Expired { .. }), "{first:?}");
        let delivery =
            within("what lives", common::next_news(&mut updates)).await.unwrap().into_delivery().unwrap();
        assert_eq!(delivery.notification().name, lives.name);
        record(&store, &bus, &lives, [0, 0, 1, 0]).await;
        let delivery =
            within("it goes on", common::next_news(&mut updates)).await.unwrap().into_delivery().unwrap();
        assert!(delivery.since() >= since.into());
    }
}

#[tokio::test(start_paused = true)]
async fn closed_shards_that_are_empty_are_forgotten_and_readers_find_on() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let (changes, db) = (bus.changes(), db("docs", 1));
    let options = ChangesOptions::default().shards(3);
    store.run(async |tx| changes.create(&tx, &db, &options).await).await.unwrap();
    let edit = async |id: &str, position: u64, previous: Option<Sequence>| {
        let revision = Revision { position, hash: [1; 16] };
        let doc = DocSummary { id: DocId::new(id).unwrap(), revision, branches: 1, is_deleted: false };
        let tx = store.begin();
        let edited = changes.writer(&tx, &db).await.unwrap().record(&doc, previous).unwrap();
        edited.of(tx.commit().await.unwrap().unwrap())
    };
    let feed = changes.feed(&db);
    let first = edit("x", 1, None).await;
    let start = feed.topology().await.unwrap();
    let mut readers: Vec<_> =
        start[0].shards.iter().map(|&shard| feed.shard_reader(shard, Cursor::BEGINNING)).collect();
    let mut read = 0;
    for reader in &mut readers {
        read += usize::from(reader.try_next().await.unwrap().is_some());
    }
    assert_eq!(read, 1);
    let mut unread = feed.shard_reader(start[0].shards[0], Cursor::BEGINNING);

    // The entry in the middle gets no row, and the first one loses its own.
    feed.reshard(5, None).await.unwrap();
    let last = feed.reshard(2, None).await.unwrap();
    let janitor = frequent(&bus).await;
    until("the empty entry is dropped", async || feed.topology().await.unwrap().len() == 2).await;
    assert_eq!(feed.topology().await.unwrap()[0].first, Sequence::MIN, "it has a row");
    edit("x", 2, Some(first)).await;
    until("both are dropped", async || feed.topology().await.unwrap().len() == 1).await;
    assert_eq!(bus.stats().topologies_dropped, 2);

    for reader in &mut readers {
        let Some(ShardEvent::Resharded(end)) = reader.try_next().await.unwrap() else {
            panic!("it has ended")
        };
        assert_eq!(end.successor, last);
        assert!(reader.is_ended() && reader.try_next().await.unwrap().is_none());
    }
    let dropped = unread.try_next().await.unwrap_err();
    assert!(matches!(dropped, Error::NoShard { is_trimmed: true, .. }), "{dropped}");
    assert_eq!(feed.topology_at(first).await.unwrap(), last, "a reader at any position finds shards");
    assert_eq!(feed.page(first, 10).await.unwrap().rows.len(), 1);
    assert_eq!(feed.reshard(1, None).await.unwrap().shards[0].0, 11, "no id is used again");
    janitor.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn nothing_is_left_of_what_was_dropped() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let keys = async || {
        let all =
            RangeRead::new(KeyRange::new(&b""[..], &b"\xff"[..])).limit(100_000).target_bytes(usize::MAX);
        let rows = store.begin().get_range(&all, Isolation::Snapshot).await.unwrap().rows;
        // The rows of a feed: entries, newest and topology. The number of all other rows is fixed or bounded.
        rows.into_iter().filter(|(key, _)| [4, 5, 7].map(Some).contains(&key.get(8).copied())).count()
    };
    // The row of the topology entry.
    let at_least = 1;
    for round in 0..4 {
        for n in 0..600 {
            record(&store, &bus, &db(&format!("db{n}"), round), [1, 1, 0, 0]).await;
        }
        bus.feed().reshard(4 - u32::from(round), None).await.unwrap();
    }
    until("all are folded", async || bus.is_drained().await.unwrap()).await;
    let options =
        JanitorOptions::default().interval(Duration::from_millis(10)).tombstone_retention(Duration::ZERO);
    let janitor = joined(&bus).await.janitor(options).await.unwrap();
    until("all are dropped", async || rows(&bus).await.is_empty()).await;
    until("one entry is left", async || keys().await <= at_least).await;
    assert_eq!(bus.stats().tombstones_dropped, 600);
    janitor.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
}

/// Makes a bus whose horizon is above the rows of three living databases.
async fn with_old_rows(store: &Store) -> Bus {
    let bus = wide_bus(store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let _janitor = frequent(&bus).await;
    for n in 0..3 {
        let db = db(&format!("lives{n}"), 1);
        record(store, &bus, &db, [1, 0, 0, 0]).await;
        row_with(&bus, &db, [1, 0, 0, 0]).await;
    }
    deleted(store, &bus, "gone").await;
    pass(RETENTION * 5 / 4).await;
    assert!(bus.feed().horizon().await.unwrap() > rows(&bus).await[2].sequence);
    bus
}

/// Regression: a reader from zero that needed several pages expired as soon as the first page ended below the horizon, so a bus with many
/// idle databases could no longer be read to its end.
#[tokio::test(start_paused = true)]
async fn a_reader_from_zero_reads_past_the_horizon_in_pages_of_any_size() {
    let store = Store::memory();
    let bus = with_old_rows(&store).await;
    assert_eq!(rows_in_pages(&bus, 1).await.len(), 3);

    let seen = Arc::new(AtomicUsize::new(0));
    let options = ParallelJobOptions::default().batch_rows_max(1);
    let (counter, feed) = (Arc::clone(&seen), bus.feed());
    let job = ParallelJob::new(feed, Cursor::BEGINNING).with_options(options);
    let work = move |batch: ParallelBatch<Notification>| {
        counter.fetch_add(batch.rows.len(), Ordering::Relaxed);
        async { Ok(()) }
    };
    job.run(work).await.unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 3);

    let options = DispatcherOptions::default().page_rows_max(1);
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let mut updates = dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).stream();
    for n in 0..3 {
        let delivery = within("a row", updates.next()).await.unwrap().into_delivery().unwrap();
        assert_eq!(delivery.notification().name.as_str(), format!("lives{n}"));
    }
}

/// A reader that began at zero expires if a database that it may have seen is deleted and its tombstone removed before the reader is done.
#[tokio::test(start_paused = true)]
async fn a_reader_that_began_before_the_deletion_expires() {
    let store = Store::memory();
    let bus = with_old_rows(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let page = bus.feed().page(Cursor::BEGINNING, 1).await.unwrap();
    assert!(bus.feed().page(page.next, 1).await.is_ok());
    record(&store, &bus, &db("lives0", 1), [0, 1, 0, 0]).await;
    row_with(&bus, &db("lives0", 1), [1, 1, 0, 0]).await;
    let _janitor = frequent(&bus).await;
    pass(RETENTION * 5 / 4).await;
    assert!(matches!(bus.feed().page(page.next, 1).await, Err(Error::Expired { .. })));
}

/// Regression: the time of a mark was taken before its position was read, so on a slow store rows counted as older than they were.
#[tokio::test(start_paused = true)]
async fn a_tombstone_stays_for_its_time_although_the_store_is_slow() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let faults = Faults::new(&store);
    let slow = wide_bus(&faults.store()).await;
    let (opened, mut reads) = (tokio::time::Instant::now(), 0);
    faults.plan_reads(move |operation| {
        let is_marks = |range: &KeyRange| range.begin.starts_with(b"notibus\x15\x0d");
        reads += u32::from(matches!(operation, Operation::GetRange { range, .. } if is_marks(range)));
        // The first read finds the time of earlier janitors; the next one belongs to a mark.
        (reads > 1 && opened.elapsed() < Duration::from_secs(50)).then_some(StoreError::TRANSACTION_TOO_OLD)
    });
    let _janitor = frequent(&slow).await;
    pass(Duration::from_secs(45)).await;
    deleted(&store, &bus, "gone").await;
    let began = tokio::time::Instant::now();
    while row(&bus, &db("gone", 1)).await.is_some() {
        pass(Duration::from_secs(1)).await;
    }
    assert!(began.elapsed() >= RETENTION, "dropped after {:?}", began.elapsed());
}

/// Regression: one row that could not be decoded stopped the janitor, so nothing was cleaned up.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_read_keeps_nothing_else() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    record(&store, &bus, &db("x", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("x", 1), [1, 0, 0, 0]).await;
    let entries = RangeRead::new(KeyRange::prefix(&b"notibus\x15\x04\x01n"[..]));
    let page = store.begin().get_range(&entries, Isolation::Snapshot).await.unwrap();
    store
        .run(async |tx| {
            tx.set(&page.rows[0].0, b"garbage");
            Ok(())
        })
        .await
        .unwrap();
    deleted(&store, &bus, "gone").await;
    bus.feed().reshard(3, None).await.unwrap();
    let docs = db("docs", 1);
    let changes = bus.changes();
    store.run(async |tx| changes.create(&tx, &docs, &ChangesOptions::default()).await).await.unwrap();
    changes.feed(&docs).reshard(3, None).await.unwrap();
    let _janitor = frequent(&bus).await;
    pass(RETENTION * 5 / 4).await;
    assert_eq!(bus.stats().tombstones_dropped, 1);
    assert_eq!(changes.feed(&docs).topology().await.unwrap().len(), 1);
}

/// Regression: a row that waited for a slow subscriber was delivered after `Expired`, although the database
/// was gone.
#[tokio::test(start_paused = true)]
async fn an_expired_subscriber_gets_no_rows_of_gone_databases() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let faults = Faults::new(&store);
    let away = wide_bus(&faults.store()).await;
    let dispatcher = away.dispatcher(DispatcherOptions::default()).await.unwrap();
    let gone = db("gone", 1);
    let mut updates = dispatcher.subscribe(Filter::name("gone").unwrap()).stream();
    record(&store, &bus, &gone, [1, 0, 0, 0]).await;
    let living = row_with(&bus, &gone, [1, 0, 0, 0]).await;
    until("the tail has it", async || dispatcher.position() >= living.sequence).await;
    // The process is cut off while the row waits.
    faults.plan_reads(|_| Some(StoreError::TRANSACTION_TOO_OLD));
    record(&store, &bus, &gone, [0, 1, 0, 0]).await;
    row_with(&bus, &gone, [1, 1, 0, 0]).await;
    let janitor = frequent(&bus).await;
    pass(RETENTION * 5 / 4).await;
    janitor.shutdown().await.unwrap();
    faults.heal();
    pass(RETENTION / 2).await;
    let first = within("it expires", updates.next()).await.unwrap();
    assert!(matches!(first, Item::Expired { .. }), "{first:?}");
    let next = tokio::time::timeout(RETENTION, common::next_news(&mut updates)).await;
    assert!(next.is_err(), "delivered {next:?}");
}

/// Regression: the first closed entry that could not be dropped ended the pass, so the entries after it were never dropped.
#[tokio::test(start_paused = true)]
async fn an_entry_that_cannot_be_dropped_keeps_no_other_one() {
    let faults = Faults::new(&Store::memory());
    let bus = wide_bus(&faults.store()).await;
    let changes = bus.changes();
    let dbs = [db("first", 1), db("second", 2)];
    for db in &dbs {
        let create = async |tx| changes.create(&tx, db, &ChangesOptions::default()).await;
        bus.store().run(create).await.unwrap();
        changes.feed(db).reshard(2, None).await.unwrap();
    }
    let first = dbs[0].instance.0;
    faults.plan_commits(move |attempt| {
        let is_of_first = |key: &[u8]| key.windows(first.len()).any(|part| part == first);
        let drops = attempt
            .mutations()
            .any(|mutation| matches!(mutation, Operation::Clear { key } if is_of_first(key)));
        drops.then_some(CommitFault::Before(StoreError::IO_ERROR))
    });
    let janitor = frequent(&bus).await;
    pass(RETENTION / 10).await;
    let entries = async |db| changes.feed(db).topology().await.unwrap().len();
    assert_eq!((entries(&dbs[0]).await, entries(&dbs[1]).await), (2, 1));
    faults.heal();
    pass(RETENTION / 10).await;
    assert_eq!((entries(&dbs[0]).await, bus.stats().topologies_dropped), (1, 2));
    janitor.shutdown().await.unwrap();
}

/// Routes everything to the last shard.
#[derive(Debug)]
struct Last;

impl HashingScheme for Last {
    fn place(&self, _id: &[u8], shards: u32) -> u32 {
        shards - 1
    }
}

#[tokio::test(start_paused = true)]
async fn an_entry_of_many_shards_is_kept_for_one_row() {
    let store = Store::memory();
    let schemes = Schemes::default().with(SchemeId(2_000), Last).unwrap();
    let bus = Bus::open(&store, BusOptions::default().schemes(schemes)).await.unwrap();
    let (changes, docs) = (bus.changes(), db("docs", 1));
    let options = ChangesOptions::default().shards(500).scheme(SchemeId(2_000));
    store.run(async |tx| changes.create(&tx, &docs, &options).await).await.unwrap();
    let revision = Revision { position: 1, hash: [1; 16] };
    let doc = DocSummary { id: DocId::new("doc").unwrap(), revision, branches: 1, is_deleted: false };
    store.run(async |tx| changes.writer(&tx, &docs).await?.record(&doc, None).map(|_| ())).await.unwrap();
    let feed = changes.feed(&docs);
    feed.reshard(1, None).await.unwrap();
    let _janitor = frequent(&bus).await;
    pass(RETENTION / 10).await;
    assert_eq!(feed.topology().await.unwrap().len(), 2);
    assert_eq!(feed.page(Cursor::BEGINNING, 10).await.unwrap().rows.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_interval_of_zero_is_refused() {
    let bus = wide_bus(&Store::memory()).await;
    let options = JanitorOptions::default().interval(Duration::ZERO);
    assert!(matches!(joined(&bus).await.janitor(options).await, Err(Error::Invalid { .. })));
    assert!(bus.nodes().await.unwrap()[0].roles.is_empty(), "its node is none");
}

/// Regression: the entry with the dropped tombstone was gone as well, so no task of a parallel job read from the job's cursor, and the job
/// ended without the deletion.
#[tokio::test(start_paused = true)]
async fn a_parallel_job_from_before_the_horizon_expires_although_the_shard_is_forgotten() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let feed = bus.feed();
    for name in ["a", "b"] {
        record(&store, &bus, &db(name, 1), [1, 0, 0, 0]).await;
        row_with(&bus, &db(name, 1), [1, 0, 0, 0]).await;
    }
    let since = feed.now().await.unwrap();
    record(&store, &bus, &db("b", 1), [0, 1, 0, 0]).await;
    row_with(&bus, &db("b", 1), [1, 1, 0, 0]).await;
    let job = ParallelJob::new(feed.clone(), since);
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let work = move |batch: ParallelBatch<Notification>| {
        counted.fetch_add(batch.rows.len(), Ordering::SeqCst);
        async { Ok(()) }
    };
    job.run(work.clone()).await.unwrap();
    assert_eq!(seen.load(Ordering::SeqCst), 1, "the deletion is news");
    feed.reshard(2, None).await.unwrap();
    record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
    row_with(&bus, &db("a", 1), [1, 0, 1, 0]).await;
    let janitor = joined(&bus).await.janitor(forgetful()).await.unwrap();
    until("one entry", async || feed.topology().await.unwrap().len() == 1).await;
    janitor.shutdown().await.unwrap();
    assert!(matches!(feed.page(since, 10).await, Err(Error::Expired { .. })));
    let ran = job.run(work).await;
    assert!(matches!(ran, Err(Error::Expired { .. })), "{ran:?}");
}

/// Regression: a round of a parallel job outlived its snapshot, and its tasks continued at newer versions. The next round compared the
/// horizon with the version at which that round had begun, so the job expired because of a tombstone that it had worked on.
#[tokio::test(start_paused = true)]
async fn a_parallel_job_does_not_expire_for_a_tombstone_that_it_has_worked_on() {
    for is_resharded in [false, true] {
        worked_on(is_resharded).await;
    }
}

/// A parallel job works on a tombstone that the janitor drops while the job runs. If the feed `is_resharded` after the tombstone, the shard
/// ends in that round.
async fn worked_on(is_resharded: bool) {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default().shards(1)).await.unwrap();
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let feed = bus.feed();
    record(&store, &bus, &db("b", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("b", 1), [1, 0, 0, 0]).await;
    let since = feed.now().await.unwrap();
    for name in ["a", "c"] {
        record(&store, &bus, &db(name, 1), [1, 0, 0, 0]).await;
        row_with(&bus, &db(name, 1), [1, 0, 0, 0]).await;
    }
    // For each of the rows whose work takes long: signals that the row has arrived, and that its work may end.
    let rows: Arc<[(Notify, Notify); 2]> = Arc::default();
    let slow = Arc::clone(&rows);
    let work = move |batch: ParallelBatch<Notification>| {
        let slow = Arc::clone(&slow);
        async move {
            let place = ["a", "b"].iter().position(|name| *name == batch.rows[0].name.as_str());
            if let Some((has_come, may_end)) = place.map(|place| &slow[place]) {
                has_come.notify_one();
                may_end.notified().await;
            }
            Ok(())
        }
    };
    let options = ParallelJobOptions::default().batch_rows_max(1);
    let job = ParallelJob::new(feed.clone(), since).with_options(options);
    let running = tokio::spawn(async move { job.run(work).await });
    within("the first row", rows[0].0.notified()).await;
    record(&store, &bus, &db("b", 1), [0, 1, 0, 0]).await;
    row_with(&bus, &db("b", 1), [1, 1, 0, 0]).await;
    record(&store, &bus, &db("d", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("d", 1), [1, 0, 0, 0]).await;
    // After this, the snapshot of the round is too old.
    tokio::time::sleep(Duration::from_secs(10)).await;
    rows[0].1.notify_one();
    within("the tombstone", rows[1].0.notified()).await;
    if is_resharded {
        feed.reshard(2, None).await.unwrap();
    }
    let janitor = joined(&bus).await.janitor(forgetful()).await.unwrap();
    until("the end of the tombstone", async || bus.stats().tombstones_dropped > 0).await;
    janitor.shutdown().await.unwrap();
    // The rows after the tombstone are read at a version after the reshard.
    tokio::time::sleep(Duration::from_secs(10)).await;
    rows[1].1.notify_one();
    within("the job", running).await.unwrap().unwrap();
}

/// Results of runs that are committed exactly once: old ones are removed even if they fill more than a page; young ones stay, and remain
/// valid.
#[tokio::test(start_paused = true)]
async fn old_results_of_runs_go_in_pages_and_young_ones_stay() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let family = KeyRange::prefix([b"notibus", &[0x15, 24, 0x14][..]].concat());
    let count = async || {
        let read = RangeRead::new(family.clone()).limit(10_000).target_bytes(usize::MAX);
        store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows.len()
    };
    let run = async |key: String| bus.run_exactly_once(Some(key.as_bytes()), async |_| Ok(())).await.unwrap();
    for n in 0..1_500 {
        run(format!("{n}")).await;
    }
    pass(Duration::from_mins(3)).await;
    for n in 0..100 {
        run(format!("{n} is younger")).await;
    }
    let _janitor = frequent(&bus).await;
    pass(Duration::from_mins(1)).await;
    assert_eq!(count().await, 1_600);
    pass(Duration::from_mins(2)).await;
    assert_eq!(count().await, 100);
    assert!(run("7 is younger".to_owned()).await.is_repeat);
    assert!(!run("7".to_owned()).await.is_repeat, "it is a new run");
    pass(Duration::from_mins(6)).await;
    assert_eq!(count().await, 0);
}

/// Regression: the janitor dropped a tombstone while events of its database waited to be folded. The fold found no row, so it mistook the
/// database for a living one, and nothing ever deleted it again.
#[tokio::test(start_paused = true)]
async fn a_waiting_event_does_not_bring_a_deleted_database_back() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    let _janitor = frequent(&bus).await;
    deleted(&store, &bus, "gone").await;
    pass(RETENTION / 2).await;
    notifier.shutdown().await.unwrap();
    record(&store, &bus, &db("gone", 1), [0, 0, 1, 0]).await;
    pass(RETENTION).await;
    assert_eq!(bus.stats().tombstones_dropped, 0);
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    pass(RETENTION / 60).await;
    assert!(row(&bus, &db("gone", 1)).await.unwrap().is_deleted());
    pass(RETENTION * 5 / 4).await;
    assert_eq!(row(&bus, &db("gone", 1)).await, None);
}
