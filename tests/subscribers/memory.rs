//! Memory: the backlog of a slow subscriber takes no memory.

use std::sync::{Arc, Weak};

use notibus::{
    Bus, Dispatcher, DispatcherOptions, EventKind, Filter, Notification, Sequence, dispatcher::Subscription,
    event::Versionstamp,
};

use crate::{
    common::{db, narrow_bus},
    fixture::{SubscriberFixture, next},
};

/// Makes a bus, and a row to copy.
async fn template() -> (Bus, Notification) {
    let fixture = SubscriberFixture::new().await;
    fixture.event(&db("template", 1), EventKind::Created).await;
    let row = fixture.bus.feed().newest(&"template".parse().unwrap()).await.unwrap().unwrap();
    (narrow_bus(&fixture.store).await, row)
}

/// Publishes rows of `count` databases, and returns weak references to the rows.
fn push(fanout: &Dispatcher, template: &Notification, count: usize) -> Vec<Weak<Notification>> {
    let from = fanout.position();
    let row = |n: usize| {
        let stamp = Versionstamp::new(from.versionstamp().version() + 1 + n as u64, 0);
        let sequence = Sequence::new(from.incarnation(), stamp, 0);
        let name = format!("db{n}").parse().unwrap();
        Arc::new(Notification { sequence, name, updated_at: Some(sequence), ..template.clone() })
    };
    let rows: Vec<_> = (0..count).map(row).collect();
    let weak = rows.iter().map(Arc::downgrade).collect();
    fanout.push(rows.clone(), rows.last().unwrap().sequence).unwrap();
    weak
}

/// Subscribers that each stopped in the middle of a different batch each hold a small part of it. After a hundred thousand further
/// databases, only these parts and the rows of the ring are held.
#[tokio::test]
async fn slow_subscribers_hold_a_small_batch_each() {
    const RING: usize = 2_000;
    const BATCH: usize = 1_000;
    let (bus, template) = template().await;
    let options = DispatcherOptions::default().ring_rows_max(RING);
    let most = options.catch_up_rows_max;
    let fanout = bus.suspended_dispatcher(options).await.unwrap();
    let filters = [Filter::all(), Filter::prefix("db"), Filter::glob("*").unwrap()];
    let mut slow: Vec<Subscription> = Vec::new();
    let mut rows = Vec::new();
    for n in 0..100 {
        let mut one = fanout.subscribe(filters[n % 3].clone()).stream();
        rows.extend(push(&fanout, &template, BATCH));
        next(&mut one).await;
        slow.push(one);
    }
    assert_eq!(rows.len(), 100_000);
    let held = || rows.iter().filter(|row| row.strong_count() > 0).count();
    assert!(held() <= RING + most + slow.len() * most, "{} rows are held", held());
    drop(slow);
    assert!(held() <= RING + most, "{} rows are held by the ring", held());
}

/// Only the ring holds the backlog of a subscriber, whether or not the subscriber wants exact names.
#[tokio::test]
async fn what_waits_for_a_slow_subscriber_is_in_the_ring_only() {
    let (bus, template) = template().await;
    let options = DispatcherOptions::default().ring_rows_max(1);
    let fanout = bus.suspended_dispatcher(options).await.unwrap();
    let names = ["db0", "db1", "db2"].map(|name| name.parse().unwrap());
    let slow = [Filter::names(names).unwrap(), Filter::prefix("db"), Filter::all()]
        .map(|filter| fanout.subscribe(filter).stream());
    let mut rows = Vec::new();
    for _ in 0..1_000 {
        rows.extend(push(&fanout, &template, 10));
    }
    let held = rows.iter().filter(|row| row.strong_count() > 0).count();
    assert_eq!(held, 10, "those of the last batch, which is in the ring");
    drop(slow);
}
