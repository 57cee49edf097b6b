//! How fast the dispatcher fans out, from rows that the tail has read to what the subscribers have received.
//!
//! `all/S`: S subscribers of everything, each row goes to each of them; elements are deliveries. `exact/S`: S subscribers of
//! one name each, the rows go round; elements are rows. Beside them, on the same rows: a `tokio::sync::broadcast` channel
//! with as many receivers, which filter in the second case.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use notibus::{
    Bus, BusOptions, Db, DbInstance, DispatcherOptions, Filter, Notification, NotifierOptions, Sequence,
    Since, Versionstamp, store::Database,
};
use tokio::{
    runtime::Runtime,
    sync::broadcast::{self, error::RecvError},
    task::JoinSet,
};
use tokio_stream::StreamExt;

/// Rows of one batch.
const BATCH: usize = 1_000;

/// A row of the bus, to be copied.
async fn template(bus: &Bus, store: &Database) -> Notification {
    let notifier = bus.notifier(NotifierOptions::default()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut rows = dispatcher.subscribe(Filter::all()).since(Since::After(Sequence::ZERO)).stream();
    let db = Db::new("template".parse().unwrap(), DbInstance::random(store.env()));
    let producer = bus.producer();
    store
        .run(async |tx| {
            producer.updated(&tx, &db);
            Ok(())
        })
        .await
        .unwrap();
    let row = rows.next().await.unwrap().unwrap().notification().as_ref().clone();
    notifier.shutdown().await.unwrap();
    row
}

/// `count` rows after `from`, whose names go round `names`.
fn rows(template: &Notification, from: Sequence, names: usize, count: usize) -> Vec<Arc<Notification>> {
    let start = from.versionstamp().version() + 1;
    (0..count)
        .map(|n| {
            let stamp = Versionstamp::new(start + n as u64, 0);
            let sequence = Sequence::new(from.incarnation(), stamp, 0);
            let name = format!("db-{}", n % names).parse().unwrap();
            Arc::new(Notification { sequence, name, updated_at: Some(sequence), ..template.clone() })
        })
        .collect()
}

/// Subscribes `subscribers`, hands out `count` rows, and says how long it took until all have the last row that is theirs.
async fn dispatch(
    bus: &Bus,
    template: &Notification,
    subscribers: usize,
    exact: bool,
    count: usize,
) -> Duration {
    let fanout = bus
        .fanout(DispatcherOptions { ring_rows_max: 1 << 20, ..DispatcherOptions::default() })
        .await
        .unwrap();
    let rows = rows(template, fanout.position(), subscribers, count);
    let mut tasks = JoinSet::new();
    for n in 0..subscribers {
        let name = format!("db-{n}");
        let last = rows.iter().rev().find(|row| !exact || row.name.as_str() == name);
        let Some(last) = last.map(|row| row.sequence) else { continue };
        let filter = if exact { Filter::name(&name).unwrap() } else { Filter::all() };
        let mut stream = fanout.subscribe(filter).stream();
        tasks.spawn(async move {
            let mut received = 0;
            while let Some(delivery) = stream.next().await {
                received += 1;
                if delivery.unwrap().sequence() == last {
                    break;
                }
            }
            received
        });
    }
    let batches: Vec<_> = rows.chunks(BATCH).map(<[_]>::to_vec).collect();
    let started = Instant::now();
    for batch in batches {
        let to = batch.last().unwrap().sequence;
        fanout.push(batch, to).unwrap();
        tokio::task::yield_now().await;
    }
    let received: Vec<usize> = tasks.join_all().await;
    let took = started.elapsed();
    assert!(exact || received.iter().all(|received| *received == count), "a row is missing");
    took
}

/// The same with a broadcast channel.
async fn broadcast(template: &Notification, subscribers: usize, exact: bool, count: usize) -> Duration {
    let rows = rows(template, Sequence::ZERO, subscribers, count);
    let (sender, _) = broadcast::channel::<Arc<Notification>>(1 << 20);
    let mut tasks = JoinSet::new();
    for n in 0..subscribers {
        let name = format!("db-{n}");
        let mut receiver = sender.subscribe();
        tasks.spawn(async move {
            let mut matched = 0;
            loop {
                match receiver.recv().await {
                    Ok(row) if !exact || row.name.as_str() == name => matched += 1,
                    Ok(_) => {}
                    Err(RecvError::Closed) => return matched,
                    Err(RecvError::Lagged(_)) => panic!("the channel is long enough"),
                }
            }
        });
    }
    let started = Instant::now();
    for batch in rows.chunks(BATCH) {
        for row in batch {
            sender.send(Arc::clone(row)).unwrap();
        }
        tokio::task::yield_now().await;
    }
    drop(sender);
    let matched: Vec<usize> = tasks.join_all().await;
    let took = started.elapsed();
    assert_eq!(matched.iter().sum::<usize>(), if exact { count } else { count * subscribers });
    took
}

fn dispatching(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let store = Database::memory();
    let bus = runtime.block_on(Bus::open(&store, BusOptions::default())).unwrap();
    let template = runtime.block_on(template(&bus, &store));
    let mut group = c.benchmark_group("dispatch");
    group.sample_size(10);
    for (exact, kind) in [(false, "all"), (true, "exact")] {
        for subscribers in [1, 100, 1_000] {
            let count = match (exact, subscribers) {
                (false, 1_000) => 5_000,
                (false, 100) => 20_000,
                _ => 200_000,
            };
            let elements = if exact { count } else { count * subscribers };
            group.throughput(Throughput::Elements(elements as u64));
            group.bench_function(format!("{kind}/{subscribers}"), |b| {
                b.iter_custom(|times| {
                    let run = || runtime.block_on(dispatch(&bus, &template, subscribers, exact, count));
                    (0..times).map(|_| run()).sum()
                });
            });
            if exact && subscribers > 100 {
                // Each receiver sees every row: far too slow for as many rows.
                continue;
            }
            group.bench_function(format!("{kind}/{subscribers}/broadcast"), |b| {
                b.iter_custom(|times| {
                    let run = || runtime.block_on(broadcast(&template, subscribers, exact, count));
                    (0..times).map(|_| run()).sum()
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, dispatching);
criterion_main!(benches);
