//! Family 25: consumers, their checkpoints and deferred ids.

use std::{fmt, str::FromStr, sync::Arc};

use bytes::Bytes;

use super::{FeedId, Keys, Role, ShardId, family};
use crate::{
    base::{
        cursor::Cursor,
        encoding::{Incarnation, Reader, Sequence},
        error::{Error, Result},
        event::DbInstance,
        macros::serde_as_text,
    },
    store::KeyRange,
};

/// The format of the stored rows.
const FORMAT: u8 = 1;

/// The numbers after the family in a key. They are stored, so they never change.
mod part {
    pub const CONSUMER: u16 = 0;
    pub const CHECKPOINT: u16 = 1;
    pub const DEFERRED: u16 = 2;
    pub const WATERMARK: u16 = 3;
    pub const IDLE: u16 = 4;
}

/// The maximum number of bytes of an error's text that are stored.
const ERROR_LEN_MAX: usize = 1_000;

/// The maximum number of bytes of a filter's text that are stored.
const FILTER_LEN_MAX: usize = 2_000;

/// The name of a consumer: UTF-8, 1 to 256 bytes, unique on the bus. Clones are cheap.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConsumerName(Arc<str>);

impl ConsumerName {
    /// The maximum length of a name, in bytes.
    pub const LEN_MAX: usize = 256;

    /// Creates a name; fails with [`Error::Invalid`] if it is empty or too long.
    pub fn new(name: &str) -> Result<Self> {
        if (1..=Self::LEN_MAX).contains(&name.len()) {
            return Ok(Self(name.into()));
        }
        let reason = format!("it has {} bytes, not 1 to {}", name.len(), Self::LEN_MAX);
        Err(Error::invalid("consumer name", reason))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name of the pool for the consumer's shards.
    pub(crate) fn pool(&self) -> String {
        format!("consumer/{}", self.0)
    }

    /// Returns the role of the consumer's members. If the name is too long for a role, the role contains a hash of the name instead.
    pub(crate) fn role(&self) -> Role {
        Role::new(format!("consumer:{}", self.0)).unwrap_or_else(|_| {
            let hash = xxhash_rust::xxh3::xxh3_128(self.0.as_bytes());
            Role::new(format!("consumer-by-hash:{hash:032x}")).expect("it is short")
        })
    }
}

impl fmt::Display for ConsumerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ConsumerName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

serde_as_text!(ConsumerName);

/// A consumer since its creation or its last reset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConsumerRow {
    /// Drawn at random when the consumer is created: distinguishes it from a later consumer of the same name.
    pub identity: [u8; 16],
    /// Starts at 1; each reset raises it.
    pub generation: u64,
    pub feed: FeedId,
    /// What the consumer knew when its position was set, and the position itself.
    pub start: Cursor,
    /// A hash of the filter.
    pub filter: u64,
    /// The filter in human-readable form, truncated if it is too long.
    pub filter_text: String,
    pub is_paused: bool,
    /// When the consumer was created, in milliseconds since 1970; for display only.
    pub created_ms: u64,
    /// The consumer is deleted after this many milliseconds without a member; 0 means never.
    pub expiry_ms: u64,
}

impl ConsumerRow {
    /// The stored form: format (1 byte), identity (16), generation (8), the feed and the filter's text, each after its length (2), the
    /// filter's hash (8), start (a cursor), paused (1), creation (8), expiry (8).
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![FORMAT];
        bytes.extend_from_slice(&self.identity);
        bytes.extend_from_slice(&self.generation.to_be_bytes());
        put_bytes(&mut bytes, self.feed.bytes());
        put_bytes(&mut bytes, cut(&self.filter_text, FILTER_LEN_MAX).as_bytes());
        bytes.extend_from_slice(&self.filter.to_be_bytes());
        bytes.extend_from_slice(&self.start.to_bytes());
        bytes.push(self.is_paused.into());
        bytes.extend_from_slice(&self.created_ms.to_be_bytes());
        bytes.extend_from_slice(&self.expiry_ms.to_be_bytes());
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = begin("consumer", bytes)?;
        let (identity, generation) = (reader.bytes16()?, reader.u64()?);
        let feed_len = reader.u16()?.into();
        let feed = FeedId::from_bytes(reader.take(feed_len)?)?;
        let row = Self {
            identity,
            generation,
            feed,
            filter_text: reader.text()?.to_owned(),
            filter: reader.u64()?,
            start: Cursor::read(&mut reader)?,
            is_paused: match reader.u8()? {
                0 => false,
                1 => true,
                other => return Err(reader.corrupt(format!("paused flag {other} is unknown"))),
            },
            created_ms: reader.u64()?,
            expiry_ms: reader.u64()?,
        };
        reader.finish()?;
        Ok(row)
    }
}

