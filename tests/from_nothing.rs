//! Many subscribers begin with nothing at the same time: each reads the whole feed in pages, and all of them together hold a few pages,
//! however many databases there are. Memory is counted by the allocator, so this file has one test.
//!
//! A small size runs by default. `NOTIBUS_FROM_NOTHING=full` runs with 100 subscribers and a million databases, and a dispatcher with
//! default options: `NOTIBUS_FROM_NOTHING=full cargo test --release --test from_nothing -- --nocapture`. It prints how long that takes; the
//! time is not asserted.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::cast_precision_loss, reason = "the figures are for people")]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    collections::HashSet,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use common::{db, eager, joined};
use notibus::{
    Bus, BusOptions, Cursor, DispatcherOptions, Filter,
    dispatcher::{BatchSubscription, Item},
    store::Store,
};
use tokio_stream::StreamExt;

/// The system's allocator, which counts the bytes in use: now, and the peak since the last reset.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code, reason = "an allocator can only be wrapped so")]
// SAFETY: each method passes its arguments on to the system's allocator, which keeps the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let in_use = IN_USE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(in_use, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// More than the memory of a row, with its name and its place in a page, while it is read and decoded.
const ROW_BYTES_MAX: usize = 2_048;

/// More than everything else allocates during the test.
const BESIDES_BYTES_MAX: usize = 4 << 20;

/// The number of databases that one transaction creates.
const CREATED_AT_ONCE: usize = 1_000;

struct Size {
    subscribers: usize,
    databases: usize,
    options: DispatcherOptions,
}

fn size() -> Size {
    if std::env::var("NOTIBUS_FROM_NOTHING").as_deref() == Ok("full") {
        return Size { subscribers: 100, databases: 1_000_000, options: DispatcherOptions::default() };
    }
    let options = DispatcherOptions::default().catch_up_rows_max(16).catch_ups_max(4);
    Size { subscribers: 20, databases: 4_000, options }
}

/// Makes a bus whose feed has `databases` rows.
async fn filled(databases: usize) -> Bus {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let producer = bus.producer();
    let all: Vec<usize> = (0..databases).collect();
    for some in all.chunks(CREATED_AT_ONCE) {
        let create = async |tx: notibus::store::Transaction| {
            for n in some {
                producer.created(&tx, &db(&format!("customer-{n:07}"), 1));
            }
            Ok(())
        };
        store.run(create).await.unwrap();
    }
    // This may take long on a busy machine.
    while bus.stats().folded.created < databases as u64 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    notifier.shutdown().await.unwrap();
    bus
}

/// Receives until the first scan is complete. Returns how many rows arrived.
async fn receive(mut batches: BatchSubscription, rows_max: usize) -> usize {
    let (mut rows, mut last) = (0, None);
    loop {
        match batches.next().await.unwrap() {
            Item::Delivery(batch) => {
                assert!(batch.len() <= rows_max, "{} rows came at once", batch.len());
                for delivery in &batch {
                    // Rows arrive in order, so none can arrive twice.
                    assert!(last < Some(delivery.sequence()), "{delivery:?} came after {last:?}");
                    last = Some(delivery.sequence());
                }
                rows += batch.len();
            }
            Item::CaughtUp { .. } => return rows,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscribers_from_nothing_hold_a_few_pages_whatever_there_is_to_read() {
    let Size { subscribers, databases, options } = size();
    let bus = filled(databases).await;
    let rows_max = options.catch_up_rows_max;
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let before = IN_USE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let began = Instant::now();
    let subscribe = |_| dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).batches();
    let tasks: Vec<_> =
        (0..subscribers).map(subscribe).map(|batches| tokio::spawn(receive(batches, rows_max))).collect();
    let mut received = HashSet::new();
    for task in tasks {
        received.insert(task.await.unwrap());
    }
    let took = began.elapsed();
    let (peak, after) = (PEAK.load(Ordering::Relaxed) - before, IN_USE.load(Ordering::Relaxed));
    let rows = subscribers * databases;
    println!(
        "{rows} rows in {took:?}, {:.0} a second; {} KB more at most, {} KB when all have ended",
        rows as f64 / took.as_secs_f64(),
        peak / 1_024,
        after.saturating_sub(before) / 1_024,
    );
    assert_eq!(received, HashSet::from([databases]), "each is delivered every database once");
    let most = subscribers * rows_max * ROW_BYTES_MAX + BESIDES_BYTES_MAX;
    assert!(most < subscribers * databases * 128, "this size would not show what is held forever");
    assert!(peak <= most, "{peak} bytes were in use at once, more than {most}");
}
