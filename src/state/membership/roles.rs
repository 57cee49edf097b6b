//! The roles of nodes, as they are stored: under the role, for those who divide its work, and under the node, for anyone who removes
//! it. Both are written together, and only as long as the row of the node is there: so who has a role lives, as far as anybody
//! knows.

use super::silence::NodeRows;
use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, NodeId, NodeRow, Role, role_max},
    store::{Isolation, Transaction},
};

/// Writes that `node` has `role`, and may own at most `max` resources by it.
pub(super) fn set_role(tx: &Transaction, keys: &Keys, node: NodeId, role: &Role, max: u32) {
    keys.role(node, role).iter().for_each(|key| tx.set(key, &max.to_be_bytes()));
}

/// Removes all roles of `node`. The transaction also changes its row, which is in its conflict set.
pub(super) async fn clear_roles(tx: &Transaction, keys: &Keys, node: NodeId) -> Result<()> {
    for (key, _) in tx.all_rows(keys.roles_of(node), Isolation::Serializable).await? {
        let (_, role) = keys.role_of_node(&key)?;
        keys.role(node, &role).iter().for_each(|key| tx.clear(key));
    }
    Ok(())
}

/// The nodes that have `role`, in the order of their ids, each with how many resources it may own by it; read so that they make
/// nothing fail.
pub(crate) async fn members(tx: &Transaction, keys: &Keys, role: &Role) -> Result<Vec<(NodeId, u32)>> {
    let rows = tx.all_rows(keys.nodes_with(role), Isolation::Snapshot).await?;
    rows.into_iter().map(|(key, value)| Ok((keys.node_of_role(&key)?, role_max(&value)?))).collect()
}

/// The rows of the nodes that have `role`, read so that they make nothing fail.
pub(crate) async fn member_rows(tx: &Transaction, keys: &Keys, role: &Role) -> Result<NodeRows> {
    let members = members(tx, keys, role).await?;
    let rows = members.into_iter().map(|(node, _)| async move {
        let row = tx.get(&keys.node(node), Isolation::Snapshot).await?;
        Ok::<_, Error>(row.map(|value| NodeRow::from_bytes(&value)).transpose()?.map(|row| (node, row)))
    });
    Ok(futures_util::future::try_join_all(rows).await?.into_iter().flatten().collect())
}
