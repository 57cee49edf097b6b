//! The oracle for the feed of notifications: one row per database, in order, with exactly the events that were recorded, and written only
//! under the lease of its partition.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use notibus::{
    event::{Counters, Db, DbName, EventKind, Kinds, Notification, Sequence},
    feed::{FeedRow, ShardId},
    test_util::inspect,
};

use super::{
    FEED, Oracle, Placed,
    commit::{Change, ObservedCommit, StoredChanges, Verdict},
    stored_item::StoredItem,
};
use crate::{findings::Findings, guarantee::Guarantee, keyspace::BUS_PREFIX, witness::Witness};

/// Returns `a - b`, lane by lane; `None` if a lane would be negative.
fn minus(a: Counters, b: Counters) -> Option<Counters> {
    let (a, b) = (a.lanes(), b.lanes());
    let mut lanes = [0; 4];
    for (lane, (a, b)) in lanes.iter_mut().zip(a.into_iter().zip(b)) {
        *lane = a.checked_sub(b)?;
    }
    Some(Counters::from_lanes(lanes))
}

impl Oracle {
    /// Returns the position of the newest row so far, even if it is gone.
    pub fn end_of_feed(&self) -> Sequence {
        self.past.last_key_value().map_or(Sequence::MIN, |(at, _)| *at)
    }

    /// Whether the issuer of a commit owned the lease of `resource` in `pool` when the commit was decided.
    pub(super) fn owns(&self, seen: &ObservedCommit<'_>, pool: &str, resource: u64) -> bool {
        let key = inspect::lease(BUS_PREFIX, pool, resource).expect("the prefix is short");
        let owner = (seen.before)(&key).and_then(|value| inspect::owner(&value).ok().flatten());
        owner.is_some_and(|node| self.nodes.get(&seen.issuer).is_some_and(|nodes| nodes.contains(&node)))
    }

    /// Judges and records the changes that a commit made to the rows of the feed.
    pub(super) fn judge_feed(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) -> Verdict {
        let (mut written, mut removed) = (BTreeMap::new(), BTreeMap::new());
        for (item, change) in items {
            match item {
                StoredItem::FoldMark(partition) => {
                    let lease = StoredItem::Lease("partition".to_owned(), (*partition).into());
                    let takes_lease = items.iter().any(|(item, _)| *item == lease);
                    if !takes_lease && !self.owns(seen, "partition", (*partition).into()) {
                        return Guarantee::Fenced
                            .fails(format!("partition {partition} was folded without its lease"));
                    }
                    if !takes_lease && seen.is_late {
                        findings.witness(Witness::LateFoldCommitted);
                    }
                }
                StoredItem::Lease(pool, resource) => {
                    let owner = |value: &Option<Bytes>| inspect::owner(value.as_ref()?).ok().flatten();
                    let is_free = owner(&change.before).is_some()
                        && change.after.is_some()
                        && owner(&change.after).is_none();
                    // A reset, deletion or pause of a consumer also takes its leases from their owners.
                    let is_taken = items.iter().any(|(item, _)| matches!(item, StoredItem::Consumer(_)));
                    if is_free && !is_taken && !self.owns(seen, pool, *resource) {
                        return Guarantee::Fenced
                            .fails(format!("the lease of {pool} {resource} was released, not by its owner"));
                    }
                }
                StoredItem::Horizon(feed) if feed == FEED => {
                    if let Some(value) = &change.after {
                        self.horizon = Sequence::from_bytes(value).map_err(|error| error.to_string())?;
                    }
                }
                StoredItem::Topology(feed, first) if feed == FEED => {
                    if let Change { before: None, after: Some(value) } = change {
                        let shards = inspect::topology(*first, value).map_err(|error| error.to_string())?;
                        self.entries.push(shards);
                    }
                }
                StoredItem::Ddoc(db, id) => self.see_ddoc((db.clone(), id.clone()), change)?,
                StoredItem::Row(feed, shard, at) if feed == FEED => {
                    Self::gather(seen, (*shard, *at), change, (&mut written, &mut removed))?;
                }
                _ => {}
            }
        }
        let newest = self.end_of_feed();
        for (name, placed) in written {
            let at = placed.row.sequence;
            if at <= newest {
                return Guarantee::Ordered
                    .fails(format!("a row stands at {at}, not after the one at {newest}"));
            }
            self.judge_row(findings, name, placed, &mut removed)?;
        }
        for (name, row) in removed {
            self.judge_drop(findings, &name, &row)?;
        }
        Ok(())
    }

    /// Records that a stored row of a design document changed.
    fn see_ddoc(&mut self, ddoc: (Db, Option<notibus::event::DdocId>), change: &Change) -> Verdict {
        let Some(value) = &change.after else {
            self.ddocs.remove(&ddoc);
            return Ok(());
        };
        let at = Sequence::from_bytes(value).map_err(|error| error.to_string())?;
        self.ddocs.insert(ddoc.clone(), at);
        self.reported_ddocs.insert(ddoc, at);
        Ok(())
    }

