//! Sets of filters, filters by design documents, and filters that are refused.

use std::time::Duration;

use notibus::{
    Cursor, Error, EventKind, Filter, Kinds, cursor::Start, dispatcher::RestartPolicy, event::DdocId,
};

use crate::{
    common::{db, joined, narrow_bus, record, row_with, until},
    fixture::{SubscriberFixture, calls, drain, kinds, name, next, ready},
};

/// Returns the ids of the design documents in a delivery.
fn ids(delivery: &notibus::Delivery) -> Vec<String> {
    delivery.ddocs().unwrap().iter().map(|(id, _)| id.to_string()).collect()
}

#[tokio::test]
async fn bad_input_is_refused_when_one_subscribes() {
    let fixture = SubscriberFixture::new().await;
    let dispatcher = &fixture.dispatcher;
    let invalid = |error: Option<Error>| matches!(error, Some(Error::Invalid { .. }));
    assert!(invalid(Filter::glob("a[").err()));
    assert!(invalid(Filter::any([]).err()));
    assert!(invalid(Filter::names([]).err()));
    assert!(invalid(Filter::all().kinds(Kinds::NONE).err()));
    assert!(invalid(Filter::all().ddocs([]).err()));
    let auth: DdocId = "_design/auth".parse().unwrap();
    let by_ddoc = Filter::all().ddocs([auth.clone()]).unwrap();
    assert!(invalid(Filter::any([by_ddoc.clone()]).err()), "a set names them as a whole");
    assert!(invalid(Filter::all().kinds(EventKind::Created.into()).unwrap().ddocs([auth]).err()));
    assert!(invalid(by_ddoc.kinds(EventKind::Created.into()).err()), "in whatever order");
    assert!(invalid(dispatcher.subscribe(Filter::all()).every(Duration::ZERO).err()));
    let policy = RestartPolicy::default;
    for bad in [policy().attempts_max(0), policy().pause_min(Duration::from_mins(1))] {
        let refused = dispatcher.subscribe(Filter::all()).callback(bad, calls(|_| async {}));
        assert!(invalid(refused.err()));
    }
    assert_eq!(dispatcher.subscribers(), 0, "nothing was changed");
}

#[tokio::test(start_paused = true)]
async fn a_set_wants_what_any_of_its_filters_wants() {
    let fixture = SubscriberFixture::new().await;
    let deleted = Filter::all().kinds(EventKind::Deleted.into()).unwrap();
    let set = Filter::any([Filter::suffix("_replicator"), Filter::glob("shop/*").unwrap(), deleted]).unwrap();
    let mut subscription = fixture.dispatcher.subscribe(set).stream();
    fixture.events(&["_replicator", "shop/orders", "other"], EventKind::Created).await;
    fixture.events(&["other"], EventKind::Deleted).await;
    let delivered: Vec<_> = drain(&mut subscription)
        .await
        .iter()
        .map(|d| (name(d).to_owned(), d.wanted_by(), kinds(d)))
        .collect();
    let expected = [
        ("_replicator".to_owned(), vec![0], vec![EventKind::Created]),
        ("shop/orders".to_owned(), vec![1], vec![EventKind::Created]),
        ("other".to_owned(), vec![2], vec![EventKind::Deleted]),
    ];
    assert_eq!(delivered, expected);
}

/// Regression: a set checked the kinds of its filters and its own kinds separately, so it delivered a row if one filter wanted one kind of
/// its news, and the set another. A subscriber of some design documents also got others if the set allowed other news in the row.
#[tokio::test(start_paused = true)]
async fn a_set_wants_no_kind_that_only_the_whole_does() {
    let fixture = SubscriberFixture::new().await;
    for (number, filter) in [Filter::name("a").unwrap(), Filter::prefix("a")].into_iter().enumerate() {
        let a = db("a", number as u8 + 1);
        let set = |kind: EventKind| Filter::any([filter.clone().kinds(kind.into()).unwrap()]).unwrap();
        let updated = set(EventKind::Created).kinds(EventKind::Updated.into()).unwrap();
        let auth = set(EventKind::DdocUpdated).ddocs(["_design/auth".parse().unwrap()]).unwrap();
        let since = Start::from(fixture.dispatcher.position());
        fixture.event(&a, EventKind::Created).await;
        fixture.event(&a, EventKind::Updated).await;
        fixture.ddoc(&a, Some("_design/other")).await;
        for filter in [updated, auth] {
            let mut subscription = fixture.dispatcher.subscribe(filter).since(since).stream();
            assert!(drain(&mut subscription).await.is_empty(), "{subscription:?}");
        }
        fixture.event(&a, EventKind::Deleted).await;
    }
}

