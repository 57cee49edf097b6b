//! The layer on top of the bus: databases that are created, updated and deleted, and a history of this in the same
//! transactions.
//!
//! A database is a key with its instance. A transaction that creates, updates or deletes one reads that key
//! serializably, as a layer does that must know whether the database exists. The history has one line per database
//! and transaction, ordered by the versionstamps of the transactions. The oracle trusts this history.

use bytes::Bytes;
use foundationdb_tuple::{TuplePack, Versionstamp as TupleStamp};

use crate::{
    base::{
        encoding::{Counters, Sequence},
        error::{Error, Result},
        event::{Db, DbInstance, DbName, DdocId},
    },
    roles::changes::{DocId, DocSummary, PendingSequence, Revision},
    state::keys::GroupName,
    store::{AtomicOp, KeyRange, Transaction},
};

/// The prefix of all keys of the layer.
pub(super) const PREFIX: &[u8] = b"app";

pub(super) mod family {
    pub const DATABASE: u16 = 0;
    pub const HISTORY: u16 = 1;
    pub const ONCE: u16 = 2;
    pub const EFFECT: u16 = 3;
    pub const DOCUMENT: u16 = 4;
    pub const TALLY: u16 = 5;
    pub const DERIVED: u16 = 6;
    pub const DERIVED_TO: u16 = 7;
    pub const CLEANED: u16 = 8;
}

/// The triggers, by the names of their cursors. The jobs of both derive rows from the documents of a database.
pub(super) mod trigger {
    /// An index trigger, whose jobs are parallel jobs.
    pub const INDEX: &str = "index";
    /// A replication trigger, whose jobs read the documents in pages.
    pub const COPY: &str = "copy";
    /// Both.
    pub const ALL: [&str; 2] = [INDEX, COPY];
}

fn pack(elements: &impl TuplePack) -> Vec<u8> {
    let mut key = PREFIX.to_vec();
    elements.pack_into_vec(&mut key);
    key
}

pub(super) fn database(name: &DbName) -> Vec<u8> {
    pack(&(family::DATABASE, name.as_str()))
}

/// The key of something that must happen once.
pub(super) fn once(number: u64) -> Vec<u8> {
    pack(&(family::ONCE, number))
}

/// The key that says that `group` has worked on the row at `sequence`, after its `generation`th reset.
pub(super) fn effect(group: &GroupName, sequence: Sequence) -> Vec<u8> {
    pack(&(family::EFFECT, group.as_str(), &sequence.as_bytes()[..]))
}

/// The key of the document `id` of a database.
pub(super) fn document(instance: DbInstance, id: &DocId) -> Vec<u8> {
    pack(&(family::DOCUMENT, &instance.0[..], id.as_str()))
}

pub(super) fn documents(instance: DbInstance) -> KeyRange {
    let mut begin = pack(&(family::DOCUMENT, &instance.0[..]));
    let mut end = begin.clone();
    begin.push(0);
    end.push(0xff);
    KeyRange::new(begin, end)
}

/// The key of the row that the jobs of `trigger` derive from a document. Its value is the sequence of the document's last edit.
pub(super) fn derived(trigger: &str, instance: DbInstance, id: &DocId) -> Vec<u8> {
    pack(&(family::DERIVED, trigger, &instance.0[..], id.as_str()))
}

/// All rows that the jobs of `trigger` derive from the documents of a database.
pub(super) fn all_derived(trigger: &str, instance: DbInstance) -> KeyRange {
    let mut begin = pack(&(family::DERIVED, trigger, &instance.0[..]));
    let mut end = begin.clone();
    begin.push(0);
    end.push(0xff);
    KeyRange::new(begin, end)
}

/// The key of the cursor up to which the jobs of `trigger` have derived rows from the documents of a database.
pub(super) fn derived_to(trigger: &str, instance: DbInstance) -> Vec<u8> {
    pack(&(family::DERIVED_TO, trigger, &instance.0[..]))
}

/// The key that says that the job of `trigger` has cleaned up after a deleted database.
pub(super) fn cleaned(trigger: &str, instance: DbInstance) -> Vec<u8> {
    pack(&(family::CLEANED, trigger, &instance.0[..]))
}