/// When a deferred id is due, in versions of the store. A version of another incarnation cannot be compared, so such an id is due now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// There is nothing to do: everything up to [`DeferredRow::done`] is finished.
    Never,
    At(Incarnation, u64),
}

impl Due {
    pub const NOW: Self = Self::At(Incarnation(0), 0);
}

/// An id whose state the checkpoint of its shard does not describe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeferredRow {
    /// Up to where the work on the id is finished. The id is done if its newest row is not after this and [`DeferredRow::again`] is unset.
    pub done: Cursor,
    /// The database that was, or still is, being worked on; `None` if there is nothing to clean up.
    pub instance: Option<DbInstance>,
    /// The database before `instance`, if the handler has not handled its end.
    pub ended: Option<DbInstance>,
    pub due: Due,
    /// How many times the work on the current row has failed.
    pub attempts: u32,
    /// When the work last failed, in milliseconds since 1970; for display only.
    pub at_ms: u64,
    /// The last error; empty if the work has not failed.
    pub error: String,
    /// Drawn at random by a request to work on the id again.
    pub again: Option<[u8; 16]>,
}

impl DeferredRow {
    /// Creates the row of an id about which only `done` is known. The id is due now.
    pub fn new(done: Cursor) -> Self {
        let (due, error) = (Due::NOW, String::new());
        Self { done, instance: None, ended: None, due, attempts: 0, at_ms: 0, error, again: None }
    }

    /// The stored form, with sizes in bytes: format (1), done (a cursor), flags (1), due (incarnation 1, version 8), instance (16),
    /// ended (16), again (16), attempts (4), time (8), and the error after its length (2). Flags: due 1, instance 2, again 4, ended 8.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![FORMAT];
        bytes.extend_from_slice(&self.done.to_bytes());
        let has_due = self.due != Due::Never;
        let flags = [
            (has_due, 1),
            (self.instance.is_some(), 2),
            (self.again.is_some(), 4),
            (self.ended.is_some(), 8),
        ];
        bytes.push(flags.iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| bit).sum());
        if let Due::At(incarnation, version) = self.due {
            bytes.push(incarnation.0);
            bytes.extend_from_slice(&version.to_be_bytes());
        }
        for instance in [&self.instance, &self.ended] {
            bytes.extend_from_slice(instance.as_ref().map_or(&[], |instance| &instance.0[..]));
        }
        bytes.extend_from_slice(self.again.as_ref().map_or(&[], |again| &again[..]));
        bytes.extend_from_slice(&self.attempts.to_be_bytes());
        bytes.extend_from_slice(&self.at_ms.to_be_bytes());
        put_bytes(&mut bytes, cut(&self.error, ERROR_LEN_MAX).as_bytes());
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = begin("deferred id", bytes)?;
        let done = Cursor::read(&mut reader)?;
        let flags = reader.u8()?;
        if flags > 15 {
            return Err(reader.corrupt(format!("flags {flags} are unknown")));
        }
        let due = if flags & 1 == 0 { Due::Never } else { Due::At(Incarnation(reader.u8()?), reader.u64()?) };
        let instance = if flags & 2 == 0 { None } else { Some(DbInstance(reader.bytes16()?)) };
        let ended = if flags & 8 == 0 { None } else { Some(DbInstance(reader.bytes16()?)) };
        let again = if flags & 4 == 0 { None } else { Some(reader.bytes16()?) };
        let row = Self {
            done,
            due,
            instance,
            ended,
            again,
            attempts: reader.u32()?,
            at_ms: reader.u64()?,
            error: reader.text()?.to_owned(),
        };
        reader.finish()?;
        Ok(row)
    }
}

