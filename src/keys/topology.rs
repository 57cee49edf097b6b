//! Family 7: which shards a feed writes to, from which sequence on.

use super::{FeedId, Keys, ShardId, family, position, sequence};
use crate::{
    encoding::{Reader, Sequence},
    error::{Error, Result},
    store::{KeyRange, Row},
};

/// Which shards a feed writes to, from one sequence on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TopologyEntry {
    /// The first sequence that it holds for.
    pub first: Sequence,
    /// The stored number of the scheme that routes ids to shards.
    pub scheme: u16,
    /// Whether a later entry has taken over.
    pub closed: bool,
    /// The shards, in the order that the scheme counts them.
    pub shards: Vec<ShardId>,
}

impl TopologyEntry {
    /// The stored form: scheme (2 bytes), closed (1), count (4), shard ids (8 each).
    pub fn to_bytes(&self) -> Vec<u8> {
        let count = u32::try_from(self.shards.len()).expect("shard counts are limited");
        let mut bytes =
            [&self.scheme.to_be_bytes()[..], &[u8::from(self.closed)], &count.to_be_bytes()].concat();
        for shard in &self.shards {
            bytes.extend_from_slice(&shard.0.to_be_bytes());
        }
        bytes
    }

    /// The entry from `first` on that is stored as `bytes`.
    pub fn from_bytes(first: Sequence, bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("topology", bytes);
        let scheme = reader.u16()?;
        let closed = match reader.u8()? {
            0 => false,
            1 => true,
            flag => return Err(reader.corrupt(format!("closed flag {flag} is unknown"))),
        };
        let count = reader.u32()?;
        if count == 0 {
            return Err(reader.corrupt("it has no shards"));
        }
        let shards = (0..count).map(|_| reader.u64().map(ShardId)).collect::<Result<_>>()?;
        reader.finish()?;
        Ok(Self { first, scheme, closed, shards })
    }
}

impl Keys {
    /// The key of the topology entry of `feed` from `first` on.
    pub fn topology(&self, feed: &FeedId, first: Sequence) -> Vec<u8> {
        let (incarnation, stamp) = position(first);
        self.pack(&(family::TOPOLOGY, feed.bytes(), incarnation, stamp))
    }

    /// All topology entries of `feed`, oldest first.
    pub fn topologies(&self, feed: &FeedId) -> KeyRange {
        self.range(&(family::TOPOLOGY, feed.bytes()))
    }

    /// The topology entry in a stored row.
    pub fn topology_entry(&self, (key, value): &Row) -> Result<TopologyEntry> {
        let (number, _, incarnation, stamp): (
            u16,
            foundationdb_tuple::Bytes<'_>,
            u16,
            foundationdb_tuple::Versionstamp,
        ) = self.unpack("topology", key)?;
        if number != family::TOPOLOGY {
            return Err(Error::corrupt("topology", "its key is of another family"));
        }
        TopologyEntry::from_bytes(sequence(incarnation, &stamp)?, value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoding::{Incarnation, Versionstamp};

    #[test]
    fn golden_bytes_and_round_trip() {
        let keys = Keys::new(b"p").unwrap();
        let entry = TopologyEntry {
            first: Sequence::new(Incarnation(1), Versionstamp::new(2, 3), 4),
            scheme: 1,
            closed: true,
            shards: vec![ShardId(1), ShardId(258)],
        };
        assert_eq!(entry.to_bytes(), [0, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 2]);
        let feed = FeedId::notifications();
        let key = keys.topology(&feed, entry.first);
        assert_eq!(key[..7], [b'p', 0x15, 7, 0x01, b'n', 0, 0x15]);
        assert!(keys.topologies(&feed).contains(&key));
        assert_eq!(keys.topology_entry(&(key.into(), entry.to_bytes().into())).unwrap(), entry);
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        for bad in [
            &[0, 1, 0, 0, 0, 0, 0][..],
            &[0, 1, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1],
            &[0, 1, 0, 0, 0, 0, 1],
        ] {
            assert!(TopologyEntry::from_bytes(Sequence::ZERO, bad).is_err());
        }
    }
}
