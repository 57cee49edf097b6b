//! [`Members`]: what the oracle knows of the nodes with a role.

use std::collections::BTreeSet;

use notibus::node::NodeId;

/// The nodes with a role.
#[derive(Debug, Default)]
pub(crate) struct Members {
    pub nodes: BTreeSet<NodeId>,
    /// The version, which is in microseconds, at which it has last had one.
    pub alive: u64,
}
