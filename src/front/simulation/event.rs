//! [`Event`]: what the schedule of a world lets happen.

use std::sync::Arc;

use super::{
    flight::Flight,
    issuer::{Issuer, ProcessId},
};

pub(super) enum Event {
    /// Sleepers wake.
    Nothing,
    /// A commit arrives at the store.
    Arrival(Arc<Flight>),
    /// A process crashes, if it still lives that life.
    Crash(Issuer),
    Start(ProcessId),
    /// A paused process resumes, if it still lives that life.
    Resume(Issuer),
    /// Pauses and jumps are drawn.
    Mishap,
    /// The bus begins to move: all processes stop.
    Move,
    /// Those that have not stopped crash.
    Stopped,
    /// Nothing is under way to the old place of the bus any more.
    Silent,
    /// The bus has moved, and all processes start at its new place.
    Moved,
    /// The faults end.
    Rest,
    /// The world checks whether everything is at rest, or has ended.
    Poll,
}
