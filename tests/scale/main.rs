//! How costs grow: the slopes of `docs/scale.md`, measured at small sizes in paused time, in operations of the store.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod beats;
#[path = "../common/mod.rs"]
mod common;
mod consumers;
mod idle;
mod janitor;
mod nodes;
mod pools;
mod reshards;

use std::time::Duration;

use common::{db, joined, record, row_with, unpolled, until};
use notibus::{
    Bus, BusOptions, Dispatcher, DispatcherOptions, Filter, NodeOptions, Notification, NotifierOptions,
    consumer::Batch,
    node::Role,
    store::{
        Store,
        testing::{Faults, OperationCounts},
    },
};

/// A bus whose store counts operations, and the same bus without counts, for everything else.
struct ScaleFixture {
    faults: Faults,
    counted: Bus,
    others: Bus,
    store: Store,
}

impl ScaleFixture {
    async fn new(partitions: u32, shards: u32) -> Self {
        let store = Store::memory();
        let faults = Faults::new(&store);
        let options = || BusOptions::default().partitions(partitions).shards(shards);
        let others = Bus::open(&store, options()).await.unwrap();
        let counted = Bus::open(&faults.store(), options()).await.unwrap();
        Self { faults, counted, others, store }
    }

    async fn during<T>(&self, work: impl Future<Output = T>) -> OperationCounts {
        let before = self.faults.counts();
        work.await;
        self.faults.counts() - before
    }
}

/// Whether the environment asks for the sizes of `docs/scale.md`.
fn is_full() -> bool {
    std::env::var("NOTIBUS_LOAD").is_ok_and(|size| size == "full")
}

/// Whether `more` is `times` as much as `less`, give or take `percent` percent.
fn is_times(more: u64, less: u64, times: u64, percent: u64) -> bool {
    let expected = less * times;
    more * 100 <= expected * (100 + percent) && more * 100 >= expected * (100 - percent)
}

/// Returns the operations of an idle node in ten minutes among `nodes` others.
async fn idle_among(nodes: usize) -> OperationCounts {
    let fixture = ScaleFixture::new(1, 1).await;
    let mut others = Vec::new();
    for _ in 0..nodes {
        let node = fixture.others.node(NodeOptions::default()).await.unwrap();
        let role = node.announce(Role::HTTP).await.unwrap();
        others.push((node, role));
    }
    let node = fixture.counted.node(NodeOptions::default()).await.unwrap();
    let _role = node.announce(Role::HTTP).await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    fixture.during(tokio::time::sleep(Duration::from_mins(10))).await
}

#[tokio::test(start_paused = true)]
async fn an_idle_node_asks_as_much_among_many_as_among_some() {
    let (some, many) = (idle_among(16).await, idle_among(128).await);
    println!("16 nodes: {some:?}\n128 nodes: {many:?}");
    assert!(is_times(many.commits, some.commits, 1, 5));
    assert!(is_times(many.write_commits, some.write_commits, 1, 5));
    // A node at the end of the ring reads the nodes after it with two reads instead of one.
    assert!(many.reads <= some.reads * 2 && some.reads <= many.reads * 2);
    assert!(is_times(many.read_bytes, some.read_bytes, 1, 10));
}

/// Returns the operations of folding 50 successive updates of one database among `databases` databases.
async fn folds_among(databases: usize) -> OperationCounts {
    let fixture = ScaleFixture::new(1, 1).await;
    let notifier = joined(&fixture.counted).await.notifier(unpolled()).await.unwrap();
    for n in 0..databases {
        record(&fixture.store, &fixture.others, &db(&format!("db{n:06}"), 1), [1, 0, 0, 0]).await;
    }
    until("all are folded", async || fixture.others.is_drained().await.unwrap()).await;
    let one = db("db000000", 1);
    let spent = fixture
        .during(async {
            for n in 1..=50 {
                record(&fixture.store, &fixture.others, &one, [0, 0, 1, 0]).await;
                row_with(&fixture.others, &one, [1, 0, n, 0]).await;
            }
        })
        .await;
    notifier.shutdown().await.unwrap();
    spent
}

#[tokio::test(start_paused = true)]
async fn a_fold_costs_the_same_among_many_databases_as_among_some() {
    let (some, many) = (folds_among(100).await, folds_among(1_000).await);
    println!("100 databases: {some:?}\n1,000 databases: {many:?}");
    assert!(is_times(many.reads, some.reads, 1, 10));
    assert!(is_times(many.read_bytes, some.read_bytes, 1, 10));
    assert!(is_times(many.written_bytes, some.written_bytes, 1, 10));
}

