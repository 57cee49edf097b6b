//! [`Delivery`] and [`Interruption`]: what a subscriber receives.

use std::sync::Arc;

use super::filter::{Filter, Set};
use crate::{
    encoding::Sequence,
    error::Error,
    event::{DdocId, EventKind},
    notification::{News, Notification},
    notification_feed::ChangedDdocs,
};

/// A row, as news to one subscriber. Clones are cheap.
#[derive(Debug, Clone)]
pub struct Delivery {
    /// The row.
    row: Arc<Notification>,
    /// Up to where the subscriber knew the database.
    since: Sequence,
    /// The design documents that have changed since, if they were asked for.
    ddocs: Option<Arc<ChangedDdocs>>,
    /// The filters of the subscriber, if it has a set of them.
    filters: Option<Arc<Set>>,
}

impl Delivery {
    /// `row` for a subscriber that knew the database up to `since`.
    pub(super) fn new(row: Arc<Notification>, since: Sequence) -> Self {
        Self { row, since, ddocs: None, filters: None }
    }

    /// The delivery with what the filter of its subscriber and, if they were asked for, the design documents add to it.
    pub(super) fn with(self, filter: &Filter, ddocs: Option<ChangedDdocs>) -> Self {
        Self { ddocs: ddocs.map(Arc::new), filters: filter.set().cloned(), ..self }
    }

    /// The newest row of the database.
    pub fn notification(&self) -> &Arc<Notification> {
        &self.row
    }

    /// What is new to this subscriber, in the order in which it happened.
    ///
    /// Nothing is left out. While the subscriber catches up over several pages of the feed, a database that moves meanwhile
    /// can be delivered again with kinds that were told before.
    pub fn news(&self) -> News {
        self.row.news_since(self.since)
    }

    /// Up to where the subscriber knew everything of every database that it wants. Whoever starts again from here misses
    /// nothing, and may be told again what came after it.
    pub fn since(&self) -> Sequence {
        self.since
    }

    /// The position of the row. Other databases may have had events before it that are still to be delivered, so this is
    /// no place to start again from, unless the subscription is to one name.
    pub fn sequence(&self) -> Sequence {
        self.row.sequence
    }

    /// The design documents of the database that were written or deleted since the subscriber knew it, as far as producers
    /// have recorded their ids, each with the sequence of the notification that told of it. `None` unless they were asked
    /// for ([`Subscribe::with_ddocs`](super::Subscribe::with_ddocs)).
    ///
    /// They are read after the row: what has changed since is among them, and comes again. Others may have changed as well, if
    /// [`Delivery::may_be_any_ddoc`] says so.
    pub fn ddocs(&self) -> Option<&[(DdocId, Sequence)]> {
        Some(&self.ddocs.as_ref()?.ids)
    }

    /// Whether the news tell of a design document of which nobody knows which it is: a producer has not recorded its id, the ids
    /// were not asked for, or the database is deleted by now.
    pub fn may_be_any_ddoc(&self) -> bool {
        let Some(ddocs) = &self.ddocs else { return self.news().kinds().contains(EventKind::DdocUpdated) };
        let tells = self.news().kinds().contains(EventKind::DdocUpdated);
        tells && (ddocs.nameless.is_some() || ddocs.ids.is_empty())
    }

    /// Which filters of the subscriber's set ([`Filter::any`]) want this, by their places. Only 0 if it has no set.
    pub fn wanted_by(&self) -> Vec<usize> {
        let Some(set) = &self.filters else { return vec![0] };
        let mut wanting: Vec<_> = set.wanting(&self.row, self.since).collect();
        wanting.sort_unstable();
        wanting
    }
}

/// Why a subscription has something other than a row to say.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Interruption {
    /// A subscriber that skips has fallen behind: it was not told of what lies between. It goes on from `to`.
    #[error("skipped everything between {from} and {to}")]
    Lagged {
        /// The last position that it knew.
        from: Sequence,
        /// Where it goes on.
        to: Sequence,
    },
    /// The subscriber was away for so long that rows which it has not seen may have been dropped: databases that it knows
    /// may be gone. It should forget what it knows; it goes on as one who knows nothing, with every database that it wants.
    #[error("rows up to {horizon} may have been dropped unseen")]
    Expired {
        /// Up to where rows may have been dropped.
        horizon: Sequence,
    },
    /// The feed could not be read. The subscriber keeps its position; receiving again tries again.
    #[error(transparent)]
    Failed(#[from] Error),
}
