//! How fast the dispatcher fans out: from rows of the tail to receipt by the subscribers.
//!
//! - `all/S`, `batches/S`: S subscribers of everything, which receive single deliveries or whole batches. Each row goes to every
//!   subscriber; elements are deliveries.
//! - `suffix/S`, `prefix/S`, `glob/S`, `exact/S`: S subscribers, each of one of S suffixes, prefixes, globs or names; the rows cycle
//!   through the names. Each row goes to one subscriber; elements are rows.
//! - `latency/…/S`: the time from handing out a single row until all interested subscribers have it.
//! - `one_of_100000`: rows of one name, which one of 100,000 subscribers of exact names wants. Compare it with `one_of_1`: the cost of an
//!   event must not grow with the number of other subscribers.
//! - `set_of_100000`: the same for one subscriber that wants 100,000 exact names through a set of as many filters. Compare it with
//!   `set_of_1`.
//! - `rest`, which is printed first: the memory of a subscriber that waits for its next row.
//!
//! Each case has a competitor on the same rows: a `tokio::sync::broadcast` channel with as many receivers, which filter by themselves.
//! Compare `batches` with the channel next to `all/S`. There is no channel with 100,000 receivers, which would take minutes.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use criterion::{
    BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use futures_util::FutureExt;
use notibus::{
    Bus, BusOptions, Db, DbInstance, Dispatcher, DispatcherOptions, Filter, NodeOptions, Notification,
    NotifierOptions, Sequence,
    dispatcher::{BatchSubscription, Item, Subscription},
    event::Versionstamp,
    store::Store,
};
use tokio::{
    runtime::Runtime,
    sync::broadcast::{self, error::RecvError},
    task::JoinSet,
};
use tokio_stream::StreamExt;

const BATCH: usize = 1_000;

const DELIVERIES: usize = 1_000_000;

/// The maximum number of receivers of a broadcast channel.
const RECEIVERS_MAX: usize = 10_000;

/// The number of idle subscribers that are measured.
const RESTING: usize = 1_000_000;

/// The cases: the interests and the numbers of subscribers, by name.
const DISPATCHED: [(&str, Want, &[usize]); 6] = [
    ("all", Want::All, &[1, 10, 100, 1_000, 10_000]),
    ("batches", Want::Batches, &[1, 10, 1_000, 10_000]),
    ("suffix", Want::Suffix, &[10, 100, 10_000]),
    ("prefix", Want::Prefix, &[10, 100, 10_000]),
    ("glob", Want::Glob, &[10, 1_000]),
    ("exact", Want::Exact, &[1, 100, 1_000, 10_000, 100_000]),
];

const LATENCIES: [(&str, Want, usize); 3] =
    [("all/1000", Want::All, 1_000), ("exact/1", Want::Exact, 1), ("exact/10000", Want::Exact, 10_000)];

type Test = Box<dyn Fn(&str) -> bool + Send>;

/// Returns the filter of a subscriber with this number.
type FilterOf = fn(usize) -> Filter;

/// What the subscribers want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    /// Everything, delivery by delivery.
    All,
    /// Everything, in batches.
    Batches,
    Suffix,
    Prefix,
    Glob,
    Exact,
}

impl Want {
    /// Whether all subscribers want each row.
    fn is_everything(self) -> bool {
        matches!(self, Self::All | Self::Batches)
    }

    fn name(self, n: usize) -> String {
        if self == Self::Prefix { format!("{n}/db") } else { format!("db/{n}") }
    }

    fn filter(self, n: usize) -> Filter {
        match self {
            Self::All | Self::Batches => Filter::all(),
            Self::Suffix => Filter::suffix(format!("/{n}")),
            Self::Prefix => Filter::prefix(format!("{n}/")),
            Self::Glob => Filter::glob(&format!("*[/]{n}")).unwrap(),
            Self::Exact => Filter::name(&self.name(n)).unwrap(),
        }
    }

