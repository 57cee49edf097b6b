//! Writing rows within one transaction.

use super::{Entries, RawFeed, pending_rows::PendingRows, topology::space_of};
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        context::Context,
        keys::{Lanes, ShardId, end_operand, sequence_operand},
    },
    store::{AtomicOp, Transaction},
};

/// The index of a row in its transaction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowPlace {
    /// Its number among the rows that the transaction writes to the feed.
    pub order: u16,
    /// Whether the transaction has not yet written a row of this id, which this row would replace.
    pub is_first: bool,
}

/// Removes the row of `id` at `previous`, if there is one, appends `row` at its index in the transaction, and notes it as the newest of `id`.
/// Returns its shard. Blind: it reads nothing. The open one of `entries` must be in the read-conflict set, and
/// the one of `previous` must be among them.
///
/// Rows are counted by shard. A new id costs one more `ADD` on the shard's count, however many there are in the
/// transaction. A row that replaces one in another shard costs two; one in the same shard costs none.
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
    PendingRows::count(tx, feed.id.bytes(), feed.context.keys.row_count(feed.id, shard), rows);
}

/// Moves the pulse of the feed, and the end of the present incarnation.
pub(super) fn moved(tx: &Transaction, feed: RawFeed<'_>, lanes: Lanes) {
    let Context { keys, config, .. } = feed.context;
    tx.atomic(AtomicOp::Add, &keys.pulse(feed.id), &lanes.to_operand());
    let end = keys.end_of_incarnation(config.incarnation);
    tx.atomic(AtomicOp::SetVersionstampedValue, &end, &end_operand(config.incarnation));
}

/// Writes the rows of a feed with a pulse, within one transaction. The topology must have
/// been read in the same transaction, serializably.
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

    /// Removes the row of `id` at `previous`, if there is one, and appends `row`. Returns the number of the row in the
    /// transaction, which must have no other row of the id. Blind: it reads nothing.
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

    /// Moves the pulse of the feed, once for all rows. Returns the number of rows written.
    pub fn finish(self) -> u16 {
        if !self.appended.is_empty() {
            moved(self.tx, self.feed, self.appended);
        }
        self.order
    }
}
