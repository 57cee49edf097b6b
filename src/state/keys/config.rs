//! Families 0, 26 and 13: the settings that are fixed when a bus is created; the table of incarnations, with the end of each; and positions of the notification feed, each with the time that janitors had worked by then, for finding old rows.

use super::{Keys, family, feed::sequence_operand};
use crate::{
    base::{
        encoding::{Incarnation, Reader, Sequence},
        error::{Error, Result},
    },
    store::{KeyRange, Row},
};

/// The format of all keys and values of a bus.
const FORMAT: u16 = 6;

/// The settings that are fixed when a bus is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Config {
    /// The number of partitions of the counters.
    pub partitions: u32,
    /// How many times the bus has moved to another cluster.
    pub incarnation: Incarnation,
}

impl Config {
    /// The length of the stored form, in bytes.
    pub const LEN: usize = 7;

    /// Returns the configuration after a move to another store.
    pub fn raised(self) -> Result<Self> {
        let raised = self.incarnation.0.checked_add(1).map(Incarnation);
        let incarnation = raised.ok_or_else(|| Error::invalid("incarnation", "255 is the last one"))?;
        Ok(Self { incarnation, ..self })
    }

    /// Returns the error for a search that found no bus under `prefix`.
    pub fn missing(prefix: &[u8]) -> Error {
        let reason = format!(
            "there is no bus under \"{}\": `notibus serve` or `Bus::open` creates one",
            prefix.escape_ascii()
        );
        Error::invalid("prefix", reason)
    }

    /// Fails with [`Error::BusGone`] unless `stored`, the current value, still describes the bus that was opened with this configuration.
    pub fn check_stored(self, stored: Option<&[u8]>) -> Result<()> {
        let gone = |reason: String| Err(Error::BusGone { reason });
        match stored.map(Self::from_bytes).transpose()? {
            None => gone("its configuration was removed, for example by wiping the store".to_owned()),
            Some(stored) if stored.incarnation != self.incarnation => {
                gone(format!("its incarnation was {}, and is {}", self.incarnation.0, stored.incarnation.0))
            }
            Some(stored) if stored != self => gone("it has a different number of partitions".to_owned()),
            Some(_) => Ok(()),
        }
    }

    /// The stored form: format (2 bytes), partitions (4), incarnation (1).
    pub fn to_bytes(self) -> Vec<u8> {
        [&FORMAT.to_be_bytes()[..], &self.partitions.to_be_bytes(), &[self.incarnation.0]].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("config", bytes);
        let found = reader.u16()?;
        if found != FORMAT {
            return Err(Error::OtherFormat { what: "the bus", found, known: FORMAT });
        }
        let config = Self { partitions: reader.u32()?, incarnation: Incarnation(reader.u8()?) };
        if config.partitions == 0 {
            return Err(reader.corrupt("it has no partitions"));
        }
        reader.finish()?;
        Ok(config)
    }
}

impl Keys {
    /// The key of the configuration.
    pub fn config(&self) -> Vec<u8> {
        self.pack(&(family::CONFIG,))
    }

    /// The key that exists while a bus is being imported.
    pub fn import_mark(&self) -> Vec<u8> {
        self.pack(&(family::CONFIG, "import"))
    }

    /// The key of the end of `incarnation`.
    pub fn end_of_incarnation(&self, incarnation: Incarnation) -> Vec<u8> {
        self.pack(&(family::INCARNATION, u16::from(incarnation.0)))
    }
}

/// Which sequences of an incarnation were given out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EndOfIncarnation {
    /// The last sequence that is known to exist.
    pub last: Sequence,
    /// The versions that the store of an earlier incarnation had given out, as intervals; empty if that store kept no such history, and for
    /// the current incarnation, whose store itself knows them. Other versions belong to another store, or to a past that was lost.
    pub openings: Vec<(u64, u64)>,
}

impl EndOfIncarnation {
    /// Whether the store of the incarnation may have given out `version`.
    pub fn may_have_used(&self, version: u64) -> bool {
        let contains = |(first, last): &(u64, u64)| (*first..=*last).contains(&version);
        self.openings.is_empty() || self.openings.iter().any(contains)
    }

