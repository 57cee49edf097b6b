//! [`NotificationTail`]: reads the feed as it grows.

use std::time::Duration;

use futures_util::future::{BoxFuture, pending};
use tokio::sync::watch;

use super::{NotificationFeed, NotificationPage};
use crate::{
    bugs::{Bug, is_on},
    encoding::Sequence,
    error::Result,
    feed::Cursor,
};

/// How long the tail waits for the notifiers of its own process before it sets watches for those of others. Under steady
/// local load no watch is ever set.
const QUIET: Duration = Duration::from_millis(10);

/// How often the tail looks for rows that no hint has told of, if nothing else is asked for.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

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
    /// How often to look for rows that no hint has told of.
    poll_interval: Duration,
    /// Counts the appends of this process.
    appends: watch::Receiver<u64>,
    /// The watches that are set, if any.
    fired: Option<BoxFuture<'static, bool>>,
    /// Whether the next read sets watches.
    arm: bool,
    /// Whether everything was read, so that the next page waits.
    is_at_end: bool,
    /// Whether the last page said that there was more.
    had_more: bool,
}

impl NotificationTail {
    /// A tail of `feed` that starts after `after`.
    pub(super) fn new(feed: NotificationFeed, after: Sequence) -> Self {
        let appends = feed.context.signals.appends();
        Self {
            feed,
            cursor: after.into(),
            limit: PAGE_ROWS,
            poll_interval: POLL_INTERVAL,
            appends,
            fired: None,
            arm: true,
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
    pub fn with_poll_interval(self, poll_interval: Duration) -> Self {
        Self { poll_interval, ..self }
    }

    /// Goes on from another position, as after [`Error::Expired`](crate::Error::Expired).
    pub fn restart(&mut self, after: Sequence) {
        self.cursor = after.into();
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
                self.wait().await;
                self.is_at_end = false;
            }
            self.appends.mark_unchanged();
            let page = if self.arm {
                let (page, fired) = self.feed.page_and_watch(self.cursor, self.limit).await?;
                self.fired = fired.or(self.fired.take());
                page
            } else {
                self.feed.page(self.cursor, self.limit).await?
            };
            self.cursor = page.next;
            self.is_at_end = !page.more;
            let had_more = std::mem::replace(&mut self.had_more, page.more);
            if had_more || !page.rows.is_empty() {
                return Ok(page);
            }
        }
    }

    /// Completes when there may be rows; then `arm` says whether the next read sets watches.
    async fn wait(&mut self) {
        // Where watches were just refused, asking again at once would not help.
        let is_watching = self.fired.is_some();
        let pause = if is_watching || self.arm { self.poll_interval } else { QUIET.min(self.poll_interval) };
        let pause = if is_on(Bug::TailWithoutPoll) && is_watching { Duration::MAX } else { pause };
        let Self { fired, appends, feed, poll_interval, arm, .. } = self;
        let env = feed.context.env();
        *arm = tokio::select! {
            // A sender that is gone cannot be: the context that owns it is shared.
            _ = appends.changed() => false,
            changed = async { match &mut *fired { Some(fired) => fired.await, None => pending().await } } => {
                *fired = None;
                if !changed {
                    // Refused as late as this: the poll goes on, and asks again.
                    tokio::select! {
                        _ = appends.changed() => {}
                        () = env.sleep(*poll_interval) => {}
                    }
                }
                false
            }
            // Nothing for a while: set watches, unless they are set.
            () = env.sleep(pause) => !is_watching,
        };
    }
}

impl std::fmt::Debug for NotificationTail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NotificationTail").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
