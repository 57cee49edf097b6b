//! [`Cursor`]: the position of a reader of a feed, and [`Start`]: where a reading begins.
//!
//! A sequence alone is not enough. Between two pages, a reader's position does not mean that the reader has received every row before it:
//! an earlier row may have been superseded by one on a later page. So a cursor has these parts: what the reader knew when its reading
//! began, how far the feed was readable at the last page, and how far the reader has come. If the reader began with nothing, the cursor
//! also says how far the feed was readable when it began.
//!
//! ```text
//! sequence   1          2          3
//!            a created  b created  a updated        a reader from nothing that stops after 2
//!            (superseded)  row of b   row of a      still has to be delivered "a created", not just "a updated"
//! ```
//!
//! # Invariants
//!
//! 1. What a reader knew is explicit. No sequence, the first one included, stands for "knows nothing".
//! 2. A reader that began with nothing and has received rows may know any database that was alive when it began, or later. So its cursor
//!    records when it began, even when the reading starts over for another filter ([`Cursor::rewound`]).
//! 3. If a row moves before a reader reaches it, the reader passes the row's old position without getting it. A store that is restored from
//!    an older copy has the row at that position, where this reader never looks again. So the cursor records how far the feed was readable
//!    at the last page; an older copy does not reach that far.

use std::{fmt, str::FromStr};

use crate::base::{
    encoding::{Reader, Sequence},
    error::{Error, Result},
    macros::serde_as_text,
};

/// What a reader knew when its reading began. Less knowledge sorts before more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Knowledge {
    /// No database at all.
    #[default]
    Nothing,
    /// Everything that happened up to this sequence.
    UpTo(Sequence),
}

/// The position of a reader: what it knew when its reading began, how far the feed was readable at its last page, and how far it has come.
///
/// [`Cursor::BEGINNING`] is the start of a reader that knows no database. A [`Sequence`] converts into the cursor of a reader that knows
/// everything up to it. Cursors sort by how much remains to be delivered, most first.
///
/// The text of a cursor is `0` for nothing, and 26 hexadecimal digits for everything up to a sequence. In the middle of a reading it is
/// `AFTER-READABLE-KNOWN`, each with 26 digits, if the reading began with everything up to `KNOWN`, or `AFTER-READABLE-BEGAN-0` if it began
/// with nothing. Serde uses the text.
///
/// ```
/// use notibus::{Cursor, event::{Incarnation, Versionstamp}, cursor::Knowledge, Sequence};
///
/// let sequence = Sequence::new(Incarnation(0), Versionstamp::new(7, 0), 0);
/// let cursor = Cursor::from(sequence);
/// assert_eq!(cursor.knowledge(), Knowledge::UpTo(sequence));
/// assert_eq!(cursor.to_string().parse::<Cursor>()?, cursor);
/// assert_eq!("0".parse::<Cursor>()?, Cursor::BEGINNING);
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cursor {
    knowledge: Knowledge,
    /// How far the feed was readable when the reading began. Set only in the middle of a reading that began with nothing.
    began: Option<Sequence>,
    /// The reader has read everything up to here.
    after: Sequence,
    /// How far the feed was readable at the last page; `None` if the reading has not begun.
    readable: Option<Sequence>,
}

/// Where a reader, a subscriber or a consumer starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Start {
    /// With new rows. Events that were committed earlier but not yet folded may be delivered.
    #[default]
    Now,
    /// At this cursor: [`Cursor::BEGINNING`] delivers every database first.
    At(Cursor),
}

impl From<Cursor> for Start {
    fn from(cursor: Cursor) -> Self {
        Self::At(cursor)
    }
}

impl From<Sequence> for Start {
    fn from(sequence: Sequence) -> Self {
        Self::At(sequence.into())
    }
}

impl FromStr for Start {
    type Err = Error;

    /// Parses `now`, or the text of a cursor.
    fn from_str(text: &str) -> Result<Self> {
        if text == "now" { Ok(Self::Now) } else { Ok(Self::At(text.parse()?)) }
    }
}

