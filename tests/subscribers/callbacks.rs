//! Callbacks: how they are called, how they are replaced after a panic, and how they end.

use std::{
    array,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt;
use notibus::{
    Cursor, DispatcherOptions, EventKind, Filter, Sequence, StartOptions,
    cursor::Start,
    dispatcher::{Item, RestartPolicy},
    store::{Store, StoreError, testing::Faults},
};
use tokio::{
    sync::{
        Notify,
        mpsc::{UnboundedReceiver, unbounded_channel},
    },
    time::Instant,
};
use tokio_stream::StreamExt;

use crate::{
    common::{db, eager, joined, narrow_bus, record, until, within},
    fixture::{SubscriberFixture, calls, commit, drain, fold, forget, kinds, name, names},
};

/// Returns a policy without pauses.
fn at_once() -> RestartPolicy {
    RestartPolicy::default().pause_min(Duration::ZERO).pause_max(Duration::ZERO)
}

/// Describes what a reporting callback received.
fn report(item: &Item) -> String {
    match item {
        Item::Delivery(delivery) => format!("{} {:?}", name(delivery), kinds(delivery)),
        Item::Lagged { .. } => "lagged".to_owned(),
        other => format!("{other:?}"),
    }
}

async fn next_call(receiver: &mut UnboundedReceiver<String>) -> String {
    within("a call", receiver.recv()).await.unwrap()
}

/// The cursor of a callback covers exactly the items with which the callback was called.
#[tokio::test(start_paused = true)]
async fn a_callback_is_called_with_each_item_until_it_is_stopped() {
    let fixture = SubscriberFixture::new().await;
    let (sender, mut receiver) = unbounded_channel();
    let report = calls(move |item| {
        sender.send(report(&item)).unwrap();
        async {}
    });
    let handle = fixture.dispatcher.subscribe(Filter::all()).callback(at_once(), report).unwrap();
    fixture.events(&["a"], EventKind::Created).await;
    assert_eq!(next_call(&mut receiver).await, "a [Created]");
    let cursor = handle.stop().await;
    assert!(receiver.recv().await.is_none(), "it is dropped");
    assert_eq!(fixture.dispatcher.subscribers(), 0);
    assert!(handle.is_finished());
    assert_eq!(handle.stop().await, cursor, "again");
    fixture.events(&["b"], EventKind::Created).await;
    let mut rest = fixture.dispatcher.subscribe(Filter::all()).since(cursor).stream();
    assert_eq!(names(&drain(&mut rest).await), ["b"].into());
}

#[tokio::test(start_paused = true)]
async fn a_callback_ends_when_its_handle_is_dropped() {
    let fixture = SubscriberFixture::new().await;
    let (sender, mut receiver) = unbounded_channel::<()>();
    let never = calls(move |_| {
        let sender = sender.clone();
        async move { sender.closed().await }
    });
    let handle = fixture.dispatcher.subscribe(Filter::all()).callback(at_once(), never).unwrap();
    fixture.events(&["a"], EventKind::Created).await;
    drop(handle);
    assert!(within("the end of its call", receiver.recv()).await.is_none());
    until("its end", async || fixture.dispatcher.subscribers() == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_callback_that_panics_is_made_again_and_goes_on_where_it_was() {
    let fixture = SubscriberFixture::new().await;
    let (sender, mut receiver) = unbounded_channel();
    let made = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&made);
    let factory = move || {
        let (sender, number) = (sender.clone(), count.fetch_add(1, Ordering::Relaxed) + 1);
        move |item: Item| {
            let report = report(&item);
            sender.send(format!("{number}: {report}")).unwrap();
            assert!(!report.starts_with("bad"), "as planned");
            std::future::ready(())
        }
    };
    let policy = RestartPolicy::default().attempts_max(2);
    let handle = fixture.dispatcher.subscribe(Filter::all()).callback(policy, factory).unwrap();
    let mut other = fixture.dispatcher.subscribe(Filter::all()).stream();
    fixture.events(&["bad", "good"], EventKind::Created).await;
    assert_eq!(next_call(&mut receiver).await, "1: bad [Created]");
    assert_eq!(next_call(&mut receiver).await, "2: bad [Created]", "another one is given it again");
    assert_eq!(next_call(&mut receiver).await, "3: good [Created]", "and there is no third time");
    let stats = fixture.bus.stats();
    assert_eq!((stats.callback_panics, stats.callback_skips), (2, 1));
    assert_eq!(names(&drain(&mut other).await), ["bad", "good"].into(), "others do not notice");
    handle.stop().await;
}

/// A panic in the factory does not count as an attempt on the item.
#[tokio::test(start_paused = true)]
async fn pauses_between_restarts_grow() {
    let fixture = SubscriberFixture::new().await;
    let (times, is_called) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Notify::new()));
    let (made, called) = (Arc::clone(&times), Arc::clone(&is_called));
    let factory = move || {
        made.lock().unwrap().push(Instant::now());
        assert!(made.lock().unwrap().len() > 6, "the factory panics");
        let called = Arc::clone(&called);
        move |_: Item| {
            called.notify_one();
            std::future::ready(())
        }
    };
    let policy = RestartPolicy::default().pause_min(Duration::from_secs(1)).pause_max(Duration::from_secs(8));
    let _handle = fixture.dispatcher.subscribe(Filter::all()).callback(policy, factory).unwrap();
    fixture.events(&["a"], EventKind::Created).await;
    within("its call", is_called.notified()).await;
    assert_eq!(fixture.bus.stats().callback_skips, 0);
    let times = times.lock().unwrap();
    let pauses: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(pauses.len(), 6);
    for (pause, full) in pauses.iter().zip([1, 2, 4, 8, 8, 8]) {
        let full = Duration::from_secs(full);
        assert!(*pause >= full / 2 && *pause <= full + Duration::from_millis(5), "{pauses:?}");
    }
}