/// Returns the reads of a dispatcher for `events` events that its only subscriber does not want.
async fn tail_of(events: u64) -> OperationCounts {
    let fixture = ScaleFixture::new(1, 1).await;
    let notifier = joined(&fixture.others).await.notifier(unpolled()).await.unwrap();
    let dispatcher: Dispatcher = fixture.counted.dispatcher(DispatcherOptions::default()).await.unwrap();
    let _subscription = dispatcher.subscribe(Filter::name("none").unwrap()).stream();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let rows = fixture.counted.stats().rows_tailed;
    let spent = fixture
        .during(async {
            for n in 0..events {
                let db = db(&format!("db{n:06}"), 1);
                record(&fixture.store, &fixture.others, &db, [1, 0, 0, 0]).await;
                row_with(&fixture.others, &db, [1, 0, 0, 0]).await;
                until("it is read", async || fixture.counted.stats().rows_tailed - rows == n + 1).await;
            }
        })
        .await;
    notifier.shutdown().await.unwrap();
    spent
}

/// This line of the table does not scale: each dispatcher reads each row, whatever its subscribers want.
#[tokio::test(start_paused = true)]
async fn a_dispatcher_reads_the_whole_feed() {
    let (less, more) = (tail_of(100).await, tail_of(400).await);
    println!("100 events: {less:?}\n400 events: {more:?}");
    assert!(is_times(more.read_bytes, less.read_bytes, 4, 25));
}

/// Returns the operations of the second notifier of a bus until both have their shares.
async fn join_of(partitions: u32) -> OperationCounts {
    let fixture = ScaleFixture::new(partitions, 1).await;
    let options = || NotifierOptions::default().poll_interval(Duration::from_hours(10));
    let first = joined(&fixture.others).await.notifier(options()).await.unwrap();
    let mut second = None;
    let spent = fixture
        .during(async {
            let notifier = joined(&fixture.counted).await.notifier(options()).await.unwrap();
            let half = partitions as usize / 2;
            until("both have a half", async || notifier.partitions().len() == half).await;
            second = Some(notifier);
        })
        .await;
    first.shutdown().await.unwrap();
    second.unwrap().shutdown().await.unwrap();
    spent
}

#[tokio::test(start_paused = true)]
async fn joining_a_pool_costs_in_proportion_to_its_resources() {
    let (less, more) = (join_of(128).await, join_of(1_024).await);
    println!("128 partitions: {less:?}\n1,024 partitions: {more:?}");
    // At most about eight times as many, not the square; fewer, because a part of the cost is fixed.
    assert!(more.read_bytes <= less.read_bytes * 8 * 3 / 2, "{} after {}", more.read_bytes, less.read_bytes);
    assert!(more.written_bytes <= less.written_bytes * 8 * 3 / 2);
}

/// Returns the operations of a consumer from a reshard on, until it works on all successors of `shards` shards.
async fn drain_of(shards: u32) -> OperationCounts {
    let fixture = ScaleFixture::new(1, shards).await;
    let nothing = |_: Batch<Notification>| std::future::ready(Ok(()));
    let consumer = joined(&fixture.counted).await.consumer("c").unwrap().run_batches(nothing).await.unwrap();
    until("it has all", async || consumer.shards().len() == shards as usize).await;
    tokio::time::sleep(Duration::from_mins(5)).await;
    let last = consumer.shards().last().copied();
    let spent = fixture
        .during(async {
            fixture.others.feed().reshard(shards, None).await.unwrap();
            let is_over =
                || consumer.shards().len() == shards as usize && consumer.shards().first() > last.as_ref();
            until("it works on the successors", async || is_over()).await;
        })
        .await;
    consumer.shutdown().await.unwrap();
    spent
}

/// Regression: each shard of a consumer that had reached its end read the checkpoints of all others: 0.6 MB at 128 shards, 8.9 MB at 512.
#[tokio::test(start_paused = true)]
async fn a_drain_of_a_consumer_costs_in_proportion_to_its_shards() {
    let (less, more) = (drain_of(128).await, drain_of(512).await);
    println!("128 shards: {less:?}\n512 shards: {more:?}");
    assert!(more.read_bytes <= less.read_bytes * 4 * 3 / 2, "{} after {}", more.read_bytes, less.read_bytes);
    assert!(more.written_bytes <= less.written_bytes * 4 * 3 / 2);
}
