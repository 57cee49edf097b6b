//! The stored roles of nodes: under the role, for the nodes that divide its work, and under the node, for the node's
//! remover. Both are written together, and exist only as long as the node's row: a node with a role counts as living.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, NodeId, NodeRow, Role, role_max},
    store::{Isolation, Transaction},
};

/// Writes that `node` has `role`, and may own at most `max` resources by it.
pub(super) fn set_role(tx: &Transaction, keys: &Keys, node: NodeId, role: &Role, max: u32) {
    keys.role(node, role).iter().for_each(|key| tx.set(key, &max.to_be_bytes()));
}

/// Removes `role` of `node`.
pub(super) fn clear_role(tx: &Transaction, keys: &Keys, node: NodeId, role: &Role) {
    keys.role(node, role).iter().for_each(|key| tx.clear(key));
}

/// The stored roles of `node`, with how many resources it may own by each.
pub(super) async fn stored_roles(tx: &Transaction, keys: &Keys, node: NodeId) -> Result<BTreeMap<Role, u32>> {
    let rows = tx.all_rows(keys.roles_of(node), Isolation::Serializable).await?;
    let role = |(key, value): &(Bytes, Bytes)| {
        let (_, role) = keys.role_of_node(key).map_err(|error| error.at(key))?;
        Ok((role, role_max(value).map_err(|error| error.at(key))?))
    };
    rows.iter().map(role).collect()
}

/// Removes all roles of `node`. Returns them, with how many resources it might own by each. The transaction also changes its row, which
/// is in its conflict set.
pub(super) async fn clear_roles(tx: &Transaction, keys: &Keys, node: NodeId) -> Result<BTreeMap<Role, u32>> {
    let cleared = stored_roles(tx, keys, node).await?;
    for role in cleared.keys() {
        clear_role(tx, keys, node, role);
    }
    Ok(cleared)
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

/// The rows of the nodes with `role`, read by snapshot.
pub(crate) async fn member_rows(
    tx: &Transaction,
    keys: &Keys,
    role: &Role,
) -> Result<BTreeMap<NodeId, NodeRow>> {
    let rows = members(tx, keys, role).await?.into_iter().map(|(node, _)| async move {
        let key = keys.node(node);
        let row = tx.get(&key, Isolation::Snapshot).await?;
        let row = row.map(|value| NodeRow::from_bytes(&value).map_err(|error| error.at(&key))).transpose()?;
        Ok::<_, Error>(row.map(|row| (node, row)))
    });
    Ok(futures_util::future::try_join_all(rows).await?.into_iter().flatten().collect())
}
