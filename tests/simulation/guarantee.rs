//! [`Guarantee`]: the promises, by name; [`Broken`]: a promise that was not kept, and how.

use std::fmt;

/// A promise that a world has to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Guarantee {
    /// The store follows from the recorded events: rows, totals, topologies; and nothing is left behind.
    Consistent,
    /// Every recorded event is folded once.
    FoldedOnce,
    /// Recording makes no transaction conflict.
    Blind,
    /// Only the owner of a lease works under it, and each acquisition raises its epoch.
    Fenced,
    /// The rows of one name, or document, come in order; those of a feed in the order of their positions.
    Ordered,
    /// Every reader gets a row at or after each fact that is owed to it.
    Complete,
    /// A row comes once, except after a restart, a panic or a change of the filter.
    Unique,
    /// A row brings all its news: none of it comes later, or not at all.
    Atomic,
    /// A delivered row was written with this content, its news have happened, and at least one is wanted.
    Truthful,
    /// Nothing is owed to a reader up to a position that it claims.
    Bookmarkable,
    /// A reader that resumes from a position is owed nothing from before it.
    Resumable,
    /// A reader that may have missed dropped rows gets `Expired`.
    ExpiredNotSilent,
    /// Only a reader that may have missed dropped rows gets `Expired`.
    ExpiredForReason,
    /// The checkpoint of a consumer passes no row without work, unless a key stands for it.
    AtLeastOnce,
    /// Effects in one transaction with a checkpoint happen once.
    ExactlyOnce,
    /// Rows that a reader still has to read are not dropped.
    Kept,
    /// A consumer works on every wanted row in its newest state, and learns of the end of each database before it works on the next one.
    Worked,
    /// Work that was cancelled, or overtaken, or whose database has ended, writes nothing any more.
    Ended,
    /// Answered commits stay on disk.
    Durable,
    /// Bytes on the wire have the form of the protocol.
    Framed,
    /// After the faults everything comes to rest, and ends on request.
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
    /// What happened.
    pub reason: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.guarantee, self.reason)
    }
}

impl From<String> for Broken {
    /// A contradiction in the store breaks `Consistent`, unless the oracle says otherwise.
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
    /// The same, about `who`.
    pub fn about(self, who: impl fmt::Display) -> Self {
        Self { reason: format!("{who}: {}", self.reason), ..self }
    }
}

impl Guarantee {
    /// A breach of it for `reason`.
    pub fn broken(self, reason: impl Into<String>) -> Broken {
        Broken { guarantee: self, reason: reason.into() }
    }

    /// The same, as the result of a judgement.
    pub fn fails<T>(self, reason: impl Into<String>) -> Result<T, Broken> {
        Err(self.broken(reason))
    }
}
