//! [`Additions`]: what a transaction adds to counters, merged by key.

use bytes::Bytes;

use super::{
    AtomicOp,
    mutation::{Mutation, write_len},
};
use crate::base::encoding::{COUNTERS_LEN, Tally};

/// Keys and the counters to add to each.
#[derive(Default)]
pub(super) struct Additions {
    /// In no order; a key may be there several times.
    all: Vec<(Vec<u8>, Tally)>,
    /// How many keys were there when they were last merged.
    merged: usize,
}

/// Fewer additions than this are merged at the commit only.
const MERGED_MIN: usize = 64;

impl Additions {
    pub fn add(&mut self, key: Vec<u8>, tally: &Tally) {
        if let Some((last, sum)) = self.all.last_mut()
            && *last == key
        {
            *sum += *tally;
            return;
        }
        if self.all.len() >= MERGED_MIN.max(2 * self.merged) {
            self.merge();
        }
        self.all.push((key, *tally));
    }

    /// Leaves each key once, in order.
    fn merge(&mut self) {
        self.all.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        self.all.dedup_by(|(key, tally), (kept, sum)| {
            let is_same = key == kept;
            if is_same {
                *sum += *tally;
            }
            is_same
        });
        self.merged = self.all.len();
    }

    /// About the bytes that they add to the size of their transaction.
    pub fn len(&self) -> usize {
        self.all.iter().map(|(key, _)| write_len(key.len(), COUNTERS_LEN)).sum()
    }

    /// One `ADD` for each key, in their order.
    pub fn into_mutations(mut self) -> impl ExactSizeIterator<Item = Mutation> {
        self.merge();
        self.all.into_iter().map(|(mut key, tally)| {
            let key_len = key.len();
            // Key and operand are one allocation.
            key.extend_from_slice(&tally.to_bytes());
            let mut key = Bytes::from(key);
            let operand = key.split_off(key_len);
            Mutation::Atomic(AtomicOp::Add, key, operand)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::Counters;

    #[test]
    fn each_key_gets_one_add_however_often_and_in_which_order_it_is_added_to() {
        let one = Tally::from(Counters { updated: 1, ..Counters::ZERO });
        let mut additions = Additions::default();
        for n in 0..10_000_u32 {
            additions.add((n * 7 % 100).to_be_bytes().to_vec(), &one);
            assert!(additions.all.len() <= 200, "what waits is bounded by the keys");
        }
        let hundred = Tally::from(Counters { updated: 100, ..Counters::ZERO }).to_bytes();
        let expected = (0..100_u32).map(|n| {
            let (key, operand) = (Bytes::copy_from_slice(&n.to_be_bytes()), Bytes::copy_from_slice(&hundred));
            Mutation::Atomic(AtomicOp::Add, key, operand)
        });
        assert!(additions.into_mutations().eq(expected));
    }
}
