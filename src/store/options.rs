//! [`TransactionOption`]: options of one transaction.

use std::time::Duration;

/// Whether a read can make the transaction conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isolation {
    /// The commit fails if the read keys were written since.
    Serializable,
    /// The read conflicts with nothing.
    Snapshot,
}

/// An option of one transaction. Options last until the transaction is reset; later attempts of
/// [`Database::run`](super::Database::run) keep them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransactionOption {
    /// Everything fails with `transaction_timed_out` (1031) this long after the transaction was made or reset. A commit
    /// that is under way then may still happen.
    Timeout(Duration),
    /// The commit of a larger transaction fails with `transaction_too_large` (2101), in bytes. At most 10 MB.
    SizeLimit(usize),
    /// How urgent the transaction is. The embedded store treats all alike.
    Priority(Priority),
    /// Keep the ranges on which a commit failed, for
    /// [`Transaction::conflicting_ranges`](super::Transaction::conflicting_ranges).
    ReportConflicts,
}

/// Options of a store in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FolderOptions {
    /// For how long commits wait while the disk has no room for a snapshot that is overdue. Then they fail with
    /// [`StoreError::NO_ROOM`](super::StoreError::NO_ROOM), not committed. Default: 3 s.
    pub no_room_wait: Duration,
}

crate::base::macros::setters!(FolderOptions { no_room_wait: Duration });

impl Default for FolderOptions {
    fn default() -> Self {
        Self { no_room_wait: Duration::from_secs(3) }
    }
}

/// How urgent a transaction is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// As usual. It does not cancel another priority.
    #[default]
    Default,
    /// Work that can wait: a loaded cluster throttles it first, and may not let it through at all.
    Batch,
    /// Ahead of everything, and never throttled: not for the work of layers.
    System,
}
