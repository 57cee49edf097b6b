//! [`Batch`]: rows of the feed that were read together; and [`Matched`]: the rows of a batch that a pattern matches.

#[cfg(feature = "http")]
use std::any::Any;
use std::{fmt, sync::Arc};

#[cfg(feature = "http")]
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::log::Mark;
use crate::base::{
    cursor::{Cursor, Knowledge},
    encoding::Sequence,
    notification::Notification,
};

/// Bytes of names after which a batch takes no further row.
const BATCH_BYTES_MAX: usize = 32 * 1024;

/// How many of `rows` go into one batch. Batches are small, because an idle subscriber holds one.
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
    /// Where the reading began that the batch is part of: every receiver of the batch knew at least this.
    pub since: Cursor,
    /// The batch covers the feed up to here.
    pub to: Sequence,
    /// Whether the reading ends here. A receiver then knows everything up to `to`.
    pub is_complete: bool,
    /// Values computed from the batch once for all receivers.
    #[cfg(feature = "http")]
    made: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl Batch {
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

    /// Calls `make` once for all callers with an equal `key`, and returns the result. Keep the number of keys small.
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

    /// The cursor of a reader whose reading began at `since` and that was delivered the whole batch.
    pub fn cursor_after(&self, since: Cursor) -> Cursor {
        if self.is_complete {
            // The reader may know more than the batch covers.
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

/// Rows of a batch, in order; mostly one.
pub(super) type Indices = SmallVec<[u32; 4]>;

/// The rows of a batch that a pattern matches, or that are delivered.
#[derive(Debug, Clone)]
pub(super) struct Matched {
    pub batch: Arc<Batch>,
    /// All of them if `None`.
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

    /// The index in the batch of the row number `place`.
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
