//! [`Sequence`]: the position of a row in a feed.
//!
//! 13 bytes: incarnation (1), versionstamp of the transaction that wrote the row (10), order within that transaction (2), all big-endian.
//! The bytes and the text sort in the order of commits, even after a move to another cluster, where versionstamps start over: a move raises
//! the incarnation by one (CouchDB RFC 003).
//!
//! Nothing in this file can fail, so the error type can use it: errors contain positions. `encoding` reads sequences from bytes and text.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The length of a transaction's versionstamp in bytes: commit version (8) and order of the transaction in its batch (2).
pub(crate) const STAMP_LEN: usize = 10;

pub(crate) const SEQUENCE_LEN: usize = 13;

/// How many times the bus has moved to another cluster; the first byte of each sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub u8);

/// When a transaction committed: 10 bytes, big-endian, unique and increasing within one cluster.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Versionstamp(pub [u8; STAMP_LEN]);

impl Versionstamp {
    /// Returns the stamp of transaction number `order` in the batch committed at `version`.
    pub fn new(version: u64, order: u16) -> Self {
        let mut bytes = [0; STAMP_LEN];
        bytes[..8].copy_from_slice(&version.to_be_bytes());
        bytes[8..].copy_from_slice(&order.to_be_bytes());
        Self(bytes)
    }

    /// Returns the commit version.
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
/// use notibus::{event::{Incarnation, Versionstamp}, Sequence};
///
/// let sequence = Sequence::new(Incarnation(1), Versionstamp::new(7, 2), 3);
/// assert_eq!(sequence.to_string(), "01000000000000000700020003");
/// assert_eq!("01000000000000000700020003".parse::<Sequence>()?, sequence);
/// assert!("0100".parse::<Sequence>().is_err());
/// # Ok::<(), notibus::Error>(())
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence([u8; SEQUENCE_LEN]);

impl Sequence {
    /// The position before every row: the beginning of a feed. What a reader knows is in its [`Cursor`](crate::Cursor).
    pub const MIN: Self = Self([0; SEQUENCE_LEN]);

    /// The position after every row.
    pub const MAX: Self = Self([0xff; SEQUENCE_LEN]);

    /// Returns the position of row number `order` of the transaction with `stamp`.
    pub fn new(incarnation: Incarnation, stamp: Versionstamp, order: u16) -> Self {
        let mut bytes = [0; SEQUENCE_LEN];
        bytes[0] = incarnation.0;
        bytes[1..11].copy_from_slice(&stamp.0);
        bytes[11..].copy_from_slice(&order.to_be_bytes());
        Self(bytes)
    }

    /// Returns the last position that a reader at read version `version` can see.
    pub fn last_at(incarnation: Incarnation, version: u64) -> Self {
        Self::new(incarnation, Versionstamp::new(version, u16::MAX), u16::MAX)
    }

    pub(crate) const fn from_array(bytes: [u8; SEQUENCE_LEN]) -> Self {
        Self(bytes)
    }

    /// Returns the 13 bytes, which sort as sequences do.
    pub fn as_bytes(&self) -> &[u8; SEQUENCE_LEN] {
        &self.0
    }

    /// Returns the position just before this one. The first position is returned unchanged.
    pub(crate) fn before(self) -> Self {
        let mut wide = [0; 16];
        wide[3..].copy_from_slice(&self.0);
        let before = u128::from_be_bytes(wide).saturating_sub(1).to_be_bytes();
        Self(before[3..].try_into().expect("the slice has the length of a sequence"))
    }

    /// Returns how many times the bus had moved when the row was written.
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.0[0])
    }

    /// Returns the stamp of the transaction that wrote the row.
    pub fn versionstamp(&self) -> Versionstamp {
        Versionstamp(self.0[1..11].try_into().expect("the slice has the length of a stamp"))
    }

    /// Returns the index of the row in its transaction.
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
