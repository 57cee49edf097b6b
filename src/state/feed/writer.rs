//! Writing rows within one transaction.

use std::collections::BTreeSet;

use super::{RawFeed, Topology, topology::space_of};
use crate::{
    base::{
        bugs::{Bug, is_on},
        encoding::{Sequence, versionstamped},
        error::{Error, Result},
    },
    state::keys::{ShardId, sequence_operand},
    store::{AtomicOp, Transaction},
};

/// Removes the row of `id` at `previous`, if there is one, and appends `row` as number `order` of the transaction. Returns
/// the shard that it goes to. Blind: it reads nothing. `topology` must be the current one, and in the read-conflict set.
pub(crate) fn append(
    tx: &Transaction,
    feed: RawFeed<'_>,
    topology: &Topology,
    id: &[u8],
    previous: Option<Sequence>,
    order: u16,
    row: &[u8],
) -> Result<ShardId> {
    let shard = topology.shard_of_new(feed, id)?;
    if let Some(previous) = previous.filter(|_| !is_on(Bug::RowBeforeLeft)) {
        tx.clear(&topology.space_at(feed, previous, id)?.row(previous));
    }
    let space = space_of(topology.current(), feed, shard);
    let key = space.append(feed.context.config.incarnation, order);
    tx.atomic(AtomicOp::SetVersionstampedKey, &key, row);
    Ok(shard)
}

/// Writes the rows of a feed that keeps track of the newest row of each id, within one transaction. The topology must have
/// been read in the same transaction, serializably.
pub(crate) struct FeedWriter<'a> {
    /// The transaction.
    tx: &'a Transaction,
    /// The feed.
    feed: RawFeed<'a>,
    /// Where rows go and have gone.
    topology: &'a Topology,
    /// The place of the next row in the transaction.
    order: u16,
    /// The shards that got a row, and whose heads were moved.
    appended: BTreeSet<ShardId>,
    /// The one that got the last row.
    last: Option<ShardId>,
}

impl<'a> FeedWriter<'a> {
    /// A writer of `feed` in `tx`.
    pub fn new(tx: &'a Transaction, feed: RawFeed<'a>, topology: &'a Topology) -> Self {
        Self { tx, feed, topology, order: 0, appended: BTreeSet::new(), last: None }
    }

    /// Removes the row of `id` at `previous`, if there is one, appends `row`, and moves the head of its shard. Returns the place of
    /// the row in the transaction. Blind: it reads nothing.
    pub fn replace(&mut self, id: &[u8], previous: Option<Sequence>, row: &[u8]) -> Result<u16> {
        let order = self.order;
        self.order = order
            .checked_add(1)
            .ok_or_else(|| Error::invalid("rows", "a transaction holds at most 65,535 rows"))?;
        let shard = append(self.tx, self.feed, self.topology, id, previous, order, row)?;
        let context = self.feed.context;
        if self.appended.insert(shard) && !is_on(Bug::HeadNotMoved) {
            self.touch(&context.keys.head(self.feed.id, shard));
        }
        self.last = Some(shard);
        let newest = context.keys.newest(self.feed.id, id);
        let sequence = sequence_operand(context.config.incarnation, order);
        if !is_on(Bug::NewestNotUpdated) {
            self.tx.atomic(AtomicOp::SetVersionstampedValue, &newest, &sequence);
        }
        Ok(order)
    }

    /// Moves the pulse of the feed. Returns how many rows were written.
    pub fn finish(self) -> u16 {
        // Any key of the pulse will do: the one of the last row's shard spreads folds of many shards over all of them.
        if let Some(shard) = self.last.filter(|_| !is_on(Bug::PulseNotMoved)) {
            self.touch(&self.feed.context.keys.pulse(self.feed.id, shard));
        }
        self.order
    }

    /// Sets `key` to the stamp of the transaction.
    fn touch(&self, key: &[u8]) {
        self.tx.atomic(AtomicOp::SetVersionstampedValue, key, &versionstamped(&[], &[]));
    }
}