    /// The stored form: the last sequence, then the first and the last version of each interval (8 bytes each).
    pub fn to_bytes(&self) -> Vec<u8> {
        let openings = self.openings.iter().flat_map(|(first, last)| [*first, *last]);
        [&self.last.as_bytes()[..], &openings.flat_map(u64::to_be_bytes).collect::<Vec<_>>()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("end of an incarnation", bytes);
        let (last, mut openings) = (reader.sequence()?, Vec::new());
        while !reader.is_empty() {
            openings.push((reader.u64()?, reader.u64()?));
        }
        Ok(Self { last, openings })
    }
}

/// The last sequence of `incarnation`, as the operand of `SET_VERSIONSTAMPED_VALUE`: after all rows of the transaction that writes it.
pub(crate) fn end_operand(incarnation: Incarnation) -> Vec<u8> {
    sequence_operand(incarnation, u16::MAX)
}

/// A position, and when the feed reached it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AgeMark {
    /// How long janitors had worked in total by then, in milliseconds.
    pub worked_ms: u64,
    /// The position that the feed had reached. Everything up to it is at least as old as the mark.
    pub at: Sequence,
}

impl Keys {
    pub fn age_mark(&self, worked_ms: u64) -> Vec<u8> {
        self.pack(&(family::AGE, worked_ms))
    }

    /// All age marks, oldest first.
    pub fn age_marks(&self) -> KeyRange {
        self.range(&(family::AGE,))
    }

    /// Decodes the mark in a stored row.
    pub fn age_mark_of(&self, (key, value): &Row) -> Result<AgeMark> {
        let (number, worked_ms): (u16, u64) = self.unpack("age mark", key)?;
        if number != family::AGE {
            return Err(Error::corrupt("age mark", "its key belongs to another family"));
        }
        Ok(AgeMark { worked_ms, at: Sequence::from_bytes(value)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::Versionstamp;

    #[test]
    fn golden_bytes() {
        let config = Config { partitions: 64, incarnation: Incarnation(3) };
        assert_eq!(config.to_bytes(), [0, 6, 0, 0, 0, 64, 3]);
        assert_eq!(Config::from_bytes(&config.to_bytes()).unwrap(), config);
        let keys = Keys::new(b"p").unwrap();
        assert_eq!(keys.config(), [b'p', 0x14]);
        assert_eq!(keys.end_of_incarnation(Incarnation(3)), [b'p', 0x15, 26, 0x15, 3]);
        let operand = end_operand(Incarnation(3));
        assert_eq!((operand[0], &operand[11..13]), (3, &[0xff; 2][..]));
        let end = EndOfIncarnation { last: Sequence::MAX, openings: vec![(1, 2), (5, 7)] };
        let bytes = [[0xff; 13].as_slice(), &[0, 0, 0, 0, 0, 0, 0, 1], &[0, 0, 0, 0, 0, 0, 0, 2]].concat();
        assert_eq!(end.to_bytes()[..29], bytes);
        assert_eq!(EndOfIncarnation::from_bytes(&end.to_bytes()).unwrap(), end);
        assert_eq!([2, 3, 5].map(|version| end.may_have_used(version)), [true, false, true]);
        assert!(EndOfIncarnation::from_bytes(&bytes[..28]).is_err());
    }

    /// Regression: a bus that was written by another version of this program was reported as corrupt, as if it were damaged.
    #[test]
    fn another_format_is_no_damage() {
        let other = Config::from_bytes(&[0, 4, 0, 0, 0, 64, 0]);
        assert!(matches!(other, Err(Error::OtherFormat { found: 4, known: FORMAT, .. })), "{other:?}");
        // The bytes after the format number belong to that format, and may have any length.
        assert!(matches!(Config::from_bytes(&[1, 0]), Err(Error::OtherFormat { found: 256, .. })));
    }

    #[test]
    fn contradictory_bytes_are_refused() {
        assert!(Config::from_bytes(&[0, 6, 0, 0, 0, 0, 0]).is_err());
        assert!(Config::from_bytes(&[0, 6, 0, 0, 0, 64]).is_err());
        assert!(Config::from_bytes(&[0, 6, 0, 0, 0, 64, 0, 0]).is_err());
    }

    #[test]
    fn golden_bytes_and_order_of_age_marks() {
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
