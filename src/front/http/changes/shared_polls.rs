//! [`SharedPolls`]: what feeds that wait find when they look at the store although nothing tells them to.
//!
//! Notifications tell them of nearly everything; what no notification tells of must not leave them asleep for ever. A thousand
//! feeds of one database that look one after the other find the same, so they share one look.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use crate::{
    base::{
        encoding::Sequence,
        error::Result,
        event::{Db, DbInstance},
    },
    roles::changes::Change,
    state::feed::Feed,
};

/// Of how many databases it is remembered what was found. With more than that, some look again.
const DATABASES_MAX: usize = 10_000;

/// What was found.
#[derive(Debug, Clone, Copy)]
struct Found {
    /// When a feed began to look.
    at: Duration,
    /// The sequence of the newest row; zero if there is none.
    last: Sequence,
}

/// What feeds that wait have found in the store.
#[derive(Debug)]
pub(super) struct SharedPolls {
    /// For how long it holds what was found.
    fresh: Duration,
    /// What was found, by database.
    found: Mutex<HashMap<DbInstance, Found>>,
}

impl SharedPolls {
    /// Nothing was found yet. Feeds learn of news within `interval`.
    pub fn new(interval: Duration) -> Self {
        Self { fresh: interval / 4, found: Mutex::default() }
    }

    /// Whether there may be more to read behind `position`, up to which everything was read. Fails if the changes were removed,
    /// and as a read would.
    pub async fn has_news(&self, feed: &Feed<Change>, db: &Db, position: Sequence) -> Result<bool> {
        let now = feed.context.env().now();
        if let Some(last) = self.lately(db.instance, now) {
            return Ok(last > position);
        }
        let last = feed.last_sequence().await?.unwrap_or(Sequence::MIN);
        self.remember(db.instance, Found { at: now, last });
        Ok(last > position)
    }

    /// What was found of `instance` lately; `None` if it is time to look.
    fn lately(&self, instance: DbInstance, now: Duration) -> Option<Sequence> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let found = found.get(&instance).filter(|found| now.saturating_sub(found.at) < self.fresh);
        found.map(|found| found.last)
    }

    /// Remembers what was `found` of `instance`.
    fn remember(&self, instance: DbInstance, new: Found) {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if found.len() >= DATABASES_MAX {
            found.clear();
        }
        found.insert(instance, new);
    }
}
