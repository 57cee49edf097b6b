//! [`Item`]: what a subscription yields; [`Delivery`] and [`DeliveryBatch`]; and [`Trouble`], what a plain loop has to handle. Below them,
//! [`Batch`]: rows of the feed that were read together; and [`Matched`]: the rows of a batch that a pattern matches.

#[cfg(feature = "http")]
use std::any::Any;
use std::{fmt, ops::Range, sync::Arc};

#[cfg(feature = "http")]
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::log::Mark;
use crate::{
    base::{
        cursor::{Cursor, Knowledge},
        encoding::Sequence,
        error::Error,
        event::{DdocId, EventKind, Kinds},
        filter::Set,
        notification::{News, Notification},
    },
    state::notification_feed::ChangedDdocs,
};

/// A batch takes no more rows once its names have this many bytes.
const BATCH_BYTES_MAX: usize = 32 * 1024;

/// Returns how many of `rows` go into one batch. Batches are small, because every idle subscriber may hold one.
pub(super) fn batch_len(rows: &[Arc<Notification>], rows_max: usize) -> usize {
    let mut bytes = 0;
    let fits = |row: &&Arc<Notification>| {
        let fits = bytes < BATCH_BYTES_MAX;
        bytes += row.name.as_str().len();
        fits
    };
    rows.iter().take(rows_max).take_while(fits).count()
}

/// Rows of the feed, read by the tail or by a subscriber that catches up.
pub(crate) struct Batch {
    pub rows: Vec<Arc<Notification>>,
    /// The start of the reading that the batch is part of: every receiver of the batch knew at least this much.
    pub since: Cursor,
    /// The batch covers the feed up to here.
    pub to: Sequence,
    /// How far the feed could be read at the time. If that is `to`, the reading ends here, and a receiver then knows everything up to `to`.
    pub readable: Sequence,
    /// Values computed from the batch once for all receivers.
    #[cfg(feature = "http")]
    made: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl Batch {
    pub fn new(rows: Vec<Arc<Notification>>, since: Cursor, to: Sequence, readable: Sequence) -> Self {
        Self {
            rows,
            since,
            to,
            readable,
            #[cfg(feature = "http")]
            made: Mutex::default(),
        }
    }

    /// Calls `make` once for all callers with an equal `key`, and returns its result. Keep the number of keys small.
    #[cfg(feature = "http")]
    pub fn once<K, T>(&self, key: K, make: impl FnOnce() -> T) -> Arc<(K, T)>
    where
        K: PartialEq + Send + Sync + 'static,
        T: Send + Sync + 'static,
    {
        let mut all = self.made.lock();
        let known = all.iter().filter_map(|made| Arc::clone(made).downcast::<(K, T)>().ok());
        if let Some(made) = known.into_iter().find(|made| made.0 == key) {
            return made;
        }
        let new = Arc::new((key, make()));
        all.push(Arc::clone(&new) as Arc<dyn Any + Send + Sync>);
        new
    }

    /// Returns the cursor of a reader whose reading began at `since` and that has received the whole batch.
    pub fn cursor_after(&self, since: Cursor) -> Cursor {
        if let (Knowledge::UpTo(known), true) = (since.knowledge(), self.to == self.readable) {
            // The reader may know more than the batch covers.
            return known.max(self.to).into();
        }
        self.cursor_at(since, self.to)
    }

    /// Returns the cursor of a reader whose reading began at `since` and that has received the rows of the batch up to `to`.
    fn cursor_at(&self, since: Cursor, to: Sequence) -> Cursor {
        let readable = since.readable().max(Some(self.readable)).unwrap_or(self.readable);
        let began = since.began().unwrap_or(self.readable);
        Cursor::resumed(since.knowledge(), began, since.position().max(to), readable)
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("rows", &self.rows.len()).field("to", &self.to).finish_non_exhaustive()
    }
}

pub(super) fn to_mark(position: Sequence) -> Mark {
    let mut bytes = [0; 16];
    bytes[..position.as_bytes().len()].copy_from_slice(position.as_bytes());
    let (high, low) = bytes.split_at(8);
    [high, low].map(|half| u64::from_be_bytes(half.try_into().expect("they are 8 bytes each")))
}

pub(super) fn of_mark(mark: Mark) -> Sequence {
    let bytes = [mark[0].to_be_bytes(), mark[1].to_be_bytes()].concat();
    Sequence::from_bytes(&bytes[..Sequence::MIN.as_bytes().len()]).expect("it was one")
}

/// Indices of rows in a batch, in order; usually just one.
pub(super) type Indices = SmallVec<[u32; 4]>;

/// The rows of a batch that a pattern matches, or that are delivered.
#[derive(Debug, Clone)]
pub(super) struct Matched {
    pub batch: Arc<Batch>,
    /// The indices of these rows; `None` for all rows of the batch.
    pub chosen: Option<Indices>,
}

impl Matched {
    pub fn all(batch: Batch) -> Self {
        Self { batch: Arc::new(batch), chosen: None }
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.batch.rows.len(), SmallVec::len)
    }