    /// Returns the test of receiver `n` of a broadcast channel; `None` if it wants everything.
    fn test(self, n: usize) -> Option<Test> {
        match self {
            Self::All | Self::Batches => None,
            Self::Suffix => {
                let suffix = format!("/{n}");
                Some(Box::new(move |name| name.ends_with(&suffix)))
            }
            Self::Prefix => {
                let prefix = format!("{n}/");
                Some(Box::new(move |name| name.starts_with(&prefix)))
            }
            Self::Glob => {
                let glob = globset::Glob::new(&format!("*[/]{n}")).unwrap().compile_matcher();
                Some(Box::new(move |name| glob.is_match(name)))
            }
            Self::Exact => {
                let wanted = self.name(n);
                Some(Box::new(move |name| name == wanted))
            }
        }
    }

    /// Returns how many rows to hand out to `subscribers`: a row has a cost for each subscriber that sees it.
    fn rows(self, subscribers: usize) -> usize {
        let looks = if self == Self::Exact { 1 } else { subscribers };
        // Each subscriber that wants only some names has its own row.
        let least = if self.is_everything() { subscribers.min(1_000) } else { subscribers };
        (DELIVERIES / looks).clamp(least, 200_000)
    }

    /// Returns the number of elements in `rows` for `subscribers`.
    fn elements(self, subscribers: usize, rows: usize) -> Throughput {
        Throughput::Elements(if self.is_everything() { rows * subscribers } else { rows } as u64)
    }
}

/// Makes a row of the bus that can be copied.
async fn template(bus: &Bus, store: &Store) -> Notification {
    let notifier =
        bus.node(NodeOptions::default()).await.unwrap().notifier(NotifierOptions::default()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut rows = dispatcher.subscribe(Filter::all()).stream();
    let db = Db::new("template".parse().unwrap(), DbInstance::new());
    let producer = bus.producer();
    store
        .run(async |tx| {
            producer.updated(&tx, &db);
            Ok(())
        })
        .await
        .unwrap();
    let row = rows.next().await.unwrap().into_delivery().unwrap().notification().as_ref().clone();
    notifier.shutdown().await.unwrap();
    row
}

/// Returns the position `n` versions after `from`.
fn later(from: Sequence, n: usize) -> Sequence {
    let stamp = Versionstamp::new(from.versionstamp().version() + n as u64, 0);
    Sequence::new(from.incarnation(), stamp, 0)
}

/// Makes `count` rows after `from`, whose names cycle through those of the first `names` databases.
fn rows(
    template: &Notification,
    from: Sequence,
    want: Want,
    names: usize,
    count: usize,
) -> Vec<Arc<Notification>> {
    (0..count)
        .map(|n| {
            let sequence = later(from, n + 1);
            let name = want.name(n % names).parse().unwrap();
            Arc::new(Notification { sequence, name, updated_at: Some(sequence), ..template.clone() })
        })
        .collect()
}

/// Makes a dispatcher whose ring holds everything.
async fn fanout(bus: &Bus) -> Dispatcher {
    bus.suspended_dispatcher(DispatcherOptions::default().ring_rows_max(1 << 20)).await.unwrap()
}

/// Receives until the row at `last`, and returns the number of rows. The stream is returned too, so that dropping it is not measured.
async fn receive(mut stream: Subscription, last: Sequence) -> (usize, Box<dyn Send>) {
    let mut received = 0;
    while let Some(Item::Delivery(delivery)) = stream.next().await {
        received += 1;
        if delivery.sequence() == last {
            break;
        }
    }
    (received, Box::new(stream))
}

async fn receive_batches(mut stream: BatchSubscription, last: Sequence) -> (usize, Box<dyn Send>) {
    let mut received = 0;
    while let Some(Item::Delivery(batch)) = stream.next().await {
        let mut at = None;
        for delivery in &batch {
            received += 1;
            at = Some(black_box(delivery.sequence()));
        }
        if at == Some(last) {
            break;
        }
    }
    (received, Box::new(stream))
}

/// Runs `pushing` as a task of the runtime, as a tail runs.
async fn as_the_tail<T: Send + 'static>(pushing: impl Future<Output = T> + Send + 'static) -> T {
    tokio::spawn(pushing).await.unwrap()
}

