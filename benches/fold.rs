//! How fast notifiers fold: databases per second, in memory, from the start of the notifier until nothing waits.
//!
//! Each database has one event waiting. `first` folds them into an empty feed, `again` into one that has a row of each.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use notibus::{BalanceOptions, Bus, BusOptions, Db, DbInstance, NotifierOptions, store::Database};
use tokio::runtime::Runtime;

const DATABASES: u64 = 10_000;

/// Records an event of each database.
async fn record(store: &Database, bus: &Bus, dbs: &[Db]) {
    let producer = bus.producer();
    for some in dbs.chunks(100) {
        store
            .run(async |tx| {
                for db in some {
                    producer.updated(&tx, db);
                }
                Ok(())
            })
            .await
            .unwrap();
    }
}

/// Folds all that waits with `notifiers`, and says how long it took.
async fn fold(bus: &Bus, notifiers: u32) -> Duration {
    let before = bus.stats().folded.total();
    let started = Instant::now();
    let mut running = Vec::new();
    for _ in 0..notifiers {
        let share = BusOptions::default().partitions.div_ceil(notifiers);
        let balance = BalanceOptions { leases_max: Some(share), ..BalanceOptions::default() };
        let options = NotifierOptions { balance, ..NotifierOptions::default() };
        running.push(bus.notifier(options).await.unwrap());
    }
    while bus.stats().folded.total() - before < DATABASES {
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    let took = started.elapsed();
    for notifier in running {
        notifier.shutdown().await.unwrap();
    }
    took
}

fn folds(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("fold");
    group.throughput(Throughput::Elements(DATABASES)).sample_size(10);
    for (name, rounds) in [("first", 1), ("again", 2)] {
        for notifiers in [1, 4] {
            group.bench_function(format!("{name}/{notifiers} notifiers"), |b| {
                b.iter_custom(|count| {
                    let mut took = Duration::ZERO;
                    for _ in 0..count {
                        took += runtime.block_on(async {
                            let store = Database::memory();
                            let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
                            let dbs: Vec<_> = (0..DATABASES)
                                .map(|n| {
                                    Db::new(
                                        format!("db-{n}").parse().unwrap(),
                                        DbInstance::random(store.env()),
                                    )
                                })
                                .collect();
                            let mut last = Duration::ZERO;
                            for _ in 0..rounds {
                                record(&store, &bus, &dbs).await;
                                last = fold(&bus, notifiers).await;
                            }
                            last
                        });
                    }
                    took
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, folds);
criterion_main!(benches);
