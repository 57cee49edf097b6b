//! [`Given`]: the values that a subscriber receives, as plain values: the oracle knows no type of the dispatcher.

use std::sync::Arc;

use notibus::{
    cursor::{Cursor, Knowledge},
    event::{DbInstance, DdocId, EventKind, Kinds, Notification, Sequence},
};

/// The knowledge of a subscriber at its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Start {
    Nothing,
    /// Everything up to here.
    At(Sequence),
}

impl From<Cursor> for Start {
    /// The knowledge of a reader at this cursor when its reading began: later facts may still have to be delivered.
    fn from(cursor: Cursor) -> Self {
        match cursor.knowledge() {
            Knowledge::Nothing => Self::Nothing,
            Knowledge::UpTo(known) => Self::At(known),
        }
    }
}

impl Start {
    /// Whether something at `at` came after it.
    pub fn is_before(self, at: Sequence) -> bool {
        match self {
            Self::Nothing => true,
            Self::At(start) => at > start,
        }
    }
}

/// A value that a subscriber has received.
#[derive(Debug, Clone)]
pub(crate) enum Given {
    Row(GivenRow),
    /// It has skipped everything in between.
    Lagged {
        /// The last position that it knew.
        from: Sequence,
        /// Where it resumes.
        to: Sequence,
    },
    /// It knows nothing any more.
    Expired {
        /// The position up to which rows may have been dropped.
        horizon: Sequence,
    },
    /// Its first scan is complete.
    CaughtUp {
        /// Everything up to here was delivered.
        at: Sequence,
    },
    /// The feed could not be read.
    Failed,
}

/// A row, as news to a subscriber.
#[derive(Debug, Clone)]
pub(crate) struct GivenRow {
    pub row: Arc<Notification>,
    /// The news, in their order.
    pub news: Vec<(DbInstance, EventKind)>,
    /// The indices of the filters of a set that want it.
    pub wanted_by: Vec<usize>,
    /// The changed design documents, if it asked for them.
    pub ddocs: Option<GivenDdocs>,
}

impl GivenRow {
    /// The kinds of the news.
    pub fn kinds(&self) -> Kinds {
        self.news.iter().map(|(_, kind)| *kind).collect()
    }
}

/// The changed design documents.
#[derive(Debug, Clone)]
pub(crate) struct GivenDdocs {
    /// The position after which they changed.
    pub since: Start,
    /// Those with an id, each with the sequence of its notification.
    pub ids: Vec<(DdocId, Sequence)>,
    /// Whether others may have changed as well.
    pub may_be_any: bool,
}
