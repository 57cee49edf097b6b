//! The janitor: tombstones go once they are old, readers that were away for longer are told, and empty shards are forgotten.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::Duration;

use common::{db, record, row, row_with, rows, unpolled, until, wide_bus, within};
use notibus::{
    Bus, ChangesOptions, DispatcherOptions, DocId, DocSummary, Error, Filter, Interruption, Janitor,
    JanitorOptions, Revision, Sequence, ShardEvent, Since,
    store::{Database, Isolation, KeyRange, RangeRead},
};
use tokio_stream::StreamExt;

/// For how long tombstones stay.
const RETENTION: Duration = Duration::from_mins(8);

/// A janitor that looks often.
async fn frequent(bus: &Bus) -> Janitor {
    let options = JanitorOptions {
        interval: RETENTION / 60,
        tombstone_retention: RETENTION,
        ..JanitorOptions::default()
    };
    bus.janitor(options).await.unwrap()
}

/// Creates and deletes `name`; returns the sequence of its tombstone.
async fn deleted(store: &Database, bus: &Bus, name: &str) -> Sequence {
    record(store, bus, &db(name, 1), [1, 0, 0, 0]).await;
    row_with(bus, &db(name, 1), [1, 0, 0, 0]).await;
    record(store, bus, &db(name, 1), [0, 1, 0, 0]).await;
    row_with(bus, &db(name, 1), [1, 1, 0, 0]).await.sequence
}

/// Lets paused time pass.
async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_goes_once_it_is_old_and_living_databases_stay() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let _notifier = bus.notifier(unpolled()).await.unwrap();
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
    janitor.shutdown().await.unwrap();

    // The name can be used again, as if it had never been.
    record(&store, &bus, &db("gone", 2), [1, 0, 0, 0]).await;
    let row = row_with(&bus, &db("gone", 2), [1, 0, 0, 0]).await;
    assert_eq!(row.replaced, None);
}

#[tokio::test(start_paused = true)]
async fn a_database_that_is_created_again_keeps_its_row() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let _notifier = bus.notifier(unpolled()).await.unwrap();
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
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let _notifier = bus.notifier(unpolled()).await.unwrap();
    let janitor = frequent(&bus).await;
    pass(RETENTION / 6).await;
    deleted(&store, &bus, "gone").await;
    pass(RETENTION / 2).await;
    janitor.shutdown().await.unwrap();
    pass(RETENTION * 4).await;
    // Another goes on with the time of the first.
    let _janitor = frequent(&bus).await;
    pass(RETENTION / 3).await;
    assert!(row(&bus, &db("gone", 1)).await.is_some(), "time alone does not count");
    pass(RETENTION / 3).await;
    assert_eq!(row(&bus, &db("gone", 1)).await, None);
}

#[tokio::test(start_paused = true)]
async fn of_two_janitors_one_works_and_the_other_takes_over() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let _notifier = bus.notifier(unpolled()).await.unwrap();
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
async fn a_reader_below_the_horizon_is_told() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let _notifier = bus.notifier(unpolled()).await.unwrap();
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
    assert_eq!(feed.page(Sequence::ZERO, 10).await.unwrap().rows.len(), 1, "nor does who knows nothing");
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_was_away_for_too_long_is_told_and_starts_anew() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let _notifier = bus.notifier(unpolled()).await.unwrap();
    let _janitor = frequent(&bus).await;
    let lives = db("lives", 1);
    record(&store, &bus, &lives, [1, 0, 0, 0]).await;
    let since = row_with(&bus, &lives, [1, 0, 0, 0]).await.sequence;
    deleted(&store, &bus, "gone").await;
    pass(RETENTION * 5 / 4).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let names = Filter::names(["lives", "gone"].map(|name| name.parse().unwrap())).unwrap();
    for filter in [Filter::all(), names] {
        let mut updates = dispatcher.subscribe(filter).since(Since::After(since)).stream();
        let first = within("it is told", updates.next()).await.unwrap();
        assert!(matches!(first, Err(Interruption::Expired { .. })), "{first:?}");
        let delivery = within("what lives", updates.next()).await.unwrap().unwrap();
        assert_eq!(delivery.notification().name, lives.name);
        record(&store, &bus, &lives, [0, 0, 1, 0]).await;
        let delivery = within("it goes on", updates.next()).await.unwrap().unwrap();
        assert_eq!(delivery.since(), delivery.since().max(since));
    }
}

#[tokio::test(start_paused = true)]
async fn closed_shards_that_are_empty_are_forgotten_and_readers_find_on() {
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let (changes, db) = (bus.changes(), db("docs", 1));
    let options = ChangesOptions { shards: 3, ..ChangesOptions::default() };
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
        start[0].shards.iter().map(|&shard| feed.shard_reader(shard, Sequence::ZERO)).collect();
    let mut read = 0;
    for reader in &mut readers {
        read += usize::from(reader.try_next().await.unwrap().is_some());
    }
    assert_eq!(read, 1);
    let mut unread = feed.shard_reader(start[0].shards[0], Sequence::ZERO);

    // The entry in the middle gets no row, and the first one loses its own.
    feed.reshard(5, None).await.unwrap();
    let last = feed.reshard(2, None).await.unwrap();
    let janitor = frequent(&bus).await;
    until("the empty entry is dropped", async || feed.topology().await.unwrap().len() == 2).await;
    assert_eq!(feed.topology().await.unwrap()[0].first, Sequence::ZERO, "it has a row");
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
    let store = Database::memory();
    let bus = wide_bus(&store).await;
    let notifier = bus.notifier(unpolled()).await.unwrap();
    let keys = async || {
        let all =
            RangeRead::new(KeyRange::new(&b""[..], &b"\xff"[..])).limit(100_000).target_bytes(usize::MAX);
        let rows = store.begin().get_range(&all, Isolation::Snapshot).await.unwrap().rows;
        // Of a feed: entries, newest and topology; the others have a number that is fixed or bounded.
        rows.into_iter().filter(|(key, _)| [4, 5, 7].map(Some).contains(&key.get(8).copied())).count()
    };
    let before = keys().await;
    for round in 0..4 {
        for n in 0..600 {
            record(&store, &bus, &db(&format!("db{n}"), round), [1, 1, 0, 0]).await;
        }
        bus.feed().reshard(u32::from(round) + 1, None).await.unwrap();
    }
    until("all are folded", async || bus.is_drained().await.unwrap()).await;
    let options = JanitorOptions {
        interval: Duration::from_millis(10),
        tombstone_retention: Duration::ZERO,
        ..JanitorOptions::default()
    };
    let janitor = bus.janitor(options).await.unwrap();
    until("all are dropped", async || rows(&bus).await.is_empty()).await;
    until("one entry is left", async || keys().await == before).await;
    assert_eq!(bus.stats().tombstones_dropped, 600);
    janitor.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_interval_of_zero_is_refused() {
    let bus = wide_bus(&Database::memory()).await;
    let options = JanitorOptions { interval: Duration::ZERO, ..JanitorOptions::default() };
    assert!(matches!(bus.janitor(options).await, Err(Error::Invalid { .. })));
    assert!(bus.nodes().await.unwrap().is_empty(), "it has not joined");
}
