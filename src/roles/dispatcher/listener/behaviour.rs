//! [`Listener`]: what a listener is to do, what it wants next, and why it ends.

use std::{any::Any, fmt, time::Duration};

use super::super::delivery::{Delivery, DeliveryBatch, Interruption};
use crate::base::cursor::Cursor;

/// What a listener wants next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// To wait for whatever comes.
    Continue,
    /// To wait so long; if nothing comes by then, [`Listener::timeout`] is called, once.
    ContinueFor(Duration),
    /// To end, for this reason. It is not made again, whatever the reason.
    Stop(StopReason),
}

/// Why a listener has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// It said so: there is nothing left to do.
    Normal,
    /// It said so: it could not go on, in its own words.
    Failed(String),
    /// It was asked to end, or its dispatcher has ended.
    Shutdown,
    /// Its parent has ended.
    ParentEnded,
    /// It has panicked, and its policy does not make it again.
    Panicked(String),
    /// Another subscriber has opened its cursor.
    CursorLost,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Normal => f.write_str("normal"),
            Self::Failed(reason) => f.write_str(reason),
            Self::Shutdown => f.write_str("shutdown"),
            Self::ParentEnded => f.write_str("its parent has ended"),
            Self::Panicked(text) => write!(f, "panic: {text}"),
            Self::CursorLost => f.write_str("another subscriber has opened its cursor"),
        }
    }
}

/// A message to a listener, other than a delivery.
#[non_exhaustive]
pub enum Message<M> {
    /// Of the type that it expects ([`ListenerHandle::cast`](crate::dispatcher::ListenerHandle::cast)).
    Cast(M),
    /// Of any type ([`ListenerHandle::info`](crate::dispatcher::ListenerHandle::info)).
    Info(Box<dyn Any + Send>),
    /// Its subscription has something other than a row to say.
    Interrupted(Interruption),
}

impl<M> fmt::Debug for Message<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cast(_) => f.write_str("Cast"),
            Self::Info(_) => f.write_str("Info"),
            Self::Interrupted(interruption) => f.debug_tuple("Interrupted").field(interruption).finish(),
        }
    }
}

/// A subscriber with a state of its own. Its methods are called one at a time.
///
/// It is subscribed before `init` is called, so nothing that happens meanwhile is missed. A panic of any of them but
/// `terminate` ends this listener without a further call; the supervisor makes another one, by the [`RestartPolicy`](crate::dispatcher::RestartPolicy).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Db, DbInstance, Delivery, Filter, dispatcher::{Listener, Message, Next, RestartPolicy, StopReason}, store::Database};
///
/// /// Counts databases.
/// struct Counter(usize);
///
/// impl Listener for Counter {
///     type Message = tokio::sync::oneshot::Sender<usize>;
///
///     async fn handle_event(&mut self, _: Delivery) -> Next {
///         self.0 += 1;
///         Next::Continue
///     }
///
///     async fn handle_message(&mut self, message: Message<Self::Message>) -> Next {
///         match message {
///             Message::Cast(reply) => drop(reply.send(self.0)),
///             other => println!("what is this? {other:?}"),
///         }
///         Next::Continue
///     }
///
///     async fn terminate(&mut self, reason: &StopReason) {
///         println!("counted {}, ending: {reason}", self.0);
///     }
/// }
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let notifier = bus.notifier(Default::default()).await?;
/// let dispatcher = bus.dispatcher(Default::default()).await?;
/// let counter = dispatcher
///     .subscribe(Filter::all())
///     .listener(|| Counter(0))
///     .named("counter")?
///     .restart(RestartPolicy::Times(5))
///     .start()?;
///
/// let db = Db::new("orders".parse()?, DbInstance::random(store.env()));
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// loop {
///     let (reply, answer) = tokio::sync::oneshot::channel();
///     counter.cast(reply).await.expect("it runs");
///     if answer.await.expect("it answers") == 1 {
///         break;
///     }
/// }
/// assert_eq!(counter.stop().await, StopReason::Shutdown);
/// notifier.shutdown().await
/// # }
/// ```
pub trait Listener: Send + 'static {
    /// What it expects to be sent.
    type Message: Send + 'static;

    /// It is about to begin; everything before `cursor` was worked on.
    fn init(&mut self, cursor: Cursor) -> impl Future<Output = Next> + Send {
        let _ = cursor;
        std::future::ready(Next::Continue)
    }

    /// Something is new of a database.
    fn handle_event(&mut self, delivery: Delivery) -> impl Future<Output = Next> + Send;

    /// Something is new of some databases: for one that was started with [`Listen::in_batches`](crate::dispatcher::Listen::in_batches), instead of
    /// [`Listener::handle_event`], which it calls by default for each delivery. What the last of these calls wants next counts,
    /// unless one before wants to stop.
    fn handle_batch(&mut self, batch: DeliveryBatch) -> impl Future<Output = Next> + Send {
        async move {
            let mut next = Next::Continue;
            for index in 0..batch.len() {
                next = self.handle_event(batch.delivery(index)).await;
                if matches!(next, Next::Stop(_)) {
                    break;
                }
            }
            next
        }
    }

    /// Somebody has sent a message, or the subscription has something to say. One that overrides nothing logs it, and goes on.
    fn handle_message(&mut self, message: Message<Self::Message>) -> impl Future<Output = Next> + Send {
        if !matches!(message, Message::Interrupted(Interruption::Synced { .. })) {
            tracing::warn!(?message, "a listener ignores a message");
        }
        std::future::ready(Next::Continue)
    }

    /// Nothing has come for as long as [`Next::ContinueFor`] said.
    fn timeout(&mut self) -> impl Future<Output = Next> + Send {
        std::future::ready(Next::Continue)
    }

    /// It is about to end. After a panic this is not called.
    fn terminate(&mut self, reason: &StopReason) -> impl Future<Output = ()> + Send {
        let _ = reason;
        std::future::ready(())
    }
}
