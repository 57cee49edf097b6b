//! How fast notifiers fold: databases per second, in memory, from the start of the notifier until no event is waiting.
//!
//! A thousand to a hundred thousand databases have one waiting event each. `first` folds them into an empty feed, `again` into a feed that
//! has a row for each. Each node has one thread, so more nodes show the gain from another node, if there are enough cores.
//!
//! First it prints the memory that a database takes at rest: created, updated and folded, with only its rows left in the store. With the
//! feature `cli` the allocator is that of the command.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::{
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use notibus::{
    Bus, BusOptions, Db, DbInstance, NodeOptions, NotifierOptions, node::BalanceOptions, store::Store,
};
use tokio::runtime::Runtime;

#[cfg(feature = "cli")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The number of idle databases whose memory is measured.
const AT_REST: u64 = 100_000;

async fn record(store: &Store, bus: &Bus, dbs: &[Db]) {
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

/// Folds one event for each of `databases` databases on `nodes` nodes with one thread each, and returns the time.
fn fold(store: &Store, nodes: u32, databases: u64) -> Duration {
    let (folded, ready) = (AtomicU64::new(0), Barrier::new(nodes as usize));
    let share = BusOptions::default().partitions.div_ceil(nodes);
    let work = async || {
        let bus = Bus::open(store, BusOptions::default()).await.unwrap();
        ready.wait();
        let started = Instant::now();
        let balance = BalanceOptions::default().leases_max(Some(share));
        let notifier = bus
            .node(NodeOptions::default())
            .await
            .unwrap()
            .notifier(NotifierOptions::default().balance(balance))
            .await
            .unwrap();
        let mut mine = 0;
        while folded.load(Ordering::Relaxed) < databases {
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

/// Returns the resident memory of this process in bytes, if the system reports it.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1_024)
}

/// Prints the memory that an idle database takes.
fn memory(_: &mut Criterion) {
    let Some(before) = resident() else { return };
    let runtime = Runtime::new().unwrap();
    let store = Store::memory();
    let bus = runtime.block_on(Bus::open(&store, BusOptions::default())).unwrap();
    let dbs: Vec<_> = (0..AT_REST).map(database).collect();
    for _ in 0..2 {
        runtime.block_on(record(&store, &bus, &dbs));
        fold(&store, 1, AT_REST);
    }
    drop(dbs);
    // A transaction is too old after 5 s; the next commit then drops versions that no transaction needs.
    std::thread::sleep(Duration::from_secs(6));
    runtime.block_on(record(&store, &bus, &[database(0)]));
    let each = resident().unwrap().saturating_sub(before) / AT_REST;
    println!("memory at rest: {each} bytes for each of {AT_REST} databases");
}

fn database(n: u64) -> Db {
    Db::new(format!("db-{n}").parse().unwrap(), DbInstance(u128::from(n).to_be_bytes()))
}

/// Returns the time of the last of `rounds` folds of `databases` in a new store.
fn last_fold(runtime: &Runtime, nodes: u32, databases: u64, rounds: u32) -> Duration {
    let store = Store::memory();
    let bus = runtime.block_on(Bus::open(&store, BusOptions::default())).unwrap();
    let dbs: Vec<_> = (0..databases).map(database).collect();
    let fold = |_| {
        runtime.block_on(record(&store, &bus, &dbs));
        fold(&store, nodes, databases)
    };
    (0..rounds).map(fold).last().unwrap()
}

fn folds(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("fold");
    group.sample_size(10);
    let sizes = [1_000, 10_000, 100_000].map(|databases| (databases, 1));
    for (databases, nodes) in sizes.into_iter().chain([(10_000, 2), (10_000, 4)]) {
        group.throughput(Throughput::Elements(databases));
        for (name, rounds) in [("first", 1), ("again", 2)] {
            let id = match nodes {
                1 => format!("{name}/{databases}"),
                _ => format!("{name}/{databases}/{nodes} nodes"),
            };
            group.bench_function(id, |b| {
                b.iter_custom(|count| {
                    (0..count).map(|_| last_fold(&runtime, nodes, databases, rounds)).sum()
                });
            });
        }
    }
}

criterion_group!(benches, memory, folds);
criterion_main!(benches);
