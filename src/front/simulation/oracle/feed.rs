//! The oracle on rows and topologies: exactly-once folding, one row per database, no row in a closed shard.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    FEED, Oracle, Placed,
    commit::{Change, ObservedCommit, StoredChanges, Verdict},
    stored_item::StoredItem,
};
use crate::{
    base::{
        encoding::{Counters, Sequence, Tally},
        event::{Db, DbName, EventKind, Kinds},
        notification::Notification,
    },
    front::simulation::{
        findings::Findings,
        guarantee::{Broken, Guarantee},
        keyspace::BROKEN,
        witness::Witness,
    },
    state::{
        keys::{FoldMark, Layout, Lease, Partition, ShardId, TopologyRow},
        routing::{SchemeId, Schemes},
    },
};

/// The events that a fold has taken from the counters, and its rows.
#[derive(Default)]
struct Fold {
    taken: BTreeMap<Db, Counters>,
    /// Databases with changes of design documents without an id.
    nameless: BTreeSet<Db>,
    /// Databases with other rows than counters.
    others: BTreeSet<Db>,
    added: BTreeMap<DbName, Placed>,
    removed: BTreeMap<DbName, Arc<Notification>>,
}

/// The counters in a value, and how many of their design documents have an id.
fn counters(value: Option<&bytes::Bytes>) -> Result<(Counters, u64), Broken> {
    let tally = value.map(|value| Tally::from_bytes(value)).transpose();
    let tally = tally.map_err(|error| error.to_string())?.unwrap_or_default();
    Ok((tally.counters, tally.with_id))
}

/// `a - b`, lane by lane; `None` if a lane would be less than nothing.
fn minus(a: Counters, b: Counters) -> Option<Counters> {
    let (a, b) = (a.lanes(), b.lanes());
    let mut lanes = [0; 4];
    for (lane, (a, b)) in lanes.iter_mut().zip(a.into_iter().zip(b)) {
        *lane = a.checked_sub(b)?;
    }
    Some(Counters::from_lanes(lanes))
}

/// `a + b`, lane by lane.
fn plus(mut a: Counters, b: Counters) -> Counters {
    a += b;
    a
}

impl Oracle {
    /// Judges and records topology entries: the last one is open, all others are closed, and ids only grow.
    pub(super) fn judge_topology(&mut self, findings: &Findings, items: &StoredChanges<'_>) -> Verdict {
        let mut entries: BTreeMap<Sequence, TopologyRow> =
            self.topology.drain(..).map(|entry| (entry.first, entry)).collect();
        let mut is_changed = false;
        for (item, change) in items {
            let StoredItem::Topology(feed, first) = item else { continue };
            if feed != FEED {
                continue;
            }
            is_changed = true;
            let Some(value) = &change.after else {
                findings.witness(Witness::TopologyDropped);
                let in_it = entries.remove(first);
                let has_row = |entry: &TopologyRow| self.rows.values().any(|placed| entry.has(placed.shard));
                if in_it.is_some_and(|entry| !entry.closed || has_row(&entry)) {
                    return Guarantee::Kept
                        .fails(format!("the topology entry of {first} was dropped, and is needed"));
                }
                continue;
            };
            let entry = TopologyRow::from_bytes(*first, value).map_err(|error| error.to_string())?;
            if change.before.is_none() {
                if entry.shards().next().is_some_and(|shard| shard.0 < self.next_shard) {
                    return Guarantee::Consistent.fails(format!("a shard id was used again: {entry:?}"));
                }
                self.next_shard = entry.next_shard().0;
                self.entries.push(entry.clone());
            }
            entries.insert(*first, entry);
        }
        self.topology = entries.into_values().collect();
        if is_changed {
            if self.topology.len() >= 3 {
                findings.witness(Witness::ManyTopologies);
            }
            let open = self.topology.iter().filter(|entry| !entry.closed).count();
            if open != 1 || self.topology.last().is_none_or(|last| last.closed) {
                return Guarantee::Consistent.fails(format!("{open} topology entries are open"));
            }
        }
        Ok(())
    }

