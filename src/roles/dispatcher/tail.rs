//! The tail: the one task of a node that reads the feed as it grows.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;

use super::shared::Shared;
use crate::{base::error::Error, state::notification_feed::NotificationTail};

const TAIL: &str = "tail of a dispatcher";

/// Pause of the tail after a failure.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// Reads the feed from the position of the ring, and publishes what it reads, until it is aborted. After a panic it starts again,
/// which subscribers do not notice.
pub(super) async fn run(shared: Arc<Shared>) {
    let options = &shared.options;
    loop {
        let tail = shared.feed.tail(shared.ring.read().position());
        let tail = tail.with_limit(options.page_rows_max).with_poll_interval(options.poll_interval);
        let _panic = AssertUnwindSafe(read(&shared, tail)).catch_unwind().await;
        shared.context.stats.tail_panics.add(1);
        tracing::error!("the tail of a dispatcher has panicked and starts again");
        shared.context.env().sleep(FAILURE_PAUSE).await;
    }
}

async fn read(shared: &Shared, mut tail: NotificationTail) -> ! {
    loop {
        match tail.next().await {
            Ok(page) => {
                shared.context.stats.health.works(TAIL, 0);
                shared.context.stats.rows_tailed.add(page.rows.len() as u64);
                tracing::debug_span!("batch", rows = page.rows.len(), to = %page.to)
                    .in_scope(|| shared.publish(page.rows, page.to, !page.more));
                // Subscribers of this thread get their turn between two pages.
                tokio::task::yield_now().await;
            }
            Err(Error::Expired { horizon }) => {
                tracing::error!(%horizon, "the tail was away for too long: its subscribers start again");
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