impl From<Sequence> for Cursor {
    fn from(sequence: Sequence) -> Self {
        Self { knowledge: Knowledge::UpTo(sequence), began: None, after: sequence, readable: None }
    }
}

/// The tags of stored cursors. They never change.
mod tag {
    /// Nothing is known, and the reading has not begun.
    pub const NOTHING: u8 = 0;
    /// Everything up to a sequence is known, and the reading has not begun.
    pub const UP_TO: u8 = 1;
    /// A reading that began with nothing.
    pub const FROM_NOTHING: u8 = 2;
    /// A reading that began with everything up to a sequence.
    pub const FROM_UP_TO: u8 = 3;
}

impl Cursor {
    /// The cursor of a reader that knows no database yet.
    pub const BEGINNING: Self =
        Self { knowledge: Knowledge::Nothing, began: None, after: Sequence::MIN, readable: None };

    /// Returns the cursor of a reader that knew `knowledge` when it began and has read up to `after`. When its last page was read, the feed
    /// was readable up to `readable`. When it began, the feed was readable up to `began`, which matters only if it began with nothing.
    pub(crate) fn resumed(
        knowledge: Knowledge,
        began: Sequence,
        after: Sequence,
        readable: Sequence,
    ) -> Self {
        let readable = Some(readable.max(after));
        match knowledge {
            // A position within the knowledge adds nothing to it.
            Knowledge::UpTo(known) if after <= known => known.into(),
            Knowledge::UpTo(_) => Self { knowledge, began: None, after, readable },
            Knowledge::Nothing => Self { knowledge, began: Some(began), after, readable },
        }
    }

    /// Returns what the reader knew when its reading began.
    pub fn knowledge(&self) -> Knowledge {
        self.knowledge
    }

    /// Whether the reader knew nothing when its reading began.
    pub fn knew_nothing(&self) -> bool {
        self.knowledge == Knowledge::Nothing
    }

    /// Returns how far the feed was readable when the reading began, if it began with nothing; `None` if it has not begun.
    pub fn began(&self) -> Option<Sequence> {
        self.began
    }

    /// Returns how far the feed was readable at the last page of the reading; `None` if the reading has not begun.
    pub fn readable(&self) -> Option<Sequence> {
        self.readable
    }

    /// Returns how far the reader has read; [`Sequence::MIN`] if it has read nothing.
    pub fn position(&self) -> Sequence {
        self.after
    }

    /// Returns the cursor of the same reader with its reading started over: it receives everything since its beginning again. The cursor of
    /// a reader that began with nothing still says when it began, because the reader may know databases by now.
    #[must_use]
    pub fn rewound(self) -> Self {
        match self.knowledge {
            Knowledge::Nothing => Self { after: Sequence::MIN, ..self },
            Knowledge::UpTo(known) => known.into(),
        }
    }

    /// Whether an event of a database at `at` is news to this reader.
    pub fn is_news(&self, at: Sequence) -> bool {
        match self.knowledge {
            Knowledge::Nothing => true,
            Knowledge::UpTo(known) => at > known,
        }
    }

    /// Whether the deletion at `at` of an instance that was replaced is news to this reader. A reader that began with nothing cannot know
    /// an instance that was gone before it began.
    pub fn is_news_of_replaced(&self, at: Sequence) -> bool {
        match self.knowledge {
            Knowledge::Nothing => self.began.is_some_and(|began| at > began),
            Knowledge::UpTo(known) => at > known,
        }
    }

    /// Returns the cursor of the same reader after it has read up to `to`.
    pub(crate) fn at(self, to: Sequence) -> Self {
        match self.readable {
            Some(readable) => Self::resumed(self.knowledge, self.began.unwrap_or(readable), to, readable),
            None => Self { after: to, ..self },
        }
    }

    /// Returns the cursor of the same reader while it reads a page of a feed that is readable up to `last`.
    pub(crate) fn begin(self, last: Sequence) -> Self {
        let began = if self.knew_nothing() { self.began.or(Some(last)) } else { None };
        Self { began, readable: Some(last), ..self }
    }

