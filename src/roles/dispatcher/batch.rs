//! [`Batch`]: rows of the feed that were read together; and [`DeliveryBatch`]: those of them that are news to one subscriber.

#[cfg(feature = "http")]
use std::{
    any::Any,
    sync::{Mutex, PoisonError},
};
use std::{fmt, sync::Arc};

use smallvec::{SmallVec, smallvec};

use super::{
    delivery::{Delivery, DeliveryRef},
    filter::Set,
    log::Mark,
};
use crate::{
    base::{
        cursor::{Cursor, Knowledge},
        encoding::Sequence,
        event::Kinds,
        notification::Notification,
    },
    state::notification_feed::ChangedDdocs,
};

/// With so many bytes of names a batch takes no further row.
pub(super) const BATCH_BYTES_MAX: usize = 32 * 1024;

/// Rows of the feed, as the tail or a subscriber that catches up has read them.
pub(crate) struct Batch {
    /// The rows, in order.
    pub rows: Vec<Arc<Notification>>,
    /// What everybody knew for whom the rows are news: the batch is a part of a reading that began there.
    pub since: Cursor,
    /// Where the batch ends: rows up to here were read.
    pub to: Sequence,
    /// Whether it ends at the end of what there was to read. Who has it then knows all that happened up to there.
    pub is_complete: bool,
    /// What was made of it once for all who share it.
    #[cfg(feature = "http")]
    made: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl Batch {
    /// A batch of `rows`.
    pub fn new(rows: Vec<Arc<Notification>>, since: Cursor, to: Sequence, is_complete: bool) -> Self {
        Self {
            rows,
            since,
            to,
            is_complete,
            #[cfg(feature = "http")]
            made: Mutex::default(),
        }
    }

    /// What `make` makes of the batch, made once for all who pass an equal `key`. Keep the number of keys small.
    #[cfg(feature = "http")]
    pub fn once<K, T>(&self, key: K, make: impl FnOnce() -> T) -> Arc<(K, T)>
    where
        K: PartialEq + Send + Sync + 'static,
        T: Send + Sync + 'static,
    {
        let mut all = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.iter().filter_map(|made| Arc::clone(made).downcast::<(K, T)>().ok());
        if let Some(made) = known.into_iter().find(|made| made.0 == key) {
            return made;
        }
        let new = Arc::new((key, make()));
        all.push(Arc::clone(&new) as Arc<dyn Any + Send + Sync>);
        new
    }

    /// The cursor of a reader whose reading began as `since` says, and that was delivered all of the batch.
    pub fn cursor_after(&self, since: Cursor) -> Cursor {
        if self.is_complete {
            // It may know more than the batch says.
            return match since.knowledge() {
                Knowledge::UpTo(known) => known.max(self.to).into(),
                Knowledge::Nothing => self.to.into(),
            };
        }
        Cursor::resumed(since.knowledge(), since.began().unwrap_or(self.to), since.position().max(self.to))
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("rows", &self.rows.len()).field("to", &self.to).finish_non_exhaustive()
    }
}

/// A position as logs carry it.
pub(super) fn to_mark(position: Sequence) -> Mark {
    let mut bytes = [0; 16];
    bytes[..position.as_bytes().len()].copy_from_slice(position.as_bytes());
    let (high, low) = bytes.split_at(8);
    [high, low].map(|half| u64::from_be_bytes(half.try_into().expect("they are 8 bytes each")))
}

/// The position that logs have carried.
pub(super) fn of_mark(mark: Mark) -> Sequence {
    let bytes = [mark[0].to_be_bytes(), mark[1].to_be_bytes()].concat();
    Sequence::from_bytes(&bytes[..Sequence::MIN.as_bytes().len()]).expect("it was one")
}

/// Rows of a batch by their indices, in order. Mostly there is one.
pub(super) type Indices = SmallVec<[u32; 4]>;

/// Which rows of a batch are delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Chosen {
    /// Those from an index on.
    From(u32),
    /// Those at these indices.
    Indices(Indices),
}

