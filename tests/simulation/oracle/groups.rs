//! The oracle on groups: no checkpoint passes a row without work, work happens once where that is promised, and no
//! row is dropped that a group still has to read.

use std::collections::{BTreeMap, BTreeSet};

use notibus::{
    event::{DbInstance, DbName, Sequence},
    feed::ShardId,
    group::GroupName,
    test_util::rooms,
};

use super::{
    Oracle, Placed,
    commit::{ObservedCommit, StoredChanges, Verdict},
    models::{
        documents::DocFeed,
        group::{GroupId, GroupModel},
    },
    stored_item::StoredItem,
};
use crate::{app::AppKey, findings::Findings, guarantee::Guarantee, witness::Witness};

/// The positions of the rows of the feed of `group`.
fn rows_of<'a>(
    rows: &'a BTreeMap<DbName, Placed>,
    documents: &'a BTreeMap<DbInstance, DocFeed>,
    group: &GroupId,
) -> impl Iterator<Item = (ShardId, Sequence)> + use<'a> {
    let instance = group.instance;
    let notifications = rows.values().map(|placed| (placed.shard, placed.row.sequence));
    let documents = instance.and_then(|instance| documents.get(&instance));
    let documents = documents.into_iter().flat_map(DocFeed::places);
    notifications.filter(move |_| instance.is_none()).chain(documents)
}

/// Whether a newer row of its document may stand for that of `group` at `at`, where groups park: of the rows that wait behind a parked
/// one, only the newest is kept.
fn is_overtaken(documents: &BTreeMap<DbInstance, DocFeed>, group: &GroupId, at: Sequence) -> bool {
    let feed = group.instance.and_then(|instance| documents.get(&instance));
    feed.is_some_and(|feed| feed.has_newer(at))
}

impl Oracle {
    /// The number of the group's resets, which marks its work.
    pub fn generation(&self, group: &GroupName) -> u64 {
        self.groups.get(group).map_or(0, |group| group.generation)
    }

    /// Records that an observer has worked on rows, apart from its checkpoint.
    pub fn observed(&mut self, group: &GroupName, generation: u64, rows: &[Sequence]) {
        if let Some(group) = self.groups.get_mut(group).filter(|group| group.generation == generation) {
            group.done.extend(rows);
            group.is_used = true;
        }
    }

    /// Judges whether the row at `sequence` may be dropped.
    pub(super) fn may_drop(&self, sequence: Sequence) -> Verdict {
        for (name, group) in self.groups.iter().filter(|(_, group)| group.id.instance.is_none()) {
            if let Some((shard, at)) = group.checkpoints.iter().find(|(_, at)| **at < sequence) {
                return Guarantee::Kept
                    .fails(format!("the row at {sequence} was dropped, and {name} is at {at} in {shard}"));
            }
        }
        Ok(())
    }

    /// Judges the changes of a commit to groups.
    pub(super) fn judge_groups(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) -> Verdict {
        self.judge_left_entries(items)?;
        let mut set = BTreeSet::new();
        for (item, change) in items {
            let StoredItem::Group(name) = item else { continue };
            set.insert(name.clone());
            if change.before.is_some() {
                self.judge_operation(seen, name)?;
            }
            let was_used = self.groups.get(name).is_some_and(|group| group.is_used);
            let Some(value) = &change.after else {
                if was_used {
                    findings.witness(Witness::GroupDeleted);
                }
                self.judge_expiry(findings, seen, name, change)?;
                self.groups.remove(name);
                continue;
            };
            if change.before.is_some() && was_used {
                findings.witness(Witness::GroupReset);
            }
            let (start, _) = rooms::group(value).map_err(|error| error.to_string())?;
            self.next_reader += 1;
            let id = GroupId::of_key(name).ok_or_else(|| format!("{name} is a group of no feed"))?;
            let before = self.groups.get(name).filter(|_| change.before.is_some());
            let created = before.map_or(seen.stamp.version(), |before| before.created);
            self.groups.insert(name.clone(), GroupModel::new(id, self.next_reader, start, created));
        }
        self.judge_work(findings, seen, items)?;
        self.judge_parked(findings, seen, items, &set)?;
        self.judge_checkpoints(findings, seen, items, &set)?;
        self.judge_lowest(findings, items)
    }

