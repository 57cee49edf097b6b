//! [`PendingEvents`]: the events that a transaction records, until its commit.

use std::collections::{BTreeMap, btree_map::Entry};

use bytes::Bytes;

use super::additions::Additions;
use crate::{
    base::encoding::Tally,
    store::{AtomicOp, Extension, Mutation, Transaction, write_len},
};

/// The events of a transaction.
#[derive(Default)]
pub(super) struct PendingEvents {
    additions: Additions,
    /// Keys whose values get the versionstamp, each with the operand.
    stamps: BTreeMap<Bytes, Bytes>,
    /// About the bytes that `stamps` add to the size of the transaction.
    stamps_len: usize,
}

impl PendingEvents {
    /// Adds `tally` to the counters at `key` with the commit of `tx`. However often this is called for one key, the commit
    /// has one `ADD` for it. Reads of `tx` do not see it.
    pub fn add(tx: &Transaction, key: Vec<u8>, tally: &Tally) {
        tx.extension(|pending: &mut Self| pending.additions.add(key, tally));
    }

    /// Sets the value at `key` with the commit of `tx` to `operand`, in which the versionstamp replaces 10 bytes. However
    /// often this is called for one key, the commit sets it once. Reads of `tx` do not see it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{base::encoding::Counters, store::Database};

    /// Regression: what is held back for the commit counted for nothing before it; then the counters did, but versionstamps did
    /// not. A producer that records versionstamps and commits in time, by the size, failed with 2101.
    #[tokio::test]
    async fn events_and_stamps_count_for_the_size_of_their_transaction() {
        let one = Tally::from(Counters { updated: 1, ..Counters::ZERO });
        let operand = Bytes::from([&[0; 10][..], &[0; 4]].concat());
        for stamps in [false, true] {
            let tx = Database::memory().begin();
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
