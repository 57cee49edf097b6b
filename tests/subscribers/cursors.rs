//! Durable named cursors: a restart misses nothing.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::FutureExt;
use notibus::{
    Cursor, DispatcherOptions, Error, EventKind, Filter, NodeOptions,
    dispatcher::{Interruption, StopReason},
    node::NodeId,
};
use tokio_stream::StreamExt;

use crate::{
    common::{self, db, until, within},
    fixture::{SubscriberFixture, drain, kinds, name, names, next, ready},
    listeners::Recorder,
};

#[tokio::test(start_paused = true)]
async fn a_durable_subscriber_goes_on_where_it_was() {
    let names_of = |names: [&str; 2]| Filter::names(names.map(|name| name.parse().unwrap())).unwrap();
    for filter in [Filter::all(), names_of(["a", "b"])] {
        let fixture = SubscriberFixture::new().await;
        let cursor = fixture.bus.cursor("mirror").unwrap();
        assert_eq!(cursor.read().await.unwrap(), None);
        let durable = async || fixture.dispatcher.subscribe(filter.clone()).durable(&cursor).await.unwrap();
        let mut first = durable().await.stream();
        assert!(cursor.read().await.unwrap().is_some(), "where it starts is saved at once");
        fixture.events(&["a"], EventKind::Created).await;
        assert_eq!(names(&drain(&mut first).await), ["a"].into());
        first.checkpoint().await.unwrap();
        fixture.events(&["b"], EventKind::Created).await;
        next(&mut first).await;
        // It dies before it has saved that; more happens meanwhile.
        drop(first);
        fixture.events(&["a"], EventKind::Updated).await;
        let mut second = durable().await.stream();
        let delivered = drain(&mut second).await;
        let mut delivered: Vec<_> = delivered.iter().map(|d| (name(d).to_owned(), kinds(d))).collect();
        delivered.sort_unstable();
        let expected =
            [("a".to_owned(), vec![EventKind::Updated]), ("b".to_owned(), vec![EventKind::Created])];
        assert_eq!(delivered, expected);
        second.checkpoint().await.unwrap();
        drop(second);
        let mut third = durable().await.stream();
        assert!(drain(&mut third).await.is_empty(), "all was saved");
    }
}

/// Regression: a durable subscriber with a predicate was given another one, and ended before it saved. All predicates hash alike, so its first
/// scan went on where the earlier one had come to, and passed over what only the new one wanted.
#[tokio::test(start_paused = true)]
async fn a_first_scan_with_another_predicate_starts_over() {
    let fixture = SubscriberFixture::with(DispatcherOptions::default().catch_up_rows_max(1)).await;
    fixture.events(&["a", "b", "c"], EventKind::Created).await;
    let cursor = fixture.bus.cursor("cache").unwrap();
    let durable = async |filter: Filter| {
        let subscribe = fixture.dispatcher.subscribe(filter).since(Cursor::NOTHING);
        subscribe.durable(&cursor).await.unwrap().stream()
    };
    let mut first = durable(Filter::predicate(|row| row.name.as_str() == "b")).await;
    assert_eq!(name(&next(&mut first).await), "b");
    first.checkpoint().await.unwrap();
    drop(first);
    let mut second = durable(Filter::predicate(|row| row.name.as_str() != "b")).await;
    assert_eq!(names(&drain(&mut second).await), ["a", "c"].into());
}

#[tokio::test(start_paused = true)]
async fn the_first_event_after_the_beginning_is_not_missed_although_nothing_was_saved() {
    let fixture = SubscriberFixture::new().await;
    let cursor = fixture.bus.cursor("mirror").unwrap();
    drop(fixture.dispatcher.subscribe(Filter::all()).durable(&cursor).await.unwrap());
    fixture.events(&["a"], EventKind::Created).await;
    let mut again = fixture.dispatcher.subscribe(Filter::all()).durable(&cursor).await.unwrap().stream();
    assert_eq!(name(&next(&mut again).await), "a");
}

