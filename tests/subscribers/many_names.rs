//! Subscribers of very many exact names: the cost of starting them.

use notibus::{
    Cursor, DbName, DispatcherOptions, EventKind, Filter,
    store::{Store, testing::Faults},
};

use crate::{
    common::{eager, joined, wide_bus},
    fixture::{SubscriberFixture, next},
};

/// `count` names of databases that do not exist.
fn absent(count: usize) -> impl Iterator<Item = DbName> {
    (0..count).map(|n| format!("absent{n}").parse().unwrap())
}

/// Regression: each name was looked up by its own transaction, which read the topology again, and one after the other: 100,000 names
/// took minutes to start.
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
