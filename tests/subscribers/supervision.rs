//! Panics: isolated, reported, and followed by a restart as the policy says.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, Delivery, DispatcherOptions, EventKind, Filter, Sequence,
    dispatcher::{
        Listener, Missed, Next, RestartPolicy, StopReason, Supervised, Supervision, SupervisionEvents,
    },
    store::{Database, testing::Faults},
};
use tokio::{
    sync::mpsc::{UnboundedSender, unbounded_channel},
    time::Instant,
};
use tokio_stream::StreamExt;

use crate::{
    common::{db, eager, joined, narrow_bus, until, within},
    fixture::{SubscriberFixture, drain, fold, name, names},
    listeners::{call_reporters, next_call},
};

async fn next(events: &mut SupervisionEvents) -> Supervised {
    within("an event", events.next()).await.unwrap().unwrap().what
}

/// Whether it is the report of a panic.
fn is_panic(what: &Supervised, at: Option<Sequence>) -> bool {
    matches!(what, Supervised::Panicked { text, at: found } if text.contains("as planned") && *found == at)
}

#[tokio::test(start_paused = true)]
async fn a_listener_that_panics_is_made_again_and_goes_on_where_it_was() {
    let fixture = SubscriberFixture::new().await;
    let mut events = fixture.dispatcher.supervision();
    let (factory, mut calls) = call_reporters();
    let listen = fixture.dispatcher.subscribe(Filter::all()).listener(factory);
    let handle = listen.attempts(2).unwrap().start();
    let mut other = fixture.dispatcher.subscribe(Filter::all()).stream();
    assert_eq!(next(&mut events).await, Supervised::Started);
    next_call(&mut calls).await;
    let bad = fixture.event(&db("panic", 1), EventKind::Created).await;
    fixture.event(&db("good", 1), EventKind::Created).await;
    assert_eq!(next_call(&mut calls).await, "event panic [Created]");
    assert_eq!(next_call(&mut calls).await, "init true", "another one");
    assert_eq!(next_call(&mut calls).await, "event panic [Created]", "it is given it again");
    assert_eq!(next_call(&mut calls).await, "init true");
    assert_eq!(next_call(&mut calls).await, "event good [Created]", "and no third time");
    assert!(is_panic(&next(&mut events).await, Some(bad)));
    assert!(matches!(next(&mut events).await, Supervised::Restarting { restarts: 1, .. }));
    assert!(is_panic(&next(&mut events).await, Some(bad)));
    let passed = Supervised::PassedOver { name: "panic".parse().unwrap(), sequence: bad };
    assert_eq!(next(&mut events).await, passed);
    assert!(matches!(next(&mut events).await, Supervised::Restarting { restarts: 2, .. }));
    assert_eq!(names(&drain(&mut other).await), ["good", "panic"].into(), "others hear nothing of it");
    let stats = fixture.bus.stats();
    assert_eq!((stats.listener_panics, stats.listener_restarts), (2, 2));
    handle.stop().await;
    let last: Supervision = within("an event", events.next()).await.unwrap().unwrap();
    assert_eq!(last.what, Supervised::Stopped(StopReason::Shutdown));
    assert_eq!(last.id, handle.id());
}

#[tokio::test(start_paused = true)]
async fn a_policy_limits_the_restarts() {
    for (policy, inits) in [(RestartPolicy::Never, 1), (RestartPolicy::Times(2), 3)] {
        let fixture = SubscriberFixture::new().await;
        let (factory, mut calls) = call_reporters();
        let listen = fixture.dispatcher.subscribe(Filter::all()).listener(factory).restart(policy);
        let handle = listen.start();
        fixture.event(&db("panic", 1), EventKind::Created).await;
        let reason = within("its end", handle.finished()).await;
        assert!(matches!(reason, StopReason::Panicked(ref text) if text.contains("as planned")));
        let mut all = Vec::new();
        while let Some(call) = calls.recv().await {
            all.push(call);
        }
        assert_eq!(all.iter().filter(|call| *call == "init true").count(), inits, "{policy:?}");
        assert!(!all.iter().any(|call| call.starts_with("terminate")), "not after a panic");
        assert_eq!(fixture.dispatcher.subscribers(), 0, "it is removed");
    }
}

/// Panics when it is made, or when it begins.
struct Fragile;

