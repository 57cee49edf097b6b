//! The layer on top of the bus: databases that are created, updated and deleted, and a history of these events in the same transactions.
//!
//! A database is a key whose value is its instance. A transaction that creates, updates or deletes a database reads that key serializably,
//! because a layer has to know whether the database exists. The history has one line per database and transaction, ordered by the
//! versionstamps of the transactions. The oracle trusts this history.

use bytes::Bytes;
use foundationdb_tuple::{TuplePack, Versionstamp as TupleStamp};
use notibus::{
    changes::{DocId, DocSummary, PendingSequence, Revision},
    event::{Counters, Db, DbInstance, DbName, DdocId, Sequence},
    store::{AtomicOp, KeyRange, Transaction},
};

/// The prefix of all keys that the layer writes.
pub const PREFIX: &[u8] = b"app";

const WRITTEN: &str = "the layer has written it";

pub mod family {
    pub const DATABASE: u16 = 0;
    pub const HISTORY: u16 = 1;
    pub const ONCE: u16 = 2;
    pub const DOCUMENT: u16 = 4;
    pub const WORKED: u16 = 6;
}

fn pack(elements: &impl TuplePack) -> Vec<u8> {
    let mut key = PREFIX.to_vec();
    elements.pack_into_vec(&mut key);
    key
}

pub fn database(name: &DbName) -> Vec<u8> {
    pack(&(family::DATABASE, name.as_str()))
}

/// Returns the key of something that must happen once.
pub fn once(number: u64) -> Vec<u8> {
    pack(&(family::ONCE, number))
}

/// Returns the key of the document `id` in a database.
pub fn document(instance: DbInstance, id: &DocId) -> Vec<u8> {
    pack(&(family::DOCUMENT, &instance.0[..], id.as_str()))
}

pub fn documents(instance: DbInstance) -> KeyRange {
    let mut begin = pack(&(family::DOCUMENT, &instance.0[..]));
    let mut end = begin.clone();
    begin.push(0);
    end.push(0xff);
    KeyRange::new(begin, end)
}

/// Returns the key at which the handler of `consumer` records what it last did for the id `id`.
pub fn worked(consumer: &str, id: &[u8]) -> Vec<u8> {
    pack(&(family::WORKED, consumer, id))
}

/// Encodes what a handler did: the number of its run, and whether that finished the work on the id. `nonce` makes the value unique.
pub fn work(run: u64, is_final: bool, nonce: u64) -> Vec<u8> {
    foundationdb_tuple::pack(&(run, is_final, nonce))
}

/// Decodes a value from [`work`]: the run, and whether it finished the work.
pub fn work_of(value: &[u8]) -> (u64, bool) {
    let (run, is_final, _): (u64, bool, u64) = foundationdb_tuple::unpack(value).expect(WRITTEN);
    (run, is_final)
}

/// A document as the layer stores it: its last edit, and the edit that the layer named as the previous one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// The sequence of the last edit.
    pub edited: Sequence,
    /// The edit that was given to the bus as the previous one.
    pub previous: Option<Sequence>,
    /// The summary that was given to the bus.
    pub doc: DocSummary,
}

impl Document {
    /// Writes `doc`, which was recorded as `pending`, with the previous edit that was given to the bus.
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

    pub fn from_bytes(id: &str, bytes: &[u8]) -> Self {
        type Stored<'a> = (u64, foundationdb_tuple::Bytes<'a>, u32, bool, foundationdb_tuple::Bytes<'a>);
        let (edited, rest) = bytes.split_at(13);
        let (position, hash, branches, is_deleted, previous): Stored<'_> =
            foundationdb_tuple::unpack(rest).expect(WRITTEN);
        let revision = Revision { position, hash: hash[..].try_into().expect(WRITTEN) };
        let previous = Some(&previous[..]).filter(|previous| !previous.is_empty());
        Self {
            edited: Sequence::from_bytes(edited).expect(WRITTEN),
            previous: previous.map(|previous| Sequence::from_bytes(previous).expect(WRITTEN)),
            doc: DocSummary { id: DocId::new(id).expect(WRITTEN), revision, branches, is_deleted },
        }
    }
}

/// A line of the history: the changes that a transaction made to a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub db: Db,
    /// How many events of each kind happened.
    pub counters: Counters,
    /// The ids of the design documents that changed.
    pub ddocs: Vec<DdocId>,
}

impl Line {
    /// Writes the line in `tx`, as line number `order` of the transaction.
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

    pub fn from_bytes(bytes: &[u8]) -> Self {
        type Stored<'a> = (String, foundationdb_tuple::Bytes<'a>, (u64, u64, u64, u64), String);
        let (name, instance, lanes, ddocs): Stored<'_> = foundationdb_tuple::unpack(bytes).expect(WRITTEN);
        let instance = DbInstance(instance[..].try_into().expect(WRITTEN));
        let ids = ddocs.split(',').filter(|id| !id.is_empty());
        Self {
            db: Db::new(DbName::new(&name).expect(WRITTEN), instance),
            counters: Counters::from_lanes([lanes.0, lanes.1, lanes.2, lanes.3]),
            ddocs: ids.map(|id| DdocId::new(id).expect(WRITTEN)).collect(),
        }
    }
}

/// The meaning of a key that the layer wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AppKey {
    /// Whether a database exists.
    Database(DbName),
    History,
    /// Something that must happen once.
    Once(u64),
    Document(DbInstance, String),
    /// What the handler of a consumer last did for an id.
    Worked(String, Vec<u8>),
}

impl AppKey {
    /// Decodes `key`; returns `None` if it is not a key of the layer.
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
        if let Ok((family::DOCUMENT, instance, id)) = unpack::<(u16, TupleBytes<'_>, String)>(rest) {
            return Some(Self::Document(DbInstance(instance[..].try_into().ok()?), id));
        }
        let (number, name, id): (u16, String, TupleBytes<'_>) = unpack(rest).ok()?;
        (number == family::WORKED).then(|| Self::Worked(name, id.to_vec()))
    }
}

/// Decodes the instance of a database that exists.
pub fn instance_of(value: &Bytes) -> DbInstance {
    DbInstance(value[..].try_into().expect(WRITTEN))
}
