//! Writes rows within one transaction; and [`PendingRows`]: what a transaction has written to feeds, until its commit.

use std::collections::{BTreeMap, btree_map::Entry};

use bytes::Bytes;

use super::{Entries, RawFeed, topology::space_of};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        keys::{Lanes, ShardId, end_operand, sequence_operand},
    },
    store::{AtomicOp, Extension, Mutation, Transaction, write_len},
};

/// The index of a row in its transaction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowPlace {
    /// The number of the row among those that the transaction writes to the feed.
    pub order: u16,
    /// Whether this is the first row of the id in the transaction. A later one replaces it.
    pub is_first: bool,
}

/// Removes the row of `id` at `previous`, if there is one, appends `row` at its index in the transaction, and records it as the newest row
/// of `id`. Returns the shard of the row. Reads nothing. The open entry of `entries` must be in the read-conflict set, and the entry of
/// `previous` must be among `entries`.
///
/// Rows are counted per shard. New ids cost one more `ADD` on the count of their shard, however many there are in the transaction. A row
/// that replaces one in another shard costs two; a row that replaces one in the same shard costs none.
pub(crate) fn append(
    tx: &Transaction,
    feed: RawFeed<'_>,
    entries: &Entries,
    (id, previous): (&[u8], Option<Sequence>),
    RowPlace { order, is_first }: RowPlace,
    row: &[u8],
) -> Result<ShardId> {
    let shard = entries.shard_of_new(feed, id)?;
    if let Some(previous) = previous {
        let (left, space) = entries.place_of(feed, previous, id)?;
        tx.clear(&space.row(previous));
        if is_first {
            count(tx, feed, left, -1);
        }
    }
    let space = space_of(entries.current(), feed, shard);
    let incarnation = feed.context.config.incarnation;
    let (key, newest) = (space.append(incarnation, order), feed.context.keys.newest(feed.id, id));
    tx.atomic(AtomicOp::SetVersionstampedKey, &key, row);
    tx.atomic(AtomicOp::SetVersionstampedValue, &newest, &sequence_operand(incarnation, order));
    if is_first {
        count(tx, feed, shard, 1);
    }
    Ok(shard)
}

/// Removes the row of `id` at `sequence`, which must exist.
pub(crate) fn remove(
    tx: &Transaction,
    feed: RawFeed<'_>,
    entries: &Entries,
    id: &[u8],
    sequence: Sequence,
) -> Result<()> {
    let (shard, space) = entries.place_of(feed, sequence, id)?;
    tx.clear(&space.row(sequence));
    count(tx, feed, shard, -1);
    Ok(())
}

fn count(tx: &Transaction, feed: RawFeed<'_>, shard: ShardId, rows: i64) {
    let keys = &feed.context.keys;
    PendingRows::count(tx, &keys.pulse(feed.id), keys.row_count(feed.id, shard), rows);
}

/// Moves the pulse of the feed, and the end of the current incarnation.
pub(super) fn moved(tx: &Transaction, feed: RawFeed<'_>, lanes: Lanes) {
    let Context { keys, config, .. } = feed.context;
    tx.atomic(AtomicOp::Add, &keys.pulse(feed.id), &lanes.to_operand());
    let end = keys.end_of_incarnation(config.incarnation);
    tx.atomic(AtomicOp::SetVersionstampedValue, &end, &end_operand(config.incarnation));
}

/// Writes the rows of a feed with a pulse, within one transaction. The topology must have been read in the same transaction, serializably.
pub(crate) struct FeedWriter<'a> {
    tx: &'a Transaction,
    feed: RawFeed<'a>,
    entries: &'a Entries,
    /// The index of the next row in the transaction.
    order: u16,
    /// The lanes of the shards that got a row.
    appended: Lanes,
}

impl<'a> FeedWriter<'a> {
    pub fn new(tx: &'a Transaction, feed: RawFeed<'a>, entries: &'a Entries) -> Self {
        Self { tx, feed, entries, order: 0, appended: Lanes::default() }
    }

    /// Removes the row of `id` at `previous`, if there is one, and appends `row`, which must be the only row of the id in the transaction.
    /// Returns the number of the row in the transaction. Reads nothing.
    pub fn replace(&mut self, id: &[u8], previous: Option<Sequence>, row: &[u8]) -> Result<u16> {
        let order = self.order;
        self.order = order
            .checked_add(1)
            .ok_or_else(|| Error::invalid("rows", "a transaction holds at most 65,535 rows"))?;
        let place = RowPlace { order, is_first: true };
        let shard = append(self.tx, self.feed, self.entries, (id, previous), place, row)?;
        self.appended.insert(shard);
        Ok(order)
    }

    /// Moves the pulse of the feed, once for all rows. Returns the number of rows written, and their lanes.
    pub fn finish(self) -> (u16, Lanes) {
        if !self.appended.is_empty() {
            moved(self.tx, self.feed, self.appended);
        }
        (self.order, self.appended)
    }
}

/// What a transaction has written to feeds. All methods identify a feed by the key of its pulse, as a transaction may write to several buses.
#[derive(Default)]
pub(crate) struct PendingRows {
    /// For each feed, the keys of row counts, and the number of rows to add to each.
    counts: BTreeMap<Bytes, BTreeMap<Bytes, i64>>,
    /// Roughly how many bytes `counts` adds to the size of the transaction.
    counts_len: usize,
    /// For each feed, the ids that got a row, each with the index of its row among those of the feed in this transaction.
    rows: BTreeMap<Bytes, BTreeMap<Bytes, u16>>,
    /// How many times each feed was removed.
    removals: BTreeMap<Bytes, u64>,
}

impl PendingRows {
    /// Returns the index of the row of `id` among the rows that `tx` writes to `feed`, and whether this is the first row of the id. The
    /// index of an id stays the same, so that only the last row written for it remains. Returns `None` once all 65,535 indices are taken.
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

    /// Adds `rows` to the number of rows of `feed` at `key` when `tx` commits. However many times this is called for one key, the commit
    /// has at most one `ADD` for it. Reads in `tx` do not see the change.
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

    /// Notes that `tx` removes `feed`, with all rows that `tx` has written to it. Writers must read the feed again.
    pub fn note_removal(tx: &Transaction, feed: &[u8]) {
        tx.extension(|pending: &mut Self| {
            *pending.removals.entry(Bytes::copy_from_slice(feed)).or_default() += 1;
            pending.counts.remove(feed);
            pending.rows.remove(feed);
        });
    }

    /// Returns how many times `tx` has removed `feed`.
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
    use crate::store::Store;

    /// Regression: the row counts that are held back until the commit were not included in the size of the transaction. So a layer that
    /// watches the size, to commit before the limit is reached, failed with 2101.
    #[tokio::test]
    async fn numbers_of_rows_count_for_the_size_of_their_transaction() {
        let tx = Store::memory().begin();
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
