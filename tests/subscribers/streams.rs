//! Streams: every subscriber gets its deliveries, with the news since its own cursor, however slow it is.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, Cursor, Dispatcher, DispatcherOptions, Error, EventKind, Filter, Kinds, Notifier, Sequence,
    cursor::Start,
    dispatcher::{Item, RestartPolicy},
    event::{Incarnation, Versionstamp},
    store::{
        Store, StoreError,
        testing::{Faults, Operation, WatchFault},
    },
};
use tokio_stream::StreamExt;

use super::fixture::{SubscriberFixture, calls, changes, drain, kinds, names, next, ready};
use crate::common::{self, NEVER, db, eager, joined, narrow_bus, record, row_with, until, within};

fn ring(ring_rows_max: usize) -> DispatcherOptions {
    DispatcherOptions::default().ring_rows_max(ring_rows_max)
}

#[tokio::test(start_paused = true)]
async fn every_filter_gets_its_databases_and_no_others() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    let cases = [
        (Filter::all(), vec!["_replicator", "a/_replicator", "a/b", "ab", "b", "b/_replicator"]),
        (Filter::name("ab").unwrap(), vec!["ab"]),
        (Filter::names(["b".parse().unwrap(), "a/b".parse().unwrap()]).unwrap(), vec!["a/b", "b"]),
        (Filter::prefix("a"), vec!["a/_replicator", "a/b", "ab"]),
        (Filter::suffix("/_replicator"), vec!["a/_replicator", "b/_replicator"]),
        (
            Filter::glob("{_replicator,*/_replicator}").unwrap(),
            vec!["_replicator", "a/_replicator", "b/_replicator"],
        ),
        (Filter::glob("a?b").unwrap(), vec!["a/b"]),
        (Filter::glob("[ab]").unwrap(), vec!["b"]),
        (Filter::predicate(|row| row.name.as_str().len() == 2), vec!["ab"]),
    ];
    let mut subscriptions: Vec<_> =
        cases.iter().map(|(filter, _)| node.dispatcher.subscribe(filter.clone()).stream()).collect();
    node.events(&["_replicator", "a/_replicator", "a/b", "ab", "b", "b/_replicator"], EventKind::Created)
        .await;
    for (subscription, (filter, expected)) in subscriptions.iter_mut().zip(&cases) {
        let found = drain(subscription).await;
        assert_eq!(found.len(), expected.len(), "{filter:?}");
        assert_eq!(names(&found), expected.iter().copied().collect(), "{filter:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_the_wanted_kinds_are_delivered() {
    for filter in [Filter::name("a").unwrap(), Filter::all(), Filter::prefix("a")] {
        let node = SubscriberFixture::with(DispatcherOptions::default()).await;
        let wanted = Kinds::from(EventKind::Deleted) | EventKind::DdocUpdated.into();
        let mut subscription = node.dispatcher.subscribe(filter.kinds(wanted).unwrap()).stream();
        let a = db("a", 1);
        for kind in [EventKind::Created, EventKind::Updated] {
            node.event(&a, kind).await;
        }
        assert!(ready(&mut subscription).is_empty());
        for kind in [EventKind::DdocUpdated, EventKind::Deleted] {
            let sequence = node.event(&a, kind).await;
            let delivery = next(&mut subscription).await;
            assert_eq!(delivery.sequence(), sequence);
            assert!(delivery.news().kinds().contains(kind));
        }
    }
}

#[test]
fn filters_that_never_match_are_typed_errors() {
    let invalid = |result: notibus::Result<Filter>| matches!(result, Err(Error::Invalid { .. }));
    assert!(invalid(Filter::names([])));
    assert!(invalid(Filter::name("")));
    assert!(invalid(Filter::glob("a[")));
    assert!(invalid(Filter::all().kinds(Kinds::NONE)));
}

#[tokio::test]
async fn options_out_of_their_limits_are_typed_errors() {
    let bus = narrow_bus(&Store::memory()).await;
    let good = DispatcherOptions::default;
    for bad in [
        good().ring_rows_max(0),
        good().page_rows_max(0),
        good().page_rows_max(10_001),
        good().poll_interval(Duration::ZERO),
        good().catch_ups_max(0),
        // A semaphore does not allow so many permits, and would panic.
        good().catch_ups_max(usize::MAX),
    ] {
        let refused = bus.dispatcher(bad.clone()).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{bad:?}");
    }
}

/// A subscriber's cursor is a position up to which the subscriber knows everything. Regression: each delivered row moved the cursor,
/// although older rows of the next database may have been replaced by newer ones, so a subscriber from the start got only the news of the
/// last row of all databases but the first.
#[tokio::test(start_paused = true)]
async fn a_subscriber_from_the_start_gets_everything_of_every_database() {
    for (page_rows_max, filter) in [
        (1_000, Filter::all()),
        (1, Filter::all()),
        (1_000, Filter::prefix("db")),
        (1_000, Filter::names(["db1", "db2", "db3"].map(|name| name.parse().unwrap())).unwrap()),
    ] {
        let node = SubscriberFixture::with(DispatcherOptions::default().page_rows_max(page_rows_max)).await;
        for kind in [EventKind::Created, EventKind::DdocUpdated, EventKind::Updated] {
            node.events(&["db1", "db2", "db3"], kind).await;
        }
        let mut subscription = node.dispatcher.subscribe(filter).since(Cursor::BEGINNING).stream();
        for name in ["db1", "db2", "db3"] {
            let delivery = next(&mut subscription).await;
            assert_eq!(delivery.notification().name.as_str(), name);
            assert_eq!(
                kinds(&delivery),
                [EventKind::Created, EventKind::Updated, EventKind::DdocUpdated],
                "{name}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_kind_from_before_the_last_row_reaches_a_subscriber_of_that_kind_only() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    for kind in [EventKind::Created, EventKind::Updated] {
        node.events(&["a", "b", "c"], kind).await;
    }
    let created = Filter::all().kinds(EventKind::Created.into()).unwrap();
    let mut subscription = node.dispatcher.subscribe(created).since(Cursor::BEGINNING).stream();
    assert_eq!(names(&drain(&mut subscription).await), ["a", "b", "c"].into());
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_from_a_sequence_gets_what_came_after_it() {
    for filter in [Filter::all(), Filter::prefix("d"), Filter::name("d").unwrap()] {
        let node = SubscriberFixture::with(DispatcherOptions::default()).await;
        let known = node.event(&db("d", 1), EventKind::Created).await;
        node.event(&db("d", 1), EventKind::DdocUpdated).await;
        node.event(&db("d", 1), EventKind::Updated).await;
        let mut subscription = node.dispatcher.subscribe(filter).since(Start::from(known)).stream();
        // A subscriber that follows the ring gets both rows; a subscriber of the exact name gets only the newest one.
        let deliveries = drain(&mut subscription).await;
        let delivered: BTreeSet<_> = deliveries.iter().flat_map(kinds).collect();
        assert_eq!(delivered, [EventKind::Updated, EventKind::DdocUpdated].into());
        let last = deliveries.last().unwrap().sequence();
        node.event(&db("d", 1), EventKind::Updated).await;
        let delivery = next(&mut subscription).await;
        assert!(delivery.sequence() > last);
        assert_eq!(kinds(&delivery), [EventKind::Updated]);
        assert!(drain(&mut subscription).await.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_from_now_gets_nothing_old() {
    for filter in [Filter::all(), Filter::name("d").unwrap()] {
        let node = SubscriberFixture::with(DispatcherOptions::default()).await;
        node.event(&db("d", 1), EventKind::Created).await;
        let mut subscription = node.dispatcher.subscribe(filter).stream();
        node.event(&db("d", 1), EventKind::Updated).await;
        assert_eq!(kinds(&next(&mut subscription).await), [EventKind::Updated]);
        assert!(drain(&mut subscription).await.is_empty());
    }
}

/// A reader at the very start knows no database, so an earlier instance is not reported as gone. Regression: the reader applied this to all
/// pages that it read from there, so the deletion of a database on its first page was not delivered.
#[tokio::test(start_paused = true)]
async fn a_database_that_is_replaced_between_two_first_pages_is_delivered_as_deleted() {
    let options = DispatcherOptions::default().page_rows_max(1);
    let node = SubscriberFixture::with(options).await;
    // With so many names, two rows must be in one shard.
    let all = ["a", "b", "c", "d", "e", "f", "g", "h"];
    node.events(&all, EventKind::Created).await;
    let start = Cursor::BEGINNING;
    let mut subscription = node.dispatcher.subscribe(Filter::all()).since(start).stream();
    assert_eq!(next(&mut subscription).await.notification().name.as_str(), "a");
    node.event(&db("a", 1), EventKind::Deleted).await;
    node.event(&db("a", 2), EventKind::Created).await;
    let rest = drain(&mut subscription).await;
    assert_eq!(names(&rest), all.into());
    let again = rest.iter().find(|delivery| delivery.notification().name.as_str() == "a");
    let expected = [(db("a", 1).instance, EventKind::Deleted), (db("a", 2).instance, EventKind::Created)];
    assert_eq!(changes(again.unwrap()), expected);
}

/// A subscriber that starts again from the `since` of a delivery misses nothing.
#[tokio::test(start_paused = true)]
async fn a_subscriber_can_start_again_from_where_it_knew_everything() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    for kind in [EventKind::Created, EventKind::Updated] {
        node.events(&["a", "b"], kind).await;
    }
    let start = |since| node.dispatcher.subscribe(Filter::all()).since(Start::from(since)).stream();
    let first = next(&mut start(Cursor::BEGINNING)).await;
    let again = drain(&mut start(first.since())).await;
    let delivered = again.iter().find(|delivery| delivery.notification().name.as_str() == "b").unwrap();
    assert_eq!(kinds(delivered), [EventKind::Created, EventKind::Updated]);
}

#[tokio::test(start_paused = true)]
async fn a_row_has_all_that_was_missed_before_it() {
    // The ring holds only the last row.
    let node = SubscriberFixture::with(ring(1)).await;
    let mut subscription = node.dispatcher.subscribe(Filter::name("a").unwrap()).stream();
    let (old, new) = (db("a", 1), db("a", 2));
    node.event(&old, EventKind::Created).await;
    let known = next(&mut subscription).await;
    assert_eq!(changes(&known), [(old.instance, EventKind::Created)]);
    for (database, kind) in [
        (&old, EventKind::Deleted),
        (&new, EventKind::Created),
        (&new, EventKind::DdocUpdated),
        (&new, EventKind::Updated),
    ] {
        node.event(database, kind).await;
    }
    let expected = [
        (old.instance, EventKind::Deleted),
        (new.instance, EventKind::Created),
        (new.instance, EventKind::Updated),
        (new.instance, EventKind::DdocUpdated),
    ];
    assert_eq!(changes(&next(&mut subscription).await), expected);
    assert!(ready(&mut subscription).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_laggard_reads_the_feed_again_and_misses_nothing() {
    for page_rows_max in [1, 1_000] {
        let node = SubscriberFixture::with(ring(2).page_rows_max(page_rows_max)).await;
        let mut subscription = node.dispatcher.subscribe(Filter::all()).stream();
        let all = ["a", "b", "c", "d", "e"];
        node.events(&all, EventKind::Created).await;
        ready(&mut subscription);
        for kind in [EventKind::DdocUpdated, EventKind::Updated] {
            node.events(&all, kind).await;
        }
        let deliveries = drain(&mut subscription).await;
        assert!(deliveries.is_sorted_by(|a, b| a.sequence() < b.sequence()));
        for name in all {
            let last = deliveries.iter().rfind(|found| found.notification().name.as_str() == name);
            let row = common::row(&node.bus, &db(name, 1)).await.unwrap();
            assert_eq!(**last.unwrap().notification(), row, "{name}");
            assert!(last.unwrap().news().kinds().contains(EventKind::DdocUpdated));
        }
        node.event(&db("a", 1), EventKind::Updated).await;
        assert_eq!(kinds(&next(&mut subscription).await), [EventKind::Updated]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_skips_is_informed_of_skipped_rows() {
    let node = SubscriberFixture::with(ring(2)).await;
    let mut subscription = node.dispatcher.subscribe(Filter::all()).skip_when_lagging().stream();
    let first = node.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(next(&mut subscription).await.sequence(), first);
    let mut sequences = Vec::new();
    for _ in 0..10 {
        sequences.push(node.event(&db("a", 1), EventKind::Updated).await);
    }
    let items = ready(&mut subscription);
    let Some(Item::Lagged { from, to }) = items.first() else {
        panic!("{items:?}");
    };
    assert!(*from >= first && *from < sequences[0] && *to >= sequences[0]);
    let to = *to;
    let rest = items.into_iter().skip(1).map(|item| item.into_delivery().unwrap().sequence());
    let rest: Vec<_> = rest.collect();
    let expected: Vec<_> = sequences.iter().copied().filter(|sequence| *sequence > to).collect();
    assert!(!expected.is_empty());
    assert_eq!(rest, expected, "what was not skipped is delivered");
}

/// Regression: the tail's reads filled the ring even while nothing happened, so a subscriber that had received everything got `Lagged`.
#[tokio::test(start_paused = true)]
async fn nobody_falls_behind_while_nothing_happens() {
    let node = SubscriberFixture::with(ring(4)).await;
    let mut subscription = node.dispatcher.subscribe(Filter::all()).skip_when_lagging().stream();
    node.event(&db("a", 1), EventKind::Created).await;
    for second in 0..100_u8 {
        node.store
            .run(async |tx| {
                tx.set(b"of another layer", &[second]);
                Ok(())
            })
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(kinds(&next(&mut subscription).await), [EventKind::Created], "the ring still holds it");
    for second in 0..100_u8 {
        node.store
            .run(async |tx| {
                tx.set(b"of another layer", &[second]);
                Ok(())
            })
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    node.event(&db("a", 1), EventKind::Updated).await;
    assert_eq!(kinds(&next(&mut subscription).await), [EventKind::Updated]);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_subscription_is_not_registered_any_more() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    let exact = node.dispatcher.subscribe(Filter::name("a").unwrap()).stream();
    let other = node.dispatcher.subscribe(Filter::name("a").unwrap()).stream();
    let pattern = node.dispatcher.subscribe(Filter::prefix("a")).stream();
    let callback = node.dispatcher.subscribe(Filter::all());
    let callback = callback.callback(RestartPolicy::default(), calls(|_| async {})).unwrap();
    assert_eq!(node.dispatcher.subscribers(), 4);
    drop((exact, pattern));
    assert_eq!(node.dispatcher.subscribers(), 2);
    drop(callback);
    until("the callback's end", async || node.dispatcher.subscribers() == 1).await;
    let mut other = other;
    node.event(&db("a", 1), EventKind::Created).await;
    next(&mut other).await;
    drop(other);
    assert_eq!(node.dispatcher.subscribers(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_callback_is_called_with_each_delivery_in_order() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    let seen_calls = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&seen_calls);
    let slow = calls(move |item: Item| {
        let seen = Arc::clone(&seen);
        async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            seen.lock().unwrap().push(item.into_delivery().unwrap().sequence());
        }
    });
    let handle = node.dispatcher.subscribe(Filter::all()).callback(RestartPolicy::default(), slow).unwrap();
    let mut sequences = Vec::new();
    for name in ["a", "b", "a", "c"] {
        sequences.push(node.event(&db(name, 1), EventKind::Updated).await);
    }
    until("all calls", async || seen_calls.lock().unwrap().len() == 4).await;
    assert_eq!(*seen_calls.lock().unwrap(), sequences);
    assert!(!handle.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_callback_is_counted_and_touches_nothing_else() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    let count_of_calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count_of_calls);
    let panics = calls(move |item: Item| {
        counted.fetch_add(1, Ordering::Relaxed);
        let delivery = item.into_delivery().unwrap();
        assert_ne!(delivery.notification().name.as_str(), "early", "it panics before its future");
        async move {
            assert_ne!(delivery.notification().name.as_str(), "late", "it panics within it");
        }
    });
    let policy = RestartPolicy::default().attempts_max(1);
    let _handle = node.dispatcher.subscribe(Filter::all()).callback(policy, panics).unwrap();
    let mut other = node.dispatcher.subscribe(Filter::all()).stream();
    node.events(&["early", "late", "good"], EventKind::Created).await;
    until("all calls", async || count_of_calls.load(Ordering::Relaxed) == 3).await;
    assert_eq!(node.bus.stats().callback_panics, 2);
    assert_eq!(drain(&mut other).await.len(), 3);
}

/// Regression: a subscription did not survive a panic of its predicate, so it ended silently.
#[tokio::test(start_paused = true)]
async fn a_panic_of_a_predicate_is_counted_and_the_callback_goes_on() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    let filter = Filter::predicate(|row| {
        assert_ne!(row.name.as_str(), "bad", "the predicate panics");
        true
    });
    let count_of_calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count_of_calls);
    let count = calls(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        async {}
    });
    let _handle = node.dispatcher.subscribe(filter).callback(RestartPolicy::default(), count).unwrap();
    node.events(&["good", "bad", "other"], EventKind::Created).await;
    until("the calls", async || count_of_calls.load(Ordering::Relaxed) == 2).await;
    assert_eq!(node.bus.stats().callback_panics, 1);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_streams() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    let mut streams: Vec<_> = [Filter::all(), Filter::prefix("a"), Filter::name("a").unwrap()]
        .into_iter()
        .map(|filter| node.dispatcher.subscribe(filter).stream())
        .collect();
    node.event(&db("a", 1), EventKind::Created).await;
    // Unlike the others, this subscription is already waiting.
    let mut waiting = node.dispatcher.subscribe(Filter::name("b").unwrap()).stream();
    let waits = tokio::spawn(async move { waiting.next().await.is_none() });
    tokio::task::yield_now().await;
    within("the shutdown", node.dispatcher.shutdown()).await;
    for stream in &mut streams {
        assert!(within("the end", stream.next()).await.is_none(), "its cursor covers what waits");
        assert!(within("the end, again", stream.next()).await.is_none());
    }
    assert!(within("the end", waits).await.unwrap());
}

/// Regression: a subscription to exact names that was begun before the shutdown and completed afterwards missed it, so it never ended.
#[tokio::test(start_paused = true)]
async fn a_subscription_that_is_made_after_the_shutdown_ends() {
    for filter in [Filter::all(), Filter::name("a").unwrap()] {
        let node = SubscriberFixture::with(DispatcherOptions::default()).await;
        let late = node.dispatcher.subscribe(filter);
        node.dispatcher.shutdown().await;
        assert!(within("the end", late.stream().next()).await.is_none());
    }
}

/// Starts a notifier, and waits until the feed has one row.
async fn with_a_row(store: &Store, bus: &Bus) -> Notifier {
    let notifier = joined(bus).await.notifier(eager()).await.unwrap();
    record(store, bus, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(bus, &db("a", 1), [1, 0, 0, 0]).await;
    notifier
}

/// Regression: a subscriber of exact names did not repeat its first read of the feed after a failure, so it never got the rows.
#[tokio::test(start_paused = true)]
async fn a_failed_read_is_reported_and_tried_again() {
    for filter in [Filter::all(), Filter::name("a").unwrap()] {
        let store = Store::memory();
        let faults = Faults::new(&store);
        let bus = narrow_bus(&faults.store()).await;
        let _notifier = with_a_row(&store, &bus).await;
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let mut subscription = dispatcher.subscribe(filter).since(Cursor::BEGINNING).stream();
        faults.plan_reads(|_| Some(StoreError::IO_ERROR));
        for _ in 0..2 {
            let item = within("a failure", subscription.next()).await.unwrap();
            assert!(matches!(item, Item::Failed(ref error) if error.code() == Some(1510)), "{item:?}");
        }
        faults.heal();
        assert_eq!(kinds(&next(&mut subscription).await), [EventKind::Created]);
    }
}

/// Regression: a subscriber polled the task of a read again after the task had panicked, so the subscriber kept panicking.
#[tokio::test(start_paused = true)]
async fn a_read_that_panics_is_reported_and_tried_again() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (bus, reading) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
    let _notifier = with_a_row(&store, &bus).await;
    let dispatcher = reading.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut subscription = dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).stream();
    faults.plan_reads(|_| panic!("it breaks"));
    for _ in 0..2 {
        let item = within("a failure", subscription.next()).await.unwrap();
        assert!(matches!(item, Item::Failed(_)), "{item:?}");
    }
    faults.heal();
    assert_eq!(kinds(&next(&mut subscription).await), [EventKind::Created]);
}

/// Regression: the task of a callback retried failed reads without a pause, so it loaded the store for as long as reads failed.
#[tokio::test(start_paused = true)]
async fn a_callback_pauses_while_reads_fail() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = narrow_bus(&faults.store()).await;
    let _notifier = with_a_row(&store, &bus).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut failures = 0;
    faults.plan_reads(move |_| {
        failures += 1;
        // The limit makes the test end even if the callback never pauses.
        (failures < 10_000).then_some(StoreError::IO_ERROR)
    });
    let count_of_calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count_of_calls);
    let count = calls(move |item: Item| {
        counted.fetch_add(item.into_delivery().is_some().into(), Ordering::Relaxed);
        async {}
    });
    let from_nothing = dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING);
    let _handle = from_nothing.callback(RestartPolicy::default(), count).unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let reads = faults.counts().reads;
    assert!(reads < 200, "{reads} reads in 10 s");
    faults.heal();
    until("the call", async || count_of_calls.load(Ordering::Relaxed) == 1).await;
}

/// Regression: a subscriber that started ahead of the store was accepted, so it received nothing until the store had reached its position.
#[tokio::test(start_paused = true)]
async fn a_start_ahead_of_the_store_is_a_typed_error() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    node.event(&db("a", 1), EventKind::Created).await;
    let now = node.bus.feed().now().await.unwrap();
    let version = now.versionstamp().version() + 1_000_000_000;
    let ahead = Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0);
    let elsewhere = Sequence::new(Incarnation(1), Versionstamp::new(1, 0), 0);
    for filter in [Filter::all(), Filter::name("a").unwrap()] {
        let first = async |since: Sequence| {
            let since = Start::from(since);
            let mut subscription = node.dispatcher.subscribe(filter.clone()).since(since).stream();
            within("an error", subscription.next()).await.unwrap()
        };
        let expired = first(ahead).await;
        assert!(matches!(expired, Item::Expired { .. }), "{filter:?}: {expired:?}");
        let refused = first(elsewhere).await;
        let is_invalid = matches!(refused, Item::Failed(Error::Invalid { .. }));
        assert!(is_invalid, "{filter:?}: {refused:?}");
    }
}

/// A subscriber can know more rows than the tail has read: these are not delivered again, but later rows are.
#[tokio::test(start_paused = true)]
async fn a_start_ahead_of_the_tail_is_fine() {
    let options = DispatcherOptions::default().poll_interval(NEVER);
    let (faults, folding, _notifier, _dispatching, dispatcher) = apart(options).await;
    faults.plan_watches(|_| Some(WatchFault::Drop));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let store = faults.store();
    for filter in [Filter::all(), Filter::name("a").unwrap()] {
        record(&store, &folding, &db("a", 1), [0, 0, 1, 0]).await;
        until("the fold", async || folding.stats().folded.updated % 2 == 1).await;
        let known = folding.feed().now().await.unwrap();
        assert!(dispatcher.position() < known);
        let since = Start::from(known);
        let mut subscription = dispatcher.subscribe(filter).since(since).stream();
        assert!(ready(&mut subscription).is_empty());
        record(&store, &folding, &db("a", 1), [0, 0, 1, 0]).await;
        until("the fold", async || folding.stats().folded.updated % 2 == 0).await;
        // Only the poll of the tail wakes it.
        let delivery = tokio::time::timeout(2 * NEVER, subscription.next()).await.unwrap();
        assert!(delivery.unwrap().into_delivery().unwrap().sequence() > known);
        assert!(ready(&mut subscription).is_empty());
    }
}

/// Starts two processes: one folds, the other dispatches.
async fn apart(options: DispatcherOptions) -> (Faults, Bus, Notifier, Bus, Dispatcher) {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (folding, dispatching) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
    let notifier = joined(&folding).await.notifier(eager()).await.unwrap();
    let dispatcher = dispatching.dispatcher(options).await.unwrap();
    (faults, folding, notifier, dispatching, dispatcher)
}

#[tokio::test(start_paused = true)]
async fn a_watch_wakes_the_tail_for_the_notifier_of_another_process() {
    let options = DispatcherOptions::default().poll_interval(NEVER);
    let (faults, folding, _notifier, _dispatching, dispatcher) = apart(options).await;
    let mut subscription = dispatcher.subscribe(Filter::all()).stream();
    for n in 0..50 {
        tokio::time::sleep(Duration::from_millis(n)).await;
        record(&faults.store(), &folding, &db(&format!("db{}", n % 7), 1), [0, 0, 1, 0]).await;
        next(&mut subscription).await;
    }
}

/// Regression: a tail whose watches were refused set them again every 10 ms, so it read the feed each time.
#[tokio::test(start_paused = true)]
async fn the_poll_makes_good_watches_that_are_dropped_or_refused_and_is_no_more_often() {
    for fault in [WatchFault::Drop, WatchFault::Refuse(StoreError::TOO_MANY_WATCHES)] {
        let (faults, folding, _notifier, _dispatching, dispatcher) =
            apart(DispatcherOptions::default()).await;
        faults.plan_watches(move |_| Some(fault.clone()));
        let mut subscription = dispatcher.subscribe(Filter::all()).stream();
        tokio::time::sleep(Duration::from_secs(5)).await;
        for _ in 0..3 {
            record(&faults.store(), &folding, &db("a", 1), [0, 0, 1, 0]).await;
            next(&mut subscription).await;
        }
        let before = faults.counts().reads;
        tokio::time::sleep(Duration::from_secs(100)).await;
        let reads = faults.counts().reads - before;
        assert!(reads < 3_000, "{reads} reads in 100 s");
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_tail_only_polls() {
    let (faults, folding, _notifier, _dispatching, dispatcher) = apart(DispatcherOptions::default()).await;
    for n in 0..100 {
        record(&faults.store(), &folding, &db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
    }
    let _subscription = dispatcher.subscribe(Filter::all()).stream();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let before = faults.counts();
    tokio::time::sleep(Duration::from_secs(100)).await;
    let after = faults.counts();
    assert_eq!(after.write_commits, before.write_commits);
    assert!(after.reads - before.reads < 1_500, "{before:?} {after:?}");
}

/// The tail continues after a period in which the feed cannot be read.
#[tokio::test(start_paused = true)]
async fn the_tail_goes_on_after_reads_have_failed() {
    let (faults, folding, _notifier, _dispatching, dispatcher) = apart(DispatcherOptions::default()).await;
    let mut subscription = dispatcher.subscribe(Filter::all()).stream();
    faults.plan_reads(|read| matches!(read, Operation::GetRange { .. }).then_some(StoreError::IO_ERROR));
    record(&faults.store(), &folding, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&folding, &db("a", 1), [1, 0, 0, 0]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    faults.heal();
    assert_eq!(next(&mut subscription).await.notification().name.as_str(), "a");
}

/// Wake-ups from the commit through the fold and the tail to the subscriber, in one process on real threads, without a poll that could make
/// up for a lost one.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_wake_up_is_lost_within_a_process() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(common::unpolled()).await.unwrap();
    let options = DispatcherOptions::default().poll_interval(NEVER);
    let dispatcher = bus.dispatcher(options).await.unwrap();
    receive_all(&store, &bus, &dispatcher).await;
}

/// The producer, the notifier and the dispatcher are in three processes, which use doorbells and watches; again, no poll could make up for
/// a lost wake-up.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_wake_up_is_lost_between_processes() {
    let store = Store::memory();
    let producing = narrow_bus(&store).await;
    let folding = narrow_bus(&store).await;
    let _notifier = joined(&folding).await.notifier(common::unpolled()).await.unwrap();
    let options = DispatcherOptions::default().poll_interval(NEVER);
    let dispatching = narrow_bus(&store).await;
    let dispatcher = dispatching.dispatcher(options).await.unwrap();
    receive_all(&store, &producing, &dispatcher).await;
}

/// Records runs of events, sometimes with pauses in between, and waits for the last event of each run.
async fn receive_all(store: &Store, bus: &Bus, dispatcher: &Dispatcher) {
    let mut random = common::dice();
    let mut all = dispatcher.subscribe(Filter::all()).stream();
    let mut exact = dispatcher.subscribe(Filter::name("a").unwrap()).stream();
    let mut recorded = 0;
    for _ in 0..120 {
        for _ in 0..random.u8(1..4) {
            record(store, bus, &db("a", 1), [0, 0, 1, 0]).await;
            recorded += 1;
            for _ in 0..random.u16(..2_000) {
                std::hint::spin_loop();
            }
        }
        for subscription in [&mut all, &mut exact] {
            while next(subscription).await.notification().totals.updated < recorded {}
        }
        if random.u8(..4) == 0 {
            tokio::time::sleep(Duration::from_millis(random.u64(..15))).await;
        }
    }
}

/// On real threads, subscriptions at a sequence race with the tail, which publishes the rows after it: they are made without a pause until
/// the tail has passed the sequence.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_comes_while_a_subscription_is_made_is_delivered() {
    let node = SubscriberFixture::with(DispatcherOptions::default()).await;
    let a = db("a", 1);
    node.event(&a, EventKind::Created).await;
    for round in 0..80 {
        let known = node.dispatcher.position();
        let filter = if round % 4 == 0 { Filter::all() } else { Filter::name("a").unwrap() };
        record(&node.store, &node.bus, &a, [0, 0, 1, 0]).await;
        let mut subscriptions = Vec::new();
        while node.dispatcher.position() == known && subscriptions.len() < 5_000 {
            let since = Start::from(known);
            subscriptions.push(node.dispatcher.subscribe(filter.clone()).since(since).stream());
        }
        for subscription in &mut subscriptions {
            let delivery = next(subscription).await;
            assert!(delivery.sequence() > known);
            assert_eq!(kinds(&delivery), [EventKind::Updated]);
        }
        until("the tail", async || node.dispatcher.position() > known).await;
    }
}
