//! What is stored for nodes: their rows, their roles, and the leases that they own; and whether listed nodes are still alive.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde::Serialize;

use super::roles::{members, node_rows};
use crate::{
    base::error::{Error, Result},
    state::{
        keys::{Config, Keys, Lease, NodeId, NodeRow, Role, role_of_pool},
        last_seen::LastSeen,
    },
    store::{Isolation, Store, Transaction},
};
#[cfg(feature = "http")]
use parking_lot::Mutex;

/// The state of a node. The node may be dead: see [`NodeStatus::is_silent`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NodeStatus {
    /// The id of the node.
    pub id: NodeId,
    /// The roles of the node, in order.
    pub roles: Vec<Role>,
    /// How many heartbeats the node has written since it last joined.
    pub beat: u64,
    /// When the node last joined, in milliseconds since 1970 by its own clock.
    pub started_ms: u64,
    /// The number of milliseconds without a heartbeat after which others consider the node dead; `u64::MAX` means never.
    pub expiry_ms: u64,
    /// The number of milliseconds for which this process has seen no new heartbeat; 0 when it first sees the node.
    pub silent_ms: u64,
    /// Whether `silent_ms` has reached the expiry, so that others consider the node dead.
    pub is_silent: bool,
    /// How many leases the node owns, by pool.
    pub leases: BTreeMap<String, u64>,
}

/// Returns the rows of all nodes.
pub(crate) async fn all_nodes(
    tx: &Transaction,
    keys: &Keys,
    isolation: Isolation,
) -> Result<BTreeMap<NodeId, NodeRow>> {
    Ok(node_rows(keys, &tx.all_rows(keys.nodes(), isolation).await?)?.into_iter().collect())
}

/// The nodes of the bus, and the owners of its partitions.
#[derive(Debug, Default)]
#[cfg_attr(not(feature = "http"), expect(dead_code, reason = "`ready` reads the rest"))]
pub(crate) struct Members {
    /// The rows of all nodes.
    pub nodes: BTreeMap<NodeId, NodeRow>,
    /// For how long this process has seen no new heartbeat from each node, and whether that has reached the node's expiry.
    pub silent: BTreeMap<NodeId, (Duration, bool)>,
    /// The nodes with a notifier.
    pub notifiers: BTreeSet<NodeId>,
    /// The owner of each partition, if it has one, and the epoch of its lease.
    pub owners: BTreeMap<u32, (Option<NodeId>, u64)>,
}

impl Members {
    /// Reads the members at snapshot isolation. Fails with [`Error::BusGone`](crate::Error::BusGone) if the bus that was `opened` is gone.
    pub async fn read(tx: &Transaction, keys: &Keys, opened: Config) -> Result<Self> {
        let config = keys.config();
        let (config, nodes, notifiers, leases) = tokio::try_join!(
            tx.get(&config, Isolation::Snapshot),
            all_nodes(tx, keys, Isolation::Snapshot),
            members(tx, keys, &Role::NOTIFIER),
            tx.all_rows(keys.leases("partition"), Isolation::Snapshot),
        )?;
        opened.check_stored(config.as_deref())?;
        let mut owners = BTreeMap::new();
        for (key, value) in leases {
            let (_, partition, lease) = keys.lease_row(&key, &value)?;
            if let Ok(partition) = u32::try_from(partition) {
                owners.insert(partition, (lease.owner.map(|owner| owner.node), lease.epoch));
            }
        }
        let notifiers = notifiers.into_iter().map(|(node, _)| node).collect();
        Ok(Self { nodes, silent: BTreeMap::new(), notifiers, owners })
    }

    /// Decides which nodes are alive, based on what was seen before. The rows were read between `began` and `now`.
    pub fn judge(&mut self, seen: &mut LastSeen<NodeId, NodeRow>, (began, now): (Duration, Duration)) {
        let judged = |(node, row): (&NodeId, &NodeRow)| {
            (*node, (seen.age(node, row, began), seen.is_silent(node, row, began)))
        };
        self.silent = self.nodes.iter().map(judged).collect();
        seen.adopt(self.nodes.iter().map(|(node, row)| (*node, *row)), now);
    }

