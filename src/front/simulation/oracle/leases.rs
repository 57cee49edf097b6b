//! The oracle on nodes and leases: epochs only grow, and only the present or new owner of a lease writes it.

use super::{
    Oracle,
    commit::{Items, ObservedCommit, Verdict},
    stored_item::StoredItem,
};
use crate::{
    front::simulation::{
        findings::Findings,
        guarantee::{Broken, Guarantee},
        issuer::Issuer,
        witness::Witness,
    },
    state::keys::{FeedId, GroupId, GroupName, Lease, NodeId, Role},
};

impl Oracle {
    /// Whether the process of `issuer` is, or has been, `node` in that life.
    pub(super) fn is_node(&self, issuer: Issuer, node: NodeId) -> bool {
        self.nodes.get(&issuer).is_some_and(|nodes| nodes.contains(&node))
    }

    /// Judges the changes of a commit to nodes and leases.
    pub(super) fn judge_leases(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &Items<'_>,
    ) -> Verdict {
        let sets_group = items.iter().any(|(item, _)| matches!(item, StoredItem::Group(_)));
        for (item, change) in items {
            match item {
                StoredItem::Node(node)
                    if change.after.is_none()
                        && change.before.is_some()
                        && !self.is_node(seen.issuer, *node) =>
                {
                    findings.witness(Witness::NodeBuried);
                }
                StoredItem::Lease(pool, resource) => {
                    let read = |value: &Option<bytes::Bytes>| {
                        let lease = value.as_ref().map(|value| Lease::from_bytes(value)).transpose();
                        lease.map_err(|error| error.to_string())
                    };
                    let before = read(&change.before)?.unwrap_or_default();
                    match read(&change.after)? {
                        Some(after) if !sets_group => {
                            self.judge_lease(findings, seen, items, (pool, *resource), (before, after))?;
                        }
                        None if pool == "partition" || pool == "janitor" => {
                            return Guarantee::Fenced
                                .fails(format!("the lease of {pool} {resource} was removed"));
                        }
                        after => {
                            if after.is_some_and(|after| after.epoch < before.epoch || after.owner.is_some())
                            {
                                return Guarantee::Fenced.fails(format!(
                                    "{before:?} of {pool} {resource} was taken away as {after:?}"
                                ));
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Judges the change of a lease.
    fn judge_lease(
        &self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &Items<'_>,
        (pool, resource): (&str, u64),
        (before, after): (Lease, Lease),
    ) -> Verdict {
        let describe = || format!("{before:?} of {pool} {resource} has become {after:?}");
        match (before.owner, after.owner) {
            (Some(owner), None) => {
                if after.epoch != before.epoch || !self.is_node(seen.issuer, owner.node) {
                    return Guarantee::Fenced.fails(format!("{}: not by its owner", describe()));
                }
                // Its owner keeps the role, so it has released this lease for another one.
                let [_, by_role] = self.keys.role(owner.node, &role_of(pool)?);
                if (seen.before)(&by_role).is_some() {
                    findings.witness(Witness::LeaseHandedOver);
                }
            }
            (None, None) if after.epoch == before.epoch => {}
            (_, Some(owner)) if after.epoch == before.epoch + 1 && self.is_node(seen.issuer, owner.node) => {
                let victim = before.owner.filter(|victim| victim.node != owner.node);
                let lives = victim.is_some_and(|victim| {
                    let is_buried = items.iter().any(|(item, _)| *item == StoredItem::Node(victim.node));
                    !is_buried && (seen.before)(&self.keys.node(victim.node)).is_some()
                });
                if lives {
                    findings.witness(Witness::LeaseTakenFromLiving);
                }
            }
            _ => return Guarantee::Fenced.fails(format!("{}: no acquisition, and no release", describe())),
        }
        Ok(())
    }
}

/// The role of the nodes that divide `pool`.
fn role_of(pool: &str) -> Result<Role, Broken> {
    let role = match pool {
        "partition" => Role::NOTIFIER,
        "janitor" => Role::JANITOR,
        pool => {
            let unknown = || format!("whose pool is {pool}?");
            let (feed, name) =
                pool.strip_prefix("group/").and_then(|rest| rest.split_once('/')).ok_or_else(unknown)?;
            let feed = match feed {
                "notifications" => FeedId::notifications(),
                instance => FeedId::documents(instance.parse().map_err(|_| unknown())?),
            };
            GroupId { feed, name: GroupName::new(name).map_err(|_| unknown())? }.role()
        }
    };
    Ok(role)
}
