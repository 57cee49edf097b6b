//! [`Context`]: what all roles of one bus in one process share.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use tokio::task::JoinHandle;

use crate::{
    base::{
        env::Env,
        error::{Error, Result},
    },
    state::{
        failing::Failing,
        keys::{Config, FeedId, Keys},
        last_seen::NodesSeen,
        page_cache::PageCache,
        polls::Polls,
        routing::Schemes,
        signals::Signals,
        skipped::{Skipped, SkippedAt},
        stats::Stats,
        wakeups::Wakeups,
    },
    store::Store,
};

/// The name under which failures of the history check are logged.
const HISTORY: &str = "history of the store";

/// What all roles of one bus in one process share.
#[derive(Debug)]
pub(crate) struct Context {
    pub store: Store,
    pub keys: Keys,
    /// The settings that are fixed when the bus is created.
    pub config: Config,
    pub schemes: Schemes,
    /// Wakes the notifiers.
    pub signals: Arc<Signals>,
    /// Wakes everything that waits for rows.
    pub wakeups: Wakeups,
    /// The last pages that consumers have read.
    pub pages: PageCache,
    /// The polls of everything that waits for hints.
    pub polls: Arc<Polls>,
    pub nodes_seen: Arc<NodesSeen>,
    pub stats: Arc<Stats>,
    pub skipped: Arc<Skipped>,
    /// The failures that hold up shards of consumers.
    pub failing: Failing,
    pub feed: FeedId,
    /// The task that rings doorbells as long as any part of the bus is in use.
    pub ringer: OnceLock<Background>,
    /// Whether the last check of the history in this process found that the store is at a lower version than its own rows.
    is_older: AtomicBool,
}

/// A task that ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Background(pub JoinHandle<()>);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Context {
    pub fn new(store: Store, keys: Keys, config: Config, schemes: Schemes) -> Arc<Self> {
        let signals = Arc::new(Signals::new(config.partitions));
        let stats = Arc::default();
        let ringer = OnceLock::new();
        let (feed, wakeups, skipped) = (FeedId::notifications(), Wakeups::default(), Arc::default());
        let polls = Polls::new(store.env());
        Arc::new(Self {
            store,
            keys,
            config,
            schemes,
            signals,
            wakeups,
            pages: PageCache::default(),
            polls,
            nodes_seen: Arc::default(),
            stats,
            skipped,
            failing: Failing::default(),
            feed,
            ringer,
            is_older: AtomicBool::new(false),
        })
    }

    /// Notes that a reader skipped the row at `place`, which cannot be decoded.
    pub fn skip(&self, place: &SkippedAt, error: &Error) {
        self.skipped.note(self.env(), &self.stats, place, error);
    }

    /// Notes whether a check of the history found that the store is older than its own rows. If so, the log and the status report it.
    pub fn note_history<T>(&self, check: Result<T>) -> Result<T> {
        match &check {
            Ok(_) => {
                self.is_older.store(false, Ordering::Relaxed);
                self.stats.health.works(HISTORY, 0);
            }
            Err(error @ Error::OlderThanRows { .. }) => {
                self.is_older.store(true, Ordering::Relaxed);
                self.stats.health.failed(self.env(), HISTORY, 0, error);
            }
            Err(_) => {}
        }
        check
    }

    /// Whether the store's versions are behind those in its rows ([`Error::OlderThanRows`]), as far as this process knows.
    pub fn is_older(&self) -> bool {
        self.is_older.load(Ordering::Relaxed)
    }

    pub fn env(&self) -> &Env {
        self.store.env()
    }
}
