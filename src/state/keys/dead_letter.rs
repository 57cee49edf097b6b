//! Family 12: rows that a group could not work on, kept until a program replays or deletes them.

use bytes::Bytes;

use super::{FeedId, GroupId, GroupName, Keys, ShardId, failed_row, family, group::part, position, sequence};
use crate::{
    base::{
        encoding::{Reader, Sequence},
        error::{Error, Result},
    },
    store::{KeyRange, Row},
};

/// The format of stored dead letters.
const FORMAT: u8 = 1;

/// A row that a group could not work on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeadLetterRow {
    pub shard: ShardId,
    pub attempts: u32,
    /// When the group gave it up, in milliseconds since 1970; for people.
    pub at_ms: u64,
    /// Why the last attempt failed.
    pub error: String,
    /// The row, as it was in the feed.
    pub row: Bytes,
}

impl DeadLetterRow {
    /// The stored form: format (1 byte), shard (8), attempts (4), time (8), the error's text behind its length (2), and the
    /// row. A text that is too long is cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        let tail = failed_row::to_bytes(self.attempts, self.at_ms, &self.error, &self.row);
        [&[FORMAT][..], &self.shard.0.to_be_bytes(), &tail].concat()
    }

    pub fn from_bytes(bytes: &Bytes) -> Result<Self> {
        let mut reader = Reader::new("dead letter", bytes);
        let format = reader.u8()?;
        if format != FORMAT {
            return Err(reader.corrupt(format!("format {format} is unknown")));
        }
        let shard = ShardId(reader.u64()?);
        let (attempts, at_ms, error, row) = failed_row::read(reader, bytes, 1 + 8)?;
        Ok(Self { shard, attempts, at_ms, error, row })
    }
}

impl Keys {
    /// The key of the dead letter of `group` whose row was at `at`.
    pub fn dead_letter(&self, group: &GroupId, at: Sequence) -> Vec<u8> {
        let (incarnation, stamp) = position(at);
        let (feed, name) = (group.feed.bytes(), group.name.as_str());
        self.pack(&(family::CHECKPOINT, feed, part::DEAD_LETTER, name, incarnation, stamp))
    }

    /// The dead letters of `group`, in the order of their sequences.
    pub fn dead_letters(&self, group: &GroupId) -> KeyRange {
        self.range(&(family::CHECKPOINT, group.feed.bytes(), part::DEAD_LETTER, group.name.as_str()))
    }

    /// The group, the position and the content of a stored dead letter.
    pub fn dead_letter_row(&self, (key, value): &Row) -> Result<(GroupId, Sequence, DeadLetterRow)> {
        type Key<'k> =
            (u16, foundationdb_tuple::Bytes<'k>, u16, String, u16, foundationdb_tuple::Versionstamp);
        let (number, feed, part, name, incarnation, stamp) = self.unpack::<Key<'_>>("dead letter", key)?;
        if (number, part) != (family::CHECKPOINT, part::DEAD_LETTER) {
            return Err(Error::corrupt("dead letter", "its key is that of another row"));
        }
        let group = GroupId { feed: FeedId::from_bytes(&feed)?, name: GroupName::new(&name)? };
        Ok((group, sequence(incarnation, &stamp)?, DeadLetterRow::from_bytes(value)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::{Incarnation, Versionstamp};

    #[test]
    fn golden_bytes_and_round_trip() {
        let keys = Keys::new(b"p").unwrap();
        let group = GroupId { feed: FeedId::notifications(), name: GroupName::new("g").unwrap() };
        let letter = DeadLetterRow {
            shard: ShardId(9),
            attempts: 3,
            at_ms: 258,
            error: "no".to_owned(),
            row: Bytes::from_static(b"row"),
        };
        let golden = b"\x01\0\0\0\0\0\0\0\x09\0\0\0\x03\0\0\0\0\0\0\x01\x02\0\x02norow";
        assert_eq!(letter.to_bytes(), golden);
        let at = Sequence::new(Incarnation(1), Versionstamp::new(2, 3), 4);
        let key = keys.dead_letter(&group, at);
        let stamp = [&[0x33, 0, 0, 0, 0, 0, 0, 0, 2, 0, 3][..], &[0, 4]].concat();
        assert_eq!(key, [&b"p\x15\x0c\x01n\x00\x15\x02\x02g\x00\x15\x01"[..], &stamp].concat());
        assert!(keys.dead_letters(&group).contains(&key));
        let stored = (key.into(), golden[..].into());
        assert_eq!(keys.dead_letter_row(&stored).unwrap(), (group.clone(), at, letter));
        let other = (keys.group(&group).into(), stored.1.clone());
        assert!(keys.dead_letter_row(&other).is_err());
        assert!(DeadLetterRow::from_bytes(&stored.1.slice(..22)).is_err());
        assert!(DeadLetterRow::from_bytes(&stored.1.slice(1..)).is_err());
    }
}
