//! Family 7: the topology of a feed, which says which shards the feed writes to, and from which sequence on.

use bytes::Bytes;

use super::{FeedId, Keys, ShardId, family, position, sequence};
use crate::{
    base::{
        encoding::{Incarnation, Reader, Sequence},
        error::{Error, Result},
    },
    store::{KeyRange, Row},
};

/// The maximum number of shards in a topology entry.
pub(crate) const SHARDS_MAX: u32 = 1_000;

/// The shards that a feed writes to from one sequence on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TopologyRow {
    /// The first sequence under this entry.
    pub first: Sequence,
    /// Whether a later entry has taken over.
    pub closed: bool,
    /// Drawn at random by the writer, which uses it to find out whether a write with an unknown result was committed.
    pub token: [u8; 16],
    pub layout: Layout,
}

/// The key ranges of the rows of a topology entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Layout {
    /// One unsharded range that another writer left, under keys that start with this prefix. An empty prefix means the range of shard 0, to
    /// which a move to another store brought the rows. In both cases the range counts as shard 0.
    Legacy(Bytes),
    /// Shards. Their ids in one entry are consecutive, because each reshard takes new ones.
    Sharded {
        /// The stored number of the scheme that routes ids to shards.
        scheme: u16,
        first: ShardId,
        count: u32,
    },
}

/// The stored tags of [`Layout`].
const LEGACY: u8 = 0;
const SHARDED: u8 = 1;

impl TopologyRow {
    /// The stored form: layout tag (1 byte), closed (1), token (16); then, for a legacy range, the length of the prefix (2) and the prefix,
    /// or, for shards, the scheme (2), the first shard id (8) and the count (4).
    pub fn to_bytes(&self) -> Vec<u8> {
        let (tag, rest) = match &self.layout {
            Layout::Legacy(prefix) => {
                let len = u16::try_from(prefix.len()).expect("prefixes are limited");
                (LEGACY, [&len.to_be_bytes()[..], prefix].concat())
            }
            Layout::Sharded { scheme, first, count } => {
                (SHARDED, [&scheme.to_be_bytes()[..], &first.0.to_be_bytes(), &count.to_be_bytes()].concat())
            }
        };
        [&[tag, u8::from(self.closed)][..], &self.token, &rest].concat()
    }

    /// Decodes the entry that begins at `first` and is stored as `bytes`.
    pub fn from_bytes(first: Sequence, bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("topology", bytes);
        let tag = reader.u8()?;
        let closed = match reader.u8()? {
            0 => false,
            1 => true,
            flag => return Err(reader.corrupt(format!("closed flag {flag} is unknown"))),
        };
        let token = reader.bytes16()?;
        let layout = match tag {
            LEGACY => {
                let len = reader.u16()?;
                Layout::Legacy(Bytes::copy_from_slice(reader.take(len.into())?))
            }
            SHARDED => {
                let (scheme, first, count) = (reader.u16()?, ShardId(reader.u64()?), reader.u32()?);
                if !(1..=SHARDS_MAX).contains(&count) {
                    return Err(reader.corrupt(format!("it has {count} shards")));
                }
                if first.0 == 0 || first.0.checked_add(count.into()).is_none() {
                    return Err(reader.corrupt(format!("{count} shards from {} on cannot exist", first.0)));
                }
                Layout::Sharded { scheme, first, count }
            }
            tag => return Err(reader.corrupt(format!("layout tag {tag} is unknown"))),
        };
        reader.finish()?;
        Ok(Self { first, closed, token, layout })
    }

    /// Returns the shards of the entry, in the order of the scheme's indices. A legacy range is shard 0.
    pub fn shards(&self) -> impl ExactSizeIterator<Item = ShardId> + use<> {
        let (first, count) = match self.layout {
            Layout::Legacy(_) => (0, 1),
            Layout::Sharded { first, count, .. } => (first.0, count as usize),
        };
        (0..count).map(move |place| ShardId(first + place as u64))
    }

    pub fn has(&self, shard: ShardId) -> bool {
        let mut shards = self.shards();
        shards.next().is_some_and(|first| first <= shard) && shard < self.next_shard()
    }

    /// Returns the first shard id that was never used, if this is the newest entry.
    pub fn next_shard(&self) -> ShardId {
        match self.layout {
            Layout::Legacy(_) => ShardId(1),
            Layout::Sharded { first, count, .. } => ShardId(first.0 + u64::from(count)),
        }
    }
}

impl Keys {
    /// The key of the topology entry of `feed` that begins at `first`.
    pub fn topology(&self, feed: &FeedId, first: Sequence) -> Vec<u8> {
        let (incarnation, stamp) = position(first);
        self.pack(&(family::TOPOLOGY, feed.bytes(), incarnation, stamp))
    }

