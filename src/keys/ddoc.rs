//! Family 9: the sequence of the notification that last told of a design document.

use super::{Keys, family};
use crate::event::{Db, DdocId};

impl Keys {
    /// The key of the design document `id` of `db`.
    pub fn ddoc(&self, db: &Db, id: &DdocId) -> Vec<u8> {
        self.pack(&(family::DDOC, db.name.as_str(), &db.instance.0[..], id.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{DbInstance, DbName};

    #[test]
    fn golden_bytes() {
        let db = Db::new(DbName::new("db").unwrap(), DbInstance([7; 16]));
        let key = Keys::new(b"p").unwrap().ddoc(&db, &DdocId::new("i").unwrap());
        let expected =
            [&[b'p', 0x15, 9, 0x02, b'd', b'b', 0, 0x01][..], &[7; 16], &[0, 0x02, b'i', 0]].concat();
        assert_eq!(key, expected);
    }
}
