//! How fast a group reads a feed, in memory: rows per second from the start of the consumer until no row is left,
//! with the consumer's own checkpoints, and with those of an observer that counts exactly once. It also prints the
//! load of an idle consumer on the store per second.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, NodeOptions, Notification, NotifierOptions,
    group::{ConsumerOptions, GroupBatch, GroupOptions},
    store::{AtomicOp, Database, testing::Faults},
};
use tokio::runtime::Runtime;

const ROWS: u64 = 20_000;

/// A bus whose feed of `shards` shards has [`ROWS`] rows.
async fn filled(store: &Database, shards: u32) -> Bus {
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

/// Reads the feed once, and returns the time.
async fn consume(store: &Database, bus: &Bus, exactly_once: bool) -> Duration {
    let group = bus.group("bench").unwrap();
    let options = GroupOptions::default().start_from(Cursor::NOTHING);
    group.create(&options).await.unwrap();
    let before = bus.stats().group_rows;
    let observe = {
        let store = store.clone();
        move |batch: GroupBatch<Notification>| {
            let store = store.clone();
            async move {
                if exactly_once {
                    let body = async |tx| {
                        if batch.checkpoint_in(&tx).await?.is_done() {
                            return Ok(());
                        }
                        tx.atomic(AtomicOp::Add, b"rows", &(batch.rows.len() as u64).to_le_bytes());
                        Ok(())
                    };
                    store.run(body).await?;
                }
                Ok(())
            }
        }
    };
    let started = Instant::now();
    let consumer = bus
        .node(NodeOptions::default())
        .await
        .unwrap()
        .consumer(&group, move |_| observe.clone(), ConsumerOptions::default())
        .await
        .unwrap();
    while bus.stats().group_rows < before + ROWS {
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    let took = started.elapsed();
    consumer.shutdown().await.unwrap();
    group.delete(true).await.unwrap();
    took
}

/// The load of an idle node with a group on the store per second; printed, not measured by criterion.
async fn idle(shards: u32, groups: usize) {
    let faults = Faults::new(&Database::memory());
    let options = BusOptions::default().shards(shards);
    let bus = Bus::open(&faults.database(), options).await.unwrap();
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let mut consumers = Vec::new();
    for n in 0..groups {
        let group = bus.group(&format!("g{n}")).unwrap();
        group.create(&GroupOptions::default()).await.unwrap();
        let observe = |_: GroupBatch<Notification>| std::future::ready(Ok(()));
        consumers.push(node.consumer(&group, move |_| observe, ConsumerOptions::default()).await.unwrap());
    }
    // Until the earlier positions are saved.
    tokio::time::sleep(Duration::from_mins(2)).await;
    let (before, minutes) = (faults.counts(), 30_u32);
    tokio::time::sleep(Duration::from_mins(minutes.into())).await;
    let (spent, seconds) = (faults.counts() - before, f64::from(minutes * 60));
    let rate = |count: u64| f64::from(count as u32) / seconds;
    println!(
        "idle, {shards} shards, {groups} groups: per second {:.2} transactions, of which {:.2} write, {:.2} reads, {:.0} bytes \
         read, {:.0} bytes written",
        rate(spent.commits),
        rate(spent.write_commits),
        rate(spent.reads),
        rate(spent.read_bytes),
        rate(spent.written_bytes),
    );
}

fn group(criterion: &mut Criterion) {
    for (shards, groups) in [(1, 1), (4, 1), (16, 1), (1, 16), (16, 16)] {
        let paused =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        paused.block_on(idle(shards, groups));
    }
    let runtime = Runtime::new().unwrap();
    let mut benches = criterion.benchmark_group("group");
    benches.sample_size(10).throughput(Throughput::Elements(ROWS));
    for shards in [1, 4, 16] {
        let store = Database::memory();
        let bus = runtime.block_on(filled(&store, shards));
        for (name, exactly_once) in [("checkpoints", false), ("exactly_once", true)] {
            benches.bench_with_input(BenchmarkId::new(name, shards), &shards, |bencher, _| {
                bencher.to_async(&runtime).iter_custom(async |rounds| {
                    let mut took = Duration::ZERO;
                    for _ in 0..rounds {
                        took += consume(&store, &bus, exactly_once).await;
                    }
                    took
                });
            });
        }
    }
    benches.finish();
}

criterion_group!(benches, group);
criterion_main!(benches);