    /// Adds the row at `at` of `shard` to the rows that were written, or to those that were removed.
    fn gather(
        seen: &ObservedCommit<'_>,
        (shard, at): (ShardId, Sequence),
        change: &Change,
        (written, removed): (&mut BTreeMap<DbName, Placed>, &mut BTreeMap<DbName, Arc<Notification>>),
    ) -> Verdict {
        let read = |value: &Bytes| Notification::from_stored(at, value).map_err(|error| error.to_string());
        match change {
            Change { before: None, after: Some(value) } => {
                let row = Arc::new(read(value)?);
                if at.versionstamp() != seen.stamp {
                    return Guarantee::Ordered
                        .fails(format!("a row stands at {at}, which is not its commit"));
                }
                let name = row.name.clone();
                if written.insert(name.clone(), Placed { shard, row }).is_some() {
                    return Guarantee::Unique.fails(format!("two rows of {name:?} were written at once"));
                }
            }
            Change { before: Some(value), after: None } => {
                let row = read(value)?;
                removed.insert(row.name.clone(), Arc::new(row));
            }
            change if change.before == change.after => {}
            _ => return Guarantee::Unique.fails(format!("the row at {at} was overwritten")),
        }
        Ok(())
    }

    /// Judges the next row of `name`: the previous row must be gone, and the totals may grow only by events that were recorded.
    fn judge_row(
        &mut self,
        findings: &Findings,
        name: DbName,
        placed: Placed,
        removed: &mut BTreeMap<DbName, Arc<Notification>>,
    ) -> Verdict {
        let row = Arc::clone(&placed.row);
        let before = self.rows.get(&name).map(|placed| Arc::clone(&placed.row));
        let is_end =
            row.is_deleted() || before.as_ref().is_some_and(|before| before.instance != row.instance);
        self.note_row_for_consumers(findings, name.as_str(), is_end);
        if removed.remove(&name) != before {
            return Guarantee::Unique.fails(format!("{row:?} was written, and {before:?} stays"));
        }
        let recorded = self.recorded.get(&row.db()).copied().unwrap_or(Counters::ZERO);
        let same = before.as_ref().filter(|before| before.instance == row.instance);
        let counted = same.map_or(Counters::ZERO, |before| before.totals);
        let (Some(news), Some(_)) = (minus(row.totals, counted), minus(recorded, row.totals)) else {
            return Guarantee::FoldedOnce
                .fails(format!("{row:?} was written after {counted:?} of {recorded:?} recorded events"));
        };
        let mut kinds: Kinds =
            EventKind::ALL.into_iter().filter(|kind| news.lanes()[*kind as usize] > 0).collect();
        // The id of a changed design document counts as a change, even if no such event was counted.
        if row.ddoc_updated_at == Some(row.sequence) {
            kinds |= EventKind::DdocUpdated.into();
        }
        if same.is_none() && before.is_some_and(|before| !before.is_deleted()) {
            findings.witness(Witness::DeletionAndCreationInOneFold);
        }
        if name.as_str().len() == DbName::LEN_MAX {
            findings.witness(Witness::LongNameFolded);
        }
        self.ledger.fold(&name, row.sequence, row.instance, kinds);
        if row.replaced.is_some_and(|replaced| replaced.deleted_at == row.sequence) {
            self.ledger.show_end(&name, row.sequence);
        }
        self.past.insert(row.sequence, row);
        self.rows.insert(name, placed);
        Ok(())
    }

    /// Judges a row that is removed without a successor: it must be a tombstone that no reader needs.
    fn judge_drop(&mut self, findings: &Findings, name: &DbName, row: &Notification) -> Verdict {
        findings.witness(Witness::TombstoneDropped);
        if !row.is_deleted() {
            return Guarantee::Kept.fails(format!("the row of {name:?} was dropped, which lives"));
        }
        self.may_drop_from_consumers(row)?;
        if self.rows.remove(name).is_none_or(|placed| placed.row.sequence != row.sequence) {
            return Guarantee::Unique.fails(format!("a row of {name:?} was dropped that is not the newest"));
        }
        self.ledger.drop_tombstone(name, row.sequence);
        self.note_drop(findings, name);
        Ok(())
    }

    /// Describes recorded events that no row counts yet. Events of instances that are gone need not be counted.
    pub(super) fn unfolded(&self) -> Option<String> {
        self.recorded.keys().find_map(|db| {
            let row = self.rows.get(&db.name).map(|placed| &placed.row);
            let lives = self.databases.get(&db.name);
            let counted = match (lives, row) {
                (Some(lives), _) if *lives != db.instance => return None,
                (Some(_), row) => row.filter(|row| row.instance == db.instance && !row.is_deleted()),
                (None, Some(row)) if row.instance != db.instance && row.is_deleted() => return None,
                (None, Some(row)) => Some(row).filter(|row| row.is_deleted()),
                (None, None) if self.ledger.was_dropped_after(&db.name, Sequence::MIN) => return None,
                (None, None) => None,
            };
            let (counted, recorded) = (counted.map(|row| row.totals), self.recorded[db]);
            (counted != Some(recorded))
                .then(|| format!("{counted:?} of {db:?} are in its row, of {recorded:?}"))
        })
    }
}
