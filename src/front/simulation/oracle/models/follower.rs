//! [`Follower`]: what the oracle knows of a follower of shards.

use std::collections::BTreeSet;

use crate::{base::encoding::Sequence, front::simulation::issuer::Issuer, state::keys::ShardId};

/// The number of a follower of shards.
pub(in crate::front::simulation) type FollowerId = u64;

/// A follower, which reads the feed shard by shard.
#[derive(Debug)]
pub(in crate::front::simulation::oracle) struct Follower {
    /// Its process.
    pub issuer: Issuer,
    /// The rows that it has read.
    pub read: BTreeSet<Sequence>,
    /// The shards whose end it has received.
    pub ended: BTreeSet<ShardId>,
}
