//! Family 9: the sequence of the notification that last told of a design document.

use super::{Keys, family};
use crate::{
    encoding::Sequence,
    error::{Error, Result},
    event::{Db, DdocId},
    store::{KeyRange, Row},
};

impl Keys {
    /// The key of the design document `id` of `db`.
    pub fn ddoc(&self, db: &Db, id: &DdocId) -> Vec<u8> {
        self.pack(&(family::DDOC, db.name.as_str(), &db.instance.0[..], id.as_str()))
    }

    /// All design documents of `db` that notifications have told of.
    pub fn ddocs(&self, db: &Db) -> KeyRange {
        self.range(&(family::DDOC, db.name.as_str(), &db.instance.0[..]))
    }

    /// The design document in a stored row, and the sequence of the notification that last told of it.
    pub fn ddoc_row(&self, (key, value): &Row) -> Result<(DdocId, Sequence)> {
        let (number, _, _, id): (u16, String, foundationdb_tuple::Bytes<'_>, String) =
            self.unpack("ddoc", key)?;
        if number != family::DDOC {
            return Err(Error::corrupt("ddoc", "its key is of another family"));
        }
        let id = DdocId::new(&id).map_err(|error| Error::corrupt("ddoc", error.to_string()))?;
        Ok((id, Sequence::from_bytes(value)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{DbInstance, DbName};

    #[test]
    fn golden_bytes() {
        let db = Db::new(DbName::new("db").unwrap(), DbInstance([7; 16]));
        let keys = Keys::new(b"p").unwrap();
        let id = DdocId::new("i").unwrap();
        let key = keys.ddoc(&db, &id);
        let expected =
            [&[b'p', 0x15, 9, 0x02, b'd', b'b', 0, 0x01][..], &[7; 16], &[0, 0x02, b'i', 0]].concat();
        assert_eq!(key, expected);
        assert!(keys.ddocs(&db).contains(&key));
        let row = (key.into(), bytes::Bytes::copy_from_slice(Sequence::ZERO.as_bytes()));
        assert_eq!(keys.ddoc_row(&row).unwrap(), (id, Sequence::ZERO));
    }
}
