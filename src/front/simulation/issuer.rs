//! [`Issuer`]: who has issued an operation on the store.

/// The number of a process in its world.
pub(super) type ProcessId = usize;

/// A process in one of its lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Issuer {
    pub process: ProcessId,
    /// How often it was started before.
    pub generation: u64,
}