    /// Judges the changes of a commit to counters, rows and the keys beside them.
    pub(super) fn judge_feed(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
        recorded: &BTreeMap<Db, Counters>,
    ) -> Verdict {
        let mut fold = self.gather(seen, items)?;
        let marks: Vec<_> =
            items.iter().filter(|(item, _)| matches!(item, StoredItem::FoldMark(_))).collect();
        let is_fold = self.judge_marks(findings, seen, items, &marks)?;
        if !is_fold {
            self.judge_recording(items, recorded)?;
            if !fold.added.is_empty() {
                return Guarantee::Consistent
                    .fails("a row was written by something other than a fold".to_owned());
            }
            return self.judge_drop(findings, items, fold);
        }
        if !recorded.is_empty() {
            return Guarantee::Consistent.fails("a fold records events".to_owned());
        }
        let Some((StoredItem::FoldMark(partition), _)) = marks.first() else {
            return Guarantee::Consistent.fails("a fold without a mark".to_owned());
        };
        let names: BTreeSet<_> = fold
            .taken
            .keys()
            .chain(&fold.others)
            .map(|db| db.name.clone())
            .chain(fold.added.keys().cloned())
            .chain(fold.removed.keys().cloned())
            .collect();
        self.witness_sizes(findings, &fold);
        for name in names {
            if Partition::of(name.as_str(), self.partitions).0 != *partition {
                return Guarantee::Consistent
                    .fails(format!("{name:?} was folded as if it were of partition {partition}"));
            }
            self.judge_name(findings, &name, &mut fold, items)?;
        }
        if seen.is_late {
            findings.witness(Witness::LateFoldCommitted);
        }
        Ok(())
    }

    fn witness_sizes(&self, findings: &Findings, fold: &Fold) {
        if fold.added.keys().any(|name| name.as_str().len() == DbName::LEN_MAX) {
            findings.witness(Witness::LongNameFolded);
        }
        if self.rows.len() >= 1_000 {
            findings.witness(Witness::ManyDatabasesFolded);
        }
        if !fold.added.is_empty() && self.topology.last().is_some_and(|open| open.shards().count() >= 1_000) {
            findings.witness(Witness::ManyShardsWritten);
        }
    }

    /// Collects the events that a commit has taken from the counters, and the rows that it has written and removed.
    fn gather(&self, seen: &ObservedCommit<'_>, items: &StoredChanges<'_>) -> Result<Fold, Broken> {
        let mut fold = Fold::default();
        for (item, change) in items {
            match item {
                StoredItem::Counters(db) => {
                    let ((before, with_id), (after, still_with_id)) =
                        (counters(change.before.as_ref())?, counters(change.after.as_ref())?);
                    if change.after.is_some() && after == Counters::ZERO {
                        return Guarantee::Consistent
                            .fails(format!("counters of {db:?} without a count were left behind"));
                    }
                    if let Some(taken) = minus(before, after) {
                        if with_id
                            .checked_sub(still_with_id)
                            .is_some_and(|with_id| taken.ddoc_updated > with_id)
                        {
                            fold.nameless.insert(db.clone());
                        }
                        *fold.taken.entry(db.clone()).or_default() += taken;
                    }
                }
                // A design document that was changed again meanwhile is in the notification all the same.
                StoredItem::LastUpdate(db) | StoredItem::PendingDdoc(db, _) => {
                    fold.others.insert(db.clone());
                }
                StoredItem::Row(feed, shard, sequence) if feed == FEED => {
                    self.gather_row(seen, &mut fold, (*shard, *sequence), change)?;
                }
                _ => {}
            }
        }
        Ok(fold)
    }

