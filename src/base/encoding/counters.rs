//! [`Counters`] and [`Tally`]: producers add to them, and the notifier subtracts from them.
//!
//! Five lanes of 64 bits, little-endian: created, deleted, updated, `ddoc_updated`, and how many of the `ddoc_updated` events came with the
//! id of the design document. FoundationDB's `ADD` treats the 40 bytes as one number, so a lane must never carry into its neighbour. One
//! `ADD` adds at most 2^32 − 1 to a lane, so it would take over 2^31 of them without a fold to set a lane's highest bit. Subtracting means
//! adding the two's complement of the whole number. No lane is smaller than what is subtracted from it, so no borrow crosses lanes either.

use std::ops::AddAssign;

use byteorder::{ByteOrder, LittleEndian};

use crate::base::error::{Error, Result};

/// The length of the five lanes, in bytes.
pub const COUNTERS_LEN: usize = 40;

/// The number of events of each kind, in the order of the lanes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Counters {
    /// Databases created.
    pub created: u64,
    /// Databases deleted.
    pub deleted: u64,
    /// Updates of a database other than to its design documents.
    pub updated: u64,
    /// Updates of design documents.
    pub ddoc_updated: u64,
}

impl Counters {
    /// No events.
    pub const ZERO: Self = Self { created: 0, deleted: 0, updated: 0, ddoc_updated: 0 };

    /// Returns the lanes in order.
    pub fn lanes(&self) -> [u64; 4] {
        [self.created, self.deleted, self.updated, self.ddoc_updated]
    }

    /// Returns the counters with these lanes.
    pub fn from_lanes([created, deleted, updated, ddoc_updated]: [u64; 4]) -> Self {
        Self { created, deleted, updated, ddoc_updated }
    }

    /// Returns the sum of all lanes.
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

/// The maximum number of events of a kind that one `ADD` may add.
pub const ADDED_MAX: u64 = u32::MAX as u64;

/// The stored counters of a database: the events, and how many changes to design documents came with an id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// The events.
    pub counters: Counters,
    /// How many of the `ddoc_updated` events have a row that names the design document; never more than `ddoc_updated`.
    pub with_id: u64,
}

impl From<Counters> for Tally {
    fn from(counters: Counters) -> Self {
        Self { counters, with_id: 0 }
    }
}

impl Tally {
    /// Whether a design document changed without a row that names it.
    pub fn has_ddocs_without_id(&self) -> bool {
        self.counters.ddoc_updated > self.with_id
    }

    /// Returns the operand of an `ADD` that adds this tally; also the stored form.
    pub fn to_bytes(&self) -> [u8; COUNTERS_LEN] {
        let Counters { created, deleted, updated, ddoc_updated } = self.counters;
        let mut bytes = [0; COUNTERS_LEN];
        LittleEndian::write_u64_into(&[created, deleted, updated, ddoc_updated, self.with_id], &mut bytes);
        bytes
    }

    /// Returns the operand of an `ADD` that subtracts this tally.
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

    /// Decodes `bytes`. Fails if the length is wrong, if the highest bit of a lane is set, which means that the lane is below zero, or if
    /// more changes have an id than there are changes. Correct producers and folds never cause any of these.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() != COUNTERS_LEN {
            return Err(Error::corrupt(
                "counters",
                format!("{} bytes instead of {COUNTERS_LEN}", bytes.len()),
            ));
        }
        let mut lanes = [0; 5];
        LittleEndian::read_u64_into(bytes, &mut lanes);
        if let Some(lane) = lanes.iter().find(|&lane| lane >> 63 != 0) {
            return Err(Error::corrupt("counters", format!("lane {lane:#x} is below zero")));
        }
        let [created, deleted, updated, ddoc_updated, with_id] = lanes;
        if with_id > ddoc_updated {
            let reason = format!("{with_id} of {ddoc_updated} changes of design documents have an id");
            return Err(Error::corrupt("counters", reason));
        }
        Ok(Self { counters: Counters { created, deleted, updated, ddoc_updated }, with_id })
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.counters += other.counters;
        self.with_id = self.with_id.saturating_add(other.with_id);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tally() -> impl Strategy<Value = Tally> {
        (any::<[u32; 4]>(), any::<u32>()).prop_map(|(lanes, with_id)| {
            let counters = Counters::from_lanes(lanes.map(u64::from));
            Tally { counters, with_id: counters.ddoc_updated.min(with_id.into()) }
        })
    }

    /// Does what FoundationDB's `ADD` does to operands of equal length, according to its documentation.
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
        bytes[32] = 3;
        assert_eq!(Tally { counters, with_id: 3 }.to_bytes(), bytes);
        let one = Tally::from(Counters { created: 1, ..Counters::ZERO });
        assert_eq!(one.to_negative_bytes(), [0xff; COUNTERS_LEN]);
    }

    /// Regression: the count of changes with an id had only 16 bits of the last lane. The 65,536th without a fold was lost, and a
    /// subscriber to one design document got changes to all of them.
    #[test]
    fn any_number_of_changes_may_have_an_id() {
        let one = Tally { counters: Counters { ddoc_updated: 1, ..Counters::ZERO }, with_id: 1 };
        let many = Tally { counters: Counters { ddoc_updated: 0xffff, ..Counters::ZERO }, with_id: 0xffff };
        let stored = Tally::from_bytes(&add(many.to_bytes(), one.to_bytes())).unwrap();
        assert_eq!((stored.counters.ddoc_updated, stored.with_id), (0x1_0000, 0x1_0000));
        assert!(!stored.has_ddocs_without_id());
    }

    #[test]
    fn contradictory_bytes_are_corrupt() {
        assert!(Tally::from_bytes(&[0; COUNTERS_LEN - 1]).is_err());
        assert!(Tally::from_bytes(&[0; COUNTERS_LEN + 1]).is_err());
        for lane in 0..5 {
            let mut minus_one = [0; COUNTERS_LEN];
            minus_one[lane * 8..lane * 8 + 8].fill(0xff);
            assert!(Tally::from_bytes(&minus_one).is_err(), "lane {lane}");
        }
        let counters = Counters { ddoc_updated: 1, ..Counters::ZERO };
        assert!(Tally::from_bytes(&Tally { counters, with_id: 2 }.to_bytes()).is_err());
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
