//! The faults of one commit, and of one watch.

use super::Gate;
use crate::base::error::StoreError;

/// A fault of a commit.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum CommitFault {
    /// It fails and changes nothing: 1020, 1007, or 1021 of a commit that did not happen.
    Before(StoreError),
    /// It happens, and then fails: 1021 of a commit that did happen.
    After(StoreError),
    /// It fails, and happens later, at [`Faults::commit_late`](super::Faults::commit_late): 1031.
    Late(StoreError),
    /// It waits at the gate, and then happens.
    Hold(Gate),
}

/// A fault of a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchFault {
    /// It is not set: 1032.
    Refuse(StoreError),
    /// It never fires.
    Drop,
    /// It fires at once.
    Spurious,
}
