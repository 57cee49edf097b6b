//! A bus with all its roles in one process, and helpers that receive from it.

use std::{collections::BTreeSet, time::Duration};

use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Bus, Db, DbInstance, Delivery, Dispatcher, DispatcherOptions, EventKind, JanitorOptions, Notifier,
    Sequence,
    dispatcher::{Item, Subscription},
    store::{Store, Transaction},
};

use crate::common::{self, eager, forgetful, joined, narrow_bus, record, until, within};

/// A bus with all its roles in one process.
pub struct SubscriberFixture {
    pub store: Store,
    pub bus: Bus,
    /// The notifier, which folds at once.
    pub notifier: Notifier,
    pub dispatcher: Dispatcher,
}

impl SubscriberFixture {
    /// Makes a bus in a new store.
    pub async fn new() -> Self {
        Self::with(DispatcherOptions::default()).await
    }

    /// Makes a bus in a new store, whose dispatcher has these options.
    pub async fn with(options: DispatcherOptions) -> Self {
        let store = Store::memory();
        let bus = narrow_bus(&store).await;
        Self {
            notifier: joined(&bus).await.notifier(eager()).await.unwrap(),
            dispatcher: bus.dispatcher(options).await.unwrap(),
            store,
            bus,
        }
    }

    /// Commits an event, and waits until it is folded and the tail has read it.
    pub async fn event(&self, database: &Db, kind: EventKind) -> Sequence {
        let sequence = self.folded(database, kind).await;
        until("the tail", async || self.dispatcher.position() >= sequence).await;
        sequence
    }

    /// Commits an event, and waits until it is folded.
    pub async fn folded(&self, database: &Db, kind: EventKind) -> Sequence {
        fold(&self.store, &self.bus, database, kind).await
    }

    /// Commits events of one kind in the databases `names`.
    pub async fn events(&self, names: &[&str], kind: EventKind) {
        for name in names {
            self.event(&common::db(name, 1), kind).await;
        }
    }

    /// Commits a change to the design document `id`, and waits until the tail has read it.
    pub async fn ddoc(&self, database: &Db, id: Option<&str>) -> Sequence {
        let before = self.bus.stats().folded.total();
        let (producer, id) = (self.bus.producer(), id.map(|id| id.parse().unwrap()));
        self.store
            .run(async |tx| {
                producer.ddoc_updated(&tx, database, id.as_ref());
                Ok(())
            })
            .await
            .unwrap();
        until("a fold", async || self.bus.stats().folded.total() > before).await;
        let row = common::row(&self.bus, database).await.unwrap();
        until("the tail", async || self.dispatcher.position() >= row.sequence).await;
        row.sequence
    }
}

/// Commits an event without waiting for its fold. Returns the version of the commit.
pub async fn commit(bus: &Bus, database: &Db, kind: EventKind) -> u64 {
    let producer = bus.producer();
    let record = async |tx: Transaction| {
        match kind {
            EventKind::Created => producer.created(&tx, database),
            EventKind::Deleted => producer.deleted(&tx, database),
            _ => producer.updated(&tx, database),
        }
        Ok(())
    };
    bus.run_exactly_once(None, record).await.unwrap().committed.versionstamp.version()
}

/// Commits an event, and waits until it is folded.
pub async fn fold(store: &Store, bus: &Bus, database: &Db, kind: EventKind) -> Sequence {
    let before = bus.stats().folded.total();
    record(store, bus, database, kind.once().lanes()).await;
    until("a fold", async || bus.stats().folded.total() > before).await;
    common::row(bus, database).await.unwrap().sequence
}

pub async fn next(subscription: &mut Subscription) -> Delivery {
    within("a delivery", common::next_news(subscription)).await.unwrap().into_delivery().unwrap()
}

/// Returns all items that are ready.
pub fn ready(subscription: &mut Subscription) -> Vec<Item> {
    std::iter::from_fn(|| common::next_news(subscription).now_or_never().flatten()).collect()
}

/// Returns all deliveries, until none arrives for 10 s.
pub async fn drain(subscription: &mut Subscription) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while let Ok(Some(item)) =
        tokio::time::timeout(Duration::from_secs(10), common::next_news(subscription)).await
    {
        deliveries.push(item.into_delivery().unwrap());
    }
    deliveries
}

/// Returns the name of the database of a delivery.
pub fn name(delivery: &Delivery) -> &str {
    delivery.notification().name.as_str()
}

pub fn names(deliveries: &[Delivery]) -> BTreeSet<&str> {
    deliveries.iter().map(name).collect()
}

pub fn changes(delivery: &Delivery) -> Vec<(DbInstance, EventKind)> {
    delivery.news().iter().collect()
}

/// Returns the kinds of events in a delivery's news.
pub fn kinds(delivery: &Delivery) -> Vec<EventKind> {
    delivery.news().iter().map(|(_, kind)| kind).collect()
}

/// Removes all tombstones.
pub async fn forget(bus: &Bus) {
    forget_by(bus, forgetful()).await;
}

/// Runs a janitor with these options until it has removed a tombstone.
pub async fn forget_by(bus: &Bus, options: JanitorOptions) {
    let dropped = bus.stats().tombstones_dropped;
    let janitor = joined(bus).await.janitor(options).await.unwrap();
    until("the tombstone's end", async || bus.stats().tombstones_dropped > dropped).await;
    janitor.shutdown().await.unwrap();
}

/// A boxed callback, whose type can be named.
pub type Call<T> = Box<dyn FnMut(Item<T>) -> BoxFuture<'static, ()> + Send>;

/// Returns a factory of callbacks that all run `call`.
pub fn calls<T: 'static, R: Future<Output = ()> + Send + 'static>(
    call: impl Fn(Item<T>) -> R + Clone + Send + 'static,
) -> impl FnMut() -> Call<T> + Send + 'static {
    move || {
        let call = call.clone();
        Box::new(move |item| call(item).boxed())
    }
}
