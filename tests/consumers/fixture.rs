//! Shared by the tests of consumers: a bus with a notifier, and handlers that log their calls.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::future::BoxFuture;
use notibus::{
    Bus, BusOptions, Janitor, JanitorOptions, Node, Notification, Notifier, Sequence,
    consumer::{Batch, ConsumerBuilder, ConsumerHandle, ConsumerOptions, HandlerResult, Work},
    store::{Isolation, Store, testing::Faults},
};

use crate::common::{NEVER, db, joined, record, row_with, unpolled, until};

/// A bus in a store that fails as planned, with a notifier whose handle to the store does not fail.
pub struct ConsumerFixture {
    /// The underlying store, without faults.
    pub store: Store,
    /// The store of the members.
    pub faults: Faults,
    /// The bus of the members' process.
    pub bus: Bus,
    /// The bus of another process.
    pub other: Bus,
    /// The notifier, which folds what is recorded.
    _notifier: Notifier,
}

impl ConsumerFixture {
    /// Makes a bus whose feed has `shards` shards.
    pub async fn new(shards: u32) -> Self {
        let store = Store::memory();
        let faults = Faults::new(&store);
        let options = || BusOptions::default().partitions(1).shards(shards);
        let other = Bus::open(&store, options()).await.unwrap();
        let bus = Bus::open(&faults.store(), options()).await.unwrap();
        let notifier = joined(&other).await.notifier(unpolled()).await.unwrap();
        Self { store, faults, bus, other, _notifier: notifier }
    }

    /// Returns the handle of the consumer `c`.
    pub fn handle(&self) -> ConsumerHandle {
        self.other.consumer("c").unwrap()
    }

    /// Makes a member of the consumer `c`, on its own node in the members' process.
    pub async fn member(&self) -> ConsumerBuilder<Notification> {
        member_of(&joined(&self.bus).await)
    }

    /// Makes a member of the consumer `c`, on its own node in another process.
    pub async fn other_member(&self) -> ConsumerBuilder<Notification> {
        member_of(&joined(&self.other).await)
    }

    /// Creates the databases `names`, and waits until they are in the feed.
    pub async fn create(&self, names: impl IntoIterator<Item = impl AsRef<str>>) {
        let dbs: Vec<_> = names.into_iter().map(|name| db(name.as_ref(), 1)).collect();
        for db in &dbs {
            record(&self.store, &self.other, db, [1, 0, 0, 0]).await;
        }
        for db in &dbs {
            row_with(&self.other, db, [1, 0, 0, 0]).await;
        }
    }

    /// Updates the database `name`, which was updated `before` times, and waits until the update is in the feed.
    pub async fn update(&self, name: &str, before: u64) -> Sequence {
        record(&self.store, &self.other, &db(name, 1), [0, 0, 1, 0]).await;
        row_with(&self.other, &db(name, 1), [1, 0, before + 1, 0]).await.sequence
    }

    /// Opens the bus as another process would.
    pub async fn another(&self) -> Bus {
        Bus::open_existing(&self.faults.store(), b"notibus").await.unwrap()
    }

    /// Starts a janitor that deletes tombstones at once.
    pub async fn eager_janitor(&self) -> Janitor {
        let options =
            JanitorOptions::default().interval(Duration::from_secs(1)).tombstone_retention(Duration::ZERO);
        joined(&self.other).await.janitor(options).await.unwrap()
    }

    /// Returns the exact number of rows that the consumer has not passed.
    pub async fn behind(&self) -> u64 {
        let lag = self.handle().lag().await.unwrap();
        assert!(lag.iter().all(|shard| shard.is_exact));
        lag.iter().map(|shard| shard.rows).sum()
    }

    pub async fn is_none_deferred(&self) -> bool {
        self.handle().deferred(None, 1).await.unwrap().is_empty()
    }

    /// Waits until the consumer is not behind in any shard, and has no deferred ids.
    pub async fn until_done(&self) {
        until("the consumer has done everything", async || {
            let lag = self.handle().lag().await.unwrap();
            let deferred = self.handle().deferred(None, 1).await.unwrap();
            lag.iter().all(|shard| shard.rows == 0) && deferred.is_empty()
        })
        .await;
    }
}

fn member_of(node: &Node) -> ConsumerBuilder<Notification> {
    node.consumer("c").unwrap().options(hinted())
}

/// Returns options for members that read a shard only after a hint.
pub fn hinted() -> ConsumerOptions {
    ConsumerOptions::default().poll_interval(NEVER)
}

/// Returns the names `prefix0`, `prefix1`, ….
pub fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("{prefix}{n}")).collect()
}

type Step<T> = dyn Fn(T) -> BoxFuture<'static, HandlerResult> + Send + Sync;

/// A log of the names that were given to handlers in each call. Clones share it.
pub struct Log<T> {
    given: Arc<Mutex<Vec<Vec<String>>>>,
    step: Arc<Step<T>>,
}

impl<T> Clone for Log<T> {
    fn clone(&self) -> Self {
        Self { given: Arc::clone(&self.given), step: Arc::clone(&self.step) }
    }
}

/// Work that is given to a handler.
pub trait Given: Send + 'static {
    fn names(&self) -> Vec<String>;
}

impl Given for Work<Notification> {
    fn names(&self) -> Vec<String> {
        vec![String::from_utf8(self.id().to_vec()).unwrap()]
    }
}

impl Given for Batch<Notification> {
    fn names(&self) -> Vec<String> {
        self.rows.iter().map(|row| row.name.as_str().to_owned()).collect()
    }
}

impl<T: Given> Log<T> {
    /// Makes handlers that succeed at once.
    pub fn new() -> Self {
        Self::doing(async |_| Ok(()))
    }

    /// Makes handlers that run `step`.
    pub fn doing<F, W>(step: F) -> Self
    where
        F: Fn(T) -> W + Send + Sync + 'static,
        W: Future<Output = HandlerResult> + Send + 'static,
    {
        let step = Arc::new(move |given| Box::pin(step(given)) as BoxFuture<'static, HandlerResult>);
        Self { given: Arc::default(), step }
    }

    /// Returns a handler that logs its calls.
    pub fn handler(&self) -> impl Fn(T) -> BoxFuture<'static, HandlerResult> + Clone + Send + Sync + 'static {
        let log = self.clone();
        move |given: T| {
            log.given.lock().unwrap().push(given.names());
            (log.step)(given)
        }
    }

    /// Returns the names that were given to handlers, in order, even those whose work failed.
    pub fn names(&self) -> Vec<String> {
        self.given.lock().unwrap().concat()
    }

    /// Returns the number of calls.
    pub fn calls(&self) -> usize {
        self.given.lock().unwrap().len()
    }

    /// Waits until handlers were called `calls` times.
    pub async fn until_calls(&self, calls: usize) {
        until(&format!("call {calls}"), async || self.calls() >= calls).await;
    }

    /// Waits until each of `names` was given to a handler, in any order.
    pub async fn until_names(&self, names: &[String]) {
        until(&format!("all of {} names", names.len()), async || {
            let got = self.names();
            names.iter().all(|name| got.contains(name))
        })
        .await;
    }
}

/// Returns the number that is stored at `key`.
pub async fn counter(store: &Store, key: &[u8]) -> u64 {
    let value = store.begin().get(key, Isolation::Snapshot).await.unwrap();
    value.map_or(0, |value| u64::from_le_bytes(value[..].try_into().unwrap()))
}

/// Lets `time` pass on the paused clock.
pub async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}
