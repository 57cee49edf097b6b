//! [`Pool`]: the resources that the nodes of a role divide.

use std::sync::Arc;

use bytes::Bytes;

use crate::state::keys::Role;

/// A pool: the resources to divide, and the role of the nodes that divide them.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    /// The name of the pool in the keys of its leases.
    pub name: Arc<str>,
    /// The role of the nodes that divide it.
    pub role: Role,
    /// The key of the note that no node has the role. Each publication of the role removes it, so no node joins unseen.
    pub idle: Option<Bytes>,
}
