//! Restarts of the dispatcher: its subscribers remain, and continue where they were.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    DispatcherOptions, EventKind, Filter,
    dispatcher::{Item, RestartPolicy},
    store::{Store, testing::Faults},
};
use tokio_stream::{Stream, StreamExt};

use crate::{
    common::{db, eager, forgetful, joined, narrow_bus, until, wide_bus, within},
    fixture::{SubscriberFixture, calls, drain, kinds, name, names, next, ready},
};

/// The listeners of `couch_event` receive nothing after its server is restarted, because its registry is lost.
#[tokio::test(start_paused = true)]
async fn subscribers_survive_a_restart_of_the_dispatcher_and_miss_nothing() {
    for ring_rows_max in [1, 1_000] {
        let options = DispatcherOptions::default().ring_rows_max(ring_rows_max);
        let SubscriberFixture { store, bus, notifier, dispatcher } = SubscriberFixture::with(options).await;
        let filters = [Filter::all(), Filter::suffix("a"), Filter::name("a").unwrap()];
        let mut streams: Vec<_> =
            filters.into_iter().map(|filter| dispatcher.subscribe(filter).stream()).collect();
        let delivered = Arc::new(Mutex::new(Vec::new()));
        let recorded = Arc::clone(&delivered);
        let record = calls(move |item: Item| {
            recorded.lock().unwrap().extend(item.into_delivery());
            async {}
        });
        let all = dispatcher.subscribe(Filter::all());
        let _callback = all.callback(RestartPolicy::default(), record).unwrap();
        let suspended = dispatcher.suspend();
        assert_eq!(suspended.subscribers(), 4);
        for kind in [EventKind::Created, EventKind::Updated] {
            crate::fixture::fold(&store, &bus, &db("a", 1), kind).await;
        }
        tokio::time::sleep(Duration::from_mins(1)).await;
        assert!(streams.iter_mut().all(|stream| ready(stream).is_empty()), "nobody reads the feed");
        let dispatcher = suspended.resume();
        for stream in &mut streams {
            let all = drain(stream).await;
            assert_eq!(names(&all), ["a"].into());
            let all: Vec<_> = all.iter().flat_map(kinds).collect();
            assert_eq!(all, [EventKind::Created, EventKind::Updated]);
        }
        until("the callback", async || !delivered.lock().unwrap().is_empty()).await;
        let fixture = SubscriberFixture { store, bus, notifier, dispatcher };
        fixture.event(&db("a", 1), EventKind::Updated).await;
        for stream in &mut streams {
            assert_eq!(kinds(&next(stream).await), [EventKind::Updated]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_suspended_dispatcher_that_is_dropped_ends_its_subscribers() {
    let SubscriberFixture { dispatcher, .. } = SubscriberFixture::new().await;
    let mut stream = dispatcher.subscribe(Filter::all()).stream();
    let quiet = calls(|_| async {});
    let handle = dispatcher.subscribe(Filter::all()).callback(RestartPolicy::default(), quiet).unwrap();
    drop(dispatcher.suspend());
    assert!(within("the end", stream.next()).await.is_none());
    within("its end", handle.finished()).await;
}

/// All subscribers depend on one tail, so it restarts at once after a panic.
#[tokio::test(start_paused = true)]
async fn a_tail_that_panics_is_begun_again() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (folding, bus) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
    let _notifier = joined(&folding).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut streams = [Filter::all(), Filter::name("a").unwrap()].map(|f| dispatcher.subscribe(f).stream());
    let has_panicked = AtomicBool::new(false);
    faults.plan_reads(move |_| {
        assert!(has_panicked.swap(true, Ordering::Relaxed), "a read of the tail panics");
        None
    });
    crate::fixture::fold(&store, &folding, &db("a", 1), EventKind::Created).await;
    for stream in &mut streams {
        assert_eq!(name(&next(stream).await), "a");
    }
    assert_eq!(bus.stats().tail_panics, 1);
}

/// If the dispatcher was suspended for longer than tombstones are kept, every subscriber gets `Expired`, and starts again.
#[tokio::test(start_paused = true)]
async fn a_subscriber_suspended_for_too_long_expires() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let world_event = async |db: &notibus::Db, kind| crate::fixture::fold(&store, &bus, db, kind).await;
    world_event(&db("stays", 1), EventKind::Created).await;
    world_event(&db("goes", 1), EventKind::Created).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let names_of = ["stays", "goes"].map(|name| name.parse().unwrap());
    let filters = [Filter::all(), Filter::names(names_of).unwrap()];
    let mut streams = filters.map(|filter| dispatcher.subscribe(filter).stream());
    let suspended = dispatcher.suspend();
    world_event(&db("goes", 1), EventKind::Deleted).await;
    let _janitor = joined(&bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstone's end", async || bus.stats().tombstones_dropped == 1).await;
    let _dispatcher = suspended.resume();
    for stream in &mut streams {
        let first = within("it is delivered", stream.next()).await.unwrap();
        assert!(matches!(first, Item::Expired { .. }), "{first:?}");
        let rest = drain(stream).await;
        assert_eq!(names(&rest), ["stays"].into());
    }
}

/// Regression: a replacement of the filter hid an `Expired` that was not returned yet, so the subscriber never got it.
#[tokio::test(start_paused = true)]
async fn a_replaced_filter_does_not_hide_expired() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    crate::fixture::fold(&store, &bus, &db("stays", 1), EventKind::Created).await;
    crate::fixture::fold(&store, &bus, &db("goes", 1), EventKind::Created).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let goes = Filter::name("goes").unwrap();
    let both = Filter::names(["stays", "goes"].map(|name| name.parse().unwrap())).unwrap();
    let streams =
        [both.clone(), Filter::all()].map(|next| (dispatcher.subscribe(goes.clone()).stream(), next));
    let suspended = dispatcher.suspend();
    crate::fixture::fold(&store, &bus, &db("goes", 1), EventKind::Deleted).await;
    let _janitor = joined(&bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstone's end", async || bus.stats().tombstones_dropped == 1).await;
    let dispatcher = suspended.resume();
    let horizon = bus.feed().horizon().await.unwrap();
    until("the tail", async || dispatcher.position() >= horizon).await;
    for (stream, filter) in streams {
        let mut stream = stream.replace(filter).stream();
        let first = within("it is delivered", stream.next()).await.unwrap();
        assert!(matches!(first, Item::Expired { .. }), "{first:?}");
        assert_eq!(names(&drain(&mut stream).await), ["stays"].into());
    }
}

/// Regression: a subscriber of exact names that saved its cursor before it got `Expired` began at zero after its next restart, so it never
/// learned which databases were gone.
#[tokio::test(start_paused = true)]
async fn a_subscriber_that_dies_before_it_gets_expired_gets_it_later() {
    for replaces in [false, true] {
        let store = Store::memory();
        let bus = wide_bus(&store).await;
        let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        crate::fixture::fold(&store, &bus, &db("goes", 1), EventKind::Created).await;
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let goes = Filter::name("goes").unwrap();
        let mut stream = dispatcher.subscribe(goes.clone()).stream();
        let suspended = dispatcher.suspend();
        crate::fixture::fold(&store, &bus, &db("goes", 1), EventKind::Deleted).await;
        let _janitor = joined(&bus).await.janitor(forgetful()).await.unwrap();
        until("the tombstone's end", async || bus.stats().tombstones_dropped == 1).await;
        let dispatcher = suspended.resume();
        let horizon = bus.feed().horizon().await.unwrap();
        until("the tail", async || dispatcher.position() >= horizon).await;
        if replaces {
            stream = stream.replace(Filter::all()).stream();
        }
        let cursor = stream.cursor();
        drop(stream);
        let mut stream = dispatcher.subscribe(goes).since(cursor).stream();
        let first = within("it is delivered", stream.next()).await.unwrap();
        assert!(matches!(first, Item::Expired { .. }), "{first:?}");
    }
}

/// A waker that panics.
struct Bad;

impl std::task::Wake for Bad {
    fn wake(self: Arc<Self>) {
        panic!("a waker of no use");
    }
}

/// Regression: the tail stopped in the middle of a batch when a waker panicked, so other subscribers lost rows of their exact names, and
/// other waiting subscribers were not woken.
#[tokio::test(start_paused = true)]
async fn a_waker_that_panics_costs_others_nothing() {
    for bad in [Filter::all(), Filter::name("a").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let mut bad = fixture.dispatcher.subscribe(bad).stream();
        let waker = Arc::new(Bad).into();
        let polled = std::pin::Pin::new(&mut bad).poll_next(&mut std::task::Context::from_waker(&waker));
        assert!(polled.is_pending());
        let filters = [Filter::name("a").unwrap(), Filter::name("b").unwrap(), Filter::all()];
        let others = filters.map(|filter| {
            let mut stream = fixture.dispatcher.subscribe(filter).stream();
            tokio::spawn(async move { stream.next().await.unwrap().into_delivery().unwrap() })
        });
        tokio::task::yield_now().await;
        // These rows are one batch.
        let producer = fixture.bus.producer();
        let write = async |tx| {
            for name in ["a", "b", "c"] {
                producer.created(&tx, &db(name, 1));
            }
            Ok(())
        };
        fixture.store.run(write).await.unwrap();
        for other in others {
            within("what others are given", other).await.unwrap();
        }
        assert_eq!(fixture.bus.stats().tail_panics, 0);
        assert_eq!(name(&next(&mut bad).await), "a", "and the waiting subscriber loses nothing");
    }
}
