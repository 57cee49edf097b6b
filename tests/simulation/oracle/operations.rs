//! The oracle on operators, who reset and delete groups: one call changes one group, and, unless it is by force, none that somebody
//! works for.

use std::time::Duration;

use notibus::{group::GroupName, test_util::rooms};

use super::{
    Oracle,
    commit::{ObservedCommit, Verdict},
    models::operation::Operation,
    node_key,
};
use crate::{guarantee::Guarantee, kernel::Issuer};

impl Oracle {
    /// From now on `issuer` resets or deletes the group `name` of notifications. Its call before has ended.
    pub fn operates(&mut self, issuer: Issuer, name: &GroupName, is_forced: bool) {
        self.operations.insert(issuer, Operation { group: name.clone(), is_forced, is_done: false });
    }

    /// Judges a reset or a deletion of the group `name`, if it is by an operator.
    pub(super) fn judge_operation(&mut self, seen: &ObservedCommit<'_>, name: &GroupName) -> Verdict {
        // A commit that comes late is of a call that may have ended.
        let operation = self.operations.get_mut(&seen.issuer).filter(|_| !seen.is_late);
        let Some(operation) = operation.filter(|operation| operation.group == *name) else { return Ok(()) };
        if std::mem::replace(&mut operation.is_done, true) {
            return Guarantee::Kept.fails(format!(
                "one call of an operator has changed {name} twice: the second time it was another one, created since"
            ));
        }
        if operation.is_forced || !self.has_steady_clocks {
            return Ok(());
        }
        let members = self.groups.get(name).and_then(|group| self.members.get(&group.id.role()));
        for node in members.into_iter().flat_map(|members| &members.nodes) {
            let row = (seen.before)(&node_key(*node)).and_then(|row| rooms::node(&row).ok());
            let (Some((_, expiry)), Some(beaten)) = (row, self.beats.get(node)) else { continue };
            // The operator's clock may be a little fast.
            let silent = Duration::from_micros(seen.stamp.version() - beaten).mul_f64(1.1);
            if silent < expiry {
                return Guarantee::Kept.fails(format!(
                    "{name} was reset or deleted without force, and {node} is a member of it: silent for {silent:?}, of {expiry:?}"
                ));
            }
        }
        Ok(())
    }
}
