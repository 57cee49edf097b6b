//! The end of a shard: replaces the checkpoints of a closed topology entry by those of the next one.

use super::Task;
use crate::{
    base::{
        bugs::{Bug, is_on},
        error::{Error, Result},
    },
    roles::group::{Observer, batch::BatchContext},
    state::{
        feed::FeedRow,
        keys::{ShardId, TopologyRow, checkpoint_position},
        membership::changed,
    },
    store::{Isolation, Transaction},
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

impl<R, F, O> Task<R, F>
where
    R: FeedRow,
    F: Fn(ShardId) -> O + Send + Sync + 'static,
    O: Observer<R>,
{
    /// Saves that the shard is drained; if it is the last one of its entry, begins the successors.
    pub(super) async fn drain(&mut self) -> Result<Drained> {
        let (right, feed) = (&self.right, self.consuming.group.raw());
        if self.is_explicit() {
            let stored = self.db().run(async |tx| right.position(&tx).await).await?;
            // If the shard was dropped meanwhile, newer rows have replaced its rows.
            if stored.is_some_and(|stored| stored < self.last_row) || self.parking.has_pending() {
                return Ok(Drained::Behind);
            }
        }
        let drain = async |tx: Transaction| {
            if right.position(&tx).await?.is_none() {
                return Ok(Drained::Replaced);
            }
            let topology = feed.topology(&tx).await?;
            let (successor, is_trimmed) = match topology.entry_of(right.shard) {
                Ok((_, Some(successor))) => (successor, false),
                // The shard was dropped, so all shards of its entry are empty.
                Err(Error::NoShard { is_trimmed: true, shard }) => {
                    let successor = topology.successor_of_trimmed(right.shard);
                    (successor.ok_or(Error::NoShard { is_trimmed: true, shard })?, true)
                }
                Ok((_, None)) => return Err(Error::corrupt("topology", "a closed entry is open again")),
                Err(error) => return Err(error),
            };
            replace(&tx, right, successor, is_trimmed).await
        };
        self.db().run(drain).await
    }
}

/// Saves that the shard is drained, and replaces the checkpoints of its entry if it is the last one.
async fn replace(
    tx: &Transaction,
    right: &BatchContext,
    successor: &TopologyRow,
    is_trimmed: bool,
) -> Result<Drained> {
    let keys = &right.context.keys;
    let end = successor.first.before();
    let (mut are_drained, mut is_saved) = (true, false);
    for (key, value) in tx.all_rows(keys.checkpoints_of(&right.group), Isolation::Serializable).await? {
        let (shard, position) = (keys.checkpoint_shard(&key)?, checkpoint_position(&value)?);
        is_saved |= shard == right.shard && position >= end;
        are_drained &=
            is_on(Bug::SuccessorsBegunEarly) || is_trimmed || shard == right.shard || position >= end;
    }
    if !are_drained {
        if !is_saved {
            right.write_position(tx, end);
        }
        return Ok(Drained::Waits);
    }
    for range in [keys.checkpoints_of(&right.group)].iter().chain(&keys.statuses_of(&right.group)) {
        tx.clear_range(range);
    }
    changed(tx, keys, &right.group.pool());
    for shard in successor.shards() {
        tx.set(&keys.checkpoint(&right.group, shard), end.as_bytes());
    }
    Ok(Drained::Replaced)
}
