//! Shared by the tests of the bus. Time is paused in most of them: waiting costs nothing, and if the next poll is a day away, a test shows
//! what works without polls.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, JanitorOptions, Node, NodeOptions, Notification,
    NotifierOptions,
    dispatcher::{Item, Subscription},
    event::Counters,
    store::{Isolation, KeyRange, RangeRead, Store, Transaction},
};
use tokio_stream::StreamExt;

/// How long a test waits for an expected event.
pub const LIMIT: Duration = Duration::from_mins(2);

/// An interval so long that the poll does not help within [`LIMIT`].
pub const NEVER: Duration = Duration::from_hours(24);

/// Returns random numbers from a seed that a failing test prints; `NOTIBUS_SEED` sets the seed.
pub fn dice() -> fastrand::Rng {
    let given = std::env::var("NOTIBUS_SEED").ok();
    let seed = given.map_or_else(|| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("seed {seed}");
    fastrand::Rng::with_seed(seed)
}

/// Returns instance number `instance` of the database `name`.
pub fn db(name: &str, instance: u8) -> Db {
    Db::new(name.parse().unwrap(), DbInstance([instance; 16]))
}

/// Returns counters with these lanes: created, deleted, updated, `ddoc_updated`.
pub fn counts(lanes: [u64; 4]) -> Counters {
    Counters::from_lanes(lanes)
}

/// Opens a bus with one partition, so that everything is folded together.
pub async fn narrow_bus(store: &Store) -> Bus {
    let options = BusOptions::default().partitions(1);
    Bus::open(store, options).await.unwrap()
}

/// Opens a bus with the default options.
pub async fn wide_bus(store: &Store) -> Bus {
    Bus::open(store, BusOptions::default()).await.unwrap()
}

/// Joins a node for a role. The node leaves with its last role.
pub async fn joined(bus: &Bus) -> Node {
    bus.node(NodeOptions::default()).await.unwrap()
}

/// Returns options for a notifier that folds at once.
pub fn eager() -> NotifierOptions {
    NotifierOptions::default().fold_interval_max(Duration::ZERO)
}

/// Returns options for a notifier that folds at once, but only after a hint.
pub fn unpolled() -> NotifierOptions {
    eager().poll_interval(NEVER)
}

/// Returns options for a janitor that deletes tombstones soon.
pub fn forgetful() -> JanitorOptions {
    let (interval, tombstone_retention) = (Duration::from_secs(1), Duration::from_secs(10));
    JanitorOptions::default().interval(interval).tombstone_retention(tombstone_retention)
}

/// Commits an event of `db` with these `lanes`.
pub async fn record(store: &Store, bus: &Bus, db: &Db, lanes: [u64; 4]) {
    let producer = bus.producer();
    let counters = counts(lanes);
    store
        .run(async |tx| {
            producer.record_all(&tx, db, &counters)?;
            Ok(())
        })
        .await
        .unwrap();
}

/// Waits until `holds`.
pub async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("waited in vain for {what}"));
}

/// Waits for `future` to complete, or fails the test.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, future).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

/// Reads the row of `db`'s name.
pub async fn row(bus: &Bus, db: &Db) -> Option<Notification> {
    bus.feed().newest(&db.name).await.unwrap()
}

/// Waits until the row of `db` has `lanes` as its totals, and returns the row.
pub async fn row_with(bus: &Bus, db: &Db, lanes: [u64; 4]) -> Notification {
    let find =
        async || row(bus, db).await.filter(|row| row.instance == db.instance && row.totals == counts(lanes));
    until(&format!("{lanes:?} of {}", db.name), async || find().await.is_some()).await;
    find().await.unwrap()
}

/// Reads all rows of the feed, in pages of `limit`.
pub async fn rows_in_pages(bus: &Bus, limit: usize) -> Vec<Arc<Notification>> {
    let mut rows = Vec::new();
    let mut cursor = Cursor::BEGINNING;
    loop {
        let page = bus.feed().page(cursor, limit).await.unwrap();
        rows.extend(page.rows);
        cursor = page.next;
        if !page.more {
            return rows;
        }
    }
}

/// Reads all rows of the feed.
pub async fn rows(bus: &Bus) -> Vec<Arc<Notification>> {
    rows_in_pages(bus, 10_000).await
}

/// Counts the rows of counters, stamps and design documents that wait in the store.
pub async fn waiting(store: &Store) -> usize {
    // The byte after the default prefix is the family's number as a tuple element.
    let range = KeyRange::prefix(&b"notibus\x15\x01"[..]);
    let read = RangeRead::new(range).limit(100_000).target_bytes(usize::MAX);
    let page = store.begin().get_range(&read, Isolation::Snapshot).await.unwrap();
    page.rows.len()
}

/// Returns the next item of a subscription; skips the end of the first scan.
pub async fn next_news(subscription: &mut Subscription) -> Option<Item> {
    loop {
        match subscription.next().await {
            Some(Item::CaughtUp { .. }) => {}
            other => return other,
        }
    }
}

/// Reads the rows whose keys start with `prefix`.
pub async fn stored(store: &Store, prefix: &[u8]) -> Vec<(Bytes, Bytes)> {
    let read = RangeRead::new(KeyRange::prefix(prefix.to_vec()));
    store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows
}

/// Overwrites the row at `key`.
pub async fn set(store: &Store, key: &[u8], value: &[u8]) {
    let write = async |tx: Transaction| {
        tx.set(key, value);
        Ok(())
    };
    store.run(write).await.unwrap();
}
