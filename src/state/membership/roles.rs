//! The stored roles of nodes, and the versions that tell others of changes.
//!
//! A role is stored under its name, for the nodes that divide its work, and under its node, for the node's remover. Both are written
//! together, and exist only as long as the node's row: a node with a role counts as living.
//!
//! Every change of a pool, of its members, leases or resources, moves the version of the pool and a common version. A node reads the
//! common one only, until it moves; and whatever its number of workers, one task reads.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use futures_util::future::try_join_all;

use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, NodeId, NodeRow, Role, role_max, role_of_pool, stamp_operand},
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

/// The role in the key of a row by node.
fn role_at(keys: &Keys, key: &[u8]) -> Result<Role> {
    Ok(keys.role_of_node(key).map_err(|error| error.at(key))?.1)
}

/// The stored roles of `node`.
pub(super) async fn stored_roles(tx: &Transaction, keys: &Keys, node: NodeId) -> Result<Vec<Role>> {
    let rows = tx.all_rows(keys.roles_of(node), Isolation::Serializable).await?;
    rows.iter().map(|(key, _)| role_at(keys, key)).collect()
}

/// Removes a page of the roles of `node`, and its row with the last page. Returns whether it was the last. `tx` has the row in its
/// conflict set.
pub(super) async fn clear_page(tx: &Transaction, keys: &Keys, node: NodeId) -> Result<bool> {
    let page = RangeRead::new(keys.roles_of(node)).limit(ROLES_MAX);
    let page = tx.get_range(&page, Isolation::Serializable).await?;
    let roles = page.rows.iter().map(|(key, _)| role_at(keys, key)).collect::<Result<Vec<_>>>()?;
    for role in &roles {
        clear_role(tx, keys, node, role);
    }
    members_changed(tx, keys, &roles);
    if !page.more {
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

/// The time of the last change; `None` for never.
pub(super) type Version = Option<Bytes>;

/// The last changes, as far as a node has to know them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Versions {
    /// Of any pool.
    common: Version,
    /// Of each pool that the node works on.
    pub of_pool: BTreeMap<Arc<str>, Version>,
}

impl Versions {
    /// Reads them by snapshot: those of pools in `before` only if any pool has changed since.
    pub async fn read(
        tx: &Transaction,
        keys: &Keys,
        pools: BTreeSet<Arc<str>>,
        before: &Self,
    ) -> Result<Self> {
        let common = tx.get(&keys.common_version(), Isolation::Snapshot).await?;
        let known = if common == before.common { &before.of_pool } else { &BTreeMap::new() };
        let read = pools.into_iter().map(|pool| async move {
            let version = match known.get(&pool) {
                Some(version) => version.clone(),
                None => tx.get(&keys.role_version(&role_of_pool(&pool)), Isolation::Snapshot).await?,
            };
            Ok::<_, Error>((pool, version))
        });
        let of_pool = try_join_all(read).await?.into_iter().collect();
        Ok(Self { common, of_pool })
    }
}

/// Makes `tx` move the versions because it changes leases or resources of `pool`.
pub(crate) fn changed(tx: &Transaction, keys: &Keys, pool: &str) {
    members_changed(tx, keys, [&role_of_pool(pool)]);
}

/// Makes `tx` move the versions because it changes which nodes have these `roles`, or what they may own by them.
pub(super) fn members_changed<'a>(tx: &Transaction, keys: &Keys, roles: impl IntoIterator<Item = &'a Role>) {
    let mut moved: BTreeSet<_> = roles.into_iter().map(|role| keys.role_version(role)).collect();
    if !moved.is_empty() {
        moved.insert(keys.common_version());
    }
    for key in moved {
        tx.atomic(AtomicOp::SetVersionstampedValue, &key, &stamp_operand());
    }
}
