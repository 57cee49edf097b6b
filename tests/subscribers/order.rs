//! Order: the deliveries of a database arrive in the order of its events, even across reshards and restarts.

use std::collections::BTreeMap;

use notibus::{
    Bus, BusOptions, Cursor, DbInstance, Delivery, DispatcherOptions, EventKind, Filter, Sequence,
    dispatcher::Subscription, store::Store,
};

use crate::{
    common::{self, db, eager, joined, record, until},
    fixture::{changes, drain, ready},
};

const NAMES: [&str; 4] = ["a/x", "a/y", "b/x", "c"];

/// The deliveries to a subscriber so far.
#[derive(Default)]
struct Delivered {
    /// The last sequence of each database.
    last: BTreeMap<String, Sequence>,
    living: BTreeMap<String, Option<DbInstance>>,
}

impl Delivered {
    /// Checks the next delivery.
    fn receive(&mut self, delivery: &Delivery) {
        let name = delivery.notification().name.as_str().to_owned();
        let before = self.last.insert(name.clone(), delivery.sequence());
        assert!(before < Some(delivery.sequence()), "{name}: {before:?}, then {}", delivery.sequence());
        let living = self.living.entry(name.clone()).or_default();
        for (instance, kind) in changes(delivery) {
            match kind {
                EventKind::Created => assert!(living.replace(instance).is_none(), "{name} was created twice"),
                EventKind::Deleted => *living = None,
                EventKind::Updated | EventKind::DdocUpdated => {
                    assert_eq!(*living, Some(instance), "{name} was updated without being there");
                }
            }
        }
    }
}

/// Records a random event of one of the databases.
async fn step(random: &mut fastrand::Rng, store: &Store, bus: &Bus, lives: &mut [(u8, bool)]) -> u64 {
    let place = random.usize(..NAMES.len());
    let (instance, is_living) = &mut lives[place];
    let mut lanes = [0, 0, random.u64(..2), random.u64(..2)];
    if !*is_living {
        (*instance, *is_living, lanes[0]) = (*instance + 1, true, 1);
    } else if lanes == [0; 4] {
        (*is_living, lanes[1]) = (false, 1);
    }
    record(store, bus, &db(NAMES[place], *instance), lanes).await;
    lanes.iter().sum()
}

/// Runs reshards, restarts of the notifier and the dispatcher, and subscribers that only sometimes receive.
async fn run(mut random: fastrand::Rng) {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default().partitions(2)).await.unwrap();
    let mut notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let options = DispatcherOptions::default().ring_rows_max(*random.choice(&[2, 1_000]).unwrap());
    let mut dispatcher = bus.dispatcher(options).await.unwrap();
    let filters = [
        Filter::all(),
        Filter::prefix("a/"),
        Filter::names(NAMES.map(|name| name.parse().unwrap())).unwrap(),
        Filter::any([Filter::suffix("/x"), Filter::glob("?").unwrap()]).unwrap(),
        Filter::any(NAMES.map(|name| Filter::name(name).unwrap())).unwrap(),
    ];
    let mut subscribers: Vec<(Subscription, Delivered)> = Vec::new();
    for filter in filters {
        for pace in [None, Some(std::time::Duration::from_secs(1))] {
            let subscribe = dispatcher.subscribe(filter.clone()).since(Cursor::BEGINNING);
            let subscribe = match pace {
                Some(pace) => subscribe.every(pace).unwrap(),
                None => subscribe,
            };
            subscribers.push((subscribe.stream(), Delivered::default()));
        }
    }
    let (mut lives, mut recorded) = (vec![(0, false); NAMES.len()], 0);
    for _ in 0..120 {
        match random.u8(..30) {
            0 => drop(bus.feed().reshard(random.u32(1..8), None).await.unwrap()),
            1 => {
                notifier.shutdown().await.unwrap();
                let options = eager().poll_interval(std::time::Duration::from_millis(50));
                notifier = joined(&bus).await.notifier(options).await.unwrap();
            }
            2 => dispatcher = dispatcher.suspend().resume(),
            3..8 => {
                let place = random.usize(..subscribers.len());
                let (subscription, delivered) = &mut subscribers[place];
                for item in ready(subscription) {
                    delivered.receive(&item.into_delivery().unwrap());
                }
            }
            8..12 => tokio::time::sleep(std::time::Duration::from_millis(random.u64(..500))).await,
            _ => recorded += step(&mut random, &store, &bus, &mut lives).await,
        }
    }
    until("all folds", async || bus.stats().folded.total() == recorded).await;
    let rows = common::rows(&bus).await;
    for (subscription, delivered) in &mut subscribers {
        for delivery in drain(subscription).await {
            delivered.receive(&delivery);
        }
        for (name, last) in &delivered.last {
            let row = rows.iter().find(|row| row.name.as_str() == name).unwrap();
            assert_eq!(row.sequence, *last, "{name} ends with its newest row");
            let living = (!row.is_deleted()).then_some(row.instance);
            assert_eq!(delivered.living[name], living, "{name}");
        }
    }
    drop(dispatcher);
}

#[tokio::test(start_paused = true)]
async fn deliveries_of_a_database_come_in_order() {
    for _ in 0..25 {
        run(common::dice()).await;
    }
}

/// A move to another cluster raises the incarnation: sequences continue to grow, and a cursor stays valid.
#[tokio::test(start_paused = true)]
async fn a_cursor_moves_with_its_bus() {
    let store = Store::memory();
    let bus = common::narrow_bus(&store).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut before = dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).stream();
    crate::fixture::fold(&store, &bus, &db("a", 1), EventKind::Created).await;
    let known = crate::fixture::next(&mut before).await.sequence();
    assert!(ready(&mut before).is_empty());
    let cursor = before.cursor();
    crate::fixture::fold(&store, &bus, &db("b", 1), EventKind::Created).await;
    dispatcher.shutdown().await;
    notifier.shutdown().await.unwrap();
    let mut moved = Vec::new();
    bus.export(&mut moved, notibus::relocation::ExportOptions::default()).await.unwrap();
    let elsewhere = Store::memory();
    Bus::import(&elsewhere, b"notibus", &mut &moved[..]).await.unwrap();
    let bus = common::narrow_bus(&elsewhere).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut after = dispatcher.subscribe(Filter::all()).since(cursor).stream();
    let delivered = drain(&mut after).await;
    assert_eq!(crate::fixture::names(&delivered), ["b"].into(), "the cursor is as good there");
    let last = crate::fixture::fold(&elsewhere, &bus, &db("a", 1), EventKind::Updated).await;
    let delivery = crate::fixture::next(&mut after).await;
    assert!(delivery.sequence() == last && last > known);
    assert_eq!(crate::fixture::kinds(&delivery), [EventKind::Updated]);
}
