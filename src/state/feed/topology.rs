//! [`Topology`]: the history of a feed's shards.

use std::ops::Deref;

use serde::{Serialize, Serializer};

use super::RawFeed;
use crate::{
    base::{
        encoding::Sequence,
        error::{Error, Result},
    },
    state::{
        keys::{Layout, RowSpace, SHARDS_MAX, ShardId, TopologyRow},
        routing::SchemeId,
        skipped::SkippedAt,
    },
    store::{Isolation, RangeRead, Row, Transaction},
};

/// The shards that a feed writes to from one sequence on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TopologyEntry {
    /// The first sequence under this entry.
    pub first: Sequence,
    /// How ids are routed to the shards; `None` for a legacy range, which is not sharded.
    pub scheme: Option<SchemeId>,
    /// Whether a later entry has taken over, so that no row will ever be added to these shards. Serialized as `open`, its opposite.
    #[serde(rename = "open", serialize_with = "contrary")]
    pub is_closed: bool,
    /// The shards, in the order of the scheme's indices. A legacy range is shard 0.
    pub shards: Vec<ShardId>,
}

/// Serializes whether an entry is open: the opposite of `is_closed`.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "it is what serde calls")]
fn contrary<S: Serializer>(is_closed: &bool, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_bool(!is_closed)
}

impl From<&TopologyRow> for TopologyEntry {
    fn from(row: &TopologyRow) -> Self {
        let scheme = match row.layout {
            Layout::Legacy(_) => None,
            Layout::Sharded { scheme, .. } => Some(SchemeId(scheme)),
        };
        Self { first: row.first, scheme, is_closed: row.closed, shards: row.shards().collect() }
    }
}

/// The end of a closed shard: later rows of its ids are in the shards of its successor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Resharded {
    /// The first sequence of the successor: every row of the closed shard is before it, and every later row is at or after it.
    pub at: Sequence,
    /// The next topology entry. Read all of its shards, each from the position up to which the closed shard was read.
    pub successor: TopologyEntry,
}

impl From<&TopologyRow> for Resharded {
    fn from(successor: &TopologyRow) -> Self {
        Self { at: successor.first, successor: successor.into() }
    }
}

/// Some entries of a topology, oldest first: those for the sequences that were looked up, and the open one, which is the last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entries(Vec<TopologyRow>);

impl Entries {
    /// Reads the open entry of `feed`. If the read is serializable, a reshard before the commit makes the transaction fail; every writer
    /// relies on this. Reads only one row, however long the history is.
    ///
    /// Fails with [`Error::NoFeed`] if there is no such feed.
    pub async fn open(tx: &Transaction, feed: RawFeed<'_>, isolation: Isolation) -> Result<Self> {
        let last = RangeRead::new(feed.context.keys.topologies(feed.id)).limit(1).reverse();
        let page = tx.get_range(&last, isolation).await?;
        let row = page.rows.first().ok_or_else(|| Error::NoFeed { feed: feed.id.to_string() })?;
        let open = decode(feed, row)?;
        if open.closed {
            return Err(Error::corrupt("topology", "its last entry is closed").at(&row.0));
        }
        Ok(Self(vec![open]))
    }

    /// Reads the entries to which `sequences` belong, one row for each, except for entries that were read before. The caller must have read
    /// the open entry in the same transaction. Earlier entries do not change, and entries with rows are not dropped.
    pub async fn extend(
        &mut self,
        tx: &Transaction,
        feed: RawFeed<'_>,
        sequences: impl Iterator<Item = Sequence>,
    ) -> Result<()> {
        let mut missing: Vec<_> = sequences.filter(|sequence| *sequence < self.0[0].first).collect();
        missing.sort_unstable();
        while let Some(sequence) = missing.pop() {
            let before =
                RangeRead::new(feed.context.keys.topologies_up_to(feed.id, sequence)).limit(1).reverse();
            let page = tx.get_range(&before, Isolation::Snapshot).await?;
            // A sequence before all entries belongs to the oldest one: earlier ones have no rows.
            let Some(row) = page.rows.first() else { break };
            let entry = match decode(feed, row) {
                // Use a stand-in for an unreadable entry: looking up any of its ids will fail.
                Err(Error::Corrupt { .. }) => {
                    let first = feed.context.keys.topology_key(&row.0)?.1;
                    unreadable(first, ShardId(0), ShardId(1))
                }
                entry => entry?,
            };
            missing.retain(|sequence| *sequence < entry.first);
            self.0.insert(0, entry);
        }
        Ok(())
    }

    /// Returns the open entry, which writers use.
    pub fn current(&self) -> &TopologyRow {
        self.0.last().expect("a topology is never empty")
    }

    /// Returns the index of the entry for `sequence`: the oldest entry if the sequence is before all of them.
    fn place_at(&self, sequence: Sequence) -> usize {
        self.0.partition_point(|entry| entry.first <= sequence).saturating_sub(1)
    }

    /// Returns the entry for `sequence`. For a sequence before all known entries that is the oldest one, because older entries have no
    /// rows.
    pub fn at(&self, sequence: Sequence) -> &TopologyRow {
        &self.0[self.place_at(sequence)]
    }

