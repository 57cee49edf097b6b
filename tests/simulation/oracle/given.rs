//! [`Given`]: what a subscriber receives, as plain values: the oracle does not know the types of the dispatcher.

use std::sync::Arc;

use notibus::{
    cursor::{Cursor, Knowledge},
    event::{DbInstance, DdocId, EventKind, Kinds, Notification, Sequence},
};

/// What a subscriber knows when it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Start {
    Nothing,
    /// The subscriber knows everything up to this position.
    At(Sequence),
}

impl From<Cursor> for Start {
    /// Returns what a reader at this cursor knew when its reading began. Later facts may still have to be delivered.
    fn from(cursor: Cursor) -> Self {
        match cursor.knowledge() {
            Knowledge::Nothing => Self::Nothing,
            Knowledge::UpTo(known) => Self::At(known),
        }
    }
}

impl Start {
    /// Whether something at `at` is beyond this knowledge.
    pub fn is_before(self, at: Sequence) -> bool {
        match self {
            Self::Nothing => true,
            Self::At(start) => at > start,
        }
    }
}

/// A value that a subscriber received.
#[derive(Debug, Clone)]
pub(crate) enum Given {
    Row(GivenRow),
    /// The subscriber skipped everything in between.
    Lagged {
        /// The last position that the subscriber knew.
        from: Sequence,
        /// Where the subscriber resumes.
        to: Sequence,
    },
    /// The subscriber no longer knows anything.
    Expired {
        /// The position up to which rows may have been dropped.
        horizon: Sequence,
    },
    /// The first scan of the subscriber is complete.
    CaughtUp {
        /// Everything up to here was delivered.
        at: Sequence,
    },
    /// The feed could not be read.
    Failed,
}

/// A row that was delivered to a subscriber, with the news in it.
#[derive(Debug, Clone)]
pub(crate) struct GivenRow {
    pub row: Arc<Notification>,
    /// The news, in order.
    pub news: Vec<(DbInstance, EventKind)>,
    /// The indices of the filters in a set that want the row.
    pub wanted_by: Vec<usize>,
    /// The changed design documents, if the subscriber asked for them.
    pub ddocs: Option<GivenDdocs>,
}

impl GivenRow {
    /// Returns the kinds of the news.
    pub fn kinds(&self) -> Kinds {
        self.news.iter().map(|(_, kind)| *kind).collect()
    }
}

/// The design documents that changed.
#[derive(Debug, Clone)]
pub(crate) struct GivenDdocs {
    /// The position after which the design documents changed.
    pub since: Start,
    /// The changed documents that have an id, each with the sequence of its notification.
    pub ids: Vec<(DdocId, Sequence)>,
    /// Whether other design documents may have changed as well.
    pub may_be_any: bool,
}
