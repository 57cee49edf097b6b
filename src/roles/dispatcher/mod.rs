//! [`Dispatcher`]: tails the feed, once per node, and fans out to subscribers in the process.
//!
//! One task, the tail, appends what it reads, in batches, to a ring ([`shared`]). Each batch is matched once: every distinct pattern of the
//! subscribers ([`patterns`]) has a [`log`] of the rows that it matches, found by the names of the rows. A subscriber is a cursor
//! ([`reader`]) on the log of its pattern; one pattern matches everything, for subscribers that want everything or have a predicate. So a
//! subscriber without matching rows costs nothing, and is never behind. A subscriber whose rows are not in the ring reads the feed from its
//! cursor. Such reads are bounded and complete, and slow down no other subscriber. A subscriber for which more than a page waits takes a
//! round ([`newest`]), which has each database once. The news of a delivery is derived from a row and the subscriber's *own* cursor.
//!
//! # Memory
//!
//! The ring holds at most [`DispatcherOptions::ring_rows_max`] rows plus one batch, and a number per row and matching pattern. A subscriber
//! holds no more than a batch of [`DispatcherOptions::catch_up_rows_max`] rows, however many deliveries wait for it: its backlog is the
//! feed. All subscribers with equal patterns that take rounds share one index of the ring's rows.
//!
//! # Restarts
//!
//! The subscribers are kept apart from the tail: a tail that panics is restarted where it was, and a dispatcher that is suspended
//! ([`Dispatcher::suspend`]) and resumed keeps its subscribers.

mod callback;
mod delivery;
mod globs;
mod log;
mod newest;
mod patterns;
mod reader;
mod running;
mod shared;
mod subscribe;
mod subscription;
/// The types of the wake protocol ([`log`]). A test replaces them with those of a model checker.
mod sync {
    pub(super) use std::sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    };

    pub(super) use futures_util::task::AtomicWaker;
}
#[cfg(test)]
mod tests;

pub use self::{
    callback::{CallbackHandle, RestartPolicy},
    delivery::{BatchItem, Delivery, DeliveryBatch, DeliveryRef, Item, Iter as DeliveryIter, Trouble},
    log::SubscriberId,
    running::Dispatcher,
    shared::DispatcherOptions,
    subscribe::Subscribe,
    subscription::{BatchSubscription, Deliveries, Subscription},
};
pub use crate::base::filter::Filter;