    /// Returns the shard to which a new row of `id` belongs.
    pub fn shard_of_new(&self, feed: RawFeed<'_>, id: &[u8]) -> Result<ShardId> {
        shard_in(self.current(), feed, id)
    }

    /// Returns the row space that has the row of `id` at `sequence`, provided that the row exists.
    pub fn space_at(&self, feed: RawFeed<'_>, sequence: Sequence, id: &[u8]) -> Result<RowSpace> {
        Ok(self.place_of(feed, sequence, id)?.1)
    }

    /// Returns the shard and the row space that have the row of `id` at `sequence`, provided that the row exists.
    pub fn place_of(&self, feed: RawFeed<'_>, sequence: Sequence, id: &[u8]) -> Result<(ShardId, RowSpace)> {
        let entry = self.at(sequence);
        let shard = shard_in(entry, feed, id)?;
        Ok((shard, space_of(entry, feed, shard)))
    }
}

/// The history of a feed's shards, oldest first; never empty. Only the last entry is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology(Entries);

impl Deref for Topology {
    type Target = Entries;

    fn deref(&self) -> &Entries {
        &self.0
    }
}

impl Topology {
    /// Reads the topology of `feed`. If the read is serializable, a reshard before the commit makes the transaction fail; every writer
    /// relies on this.
    ///
    /// Fails with [`Error::NoFeed`] if there is no such feed.
    pub async fn read(tx: &Transaction, feed: RawFeed<'_>, isolation: Isolation) -> Result<Self> {
        let rows = tx.all_rows(feed.context.keys.topologies(feed.id), isolation).await?;
        if rows.is_empty() {
            return Err(Error::NoFeed { feed: feed.id.to_string() });
        }
        Self::new(decode_all(feed, &rows)?)
    }

    /// Reads, at snapshot isolation, enough of the topology of `feed` to find `shard`: only one row if its entry is open, however long the
    /// history is.
    pub async fn of_shard(tx: &Transaction, feed: RawFeed<'_>, shard: ShardId) -> Result<Self> {
        let open = Entries::open(tx, feed, Isolation::Snapshot).await?;
        if open.current().has(shard) { Ok(Self(open)) } else { feed.topology(tx).await }
    }

    /// Creates the history from `entries`, of which there is at least one.
    fn new(entries: Vec<TopologyRow>) -> Result<Self> {
        let (current, closed) = entries.split_last().expect("a topology is never empty");
        if current.closed || closed.iter().any(|entry| !entry.closed) {
            return Err(Error::corrupt("topology", "its last entry is not the only open one"));
        }
        if !entries.is_sorted_by(|a, b| a.first < b.first && b.shards().next() >= Some(a.next_shard())) {
            return Err(Error::corrupt("topology", "its shard ids do not increase"));
        }
        Ok(Self(Entries(entries)))
    }

    /// Whether the current entry is still that of `feed`. If so, a reshard that is committed before `tx` makes `tx` fail. Reads only one
    /// key, however long the history is. Earlier entries may have been dropped meanwhile, but these had no rows.
    pub async fn is_current(&self, tx: &Transaction, feed: RawFeed<'_>) -> Result<bool> {
        let current = self.current();
        let stored =
            tx.get(&feed.context.keys.topology(feed.id, current.first), Isolation::Serializable).await?;
        Ok(stored.is_some_and(|stored| stored == current.to_bytes()))
    }

    /// Returns all entries, oldest first.
    pub fn entries(&self) -> &[TopologyRow] {
        &self.0.0
    }

    /// Returns the entries that can have rows after `after`, oldest first. All rows of an entry are before those of the next.
    pub fn after(&self, after: Sequence) -> &[TopologyRow] {
        &self.entries()[self.place_at(after)..]
    }

    /// Returns the entry that has `shard`, and its successor if it is closed.
    pub fn entry_of(&self, shard: ShardId) -> Result<(&TopologyRow, Option<&TopologyRow>)> {
        let Some(place) = self.entries().iter().position(|entry| entry.has(shard)) else {
            return Err(Error::NoShard { shard: shard.0, is_trimmed: shard < self.current().next_shard() });
        };
        Ok((&self.entries()[place], self.entries().get(place + 1)))
    }

    /// Returns the first entry after that of `shard`, which this topology no longer has.
    pub fn successor_of_trimmed(&self, shard: ShardId) -> Option<&TopologyRow> {
        self.entries().iter().find(|entry| entry.shards().next().is_some_and(|first| first > shard))
    }

    /// Returns the shard of `id` under the entry that has `shard`.
    pub fn shard_beside(&self, feed: RawFeed<'_>, shard: ShardId, id: &[u8]) -> Result<ShardId> {
        shard_in(self.entry_of(shard)?.0, feed, id)
    }
}

/// Decodes the entry that is stored as `row`.
fn decode(feed: RawFeed<'_>, row: &Row) -> Result<TopologyRow> {
    feed.context.keys.topology_row(row).map(|(_, entry)| entry).map_err(|error| error.at(&row.0))
}

