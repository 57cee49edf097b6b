//! [`GroupModel`]: what the oracle knows of a group.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    base::encoding::Sequence,
    state::keys::{GroupId, ShardId},
};

#[derive(Debug)]
pub(in crate::front::simulation::oracle) struct GroupModel {
    pub id: GroupId,
    /// The number of its resets, in this world.
    pub generation: u64,
    pub start: Sequence,
    /// The version, which is in microseconds, at which it was created.
    pub created: u64,
    /// The rows that were worked on, or given up. Those of parked ids are not among them.
    pub done: BTreeSet<Sequence>,
    /// The rows that were worked on with their checkpoint.
    pub effects: BTreeSet<Sequence>,
    /// The last row in `effects`, by database or document.
    pub last: BTreeMap<String, Sequence>,
    pub checkpoints: BTreeMap<ShardId, Sequence>,
    /// The positions of the rows of parked ids.
    pub parked: BTreeMap<Vec<u8>, Sequence>,
    /// The stored lowest checkpoint.
    pub lowest: Option<Sequence>,
    /// Whether it ever had a consumer.
    pub is_used: bool,
}

impl GroupModel {
    pub fn new(id: GroupId, generation: u64, start: Sequence, created: u64) -> Self {
        Self {
            id,
            generation,
            start,
            created,
            done: BTreeSet::new(),
            effects: BTreeSet::new(),
            last: BTreeMap::new(),
            checkpoints: BTreeMap::new(),
            parked: BTreeMap::new(),
            lowest: None,
            is_used: false,
        }
    }
}