impl Listener for Fragile {
    async fn init(&mut self, _: Cursor) -> Next {
        panic!("it cannot begin")
    }

    async fn handle_event(&mut self, _: Delivery) -> Next {
        Next::Continue
    }
}

#[tokio::test(start_paused = true)]
async fn pauses_between_restarts_grow() {
    let fixture = SubscriberFixture::new().await;
    let times = Arc::new(std::sync::Mutex::new(Vec::new()));
    let made = Arc::clone(&times);
    let listen = fixture.dispatcher.subscribe(Filter::all()).listener(move || {
        made.lock().unwrap().push(Instant::now());
        assert!(!made.lock().unwrap().len().is_multiple_of(2), "the factory panics as well");
        Fragile
    });
    let (min, max) = (Duration::from_secs(1), Duration::from_secs(8));
    let listen = listen.backoff(min, max).unwrap().restart(RestartPolicy::Times(6));
    let handle = listen.start();
    assert!(matches!(within("its end", handle.finished()).await, StopReason::Panicked(_)));
    let times = times.lock().unwrap();
    let pauses: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(pauses.len(), 6);
    for (pause, full) in pauses.iter().zip([1, 2, 4, 8, 8, 8]) {
        let full = Duration::from_secs(full);
        assert!(*pause >= full / 2 && *pause <= full + Duration::from_millis(5), "{pauses:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_listener_that_pauses_after_a_panic_can_be_stopped() {
    let fixture = SubscriberFixture::new().await;
    let hour = Duration::from_hours(1);
    let listen = fixture.dispatcher.subscribe(Filter::all()).listener(|| Fragile);
    let handle = listen.backoff(hour, hour).unwrap().start();
    until("the panic", async || fixture.bus.stats().listener_panics == 1).await;
    assert_eq!(within("its end", handle.stop()).await, StopReason::Shutdown);
}

#[tokio::test(start_paused = true)]
async fn a_predicate_that_panics_is_reported_and_its_listener_goes_on() {
    let fixture = SubscriberFixture::new().await;
    let mut events = fixture.dispatcher.supervision();
    let filter = Filter::predicate(|row| {
        assert_ne!(row.name.as_str(), "bad", "as planned");
        true
    });
    let (factory, mut calls) = call_reporters();
    let _handle = fixture.dispatcher.subscribe(filter).listener(factory).start();
    next_call(&mut calls).await;
    fixture.events(&["bad", "good"], EventKind::Created).await;
    assert_eq!(next_call(&mut calls).await, "event good [Created]", "the same one");
    next(&mut events).await;
    assert!(is_panic(&next(&mut events).await, None));
}

#[tokio::test(start_paused = true)]
async fn panics_of_callbacks_are_reported_as_well() {
    let fixture = SubscriberFixture::new().await;
    let mut events = fixture.dispatcher.supervision();
    let _handle = fixture.dispatcher.subscribe(Filter::all()).callback(async |delivery| {
        assert_ne!(name(&delivery.unwrap()), "bad", "as planned");
    });
    let bad = fixture.event(&db("bad", 1), EventKind::Created).await;
    assert_eq!(next(&mut events).await, Supervised::Started);
    assert!(is_panic(&next(&mut events).await, Some(bad)));
    let passed = Supervised::PassedOver { name: "bad".parse().unwrap(), sequence: bad };
    assert_eq!(next(&mut events).await, passed);
}

/// Supervision events are bounded: a slow reader learns how many it has missed.
#[tokio::test(start_paused = true)]
async fn missed_supervision_events_are_counted() {
    let fixture = SubscriberFixture::new().await;
    let mut events = fixture.dispatcher.supervision();
    let count = Arc::new(AtomicUsize::new(0));
    let made = Arc::clone(&count);
    let listen = fixture.dispatcher.subscribe(Filter::all()).listener(move || {
        made.fetch_add(1, Ordering::Relaxed);
        Fragile
    });
    let listen = listen.backoff(Duration::ZERO, Duration::ZERO).unwrap().restart(RestartPolicy::Times(2_000));
    within("its end", listen.start().finished()).await;
    assert_eq!(count.load(Ordering::Relaxed), 2_001);
    let first = within("an event", events.next()).await.unwrap();
    assert!(matches!(first, Err(Missed(count)) if count > 1_000), "{first:?}");
    assert!(events.next().await.unwrap().is_ok());
}

/// A listener that sleeps in its handler delays no other.
#[tokio::test(start_paused = true)]
async fn a_slow_and_a_dead_subscriber_delay_no_other() {
    let fixture = SubscriberFixture::new().await;
    let _slow = fixture.dispatcher.subscribe(Filter::all()).callback(async |_| {
        tokio::time::sleep(Duration::from_hours(1)).await;
    });
    let _dead = fixture.dispatcher.subscribe(Filter::all()).stream();
    let mut quick = fixture.dispatcher.subscribe(Filter::all()).stream();
    let began = Instant::now();
    for _ in 0..100 {
        fixture.event(&db("a", 1), EventKind::Updated).await;
        within("a delivery", quick.next()).await.unwrap().unwrap();
    }
    assert!(began.elapsed() < Duration::from_mins(1), "{:?}", began.elapsed());
}

/// Regression: a subscriber that had begun to read the feed and then was not polled kept one of the few permits:
/// subscribers that lagged after it got nothing.
#[tokio::test(start_paused = true)]
async fn one_that_stops_in_the_middle_of_a_read_delays_no_other() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = narrow_bus(&faults.database()).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    fold(&store, &bus, &db("a", 1), EventKind::Created).await;
    let options = DispatcherOptions::default().catch_ups_max(1);
    let dispatcher = bus.dispatcher(options).await.unwrap();
    let subscribe = || dispatcher.subscribe(Filter::all()).since(Cursor::NOTHING).stream();
    let (mut stalled, mut other) = (subscribe(), subscribe());
    // The read has to be begun again, after a pause.
    faults.plan_reads(|_| Some(notibus::store::StoreError::TRANSACTION_TOO_OLD));
    assert!(tokio::time::timeout(Duration::from_millis(1), stalled.next()).await.is_err());
    faults.heal();
    assert_eq!(name(&crate::fixture::next(&mut other).await), "a");
    assert_eq!(name(&crate::fixture::next(&mut stalled).await), "a");
}

/// The delivery in hand is not worked on, and a restarted listener starts before it.
#[tokio::test(start_paused = true)]
async fn a_restarted_listener_starts_before_the_delivery_in_hand() {
    struct Panics(UnboundedSender<Cursor>, Arc<AtomicBool>);

    impl Listener for Panics {
        async fn init(&mut self, position: Cursor) -> Next {
            self.0.send(position).unwrap();
            Next::Continue
        }

        async fn handle_event(&mut self, _: Delivery) -> Next {
            assert!(self.1.swap(true, Ordering::Relaxed), "the first");
            Next::Continue
        }
    }

    for filter in [Filter::name("a").unwrap(), Filter::prefix("a")] {
        let fixture = SubscriberFixture::new().await;
        let (sender, mut positions) = unbounded_channel();
        let has_panicked = Arc::new(AtomicBool::new(false));
        let factory = move || Panics(sender.clone(), Arc::clone(&has_panicked));
        let _listener = fixture.dispatcher.subscribe(filter).listener(factory).start();
        within("its beginning", positions.recv()).await.unwrap();
        let sequence = fixture.event(&db("a", 1), EventKind::Created).await;
        let position = within("its restart", positions.recv()).await.unwrap();
        assert!(position < sequence.into(), "it has not worked on {sequence}, but starts at {position}");
    }
}

/// Panics at each delivery.
struct PanicsAlways;

impl Listener for PanicsAlways {
    async fn handle_event(&mut self, _: Delivery) -> Next {
        panic!("as planned");
    }
}

/// Bug: only its own commands woke a listener from the pause before its restart, so the shutdown waited for it until its limit. Fix: the end
/// of the dispatcher ends the pause.
#[tokio::test(start_paused = true)]
async fn a_pause_before_a_restart_ends_with_the_dispatcher() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let running = bus.start(notibus::Roles::default()).await.unwrap();
    let _handle = running.dispatcher().subscribe(Filter::all()).listener(|| PanicsAlways).start();
    for n in 0..10 {
        crate::common::record(&store, &bus, &db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
    }
    // The pauses have grown to 30 s.
    tokio::time::sleep(Duration::from_mins(5)).await;
    let began = Instant::now();
    let ended = running.shutdown().await;
    assert!(
        ended.is_ok() && began.elapsed() < Duration::from_secs(2),
        "{ended:?} after {:?}",
        began.elapsed()
    );
}
