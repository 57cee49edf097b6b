//! Families 4, 5, 8 and 18: the rows of a feed, the position of the newest row of an id, the horizon, and the number of
//! rows of a shard.

use bytes::Bytes;

use super::{Keys, family, position, sequence};
use crate::{
    base::{
        encoding::{Incarnation, Sequence, versionstamped},
        error::{Error, Result},
        event::DbInstance,
    },
    store::{KeyRange, key_after},
};

/// The id of a feed: `n`, or `d` and 16 bytes. Ids are stored and never change.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FeedId(Bytes);

impl FeedId {
    /// The id of the feed of notifications.
    pub fn notifications() -> Self {
        Self(Bytes::from_static(b"n"))
    }

    /// The id of the document feed of a database.
    pub fn documents(instance: DbInstance) -> Self {
        Self([&b"d"[..], &instance.0].concat().into())
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        match bytes {
            b"n" => Ok(Self::notifications()),
            [b'd', instance @ ..] if instance.len() == 16 => {
                Ok(Self::documents(DbInstance(instance.try_into().expect("the length was checked"))))
            }
            _ => Err(Error::corrupt("feed", format!("{bytes:?} is not a feed"))),
        }
    }

    /// The instance of the database whose documents the feed is about; `None` for the feed of notifications.
    pub fn instance(&self) -> Option<DbInstance> {
        let instance = self.0.strip_prefix(b"d")?;
        Some(DbInstance(instance.try_into().expect("a feed of documents names 16 bytes")))
    }

    /// The bytes that identify the feed in keys.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Display for FeedId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.instance() {
            None => f.write_str("notifications"),
            Some(instance) => write!(f, "documents of {instance}"),
        }
    }
}

/// A shard of a feed. Ids are unique within the feed, and are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct ShardId(pub u64);

impl std::fmt::Display for ShardId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The key range of the rows of one shard: each key is a prefix, an incarnation and a tuple versionstamp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowSpace(Bytes);

impl RowSpace {
    /// Creates the space of the rows whose keys start with `prefix`.
    pub fn new(prefix: impl Into<Bytes>) -> Self {
        Self(prefix.into())
    }

    pub fn prefix(&self) -> &[u8] {
        &self.0
    }

    /// The key of the row at `sequence`.
    pub fn row(&self, sequence: Sequence) -> Vec<u8> {
        let mut key = self.0.to_vec();
        foundationdb_tuple::TuplePack::pack_into_vec(&position(sequence), &mut key);
        key
    }

    /// Returns the operand of `SET_VERSIONSTAMPED_KEY` that appends row number `order` of this transaction.
    pub fn append(&self, incarnation: Incarnation, order: u16) -> Vec<u8> {
        let stamp = foundationdb_tuple::Versionstamp::incomplete(order);
        let elements = (u16::from(incarnation.0), stamp);
        let mut operand = self.0.to_vec();
        foundationdb_tuple::TuplePack::pack_into_vec_with_versionstamp(&elements, &mut operand);
        operand
    }

    /// The rows after `after`, up to and including `last`.
    pub fn rows(&self, after: Sequence, last: Sequence) -> KeyRange {
        KeyRange { begin: key_after(&self.row(after)), end: key_after(&self.row(last)) }
    }

    /// Decodes the sequence in the key of a row.
    pub fn sequence(&self, key: &[u8]) -> Result<Sequence> {
        let position = key
            .strip_prefix(&self.0[..])
            .ok_or_else(|| Error::corrupt("row", "its key is outside the shard"))?;
        let (incarnation, stamp): (u16, foundationdb_tuple::Versionstamp) =
            foundationdb_tuple::unpack(position).map_err(|error| Error::corrupt("row", error.to_string()))?;
        sequence(incarnation, &stamp)
    }
}

impl Keys {
    /// The row space of `shard`.
    pub fn shard_rows(&self, feed: &FeedId, shard: ShardId) -> RowSpace {
        RowSpace::new(self.pack(&(family::ENTRY, feed.bytes(), shard.0)))
    }

    /// The key that stores the sequence of the newest row of `id`.
    pub fn newest(&self, feed: &FeedId, id: &[u8]) -> Vec<u8> {
        self.pack(&(family::NEWEST, feed.bytes(), id))
    }