    /// Returns the states of all nodes, in the order of their ids.
    pub fn statuses(&self, holdings: &Holdings) -> Vec<NodeStatus> {
        let mut held = holdings.by_node();
        let nodes = self.nodes.iter().map(|(&id, row)| {
            let (roles, leases) = held.remove(&id).unwrap_or_default();
            let (silent, is_silent) = self.silent.get(&id).copied().unwrap_or_default();
            let silent_ms = u64::try_from(silent.as_millis()).unwrap_or(u64::MAX);
            let NodeRow { beat, started_ms, expiry_ms, .. } = *row;
            NodeStatus { id, roles, beat, started_ms, expiry_ms, silent_ms, is_silent, leases }
        });
        nodes.collect()
    }
}

/// How long a partition that had an owner may be without one while a notifier is alive. Partitions change hands as nodes come and go.
#[cfg(feature = "http")]
const HANDOVER_MAX: Duration = Duration::from_secs(3);

/// How long partitions have had no live owner.
#[cfg(feature = "http")]
#[derive(Debug, Default)]
pub(crate) struct Handovers(Mutex<HandoversState>);

#[cfg(feature = "http")]
#[derive(Debug, Default)]
struct HandoversState {
    /// Whether all partitions once had an owner at the same time.
    were_owned: bool,
    /// The partitions without a live owner, each with the epoch of its lease, which every handover changes.
    unowned: LastSeen<u32, u64>,
}

#[cfg(feature = "http")]
impl Handovers {
    /// Returns which of the `count` partitions no live node owns at `now`, leaving out those that may be changing hands.
    pub fn unowned(&self, count: u32, found: &Members, now: Duration) -> BTreeSet<u32> {
        let mut state = self.0.lock();
        // Neighbours remove a dead node after its expiry. If a node has no neighbours, only this check notices that it is dead.
        let lives = |node: &NodeId| found.silent.get(node).is_some_and(|(_, is_silent)| !is_silent);
        let living: BTreeSet<_> = found.notifiers.iter().filter(|node| lives(node)).collect();
        let leases =
            (0..count).map(|number| (number, found.owners.get(&number).copied().unwrap_or_default()));
        let unowned: Vec<_> = leases
            .filter(|(_, (owner, _))| owner.is_none_or(|owner| !living.contains(&owner)))
            .map(|(number, (_, epoch))| (number, epoch))
            .collect();
        state.were_owned |= unowned.is_empty();
        state.unowned.adopt(unowned.iter().copied(), now);
        let may_be_handed_over = state.were_owned && !living.is_empty();
        let is_late = |(number, epoch): &(u32, u64)| {
            !may_be_handed_over || state.unowned.age(number, epoch, now) >= HANDOVER_MAX
        };
        unowned.iter().filter(|unowned| is_late(unowned)).map(|(number, _)| *number).collect()
    }
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
    /// Reads the holdings of all pools, or only of the pool `only` if given, at snapshot isolation.
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

    /// Returns the nodes with `role`. Some may have died.
    pub fn nodes_with(&self, role: &Role) -> &[NodeId] {
        self.nodes.get(role).map_or(&[], Vec::as_slice)
    }

    /// Returns the owner of `resource` in `pool` and the epoch of the lease, if the resource has an owner.
    pub fn owned(&self, pool: &str, resource: u64) -> Option<(NodeId, u64)> {
        let lease = self.leases.get(pool)?.get(&resource)?;
        lease.owner.map(|owner| (owner.node, lease.epoch))
    }

    /// Counts the leases that have an owner, in the pools that `is_of` selects.
    #[cfg(feature = "http")]
    pub fn count(&self, is_of: impl Fn(&str) -> bool) -> u64 {
        let of_pools =
            self.leases.iter().filter(|(pool, _)| is_of(pool)).flat_map(|(_, leases)| leases.values());
        of_pools.filter(|lease| lease.owner.is_some()).count() as u64
    }

