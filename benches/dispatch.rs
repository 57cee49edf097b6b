//! How fast the dispatcher fans out, from rows that the tail has read to what the subscribers have received.
//!
//! - `all/S`, `suffix/S`, `exact/S`: S subscribers of everything, of one of S suffixes each, of one name each; the rows go round
//!   the names. For `all` each row goes to each of them, and elements are deliveries; for the others to one, and elements are
//!   rows.
//! - `latency/…/S`: from when a single row is handed out to when all that want it have it.
//! - `one_of_100000`: rows of one name, which one of 100,000 subscribers of exact names wants. Beside it `one_of_1`: the cost of
//!   an event must not grow with the others.
//! - `set_of_100000`: the same for one subscriber that wants 100,000 exact names by a set of as many filters. Beside it
//!   `set_of_1`.
//!
//! Beside each, on the same rows: a `tokio::sync::broadcast` channel with as many receivers, which filter by themselves.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use notibus::{
    Bus, BusOptions, Db, DbInstance, DispatcherOptions, Fanout, Filter, Notification, NotifierOptions,
    Sequence, Since, Subscription, Versionstamp, store::Database,
};
use tokio::{
    runtime::Runtime,
    sync::broadcast::{self, error::RecvError},
    task::JoinSet,
};
use tokio_stream::StreamExt;

/// Rows of one batch.
const BATCH: usize = 1_000;

/// How many deliveries one measurement is about.
const DELIVERIES: usize = 1_000_000;

/// What subscribers want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    /// Everything.
    All,
    /// The end of a name.
    Suffix,
    /// A name.
    Exact,
}

impl Want {
    /// All of them, with their names.
    const ALL: [(Self, &str); 3] = [(Self::All, "all"), (Self::Suffix, "suffix"), (Self::Exact, "exact")];

    /// The filter of subscriber `n`.
    fn filter(self, n: usize) -> Filter {
        match self {
            Self::All => Filter::all(),
            Self::Suffix => Filter::suffix(format!("/{n}")),
            Self::Exact => Filter::name(&name(n)).unwrap(),
        }
    }

    /// How many rows to hand out to `subscribers`: each costs something with everybody who has to look at it.
    fn rows(self, subscribers: usize) -> usize {
        let looks = if self == Self::Exact { 1 } else { subscribers };
        // Each subscriber of a name or a suffix has a row of its own.
        let least = if self == Self::All { subscribers.min(1_000) } else { subscribers };
        (DELIVERIES / looks).clamp(least, 200_000)
    }
}

/// The name of database `n`.
fn name(n: usize) -> String {
    format!("db/{n}")
}

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
            let name = name(n % names).parse().unwrap();
            Arc::new(Notification { sequence, name, updated_at: Some(sequence), ..template.clone() })
        })
        .collect()
}

/// A fan-out whose ring holds everything.
async fn fanout(bus: &Bus) -> Fanout {
    bus.fanout(DispatcherOptions { ring_rows_max: 1 << 20, ..DispatcherOptions::default() }).await.unwrap()
}

/// Receives until the row at `last`; how many there were.
async fn receive(mut stream: Subscription, last: Sequence) -> usize {
    let mut received = 0;
    while let Some(delivery) = stream.next().await {
        received += 1;
        if delivery.unwrap().sequence() == last {
            break;
        }
    }
    received
}