/// How long a consumer has had no member, measured by the total time that janitors have worked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemberlessSince {
    /// The last time at which the consumer may have had a member, in milliseconds.
    pub alive_ms: u64,
    /// How long the consumer had been without a member at the last check, in milliseconds.
    pub idle_ms: u64,
}

impl MemberlessSince {
    /// The stored form: both numbers, 8 bytes each.
    pub fn to_bytes(self) -> Vec<u8> {
        [self.alive_ms.to_be_bytes(), self.idle_ms.to_be_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("time without members", bytes);
        let since = Self { alive_ms: reader.u64()?, idle_ms: reader.u64()? };
        reader.finish()?;
        Ok(since)
    }
}

fn begin<'a>(what: &'static str, bytes: &'a [u8]) -> Result<Reader<'a>> {
    let mut reader = Reader::new(what, bytes);
    match reader.u8()? {
        FORMAT => Ok(reader),
        format => Err(reader.corrupt(format!("format {format} is unknown"))),
    }
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&u16::try_from(bytes.len()).expect("it is short").to_be_bytes());
    out.extend_from_slice(bytes);
}

fn cut(text: &str, len_max: usize) -> &str {
    &text[..text.floor_char_boundary(len_max)]
}

impl Keys {
    /// The key of the row of `consumer`.
    pub fn consumer(&self, consumer: &ConsumerName) -> Vec<u8> {
        self.pack(&(family::CONSUMER, part::CONSUMER, consumer.as_str()))
    }

    /// The rows of all consumers.
    pub fn consumers(&self) -> KeyRange {
        self.range(&(family::CONSUMER, part::CONSUMER))
    }

    /// The key of the checkpoint of `consumer` in `shard`. All shards with checkpoints belong to one topology entry.
    pub fn consumer_checkpoint(&self, consumer: &ConsumerName, shard: ShardId) -> Vec<u8> {
        self.pack(&(family::CONSUMER, part::CHECKPOINT, consumer.as_str(), shard.0))
    }

    /// The checkpoints of `consumer`.
    pub fn consumer_checkpoints(&self, consumer: &ConsumerName) -> KeyRange {
        self.range(&(family::CONSUMER, part::CHECKPOINT, consumer.as_str()))
    }

    /// The checkpoints of all consumers.
    pub fn all_consumer_checkpoints(&self) -> KeyRange {
        self.range(&(family::CONSUMER, part::CHECKPOINT))
    }

    /// The key of a deferred id.
    pub fn deferred(&self, consumer: &ConsumerName, shard: ShardId, id: &[u8]) -> Vec<u8> {
        self.pack(&(family::CONSUMER, part::DEFERRED, consumer.as_str(), shard.0, id))
    }

    /// The deferred ids of `consumer`, by shard and id; only those of `shard` if it is given.
    pub fn deferred_of(&self, consumer: &ConsumerName, shard: Option<ShardId>) -> KeyRange {
        match shard {
            Some(shard) => self.range(&(family::CONSUMER, part::DEFERRED, consumer.as_str(), shard.0)),
            None => self.range(&(family::CONSUMER, part::DEFERRED, consumer.as_str())),
        }
    }

    /// The key of the low watermark of `consumer`, a position that it has passed in all of its shards.
    pub fn low_watermark(&self, consumer: &ConsumerName) -> Vec<u8> {
        self.pack(&(family::CONSUMER, part::WATERMARK, consumer.as_str()))
    }

    /// The low watermarks of all consumers.
    pub fn low_watermarks(&self) -> KeyRange {
        self.range(&(family::CONSUMER, part::WATERMARK))
    }

    /// The key that stores [`MemberlessSince`] while no node works for `consumer`.
    pub fn consumer_idle(&self, consumer: &ConsumerName) -> Vec<u8> {
        self.pack(&(family::CONSUMER, part::IDLE, consumer.as_str()))
    }

    /// The keys of [`Keys::consumer_idle`] for all consumers.
    pub fn consumers_idle(&self) -> KeyRange {
        self.range(&(family::CONSUMER, part::IDLE))
    }

    /// Everything that is stored for `consumer`, its leases included.
    pub fn whole_consumer(&self, consumer: &ConsumerName) -> [KeyRange; 6] {
        [
            KeyRange::key(&self.consumer(consumer)),
            self.consumer_checkpoints(consumer),
            self.deferred_of(consumer, None),
            KeyRange::key(&self.low_watermark(consumer)),
            KeyRange::key(&self.consumer_idle(consumer)),
            self.leases(&consumer.pool()),
        ]
    }