/// The key that counts the recorded events of a database in the other bus of the store.
pub(super) fn tally(name: &DbName) -> Vec<u8> {
    pack(&(family::TALLY, name.as_str()))
}

/// A document as the layer keeps it: its last edit, and the edit that the layer named as the previous one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Document {
    /// The sequence of its last edit.
    pub edited: Sequence,
    /// The edit that the bus was given as the previous one.
    pub previous: Option<Sequence>,
    /// The summary that the bus was given.
    pub doc: DocSummary,
}

impl Document {
    /// Writes `doc`, which was recorded as `pending`, with the previous edit as given to the bus.
    pub fn write(
        tx: &Transaction,
        instance: DbInstance,
        doc: &DocSummary,
        previous: Option<Sequence>,
        pending: PendingSequence,
    ) {
        let previous = previous.map_or_else(Vec::new, |previous| previous.as_bytes().to_vec());
        let Revision { position, hash } = doc.revision;
        let rest = (position, &hash[..], doc.branches, doc.is_deleted, &previous[..]);
        let value = pending.operand(&[], &foundationdb_tuple::pack(&rest));
        tx.atomic(AtomicOp::SetVersionstampedValue, &document(instance, &doc.id), &value);
    }

    pub fn from_bytes(id: &str, bytes: &[u8]) -> Result<Self> {
        type Stored<'a> = (u64, foundationdb_tuple::Bytes<'a>, u32, bool, foundationdb_tuple::Bytes<'a>);
        let corrupt = |reason: String| Error::corrupt("document", reason);
        let (edited, rest) = bytes.split_at_checked(13).ok_or_else(|| corrupt("it is short".to_owned()))?;
        let (position, hash, branches, is_deleted, previous): Stored<'_> =
            foundationdb_tuple::unpack(rest).map_err(|error| corrupt(error.to_string()))?;
        let hash = hash[..].try_into().map_err(|_| corrupt("its hash is none".to_owned()))?;
        let revision = Revision { position, hash };
        Ok(Self {
            edited: Sequence::from_bytes(edited)?,
            previous: Some(&previous[..])
                .filter(|previous| !previous.is_empty())
                .map(Sequence::from_bytes)
                .transpose()?,
            doc: DocSummary { id: DocId::new(id)?, revision, branches, is_deleted },
        })
    }
}

/// A line of the history: the changes of a transaction to a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub db: Db,
    /// The events.
    pub counters: Counters,
    /// The ids of the changed design documents.
    pub ddocs: Vec<DdocId>,
}

impl Line {
    /// Writes it in `tx`, as line number `order` of the transaction.
    pub fn write(&self, tx: &Transaction, order: u16) {
        let mut key = PREFIX.to_vec();
        (family::HISTORY, TupleStamp::incomplete(order)).pack_into_vec_with_versionstamp(&mut key);
        let [created, deleted, updated, ddoc_updated] = self.counters.lanes();
        let ddocs = self.ddocs.iter().map(DdocId::as_str).collect::<Vec<_>>().join(",");
        let value = foundationdb_tuple::pack(&(
            self.db.name.as_str(),
            &self.db.instance.0[..],
            (created, deleted, updated, ddoc_updated),
            &ddocs[..],
        ));
        tx.atomic(AtomicOp::SetVersionstampedKey, &key, &value);
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        type Stored<'a> = (String, foundationdb_tuple::Bytes<'a>, (u64, u64, u64, u64), String);
        let corrupt = |reason: String| Error::corrupt("history", reason);
        let (name, instance, lanes, ddocs): Stored<'_> =
            foundationdb_tuple::unpack(bytes).map_err(|error| corrupt(error.to_string()))?;
        let instance = instance[..].try_into().map_err(|_| corrupt("the instance is none".to_owned()))?;
        let ids = ddocs.split(',').filter(|id| !id.is_empty()).map(DdocId::new);
        Ok(Self {
            db: Db::new(DbName::new(&name)?, DbInstance(instance)),
            counters: Counters::from_lanes([lanes.0, lanes.1, lanes.2, lanes.3]),
            ddocs: ids.collect::<Result<_>>()?,
        })
    }
}

