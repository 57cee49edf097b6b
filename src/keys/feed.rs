//! Families 4, 5 and 6: the rows of a feed, where the newest row of an id stands, and where the last row of a shard does.

use bytes::Bytes;

use super::{Keys, family, position, sequence};
use crate::{
    encoding::{Incarnation, Sequence, versionstamped},
    error::{Error, Result},
    store::{KeyRange, key_after},
};

/// Which feed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct FeedId(Bytes);

impl FeedId {
    /// The feed of notifications.
    pub fn notifications() -> Self {
        Self(Bytes::from_static(b"n"))
    }

    /// The feed as it stands in keys.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A shard of a feed. Ids are unique within the feed and never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShardId(pub u64);

impl Keys {
    /// The key of the row of `shard` at `sequence`.
    pub fn entry(&self, feed: &FeedId, shard: ShardId, sequence: Sequence) -> Vec<u8> {
        let (incarnation, stamp) = position(sequence);
        self.pack(&(family::ENTRY, feed.bytes(), shard.0, incarnation, stamp))
    }

    /// The operand of `SET_VERSIONSTAMPED_KEY` that appends row number `order` of this transaction to `shard`.
    pub fn append(&self, feed: &FeedId, shard: ShardId, incarnation: Incarnation, order: u16) -> Vec<u8> {
        let stamp = foundationdb_tuple::Versionstamp::incomplete(order);
        self.pack_stamped(&(family::ENTRY, feed.bytes(), shard.0, u16::from(incarnation.0), stamp))
    }

    /// The rows of `shard` after `after`, up to and including `last`.
    pub fn entries(&self, feed: &FeedId, shard: ShardId, after: Sequence, last: Sequence) -> KeyRange {
        KeyRange {
            begin: key_after(&self.entry(feed, shard, after)),
            end: key_after(&self.entry(feed, shard, last)),
        }
    }

    /// The sequence in the key of a row.
    pub fn entry_sequence(&self, key: &[u8]) -> Result<Sequence> {
        let (number, _, _, incarnation, stamp): (
            u16,
            foundationdb_tuple::Bytes<'_>,
            u64,
            u16,
            foundationdb_tuple::Versionstamp,
        ) = self.unpack("feed entry", key)?;
        if number != family::ENTRY {
            return Err(Error::corrupt("feed entry", "its key is of another family"));
        }
        sequence(incarnation, &stamp)
    }

    /// The key of the sequence of the newest row of `id`.
    pub fn newest(&self, feed: &FeedId, id: &[u8]) -> Vec<u8> {
        self.pack(&(family::NEWEST, feed.bytes(), id))
    }

    /// The key of the versionstamp of the last append to `shard`.
    pub fn head(&self, feed: &FeedId, shard: ShardId) -> Vec<u8> {
        self.pack(&(family::HEAD, feed.bytes(), shard.0))
    }
}

/// The operand of `SET_VERSIONSTAMPED_VALUE` that stores the sequence of row number `order` of this transaction.
pub(crate) fn sequence_operand(incarnation: Incarnation, order: u16) -> Vec<u8> {
    versionstamped(&[incarnation.0], &order.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::encoding::Versionstamp;

    fn at(version: u64, order: u16) -> Sequence {
        Sequence::new(Incarnation(1), Versionstamp::new(version, 0), order)
    }

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let feed = FeedId::notifications();
        let start = [b'p', 0x15, 4, 0x01, b'n', 0, 0x15, 9, 0x15, 1, 0x33];
        let entry = keys.entry(&feed, ShardId(9), at(0x0102, 3));
        assert_eq!(entry, [&start[..], &[0, 0, 0, 0, 0, 0, 1, 2, 0, 0], &[0, 3]].concat());
        let append = keys.append(&feed, ShardId(9), Incarnation(1), 3);
        assert_eq!(append[..start.len()], start);
        assert_eq!(append[start.len() + 10..], [0, 3, start.len() as u8, 0, 0, 0]);
        assert_eq!(keys.newest(&feed, b"db"), [b'p', 0x15, 5, 0x01, b'n', 0, 0x01, b'd', b'b', 0]);
        assert_eq!(keys.head(&feed, ShardId(9)), [b'p', 0x15, 6, 0x01, b'n', 0, 0x15, 9]);
    }

    #[test]
    fn a_range_of_rows_excludes_its_start_and_includes_its_end() {
        let keys = Keys::new(b"p").unwrap();
        let feed = FeedId::notifications();
        let range = keys.entries(&feed, ShardId(9), at(1, 0), at(3, 7));
        for (sequence, within) in [(at(1, 0), false), (at(1, 1), true), (at(3, 7), true), (at(3, 8), false)] {
            assert_eq!(range.contains(&keys.entry(&feed, ShardId(9), sequence)), within, "{sequence}");
        }
        assert!(!range.contains(&keys.entry(&feed, ShardId(10), at(2, 0))));
    }

    proptest! {
        #[test]
        fn keys_sort_as_sequences(a: (u8, u64, u16), b: (u8, u64, u16), shard: u64) {
            let keys = Keys::new(b"p").unwrap();
            let sequence = |(incarnation, version, order)| Sequence::new(Incarnation(incarnation), Versionstamp::new(version, 0), order);
            let key = |parts| keys.entry(&FeedId::notifications(), ShardId(shard), sequence(parts));
            prop_assert_eq!(sequence(a).cmp(&sequence(b)), key(a).cmp(&key(b)));
            prop_assert_eq!(keys.entry_sequence(&key(a)).unwrap(), sequence(a));
        }
    }
}
