//! Shutdowns: once one has returned, nothing is delivered and no task of the bus runs. Also, items that do not end a plain loop.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt;
use notibus::{
    Bus, Cursor, DispatcherOptions, Error, EventKind, Filter, NodeHandle, StartOptions,
    cursor::Start,
    dispatcher::{Item, RestartPolicy, Trouble},
    store::{Store, StoreError, testing::Faults},
};
use tokio_stream::StreamExt;

use crate::{
    common::{db, eager, joined, narrow_bus, record, until, wide_bus, within},
    fixture::{calls, fold, forget, name},
};

const COUNT: usize = 600;

/// Records the creation of `COUNT` databases, and waits until the tail has read them.
async fn create_all(store: &Store, bus: &Bus, running: &NodeHandle) {
    for n in 0..COUNT {
        record(store, bus, &db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
    }
    until("all folds", async || bus.stats().folded.total() == COUNT as u64).await;
    let now = bus.feed().now().await.unwrap();
    until("the tail", async || running.dispatcher().position() >= now).await;
}

/// Bug: a shutdown let subscribers receive their whole backlog, but returned before they had done so, so a stream got 27,769 more
/// deliveries over the next 7 s. Fix: a shutdown ends each subscriber, and its cursor covers what it has received.
#[tokio::test(start_paused = true)]
async fn a_stream_ends_with_the_shutdown_and_its_cursor_covers_what_it_got() {
    for (is_new, taken) in [(false, 0), (false, 10), (true, 0), (true, 10)] {
        let store = Store::memory();
        let bus = narrow_bus(&store).await;
        let running = bus.start(StartOptions::default()).await.unwrap();
        let mut stream = running.dispatcher().subscribe(Filter::all()).stream();
        create_all(&store, &bus, &running).await;
        if is_new {
            stream = running.dispatcher().subscribe(Filter::all()).since(Cursor::BEGINNING).stream();
        }
        let mut got = BTreeSet::new();
        for _ in 0..taken {
            let delivery = within("a delivery", stream.next()).await.unwrap().into_delivery().unwrap();
            got.insert(name(&delivery).to_owned());
        }
        running.shutdown().await.unwrap();
        assert!(stream.next().now_or_never().unwrap().is_none(), "{COUNT} deliveries wait");
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let rest = dispatcher.subscribe(Filter::all()).since(stream.cursor());
        let mut rest = rest.deliveries(|trouble| panic!("{trouble}"));
        while got.len() < COUNT {
            let delivery = within("the rest", rest.next()).await.unwrap();
            assert!(got.insert(name(&delivery).to_owned()), "it had {delivery:?}");
        }
        assert!(rest.next().now_or_never().is_none());
    }
}

/// Bug: a shutdown stopped neither calls that had not ended in time nor the task of a read, so both continued.
#[tokio::test(start_paused = true)]
async fn nothing_runs_after_the_shutdown() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = narrow_bus(&faults.store()).await;
    let running = bus.start(StartOptions::default().shutdown_timeout(Duration::from_secs(4))).await.unwrap();
    create_all(&faults.store(), &bus, &running).await;
    let dispatcher = running.dispatcher();
    let mirror = dispatcher.mirror(Filter::all()).unwrap();
    let beats = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&beats);
    let endless = calls(move |_| {
        let counted = Arc::clone(&counted);
        async move {
            loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
                counted.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let all = || dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING);
    let callback = all().callback(RestartPolicy::default(), endless).unwrap();
    until("its call", async || beats.load(Ordering::Relaxed) > 0).await;
    // Each of these reads pauses and is repeated.
    faults.plan_reads(|_| Some(StoreError::TRANSACTION_TOO_OLD));
    let mut streams = [(); 20].map(|()| all().stream());
    for stream in &mut streams {
        assert!(stream.next().now_or_never().is_none());
    }
    let began = tokio::time::Instant::now();
    drop(running.shutdown().await);
    assert!(began.elapsed() <= Duration::from_secs(4));
    assert!(callback.is_finished());
    let before = (faults.counts().reads, beats.load(Ordering::Relaxed));
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!((faults.counts().reads, beats.load(Ordering::Relaxed)), before);
    assert!(matches!(mirror.view(), Err(Error::NoSubscriber { .. })));
    assert!(streams.iter_mut().all(|stream| matches!(stream.next().now_or_never(), Some(None))));
}

/// Bug: streams returned the end of the first scan and `Expired` as errors, so `while let Some(Ok(delivery))` ended silently at the first,
/// and `delivery?` ended a program at the second. Fix: a plain loop skips the first, and a closure gets the second.
#[tokio::test(start_paused = true)]
async fn a_plain_loop_ends_with_its_subscription_only() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let fold = async |name: &str, kind| fold(&store, &bus, &db(name, 1), kind).await;
    let before = fold("a", EventKind::Created).await;
    fold("gone", EventKind::Created).await;
    fold("gone", EventKind::Deleted).await;
    forget(&bus).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    for (start, troubles_of) in [(Cursor::BEGINNING, 0), (before.into(), 1)] {
        let troubles = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&troubles);
        let subscribe = dispatcher.subscribe(Filter::all()).since(Start::from(start));
        let mut deliveries = subscribe.deliveries(move |trouble| heard.lock().unwrap().push(trouble));
        assert_eq!(name(&within("the first scan", deliveries.next()).await.unwrap()), "a");
        assert!(deliveries.next().now_or_never().is_none(), "it waits behind `CaughtUp`");
        fold("a", EventKind::Updated).await;
        assert_eq!(name(&within("what comes later", deliveries.next()).await.unwrap()), "a");
        let troubles = std::mem::take(&mut *troubles.lock().unwrap());
        assert!(troubles.iter().all(|trouble| matches!(trouble, Trouble::Expired { .. })));
        assert_eq!(troubles.len(), troubles_of);
        dispatcher.unsubscribe(deliveries.id()).unwrap();
        assert!(deliveries.next().await.is_none());
    }
    let item: Item = Item::CaughtUp { at: before };
    assert!(item.into_delivery().is_none());
}
