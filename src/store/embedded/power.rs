//! [`Power`]: what a simulation has to say when a commit comes to a disk.

use std::io;

/// A step of a commit on its way to a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is about to be written.
    Write,
    /// It is written, and about to be synced.
    Sync,
    /// It is synced, and about to be answered.
    Answer,
}

/// The power of the machine: it can fail at any step.
pub(crate) trait Power: Send + Sync {
    /// A commit has come to `step`. An error means that there is no power any more: nothing happens after it.
    fn step(&self, step: Step) -> io::Result<()>;
}
