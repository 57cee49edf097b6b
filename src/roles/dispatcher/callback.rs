//! Callback subscriptions: listeners that only call a function.

use tokio::task::AbortHandle;

use super::{
    delivery::{Delivery, DeliveryBatch, Interruption},
    handle::ListenerHandle,
    listen::Listen,
    listener::{Listener, Message, Next},
    log::SubscriberId,
};
use crate::base::filter::Filter;

/// A subscription that passes its deliveries to a callback. Dropping it ends the subscription.
#[derive(Debug)]
#[must_use = "dropping the handle ends the subscription"]
pub struct CallbackHandle {
    listener: ListenerHandle<()>,
    /// Its task, which dropping the handle aborts; `None` once `stop` has ended it.
    task: Option<AbortHandle>,
}

impl CallbackHandle {
    pub(super) fn start<L, F>(listen: Listen<L, F>) -> Self
    where
        L: Listener<Message = ()>,
        F: FnMut() -> L + Send + 'static,
    {
        let (listener, task) = listen.start_callback();
        Self { listener, task: Some(task) }
    }

    /// The id of the subscriber.
    pub fn id(&self) -> SubscriberId {
        self.listener.id()
    }

    /// Replaces the filter, as [`Subscription::replace`](super::Subscription::replace) does.
    pub fn replace(&self, filter: Filter) {
        self.listener.replace(filter);
    }

    /// Waits until the present call has returned, then ends the subscription; a durable one saves its cursor. Does not wait if the
    /// callback itself calls it.
    pub async fn stop(mut self) {
        self.listener.stop().await;
        self.task = None;
    }

    /// Whether the subscription has ended: its dispatcher ended, it was stopped, or another subscriber opened its cursor.
    pub fn is_finished(&self) -> bool {
        self.listener.is_finished()
    }
}

impl Drop for CallbackHandle {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// A listener that calls a callback, with a batch of one for a single delivery.
pub(super) struct Calling<F>(pub F);

impl<F, R> Listener for Calling<F>
where
    F: FnMut(Result<DeliveryBatch, Interruption>) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    type Message = ();

    async fn handle_event(&mut self, delivery: Delivery) -> Next {
        self.handle_batch(delivery.alone()).await
    }

    async fn handle_batch(&mut self, batch: DeliveryBatch) -> Next {
        (self.0)(Ok(batch)).await;
        Next::Continue
    }

    async fn handle_message(&mut self, message: Message<()>) -> Next {
        if let Message::Interrupted(interruption) = message {
            (self.0)(Err(interruption)).await;
        }
        Next::Continue
    }
}