/// Decodes the entries that are stored as `rows`, in order. Closed entries that cannot be decoded are skipped, counted and named. Each of
/// them gets the shards between the entries around it, so its rows stay readable.
fn decode_all(feed: RawFeed<'_>, rows: &[Row]) -> Result<Vec<TopologyRow>> {
    let mut entries: Vec<TopologyRow> = Vec::with_capacity(rows.len());
    let mut damaged = None;
    for (number, row) in rows.iter().enumerate() {
        match decode(feed, row) {
            Err(error @ Error::Corrupt { .. }) if number + 1 < rows.len() => {
                feed.context.skip(&SkippedAt::Key(row.0.clone()), &error);
                damaged.get_or_insert(feed.context.keys.topology_key(&row.0)?.1);
            }
            entry => {
                let entry = entry?;
                let begin = entries.last().map_or(ShardId(0), TopologyRow::next_shard);
                let end = entry.shards().next().filter(|end| *end > begin);
                if let (Some(first), Some(end)) = (damaged.take(), end) {
                    entries.push(unreadable(first, begin, end));
                }
                entries.push(entry);
            }
        }
    }
    Ok(entries)
}

/// Returns a stand-in for an undecodable closed entry. It begins at `first`, and has the shards from `begin` up to but excluding `end`.
fn unreadable(first: Sequence, begin: ShardId, end: ShardId) -> TopologyRow {
    let count = u32::try_from(end.0 - begin.0).unwrap_or(u32::MAX).min(SHARDS_MAX);
    let layout =
        Layout::Sharded { scheme: SchemeId::UNREADABLE.0, first: ShardId(end.0 - u64::from(count)), count };
    TopologyRow { first, closed: true, token: [0; 16], layout }
}

fn shard_in(entry: &TopologyRow, feed: RawFeed<'_>, id: &[u8]) -> Result<ShardId> {
    match entry.layout {
        Layout::Legacy(_) => Ok(ShardId(0)),
        Layout::Sharded { scheme, .. } if scheme == SchemeId::UNREADABLE.0 => {
            Err(Error::corrupt("topology", format!("the entry from {} on cannot be decoded", entry.first)))
        }
        Layout::Sharded { scheme, first, count } => {
            let place = feed.context.schemes.place(SchemeId(scheme), id, count)?;
            Ok(ShardId(first.0 + u64::from(place)))
        }
    }
}

pub(super) fn space_of(entry: &TopologyRow, feed: RawFeed<'_>, shard: ShardId) -> RowSpace {
    match &entry.layout {
        Layout::Legacy(prefix) if !prefix.is_empty() => RowSpace::new(prefix.clone()),
        Layout::Legacy(_) | Layout::Sharded { .. } => feed.context.keys.shard_rows(feed.id, shard),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::{Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    fn entry(version: u64, first: u64, count: u32, closed: bool) -> TopologyRow {
        let layout = Layout::Sharded { scheme: 1, first: ShardId(first), count };
        let first = if version == 0 { Sequence::MIN } else { at(version) };
        TopologyRow { first, closed, token: [0; 16], layout }
    }

    #[test]
    fn a_sequence_belongs_to_the_entry_that_was_open_then() {
        let topology =
            Topology::new(vec![entry(0, 1, 1, true), entry(10, 2, 4, true), entry(20, 6, 2, false)]).unwrap();
        let first_shard = |version| topology.at(at(version)).shards().next().unwrap().0;
        assert_eq!([0, 9, 10, 19, 20, 99].map(first_shard), [1, 1, 2, 2, 6, 6]);
        assert_eq!(topology.after(at(9)).len(), 3);
        assert_eq!(topology.after(at(10)).len(), 2);
        assert_eq!(topology.after(at(25)).len(), 1);
        let (of, successor) = topology.entry_of(ShardId(5)).unwrap();
        assert_eq!((of.first, successor.unwrap().first), (at(10), at(20)));
        assert!(topology.entry_of(ShardId(7)).unwrap().1.is_none());
        let unknown = topology.entry_of(ShardId(8)).unwrap_err();
        assert!(matches!(unknown, Error::NoShard { shard: 8, is_trimmed: false }));
    }

    #[test]
    fn what_was_dropped_in_between_leads_to_its_successor() {
        let topology = Topology::new(vec![entry(0, 1, 1, true), entry(20, 6, 2, false)]).unwrap();
        let trimmed = topology.entry_of(ShardId(3)).unwrap_err();
        assert!(matches!(trimmed, Error::NoShard { shard: 3, is_trimmed: true }));
        assert_eq!(topology.successor_of_trimmed(ShardId(3)).unwrap().first, at(20));
    }

    #[test]
    fn contradictory_histories_are_refused() {
        for bad in [
            vec![entry(0, 1, 1, true)],
            vec![entry(0, 1, 1, false), entry(10, 2, 1, false)],
            vec![entry(0, 5, 1, true), entry(10, 2, 1, false)],
        ] {
            assert!(Topology::new(bad).is_err());
        }
    }
}
