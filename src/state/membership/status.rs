//! What is stored of nodes: their rows, their roles, and the leases that they own.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use super::roles::{members, node_rows};
use crate::{
    base::error::Result,
    state::keys::{Keys, Lease, NodeId, NodeRow, Role, role_of_pool},
    store::{Isolation, Transaction},
};

/// The state of a node. The node may be dead: [`NodeStatus::is_silent`].
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
    /// For how many milliseconds this process has seen no new heartbeat; 0 at its first look.
    pub silent_ms: u64,
    /// Whether that is as long as its expiry: others take it for dead.
    pub is_silent: bool,
    /// How many leases it owns, by pool.
    pub leases: BTreeMap<String, u64>,
}

impl NodeStatus {
    /// The state of a node with this row, which has been silent for so long.
    pub(crate) fn new(
        id: NodeId,
        row: &NodeRow,
        (silent, is_silent): (Duration, bool),
        roles: Vec<Role>,
        leases: BTreeMap<String, u64>,
    ) -> Self {
        let silent_ms = u64::try_from(silent.as_millis()).unwrap_or(u64::MAX);
        let NodeRow { beat, started_ms, expiry_ms, .. } = *row;
        Self { id, roles, beat, started_ms, expiry_ms, silent_ms, is_silent, leases }
    }
}

/// The rows of all nodes.
pub(crate) async fn all_nodes(
    tx: &Transaction,
    keys: &Keys,
    isolation: Isolation,
) -> Result<BTreeMap<NodeId, NodeRow>> {
    Ok(node_rows(keys, &tx.all_rows(keys.nodes(), isolation).await?)?.into_iter().collect())
}

/// Which nodes have which roles, and the leases of pools.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    /// The nodes of each role, in order.
    nodes: BTreeMap<Role, Vec<NodeId>>,
    /// The leases of each pool, by resource.
    leases: BTreeMap<String, BTreeMap<u64, Lease>>,
}

impl Holdings {
    /// Those of all pools, or of the only one that is asked for, read by snapshot.
    pub async fn read(tx: &Transaction, keys: &Keys, only: Option<&str>) -> Result<Self> {
        let leases = only.map_or_else(|| keys.all_leases(), |pool| keys.leases(pool));
        let nodes = async {
            let mut nodes: BTreeMap<_, Vec<_>> = BTreeMap::new();
            if let Some(pool) = only {
                let role = role_of_pool(pool);
                let members = members(tx, keys, &role).await?;
                nodes.insert(role, members.into_iter().map(|(node, _)| node).collect());
                return Ok(nodes);
            }
            for (key, _) in tx.all_rows(keys.all_roles(), Isolation::Snapshot).await? {
                let (node, role) = keys.role_of_node(&key).map_err(|error| error.at(&key))?;
                nodes.entry(role).or_default().push(node);
            }
            Ok(nodes)
        };
        let (nodes, rows) = tokio::try_join!(nodes, tx.all_rows(leases, Isolation::Snapshot))?;
        let mut holdings = Self { nodes, leases: BTreeMap::new() };
        for (key, value) in rows {
            let (pool, resource, lease) = keys.lease_row(&key, &value)?;
            holdings.leases.entry(pool).or_default().insert(resource, lease);
        }
        Ok(holdings)
    }

    /// The nodes with `role`. Some may have died.
    pub fn nodes_with(&self, role: &Role) -> &[NodeId] {
        self.nodes.get(role).map_or(&[], Vec::as_slice)
    }

    /// The lease of `resource` of `pool`, if somebody owns it.
    pub fn owned(&self, pool: &str, resource: u64) -> Option<(NodeId, u64)> {
        let lease = self.leases.get(pool)?.get(&resource)?;
        lease.owner.map(|owner| (owner.node, lease.epoch))
    }

    /// How many leases somebody owns, of the pools that `is_of` selects.
    #[cfg(feature = "http")]
    pub fn count(&self, is_of: impl Fn(&str) -> bool) -> u64 {
        let of_pools =
            self.leases.iter().filter(|(pool, _)| is_of(pool)).flat_map(|(_, leases)| leases.values());
        of_pools.filter(|lease| lease.owner.is_some()).count() as u64
    }

    /// The roles and the leases of each node, by pool.
    pub fn by_node(&self) -> BTreeMap<NodeId, (Vec<Role>, BTreeMap<String, u64>)> {
        let mut nodes: BTreeMap<NodeId, (Vec<Role>, BTreeMap<String, u64>)> = BTreeMap::new();
        for (role, holders) in &self.nodes {
            for node in holders {
                nodes.entry(*node).or_default().0.push(role.clone());
            }
        }
        for (pool, leases) in &self.leases {
            for owner in leases.values().filter_map(|lease| lease.owner) {
                *nodes.entry(owner.node).or_default().1.entry(pool.clone()).or_default() += 1;
            }
        }
        nodes
    }
}
