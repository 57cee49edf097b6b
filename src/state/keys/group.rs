//! Family 12: the groups, and the names of their pools and roles.

use std::{fmt, str::FromStr, sync::Arc};

use super::{CELL, FeedId, Keys, Role, family};
use bytes::Bytes;

use crate::{
    base::{
        cursor::Cursor,
        encoding::Reader,
        error::{Error, Result},
        macros::serde_as_text,
    },
    store::{KeyRange, Page, RangeRead},
};

/// The format of stored rows.
const FORMAT: u8 = 3;

/// The number after the feed, which tells the rows of a group apart. They are stored and never change.
pub(super) mod part {
    /// The group itself.
    pub const GROUP: u16 = 0;
    /// Its checkpoint in a shard.
    pub const CHECKPOINT: u16 = 1;
    /// A row that it could not work on.
    pub const DEAD_LETTER: u16 = 2;
    /// Its status, for people.
    pub const STATUS: u16 = 3;
    /// A parked id, which waits outside of its shard.
    pub const PARKED: u16 = 4;
    /// A position that it has reached in all its shards.
    pub const LOWEST: u16 = 5;
    /// Up to where the shards of a closed topology entry are drained.
    pub const TURN: u16 = 6;
}

/// The number after the group in a row of its status. They are stored and never change.
pub(super) mod status {
    /// Since when no node works for it.
    pub const IDLE: u16 = 0;
    /// The time of its last progress in a shard.
    pub const PROGRESS: u16 = 1;
    /// Its last failure in a shard.
    pub const TROUBLE: u16 = 2;
    /// How often a retry of its parked ids was asked for.
    pub const ASKED: u16 = 3;
}

/// The name of a group: UTF-8, 1 to 256 bytes; unique among the groups of a feed. Clones are cheap.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupName(Arc<str>);

impl GroupName {
    /// The longest name, in bytes.
    pub const LEN_MAX: usize = 256;

    /// A name; fails with [`Error::Invalid`] if it is empty or too long.
    pub fn new(name: &str) -> Result<Self> {
        if (1..=Self::LEN_MAX).contains(&name.len()) {
            return Ok(Self(name.into()));
        }
        let reason = format!("it has {} bytes, of 1 to {}", name.len(), Self::LEN_MAX);
        Err(Error::invalid("group name", reason))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for GroupName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

serde_as_text!(GroupName);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupId {
    /// The feed whose rows it reads.
    pub feed: FeedId,
    pub name: GroupName,
}

impl GroupId {
    /// The pool of its shards.
    pub fn pool(&self) -> String {
        pool(&self.feed, self.name.as_str())
    }

    /// The role of its nodes. If the name is too long for a role, the role has a hash of it.
    pub fn role(&self) -> Role {
        let role = match self.feed.instance() {
            None => format!("group:{}", self.name),
            Some(instance) => format!("group-of-{instance}:{}", self.name),
        };
        Role::new(role).unwrap_or_else(|_| {
            let hash =
                xxhash_rust::xxh3::xxh3_128(&[self.feed.bytes(), self.name.as_str().as_bytes()].concat());
            Role::new(format!("group-by-hash:{hash:032x}")).expect("it is short")
        })
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on the feed of {}", self.name, self.feed)
    }
}

/// The pool of the group `name` of `feed`; with an empty name, the common prefix of the pools of all its groups.
fn pool(feed: &FeedId, name: &str) -> String {
    match feed.instance() {
        None => format!("group/notifications/{name}"),
        Some(instance) => format!("group/{instance}/{name}"),
    }
}

/// The settings of a group since its creation, or its last reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupRow {
    /// Drawn at its creation: distinguishes it from another group of the name.
    pub identity: [u8; 16],
    /// Drawn by each writer, which can find out by it after an unknown result whether its write was committed.
    pub token: [u8; 16],
    /// How often its position was set: 1 at its creation, raised by each reset.
    pub generation: u64,
    /// What it knew when its position was set, and where it begins. If it knew nothing, this says when that was, because it may know by
    /// now what has lived since.
    pub start: Cursor,
    /// When it was created, in milliseconds since 1970; for people.
    pub created_ms: u64,
    /// After how many milliseconds without a living member it is deleted; 0 for never.
    pub expiry_ms: u64,
}

impl GroupRow {
    /// The stored form: format (1 byte), identity (16), token (16), generation (8), start (a cursor), creation (8), expiry (8).
    pub fn to_bytes(self) -> Vec<u8> {
        [
            &[FORMAT][..],
            &self.identity,
            &self.token,
            &self.generation.to_be_bytes(),
            &self.start.to_bytes(),
            &self.created_ms.to_be_bytes(),
            &self.expiry_ms.to_be_bytes(),
        ]
        .concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("group", bytes);
        let format = reader.u8()?;
        if format != FORMAT {
            return Err(reader.corrupt(format!("format {format} is unknown")));
        }
        let row = Self {
            identity: reader.bytes16()?,
            token: reader.bytes16()?,
            generation: reader.u64()?,
            start: Cursor::read(&mut reader)?,
            created_ms: reader.u64()?,
            expiry_ms: reader.u64()?,
        };
        reader.finish()?;
        Ok(row)
    }
}

/// The time since which a group has no member, in the time that janitors have worked, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Idleness {
    /// The last time at which it may have had a member, in milliseconds.
    pub alive_ms: u64,
    /// How long it has had no member since, in milliseconds, at the last check.
    pub idle_ms: u64,
}

