//! Family 12: the checkpoints of a group, the times of its progress, and its last failures.

use super::{
    FeedId, GroupId, GroupName, Keys, ShardId, family,
    group::{part, status},
};
use crate::{
    base::{
        encoding::{Reader, Sequence},
        error::{Error, Result},
    },
    store::KeyRange,
};

/// The format of a stored trouble.
const FORMAT: u8 = 1;

/// The most bytes of an error's text that are stored.
pub(crate) const ERROR_TEXT_LEN_MAX: usize = 1_000;

/// The last failure in a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// Whether the failure persists: no row of the shard was done since.
    pub is_current: bool,
    /// Whether it has lasted for so long that it was reported as stuck.
    pub is_stuck: bool,
    /// How often the same rows were tried.
    pub attempts: u32,
    /// When it happened, in milliseconds since 1970; for people.
    pub at_ms: u64,
    /// The text of the error.
    pub text: String,
}

impl Trouble {
    /// The stored form: format (1 byte), flags (1: current 1, stuck 2), attempts (4), time (8), and the text behind its
    /// length (2). A text that is too long is cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        let text = cut(&self.text);
        let len = u16::try_from(text.len()).expect("it was cut");
        let flags = u8::from(self.is_current) | u8::from(self.is_stuck) << 1;
        let head = [FORMAT, flags];
        let (attempts, at_ms) = (self.attempts.to_be_bytes(), self.at_ms.to_be_bytes());
        [&head[..], &attempts, &at_ms, &len.to_be_bytes(), text.as_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("trouble", bytes);
        let (format, flags) = (reader.u8()?, reader.u8()?);
        if format != FORMAT || flags > 3 {
            return Err(reader.corrupt(format!("format {format} with flags {flags} is unknown")));
        }
        let trouble = Self {
            is_current: flags & 1 != 0,
            is_stuck: flags & 2 != 0,
            attempts: reader.u32()?,
            at_ms: reader.u64()?,
            text: reader.text()?.to_owned(),
        };
        reader.finish()?;
        Ok(trouble)
    }
}

/// The longest beginning of `text` that is stored.
pub(crate) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(ERROR_TEXT_LEN_MAX)]
}

impl Keys {
    /// The key of the lowest checkpoint of `group`: a position that it has reached in all its shards. It is rewritten now and then, and
    /// is never above a checkpoint; without it, nothing is known beyond the group's start.
    pub fn lowest_checkpoint(&self, group: &GroupId) -> Vec<u8> {
        self.pack(&(family::CHECKPOINT, group.feed.bytes(), part::LOWEST, group.name.as_str()))
    }

    /// The lowest checkpoints of all groups of `feed`.
    pub fn lowest_checkpoints(&self, feed: &FeedId) -> KeyRange {
        self.range(&(family::CHECKPOINT, feed.bytes(), part::LOWEST))
    }

    /// The group of the key of a lowest checkpoint.
    pub fn lowest_checkpoint_group(&self, key: &[u8]) -> Result<GroupId> {
        type Key<'k> = (u16, foundationdb_tuple::Bytes<'k>, u16, String);
        let (number, feed, part, name) = self.unpack::<Key<'_>>("lowest checkpoint", key)?;
        if (number, part) != (family::CHECKPOINT, part::LOWEST) {
            return Err(Error::corrupt("lowest checkpoint", "its key is that of another row"));
        }
        let name =
            GroupName::new(&name).map_err(|error| Error::corrupt("lowest checkpoint", error.to_string()))?;
        Ok(GroupId { feed: FeedId::from_bytes(&feed)?, name })
    }

    /// The key of whose turn it is while `group` drains a closed topology entry: the first shard, 8 bytes, that was not drained when all
    /// before it were. Without it, it is the turn of the first shard.
    pub fn drain_turn(&self, group: &GroupId) -> Vec<u8> {
        self.pack(&(family::CHECKPOINT, group.feed.bytes(), part::TURN, group.name.as_str()))
    }

    /// The checkpoints of `group`, one for each shard that it has not read to its end. A checkpoint only grows, until the group
    /// is reset or deleted.
    pub fn checkpoints_of(&self, group: &GroupId) -> KeyRange {
        self.range(&(family::CHECKPOINT, group.feed.bytes(), part::CHECKPOINT, group.name.as_str()))
    }

    /// The key of the checkpoint of `group` in `shard`.
    pub fn checkpoint(&self, group: &GroupId, shard: ShardId) -> Vec<u8> {
        let (feed, name) = (group.feed.bytes(), group.name.as_str());
        self.pack(&(family::CHECKPOINT, feed, part::CHECKPOINT, name, shard.0))
    }

    /// The shard of a checkpoint's key.
    pub fn checkpoint_shard(&self, key: &[u8]) -> Result<ShardId> {
        type Key<'k> = (u16, foundationdb_tuple::Bytes<'k>, u16, String, u64);
        match self.unpack::<Key<'_>>("checkpoint", key)? {
            (family::CHECKPOINT, _, part::CHECKPOINT, _, shard) => Ok(ShardId(shard)),
            _ => Err(Error::corrupt("checkpoint", "its key is that of another row")),
        }
    }

    /// The key of the time of the last progress of `group` in `shard`: milliseconds since 1970, 8 bytes; for people.
    pub fn progress(&self, group: &GroupId, shard: ShardId) -> Vec<u8> {
        let (feed, name) = (group.feed.bytes(), group.name.as_str());
        self.pack(&(family::CHECKPOINT, feed, part::STATUS, name, status::PROGRESS, shard.0))
    }

    /// The key of the last failure of `group` in `shard`.
    pub fn trouble(&self, group: &GroupId, shard: ShardId) -> Vec<u8> {
        let (feed, name) = (group.feed.bytes(), group.name.as_str());
        self.pack(&(family::CHECKPOINT, feed, part::STATUS, name, status::TROUBLE, shard.0))
    }

    /// The shard in the key of a time or a failure.
    pub fn status_shard(&self, key: &[u8]) -> Result<ShardId> {
        type Key<'k> = (u16, foundationdb_tuple::Bytes<'k>, u16, String, u16, u64);
        match self.unpack::<Key<'_>>("group status", key)? {
            (family::CHECKPOINT, _, part::STATUS, _, _, shard) => Ok(ShardId(shard)),
            _ => Err(Error::corrupt("group status", "its key is that of another row")),
        }
    }

    /// The times and failures of all shards of `group`.
    pub fn statuses_of(&self, group: &GroupId) -> [KeyRange; 2] {
        let (feed, name) = (group.feed.bytes(), group.name.as_str());
        [status::PROGRESS, status::TROUBLE]
            .map(|kind| self.range(&(family::CHECKPOINT, feed, part::STATUS, name, kind)))
    }
}