    /// Merges two cursors of one reader: takes the larger knowledge and the later position.
    pub(crate) fn joined(self, other: Self) -> Self {
        let (knowledge, after) = (self.knowledge.max(other.knowledge), self.after.max(other.after));
        let (began, readable) = (self.began.max(other.began), self.readable.max(other.readable));
        match readable {
            None => Self { knowledge, began: None, after, readable },
            Some(readable) => Self::resumed(knowledge, began.unwrap_or(readable), after, readable),
        }
    }

    /// Fails if dropped rows may have reported changes to databases that the reader knows.
    pub(crate) fn check(&self, horizon: Sequence) -> Result<()> {
        let seen = match (self.knowledge, self.began) {
            // The reader cannot miss a deletion from before it began.
            (Knowledge::Nothing, None) => return Ok(()),
            (Knowledge::Nothing, Some(began)) => began.max(self.after),
            (Knowledge::UpTo(_), _) => self.after,
        };
        if seen < horizon { Err(Error::Expired { horizon }) } else { Ok(()) }
    }

    /// Returns the stored form: a tag (1 byte), then 0, 1 or 3 sequences (13 bytes each). The first is the knowledge, unless that is
    /// nothing. A reading that has begun has three: its knowledge or, if it began with nothing, its beginning; how far the feed was
    /// readable at its last page; its position.
    pub fn to_bytes(&self) -> Vec<u8> {
        let tag = match (self.knowledge, self.readable) {
            (Knowledge::Nothing, None) => tag::NOTHING,
            (Knowledge::UpTo(_), None) => tag::UP_TO,
            (Knowledge::Nothing, Some(_)) => tag::FROM_NOTHING,
            (Knowledge::UpTo(_), Some(_)) => tag::FROM_UP_TO,
        };
        let mut bytes = vec![tag];
        let first = match self.knowledge {
            Knowledge::UpTo(known) => Some(known),
            Knowledge::Nothing => self.began,
        };
        let parts = [first, self.readable, self.readable.map(|_| self.after)];
        parts.iter().flatten().for_each(|part| bytes.extend_from_slice(part.as_bytes()));
        bytes
    }

    /// Decodes a cursor. Fails with [`Error::Corrupt`] if the bytes are malformed or contradict each other.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("cursor", bytes);
        let cursor = Self::read(&mut reader)?;
        reader.finish()?;
        Ok(cursor)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        match reader.u8()? {
            tag::NOTHING => Ok(Self::BEGINNING),
            tag::UP_TO => Ok(reader.sequence()?.into()),
            tag @ (tag::FROM_NOTHING | tag::FROM_UP_TO) => {
                let (first, readable, after) = (reader.sequence()?, reader.sequence()?, reader.sequence()?);
                let knowledge =
                    if tag == tag::FROM_UP_TO { Knowledge::UpTo(first) } else { Knowledge::Nothing };
                Self::begun(knowledge, first, after, readable)
                    .ok_or_else(|| reader.corrupt("it contradicts itself".to_owned()))
            }
            tag => Err(reader.corrupt(format!("tag {tag} is unknown"))),
        }
    }

    /// Does the same as [`Cursor::resumed`], or returns `None` if the parts contradict each other.
    fn begun(knowledge: Knowledge, began: Sequence, after: Sequence, readable: Sequence) -> Option<Self> {
        let least = match knowledge {
            Knowledge::Nothing => began,
            Knowledge::UpTo(known) if known >= after => return None,
            Knowledge::UpTo(known) => known,
        };
        (least.max(after) <= readable).then(|| Self::resumed(knowledge, began, after, readable))
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.knowledge, self.readable) {
            (Knowledge::Nothing, None) => f.write_str("0"),
            (Knowledge::UpTo(known), None) => known.fmt(f),
            (Knowledge::UpTo(known), Some(readable)) => write!(f, "{}-{readable}-{known}", self.after),
            (Knowledge::Nothing, Some(readable)) => {
                write!(f, "{}-{readable}-{}-0", self.after, self.began.unwrap_or(readable))
            }
        }
    }
}

