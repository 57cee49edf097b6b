//! The tail: the one task of a node that reads the feed as it grows.

use std::{sync::Arc, time::Duration};

use futures_util::future::{BoxFuture, pending};
use tokio::sync::watch;

use super::Shared;
use crate::error::Result;

/// How long the tail waits for the notifiers of its own process before it sets watches for those of others. Under steady
/// local load no watch is ever set.
const QUIET: Duration = Duration::from_millis(10);

/// How long the tail pauses after a failure that its transaction could not mend.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// What ended a wait.
enum Woken {
    /// A hint, or the poll: there may be rows.
    Look,
    /// Nothing for a while: set the watches, and look.
    Arm,
}

/// Reads the feed and hands out what it reads, until it is aborted.
pub(super) async fn run(shared: Arc<Shared>, mut appends: watch::Receiver<u64>, poll_interval: Duration) {
    let env = shared.context.env().clone();
    let mut fired: Option<BoxFuture<'static, bool>> = None;
    let mut arm = true;
    loop {
        appends.mark_unchanged();
        match advance(&shared, arm).await {
            Ok(watch) => fired = watch.or(fired),
            Err(error) => {
                tracing::error!(%error, "the feed cannot be read, trying again");
                env.sleep(FAILURE_PAUSE).await;
                continue;
            }
        }
        // Where watches were just refused, asking again at once would not help.
        let pause = if fired.is_some() || arm { poll_interval } else { QUIET.min(poll_interval) };
        let woken = tokio::select! {
            // A sender that is gone cannot be: the context that owns it is shared.
            _ = appends.changed() => Woken::Look,
            changed = async { match &mut fired { Some(fired) => fired.await, None => pending().await } } => {
                fired = None;
                if !changed {
                    // Refused as late as this: the poll goes on, and asks again.
                    tokio::select! {
                        _ = appends.changed() => {}
                        () = env.sleep(poll_interval) => {}
                    }
                }
                Woken::Look
            }
            () = env.sleep(pause) => if fired.is_some() { Woken::Look } else { Woken::Arm },
        };
        arm = matches!(woken, Woken::Arm);
    }
}

/// Reads and hands out everything that there is, and sets watches for what comes if `arm` says so.
async fn advance(shared: &Arc<Shared>, arm: bool) -> Result<Option<BoxFuture<'static, bool>>> {
    loop {
        let from = shared.ring.position();
        let (page, watch) = if arm {
            shared.feed.page_and_watch(from, shared.page_rows_max).await?
        } else {
            (shared.feed.page(from, shared.page_rows_max).await?, None)
        };
        let more = page.more;
        shared.context.stats.rows_tailed.add(page.rows.len() as u64);
        shared.hand_out(page.rows, page.to, !more);
        if !more {
            return Ok(watch);
        }
        // Many pages in a row must not keep the subscribers of this thread waiting.
        tokio::task::yield_now().await;
    }
}
