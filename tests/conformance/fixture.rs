//! The fixture of a conformance case: a store, and a part of the key space for the case alone.
//!
//! Cases never touch keys outside their prefix, so that they can share a cluster with each other and with other users.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use notibus::{
    Error, Result,
    store::{
        AtomicOp, Committed, Env, Environment, Isolation, KeyRange, RangeRead, Store, StoreError,
        Transaction, Watch,
    },
};
use tempfile::TempDir;

#[cfg(feature = "foundationdb")]
use {crate::cluster::Cluster, std::sync::Mutex};

/// How long to wait for an expected event.
const PATIENCE: Duration = Duration::from_mins(1);

/// A store that the cases run against.
pub(crate) struct Backend {
    /// Whether time can be paused, which requires that the store completes everything at once.
    pub paused: bool,
    /// Opens the store.
    pub open: fn() -> Opened,
}

pub(crate) struct Opened {
    /// The store.
    pub store: Store,
    /// The store's clock, if it can be set forward. Without one, cases that need time to pass sleep.
    pub clock: Option<Clock>,
    /// The store's folder, which is removed afterwards.
    pub folder: Option<TempDir>,
}

pub(crate) const MEMORY: Backend =
    Backend { paused: true, open: || Opened { store: Store::memory(), clock: None, folder: None } };

/// The store in a folder. The store waits for its disk, so its time is real, but can be set forward.
pub(crate) const DURABLE: Backend = Backend {
    paused: false,
    open: || {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let clock = Clock::default();
        let db = Store::open_dir_in(folder.path(), Env::new(clock.clone()));
        Opened { store: db.expect("an empty folder can be opened"), clock: Some(clock), folder: Some(folder) }
    },
};

/// The shared cluster, once a case has needed it.
#[cfg(feature = "foundationdb")]
static CLUSTER: Mutex<Option<Cluster>> = Mutex::new(None);

/// Stops the cluster, if there is one.
#[cfg(feature = "foundationdb")]
pub(crate) fn stop_cluster() {
    *CLUSTER.lock().expect("starting the cluster does not panic") = None;
}

/// A real cluster that all cases share; each case has its own client.
#[cfg(feature = "foundationdb")]
pub(crate) const FOUNDATIONDB: Backend = Backend {
    paused: false,
    open: || {
        let file = {
            let mut cluster = CLUSTER.lock().expect("starting the cluster does not panic");
            cluster.get_or_insert_with(Cluster::start).file()
        };
        // A case already runs in a runtime, which cannot block on another one.
        let opened = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be built").block_on(Store::foundationdb(file))
        });
        let db = opened.join().expect("opening does not panic").expect("the cluster can be opened");
        Opened { store: db, clock: None, folder: None }
    },
};

/// Real time, plus the time that was skipped.
#[derive(Clone)]
pub(crate) struct Clock {
    /// When the clock was made.
    start: Instant,
    /// The number of milliseconds that were skipped.
    skipped_ms: Arc<AtomicU64>,
}

impl Default for Clock {
    fn default() -> Self {
        Self { start: Instant::now(), skipped_ms: Arc::default() }
    }
}

impl Environment for Clock {
    fn now(&self) -> Duration {
        self.start.elapsed() + Duration::from_millis(self.skipped_ms.load(Ordering::SeqCst))
    }

    fn wall_ms(&self) -> u64 {
        u64::try_from(self.now().as_millis()).expect("a test is short")
    }

    fn random(&self) -> u64 {
        fastrand::u64(..)
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(duration))
    }
}

pub(crate) struct Fixture {
    /// The store.
    pub store: Store,
    /// The prefix of all keys of the case.
    prefix: Vec<u8>,
    /// The clock of the store, if it can be set forward.
    clock: Option<Clock>,
    /// The folder of the store, which is removed last.
    _folder: Option<TempDir>,
}

/// Runs `case` against `backend` on its own runtime.
pub(crate) fn run(backend: &Backend, name: &str, case: &impl AsyncFn(&Fixture) -> Result<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(backend.paused)
        .build()
        .expect("a runtime can be built");
    runtime.block_on(async {
        let opened = (backend.open)();
        let fixture = Fixture {
            store: opened.store,
            prefix: format!("{name}/{:016x}/", fastrand::u64(..)).into_bytes(),
            clock: opened.clock,
            _folder: opened.folder,
        };
        case(&fixture).await.expect("the case meets no error");
    });
}