    /// Returns the consumer from the key of a consumer row, a low watermark or a [`MemberlessSince`].
    pub fn consumer_of(&self, key: &[u8]) -> Result<ConsumerName> {
        let (number, _, name): (u16, u16, String) = self.unpack("consumer", key)?;
        named(number, &name)
    }

    /// Returns the consumer and the shard from the key of a checkpoint.
    pub fn consumer_checkpoint_of(&self, key: &[u8]) -> Result<(ConsumerName, ShardId)> {
        let (number, part, name, shard): (u16, u16, String, u64) = self.unpack("checkpoint", key)?;
        if part != part::CHECKPOINT {
            return Err(Error::corrupt("checkpoint", "its key belongs to another part"));
        }
        Ok((named(number, &name)?, ShardId(shard)))
    }

    /// Returns the shard and the id from the key of a deferred id.
    pub fn deferred_id(&self, key: &[u8]) -> Result<(ShardId, Bytes)> {
        type Key<'k> = (u16, u16, String, u64, foundationdb_tuple::Bytes<'k>);
        let (number, part, name, shard, id) = self.unpack::<Key<'_>>("deferred id", key)?;
        if part != part::DEFERRED {
            return Err(Error::corrupt("deferred id", "its key belongs to another part"));
        }
        named(number, &name)?;
        Ok((ShardId(shard), id.into_owned().into()))
    }

    /// Returns the consumer from the key of a deferred id.
    pub fn deferred_consumer(&self, key: &[u8]) -> Result<ConsumerName> {
        type Key<'k> = (u16, u16, String, u64, foundationdb_tuple::Bytes<'k>);
        let (number, _, name, ..) = self.unpack::<Key<'_>>("deferred id", key)?;
        named(number, &name)
    }
}

fn named(number: u16, name: &str) -> Result<ConsumerName> {
    if number != family::CONSUMER {
        return Err(Error::corrupt("consumer", "its key belongs to another family"));
    }
    ConsumerName::new(name).map_err(|error| Error::corrupt("consumer", error.to_string()))
}

/// Decodes a low watermark.
pub(crate) fn watermark(value: &[u8]) -> Result<Sequence> {
    Sequence::from_bytes(value)
}

#[cfg(test)]
mod tests {
    use proptest::{option, prelude::*};

    use super::*;
    use crate::base::encoding::Versionstamp;

    fn name() -> ConsumerName {
        ConsumerName::new("m").unwrap()
    }

    fn row() -> ConsumerRow {
        ConsumerRow {
            identity: [1; 16],
            generation: 3,
            feed: FeedId::notifications(),
            start: Cursor::BEGINNING,
            filter: 4,
            filter_text: "All".to_owned(),
            is_paused: true,
            created_ms: 5,
            expiry_ms: 6,
        }
    }

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let name = name();
        assert_eq!(keys.consumer(&name), b"p\x15\x19\x14\x02m\x00");
        let checkpoint = keys.consumer_checkpoint(&name, ShardId(258));
        assert_eq!(checkpoint, b"p\x15\x19\x15\x01\x02m\x00\x16\x01\x02");
        assert_eq!(keys.consumer_checkpoint_of(&checkpoint).unwrap(), (name.clone(), ShardId(258)));
        let deferred = keys.deferred(&name, ShardId(1), b"db");
        assert_eq!(deferred, b"p\x15\x19\x15\x02\x02m\x00\x15\x01\x01db\x00");
        assert_eq!(keys.deferred_id(&deferred).unwrap(), (ShardId(1), Bytes::from_static(b"db")));
        assert_eq!(keys.deferred_consumer(&deferred).unwrap(), name);
        assert_eq!(keys.low_watermark(&name), b"p\x15\x19\x15\x03\x02m\x00");
        assert_eq!(keys.consumer_idle(&name), b"p\x15\x19\x15\x04\x02m\x00");
        assert_eq!(keys.consumer_of(&keys.consumer(&name)).unwrap(), name);
        assert!(keys.deferred_id(&checkpoint).is_err() && keys.consumer_checkpoint_of(&deferred).is_err());

