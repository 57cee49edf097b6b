//! The oracle for deletions and resets of consumers. The janitor may, and must, delete a consumer that has had no member for long enough.
//! An operator's call changes one consumer, and, unless the call is forced, never one that has members.

use std::{collections::BTreeSet, time::Duration};

use bytes::Bytes;
use notibus::{
    node::NodeId,
    test_util::inspect::{self, StoredConsumer},
};

use super::{
    Oracle,
    commit::{Change, ObservedCommit, StoredChanges, Verdict},
    node_key,
    stored_item::StoredItem,
};
use crate::{findings::Findings, guarantee::Guarantee, kernel::Issuer, witness::Witness};

/// The nodes that have a role.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    pub(super) nodes: BTreeSet<NodeId>,
    /// The version, in microseconds, at which the role last had a node.
    pub(super) alive: u64,
}

/// A call in which an operator resets or deletes a consumer.
#[derive(Debug, Clone)]
pub(super) struct Operation {
    consumer: String,
    is_forced: bool,
    /// Whether the call has already done its work.
    is_done: bool,
}

/// Returns the role of the members of `consumer`.
fn role(consumer: &str) -> String {
    format!("consumer:{consumer}")
}

impl Oracle {
    /// Sets the consumers that must expire after the faults. From now on, the janitor must also drop the tombstones that no consumer keeps.
    pub fn expect_janitor(&mut self, given_up: Vec<String>) {
        self.given_up = Some(given_up);
    }

    /// Returns whether `consumer` exists, and a count of changes: if two answers are equal, nothing changed in between.
    pub fn existence(&self, consumer: &str) -> (bool, u64) {
        (self.consumers.contains_key(consumer), self.consumer_changes)
    }

    /// Records which nodes have which roles.
    pub(super) fn judge_members(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) {
        for (item, change) in items {
            match item {
                // If the result of a role's removal is unknown, the role is removed again, so only real changes count.
                StoredItem::Member(role, node) if change.before != change.after => {
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
                        && self.consumers.contains_key(name) =>
                {
                    findings.witness(Witness::IdleConsumerUsedAgain);
                }
                _ => {}
            }
        }
    }

    /// Records when a node last wrote its row.
    fn see_beat(&mut self, seen: &ObservedCommit<'_>, node: NodeId, change: &Change) {
        let beat = |value: &Option<Bytes>| inspect::node(value.as_ref()?).ok().map(|(beat, _)| beat);
        // A heartbeat whose first commit had an unknown result is written twice, but other nodes notice only the first write.
        match beat(&change.after) {
            None => drop(self.beats.remove(&node)),
            after if after != beat(&change.before) => drop(self.beats.insert(node, seen.stamp.version())),
            _ => {}
        }
    }

    /// Judges the deletion of `name`, a consumer of notifications, by a node. Operators are not nodes, so the consumer must have expired.
    pub(super) fn judge_expiry(
        &self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        (name, row, created): (&str, &StoredConsumer, u64),
    ) -> Verdict {
        if row.instance.is_some() || !self.nodes.contains_key(&seen.issuer) {
            return Ok(());
        }
        let members = self.members.get(&role(name));
        if let Some(node) = members.and_then(|members| members.nodes.first()) {
            return Guarantee::Kept.fails(format!("{name} has expired, and {node} is a member of it"));
        }
        let Some(expiry) = row.expiry else {
            return Guarantee::Kept.fails(format!("{name} has expired, and was created without an expiry"));
        };
        let alive = members.map_or(0, |members| members.alive).max(created);
        // The janitor's clock may be slightly fast.
        let silent = Duration::from_micros(seen.stamp.version() - alive).mul_f64(1.1);
        if self.has_steady_clocks && silent < expiry {
            return Guarantee::Kept
                .fails(format!("{name} has expired {silent:?} after its last member, of {expiry:?}"));
        }
        findings.witness(Witness::ConsumerExpired);
        Ok(())
    }

    /// Records that `issuer` now resets or deletes `consumer`. The operator's previous call has ended.
    pub fn operates(&mut self, issuer: Issuer, consumer: &str, is_forced: bool) {
        let consumer = consumer.to_owned();
        self.operations.insert(issuer, Operation { consumer, is_forced, is_done: false });
    }

    /// Judges a reset or deletion of the consumer `name`, if an operator did it.
    pub(super) fn judge_operation(&mut self, seen: &ObservedCommit<'_>, name: &str) -> Verdict {
        // A late commit may belong to a call that has ended.
        let operation = self.operations.get_mut(&seen.issuer).filter(|_| !seen.is_late);
        let Some(operation) = operation.filter(|operation| operation.consumer == name) else { return Ok(()) };
        if std::mem::replace(&mut operation.is_done, true) {
            return Guarantee::Kept.fails(format!(
                "one call of an operator has changed {name} twice: the second time it was another one, created since"
            ));
        }
        if operation.is_forced || !self.has_steady_clocks {
            return Ok(());
        }
        let members = self.members.get(&role(name));
        for node in members.into_iter().flat_map(|members| &members.nodes) {
            let row = (seen.before)(&node_key(*node)).and_then(|row| inspect::node(&row).ok());
            let (Some((_, expiry)), Some(beaten)) = (row, self.beats.get(node)) else { continue };
            // The operator's clock may be slightly fast.
            let silent = Duration::from_micros(seen.stamp.version() - beaten).mul_f64(1.1);
            if silent < expiry {
                return Guarantee::Kept.fails(format!(
                    "{name} was reset or deleted without force, and {node} is a member of it: silent for {silent:?}, of {expiry:?}"
                ));
            }
        }
        Ok(())
    }

    /// Describes what the janitor still has to do.
    pub(super) fn janitor_owes(&self) -> Option<String> {
        let given_up = self.given_up.as_ref()?;
        if let Some(name) = given_up.iter().find(|name| self.consumers.contains_key(*name)) {
            return Some(format!("{name} has still to expire"));
        }
        let passed = self.passed_by_consumers();
        let mut rows = self.rows.iter();
        let (name, placed) = rows.find(|(_, placed)| {
            placed.row.is_deleted() && passed.is_none_or(|passed| placed.row.sequence <= passed)
        })?;
        Some(format!("the tombstone of {name:?} at {} has still to be dropped", placed.row.sequence))
    }
}
