//! How fast a consumer reads a feed, in memory: rows per second in batches, with its own checkpoints and with those of a handler that
//! counts exactly once; and ids per second in concurrent work, with a handler that does nothing. It also prints what many consumers on a
//! node cost to start, while idle, and to stop.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]
#![allow(clippy::cast_precision_loss, reason = "the counts are small")]

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use notibus::{
    Bus, BusOptions, Consumer, Cursor, Db, DbInstance, NodeOptions, Notification, NotifierOptions,
    consumer::{Batch, ConsumerOptions, ConsumerSettings, Work},
    store::{AtomicOp, Store, testing::Faults},
};
use tokio::runtime::Runtime;

const ROWS: u64 = 20_000;

/// Makes a bus whose feed of `shards` shards has [`ROWS`] rows.
async fn filled(store: &Store, shards: u32) -> Bus {
    let bus = Bus::open(store, BusOptions::default().shards(shards)).await.unwrap();
    let producer = bus.producer();
    for first in (0..ROWS).step_by(100) {
        let body = async |tx| {
            for n in first..first + 100 {
                let db = Db::new(format!("db{n}").parse()?, DbInstance([1; 16]));
                producer.created(&tx, &db);
            }
            Ok(())
        };
        store.run(body).await.unwrap();
    }
    let notifier =
        bus.node(NodeOptions::default()).await.unwrap().notifier(NotifierOptions::default()).await.unwrap();
    while !bus.is_drained().await.unwrap() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    notifier.shutdown().await.unwrap();
    bus
}

/// What the handler does.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Batches,
    BatchesOnce,
    Ids,
    IdsOnce,
}

/// Reads the feed once, and returns the time since the start of the node.
async fn consume(store: &Store, bus: &Bus, kind: Kind) -> Duration {
    let before = bus.stats().consumer_rows;
    let handle = bus.consumer("bench").unwrap();
    handle.create(&ConsumerSettings::default().start(Cursor::BEGINNING.into())).await.unwrap();
    let started = Instant::now();
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let options = ConsumerOptions::default().max_concurrency(64);
    let member = node.consumer("bench").unwrap().start_from(Cursor::BEGINNING).options(options);
    let store = store.clone();
    let consumer = match kind {
        Kind::Batches => member.run_batches(|_: Batch<Notification>| async { Ok(()) }).await.unwrap(),
        Kind::BatchesOnce => {
            let count = move |batch: Batch<Notification>| {
                let store = store.clone();
                async move {
                    let body = async |tx| {
                        if !batch.commit_in(&tx).await?.is_already_committed() {
                            tx.atomic(AtomicOp::Add, b"rows", &(batch.rows.len() as u64).to_le_bytes());
                        }
                        Ok(())
                    };
                    store.run(body).await?;
                    Ok(())
                }
            };
            member.run_batches(count).await.unwrap()
        }
        Kind::Ids => member.run(|_: Work<Notification>| async { Ok(()) }).await.unwrap(),
        Kind::IdsOnce => {
            let count = move |work: Work<Notification>| {
                let store = store.clone();
                async move {
                    let body = async |tx| {
                        if !work.commit_in(&tx).await?.is_already_committed() {
                            tx.atomic(AtomicOp::Add, b"rows", &1_u64.to_le_bytes());
                        }
                        Ok(())
                    };
                    store.run(body).await?;
                    Ok(())
                }
            };
            member.run(count).await.unwrap()
        }
    };
    while bus.stats().consumer_rows < before + ROWS {
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    let took = started.elapsed();
    consumer.shutdown().await.unwrap();
    handle.delete(true).await.unwrap();
    node.shutdown().await.unwrap();
    took
}

fn reading(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = criterion.benchmark_group("consumer");
    group.throughput(Throughput::Elements(ROWS)).sample_size(10);
    let kinds = [
        ("batches", Kind::Batches),
        ("batches, exactly once", Kind::BatchesOnce),
        ("ids", Kind::Ids),
        ("ids, exactly once", Kind::IdsOnce),
    ];
    for (name, kind) in kinds {
        for shards in [1, 4] {
            let store = Store::memory();
            let bus = runtime.block_on(filled(&store, shards));
            group.bench_function(BenchmarkId::new(name, shards), |bencher| {
                bencher.iter_custom(|runs| {
                    runtime.block_on(async {
                        let mut took = Duration::ZERO;
                        for _ in 0..runs {
                            took += consume(&store, &bus, kind).await;
                        }
                        took
                    })
                });
            });
        }
    }
    group.finish();
}

/// Prints the cost of `count` consumers on a node.
async fn many(count: usize) {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = Bus::open(&faults.store(), BusOptions::default().shards(1)).await.unwrap();
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let (mut members, began, before) = (Vec::new(), Instant::now(), faults.counts());
    for n in 0..count {
        let member = node.consumer(&format!("c{n}")).unwrap();
        members.push(member.run(|_: Work<Notification>| async { Ok(()) }).await.unwrap());
    }
    while members.iter().any(|member| member.shards().is_empty()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (started, after) = (began.elapsed(), faults.counts());
    // In the first seconds the consumers still have things to poll, so they are not idle yet.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let resting = faults.counts();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let rested = faults.counts();
    let began = Instant::now();
    futures_util::future::join_all(members.into_iter().map(Consumer::shutdown)).await;
    let stopped = began.elapsed();
    let each = |from: u64, to: u64| (to - from) as f64 / count as f64;
    println!(
        "{count} consumers: started in {started:.1?} ({:.1} reads, {:.1} mutations each); at rest {:.1} reads and {:.1} write commits a \
         second in all; stopped in {stopped:.1?} ({:.1} mutations each)",
        each(before.reads, after.reads),
        each(before.mutations, after.mutations),
        (rested.reads - resting.reads) as f64 / 10.0,
        (rested.write_commits - resting.write_commits) as f64 / 10.0,
        each(rested.mutations, faults.counts().mutations),
    );
}

fn on_one_node(_: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    for count in [1, 100, 1_000, 10_000] {
        runtime.block_on(many(count));
    }
}

criterion_group!(benches, reading, on_one_node);
criterion_main!(benches);