    /// Returns the index within the batch of the row at `place`.
    #[inline]
    pub fn index_of(&self, place: usize) -> u32 {
        self.chosen.as_ref().map_or(place as u32, |indices| indices[place])
    }

    #[inline]
    pub fn row(&self, place: usize) -> &Arc<Notification> {
        &self.batch.rows[self.index_of(place) as usize]
    }

    pub fn rows(&self) -> impl Iterator<Item = &Arc<Notification>> {
        (0..self.len()).map(|place| self.row(place))
    }

    pub fn drop_up_to(&mut self, position: Sequence) {
        let rows = &self.batch.rows;
        if rows.first().is_some_and(|row| row.sequence <= position) {
            let indices = self.chosen.get_or_insert_with(|| (0..rows.len() as u32).collect());
            indices.retain(|index| rows[*index as usize].sequence > position);
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Content {
    pub rows: Matched,
    /// The subscriber's cursor before the batch.
    pub since: Cursor,
    /// The subscriber's set of filters, if it has one, and the kinds of events that the set wants.
    pub filters: Option<(Arc<Set>, Kinds)>,
    /// The changed design documents of each delivery, if the subscription asked for them.
    pub ddocs: Option<Box<[Arc<ChangedDdocs>]>>,
}

impl Content {
    fn changed(&self, index: usize) -> Option<&Arc<ChangedDdocs>> {
        self.ddocs.as_ref().map(|changed| &changed[index])
    }

    fn cursor_after(&self, count: usize) -> Cursor {
        let Self { rows, since, .. } = self;
        if count >= rows.len() {
            return rows.batch.cursor_after(*since);
        }
        let Some(last) = count.checked_sub(1) else { return *since };
        rows.batch.cursor_at(*since, rows.row(last).sequence.min(rows.batch.to))
    }
}

/// Deliveries that are received together. Each is for a different database, with one exception: in a round, a database that was deleted and
/// created again can appear twice, first with its tombstone.
///
/// Iterating over a reference copies no rows:
///
/// ```
/// # fn example(batch: notibus::dispatcher::DeliveryBatch) {
/// for delivery in &batch {
///     println!("{}: {:?}", delivery.notification().name, delivery.news().kinds());
/// }
/// # }
/// ```
///
/// Clones are cheap and share the rows. A batch keeps its rows in memory: at most
/// [`DispatcherOptions::catch_up_rows_max`](super::DispatcherOptions::catch_up_rows_max) of them, or those of a round.
#[derive(Clone)]
pub struct DeliveryBatch {
    all: Arc<Content>,
    /// This batch is the part of `all` from `start` up to, but not including, `end`. It is not empty when it is delivered.
    start: u32,
    end: u32,
}

impl DeliveryBatch {
    pub(super) fn new(all: Content) -> Self {
        Self { start: 0, end: all.rows.len() as u32, all: Arc::new(all) }
    }

    /// The number of deliveries: at least one.
    #[expect(clippy::len_without_is_empty, reason = "a batch is never empty")]
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// The deliveries, in order.
    pub fn iter(&self) -> Iter<'_> {
        let Matched { batch, chosen, .. } = &self.all.rows;
        let (rows, chosen) = (&batch.rows[..], chosen.as_deref());
        Iter { batch: &self.all, rows, chosen, left: self.start as usize..self.end as usize }
    }

    /// The delivery at `index`, as an owned value.
    ///
    /// # Panics
    ///
    /// If `index` is out of bounds.
    pub fn delivery(&self, index: usize) -> Delivery {
        assert!(index < self.len(), "there is no delivery {index} of {}", self.len());
        Delivery { batch: Arc::clone(&self.all), index: self.start as usize + index }
    }

    /// Removes the first delivery from `left`, and returns it as a batch of its own.
    #[inline]
    pub(super) fn take_first(left: &mut Option<Self>) -> Option<Self> {
        let rest = left.as_mut()?;
        let start = rest.start;
        if start + 1 == rest.end {
            return left.take();
        }
        rest.start = start + 1;
        Some(Self { all: Arc::clone(&rest.all), start, end: start + 1 })
    }

    #[inline]
    pub(super) fn into_first(self) -> Delivery {
        Delivery { batch: self.all, index: self.start as usize }
    }

    /// The cursor of a subscriber that has worked on the whole batch.
    pub fn cursor(&self) -> Cursor {
        self.all.cursor_after(self.end as usize)
    }

    /// The cursor of a subscriber that has worked on the first `count` deliveries.
    pub fn cursor_after(&self, count: usize) -> Cursor {
        self.all.cursor_after(self.end.min(self.start.saturating_add(count as u32)) as usize)
    }

    /// Returns the deliveries for which `is_wanted` is true, in order, with their changed design documents.
    pub(super) fn with_ddocs(
        &self,
        ddocs: Vec<Arc<ChangedDdocs>>,
        is_wanted: impl Fn(DeliveryRef<'_>) -> bool,
    ) -> Self {
        let mut all = Content { ddocs: Some(ddocs.into()), ..(*self.all).clone() };
        let wanted = |index: &usize| is_wanted(DeliveryRef::new(&all, *index));
        let wanted: Vec<_> = (0..all.rows.len()).filter(wanted).collect();
        all.ddocs = Some(wanted.iter().filter_map(|index| all.changed(*index).cloned()).collect());
        all.rows.chosen = Some(wanted.iter().map(|index| all.rows.index_of(*index)).collect());
        Self::new(all)
    }

    /// Returns the underlying batch if this is the whole of it, exactly as other subscribers receive it.
    #[cfg(feature = "http")]
    pub(crate) fn whole(&self) -> Option<&Arc<Batch>> {
        let Content { rows: Matched { batch, chosen, .. }, since, .. } = &*self.all;
        let is_whole = chosen.is_none() && self.len() == batch.rows.len();
        (is_whole && since.rewound() == batch.since).then_some(batch)
    }
}

impl<'a> IntoIterator for &'a DeliveryBatch {
    type Item = DeliveryRef<'a>;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

impl fmt::Debug for DeliveryBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|delivery| delivery.notification())).finish()
    }
}

