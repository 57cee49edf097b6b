//! The guarantees that the tests of CouchDB's `couch_event_server` check, in the terms of this library.

use notibus::{Cursor, EventKind, Filter};
use tokio_stream::StreamExt;

use crate::{
    common::{db, within},
    fixture::{SubscriberFixture, drain, kinds, name, names, next, ready},
};

#[tokio::test(start_paused = true)]
async fn a_subscriber_is_registered_and_unregistered() {
    let fixture = SubscriberFixture::new().await;
    let a = "a".parse().unwrap();
    let subscription = fixture.dispatcher.subscribe(Filter::name("a").unwrap()).stream();
    assert_eq!((fixture.dispatcher.subscribers(), fixture.dispatcher.subscribers_of(&a)), (1, 1));
    let id = subscription.id();
    fixture.dispatcher.unsubscribe(id).unwrap();
    drop(subscription);
    assert_eq!((fixture.dispatcher.subscribers(), fixture.dispatcher.subscribers_of(&a)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn to_unregister_a_stranger_is_reported() {
    let fixture = SubscriberFixture::new().await;
    let subscription = fixture.dispatcher.subscribe(Filter::all()).stream();
    let id = subscription.id();
    drop(subscription);
    let refused = fixture.dispatcher.unsubscribe(id);
    assert!(matches!(refused, Err(notibus::Error::NoSubscriber { .. })), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_is_ended_by_its_id_gets_nothing_more() {
    let fixture = SubscriberFixture::new().await;
    for filter in [Filter::all(), Filter::name("a").unwrap()] {
        let mut waits = fixture.dispatcher.subscribe(filter.clone()).stream();
        let mut has_more = fixture.dispatcher.subscribe(filter).stream();
        let ids = [waits.id(), has_more.id()];
        let waits = tokio::spawn(async move { waits.next().await.is_none() });
        tokio::task::yield_now().await;
        for id in ids {
            fixture.dispatcher.unsubscribe(id).unwrap();
        }
        assert!(within("the end of one that waits", waits).await.unwrap());
        fixture.event(&db("a", 1), EventKind::Updated).await;
        assert!(within("the end of one that has more", has_more.next()).await.is_none());
        drop(has_more);
        assert_eq!(fixture.dispatcher.subscribers(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_dies_is_unregistered() {
    let fixture = SubscriberFixture::new().await;
    let a = "a".parse().unwrap();
    let mut subscription = fixture.dispatcher.subscribe(Filter::name("a").unwrap()).stream();
    let task = tokio::spawn(async move {
        subscription.next().await;
        panic!("it dies");
    });
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert!(within("its death", task).await.unwrap_err().is_panic());
    assert_eq!((fixture.dispatcher.subscribers(), fixture.dispatcher.subscribers_of(&a)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn only_interested_subscribers_get_deliveries() {
    let fixture = SubscriberFixture::new().await;
    let mut a = fixture.dispatcher.subscribe(Filter::name("a").unwrap()).stream();
    let mut all = fixture.dispatcher.subscribe(Filter::all()).stream();
    fixture.events(&["b", "a"], EventKind::Updated).await;
    assert_eq!(names(&drain(&mut a).await), ["a"].into());
    assert_eq!(names(&drain(&mut all).await), ["a", "b"].into());
}

/// `couch_event` delivers two copies to a process that registered for a name and for everything. Here two subscriptions get one copy each,
/// and one subscription with a set of filters learns which of them want a delivery.
#[tokio::test(start_paused = true)]
async fn a_set_says_which_of_its_filters_want_a_delivery() {
    let fixture = SubscriberFixture::new().await;
    let both = Filter::any([Filter::name("a").unwrap(), Filter::all()]).unwrap();
    let mut set = fixture.dispatcher.subscribe(both).stream();
    let mut single = fixture.dispatcher.subscribe(Filter::all()).stream();
    fixture.events(&["a", "b"], EventKind::Created).await;
    let wanted: Vec<_> = drain(&mut set).await.iter().map(|d| (name(d).to_owned(), d.wanted_by())).collect();
    assert_eq!(wanted, [("a".to_owned(), vec![0, 1]), ("b".to_owned(), vec![1])]);
    assert_eq!(next(&mut single).await.wanted_by(), [0]);
}

/// Since its registry was rewritten, CouchDB still delivers databases for which a listener registered before, and never forgets a
/// registration, even after the listener has died.
#[tokio::test(start_paused = true)]
async fn to_register_again_replaces_what_was_wanted_before() {
    let [a, b, c]: [Filter; 3] = ["a", "b", "c"].map(|name| Filter::name(name).unwrap());
    let (prefix_b, all) = (Filter::prefix("b"), Filter::all());
    let cases = [(a.clone(), b.clone()), (a.clone(), prefix_b.clone()), (all.clone(), b), (all, prefix_b)];
    for (before, after) in cases {
        let fixture = SubscriberFixture::new().await;
        let name_of = |name: &str| name.parse().unwrap();
        let mut subscription = fixture.dispatcher.subscribe(before.clone()).stream();
        fixture.event(&db("a", 1), EventKind::Created).await;
        assert_eq!(names(&drain(&mut subscription).await), ["a"].into());
        subscription = subscription.replace(after.clone()).stream();
        assert_eq!(fixture.dispatcher.subscribers(), 1);
        assert_eq!(fixture.dispatcher.subscribers_of(&name_of("a")), 0, "no stale interest is left");
        fixture.events(&["a", "b"], EventKind::Updated).await;
        let delivered = drain(&mut subscription).await;
        assert_eq!(names(&delivered), ["b"].into(), "{before:?} → {after:?}");
        assert_eq!(delivered.len(), 1);
        subscription = subscription.replace(c.clone()).stream();
        drop(subscription);
        for name in ["a", "b", "c"] {
            assert_eq!(fixture.dispatcher.subscribers_of(&name_of(name)), 0, "nor after its death");
        }
    }
}

/// Rows that both the old and the new filter want are neither missed nor delivered twice, whatever the position of the subscriber.
#[tokio::test(start_paused = true)]
async fn rows_that_both_filters_want_are_delivered_exactly_once() {
    let names = |names: &[&str]| Filter::names(names.iter().map(|name| name.parse().unwrap())).unwrap();
    let cases =
        [(Filter::prefix("a"), Filter::all()), (names(&["a1", "a2", "a3"]), names(&["a1", "a2", "a3", "b"]))];
    for (before, after) in cases {
        for taken in 0..4 {
            let fixture = SubscriberFixture::new().await;
            let mut subscription = fixture.dispatcher.subscribe(before.clone()).stream();
            fixture.events(&["b", "a1", "a2", "a3"], EventKind::Created).await;
            let mut delivered = Vec::new();
            for _ in 0..taken {
                delivered.push(next(&mut subscription).await);
            }
            subscription = subscription.replace(after.clone()).stream();
            fixture.event(&db("a1", 1), EventKind::Updated).await;
            delivered.extend(drain(&mut subscription).await);
            for name in ["a1", "a2", "a3"] {
                let of: Vec<_> =
                    delivered.iter().filter(|d| crate::fixture::name(d) == name).flat_map(kinds).collect();
                let created = of.iter().filter(|kind| **kind == EventKind::Created).count();
                assert_eq!(created, 1, "{name} after {taken}: {of:?} {before:?}");
                let updated = of.iter().filter(|kind| **kind == EventKind::Updated).count();
                assert_eq!(updated, usize::from(name == "a1"), "{name} after {taken}: {of:?}");
            }
        }
    }
}

/// A dispatcher also runs without subscribers: an event without a subscriber is not a failure.
#[tokio::test(start_paused = true)]
async fn events_without_subscribers_are_fine() {
    let fixture = SubscriberFixture::new().await;
    let position = fixture.event(&db("a", 1), EventKind::Created).await;
    let since = Cursor::BEGINNING;
    let mut late = fixture.dispatcher.subscribe(Filter::all()).since(since).stream();
    assert_eq!(next(&mut late).await.sequence(), position);
    assert!(ready(&mut late).is_empty());
}

/// Regression: a change that the old filter had rejected for its design document counted as delivered, so the new filter missed it.
#[tokio::test(start_paused = true)]
async fn a_row_rejected_for_its_design_document_is_delivered_by_the_new_filter() {
    let fixture = SubscriberFixture::new().await;
    fixture.events(&["a", "b", "c"], EventKind::Created).await;
    let ddocs = Filter::prefix("").kinds(EventKind::DdocUpdated.into()).unwrap();
    let auth = ddocs.clone().ddocs(["_design/auth".parse().unwrap()]).unwrap();
    let mut subscription = fixture.dispatcher.subscribe(auth).stream();
    let producer = fixture.bus.producer();
    let [other, auth] = ["_design/other", "_design/auth"].map(|id| id.parse().unwrap());
    // All changes are in one batch, so that the filter is replaced in the middle of it.
    let write = async |tx| {
        for (name, id) in [("a", &other), ("b", &auth), ("c", &auth)] {
            producer.ddoc_updated(&tx, &db(name, 1), Some(id));
        }
        Ok(())
    };
    fixture.store.run(write).await.unwrap();
    let mut delivered = vec![next(&mut subscription).await];
    subscription = subscription.replace(ddocs).stream();
    delivered.extend(drain(&mut subscription).await);
    assert_eq!(names(&delivered), ["a", "b", "c"].into());
}
