//! The oracle on groups that expire: each is deleted only after it has had no member for so long, and then it is, and the janitor goes
//! on with what it had to keep for it.

use std::time::Duration;

use bytes::Bytes;
use notibus::{group::GroupName, node::NodeId, test_util::rooms};

use super::{
    Oracle,
    commit::{Change, ObservedCommit, StoredChanges, Verdict},
    stored_item::StoredItem,
};
use crate::{findings::Findings, guarantee::Guarantee, witness::Witness};

/// What the oracle knows of the existence of a group at one moment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Existence {
    /// The number of its last reset; `None` if there is no such group.
    generation: Option<u64>,
    /// Changes at least when a group is created.
    created: u64,
}

impl Existence {
    pub fn is_there(&self) -> bool {
        self.generation.is_some()
    }
}

impl Oracle {
    /// From now on these groups have to expire after the faults, and the janitor has to drop the tombstones that no group keeps.
    pub fn expect_janitor(&mut self, given_up: Vec<GroupName>) {
        self.given_up = Some(given_up);
    }

    /// Whether `group` exists. Two equal answers say that nothing has changed in between.
    pub fn existence(&self, group: &GroupName) -> Existence {
        let generation = self.groups.get(group).map(|group| group.generation);
        Existence { generation, created: self.next_reader }
    }

    /// Records who has which role.
    pub(super) fn judge_members(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) {
        for (item, change) in items {
            match item {
                StoredItem::Member(role, node) => {
                    let members = self.members.entry(role.clone()).or_default();
                    members.alive = seen.stamp.version();
                    if change.after.is_some() {
                        members.nodes.insert(*node);
                    } else {
                        members.nodes.remove(node);
                    }
                }
                StoredItem::Node(node) => self.see_beat(seen, *node, change),
                StoredItem::Idle(name)
                    if change.before.is_some()
                        && change.after.is_none()
                        && self.groups.contains_key(name) =>
                {
                    findings.witness(Witness::IdleGroupUsedAgain);
                }
                _ => {}
            }
        }
    }

    /// Records when a node has last written its row.
    fn see_beat(&mut self, seen: &ObservedCommit<'_>, node: NodeId, change: &Change) {
        let beat = |value: &Option<Bytes>| rooms::node(value.as_ref()?).ok().map(|(beat, _)| beat);
        // A beat whose first commit had an unknown result is written twice, and others see only the first.
        match beat(&change.after) {
            None => drop(self.beats.remove(&node)),
            after if after != beat(&change.before) => drop(self.beats.insert(node, seen.stamp.version())),
            _ => {}
        }
    }

    /// Judges the deletion of the group `name` of notifications by a node, which is its expiry: operators are no nodes.
    pub(super) fn judge_expiry(
        &self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        name: &GroupName,
        change: &Change,
    ) -> Verdict {
        let (Some(group), Some(row)) = (self.groups.get(name), &change.before) else { return Ok(()) };
        if group.id.instance.is_some() || !self.nodes.contains_key(&seen.issuer) {
            return Ok(());
        }
        let (_, expiry) = rooms::group(row).map_err(|error| error.to_string())?;
        let members = self.members.get(&group.id.role());
        if let Some(node) = members.and_then(|members| members.nodes.first()) {
            return Guarantee::Kept.fails(format!("{name} has expired, and {node} is a member of it"));
        }
        let Some(expiry) = expiry else {
            return Guarantee::Kept.fails(format!("{name} has expired, and was created without an expiry"));
        };
        let alive = members.map_or(0, |members| members.alive).max(group.created);
        // The janitor's clock may be a little fast.
        let silent = Duration::from_micros(seen.stamp.version() - alive).mul_f64(1.1);
        if self.has_steady_clocks && silent < expiry {
            return Guarantee::Kept
                .fails(format!("{name} has expired {silent:?} after its last member, of {expiry:?}"));
        }
        findings.witness(Witness::GroupExpired);
        Ok(())
    }

    /// What the janitor has still to do.
    pub(super) fn janitor_owes(&self) -> Option<String> {
        let given_up = self.given_up.as_ref()?;
        if let Some(name) = given_up.iter().find(|name| self.groups.contains_key(*name)) {
            return Some(format!("{name} has still to expire"));
        }
        let of_feed = self.groups.values().filter(|group| group.id.instance.is_none());
        let passed = of_feed.map(|group| group.lowest.unwrap_or(group.start)).min();
        let passed = passed.into_iter().chain(self.passed_by_consumers()).min();
        let mut rows = self.rows.iter();
        let (name, placed) = rows.find(|(_, placed)| {
            placed.row.is_deleted() && passed.is_none_or(|passed| placed.row.sequence <= passed)
        })?;
        Some(format!("the tombstone of {name:?} at {} has still to be dropped", placed.row.sequence))
    }
}
