//! The notification feed keeps working across reshards: for folds, for its tail, and for subscribers.

use std::time::Duration;

use notibus::{Cursor, DispatcherOptions, Filter, Sequence, store::Store};

use crate::common::{self, NEVER, db, eager, joined, record, until, wide_bus, within};

#[tokio::test(start_paused = true)]
async fn subscribers_and_the_tail_go_on_through_reshards() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let options = DispatcherOptions::default().poll_interval(NEVER);
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let mut updates = dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).stream();
    let feed = bus.feed();
    let mut last = Sequence::MIN;
    for step in 0..30_u32 {
        // The feed is idle for so long that the tail relies on its watches, which are on the old shards.
        tokio::time::sleep(Duration::from_secs(1)).await;
        if step % 3 == 0 {
            feed.reshard(step % 7 + 1, None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(u64::from(step % 2) * 500)).await;
        }
        record(&store, &bus, &db(&format!("db{}", step % 4), 1), [0, 0, 1, 0]).await;
        let delivery =
            within("the update", common::next_news(&mut updates)).await.unwrap().into_delivery().unwrap();
        assert!(delivery.notification().sequence > last);
        last = delivery.notification().sequence;
    }
}

#[tokio::test(start_paused = true)]
async fn notifications_fold_right_while_their_feed_is_resharded() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager().fold_interval_max(Duration::ZERO)).await.unwrap();
    let feed = bus.feed();
    let reshards = async {
        for step in 0..40_u32 {
            tokio::time::sleep(Duration::from_millis(3)).await;
            feed.reshard(step * 7 % 11 + 1, None).await.unwrap();
        }
    };
    let records = async {
        for step in 0..400_u32 {
            record(&store, &bus, &db(&format!("db{}", step % 9), 1), [0, 0, 1, 0]).await;
            tokio::time::sleep(Duration::from_micros(300)).await;
        }
    };
    tokio::join!(reshards, records);
    until("all are folded", async || bus.stats().folded.updated == 400).await;
    let rows = feed.page(Cursor::BEGINNING, 100).await.unwrap().rows;
    assert_eq!(rows.len(), 9);
    assert_eq!(rows.iter().map(|row| row.totals.updated).sum::<u64>(), 400);
    assert_eq!(feed.topology().await.unwrap().len(), 41);
}