impl Chosen {
    /// Those from index `first` on.
    pub fn from(self, first: u32) -> Self {
        match self {
            Self::From(index) => Self::From(index.max(first)),
            Self::Indices(indices) if indices.first().is_none_or(|index| *index >= first) => {
                Self::Indices(indices)
            }
            Self::Indices(indices) => {
                Self::Indices(indices.into_iter().filter(|index| *index >= first).collect())
            }
        }
    }

    /// How many rows of `batch` they are.
    #[inline]
    pub fn count(&self, batch: &Batch) -> usize {
        match self {
            Self::From(first) => batch.rows.len() - *first as usize,
            Self::Indices(indices) => indices.len(),
        }
    }

    /// The index in the batch of the one at `place` of these.
    #[inline]
    fn index_of(&self, place: usize) -> u32 {
        match self {
            Self::From(first) => first + place as u32,
            Self::Indices(indices) => indices[place],
        }
    }

    /// Their indices in `batch`.
    pub fn indices(&self, batch: &Batch) -> impl DoubleEndedIterator<Item = u32> {
        (0..self.count(batch)).map(|place| self.index_of(place))
    }
}

/// The rows of a batch that a pattern matches.
#[derive(Debug, Clone)]
pub(super) struct Matched {
    /// The batch.
    pub batch: Arc<Batch>,
    /// Which of its rows.
    pub chosen: Chosen,
}

impl Matched {
    /// All rows of a batch that nobody else has.
    pub fn all(batch: Batch) -> Self {
        Self { batch: Arc::new(batch), chosen: Chosen::From(0) }
    }

    /// The rows.
    pub fn rows(&self) -> impl Iterator<Item = &Arc<Notification>> {
        self.chosen.indices(&self.batch).map(|index| &self.batch.rows[index as usize])
    }
}

/// Deliveries that come together: of distinct databases, but that in a round one that was deleted and created again can come twice,
/// first with its tombstone.
///
/// It is iterated by reference, which costs nothing per row:
///
/// ```
/// # fn example(batch: notibus::dispatcher::DeliveryBatch) {
/// for delivery in &batch {
///     println!("{}: {:?}", delivery.notification().name, delivery.news().kinds());
/// }
/// # }
/// ```
///
/// Clones are cheap and share the rows. Whoever keeps a batch keeps its rows in memory, at most
/// [`DispatcherOptions::catch_up_rows_max`](super::DispatcherOptions::catch_up_rows_max) of them, or those of a round.
#[derive(Clone)]
pub struct DeliveryBatch(pub(super) Arc<Deliveries>);

/// What a batch and its deliveries share.
pub(super) struct Deliveries {
    /// The rows.
    pub batch: Arc<Batch>,
    /// Which of them.
    pub chosen: Chosen,
    /// Where the reading of the subscriber began, and how far it had come before the batch.
    pub since: Cursor,
    /// The filters of the subscriber, if it has a set of them, and the kinds of events that the whole wants.
    pub filters: Option<(Arc<Set>, Kinds)>,
    /// For each delivery the design documents that have changed, if they were asked for.
    pub ddocs: Option<Box<[Arc<ChangedDdocs>]>>,
}

impl Deliveries {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.chosen.count(&self.batch)
    }

    /// The row of the delivery at `index`.
    #[inline]
    pub fn row(&self, index: usize) -> &Arc<Notification> {
        &self.batch.rows[self.chosen.index_of(index) as usize]
    }
}

