//! The oracle on parked ids of groups: a row is parked in the commit that moves the checkpoint past it, and stays so until
//! the work on it, or on a later row of its id, has succeeded.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::{
    Oracle,
    commit::{ObservedCommit, StoredChanges, Verdict},
    models::group::GroupModel,
    stored_item::StoredItem,
};
use crate::{
    base::{encoding::Sequence, event::DbName},
    front::simulation::{findings::Findings, guarantee::Guarantee, witness::Witness},
    state::keys::{GroupName, GroupParkedRow, Lease},
};

impl Oracle {
    /// From now on no work of a group that parks succeeds on the databases with these names.
    pub fn expect_parked(&mut self, names: BTreeSet<DbName>) {
        self.unworkable = names;
    }

    /// Judges the changes of parked ids in a commit whose work is recorded. `begun` are the groups that it begins.
    pub(super) fn judge_parked(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
        begun: &BTreeSet<GroupName>,
    ) -> Verdict {
        for (item, change) in items {
            let StoredItem::GroupParked(name, id) = item else { continue };
            let position = |value: &Option<Bytes>| {
                let row = value.as_ref().map(GroupParkedRow::from_bytes).transpose();
                row.map(|row| row.map(|row| row.sequence)).map_err(|error| error.to_string())
            };
            let (before, after) = (position(&change.before)?, position(&change.after)?);
            let Some(group) = self.groups.get(name).filter(|_| !begun.contains(name)) else {
                if after.is_some() {
                    return Guarantee::AtLeastOnce
                        .fails(format!("{name} begins, or is gone, and parks {id:?}"));
                }
                continue;
            };
            if (before, after) == (None, None) {
                continue;
            }
            if !self.owns_shard(seen, group) {
                return Guarantee::Fenced.fails(format!("{id:?} of {name} was changed without a lease"));
            }
            match (before, after) {
                (before, Some(after)) if before < Some(after) => {
                    Self::judge_set_aside(group, items, name, after)?;
                    let is_first = before.is_none();
                    findings.witness(if is_first { Witness::RowParked } else { Witness::ParkedRowReplaced });
                }
                (Some(before), Some(after)) if before > after => {
                    return Guarantee::Ordered
                        .fails(format!("{name} parks {id:?} at {after} instead of {before}"));
                }
                (Some(before), None) => {
                    if !self.is_worked(group, id, before) {
                        return Guarantee::AtLeastOnce.fails(format!(
                            "{name} forgets the parked row of {id:?} at {before} without work on it"
                        ));
                    }
                    findings.witness(Witness::ParkedRowWorked);
                }
                _ => {}
            }
            // Where a layer has named a wrong previous edit, earlier rows of the document have stayed. The parked one takes their place, and
            // the newest one that of those that have waited behind the parked one.
            let documents = group.id.feed.instance().and_then(|instance| self.documents.get(&instance));
            let end = after.or_else(|| documents.and_then(|documents| documents.newest_of(id)));
            let overtaken: Vec<_> = end
                .zip(documents)
                .map(|(end, documents)| documents.rows_before(id, end).collect())
                .unwrap_or_default();
            let group = self.groups.get_mut(name).expect("it was just there");
            group.done.extend(overtaken);
            match after {
                Some(after) => drop(group.parked.insert(id.clone(), after)),
                None => drop(group.parked.remove(id)),
            }
        }
        Ok(())
    }

    /// Whether the issuer of a commit owned the lease of a shard of `group`.
    fn owns_shard(&self, seen: &ObservedCommit<'_>, group: &GroupModel) -> bool {
        let pool = group.id.pool();
        group.checkpoints.keys().any(|shard| {
            let lease = (seen.before)(&self.keys.lease(&pool, shard.0));
            let lease = lease.and_then(|value| Lease::from_bytes(&value).ok()).unwrap_or_default();
            lease.owner.is_some_and(|owner| self.is_node(seen.issuer, owner.node))
        })
    }

    /// Whether `group` has worked on the row of `id` at `from`, or on a later one.
    fn is_worked(&self, group: &GroupModel, id: &[u8], from: Sequence) -> bool {
        let is_of = |at: &Sequence| match group.id.feed.instance() {
            None => self.past.get(at).is_some_and(|row| row.name.as_str().as_bytes() == id),
            Some(instance) => {
                let doc = self.documents.get(&instance).and_then(|feed| feed.id_at(*at));
                doc.is_some_and(|doc| doc.as_bytes() == id)
            }
        };
        group.done.range(from..).any(is_of)
    }

    /// Whether the group `name` has parked `id`.
    pub(super) fn is_parked(&self, name: &GroupName, id: &[u8]) -> bool {
        self.groups.get(name).is_some_and(|group| group.parked.contains_key(id))
    }

    /// Whether `group` need not work on its row at `at`: it is parked, and no work on it succeeds.
    pub(super) fn waits_forever(&self, group: &GroupModel, at: Sequence) -> bool {
        let is_unworkable = |id: &[u8]| self.unworkable.iter().any(|name| name.as_str().as_bytes() == id);
        group.id.feed.instance().is_none()
            && group.parked.iter().any(|(id, parked)| *parked == at && is_unworkable(id))
    }
}
