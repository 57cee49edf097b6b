//! Slow subscribers: their backlog in the ring is coalesced, and no deletion is lost.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use futures_util::FutureExt;
use notibus::{
    Bus, DbInstance, DbName, Delivery, Dispatcher, DispatcherOptions, EventKind, Filter, Notification,
    Sequence,
    dispatcher::Subscription,
    event::{Replaced, Versionstamp},
};
use tokio_stream::StreamExt;

use crate::{
    common::{db, dice, narrow_bus},
    fixture::SubscriberFixture,
};

const DATABASES: usize = 1_000;
const UPDATES: usize = if cfg!(debug_assertions) { 100_000 } else { 1_000_000 };
/// The number of updates per delivery that a slow subscriber takes.
const UPDATES_PER_DELIVERY: usize = 100;

/// A dispatcher whose rows are pushed by the test. They are not in the feed, so reading the feed returns none of them.
struct Tail {
    dispatcher: Dispatcher,
    template: Notification,
    /// The position of the last row of each name.
    rows: Mutex<BTreeMap<String, Sequence>>,
    _bus: Bus,
}

impl Tail {
    async fn new(options: DispatcherOptions) -> Self {
        let fixture = SubscriberFixture::new().await;
        fixture.event(&db("template", 1), EventKind::Created).await;
        let template = fixture.bus.feed().newest(&"template".parse().unwrap()).await.unwrap().unwrap();
        let bus = narrow_bus(&fixture.store).await;
        let dispatcher = bus.suspended_dispatcher(options).await.unwrap();
        Self { dispatcher, template, rows: Mutex::default(), _bus: bus }
    }

    /// Returns the position `n` versions after the current one.
    fn after(&self, n: usize) -> Sequence {
        let from = self.dispatcher.position();
        let stamp = Versionstamp::new(from.versionstamp().version() + n as u64, 0);
        Sequence::new(from.incarnation(), stamp, 0)
    }

    fn update(&self, name: &str, sequence: Sequence) -> Notification {
        let previous = self.rows.lock().unwrap().insert(name.to_owned(), sequence);
        let (name, kinds) = (name.parse().unwrap(), EventKind::Updated.into());
        Notification { sequence, name, kinds, previous, updated_at: Some(sequence), ..self.template.clone() }
    }

    fn push(&self, rows: Vec<Notification>) {
        let to = rows.last().unwrap().sequence;
        self.dispatcher.push(rows.into_iter().map(Arc::new).collect(), to).unwrap();
    }
}

/// A subscriber, and the newest row of each database that was delivered to it.
struct Slow {
    stream: Subscription,
    known: BTreeMap<DbName, Sequence>,
}

impl Slow {
    /// Takes one delivery, if one is waiting.
    fn take(&mut self) -> Option<Delivery> {
        // This is unconstrained so that tokio's budget does not limit how many items one poll of the test takes.
        let item = tokio::task::unconstrained(self.stream.next()).now_or_never()?;
        let delivery = item.unwrap().into_delivery().expect("nothing else comes from the ring");
        self.known.insert(delivery.notification().name.clone(), delivery.sequence());
        Some(delivery)
    }
}