/// The deliveries of a batch, in order.
#[derive(Debug, Clone)]
pub struct Iter<'a> {
    batch: &'a Content,
    rows: &'a [Arc<Notification>],
    chosen: Option<&'a [u32]>,
    left: Range<usize>,
}

impl<'a> Iterator for Iter<'a> {
    type Item = DeliveryRef<'a>;

    #[inline]
    fn next(&mut self) -> Option<DeliveryRef<'a>> {
        let index = self.left.next()?;
        let row = self.chosen.map_or(index, |chosen| chosen[index] as usize);
        Some(DeliveryRef { batch: self.batch, row: &self.rows[row], index })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.left.size_hint()
    }
}

impl ExactSizeIterator for Iter<'_> {}

/// A row as news for one subscriber. Clones are cheap.
///
/// A database is identified by its name. If several instances had the name in turn, the news says that the instance before the current one
/// was deleted, whichever of them the subscriber knew.
#[derive(Clone)]
pub struct Delivery {
    batch: Arc<Content>,
    index: usize,
}

/// A delivery within its [`DeliveryBatch`]. It has all methods of [`Delivery`].
#[derive(Clone, Copy)]
pub struct DeliveryRef<'a> {
    batch: &'a Content,
    row: &'a Arc<Notification>,
    index: usize,
}

