//! [`PendingEvents`]: the events that a transaction records, kept until its commit.

use std::collections::{BTreeMap, btree_map::Entry};

use bytes::Bytes;

use crate::{
    base::encoding::{COUNTERS_LEN, Tally},
    store::{AtomicOp, Extension, Mutation, Transaction, write_len},
};

/// The events that a transaction has recorded so far.
#[derive(Default)]
pub(super) struct PendingEvents {
    additions: Additions,
    /// Keys whose values get the versionstamp, each with its operand.
    stamps: BTreeMap<Bytes, Bytes>,
    /// The approximate number of bytes that `stamps` add to the size of the transaction.
    stamps_len: usize,
}

impl PendingEvents {
    /// Adds `tally` to the counters at `key` with the commit of `tx`. However many times this is called for one key, the commit has one
    /// `ADD` for it. Reads of `tx` do not see the addition.
    pub fn add(tx: &Transaction, key: Vec<u8>, tally: &Tally) {
        tx.extension(|pending: &mut Self| pending.additions.add(key, tally));
    }

    /// Sets the value at `key` with the commit of `tx` to `operand`, in which the versionstamp replaces 10 bytes. However many times this
    /// is called for one key, the commit sets it once. Reads of `tx` do not see the value.
    pub fn stamp(tx: &Transaction, key: Bytes, operand: Bytes) {
        tx.extension(|pending: &mut Self| {
            let len = write_len(key.len(), operand.len());
            if let Entry::Vacant(entry) = pending.stamps.entry(key) {
                entry.insert(operand);
                pending.stamps_len += len;
            }
        });
    }
}

impl Extension for PendingEvents {
    fn size(&self) -> usize {
        self.additions.len() + self.stamps_len
    }

    fn into_writes(self, write: &mut dyn FnMut(Mutation)) {
        self.additions.into_mutations().for_each(&mut *write);
        for (key, operand) in self.stamps {
            write(Mutation::Atomic(AtomicOp::SetVersionstampedValue, key, operand));
        }
    }
}

/// Keys and the counters to add to each.
#[derive(Default)]
pub(super) struct Additions {
    /// In no particular order; a key may occur several times.
    all: Vec<Addition>,
    /// The keys, concatenated. At the commit they and their operands become one allocation.
    keys: Vec<u8>,
    /// How many additions were left after the last merge.
    merged: usize,
}

/// The counters to add to a key.
#[derive(Clone, Copy)]
struct Addition {
    /// Where the key is in `keys`: from `begin` to before `end`.
    begin: usize,
    end: usize,
    tally: Tally,
}

/// Below this number, additions are merged only at the commit.
const MERGED_MIN: usize = 64;

impl Additions {
    pub fn add(&mut self, key: Vec<u8>, tally: &Tally) {
        if let Some(last) = self.all.last_mut()
            && self.keys[last.begin..last.end] == key
        {
            last.tally += *tally;
            return;
        }
        if self.all.len() >= MERGED_MIN.max(2 * self.merged) {
            self.merge();
            let mut keys = Vec::with_capacity(self.keys.len());
            for addition in &mut self.all {
                let begin = keys.len();
                keys.extend_from_slice(&self.keys[addition.begin..addition.end]);
                (addition.begin, addition.end) = (begin, keys.len());
            }
            self.keys = keys;
            self.merged = self.all.len();
        }
        let begin = self.keys.len();
        if begin == 0 {
            self.keys = key;
        } else {
            self.keys.extend_from_slice(&key);
        }
        self.all.push(Addition { begin, end: self.keys.len(), tally: *tally });
    }

    /// Merges the additions, so that each key occurs once, in order.
    fn merge(&mut self) {
        let key = |addition: &Addition| &self.keys[addition.begin..addition.end];
        self.all.sort_unstable_by(|a, b| key(a).cmp(key(b)));
        self.all.dedup_by(|next, sum| {
            let is_same = key(next) == key(sum);
            if is_same {
                sum.tally += next.tally;
            }
            is_same
        });
    }

    /// Returns the approximate number of bytes that the additions add to the size of their transaction.
    pub fn len(&self) -> usize {
        self.all.iter().map(|addition| write_len(addition.end - addition.begin, COUNTERS_LEN)).sum()
    }

    /// Returns one `ADD` for each key, in the order of the keys.
    pub fn into_mutations(mut self) -> impl ExactSizeIterator<Item = Mutation> {
        self.merge();
        let Self { all, mut keys, .. } = self;
        let operands = keys.len();
        keys.reserve_exact(all.len() * COUNTERS_LEN);
        for addition in &all {
            keys.extend_from_slice(&addition.tally.to_bytes());
        }
        let (bytes, mut operand) = (Bytes::from(keys), operands);
        all.into_iter().map(move |Addition { begin, end, .. }| {
            let at = operand;
            operand += COUNTERS_LEN;
            Mutation::Atomic(AtomicOp::Add, bytes.slice(begin..end), bytes.slice(at..operand))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::encoding::Counters, store::Store};

    #[test]
    fn each_key_gets_one_add_however_often_and_in_which_order_it_is_added_to() {
        let one = Tally::from(Counters { updated: 1, ..Counters::ZERO });
        let mut additions = Additions::default();
        for n in 0..10_000_u32 {
            additions.add((n * 7 % 100).to_be_bytes().to_vec(), &one);
            assert!(additions.all.len() <= 200, "what waits is bounded by the keys");
            assert!(additions.keys.len() <= 4 * additions.all.len().max(200));
        }
        let hundred = Tally::from(Counters { updated: 100, ..Counters::ZERO }).to_bytes();
        let expected = (0..100_u32).map(|n| {
            let (key, operand) = (Bytes::copy_from_slice(&n.to_be_bytes()), Bytes::copy_from_slice(&hundred));
            Mutation::Atomic(AtomicOp::Add, key, operand)
        });
        assert!(additions.into_mutations().eq(expected));
    }

    /// Regression: writes that are held back until the commit did not count towards the size before it; after a first fix counters did, but
    /// versionstamps did not. A producer that recorded versionstamps, and used the size to commit in time, failed with 2101.
    #[tokio::test]
    async fn events_and_stamps_count_for_the_size_of_their_transaction() {
        let one = Tally::from(Counters { updated: 1, ..Counters::ZERO });
        let operand = Bytes::from([&[0; 10][..], &[0; 4]].concat());
        for stamps in [false, true] {
            let tx = Store::memory().begin();
            for n in 0..60_000_u32 {
                let key = [&[b'k'; 60][..], &n.to_be_bytes()].concat();
                if stamps {
                    PendingEvents::stamp(&tx, key.into(), operand.clone());
                } else {
                    PendingEvents::add(&tx, key, &one);
                }
            }
            let size = tx.approximate_size().await.unwrap();
            let committed = tx.commit().await;
            assert!(committed.is_ok() || size > 10_000_000, "{committed:?}, and its size was {size}");
            tx.reset();
            assert_eq!(tx.approximate_size().await.unwrap(), 0);
        }
    }
}
