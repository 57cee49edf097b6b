//! [`Operation`]: the operations of a transaction, as the wrappers see them.

use bytes::Bytes;

use crate::store::{AtomicOp, Isolation, KeyRange, Mutation};

/// An operation of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// The read version was requested.
    ReadVersion,
    /// A key was read.
    Get {
        /// The key.
        key: Bytes,
        /// Whether the read can make the transaction conflict.
        isolation: Isolation,
    },
    /// A page of a range was read.
    GetRange {
        /// The range.
        range: KeyRange,
        /// Whether the read can make the transaction conflict.
        isolation: Isolation,
    },
    /// A watch was set, which is a serializable read.
    Watch {
        /// The key.
        key: Bytes,
    },
    /// A key was set.
    Set {
        /// The key.
        key: Bytes,
        /// The new value.
        value: Bytes,
    },
    /// A key was removed.
    Clear {
        /// The key.
        key: Bytes,
    },
    /// A range was removed.
    ClearRange {
        /// The range.
        range: KeyRange,
    },
    /// An atomic operation was applied.
    Atomic {
        /// The operation.
        op: AtomicOp,
        /// The key.
        key: Bytes,
        /// The operand.
        operand: Bytes,
    },
    /// A range was added to the read-conflict set.
    ReadConflict {
        /// The range.
        range: KeyRange,
    },
    /// A range was added to the write-conflict set.
    WriteConflict {
        /// The range.
        range: KeyRange,
    },
    /// The commit was requested.
    Commit,
}

impl Operation {
    /// Whether the operation reads from the store: a key, a range, a watch or the read version.
    pub fn is_read(&self) -> bool {
        matches!(self, Self::ReadVersion | Self::Get { .. } | Self::GetRange { .. } | Self::Watch { .. })
    }

    /// Returns the total length of the keys and bounds that a read asks for, in bytes.
    pub(super) fn requested_bytes(&self) -> usize {
        match self {
            Self::Get { key, .. } => key.len(),
            Self::GetRange { range, .. } => range.begin.len() + range.end.len(),
            _ => 0,
        }
    }

    /// Returns the total length of the keys and values that the operation writes, in bytes.
    pub fn written_bytes(&self) -> usize {
        match self {
            Self::Set { key, value } => key.len() + value.len(),
            Self::Clear { key } => key.len(),
            Self::ClearRange { range } => range.begin.len() + range.end.len(),
            Self::Atomic { key, operand, .. } => key.len() + operand.len(),
            _ => 0,
        }
    }

    /// Whether the operation writes to the store.
    pub fn is_mutation(&self) -> bool {
        matches!(self, Self::Set { .. } | Self::Clear { .. } | Self::ClearRange { .. } | Self::Atomic { .. })
    }

    /// Whether the operation can make the transaction conflict with others.
    pub fn is_read_conflict(&self) -> bool {
        matches!(
            self,
            Self::Get { isolation: Isolation::Serializable, .. }
                | Self::GetRange { isolation: Isolation::Serializable, .. }
                | Self::Watch { .. }
                | Self::ReadConflict { .. }
        )
    }
}

impl From<&Mutation> for Operation {
    fn from(mutation: &Mutation) -> Self {
        match mutation.clone() {
            Mutation::Set(key, value) => Self::Set { key, value },
            Mutation::Clear(key) => Self::Clear { key },
            Mutation::ClearRange(begin, end) => Self::ClearRange { range: KeyRange { begin, end } },
            Mutation::Atomic(op, key, operand) => Self::Atomic { op, key, operand },
        }
    }
}

/// One attempt at a transaction: the operations since the transaction began or was last reset.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attempt {
    /// The operations, in order.
    pub operations: Vec<Operation>,
}

impl Attempt {
    /// Returns the reads of the attempt.
    pub fn reads(&self) -> impl Iterator<Item = &Operation> {
        self.operations.iter().filter(|op| op.is_read())
    }

    /// Returns the writes of the attempt.
    pub fn mutations(&self) -> impl Iterator<Item = &Operation> {
        self.operations.iter().filter(|op| op.is_mutation())
    }

    /// Returns the operations that can make the attempt conflict with others.
    pub fn read_conflicts(&self) -> impl Iterator<Item = &Operation> {
        self.operations.iter().filter(|op| op.is_read_conflict())
    }

    /// Whether the attempt has anything to commit: a mutation, or a range in its write-conflict set.
    pub fn writes(&self) -> bool {
        self.operations.iter().any(|op| op.is_mutation() || matches!(op, Operation::WriteConflict { .. }))
    }

    /// Whether the attempt applies the atomic operation `op` to any key.
    pub fn applies(&self, op: AtomicOp) -> bool {
        self.operations
            .iter()
            .any(|done| matches!(done, Operation::Atomic { op: applied, .. } if *applied == op))
    }
}