/// The shard whose turn it is, as it is stored.
pub(crate) fn turn_shard(value: &[u8]) -> Result<ShardId> {
    let mut reader = Reader::new("turn of a drain", value);
    let shard = ShardId(reader.u64()?);
    reader.finish()?;
    Ok(shard)
}

/// The position in a stored checkpoint: everything up to it was worked on.
pub(crate) fn checkpoint_position(value: &[u8]) -> Result<Sequence> {
    Sequence::from_bytes(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let group = GroupId { feed: FeedId::notifications(), name: GroupName::new("g").unwrap() };
        let key = keys.checkpoint(&group, ShardId(258));
        assert_eq!(key, b"p\x15\x0c\x01n\x00\x15\x01\x02g\x00\x16\x01\x02");
        assert_eq!(keys.checkpoint_shard(&key).unwrap(), ShardId(258));
        assert!(keys.checkpoints_of(&group).contains(&key));
        assert_eq!(keys.drain_turn(&group), b"p\x15\x0c\x01n\x00\x15\x06\x02g\x00");
        assert_eq!(turn_shard(&258_u64.to_be_bytes()).unwrap(), ShardId(258));
        assert!(turn_shard(&[0; 9]).is_err() && turn_shard(&[0; 7]).is_err());
        let lowest = keys.lowest_checkpoint(&group);
        assert_eq!(lowest, b"p\x15\x0c\x01n\x00\x15\x05\x02g\x00");
        assert!(keys.lowest_checkpoints(&group.feed).contains(&lowest));
        assert_eq!(keys.lowest_checkpoint_group(&lowest).unwrap(), group);
        assert!(keys.lowest_checkpoint_group(&key).is_err());
        let (progress, trouble) = (keys.progress(&group, ShardId(9)), keys.trouble(&group, ShardId(9)));
        assert_eq!(progress, b"p\x15\x0c\x01n\x00\x15\x03\x02g\x00\x15\x01\x15\x09");
        assert_eq!(trouble, b"p\x15\x0c\x01n\x00\x15\x03\x02g\x00\x15\x02\x15\x09");
        let [progresses, troubles] = keys.statuses_of(&group);
        assert!(progresses.contains(&progress) && troubles.contains(&trouble));
        assert_eq!([&progress, &trouble].map(|key| keys.status_shard(key).unwrap()), [ShardId(9); 2]);
        assert!(keys.checkpoint_shard(&progress).is_err() && keys.status_shard(&key).is_err());

        let stored =
            Trouble { is_current: true, is_stuck: false, attempts: 3, at_ms: 258, text: "no".to_owned() };
        assert_eq!(stored.to_bytes(), b"\x01\x01\0\0\0\x03\0\0\0\0\0\0\x01\x02\0\x02no");
        assert_eq!(checkpoint_position(Sequence::MAX.as_bytes()).unwrap(), Sequence::MAX);
        assert!(checkpoint_position(&[0; 12]).is_err());
    }

    #[test]
    fn contradictory_bytes_are_refused_and_long_texts_cut() {
        let trouble = |text: &str| Trouble {
            is_current: true,
            is_stuck: true,
            attempts: 3,
            at_ms: 1,
            text: text.to_owned(),
        };
        let good = trouble("no").to_bytes();
        assert!(Trouble::from_bytes(&good).is_ok());
        for (place, byte) in [(0, 2), (1, 4), (15, 3)] {
            let mut bad = good.clone();
            bad[place] = byte;
            assert!(Trouble::from_bytes(&bad).is_err(), "{place}");
        }
        let long = trouble(&"ü".repeat(1_000)).to_bytes();
        assert_eq!(Trouble::from_bytes(&long).unwrap().text, "ü".repeat(500));
    }

    proptest! {
        #[test]
        fn troubles_come_back_as_they_were(is_current: bool, is_stuck: bool, attempts: u32, at_ms: u64, text in "\\PC{0,40}") {
            let trouble = Trouble { is_current, is_stuck, attempts, at_ms, text };
            prop_assert_eq!(Trouble::from_bytes(&trouble.to_bytes()).unwrap(), trouble);
        }
    }
}
