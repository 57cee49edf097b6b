//! What past reshards cost while rows of each topology entry are left: nothing for folds, events, idle nodes and shards that are taken; a
//! new consumer reads only their entries.

use std::time::Duration;

use notibus::store::testing::OperationCounts;

use crate::{
    ScaleFixture,
    common::{db, joined, record, row_with, unpolled},
    consumers::{members, update},
};

/// The number of consumers, each of 4 shards.
const CONSUMERS: usize = 10;

/// Returns the operations after `reshards` reshards: of ten folds, and of consumers that start, idle a minute, handle an event, and stop.
async fn life(reshards: u64) -> [OperationCounts; 5] {
    let fixture = ScaleFixture::new(1, 4).await;
    let notifier = joined(&fixture.others).await.notifier(unpolled()).await.unwrap();
    for n in 0..reshards {
        let db = db(&format!("db{n:03}"), 1);
        record(&fixture.store, &fixture.others, &db, [1, 0, 0, 0]).await;
        row_with(&fixture.others, &db, [1, 0, 0, 0]).await;
        fixture.others.feed().reshard(4, None).await.unwrap();
    }
    let node = joined(&fixture.counted).await;
    let mut all = Vec::new();
    let start = async {
        all = members(&node, CONSUMERS).await;
        tokio::time::sleep(Duration::from_mins(1)).await;
    };
    let start = fixture.during(start).await;
    tokio::time::sleep(Duration::from_mins(5)).await;
    let rest = fixture.during(tokio::time::sleep(Duration::from_mins(1))).await;
    update(&fixture, 1, CONSUMERS).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    let event = async {
        update(&fixture, 2, CONSUMERS).await;
        tokio::time::sleep(Duration::from_mins(1)).await;
    };
    let event = fixture.during(event).await;
    let stop = async {
        for member in all {
            member.shutdown().await.unwrap();
        }
    };
    let stop = fixture.during(stop).await;
    notifier.shutdown().await.unwrap();
    let folding = joined(&fixture.counted).await.notifier(unpolled()).await.unwrap();
    let folds = async {
        for count in 3..=12 {
            record(&fixture.store, &fixture.others, &db("a", 1), [0, 0, 1, 0]).await;
            row_with(&fixture.others, &db("a", 1), [0, 0, count, 0]).await;
        }
    };
    let folds = fixture.during(folds).await;
    folding.shutdown().await.unwrap();
    [folds, start, rest, event, stop]
}

/// Bug: each fold, each page of a consumer and each shard that was taken read every topology entry that ever had a row: 12 kB after 200.
#[tokio::test(start_paused = true)]
async fn past_reshards_cost_only_their_entries_where_a_consumer_is_created() {
    let reshards = if crate::is_full() { 200 } else { 20 };
    let (one, many) = (Box::pin(life(1)).await, Box::pin(life(reshards)).await);
    for (part, what) in
        ["ten folds", "a start", "an idle minute", "an event", "a stop"].into_iter().enumerate()
    {
        let (one, many) = (one[part], many[part]);
        println!("after one reshard, {what}: {one:?}\nafter {reshards}: {many:?}");
        let is_as_much = |one: u64, many: u64| many <= one * 11 / 10 + 5;
        assert!(is_as_much(one.reads, many.reads), "{what}: {one:?}, {many:?}");
        assert!(is_as_much(one.write_commits, many.write_commits), "{what}: {one:?}, {many:?}");
        // The creation of a consumer finds the entry in which the consumer begins.
        let entries = if what == "a start" { CONSUMERS as u64 * reshards * 100 } else { 500 };
        assert!(many.read_bytes <= one.read_bytes * 11 / 10 + entries, "{what}: {one:?}, {many:?}");
    }
}