    /// Returns, for each node, its roles and the number of its leases by pool.
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

/// The maximum time for which nodes are watched. A node with a longer expiry counts as alive.
const WATCH_MAX: Duration = Duration::from_mins(1);

type NodeRows = BTreeMap<NodeId, NodeRow>;

/// Proof that no node of a bus was alive during the watch. A killed node leaves its row behind, so listed nodes may be dead.
pub(crate) struct Silence(NodeRows);

impl Silence {
    /// Watches all nodes of the bus for the longest of their expiries. Fails with [`Error::BusInUse`] if one wrote a heartbeat or joined
    /// meanwhile, or has an expiry that is too long to wait for.
    pub async fn of_bus(store: &Store, keys: &Keys) -> Result<Self> {
        let read = || store.run(async |tx| all_nodes(&tx, keys, Isolation::Snapshot).await);
        let first = read().await?;
        let longest = first.values().map(NodeRow::expiry).max().unwrap_or_default();
        if longest <= WATCH_MAX {
            store.env().sleep(longest).await;
        }
        let seen = read().await?;
        let is_alive =
            |(node, row): &(&NodeId, &NodeRow)| first.get(node) != Some(row) || row.expiry() > WATCH_MAX;
        match seen.iter().filter(is_alive).count() {
            0 => Ok(Self(seen)),
            nodes => Err(Error::BusInUse { nodes }),
        }
    }

    /// Fails with [`Error::BusInUse`] if a node has written a heartbeat or joined since. If one does so before the commit, `tx` fails.
    pub async fn check(&self, tx: &Transaction, keys: &Keys) -> Result<()> {
        let found = all_nodes(tx, keys, Isolation::Serializable).await?;
        match found.iter().filter(|(node, row)| self.0.get(node) != Some(row)).count() {
            0 => Ok(()),
            nodes => Err(Error::BusInUse { nodes }),
        }
    }
}

#[cfg(all(test, feature = "http"))]
mod tests {
    use super::*;

    /// Returns members with three partitions: one node owns the first, another the other two. `beats` are the nodes' beats.
    fn found(beats: [u64; 2]) -> Members {
        let [a, b] = [1, 2].map(|id| NodeId([id; 16]));
        let row = |beat| NodeRow { beat, token: [1; 16], started_ms: 0, expiry_ms: 10_000 };
        Members {
            owners: BTreeMap::from([(0, (Some(a), 1)), (1, (Some(b), 1)), (2, (Some(b), 1))]),
            nodes: BTreeMap::from([(a, row(beats[0])), (b, row(beats[1]))]),
            notifiers: BTreeSet::from([a, b]),
            ..Members::default()
        }
    }

    #[test]
    fn a_partition_is_owned_while_its_owner_beats() {
        let (handovers, mut seen, second) = (Handovers::default(), LastSeen::default(), Duration::from_secs);
        let none = BTreeSet::new();
        let mut unowned = |count, mut found: Members, now| {
            found.judge(&mut seen, (now, now));
            handovers.unowned(count, &found, now)
        };
        assert_eq!(unowned(4, found([1, 1]), second(0)), BTreeSet::from([3]), "it never had one");
        assert_eq!(unowned(3, found([1, 1]), second(1)), none);
        assert_eq!(unowned(3, found([2, 1]), second(9)), none);
        // The second node has been silent for its expiry, and then for as long as a handover may take.
        assert_eq!(unowned(3, found([3, 1]), second(11)), none);
        assert_eq!(unowned(3, found([4, 1]), second(14)), BTreeSet::from([1, 2]));
        assert_eq!(unowned(3, found([4, 2]), second(15)), none, "it beats again");
        let gone = |beats, left: &[u8]| {
            let mut gone = found(beats);
            gone.nodes.retain(|node, _| left.contains(&node.0[0]));
            gone.notifiers.retain(|node| left.contains(&node.0[0]));
            gone
        };
        assert_eq!(unowned(3, gone([5, 3], &[2]), second(16)), none);
        assert_eq!(unowned(3, gone([5, 3], &[2]), second(19)), BTreeSet::from([0]), "its row is gone");
        // Nobody is left who could take over.
        assert_eq!(unowned(3, found([6, 4]), second(20)), none);
        assert_eq!(unowned(3, gone([6, 4], &[]), second(21)), BTreeSet::from([0, 1, 2]));
    }
}