impl Idleness {
    /// The stored form: both, 8 bytes each.
    pub fn to_bytes(self) -> Vec<u8> {
        [self.alive_ms.to_be_bytes(), self.idle_ms.to_be_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("idleness of a group", bytes);
        let idleness = Self { alive_ms: reader.u64()?, idle_ms: reader.u64()? };
        reader.finish()?;
        Ok(idleness)
    }
}

/// Groups that were found, with their rows.
pub(crate) type FoundGroups = Vec<(GroupId, GroupRow)>;

impl Keys {
    /// The key of the row of `group`.
    pub fn group(&self, group: &GroupId) -> Vec<u8> {
        self.pack(&(family::CHECKPOINT, group.feed.bytes(), part::GROUP, group.name.as_str()))
    }

    /// The rows of all groups of `feed`. A transaction that drops rows of the feed reads this range serializably, so
    /// that no group can begin in between.
    pub fn groups(&self, feed: &FeedId) -> KeyRange {
        self.range(&(family::CHECKPOINT, feed.bytes(), part::GROUP))
    }

    /// All rows of all groups of all feeds.
    pub fn all_groups(&self) -> KeyRange {
        self.range(&(family::CHECKPOINT,))
    }

    /// The group in a key, if it is that of the row of a group itself.
    pub fn group_of(&self, key: &[u8]) -> Result<Option<GroupId>> {
        type Key<'k> = (u16, foundationdb_tuple::Bytes<'k>, u16, String);
        // Rows of the other parts have more elements after the name.
        let Ok((number, feed, part::GROUP, name)) = self.unpack::<Key<'_>>("group", key) else {
            return Ok(None);
        };
        if number != family::CHECKPOINT {
            return Err(Error::corrupt("group", "its key is of another family"));
        }
        let name = GroupName::new(&name).map_err(|error| Error::corrupt("group", error.to_string()))?;
        Ok(Some(GroupId { feed: FeedId::from_bytes(&feed)?, name }))
    }

    /// The groups among the rows of `page`, which `read` has read from [`Keys::all_groups`], and the next range to
    /// read. `last` is the feed of the last group that was found.
    pub fn groups_in(
        &self,
        mut read: RangeRead,
        page: &Page,
        last: &mut Option<FeedId>,
    ) -> Result<(FoundGroups, Option<RangeRead>)> {
        // Where the rows of the feed of the last group end.
        let (mut groups, mut end) = (Vec::new(), Bytes::new());
        for (key, value) in &page.rows {
            if *key < end {
                continue;
            }
            if let Some(group) = self.group_of(key).map_err(|error| error.at(key))? {
                *last = Some(group.feed.clone());
                groups.push((group, GroupRow::from_bytes(value).map_err(|error| error.at(key))?));
                continue;
            }
            // The groups of a feed are at the beginning of its rows; skip the others, to the next feed.
            end = last.as_ref().map_or(end, |feed| self.groups_of_feed(feed)[0].end.clone());
        }
        match page.rows.last() {
            Some((key, _)) if page.more && *key < end => {
                read.range.begin = end;
                Ok((groups, Some(read).filter(|read| !read.range.is_empty())))
            }
            _ => Ok((groups, read.after(page))),
        }
    }

    /// All rows of `group`: its settings, checkpoints and the lowest of them, the turn of a drain, dead letters, status, parked ids,
    /// leases and the version of its pool.
    pub fn whole_group(&self, group: &GroupId) -> [KeyRange; 9] {
        let of = |part: u16| self.range(&(family::CHECKPOINT, group.feed.bytes(), part, group.name.as_str()));
        [
            KeyRange::key(&self.group(group)),
            of(part::CHECKPOINT),
            of(part::DEAD_LETTER),
            of(part::STATUS),
            of(part::PARKED),
            KeyRange::key(&self.lowest_checkpoint(group)),
            KeyRange::key(&self.drain_turn(group)),
            self.leases(&group.pool()),
            KeyRange::key(&self.pool_version(&group.pool())),
        ]
    }

    /// All rows of the groups of `feed`.
    pub fn groups_of_feed(&self, feed: &FeedId) -> [KeyRange; 3] {
        // A text in a key ends with a zero byte; without this byte, the key is a prefix of longer texts.
        let prefix = |mut key: Vec<u8>| {
            key.pop();
            KeyRange::prefix(key)
        };
        let pools = pool(feed, "");
        [
            self.range(&(family::CHECKPOINT, feed.bytes())),
            prefix(self.pack(&(family::LEASE, CELL, &pools[..]))),
            prefix(self.pool_version(&pools)),
        ]
    }

    /// The key of [`Idleness`], as long as no node works for `group`.
    pub fn group_idle(&self, group: &GroupId) -> Vec<u8> {
        let (feed, name) = (group.feed.bytes(), group.name.as_str());
        self.pack(&(family::CHECKPOINT, feed, part::STATUS, name, status::IDLE))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        base::{
            encoding::{Incarnation, Sequence, Versionstamp},
            event::DbInstance,
        },
        state::keys::ShardId,
    };

    fn group(name: &str) -> GroupId {
        GroupId { feed: FeedId::notifications(), name: GroupName::new(name).unwrap() }
    }

    #[test]
    fn golden_bytes() {
        let start = Sequence::new(Incarnation(1), Versionstamp::new(2, 3), 4);
        let row = GroupRow {
            identity: [8; 16],
            token: [9; 16],
            generation: 2,
            start: start.into(),
            created_ms: 258,
            expiry_ms: 3,
        };
        let golden = [
            &[3][..],
            &[8; 16],
            &[9; 16],
            &[0, 0, 0, 0, 0, 0, 0, 2],
            &[1],
            start.as_bytes(),
            &[0, 0, 0, 0, 0, 0, 1, 2],
            &[0, 0, 0, 0, 0, 0, 0, 3],
        ]
        .concat();
        assert_eq!(row.to_bytes(), golden);
        let from_nothing = GroupRow { start: Cursor::NOTHING.begin(start), ..row }.to_bytes();
        assert_eq!(from_nothing[41..68], [&[2][..], start.as_bytes(), Sequence::MIN.as_bytes()].concat());
        let (keys, group) = (Keys::new(b"p").unwrap(), group("g"));
        let key = keys.group(&group);
        assert_eq!(key, b"p\x15\x0c\x01n\x00\x14\x02g\x00");
        assert_eq!(keys.group_idle(&group), b"p\x15\x0c\x01n\x00\x15\x03\x02g\x00\x14");
        assert!(keys.groups(&group.feed).contains(&key) && keys.all_groups().contains(&key));
        assert_eq!(keys.group_of(&key).unwrap(), Some(group.clone()));
        assert!(GroupRow::from_bytes(&golden[1..]).is_err());
        assert_eq!(keys.group_of(&keys.group_idle(&group)).unwrap(), None);
    }

    #[test]
    fn the_range_of_a_group_has_no_key_of_another() {
        let keys = Keys::new(b"p").unwrap();
        let documents = |name: &str| GroupId { feed: FeedId::documents(DbInstance([1; 16])), ..group(name) };
        let groups = [group("a"), group("ab"), documents("a")];
        let of = |group: &GroupId| {
            [
                keys.group(group),
                keys.checkpoint(group, ShardId(1)),
                keys.dead_letter(group, Sequence::MIN),
                keys.group_idle(group),
                keys.progress(group, ShardId(1)),
                keys.trouble(group, ShardId(1)),
                keys.group_parked(group, b"id"),
                keys.group_asked(group),
                keys.lowest_checkpoint(group),
                keys.drain_turn(group),
                keys.lease(&group.pool(), 1),
                keys.pool_version(&group.pool()),
            ]
        };
        let holds = |ranges: &[KeyRange], key: &Vec<u8>| ranges.iter().any(|range| range.contains(key));
        for this in &groups {
            for other in &groups {
                let all_of_feed =
                    [&keys.groups_of_feed(&this.feed)[..], &keys.whole_feed(&this.feed)].concat();
                for key in of(other) {
                    assert_eq!(holds(&keys.whole_group(this), &key), this == other);
                    assert_eq!(holds(&all_of_feed, &key), this.feed == other.feed);
                }
            }
        }
    }

    #[test]
    fn roles_are_distinct_and_short() {
        let instance = DbInstance([1; 16]);
        let documents = |name: &str| GroupId { feed: FeedId::documents(instance), ..group(name) };
        let long = "x".repeat(GroupName::LEN_MAX);
        assert_eq!(group("a").role().as_str(), "group:a");
        assert_eq!(documents("a").role().as_str(), format!("group-of-{instance}:a"));
        let roles = [group("a"), documents("a"), group(&long), documents(&long), group(&long[1..])];
        let roles: std::collections::BTreeSet<_> = roles.iter().map(GroupId::role).collect();
        assert_eq!(roles.len(), 5);
    }

    #[test]
    fn names_have_limits() {
        assert!(GroupName::new("").is_err() && GroupName::new(&"x".repeat(257)).is_err());
        assert_eq!("ü".repeat(128).parse::<GroupName>().unwrap().as_str().len(), 256);
    }

    proptest! {
        #[test]
        fn rows_come_back_as_they_were(identity: [u8; 16], token: [u8; 16], generation: u64, version: u64, knows: bool, created_ms: u64, expiry_ms: u64) {
            let at = Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0);
            let start = if knows { at.into() } else { Cursor::NOTHING.begin(at) };
            let row = GroupRow { identity, token, generation, start, created_ms, expiry_ms };
            prop_assert_eq!(GroupRow::from_bytes(&row.to_bytes()).unwrap(), row);
        }
    }
}
