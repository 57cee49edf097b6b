//! A load on the bus that knows exactly what it has recorded, and an observer of all deliveries.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, Dispatcher, Filter,
    store::{Isolation, KeyRange, RangeRead, RetryPolicy, Store},
};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;

use crate::common::{LIMIT, db, rows, until};

/// Number of concurrent transactions.
const WORKERS: u64 = 8;

const DATABASES: u64 = 10;

/// The number of updates of each database, by name.
pub(crate) type Totals = BTreeMap<String, u64>;

/// Workers that record events until they are asked to stop.
///
/// Each transaction also sets its own marker. If one fails with an unknown result, it is tried again, and finds its marker if it was
/// committed after all. So each is committed exactly once, whatever happens to the cluster.
pub(crate) struct Load {
    /// Set to ask the workers to stop.
    stop: Arc<AtomicBool>,
    /// The number of committed transactions.
    committed: Arc<AtomicU64>,
    workers: Vec<JoinHandle<Totals>>,
    store: Store,
    /// The key prefix of the markers.
    markers: Vec<u8>,
}

impl Load {
    /// Starts the workers. Markers lie below `prefix`, which must not be that of the bus.
    pub fn start(store: &Store, bus: &Bus, prefix: &[u8]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let committed = Arc::new(AtomicU64::new(0));
        let workers = (0..WORKERS).map(|worker| {
            let worker = Worker {
                number: worker,
                store: store.clone(),
                bus: bus.clone(),
                markers: prefix.to_vec(),
                stop: Arc::clone(&stop),
                committed: Arc::clone(&committed),
            };
            tokio::spawn(worker.run())
        });
        let workers = workers.collect();
        Self { stop, committed, workers, store: store.clone(), markers: prefix.to_vec() }
    }

    /// Waits until `more` further transactions are committed.
    pub async fn advance(&self, more: u64) {
        let target = self.committed.load(Ordering::SeqCst) + more;
        until("the load to go on", async || self.committed.load(Ordering::SeqCst) >= target).await;
    }

    /// Stops the workers, and returns what they recorded.
    pub async fn stop(self) -> Totals {
        self.stop.store(true, Ordering::SeqCst);
        let mut totals = Totals::new();
        for worker in self.workers {
            for (name, count) in worker.await.expect("a worker does not fail") {
                *totals.entry(name).or_default() += count;
            }
        }
        let recorded: u64 = totals.values().sum();
        assert_eq!(recorded, self.committed.load(Ordering::SeqCst));
        assert_eq!(recorded, count(&self.store, &self.markers).await, "each transaction has one marker");
        totals
    }
}

/// Returns the number of keys that start with `prefix`.
async fn count(store: &Store, prefix: &[u8]) -> u64 {
    let tx = store.begin();
    let mut pages = tx.pages(RangeRead::new(KeyRange::prefix(prefix.to_vec())), Isolation::Snapshot);
    let mut count = 0;
    while let Some(rows) = pages.next().await.expect("the markers can be read") {
        count += rows.len() as u64;
    }
    count
}

struct Worker {
    number: u64,
    store: Store,
    /// The bus to which the worker records.
    bus: Bus,
    /// The key prefix of the markers.
    markers: Vec<u8>,
    /// Set when the worker has to stop.
    stop: Arc<AtomicBool>,
    committed: Arc<AtomicU64>,
}

impl Worker {
    /// Records one update per transaction.
    async fn run(self) -> Totals {
        let producer = self.bus.producer();
        let mut totals = Totals::new();
        for n in 0_u64.. {
            if self.stop.load(Ordering::SeqCst) {
                break;
            }
            let name = format!("db{}", (self.number + n) % DATABASES);
            let db = db(&name, 1);
            let marker = [&self.markers[..], &self.number.to_be_bytes(), &n.to_be_bytes()].concat();
            let policy = RetryPolicy::default().elapsed_max(None);
            let recorded = self.store.run_with(&policy, async |tx| {
                if tx.get(&marker, Isolation::Serializable).await?.is_none() {
                    tx.set(&marker, b"");
                    producer.updated(&tx, &db);
                }
                Ok(())
            });
            recorded.await.expect("it can be recorded");
            *totals.entry(name).or_default() += 1;
            self.committed.fetch_add(1, Ordering::SeqCst);
        }
        totals
    }
}

/// Waits until everything is folded, and asserts that the rows of `bus` have exactly `totals`.
pub(crate) async fn until_folded(bus: &Bus, totals: &Totals) {
    until("everything to be folded", async || bus.is_drained().await.unwrap_or(false)).await;
    let found: Totals =
        rows(bus).await.iter().map(|row| (row.name.to_string(), row.totals.lanes()[2])).collect();
    assert_eq!(found, *totals);
}

/// Keeps the newest delivery of each database.
pub(crate) struct Observer {
    /// The number of updates in the newest delivery of each database.
    delivered: Arc<Mutex<Totals>>,
    task: JoinHandle<()>,
}

impl Observer {
    /// Observes all databases from now on.
    pub fn start(dispatcher: &Dispatcher) -> Self {
        let delivered = Arc::new(Mutex::new(Totals::new()));
        // If the feed cannot be read for a while, the stream tries again.
        let mut stream = dispatcher.subscribe(Filter::all()).deliveries(|trouble| println!("{trouble}"));
        let receiving = Arc::clone(&delivered);
        let task = tokio::spawn(async move {
            while let Some(delivery) = stream.next().await {
                let row = delivery.notification();
                let mut delivered = receiving.lock().unwrap_or_else(PoisonError::into_inner);
                delivered.insert(row.name.to_string(), row.totals.lanes()[2]);
            }
        });
        Self { delivered, task }
    }

    /// Waits until exactly `totals` were delivered.
    pub async fn until_delivered(&self, totals: &Totals) {
        let delivered = || self.delivered.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let wait = async {
            while delivered() != *totals {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if tokio::time::timeout(LIMIT, wait).await.is_err() {
            assert_eq!(delivered(), *totals, "not everything was delivered");
        }
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.task.abort();
    }
}
