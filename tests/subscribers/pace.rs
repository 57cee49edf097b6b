//! Paces: deliveries arrive in rounds, and each round delivers everything.

use std::{sync::Arc, time::Duration};

use notibus::{
    Cursor, DispatcherOptions, EventKind, Filter,
    dispatcher::{Item, RestartPolicy},
};
use tokio::time::Instant;
use tokio_stream::StreamExt;

use crate::{
    common::{self, db, within},
    fixture::{SubscriberFixture, calls, drain, kinds, name, names, next, ready},
};

const MINUTE: Duration = Duration::from_mins(1);

#[tokio::test(start_paused = true)]
async fn a_database_comes_once_per_round_with_all_that_is_new() {
    for filter in [Filter::all(), Filter::prefix("a"), Filter::name("a").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let mut paced = fixture.dispatcher.subscribe(filter.clone()).every(MINUTE).unwrap().stream();
        let mut at_once = fixture.dispatcher.subscribe(filter).stream();
        let a = db("a", 1);
        fixture.event(&a, EventKind::Created).await;
        assert_eq!(kinds(&next(&mut paced).await), [EventKind::Created], "the first round begins at once");
        let began = Instant::now();
        for _ in 0..5 {
            fixture.event(&a, EventKind::Updated).await;
            fixture.event(&a, EventKind::DdocUpdated).await;
            assert!(ready(&mut paced).is_empty());
        }
        assert!(began.elapsed() < MINUTE / 2);
        let delivery = next(&mut paced).await;
        assert!(began.elapsed() >= Duration::from_secs(59), "{:?}", began.elapsed());
        assert_eq!(kinds(&delivery), [EventKind::Updated, EventKind::DdocUpdated]);
        assert_eq!(delivery.notification().totals.updated, 5);
        assert!(drain(&mut paced).await.is_empty());
        assert!(!drain(&mut at_once).await.is_empty());
        // After a pause of more than a round, the next row is delivered at once.
        tokio::time::sleep(MINUTE * 2).await;
        let began = Instant::now();
        fixture.event(&a, EventKind::Updated).await;
        next(&mut paced).await;
        assert!(began.elapsed() < Duration::from_secs(5));
    }
}

/// Regression: a round waited until the tail had finished reading, and did not begin if no further event came, so an exactly full page was
/// delivered only with the next event of any database, or never.
#[tokio::test(start_paused = true)]
async fn a_full_page_with_nothing_after_it_is_delivered() {
    let fixture = SubscriberFixture::with(DispatcherOptions::default().page_rows_max(1)).await;
    let mut paced = fixture.dispatcher.subscribe(Filter::all()).every(MINUTE).unwrap().stream();
    let a = db("a", 1);
    for kind in [EventKind::Created, EventKind::Updated, EventKind::Deleted] {
        let receive = async {
            let delivery = within("it is delivered", paced.next()).await.unwrap().into_delivery().unwrap();
            assert_eq!(kinds(&delivery), [kind]);
        };
        let (_, ()) = tokio::join!(fixture.event(&a, kind), receive);
        tokio::time::sleep(MINUTE * 2).await;
    }
}

/// A round delivers each database once, even with more databases than it holds in memory, a ring that has moved on, and small pages.
#[tokio::test(start_paused = true)]
async fn a_round_of_many_databases_delivers_each_once() {
    for ring_rows_max in [100, 100_000] {
        let options = DispatcherOptions::default().ring_rows_max(ring_rows_max);
        let fixture = SubscriberFixture::with(options).await;
        let mut paced = fixture.dispatcher.subscribe(Filter::all()).every(MINUTE).unwrap().stream();
        fixture.event(&db("first", 1), EventKind::Created).await;
        next(&mut paced).await;
        assert!(ready(&mut paced).is_empty(), "the first round is over");
        let all: Vec<_> = (0..600).map(|n| format!("db{n:03}")).collect();
        for kind in [EventKind::Created, EventKind::Updated] {
            for some in all.chunks(100) {
                let producer = fixture.bus.producer();
                fixture
                    .store
                    .run(async |tx| {
                        for name in some {
                            producer.record_all(&tx, &db(name, 1), &kind.once())?;
                        }
                        Ok(())
                    })
                    .await
                    .unwrap();
            }
        }
        common::until("all folds", async || fixture.bus.stats().folded.total() == 1_201).await;
        let now = fixture.bus.feed().now().await.unwrap();
        common::until("the tail", async || fixture.dispatcher.position() >= now).await;
        assert!(ready(&mut paced).is_empty());
        let mut delivered = vec![next(&mut paced).await];
        delivered.extend(drain(&mut paced).await);
        assert_eq!(delivered.len(), 600);
        assert_eq!(names(&delivered).len(), 600);
        assert!(delivered.iter().all(|d| kinds(d) == [EventKind::Created, EventKind::Updated]));
    }
}

