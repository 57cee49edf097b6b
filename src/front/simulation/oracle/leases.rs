//! The oracle on nodes and leases: epochs only grow, and only the present or new owner of a lease writes it.

use std::time::Duration;

use bytes::Bytes;

use super::{
    Oracle,
    commit::{Change, ObservedCommit, StoredChanges, Verdict},
    stored_item::StoredItem,
};
use crate::{
    front::simulation::{
        findings::Findings,
        guarantee::{Broken, Guarantee},
        issuer::Issuer,
        witness::Witness,
    },
    state::keys::{FeedId, GroupId, GroupName, Lease, NodeId, NodeRow, Role, ShardId, role_max},
};

impl Oracle {
    /// Whether the process of `issuer` is, or has been, `node` in that life.
    pub(super) fn is_node(&self, issuer: Issuer, node: NodeId) -> bool {
        self.nodes.get(&issuer).is_some_and(|nodes| nodes.contains(&node))
    }

    /// Whether the issuer of a commit owned the lease of `shard`, which is shared out in `pool`.
    pub(super) fn owns_shard(&self, seen: &ObservedCommit<'_>, pool: &str, shard: ShardId) -> bool {
        let lease = (seen.before)(&self.keys.lease(pool, shard.0));
        let lease = lease.and_then(|value| Lease::from_bytes(&value).ok()).unwrap_or_default();
        lease.owner.is_some_and(|owner| self.is_node(seen.issuer, owner.node))
    }

    /// A lease whose owner does not work on it, although nothing keeps it from that.
    pub(super) fn lease_without_work(&self) -> Option<String> {
        let mut nodes = self.working.values();
        nodes.find_map(|(node, pools)| {
            pools.iter().find_map(|(pool, working)| {
                let of_pool = self.owners.range((pool.clone(), 0)..=(pool.clone(), u64::MAX));
                let mut idle = of_pool.filter(|((_, key), owner)| *owner == node && !working.contains(key));
                idle.next()
                    .map(|((_, key), _)| format!("node {node} owns {pool} {key}, and does not work on it"))
            })
        })
    }

    /// Judges the changes of a commit to nodes and leases.
    pub(super) fn judge_leases(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) -> Verdict {
        let sets_group = items.iter().any(|(item, _)| matches!(item, StoredItem::Group(_)));
        for (item, change) in items {
            match item {
                StoredItem::Node(node) => self.judge_node(findings, seen, *node, change)?,
                StoredItem::Lease(pool, resource) => {
                    let read = |value: &Option<Bytes>| {
                        let lease = value.as_ref().map(|value| Lease::from_bytes(value)).transpose();
                        lease.map_err(|error| error.to_string())
                    };
                    let before = read(&change.before)?.unwrap_or_default();
                    match read(&change.after)? {
                        Some(after) if !sets_group => {
                            self.judge_lease(findings, seen, items, (pool, *resource), (before, after))?;
                            self.judge_maximum(seen, (pool, *resource), after)?;
                        }
                        None if pool == "partition" || pool == "janitor" => {
                            return Guarantee::Fenced
                                .fails(format!("the lease of {pool} {resource} was removed"));
                        }
                        after => {
                            self.owners.remove(&(pool.clone(), *resource));
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

    /// Judges the change of the row of a node: others may remove it after its expiry.
    fn judge_node(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        node: NodeId,
        change: &Change,
    ) -> Verdict {
        let now = seen.stamp.version();
        let read = |value: &Option<Bytes>| {
            let row = value.as_ref().map(|value| NodeRow::from_bytes(value)).transpose();
            row.map_err(|error| error.to_string())
        };
        let was_dead = self.dead.remove(&node);
        if let Some(after) = read(&change.after)? {
            if was_dead || !self.dead.is_empty() {
                let left = self.dead.len() + usize::from(was_dead);
                return Guarantee::Live.fails(format!(
                    "{left} nodes of dead processes were there when {node} joined after the store was opened again"
                ));
            }
            // A beat whose first commit had an unknown result is written twice, and others see only the first.
            let is_beat = read(&change.before)?
                .is_none_or(|before| (before.token, before.beat) != (after.token, after.beat));
            if is_beat {
                self.beats.insert(node, now);
            }
            return Ok(());
        }
        let (Some(row), Some(beaten)) = (read(&change.before)?, self.beats.remove(&node)) else {
            return Ok(());
        };
        if was_dead {
            findings.witness(Witness::DeadNodesForgotten);
            return Ok(());
        }
        if self.is_node(seen.issuer, node) {
            return Ok(());
        }
        findings.witness(Witness::NodeBuried);
        // The observer's clock may be a little fast.
        let silent = Duration::from_micros(now - beaten).mul_f64(1.1);
        if self.has_steady_clocks && silent < row.expiry() {
            return Guarantee::Fenced.fails(format!(
                "node {node} was removed {silent:?} after it had written its row, which expires after {:?}",
                row.expiry()
            ));
        }
        Ok(())
    }

    /// Judges whether the owner of a lease has no more of its pool than it may.
    fn judge_maximum(
        &mut self,
        seen: &ObservedCommit<'_>,
        (pool, resource): (&str, u64),
        lease: Lease,
    ) -> Verdict {
        let key = (pool.to_owned(), resource);
        let Some(owner) = lease.owner else {
            self.owners.remove(&key);
            return Ok(());
        };
        if self.owners.insert(key, owner.node) == Some(owner.node) {
            return Ok(());
        }
        if pool.starts_with("group/") {
            // After a reshard a node may still have leases of shards that are resources no more.
            return Ok(());
        }
        let of_pool = self.owners.range((pool.to_owned(), 0)..=(pool.to_owned(), u64::MAX));
        let held = of_pool.filter(|(_, node)| **node == owner.node).count();
        let [by_node, _] = self.keys.role(owner.node, &role_of(pool)?);
        let max = (seen.before)(&by_node).map(|value| role_max(&value)).transpose();
        match max.map_err(|error| error.to_string())? {
            Some(max) if u32::try_from(held).is_ok_and(|held| held > max) => Guarantee::Fenced
                .fails(format!("node {} owns {held} resources of {pool}, of at most {max}", owner.node)),
            _ => Ok(()),
        }
    }

    /// Judges the change of a lease.
    fn judge_lease(
        &self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
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
