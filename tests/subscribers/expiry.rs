//! A durable cursor that has expired expires again until its next scan has begun: its subscriber may have forgotten everything and ended.

use std::time::Duration;

use notibus::{
    Cursor, Dispatcher, DispatcherOptions, EventKind, Filter, JanitorOptions, Sequence,
    cursor::NamedCursor,
    dispatcher::{Interruption, Subscribe, Subscription},
    store::{
        StoreError,
        testing::{CommitFault, Faults, Gate, Operation},
    },
};
use tokio_stream::StreamExt;

use crate::{
    common::{db, narrow_bus, until, within},
    fixture::{SubscriberFixture, forget, forget_by, name, next},
    listeners::Quiet,
};

/// A dispatcher that reads all from the store.
fn without_ring() -> DispatcherOptions {
    DispatcherOptions::default().catch_up_rows_max(1).ring_rows_max(1)
}

/// A subscriber that saves only what it must.
fn subscribe(dispatcher: &Dispatcher, known: Sequence) -> Subscribe {
    dispatcher.subscribe(Filter::all()).since(known).save_every(Duration::MAX).unwrap()
}

/// A durable subscriber has received `Expired`, and died. The ring of the fixture's dispatcher has all rows since its cursor.
async fn expired() -> (SubscriberFixture, Dispatcher, NamedCursor, Sequence) {
    let fixture = SubscriberFixture::new().await;
    let known = fixture.event(&db("x", 1), EventKind::Created).await;
    let without_ring = fixture.bus.dispatcher(without_ring()).await.unwrap();
    let cursor = fixture.bus.cursor("c").unwrap();
    drop(subscribe(&without_ring, known).durable(&cursor).await.unwrap().stream());
    fixture.events(&["a", "b"], EventKind::Created).await;
    fixture.events(&["b"], EventKind::Deleted).await;
    fixture.events(&["c"], EventKind::Created).await;
    forget(&fixture.bus).await;
    let mut before = subscribe(&without_ring, known).durable(&cursor).await.unwrap().stream();
    let item = within("the end", before.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
    drop(before);
    (fixture, without_ring, cursor, known)
}

/// Regression: a cursor that had expired was compared with the horizon when it was opened, and this was forgotten when the filter was replaced
/// before the first read. Now it is saved that a subscriber has expired, before the subscriber gets `Expired`.
#[tokio::test(start_paused = true)]
async fn a_cursor_that_has_expired_expires_again_although_its_filter_is_replaced() {
    let (fixture, _without_ring, cursor, known) = expired().await;
    let mut stream = subscribe(&fixture.dispatcher, known).durable(&cursor).await.unwrap().stream();
    stream.replace(Filter::all());
    let item = within("the end again", stream.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
}

/// Regression: the same, for one that skips, and whose first read failed: it skipped what it should have expired for.
#[tokio::test(start_paused = true)]
async fn a_cursor_that_has_expired_expires_again_although_its_first_read_fails() {
    let fixture = SubscriberFixture::new().await;
    let known = fixture.event(&db("x", 1), EventKind::Created).await;
    let faults = Faults::new(&fixture.store);
    let failing = narrow_bus(&faults.database()).await;
    let without_ring = failing.dispatcher(without_ring()).await.unwrap();
    let cursor = failing.cursor("c").unwrap();
    drop(subscribe(&without_ring, known).durable(&cursor).await.unwrap().stream());
    fixture.events(&["a", "b"], EventKind::Created).await;
    fixture.events(&["b"], EventKind::Deleted).await;
    fixture.events(&["c"], EventKind::Created).await;
    forget(&fixture.bus).await;
    until("the tail", async || without_ring.position() >= fixture.dispatcher.position()).await;
    let mut before = subscribe(&without_ring, known).durable(&cursor).await.unwrap().stream();
    let item = within("the end", before.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
    drop(before);
    for fails in [false, true] {
        let subscribe = subscribe(&without_ring, known).skip_when_lagging();
        let subscribe = subscribe.durable(&cursor).await.unwrap();
        if fails {
            faults.plan_reads(|read| {
                let is_row = matches!(read, Operation::Get { .. } | Operation::GetRange { .. });
                is_row.then_some(StoreError::IO_ERROR)
            });
        }
        let mut stream = subscribe.stream();
        let mut item = within("an item", stream.next()).await.unwrap();
        if fails {
            assert!(matches!(item, Err(Interruption::Failed(_))), "{item:?}");
            faults.heal();
            while matches!(item, Err(Interruption::Failed(_))) {
                item = within("an item", stream.next()).await.unwrap();
            }
        }
        assert!(matches!(item, Err(Interruption::Expired { .. })), "fails: {fails}, {item:?}");
    }
}

/// Regression: the horizon moved, and the subscriber before got `Expired`, while the next one opened the cursor and had already
/// compared it with the horizon.
#[tokio::test(start_paused = true)]
async fn a_cursor_that_expires_while_it_is_opened_expires_again() {
    let fixture = SubscriberFixture::new().await;
    let faults = Faults::new(&fixture.store);
    let other = narrow_bus(&faults.database()).await;
    let next = other.dispatcher(DispatcherOptions::default()).await.unwrap();
    let known = fixture.event(&db("x", 1), EventKind::Created).await;
    let without_ring = fixture.bus.dispatcher(without_ring()).await.unwrap();
    let mut before =
        subscribe(&without_ring, known).durable(&fixture.bus.cursor("c").unwrap()).await.unwrap().stream();
    fixture.events(&["a", "b"], EventKind::Created).await;
    fixture.events(&["b"], EventKind::Deleted).await;
    fixture.events(&["c"], EventKind::Created).await;
    until("the tail", async || next.position() >= fixture.dispatcher.position()).await;
    let gate = Gate::default();
    faults.script_commits([CommitFault::Hold(gate.clone())]);
    let (subscribe, cursor) = (subscribe(&next, known), other.cursor("c").unwrap());
    let opening = tokio::spawn(async move { subscribe.durable(&cursor).await });
    within("the gate", gate.reached()).await;
    let soon = JanitorOptions::default().interval(Duration::from_millis(100));
    forget_by(&fixture.bus, soon.tombstone_retention(Duration::from_secs(1))).await;
    let item = within("the end", before.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
    drop(before);
    gate.open();
    let mut stream = opening.await.unwrap().unwrap().stream();
    let item = within("the end again", stream.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
}

/// Regression: a stream can be made outside of a runtime, but that of a cursor that had expired began to read at once, and panicked.
#[test]
fn the_stream_of_an_expired_cursor_is_made_outside_of_a_runtime() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let (_fixture, _without_ring, good, expired) = runtime.block_on(async {
        let (fixture, without_ring, cursor, known) = expired().await;
        let other = fixture.bus.cursor("other").unwrap();
        let good = fixture.dispatcher.subscribe(Filter::all()).durable(&other).await.unwrap();
        let expired = subscribe(&fixture.dispatcher, known).durable(&cursor).await.unwrap();
        (fixture, without_ring, good, expired)
    });
    drop(good.stream());
    let mut stream = expired.stream();
    let item = runtime.block_on(stream.next()).unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
}

/// The filter of a durable subscriber was replaced within a reading, which set its cursor back. It got `Expired`,
/// and forgot everything; when it was started again, it began at the old saved cursor, and never got what it had forgotten.
#[tokio::test(start_paused = true)]
async fn a_reader_that_was_set_back_and_expires_gets_expired_again() {
    let options = DispatcherOptions::default().catch_up_rows_max(1).ring_rows_max(1);
    let fixture = SubscriberFixture::with(options).await;
    let known = fixture.event(&db("x", 1), EventKind::Created).await;
    let cursor = fixture.bus.cursor("c").unwrap();
    let durable = async || {
        let subscribe = fixture.dispatcher.subscribe(Filter::all()).since(known);
        subscribe.save_every(Duration::MAX).unwrap().durable(&cursor).await.unwrap().stream()
    };
    fixture.events(&["a", "b"], EventKind::Created).await;
    fixture.events(&["b"], EventKind::Deleted).await;
    fixture.events(&["c"], EventKind::Created).await;
    let mut stream = durable().await;
    assert_eq!([name(&next(&mut stream).await), name(&next(&mut stream).await)], ["a", "b"]);
    stream.checkpoint().await.unwrap();
    forget(&fixture.bus).await;
    stream.replace(Filter::all());
    let item = within("the end", stream.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
    drop(stream);
    let item = within("the end again", durable().await.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
}

/// Regression: the same, but the ring still had all rows since the saved cursor. So the subscriber that was made again went on there, without
/// `Expired`, and never got what the one before had forgotten. It must not skip it either.
#[tokio::test(start_paused = true)]
async fn a_cursor_that_has_expired_expires_again_though_the_ring_has_its_rows() {
    for skips in [false, true] {
        let (fixture, _, cursor, known) = expired().await;
        let again = subscribe(&fixture.dispatcher, known);
        let again = if skips { again.skip_when_lagging() } else { again };
        let item =
            within("the end again", again.durable(&cursor).await.unwrap().stream().next()).await.unwrap();
        assert!(matches!(item, Err(Interruption::Expired { .. })), "skips: {skips}, {item:?}");
    }
}

/// Regression: one that was to begin with nothing again, and was saved before its first page, counted as expired: the next one that opened
/// the cursor got `Expired` without a reason.
#[tokio::test(start_paused = true)]
async fn one_that_begins_with_nothing_has_not_expired() {
    for is_listener in [false, true] {
        let fixture = SubscriberFixture::new().await;
        fixture.events(&["a"], EventKind::Created).await;
        let cursor = fixture.bus.cursor("c").unwrap();
        let durable = async || fixture.dispatcher.subscribe(Filter::all()).durable(&cursor).await.unwrap();
        let again = durable().await.since(Cursor::NOTHING);
        let saved = cursor.read().await.unwrap();
        if is_listener {
            again.listener(|| Quiet).start().stop().await;
        } else {
            again.stream().checkpoint().await.unwrap();
        }
        assert_eq!(cursor.read().await.unwrap(), saved, "listener: {is_listener}");
        let mut stream = durable().await.stream();
        fixture.events(&["b"], EventKind::Created).await;
        assert_eq!(name(&next(&mut stream).await), "b", "listener: {is_listener}");
    }
}

/// A durable subscriber that is about to expire, its dispatcher, and the faults of their store.
async fn expiring(fixture: &SubscriberFixture) -> (Faults, Dispatcher, Subscription) {
    let faults = Faults::new(&fixture.store);
    let failing = narrow_bus(&faults.database()).await;
    let known = fixture.event(&db("x", 1), EventKind::Created).await;
    let without_ring = failing.dispatcher(without_ring()).await.unwrap();
    let cursor = failing.cursor("c").unwrap();
    let stream = subscribe(&without_ring, known).durable(&cursor).await.unwrap().stream();
    fixture.events(&["a", "b"], EventKind::Created).await;
    fixture.events(&["b"], EventKind::Deleted).await;
    fixture.events(&["c"], EventKind::Created).await;
    forget(&fixture.bus).await;
    until("the tail", async || without_ring.position() >= fixture.dispatcher.position()).await;
    (faults, without_ring, stream)
}

/// Regression: one that had expired waited in silence while that could not be saved.
#[tokio::test(start_paused = true)]
async fn one_that_has_expired_learns_that_this_cannot_be_saved() {
    let fixture = SubscriberFixture::new().await;
    let (faults, _dispatcher, mut stream) = expiring(&fixture).await;
    faults.plan_commits(|_| Some(CommitFault::Before(StoreError::IO_ERROR)));
    for _ in 0..2 {
        let item = within("the failure", stream.next()).await.unwrap();
        assert!(matches!(item, Err(Interruption::Failed(_))), "{item:?}");
    }
    faults.heal();
    let item = within("the end", stream.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
}

/// Regression: its explicit save took over the one that was under way, and failed. Without a timer nothing was saved any more, and the
/// subscriber waited forever.
#[tokio::test(start_paused = true)]
async fn one_that_has_expired_saves_again_after_its_explicit_save_has_failed() {
    let fixture = SubscriberFixture::new().await;
    let (faults, _dispatcher, mut stream) = expiring(&fixture).await;
    let gate = Gate::default();
    faults.script_commits([CommitFault::Hold(gate.clone())]);
    tokio::select! {
        biased;
        item = stream.next() => panic!("{item:?}"),
        () = gate.reached() => {}
    }
    // Another filter has to be saved as well.
    stream.replace(Filter::name("c").unwrap());
    faults.plan_commits(|_| Some(CommitFault::Before(StoreError::IO_ERROR)));
    gate.open();
    within("the failure", stream.checkpoint()).await.unwrap_err();
    faults.heal();
    let item = within("the end", stream.next()).await.unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
}

/// Regression: an older save was under way when a subscriber expired, and up to a second passed until its expiry was saved.
#[tokio::test(start_paused = true)]
async fn an_expiry_is_saved_at_once_although_a_save_is_under_way() {
    let fixture = SubscriberFixture::new().await;
    let faults = Faults::new(&fixture.store);
    let failing = narrow_bus(&faults.database()).await;
    let known = fixture.event(&db("x", 1), EventKind::Created).await;
    let without_ring = failing.dispatcher(without_ring()).await.unwrap();
    let cursor = failing.cursor("c").unwrap();
    let durable = without_ring.subscribe(Filter::all()).since(known).durable(&cursor).await.unwrap();
    let mut stream = durable.stream();
    fixture.event(&db("a", 1), EventKind::Created).await;
    next(&mut stream).await;
    fixture.events(&["b"], EventKind::Created).await;
    fixture.events(&["b"], EventKind::Deleted).await;
    fixture.events(&["c"], EventKind::Created).await;
    forget(&fixture.bus).await;
    until("the tail", async || without_ring.position() >= fixture.dispatcher.position()).await;
    let gate = Gate::default();
    faults.script_commits([CommitFault::Hold(gate.clone())]);
    let item = tokio::spawn(async move { stream.next().await });
    within("the gate", gate.reached()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let opened = tokio::time::Instant::now();
    gate.open();
    let item = within("the end", item).await.unwrap().unwrap();
    assert!(matches!(item, Err(Interruption::Expired { .. })), "{item:?}");
    assert_eq!(opened.elapsed(), Duration::ZERO);
}