    /// Adds the row at `sequence` of `shard` to the written or removed ones.
    fn gather_row(
        &self,
        seen: &ObservedCommit<'_>,
        fold: &mut Fold,
        (shard, sequence): (ShardId, Sequence),
        change: &Change,
    ) -> Verdict {
        match change {
            Change { before: None, after: Some(value) } if value == BROKEN => {}
            Change { before: None, after: Some(value) } => {
                let row = Notification::from_bytes(sequence, value).map_err(|error| error.to_string())?;
                if (sequence.incarnation(), sequence.versionstamp()) != (self.incarnation, seen.stamp) {
                    return Guarantee::Consistent
                        .fails(format!("a row stands at {sequence}, which is not its commit"));
                }
                let open = self.topology.last().ok_or("there is no topology")?;
                let Layout::Sharded { scheme, first, count } = open.layout else {
                    return Guarantee::Consistent.fails("the open entry is a legacy range".to_owned());
                };
                let place = Schemes::default()
                    .place(SchemeId(scheme), row.name.as_str().as_bytes(), count)
                    .map_err(|error| error.to_string())?;
                if shard.0 != first.0 + u64::from(place) {
                    return Guarantee::Consistent.fails(format!(
                        "the row of {:?} was written to shard {shard}, of {open:?}",
                        row.name
                    ));
                }
                let name = row.name.clone();
                if fold.added.insert(name.clone(), Placed { shard, row: Arc::new(row) }).is_some() {
                    return Guarantee::Consistent.fails(format!("two rows of {name:?} were written at once"));
                }
            }
            Change { before: Some(value), after: None } => {
                let row = Notification::from_bytes(sequence, value).map_err(|error| error.to_string())?;
                fold.removed.insert(row.name.clone(), Arc::new(row));
            }
            change if change.before == change.after => {}
            _ => return Guarantee::Consistent.fails(format!("the row at {sequence} was overwritten")),
        }
        Ok(())
    }

    /// Whether the commit is a fold. Its mark must be the next one, under the lease that holds.
    fn judge_marks(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
        marks: &[&(StoredItem, &Change)],
    ) -> Result<bool, Broken> {
        let mark_of = |value: &Option<bytes::Bytes>| {
            value
                .as_ref()
                .map(|value| FoldMark::from_bytes(value).map_err(|error| error.to_string()))
                .transpose()
        };
        let mut folds = 0;
        for (item, change) in marks {
            let StoredItem::FoldMark(partition) = item else { continue };
            let (before, after) = (mark_of(&change.before)?, mark_of(&change.after)?);
            let after = after.ok_or_else(|| format!("the fold mark of partition {partition} was removed"))?;
            let lease = StoredItem::Lease("partition".to_owned(), u64::from(*partition));
            if let Some((_, lease)) = items.iter().find(|(item, _)| *item == lease) {
                let lease = lease.after.as_ref().map(|value| Lease::from_bytes(value));
                let epoch = lease.and_then(Result::ok).map(|lease| lease.epoch);
                if after.fold != 0 || Some(after.epoch) != epoch {
                    return Guarantee::Consistent
                        .fails(format!("{after:?} does not begin the epoch {epoch:?}"));
                }
                continue;
            }
            folds += 1;
            let key = self.keys.lease("partition", u64::from(*partition));
            let lease =
                (seen.before)(&key).and_then(|value| Lease::from_bytes(&value).ok()).unwrap_or_default();
            let is_next = before.is_some_and(|before| {
                (after.epoch, after.fold) == (before.epoch, before.fold + 1) && after.epoch == lease.epoch
            });
            let owns = lease.owner.is_some_and(|owner| self.is_node(seen.issuer, owner.node));
            if !is_next || !owns {
                return Guarantee::Fenced.fails(format!(
                    "partition {partition} was folded as {after:?} after {before:?}, under {lease:?}"
                ));
            }
            let doorbell = self.keys.doorbell(Partition(*partition));
            if self.lost_watches.remove(&(seen.issuer, doorbell)) {
                findings.witness(Witness::LostWatchSavedByPoll);
            }
        }
        match folds {
            0 => Ok(false),
            1 => Ok(true),
            _ => Guarantee::Consistent.fails("two partitions were folded in one transaction".to_owned()),
        }
    }

