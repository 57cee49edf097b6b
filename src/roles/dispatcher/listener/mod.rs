//! Listeners, as seen by their callers: subscribers with a state of their own, in supervised tasks.
//!
//! A listener does what CouchDB's `couch_event_listener` does, and more. One that panics is restarted, as its
//! [`RestartPolicy`](super::RestartPolicy) says, and continues where it was. The delivery on which it panicked is tried again a few
//! times before it is skipped. [`Supervision`] events report all of that. A listener belongs to its dispatcher. It ends when the
//! dispatcher is shut down, when it is stopped, when its parent ends, or when it stops itself.

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
    handle::{Control, Listeners, SHUTDOWN_LIMIT, State},
};
