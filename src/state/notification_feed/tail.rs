//! [`NotificationTail`]: reads the feed as it grows.

use std::time::Duration;

use super::{NotificationFeed, NotificationPage};
use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result},
    state::feed::{Pulse, PulseRead},
};

/// The most rows that are read at once, if nothing else is asked for.
const PAGE_ROWS: usize = 1_000;

/// Reads the feed as it grows. Between pages it is woken by the notifiers of this process, by watches, and by a poll that
/// makes good what those have missed.
pub struct NotificationTail {
    /// The feed.
    feed: NotificationFeed,
    /// What was returned.
    cursor: Cursor,
    /// The most rows that are read at once.
    limit: usize,
    /// Tells when there may be rows.
    pulse: Pulse,
    /// Whether everything was read, so that the next page waits.
    is_at_end: bool,
    /// Whether the last page said that there was more.
    had_more: bool,
}

impl NotificationTail {
    /// A tail of `feed` that starts after `after`.
    pub(super) fn new(feed: NotificationFeed, after: Cursor) -> Self {
        Self {
            pulse: Pulse::new(&feed.context, &feed.id),
            feed,
            cursor: after,
            limit: PAGE_ROWS,
            is_at_end: false,
            had_more: false,
        }
    }

    /// Reads at most `limit` rows at once, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Looks this often for rows that no hint has told of. Default: 1 s.
    #[must_use]
    pub fn with_poll_interval(mut self, poll_interval: Duration) -> Self {
        self.pulse.poll_interval = poll_interval;
        self
    }

    /// Goes on from another position, as after [`Error::Expired`](crate::Error::Expired).
    pub fn restart(&mut self, after: impl Into<Cursor>) {
        self.cursor = after.into();
        self.pulse.forget();
        self.is_at_end = false;
        self.had_more = false;
    }

    /// The next page, once there is one. A page is empty only after one that said there was more.
    ///
    /// # Cancel safety
    ///
    /// A page that was not returned is returned by the next call.
    pub async fn next(&mut self) -> Result<NotificationPage> {
        loop {
            if self.is_at_end {
                self.pulse.wait().await;
                self.is_at_end = false;
            }
            self.pulse.begin();
            let (found, look) = self.read().await?;
            let page = match found {
                Ok(page) => page,
                Err(to) => {
                    self.pulse.adopt(look, true);
                    (self.cursor, self.is_at_end) = (to.into(), true);
                    continue;
                }
            };
            self.cursor = page.next;
            self.is_at_end = !page.more;
            self.pulse.adopt(look, self.is_at_end);
            let had_more = std::mem::replace(&mut self.had_more, page.more);
            if had_more || !page.rows.is_empty() {
                return Ok(page);
            }
        }
    }

    /// The next rows, or up to where there are none; and what the pulse says.
    async fn read(&mut self) -> Result<(std::result::Result<NotificationPage, Sequence>, PulseRead)> {
        let (feed, cursor, limit, probe) = (&self.feed, self.cursor, self.limit, self.pulse.probe());
        let read = async |tx| {
            let mut look = probe.look(&tx).await?;
            let found = match look.unchanged() {
                Some(to) => Err(to),
                None => Ok(feed.page_in(&tx, cursor, limit).await?),
            };
            if !found.as_ref().is_ok_and(|page| page.more) {
                probe.watch(&tx, &mut look).await?;
            }
            Ok((found, look))
        };
        feed.context.db.run(read).await
    }
}

impl std::fmt::Debug for NotificationTail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotificationTail").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
