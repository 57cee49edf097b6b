//! [`Glance`]: the nodes, and how often anything has changed in what they divide; read once for all workers of a node.
//!
//! A worker that has found nothing to do need not look at its pool again before something changes. Whatever changes leases,
//! requests, resources or roles adds to one counter in the same transaction ([`changed`]), so two short reads tell all
//! workers of a node whether one of them has to act: an idle node costs the same whatever it works on.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::sync::watch;

use super::status::nodes;
use crate::{
    bugs::{Bug, is_on},
    error::{Error, Result},
    keys::{Keys, NodeId, NodeRow},
    store::{AtomicOp, Database, Isolation, RangeRead, Transaction},
};

/// The nodes, and how often anything has changed, at one read version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Glance {
    /// The rows of all nodes.
    pub nodes: BTreeMap<NodeId, NodeRow>,
    /// How often anything has changed.
    changes: u64,
}

impl Glance {
    /// Looks, so that it makes nothing fail.
    pub async fn read(tx: &Transaction, keys: &Keys) -> Result<Self> {
        let key = keys.lease_changes();
        let (nodes, changes) = tokio::join!(nodes(tx, keys), tx.get(&key, Isolation::Snapshot));
        let changes = match changes? {
            None => 0,
            Some(value) => u64::from_le_bytes(value[..].try_into().map_err(|_| {
                Error::corrupt("count of changes", format!("{} bytes instead of 8", value.len()))
            })?),
        };
        Ok(Self { nodes: nodes?, changes })
    }

    /// What must change as long as the nodes live.
    pub fn beats(&self) -> impl Iterator<Item = (NodeId, ([u8; 16], u64))> + Clone {
        self.nodes.iter().map(|(&node, row)| (node, (row.token, row.beat)))
    }

    /// Whether nothing but beats has changed between `self` and `other`.
    pub fn is_as(&self, other: &Self) -> bool {
        let tokens =
            |glance: &Self| glance.nodes.iter().map(|(&node, row)| (node, row.token)).collect::<Vec<_>>();
        self.changes == other.changes && tokens(self) == tokens(other)
    }
}

/// Makes `tx` tell all nodes that leases, requests, the resources of a pool or the roles of a node change by it.
pub(crate) fn changed(tx: &Transaction, keys: &Keys) {
    if !is_on(Bug::LeaseChangeNotCounted) {
        tx.atomic(AtomicOp::Add, &keys.lease_changes(), &1_u64.to_le_bytes());
    }
}

/// Removes the rows of all nodes, each of which is known to be dead. What they own is free from then on.
pub(crate) async fn forget_nodes(tx: &Transaction, keys: &Keys) -> Result<()> {
    let rows = RangeRead::new(keys.nodes()).limit(1);
    if tx.get_range(&rows, Isolation::Serializable).await?.rows.is_empty() {
        return Ok(());
    }
    tx.clear_range(&keys.nodes());
    tx.clear_range(&keys.all_roles());
    changed(tx, keys);
    Ok(())
}

/// Looks as long as there are workers, as often as the one that wants it most often, and shows them what was seen.
pub(super) async fn look(
    db: Database,
    keys: Keys,
    mut intervals: watch::Receiver<Vec<Duration>>,
    seen: watch::Sender<Option<Arc<Glance>>>,
) {
    let env = db.env().clone();
    let mut looked = env.now();
    loop {
        // Without a sender nobody is left to look for.
        let Ok(interval) = intervals
            .wait_for(|intervals| !intervals.is_empty())
            .await
            .map(|intervals| intervals.iter().copied().min().expect("it is not empty"))
        else {
            return;
        };
        // Spread, so that nodes that were started together do not always meet.
        let due = looked.saturating_add(env.spread(interval, 0.9, 1.0));
        tokio::select! {
            biased;
            changed = intervals.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            () = env.sleep(due.saturating_sub(env.now())) => {}
        }
        match db.run(async |tx| Glance::read(&tx, &keys).await).await {
            Ok(glance) => drop(seen.send_replace(Some(Arc::new(glance)))),
            Err(error) => tracing::warn!(%error, "cannot look at the other nodes, trying again"),
        }
        looked = env.now();
    }
}