impl<'a> DeliveryRef<'a> {
    fn new(batch: &'a Content, index: usize) -> Self {
        Self { batch, row: batch.rows.row(index), index }
    }
}

impl Delivery {
    /// Borrows the delivery.
    #[inline]
    pub fn as_ref(&self) -> DeliveryRef<'_> {
        DeliveryRef::new(&self.batch, self.index)
    }
}

/// The methods of a delivery, for the owned and the borrowed type.
macro_rules! delivery {
    ([$($of:lifetime)?] $type:ty, $life:lifetime, |$delivery:ident| $row:expr) => {
        impl $(<$of>)? $type {
            /// The newest row of the database.
            #[inline]
            pub fn notification(&self) -> &$life Arc<Notification> {
                let $delivery = self;
                $row
            }

            pub(super) fn batch_since(&self) -> &$life Cursor {
                &self.batch.since
            }

            /// What is new to this subscriber, in the order in which it happened.
            ///
            /// Nothing is left out. If a database changes while the subscriber catches up over several pages of the feed, kinds that were
            /// already delivered can be delivered again.
            pub fn news(&self) -> News {
                self.notification().news_since(self.batch.since)
            }

            /// The cursor at which the current reading began. A subscriber that starts again from here misses nothing, and may get
            /// deliveries of this reading again.
            pub fn since(&self) -> Cursor {
                self.batch.since.rewound()
            }

            /// The position of the row. Do not start again from here: events of other databases before this position may not have been
            /// delivered yet. Start again from the cursor of the subscription.
            #[inline]
            pub fn sequence(&self) -> Sequence {
                self.notification().sequence
            }

            /// The design documents of the database that were written or deleted since the state that the subscriber knew, as far as
            /// producers recorded their ids, each with the sequence of the notification that reported it. `None` unless the subscription
            /// asked for them ([`Subscribe::with_ddocs`](crate::dispatcher::Subscribe::with_ddocs)).
            ///
            /// They are read later than the row, so they include later changes, which will be delivered again. Other design documents may
            /// have changed as well if [`may_be_any_ddoc`](Self::may_be_any_ddoc) is true.
            pub fn ddocs(&self) -> Option<&$life [(DdocId, Sequence)]> {
                self.batch.changed(self.index).map(|changed| &changed.ids[..])
            }

            /// Whether an unknown design document may have changed: a producer did not record its id, the ids were not asked for, or the
            /// database has been deleted since.
            pub fn may_be_any_ddoc(&self) -> bool {
                let changed = self.batch.changed(self.index);
                let ids_say_all =
                    changed.is_some_and(|changed| changed.nameless.is_none() && !changed.ids.is_empty());
                self.news().kinds().contains(EventKind::DdocUpdated) && !ids_say_all
            }

            /// The indices of the filters in the subscriber's set ([`Filter::any`](crate::Filter::any)) that want this delivery. Only index
            /// 0 if the subscriber has no set.
            pub fn wanted_by(&self) -> Vec<usize> {
                let Some((set, kinds)) = &self.batch.filters else { return vec![0] };
                set.wanting_of(*kinds, self.notification(), &self.batch.since)
            }
        }

        impl $(<$of>)? fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let (row, since) = (self.notification(), self.since());
                f.debug_struct("Delivery").field("row", row).field("since", &since).finish()
            }
        }
    };
}

