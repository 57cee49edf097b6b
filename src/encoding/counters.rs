//! [`Counters`]: what producers bump and the notifier drains.
//!
//! Four lanes of 64 bits, little-endian, one per kind of event: created, deleted, updated, `ddoc_updated`. FoundationDB's
//! `ADD` treats the 32 bytes as one number, so a lane must never carry into its neighbour: a count is made for the low 32
//! bits of its lane, and the high 32 are padding, which no realistic backlog fills. A backlog that runs into the padding is
//! still counted. Subtracting is adding the two's complement of the whole number; as no lane is ever below what is
//! subtracted from it, no borrow crosses a lane either.

use std::ops::AddAssign;

use byteorder::{ByteOrder, LittleEndian};

use crate::error::{Error, Result};

/// Bytes of the four lanes.
pub const COUNTERS_LEN: usize = 32;

/// How many events of each kind, in the order of the lanes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Counters {
    /// Databases created.
    pub created: u64,
    /// Databases deleted.
    pub deleted: u64,
    /// Updates of a database other than of its design documents.
    pub updated: u64,
    /// Updates of design documents.
    pub ddoc_updated: u64,
}

impl Counters {
    /// No event.
    pub const ZERO: Self = Self { created: 0, deleted: 0, updated: 0, ddoc_updated: 0 };

    /// The lanes in their order.
    pub fn lanes(&self) -> [u64; 4] {
        [self.created, self.deleted, self.updated, self.ddoc_updated]
    }

    /// The counters with these lanes.
    pub fn from_lanes([created, deleted, updated, ddoc_updated]: [u64; 4]) -> Self {
        Self { created, deleted, updated, ddoc_updated }
    }

    /// The sum of all lanes.
    pub fn total(&self) -> u64 {
        self.lanes().iter().sum()
    }

    /// The operand of `ADD` that adds these counts; also how they are stored.
    pub fn to_bytes(&self) -> [u8; COUNTERS_LEN] {
        let mut bytes = [0; COUNTERS_LEN];
        LittleEndian::write_u64_into(&self.lanes(), &mut bytes);
        bytes
    }

    /// The operand of `ADD` that subtracts these counts.
    pub fn to_negative_bytes(&self) -> [u8; COUNTERS_LEN] {
        let mut bytes = self.to_bytes();
        let mut carry = true;
        for byte in &mut bytes {
            let (negated, overflow) = (!*byte).overflowing_add(u8::from(carry));
            *byte = negated;
            carry = overflow;
        }
        bytes
    }

    /// The counts stored in `bytes`. Fails on another length, and on a lane whose highest bit is set: that is a count below
    /// zero, which correct drains never produce.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != COUNTERS_LEN {
            return Err(Error::corrupt(
                "counters",
                format!("{} bytes instead of {COUNTERS_LEN}", bytes.len()),
            ));
        }
        let mut lanes = [0; 4];
        LittleEndian::read_u64_into(bytes, &mut lanes);
        match lanes.iter().find(|&&lane| lane > i64::MAX as u64) {
            Some(lane) => Err(Error::corrupt("counters", format!("lane {lane:#x} is below zero"))),
            None => Ok(Self::from_lanes(lanes)),
        }
    }
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.created = self.created.saturating_add(other.created);
        self.deleted = self.deleted.saturating_add(other.deleted);
        self.updated = self.updated.saturating_add(other.updated);
        self.ddoc_updated = self.ddoc_updated.saturating_add(other.ddoc_updated);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counters() -> impl Strategy<Value = Counters> {
        any::<[u32; 4]>().prop_map(|lanes| Counters::from_lanes(lanes.map(u64::from)))
    }

    /// FoundationDB's `ADD` on operands of equal length, by the book.
    fn add(a: [u8; COUNTERS_LEN], b: [u8; COUNTERS_LEN]) -> [u8; COUNTERS_LEN] {
        let mut carry = 0;
        std::array::from_fn(|i| {
            let sum = u16::from(a[i]) + u16::from(b[i]) + carry;
            carry = sum >> 8;
            sum as u8
        })
    }

    #[test]
    fn golden_bytes() {
        let counters = Counters { created: 1, deleted: 2, updated: 0x0102_0304, ddoc_updated: 255 };
        let mut bytes = [0; COUNTERS_LEN];
        bytes[0] = 1;
        bytes[8] = 2;
        bytes[16..20].copy_from_slice(&[4, 3, 2, 1]);
        bytes[24] = 255;
        assert_eq!(counters.to_bytes(), bytes);
        assert_eq!(Counters { created: 1, ..Counters::ZERO }.to_negative_bytes(), [0xff; COUNTERS_LEN]);
    }

    #[test]
    fn a_short_value_and_a_lane_below_zero_are_corrupt() {
        assert!(Counters::from_bytes(&[0; 31]).is_err());
        assert!(Counters::from_bytes(&[0xff; COUNTERS_LEN]).is_err());
    }

    proptest! {
        #[test]
        fn round_trips(counters in counters()) {
            prop_assert_eq!(Counters::from_bytes(&counters.to_bytes()).unwrap(), counters);
        }

        #[test]
        fn draining_leaves_exactly_what_came_meanwhile(observed in any::<[u32; 4]>(), more in any::<[u32; 4]>()) {
            let observed = Counters::from_lanes(observed.map(|lane| u64::from(lane / 2)));
            let more = Counters::from_lanes(more.map(|lane| u64::from(lane / 2)));
            let stored = add(observed.to_bytes(), more.to_bytes());
            prop_assert_eq!(Counters::from_bytes(&add(stored, observed.to_negative_bytes())).unwrap(), more);
        }
    }
}
