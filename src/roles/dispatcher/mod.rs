//! [`Dispatcher`]: tails the feed, once per node, and fans out to subscribers in the process.
//!
//! # One path
//!
//! One task ([`tail`]) reads the feed and puts what it reads, in batches, into a [`ring`]. Each batch is matched once: every pattern
//! that subscribers have ([`patterns`]) has a [`log`] of the rows that it matches, found by the names of the rows, whatever the
//! number of patterns. A subscriber is a cursor ([`reader`]): on the log of its pattern, or on the ring itself if it wants
//! everything or asks row by row. It is woken once for what the tail has read at once, reads by reference, and walks only its own rows; so one that is not
//! matched costs nothing, and is never behind.
//!
//! A subscriber whose oldest waiting row has left the ring reads the feed from its cursor, as all do at their start and after a
//! restart. The feed has one row per database, so this is bounded and complete, and a slow subscriber slows nobody. What a
//! subscriber is delivered is always derived from a row and *its own* cursor.
//!
//! # Memory
//!
//! The ring holds at most [`DispatcherOptions::ring_rows_max`] rows and one batch, and a number per row and pattern that it
//! matches. A subscriber holds no more than a batch of [`DispatcherOptions::catch_up_rows_max`] rows, or a round of 256 databases,
//! however much it has still to be delivered: its backlog is the feed.
//!
//! # Restarts
//!
//! Who has subscribed is known apart from the tail: a tail that panics is started again where it was, and a dispatcher that
//! is suspended ([`Dispatcher::suspend`]) and resumed goes on for the same subscribers.

mod batch;
mod callback;
mod catch_up;
mod coalesce;
mod delivery;
mod fanout;
mod listen;
mod listener;
mod log;
mod mirror;
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

pub(crate) use self::fanout::Subscriptions;
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
    mirror::{Mirror, MirrorView},
    options::DispatcherOptions,
    running::{Dispatcher, SuspendedDispatcher},
    subscribe::Subscribe,
    subscription::{BatchSubscription, Subscription},
    supervisor::RestartPolicy,
};
pub use crate::base::filter::Filter;
