//! The stored roles of nodes, and the versions that show changes to other nodes.
//!
//! A role is stored under its name, for the nodes that divide its work, and under its node, for the code that removes the node. Both keys are
//! written together, and exist only as long as the node's row, because a node with a role counts as alive.
//!
//! Every change to the members, leases or resources of a pool moves the version of the pool and a common version. A node reads only the
//! common version until that moves, and it does so in one task, whatever the number of its workers.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, NodeId, NodeRow, Role, role_max, role_of_pool, slot_of_pool, stamp_operand},
    store::{AtomicOp, Isolation, RangeRead, Transaction},
};

/// The maximum number of roles that one transaction writes or removes.
pub(super) const ROLES_MAX: usize = 500;

/// Stores that `node` has `role`, and may own at most `max` resources in it.
pub(super) fn set_role(tx: &Transaction, keys: &Keys, node: NodeId, role: &Role, max: u32) {
    keys.role(node, role).iter().for_each(|key| tx.set(key, &max.to_be_bytes()));
}

/// Removes `role` from `node`.
pub(super) fn clear_role(tx: &Transaction, keys: &Keys, node: NodeId, role: &Role) {
    keys.role(node, role).iter().for_each(|key| tx.clear(key));
}

/// Removes a page of the roles of `node`, and its row `found` together with the last page. Returns whether it was the last page. A row that
/// remains is condemned: its roles are no longer complete, so the node must not count as alive. `tx` has the row in its conflict set.
pub(super) async fn remove_page(
    tx: &Transaction,
    keys: &Keys,
    node: NodeId,
    found: &NodeRow,
) -> Result<bool> {
    let page = RangeRead::new(keys.roles_of(node)).limit(ROLES_MAX);
    let page = tx.get_range(&page, Isolation::Serializable).await?;
    let roles = page.rows.iter().map(|(key, _)| Ok(keys.role_of_node(key).map_err(|error| error.at(key))?.1));
    let roles = roles.collect::<Result<Vec<_>>>()?;
    for role in &roles {
        clear_role(tx, keys, node, role);
    }
    members_changed(tx, keys, &roles);
    if page.more {
        tx.set(&keys.node(node), &NodeRow { token: NodeRow::CONDEMNED, ..*found }.to_bytes());
    } else {
        tx.clear(&keys.node(node));
    }
    Ok(!page.more)
}

/// Decodes the rows of nodes.
pub(super) fn node_rows(keys: &Keys, rows: &[(Bytes, Bytes)]) -> Result<Vec<(NodeId, NodeRow)>> {
    let decode = |(key, value): &(Bytes, Bytes)| {
        let decoded = keys.node_of(key).and_then(|node| Ok((node, NodeRow::from_bytes(value)?)));
        decoded.map_err(|error| error.at(key))
    };
    rows.iter().map(decode).collect()
}

/// Returns the nodes with `role`, in the order of their ids, each with its maximum number of resources for the role. Uses a snapshot read.
pub(crate) async fn members(tx: &Transaction, keys: &Keys, role: &Role) -> Result<Vec<(NodeId, u32)>> {
    let rows = tx.all_rows(keys.nodes_with(role), Isolation::Snapshot).await?;
    let member = |(key, value): &(Bytes, Bytes)| {
        let member = keys.node_of_role(key).and_then(|node| Ok((node, role_max(value)?)));
        member.map_err(|error| error.at(key))
    };
    rows.iter().map(member).collect()
}

/// The maximum number of pool versions that are read individually. If more are missing, the versions of all pools are read in one range.
const GETS_MAX: usize = 64;

/// The time of the last change, as a versionstamp; `None` if there was no change.
pub(super) type Version = Option<Bytes>;

/// Returns the version of the store at the last change.
pub(super) fn version_of(version: &Version) -> u64 {
    let stamp = version.as_ref().and_then(|stamp| stamp.first_chunk());
    stamp.map_or(0, |version| u64::from_be_bytes(*version))
}

/// The last changes that matter to a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Versions {
    /// The last change of any pool.
    common: Version,
    /// The last change of each pool that the node works on, by slot.
    pub of_slot: BTreeMap<u16, Version>,
}

impl Versions {
    /// Returns `common` with the versions of `slots`, from snapshot reads. Those in `before` are read again only if any pool has changed
    /// since. The number of reads is bounded, whatever the number of pools.
    pub async fn read(
        tx: &Transaction,
        keys: &Keys,
        slots: &BTreeSet<u16>,
        before: &Self,
        common: Version,
    ) -> Result<Self> {
        let known = if common == before.common { &before.of_slot } else { &BTreeMap::new() };
        let (mut of_slot, mut missing) = (BTreeMap::new(), Vec::new());
        for &slot in slots {
            match known.get(&slot) {
                Some(version) => drop(of_slot.insert(slot, version.clone())),
                None => missing.push(slot),
            }
        }
        if missing.len() > GETS_MAX {
            of_slot.extend(missing.into_iter().map(|slot| (slot, None)));
            for (key, version) in tx.all_rows(keys.pool_versions(), Isolation::Snapshot).await? {
                if let Some(known) = of_slot.get_mut(&keys.slot_of(&key).map_err(|error| error.at(&key))?) {
                    *known = Some(version);
                }
            }
        } else {
            let gets = missing.into_iter().map(|slot| async move {
                Ok::<_, Error>((slot, tx.get(&keys.pool_version(slot), Isolation::Snapshot).await?))
            });
            of_slot.extend(try_join_all(gets).await?);
        }
        Ok(Self { common, of_slot })
    }
}

/// Makes `tx` move the versions because it changes leases or resources of `pool`.
pub(crate) fn changed(tx: &Transaction, keys: &Keys, pool: &str) {
    members_changed(tx, keys, [&role_of_pool(pool)]);
}

/// Makes `tx` move the versions because it changes which nodes have these `roles`, or what they may own in them.
pub(super) fn members_changed<'a>(tx: &Transaction, keys: &Keys, roles: impl IntoIterator<Item = &'a Role>) {
    let mut moved: BTreeSet<_> =
        roles.into_iter().map(|role| keys.pool_version(slot_of_pool(role))).collect();
    if !moved.is_empty() {
        moved.insert(keys.common_version());
    }
    for key in moved {
        tx.atomic(AtomicOp::SetVersionstampedValue, &key, &stamp_operand());
    }
}
