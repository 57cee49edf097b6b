//! [`Context`]: what all roles of one bus in one process share.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::{
    base::{encoding::Sequence, env::Env, error::Error},
    state::{
        feed_wakeups::FeedWakeups,
        keys::{Config, FeedId, Keys},
        polls::Polls,
        routing::Schemes,
        signals::Signals,
        skipped::{Skipped, SkippedAt},
        stats::Stats,
        trigger_board::TriggerBoard,
    },
    store::Database,
};

/// What all roles of one bus in one process share.
#[derive(Debug)]
pub(crate) struct Context {
    pub db: Database,
    pub keys: Keys,
    /// The settings that are fixed when the bus is created.
    pub config: Config,
    pub schemes: Schemes,
    pub signals: Arc<Signals>,
    /// Informs consumers of feeds of new rows.
    pub wakeups: FeedWakeups,
    /// The polls of everything that waits for hints.
    pub polls: Arc<Polls>,
    pub stats: Arc<Stats>,
    pub skipped: Arc<Skipped>,
    pub lost_horizons: LostHorizons,
    pub triggers: TriggerBoard,
    pub feed: FeedId,
    /// Rings doorbells as long as anything of the bus is used.
    pub ringer: OnceLock<Background>,
}

/// The bounds of horizons that cannot be decoded, by feed: the damaged bytes, and the last sequence that the process could
/// read when it first met them.
#[derive(Debug, Default)]
pub(crate) struct LostHorizons(Mutex<BTreeMap<FeedId, (Bytes, Sequence)>>);

impl LostHorizons {
    /// The bound of the horizon of `feed`, which is `damaged`; `last` if it was not met before.
    pub fn get(&self, feed: &FeedId, damaged: &Bytes, last: Sequence) -> Sequence {
        let mut bounds = self.0.lock();
        let bound = bounds.entry(feed.clone()).or_insert_with(|| (damaged.clone(), last));
        if bound.0 != damaged {
            *bound = (damaged.clone(), last);
        }
        bound.1
    }
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
    pub fn new(db: Database, keys: Keys, config: Config, schemes: Schemes) -> Arc<Self> {
        let signals = Arc::new(Signals::new(config.partitions));
        let stats = Arc::default();
        let ringer = OnceLock::new();
        let (feed, wakeups, skipped) = (FeedId::notifications(), FeedWakeups::default(), Arc::default());
        let (triggers, polls) = (TriggerBoard::default(), Polls::new(db.env()));
        Arc::new(Self {
            db,
            keys,
            config,
            schemes,
            signals,
            wakeups,
            polls,
            stats,
            skipped,
            lost_horizons: LostHorizons::default(),
            triggers,
            feed,
            ringer,
        })
    }

    /// Notes that a reader went on without the row at `place`, which cannot be decoded.
    pub fn skip(&self, place: &SkippedAt, error: &Error) {
        self.skipped.note(self.env(), &self.stats, place, error);
    }

    pub fn env(&self) -> &Env {
        self.db.env()
    }
}