/// Subscribes `subscribers`, hands out `count` rows, and returns the time until each subscriber has its last row.
async fn dispatch(
    bus: &Bus,
    template: &Notification,
    subscribers: usize,
    want: Want,
    count: usize,
) -> Duration {
    let fanout = fanout(bus).await;
    let start = later(fanout.position(), 1);
    // Rows of one database would be coalesced for a subscriber that is behind.
    let names = if want.is_everything() { count } else { subscribers };
    let rows = rows(template, start, want, names, count);
    let mut tasks = JoinSet::new();
    for n in 0..subscribers {
        let last =
            if want.is_everything() { count - 1 } else { (count - 1 - n) / subscribers * subscribers + n };
        let (subscribe, last) = (fanout.subscribe(want.filter(n)), rows[last].sequence);
        if want == Want::Batches {
            tasks.spawn(receive_batches(subscribe.batches(), last));
        } else {
            tasks.spawn(receive(subscribe.stream(), last));
        }
    }
    let batches: Vec<_> = rows.chunks(BATCH).map(<[_]>::to_vec).collect();
    // An empty push compiles the globs.
    fanout.push(Vec::new(), start).unwrap();
    let (took, received) = as_the_tail(async move {
        let started = Instant::now();
        for batch in batches {
            let to = batch.last().unwrap().sequence;
            fanout.push(batch, to).unwrap();
            tokio::task::yield_now().await;
        }
        let received = tasks.join_all().await;
        (started.elapsed(), received)
    })
    .await;
    assert!(!want.is_everything() || received.iter().all(|(rows, _)| *rows == count), "a row is missing");
    took
}

/// Does the same as [`dispatch`], with a broadcast channel.
async fn broadcast(template: &Notification, subscribers: usize, want: Want, count: usize) -> Duration {
    let rows = rows(template, Sequence::MIN, want, subscribers, count);
    let (sender, _) = broadcast::channel::<Arc<Notification>>(1 << 18);
    let mut tasks = JoinSet::new();
    for n in 0..subscribers {
        let (test, mut receiver) = (want.test(n), sender.subscribe());
        tasks.spawn(async move {
            let mut matched = 0;
            loop {
                let row = match receiver.recv().await {
                    Ok(row) => row,
                    Err(RecvError::Closed) => return matched,
                    Err(RecvError::Lagged(_)) => panic!("the channel is long enough"),
                };
                matched += usize::from(test.as_ref().is_none_or(|test| test(row.name.as_str())));
            }
        });
    }
    let (took, matched) = as_the_tail(async move {
        let started = Instant::now();
        for batch in rows.chunks(BATCH) {
            for row in batch {
                sender.send(Arc::clone(row)).unwrap();
            }
            tokio::task::yield_now().await;
        }
        drop(sender);
        let matched: Vec<usize> = tasks.join_all().await;
        (started.elapsed(), matched)
    })
    .await;
    let wanted = if want.is_everything() { count * subscribers } else { count };
    assert_eq!(matched.iter().sum::<usize>(), wanted);
    took
}

/// Returns the total time, over `times` single rows, until all interested subscribers among `subscribers` have each row.
async fn latency(bus: &Bus, template: &Notification, subscribers: usize, want: Want, times: u64) -> Duration {
    let fanout = fanout(bus).await;
    let (done, mut all_done) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for n in 0..subscribers {
        let (mut stream, done) = (fanout.subscribe(want.filter(n)).stream(), done.clone());
        tasks.spawn(async move {
            done.send(()).unwrap();
            while let Some(Item::Delivery(_)) = stream.next().await {
                done.send(()).unwrap();
            }
        });
    }
    // After this, all subscribers are waiting, or are about to.
    for _ in 0..subscribers {
        all_done.recv().await.unwrap();
    }
    let wanting = if want.is_everything() { subscribers } else { 1 };
    let template = template.clone();
    as_the_tail(async move {
        let mut took = Duration::ZERO;
        for _ in 0..times {
            let row = rows(&template, fanout.position(), want, 1, 1);
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
    })
    .await
}

/// Returns the time until `stream` has received `rows`, each of which is pushed separately, like an event.
async fn one_by_one(fanout: Dispatcher, rows: Vec<Arc<Notification>>, stream: Subscription) -> Duration {
    let last = rows.last().unwrap().sequence;
    let receiving = tokio::spawn(receive(stream, last));
    as_the_tail(async move {
        let started = Instant::now();
        for row in rows {
            let to = row.sequence;
            fanout.push(vec![row], to).unwrap();
        }
        receiving.await.unwrap();
        started.elapsed()
    })
    .await
}

/// Returns the time that `count` rows of one name take if one of `subscribers` subscribers of exact names wants them.
async fn one_of(bus: &Bus, template: &Notification, subscribers: usize, count: usize) -> Duration {
    let fanout = fanout(bus).await;
    let others: Vec<_> = (1..subscribers).map(|n| fanout.subscribe(Want::Exact.filter(n)).stream()).collect();
    let rows = rows(template, fanout.position(), Want::Exact, 1, count);
    let stream = fanout.subscribe(Want::Exact.filter(0)).stream();
    let took = one_by_one(fanout, rows, stream).await;
    drop(others);
    took
}

/// Returns the time that `count` rows of one name take for a subscriber that wants the name through one of `filters` filters in its set.
async fn set_of(bus: &Bus, template: &Notification, filters: usize, count: usize) -> Duration {
    let fanout = fanout(bus).await;
    let set = Filter::any((0..filters).map(|n| Want::Exact.filter(n))).unwrap();
    let stream = fanout.subscribe(set).stream();
    let rows = rows(template, fanout.position(), Want::Exact, 1, count);
    one_by_one(fanout, rows, stream).await
}

/// Returns the resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: usize = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * 4_096
}