impl DeliveryBatch {
    /// How many deliveries there are: at least one.
    #[expect(clippy::len_without_is_empty, reason = "a batch is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The deliveries, in order.
    pub fn iter(&self) -> Iter<'_> {
        Iter { batch: &self.0, next: 0, end: self.0.len() }
    }

    /// The delivery at `index`, to be kept.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn delivery(&self, index: usize) -> Delivery {
        assert!(index < self.len(), "there is no delivery {index} of {}", self.len());
        Delivery::new(Arc::clone(&self.0), index)
    }

    /// The delivery at `index` as a batch of its own.
    pub(super) fn single(&self, index: usize) -> Self {
        let Deliveries { batch, since, filters, ddocs, .. } = &*self.0;
        let chosen = Chosen::Indices(smallvec![self.0.chosen.index_of(index)]);
        let ddocs = ddocs.as_ref().map(|ddocs| [Arc::clone(&ddocs[index])].into());
        let (batch, filters) = (Arc::clone(batch), filters.clone());
        Self(Arc::new(Deliveries { batch, chosen, since: *since, filters, ddocs }))
    }

    /// Where a subscriber stands that has worked on the whole batch.
    pub fn cursor(&self) -> Cursor {
        self.0.batch.cursor_after(self.0.since)
    }

    /// Where a subscriber stands that has worked on the first `count` deliveries.
    pub fn cursor_after(&self, count: usize) -> Cursor {
        match count {
            0 => self.0.since,
            count if count >= self.len() => self.cursor(),
            count => {
                let (Deliveries { batch, since, .. }, at) = (&*self.0, self.0.row(count - 1).sequence);
                Cursor::resumed(
                    since.knowledge(),
                    since.began().unwrap_or(batch.to),
                    at.min(batch.to).max(since.position()),
                )
            }
        }
    }

    /// The deliveries of which `is_wanted`, with the design documents that have changed, in the order of the deliveries.
    pub(super) fn with_ddocs(
        &self,
        ddocs: Vec<Arc<ChangedDdocs>>,
        is_wanted: impl Fn(DeliveryRef<'_>) -> bool,
    ) -> Self {
        let Deliveries { batch, since, filters, .. } = &*self.0;
        let index_of = |index: usize| self.0.chosen.index_of(index);
        let with = |indices: Indices, ddocs| {
            let (batch, filters) = (Arc::clone(batch), filters.clone());
            let chosen = Chosen::Indices(indices);
            Self(Arc::new(Deliveries { batch, chosen, since: *since, filters, ddocs: Some(ddocs) }))
        };
        let all = with((0..self.len()).map(index_of).collect(), ddocs.into());
        let wanted: Vec<_> =
            (0..all.len()).filter(|&index| is_wanted(DeliveryRef { batch: &all.0, index })).collect();
        if wanted.len() == all.len() {
            return all;
        }
        let ddocs = all.0.ddocs.as_ref().expect("they were just added");
        with(
            wanted.iter().map(|&i| index_of(i)).collect(),
            wanted.iter().map(|&i| Arc::clone(&ddocs[i])).collect(),
        )
    }

    /// The rows that they are made of, if they are all rows of a batch which others are delivered as well.
    #[cfg(feature = "http")]
    pub(crate) fn whole(&self) -> Option<&Arc<Batch>> {
        let Deliveries { batch, chosen, since, .. } = &*self.0;
        (*chosen == Chosen::From(0) && since.rewound() == batch.since).then_some(batch)
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
#[derive(Clone)]
pub struct Iter<'a> {
    /// The batch.
    batch: &'a Deliveries,
    /// The next one.
    next: usize,
    /// The number after the last one.
    end: usize,
}

impl<'a> Iterator for Iter<'a> {
    type Item = DeliveryRef<'a>;

    #[inline]
    fn next(&mut self) -> Option<DeliveryRef<'a>> {
        if self.next == self.end {
            return None;
        }
        let delivery = DeliveryRef { batch: self.batch, index: self.next };
        self.next += 1;
        Some(delivery)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.end - self.next, Some(self.end - self.next))
    }
}

impl ExactSizeIterator for Iter<'_> {}

impl fmt::Debug for Iter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.clone().map(|delivery| delivery.notification())).finish()
    }
}