/// Subscribes `subscribers`, hands out `count` rows, and says how long it took until all have the last row that is theirs.
async fn dispatch(
    bus: &Bus,
    template: &Notification,
    subscribers: usize,
    want: Want,
    count: usize,
) -> Duration {
    let fanout = fanout(bus).await;
    let rows = rows(template, fanout.position(), subscribers, count);
    let mut tasks = JoinSet::new();
    for n in 0..subscribers {
        let last =
            if want == Want::All { count - 1 } else { (count - 1 - n) / subscribers * subscribers + n };
        tasks.spawn(receive(fanout.subscribe(want.filter(n)).stream(), rows[last].sequence));
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
    assert!(want != Want::All || received.iter().all(|received| *received == count), "a row is missing");
    took
}

/// The same with a broadcast channel.
async fn broadcast(template: &Notification, subscribers: usize, want: Want, count: usize) -> Duration {
    let rows = rows(template, Sequence::ZERO, subscribers, count);
    let (sender, _) = broadcast::channel::<Arc<Notification>>(1 << 18);
    let mut tasks = JoinSet::new();
    for n in 0..subscribers {
        let (name, suffix) = (name(n), format!("/{n}"));
        let mut receiver = sender.subscribe();
        tasks.spawn(async move {
            let mut matched = 0;
            loop {
                let row = match receiver.recv().await {
                    Ok(row) => row,
                    Err(RecvError::Closed) => return matched,
                    Err(RecvError::Lagged(_)) => panic!("the channel is long enough"),
                };
                matched += usize::from(match want {
                    Want::All => true,
                    Want::Suffix => row.name.as_str().ends_with(&suffix),
                    Want::Exact => row.name.as_str() == name,
                });
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
    assert_eq!(matched.iter().sum::<usize>(), if want == Want::All { count * subscribers } else { count });
    took
}

/// How long it takes, on average of `times`, until all of `subscribers` that want a single row have it.
async fn latency(bus: &Bus, template: &Notification, subscribers: usize, want: Want, times: u64) -> Duration {
    let fanout = fanout(bus).await;
    let (done, mut all_done) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for n in 0..subscribers {
        let (mut stream, done) = (fanout.subscribe(want.filter(n)).stream(), done.clone());
        tasks.spawn(async move {
            while let Some(delivery) = stream.next().await {
                delivery.unwrap();
                done.send(()).unwrap();
            }
        });
    }
    let wanting = if want == Want::All { subscribers } else { 1 };
    let mut took = Duration::ZERO;
    for _ in 0..times {
        let row = rows(template, fanout.position(), 1, 1);
        let to = row[0].sequence;
        let started = Instant::now();
        fanout.push(row, to).unwrap();
        for _ in 0..wanting {
            all_done.recv().await.unwrap();
        }
        took += started.elapsed();
    }
    drop(fanout);
    tasks.join_all().await;
    took
}

/// How long `count` rows of one name take that one of `subscribers` of exact names wants.
async fn one_of(bus: &Bus, template: &Notification, subscribers: usize, count: usize) -> Duration {
    let fanout = fanout(bus).await;
    let others: Vec<_> = (1..subscribers).map(|n| fanout.subscribe(Want::Exact.filter(n)).stream()).collect();
    let rows = rows(template, fanout.position(), 1, count);
    let stream = fanout.subscribe(Want::Exact.filter(0)).stream();
    let receiving = tokio::spawn(receive(stream, rows[count - 1].sequence));
    // One row per batch: an event by itself.
    let started = Instant::now();
    for row in rows {
        let to = row.sequence;
        fanout.push(vec![row], to).unwrap();
    }
    receiving.await.unwrap();
    let took = started.elapsed();
    drop(others);
    took
}

/// How long `count` rows of one name take for a subscriber that wants it by one of the `filters` filters of its set.
async fn set_of(bus: &Bus, template: &Notification, filters: usize, count: usize) -> Duration {
    let fanout = fanout(bus).await;
    let set = Filter::any((0..filters).map(|n| Want::Exact.filter(n))).unwrap();
    let stream = fanout.subscribe(set).stream();
    let rows = rows(template, fanout.position(), 1, count);
    let receiving = tokio::spawn(receive(stream, rows[count - 1].sequence));
    let started = Instant::now();
    for row in rows {
        let to = row.sequence;
        fanout.push(vec![row], to).unwrap();
    }
    receiving.await.unwrap();
    started.elapsed()
}

/// Measures `run`, a few times.
fn measure(group: &mut BenchmarkGroup<'_, WallTime>, id: String, mut run: impl FnMut() -> Duration) {
    group.bench_function(id, |b| b.iter_custom(|times| (0..times).map(|_| run()).sum()));
}

fn dispatching(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let store = Database::memory();
    let bus = runtime.block_on(Bus::open(&store, BusOptions::default())).unwrap();
    let template = runtime.block_on(template(&bus, &store));
    let mut group = c.benchmark_group("dispatch");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for (want, kind) in Want::ALL {
        for subscribers in [1, 10, 100, 1_000, 10_000] {
            let count = want.rows(subscribers);
            let elements = if want == Want::All { count * subscribers } else { count };
            group.throughput(Throughput::Elements(elements as u64));
            measure(&mut group, format!("{kind}/{subscribers}"), || {
                runtime.block_on(dispatch(&bus, &template, subscribers, want, count))
            });
            // Each receiver looks at every row: fewer of them, so that it ends.
            let count = count.min(Want::All.rows(subscribers));
            let elements = if want == Want::All { count * subscribers } else { count };
            group.throughput(Throughput::Elements(elements as u64));
            measure(&mut group, format!("{kind}/{subscribers}/broadcast"), || {
                runtime.block_on(broadcast(&template, subscribers, want, count))
            });
        }
    }
    group.throughput(Throughput::Elements(1));
    for (want, kind) in Want::ALL {
        for subscribers in [1, 10, 100, 1_000, 10_000] {
            group.bench_function(format!("latency/{kind}/{subscribers}"), |b| {
                b.iter_custom(|times| runtime.block_on(latency(&bus, &template, subscribers, want, times)));
            });
        }
    }
    for subscribers in [1, 100_000] {
        let count = 100_000;
        group.throughput(Throughput::Elements(count as u64));
        measure(&mut group, format!("one_of_{subscribers}"), || {
            runtime.block_on(one_of(&bus, &template, subscribers, count))
        });
        measure(&mut group, format!("set_of_{subscribers}"), || {
            runtime.block_on(set_of(&bus, &template, subscribers, count))
        });
    }
    group.finish();
}

criterion_group!(benches, dispatching);
criterion_main!(benches);
