//! The end of a shard.
//!
//! ```text
//!  rows     ──── shard 1 ───────┤ closed        1. everything is finished or deferred
//!  C        ──────────────────────► mark        2. the shard is marked as drained, and nothing runs in it any more
//!  keys     a, b ───────────────► 3: a, 4: b    3. the keys move to the successors, which work on them at once
//!                                               4. once all shards of the entry are marked, the owner of the first one moves what is left,
//!                                                  gives the successors their checkpoints, and takes the leases of the entry away
//! ```
//!
//! The mark is a checkpoint at the first sequence of the successors. No row of the shard, and so no other checkpoint, is there. Once a
//! shard is marked, requests to work again on an id go to the successors, or to the id's key in the shard if it has not been moved yet.

use super::{
    handler::ConsumedRow,
    member::{shard_in, successor},
    shard::{End, Go, ShardTask, moved, persist},
};
use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result},
    },
    state::{
        feed::Topology,
        history::{Claim, History},
        keys::{ShardId, TopologyRow},
        membership::changed,
    },
    store::{Isolation, KeyRange, RangeRead, Transaction},
};

/// How many keys one transaction moves.
const PAGE_KEYS: usize = 200;

/// The result of one step of leaving a drained shard.
enum Left {
    /// The shard was marked, or some keys were moved; there may be more keys.
    Moved,
    /// The shard is drained, but others of its topology entry are not yet.
    Waits,
    /// The successors have begun.
    Replaced,
    /// The consumer no longer reads the shard.
    Gone,
}

impl<R: ConsumedRow> ShardTask<R> {
    /// Hands a drained shard to its successors, then fails with `End::Stopped`. Returns `Ok` if the consumer no longer reads the shard.
    pub(super) async fn leave_shard(&mut self) -> Go<()> {
        loop {
            self.changes.mark_unchanged();
            match persist!(self, "leaving a drained shard", self.try_to_leave().await) {
                Left::Moved => {}
                Left::Waits => self.wait_for_change().await?,
                Left::Replaced => return Err(End::Stopped.into()),
                Left::Gone => return Ok(()),
            }
        }
    }

    async fn try_to_leave(&self) -> Result<Left> {
        self.db().run(async |tx| self.leave_in(&tx).await).await
    }

    async fn leave_in(&self, tx: &Transaction) -> Result<Left> {
        let (held, member) = (&self.held, &self.member);
        held.lease.check(tx).await?;
        let Some(stored) = held.checkpoint(tx, Isolation::Serializable).await? else {
            return Ok(Left::Gone);
        };
        let topology = member.feed().topology(tx).await?;
        let successor = successor(&topology, held.shard)?;
        let (keys, pool, mark) = (&held.context.keys, held.name.pool(), successor.first);
        if stored.position() < mark {
            // A store that is older than its own rows does not show them: the shard only seems to be drained.
            History::of(&held.context).check(tx, Claim::Rows).await?;
            held.set_checkpoint(tx, moved(stored, mark));
            // Requests to work again on an id conflict on the lease rather than on the checkpoint, which moves all the time.
            tx.add_write_conflict(&KeyRange::key(&keys.lease(&pool, held.shard.0)));
            changed(tx, keys, &pool);
            return Ok(Left::Moved);
        }
        if self.move_keys(tx, (held.shard, ShardId(held.shard.0 + 1)), (&topology, successor)).await? {
            // The successors may have looked for their keys already.
            changed(tx, keys, &pool);
            return Ok(Left::Moved);
        }
        if !member.is_first(held.shard) {
            return Ok(Left::Waits);
        }
        // Checkpoints only grow while their leases are held, so a snapshot read is enough.
        let left = held.checkpoints(tx).await?;
        if left.iter().any(|(_, checkpoint)| checkpoint.position() < mark) {
            return Ok(Left::Waits);
        }
        let first = successor.shards().next().expect("an entry has shards");
        // Other shards may be marked and have keys that they have not moved yet.
        if self.move_keys(tx, (held.shard, first), (&topology, successor)).await? {
            changed(tx, keys, &pool);
            return Ok(Left::Moved);
        }
        // The successors begin with what is known in all of the shards: their rows also show events that some shard had not read.
        let knows_least = left.iter().map(|(_, checkpoint)| *checkpoint).min_by_key(Cursor::knowledge);
        let begin = knows_least.map_or(Cursor::from(mark), |knows| moved(knows, mark));
        tx.clear_range(&keys.consumer_checkpoints(&held.name));
        tx.clear_range(&KeyRange::new(keys.lease(&pool, held.shard.0), keys.lease(&pool, first.0)));
        for shard in successor.shards() {
            tx.set(&keys.consumer_checkpoint(&held.name, shard), &begin.to_bytes());
        }
        changed(tx, keys, &pool);
        Ok(Left::Replaced)
    }

    /// Moves keys of the shards from `first` up to, but not including, `end` to the shards of `successor`. Returns false if there are none.
    async fn move_keys(
        &self,
        tx: &Transaction,
        (first, end): (ShardId, ShardId),
        (topology, successor): (&Topology, &TopologyRow),
    ) -> Result<bool> {
        let (keys, consumer) = (&self.held.context.keys, &self.held.name);
        let begin = |shard| keys.deferred_of(consumer, Some(shard)).begin;
        let range = KeyRange { begin: begin(first), end: begin(end) };
        // Serializable, so that a concurrent request to work again on an id is not left behind in the old shard.
        let page = tx.get_range(&RangeRead::new(range).limit(PAGE_KEYS), Isolation::Serializable).await?;
        for (key, value) in &page.rows {
            let (_, id) = keys.deferred_id(key)?;
            let shard = shard_in(topology, self.feed(), successor, &id)?;
            tx.set(&keys.deferred(consumer, shard, &id), value);
            tx.clear(key);
        }
        Ok(!page.rows.is_empty())
    }

    /// Removes everything that is stored for the consumer, if its feed is gone.
    async fn remove_without_feed(&self) -> Result<()> {
        let remove = async |tx: Transaction| {
            let (held, member) = (&self.held, &self.member);
            held.lease.check(&tx).await?;
            match Topology::read(&tx, member.feed(), Isolation::Serializable).await {
                Err(Error::NoFeed { .. }) => held.remove_in(&tx),
                Ok(_) => {}
                Err(error) => return Err(error),
            }
            Ok(())
        };
        self.db().run(remove).await
    }

    /// Removes the consumer, because its feed is gone, and waits to be stopped.
    pub(super) async fn end_with_feed(&mut self, gone: Error) -> Go<()> {
        persist!(self, "removing a consumer whose feed is gone", self.remove_without_feed().await);
        tracing::info!(consumer = %self.held.name, "a consumer ended because its feed is gone");
        self.member.end(gone);
        self.stop.requested().await;
        Ok(())
    }
}
