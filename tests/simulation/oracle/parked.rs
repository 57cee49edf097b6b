//! The oracle on parked ids of groups: a row is parked in the commit that moves the checkpoint past it, and stays so until
//! the work on it, or on a later row of its id, has succeeded.

use std::collections::BTreeSet;

use bytes::Bytes;
use notibus::{
    event::{DbName, Sequence},
    group::GroupName,
    test_util::rooms,
};

use super::{
    Oracle,
    commit::{ObservedCommit, StoredChanges, Verdict},
    models::group::GroupModel,
    stored_item::StoredItem,
};
use crate::{findings::Findings, guarantee::Guarantee, witness::Witness};

impl Oracle {
    /// From now on groups park, and no work of theirs succeeds on the databases with these names.
    pub fn expect_parked(&mut self, names: BTreeSet<DbName>) {
        self.unworkable = Some(names);
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
                let row = value.as_ref().map(rooms::parked).transpose();
                row.map_err(|error| error.to_string())
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
            let pool = group.id.pool();
            if !group.checkpoints.keys().any(|shard| self.owns(seen, &pool, shard.0)) {
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
            let group = self.groups.get_mut(name).expect("it was just there");
            match after {
                Some(after) => drop(group.parked.insert(id.clone(), after)),
                None => drop(group.parked.remove(id)),
            }
        }
        Ok(())
    }

    /// Whether `group` has worked on the row of `id` at `from`, or on a later one.
    fn is_worked(&self, group: &GroupModel, id: &[u8], from: Sequence) -> bool {
        let is_of = |at: &Sequence| match group.id.instance {
            None => self.past.get(at).is_some_and(|row| row.name.as_str().as_bytes() == id),
            Some(instance) => {
                let doc = self.documents.get(&instance).and_then(|feed| feed.id_at(*at));
                doc.is_some_and(|doc| doc.as_bytes() == id)
            }
        };
        group.done.range(from..).any(is_of)
    }

    /// Whether `group` need not work on its row at `at`: it is parked, and no work on it succeeds.
    pub(super) fn waits_forever(&self, group: &GroupModel, at: Sequence) -> bool {
        let unworkable = || self.unworkable.iter().flatten();
        let is_unworkable = |id: &[u8]| unworkable().any(|name| name.as_str().as_bytes() == id);
        group.id.instance.is_none()
            && group.parked.iter().any(|(id, parked)| *parked == at && is_unworkable(id))
    }
}

pub mod tests {
    use super::*;
    use notibus::{
        changes::{DocId, DocSummary, Revision},
        event::{DbInstance, Incarnation, Versionstamp},
        feed::ShardId,
        node::NodeId,
        test_util::rooms,
    };

    use crate::{
        app::AppKey,
        kernel::Issuer,
        oracle::{commit::Change, models::group::GroupId},
    };

    const SHARD: ShardId = ShardId(0);

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    fn name() -> GroupName {
        GroupName::new("group").unwrap()
    }

    /// The oracle of a group whose checkpoint is at 1, in a feed with rows of one document at 1, 2 and 3.
    fn oracle() -> Oracle {
        let (instance, mut oracle) = (DbInstance([1; 16]), Oracle::new(Vec::new(), true));
        let feed = oracle.documents.entry(instance).or_default();
        for version in 1..=3 {
            let revision = Revision { position: version, hash: [0; 16] };
            let doc = DocSummary { id: DocId::new("doc").unwrap(), revision, branches: 1, is_deleted: false };
            feed.rows.insert(at(version), (SHARD, doc.clone()));
            feed.past.insert(at(version), doc);
        }
        let id = GroupId { instance: Some(instance), name: name() };
        let mut group = GroupModel::new(id, 1, Sequence::MIN, 0);
        group.checkpoints.insert(SHARD, at(1));
        oracle.groups.insert(name(), group);
        oracle
    }

    /// Commits the changes, with the lease of the shard.
    fn commit(oracle: &mut Oracle, changes: &[(StoredItem, Change)]) -> Verdict {
        let (issuer, node) = (Issuer { process: 0, generation: 0 }, NodeId([1; 16]));
        oracle.nodes.entry(issuer).or_default().insert(node);
        let before = |_: &[u8]| Some(rooms::lease_of(node).into());
        let (stamp, touched) = (Versionstamp::new(9, 0), [].into());
        let seen = ObservedCommit { issuer, stamp, is_late: false, touched, before: &before };
        let items: Vec<_> = changes.iter().map(|(item, change)| (item.clone(), change)).collect();
        oracle.judge_groups(&Findings::default(), &seen, &items)
    }

    fn works(version: u64) -> (StoredItem, Change) {
        let effect = StoredItem::App(AppKey::Effect(name(), at(version)));
        (effect, Change { before: None, after: Some(Bytes::new()) })
    }

    fn stands(before: u64, after: u64) -> (StoredItem, Change) {
        let position = |version| Some(Bytes::copy_from_slice(at(version).as_bytes()));
        (StoredItem::Checkpoint(name(), SHARD), Change { before: position(before), after: position(after) })
    }

    fn parks(before: Option<u64>, after: Option<u64>) -> (StoredItem, Change) {
        let row = |version| Bytes::from(rooms::parked_at(SHARD, at(version)));
        let change = Change { before: before.map(row), after: after.map(row) };
        (StoredItem::GroupParked(name(), b"doc".to_vec()), change)
    }

    fn broken(verdict: Verdict) -> Option<Guarantee> {
        verdict.err().map(|broken| broken.guarantee)
    }

    /// Regression: the rows of a document that came after its parked one counted as done with it, although no shard had read them yet.
    /// Work on one of them was called the second, and nobody noticed when it was forgotten.
    pub fn what_comes_after_a_parked_row_is_not_done_with_it() {
        let mut oracle = oracle();
        oracle.expect_parked(BTreeSet::new());
        oracle.groups.get_mut(&name()).unwrap().parked.insert(b"doc".to_vec(), at(1));
        commit(&mut oracle, &[works(1), parks(Some(1), None)]).unwrap();
        commit(&mut oracle, &[works(2), stands(1, 2)]).unwrap();
        commit(&mut oracle, &[parks(None, Some(3)), stands(2, 3)]).unwrap();
        assert_eq!(broken(commit(&mut oracle, &[parks(Some(3), None)])), Some(Guarantee::AtLeastOnce));
    }

    /// Regression: a row that has waited behind a parked one, and gives its place to a newer one that is not saved yet, counted as lost.
    pub fn the_newest_row_of_a_document_stands_for_those_that_wait() {
        let mut oracle = oracle();
        oracle.expect_parked(BTreeSet::new());
        oracle.groups.get_mut(&name()).unwrap().parked.insert(b"doc".to_vec(), at(1));
        commit(&mut oracle, &[stands(1, 2)]).unwrap();
        assert!(oracle.groups_owe().is_some(), "the newest one is owed");
        assert_eq!(broken(commit(&mut oracle, &[stands(2, 3)])), Some(Guarantee::AtLeastOnce));
    }

    pub fn a_group_that_does_not_park_works_on_every_row_of_a_document() {
        let mut oracle = oracle();
        assert_eq!(broken(commit(&mut oracle, &[stands(1, 2)])), Some(Guarantee::AtLeastOnce));
    }
}
