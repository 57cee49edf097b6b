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
    /// The key of a note that nobody has the role. It is removed with each publication of the role, so that nobody comes unseen.
    pub idle: Option<Bytes>,
}
