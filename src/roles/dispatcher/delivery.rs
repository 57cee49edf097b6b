//! [`Delivery`] and [`Interruption`]: what a subscriber receives.

use std::{fmt, sync::Arc};

use super::batch::{Deliveries, DeliveryBatch};
#[cfg(doc)]
use super::filter::Filter;
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::Error,
        event::{DdocId, EventKind},
        notification::{News, Notification},
    },
    state::notification_feed::ChangedDdocs,
};

/// A row, as news to one subscriber. Clones are cheap.
///
/// A database is known by its name: of several instances that had the name one after the other, the news say that the last one
/// before this is deleted, whichever of them the subscriber knew.
#[derive(Clone)]
pub struct Delivery {
    /// The batch that it came in.
    batch: Arc<Deliveries>,
    /// Which one of it.
    index: usize,
}

/// A delivery within its [`DeliveryBatch`]. It has all that a [`Delivery`] has.
#[derive(Clone, Copy)]
pub struct DeliveryRef<'a> {
    /// The batch.
    pub(super) batch: &'a Deliveries,
    /// Which one of it.
    pub(super) index: usize,
}

impl<'a> DeliveryRef<'a> {
    /// The newest row of the database.
    #[inline]
    pub fn notification(&self) -> &'a Arc<Notification> {
        self.batch.row(self.index)
    }

    /// What is new to this subscriber, in the order in which it happened.
    ///
    /// Nothing is left out. While the subscriber catches up over several pages of the feed, a database that moves meanwhile
    /// can be delivered again with kinds that were delivered before.
    pub fn news(&self) -> News {
        self.notification().news_since(self.batch.since)
    }

    /// Where the reading began that this is a part of. Whoever starts again from here misses nothing, and may be delivered again
    /// what came after it.
    pub fn since(&self) -> Cursor {
        self.batch.since.rewound()
    }

    /// The position of the row. Other databases may have had events before it that are still to be delivered, so this is
    /// no place to start again from: that is the cursor of the subscription.
    #[inline]
    pub fn sequence(&self) -> Sequence {
        self.notification().sequence
    }

    /// The design documents of the database that were written or deleted since the subscriber knew it, as far as producers
    /// have recorded their ids, each with the sequence of the notification that brought it. `None` unless they were asked
    /// for ([`Subscribe::with_ddocs`](super::Subscribe::with_ddocs)).
    ///
    /// They are read after the row: what has changed since is among them, and comes again. Others may have changed as well, if
    /// [`DeliveryRef::may_be_any_ddoc`] says so.
    pub fn ddocs(&self) -> Option<&'a [(DdocId, Sequence)]> {
        self.changed().map(|changed| &changed.ids[..])
    }

    /// Whether the news tell of a design document of which nobody knows which it is: a producer has not recorded its id, the ids
    /// were not asked for, or the database is deleted by now.
    pub fn may_be_any_ddoc(&self) -> bool {
        let has_changed = self.news().kinds().contains(EventKind::DdocUpdated);
        let ids_say_all =
            self.changed().is_some_and(|changed| changed.nameless.is_none() && !changed.ids.is_empty());
        has_changed && !ids_say_all
    }

    /// Which filters of the subscriber's set ([`Filter::any`]) want this, by their places. Only 0 if it has no set.
    pub fn wanted_by(&self) -> Vec<usize> {
        let Some((set, kinds)) = &self.batch.filters else { return vec![0] };
        set.wanting_of(*kinds, self.notification(), &self.batch.since)
    }

    /// Where the subscriber stood before the batch.
    pub(super) fn batch_since(&self) -> &'a Cursor {
        &self.batch.since
    }

    /// The design documents that have changed, if they were asked for.
    fn changed(&self) -> Option<&'a ChangedDdocs> {
        Some(&self.batch.ddocs.as_ref()?[self.index])
    }
}

impl Delivery {
    /// The delivery at `index` of `batch`.
    pub(super) fn new(batch: Arc<Deliveries>, index: usize) -> Self {
        Self { batch, index }
    }

    /// Where a subscriber stands that has worked on what came before it in its batch.
    pub(super) fn cursor_before(&self) -> Cursor {
        self.batch().cursor_after(self.index)
    }

    /// The same by reference.
    #[inline]
    pub fn as_ref(&self) -> DeliveryRef<'_> {
        DeliveryRef { batch: &self.batch, index: self.index }
    }

    /// The newest row of the database.
    #[inline]
    pub fn notification(&self) -> &Arc<Notification> {
        self.batch.row(self.index)
    }

    /// What is new to this subscriber: [`DeliveryRef::news`].
    pub fn news(&self) -> News {
        self.as_ref().news()
    }

    /// Where the reading began that this is a part of: [`DeliveryRef::since`].
    pub fn since(&self) -> Cursor {
        self.as_ref().since()
    }

    /// The position of the row: [`DeliveryRef::sequence`].
    #[inline]
    pub fn sequence(&self) -> Sequence {
        self.as_ref().sequence()
    }

    /// The design documents that have changed: [`DeliveryRef::ddocs`].
    pub fn ddocs(&self) -> Option<&[(DdocId, Sequence)]> {
        self.as_ref().ddocs()
    }

    /// Whether the news tell of a design document that may be any: [`DeliveryRef::may_be_any_ddoc`].
    pub fn may_be_any_ddoc(&self) -> bool {
        self.as_ref().may_be_any_ddoc()
    }

    /// Which filters of the subscriber's set want this: [`DeliveryRef::wanted_by`].
    pub fn wanted_by(&self) -> Vec<usize> {
        self.as_ref().wanted_by()
    }

    /// The batch that it came in.
    pub fn batch(&self) -> DeliveryBatch {
        DeliveryBatch(Arc::clone(&self.batch))
    }
}

impl fmt::Debug for DeliveryRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery").field("row", self.notification()).field("since", &self.since()).finish()
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_ref().fmt(f)
    }
}

/// What a subscription has to say other than a row. It has not ended: receiving goes on with the next item, unless an item says
/// otherwise.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Interruption {
    /// The first scan of a subscriber that began with nothing is complete: all databases that it wants, as they were at `at`, have
    /// been delivered. This comes once, of a durable subscriber once for its cursor, and again after each
    /// [`Interruption::Expired`].
    #[error("everything up to {at} was delivered")]
    Synced {
        /// Everything up to here was delivered.
        at: Sequence,
    },
    /// A subscriber that skips has fallen behind: what lies between was not delivered. It goes on from `to`.
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
    /// The feed could not be read. The subscriber keeps its cursor; receiving again tries again, a tenth of a second later. After
    /// [`Error::CursorLost`] the subscription ends.
    #[error(transparent)]
    Failed(#[from] Error),
}
