//! [`Guarantee`]: what is promised, by names; [`Broken`]: that one was not kept, and how.

use std::fmt;

use super::witness::named;

named! {
    /// What a world has to keep.
    Guarantee {
        /// What is stored follows from what was recorded: rows, totals, topologies, heads; and nothing is left behind.
        Consistent,
        /// Every recorded event is folded once.
        FoldedOnce,
        /// Recording makes no transaction conflict.
        Blind,
        /// Only the owner of a lease works under it, and each acquisition raises its epoch.
        Fenced,
        /// The rows of one name, or document, come in order; those of a feed in the order of their positions.
        Ordered,
        /// Anyone who reads gets a row at or after each fact that is owed to it.
        Complete,
        /// A row comes once, except to who was restarted, has panicked or wants something else.
        Unique,
        /// A row brings all that is news by then: nothing of it comes later, or not at all.
        Atomic,
        /// A row that is delivered was written so, its news have happened, and are wanted.
        Truthful,
        /// Where a reader says that it stands, nothing up to there is owed to it.
        Bookmarkable,
        /// Who goes on from a position is owed nothing from before it.
        Resumable,
        /// Who may have missed something that is gone is informed so.
        ExpiredNotSilent,
        /// Only who may have missed something is informed so.
        ExpiredForReason,
        /// A group works on each row, and its checkpoint leaves none behind.
        AtLeastOnce,
        /// What is done in one transaction with a checkpoint is done once.
        ExactlyOnce,
        /// What has still to be read is not cleaned up.
        Kept,
        /// What is on disk when it is answered stays there.
        Durable,
        /// Bytes on the wire look as a client of the protocol expects.
        Framed,
        /// When nothing goes wrong any more, everything comes to rest, and ends when it is told to.
        Live,
    }
}

/// A guarantee that was not kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// Which.
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
    /// What the oracle finds in the store, if it does not say more.
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
    pub(super) fn about(self, who: impl fmt::Display) -> Self {
        Self { reason: format!("{who}: {}", self.reason), ..self }
    }
}

impl Guarantee {
    /// That it was not kept, because of `reason`.
    pub(super) fn broken(self, reason: impl Into<String>) -> Broken {
        Broken { guarantee: self, reason: reason.into() }
    }

    /// The same, as the result of a judgement.
    pub(super) fn fails<T>(self, reason: impl Into<String>) -> Result<T, Broken> {
        Err(self.broken(reason))
    }
}
