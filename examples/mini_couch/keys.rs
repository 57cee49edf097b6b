//! The keys of the layer: tuples under its own prefix, beside the bus in the same store.
//!
//! | row | key | value |
//! |---|---|---|
//! | database | (P, 0, name) | its instance, 16 bytes |
//! | document | (P, 1, instance, 0, id) | the sequence of its last edit, 13 bytes, and its JSON |
//! | count | (P, 1, instance, 1, [`Count`]) | 8 bytes, signed, little-endian |
//!
//! All data of one instance is one range, so that deleting it is one mutation, whatever its size.

use foundationdb_tuple::{Bytes, pack, unpack};
use notibus::{Db, DbName, changes::DocId, store::KeyRange};

use super::problem::Problem;

/// The prefix of all keys.
const PREFIX: &str = "mini_couch";

/// The counts of each database. Transactions that change it add to them blindly.
#[derive(Clone, Copy)]
pub enum Count {
    /// Documents.
    Living = 0,
    /// Documents that were deleted.
    Deleted = 1,
    /// Bytes of the JSON of all documents.
    Bytes = 2,
}

/// The key of the database that has `name`.
pub fn database(name: &DbName) -> Vec<u8> {
    pack(&(PREFIX, 0, name.as_str()))
}

/// The range of all databases, by name.
pub fn databases() -> KeyRange {
    KeyRange::prefix(pack(&(PREFIX, 0)))
}

/// The name in the key of a database.
pub fn name_of(key: &[u8]) -> Result<String, Problem> {
    let (_, _, name): (String, u16, String) = unpack(key).map_err(Problem::corrupt)?;
    Ok(name)
}

/// The range of all data of `db` but its name.
pub fn contents(db: &Db) -> KeyRange {
    KeyRange::prefix(pack(&(PREFIX, 1, instance(db))))
}

/// The key of a document of `db`.
pub fn document(db: &Db, id: &DocId) -> Vec<u8> {
    pack(&(PREFIX, 1, instance(db), 0, id.as_str()))
}

/// The range of the documents of `db`, by id.
pub fn documents(db: &Db) -> KeyRange {
    KeyRange::prefix(pack(&(PREFIX, 1, instance(db), 0)))
}

/// The range of the documents of `db` from the id `from` up to and including the id `to`.
pub fn documents_between(db: &Db, from: Option<&str>, to: Option<&str>) -> KeyRange {
    let all = documents(db);
    let key = |id: &str| pack(&(PREFIX, 1, instance(db), 0, id));
    let begin = from.map_or(all.begin, |id| key(id).into());
    let end = to.map_or(all.end, |id| KeyRange::key(&key(id)).end);
    KeyRange { begin, end }
}

/// The key of a count of `db`.
pub fn count(db: &Db, count: Count) -> Vec<u8> {
    pack(&(PREFIX, 1, instance(db), 1, count as u16))
}

/// The instance as a tuple element.
fn instance(db: &Db) -> Bytes<'_> {
    Bytes::from(&db.instance.0[..])
}