    /// No group stands in a topology entry that is dropped, unless it goes with its feed: a node may still be at work in the entry.
    fn judge_left_entries(&self, items: &StoredChanges<'_>) -> Verdict {
        for (item, change) in items {
            let StoredItem::Topology(feed, first) = item else { continue };
            let (Some(before), None) = (&change.before, &change.after) else { continue };
            let entry = rooms::topology(*first, before).map_err(|error| error.to_string())?;
            let of_feed = self.groups.iter().filter(|(_, group)| group.id.feed() == *feed);
            let mut in_it =
                of_feed.filter(|(_, group)| group.checkpoints.keys().any(|shard| entry.contains(&shard.0)));
            let goes = |name: &GroupName| {
                items.iter().any(|(item, change)| {
                    matches!(item, StoredItem::Group(of) if of == name) && change.after.is_none()
                })
            };
            if let Some((name, _)) = in_it.find(|(name, _)| !goes(name)) {
                return Guarantee::Kept.fails(format!(
                    "the topology entry of {first} was dropped, and {name} has a checkpoint in it"
                ));
            }
        }
        Ok(())
    }

    /// The row of the lowest checkpoint of a group is above none of its checkpoints.
    fn judge_lowest(&mut self, findings: &Findings, items: &StoredChanges<'_>) -> Verdict {
        for (item, change) in items {
            let StoredItem::LowestCheckpoint(name) = item else { continue };
            let lowest = change.after.as_ref().map(|value| rooms::checkpoint(value)).transpose();
            let Some(group) = self.groups.get_mut(name) else {
                if change.after.is_some() {
                    return Guarantee::Kept.fails(format!("{name} is gone, and has a lowest checkpoint"));
                }
                continue;
            };
            group.lowest = lowest.map_err(|error| error.to_string())?;
            if group.lowest.is_some() {
                findings.witness(Witness::LowestCheckpoint);
            }
        }
        for (name, group) in &self.groups {
            let least = group.checkpoints.values().min();
            if let (Some(lowest), Some(least)) = (group.lowest, least)
                && lowest > *least
            {
                return Guarantee::Kept.fails(format!(
                    "the lowest checkpoint of {name} is at {least}, and said to be {lowest}"
                ));
            }
        }
        Ok(())
    }