impl FromStr for Cursor {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "0" {
            return Ok(Self::BEGINNING);
        }
        let malformed = |reason: &str| Error::invalid("cursor", format!("{text:?} {reason}"));
        let (sequences, knew_nothing) = text.strip_suffix("-0").map_or((text, false), |parts| (parts, true));
        let parts: Result<Vec<Sequence>> = sequences.split('-').map(str::parse).collect();
        match (&parts.map_err(|_| malformed("is not a cursor"))?[..], knew_nothing) {
            (&[known], false) => Ok(known.into()),
            (&[after, readable, first], _) => {
                let knowledge = if knew_nothing { Knowledge::Nothing } else { Knowledge::UpTo(first) };
                Self::begun(knowledge, first, after, readable).ok_or_else(|| malformed("contradicts itself"))
            }
            _ => Err(malformed("is not a cursor")),
        }
    }
}

serde_as_text!(Cursor);

#[cfg(test)]
mod tests {
    use proptest::{option, prelude::*};

    use super::*;
    use crate::base::encoding::{Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    fn cursors() -> impl Strategy<Value = Cursor> {
        (option::of(any::<u32>()), option::of(any::<u32>()), 1_u32..).prop_map(|(known, began, more)| {
            let knowledge = known.map_or(Knowledge::Nothing, |known| Knowledge::UpTo(at(known.into())));
            let least = u64::from(known.unwrap_or(0));
            match (began, knowledge) {
                (Some(began), _) => {
                    let (began, after) = (at(least + u64::from(began)), at(least + u64::from(more)));
                    Cursor::resumed(knowledge, began, after, began)
                }
                (None, Knowledge::UpTo(known)) => known.into(),
                (None, Knowledge::Nothing) => Cursor::BEGINNING,
            }
        })
    }

    proptest! {
        /// Joining never moves a cursor back, and never makes an invalid one.
        #[test]
        fn joined_cursors_go_forward(one in cursors(), other in cursors()) {
            let joined = one.joined(other);
            prop_assert!(joined.knowledge() == one.knowledge().max(other.knowledge()));
            prop_assert!(joined.position() == one.position().max(other.position()));
            prop_assert_eq!(joined, other.joined(one));
            prop_assert_eq!(joined, joined.joined(one));
            prop_assert_eq!(joined.to_string().parse::<Cursor>().unwrap(), joined);
        }
    }

    #[test]
    fn who_began_with_nothing_may_know_what_lived_then() {
        let began = Cursor::BEGINNING.begin(at(10)).at(at(3));
        assert!(!Cursor::BEGINNING.is_news_of_replaced(at(5)));
        assert!(!began.is_news_of_replaced(at(10)) && began.is_news_of_replaced(at(11)));
        assert!(began.rewound().is_news_of_replaced(at(11)), "another filter makes nobody forget");
        let known = Cursor::from(at(5));
        assert!(!known.is_news_of_replaced(at(5)) && known.is_news_of_replaced(at(6)));
    }

    #[test]
    fn a_reader_expires_when_what_it_may_know_can_have_gone_unseen() {
        let is_expired = |cursor: Cursor, horizon| cursor.check(at(horizon)).is_err();
        assert!(!is_expired(Cursor::BEGINNING, 50));
        let began = Cursor::BEGINNING.begin(at(10)).at(at(3));
        assert!(!is_expired(began, 10) && is_expired(began, 11));
        assert!(!is_expired(began.at(at(20)), 20) && is_expired(began.at(at(20)).rewound(), 20));
        assert!(!is_expired(at(5).into(), 5) && is_expired(at(5).into(), 6));
        assert!(is_expired(Sequence::MIN.into(), 1), "to know that nothing was there is to know something");
        let further = Cursor::resumed(Knowledge::UpTo(at(1)), at(9), at(5), at(9));
        assert!(!is_expired(further, 5) && is_expired(further, 6));
    }

    proptest! {
        #[test]
        fn who_has_more_to_come_sorts_first(cursor in cursors(), more in 1_u64..) {
            prop_assert!(Cursor::BEGINNING <= cursor);
            prop_assert!(cursor.rewound() <= cursor);
            prop_assert!(cursor.at(at(more).max(cursor.position())) >= cursor);
        }
    }
}