impl Fixture {
    /// Returns the case's key `suffix`.
    pub fn key(&self, suffix: impl AsRef<[u8]>) -> Vec<u8> {
        [&self.prefix, suffix.as_ref()].concat()
    }

    /// Returns the range of the case's keys from `begin` up to but not including `end`.
    pub fn range(&self, begin: &str, end: &str) -> KeyRange {
        KeyRange::new(self.key(begin), self.key(end))
    }

    /// Returns the range of all of the case's keys.
    pub fn all(&self) -> KeyRange {
        KeyRange::prefix(self.prefix.clone())
    }

    /// Begins a transaction that already has a read version.
    pub async fn started(&self) -> Result<Transaction> {
        let tx = self.store.begin();
        tx.read_version().await?;
        Ok(tx)
    }

    /// Sets one key in a transaction of its own.
    pub async fn put(&self, suffix: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<Committed> {
        let tx = self.store.begin();
        tx.set(&self.key(suffix), value.as_ref());
        Ok(tx.commit().await?.expect("a set is something to commit"))
    }

    /// Sets each of `suffixes` to itself in one transaction.
    pub async fn fill(&self, suffixes: &[&str]) -> Result<Committed> {
        let tx = self.store.begin();
        for suffix in suffixes {
            tx.set(&self.key(suffix), suffix.as_bytes());
        }
        Ok(tx.commit().await?.expect("sets are something to commit"))
    }

    /// Removes one key in a transaction of its own.
    pub async fn remove(&self, suffix: &str) -> Result<()> {
        let tx = self.store.begin();
        tx.clear(&self.key(suffix));
        tx.commit().await.map(drop)
    }

    /// Applies one operation in a transaction of its own.
    pub async fn operate(&self, op: AtomicOp, suffix: &str, operand: &[u8]) -> Result<()> {
        let tx = self.store.begin();
        tx.atomic(op, &self.key(suffix), operand);
        tx.commit().await.map(drop)
    }

    /// Reads one key in a new transaction.
    pub async fn value(&self, suffix: impl AsRef<[u8]>) -> Result<Option<Bytes>> {
        self.store.begin().get(&self.key(suffix), Isolation::Snapshot).await
    }

    /// Returns the suffixes of all keys of the case, as a new transaction reads them.
    pub async fn suffixes(&self) -> Result<Vec<String>> {
        self.suffixes_in(&self.store.begin(), RangeRead::new(self.all())).await
    }

    /// Returns the suffixes of the rows that `tx` reads in one serializable page.
    pub async fn suffixes_in(&self, tx: &Transaction, read: RangeRead) -> Result<Vec<String>> {
        let page = tx.get_range(&read, Isolation::Serializable).await?;
        Ok(page.rows.iter().map(|(key, _)| self.suffix(key)).collect())
    }

    /// Returns `key` without the prefix.
    pub fn suffix(&self, key: &[u8]) -> String {
        let suffix = key.strip_prefix(&self.prefix[..]).expect("a case reads only its own keys");
        String::from_utf8_lossy(suffix).into_owned()
    }

    /// Waits until every transaction that has a read version is too old.
    pub async fn outlive(&self) {
        // An idle cluster forgets old versions only every few seconds.
        let time = Transaction::LIFETIME + Duration::from_secs(5);
        match &self.clock {
            Some(clock) => {
                let time_ms = u64::try_from(time.as_millis()).expect("it is short");
                clock.skipped_ms.fetch_add(time_ms, Ordering::SeqCst);
            }
            None => tokio::time::sleep(time).await,
        }
    }
}

/// Asserts that `result` failed with `expected`.
#[track_caller]
pub(crate) fn fails<T>(result: Result<T>, expected: &StoreError) {
    match result {
        Ok(_) => panic!("expected {expected}, but it succeeded"),
        Err(error) => assert_eq!(error.code(), Some(expected.code()), "{error}"),
    }
}

/// Commits `tx` and asserts that it conflicts.
pub(crate) async fn conflicts(tx: &Transaction) {
    fails(tx.commit().await, &StoreError::NOT_COMMITTED);
}

/// Waits for an expected event.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it happens in time")
}

/// Whether `watch` is still pending after 200 ms.
pub(crate) async fn still_waits(watch: &mut Watch) -> bool {
    tokio::time::timeout(Duration::from_millis(200), watch).await.is_err()
}

/// Returns an error of a transaction's body, as opposed to the store's.
pub(crate) fn own_error() -> Error {
    Error::Invalid { what: "body", reason: "it does not want to".to_owned() }
}
