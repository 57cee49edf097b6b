//! Family 15: the pulse of a feed. It shows waiting readers that rows were appended, and to which shards.
//!
//! The pulse is one key, whatever the number of shards, so that one read and one watch suffice; and one `ADD` moves it, whatever the number
//! of shards that a transaction appends to. Its value has 16 lanes of 32 bits, over which the shards are spread. A lane only counts, and is
//! only compared with its earlier value, so it may carry into its neighbour, which then seems to have moved, too.

use bytes::Bytes;

use super::{FeedId, Keys, ShardId, family};

const LANES: u64 = 16;

const LANE_LEN: usize = 4;

/// The length of a pulse, in bytes.
const LEN: usize = LANES as usize * LANE_LEN;

/// Some lanes of a pulse, and thus the shards that are on them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lanes(u16);

impl Lanes {
    /// All lanes.
    pub const ALL: Self = Self(u16::MAX);

    /// The number of lanes.
    pub const COUNT: usize = LANES as usize;

    /// Returns the number of the lane of `shard`.
    pub fn of(shard: ShardId) -> usize {
        (shard.0 % LANES) as usize
    }

    /// Whether there are no lanes.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Adds the lane of `shard`.
    pub fn insert(&mut self, shard: ShardId) {
        self.0 |= 1 << Self::of(shard);
    }

    /// Whether the lane of `shard` is included.
    pub fn has(self, shard: ShardId) -> bool {
        self.0 & 1 << Self::of(shard) != 0
    }

    /// Returns the operand of `ADD` that moves these lanes.
    pub fn to_operand(self) -> [u8; LEN] {
        let mut operand = [0; LEN];
        for (number, lane) in operand.chunks_exact_mut(LANE_LEN).enumerate() {
            lane[0] = (self.0 >> number & 1) as u8;
        }
        operand
    }
}

impl FromIterator<ShardId> for Lanes {
    fn from_iter<I: IntoIterator<Item = ShardId>>(shards: I) -> Self {
        let mut lanes = Self::default();
        shards.into_iter().for_each(|shard| lanes.insert(shard));
        lanes
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PulseValue(Option<Bytes>);

impl PulseValue {
    /// Creates the pulse that is stored as `value`. Any bytes are valid, because readers only compare them with what they read before.
    pub fn new(value: Option<Bytes>) -> Self {
        Self(value)
    }

    /// Returns the lanes that have moved since the pulse was `before`.
    pub fn moved_since(&self, before: &Self) -> Lanes {
        match (&before.0, &self.0) {
            (before, now) if before == now => Lanes::default(),
            (Some(before), Some(now)) if before.len() == LEN && now.len() == LEN => {
                let lanes = before.chunks_exact(LANE_LEN).zip(now.chunks_exact(LANE_LEN)).enumerate();
                Lanes(
                    lanes
                        .fold(0, |moved, (number, (before, now))| moved | u16::from(before != now) << number),
                )
            }
            _ => Lanes::ALL,
        }
    }

    /// Returns the pulse after one append to each of `appended`. A value that cannot come from appends stays unchanged.
    pub fn after(&self, appended: &[Lanes]) -> Self {
        let Some(bytes) = self.0.as_deref().filter(|bytes| bytes.len() == LEN) else { return self.clone() };
        // The store adds all bytes as one number, lowest byte first.
        let mut sum = bytes.to_vec();
        for lanes in appended {
            let mut carry = 0;
            for (byte, more) in sum.iter_mut().zip(lanes.to_operand()) {
                let added = u16::from(*byte) + u16::from(more) + carry;
                (*byte, carry) = (added as u8, added >> 8);
            }
        }
        Self::new(Some(sum.into()))
    }
}

impl Keys {
    /// The key of the pulse of `feed`.
    pub fn pulse(&self, feed: &FeedId) -> Vec<u8> {
        self.pack(&(family::PULSE, feed.bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(shards: &[u64]) -> Lanes {
        shards.iter().copied().map(ShardId).collect()
    }

    #[test]
    fn golden_bytes() {
        let keys = Keys::new(b"p").unwrap();
        assert_eq!(keys.pulse(&FeedId::notifications()), [b'p', 0x15, 15, 0x01, b'n', 0]);
        let mut operand = [0; 64];
        (operand[4], operand[60]) = (1, 1);
        assert_eq!(lanes(&[15, 17]).to_operand(), operand);
    }

    #[test]
    fn shards_are_spread_over_the_lanes() {
        let some = lanes(&[3, 20]);
        let has: Vec<_> = (0..20).filter(|shard| some.has(ShardId(*shard))).collect();
        assert_eq!(has, [3, 4, 19]);
        assert!(!some.is_empty() && Lanes::default().is_empty());
        assert!((0..40).all(|shard| Lanes::ALL.has(ShardId(shard))));
    }

    #[test]
    fn lanes_that_have_moved_are_found() {
        let value = |bytes: &[u8]| PulseValue::new(Some(Bytes::copy_from_slice(bytes)));
        let (none, one) = (PulseValue::new(None), value(&lanes(&[7]).to_operand()));
        let both = value(&lanes(&[0, 7]).to_operand());
        assert!(one.moved_since(&one).is_empty() && none.moved_since(&none).is_empty());
        assert_eq!(both.moved_since(&one), lanes(&[0]));
        // A value that cannot come from appends is compared as a whole.
        for (before, now) in
            [(&none, &one), (&one, &none), (&value(b"odd"), &one), (&value(b"a"), &value(b"b"))]
        {
            assert_eq!(now.moved_since(before), Lanes::ALL);
        }
        assert!(value(b"odd").moved_since(&value(b"odd")).is_empty());
    }

    #[test]
    fn appends_move_a_pulse_as_the_store_does() {
        let value = |bytes: &[u8]| PulseValue::new(Some(Bytes::copy_from_slice(bytes)));
        let mut full = lanes(&[1]).to_operand();
        full[..LANE_LEN].fill(0xff);
        let carried = value(&full).after(&[lanes(&[0]), lanes(&[3])]);
        assert_eq!(carried, value(&lanes(&[1, 3]).to_operand()).after(&[lanes(&[1])]));
        assert_eq!(value(b"odd").after(&[lanes(&[0])]), value(b"odd"));
        assert_eq!(PulseValue::new(None).after(&[lanes(&[0])]), PulseValue::new(None));
    }
}
