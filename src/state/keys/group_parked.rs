//! Family 12: parked ids, whose rows a group's work has failed on. They wait outside of their shard until the work
//! succeeds.
//!
//! The transaction that moves the checkpoint of a shard past a row that has failed parks the row's id. While the id is
//! parked, each transaction that moves the checkpoint past a later row of the id parks that row as well. So at any
//! time a row is either after the checkpoint and to be read from the feed, or parked, or done: never two of these.

use bytes::Bytes;

use super::{
    GroupId, Keys, ShardId, failed_row, family,
    group::{part, status},
};
use crate::{
    base::{
        encoding::{Reader, Sequence},
        error::{Error, Result},
    },
    store::KeyRange,
};

/// The format of stored rows.
const FORMAT: u8 = 1;

/// A parked id, with its newest row up to the checkpoint of its shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupParkedRow {
    pub shard: ShardId,
    /// Everything of the id up to here is done.
    pub after: Sequence,
    /// The position of the row.
    pub sequence: Sequence,
    /// How often it was tried; 0 if it is to be tried at once.
    pub attempts: u32,
    /// When it was last tried, in milliseconds since 1970; for people.
    pub at_ms: u64,
    /// Why the last attempt failed.
    pub error: String,
    pub row: Bytes,
}

impl GroupParkedRow {
    /// The stored form: format (1 byte), shard (8), both sequences (13 each), attempts (4), time (8), the error's text behind its
    /// length (2), and the row. A text that is too long is cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        let tail = failed_row::to_bytes(self.attempts, self.at_ms, &self.error, &self.row);
        let shard = self.shard.0.to_be_bytes();
        [&[FORMAT][..], &shard, self.after.as_bytes(), self.sequence.as_bytes(), &tail].concat()
    }

    pub fn from_bytes(bytes: &Bytes) -> Result<Self> {
        let mut reader = Reader::new("parked row of a group", bytes);
        let format = reader.u8()?;
        if format != FORMAT {
            return Err(reader.corrupt(format!("format {format} is unknown")));
        }
        let (shard, after, sequence) = (ShardId(reader.u64()?), reader.sequence()?, reader.sequence()?);
        let (attempts, at_ms, error, row) = failed_row::read(reader, bytes, 1 + 8 + 2 * 13)?;
        Ok(Self { shard, after, sequence, attempts, at_ms, error, row })
    }
}

impl Keys {
    /// The key of the parked `id` of `group`.
    pub fn group_parked(&self, group: &GroupId, id: &[u8]) -> Vec<u8> {
        self.pack(&(family::CHECKPOINT, group.feed.bytes(), part::PARKED, group.name.as_str(), id))
    }

    /// The parked ids of `group`.
    pub fn group_parked_ids(&self, group: &GroupId) -> KeyRange {
        self.range(&(family::CHECKPOINT, group.feed.bytes(), part::PARKED, group.name.as_str()))
    }

    /// The id in the key of a parked one.
    pub fn group_parked_id(&self, key: &[u8]) -> Result<Bytes> {
        type Key<'k> = (u16, foundationdb_tuple::Bytes<'k>, u16, String, foundationdb_tuple::Bytes<'k>);
        match self.unpack::<Key<'_>>("parked row of a group", key)? {
            (family::CHECKPOINT, _, part::PARKED, _, id) => Ok(Bytes::copy_from_slice(&id)),
            _ => Err(Error::corrupt("parked row of a group", "its key is that of another row")),
        }
    }

    /// The key of the number of retries asked for by people for parked ids of `group`: 8 bytes, little-endian.
    pub fn group_asked(&self, group: &GroupId) -> Vec<u8> {
        let (feed, name) = (group.feed.bytes(), group.name.as_str());
        self.pack(&(family::CHECKPOINT, feed, part::STATUS, name, status::ASKED))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        base::encoding::{Incarnation, Versionstamp},
        state::keys::{FeedId, GroupName},
    };

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let group = GroupId { feed: FeedId::notifications(), name: GroupName::new("g").unwrap() };
        let key = keys.group_parked(&group, b"db");
        assert_eq!(key, b"p\x15\x0c\x01n\x00\x15\x04\x02g\x00\x01db\x00");
        assert_eq!(keys.group_parked_id(&key).unwrap(), &b"db"[..]);
        assert!(keys.group_parked_ids(&group).contains(&key));
        assert!(keys.whole_group(&group).iter().any(|range| range.contains(&key)));
        assert_eq!(keys.group_asked(&group), b"p\x15\x0c\x01n\x00\x15\x03\x02g\x00\x15\x03");
        assert!(keys.group_parked_id(&keys.group_asked(&group)).is_err());
        let at = |version| Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0);
        let row = GroupParkedRow {
            shard: ShardId(2),
            after: at(1),
            sequence: at(2),
            attempts: 3,
            at_ms: 4,
            error: "no".to_owned(),
            row: Bytes::from_static(b"row"),
        };
        let golden = [
            &b"\x01\0\0\0\0\0\0\0\x02"[..],
            at(1).as_bytes(),
            at(2).as_bytes(),
            b"\0\0\0\x03\0\0\0\0\0\0\0\x04\0\x02norow",
        ]
        .concat();
        assert_eq!(row.to_bytes(), golden);
        assert!(GroupParkedRow::from_bytes(&Bytes::from_static(b"\x02")).is_err());
        assert!(GroupParkedRow::from_bytes(&golden[..50].to_vec().into()).is_err());
    }

    proptest! {
        #[test]
        fn rows_come_back_as_they_were(shard: u64, versions: [u64; 2], attempts: u32, at_ms: u64, error in "\\PC{0,40}", row: Vec<u8>) {
            let [after, sequence] =
                versions.map(|version| Sequence::new(Incarnation(1), Versionstamp::new(version, 0), 0));
            let shard = ShardId(shard);
            let parked = GroupParkedRow { shard, after, sequence, attempts, at_ms, error, row: row.into() };
            prop_assert_eq!(GroupParkedRow::from_bytes(&parked.to_bytes().into()).unwrap(), parked);
        }
    }
}
