//! [`Members`]: what the oracle knows of the nodes with a role; [`Working`]: of the work of one.

use std::collections::{BTreeMap, BTreeSet};

use crate::state::keys::NodeId;

/// The nodes with a role.
#[derive(Debug, Default)]
pub(in crate::front::simulation::oracle) struct Members {
    pub nodes: BTreeSet<NodeId>,
    /// The version, which is in microseconds, at which it has last had one.
    pub alive: u64,
}

/// The resources that a node works on, by pool.
pub(in crate::front::simulation) type Working = BTreeMap<String, BTreeSet<u64>>;
