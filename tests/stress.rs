//! Many subscribers of many databases: slow ones, panicking ones, vanishing ones. Each that survives knows exactly the right
//! state at the end, and memory stays within its bound.
//!
//! A small size runs by default. `NOTIBUS_STRESS=full` runs with 10,000 subscribers, 100,000 databases and a million events:
//! `NOTIBUS_STRESS=full cargo test --release --test stress -- --nocapture`. Figures are printed; times are not asserted.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::cast_precision_loss, reason = "the figures are for people")]

mod common;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, Delivery, Dispatcher, DispatcherOptions, Filter, Notification,
    NotifierOptions, Sequence,
    dispatcher::{CallbackHandle, Item, RestartPolicy, Subscribe, Subscription},
    event::{Counters, Versionstamp},
    store::Store,
};
use tokio_stream::StreamExt;

/// Held by one test at a time, because the tests measure.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[derive(Debug, Clone, Copy)]
struct Size {
    /// The number of subscribers: half want exact names, a quarter want patterns, and a quarter want everything.
    subscribers: usize,
    dbs: usize,
    events: usize,
    ring_rows_max: usize,
    /// The number of idle subscribers that are far behind.
    resting: usize,
    /// The number of batches in the measurement of latencies.
    batches: usize,
    /// The number of rounds of that measurement, half of them with a stalled subscriber.
    rounds: usize,
}

/// Returns the size that the environment asks for.
fn size() -> Size {
    match std::env::var("NOTIBUS_STRESS").as_deref() {
        Ok("full") => Size {
            subscribers: 10_000,
            dbs: 100_000,
            events: 1_000_000,
            ring_rows_max: 131_072,
            resting: 1_000,
            batches: 1_000,
            rounds: 20,
        },
        _ => Size {
            subscribers: 400,
            dbs: 2_000,
            events: 20_000,
            ring_rows_max: 2_048,
            resting: 100,
            batches: 200,
            rounds: 4,
        },
    }
}

/// The number of databases that share the end of their names.
const GROUP: usize = 100;

/// Returns database number `n`.
fn db(n: usize) -> Db {
    let name = format!("db{n:06}/g{:04}", n / GROUP).parse().unwrap();
    Db::new(name, DbInstance([7; 16]))
}

fn number(row: &Notification) -> usize {
    row.name.as_str()[2..8].parse().unwrap()
}

