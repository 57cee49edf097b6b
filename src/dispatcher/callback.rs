//! Callback subscriptions: a task that receives and calls.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;

use super::{Delivery, Interruption, Subscription};
use crate::context::Context;

/// How long the task pauses before it tries again to read a feed that could not be read.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// A subscription whose deliveries go to a callback. Dropping it ends the subscription.
#[derive(Debug)]
#[must_use = "dropping the handle ends the subscription"]
pub struct CallbackHandle {
    /// The task.
    task: JoinHandle<()>,
}

impl CallbackHandle {
    /// Whether the subscription has ended, because the dispatcher has.
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }
}

impl Drop for CallbackHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts the task that calls `callback` with each delivery of `subscription`.
pub(super) fn spawn<F, R>(
    context: Arc<Context>,
    mut subscription: Subscription,
    mut callback: F,
) -> CallbackHandle
where
    F: FnMut(Delivery) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let task = tokio::spawn(async move {
        loop {
            // A predicate of the filter can panic. It has seen the row then, and goes on with the next one.
            let received = AssertUnwindSafe(subscription.next()).catch_unwind().await;
            let delivery = match received {
                Ok(None) => return,
                Ok(Some(Ok(delivery))) => delivery,
                Err(_) => {
                    context.stats.callback_panics.add(1);
                    tracing::error!("a predicate has panicked; its subscription goes on");
                    continue;
                }
                Ok(Some(Err(interruption))) => {
                    tracing::warn!(%interruption, "subscription interrupted");
                    if matches!(interruption, Interruption::Failed(_)) {
                        context.env().sleep(FAILURE_PAUSE).await;
                    }
                    continue;
                }
            };
            let sequence = delivery.sequence();
            // The call that makes the future can panic as well as the future.
            let called = AssertUnwindSafe(async { callback(delivery).await }).catch_unwind().await;
            if called.is_err() {
                context.stats.callback_panics.add(1);
                tracing::error!(%sequence, "a callback has panicked; its subscription goes on");
            }
        }
    });
    CallbackHandle { task }
}
