//! [`GroupModel`]: what the oracle knows of a group.

use std::collections::{BTreeMap, BTreeSet};

use notibus::{
    event::{DbInstance, Sequence},
    feed::ShardId,
    group::GroupName,
};

/// A group, and the feed that it reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupId {
    /// The database whose documents it reads; `None` if it reads the notifications.
    pub instance: Option<DbInstance>,
    pub name: GroupName,
}

impl GroupId {
    /// The group with this key among the groups of all feeds.
    pub fn of_key(key: &GroupName) -> Option<Self> {
        let Some((instance, name)) = key.as_str().split_once('/') else {
            return Some(Self { instance: None, name: key.clone() });
        };
        Some(Self { instance: Some(instance.parse().ok()?), name: GroupName::new(name).ok()? })
    }

    /// The id of its feed in keys.
    pub fn feed(&self) -> Vec<u8> {
        self.instance.map_or_else(|| b"n".to_vec(), |instance| [b"d", &instance.0[..]].concat())
    }

    /// The pool of its shards.
    pub fn pool(&self) -> String {
        match self.instance {
            None => format!("group/notifications/{}", self.name),
            Some(instance) => format!("group/{instance}/{}", self.name),
        }
    }

    /// The role of its nodes.
    pub fn role(&self) -> String {
        match self.instance {
            None => format!("group:{}", self.name),
            Some(instance) => format!("group-of-{instance}:{}", self.name),
        }
    }
}

#[derive(Debug)]
pub(crate) struct GroupModel {
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
