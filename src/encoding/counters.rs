//! [`Counters`], and [`Tally`]: what producers bump and the notifier drains.
//!
//! Four lanes of 64 bits, little-endian, one per kind of event: created, deleted, updated, `ddoc_updated`. FoundationDB's
//! `ADD` treats the 32 bytes as one number, so a lane must never carry into its neighbour: a count is made for the low 32
//! bits of its lane, and what is above is padding, which no realistic backlog fills. A backlog that runs into the padding is
//! still counted, up to 2^63 − 1 of a kind; of changes of design documents, up to 2^47 − 1. Beyond that it cannot be told
//! from a lane below zero. Subtracting is adding the two's complement of the whole number; as no lane is ever below what
//! is subtracted from it, no borrow crosses a lane either.
//!
//! # With and without an id
//!
//! The last lane has less padding: its highest 16 bits count those of its events whose design document is named by a row of
//! its own. So one `ADD` is held to 2^16 − 1 events in this lane: it takes more than 2^31 of them, none of which is folded, to
//! reach the 2^47 that its padding ends at. Fewer than there are events say that one came without an id, and may be of any design document. This costs a
//! producer nothing, neither with an id nor without. The 16 bits are the highest of the whole number, so what overflows them
//! is lost and disturbs nothing: then some are taken for nameless that are not, and more is told than need be.

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
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.created = self.created.saturating_add(other.created);
        self.deleted = self.deleted.saturating_add(other.deleted);
        self.updated = self.updated.saturating_add(other.updated);
        self.ddoc_updated = self.ddoc_updated.saturating_add(other.ddoc_updated);
    }
}

/// The most events of each kind that one `ADD` may add, in the order of the lanes.
pub const ADDED_MAX: [u64; 4] = [u32::MAX as u64, u32::MAX as u64, u32::MAX as u64, u16::MAX as u64];

/// The lowest of the bits that count the events of the last lane with an id.
const NAMED_SHIFT: u32 = 48;

/// What stands in the counters of a database: the events, and how many of those of design documents have an id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// The events.
    pub counters: Counters,
    /// Those of `ddoc_updated` whose design document is named by a row of its own.
    pub named: u64,
}

impl From<Counters> for Tally {
    fn from(counters: Counters) -> Self {
        Self { counters, named: 0 }
    }
}

impl Tally {
    /// Whether a design document was changed that no row names. Perhaps also if none was, but never the other way round.
    pub fn has_nameless(&self) -> bool {
        self.counters.ddoc_updated > self.named
    }

    /// The operand of `ADD` that adds this; also how it is stored.
    pub fn to_bytes(&self) -> [u8; COUNTERS_LEN] {
        let mut lanes = self.counters.lanes();
        lanes[3] = lanes[3].wrapping_add(self.named << NAMED_SHIFT);
        let mut bytes = [0; COUNTERS_LEN];
        LittleEndian::write_u64_into(&lanes, &mut bytes);
        bytes
    }

    /// The operand of `ADD` that subtracts this.
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

    /// What is stored in `bytes`. Fails on another length, and on a count whose highest bit is set: that is one below zero,
    /// which correct drains never produce.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != COUNTERS_LEN {
            return Err(Error::corrupt(
                "counters",
                format!("{} bytes instead of {COUNTERS_LEN}", bytes.len()),
            ));
        }
        let mut lanes = [0; 4];
        LittleEndian::read_u64_into(bytes, &mut lanes);
        let named = lanes[3] >> NAMED_SHIFT;
        lanes[3] -= named << NAMED_SHIFT;
        let is_below_zero = |(lane, bits): (&u64, u32)| lane >> (bits - 1) != 0;
        match lanes.iter().zip([64, 64, 64, NAMED_SHIFT]).find(|&lane| is_below_zero(lane)) {
            Some((lane, _)) => Err(Error::corrupt("counters", format!("lane {lane:#x} is below zero"))),
            None => Ok(Self { counters: Counters::from_lanes(lanes), named }),
        }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.counters += other.counters;
        self.named = self.named.saturating_add(other.named);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tally() -> impl Strategy<Value = Tally> {
        (any::<[u32; 4]>(), any::<u16>()).prop_map(|(lanes, named)| Tally {
            counters: Counters::from_lanes(lanes.map(u64::from)),
            named: named.into(),
        })
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
        assert_eq!(Tally::from(counters).to_bytes(), bytes);
        bytes[30..].copy_from_slice(&[3, 1]);
        assert_eq!(Tally { counters, named: 0x0103 }.to_bytes(), bytes);
        let one = Tally::from(Counters { created: 1, ..Counters::ZERO });
        assert_eq!(one.to_negative_bytes(), [0xff; COUNTERS_LEN]);
    }

    /// More with an id than the 16 bits can count: all events are counted all the same, and more is told than need be.
    #[test]
    fn too_many_with_an_id_are_taken_for_nameless() {
        let one = Tally { counters: Counters { ddoc_updated: 1, ..Counters::ZERO }, named: 1 };
        let many = Tally { counters: Counters { ddoc_updated: 0xffff, ..Counters::ZERO }, named: 0xffff };
        assert!(!one.has_nameless() && !many.has_nameless());
        let stored = Tally::from_bytes(&add(many.to_bytes(), one.to_bytes())).unwrap();
        assert_eq!((stored.counters.total(), stored.named), (0x1_0000, 0));
        assert!(stored.has_nameless());
        assert_eq!(add(stored.to_bytes(), stored.to_negative_bytes()), [0; COUNTERS_LEN]);
    }

    #[test]
    fn a_short_value_and_a_lane_below_zero_are_corrupt() {
        assert!(Tally::from_bytes(&[0; 31]).is_err());
        for lane in 0..4 {
            let mut minus_one = [0; COUNTERS_LEN];
            minus_one[lane * 8..lane * 8 + 8].fill(0xff);
            assert!(Tally::from_bytes(&minus_one).is_err(), "lane {lane}");
        }
    }

    proptest! {
        #[test]
        fn round_trips(tally in tally()) {
            prop_assert_eq!(Tally::from_bytes(&tally.to_bytes()).unwrap(), tally);
        }

        #[test]
        fn draining_leaves_exactly_what_came_meanwhile(observed in tally(), more in tally()) {
            let stored = add(observed.to_bytes(), more.to_bytes());
            prop_assert_eq!(Tally::from_bytes(&add(stored, observed.to_negative_bytes())).unwrap(), more);
        }
    }
}