    /// Producers must add exactly the recorded events to the counters.
    fn judge_recording(&mut self, items: &StoredChanges<'_>, recorded: &BTreeMap<Db, Counters>) -> Verdict {
        let mut added: BTreeMap<Db, Counters> = BTreeMap::new();
        for (item, change) in items {
            if let StoredItem::Counters(db) = item {
                let (before, after) =
                    (counters(change.before.as_ref())?.0, counters(change.after.as_ref())?.0);
                let more = minus(after, before)
                    .ok_or_else(|| format!("events of {db:?} were taken by something other than a fold"))?;
                *added.entry(db.clone()).or_default() += more;
            }
        }
        if added != *recorded {
            return Guarantee::Consistent
                .fails(format!("{recorded:?} was recorded, and {added:?} was added"));
        }
        for (db, counters) in added {
            *self.waiting.entry(db).or_default() += counters;
        }
        Ok(())
    }

    /// Rows that are removed without a successor must be tombstones that no reader needs.
    fn judge_drop(&mut self, findings: &Findings, items: &StoredChanges<'_>, fold: Fold) -> Verdict {
        for (item, change) in items {
            if let (StoredItem::Horizon(feed), Some(value)) = (item, &change.after)
                && feed == FEED
            {
                let horizon = Sequence::from_bytes(value).map_err(|error| error.to_string())?;
                if horizon < self.horizon {
                    return Guarantee::Consistent
                        .fails(format!("the horizon went back from {} to {horizon}", self.horizon));
                }
                self.horizon = horizon;
            }
        }
        for (name, row) in fold.removed {
            findings.witness(Witness::TombstoneDropped);
            if !row.is_deleted() {
                return Guarantee::Kept.fails(format!("the row of {name:?} was dropped, which lives"));
            }
            if self.horizon < row.sequence {
                return Guarantee::Kept
                    .fails(format!("the row at {} was dropped above the horizon", row.sequence));
            }
            self.may_drop(row.sequence)?;
            if self.rows.remove(&name).is_none_or(|placed| placed.row.sequence != row.sequence) {
                return Guarantee::Consistent
                    .fails(format!("a row of {name:?} was dropped that is not the newest"));
            }
            let newest = StoredItem::Newest(FEED.to_vec(), name.as_str().as_bytes().to_vec());
            if !items.iter().any(|(item, change)| *item == newest && change.after.is_none()) {
                return Guarantee::Consistent
                    .fails(format!("the row of {name:?} was dropped, but not where it stands"));
            }
            *self.dropped.entry(row.db()).or_default() += row.totals;
            self.ledger.drop_tombstone(&name, row.sequence);
            self.note_drop(findings, &name);
        }
        Ok(())
    }

    /// Judges the fold of one name.
    fn judge_name(
        &mut self,
        findings: &Findings,
        name: &DbName,
        fold: &mut Fold,
        items: &StoredChanges<'_>,
    ) -> Verdict {
        let mut taken: BTreeMap<Db, Counters> = BTreeMap::new();
        for (db, counters) in fold.taken.iter().filter(|(db, _)| db.name == *name) {
            let waiting = self.waiting.entry(db.clone()).or_default();
            *waiting = minus(*waiting, *counters)
                .ok_or_else(|| format!("{counters:?} of {db:?} were taken, and {waiting:?} waited"))?;
            taken.insert(db.clone(), *counters);
        }
        self.waiting.retain(|_, counters| *counters != Counters::ZERO);
        for db in fold.others.iter().filter(|db| db.name == *name) {
            taken.entry(db.clone()).or_default();
        }
        let before = self.rows.get(name).cloned();
        let removed = fold.removed.remove(name);
        if removed.as_ref().map(|row| row.sequence) != before.as_ref().map(|placed| placed.row.sequence)
            && (removed.is_some() || fold.added.contains_key(name))
        {
            return Guarantee::Consistent
                .fails(format!("a row of {name:?} was written or removed, and {before:?} stays"));
        }
        let Some(placed) = fold.added.remove(name) else {
            return self.judge_stale(findings, name, before.as_ref(), taken);
        };
        let row = Arc::clone(&placed.row);
        self.judge_row(name, before.as_ref().map(|placed| &*placed.row), &row, &taken)?;
        Self::judge_newest(&placed, items)?;
        for (db, counters) in &taken {
            let is_gone = db.instance != row.instance
                && before.as_ref().is_none_or(|before| before.row.instance != db.instance);
            if is_gone && counters.created > 0 && counters.deleted > 0 {
                findings.witness(Witness::CameAndWentUnseen);
            }
        }
        let replaces = before.as_ref().filter(|before| before.row.instance != row.instance);
        let is_deletion =
            |before: &&Placed| taken.get(&before.row.db()).is_some_and(|taken| taken.deleted > 0);
        if replaces.as_ref().is_some_and(is_deletion) {
            findings.witness(Witness::DeletionAndCreationInOneFold);
        }
        if self.waiting.keys().any(|db| db.name == *name && !taken.contains_key(db)) {
            findings.witness(Witness::NameTorn);
        }
        let has_id = |(item, _): &(StoredItem, &Change)| matches!(item, StoredItem::PendingDdoc(db, _) if *db == row.db());
        let mut kinds = Kinds::counted(&taken.get(&row.db()).copied().unwrap_or(Counters::ZERO));
        if items.iter().any(has_id) {
            kinds |= EventKind::DdocUpdated.into();
        }
        self.ledger.fold(name, row.sequence, row.instance, kinds);
        let is_nameless = fold.nameless.contains(&row.db());
        self.judge_ddocs(before.as_ref().map(|placed| &*placed.row), &row, is_nameless, items)?;
        self.past.insert(row.sequence, row);
        self.rows.insert(name.clone(), placed);
        Ok(())
    }

