//! [`Guarantee`]: the promises, by name; [`Broken`]: a promise that was not kept, and how.

use std::fmt;

/// A promise that a world has to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Guarantee {
    /// The rows, totals and topologies in the store follow from the recorded events, and nothing is left behind.
    Consistent,
    /// Every recorded event is folded once.
    FoldedOnce,
    /// Recording never makes a transaction conflict.
    Blind,
    /// Only the owner of a lease works under it, and each acquisition raises its epoch.
    Fenced,
    /// The rows of a name or a document arrive in order, and those of a feed in the order of their positions.
    Ordered,
    /// Every reader gets a row at or after each fact that has to reach it.
    Complete,
    /// A row arrives once, except after a restart, a panic or a change of the filter.
    Unique,
    /// A row brings all its news: none of it arrives later, or never.
    Atomic,
    /// A delivered row was written with this content, its news happened, and at least one of them is wanted.
    Truthful,
    /// A reader that claims a position has received everything up to it.
    Bookmarkable,
    /// A reader that resumes from a position has missed nothing before it.
    Resumable,
    /// A reader that may have missed dropped rows gets `Expired`.
    ExpiredNotSilent,
    /// Only a reader that may have missed dropped rows gets `Expired`.
    ExpiredForReason,
    /// A consumer's checkpoint passes no row with unfinished work, unless a key records that the work is pending.
    AtLeastOnce,
    /// Effects in the same transaction as a checkpoint happen once.
    ExactlyOnce,
    /// Rows that a reader must still read are not dropped.
    Kept,
    /// A consumer works on every wanted row in its newest state, and learns of the end of a database before it works on the successor.
    Worked,
    /// Work that was cancelled, or overtaken by newer work, or whose database has ended, writes nothing more.
    Ended,
    /// Answered commits stay on disk.
    Durable,
    /// Bytes on the wire have the form that the protocol prescribes.
    Framed,
    /// After the faults everything comes to rest, and shuts down on request.
    Live,
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A promise that was not kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// The promise.
    pub guarantee: Guarantee,
    /// How the promise was broken.
    pub reason: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.guarantee, self.reason)
    }
}

impl From<String> for Broken {
    /// A contradiction in the store breaks `Consistent`, unless the oracle names another promise.
    fn from(reason: String) -> Self {
        Self { guarantee: Guarantee::Consistent, reason }
    }
}

impl From<&str> for Broken {
    fn from(reason: &str) -> Self {
        reason.to_owned().into()
    }
}

impl Broken {
    /// Returns the same breach, with the name of `who` in the reason.
    pub fn about(self, who: impl fmt::Display) -> Self {
        Self { reason: format!("{who}: {}", self.reason), ..self }
    }
}

impl Guarantee {
    /// Returns a breach of this guarantee for `reason`.
    pub fn broken(self, reason: impl Into<String>) -> Broken {
        Broken { guarantee: self, reason: reason.into() }
    }

    /// Returns a breach of this guarantee as an `Err`.
    pub fn fails<T>(self, reason: impl Into<String>) -> Result<T, Broken> {
        Err(self.broken(reason))
    }
}
