//! [`FeedWriter`]: replaces the rows of ids within one transaction.

use std::collections::BTreeSet;

use super::Topology;
use crate::{
    encoding::{Incarnation, Sequence, versionstamped},
    error::{Error, Result},
    keys::{FeedId, Keys, ShardId, sequence_operand},
    store::{AtomicOp, Transaction},
};

/// Writes rows within one transaction. The topology must have been read in the same transaction, serializably.
pub(crate) struct FeedWriter<'a> {
    /// The transaction.
    tx: &'a Transaction,
    /// The keys of the bus.
    keys: &'a Keys,
    /// The feed.
    feed: &'a FeedId,
    /// Where rows go and have gone.
    topology: &'a Topology,
    /// The incarnation of the bus.
    incarnation: Incarnation,
    /// The place of the next row in the transaction.
    order: u16,
    /// The shards that got a row.
    appended: BTreeSet<ShardId>,
}

impl<'a> FeedWriter<'a> {
    /// A writer of `feed` in `tx`.
    pub fn new(
        tx: &'a Transaction,
        keys: &'a Keys,
        feed: &'a FeedId,
        topology: &'a Topology,
        incarnation: Incarnation,
    ) -> Self {
        Self { tx, keys, feed, topology, incarnation, order: 0, appended: BTreeSet::new() }
    }

    /// Removes the row of `id` at `previous`, if there is one, and appends `row`. Returns the place of the row in the
    /// transaction. Blind: it reads nothing.
    pub fn replace(&mut self, id: &[u8], previous: Option<Sequence>, row: &[u8]) -> Result<u16> {
        if let Some(previous) = previous {
            let shard = self.topology.shard_at(previous, id)?;
            self.tx.clear(&self.keys.entry(self.feed, shard, previous));
        }
        let shard = self.topology.shard_of_new(id)?;
        let order = self.order;
        self.order = order
            .checked_add(1)
            .ok_or_else(|| Error::invalid("rows", "a transaction holds at most 65,535 rows"))?;
        let key = self.keys.append(self.feed, shard, self.incarnation, order);
        self.tx.atomic(AtomicOp::SetVersionstampedKey, &key, row);
        let newest = self.keys.newest(self.feed, id);
        self.tx.atomic(AtomicOp::SetVersionstampedValue, &newest, &sequence_operand(self.incarnation, order));
        self.appended.insert(shard);
        Ok(order)
    }

    /// Moves the heads of the shards that got a row. Returns how many rows were written.
    pub fn finish(self) -> u16 {
        for shard in self.appended {
            let head = self.keys.head(self.feed, shard);
            self.tx.atomic(AtomicOp::SetVersionstampedValue, &head, &versionstamped(&[], &[]));
        }
        self.order
    }
}
