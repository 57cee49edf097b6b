//! [`ChangesTail`]: reads the changes of a database as they come.

use std::time::Duration;

use tokio_stream::StreamExt;

use super::Change;
use crate::{
    dispatcher::Subscription,
    encoding::Sequence,
    error::Result,
    feed::{Cursor, Feed, FeedPage},
};

/// How often the tail looks for rows once there is no dispatcher that could tell of them.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Reads the changes of a database as they come. It is woken by the database's notifications, and looks at nothing meanwhile:
/// an edit and its event are one transaction, so a notification comes after every edit, as long as a notifier is at work on
/// some node. Only once its dispatcher has ended it looks every 10 s.
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
}

impl ChangesTail {
    /// A tail that starts after `after`, and is woken by `updates`, which have begun.
    pub(super) fn new(feed: Feed<Change>, after: Sequence, updates: Subscription) -> Self {
        Self { feed, cursor: after.into(), limit: 1_000, updates: Some(updates), is_at_end: false }
    }

    /// Reads at most `limit` rows at once, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
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
        let Some(updates) = &mut self.updates else {
            return self.feed.context.env().sleep(POLL_INTERVAL).await;
        };
        // Whatever the notification says, the feed knows better.
        if updates.next().await.is_none() {
            self.updates = None;
        }
    }
}
