//! [`Observers`]: the subscribers of a replay.

use std::sync::Arc;

use notibus::{Dispatcher, EventKind, Filter, Kinds};

use super::observer::{Latencies, Observer};
use crate::failure::Failure;

/// The subscribers of a replay.
pub struct Observers {
    /// Gets updates of every database, like an indexer.
    pub indexer: Observer,
    /// Databases whose name contains "replicator".
    pub replicator: Observer,
    pub db_updates: Observer,
}

impl Observers {
    pub fn start(dispatcher: &Dispatcher, latencies: &Arc<Latencies>) -> Result<Self, Failure> {
        let updates = Kinds::from(EventKind::Updated) | EventKind::DdocUpdated.into();
        let is_replicator = |name: &str| name.contains("replicator");
        Ok(Self {
            indexer: Observer::start(
                dispatcher,
                "indexer",
                Filter::all().kinds(updates)?,
                updates,
                |_| true,
                None,
            ),
            replicator: Observer::start(
                dispatcher,
                "replicator",
                Filter::predicate(move |row| is_replicator(row.name.as_str())),
                Kinds::ALL,
                is_replicator,
                None,
            ),
            db_updates: Observer::start(
                dispatcher,
                "db_updates",
                Filter::all(),
                Kinds::ALL,
                |_| true,
                Some(Arc::clone(latencies)),
            ),
        })
    }

    pub fn all(&self) -> [&Observer; 3] {
        [&self.indexer, &self.replicator, &self.db_updates]
    }
}
