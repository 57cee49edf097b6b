//! [`ChangesTail`]: reads the changes of a database as they appear.

use std::time::Duration;

use tokio_stream::StreamExt;

use super::Change;
use crate::{
    base::{cursor::Cursor, env::Env, error::Result},
    roles::dispatcher::Subscription,
    state::feed::{Feed, FeedPage},
};

/// How often the tail polls after its dispatcher has ended.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Default for the longest time between polls while the dispatcher runs.
pub(crate) const FALLBACK_INTERVAL: Duration = Duration::from_mins(5);

/// Reads the changes of a database as they appear. The database's notifications wake it: an edit and its event are one
/// transaction, so a notification follows every edit, as long as a notifier runs on some node. Once its dispatcher has
/// ended, it polls every 10 s.
///
/// Some changes have no notification: changes that were removed without the event that their database was deleted, and
/// edits of a database that the bus takes for replaced. So it also polls the store every few minutes, at a random time
/// within [`ChangesTail::with_fallback_interval`].
#[derive(Debug)]
pub struct ChangesTail {
    feed: Feed<Change>,
    /// Covers everything that was returned.
    cursor: Cursor,
    limit: usize,
    /// Notifications of the database; `None` after they have ended.
    updates: Option<Subscription>,
    /// Whether everything was read.
    is_at_end: bool,
    /// The longest time between polls without a notification.
    fallback_interval: Duration,
    /// When it polls next, while it waits.
    poll_at: Option<Duration>,
}

impl ChangesTail {
    pub(super) fn new(feed: Feed<Change>, after: Cursor, updates: Subscription) -> Self {
        Self {
            feed,
            cursor: after,
            limit: 1_000,
            updates: Some(updates),
            is_at_end: false,
            fallback_interval: FALLBACK_INTERVAL,
            poll_at: None,
        }
    }

    /// Limits a page to `limit` rows, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Sets the longest time between polls without a notification; it polls after half of it at least. Default: 5 min; at least
    /// 1 s.
    #[must_use]
    pub fn with_fallback_interval(self, fallback_interval: Duration) -> Self {
        Self { fallback_interval: fallback_interval.max(Duration::from_secs(1)), ..self }
    }

    /// Waits for the next page. It has rows, unless the page before said that there was more.
    ///
    /// Fails as [`Feed::page`] does, and with [`Error::NoFeed`](crate::Error::NoFeed) once the database's changes were removed.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the next call returns the page.
    pub async fn next(&mut self) -> Result<FeedPage<Change>> {
        loop {
            if self.is_at_end {
                self.wait().await;
                self.is_at_end = false;
            }
            let page = self.feed.page(self.cursor, self.limit).await?;
            self.cursor = page.next;
            self.is_at_end = !page.more;
            if !page.rows.is_empty() {
                return Ok(page);
            }
        }
    }

    /// Completes when there may be rows.
    async fn wait(&mut self) {
        let env = self.feed.context.env();
        let Some(updates) = &mut self.updates else {
            return env.sleep(POLL_INTERVAL).await;
        };
        let poll_at = *self
            .poll_at
            .get_or_insert_with(|| env.now().saturating_add(some_time(env, self.fallback_interval)));
        // The notification only wakes; the feed has the rows.
        let is_woken = tokio::select! {
        update = updates.next() => update.is_some(),
            () = env.sleep(poll_at.saturating_sub(env.now())) => true,
        };
        self.poll_at = None;
        if !is_woken {
            self.updates = None;
        }
    }
}

/// A random time in the second half of `interval`, so that tails that began together do not poll together.
pub(crate) fn some_time(env: &Env, interval: Duration) -> Duration {
    env.spread(interval, 0.5, 1.0)
}
