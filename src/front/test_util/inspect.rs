//! What a judge that sees the rows of a store reads of the leases that guard the work of a bus. It writes nothing.

use crate::{
    base::error::Result,
    state::keys::{Keys, Lease, NodeId},
};

/// The key of the lease of `resource` of `pool`, in the bus with this prefix: of a partition, or of a shard of a group.
///
/// Fails with [`Error::Invalid`](crate::Error::Invalid) if the prefix is too long.
pub fn lease(bus: &[u8], pool: &str, resource: u64) -> Result<Vec<u8>> {
    Ok(Keys::new(bus)?.lease(pool, resource))
}

/// The node that owns the lease with this value; `None` if it is free.
///
/// Fails with [`Error::Corrupt`](crate::Error::Corrupt) if it is no lease.
pub fn owner(lease: &[u8]) -> Result<Option<NodeId>> {
    Ok(Lease::from_bytes(lease)?.owner.map(|owner| owner.node))
}
