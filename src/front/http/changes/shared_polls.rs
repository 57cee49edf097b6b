//! [`SharedPolls`] shares the results of polls: reads of the store by waiting feeds without a notification.
//!
//! Notifications wake feeds for nearly all changes. The polls keep the others from leaving a feed asleep forever. A thousand feeds
//! of one database would all find the same, so they share one poll.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;

use crate::{
    base::{
        encoding::Sequence,
        error::Result,
        event::{Db, DbInstance},
    },
    roles::changes::Change,
    state::feed::Feed,
};

/// For how many databases results are remembered. With more databases, some feeds poll more often.
const DATABASES_MAX: usize = 10_000;

/// The result of a poll.
#[derive(Debug, Clone, Copy)]
struct Found {
    /// When a feed began to poll.
    at: Duration,
    /// The sequence of the newest row; zero if there is none.
    last: Sequence,
}

#[derive(Debug)]
pub(super) struct SharedPolls {
    /// How long a result stays valid.
    fresh: Duration,
    /// The results by database.
    found: Mutex<HashMap<DbInstance, Found>>,
}

impl SharedPolls {
    /// Makes an empty memory of results. Feeds see changes within `interval`.
    pub fn new(interval: Duration) -> Self {
        Self { fresh: interval / 4, found: Mutex::default() }
    }

    /// Returns whether there may be more to read after `position`; the feed has read everything before it. Fails if the changes
    /// were removed, and as a read does.
    pub async fn has_news(&self, feed: &Feed<Change>, db: &Db, position: Sequence) -> Result<bool> {
        let now = feed.context.env().now();
        if let Some(last) = self.lately(db.instance, now) {
            return Ok(last > position);
        }
        let last = feed.last_sequence().await?.unwrap_or(Sequence::MIN);
        self.remember(db.instance, Found { at: now, last });
        Ok(last > position)
    }

    /// Returns the last result for `instance`; `None` if it is time to poll.
    fn lately(&self, instance: DbInstance, now: Duration) -> Option<Sequence> {
        let found = self.found.lock();
        let found = found.get(&instance).filter(|found| now.saturating_sub(found.at) < self.fresh);
        found.map(|found| found.last)
    }

    fn remember(&self, instance: DbInstance, new: Found) {
        let mut found = self.found.lock();
        if found.len() >= DATABASES_MAX {
            found.clear();
        }
        found.insert(instance, new);
    }
}
