//! Deletions through recreation reach every subscriber that may have known the name, whatever its filter, start, restart, pace and
//! receiver. Subscribers know names, not instances.

use std::time::Duration;

use notibus::{
    Cursor, DispatcherOptions, EventKind, Filter,
    cursor::Start,
    dispatcher::{Item, Subscription},
};

use crate::{
    common::{self, db, forgetful, joined, next_news, until, within},
    fixture::{SubscriberFixture, drain, kinds, name, next, ready},
};

/// Returns filters that want the database `a`, one for each way of matching.
fn filters() -> Vec<Filter> {
    let only_a = || Filter::name("a").unwrap();
    vec![
        only_a(),
        Filter::names(["a", "z"].map(|name| name.parse().unwrap())).unwrap(),
        Filter::prefix("a"),
        Filter::suffix("a"),
        Filter::glob("[a]").unwrap(),
        Filter::any([only_a(), Filter::name("y").unwrap()]).unwrap(),
        Filter::any([only_a(), Filter::prefix("x")]).unwrap(),
        Filter::predicate(|row| row.name.as_str() == "a"),
        Filter::all(),
    ]
}

/// Makes a fixture whose subscribers read the feed and the ring row by row.
async fn by_rows() -> SubscriberFixture {
    SubscriberFixture::with(DispatcherOptions::default().catch_up_rows_max(1)).await
}

/// Deletes the instance `old` of `a` and creates the next one, in one fold.
async fn recreate(fixture: &SubscriberFixture, old: u8) {
    let (old, new) = (db("a", old), db("a", old + 1));
    let producer = fixture.bus.producer();
    fixture
        .store
        .run(async |tx| {
            producer.deleted(&tx, &old);
            producer.created(&tx, &new);
            Ok(())
        })
        .await
        .unwrap();
    let is_there = async || common::row(&fixture.bus, &new).await.is_some();
    until("the fold", is_there).await;
    let row = common::row(&fixture.bus, &new).await.unwrap();
    until("the tail", async || fixture.dispatcher.position() >= row.sequence).await;
}

