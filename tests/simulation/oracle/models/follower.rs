//! [`Follower`]: what the oracle knows of a follower of shards.

use std::collections::BTreeSet;

use notibus::{event::Sequence, feed::ShardId};

use crate::kernel::Issuer;

/// The number of a follower of shards.
pub(crate) type FollowerId = u64;

/// A follower, which reads the feed shard by shard.
#[derive(Debug)]
pub(crate) struct Follower {
    /// Its process.
    pub issuer: Issuer,
    /// The rows that it has read.
    pub read: BTreeSet<Sequence>,
    /// The shards whose end it has received.
    pub ended: BTreeSet<ShardId>,
}
