//! [`ChangesTail`]: reads the changes of a database as they appear.

use std::time::Duration;

use tokio_stream::StreamExt;

use super::Change;
use crate::{
    base::{cursor::Cursor, error::Result},
    roles::dispatcher::Subscription,
    state::{
        feed::{Feed, FeedPage},
        feed_watcher::Listener,
    },
};

/// How often the tail polls after its dispatcher has ended.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Reads the changes of a database as they appear. The database's notifications wake it: an edit and its event are in one transaction, so a
/// notification follows every edit, as long as a notifier runs on some node. Once its dispatcher has ended, the tail polls every 10 s.
///
/// Some changes have no notification: the removal of all changes without a `deleted` event for their database, and edits of a database that
/// the bus considers replaced. The process's poll finds these changes within a minute, or later if the process has readers on more than
/// 1,000 feeds of documents.
#[derive(Debug)]
pub struct ChangesTail {
    feed: Feed<Change>,
    /// The cursor after everything that was returned.
    cursor: Cursor,
    limit: usize,
    /// Notifications of the database; `None` once they have ended.
    updates: Option<Subscription>,
    /// Whether everything was read.
    is_at_end: bool,
    /// Reports what the poll of the process finds.
    listener: Option<Listener>,
}

impl ChangesTail {
    pub(super) fn new(feed: Feed<Change>, after: Cursor, updates: Subscription) -> Self {
        Self { feed, cursor: after, limit: 1_000, updates: Some(updates), is_at_end: false, listener: None }
    }

    /// Limits a page to `limit` rows, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Waits for the next page, which has at least one row.
    ///
    /// Fails as [`Feed::page`] does, and with [`Error::NoFeed`](crate::Error::NoFeed) once the database's changes have been removed.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, nothing is lost: the next call returns the page.
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

    /// Completes when there may be new rows.
    async fn wait(&mut self) {
        let context = &self.feed.context;
        let Some(updates) = &mut self.updates else {
            return context.env().sleep(POLL_INTERVAL).await;
        };
        let (id, read) = (&self.feed.id, self.cursor.position());
        let listener = self.listener.get_or_insert_with(|| Listener::to_documents(context, id));
        // The notification only wakes the tail; the rows are in the feed.
        tokio::select! {
            update = updates.next() => {
                if update.is_none() {
                    self.updates = None;
                }
            }
            () = listener.changed(|heads| heads.any_may_have_rows(read)) => {}
        }
    }
}
