//! What a world runs on: time, processes, the network to the store, and the disk below it. None of this knows about a bus.

pub mod commits;
pub mod link;
pub mod machine;
pub mod process;
pub mod time;
pub mod trace;

use std::sync::Arc;

use self::commits::Flight;

/// The number of a process in its world.
pub type ProcessId = usize;

/// A process in one of its lives: a restart begins a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Issuer {
    pub process: ProcessId,
    /// The number of earlier starts.
    pub generation: u64,
}

/// An entry in the schedule of a world.
pub enum Event {
    /// Nothing happens, except that sleepers wake.
    Nothing,
    /// A commit arrives at the store.
    Arrival(Arc<Flight>),
    /// A process crashes, if it is still in that life.
    Crash(Issuer),
    Start(ProcessId),
    /// A paused process resumes, if it is still in that life.
    Resume(Issuer),
    /// The world draws whether processes pause and clocks jump.
    Mishap,
    /// A copy of the store is taken.
    Copy,
    /// The store is replaced with the copy.
    Restore,
    /// An operator notices that an older state was restored, and raises the incarnation.
    Raise,
    /// The faults end.
    Rest,
    /// The world checks whether everything is at rest, or has ended.
    Poll,
}

/// Lists the tests of the clocks.
pub fn tests() -> Vec<(&'static str, fn())> {
    vec![
        (
            "a_fast_clock_wakes_early_and_a_jump_wakes_at_once",
            time::tests::a_fast_clock_wakes_early_and_a_jump_wakes_at_once,
        ),
        (
            "what_is_due_at_once_comes_in_its_order_and_a_dropped_sleep_never",
            time::tests::what_is_due_at_once_comes_in_its_order_and_a_dropped_sleep_never,
        ),
    ]
}
