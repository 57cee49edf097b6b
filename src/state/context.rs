//! [`Context`]: what all roles of one bus in one process share.

use std::sync::{Arc, OnceLock};

use tokio::task::JoinHandle;

use crate::{
    base::{env::Env, error::Error},
    state::{
        feed_wakeups::FeedWakeups,
        keys::{Config, FeedId, Keys},
        routing::Schemes,
        signals::Signals,
        skipped::{Place, Skipped},
        stats::Stats,
        trigger_board::TriggerBoard,
    },
    store::Database,
};

/// What all roles of one bus in one process share.
#[derive(Debug)]
pub(crate) struct Context {
    pub db: Database,
    /// The keys of the bus.
    pub keys: Keys,
    /// What is fixed since the bus was created.
    pub config: Config,
    /// How ids are routed to shards.
    pub schemes: Schemes,
    /// Wake-ups within the process.
    pub signals: Arc<Signals>,
    /// What consumers of feeds are told.
    pub arrivals: FeedWakeups,
    /// What the roles have done.
    pub stats: Arc<Stats>,
    /// The rows that cannot be decoded.
    pub skipped: Skipped,
    /// The triggers of this process.
    pub triggers: TriggerBoard,
    /// The feed of notifications.
    pub feed: FeedId,
    /// Rings doorbells as long as anything of the bus is used.
    pub ringer: OnceLock<Background>,
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
    /// The context of the bus with these keys and this configuration.
    pub fn new(db: Database, keys: Keys, config: Config, schemes: Schemes) -> Arc<Self> {
        let signals = Arc::new(Signals::new(config.partitions));
        let stats = Arc::default();
        let ringer = OnceLock::new();
        let (feed, arrivals, skipped) = (FeedId::notifications(), FeedWakeups::default(), Skipped::default());
        let triggers = TriggerBoard::default();
        Arc::new(Self {
            db,
            keys,
            config,
            schemes,
            signals,
            arrivals,
            stats,
            skipped,
            triggers,
            feed,
            ringer,
        })
    }

    /// Somebody goes on without the row at `place`, which cannot be decoded.
    pub fn skip(&self, place: &Place, error: &Error) {
        self.skipped.note(self.env(), &self.stats, place, error);
    }

    /// Time and randomness.
    pub fn env(&self) -> &Env {
        self.db.env()
    }
}