    /// The keys of [`Keys::newest`] for the ids after `id`, or for all ids if it is `None`.
    #[cfg(feature = "http")]
    pub fn newest_after(&self, feed: &FeedId, id: Option<&[u8]>) -> KeyRange {
        let KeyRange { begin, end } = self.newest_of_feed(feed);
        KeyRange { begin: id.map_or(begin, |id| key_after(&self.newest(feed, id))), end }
    }

    /// Returns the feed and the id from `key`, a key of [`Keys::newest`].
    pub fn newest_id(&self, key: &[u8]) -> Result<(FeedId, Vec<u8>)> {
        let (number, feed, id): (u16, foundationdb_tuple::Bytes<'_>, foundationdb_tuple::Bytes<'_>) =
            self.unpack("newest", key)?;
        if number != family::NEWEST {
            return Err(Error::corrupt("newest", "its key belongs to another family"));
        }
        Ok((FeedId::from_bytes(&feed)?, id.into_owned()))
    }

    /// The keys of [`Keys::newest`] for all ids of `feed`.
    pub fn newest_of_feed(&self, feed: &FeedId) -> KeyRange {
        self.range(&(family::NEWEST, feed.bytes()))
    }

    /// The key that stores the number of rows in `shard`.
    pub fn row_count(&self, feed: &FeedId, shard: ShardId) -> Vec<u8> {
        self.pack(&(family::ROW_COUNT, feed.bytes(), shard.0))
    }

    /// The row counts of the shards from `first` up to and including `last`.
    pub fn row_counts(&self, feed: &FeedId, first: ShardId, last: ShardId) -> KeyRange {
        KeyRange { begin: self.row_count(feed, first).into(), end: key_after(&self.row_count(feed, last)) }
    }

    /// The key of the horizon of `feed`, the oldest position from which a reader misses nothing.
    pub fn horizon(&self, feed: &FeedId) -> Vec<u8> {
        self.pack(&(family::HORIZON, feed.bytes()))
    }

    /// A conflict key without a value. A transaction that sets where a consumer of `feed` begins writes this key, and the janitor reads it
    /// before the consumers. The horizon cannot be this key: all such transactions read it, and would conflict with each other.
    pub fn beginnings(&self, feed: &FeedId) -> KeyRange {
        KeyRange::key(&key_after(&self.horizon(feed)))
    }

    /// All keys of `feed`, except those of its consumers.
    pub fn whole_feed(&self, feed: &FeedId) -> [KeyRange; 6] {
        let range = |number: u16| self.range(&(number, feed.bytes()));
        [
            range(family::ENTRY),
            range(family::NEWEST),
            range(family::ROW_COUNT),
            KeyRange::key(&self.pulse(feed)),
            self.topologies(feed),
            KeyRange::key(&self.horizon(feed)),
        ]
    }
}

/// The operand of `SET_VERSIONSTAMPED_VALUE` that stores the sequence of row number `order` of this transaction.
pub(crate) fn sequence_operand(incarnation: Incarnation, order: u16) -> Vec<u8> {
    versionstamped(&[incarnation.0], &order.to_be_bytes())
}

