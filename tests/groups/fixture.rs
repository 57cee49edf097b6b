//! Shared by the tests of groups: a bus with a notifier, and observers that log their calls.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, BusOptions, Consumer, DbName, Notification, Notifier, Observer, Sequence,
    cursor::Start,
    feed::ShardId,
    group::{CloseReason, ConsumerOptions, Group, GroupBatch, GroupOptions, ObserverResult},
    store::{Database, testing::Faults},
};

use crate::common::{NEVER, db, joined, record, row_with, unpolled, until};

/// A bus in a store that fails as planned, with a notifier on another handle that does not fail.
pub struct GroupFixture {
    /// The store without faults.
    pub store: Database,
    /// The store of the consumers.
    pub faults: Faults,
    /// The bus of the consumers' process.
    pub bus: Bus,
    /// The bus of another process.
    pub other: Bus,
    /// Folds what is recorded.
    notifier: Notifier,
}

impl GroupFixture {
    /// A bus whose feed has `shards` shards.
    pub async fn new(shards: u32) -> Self {
        let store = Database::memory();
        let faults = Faults::new(&store);
        let options = || BusOptions::default().partitions(1).shards(shards);
        let other = Bus::open(&store, options()).await.unwrap();
        let bus = Bus::open(&faults.database(), options()).await.unwrap();
        let notifier = joined(&other).await.notifier(unpolled()).await.unwrap();
        Self { store, faults, bus, other, notifier }
    }

    /// The bus and its store, after the roles were stopped.
    pub async fn stopped(self) -> (Bus, Database) {
        self.notifier.shutdown().await.unwrap();
        (self.other, self.store)
    }

    /// The bus as opened by another process.
    pub async fn another(&self) -> Bus {
        Bus::open_existing(&self.faults.database(), b"notibus").await.unwrap()
    }

    /// The group `g`, created to start at `start`.
    pub async fn group(&self, start: impl Into<Start>) -> Group<Notification> {
        let group = self.bus.group("g").unwrap();
        assert!(group.create(&GroupOptions::default().start_from(start)).await.unwrap());
        group
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

    /// Updates the database `name`, which was updated `before` times, and waits until that is in the feed.
    pub async fn update(&self, name: &str, before: u64) -> Sequence {
        record(&self.store, &self.other, &db(name, 1), [0, 0, 1, 0]).await;
        row_with(&self.other, &db(name, 1), [1, 0, before + 1, 0]).await.sequence
    }
}

/// Consumers that read a shard only after a hint.
pub fn hinted() -> ConsumerOptions {
    ConsumerOptions::default().poll_interval(NEVER)
}

/// Names `prefix0`, `prefix1`, ….
pub fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("{prefix}{n}")).collect()
}

/// A call of an observer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happened {
    Opened(ShardId, Sequence),
    /// It got these rows, in this attempt.
    Batch(ShardId, Vec<(DbName, Sequence)>, u32),
    Closed(CloseReason),
}

pub type Work = dyn Fn(GroupBatch<Notification>) -> futures_util::future::BoxFuture<'static, ObserverResult>
    + Send
    + Sync;

/// A log of the calls of observers, by the number of each. Clones share it.
#[derive(Clone)]
pub struct Log {
    /// What happened, in order.
    happened: Arc<Mutex<Vec<(u64, Happened)>>>,
    /// The number of the next observer.
    next: Arc<AtomicU64>,
    work: Arc<Work>,
}

impl Log {
    /// Observers that succeed at once.
    pub fn new() -> Self {
        Self::doing(async |_| Ok(()))
    }