/// Bug: a pause was a plain sleep, so a shutdown waited for it up to the shutdown's limit, and an unsubscribe up to 10 minutes. Fix: the
/// end of a subscriber wakes its callback even during a pause.
#[tokio::test(start_paused = true)]
async fn a_pause_ends_with_whatever_ends_the_subscription() {
    let hour = Duration::from_hours(1);
    let policy = RestartPolicy::default().pause_min(hour).pause_max(hour);
    for by in ["stop", "unsubscribe", "the drop of the dispatcher", "its shutdown", "the shutdown of all"] {
        let store = Store::memory();
        let bus = narrow_bus(&store).await;
        let running = bus.start(StartOptions::default()).await.unwrap();
        let own = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let dispatcher = if by == "the shutdown of all" { running.dispatcher() } else { &own };
        let panics = calls(|_| -> std::future::Ready<()> { panic!("as planned") });
        let handle = dispatcher.subscribe(Filter::all()).callback(policy.clone(), panics).unwrap();
        record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
        until("the panic", async || bus.stats().callback_panics == 1).await;
        let began = Instant::now();
        match by {
            "stop" => drop(handle.stop().await),
            "unsubscribe" => own.unsubscribe(handle.id()).unwrap(),
            "the drop of the dispatcher" => drop(own),
            "its shutdown" => own.shutdown().await,
            _ => running.shutdown().await.unwrap(),
        }
        let cursor = handle.finished().await;
        assert!(began.elapsed() < Duration::from_secs(5), "{by}: {:?}", began.elapsed());
        let row = crate::common::row(&bus, &db("a", 1)).await.unwrap();
        assert!(cursor < row.sequence.into(), "{by}: it has not worked on its delivery");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_cuts_off_calls_that_do_not_end() {
    let fixture = SubscriberFixture::new().await;
    let stuck = calls(|_| std::future::pending());
    let handle = fixture.dispatcher.subscribe(Filter::all()).callback(at_once(), stuck).unwrap();
    fixture.events(&["a"], EventKind::Created).await;
    let began = Instant::now();
    within("the shutdown", fixture.dispatcher.shutdown()).await;
    assert!(began.elapsed() < Duration::from_mins(1));
    assert!(handle.is_finished(), "it has ended before the shutdown returned");
}

/// Regression: a callback that panicked on `Lagged` was replaced, but `Lagged` was not repeated, so the new callback never learned of it.
#[tokio::test(start_paused = true)]
async fn an_item_that_is_no_delivery_is_given_again_after_a_panic() {
    let fixture = SubscriberFixture::with(DispatcherOptions::default().ring_rows_max(1)).await;
    let (sender, mut receiver) = unbounded_channel();
    let has_panicked = Arc::new(AtomicBool::new(false));
    let panics_once = calls(move |item: Item| {
        if !matches!(item, Item::Delivery(_)) {
            assert!(has_panicked.swap(true, Ordering::Relaxed), "the first");
            sender.send(report(&item)).unwrap();
        }
        async {}
    });
    fixture.events(&["a", "b"], EventKind::Created).await;
    let since = Start::from(fixture.bus.feed().horizon().await.unwrap());
    let subscribe = fixture.dispatcher.subscribe(Filter::all()).since(since).skip_when_lagging();
    let _handle = subscribe.callback(at_once(), panics_once).unwrap();
    assert_eq!(next_call(&mut receiver).await, "lagged");
}

#[tokio::test(start_paused = true)]
async fn a_callback_can_end_itself() {
    let fixture = SubscriberFixture::new().await;
    let dispatcher = Arc::new(fixture.dispatcher);
    let (sender, mut receiver) = unbounded_channel();
    let (own, id) = (Arc::clone(&dispatcher), Arc::new(Mutex::new(None)));
    let known = Arc::clone(&id);
    let ends = calls(move |item: Item| {
        own.unsubscribe(known.lock().unwrap().unwrap()).unwrap();
        let sender = sender.clone();
        async move {
            // The current call still runs to its end.
            tokio::time::sleep(Duration::from_secs(1)).await;
            sender.send(report(&item)).unwrap();
        }
    });
    let handle = dispatcher.subscribe(Filter::all()).callback(at_once(), ends).unwrap();
    *id.lock().unwrap() = Some(handle.id());
    for name in ["a", "b"] {
        fold(&fixture.store, &fixture.bus, &db(name, 1), EventKind::Created).await;
    }
    assert_eq!(next_call(&mut receiver).await, "a [Created]");
    within("its end", handle.finished()).await;
    assert!(receiver.recv().await.is_none(), "it is not called again");
}

/// Regression: a callback's report of progress woke its own task, so while a caller waited for a position that the callback had not
/// reached, such as one in its next round, the task never rested, and paused time did not advance.
#[test]
fn a_callback_rests_while_a_caller_waits_for_it() {
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().unwrap().block_on(async {
            let fixture = SubscriberFixture::new().await;
            let paced = fixture.dispatcher.subscribe(Filter::all()).every(Duration::from_secs(30)).unwrap();
            let callback = paced.callback(at_once(), calls(|_| async {})).unwrap();
            for kind in [EventKind::Created, EventKind::Updated] {
                let sequence = fixture.folded(&db("a", 1), kind).await;
                assert!(callback.wait_until(sequence).await);
            }
        });
        done.send(()).unwrap();
    });
    // This uses real time, because the clock of the other thread does not advance when the test fails.
    ended.recv_timeout(Duration::from_mins(1)).expect("the second round has come");
}