delivery!([] Delivery, '_, |delivery| delivery.batch.rows.row(delivery.index));
delivery!(['a] DeliveryRef<'a>, 'a, |delivery| delivery.row);

/// What a subscription yields: a delivery, a batch of deliveries, or something that happened to the subscription itself. The subscription
/// continues after each item, except after [`Item::Failed`] with [`Error::BusGone`].
#[derive(Debug, Clone)]
pub enum Item<T = Delivery> {
    /// A row as news, or a batch of such rows.
    Delivery(T),
    /// The first scan of a subscriber that began with nothing is complete: all databases that it wants, as they were at `at`, have been
    /// delivered. This item comes once per subscriber, and again after each [`Item::Expired`].
    CaughtUp {
        /// The end of the scan.
        at: Sequence,
    },
    /// A subscriber that skips has fallen behind: rows between `from` and `to` were not delivered. It continues at `to`.
    Lagged {
        /// The last position up to which the subscriber knew everything.
        from: Sequence,
        /// The position at which it continues.
        to: Sequence,
    },
    /// The subscriber was away for so long that rows it has not seen may have been deleted: databases that it knows may be gone. The
    /// subscriber should forget what it knows. It starts again from nothing, with every database that it wants.
    Expired {
        /// Rows up to here may have been deleted.
        horizon: Sequence,
    },
    /// The feed could not be read. The subscriber keeps its cursor, and tries again a second later. After [`Error::BusGone`] the
    /// subscription ends.
    Failed(Error),
}

/// An [`Item`] whose deliveries come in batches.
pub type BatchItem = Item<DeliveryBatch>;

impl<T> Item<T> {
    /// Returns the delivery; `None` for any other item.
    pub fn into_delivery(self) -> Option<T> {
        self.sorted().ok().flatten()
    }

    /// Returns the delivery, `None` for [`Item::CaughtUp`], or the trouble as the error.
    pub(super) fn sorted(self) -> Result<Option<T>, Trouble> {
        match self {
            Self::Delivery(delivery) => Ok(Some(delivery)),
            Self::CaughtUp { .. } => Ok(None),
            Self::Lagged { from, to } => Err(Trouble::Lagged { from, to }),
            Self::Expired { horizon } => Err(Trouble::Expired { horizon }),
            Self::Failed(error) => Err(Trouble::Failed(error)),
        }
    }

    pub(super) fn map<U>(self, convert: impl FnOnce(T) -> U) -> Item<U> {
        match self {
            Self::Delivery(delivery) => Item::Delivery(convert(delivery)),
            Self::CaughtUp { at } => Item::CaughtUp { at },
            Self::Lagged { from, to } => Item::Lagged { from, to },
            Self::Expired { horizon } => Item::Expired { horizon },
            Self::Failed(error) => Item::Failed(error),
        }
    }
}

/// What a loop over [deliveries alone](crate::dispatcher::Subscribe::deliveries) has to handle besides deliveries.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Trouble {
    /// See [`Item::Lagged`]: data derived from deliveries may be stale for databases that changed in between.
    #[error("skipped everything between {from} and {to}")]
    Lagged {
        /// The last position up to which the subscriber knew everything.
        from: Sequence,
        /// The position at which it continues.
        to: Sequence,
    },
    /// See [`Item::Expired`]: discard all data derived from deliveries. Every wanted database is delivered again.
    #[error("rows up to {horizon} may have been dropped unseen: every database is delivered again")]
    Expired {
        /// Rows up to here may have been deleted.
        horizon: Sequence,
    },
    /// See [`Item::Failed`]: nothing is lost, and the subscription tries again, unless it ends with [`Error::BusGone`].
    #[error(transparent)]
    Failed(#[from] Error),
}