#[tokio::test(start_paused = true)]
async fn each_subscriber_has_its_own_pace() {
    let fixture = SubscriberFixture::new().await;
    let every = |seconds| {
        let all = fixture.dispatcher.subscribe(Filter::all());
        all.every(Duration::from_secs(seconds)).unwrap().stream()
    };
    let (mut indexer, mut replicator) = (every(60), every(10));
    let mut feed = fixture.dispatcher.subscribe(Filter::all()).stream();
    let mut delivered = [0; 3];
    let began = Instant::now();
    let mut updates = 0;
    while began.elapsed() < Duration::from_mins(5) {
        fixture.event(&db("a", 1), EventKind::Updated).await;
        updates += 1;
        tokio::time::sleep(Duration::from_secs(1)).await;
        for (count, subscription) in delivered.iter_mut().zip([&mut indexer, &mut replicator, &mut feed]) {
            *count += ready(subscription).len();
        }
    }
    assert_eq!(delivered[2], updates, "at once");
    assert!((26..=31).contains(&delivered[1]), "each 10 s: {delivered:?}");
    assert!((5..=6).contains(&delivered[0]), "each minute: {delivered:?}");
}

/// When a round is repeated, a predicate that panicked on a row is not called with that row again and again.
#[tokio::test(start_paused = true)]
async fn a_predicate_that_panics_does_not_stop_a_paced_subscriber() {
    let fixture = SubscriberFixture::new().await;
    let filter = Filter::predicate(|row| {
        assert_ne!(row.name.as_str(), "bad", "the predicate panics");
        true
    });
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let send = calls(move |item: Item| {
        sender.send(name(&item.into_delivery().unwrap()).to_owned()).unwrap();
        async {}
    });
    let paced = fixture.dispatcher.subscribe(filter).every(MINUTE).unwrap();
    let _handle = paced.callback(RestartPolicy::default(), send).unwrap();
    fixture.event(&db("first", 1), EventKind::Created).await;
    assert_eq!(within("the first", receiver.recv()).await.unwrap(), "first");
    fixture.events(&["good", "bad", "other"], EventKind::Created).await;
    let delivered = [receiver.recv().await.unwrap(), receiver.recv().await.unwrap()];
    assert_eq!(delivered, ["good", "other"]);
    assert_eq!(fixture.bus.stats().callback_panics, 1);
}

/// A pace also applies to subscribers that start in the past: they get everything in the first round.
#[tokio::test(start_paused = true)]
async fn a_paced_subscriber_from_the_start_gets_everything_first() {
    for filter in [Filter::all(), Filter::names(["a", "b"].map(|name| name.parse().unwrap())).unwrap()] {
        let fixture = SubscriberFixture::new().await;
        fixture.events(&["a", "b"], EventKind::Created).await;
        let since = Cursor::BEGINNING;
        let mut paced = fixture.dispatcher.subscribe(filter).since(since).every(MINUTE).unwrap().stream();
        assert_eq!(names(&drain(&mut paced).await), ["a", "b"].into());
        fixture.event(&db("a", 1), EventKind::Updated).await;
        let waited = Instant::now();
        let delivery = Arc::clone(next(&mut paced).await.notification());
        assert!(waited.elapsed() > MINUTE / 2 && delivery.totals.updated == 1);
    }
}

/// Bug: a first scan without rows used up a pace, as a round does, so the first delivery was late. Fix: a pace begins with a delivery.
#[tokio::test(start_paused = true)]
async fn an_empty_first_scan_costs_no_pace() {
    let fixture = SubscriberFixture::new().await;
    let subscribe = fixture.dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING);
    let mut paced = subscribe.every(MINUTE).unwrap().stream();
    let first = within("the end of the scan", paced.next()).await.unwrap();
    assert!(matches!(first, Item::CaughtUp { .. }), "{first:?}");
    let began = Instant::now();
    fixture.event(&db("a", 1), EventKind::Created).await;
    next(&mut paced).await;
    assert!(began.elapsed() < MINUTE / 2, "{:?}", began.elapsed());
}
