//! [`Dispatcher`]: tails the feed, once per node, and fans out to subscribers in the process.
//!
//! # One path
//!
//! One task ([`tail`]) reads the feed and appends what it reads, in batches, to a [`ring`]. Each batch is matched once: every distinct
//! pattern of the subscribers ([`patterns`]) has a [`log`] of the rows that it matches. Patterns are found by the names of the rows, at
//! a cost that does not depend on the number of patterns. A subscriber is a cursor ([`reader`]) on the log of its pattern; one
//! pattern matches everything, for those that want everything or have a predicate. The tail wakes it once for each read of the feed; it reads by reference, and
//! visits only its own rows. So a subscriber without matching rows costs nothing, and is never behind.
//!
//! A subscriber reads the feed from its cursor at its start, after a restart, and when its oldest waiting row has left the ring. The
//! feed has one row per database, so this is bounded and complete, and a slow subscriber does not slow down others. The news of a
//! delivery are always derived from a row and the subscriber's *own* cursor.
//!
//! # Memory
//!
//! The ring holds at most [`DispatcherOptions::ring_rows_max`] rows and one batch, and a number per row and matching pattern.
//! A subscriber holds no more than a batch of [`DispatcherOptions::catch_up_rows_max`] rows, or a round of 256 databases,
//! however many deliveries wait for it: its backlog is the feed.
//!
//! # Restarts
//!
//! The subscribers are kept apart from the tail: a tail that panics is started again where it was, and a dispatcher that
//! is suspended ([`Dispatcher::suspend`]) and resumed keeps its subscribers.

mod batch;
mod callback;
mod catch_up;
mod coalesce;
mod delivery;
mod fanout;
mod listen;
mod listener;
mod log;
mod options;
mod pace;
mod patterns;
mod reader;
mod ring;
mod running;
mod shared;
mod subscribe;
mod subscription;
mod supervisor;
mod sync;
mod tail;
#[cfg(test)]
mod tests;

pub use self::{
    callback::CallbackHandle,
    delivery::{Delivery, DeliveryBatch, DeliveryRef, Interruption, Iter as DeliveryIter},
    fanout::Fanout,
    listen::Listen,
    listener::{
        CastError, Listener, ListenerHandle, Message, Missed, Next, Parent, StopReason, Supervised,
        Supervision, SupervisionEvents,
    },
    log::SubscriberId,
    options::DispatcherOptions,
    running::{Dispatcher, SuspendedDispatcher},
    subscribe::Subscribe,
    subscription::{BatchSubscription, Subscription},
    supervisor::RestartPolicy,
};
pub use crate::base::filter::Filter;
