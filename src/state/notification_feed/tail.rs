//! [`NotificationTail`]: reads the feed as it grows.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{NotificationFeed, NotificationPage};
use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result},
    state::{
        feed::{Pulse, PulseRead},
        polls,
    },
};

/// The default number of rows per read.
const PAGE_ROWS: usize = 1_000;

/// How far a tail has read the feed, also where there were no rows, and when it did so.
#[derive(Debug)]
pub(crate) struct TailProgress(Mutex<(Sequence, Duration)>);

impl TailProgress {
    /// Of a tail that has begun at `start`, at the time `now`.
    pub fn new(start: Sequence, now: Duration) -> Arc<Self> {
        Arc::new(Self(Mutex::new((start, now))))
    }

    /// Notes at `now` that everything up to `to` was read.
    pub fn note(&self, to: Sequence, now: Duration) {
        *self.0.lock() = (to, now);
    }

    /// The position up to which everything was read, and the time of the last read.
    #[cfg(feature = "http")]
    pub fn get(&self) -> (Sequence, Duration) {
        *self.0.lock()
    }
}

/// Reads the feed as it grows. Between pages it waits for the notifiers of this process, for watches, and for a poll
/// that finds rows without a hint.
pub struct NotificationTail {
    feed: NotificationFeed,
    /// The position up to which rows were returned.
    cursor: Cursor,
    /// The most rows per read.
    limit: usize,
    pulse: Pulse,
    /// Whether everything was read, so that the next page waits.
    is_at_end: bool,
    /// Whether the last page had more after it.
    had_more: bool,
    /// Where each read puts what it has come to, also one that finds no rows.
    progress: Arc<TailProgress>,
}

impl NotificationTail {
    pub(super) fn new(feed: NotificationFeed, after: Cursor) -> Self {
        Self {
            pulse: Pulse::new(&feed.context, &feed.id),
            feed,
            cursor: after,
            limit: PAGE_ROWS,
            is_at_end: false,
            had_more: false,
            progress: TailProgress::new(after.position(), Duration::ZERO),
        }
    }

    /// Notes each read in `progress`.
    pub(crate) fn report_to(&mut self, progress: Arc<TailProgress>) {
        self.progress = progress;
    }

    /// Reads at most `limit` rows at once, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Polls this often for rows without a hint. Default: 1 s; at least 10 ms.
    #[must_use]
    pub fn with_poll_interval(mut self, poll_interval: Duration) -> Self {
        self.pulse.poll_every(poll_interval);
        self
    }

    /// Goes on from another position, for example after [`Error::Expired`](crate::Error::Expired).
    pub fn restart(&mut self, after: impl Into<Cursor>) {
        self.cursor = after.into();
        self.pulse.forget();
        self.is_at_end = false;
        self.had_more = false;
    }

    /// The next page, once there is one. A page is empty only after a page that had more after it, or if all its rows were left out.
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
            let (found, read) = self.read().await?;
            let page = match found {
                Ok(page) => page,
                Err(to) => {
                    self.pulse.adopt(read, true);
                    (self.cursor, self.is_at_end) = (to.into(), true);
                    continue;
                }
            };
            let before = std::mem::replace(&mut self.cursor, page.next).position();
            self.is_at_end = !page.more;
            self.pulse.adopt(read, self.is_at_end);
            let had_more = std::mem::replace(&mut self.had_more, page.more);
            // Rows that are left out move the position, too: barriers wait for it.
            if had_more || !page.rows.is_empty() || self.cursor.position() > before {
                return Ok(page);
            }
        }
    }

    /// The next rows, or the position up to which there are none; and the result of the poll.
    async fn read(&mut self) -> Result<(std::result::Result<NotificationPage, Sequence>, PulseRead)> {
        let poll = self.pulse.take_poll();
        let (feed, cursor, limit, probe) = (&self.feed, self.cursor, self.limit, self.pulse.probe());
        let appended = async |tx| feed.appended_in(&tx, cursor, limit, probe).await;
        let (found, read) = polls::read(poll, &feed.context.db, appended).await?;
        let to = found.as_ref().map_or_else(|to| *to, |page: &NotificationPage| page.next.position());
        self.progress.note(to, feed.context.env().now());
        Ok((found, read))
    }
}

impl std::fmt::Debug for NotificationTail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotificationTail").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
