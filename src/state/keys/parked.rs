//! Family 16, too: parked databases, whose job has failed too often. They wait outside of the plan of their trigger.

use super::{CursorId, Keys, cut, family};
use crate::{
    base::{
        encoding::Reader,
        error::{Error, Result},
        event::{Db, DbInstance, DbName},
    },
    store::{KeyRange, Row},
};

/// The format of stored rows.
const FORMAT: u8 = 1;

/// The numbers after the name of the cursor. They are stored and never change.
pub(super) mod part {
    /// A parked database.
    pub const PARKED: u16 = 2;
    /// How often a retry of parked databases was asked for.
    pub const ASKED: u16 = 3;
}

/// The flags of a row, as bits. They are stored and never change.
mod flag {
    /// The job has to learn that the database is gone.
    pub const GONE: u8 = 1;
    /// It was created since the last work on it.
    pub const FRESH: u8 = 2;
    /// A retry was asked for.
    pub const ASKED: u8 = 4;
    /// All of them.
    pub const ALL: u8 = GONE | FRESH | ASKED;
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ParkedRow {
    /// Whether the job has to learn that the database is gone, instead of working on it.
    pub is_gone: bool,
    /// Whether it was created since the last work on it.
    pub is_fresh: bool,
    /// Whether a retry was asked for.
    pub is_asked: bool,
    /// How often it was tried.
    pub attempts: u32,
    /// How often it was tried since it was parked, or has changed.
    pub retries: u32,
    /// When it was last tried, in milliseconds since 1970; for people.
    pub at_ms: u64,
    /// Why the last attempt failed.
    pub error: String,
}

impl ParkedRow {
    /// The stored form: format (1 byte), flags (1), attempts (4), retries (4), time (8), and the error's text behind its length
    /// (2). A text that is too long is cut.
    pub fn to_bytes(&self) -> Vec<u8> {
        let error = cut(&self.error);
        let len = u16::try_from(error.len()).expect("it was cut");
        let flags = [(self.is_gone, flag::GONE), (self.is_fresh, flag::FRESH), (self.is_asked, flag::ASKED)];
        let flags = flags.iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag);
        [
            &[FORMAT, flags][..],
            &self.attempts.to_be_bytes(),
            &self.retries.to_be_bytes(),
            &self.at_ms.to_be_bytes(),
            &len.to_be_bytes(),
            error.as_bytes(),
        ]
        .concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("parked database", bytes);
        let (format, flags) = (reader.u8()?, reader.u8()?);
        if format != FORMAT || flags & !flag::ALL != 0 {
            return Err(reader.corrupt(format!("format {format} with flags {flags} is unknown")));
        }
        let row = Self {
            is_gone: flags & flag::GONE != 0,
            is_fresh: flags & flag::FRESH != 0,
            is_asked: flags & flag::ASKED != 0,
            attempts: reader.u32()?,
            retries: reader.u32()?,
            at_ms: reader.u64()?,
            error: reader.text()?.to_owned(),
        };
        reader.finish()?;
        Ok(row)
    }
}

impl Keys {
    /// The key of the parked `db` of the trigger with this `cursor`.
    pub fn parked(&self, cursor: &CursorId, db: &Db) -> Vec<u8> {
        let (owner, name) = cursor.parts();
        self.pack(&(family::CURSOR, owner, name, part::PARKED, db.name.as_str(), &db.instance.0[..]))
    }

    /// The parked databases of the trigger with this `cursor`.
    pub fn all_parked(&self, cursor: &CursorId) -> KeyRange {
        let (owner, name) = cursor.parts();
        self.range(&(family::CURSOR, owner, name, part::PARKED))
    }

    /// The parked instances of the database `db`.
    pub fn parked_as(&self, cursor: &CursorId, db: &DbName) -> KeyRange {
        let (owner, name) = cursor.parts();
        self.range(&(family::CURSOR, owner, name, part::PARKED, db.as_str()))
    }

    /// The key of the number of retries asked for by people for parked databases of the trigger with this `cursor`.
    pub fn asked(&self, cursor: &CursorId) -> Vec<u8> {
        let (owner, name) = cursor.parts();
        self.pack(&(family::CURSOR, owner, name, part::ASKED))
    }

    /// The database and the content of a stored row.
    pub fn parked_row(&self, (key, value): &Row) -> Result<(Db, Result<ParkedRow>)> {
        type Key<'k> =
            (u16, foundationdb_tuple::Bytes<'k>, String, u16, String, foundationdb_tuple::Bytes<'k>);
        let (number, _, _, part, name, instance) = self.unpack::<Key<'_>>("parked database", key)?;
        let corrupt = |reason: String| Error::corrupt("parked database", reason);
        if (number, part) != (family::CURSOR, part::PARKED) {
            return Err(corrupt("its key is of another family".into()));
        }
        let name = DbName::new(&name).map_err(|error| corrupt(error.to_string()))?;
        let instance = (*instance)
            .try_into()
            .map_err(|_| corrupt(format!("an instance of {} bytes", instance.len())))?;
        Ok((Db::new(name, DbInstance(instance)), ParkedRow::from_bytes(value)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row() -> ParkedRow {
        ParkedRow {
            is_gone: false,
            is_fresh: true,
            is_asked: true,
            attempts: 5,
            retries: 2,
            at_ms: 7,
            error: "no disk".to_owned(),
        }
    }

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        let cursor = CursorId::new(None, "c").unwrap();
        let db = Db::new(DbName::new("db").unwrap(), DbInstance([7; 16]));
        let key = keys.parked(&cursor, &db);
        let golden = [&b"p\x15\x10\x01\x00\x02c\x00\x15\x02\x02db\x00\x01"[..], &[7; 16], &[0]].concat();
        assert_eq!(key, golden);
        assert!(keys.all_parked(&cursor).contains(&key) && keys.parked_as(&cursor, &db.name).contains(&key));
        assert!(keys.whole_cursor(&cursor).contains(&key) && !keys.scans(&cursor).contains(&key));
        assert_eq!(keys.asked(&cursor), b"p\x15\x10\x01\x00\x02c\x00\x15\x03");
        let value = [&[1, 6, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7, 0, 7][..], b"no disk"].concat();
        assert_eq!(row().to_bytes(), value);
        let (found, parked) = keys.parked_row(&(key.into(), value.into())).unwrap();
        assert_eq!((found, parked.unwrap()), (db, row()));
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        let good = row().to_bytes();
        assert!(ParkedRow::from_bytes(&good[1..]).is_err());
        assert!(ParkedRow::from_bytes(&[&good[..], &[0]].concat()).is_err());
        for (place, byte) in [(0, 2), (1, 8)] {
            let mut bad = good.clone();
            bad[place] = byte;
            assert!(ParkedRow::from_bytes(&bad).is_err());
        }
    }

    proptest! {
        #[test]
        fn rows_come_back_as_they_were(
            is_gone: bool, is_fresh: bool, is_asked: bool, attempts: u32, retries: u32, at_ms: u64, error in ".{0,100}"
        ) {
            let row = ParkedRow { is_gone, is_fresh, is_asked, attempts, retries, at_ms, error };
            prop_assert_eq!(ParkedRow::from_bytes(&row.to_bytes()).unwrap(), row);
        }
    }
}
