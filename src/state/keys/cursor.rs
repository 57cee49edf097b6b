//! Family 16: the cursor of a durable subscriber.

use std::{fmt, sync::Arc};

use super::{Keys, NodeId, family};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Reader,
        error::{Error, Result},
    },
    store::KeyRange,
};

/// The format of stored rows.
const FORMAT: u8 = 1;

/// The number after the name. It is stored and never changes.
mod part {
    /// The cursor of the subscriber in the feed.
    pub const CURSOR: u16 = 0;
}

/// The id of a cursor: of a node, or of the bus as a whole.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CursorId {
    /// The node; empty for the bus as a whole.
    owner: Arc<[u8]>,
    name: Arc<str>,
}

impl CursorId {
    /// The longest name, in bytes.
    pub const NAME_LEN_MAX: usize = 256;

    /// The cursor `name` of `owner`, or of the bus. Fails if the name is empty or too long.
    pub fn new(owner: Option<&NodeId>, name: &str) -> Result<Self> {
        if !(1..=Self::NAME_LEN_MAX).contains(&name.len()) {
            let reason = format!("it has {} bytes, of 1 to {}", name.len(), Self::NAME_LEN_MAX);
            return Err(Error::invalid("cursor name", reason));
        }
        Ok(Self { owner: owner.map_or(&[][..], |node| &node.0).into(), name: name.into() })
    }

    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for CursorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match <[u8; 16]>::try_from(&*self.owner) {
            Ok(node) => write!(f, "{} of node {}", self.name, NodeId(node)),
            Err(_) => f.write_str(&self.name),
        }
    }
}

/// A stored cursor and its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CursorRow {
    /// Drawn by the last owner that opened it; only this owner may write.
    pub token: [u8; 16],
    pub cursor: Cursor,
    /// A hash of the filter: with another filter, an unfinished reading has to start over.
    pub filter: u64,
}

impl CursorRow {
    /// The stored form: format (1 byte), token (16), hash of the filter (8), cursor (1 to 40).
    pub fn to_bytes(self) -> Vec<u8> {
        [&[FORMAT][..], &self.token, &self.filter.to_be_bytes(), &self.cursor.to_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("cursor", bytes);
        let format = reader.u8()?;
        if format != FORMAT {
            return Err(reader.corrupt(format!("format {format} is unknown")));
        }
        let (token, filter) = (reader.bytes16()?, reader.u64()?);
        let row = Self { token, filter, cursor: Cursor::read(&mut reader)? };
        reader.finish()?;
        Ok(row)
    }
}

impl Keys {
    /// The key of the row of `cursor`.
    pub fn cursor(&self, cursor: &CursorId) -> Vec<u8> {
        self.pack(&(family::CURSOR, &*cursor.owner, &*cursor.name, part::CURSOR))
    }

    /// The cursor of the bus as a whole whose row is under `key`.
    pub fn cursor_id(&self, key: &[u8]) -> Result<CursorId> {
        let (number, _, name, part): (u16, foundationdb_tuple::Bytes<'_>, String, u16) =
            self.unpack("cursor", key)?;
        if (number, part) != (family::CURSOR, part::CURSOR) {
            return Err(Error::corrupt("cursor", "its key is of another family"));
        }
        CursorId::new(None, &name)
    }

    /// All rows of `cursor`.
    pub fn whole_cursor(&self, cursor: &CursorId) -> KeyRange {
        self.range(&(family::CURSOR, &*cursor.owner, &*cursor.name))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::encoding::{Incarnation, Sequence, Versionstamp};

    fn id(name: &str) -> CursorId {
        CursorId::new(None, name).unwrap()
    }

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let position = Sequence::new(Incarnation(1), Versionstamp::new(2, 3), 4);
        let row = CursorRow { token: [9; 16], cursor: position.into(), filter: 5 };
        let filter = [0, 0, 0, 0, 0, 0, 0, 5];
        assert_eq!(row.to_bytes(), [&[1][..], &[9; 16], &filter, &[1], position.as_bytes()].concat());
        assert_eq!(keys.cursor(&id("c")), b"p\x15\x10\x01\x00\x02c\x00\x14");
    }

    #[test]
    fn the_range_of_a_cursor_has_no_key_of_another() {
        let keys = Keys::new(b"p").unwrap();
        let node = NodeId([3; 16]);
        let cursors = [id("a"), id("ab"), CursorId::new(Some(&node), "a").unwrap()];
        for this in &cursors {
            for other in &cursors {
                assert_eq!(keys.whole_cursor(this).contains(&keys.cursor(other)), this == other);
            }
        }
    }

    #[test]
    fn names_have_limits() {
        assert!(CursorId::new(None, "").is_err());
        assert!(CursorId::new(None, &"x".repeat(CursorId::NAME_LEN_MAX + 1)).is_err());
        assert!(CursorId::new(None, &"x".repeat(CursorId::NAME_LEN_MAX)).is_ok());
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        let good = CursorRow { token: [1; 16], cursor: Cursor::NOTHING, filter: 0 }.to_bytes();
        assert!(CursorRow::from_bytes(&good[1..]).is_err());
        assert!(CursorRow::from_bytes(&[&good[..], &[0]].concat()).is_err());
        let mut unknown = good;
        unknown[0] = 2;
        assert!(CursorRow::from_bytes(&unknown).is_err());
    }

    proptest! {
        #[test]
        fn rows_come_back_as_they_were(token: [u8; 16], version: u64, order: u16, filter: u64) {
            let position = Sequence::new(Incarnation(0), Versionstamp::new(version, 0), order);
            let row = CursorRow { token, cursor: position.into(), filter };
            prop_assert_eq!(CursorRow::from_bytes(&row.to_bytes()).unwrap(), row);
        }
    }
}