    /// A fold that writes no row of a name may take only events of instances that are gone.
    fn judge_stale(
        &mut self,
        findings: &Findings,
        name: &DbName,
        before: Option<&Placed>,
        taken: BTreeMap<Db, Counters>,
    ) -> Verdict {
        for (db, counters) in taken {
            if counters == Counters::ZERO {
                continue;
            }
            let Some(before) = before else {
                return Guarantee::FoldedOnce
                    .fails(format!("{counters:?} of {db:?} were taken, and there is no row"));
            };
            if before.row.instance == db.instance || self.databases.get(name) == Some(&db.instance) {
                return Guarantee::FoldedOnce
                    .fails(format!("{counters:?} of {db:?} were taken, and its row does not change"));
            }
            findings.witness(Witness::StaleEvents);
            *self.stale.entry(db).or_default() += counters;
        }
        Ok(())
    }

    /// Judges the next row of a name.
    fn judge_row(
        &mut self,
        name: &DbName,
        before: Option<&Notification>,
        row: &Notification,
        taken: &BTreeMap<Db, Counters>,
    ) -> Verdict {
        let db = row.db();
        let own =
            *taken.get(&db).ok_or_else(|| format!("the row of {db:?} is of no instance that has events"))?;
        let same = before.filter(|before| before.instance == row.instance);
        let expected = plus(same.map_or(Counters::ZERO, |before| before.totals), own);
        if row.totals != expected {
            return Guarantee::FoldedOnce
                .fails(format!("the row of {db:?} counts {:?} instead of {expected:?}", row.totals));
        }
        if self
            .databases
            .get(name)
            .is_some_and(|lives| *lives != row.instance && taken.contains_key(&Db::new(name.clone(), *lives)))
        {
            return Guarantee::Consistent
                .fails(format!("the row of {db:?} was written, although another instance lives"));
        }
        let now = Kinds::counted(&own);
        let at = |row: &Notification, kind| match kind {
            EventKind::Created => row.created_at,
            EventKind::Deleted => row.deleted_at,
            EventKind::Updated => row.updated_at,
            EventKind::DdocUpdated => row.ddoc_updated_at,
        };
        for kind in [EventKind::Created, EventKind::Deleted, EventKind::Updated, EventKind::DdocUpdated] {
            let earlier = same.and_then(|before| at(before, kind));
            let stated = at(row, kind);
            // An id of a design document without a count stands for a change as well.
            let is_now = stated == Some(row.sequence);
            let is_right = if now.contains(kind) {
                is_now
            } else {
                stated == earlier || kind == EventKind::DdocUpdated && is_now
            };
            if !is_right {
                return Guarantee::Consistent
                    .fails(format!("the row of {db:?} says {kind:?} at {stated:?}, after {earlier:?}"));
            }
        }
        match (before, row.replaced) {
            (Some(before), Some(replaced)) if before.instance != row.instance => {
                let expected = before.deleted_at.unwrap_or(row.sequence);
                if (replaced.instance, replaced.deleted_at) != (before.instance, expected) {
                    return Guarantee::Consistent
                        .fails(format!("the row of {db:?} replaces {replaced:?}, not {before:?}"));
                }
            }
            (Some(before), replaced) if before.instance == row.instance => {
                if replaced != before.replaced {
                    return Guarantee::Consistent
                        .fails(format!("the row of {db:?} has forgotten what it replaces"));
                }
            }
            (Some(_), _) => {
                return Guarantee::Consistent
                    .fails(format!("the row of {db:?} does not say what it replaces"));
            }
            (None, _) => {}
        }
        // No row counts folded events of other instances any more.
        for (other, counters) in taken.iter().filter(|(other, _)| **other != db) {
            if before.is_none_or(|before| before.instance != other.instance) {
                *self.stale.entry(other.clone()).or_default() += *counters;
            }
        }
        Ok(())
    }

