//! [`Cursor`]: where a reader stands, and where and when it began.

use crate::{
    encoding::Sequence,
    error::{Error, Result},
};

/// Where a reader stands: up to where it has read, and where and when it began. A [`Sequence`] is one that begins there.
///
/// A reader that takes several pages is between two of them at a position that says too little. What is news to it counts from
/// where it began ([`Cursor::since`]); and one that began at zero may well stand below the horizon: it lacks only what was
/// dropped after it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// Everything up to here was known when the reading began.
    since: Sequence,
    /// What could be read when it began; `None` if it is about to begin.
    began: Option<Sequence>,
    /// Everything up to here was read.
    after: Sequence,
}

impl From<Sequence> for Cursor {
    fn from(since: Sequence) -> Self {
        Self { since, began: None, after: since }
    }
}

impl Cursor {
    /// The cursor of a reader that knew everything up to `since` when it began, when everything up to `began` could be read,
    /// and has read up to `after`: for readers that keep their position somewhere.
    pub fn resumed(since: Sequence, began: Sequence, after: Sequence) -> Self {
        Self { since, began: Some(began), after }
    }

    /// Everything up to here was known when the reading began.
    pub fn since(&self) -> Sequence {
        self.since
    }

    /// What could be read when it began; `None` if it is about to begin.
    pub fn began(&self) -> Option<Sequence> {
        self.began
    }

    /// Everything up to here was read.
    pub fn position(&self) -> Sequence {
        self.after
    }

    /// The same reader, having read up to `to`.
    pub(crate) fn at(self, to: Sequence) -> Self {
        Self { after: to, ..self }
    }

    /// The same reader; if it was about to begin, it begins where everything up to `last` can be read.
    pub(super) fn begin(self, last: Sequence) -> Self {
        Self { began: self.began.or(Some(last)), ..self }
    }

    /// Fails if rows may have been dropped that the reader has not seen and that tell of what it knows.
    pub(super) fn check(self, horizon: Sequence) -> Result<()> {
        let known = if self.since == Sequence::ZERO {
            // It knew nothing: what was deleted before it began cannot be missed.
            self.began.map_or(horizon, |began| began.max(self.after))
        } else {
            self.after
        };
        if known < horizon { Err(Error::Expired { horizon }) } else { Ok(()) }
    }
}
