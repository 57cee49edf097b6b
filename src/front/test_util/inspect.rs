//! Decodes the leases, nodes, shards and consumers of a bus, for tests that judge the rows of its store. It writes nothing.

use std::{ops::Range, time::Duration};

use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result, event::DbInstance},
    state::keys::{ConsumerRow, DeferredRow, Due, Keys, Lease, NodeId, NodeRow, TopologyRow},
};

/// Returns the key of the lease on `resource` in `pool`, in the bus with this prefix. A resource is a partition, or a shard of a consumer.
///
/// Fails with [`Error::Invalid`](crate::Error::Invalid) if the prefix is too long.
pub fn lease(bus: &[u8], pool: &str, resource: u64) -> Result<Vec<u8>> {
    Ok(Keys::new(bus)?.lease(pool, resource))
}

/// Returns the node that owns the lease with this value; `None` if the lease is free.
///
/// Fails with [`Error::Corrupt`](crate::Error::Corrupt) if the value is not a lease.
pub fn owner(lease: &[u8]) -> Result<Option<NodeId>> {
    Ok(Lease::from_bytes(lease)?.owner.map(|owner| owner.node))
}

/// Returns what identifies the latest heartbeat of a node, and how long the node may go without one before it counts as dead.
///
/// Fails with [`Error::Corrupt`](crate::Error::Corrupt) if `row` is not the row of a node.
pub fn node(row: &[u8]) -> Result<(([u8; 16], u64), Duration)> {
    let row = NodeRow::from_bytes(row)?;
    Ok(((row.token, row.beat), row.expiry()))
}

/// Returns the shards of the topology entry that begins at `first`.
///
/// Fails with [`Error::Corrupt`](crate::Error::Corrupt) if `entry` is not a topology entry.
pub fn topology(first: Sequence, entry: &[u8]) -> Result<Range<u64>> {
    let entry = TopologyRow::from_bytes(first, entry)?;
    let next = entry.next_shard().0;
    Ok(next - entry.shards().len() as u64..next)
}

/// The stored row of a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredConsumer {
    /// A random id, drawn when the consumer was created.
    pub identity: [u8; 16],
    /// The number of the generation, raised by each reset.
    pub generation: u64,
    /// Where the consumer began when its position was last set.
    pub start: Cursor,
    /// Whether the consumer is paused, so that nothing may be worked on.
    pub is_paused: bool,
    /// How long the consumer may be without a member before it is deleted; `None` for no limit.
    pub expiry: Option<Duration>,
    /// The database whose documents the consumer follows; `None` if it follows the notifications.
    pub instance: Option<DbInstance>,
}

/// Reads the row of a consumer. Fails with [`Error::Corrupt`](crate::Error::Corrupt) if `row` is not such a row.
pub fn consumer(row: &[u8]) -> Result<StoredConsumer> {
    let ConsumerRow { identity, generation, start, is_paused, expiry_ms, feed, .. } =
        ConsumerRow::from_bytes(row)?;
    let expiry = (expiry_ms > 0).then(|| Duration::from_millis(expiry_ms));
    Ok(StoredConsumer { identity, generation, start, is_paused, expiry, instance: feed.instance() })
}

/// The stored key of an id whose state the checkpoint of its shard does not describe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredKey {
    /// Up to where the work on the id is finished.
    pub done: Cursor,
    /// The database that was worked on.
    pub instance: Option<DbInstance>,
    /// Whether there is work to do on the id. If not, the key says only what is finished.
    pub is_pending: bool,
    /// The request to work on the id again.
    pub again: Option<[u8; 16]>,
}

/// Reads the key of a consumer's id. Fails with [`Error::Corrupt`](crate::Error::Corrupt) if `key` is not such a key.
pub fn deferred(key: &[u8]) -> Result<StoredKey> {
    let DeferredRow { done, instance, due, again, .. } = DeferredRow::from_bytes(key)?;
    Ok(StoredKey { done, instance, is_pending: due != Due::Never, again })
}