/// Regression: a callback that expired while nobody waited for its progress did not reset it, so the next barrier for an earlier position
/// passed at once, while the callback was forgetting everything.
#[tokio::test(start_paused = true)]
async fn no_barrier_passes_at_what_was_forgotten_while_nobody_waited() {
    for is_awaited in [true, false] {
        let options = DispatcherOptions::default().ring_rows_max(1);
        let fixture = SubscriberFixture::with(options).await;
        let known = fixture.event(&db("x", 1), EventKind::Created).await;
        let [goes_on, has_expired, forgets]: [Arc<Notify>; 3] = array::from_fn(|_| Arc::default());
        let slow = {
            let is_new = Arc::new(AtomicBool::new(false));
            let all = [&goes_on, &has_expired, &forgets].map(Arc::clone);
            calls(move |item: Item| {
                let ([goes_on, has_expired, forgets], is_new) = (all.clone(), Arc::clone(&is_new));
                async move {
                    match item {
                        Item::Delivery(delivery)
                            if name(&delivery) == "gate" && !is_new.load(Ordering::Relaxed) =>
                        {
                            goes_on.notified().await;
                        }
                        Item::Expired { .. } => {
                            is_new.store(true, Ordering::Relaxed);
                            has_expired.notify_one();
                            forgets.notified().await;
                        }
                        _ => {}
                    }
                }
            })
        };
        let subscribe = fixture.dispatcher.subscribe(Filter::all()).since(known);
        let handle = Arc::new(subscribe.callback(at_once(), slow).unwrap());
        fixture.events(&["b"], EventKind::Created).await;
        let version = commit(&fixture.bus, &db("a", 1), EventKind::Created).await;
        let at = fixture.dispatcher.wait_until(version).await.unwrap();
        assert!(within("the barrier", handle.wait_until(at)).await);
        fixture.events(&["gate"], EventKind::Created).await;
        fixture.events(&["b"], EventKind::Deleted).await;
        fixture.events(&["c", "d"], EventKind::Created).await;
        forget(&fixture.bus).await;
        let later = Arc::clone(&handle);
        let waits = is_awaited.then(|| tokio::spawn(async move { later.wait_until(Sequence::MAX).await }));
        tokio::task::yield_now().await;
        goes_on.notify_one();
        within("the expiry", has_expired.notified()).await;
        // The callback must forget everything, and its knowledge is incomplete until its scan has ended.
        let passed = handle.wait_until(at).now_or_never();
        assert_eq!(passed, None, "somebody waits: {is_awaited}");
        forgets.notify_one();
        assert!(within("the barrier again", handle.wait_until(at)).await);
        drop(waits);
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_and_a_dead_subscriber_delay_no_other() {
    let fixture = SubscriberFixture::new().await;
    let sleeps = calls(|_| tokio::time::sleep(Duration::from_hours(1)));
    let _slow = fixture.dispatcher.subscribe(Filter::all()).callback(at_once(), sleeps).unwrap();
    let _dead = fixture.dispatcher.subscribe(Filter::all()).stream();
    let mut quick = fixture.dispatcher.subscribe(Filter::all()).stream();
    let began = Instant::now();
    for _ in 0..100 {
        fixture.event(&db("a", 1), EventKind::Updated).await;
        within("a delivery", quick.next()).await.unwrap().into_delivery().unwrap();
    }
    assert!(began.elapsed() < Duration::from_mins(1), "{:?}", began.elapsed());
}

/// Regression: a subscriber that began to read the feed and then was not polled kept one of the few permits, so other lagging subscribers
/// got nothing.
#[tokio::test(start_paused = true)]
async fn one_that_stops_in_the_middle_of_a_read_delays_no_other() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = narrow_bus(&faults.store()).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    fold(&store, &bus, &db("a", 1), EventKind::Created).await;
    let options = DispatcherOptions::default().catch_ups_max(1);
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let subscribe = || dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).stream();
    let (mut stalled, mut other) = (subscribe(), subscribe());
    // The read has to be started again, after a pause.
    faults.plan_reads(|_| Some(StoreError::TRANSACTION_TOO_OLD));
    assert!(tokio::time::timeout(Duration::from_millis(1), stalled.next()).await.is_err());
    faults.heal();
    assert_eq!(name(&crate::fixture::next(&mut other).await), "a");
    assert_eq!(name(&crate::fixture::next(&mut stalled).await), "a");
}
