//! The rows of groups and durable subscribers, for the judges of these. This goes with them, as soon as one kind of consumer
//! takes their place; nothing else may use it.
//!
//! Each function fails with [`Error::Corrupt`](crate::Error::Corrupt) if the value is no such row.

use std::{ops::Range, time::Duration};

use bytes::Bytes;

use crate::{
    base::{cursor::Cursor, encoding::Sequence, error::Result},
    state::keys::{
        CursorRow, GroupParkedRow, GroupRow, Lease, NodeId, NodeRow, Owner, ShardId, TopologyRow,
        checkpoint_position,
    },
};

/// The position in a checkpoint.
pub fn checkpoint(value: &[u8]) -> Result<Sequence> {
    checkpoint_position(value)
}

/// Where a group begins, and after how long without a member it is deleted.
pub fn group(value: &[u8]) -> Result<(Sequence, Option<Duration>)> {
    let row = GroupRow::from_bytes(value)?;
    let expiry = (row.expiry_ms > 0).then(|| Duration::from_millis(row.expiry_ms));
    Ok((row.start.position(), expiry))
}

/// The position of the row that a group has parked.
pub fn parked(value: &Bytes) -> Result<Sequence> {
    Ok(GroupParkedRow::from_bytes(value)?.sequence)
}

/// A named cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedCursor {
    /// Drawn by the owner that opened it last.
    pub token: [u8; 16],
    /// Its position.
    pub cursor: Cursor,
    /// A hash of the filter.
    pub filter: u64,
}

impl SavedCursor {
    /// Of an owner that has expired, and has yet to begin again.
    pub const EXPIRED: Cursor = Cursor::EXPIRED;

    /// Whether a reader at its position has to expire, where everything up to `horizon` may have been dropped.
    pub fn is_expired(&self, horizon: Sequence) -> bool {
        self.cursor.check(horizon).is_err()
    }
}

/// The cursor of a durable subscriber.
pub fn cursor(value: &[u8]) -> Result<SavedCursor> {
    let CursorRow { token, cursor, filter } = CursorRow::from_bytes(value)?;
    Ok(SavedCursor { token, cursor, filter })
}

/// What distinguishes each beat of a node from all others, and after how long without one it counts as dead.
pub fn node(value: &[u8]) -> Result<(([u8; 16], u64), Duration)> {
    let row = NodeRow::from_bytes(value)?;
    Ok(((row.token, row.beat), row.expiry()))
}

/// The shards of the topology entry that begins at `first`.
pub fn topology(first: Sequence, value: &[u8]) -> Result<Range<u64>> {
    let entry = TopologyRow::from_bytes(first, value)?;
    let next = entry.next_shard().0;
    Ok(next - entry.shards().len() as u64..next)
}

/// The value of a lease that `node` owns.
pub fn lease_of(node: NodeId) -> Vec<u8> {
    Lease { epoch: 1, owner: Some(Owner { node, token: [0; 16] }) }.to_bytes()
}

/// The value of the parked row at `sequence` of `shard`.
pub fn parked_at(shard: ShardId, sequence: Sequence) -> Vec<u8> {
    let (after, error, row) = (Sequence::MIN, String::new(), Bytes::new());
    GroupParkedRow { shard, after, sequence, attempts: 1, at_ms: 0, error, row }.to_bytes()
}
