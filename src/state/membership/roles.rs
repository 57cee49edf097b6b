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

/// Removes all roles of `node`, also those that cannot be decoded. Returns the others, with how many resources it might own by each; `None`
/// if that cannot be decoded. The transaction also changes its row, which is in its conflict set.
pub(super) async fn clear_roles(
    tx: &Transaction,
    keys: &Keys,
    node: NodeId,
) -> Result<BTreeMap<Role, Option<u32>>> {
    let mut cleared = BTreeMap::new();
    for (key, value) in tx.all_rows(keys.roles_of(node), Isolation::Serializable).await? {
        tx.clear(&key);
        // A role that cannot be decoded counts for no pool.
        if let Ok((_, role)) = keys.role_of_node(&key) {
            keys.role(node, &role).iter().for_each(|key| tx.clear(key));
            cleared.insert(role, role_max(&value).ok());
        }
    }
    Ok(cleared)
}

/// The nodes with `role`, in the order of their ids, each with the most resources that it may own by it; read by
/// snapshot. What cannot be decoded is passed to `skip`: a node whose limit is damaged is a member without one.
pub(crate) async fn members(
    tx: &Transaction,
    keys: &Keys,
    role: &Role,
    skip: impl Fn(&Bytes, &Error),
) -> Result<Vec<(NodeId, u32)>> {
    let rows = tx.all_rows(keys.nodes_with(role), Isolation::Snapshot).await?;
    let member = |(key, value): &(Bytes, Bytes)| {
        let node = keys.node_of_role(key).inspect_err(|error| skip(key, error)).ok()?;
        let max = role_max(value).inspect_err(|error| skip(key, error)).unwrap_or(u32::MAX);
        Some((node, max))
    };
    Ok(rows.iter().filter_map(member).collect())
}

/// The rows of the nodes with `role`, read by snapshot; an error for each that cannot be decoded.
pub(crate) async fn member_rows(
    tx: &Transaction,
    keys: &Keys,
    role: &Role,
) -> Result<Vec<(NodeId, Result<NodeRow>)>> {
    // The nodes that divide the work of the role report what cannot be decoded.
    let members = members(tx, keys, role, |_, _| {}).await?;
    let rows = members.into_iter().map(|(node, _)| async move {
        let row = tx.get(&keys.node(node), Isolation::Snapshot).await?;
        Ok::<_, Error>(row.map(|value| (node, NodeRow::from_bytes(&value))))
    });
    Ok(futures_util::future::try_join_all(rows).await?.into_iter().flatten().collect())
}