/// Decodes a stored row count; 0 without a value. The count can be negative if a layer named a wrong previous edit.
pub(crate) fn row_count(bytes: Option<&[u8]>) -> Result<i64> {
    let Some(bytes) = bytes else { return Ok(0) };
    let count = bytes.try_into();
    count.map(i64::from_le_bytes).map_err(|_| Error::corrupt("row count", format!("{} bytes", bytes.len())))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::encoding::Versionstamp;

    fn at(version: u64, order: u16) -> Sequence {
        Sequence::new(Incarnation(1), Versionstamp::new(version, 0), order)
    }

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let feed = FeedId::notifications();
        let start = [b'p', 0x15, 4, 0x01, b'n', 0, 0x15, 9, 0x15, 1, 0x33];
        let rows = keys.shard_rows(&feed, ShardId(9));
        assert_eq!(rows.row(at(0x0102, 3)), [&start[..], &[0, 0, 0, 0, 0, 0, 1, 2, 0, 0], &[0, 3]].concat());
        let append = rows.append(Incarnation(1), 3);
        assert_eq!(append[..start.len()], start);
        assert_eq!(append[start.len() + 10..], [0, 3, start.len() as u8, 0, 0, 0]);
        assert_eq!(keys.newest(&feed, b"db"), [b'p', 0x15, 5, 0x01, b'n', 0, 0x01, b'd', b'b', 0]);
        assert_eq!(keys.row_count(&feed, ShardId(9)), [b'p', 0x15, 18, 0x01, b'n', 0, 0x15, 9]);
        assert_eq!(row_count(Some(&[2, 1, 0, 0, 0, 0, 0, 0])).unwrap(), 258);
        assert_eq!(keys.horizon(&feed), [b'p', 0x15, 8, 0x01, b'n', 0]);
    }

    #[test]
    fn a_number_of_rows_of_another_length_is_refused() {
        assert_eq!(row_count(None).unwrap(), 0);
        for bad in [&[][..], &[1; 7], &[1; 9]] {
            assert!(row_count(Some(bad)).is_err());
        }
    }

    #[cfg(feature = "http")]
    #[test]
    fn ids_are_found_in_order() {
        let (keys, feed) = (Keys::new(b"p").unwrap(), FeedId::notifications());
        let key = |id: &[u8]| keys.newest(&feed, id);
        assert_eq!(keys.newest_id(&key(b"a\0b")).unwrap().1, b"a\0b");
        let (all, after) = (keys.newest_after(&feed, None), keys.newest_after(&feed, Some(b"b")));
        for (id, is_after) in [(&b"a"[..], false), (b"b", false), (b"b\0", true), (b"ba", true), (b"c", true)]
        {
            assert!(all.contains(&key(id)));
            assert_eq!(after.contains(&key(id)), is_after, "{id:?}");
        }
        assert!(!after.contains(&keys.newest(&FeedId::documents(DbInstance([0; 16])), b"c")));
    }

    #[test]
    fn feeds_are_distinct() {
        let documents = FeedId::documents(DbInstance([7; 16]));
        assert_eq!(documents.bytes(), [&b"d"[..], &[7; 16]].concat());
        for feed in [FeedId::notifications(), documents] {
            assert_eq!(FeedId::from_bytes(feed.bytes()).unwrap(), feed);
        }
        for bad in [&b""[..], b"x", b"nn", b"d", b"d123456789abcdefgh"] {
            assert!(FeedId::from_bytes(bad).is_err());
        }
    }

    #[test]
    fn the_range_of_a_feed_has_no_key_of_another() {
        let keys = Keys::new(b"p").unwrap();
        let (this, other) = (FeedId::notifications(), FeedId::documents(DbInstance([0; 16])));
        let of = |feed: &FeedId| {
            [
                keys.shard_rows(feed, ShardId(1)).row(at(1, 0)),
                keys.newest(feed, b"db"),
                keys.row_count(feed, ShardId(1)),
                keys.pulse(feed),
                keys.topology(feed, at(1, 0)),
                keys.horizon(feed),
            ]
        };
        let is_in =
            |key: &Vec<u8>, feed: &FeedId| keys.whole_feed(feed).iter().any(|range| range.contains(key));
        assert!(of(&this).iter().all(|key| is_in(key, &this) && !is_in(key, &other)));
        assert!(of(&other).iter().all(|key| is_in(key, &other) && !is_in(key, &this)));
    }

    #[test]
    fn a_range_of_rows_excludes_its_start_and_includes_its_end() {
        let keys = Keys::new(b"p").unwrap();
        let rows = keys.shard_rows(&FeedId::notifications(), ShardId(9));
        let range = rows.rows(at(1, 0), at(3, 7));
        for (sequence, within) in [(at(1, 0), false), (at(1, 1), true), (at(3, 7), true), (at(3, 8), false)] {
            assert_eq!(range.contains(&rows.row(sequence)), within, "{sequence}");
        }
        let others = keys.shard_rows(&FeedId::notifications(), ShardId(10));
        assert!(!range.contains(&others.row(at(2, 0))));
        assert!(rows.sequence(&others.row(at(2, 0))).is_err());
    }

    proptest! {
        #[test]
        fn keys_sort_as_sequences(a: (u8, u64, u16), b: (u8, u64, u16), shard: u64) {
            let keys = Keys::new(b"p").unwrap();
            let rows = keys.shard_rows(&FeedId::notifications(), ShardId(shard));
            let sequence = |(incarnation, version, order)| Sequence::new(Incarnation(incarnation), Versionstamp::new(version, 0), order);
            prop_assert_eq!(sequence(a).cmp(&sequence(b)), rows.row(sequence(a)).cmp(&rows.row(sequence(b))));
            prop_assert_eq!(rows.sequence(&rows.row(sequence(a))).unwrap(), sequence(a));
        }
    }
}
