//! [`NotificationTail`]: a reader that follows the feed as it grows.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;

use super::{NotificationFeed, NotificationPage};
use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result},
    state::{
        feed_watcher::{Listener, POLL_INTERVAL},
        keys::{Lanes, PulseValue},
    },
    store::{Isolation, Transaction},
};

/// The default number of rows per read.
const PAGE_ROWS: usize = 1_000;

/// How far a tail has read the feed, including parts without rows, and when it last read.
#[derive(Debug)]
pub(crate) struct TailProgress(Mutex<(Sequence, Duration)>);

impl TailProgress {
    /// Creates the progress of a tail that began at `start`, at the time `now`.
    pub fn new(start: Sequence, now: Duration) -> Arc<Self> {
        Arc::new(Self(Mutex::new((start, now))))
    }

    /// Notes at `now` that everything up to `to` was read.
    pub fn note(&self, to: Sequence, now: Duration) {
        *self.0.lock() = (to, now);
    }

    /// Returns the position up to which everything was read, and the time of the last read.
    #[cfg(feature = "http")]
    pub fn get(&self) -> (Sequence, Duration) {
        *self.0.lock()
    }
}

/// Reads the feed as it grows. Between pages the tail waits for the one poll of the process, which happens when a notifier of this process
/// has appended, when a watch fires, and at regular intervals. Then the tail reads the shards whose lane of the pulse has moved since it
/// last read them all. It reads the pulse in the same transaction, so it sees every row that has moved to another shard meanwhile.
pub struct NotificationTail {
    feed: NotificationFeed,
    /// The position up to which rows were returned.
    cursor: Cursor,
    /// The maximum number of rows per read.
    limit: usize,
    poll_interval: Duration,
    /// Waits for the poll; set by the first read.
    listener: Option<Listener>,
    /// The pulse when the last read reached the end of all shards; `None` before that.
    complete: Option<PulseValue>,
    /// Whether everything was read, so that the next page waits.
    is_at_end: bool,
    /// Whether there was more to read after the last page.
    had_more: bool,
    /// Where each read records how far it got, even if it found no rows.
    progress: Arc<TailProgress>,
}

impl NotificationTail {
    pub(super) fn new(feed: NotificationFeed, after: Cursor) -> Self {
        Self {
            feed,
            cursor: after,
            limit: PAGE_ROWS,
            poll_interval: POLL_INTERVAL,
            listener: None,
            complete: None,
            is_at_end: false,
            had_more: false,
            progress: TailProgress::new(after.position(), Duration::ZERO),
        }
    }

    /// Makes each read record its progress in `progress`.
    pub(crate) fn report_to(&mut self, progress: Arc<TailProgress>) {
        self.progress = progress;
    }

    /// Sets the maximum number of rows per read, 1 to 10,000. Default: 1,000.
    #[must_use]
    pub fn with_limit(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// Sets how often to poll for rows when no hint arrives. Default: 1 s; at least 10 ms.
    #[must_use]
    pub fn with_poll_interval(mut self, poll_interval: Duration) -> Self {
        self.poll_interval = poll_interval;
        self
    }

    /// Continues from another position, for example after [`Error::Expired`](crate::Error::Expired).
    pub fn restart(&mut self, after: impl Into<Cursor>) {
        self.cursor = after.into();
        self.complete = None;
        self.is_at_end = false;
        self.had_more = false;
    }

    /// Returns the next page as soon as there is one. A page is empty only if the page before it reported more rows, or if it only advances
    /// the position: at the beginning, if its rows were left out, or if the poll of the process failed.
    ///
    /// # Cancel safety
    ///
    /// A page that was not returned is returned by the next call.
    pub async fn next(&mut self) -> Result<NotificationPage> {
        loop {
            if self.is_at_end {
                self.wait().await;
                self.is_at_end = false;
            }
            let page = self.read().await?;
            let before = std::mem::replace(&mut self.cursor, page.next).position();
            self.is_at_end = !page.more;
            let had_more = std::mem::replace(&mut self.had_more, page.more);
            // Rows that are left out also move the position, because barriers wait for it.
            if had_more || !page.rows.is_empty() || self.cursor.position() > before {
                return Ok(page);
            }
        }
    }

    /// Waits until there may be rows. While polls find none, the position advances with them. Cancel safe.
    async fn wait(&mut self) {
        while let Some(listener) = &mut self.listener {
            let Some(to) = listener.looked().await else { return };
            let position = self.cursor.position();
            if listener.heads().any_may_have_rows(position) {
                return;
            }
            self.cursor = to.max(position).into();
            self.progress.note(self.cursor.position(), self.feed.context.env().now());
        }
    }

    /// Reads the next rows.
    async fn read(&mut self) -> Result<NotificationPage> {
        let (context, interval) = (&self.feed.context, self.poll_interval);
        self.listener.get_or_insert_with(|| Listener::to_notifications(context, interval));
        let (feed, complete, cursor, limit) = (&self.feed, &self.complete, self.cursor, self.limit);
        let key = context.keys.pulse(&context.feed);
        let read = async |tx: Transaction| {
            let pulse = tx.get(&key, Isolation::Snapshot);
            let (pulse, begun) = tokio::try_join!(pulse, feed.raw().begin(&tx, cursor))?;
            let pulse = PulseValue::new(pulse);
            let lanes = complete.as_ref().map_or(Lanes::ALL, |before| pulse.moved_since(before));
            Ok((feed.page_of_lanes_in(&tx, begun, lanes, limit).await?, pulse))
        };
        let (page, pulse) = context.store.run(read).await?;
        if !page.more {
            // All shards have now been read up to here: those that were left out have not moved.
            self.complete = Some(pulse);
        }
        self.progress.note(page.next.position(), feed.context.env().now());
        Ok(page)
    }
}

impl std::fmt::Debug for NotificationTail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotificationTail").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