/// The meaning of a key of the layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AppKey {
    /// Whether a database exists.
    Database(DbName),
    History,
    /// Something that must happen once.
    Once(u64),
    /// A group has worked on a row.
    Effect(GroupName, Sequence),
    Document(DbInstance, String),
    /// How many events were recorded in the other bus.
    Tally,
    /// A row that the jobs of a trigger derive from a document of a database.
    Derived(String, DbInstance, String),
    /// The position up to which the jobs of a trigger have derived rows of a database.
    DerivedTo(String, DbInstance),
    /// The job of a trigger has cleaned up after a deleted database.
    Cleaned(String, DbInstance),
}

impl AppKey {
    /// The meaning of `key`; `None` if it is no key of the layer.
    pub fn decode(key: &[u8]) -> Option<Self> {
        use foundationdb_tuple::{Bytes as TupleBytes, unpack};
        let rest = key.strip_prefix(PREFIX)?;
        if let Ok((family::DATABASE, name)) = unpack::<(u16, String)>(rest) {
            return DbName::new(&name).ok().map(Self::Database);
        }
        if let Ok((family::HISTORY, _)) = unpack::<(u16, TupleStamp)>(rest) {
            return Some(Self::History);
        }
        if let Ok((family::ONCE, number)) = unpack::<(u16, u64)>(rest) {
            return Some(Self::Once(number));
        }
        if let Ok((family::TALLY, _)) = unpack::<(u16, String)>(rest) {
            return Some(Self::Tally);
        }
        if let Ok((family::DOCUMENT, instance, id)) = unpack::<(u16, TupleBytes<'_>, String)>(rest) {
            return Some(Self::Document(DbInstance(instance[..].try_into().ok()?), id));
        }
        if let Ok((family::DERIVED, trigger, instance, id)) =
            unpack::<(u16, String, TupleBytes<'_>, String)>(rest)
        {
            return Some(Self::Derived(trigger, DbInstance(instance[..].try_into().ok()?), id));
        }
        let (number, name, bytes): (u16, String, TupleBytes<'_>) = unpack(rest).ok()?;
        Some(match number {
            family::EFFECT => Self::Effect(GroupName::new(&name).ok()?, Sequence::from_bytes(&bytes).ok()?),
            family::DERIVED_TO => Self::DerivedTo(name, DbInstance(bytes[..].try_into().ok()?)),
            family::CLEANED => Self::Cleaned(name, DbInstance(bytes[..].try_into().ok()?)),
            _ => return None,
        })
    }
}

pub(super) fn instance_of(value: &Bytes) -> Result<DbInstance> {
    let bytes = value[..].try_into();
    bytes.map(DbInstance).map_err(|_| Error::corrupt("database", "its instance has not 16 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_distinct() {
        let name = DbName::new("a/b").unwrap();
        let group = GroupName::new("g").unwrap();
        for (key, expected) in [
            (database(&name), AppKey::Database(name.clone())),
            (once(7), AppKey::Once(7)),
            (effect(&group, Sequence::MAX), AppKey::Effect(group.clone(), Sequence::MAX)),
            (
                document(DbInstance([7; 16]), &DocId::new("x").unwrap()),
                AppKey::Document(DbInstance([7; 16]), "x".to_owned()),
            ),
            (tally(&name), AppKey::Tally),
            (
                derived("t", DbInstance([7; 16]), &DocId::new("x").unwrap()),
                AppKey::Derived("t".to_owned(), DbInstance([7; 16]), "x".to_owned()),
            ),
            (derived_to("t", DbInstance([7; 16])), AppKey::DerivedTo("t".to_owned(), DbInstance([7; 16]))),
            (cleaned("t", DbInstance([7; 16])), AppKey::Cleaned("t".to_owned(), DbInstance([7; 16]))),
        ] {
            assert_eq!(AppKey::decode(&key), Some(expected));
        }
        assert_eq!(AppKey::decode(b"bus"), None);
    }
}
