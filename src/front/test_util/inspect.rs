//! Decodes the leases, nodes, shards and consumers of a bus, for tests that judge the rows of its store. It writes nothing.

use std::{ops::Range, time::Duration};

use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result, event::DbInstance},
    state::keys::{ConsumerRow, DeferredRow, Due, Keys, Lease, NodeId, NodeRow, TopologyRow},
};

/// The key of the lease of `resource` of `pool`, in the bus with this prefix: of a partition, or of a shard of a consumer.
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

/// What distinguishes each beat of a node from all others, and after how long without one it counts as dead.
///
/// Fails with [`Error::Corrupt`](crate::Error::Corrupt) if it is no row of a node.
pub fn node(row: &[u8]) -> Result<(([u8; 16], u64), Duration)> {
    let row = NodeRow::from_bytes(row)?;
    Ok(((row.token, row.beat), row.expiry()))
}

/// The shards of the topology entry that begins at `first`.
///
/// Fails with [`Error::Corrupt`](crate::Error::Corrupt) if it is no topology entry.
pub fn topology(first: Sequence, entry: &[u8]) -> Result<Range<u64>> {
    let entry = TopologyRow::from_bytes(first, entry)?;
    let next = entry.next_shard().0;
    Ok(next - entry.shards().len() as u64..next)
}

/// The stored row of a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredConsumer {
    /// Drawn at its creation.
    pub identity: [u8; 16],
    /// Raised by each reset.
    pub generation: u64,
    /// Where it began when its position was last set.
    pub start: Cursor,
    /// Whether nothing may be worked on.
    pub is_paused: bool,
    /// After how long without a member it is deleted.
    pub expiry: Option<Duration>,
    /// The database whose documents it follows; `None` if it follows the notifications.
    pub instance: Option<DbInstance>,
}

/// Reads the row of a consumer. Fails with [`Error::Corrupt`](crate::Error::Corrupt) if `row` is not such a row.
pub fn consumer(row: &[u8]) -> Result<StoredConsumer> {
    let ConsumerRow { identity, generation, start, is_paused, expiry_ms, feed, .. } =
        ConsumerRow::from_bytes(row)?;
    let expiry = (expiry_ms > 0).then(|| Duration::from_millis(expiry_ms));
    Ok(StoredConsumer { identity, generation, start, is_paused, expiry, instance: feed.instance() })
}

/// The stored key of an id whose work is not decided by the checkpoint of its shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredKey {
    /// Up to where the work on the id is finished.
    pub done: Cursor,
    /// The database that was worked on.
    pub instance: Option<DbInstance>,
    /// Whether something is to be done; otherwise it says only what is finished.
    pub is_pending: bool,
    /// The request to work again.
    pub again: Option<[u8; 16]>,
}

/// Reads the key of an id of a consumer. Fails with [`Error::Corrupt`](crate::Error::Corrupt) if it is none.
pub fn deferred(key: &[u8]) -> Result<StoredKey> {
    let DeferredRow { done, instance, due, again, .. } = DeferredRow::from_bytes(key)?;
    Ok(StoredKey { done, instance, is_pending: due != Due::Never, again })
}