#[tokio::test(start_paused = true)]
async fn changed_design_documents_are_listed_on_demand_deleted_ones_too() {
    for filter in [Filter::all(), Filter::name("a").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let a = db("a", 1);
        fixture.event(&a, EventKind::Created).await;
        fixture.ddoc(&a, Some("_design/before")).await;
        let mut asks = fixture.dispatcher.subscribe(filter.clone()).with_ddocs().stream();
        let mut does_not = fixture.dispatcher.subscribe(filter).stream();
        // Deleting a design document is also a change to it: a producer records both in the same way.
        let first = fixture.ddoc(&a, Some("_design/x")).await;
        let delivery = next(&mut asks).await;
        assert_eq!(delivery.ddocs().unwrap(), [("_design/x".parse().unwrap(), first)]);
        assert!(next(&mut does_not).await.ddocs().is_none());
        // Several changes are made, and received late.
        fixture.ddoc(&a, Some("_design/y")).await;
        fixture.event(&a, EventKind::Updated).await;
        fixture.ddoc(&a, Some("_design/x")).await;
        let mut delivered: Vec<_> = drain(&mut asks).await.iter().flat_map(ids).collect();
        delivered.sort_unstable();
        delivered.dedup();
        assert_eq!(delivered, ["_design/x", "_design/y"]);
        fixture.event(&a, EventKind::Updated).await;
        assert_eq!(next(&mut asks).await.ddocs(), Some(&[][..]), "nothing of design documents is new");
        fixture.ddoc(&a, None).await;
        let delivery = next(&mut asks).await;
        assert_eq!((kinds(&delivery), delivery.ddocs()), (vec![EventKind::DdocUpdated], Some(&[][..])));
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_of_one_design_document_does_not_get_others() {
    for filter in [Filter::prefix("a"), Filter::name("a").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let a = db("a", 1);
        let wanted = Kinds::from(EventKind::DdocUpdated) | EventKind::Deleted.into();
        let filter = filter.kinds(wanted).unwrap().ddocs(["_design/auth".parse().unwrap()]).unwrap();
        let mut subscription = fixture.dispatcher.subscribe(filter).stream();
        fixture.event(&a, EventKind::Created).await;
        fixture.ddoc(&a, Some("_design/other")).await;
        fixture.event(&a, EventKind::Updated).await;
        assert!(drain(&mut subscription).await.is_empty());
        fixture.ddoc(&a, Some("_design/auth")).await;
        assert_eq!(ids(&next(&mut subscription).await), ["_design/auth"]);
        fixture.ddoc(&a, Some("_design/other")).await;
        assert!(drain(&mut subscription).await.is_empty());
        fixture.ddoc(&a, None).await;
        assert_eq!(kinds(&next(&mut subscription).await), [EventKind::DdocUpdated], "it may be any");
        fixture.event(&a, EventKind::Deleted).await;
        assert_eq!(kinds(&next(&mut subscription).await), [EventKind::Deleted]);
        assert!(ready(&mut subscription).is_empty());
    }
}

/// Commits changes to design documents in one transaction, and waits until the tail has read them.
async fn fold_together(fixture: &SubscriberFixture, database: &notibus::Db, ids: &[Option<&str>]) {
    let before = fixture.bus.stats().folded.total();
    let producer = fixture.bus.producer();
    let ids: Vec<Option<DdocId>> = ids.iter().map(|id| id.map(|id| id.parse().unwrap())).collect();
    let write = async |tx| {
        for id in &ids {
            producer.ddoc_updated(&tx, database, id.as_ref());
        }
        Ok(())
    };
    fixture.store.run(write).await.unwrap();
    until("a fold", async || fixture.bus.stats().folded.total() > before).await;
    let row = crate::common::row(&fixture.bus, database).await.unwrap();
    until("the tail", async || fixture.dispatcher.position() >= row.sequence).await;
}

/// A change without an id may be to any design document. Regression: changes with an id in the same fold hid it, so subscribers of other
/// design documents got nothing.
#[tokio::test(start_paused = true)]
async fn a_change_without_an_id_reaches_subscribers_of_any_whatever_it_is_folded_with() {
    for filter in [Filter::prefix("a"), Filter::name("a").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let a = db("a", 1);
        fixture.event(&a, EventKind::Created).await;
        let filter = filter.kinds(EventKind::DdocUpdated.into()).unwrap();
        let filter = filter.ddocs(["_design/auth".parse().unwrap()]).unwrap();
        let mut subscription = fixture.dispatcher.subscribe(filter.clone()).stream();
        let start = fixture.dispatcher.position();
        for others in [&["_design/other"][..], &["_design/x", "_design/y", "_design/x"]] {
            let mut ids: Vec<_> = others.iter().map(|id| Some(*id)).collect();
            ids.insert(1, None);
            fold_together(&fixture, &a, &ids).await;
            let delivered = drain(&mut subscription).await;
            assert_eq!(
                delivered.iter().map(kinds).collect::<Vec<_>>(),
                [[EventKind::DdocUpdated]],
                "{others:?}"
            );
            // The change is not delivered again, however often another document changes.
            fold_together(&fixture, &a, &[Some("_design/other"), Some("_design/other")]).await;
            fixture.event(&a, EventKind::Updated).await;
            assert!(drain(&mut subscription).await.is_empty(), "{others:?}");
        }
        // A late subscriber in another process reads one row for all of this, and each cursor gets the news since that cursor.
        let last = fixture.dispatcher.position();
        fold_together(&fixture, &a, &[Some("_design/z")]).await;
        let other = fixture.bus.dispatcher(notibus::DispatcherOptions::default()).await.unwrap();
        let mut late = other.subscribe(filter.clone()).since(Start::from(start)).stream();
        assert_eq!(drain(&mut late).await.len(), 1);
        let mut later = other.subscribe(filter).since(Start::from(last)).stream();
        assert!(drain(&mut later).await.is_empty());
    }
}

/// Only subscribers that ask for design documents read them. After the tail has published a row, other subscribers cost no reads.
#[tokio::test(start_paused = true)]
async fn design_documents_cost_nothing_unless_they_are_asked_for() {
    let store = notibus::store::Store::memory();
    let faults = notibus::store::testing::Faults::new(&store);
    let (folding, bus) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
    let notifier = joined(&folding).await.notifier(crate::common::eager()).await.unwrap();
    let a = db("a", 1);
    record(&store, &folding, &a, [1, 0, 0, 1]).await;
    row_with(&folding, &a, [1, 0, 0, 1]).await;
    notifier.shutdown().await.unwrap();
    let start = folding.feed().now().await.unwrap();
    let fanout = bus.suspended_dispatcher(notibus::DispatcherOptions::default()).await.unwrap();
    let row = folding.feed().newest(&a.name).await.unwrap().unwrap();
    let to = notibus::Sequence::new(
        start.incarnation(),
        notibus::event::Versionstamp::new(start.versionstamp().version() + 1, 0),
        0,
    );
    let row = notibus::Notification { sequence: to, ddoc_updated_at: Some(to), ..row };
    let filters = [Filter::all(), Filter::name("a").unwrap()];
    let mut quiet: Vec<_> = filters.iter().map(|filter| fanout.subscribe(filter.clone()).stream()).collect();
    let mut asks = fanout.subscribe(Filter::all()).with_ddocs().stream();
    fanout.push(vec![row.into()], to).unwrap();
    let before = faults.counts().reads;
    for subscription in &mut quiet {
        assert_eq!(kinds(&next(subscription).await), [EventKind::DdocUpdated]);
    }
    assert_eq!(faults.counts().reads, before);
    assert_eq!(next(&mut asks).await.ddocs(), Some(&[][..]));
    assert!(faults.counts().reads > before);
}

/// Regression: the dispatcher did not look up sets of exact names, so it compared each with the rows of all databases.
#[tokio::test(start_paused = true)]
async fn a_set_of_exact_names_is_looked_up() {
    let options = notibus::DispatcherOptions::default().ring_rows_max(1);
    let fixture = SubscriberFixture::with(options).await;
    let count = |name: &str| fixture.dispatcher.subscribers_of(&name.parse().unwrap());
    let only = |name: &str, kind: EventKind| Filter::name(name).unwrap().kinds(kind.into()).unwrap();
    let inner = Filter::any([Filter::name("b").unwrap(), Filter::name("c").unwrap()]).unwrap();
    let set =
        [only("a", EventKind::Created), only("a", EventKind::Deleted), inner, Filter::name("b").unwrap()];
    let set = Filter::any(set).unwrap();
    let mut subscription = fixture.dispatcher.subscribe(set).skip_when_lagging().stream();
    assert_eq!(["a", "b", "c", "d"].map(count), [1, 1, 1, 0], "once for each of its names");
    // There are more rows than the ring holds, so a subscriber that follows the ring would have to skip some.
    fixture.events(&["d", "a", "e", "b", "f", "g"], EventKind::Created).await;
    fixture.event(&db("a", 1), EventKind::Updated).await;
    fixture.events(&["h", "i"], EventKind::Created).await;
    let delivered: Vec<_> = drain(&mut subscription)
        .await
        .iter()
        .map(|d| (name(d).to_owned(), d.wanted_by(), kinds(d)))
        .collect();
    let expected = [
        ("b".to_owned(), vec![2, 3], vec![EventKind::Created]),
        ("a".to_owned(), vec![0], vec![EventKind::Created, EventKind::Updated]),
    ];
    assert_eq!(delivered, expected);
    fixture.event(&db("a", 1), EventKind::Updated).await;
    assert!(drain(&mut subscription).await.is_empty(), "no filter wants that of it");
    fixture.event(&db("a", 1), EventKind::Deleted).await;
    assert_eq!(next(&mut subscription).await.wanted_by(), [1]);
    // The names are registered again, with and without a set.
    let other = Filter::any([Filter::name("c").unwrap(), Filter::name("d").unwrap()]).unwrap();
    subscription = subscription.replace(other).stream();
    assert_eq!(["a", "b", "c", "d"].map(count), [0, 0, 1, 1], "no stale interest is left");
    fixture.events(&["a", "b", "c", "d"], EventKind::Updated).await;
    assert_eq!(crate::fixture::names(&drain(&mut subscription).await), ["c", "d"].into());
    subscription = subscription
        .replace(Filter::any([Filter::name("e").unwrap(), Filter::prefix("f")]).unwrap())
        .stream();
    assert_eq!(["c", "d", "e"].map(count), [0, 0, 1], "so is a set with a pattern in it");
    subscription = subscription.replace(Filter::name("e").unwrap()).stream();
    assert_eq!(count("e"), 1);
    drop(subscription);
    assert_eq!(count("e"), 0);
}

/// A failed read of design documents is reported and repeated: the delivery is not lost.
#[tokio::test(start_paused = true)]
async fn a_failed_read_of_design_documents_is_reported_and_tried_again() {
    let store = notibus::store::Store::memory();
    let faults = notibus::store::testing::Faults::new(&store);
    let bus = narrow_bus(&faults.store()).await;
    let notifier = joined(&bus).await.notifier(crate::common::eager()).await.unwrap();
    let a = db("a", 1);
    record(&store, &bus, &a, [1, 0, 0, 1]).await;
    row_with(&bus, &a, [1, 0, 0, 1]).await;
    let dispatcher = bus.dispatcher(notibus::DispatcherOptions::default()).await.unwrap();
    let since = Cursor::BEGINNING;
    let mut subscription = dispatcher.subscribe(Filter::all()).with_ddocs().since(since).stream();
    // Rows can be read, but not design documents, which are in family 9.
    faults.plan_reads(|operation| {
        let is_ddocs = matches!(operation, notibus::store::testing::Operation::GetRange { range, .. }
            if range.begin.starts_with(b"notibus\x15\x09"));
        is_ddocs.then_some(notibus::store::StoreError::IO_ERROR)
    });
    for _ in 0..2 {
        let item = crate::common::within("a failure", tokio_stream::StreamExt::next(&mut subscription)).await;
        assert!(matches!(item, Some(notibus::dispatcher::Item::Failed(_))), "{item:?}");
    }
    faults.heal();
    assert!(kinds(&next(&mut subscription).await).contains(&EventKind::DdocUpdated));
    notifier.shutdown().await.unwrap();
}

/// Regression: the dispatcher compared some globs with the last component of a name, which names that end with `..` do not have, so live
/// subscribers missed events that others got from the store.
#[tokio::test(start_paused = true)]
async fn globs_match_names_that_end_with_dots() {
    for (glob, name) in [("*.?", "a/.."), ("**/..", "a/.."), ("a/*.", "a/.."), ("*{.,*a}.", "A/..")] {
        let fixture = SubscriberFixture::new().await;
        let mut live = fixture.dispatcher.subscribe(Filter::glob(glob).unwrap()).stream();
        fixture.events(&[name], EventKind::Created).await;
        assert_eq!(drain(&mut live).await.len(), 1, "{glob}, {name}");
    }
}