    /// The newest row of the name must be recorded, and the pulse must have moved in the lane of its shard.
    fn judge_newest(placed: &Placed, items: &StoredChanges<'_>) -> Verdict {
        let Placed { shard, row } = placed;
        let newest = StoredItem::Newest(FEED.to_vec(), row.name.as_str().as_bytes().to_vec());
        let says = |wanted: &StoredItem| {
            items.iter().find(|(item, _)| item == wanted).and_then(|(_, change)| change.after.clone())
        };
        if says(&newest).as_deref() != Some(&row.sequence.as_bytes()[..]) {
            return Guarantee::Consistent
                .fails(format!("the newest row of {:?} is not recorded at {}", row.name, row.sequence));
        }
        let pulse = items.iter().find(|(item, _)| *item == StoredItem::Pulse(FEED.to_vec()));
        // 16 lanes of 4 bytes, none of which is there before the first row.
        let place = shard.0 as usize % 16 * 4;
        let lane = |value: &Option<bytes::Bytes>| Some(value.as_ref()?.get(place..place + 4)?.to_vec());
        if pulse.is_none_or(|(_, change)| lane(&change.before) == lane(&change.after)) {
            return Guarantee::Consistent.fails(format!("the pulse has not moved for shard {shard}"));
        }
        Ok(())
    }

    /// Judges and records changed design documents, and those that go with their databases.
    fn judge_ddocs(
        &mut self,
        before: Option<&Notification>,
        row: &Notification,
        is_nameless: bool,
        items: &StoredChanges<'_>,
    ) -> Verdict {
        if let Some(before) = before.filter(|before| row.is_deleted() || before.instance != row.instance) {
            self.ddocs.retain(|(db, _), _| *db != before.db());
        }
        let named = items.iter().filter_map(|(item, _)| match item {
            StoredItem::PendingDdoc(db, id) if *db == row.db() => Some(Some(id.clone())),
            _ => None,
        });
        for id in named.chain(is_nameless.then_some(None)) {
            self.reported_ddocs.insert((row.db(), id.clone()), row.sequence);
            if !row.is_deleted() {
                self.ddocs.insert((row.db(), id), row.sequence);
            }
        }
        for (item, change) in items {
            let StoredItem::Ddoc(db, id) = item else { continue };
            if db.name != row.name {
                continue;
            }
            let stated = change.after.as_ref().map(|value| Sequence::from_bytes(value)).transpose();
            let stated = stated.map_err(|error| error.to_string())?;
            let expected = self.ddocs.get(&(db.clone(), id.clone())).copied();
            if stated != expected {
                return Guarantee::Consistent
                    .fails(format!("{id:?} of {db:?} is recorded at {stated:?} instead of {expected:?}"));
            }
        }
        Ok(())
    }
}
