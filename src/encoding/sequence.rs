//! [`Sequence`]: the position of a row in a feed.
//!
//! 13 bytes: incarnation (1), versionstamp of the transaction that wrote the row (10), order within that transaction
//! (2), all big-endian. It sorts as bytes, as text and as time, also after a move to another cluster, where versionstamps
//! start over: the incarnation is raised by one then (CouchDB RFC 003).

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, Result};

/// Bytes of a transaction's versionstamp: commit version (8) and order of the transaction in its batch (2).
pub(crate) const STAMP_LEN: usize = 10;

/// Bytes of a sequence.
const LEN: usize = 13;

/// How often the bus has moved to another cluster; the first byte of each sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u8);

/// When a transaction committed: 10 bytes, big-endian, unique and growing within one cluster.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Versionstamp(pub [u8; STAMP_LEN]);

impl Versionstamp {
    /// The stamp of the transaction at place `order` of the batch committed at `version`.
    pub fn new(version: u64, order: u16) -> Self {
        let mut bytes = [0; STAMP_LEN];
        bytes[..8].copy_from_slice(&version.to_be_bytes());
        bytes[8..].copy_from_slice(&order.to_be_bytes());
        Self(bytes)
    }

    /// The commit version within.
    pub fn version(&self) -> u64 {
        u64::from_be_bytes(self.0[..8].try_into().expect("a stamp is longer than 8 bytes"))
    }
}

impl fmt::Debug for Versionstamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The position of a row in a feed. As text it is 26 lower-case hexadecimal digits.
///
/// ```
/// use notibus::{Incarnation, Sequence, Versionstamp};
///
/// let sequence = Sequence::new(Incarnation(1), Versionstamp::new(7, 2), 3);
/// assert_eq!(sequence.to_string(), "01000000000000000700020003");
/// assert_eq!("01000000000000000700020003".parse::<Sequence>()?, sequence);
/// assert!("0100".parse::<Sequence>().is_err());
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence([u8; LEN]);

impl Sequence {
    /// Before every row. A reader at zero knows nothing yet.
    pub const ZERO: Self = Self([0; LEN]);

    /// After every row.
    pub const MAX: Self = Self([0xff; LEN]);

    /// The position of row number `order` of the transaction with `stamp`.
    pub fn new(incarnation: Incarnation, stamp: Versionstamp, order: u16) -> Self {
        let mut bytes = [0; LEN];
        bytes[0] = incarnation.0;
        bytes[1..11].copy_from_slice(&stamp.0);
        bytes[11..].copy_from_slice(&order.to_be_bytes());
        Self(bytes)
    }

    /// The last position that a reader at read version `version` can have seen.
    pub fn last_at(incarnation: Incarnation, version: u64) -> Self {
        Self::new(incarnation, Versionstamp::new(version, u16::MAX), u16::MAX)
    }

    /// The sequence in its 13 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bytes = bytes
            .try_into()
            .map_err(|_| Error::corrupt("sequence", format!("{} bytes instead of {LEN}", bytes.len())))?;
        Ok(Self(bytes))
    }

    /// Its 13 bytes, which sort as the sequence does.
    pub fn as_bytes(&self) -> &[u8; LEN] {
        &self.0
    }

    /// How often the bus had moved when the row was written.
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.0[0])
    }

    /// The stamp of the transaction that wrote the row.
    pub fn versionstamp(&self) -> Versionstamp {
        Versionstamp(self.0[1..11].try_into().expect("the slice has the length of a stamp"))
    }

    /// The place of the row in that transaction.
    pub fn order(&self) -> u16 {
        u16::from_be_bytes([self.0[11], self.0[12]])
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Sequence {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fail = |reason: &str| Error::invalid("sequence", format!("{text:?} {reason}"));
        if text.len() != 2 * LEN {
            return Err(fail("is not 26 hexadecimal digits"));
        }
        let mut bytes = [0; LEN];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
            match (digit(pair[0]), digit(pair[1])) {
                (Some(high), Some(low)) => *byte = high << 4 | low,
                _ => return Err(fail("has a character that is no hexadecimal digit")),
            }
        }
        Ok(Self(bytes))
    }
}

impl Serialize for Sequence {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sequence {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sequences() -> impl Strategy<Value = Sequence> {
        (any::<u8>(), any::<u64>(), any::<u16>(), any::<u16>())
            .prop_map(|(i, v, b, o)| Sequence::new(Incarnation(i), Versionstamp::new(v, b), o))
    }

    #[test]
    fn golden_bytes() {
        let sequence =
            Sequence::new(Incarnation(2), Versionstamp::new(0x0102_0304_0506_0708, 0x090a), 0x0b0c);
        assert_eq!(sequence.as_bytes(), &[2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(sequence.to_string(), "020102030405060708090a0b0c");
    }

    #[test]
    fn bad_text_is_refused_with_the_reason() {
        for text in [
            "",
            "0",
            "now",
            "zz0102030405060708090a0b0c",
            "020102030405060708090a0b0c0d",
            "0201020304050607é090a0b0",
        ] {
            assert!(
                matches!(text.parse::<Sequence>(), Err(Error::Invalid { what: "sequence", .. })),
                "{text}"
            );
        }
        assert!(Sequence::from_bytes(&[0; 12]).is_err());
    }

    proptest! {
        #[test]
        fn round_trips(sequence in sequences()) {
            prop_assert_eq!(Sequence::from_bytes(sequence.as_bytes()).unwrap(), sequence);
            prop_assert_eq!(sequence.to_string().parse::<Sequence>().unwrap(), sequence);
            prop_assert_eq!(
                Sequence::new(sequence.incarnation(), sequence.versionstamp(), sequence.order()),
                sequence
            );
            let json = serde_json::to_string(&sequence).unwrap();
            prop_assert_eq!(serde_json::from_str::<Sequence>(&json).unwrap(), sequence);
        }

        #[test]
        fn bytes_text_and_time_sort_alike(a in sequences(), b in sequences()) {
            let parts = |s: Sequence| (s.incarnation(), s.versionstamp().version(), s.versionstamp(), s.order());
            prop_assert_eq!(a.cmp(&b), parts(a).cmp(&parts(b)));
            prop_assert_eq!(a.cmp(&b), a.as_bytes().cmp(b.as_bytes()));
            prop_assert_eq!(a.cmp(&b), a.to_string().cmp(&b.to_string()));
        }
    }
}
