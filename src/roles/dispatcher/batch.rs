//! [`Batch`]: rows of the feed that were read together; and [`Matched`]: those of them that a pattern matches.

#[cfg(feature = "http")]
use std::{
    any::Any,
    sync::{Mutex, PoisonError},
};
use std::{fmt, sync::Arc};

use smallvec::SmallVec;

use super::log::Mark;
use crate::base::{
    cursor::{Cursor, Knowledge},
    encoding::Sequence,
    notification::Notification,
};

/// With so many bytes of names a batch takes no further row.
const BATCH_BYTES_MAX: usize = 32 * 1024;

/// How many of `rows` go into one batch: few, because a subscriber that rests holds one.
pub(super) fn batch_len(rows: &[Arc<Notification>], rows_max: usize) -> usize {
    let mut bytes = 0;
    let fits = |row: &&Arc<Notification>| {
        let fits = bytes < BATCH_BYTES_MAX;
        bytes += row.name.as_str().len();
        fits
    };
    rows.iter().take(rows_max).take_while(fits).count()
}

/// Rows of the feed, as the tail or a subscriber that catches up has read them.
pub(crate) struct Batch {
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

/// Rows of a batch, in order. Mostly there is one.
pub(super) type Indices = SmallVec<[u32; 4]>;

/// Which rows of a batch are delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Chosen {
    /// Those from an index on.
    From(u32),
    Indices(Indices),
}

impl Chosen {
    /// Those from index `first` on.
    pub fn from(self, first: u32) -> Self {
        match self {
            Self::From(index) => Self::From(index.max(first)),
            Self::Indices(mut indices) => {
                indices.retain(|index| *index >= first);
                Self::Indices(indices)
            }
        }
    }

    #[inline]
    pub fn count(&self, batch: &Batch) -> usize {
        match self {
            Self::From(first) => batch.rows.len() - *first as usize,
            Self::Indices(indices) => indices.len(),
        }
    }

    /// The index in the batch of the one at `place` of these.
    #[inline]
    pub fn index_of(&self, place: usize) -> u32 {
        match self {
            Self::From(first) => first + place as u32,
            Self::Indices(indices) => indices[place],
        }
    }

    pub fn indices(&self, batch: &Batch) -> impl DoubleEndedIterator<Item = u32> {
        (0..self.count(batch)).map(|place| self.index_of(place))
    }
}

/// The rows of a batch that a pattern matches.
#[derive(Debug, Clone)]
pub(super) struct Matched {
    pub batch: Arc<Batch>,
    pub chosen: Chosen,
}

impl Matched {
    /// All rows of a batch that nobody else has.
    pub fn all(batch: Batch) -> Self {
        Self { batch: Arc::new(batch), chosen: Chosen::From(0) }
    }

    pub fn rows(&self) -> impl Iterator<Item = &Arc<Notification>> {
        self.chosen.indices(&self.batch).map(|index| &self.batch.rows[index as usize])
    }
}