    /// The operand of `SET_VERSIONSTAMPED_KEY` for a topology entry that begins at this transaction's own stamp.
    pub fn next_topology(&self, feed: &FeedId, incarnation: Incarnation) -> Vec<u8> {
        let stamp = foundationdb_tuple::Versionstamp::incomplete(0);
        self.pack_stamped(&(family::TOPOLOGY, feed.bytes(), u16::from(incarnation.0), stamp))
    }

    /// All topology entries of `feed`, oldest first.
    pub fn topologies(&self, feed: &FeedId) -> KeyRange {
        self.range(&(family::TOPOLOGY, feed.bytes()))
    }

    /// The topology entries of `feed` whose first sequence is `last` or before it, oldest first.
    pub fn topologies_up_to(&self, feed: &FeedId, last: Sequence) -> KeyRange {
        KeyRange { end: KeyRange::key(&self.topology(feed, last)).end, ..self.topologies(feed) }
    }

    /// All topology entries of all feeds, feed by feed.
    pub fn all_topologies(&self) -> KeyRange {
        self.range(&(family::TOPOLOGY,))
    }

    /// Decodes the topology entry in a stored row, and its feed.
    pub fn topology_row(&self, (key, value): &Row) -> Result<(FeedId, TopologyRow)> {
        let (feed, first) = self.topology_key(key)?;
        Ok((feed, TopologyRow::from_bytes(first, value)?))
    }

    /// Decodes the feed and the first sequence from the key of a topology entry.
    pub fn topology_key(&self, key: &[u8]) -> Result<(FeedId, Sequence)> {
        let (number, feed, incarnation, stamp): (
            u16,
            foundationdb_tuple::Bytes<'_>,
            u16,
            foundationdb_tuple::Versionstamp,
        ) = self.unpack("topology", key)?;
        if number != family::TOPOLOGY {
            return Err(Error::corrupt("topology", "its key belongs to another family"));
        }
        Ok((FeedId::from_bytes(&feed)?, sequence(incarnation, &stamp)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::Versionstamp;

    #[test]
    fn golden_bytes_and_round_trip() {
        let keys = Keys::new(b"p").unwrap();
        let first = Sequence::new(Incarnation(1), Versionstamp::new(2, 3), 4);
        let layout = Layout::Sharded { scheme: 1, first: ShardId(258), count: 3 };
        let row = TopologyRow { first, closed: true, token: [9; 16], layout };
        let rest = [0, 1, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 3];
        assert_eq!(row.to_bytes(), [&[1, 1][..], &[9; 16], &rest].concat());
        let feed = FeedId::notifications();
        let key = keys.topology(&feed, row.first);
        assert_eq!(key[..7], [b'p', 0x15, 7, 0x01, b'n', 0, 0x15]);
        assert!(keys.topologies(&feed).contains(&key) && keys.all_topologies().contains(&key));
        assert!(keys.topologies_up_to(&feed, row.first).contains(&key));
        assert!(!keys.topologies_up_to(&feed, row.first.before()).contains(&key));
        let operand = keys.next_topology(&feed, Incarnation(1));
        assert_eq!(operand[..key.len() - 12], key[..key.len() - 12], "the same key but for the stamp");
        let stored = (key.into(), row.to_bytes().into());
        assert_eq!(keys.topology_row(&stored).unwrap(), (feed, row.clone()));
        assert_eq!(row.shards().collect::<Vec<_>>(), [258, 259, 260].map(ShardId));
        assert_eq!(row.next_shard(), ShardId(261));
    }

    #[test]
    fn a_legacy_range_is_shard_0() {
        let layout = Layout::Legacy(Bytes::from_static(b"old"));
        let row = TopologyRow { first: Sequence::MIN, closed: false, token: [9; 16], layout };
        assert_eq!(row.to_bytes(), [&[0, 0][..], &[9; 16], b"\0\x03old"].concat());
        assert_eq!(TopologyRow::from_bytes(Sequence::MIN, &row.to_bytes()).unwrap(), row);
        assert_eq!(row.shards().collect::<Vec<_>>(), [ShardId(0)]);
        assert_eq!(row.next_shard(), ShardId(1));
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        let good = |tag: u8, closed: u8, rest: &[u8]| [&[tag, closed][..], &[9; 16], rest].concat();
        let sharded = |first: u64, count: u32| {
            good(1, 0, &[&[0, 1][..], &first.to_be_bytes(), &count.to_be_bytes()].concat())
        };
        assert!(TopologyRow::from_bytes(Sequence::MIN, &sharded(1, 1)).is_ok());
        let too_long = [&sharded(1, 1)[..], &[0]].concat();
        for bad in [
            sharded(1, 0),
            sharded(1, SHARDS_MAX + 1),
            sharded(0, 1),
            sharded(u64::MAX, 1),
            too_long,
            good(2, 0, &[]),
            good(0, 2, &[0, 0]),
            good(0, 0, &[0, 1]),
        ] {
            assert!(TopologyRow::from_bytes(Sequence::MIN, &bad).is_err(), "{bad:?}");
        }
    }
}
