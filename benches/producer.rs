//! What recording costs a transaction: a one-document write with and without an event, in memory.
//!
//! No notifier runs, so the counters only grow. `32 databases` records an event of each in one transaction.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use notibus::{
    Bus, BusOptions, Db, DbInstance, Producer,
    event::DdocId,
    producer::ProducerOptions,
    store::{Store, Transaction},
};
use tokio::runtime::Runtime;

/// Commits `count` transactions that each write a document, with the additions of `record`.
async fn write(store: &Store, count: u64, record: impl Fn(&Transaction)) -> Duration {
    let started = Instant::now();
    for n in 0..count {
        let tx = store.begin();
        tx.set(&[b"doc/", &(n % 10_000).to_be_bytes()[..]].concat(), &[7; 100]);
        record(&tx);
        tx.commit().await.unwrap();
    }
    started.elapsed()
}

fn producer(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let store = Store::memory();
    let bus = runtime.block_on(Bus::open(&store, BusOptions::default())).unwrap();
    let producer = bus.producer();
    let stamping: Producer =
        bus.producer_with(ProducerOptions::default().record_versionstamps(true)).unwrap();
    let dbs: Vec<_> =
        (0..32).map(|n| Db::new(format!("database-{n}").parse().unwrap(), DbInstance::new())).collect();
    let id = DdocId::new("_design/index").unwrap();

    let mut group = c.benchmark_group("producer");
    group.throughput(Throughput::Elements(1));
    let mut case = |name: &str, record: &dyn Fn(&Transaction)| {
        group.bench_function(name, |b| {
            b.iter_custom(|count| runtime.block_on(write(&store, count, record)));
        });
    };
    case("document", &|_| {});
    case("document and event", &|tx| producer.updated(tx, &dbs[0]));
    case("document and 10 events of one database", &|tx| (0..10).for_each(|_| producer.updated(tx, &dbs[0])));
    case("document and ddoc event with id", &|tx| producer.ddoc_updated(tx, &dbs[0], Some(&id)));
    case("document and event with versionstamp", &|tx| stamping.updated(tx, &dbs[0]));
    case("document and events of 32 databases", &|tx| dbs.iter().for_each(|db| producer.updated(tx, db)));
    group.finish();
}

criterion_group!(benches, producer);
criterion_main!(benches);
