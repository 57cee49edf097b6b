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
    store::{Database, Isolation, KeyRange, StoreError, TransactionOption},
};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time,
};

use super::{
    args::Rate,
    history::{Event, History, Transaction},
    observer::Latencies,
    progress::Progress,
};
use crate::failure::Failure;

/// How long the writers wait for an event that is not due before they note that this is no stall.
const PACE_STEP_MAX: Duration = Duration::from_secs(1);

/// Pause before a transaction is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The result of the load.
#[derive(Debug)]
pub struct Loaded {
    /// When the first transaction began.
    pub started: Instant,
    /// Attempts of transactions that failed by a conflict.
    pub conflicts: u64,
}

/// Orders the transactions of one database.
#[derive(Debug, Default)]
struct Turn {
    /// Number of finished transactions.
    done: AtomicU32,
    changed: Notify,
}

impl Turn {
    /// Completes when `number` transactions are finished.
    async fn wait(&self, number: u32) {
        while self.done.load(Ordering::Acquire) < number {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Enabled before the second check, so that a change in between is not missed.
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

struct Inner {
    db: Database,
    producer: Producer,
    history: Arc<History>,
    /// Measures the time from commit to delivery.
    latencies: Arc<Latencies>,
    rate: Rate,
    /// The next transaction to be taken.
    next: AtomicUsize,
    progress: Progress,
    turns: Vec<Turn>,
    /// Attempts that failed by a conflict.
    conflicts: AtomicU64,
    /// The key prefix of the documents of this run.
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
        progress: Progress,
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
            progress,
            turns,
            conflicts: AtomicU64::new(0),
            prefix,
        }))
    }

    /// The number of recorded events, updated while the load runs.
    pub fn recorded(&self) -> watch::Receiver<u64> {
        self.0.progress.recorded.subscribe()
    }

    /// Records everything with `writers` tasks, then removes the documents that it wrote.
    pub async fn run(self, writers: u16, bar: &ProgressBar) -> Result<Loaded, Failure> {
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..writers {
            tasks.spawn(Arc::clone(&self.0).write(started, bar.clone()));
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
    /// Takes transactions in order and commits each when it has its turn at all of its databases. A transaction never
    /// waits for one that was taken later, so one can always go on.
    async fn write(self: Arc<Self>, started: Instant, bar: ProgressBar) -> Result<(), Failure> {
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
            self.progress.recorded.send_modify(|recorded| *recorded += events);
            bar.inc(events);
        }
    }

    /// Waits until event number `event` is due, which is no stall.
    async fn pace(&self, started: Instant, event: usize) {
        if let Rate::PerSecond(rate) = self.rate {
            #[expect(clippy::cast_precision_loss, reason = "a history has far fewer than 2^53 events")]
            let due = time::Instant::from(started) + Duration::from_secs_f64(event as f64 / rate);
            let step = (self.progress.deadline.0 / 4).clamp(Duration::from_millis(1), PACE_STEP_MAX);
            while time::Instant::now() < due {
                self.progress.moves.step();
                time::sleep_until(due.min(time::Instant::now() + step)).await;
            }
        }
    }

    /// Writes a document and records the events, in one transaction. After an unknown result, the document shows
    /// whether the transaction was committed. It is tried again until the replay is given up.
    async fn commit(&self, number: usize, transaction: &Transaction) -> Result<(), Failure> {
        let document = [&self.prefix[..], &(number as u64).to_be_bytes()].concat();
        let events = &self.history.events[transaction.events.clone()];
        for attempt in 0.. {
            match self.attempt(&document, events, attempt > 0).await {
                Ok(()) => break,
                Err(error) if error.is_retryable() => {
                    if error.code() == StoreError::NOT_COMMITTED.code().into() {
                        self.conflicts.fetch_add(1, Ordering::Relaxed);
                    }
                    time::sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(failed(&error, transaction)),
            }
        }
        self.progress.moves.step();
        self.latencies.committed(events);
        Ok(())
    }

    /// One attempt. If `check` is set, it first checks whether an earlier one was committed.
    async fn attempt(&self, document: &[u8], events: &[Event], check: bool) -> Result<(), Error> {
        let tx = self.db.begin();
        tx.set_option(TransactionOption::Timeout(self.progress.deadline.0));
        if check && tx.get(document, Isolation::Serializable).await?.is_some() {
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

/// Why a transaction of the history was not recorded. If no store can hold it, the history is at fault.
fn failed(error: &Error, transaction: &Transaction) -> Failure {
    let reason = format!("the transaction that begins on line {}: {error}", transaction.line);
    match error.code() {
        Some(code) if code == StoreError::TRANSACTION_TOO_LARGE.code() => Failure::BadInput(reason),
        _ => Failure::Failed(reason),
    }
}
