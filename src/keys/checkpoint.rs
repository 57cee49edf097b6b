//! Family 12: what groups have to tell the janitor: which there are, and how far each has come.

use super::{FeedId, Keys, family};
use crate::{encoding::Sequence, error::Result, store::KeyRange};

/// The number, after the feed, of the rows of groups. They are written when a group begins, is reset or ends.
const GROUP: u16 = 0;

/// The number, after the feed, of the checkpoints.
const CHECKPOINT: u16 = 1;

impl Keys {
    /// The rows of all groups of `feed`. Whoever drops rows of the feed reads this range serializably, so that no group can
    /// begin in between.
    pub fn groups(&self, feed: &FeedId) -> KeyRange {
        self.range(&(family::CHECKPOINT, feed.bytes(), GROUP))
    }

    /// The checkpoints of all groups of `feed`, one for each shard that a group has not read to its end. They only grow while
    /// a group lives.
    pub fn checkpoints(&self, feed: &FeedId) -> KeyRange {
        self.range(&(family::CHECKPOINT, feed.bytes(), CHECKPOINT))
    }
}

/// The position in a stored checkpoint: everything up to it was worked on.
pub(crate) fn checkpoint_position(value: &[u8]) -> Result<Sequence> {
    Sequence::from_bytes(value)
}
