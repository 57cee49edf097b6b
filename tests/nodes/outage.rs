//! What a process reports during an outage of the store, how it shuts down during one, and that its tasks survive panics.

use std::{
    collections::BTreeMap,
    fmt::{Debug, Write},
    sync::{Arc, Mutex},
    time::Duration,
};

use notibus::{
    Cursor, Error, Filter, Notification, StartOptions,
    consumer::{Batch, Work},
    dispatcher::{Item, RestartPolicy},
    node::Role,
    store::{
        Store, StoreError,
        testing::{Attempt, CommitFault, Faults, Operation, WatchFault},
    },
};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use super::fixture::{NODES, writes};
use crate::common::{db, eager, joined, narrow_bus, record, row_with};

/// Counts the warnings and errors that the library logs, by their texts.
#[derive(Debug, Clone, Default)]
struct Lines(Arc<Mutex<BTreeMap<String, u32>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= Level::WARN && metadata.target().starts_with("notibus")
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        *self.0.lock().unwrap().entry(text.0).or_default() += 1;
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

impl Lines {
    /// Takes the lines so far, each with its count.
    fn take(&self) -> BTreeMap<String, u32> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// Makes all reads, writes and watches fail with `error`.
fn cut_off(faults: &Faults, error: &StoreError) {
    let (read, write, watch) = (error.clone(), error.clone(), error.clone());
    faults.plan_reads(move |_| Some(read.clone()));
    faults.plan_commits(move |_| Some(CommitFault::Before(write.clone())));
    faults.plan_watches(move |_| Some(WatchFault::Refuse(watch.clone())));
}

/// Regression: parallel jobs and consumers logged each failure of the store, so the one line per cause with growing pauses was lost.
#[tokio::test(start_paused = true)]
async fn an_hour_without_the_store_costs_at_most_a_line_a_minute() {
    // The first error is retried inside the transaction; the second is returned at once.
    for error in [StoreError::PROCESS_BEHIND, StoreError::TRANSACTION_TIMED_OUT] {
        let lines = Lines::default();
        let _guard = tracing::subscriber::set_default(lines.clone());
        // With only one tracing subscriber, a log line that another test reaches first is disabled for good.
        let _second = tracing::Dispatch::new(lines.clone());
        let faults = Faults::new(&Store::memory());
        let store = faults.store();
        let bus = narrow_bus(&store).await;
        let running = bus.start(StartOptions::default()).await.unwrap();
        let audit = running.consumer("audit").unwrap().start_from(Cursor::BEGINNING);
        let audit = audit.run_batches(async |_: Batch<Notification>| Ok(())).await.unwrap();
        let dispatcher = running.dispatcher();
        let views = running.consumer("views").unwrap().run(async |_: Work<Notification>| Ok(()));
        let views = views.await.unwrap();
        let mirror = dispatcher.mirror(Filter::all()).unwrap();
        let callback = dispatcher.subscribe(Filter::all());
        let callback = callback.callback(RestartPolicy::default(), || async |_: Item| {}).unwrap();
        for number in 0..20 {
            record(&store, &bus, &db(&format!("db{number}"), 1), [1, 0, 0, 0]).await;
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(lines.take(), BTreeMap::new(), "all is well");

        cut_off(&faults, &error);
        tokio::time::sleep(Duration::from_hours(1)).await;
        let said = lines.take();
        let count: u32 = said.values().sum();
        assert!((1..=60).contains(&count), "{count} after {error}: {said:#?}");

        faults.heal();
        tokio::time::sleep(Duration::from_mins(2)).await;
        let said = lines.take();
        assert!(said.values().sum::<u32>() <= 5, "{error}: {said:#?}");
        assert!(said.keys().any(|line| line.contains("member again")), "{said:#?}");
        record(&store, &bus, &db("after", 1), [1, 0, 0, 0]).await;
        row_with(&bus, &db("after", 1), [1, 0, 0, 0]).await;
        drop((mirror, callback));
        views.shutdown().await.unwrap();
        audit.shutdown().await.unwrap();
        running.shutdown().await.unwrap();
    }
}

/// Regression: shutdowns waited without a time limit for positions to be saved, so a shutdown during an outage lasted as long as the
/// outage.
#[tokio::test(start_paused = true)]
async fn what_saves_its_position_ends_without_the_store_too() {
    let faults = Faults::new(&Store::memory());
    let store = faults.store();
    let bus = narrow_bus(&store).await;
    let running = bus.start(StartOptions::default()).await.unwrap();
    let consumer = running.consumer("c").unwrap().run(async |_: Work<Notification>| Ok(())).await.unwrap();
    // No checkpoint can be saved from here on, so that there is one to save at shutdown.
    let is_save = |attempt: &Attempt| writes(attempt, b"notibus\x15\x19\x15\x01");
    faults.plan_commits(move |attempt| {
        is_save(attempt).then_some(CommitFault::Before(StoreError::PROCESS_BEHIND))
    });
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(bus.stats().consumer_rows, 1);
    cut_off(&faults, &StoreError::PROCESS_BEHIND);
    let began = tokio::time::Instant::now();
    consumer.shutdown().await.unwrap_err();
    assert!(began.elapsed() <= Duration::from_secs(25), "{:?}", began.elapsed());
    faults.heal();
    running.shutdown().await.unwrap();
}

/// Regression: a panic ended the poll of a notifier for good, and nothing counted it, so from then on events whose ring was lost were not
/// folded until the next ring.
#[tokio::test(start_paused = true)]
async fn a_poll_that_has_panicked_goes_on_and_is_counted() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = narrow_bus(&faults.store()).await;
    let notifier = eager().poll_interval(Duration::from_secs(1));
    let notifier = joined(&bus).await.notifier(notifier).await.unwrap();
    // From here on only the poll can find events: the fold sleeps until it is woken.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut panics = true;
    faults.plan_reads(move |operation| {
        let is_poll = matches!(operation, Operation::GetRange { range, .. } if range.begin.starts_with(b"notibus\x15\x01"));
        assert!(!is_poll || !std::mem::take(&mut panics), "as planned");
        None
    });
    faults.plan_watches(|_| Some(WatchFault::Drop));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(bus.stats().task_panics, 1);
    // Another process records an event, and its ring is lost.
    let other = narrow_bus(&store).await;
    record(&store, &other, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
    notifier.shutdown().await.unwrap();
}

/// Regression: the heartbeat missed that a publication had panicked, so the role counted as published, and nothing counted the panic.
#[tokio::test(start_paused = true)]
async fn a_heartbeat_that_panics_is_counted_and_publishes_nothing() {
    let faults = Faults::new(&Store::memory());
    let bus = narrow_bus(&faults.store()).await;
    let node = joined(&bus).await;
    faults.plan_commits(|attempt| {
        assert!(!writes(attempt, NODES), "as planned");
        None
    });
    let refused = node.announce(Role::HTTP).await.unwrap_err();
    assert!(matches!(refused, Error::Task { .. }), "{refused}");
    faults.heal();
    assert_eq!(bus.stats().task_panics, 1);
    let _role = node.announce(Role::HTTP).await.unwrap();
}
