//! What roles do on a store that is older than its rows, and the effects that remain once the incarnation is raised.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use notibus::{
    Bus, Cursor, JanitorOptions, Notification, StartOptions,
    consumer::{ConsumerSettings, HandlerResult, Work},
    cursor::Start,
    event::Incarnation,
    node::NodeHandle,
    store::Store,
};

use crate::{
    PREFIX,
    steps::{later_store, open, record, restore, totals, until},
};

async fn start(bus: &Bus) -> NodeHandle {
    let often = JanitorOptions::default()
        .interval(Duration::from_millis(200))
        .tombstone_retention(Duration::from_millis(500));
    bus.start(StartOptions::default().janitor(Some(often))).await.unwrap()
}

/// Restores what `live` makes in a store of later versions into one of lower versions.
async fn restored(live: impl AsyncFn(&Bus)) -> Store {
    let (old, new) = (later_store(1), Store::memory());
    let bus = open(&old, PREFIX).await;
    let running = start(&bus).await;
    live(&bus).await;
    running.shutdown().await.unwrap();
    restore(&old, &new, PREFIX).await;
    new
}

async fn raise(store: &Store) {
    Bus::raise_incarnation(store, PREFIX, Incarnation(0), false).await.unwrap();
}

/// Bug: a consumer in a closed topology entry saw no rows there, because they are ahead of the store, and left its shards as if they were
/// drained. After the incarnation was raised, it never worked on them.
#[tokio::test(start_paused = true)]
async fn a_consumer_does_not_leave_shards_whose_rows_it_cannot_see() {
    let store = restored(async |bus| {
        let from_nothing = ConsumerSettings::default().start(Start::At(Cursor::BEGINNING));
        assert!(bus.consumer("waits").unwrap().create(&from_nothing).await.unwrap());
        for name in ["a", "b"] {
            record(bus, name, [1, 0, 0, 0]).await;
        }
        until("rows", async || totals(bus, "a").await.is_some() && totals(bus, "b").await.is_some()).await;
        bus.feed().reshard(2, None).await.unwrap();
    })
    .await;
    let worked: Arc<Mutex<BTreeSet<Vec<u8>>>> = Arc::default();
    let handler = {
        let worked = Arc::clone(&worked);
        move |work: Work<Notification>| -> std::future::Ready<HandlerResult> {
            worked.lock().unwrap().insert(work.id().to_vec());
            std::future::ready(Ok(()))
        }
    };
    let bus = open(&store, PREFIX).await;
    let running = start(&bus).await;
    let member = running.consumer("waits").unwrap().run(handler.clone()).await.unwrap();
    // Long enough for the consumer's low watermark to be written.
    tokio::time::sleep(Duration::from_mins(1)).await;
    drop(member);
    drop(running.shutdown().await);
    raise(&store).await;
    let bus = open(&store, PREFIX).await;
    let running = start(&bus).await;
    let member = running.consumer("waits").unwrap().run(handler).await.unwrap();
    until("both rows", async || worked.lock().unwrap().len() == 2).await;
    member.shutdown().await.unwrap();
    running.shutdown().await.unwrap();
}

/// Bug: the janitor's time marks pointed at positions that the restore had lost. A janitor continued from such a mark, got `Expired`, and
/// then continued at the end of the feed, so tombstones before that stayed until another janitor started.
#[tokio::test(start_paused = true)]
async fn tombstones_of_after_a_raise_are_dropped() {
    let store = restored(async |bus| {
        record(bus, "a", [1, 0, 0, 0]).await;
        until("a row", async || totals(bus, "a").await.is_some()).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
    })
    .await;
    raise(&store).await;
    let bus = open(&store, PREFIX).await;
    let running = start(&bus).await;
    record(&bus, "a", [0, 1, 0, 0]).await;
    until("the tombstone is dropped", async || totals(&bus, "a").await.is_none()).await;
    running.shutdown().await.unwrap();
}