/// Removes all tombstones.
async fn forget(fixture: &SubscriberFixture) {
    let dropped = fixture.bus.stats().tombstones_dropped;
    let janitor = joined(&fixture.bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstone's end", async || fixture.bus.stats().tombstones_dropped > dropped).await;
    janitor.shutdown().await.unwrap();
}

/// Receives until the first scan is complete, and returns the delivered names.
async fn sync(subscription: &mut Subscription) -> Vec<String> {
    use tokio_stream::StreamExt;
    let mut found = Vec::new();
    loop {
        match within("the first scan", subscription.next()).await.unwrap() {
            Item::Delivery(delivery) => found.push(name(&delivery).to_owned()),
            Item::CaughtUp { at } => {
                assert_eq!(subscription.cursor(), Cursor::from(at));
                return found;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Regression: an unwanted row in the first scan of a subscriber of exact names that began at zero left the slot of the name at zero, which
/// meant "knows nothing", so the subscriber never got a deletion through recreation.
#[tokio::test(start_paused = true)]
async fn a_deletion_by_recreation_reaches_a_subscriber_of_deletions_only() {
    for filter in filters() {
        let fixture = SubscriberFixture::new().await;
        fixture.event(&db("a", 1), EventKind::Created).await;
        let only_deletions = filter.clone().kinds(EventKind::Deleted.into()).unwrap();
        let mut subscription = fixture.dispatcher.subscribe(only_deletions).since(Cursor::BEGINNING).stream();
        assert_eq!(sync(&mut subscription).await.len(), 0, "{filter:?}");
        recreate(&fixture, 1).await;
        assert!(kinds(&next(&mut subscription).await).contains(&EventKind::Deleted), "{filter:?}");
    }
}

fn since(fixture: &SubscriberFixture, filter: &Filter, cursor: Cursor) -> Subscription {
    fixture.dispatcher.subscribe(filter.clone()).since(cursor).stream()
}

/// Makes a fixture whose subscriber stopped after the first of three databases, `a`. Also returns the subscriber's cursor.
async fn stopped_within_the_first_scan(filter: &Filter) -> (SubscriberFixture, Cursor) {
    let fixture = by_rows().await;
    fixture.events(&["a", "b", "c"], EventKind::Created).await;
    let mut subscription = since(&fixture, filter, Cursor::BEGINNING);
    assert_eq!(name(&next(&mut subscription).await), "a");
    let cursor = subscription.cursor();
    (fixture, cursor)
}

/// Regression: a subscriber that was restarted during its first scan had saved zero as its cursor, so it never got the deletion of
/// databases that had been delivered to it and were created again.
#[tokio::test(start_paused = true)]
async fn a_restart_within_the_first_scan_misses_no_deletion() {
    for filter in filters() {
        let (fixture, cursor) = stopped_within_the_first_scan(&filter).await;
        recreate(&fixture, 1).await;
        let mut second = since(&fixture, &filter, cursor);
        let deliveries = drain(&mut second).await;
        let of_a = deliveries.iter().find(|delivery| name(delivery) == "a").unwrap();
        assert_eq!(kinds(of_a), [EventKind::Deleted, EventKind::Created], "{filter:?}");
    }
}

/// Regression: a subscriber restarted during its first scan did not expire when a tombstone was already dropped, so it got nothing at all.
#[tokio::test(start_paused = true)]
async fn a_restart_within_the_first_scan_expires_if_deletions_can_have_gone() {
    for filter in filters() {
        let (fixture, cursor) = stopped_within_the_first_scan(&filter).await;
        fixture.event(&db("a", 1), EventKind::Deleted).await;
        forget(&fixture).await;
        let mut second = since(&fixture, &filter, cursor);
        let first = within("it hears of it", next_news(&mut second)).await.unwrap();
        assert!(matches!(first, Item::Expired { .. }), "{filter:?}: {first:?}");
        let again = drain(&mut second).await;
        assert!(again.iter().all(|delivery| name(delivery) != "a"), "it is gone");
    }
}

/// Regression: a subscriber whose filter was replaced during its first scan lost the same deletions.
#[tokio::test(start_paused = true)]
async fn a_filter_replaced_within_the_first_scan_misses_no_deletion() {
    for filter in filters() {
        let fixture = by_rows().await;
        fixture.events(&["a", "b", "c"], EventKind::Created).await;
        let mut subscription = fixture.dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).stream();
        assert_eq!(name(&next(&mut subscription).await), "a");
        subscription = subscription.replace(filter.clone()).stream();
        recreate(&fixture, 1).await;
        let deliveries = drain(&mut subscription).await;
        let of_a = deliveries.iter().find(|delivery| name(delivery) == "a").unwrap();
        assert_eq!(kinds(of_a), [EventKind::Deleted, EventKind::Created], "{filter:?}");
    }
}

/// A subscriber that widens its filter during its first scan gets everything: rows that both filters want are delivered again.
#[tokio::test(start_paused = true)]
async fn a_filter_that_is_widened_within_a_first_scan_finds_everything() {
    let fixture = by_rows().await;
    fixture.events(&["b1", "a1", "b2", "a2"], EventKind::Created).await;
    let mut subscription =
        fixture.dispatcher.subscribe(Filter::prefix("a")).since(Cursor::BEGINNING).stream();
    assert_eq!(name(&next(&mut subscription).await), "a1");
    subscription = subscription.replace(Filter::all()).stream();
    let names: Vec<_> = drain(&mut subscription).await.iter().map(|d| name(d).to_owned()).collect();
    assert_eq!(names, ["b1", "a1", "b2", "a2"]);
}

/// Regression: a round replaced a waiting tombstone that the janitor had already dropped with a newer row, which did not show the deletion,
/// so the deletion was never delivered.
#[tokio::test(start_paused = true)]
async fn a_round_forgets_no_tombstone_that_the_janitor_has_dropped() {
    for filter in filters() {
        let fixture = SubscriberFixture::new().await;
        fixture.event(&db("a", 1), EventKind::Created).await;
        let hour = Duration::from_hours(1);
        let subscribe = fixture.dispatcher.subscribe(filter.clone()).since(Cursor::BEGINNING);
        let mut paced = subscribe.every(hour).unwrap().stream();
        assert_eq!(kinds(&next(&mut paced).await), [EventKind::Created]);
        fixture.event(&db("a", 1), EventKind::Deleted).await;
        forget(&fixture).await;
        fixture.event(&db("a", 2), EventKind::Created).await;
        assert!(
            common::row(&fixture.bus, &db("a", 2)).await.unwrap().replaced.is_none(),
            "it says nothing of it"
        );
        assert!(ready(&mut paced).is_empty(), "it is not time yet");
        tokio::time::sleep(hour).await;
        let delivered: Vec<_> =
            ready(&mut paced).into_iter().flat_map(|item| kinds(&item.into_delivery().unwrap())).collect();
        assert_eq!(delivered, [EventKind::Deleted, EventKind::Created], "{filter:?}");
    }
}

/// A subscriber without a pace that takes nothing for longer than the retention does not miss a deletion whose tombstone was dropped.
#[tokio::test(start_paused = true)]
async fn a_subscriber_that_takes_nothing_for_long_misses_no_deletion() {
    for filter in filters() {
        let fixture = SubscriberFixture::new().await;
        fixture.event(&db("a", 1), EventKind::Created).await;
        let mut slow = fixture.dispatcher.subscribe(filter.clone()).since(Start::Now).stream();
        fixture.event(&db("a", 1), EventKind::Deleted).await;
        forget(&fixture).await;
        fixture.event(&db("a", 2), EventKind::Created).await;
        let delivered: Vec<_> = drain(&mut slow).await.iter().flat_map(kinds).collect();
        assert_eq!(delivered, [EventKind::Deleted, EventKind::Created], "{filter:?}");
    }
}

/// A name that several instances had between two deliveries is delivered as deleted and created once: whichever instance the subscriber
/// knew is gone.
#[tokio::test(start_paused = true)]
async fn several_recreations_are_one_deletion_of_the_name() {
    for filter in filters() {
        // The ring holds one row, so newer rows replace those in between.
        let fixture = SubscriberFixture::with(DispatcherOptions::default().ring_rows_max(1)).await;
        fixture.event(&db("a", 1), EventKind::Created).await;
        let mut subscription = fixture.dispatcher.subscribe(filter.clone()).stream();
        assert!(ready(&mut subscription).is_empty());
        recreate(&fixture, 1).await;
        recreate(&fixture, 2).await;
        fixture.event(&db("b", 1), EventKind::Created).await;
        let deliveries = drain(&mut subscription).await;
        let of_a: Vec<_> = deliveries.iter().filter(|delivery| name(delivery) == "a").collect();
        assert_eq!(of_a.len(), 1, "{filter:?}: {of_a:?}");
        assert_eq!(kinds(of_a[0]), [EventKind::Deleted, EventKind::Created]);
        assert_eq!(of_a[0].notification().instance, db("a", 3).instance);
    }
}

/// Even in the middle of a first scan, the text of a cursor has all of its parts.
#[tokio::test(start_paused = true)]
async fn a_cursor_in_the_middle_of_a_scan_is_kept_whole() {
    let fixture = by_rows().await;
    fixture.events(&["a", "b"], EventKind::Created).await;
    let mut subscription = since(&fixture, &Filter::all(), Cursor::BEGINNING);
    let delivery = next(&mut subscription).await;
    let cursor = subscription.cursor();
    assert_eq!(cursor.to_string().parse::<Cursor>().unwrap(), cursor);
    assert!(cursor.knew_nothing() && cursor.began().is_some());
    assert_eq!(cursor.position(), delivery.sequence());
}
