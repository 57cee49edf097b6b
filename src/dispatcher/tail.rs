//! The tail: the one task of a node that reads the feed as it grows.

use std::{sync::Arc, time::Duration};

use super::Shared;
use crate::{error::Error, notification_feed::NotificationTail};

/// How long the tail pauses after a failure that its transaction could not mend.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// Reads the feed and hands out what it reads, until it is aborted.
pub(super) async fn run(shared: Arc<Shared>, mut tail: NotificationTail) {
    loop {
        match tail.next().await {
            Ok(page) => {
                shared.context.stats.rows_tailed.add(page.rows.len() as u64);
                shared.hand_out(page.rows, page.to, !page.more);
                // Many pages in a row must not keep the subscribers of this thread waiting.
                tokio::task::yield_now().await;
            }
            Err(Error::Expired { horizon }) => {
                tracing::error!(%horizon, "the tail was away for too long, its subscribers start anew");
                shared.expire(horizon);
                tail.restart(horizon);
            }
            Err(error) => {
                tracing::error!(%error, "the feed cannot be read, trying again");
                shared.context.env().sleep(FAILURE_PAUSE).await;
            }
        }
    }
}