/// Returns a hash of a number. No two small sets of numbers have the same combined hash by chance.
fn hash(n: usize) -> u64 {
    let mut x = (n as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The final states that a subscriber knows: how many, and which.
#[derive(Debug, Default)]
struct Known {
    /// How many databases the subscriber knows in their final state.
    count: AtomicUsize,
    /// The combined hashes of these databases.
    which: AtomicU64,
    deliveries: AtomicU64,
}

impl Known {
    /// Notes a delivery; `finals` are the totals at the end.
    fn receive(&self, delivery: &Delivery, finals: &[u32]) {
        self.deliveries.fetch_add(1, Ordering::Relaxed);
        let row = delivery.notification();
        let n = number(row);
        if row.totals.updated == u64::from(finals[n]) {
            self.which.fetch_xor(hash(n), Ordering::Relaxed);
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the known final states.
    fn get(&self) -> (usize, u64) {
        (self.count.load(Ordering::Relaxed), self.which.load(Ordering::Relaxed))
    }
}

struct Survivor {
    what: String,
    known: Arc<Known>,
    /// The expected state at the end.
    expected: (usize, u64),
}

/// Registers a callback that panics on every thousandth call. Calls are counted across restarts, so the delivery succeeds when it is
/// repeated.
fn panicking(subscribe: Subscribe, known: Arc<Known>, finals: Arc<[u32]>) -> CallbackHandle {
    let policy = RestartPolicy::default().pause_min(Duration::ZERO).pause_max(Duration::from_millis(10));
    let calls = Arc::<AtomicU64>::default();
    let factory = move || {
        let (known, finals, calls) = (Arc::clone(&known), Arc::clone(&finals), Arc::clone(&calls));
        move |item: Item| {
            let call = calls.fetch_add(1, Ordering::Relaxed);
            assert_ne!(call % 1_000, 7, "on purpose");
            if let Item::Delivery(delivery) = item {
                known.receive(&delivery, &finals);
            }
            std::future::ready(())
        }
    };
    subscribe.callback(policy, factory).unwrap()
}

/// Returns the resident memory of this process, in MB.
fn memory_mb() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kb = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kb.unwrap_or(f64::NAN) / 1_024.0
}

/// Returns a filter for subscriber `n`, and the databases that it wants.
fn filter(random: &mut fastrand::Rng, n: usize, size: Size) -> (Filter, Range<usize>) {
    let place = random.usize(..size.dbs);
    let group = place / GROUP;
    let of_group = group * GROUP..(group + 1) * GROUP;
    match n % 8 {
        0..4 => (Filter::name(db(place).name.as_str()).unwrap(), place..place + 1),
        4 => (Filter::suffix(format!("/g{group:04}")), of_group),
        5 if random.bool() => (Filter::prefix(format!("db{group:04}")), of_group),
        5 => (Filter::glob(&format!("*/g{group:04}")).unwrap(), of_group),
        _ => (Filter::all(), 0..size.dbs),
    }
}

/// Returns the expected state of the databases in `range`: how many there are, and their combined hash.
fn expected(range: Range<usize>, finals: &[u32]) -> (usize, u64) {
    let known = range.filter(|n| finals[*n] > 0);
    known.fold((0, 0), |(count, which), n| (count + 1, which ^ hash(n)))
}

/// Makes all subscribers. Returns those that must survive.
fn subscribe(
    dispatcher: &Dispatcher,
    random: &mut fastrand::Rng,
    size: Size,
    finals: &Arc<[u32]>,
) -> (Vec<Survivor>, Vec<CallbackHandle>) {
    let (mut survivors, mut callbacks) = (Vec::new(), Vec::new());
    let all = expected(0..size.dbs, finals);
    for n in 0..size.subscribers {
        let (filter, range) = filter(random, n, size);
        let (known, finals) = (Arc::<Known>::default(), Arc::clone(finals));
        let expected = if range.len() == size.dbs { all } else { expected(range, &finals) };
        let fate = random.u8(..10);
        let what = format!("{n}: {filter:?}, fate {fate}");
        let subscribe = dispatcher.subscribe(filter);
        let mut dice = random.fork();
        let mine = Arc::clone(&known);
        match fate {
            // Vanishes.
            0 => {
                let (mut stream, most) = (subscribe.stream(), dice.usize(..2_000));
                tokio::spawn(async move {
                    for _ in 0..most {
                        stream.next().await;
                    }
                });
                continue;
            }
            // Panics again and again.
            1 => {
                callbacks.push(panicking(subscribe, mine, finals));
            }
            // Is slow: it pauses now and then, or receives from time to time.
            2 => {
                let pace = Duration::from_millis(dice.u64(100..5_000));
                let is_paced = dice.u8(..8) == 0;
                let subscribe = if is_paced { subscribe.every(pace).unwrap() } else { subscribe };
                let mut stream = subscribe.deliveries(|trouble| panic!("{trouble}"));
                tokio::spawn(async move {
                    while let Some(delivery) = stream.next().await {
                        mine.receive(&delivery, &finals);
                        if dice.u16(..500) == 0 {
                            tokio::time::sleep(Duration::from_millis(dice.u64(1..30))).await;
                        }
                    }
                });
            }
            _ => {
                let mut stream = subscribe.deliveries(|trouble| panic!("{trouble}"));
                tokio::spawn(async move {
                    while let Some(delivery) = stream.next().await {
                        mine.receive(&delivery, &finals);
                    }
                });
            }
        }
        survivors.push(Survivor { what, known, expected });
    }
    (survivors, callbacks)
}

/// Commits all events, a few hundred in a transaction.
async fn produce(bus: &Bus, store: &Store, events: &[u32]) {
    let producer = bus.producer();
    for some in events.chunks(500) {
        store
            .run(async |tx| {
                for &n in some {
                    producer.updated(&tx, &db(n as usize));
                }
                Ok(())
            })
            .await
            .unwrap();
    }
}

/// Returns the number of each database as many times as it has events, and the totals at the end. A few databases have many events.
fn events(random: &mut fastrand::Rng, size: Size) -> (Vec<u32>, Arc<[u32]>) {
    let mut finals = vec![0; size.dbs];
    let mut events = Vec::with_capacity(size.events);
    for _ in 0..size.events {
        // Half of the events fall on a hundredth of the databases.
        let n = if random.bool() { random.usize(..size.dbs / 100) } else { random.usize(..size.dbs) };
        finals[n] += 1;
        events.push(n as u32);
    }
    (events, finals.into())
}

/// Hides the messages of deliberate panics.
fn hush() {
    let show = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload_as_str().unwrap_or_default();
        if !text.contains("on purpose") {
            show(info);
        }
    }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_survivor_ends_with_exactly_what_it_should_know() {
    let _turn = TURN.lock().await;
    hush();
    let (size, mut random) = (size(), common::dice());
    println!("{size:?}");
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let fold_interval_max = Duration::from_secs(if size.events > 100_000 { 5 } else { 0 });
    let options = NotifierOptions::default().fold_interval_max(fold_interval_max).fold_percent(1);
    let notifier = common::joined(&bus).await.notifier(options).await.unwrap();
    let options = DispatcherOptions::default().ring_rows_max(size.ring_rows_max);
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let (events, finals) = events(&mut random, size);

    let empty = memory_mb();
    let (survivors, callbacks) = subscribe(&dispatcher, &mut random, size, &finals);
    let subscribed = memory_mb();
    println!("{} subscribers take {:.1} MB", dispatcher.subscribers(), subscribed - empty);

    let began = Instant::now();
    produce(&bus, &store, &events).await;
    println!("{} events recorded in {:.1?}", events.len(), began.elapsed());
    let wait = async {
        while survivors.iter().any(|one| one.known.count.load(Ordering::Relaxed) < one.expected.0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let in_time =
        tokio::time::timeout(Duration::from_secs(if size.events > 100_000 { 1_800 } else { 60 }), wait)
            .await
            .is_ok();
    let took = began.elapsed();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let wrong: Vec<_> = survivors.iter().filter(|one| one.known.get() != one.expected).collect();
    for one in wrong.iter().take(10) {
        println!("{}: knows {:?}, not {:?}", one.what, one.known.get(), one.expected);
    }
    assert!(in_time && wrong.is_empty(), "{} of {} do not know the end", wrong.len(), survivors.len());
    let stats = bus.stats();
    let deliveries: u64 = survivors.iter().map(|one| one.known.deliveries.load(Ordering::Relaxed)).sum();
    println!(
        "{} rows, {deliveries} deliveries to {} survivors in {took:.1?}: {:.1} million per second; {} panics",
        stats.rows_tailed,
        survivors.len(),
        deliveries as f64 / took.as_secs_f64() / 1e6,
        stats.callback_panics,
    );
    assert_eq!(stats.folded, Counters { updated: size.events as u64, ..Counters::ZERO });
    assert!(stats.callback_panics > 0);
    println!("memory {:.0} MB, store included", memory_mb());

    drop(callbacks);
    dispatcher.shutdown().await;
    notifier.shutdown().await.unwrap();
}

/// Idle subscribers that must still receive all databases hold a small page each, and no more whatever happens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_subscriber_far_behind_holds_a_small_page() {
    let _turn = TURN.lock().await;
    let size = size();
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let notifier = common::joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
    let options = DispatcherOptions::default().ring_rows_max(size.ring_rows_max);
    let dispatcher = bus.dispatcher(options).await.unwrap();
    update_all(&bus, &store, &dispatcher, size).await;
    let before = memory_mb();
    let mut resting: Vec<Subscription> = Vec::new();
    for _ in 0..size.resting {
        let mut one = dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).stream();
        one.next().await.unwrap().into_delivery().unwrap();
        resting.push(one);
    }
    let resting_mb = memory_mb() - before;
    // Another event of each database: all subscribers are as far behind as possible.
    update_all(&bus, &store, &dispatcher, size).await;
    let later_mb = memory_mb() - before;
    let rows = DispatcherOptions::default().catch_up_rows_max;
    let bound_mb = (size.resting * rows * 1_000) as f64 / 1e6;
    println!(
        "{} resting subscribers, {} databases behind: {resting_mb:.1} MB; {} events later {later_mb:.1} MB; the bound is \
         {bound_mb:.0} MB for {rows} rows of at most 1 kB each",
        size.resting, size.dbs, size.dbs,
    );
    assert!(resting_mb < bound_mb + 32.0, "{resting_mb} MB are more than {bound_mb}");
    drop(resting);
    dispatcher.shutdown().await;
    notifier.shutdown().await.unwrap();
}

/// Records an event of each database, and waits until the tail has read them.
async fn update_all(bus: &Bus, store: &Store, dispatcher: &Dispatcher, size: Size) {
    let all: Vec<u32> = (0..size.dbs as u32).collect();
    let folded = bus.stats().folded.updated;
    produce(bus, store, &all).await;
    while bus.stats().folded.updated < folded + size.dbs as u64 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let last = bus.feed().last_sequence().await.unwrap();
    common::until("the tail", async || Some(dispatcher.position()) >= last).await;
    // Waits until the store has dropped the versions of the last seconds.
    tokio::time::sleep(Duration::from_secs(6)).await;
}

/// The latencies of 100 subscribers, with and without one that never receives anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_subscriber_does_not_slow_the_others() {
    let _turn = TURN.lock().await;
    let size = size();
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let notifier = common::joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
    produce(&bus, &store, &[0]).await;
    common::until("the fold", async || bus.stats().folded.updated == 1).await;
    let template = bus.feed().newest(&db(0).name).await.unwrap().unwrap();
    notifier.shutdown().await.unwrap();
    let mut p99 = [Vec::new(), Vec::new()];
    for round in 0..size.rounds {
        let stalls = round % 2 == 1;
        p99[usize::from(stalls)].push(latency(&bus, &template, size.batches, stalls).await);
    }
    let best = |times: &[Duration]| *times.iter().min().unwrap();
    let (without, with) = (best(&p99[0]), best(&p99[1]));
    let change = (with.as_secs_f64() / without.as_secs_f64() - 1.0) * 100.0;
    println!(
        "p99 of 100 subscribers: {without:.1?}; with one of them stalled {with:.1?}: {change:+.1} % (of {p99:.0?})"
    );
}

/// Returns the 99th percentile of the time from the publishing of a row to its delivery to each of 100 subscribers.
async fn latency(bus: &Bus, template: &Notification, batches: usize, stalls: bool) -> Duration {
    let fanout = bus.suspended_dispatcher(DispatcherOptions::default()).await.unwrap();
    let began = Instant::now();
    let last_version = fanout.position().versionstamp().version() + batches as u64;
    let mut tasks = tokio::task::JoinSet::new();
    let mut stalled = Vec::new();
    for n in 0..100 {
        let mut stream = fanout.subscribe(Filter::all()).stream();
        if n == 0 && stalls {
            stalled.push(stream);
            continue;
        }
        tasks.spawn(async move {
            let mut times = Vec::with_capacity(batches);
            while let Some(delivery) = stream.next().await {
                let row = Arc::clone(delivery.into_delivery().unwrap().notification());
                // The row has the time when it was published, on the clock of this process.
                times.push(began.elapsed().saturating_sub(Duration::from_nanos(row.written_ms)));
                if row.sequence.versionstamp().version() == last_version {
                    break;
                }
            }
            times
        });
    }
    for _ in 0..batches {
        let from = fanout.position();
        let stamp = Versionstamp::new(from.versionstamp().version() + 1, 0);
        let sequence = Sequence::new(from.incarnation(), stamp, 0);
        let written_ms = began.elapsed().as_nanos() as u64;
        let row = Notification { sequence, updated_at: Some(sequence), written_ms, ..template.clone() };
        fanout.push(vec![Arc::new(row)], sequence).unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut times: Vec<Duration> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(times.len(), batches * if stalls { 99 } else { 100 });
    times.sort_unstable();
    times[times.len() * 99 / 100]
}
