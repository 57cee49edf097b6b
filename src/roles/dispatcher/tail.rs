//! The tail: the one task of a node that reads the feed as it grows.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;

use super::{options::DispatcherOptions, shared::Shared};
use crate::{base::error::Error, state::notification_feed::NotificationTail};

/// What is reported of the tail.
const TAIL: &str = "tail of a dispatcher";

/// How long the tail pauses after a failure that its transaction could not mend.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// Reads the feed from where the subscribers stand, and hands out what it reads, until it is aborted. After a panic it begins
/// again: the subscribers are none the wiser.
pub(super) async fn run(shared: Arc<Shared>, options: DispatcherOptions) {
    loop {
        let tail = shared.feed.tail(shared.ring.position());
        let tail = tail.with_limit(options.page_rows_max).with_poll_interval(options.poll_interval);
        let _panic = AssertUnwindSafe(read(&shared, tail)).catch_unwind().await;
        shared.context.stats.tail_panics.add(1);
        tracing::error!("the tail of a dispatcher has panicked and begins again");
        shared.context.env().sleep(FAILURE_PAUSE).await;
    }
}

/// Reads the feed and hands out what it reads.
async fn read(shared: &Shared, mut tail: NotificationTail) -> ! {
    loop {
        match tail.next().await {
            Ok(page) => {
                shared.context.stats.health.works(TAIL, 0);
                shared.context.stats.rows_tailed.add(page.rows.len() as u64);
                shared.hand_out(page.rows, page.to, !page.more);
                // Many pages in a row must not keep the subscribers of this thread waiting.
                tokio::task::yield_now().await;
            }
            Err(Error::Expired { horizon }) => {
                tracing::error!(%horizon, "the tail was away for too long, its subscribers start again");
                shared.expire(horizon);
                tail.restart(horizon);
            }
            Err(error) => {
                shared.context.stats.health.failed(shared.context.env(), TAIL, 0, &error);
                shared.context.env().sleep(FAILURE_PAUSE).await;
            }
        }
    }
}
