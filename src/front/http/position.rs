//! [`Position`] says where a client of `_db_updates` stands.
//!
//! A position is a [`Cursor`], and its text looks like one. A database can have several rows, one for each type, and a client may
//! stop between two of them. Then the cursor stands before the database's row in the feed, and a part says which of the rows were
//! sent:
//!
//! ```text
//! CURSOR~TOLDINSTANCEAT    2, 32 and 26 hexadecimal digits: the client stands in the middle of the row at AT
//! CURSOR.TOLDINSTANCEAT    the same, once the client has passed AT: the row has moved on, and will come later
//! ```
//!
//! The part names the instance, so that the server sends nothing twice even if the row has moved on. It also names the time, so
//! that the server sends everything that happened later.
//!
//! A position holds one part. A client may stop in the middle of a second database before it reaches the place to which the first
//! one has moved. Then the server sends the first one's rows again.
//!
//! # Texts sort
//!
//! In the middle of a row, the cursor is that of the row before it. The two marks make these texts sort: a position in the middle
//! of a row sorts after the position of the row before, whichever database that position names in its part. Of two positions in the
//! middle of one row, the later one has more bits.

use std::{fmt, str::FromStr};

use crate::base::{
    cursor::Cursor,
    encoding::Sequence,
    error::{Error, Result},
    event::DbInstance,
};

/// Where a client of `_db_updates` stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    /// The client has received everything up to this cursor, which also says how its reading began.
    pub cursor: Cursor,
    /// What the client has received of one database after the cursor.
    pub part: Option<Part>,
}

/// The rows that a client has received of a database whose other rows are still to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// The items of the row that were sent, one bit each.
    pub sent: u8,
    pub instance: DbInstance,
    /// The sequence of the row at that time.
    pub at: Sequence,
}

impl From<Cursor> for Position {
    fn from(cursor: Cursor) -> Self {
        Self { cursor, part: None }
    }
}

impl Position {
    /// Returns the mark before `part` in the text of a position at `cursor`.
    fn mark(cursor: &Cursor, part: &Part) -> char {
        if cursor.position() < part.at { '~' } else { '.' }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cursor.fmt(f)?;
        let Some(part) = &self.part else { return Ok(()) };
        let Part { sent, instance, at } = part;
        write!(f, "{}{sent:02x}{instance}{at}", Self::mark(&self.cursor, part))
    }
}

impl FromStr for Position {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((cursor, marked)) = text.find(['.', '~']).map(|place| text.split_at(place)) else {
            return Ok(text.parse::<Cursor>()?.into());
        };
        let (mark, part) = marked.split_at(1);
        let malformed = || Error::invalid("position", format!("{text:?} is no text of a position"));
        let (sent, rest) = part.split_at_checked(2).ok_or_else(malformed)?;
        let (instance, at) = rest.split_at_checked(32).ok_or_else(malformed)?;
        if !sent.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(malformed());
        }
        let sent = u8::from_str_radix(sent, 16).map_err(|_| malformed())?;
        let part = Part { sent, instance: instance.parse()?, at: at.parse()? };
        let cursor = cursor.parse()?;
        if !mark.starts_with(Self::mark(&cursor, &part)) {
            return Err(malformed());
        }
        Ok(Self { cursor, part: Some(part) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::encoding::{Incarnation, Versionstamp};

    #[test]
    fn golden_texts_come_back() {
        let at = Sequence::new(Incarnation(1), Versionstamp::new(2, 3), 4);
        let part = Part { sent: 5, instance: DbInstance([0xab; 16]), at };
        let position = Position { cursor: Cursor::NOTHING, part: Some(part) };
        let text = format!("0~05{}{at}", "ab".repeat(16));
        assert_eq!(position.to_string(), text);
        assert_eq!(text.parse::<Position>().unwrap(), position);
        let behind = Position { cursor: at.into(), part: Some(part) };
        assert_eq!(behind.to_string(), format!("{at}.{}", &text[2..]));
        assert_eq!(behind.to_string().parse::<Position>().unwrap(), behind);
        assert_eq!(at.to_string().parse::<Position>().unwrap(), Cursor::from(at).into());
        for bad in [
            "",
            ".",
            "~",
            "0.",
            "0~+5",
            &text[..text.len() - 1],
            &format!("{text}0"),
            &text.replacen('5', "+", 1),
            // This text contradicts itself: a client cannot have passed a row with a cursor at nothing.
            &text.replace('~', "."),
        ] {
            assert!(bad.parse::<Position>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC*", rest in "[0-9a-f.~\\PC]{50,70}") {
            drop(text.parse::<Position>());
            drop(format!("0~{rest}").parse::<Position>());
        }
    }
}
