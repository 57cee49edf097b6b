//! The cost of starting subscribers of very many exact names.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use notibus::{
    Cursor, DbName, DispatcherOptions, EventKind, Filter,
    store::{
        Store, StoreError,
        testing::{Faults, Operation},
    },
};

use crate::{
    common::{db, eager, joined, until, wide_bus},
    fixture::{SubscriberFixture, fold, next},
};

/// Returns `count` names of databases that do not exist.
fn absent(count: usize) -> impl Iterator<Item = DbName> {
    (0..count).map(|n| format!("absent{n}").parse().unwrap())
}

/// Regression: a subscriber looked up one name after another, each in its own transaction, which read the topology again, so it took
/// minutes to start with 100,000 names.
#[tokio::test(start_paused = true)]
async fn a_start_in_the_past_costs_one_read_per_name_and_few_transactions() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let fixture = SubscriberFixture { store, bus, notifier, dispatcher };
    fixture.events(&["x", "y"], EventKind::Created).await;
    let names = absent(2_000).chain(["x", "y"].map(|name| name.parse().unwrap()));
    let before = faults.counts();
    let subscribe = fixture.dispatcher.subscribe(Filter::names(names).unwrap());
    let mut stream = subscribe.since(Cursor::BEGINNING).stream();
    let found = [next(&mut stream).await, next(&mut stream).await];
    let cost = faults.counts() - before;
    let found = found.map(|delivery| delivery.notification().name.to_string());
    assert_eq!(found, ["x", "y"], "in the order of their names");
    assert!(cost.reads < 2_400, "{cost:?}");
}

/// Each transaction looks up a hundred names. Bug: if a row moved before a later transaction looked up its name, the reader still counted
/// the names as read up to the first transaction, so the news from before the move was lost.
#[tokio::test(start_paused = true)]
async fn a_name_that_moves_between_two_look_ups_brings_all_of_its_news() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let since = bus.feed().now().await.unwrap();
    fold(&store, &bus, &db("moves", 1), EventKind::Created).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let fixture = SubscriberFixture { store, bus, notifier, dispatcher };

    // The second transaction fails until the row has moved. All names in the first transaction sort before those in the second.
    let failures = Arc::new(AtomicUsize::new(0));
    let failed = Arc::clone(&failures);
    faults.plan_reads(move |operation| {
        let is_second = |key: &[u8]| key.windows(6).any(|part| part == b"second");
        let fails = matches!(operation, Operation::Get { key, .. } if is_second(key));
        fails.then(|| {
            failed.fetch_add(1, Ordering::Relaxed);
            StoreError::TRANSACTION_TOO_OLD
        })
    });
    let names = absent(100).chain(["moves", "second"].map(|name| name.parse().unwrap()));
    let subscribe = fixture.dispatcher.subscribe(Filter::names(names).unwrap());
    let mut stream = subscribe.since(since).stream();
    let moves = async {
        until("a look-up that fails", async || failures.load(Ordering::Relaxed) > 0).await;
        fixture.folded(&db("moves", 1), EventKind::Updated).await;
        faults.heal();
    };
    let (delivery, ()) = tokio::join!(next(&mut stream), moves);
    assert!(delivery.news().kinds().contains(EventKind::Updated));
    assert!(delivery.news().kinds().contains(EventKind::Created), "it never got the creation");
}
