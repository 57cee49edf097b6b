//! [`NodeStatus`]: what the rows of nodes and leases say, for people.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::{
    error::Result,
    keys::{Keys, LeaseRow, NodeId, NodeRow, Role, Roles},
    store::{Database, Isolation, Transaction},
};

/// What a node tells of itself. It may be dead: only a beat that changes shows that it lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NodeStatus {
    /// Which node.
    pub id: NodeId,
    /// What it does, in order.
    pub roles: Vec<Role>,
    /// How often it has written that it lives, since it last joined.
    pub beat: u64,
    /// When it last joined, in milliseconds since 1970 by its own clock.
    pub started_ms: u64,
    /// How many leases it owns, by pool.
    pub leases: BTreeMap<String, u64>,
}

/// The nodes that have a row, in the order of their ids.
pub(crate) async fn statuses(db: &Database, keys: &Keys) -> Result<Vec<NodeStatus>> {
    db.run(async |tx| {
        let mut leases: BTreeMap<NodeId, BTreeMap<String, u64>> = BTreeMap::new();
        for (key, value) in tx.all_rows(keys.all_leases(), Isolation::Snapshot).await? {
            if let (pool, _, LeaseRow::Lease(lease)) = keys.lease_row(&key, &value)?
                && let Some(owner) = lease.owner
            {
                *leases.entry(owner.node).or_default().entry(pool).or_default() += 1;
            }
        }
        let mut roles = roles(&tx, keys).await?;
        let nodes = nodes(&tx, keys).await?.into_iter().map(|(id, row)| NodeStatus {
            id,
            roles: roles.remove(&id).unwrap_or_default().into_iter().collect(),
            beat: row.beat,
            started_ms: row.started_ms,
            leases: leases.remove(&id).unwrap_or_default(),
        });
        Ok(nodes.collect())
    })
    .await
}

/// The rows of all nodes, read so that they make nothing fail.
pub(crate) async fn nodes(tx: &Transaction, keys: &Keys) -> Result<BTreeMap<NodeId, NodeRow>> {
    let rows = tx.all_rows(keys.nodes(), Isolation::Snapshot).await?;
    rows.into_iter().map(|(key, value)| Ok((keys.node_of(&key)?, NodeRow::from_bytes(&value)?))).collect()
}

/// The roles of all nodes, and maybe those of nodes that are gone, which mean nothing; read so that
/// they make nothing fail.
pub(crate) async fn roles(tx: &Transaction, keys: &Keys) -> Result<BTreeMap<NodeId, BTreeSet<Role>>> {
    let rows = tx.all_rows(keys.all_roles(), Isolation::Snapshot).await?;
    rows.into_iter().map(|(key, value)| Ok((keys.node_of(&key)?, Roles::from_bytes(&value)?.0))).collect()
}
