//! Family 9: the sequence of the last notification with a change of a design document.
//!
//! A row without an id stands for changes whose ids were not recorded. Such a change may be of any document, so a
//! change with an id does not replace the row.

use super::{Keys, family};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
        event::{Db, DdocId},
    },
    store::{KeyRange, Row},
};

impl Keys {
    /// The key of the design document `id` of `db`; without an id, of changes without ids. No id is empty.
    pub fn ddoc(&self, db: &Db, id: Option<&DdocId>) -> Vec<u8> {
        let id = id.map_or("", DdocId::as_str);
        self.pack(&(family::DDOC, db.name.as_str(), &db.instance.0[..], id))
    }

    /// The rows of all changed design documents of `db`.
    pub fn ddocs(&self, db: &Db) -> KeyRange {
        self.range(&(family::DDOC, db.name.as_str(), &db.instance.0[..]))
    }

    /// The id in a stored row, if it has one, and the sequence of the last notification with a change of it.
    pub fn ddoc_row(&self, (key, value): &Row) -> Result<(Option<DdocId>, Sequence)> {
        let (number, _, _, id): (u16, String, foundationdb_tuple::Bytes<'_>, String) =
            self.unpack("ddoc", key)?;
        if number != family::DDOC {
            return Err(Error::corrupt("ddoc", "its key is of another family"));
        }
        let id = (!id.is_empty()).then(|| DdocId::new(&id)).transpose();
        let id = id.map_err(|error| Error::corrupt("ddoc", error.to_string()))?;
        Ok((id, Sequence::from_bytes(value)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::event::{DbInstance, DbName};

    #[test]
    fn golden_bytes() {
        let db = Db::new(DbName::new("db").unwrap(), DbInstance([7; 16]));
        let keys = Keys::new(b"p").unwrap();
        let id = DdocId::new("i").unwrap();
        for (id, bytes) in [(Some(id), &b"\x02i\0"[..]), (None, b"\x02\0")] {
            let key = keys.ddoc(&db, id.as_ref());
            let expected = [&[b'p', 0x15, 9, 0x02, b'd', b'b', 0, 0x01][..], &[7; 16], &[0], bytes].concat();
            assert_eq!(key, expected);
            assert!(keys.ddocs(&db).contains(&key));
            let row = (key.into(), bytes::Bytes::copy_from_slice(Sequence::MIN.as_bytes()));
            assert_eq!(keys.ddoc_row(&row).unwrap(), (id, Sequence::MIN));
        }
    }
}