    /// Judges and records the work in this transaction.
    fn judge_work(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) -> Verdict {
        for (item, change) in items {
            match item {
                StoredItem::DeadLetter(name, at) if change.after.is_some() => {
                    findings.witness(Witness::DeadLetter);
                    if let Some(group) = self.groups.get(name).filter(|_| change.before.is_none()) {
                        Self::judge_set_aside(group, items, name, *at)?;
                    }
                    if let Some(group) = self.groups.get_mut(name) {
                        group.done.insert(*at);
                    }
                }
                StoredItem::App(AppKey::Effect(name, at)) if change.after.is_some() => {
                    let group = self
                        .groups
                        .get_mut(name)
                        .ok_or_else(|| format!("{name} is gone, and works on {at}"))?;
                    let row = match group.id.instance {
                        None => self.past.get(at).map(|row| row.name.as_str().to_owned()),
                        Some(instance) => self.documents.get(&instance).and_then(|feed| feed.id_at(*at)),
                    };
                    let row = row.ok_or_else(|| format!("{name} works on {at}, which is no row"))?;
                    group.is_used = true;
                    group.effects.insert(*at);
                    if !group.done.insert(*at) {
                        return Guarantee::ExactlyOnce
                            .fails(format!("{name} has worked twice on the row at {at}"));
                    }
                    if *at <= group.start {
                        return Guarantee::AtLeastOnce
                            .fails(format!("{name} begins at {}, and works on {at}", group.start));
                    }
                    if let Some(last) = group.last.insert(row.clone(), *at).filter(|last| last > at) {
                        return Guarantee::Ordered
                            .fails(format!("{name} works on {row:?} at {at}, after {last}"));
                    }
                    let is_of_parked = |id: &[u8]| id == row.as_bytes();
                    let moves = items.iter().any(|(item, _)| match item {
                        StoredItem::Checkpoint(of, _) => of == name,
                        StoredItem::GroupParked(of, id) => of == name && is_of_parked(id),
                        _ => false,
                    });
                    if !moves {
                        return Guarantee::AtLeastOnce.fails(format!(
                            "{name} works on {at} without a checkpoint, at {:?}",
                            seen.stamp
                        ));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The row of `group`, called `name`, at `at` becomes a dead letter, or is parked. From then on its shard does not deliver it, so it
    /// is not done yet, and the checkpoint moves past it at the same time.
    pub(super) fn judge_set_aside(
        group: &GroupModel,
        items: &StoredChanges<'_>,
        name: &GroupName,
        at: Sequence,
    ) -> Verdict {
        if group.effects.contains(&at) {
            return Guarantee::ExactlyOnce.fails(format!("{name} sets aside the row at {at}, which is done"));
        }
        let position = |value: &Option<bytes::Bytes>| rooms::checkpoint(value.as_ref()?).ok();
        let passes = items.iter().any(|(item, change)| {
            let stood = matches!(item, StoredItem::Checkpoint(of, _) if of == name);
            stood
                && position(&change.before).is_some_and(|before| before < at)
                && position(&change.after).is_some_and(|after| at <= after)
        });
        if passes {
            return Ok(());
        }
        Guarantee::ExactlyOnce
            .fails(format!("{name} sets aside the row at {at}, and its checkpoint is not past it"))
    }

    /// Judges the changes of checkpoints.
    fn judge_checkpoints(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
        set: &BTreeSet<GroupName>,
    ) -> Verdict {
        let mut begun = BTreeSet::new();
        let mut owned: BTreeMap<&GroupName, bool> = BTreeMap::new();
        for (item, change) in items {
            let StoredItem::Checkpoint(name, shard) = item else { continue };
            let read = |value: &Option<bytes::Bytes>| {
                let position = value.as_ref().map(|value| rooms::checkpoint(value)).transpose();
                position.map_err(|error| error.to_string())
            };
            let (before, after) = (read(&change.before)?, read(&change.after)?);
            let (rows, documents, parks) = (&self.rows, &self.documents, self.unworkable.is_some());
            let Some(group) = self.groups.get_mut(name) else {
                if after.is_some() {
                    return Guarantee::AtLeastOnce
                        .fails(format!("{name} is gone, and has a checkpoint in {shard}"));
                }
                continue;
            };
            match after {
                Some(after) => drop(group.checkpoints.insert(*shard, after)),
                None => drop(group.checkpoints.remove(shard)),
            }
            if set.contains(name) {
                continue;
            }
            let Some(before) = before else {
                begun.insert(name);
                continue;
            };
            if after.is_some_and(|after| after < before) {
                return Guarantee::AtLeastOnce
                    .fails(format!("{name} went back in {shard}, from {before} to {after:?}"));
            }
            let to = after.unwrap_or(Sequence::MAX);
            let is_parked = |at: &Sequence| group.parked.values().any(|parked| parked == at);
            let left = rows_of(rows, documents, &group.id).find(|(place, at)| {
                let is_passed = place == shard && before < *at && *at <= to;
                let is_overtaken = || parks && is_overtaken(documents, &group.id, *at);
                is_passed && !group.done.contains(at) && !is_parked(at) && !is_overtaken()
            });
            if let Some((_, left)) = left {
                return Guarantee::AtLeastOnce.fails(format!(
                    "{name} went from {before} to {after:?} in {shard}, and leaves the row at {left} behind"
                ));
            }
            let pool = group.id.pool();
            *owned.entry(name).or_default() |= self.owns(seen, &pool, shard.0);
        }
        if let Some((name, _)) = owned.iter().find(|(_, owns)| !**owns) {
            return Guarantee::Fenced.fails(format!("a checkpoint of {name} was written without its lease"));
        }
        if !begun.is_empty() {
            findings.witness(Witness::GroupWentOver);
        }
        for name in begun {
            // All shards that a group reads at one time are of one topology entry.
            let group = &self.groups[name];
            let shards: Vec<_> = group.checkpoints.keys().copied().collect();
            let entries = match group.id.instance {
                None => &self.entries[..],
                Some(instance) => self.documents.get(&instance).map_or(&[][..], |feed| &feed.entries[..]),
            };
            let is_one = entries.iter().any(|entry| entry.clone().eq(shards.iter().map(|shard| shard.0)));
            if !is_one {
                return Guarantee::AtLeastOnce
                    .fails(format!("{name} reads {shards:?}, which are of no one topology entry"));
            }
        }
        Ok(())
    }

    /// Work that a group still has to do.
    pub(super) fn groups_owe(&self) -> Option<String> {
        self.groups.iter().find_map(|(name, group)| {
            let mut left = rows_of(&self.rows, &self.documents, &group.id).map(|(_, at)| at);
            let parks = self.unworkable.is_some();
            let left = left.find(|at| {
                let is_overtaken = || parks && is_overtaken(&self.documents, &group.id, *at);
                let is_done = group.done.contains(at) || self.waits_forever(group, *at) || is_overtaken();
                *at > group.start && !is_done
            })?;
            Some(format!("{name} has still to work on the row at {left}"))
        })
    }
}
