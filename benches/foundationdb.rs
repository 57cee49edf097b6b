//! The bus on a real cluster of one process: what recording costs a transaction, the speed of notifiers, and the latency from commit to
//! delivery.
//!
//! It starts its own cluster with the `fdbserver` that it finds; if it finds none, it says so and exits. `producer` commits with 64
//! concurrent tasks, so that the cluster is busy; elements are transactions. `latency` records an event of one database in a quiet bus and
//! waits for its delivery, with a fold interval of zero.
//!
//! `cost` prints the cost of an event by the cluster's own counters, `limits` what limits folding, and `whole` how fast the bus is.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

#[path = "../tests/cluster/mod.rs"]
mod cluster;
#[cfg(feature = "http")]
#[path = "cluster/cost.rs"]
mod cost;
#[path = "cluster/folding.rs"]
mod folding;
#[path = "shared/whole.rs"]
mod whole;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use criterion::{Criterion, Throughput};
use notibus::{
    Bus, BusOptions, Db, DbInstance, DispatcherOptions, Filter, NodeOptions, NotifierOptions, Producer,
    store::{Store, stop_network},
};
use tokio::{runtime::Runtime, task::JoinSet};
use tokio_stream::StreamExt;

/// The number of concurrent transactions.
const TASKS: u64 = 64;

const DATABASES: u64 = 2_000;

async fn open(store: &Store, name: &str) -> Bus {
    let prefix = format!("{name}/{:016x}/", fastrand::u64(..)).into_bytes();
    Bus::open(store, BusOptions::default().prefix(prefix)).await.unwrap()
}

/// Makes databases for which events are recorded.
fn databases(count: u64) -> Arc<Vec<Db>> {
    let db = |n| Db::new(format!("db-{n}").parse().unwrap(), DbInstance::new());
    Arc::new((0..count).map(db).collect())
}

/// Commits `count` transactions that each write a document, and record an event for it if there is a producer.
async fn write(store: &Store, producer: Option<&Producer>, dbs: &Arc<Vec<Db>>, count: u64) -> Duration {
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (store, producer, dbs) = (store.clone(), producer.cloned(), Arc::clone(dbs));
        tasks.spawn(async move {
            for n in (task..count).step_by(usize::try_from(TASKS).unwrap()) {
                let key = [b"doc/", &(n % 100_000).to_be_bytes()[..]].concat();
                let tx = store.begin();
                tx.set(&key, &[7; 100]);
                if let Some(producer) = &producer {
                    producer.updated(&tx, &dbs[usize::try_from(n).unwrap() % dbs.len()]);
                }
                tx.commit().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    started.elapsed()
}

/// Folds an event of each database with one notifier, and returns the time.
async fn fold(store: &Store) -> Duration {
    let bus = open(store, "fold").await;
    let producer = bus.producer();
    for some in databases(DATABASES).chunks(100) {
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
    let started = Instant::now();
    let notifier =
        bus.node(NodeOptions::default()).await.unwrap().notifier(NotifierOptions::default()).await.unwrap();
    while bus.stats().folded.total() < DATABASES {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let took = started.elapsed();
    notifier.shutdown().await.unwrap();
    took
}

/// Records events one at a time, and returns the time from commit to delivery of each.
async fn latency(store: &Store, count: u64) -> Duration {
    let bus = open(store, "latency").await;
    let options = NotifierOptions::default().fold_interval_max(Duration::ZERO);
    let notifier = bus.node(NodeOptions::default()).await.unwrap().notifier(options).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut deliveries = dispatcher.subscribe(Filter::all()).deliveries(|trouble| panic!("{trouble}"));
    let producer = bus.producer();
    let dbs = databases(1);
    let mut took = Duration::ZERO;
    for _ in 0..count {
        let tx = store.begin();
        producer.updated(&tx, &dbs[0]);
        tx.commit().await.unwrap();
        let committed = Instant::now();
        deliveries.next().await.unwrap();
        took += committed.elapsed();
    }
    dispatcher.shutdown().await;
    notifier.shutdown().await.unwrap();
    took
}

fn run(c: &mut Criterion, runtime: &Runtime, store: &Store) {
    let mut group = c.benchmark_group("foundationdb");
    group.sample_size(10).measurement_time(Duration::from_secs(10));
    let bus = runtime.block_on(open(store, "producer"));
    let producer = bus.producer();
    let (one, many) = (databases(1), databases(1_000));
    group.throughput(Throughput::Elements(1));
    for (name, producer, dbs) in [
        ("producer/document", None, &one),
        ("producer/document and event of one database", Some(&producer), &one),
        ("producer/document and event of one of 1,000 databases", Some(&producer), &many),
    ] {
        group.bench_function(name, |b| {
            b.iter_custom(|count| runtime.block_on(write(store, producer, dbs, count)));
        });
    }
    group.bench_function("latency", |b| b.iter_custom(|count| runtime.block_on(latency(store, count))));
    group.throughput(Throughput::Elements(DATABASES));
    group.bench_function("fold", |b| {
        b.iter_custom(|count| (0..count).map(|_| runtime.block_on(fold(store))).sum());
    });
    group.finish();
}

fn main() {
    if cluster::is_missing() {
        return;
    }
    let cluster = cluster::Cluster::start();
    let runtime = Runtime::new().unwrap();
    let store = runtime.block_on(Store::foundationdb(cluster.file())).unwrap();
    let asked: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let is_asked = |what: &str| asked.is_empty() || asked.iter().any(|argument| what.contains(argument));
    #[cfg(feature = "http")]
    if is_asked("cost") {
        runtime.block_on(cost::print(&cluster, &store));
    }
    if is_asked("limits") {
        runtime.block_on(folding::print(&cluster, &store));
    }
    if is_asked("whole") {
        let few = whole::Case { partitions: 8, pause: None, writers: 64 };
        for case in whole::Case::all().chain([few]) {
            runtime.block_on(whole::print("cluster", &store, case));
        }
    }
    let mut criterion = Criterion::default().configure_from_args();
    run(&mut criterion, &runtime, &store);
    criterion.final_summary();
    drop((store, runtime));
    stop_network();
}
