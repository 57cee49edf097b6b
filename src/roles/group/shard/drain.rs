//! The end of a shard: replaces the checkpoints of a closed topology entry by those of the next one, once all its shards are drained.
//! Each shard saves its own end. Only the shard whose turn it is reads the checkpoints of others.

#[cfg(test)]
mod model;

use super::task::ShardTask;
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    roles::group::{Observer, batch::BatchContext},
    state::{
        feed::FeedRow,
        keys::{ShardId, TopologyRow, checkpoint_position, turn_shard},
        membership::changed,
    },
    store::{Isolation, KeyRange, RangeRead, Transaction, key_after},
};

/// The result of draining a shard.
pub(super) enum Drained {
    /// It was the last one of its entry: the checkpoints of the entry were replaced by those of the successors.
    Replaced,
    /// Other shards of its entry are not drained yet.
    Waits,
    /// The observer was given rows that are not saved.
    Behind,
}

impl<R, F, O> ShardTask<R, F>
where
    R: FeedRow,
    F: Fn(ShardId) -> O + Send + Sync + 'static,
    O: Observer<R>,
{
    /// Saves that the shard is drained; if it is the last one of its entry, begins the successors.
    pub(super) async fn drain(&mut self) -> Result<Drained> {
        let (shard_context, feed) = (&self.shard_context, self.consuming.group.raw());
        if self.is_explicit() {
            let stored = self.db().run(async |tx| shard_context.position(&tx).await).await?;
            // If the shard was dropped meanwhile, newer rows have replaced its rows.
            if stored.is_some_and(|stored| stored < self.last_row) || self.parking.has_pending() {
                return Ok(Drained::Behind);
            }
        }
        let drain = async |tx: Transaction| {
            let Some(stored) = shard_context.position(&tx).await? else {
                return Ok(Drained::Replaced);
            };
            let topology = feed.topology(&tx).await?;
            let (successor, is_trimmed) = match topology.entry_of(shard_context.shard) {
                Ok((_, Some(successor))) => (successor, false),
                // The shard was dropped, so all shards of its entry are empty.
                Err(Error::NoShard { is_trimmed: true, shard }) => {
                    let successor = topology.successor_of_trimmed(shard_context.shard);
                    (successor.ok_or(Error::NoShard { is_trimmed: true, shard })?, true)
                }
                Ok((_, None)) => return Err(Error::corrupt("topology", "a closed entry is open again")),
                Err(error) => return Err(error),
            };
            replace(&tx, shard_context, (successor, stored), is_trimmed).await
        };
        self.db().run(drain).await
    }
}

/// Saves that the shard, whose stored checkpoint is `stored`, is drained; and replaces the checkpoints of its entry if it is the last one.
async fn replace(
    tx: &Transaction,
    shard_context: &BatchContext,
    (successor, stored): (&TopologyRow, Sequence),
    is_trimmed: bool,
) -> Result<Drained> {
    let (keys, group) = (&shard_context.context.keys, &shard_context.group);
    let end = successor.first.before();
    if !is_trimmed && !are_others_drained(tx, shard_context, end).await? {
        if !is_drained(stored, end) {
            shard_context.write_position(tx, end);
        }
        return Ok(Drained::Waits);
    }
    for range in [keys.checkpoints_of(group)].iter().chain(&keys.statuses_of(group)) {
        tx.clear_range(range);
    }
    tx.clear(&keys.drain_turn(group));
    changed(tx, keys, &group.pool());
    for shard in successor.shards() {
        tx.set(&keys.checkpoint(group, shard), end.as_bytes());
    }
    Ok(Drained::Replaced)
}

/// Whether all shards of the entry but that of `shard_context` have checkpoints at its `end`.
///
/// Only the shard whose turn it is reads others: those after it, up to the first that is not drained. The turn passes to that one. So all
/// shards together read each checkpoint once, in whichever order they reach their ends.
async fn are_others_drained(tx: &Transaction, shard_context: &BatchContext, end: Sequence) -> Result<bool> {
    let (keys, group) = (&shard_context.context.keys, &shard_context.group);
    let (turn, checkpoints) = (keys.drain_turn(group), keys.checkpoints_of(group));
    let stored = tx.get(&turn, Isolation::Serializable).await?;
    let stored = stored.map(|stored| turn_shard(&stored)).transpose()?;
    let first = if stored.is_some() {
        None
    } else {
        // The set of checkpoints changes only together with that of this shard, which is in the conflict set.
        let page = tx.get_range(&RangeRead::new(checkpoints.clone()).limit(1), Isolation::Snapshot).await?;
        page.rows.first().map(|(key, _)| keys.checkpoint_shard(key)).transpose()?
    };
    if !has_turn(shard_context.shard, stored, first) {
        return Ok(false);
    }
    let behind = KeyRange::new(key_after(&keys.checkpoint(group, shard_context.shard)), checkpoints.end);
    let mut pages = tx.pages(RangeRead::new(behind), Isolation::Snapshot);
    while let Some(rows) = pages.next().await? {
        for (key, value) in &rows {
            if !is_drained(checkpoint_position(value)?, end) {
                // A shard that saves its end before the commit may not have seen its turn.
                tx.add_read_conflict(&KeyRange::key(key));
                tx.set(&turn, &keys.checkpoint_shard(key)?.0.to_be_bytes());
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Whether `shard` reads the checkpoints of others. The turn begins at the `first` shard, until it is `stored`.
fn has_turn(shard: ShardId, stored: Option<ShardId>, first: Option<ShardId>) -> bool {
    stored.or(first) == Some(shard)
}

/// Whether a shard with this checkpoint was worked on up to the `end` of its entry.
fn is_drained(checkpoint: Sequence, end: Sequence) -> bool {
    checkpoint >= end
}
