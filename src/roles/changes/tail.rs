//! [`ChangesTail`]: reads the changes of a database as they come.

use std::time::Duration;

use tokio_stream::StreamExt;

use super::Change;
use crate::{
    base::{cursor::Cursor, env::Env, error::Result},
    roles::dispatcher::Subscription,
    state::feed::{Feed, FeedPage},
};

/// How often the tail looks for rows once there is no dispatcher that could tell of them.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// How long it may take at most until the tail looks although nothing tells it to, if nothing else is asked for.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_mins(5);

/// Reads the changes of a database as they come. It is woken by the database's notifications: an edit and its event are one
/// transaction, so a notification comes after every edit, as long as a notifier is at work on some node. Once its dispatcher has
/// ended it looks every 10 s.
///
/// Of some things no notification tells: of changes that were removed without the event that their database was deleted, and of
/// edits of a database that the bus holds for replaced. So it looks at the store every few minutes all the same, at some time
/// within [`ChangesTail::with_look_interval`].
#[derive(Debug)]
pub struct ChangesTail {
    /// The changes.
    feed: Feed<Change>,
    /// What was returned.
    cursor: Cursor,
    /// The most rows that are read at once.
    limit: usize,
    /// The notifications of the database; `None` after they have ended.
    updates: Option<Subscription>,
    /// Whether everything was read.
    is_at_end: bool,
    /// How long it may take at most until it looks although nothing tells it to.
    look_interval: Duration,
    /// When it looks next, once it waits.
    look_at: Option<Duration>,
}

impl ChangesTail {
    /// A tail that starts after `after`, and is woken by `updates`, which have begun.
    pub(super) fn new(feed: Feed<Change>, after: Cursor, updates: Subscription) -> Self {
        Self {
            feed,
            cursor: after,
            limit: 1_000,
            updates: Some(updates),
            is_at_end: false,
            look_interval: LOOK_INTERVAL,
            look_at: None,
        }
    }

    /// Reads at most `limit` rows at once, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Looks at the store after at most this time, and half of it at least, if no notification comes. Default: 5 min; at least
    /// 1 s.
    #[must_use]
    pub fn with_look_interval(self, look_interval: Duration) -> Self {
        Self { look_interval: look_interval.max(Duration::from_secs(1)), ..self }
    }

    /// The next page, once there is one. It has rows, unless the page before said that there was more.
    ///
    /// Fails as [`Feed::page`] does, with [`Error::NoFeed`](crate::Error::NoFeed) once the database's changes were removed.
    ///
    /// # Cancel safety
    ///
    /// A page that was not returned is returned by the next call.
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
        let look_at =
            *self.look_at.get_or_insert_with(|| env.now().saturating_add(some_time(env, self.look_interval)));
        // Whatever the notification says, the feed knows better.
        let is_told = tokio::select! {
            told = updates.next() => told.is_some(),
            () = env.sleep(look_at.saturating_sub(env.now())) => true,
        };
        self.look_at = None;
        if !is_told {
            self.updates = None;
        }
    }
}

/// A time in the second half of `interval`, so that those who began together do not look together.
pub(crate) fn some_time(env: &Env, interval: Duration) -> Duration {
    env.spread(interval, 0.5, 1.0)
}
