//! The writers: record the history, several transactions at once, in order for each database.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use indicatif::ProgressBar;
use notibus::{
    Error, EventKind, Producer,
    store::{Database, Isolation, KeyRange, StoreError},
};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};

use super::{
    Rate,
    history::{Event, History, Transaction},
    observer::Latencies,
};
use crate::Failure;

/// How long a transaction is tried again.
const RETRY_MAX: Duration = Duration::from_mins(5);

/// The pause before it is.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// What the load has done.
#[derive(Debug)]
pub struct Loaded {
    /// When the first transaction began.
    pub started: Instant,
    /// Attempts of transactions that failed by a conflict.
    pub conflicts: u64,
}

/// Whose turn it is at one database.
#[derive(Debug, Default)]
struct Turn {
    /// How many transactions have been done.
    done: AtomicU32,
    /// Wakes those that wait.
    changed: Notify,
}

impl Turn {
    /// Completes when `number` transactions have been done.
    async fn wait(&self, number: u32) {
        while self.done.load(Ordering::Acquire) < number {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Enlisted before the second look, so that a change in between is not missed.
            changed.as_mut().enable();
            if self.done.load(Ordering::Acquire) >= number {
                return;
            }
            changed.await;
        }
    }

    /// Ends a transaction's turn.
    fn pass(&self) {
        self.done.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_waiters();
    }
}

/// The load.
pub struct Load(Arc<Inner>);

/// What the writers share.
struct Inner {
    /// Where to write.
    db: Database,
    /// How to record.
    producer: Producer,
    /// What to record.
    history: Arc<History>,
    /// When what was committed.
    latencies: Arc<Latencies>,
    /// How fast to record.
    rate: Rate,
    /// The next transaction to be taken.
    next: AtomicUsize,
    /// How many events were recorded.
    recorded: watch::Sender<u64>,
    /// By name.
    turns: Vec<Turn>,
    /// Attempts that failed by a conflict.
    conflicts: AtomicU64,
    /// What the documents of this run start with.
    prefix: Vec<u8>,
}

impl Load {
    /// The load of `history`.
    pub fn new(
        db: Database,
        producer: Producer,
        history: Arc<History>,
        latencies: Arc<Latencies>,
        rate: Rate,
    ) -> Self {
        let turns = history.names.iter().map(|_| Turn::default()).collect();
        let prefix = [b"replay/", &db.env().random().to_be_bytes()[..]].concat();
        Self(Arc::new(Inner {
            db,
            producer,
            history,
            latencies,
            rate,
            next: AtomicUsize::new(0),
            recorded: watch::Sender::new(0),
            turns,
            conflicts: AtomicU64::new(0),
            prefix,
        }))
    }

    /// How many events were recorded, as the load goes on.
    pub fn recorded(&self) -> watch::Receiver<u64> {
        self.0.recorded.subscribe()
    }

    /// Records everything with so many writers, then removes the documents that it wrote.
    pub async fn run(self, writers: u16, progress: &ProgressBar) -> Result<Loaded, Failure> {
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..writers {
            tasks.spawn(Arc::clone(&self.0).write(started, progress.clone()));
        }
        while let Some(ended) = tasks.join_next().await {
            ended.map_err(|error| Failure::Failed(format!("a writer has panicked: {error}")))??;
        }
        let documents = &KeyRange::prefix(self.0.prefix.clone());
        self.0
            .db
            .run(async |tx| {
                tx.clear_range(documents);
                Ok(())
            })
            .await?;
        Ok(Loaded { started, conflicts: self.0.conflicts.load(Ordering::Relaxed) })
    }
}

impl Inner {
    /// Takes transactions in order and commits each when it is its turn at all of its databases. The one that was taken
    /// first never waits for one taken later, so there is always one that can go on.
    async fn write(self: Arc<Self>, started: Instant, progress: ProgressBar) -> Result<(), Failure> {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(transaction) = self.history.transactions.get(number) else {
                return Ok(());
            };
            for &(name, turn) in &transaction.turns {
                self.turns[name].wait(turn).await;
            }
            self.pace(started, transaction.events.start).await;
            self.commit(number, transaction).await?;
            for &(name, _) in &transaction.turns {
                self.turns[name].pass();
            }
            let events = transaction.events.len() as u64;
            self.recorded.send_modify(|recorded| *recorded += events);
            progress.inc(events);
        }
    }

    /// Waits until event number `event` is due.
    async fn pace(&self, started: Instant, event: usize) {
        if let Rate::PerSecond(rate) = self.rate {
            #[expect(clippy::cast_precision_loss, reason = "a history has far fewer than 2^53 events")]
            let due = started + Duration::from_secs_f64(event as f64 / rate);
            tokio::time::sleep_until(due.into()).await;
        }
    }

    /// Writes a document and records the events, in one transaction. The document tells, after an unknown result,
    /// whether the transaction was committed.
    async fn commit(&self, number: usize, transaction: &Transaction) -> Result<(), Failure> {
        let document = [&self.prefix[..], &(number as u64).to_be_bytes()].concat();
        let events = &self.history.events[transaction.events.clone()];
        let started = Instant::now();
        for attempt in 0.. {
            match self.attempt(&document, events, attempt > 0).await {
                Ok(()) => break,
                Err(error) if error.is_retryable() && started.elapsed() < RETRY_MAX => {
                    if error.code() == StoreError::NOT_COMMITTED.code().into() {
                        self.conflicts.fetch_add(1, Ordering::Relaxed);
                    }
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(failed(&error, transaction)),
            }
        }
        self.latencies.committed(events);
        Ok(())
    }

    /// One attempt. A later one first looks whether an earlier one was committed.
    async fn attempt(&self, document: &[u8], events: &[Event], look: bool) -> Result<(), Error> {
        let tx = self.db.begin();
        if look && tx.get(document, Isolation::Serializable).await?.is_some() {
            return Ok(());
        }
        tx.set(document, b"");
        for event in events {
            let db = &self.history.instances[event.instance].db;
            match event.kind {
                EventKind::Created => self.producer.created(&tx, db),
                EventKind::Deleted => self.producer.deleted(&tx, db),
                EventKind::Updated => self.producer.updated(&tx, db),
                EventKind::DdocUpdated => self.producer.ddoc_updated(&tx, db, event.ddoc.as_ref()),
            }
        }
        tx.commit().await.map(drop)
    }
}

/// Why a transaction of the history was not recorded. One that no store can hold is the history's fault.
fn failed(error: &Error, transaction: &Transaction) -> Failure {
    let reason = format!("the transaction that begins on line {}: {error}", transaction.line);
    match error.code() {
        Some(code) if code == StoreError::TRANSACTION_TOO_LARGE.code() => Failure::BadInput(reason),
        _ => Failure::Failed(reason),
    }
}