#[tokio::test(start_paused = true)]
async fn a_cursor_is_for_one_subscriber_at_a_time() {
    let fixture = SubscriberFixture::new().await;
    let cursor = fixture.bus.cursor("mirror").unwrap();
    let durable = async || fixture.dispatcher.subscribe(Filter::all()).durable(&cursor).await.unwrap();
    let mut old = durable().await.stream();
    let mut new = durable().await.stream();
    fixture.events(&["a"], EventKind::Created).await;
    next(&mut old).await;
    drain(&mut new).await;
    let lost = old.checkpoint().await;
    assert!(matches!(lost, Err(Error::CursorLost { .. })), "{lost:?}");
    let lost = within("it finds out by itself", old.next()).await;
    assert!(matches!(lost, Some(Err(Interruption::Failed(Error::CursorLost { .. })))), "{lost:?}");
    assert!(old.next().await.is_none(), "and ends");
    new.checkpoint().await.unwrap();
    cursor.delete().await.unwrap();
    fixture.events(&["a"], EventKind::Updated).await;
    next(&mut new).await;
    assert!(matches!(new.checkpoint().await, Err(Error::CursorLost { .. })));
    assert_eq!(cursor.read().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn each_node_has_cursors_of_its_own() {
    let fixture = SubscriberFixture::new().await;
    let node = async |id: u8| {
        let options = NodeOptions::default().id(Some(NodeId([id; 16])));
        fixture.bus.node(options).await.unwrap()
    };
    let (one, two) = (node(1).await, node(2).await);
    let cursors = [one.cursor("cache"), two.cursor("cache"), fixture.bus.cursor("cache")].map(Result::unwrap);
    let mut subscriptions = Vec::new();
    for cursor in &cursors {
        let subscribe = fixture.dispatcher.subscribe(Filter::all());
        subscriptions.push(subscribe.durable(cursor).await.unwrap().stream());
    }
    fixture.events(&["a"], EventKind::Created).await;
    next(&mut subscriptions[0]).await;
    assert!(ready(&mut subscriptions[0]).is_empty());
    subscriptions[0].checkpoint().await.unwrap();
    let at = async |n: usize| cursors[n].read().await.unwrap().unwrap();
    assert!(at(0).await > at(1).await && at(1).await == at(2).await);
    // Found again by the same id.
    let again = one.cursor("cache").unwrap().read().await.unwrap().unwrap();
    assert_eq!(again, at(0).await);
}

#[tokio::test(start_paused = true)]
async fn a_listener_saves_by_itself_what_it_has_worked_on() {
    for filter in [Filter::all(), Filter::name("a").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let cursor = fixture.bus.cursor("listener").unwrap();
        let delivered = Arc::new(Mutex::new(Vec::new()));
        let start = async || {
            let delivered = Arc::clone(&delivered);
            let durable = fixture.dispatcher.subscribe(filter.clone()).durable(&cursor).await.unwrap();
            durable.listener(move || Recorder(Arc::clone(&delivered))).start()
        };
        let first = start().await;
        let sequence = fixture.event(&db("a", 1), EventKind::Created).await;
        let stored = async || cursor.read().await.unwrap().unwrap();
        until("the checkpoint", async || stored().await >= Cursor::from(sequence)).await;
        let sequence = fixture.event(&db("a", 1), EventKind::Updated).await;
        until("the delivery", async || delivered.lock().unwrap().len() == 2).await;
        assert_eq!(first.stop().await, StopReason::Shutdown);
        assert!(stored().await >= Cursor::from(sequence), "the last of it when it ends");
        fixture.event(&db("a", 1), EventKind::DdocUpdated).await;
        let second = start().await;
        until("what came meanwhile", async || delivered.lock().unwrap().len() == 3).await;
        let third = start().await;
        fixture.event(&db("a", 1), EventKind::Updated).await;
        assert_eq!(within("the end of the second", second.finished()).await, StopReason::CursorLost);
        assert!(!third.is_finished());
    }
}

/// Regression: the cursor of a quiet subscriber stayed where it was, and expired although it had missed nothing.
#[tokio::test(start_paused = true)]
async fn databases_that_are_not_wanted_move_a_durable_listener_on() {
    for filter in [Filter::prefix("quiet"), Filter::name("quiet").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let cursor = fixture.bus.cursor("listener").unwrap();
        let durable = fixture.dispatcher.subscribe(filter).durable(&cursor).await.unwrap();
        let _handle = durable.listener(|| crate::listeners::Quiet).start();
        let sequence = fixture.event(&db("loud", 1), EventKind::Created).await;
        until("the checkpoint", async || cursor.read().await.unwrap().unwrap() >= Cursor::from(sequence))
            .await;
    }
}

/// A callback that has not returned has not worked on its delivery.
#[tokio::test(start_paused = true)]
async fn what_is_in_hand_is_not_saved() {
    for filter in [Filter::all(), Filter::name("a").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let cursor = fixture.bus.cursor("stuck").unwrap();
        let durable = fixture.dispatcher.subscribe(filter).durable(&cursor).await.unwrap();
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let handle = durable.callback(move |delivery| {
            sender.send(()).unwrap();
            async move {
                drop(delivery);
                std::future::pending::<()>().await;
            }
        });
        let sequence = fixture.event(&db("a", 1), EventKind::Created).await;
        receiver.recv().await.unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        drop(handle);
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(cursor.read().await.unwrap().unwrap() < Cursor::from(sequence));
    }
}

/// The saved position never runs ahead of the returned deliveries, whatever happens; and a subscriber that starts again from it ends
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
        let cursor = fixture.bus.cursor("random").unwrap();
        // The newest totals that were worked on, by name, as in a store of the subscriber.
        let mut known = std::collections::BTreeMap::new();
        for _ in 0..15 {
            let filter = random.choice(&filters).unwrap().clone();
            let subscribe = fixture.dispatcher.subscribe(filter).since(Cursor::NOTHING);
            let mut subscription = subscribe.durable(&cursor).await.unwrap().stream();
            for _ in 0..random.u8(..6) {
                fixture.event(&db(random.choice(all).unwrap(), 1), EventKind::Updated).await;
                for _ in 0..random.u8(..4) {
                    let Some(Some(item)) = common::next_news(&mut subscription).now_or_never() else { break };
                    let row = Arc::clone(item.unwrap().notification());
                    known.insert(row.name.clone(), row.totals);
                }
                if random.u8(..3) == 0 {
                    subscription.checkpoint().await.unwrap();
                }
            }
        }
        let filter = random.choice(&filters).unwrap().clone();
        let mut last = fixture.dispatcher.subscribe(filter).durable(&cursor).await.unwrap().stream();
        for delivery in drain(&mut last).await {
            known.insert(delivery.notification().name.clone(), delivery.notification().totals);
        }
        last.checkpoint().await.unwrap();
        for row in common::rows(&fixture.bus).await {
            assert_eq!(known.get(&row.name), Some(&row.totals), "{}", row.name);
        }
    }
}

/// The same for a listener that has panicked on it, and is asked to end before it is restarted.
#[tokio::test(start_paused = true)]
async fn what_a_listener_has_panicked_on_is_not_saved_when_it_ends() {
    for filter in [Filter::all(), Filter::name("panic").unwrap()] {
        let fixture = SubscriberFixture::new().await;
        let cursor = fixture.bus.cursor("broken").unwrap();
        let durable = fixture.dispatcher.subscribe(filter).durable(&cursor).await.unwrap();
        let hour = Duration::from_hours(1);
        let (factory, _calls) = crate::listeners::call_reporters();
        let handle = durable.listener(factory).backoff(hour, hour).unwrap().start();
        let sequence = fixture.event(&db("panic", 1), EventKind::Created).await;
        until("the panic", async || fixture.bus.stats().listener_panics == 1).await;
        assert_eq!(within("its end", handle.stop()).await, StopReason::Shutdown);
        assert!(cursor.read().await.unwrap().unwrap() < Cursor::from(sequence));
    }
}
