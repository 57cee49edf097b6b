//! Family 16, part 4: names with unfinished work of a trigger, which its cursor has passed.

use super::{CursorId, Keys, family};
use crate::{
    base::{
        encoding::Reader,
        error::{Error, Result},
        event::DbName,
    },
    store::{KeyRange, Row},
};

/// The format of stored rows.
const FORMAT: u8 = 1;

/// The number after the name of the cursor. It is stored and never changes.
pub(super) const PART: u16 = 4;

/// A name with unfinished work. The feed and the marks say which work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwedRow {
    /// Whether its database was created since the last work on it.
    pub is_fresh: bool,
}

impl OwedRow {
    /// The stored form: format (1 byte), and 1 or 0 (1).
    pub fn to_bytes(self) -> [u8; 2] {
        [FORMAT, self.is_fresh.into()]
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("owed database", bytes);
        let row = match (reader.u8()?, reader.u8()?) {
            (FORMAT, flag @ 0..=1) => Self { is_fresh: flag == 1 },
            (format, flag) => {
                return Err(reader.corrupt(format!("format {format} with flag {flag} is unknown")));
            }
        };
        reader.finish()?;
        Ok(row)
    }
}

impl Keys {
    /// The key of the unfinished work for the database `name` by the trigger with this `cursor`.
    pub fn owed(&self, cursor: &CursorId, name: &DbName) -> Vec<u8> {
        let (owner, of) = cursor.parts();
        self.pack(&(family::CURSOR, owner, of, PART, name.as_str()))
    }

    /// The names with unfinished work of the trigger with this `cursor`.
    pub fn all_owed(&self, cursor: &CursorId) -> KeyRange {
        let (owner, of) = cursor.parts();
        self.range(&(family::CURSOR, owner, of, PART))
    }

    /// The name in a stored row.
    pub fn owed_name(&self, (key, _): &Row) -> Result<DbName> {
        type Key<'k> = (u16, foundationdb_tuple::Bytes<'k>, String, u16, String);
        let (number, _, _, part, name) = self.unpack::<Key<'_>>("owed database", key)?;
        let corrupt = |reason: String| Error::corrupt("owed database", reason);
        if (number, part) != (family::CURSOR, PART) {
            return Err(corrupt("its key is of another family".into()));
        }
        DbName::new(&name).map_err(|error| corrupt(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let cursor = CursorId::new(None, "c").unwrap();
        let name = DbName::new("db").unwrap();
        let key = keys.owed(&cursor, &name);
        assert_eq!(key, b"p\x15\x10\x01\x00\x02c\x00\x15\x04\x02db\x00");
        assert!(keys.all_owed(&cursor).contains(&key) && keys.whole_cursor(&cursor).contains(&key));
        assert!(!keys.all_parked(&cursor).contains(&key));
        for (is_fresh, value) in [(false, [1, 0]), (true, [1, 1])] {
            assert_eq!(OwedRow { is_fresh }.to_bytes(), value);
            assert_eq!(OwedRow::from_bytes(&value).unwrap(), OwedRow { is_fresh });
        }
        assert_eq!(keys.owed_name(&(key.into(), bytes::Bytes::new())).unwrap(), name);
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        for bad in [&[][..], &[1], &[2, 0], &[1, 2], &[1, 0, 0]] {
            assert!(OwedRow::from_bytes(bad).is_err());
        }
    }
}
