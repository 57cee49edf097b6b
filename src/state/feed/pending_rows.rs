//! [`PendingRows`]: the rows that a transaction writes to feeds, until its commit.

use std::collections::{BTreeMap, btree_map::Entry};

use bytes::Bytes;

use crate::store::{AtomicOp, Extension, Mutation, Transaction, write_len};

/// What a transaction has written to feeds. All methods name the feed by its bytes.
#[derive(Default)]
pub(crate) struct PendingRows {
    /// By feed, keys and the numbers of rows to add to each.
    counts: BTreeMap<Bytes, BTreeMap<Bytes, i64>>,
    /// About the bytes that `counts` add to the size of the transaction.
    counts_len: usize,
    /// By feed, the ids that have got a row, each with the index of its row among those of the feed in this
    /// transaction.
    rows: BTreeMap<Bytes, BTreeMap<Bytes, u16>>,
    /// By feed, how often it was removed.
    removals: BTreeMap<Bytes, u64>,
}

impl PendingRows {
    /// The index of the row of `id` among the rows that `tx` writes to `feed`, and whether it is the
    /// first row for the id. The index of an id stays the same, so that only the last row written for it remains.
    /// `None` once all 65,535 indices are taken.
    pub fn index_of(tx: &Transaction, feed: &[u8], id: &[u8]) -> Option<(u16, bool)> {
        tx.extension(|pending: &mut Self| {
            let indices = pending.rows.entry(Bytes::copy_from_slice(feed)).or_default();
            if let Some(&index) = indices.get(id) {
                return Some((index, false));
            }
            let next = u16::try_from(indices.len()).ok().filter(|&next| next < u16::MAX)?;
            indices.insert(Bytes::copy_from_slice(id), next);
            Some((next, true))
        })
    }

    /// Adds `rows` to the number of rows of `feed` at `key` with the commit of `tx`. However often this is called for one
    /// key, the commit has at most one `ADD` for it. Reads of `tx` do not see it.
    pub fn count(tx: &Transaction, feed: &[u8], key: Vec<u8>, rows: i64) {
        tx.extension(|pending: &mut Self| {
            let len = write_len(key.len(), size_of_val(&rows));
            match pending.counts.entry(Bytes::copy_from_slice(feed)).or_default().entry(key.into()) {
                Entry::Occupied(mut entry) => *entry.get_mut() += rows,
                Entry::Vacant(entry) => {
                    entry.insert(rows);
                    pending.counts_len += len;
                }
            }
        });
    }

    /// Notes that `tx` removes `feed`, with all rows that it has written to it: its writers have to read it again.
    pub fn note_removal(tx: &Transaction, feed: &[u8]) {
        tx.extension(|pending: &mut Self| {
            *pending.removals.entry(Bytes::copy_from_slice(feed)).or_default() += 1;
            pending.counts.remove(feed);
            pending.rows.remove(feed);
        });
    }

    /// How often `tx` has removed `feed`.
    pub fn removals(tx: &Transaction, feed: &[u8]) -> u64 {
        tx.extension(|pending: &mut Self| pending.removals.get(feed).copied().unwrap_or_default())
    }
}

impl Extension for PendingRows {
    fn size(&self) -> usize {
        self.counts_len
    }

    fn into_writes(self, write: &mut dyn FnMut(Mutation)) {
        for (key, rows) in self.counts.into_values().flatten().filter(|(_, rows)| *rows != 0) {
            write(Mutation::Atomic(AtomicOp::Add, key, Bytes::copy_from_slice(&rows.to_le_bytes())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Database;

    /// Regression: the numbers of rows that are held back for the commit counted for nothing before it. A layer that commits in
    /// time, by the size, failed with 2101.
    #[tokio::test]
    async fn numbers_of_rows_count_for_the_size_of_their_transaction() {
        let tx = Database::memory().begin();
        for n in 0..60_000_u32 {
            let key = [&[b'k'; 60][..], &n.to_be_bytes()].concat();
            PendingRows::count(&tx, &n.to_be_bytes(), key, 1);
        }
        let size = tx.approximate_size().await.unwrap();
        let committed = tx.commit().await;
        assert!(committed.is_ok() || size > 10_000_000, "{committed:?}, and its size was {size}");
        tx.reset();
        assert_eq!(tx.approximate_size().await.unwrap(), 0);
    }
}
