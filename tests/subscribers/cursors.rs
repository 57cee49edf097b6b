//! Cursors that a subscriber keeps: a subscriber that starts again from its cursor misses nothing.

use std::sync::Arc;

use futures_util::FutureExt;
use notibus::{Cursor, DispatcherOptions, EventKind, Filter};

use crate::{
    common::{self, db},
    fixture::{SubscriberFixture, drain, kinds, name, names, next, ready},
};

/// The cursor is saved before the last delivery, and more events happen before the next subscription starts from the cursor.
#[tokio::test(start_paused = true)]
async fn a_subscriber_goes_on_from_its_cursor() {
    let names_of = |names: [&str; 2]| Filter::names(names.map(|name| name.parse().unwrap())).unwrap();
    for filter in [Filter::all(), names_of(["a", "b"])] {
        let fixture = SubscriberFixture::new().await;
        let since = |cursor: Cursor| fixture.dispatcher.subscribe(filter.clone()).since(cursor).stream();
        let mut first = fixture.dispatcher.subscribe(filter.clone()).stream();
        fixture.events(&["a"], EventKind::Created).await;
        assert_eq!(names(&drain(&mut first).await), ["a"].into());
        let cursor = first.cursor();
        fixture.events(&["b"], EventKind::Created).await;
        next(&mut first).await;
        drop(first);
        fixture.events(&["a"], EventKind::Updated).await;
        let mut second = since(cursor);
        let delivered = drain(&mut second).await;
        let mut delivered: Vec<_> = delivered.iter().map(|d| (name(d).to_owned(), kinds(d))).collect();
        delivered.sort_unstable();
        let expected =
            [("a".to_owned(), vec![EventKind::Updated]), ("b".to_owned(), vec![EventKind::Created])];
        assert_eq!(delivered, expected);
        assert!(drain(&mut since(second.cursor())).await.is_empty(), "all was delivered");
    }
}

/// Regression: the cursor of a quiet subscriber did not move, so it expired although the subscriber had missed nothing.
#[tokio::test(start_paused = true)]
async fn databases_that_are_not_wanted_move_a_cursor_on() {
    for filter in [Filter::prefix("quiet"), Filter::name("quiet").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let mut stream = fixture.dispatcher.subscribe(filter).stream();
        let sequence = fixture.event(&db("loud", 1), EventKind::Created).await;
        assert!(ready(&mut stream).is_empty());
        assert!(stream.cursor() >= Cursor::from(sequence));
    }
}

/// The cursor never runs ahead of the returned deliveries, whatever happens; and a subscriber that starts again from the cursor ends up
/// with the newest row of every database.
#[tokio::test(start_paused = true)]
async fn random_restarts_miss_nothing() {
    let mut random = common::dice();
    for _ in 0..10 {
        let options = DispatcherOptions::default()
            .ring_rows_max(*random.choice(&[1, 4, 1_000]).unwrap())
            .page_rows_max(*random.choice(&[1, 2, 1_000]).unwrap());
        let fixture = SubscriberFixture::with(options).await;
        let all = ["a", "b", "c", "d"];
        let filters = [
            Filter::all(),
            Filter::glob("*").unwrap(),
            Filter::names(all.map(|name| name.parse().unwrap())).unwrap(),
        ];
        let mut kept = Cursor::BEGINNING;
        // The newest delivered totals by name, as a subscriber would store them.
        let mut known = std::collections::BTreeMap::new();
        for _ in 0..15 {
            let filter = random.choice(&filters).unwrap().clone();
            let mut subscription = fixture.dispatcher.subscribe(filter).since(kept).stream();
            for _ in 0..random.u8(..6) {
                fixture.event(&db(random.choice(all).unwrap(), 1), EventKind::Updated).await;
                for _ in 0..random.u8(..4) {
                    let Some(Some(item)) = common::next_news(&mut subscription).now_or_never() else { break };
                    let row = Arc::clone(item.into_delivery().unwrap().notification());
                    known.insert(row.name.clone(), row.totals);
                }
                if random.u8(..3) == 0 {
                    kept = subscription.cursor();
                }
            }
        }
        let filter = random.choice(&filters).unwrap().clone();
        let mut last = fixture.dispatcher.subscribe(filter).since(kept).stream();
        for delivery in drain(&mut last).await {
            known.insert(delivery.notification().name.clone(), delivery.notification().totals);
        }
        for row in common::rows(&fixture.bus).await {
            assert_eq!(known.get(&row.name), Some(&row.totals), "{}", row.name);
        }
    }
}
