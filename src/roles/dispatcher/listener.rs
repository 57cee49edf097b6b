//! [`Listener`]: a subscriber with a state of its own, in a supervised task; what it wants next, why it ends, and the events of its
//! life ([`Supervision`]).
//!
//! It replaces CouchDB's `couch_event_listener`. A listener that panics is restarted, as its
//! [`RestartPolicy`](super::RestartPolicy) says, and continues where it was. The delivery on which it panicked is tried again a few
//! times before it is skipped. [`Supervision`] events report all of that. A listener belongs to its dispatcher. It ends when the
//! dispatcher is shut down, when it is stopped, or when it stops itself.

use std::{fmt, time::Duration};

use futures_util::stream::BoxStream;

use super::{
    delivery::{Delivery, DeliveryBatch, Interruption},
    log::SubscriberId,
};
use crate::base::{cursor::Cursor, encoding::Sequence, event::DbName};

/// What a listener wants next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Wait for the next delivery.
    Continue,
    /// End for this reason. The listener is not restarted, whatever the reason.
    Stop(StopReason),
}

/// Why a listener has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// It stopped itself: there is nothing left to do.
    Normal,
    /// It stopped itself because of a failure, described in its own words.
    Failed(String),
    /// It was asked to end, or its dispatcher ended.
    Shutdown,
    /// It panicked, and its policy does not restart it.
    Panicked(String),
    /// The bus that the process has opened no longer exists ([`Error::BusGone`](crate::Error::BusGone)): start the process again.
    BusGone,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Normal => f.write_str("normal"),
            Self::Failed(reason) => f.write_str(reason),
            Self::Shutdown => f.write_str("shutdown"),
            Self::Panicked(text) => write!(f, "panic: {text}"),
            Self::BusGone => f.write_str("the bus no longer exists"),
        }
    }
}

/// A subscriber with a state of its own. Its methods are called one at a time.
///
/// It is subscribed before `init` is called, so it misses nothing that happens meanwhile. A panic in any method but
/// `terminate` ends this listener without a further call; the supervisor makes another one, as the
/// [`RestartPolicy`](crate::dispatcher::RestartPolicy) says.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use std::sync::{Arc, atomic::{AtomicUsize, Ordering}};
///
/// use notibus::{Bus, BusOptions, Db, DbInstance, Delivery, Filter, Roles, dispatcher::{Listener, Next, RestartPolicy, StopReason}, store::Database};
///
/// /// Counts events.
/// struct Counter(Arc<AtomicUsize>);
///
/// impl Listener for Counter {
///     async fn handle_event(&mut self, _: Delivery) -> Next {
///         self.0.fetch_add(1, Ordering::Relaxed);
///         Next::Continue
///     }
///
///     async fn terminate(&mut self, reason: &StopReason) {
///         println!("counted {}, ending: {reason}", self.0.load(Ordering::Relaxed));
///     }
/// }
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(Roles::default()).await?;
/// let (dispatcher, count) = (running.dispatcher(), Arc::new(AtomicUsize::new(0)));
/// let counter = dispatcher
///     .subscribe(Filter::all())
///     .listener({
///         let count = Arc::clone(&count);
///         move || Counter(Arc::clone(&count))
///     })
///     .restart(RestartPolicy::Times(5))
///     .start();
///
/// let (db, producer) = (Db::new("orders".parse()?, DbInstance::new()), bus.producer());
/// let created = bus.run_exactly_once(None, async |tx| Ok(producer.created(&tx, &db))).await?;
/// counter.reached(dispatcher.reached(created.committed.versionstamp.version()).await?).await;
/// assert_eq!(count.load(Ordering::Relaxed), 1);
/// assert_eq!(counter.stop().await, StopReason::Shutdown);
/// running.shutdown().await
/// # }
/// ```
pub trait Listener: Send + 'static {
    /// Called when it begins; everything before `cursor` was worked on.
    fn init(&mut self, cursor: Cursor) -> impl Future<Output = Next> + Send {
        let _ = cursor;
        std::future::ready(Next::Continue)
    }

    /// Called for each delivery.
    fn handle_event(&mut self, delivery: Delivery) -> impl Future<Output = Next> + Send;

    /// Called for each batch, instead of [`Listener::handle_event`], if it was started with
    /// [`Listen::in_batches`](crate::dispatcher::Listen::in_batches). By default it calls `handle_event` for each delivery, until one of
    /// these calls returns [`Next::Stop`], and returns the result of the last call.
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

    /// Called for each interruption of the subscription. By default it logs the interruption and goes on.
    fn handle_interruption(&mut self, interruption: Interruption) -> impl Future<Output = Next> + Send {
        if !matches!(interruption, Interruption::Synced { .. }) {
            tracing::warn!(?interruption, "a listener ignores an interruption");
        }
        std::future::ready(Next::Continue)
    }

    /// Called when it ends, but not after a panic.
    fn terminate(&mut self, reason: &StopReason) -> impl Future<Output = ()> + Send {
        let _ = reason;
        std::future::ready(())
    }
}

/// How many events are kept for a slow reader.
pub(super) const EVENTS_MAX: usize = 1_024;

/// An event in the life of a supervised subscriber.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervision {
    /// The subscriber.
    pub id: SubscriberId,
    /// What happened to it.
    pub what: Supervised,
}

/// What happened to a supervised subscriber.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Supervised {
    /// It was started.
    Started,
    /// The listener, its factory or the predicate of its filter has panicked.
    Panicked {
        /// The message of the panic.
        text: String,
        /// The row that it was working on, if any.
        at: Option<Sequence>,
    },
    /// It will be restarted.
    Restarting {
        /// The number of this restart.
        restarts: u32,
        /// The pause before it.
        after: Duration,
    },
    /// It has panicked on a row as often as allowed; the row is skipped.
    PassedOver {
        /// The database.
        name: DbName,
        /// The row.
        sequence: Sequence,
    },
    /// It has ended.
    Stopped(StopReason),
}

/// How many events a reader that was too slow has missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} supervision events were missed")]
pub struct Missed(pub u64);

/// A stream of supervision events. It ends after the dispatcher has.
pub type SupervisionEvents = BoxStream<'static, Result<Supervision, Missed>>;
