//! The keys of the layer: tuples under its own prefix, next to the bus in the same store.
//!
//! | row | key | value |
//! |---|---|---|
//! | database | (P, 0, name) | its instance, 16 bytes |
//! | document | (P, 1, instance, 0, id) | the sequence of its last edit, 13 bytes, and its JSON |
//! | count | (P, 1, instance, 1, [`Count`]) | 8 bytes, signed, little-endian |
//!
//! All data of an instance is in one range, so that deleting it takes one mutation, whatever its size.

use foundationdb_tuple::{Bytes, pack, unpack};
use notibus::{Db, DbName, changes::DocId, store::KeyRange};

use super::problem::Problem;

/// The prefix of all keys.
const PREFIX: &str = "mini_couch";

/// The counts of each database. Transactions add to them atomically, without reading them.
#[derive(Clone, Copy)]
pub enum Count {
    /// The number of documents that are not deleted.
    Living = 0,
    /// The number of documents that were deleted.
    Deleted = 1,
    /// The size of the JSON of all documents, in bytes.
    Bytes = 2,
}

/// Returns the key of the database that has `name`.
pub fn database(name: &DbName) -> Vec<u8> {
    pack(&(PREFIX, 0, name.as_str()))
}

/// Returns the range of all databases, by name.
pub fn databases() -> KeyRange {
    KeyRange::prefix(pack(&(PREFIX, 0)))
}

/// Returns the name in the key of a database.
pub fn name_of(key: &[u8]) -> Result<String, Problem> {
    let (_, _, name): (String, u16, String) = unpack(key).map_err(Problem::corrupt)?;
    Ok(name)
}

/// Returns the range of all data of `db`, except its name.
pub fn contents(db: &Db) -> KeyRange {
    KeyRange::prefix(pack(&(PREFIX, 1, instance(db))))
}

/// Returns the key of a document of `db`.
pub fn document(db: &Db, id: &DocId) -> Vec<u8> {
    pack(&(PREFIX, 1, instance(db), 0, id.as_str()))
}

/// Returns the range of the documents of `db`, by id.
pub fn documents(db: &Db) -> KeyRange {
    KeyRange::prefix(pack(&(PREFIX, 1, instance(db), 0)))
}

/// Returns the range of the documents of `db` from the id `from` to the id `to`, inclusive.
pub fn documents_between(db: &Db, from: Option<&str>, to: Option<&str>) -> KeyRange {
    let all = documents(db);
    let key = |id: &str| pack(&(PREFIX, 1, instance(db), 0, id));
    let begin = from.map_or(all.begin, |id| key(id).into());
    let end = to.map_or(all.end, |id| KeyRange::key(&key(id)).end);
    KeyRange { begin, end }
}

/// Returns the key of a count of `db`.
pub fn count(db: &Db, count: Count) -> Vec<u8> {
    pack(&(PREFIX, 1, instance(db), 1, count as u16))
}

/// Returns the instance as a tuple element.
fn instance(db: &Db) -> Bytes<'_> {
    Bytes::from(&db.instance.0[..])
}