/// Bug: a slow subscriber got each row in the ring, so it got 31,323 rows of 1,000 databases. Fix: a subscriber with a backlog of more than
/// a page gets only the newest row of each database.
#[tokio::test]
async fn at_most_a_page_more_than_the_databases_waits_for_a_slow_subscriber() {
    const QUARTERS: usize = 4;
    let tail = Tail::new(DispatcherOptions::default().ring_rows_max(1 << 20)).await;
    let page = DispatcherOptions::default().catch_up_rows_max;
    let filters = [
        Filter::all(),
        Filter::prefix("db"),
        Filter::all().kinds(EventKind::Updated.into()).unwrap(),
        Filter::any([Filter::predicate(|_| true), Filter::suffix("x")]).unwrap(),
        Filter::names((0..DATABASES).map(|n| format!("db{n}").parse().unwrap())).unwrap(),
    ];
    let subscribe = |filter: &Filter| Slow {
        stream: tail.dispatcher.subscribe(filter.clone()).stream(),
        known: BTreeMap::new(),
    };
    // There is one subscriber for each filter and each quarter; it takes its whole backlog after that quarter.
    let mut slow: Vec<Vec<_>> = (0..QUARTERS).map(|_| filters.iter().map(subscribe).collect()).collect();
    let turns = UPDATES / DATABASES;
    for turn in 1..=turns {
        let rows = (0..DATABASES).map(|n| tail.update(&format!("db{n}"), tail.after(n + 1)));
        tail.push(rows.collect());
        for one in slow.iter_mut().flatten() {
            for _ in 0..DATABASES / UPDATES_PER_DELIVERY {
                one.take().expect("more waits than it takes");
            }
        }
        if turn.is_multiple_of(turns / QUARTERS) {
            for (mut one, filter) in slow.pop().unwrap().into_iter().zip(&filters) {
                let waiting = std::iter::from_fn(|| one.take()).count();
                assert!(waiting <= DATABASES + page, "{waiting} deliveries wait: {filter}");
                assert_eq!(one.stream.cursor(), tail.after(0).into(), "it has caught up");
                let last = tail.after(0).versionstamp().version() - DATABASES as u64;
                let is_newest = |at: &Sequence| at.versionstamp().version() > last;
                assert!(one.known.len() == DATABASES && one.known.values().all(is_newest), "{filter}");
            }
        }
    }
}

/// No later row shows a deletion whose tombstone the janitor has dropped, so waiting rows must not be coalesced across it.
#[tokio::test]
async fn no_deletion_is_lost_when_rows_are_coalesced() {
    let mut random = dice();
    let options = DispatcherOptions::default().page_rows_max(5).ring_rows_max(1 << 20);
    let tail = Tail::new(options).await;
    let filters = [Filter::all(), Filter::prefix("db"), Filter::predicate(|_| true)];
    let mut slow = filters.map(|filter| {
        let stream = tail.dispatcher.subscribe(filter).stream();
        (Slow { stream, known: BTreeMap::new() }, BTreeMap::<String, Vec<Sequence>>::new())
    });
    // The instance of each database, and the position of its deletion if it is deleted.
    let mut databases = [(1, None); 5];
    for _ in 0..5_000 {
        let (place, at) = (random.usize(..databases.len()), tail.after(1));
        let (name, (instance, deleted)) = (format!("db{place}"), &mut databases[place]);
        let mut row = tail.update(&name, at);
        if let Some(deleted_at) = deleted.take() {
            // The janitor may have dropped the tombstone.
            let before = DbInstance([*instance; 16]);
            row.replaced = random.bool().then_some(Replaced { instance: before, deleted_at });
            *instance += 1;
        } else if random.u8(..4) == 0 {
            (row.deleted_at, *deleted) = (Some(at), Some(at));
            for (_, owed) in &mut slow {
                owed.entry(name.clone()).or_default().push(at);
            }
        }
        row.instance = DbInstance([*instance; 16]);
        tail.push(vec![row]);
        let is_over = random.u8(..50) == 0;
        for (one, owed) in &mut slow {
            let takes = if is_over { usize::MAX } else { usize::from(random.u8(..8) == 0) };
            for delivery in std::iter::from_fn(|| one.take()).take(takes) {
                let Some(owed) = owed.get_mut(delivery.notification().name.as_str()) else { continue };
                let is_due = owed.first().is_some_and(|first| *first <= delivery.sequence());
                let shows = delivery.news().kinds().contains(EventKind::Deleted);
                assert!(!is_due || shows, "{delivery:?} hides {owed:?}");
                owed.retain(|at| *at > delivery.sequence());
            }
            assert!(!is_over || owed.values().all(Vec::is_empty), "{owed:?} is owed");
        }
    }
}