/// Prints the memory of a subscriber that waits for its next row. This runs first, because otherwise it would reuse the memory of other
/// cases.
fn resting(_: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let store = Store::memory();
    let bus = runtime.block_on(Bus::open(&store, BusOptions::default())).unwrap();
    let filters: [(&str, FilterOf); 3] = [
        ("exact", |n| Want::Exact.filter(n)),
        ("prefix", |_| Filter::prefix("db/")),
        ("all", |_| Filter::all()),
    ];
    // All streams are kept until the end, so that no case reuses the memory of an earlier one.
    let mut kept = Vec::new();
    for (kind, filter) in filters {
        let fanout = runtime.block_on(fanout(&bus));
        let _entered = runtime.enter();
        let before = resident();
        let streams: Vec<_> = (0..RESTING)
            .map(|n| {
                let mut stream = fanout.subscribe(filter(n)).stream();
                assert!(stream.next().now_or_never().is_none(), "there is nothing to receive");
                stream
            })
            .collect();
        let bytes = resident().saturating_sub(before) / RESTING;
        println!("dispatch/rest/{kind}/{RESTING}: {bytes} bytes each");
        kept.push((streams, fanout));
    }
}

/// Measures repeated calls of `run`.
fn measure(group: &mut BenchmarkGroup<'_, WallTime>, id: String, mut run: impl FnMut() -> Duration) {
    group.bench_function(id, |b| b.iter_custom(|times| (0..times).map(|_| run()).sum()));
}

fn dispatching(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let store = Store::memory();
    let bus = runtime.block_on(Bus::open(&store, BusOptions::default())).unwrap();
    let template = runtime.block_on(template(&bus, &store));
    let mut group = c.benchmark_group("dispatch");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for (kind, want, sizes) in DISPATCHED {
        for &subscribers in sizes {
            let count = want.rows(subscribers);
            group.throughput(want.elements(subscribers, count));
            measure(&mut group, format!("{kind}/{subscribers}"), || {
                runtime.block_on(dispatch(&bus, &template, subscribers, want, count))
            });
            if want == Want::Batches || subscribers > RECEIVERS_MAX {
                continue;
            }
            // Each receiver tests every row, so fewer rows are sent to finish in reasonable time.
            let count = count.min(Want::All.rows(subscribers));
            group.throughput(want.elements(subscribers, count));
            measure(&mut group, format!("{kind}/{subscribers}/broadcast"), || {
                runtime.block_on(broadcast(&template, subscribers, want, count))
            });
        }
    }
    group.throughput(Throughput::Elements(1));
    for (kind, want, subscribers) in LATENCIES {
        group.bench_function(format!("latency/{kind}"), |b| {
            b.iter_custom(|times| runtime.block_on(latency(&bus, &template, subscribers, want, times)));
        });
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

criterion_group!(benches, resting, dispatching);
criterion_main!(benches);
