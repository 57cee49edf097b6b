//! How fast notifiers fold: databases per second, in memory, from the start of the notifier until nothing waits.
//!
//! Each database has one event waiting. `first` folds them into an empty feed, `again` into one that has a row of each. A node has
//! one thread, so that several show what a further node brings, as long as there are cores for them.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::{
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use notibus::{Bus, BusOptions, Db, DbInstance, NotifierOptions, node::BalanceOptions, store::Database};
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

/// Folds all that waits on `nodes` nodes, each with a thread of its own as its only one, and says how long it took.
fn fold(store: &Database, nodes: u32) -> Duration {
    let (folded, ready) = (AtomicU64::new(0), Barrier::new(nodes as usize));
    let share = BusOptions::default().partitions.div_ceil(nodes);
    let work = async || {
        let bus = Bus::open(store, BusOptions::default()).await.unwrap();
        ready.wait();
        let started = Instant::now();
        let balance = BalanceOptions { leases_max: Some(share), ..BalanceOptions::default() };
        let notifier = bus.notifier(NotifierOptions { balance, ..NotifierOptions::default() }).await.unwrap();
        let mut mine = 0;
        while folded.load(Ordering::Relaxed) < DATABASES {
            tokio::time::sleep(Duration::from_micros(200)).await;
            let now = bus.stats().folded.total();
            folded.fetch_add(now - mine, Ordering::Relaxed);
            mine = now;
        }
        let took = started.elapsed();
        notifier.shutdown().await.unwrap();
        took
    };
    let run =
        || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(work());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..nodes).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    })
}

fn folds(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("fold");
    group.throughput(Throughput::Elements(DATABASES)).sample_size(10);
    for (name, rounds) in [("first", 1), ("again", 2)] {
        for nodes in [1, 2, 4] {
            group.bench_function(format!("{name}/{nodes} nodes"), |b| {
                b.iter_custom(|count| {
                    let mut took = Duration::ZERO;
                    for _ in 0..count {
                        let store = Database::memory();
                        let bus = runtime.block_on(Bus::open(&store, BusOptions::default())).unwrap();
                        let db =
                            |n| Db::new(format!("db-{n}").parse().unwrap(), DbInstance::random(store.env()));
                        let dbs: Vec<_> = (0..DATABASES).map(db).collect();
                        let mut last = Duration::ZERO;
                        for _ in 0..rounds {
                            runtime.block_on(record(&store, &bus, &dbs));
                            last = fold(&store, nodes);
                        }
                        took += last;
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
