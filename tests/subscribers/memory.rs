//! Memory: what a slow subscriber has still to be told costs none.

use std::sync::{Arc, Weak};

use notibus::{
    Bus, DispatcherOptions, EventKind, Fanout, Filter, Notification, Sequence, Subscription, Versionstamp,
};

use crate::{
    common::{db, narrow_bus},
    world::{World, next},
};

/// A row, to be copied.
async fn template() -> (Bus, Notification) {
    let world = World::new().await;
    world.event(&db("template", 1), EventKind::Created).await;
    let row = world.bus.feed().newest(&"template".parse().unwrap()).await.unwrap().unwrap();
    (narrow_bus(&world.store).await, row)
}

/// Hands out `count` rows of as many databases, and says which they are.
fn push(fanout: &Fanout, template: &Notification, count: usize) -> Vec<Weak<Notification>> {
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

/// A thousand subscribers, each of which has stopped in the middle of another batch; a hundred thousand databases later the
/// ring's rows are all that is held.
#[tokio::test]
async fn a_thousand_slow_subscribers_hold_no_rows_of_the_ring() {
    const RING: usize = 2_000;
    const BATCH: usize = 100;
    let (bus, template) = template().await;
    let options = DispatcherOptions { ring_rows_max: RING, ..DispatcherOptions::default() };
    let fanout = bus.fanout(options).await.unwrap();
    let filters = [Filter::all(), Filter::prefix("db"), Filter::glob("*").unwrap()];
    let mut slow: Vec<Subscription> = Vec::new();
    let mut rows = Vec::new();
    for n in 0..1_000 {
        let subscribe = fanout.subscribe(filters[n % 3].clone());
        let paced = std::time::Duration::from_millis(1);
        let mut one = if n % 2 == 0 { subscribe.stream() } else { subscribe.every(paced).unwrap().stream() };
        rows.extend(push(&fanout, &template, BATCH));
        next(&mut one).await;
        slow.push(one);
    }
    assert_eq!(rows.len(), 100_000);
    let held = rows.iter().filter(|row| row.strong_count() > 0).count();
    // Those with a pace hold the rest of a round of at most 256 rows; here of a batch.
    let rounds = 500 * (BATCH - 1);
    assert!(held <= RING + BATCH + rounds, "{held} rows are held");
    let first = rows.iter().take(90_000).step_by(BATCH).filter(|row| row.strong_count() > 0).count();
    assert_eq!(first, 0, "what was delivered is let go of");
    drop(slow);
    let held = rows.iter().filter(|row| row.strong_count() > 0).count();
    assert!(held <= RING + BATCH, "{held} rows are held by the ring");
}

/// Exact names hold their newest rows, however many there were.
#[tokio::test]
async fn a_slow_subscriber_of_names_holds_one_row_of_each() {
    let (bus, template) = template().await;
    let options = DispatcherOptions { ring_rows_max: 1, ..DispatcherOptions::default() };
    let fanout = bus.fanout(options).await.unwrap();
    let names = ["db0", "db1", "db2"].map(|name| name.parse().unwrap());
    let slow = fanout.subscribe(Filter::names(names).unwrap()).stream();
    let mut rows = Vec::new();
    for _ in 0..1_000 {
        rows.extend(push(&fanout, &template, 10));
    }
    let held = rows.iter().filter(|row| row.strong_count() > 0).count();
    assert!(held <= 10 + 3, "{held} rows are held");
    drop(slow);
}
