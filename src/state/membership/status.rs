//! [`NodeStatus`]: the rows of a node and its leases, for people.

use std::collections::BTreeMap;

use serde::Serialize;

use super::roles::node_rows;
use crate::{
    base::error::Result,
    state::keys::{Keys, NodeId, Role},
    store::{Database, Isolation},
};

/// The stored state of a node. The node may be dead: only a changing beat shows that it lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NodeStatus {
    /// The node.
    pub id: NodeId,
    /// Its roles, in order.
    pub roles: Vec<Role>,
    /// How many heartbeats it has written since it last joined.
    pub beat: u64,
    /// When it last joined, in milliseconds since 1970 by its own clock.
    pub started_ms: u64,
    /// After how many milliseconds without a heartbeat others take it for dead; `u64::MAX` for never.
    pub expiry_ms: u64,
    /// How many leases it owns, by pool.
    pub leases: BTreeMap<String, u64>,
}

/// The nodes that have a row, in the order of their ids.
pub(crate) async fn statuses(db: &Database, keys: &Keys) -> Result<Vec<NodeStatus>> {
    db.run(async |tx| {
        let mut leases: BTreeMap<NodeId, BTreeMap<String, u64>> = BTreeMap::new();
        for (key, value) in tx.all_rows(keys.all_leases(), Isolation::Snapshot).await? {
            let (pool, _, lease) = keys.lease_row(&key, &value)?;
            if let Some(owner) = lease.owner {
                *leases.entry(owner.node).or_default().entry(pool).or_default() += 1;
            }
        }
        let mut roles: BTreeMap<NodeId, Vec<Role>> = BTreeMap::new();
        for (key, _) in tx.all_rows(keys.all_roles(), Isolation::Snapshot).await? {
            let (node, role) = keys.role_of_node(&key).map_err(|error| error.at(&key))?;
            roles.entry(node).or_default().push(role);
        }
        let rows = tx.all_rows(keys.nodes(), Isolation::Snapshot).await?;
        let nodes = node_rows(keys, &rows)?.into_iter().map(|(id, row)| NodeStatus {
            id,
            roles: roles.remove(&id).unwrap_or_default(),
            beat: row.beat,
            started_ms: row.started_ms,
            expiry_ms: row.expiry_ms,
            leases: leases.remove(&id).unwrap_or_default(),
        });
        Ok(nodes.collect())
    })
    .await
}
