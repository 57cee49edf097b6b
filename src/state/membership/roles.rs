//! The stored roles of nodes, and the versions that tell others of changes.
//!
//! A role is stored under its name, for the nodes that divide its work, and under its node, for the node's remover. Both are written
//! together, and exist only as long as the node's row: a node with a role counts as living.
//!
//! Every change of a pool, of its members, leases or resources, moves the version of the pool and a common version. A node reads the
//! common one only, until it moves; and whatever its number of workers, one task reads.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, NodeId, NodeRow, Role, role_max, role_of_pool, slot_of_pool, stamp_operand},
    store::{AtomicOp, Isolation, RangeRead, Transaction},
};

/// The most roles that one transaction writes or removes.
pub(super) const ROLES_MAX: usize = 500;

/// Writes that `node` has `role`, and may own at most `max` resources by it.
pub(super) fn set_role(tx: &Transaction, keys: &Keys, node: NodeId, role: &Role, max: u32) {
    keys.role(node, role).iter().for_each(|key| tx.set(key, &max.to_be_bytes()));
}

/// Removes `role` of `node`.
pub(super) fn clear_role(tx: &Transaction, keys: &Keys, node: NodeId, role: &Role) {
    keys.role(node, role).iter().for_each(|key| tx.clear(key));
}

/// Removes a page of the roles of `node`, and its row `found` with the last one. Returns whether it was the last. A row that stays is
/// condemned: its roles are no longer complete, so nobody may take the node for living. `tx` has the row in its conflict set.
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

/// The nodes of these rows.
pub(super) fn node_rows(keys: &Keys, rows: &[(Bytes, Bytes)]) -> Result<Vec<(NodeId, NodeRow)>> {
    let decode = |(key, value): &(Bytes, Bytes)| {
        let decoded = keys.node_of(key).and_then(|node| Ok((node, NodeRow::from_bytes(value)?)));
        decoded.map_err(|error| error.at(key))
    };
    rows.iter().map(decode).collect()
}

/// The nodes with `role`, in the order of their ids, each with the most resources that it may own by it; read by snapshot.
pub(crate) async fn members(tx: &Transaction, keys: &Keys, role: &Role) -> Result<Vec<(NodeId, u32)>> {
    let rows = tx.all_rows(keys.nodes_with(role), Isolation::Snapshot).await?;
    let member = |(key, value): &(Bytes, Bytes)| {
        let member = keys.node_of_role(key).and_then(|node| Ok((node, role_max(value)?)));
        member.map_err(|error| error.at(key))
    };
    rows.iter().map(member).collect()
}

/// The most versions of pools that are read one by one; more are read in one range, of all there are.
const GETS_MAX: usize = 64;

/// The time of the last change; `None` for never.
pub(super) type Version = Option<Bytes>;

/// The version of the store at the last change.
pub(super) fn version_of(version: &Version) -> u64 {
    let stamp = version.as_ref().and_then(|stamp| stamp.first_chunk());
    stamp.map_or(0, |version| u64::from_be_bytes(*version))
}

/// The last changes, as far as a node has to know them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Versions {
    /// Of any pool.
    common: Version,
    /// Of the pools that the node works on, by slot.
    pub of_slot: BTreeMap<u16, Version>,
}

impl Versions {
    /// Reads them by snapshot beside `common`: those in `before` only if any pool has changed since. What it reads has a bound, whatever
    /// the number of pools.
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

/// Makes `tx` move the versions because it changes which nodes have these `roles`, or what they may own by them.
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