        let head = [&[1][..], &[1; 16], &[0, 0, 0, 0, 0, 0, 0, 3, 0, 1, b'n', 0, 3]].concat();
        let rest = [&b"All"[..], &4_u64.to_be_bytes(), &[0, 1], &5_u64.to_be_bytes(), &6_u64.to_be_bytes()];
        assert_eq!(row().to_bytes(), [head, rest.concat()].concat());

        let deferred = DeferredRow {
            done: Cursor::BEGINNING,
            instance: Some(DbInstance([7; 16])),
            ended: Some(DbInstance([8; 16])),
            due: Due::At(Incarnation(1), 258),
            attempts: 3,
            at_ms: 4,
            error: "no".to_owned(),
            again: Some([9; 16]),
        };
        let expected = [
            &[1, 0, 15, 1, 0, 0, 0, 0, 0, 0, 1, 2][..],
            &[7; 16],
            &[8; 16],
            &[9; 16],
            &[0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 2, b'n', b'o'],
        ];
        assert_eq!(deferred.to_bytes(), expected.concat());
    }

    #[test]
    fn everything_of_a_consumer_is_in_its_ranges_and_nothing_of_others() {
        let keys = Keys::new(b"p").unwrap();
        let (one, longer) = (name(), ConsumerName::new("mm").unwrap());
        let of = |name: &ConsumerName| {
            [
                keys.consumer(name),
                keys.consumer_checkpoint(name, ShardId(1)),
                keys.deferred(name, ShardId(1), b"db"),
                keys.low_watermark(name),
                keys.consumer_idle(name),
                keys.lease(&name.pool(), 1),
            ]
        };
        let is_in = |key: &Vec<u8>, name| keys.whole_consumer(name).iter().any(|range| range.contains(key));
        assert!(of(&one).iter().all(|key| is_in(key, &one) && !is_in(key, &longer)));
        assert!(of(&longer).iter().all(|key| is_in(key, &longer) && !is_in(key, &one)));
    }

    #[test]
    fn contradictory_bytes_are_refused_and_long_texts_cut() {
        let good = row().to_bytes();
        for bad in [&good[..good.len() - 1], &[&good[..], &[0]].concat(), &[&[2][..], &good[1..]].concat()] {
            assert!(ConsumerRow::from_bytes(bad).is_err());
        }
        let long = ConsumerRow { filter_text: "ü".repeat(2_000), ..row() };
        assert_eq!(ConsumerRow::from_bytes(&long.to_bytes()).unwrap().filter_text, "ü".repeat(1_000));
        assert!(ConsumerName::new("").is_err() && ConsumerName::new(&"x".repeat(257)).is_err());
        let longest = ConsumerName::new(&"x".repeat(256)).unwrap();
        assert!(longest.role().as_str().starts_with("consumer-by-hash:"));
    }

    proptest! {
        #[test]
        fn rows_round_trip(
            known: Option<u32>,
            instance in option::of(any::<[u8; 16]>()),
            ended in option::of(any::<[u8; 16]>()),
            due: Option<(u8, u64)>,
            again: Option<[u8; 16]>,
            attempts: u32,
            at_ms: u64,
            error in "\\PC{0,40}",
        ) {
            let at = |version: u32| Sequence::new(Incarnation(0), Versionstamp::new(version.into(), 0), 0);
            let row = DeferredRow {
                done: known.map_or(Cursor::BEGINNING, |known| at(known).into()),
                instance: instance.map(DbInstance),
                ended: ended.map(DbInstance),
                due: due.map_or(Due::Never, |(incarnation, version)| Due::At(Incarnation(incarnation), version)),
                attempts,
                at_ms,
                error,
                again,
            };
            prop_assert_eq!(DeferredRow::from_bytes(&row.to_bytes()).unwrap(), row);
        }
    }

    #[test]
    fn a_consumers_row_round_trips() {
        assert_eq!(ConsumerRow::from_bytes(&row().to_bytes()).unwrap(), row());
        let since = MemberlessSince { alive_ms: 1, idle_ms: 2 };
        assert_eq!(MemberlessSince::from_bytes(&since.to_bytes()).unwrap(), since);
    }
}