    /// Observers that do `work`.
    pub fn doing<F, W>(work: F) -> Self
    where
        F: Fn(GroupBatch<Notification>) -> W + Send + Sync + 'static,
        W: Future<Output = ObserverResult> + Send + 'static,
    {
        let work =
            Arc::new(move |batch| Box::pin(work(batch)) as futures_util::future::BoxFuture<'static, _>);
        Self { happened: Arc::default(), next: Arc::default(), work }
    }

    fn observer(&self) -> Logged {
        Logged { number: self.next.fetch_add(1, Ordering::Relaxed), log: self.clone() }
    }

    fn note(&self, number: u64, happened: Happened) {
        self.happened.lock().unwrap().push((number, happened));
    }

    /// Notes that an observer that is not of this log got `batch`.
    pub fn took(&self, batch: &GroupBatch<Notification>) {
        let rows = batch.rows.iter().map(|row| (row.name.clone(), row.sequence)).collect();
        self.note(0, Happened::Batch(batch.shard, rows, batch.attempt));
    }

    /// Notes that an observer that is not of this log was closed.
    pub fn was_closed(&self, reason: CloseReason) {
        self.note(0, Happened::Closed(reason));
    }

    /// Starts a consumer of `group` with such observers.
    pub async fn consume(
        &self,
        bus: &Bus,
        group: &Group<Notification>,
        options: ConsumerOptions,
    ) -> Consumer {
        let log = self.clone();
        // The group as the process of the bus opens it.
        let group = bus.group(group.name().as_str()).unwrap();
        joined(bus).await.consumer(&group, move |_| log.observer(), options).await.unwrap()
    }

    /// All logged calls.
    pub fn all(&self) -> Vec<(u64, Happened)> {
        self.happened.lock().unwrap().clone()
    }

    /// The rows that observers got, in order, whether they have failed or not.
    pub fn rows(&self) -> Vec<(DbName, Sequence)> {
        let rows = self.all().into_iter().filter_map(|(_, happened)| match happened {
            Happened::Batch(_, rows, _) => Some(rows),
            _ => None,
        });
        rows.flatten().collect()
    }

    /// The names in the rows, in order.
    pub fn names(&self) -> Vec<String> {
        self.rows().into_iter().map(|(name, _)| name.as_str().to_owned()).collect()
    }

    /// Waits until observers have received a row of each of `names`, in any order.
    pub async fn until_names(&self, names: &[String]) {
        let all = async || {
            let got = self.names();
            names.iter().all(|name| got.contains(name))
        };
        until(&format!("all of {} names", names.len()), all).await;
    }

    /// Why observers were closed, in order.
    pub fn closed(&self) -> Vec<CloseReason> {
        let closed = self.all().into_iter().filter_map(|(_, happened)| match happened {
            Happened::Closed(reason) => Some(reason),
            _ => None,
        });
        closed.collect()
    }

    /// Each observer was opened first and once, and closed last and at most once; exactly once, if all must be closed.
    pub fn check(&self, all_closed: bool) {
        let mut lives: BTreeMap<u64, Vec<Happened>> = BTreeMap::new();
        for (number, happened) in self.all() {
            lives.entry(number).or_default().push(happened);
        }
        for (number, life) in lives {
            let opened = life.iter().filter(|happened| matches!(happened, Happened::Opened(..))).count();
            let closed = life.iter().filter(|happened| matches!(happened, Happened::Closed(_))).count();
            assert!(opened == 1 && matches!(life[0], Happened::Opened(..)), "{number}: {life:?}");
            assert!(closed <= 1 && (closed == 1 || !all_closed), "{number}: {life:?}");
            assert!(closed == 0 || matches!(life.last(), Some(Happened::Closed(_))), "{number}: {life:?}");
        }
    }
}

/// An observer that logs its calls.
struct Logged {
    number: u64,
    log: Log,
}

impl Observer<Notification> for Logged {
    async fn opened(&mut self, shard: ShardId, position: Sequence) {
        self.log.note(self.number, Happened::Opened(shard, position));
    }

    async fn batch(&mut self, batch: GroupBatch<Notification>) -> ObserverResult {
        assert!(!batch.rows.is_empty() && batch.rows.iter().all(|row| row.sequence > batch.after));
        let rows = batch.rows.iter().map(|row| (row.name.clone(), row.sequence)).collect();
        self.log.note(self.number, Happened::Batch(batch.shard, rows, batch.attempt));
        (self.log.work)(batch).await
    }

    async fn closed(&mut self, reason: CloseReason) {
        self.log.note(self.number, Happened::Closed(reason));
    }
}

/// Number of rows that the group has yet to work on, counted exactly.
pub async fn behind(group: &Group<Notification>) -> u64 {
    let lag = group.lag().await.unwrap();
    assert!(lag.iter().all(|shard| shard.is_exact));
    lag.iter().map(|shard| shard.rows).sum()
}

/// Waits until the group has worked on all rows.
pub async fn until_done(group: &Group<Notification>) {
    until("the group has done everything", async || behind(group).await == 0).await;
}

/// Lets paused time pass.
pub async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}
