//! Family 13: the position of the notification feed at times of the janitors' work, by which they find old rows.

use super::{Keys, family};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    store::{KeyRange, Row},
};

/// A position of the feed and its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AgeMark {
    /// How long janitors had worked by then, one after the other, in milliseconds.
    pub worked_ms: u64,
    /// Everything up to here is older.
    pub at: Sequence,
}

impl Keys {
    pub fn age_mark(&self, worked_ms: u64) -> Vec<u8> {
        self.pack(&(family::AGE, worked_ms))
    }

    /// All marks, oldest first.
    pub fn age_marks(&self) -> KeyRange {
        self.range(&(family::AGE,))
    }

    /// The mark in a stored row.
    pub fn age_mark_of(&self, (key, value): &Row) -> Result<AgeMark> {
        let (number, worked_ms): (u16, u64) = self.unpack("age mark", key)?;
        if number != family::AGE {
            return Err(Error::corrupt("age mark", "its key is of another family"));
        }
        Ok(AgeMark { worked_ms, at: Sequence::from_bytes(value)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::{Incarnation, Versionstamp};

    #[test]
    fn golden_bytes_and_order() {
        let keys = Keys::new(b"p").unwrap();
        let at = Sequence::new(Incarnation(1), Versionstamp::new(2, 3), 4);
        let key = keys.age_mark(258);
        assert_eq!(key, [b'p', 0x15, 13, 0x16, 1, 2]);
        assert!(keys.age_marks().contains(&key) && keys.age_mark(3) < key);
        let row = (key.into(), at.as_bytes().to_vec().into());
        assert_eq!(keys.age_mark_of(&row).unwrap(), AgeMark { worked_ms: 258, at });
        assert!(keys.age_mark_of(&(keys.config().into(), row.1.clone())).is_err());
        assert!(keys.age_mark_of(&(row.0, row.1.slice(1..))).is_err());
    }
}
