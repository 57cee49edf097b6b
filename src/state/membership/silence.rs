//! Whether listed nodes still live, found out by watching their rows.
//!
//! A killed node leaves its row behind. So an operation that must not run beside living nodes is refused only if a
//! node is seen to beat, or if its expiry is too long to wait for.

use std::{collections::BTreeMap, time::Duration};

use super::status::all_nodes;
use crate::{
    base::error::{Error, Result},
    state::keys::{Keys, NodeId, NodeRow},
    store::{Database, Isolation, Transaction},
};

/// How often the rows are read.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The longest time for which a node is watched: a node with a longer expiry counts as living.
const WATCH_MAX: Duration = Duration::from_mins(1);

type NodeRows = BTreeMap<NodeId, NodeRow>;

/// Proof that no node of a bus lived at the time of the watch.
pub(crate) struct Silence(NodeRows);

impl Silence {
    /// Watches all nodes of the bus until one of them is known to live, or all have been silent for their expiry. Fails with
    /// [`Error::BusInUse`] if one lives.
    pub async fn of_bus(db: &Database, keys: &Keys) -> Result<Self> {
        let (read, env) = (|| db.run(async |tx| all_nodes(&tx, keys, Isolation::Snapshot).await), db.env());
        let first = read().await?;
        let began = env.now();
        let mut seen = first.clone();
        loop {
            let is_alive =
                |(node, row): &(&NodeId, &NodeRow)| first.get(node) != Some(row) || row.expiry() > WATCH_MAX;
            let alive = seen.iter().filter(is_alive).count();
            if alive > 0 {
                return Err(Error::BusInUse { nodes: alive });
            }
            let longest = seen.values().map(NodeRow::expiry).max();
            if longest.is_none_or(|longest| env.now().saturating_sub(began) >= longest) {
                return Ok(Self(seen));
            }
            env.sleep(POLL_INTERVAL).await;
            seen = read().await?;
        }
    }

    /// Fails with [`Error::BusInUse`] if a node has beaten or joined since, and makes `tx` fail if one does before the commit.
    pub async fn check(&self, tx: &Transaction, keys: &Keys) -> Result<()> {
        let found = all_nodes(tx, keys, Isolation::Serializable).await?;
        match found.iter().filter(|(node, row)| self.0.get(node) != Some(row)).count() {
            0 => Ok(()),
            nodes => Err(Error::BusInUse { nodes }),
        }
    }
}
