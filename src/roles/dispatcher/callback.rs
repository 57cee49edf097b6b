//! Callback subscriptions: a listener that only calls.

use tokio::task::AbortHandle;

use super::{
    delivery::{Delivery, DeliveryBatch, Interruption},
    listen::Listen,
    listener::{Listener, ListenerHandle, Message, Next},
    log::SubscriberId,
};
use crate::base::filter::Filter;

/// A subscription whose deliveries go to a callback. Dropping it ends the subscription.
#[derive(Debug)]
#[must_use = "dropping the handle ends the subscription"]
pub struct CallbackHandle {
    listener: ListenerHandle<()>,
    task: AbortHandle,
    /// Whether it was asked to end, and comes to its end by itself.
    is_stopped: bool,
}

impl CallbackHandle {
    /// Starts what calls.
    pub(super) fn start<L, F>(listen: Listen<L, F>) -> Self
    where
        L: Listener<Message = ()>,
        F: FnMut() -> L + Send + 'static,
    {
        let (listener, task) = listen.start_callback();
        Self { listener, task, is_stopped: false }
    }

    /// Which subscriber it is.
    pub fn id(&self) -> SubscriberId {
        self.listener.id()
    }

    /// Has it want something else from now on, as [`Subscription::replace`](super::Subscription::replace) says.
    pub fn replace(&self, filter: Filter) {
        self.listener.replace(filter);
    }

    /// Lets the call that is under way come to its end, and ends the subscription; a durable one saves how far it has
    /// come. Called by the callback itself, it does not wait for that.
    pub async fn stop(mut self) {
        self.listener.stop().await;
        self.is_stopped = true;
    }

    /// Whether the subscription has ended: its dispatcher has, it was stopped, or another has opened its cursor.
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }
}

impl Drop for CallbackHandle {
    fn drop(&mut self) {
        if !self.is_stopped {
            self.task.abort();
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
