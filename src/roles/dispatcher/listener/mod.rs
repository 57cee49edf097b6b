//! What is known of listeners to all who deal with one: subscribers with a state of their own, in supervised tasks.
//!
//! A listener is what CouchDB's `couch_event_listener` is, and more: one that panics is made again, by its
//! [`RestartPolicy`](super::RestartPolicy), and goes on where it was; the delivery that it has panicked on is given again, a few times,
//! before it is passed over; and all of that is told as [`Supervision`] events. A listener is owned by its dispatcher: it ends when
//! that is shut down, when it is told to, when its parent ends if it has one, or when it says so itself.

mod behaviour;
mod events;
mod handle;

pub use self::{
    behaviour::{Listener, Message, Next, StopReason},
    events::{Missed, Supervised, Supervision, SupervisionEvents},
    handle::{CastError, ListenerHandle, Parent},
};
pub(super) use self::{
    events::EVENTS_MAX,
    handle::{Control, Listeners, Orders, SHUTDOWN_LIMIT},
};
