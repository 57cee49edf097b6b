//! [`Topology`]: the history of a feed's shards.

use super::routing::{self, SCHEME_JUMP};
use crate::{
    encoding::Sequence,
    error::{Error, Result},
    keys::{FeedId, Keys, ShardId, TopologyEntry},
    store::{Isolation, RangeRead, Transaction},
};

/// The most shards that a feed can have.
pub(crate) const SHARDS_MAX: u32 = 10_000;

/// The history of a feed's shards, oldest first; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology(Vec<TopologyEntry>);

impl Topology {
    /// Reads the topology of `feed`. A serializable read makes the transaction fail if a reshard comes in between, as
    /// every writer needs it to.
    pub async fn read(tx: &Transaction, keys: &Keys, feed: &FeedId, isolation: Isolation) -> Result<Self> {
        let mut pages = tx.pages(RangeRead::new(keys.topologies(feed)), isolation);
        let mut entries = Vec::new();
        while let Some(rows) = pages.next().await? {
            for row in &rows {
                entries.push(keys.topology_entry(row)?);
            }
        }
        if entries.is_empty() {
            return Err(Error::corrupt("topology", "the feed has none"));
        }
        Ok(Self(entries))
    }

    /// Fails unless a feed can have `shards` shards.
    pub fn check_count(shards: u32) -> Result<()> {
        if (1..=SHARDS_MAX).contains(&shards) {
            Ok(())
        } else {
            Err(Error::invalid("shards", format!("{shards} is not 1 to {SHARDS_MAX}")))
        }
    }

    /// Gives `feed`, which must be new, `shards` shards from the start. The count must have been checked.
    pub fn create(tx: &Transaction, keys: &Keys, feed: &FeedId, shards: u32) {
        let entry = TopologyEntry {
            first: Sequence::ZERO,
            scheme: SCHEME_JUMP,
            closed: false,
            shards: (1..=u64::from(shards)).map(ShardId).collect(),
        };
        tx.set(&keys.topology(feed, entry.first), &entry.to_bytes());
    }

    /// The shard that a new row of `id` goes to.
    pub fn shard_of_new(&self, id: &[u8]) -> Result<ShardId> {
        Self::shard_in(self.0.last().expect("a topology is never empty"), id)
    }

    /// The shard in which the row of `id` at `sequence` lies.
    pub fn shard_at(&self, sequence: Sequence, id: &[u8]) -> Result<ShardId> {
        let later = self.0.partition_point(|entry| entry.first <= sequence);
        let entry = later.checked_sub(1).map(|place| &self.0[place]);
        let entry =
            entry.ok_or_else(|| Error::corrupt("topology", format!("it tells nothing of {sequence}")))?;
        Self::shard_in(entry, id)
    }

    /// The shard of `id` under `entry`.
    fn shard_in(entry: &TopologyEntry, id: &[u8]) -> Result<ShardId> {
        routing::route(entry.scheme, id, entry.shards.len()).map(|place| entry.shards[place])
    }

    /// All shards that can have rows.
    pub fn shards(&self) -> impl Iterator<Item = ShardId> {
        self.0.iter().flat_map(|entry| entry.shards.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoding::{Incarnation, Versionstamp};

    #[test]
    fn a_row_lies_where_the_topology_of_its_sequence_put_it() {
        let at = |version| Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0);
        let entry = |first, shard| TopologyEntry {
            first,
            scheme: SCHEME_JUMP,
            closed: false,
            shards: vec![ShardId(shard)],
        };
        let topology = Topology(vec![entry(Sequence::ZERO, 1), entry(at(10), 2)]);
        assert_eq!(topology.shard_at(at(9), b"x").unwrap(), ShardId(1));
        assert_eq!(topology.shard_at(at(10), b"x").unwrap(), ShardId(2));
        assert_eq!(topology.shard_of_new(b"x").unwrap(), ShardId(2));
        assert_eq!(topology.shards().count(), 2);
    }
}
