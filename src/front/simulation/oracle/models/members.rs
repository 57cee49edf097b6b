//! [`Members`]: what the oracle knows of the nodes with a role.

use std::collections::BTreeSet;

use crate::state::keys::NodeId;

/// The nodes with a role.
#[derive(Debug, Default)]
pub(in crate::front::simulation::oracle) struct Members {
    pub nodes: BTreeSet<NodeId>,
    /// The version, which is in microseconds, at which it has last had one.
    pub alive: u64,
}
