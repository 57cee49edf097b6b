//! [`GroupStatus`]: the state of a group as stored, for people.

use std::{collections::BTreeMap, sync::Arc};

use serde::Serialize;

use super::Group;
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        event::DbInstance,
    },
    state::{
        context::Context,
        keys::{GroupName, Idleness, NodeId, ShardId, Trouble, checkpoint_position},
        membership::members,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// The stored state of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GroupStatus {
    /// Its name.
    pub name: GroupName,
    /// The database whose documents it follows; `None` if it follows the notifications.
    pub instance: Option<DbInstance>,
    /// Where it began when it was created, or was last reset; [`Cursor::NOTHING`] if it began with every database.
    pub start: Cursor,
    /// How often its position was set: 1 at its creation, raised by each reset.
    pub generation: u64,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: u64,
    /// The milliseconds without a living member after which it is deleted; `None` for never.
    pub idle_expiry_ms: Option<u64>,
    /// How many of those milliseconds have passed, as far as the janitor has counted; 0 if there is a member.
    pub idle_ms: u64,
    /// The nodes that are its members. Some may have died: a member lives only if its heartbeat changes
    /// ([`Bus::nodes`](crate::Bus::nodes)). Without a member, no node works for the group.
    pub members: Vec<NodeId>,
    /// The shards that it is reading, in the order of their ids.
    pub shards: Vec<ShardStatus>,
    /// Whether it has dead letters.
    pub has_dead_letters: bool,
    /// Whether it has parked ids.
    pub has_parked: bool,
}

/// The stored state of a shard that a group is reading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ShardStatus {
    /// The shard.
    pub shard: ShardId,
    /// The node that owns it, alive or not; `None` if none does.
    pub owner: Option<NodeId>,
    /// Everything up to here was worked on.
    pub checkpoint: Sequence,
    /// When its position was last saved, in milliseconds since 1970; `None` if it never was.
    pub progress_ms: Option<u64>,
    /// The last failure; `None` if there was none.
    pub trouble: Option<GroupTrouble>,
}

/// The last failure in a shard of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GroupTrouble {
    /// Whether it lasts: no row of the shard was worked on since.
    pub is_current: bool,
    /// Whether it has lasted for so long that the shard was reported as stuck.
    pub is_stuck: bool,
    /// How often the rows have been tried.
    pub attempts: u32,
    /// When it happened, in milliseconds since 1970.
    pub at_ms: u64,
    /// The text of the error, at most 1,000 bytes.
    pub error: String,
}

impl From<Trouble> for GroupTrouble {
    fn from(trouble: Trouble) -> Self {
        let Trouble { is_current, is_stuck, attempts, at_ms, text } = trouble;
        Self { is_current, is_stuck, attempts, at_ms, error: text }
    }
}

/// The groups of all feeds: first those of documents, then those of the notifications, each in the order of their names.
pub(crate) async fn statuses(context: &Arc<Context>) -> Result<Vec<GroupStatus>> {
    let keys = &context.keys;
    let (mut groups, mut last) = (Vec::new(), None);
    let mut rest = Some(RangeRead::new(keys.all_groups()).limit(1_000));
    while let Some(read) = rest {
        let page = context.db.run(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
        let (found, next) = keys.groups_in(read, &page, &mut last)?;
        groups.extend(found);
        rest = next;
    }
    let mut statuses = Vec::with_capacity(groups.len());
    for (id, _) in groups {
        let group = Group::<()> { context: Arc::clone(context), id, rows: std::marker::PhantomData };
        match group.status().await {
            // It was deleted meanwhile.
            Err(Error::NoGroup { .. }) => {}
            status => statuses.push(status?),
        }
    }
    Ok(statuses)
}

impl<R> Group<R> {
    /// Reads the stored state of the group in one transaction. Fails with [`Error::NoGroup`].
    pub async fn status(&self) -> Result<GroupStatus> {
        self.context.db.run(async |tx| self.status_in(&tx).await).await
    }

    async fn status_in(&self, tx: &Transaction) -> Result<GroupStatus> {
        let keys = &self.context.keys;
        let row = self.row(tx).await?.ok_or_else(|| self.missing())?;
        let mut shards: BTreeMap<ShardId, ShardStatus> = BTreeMap::new();
        for (key, value) in tx.all_rows(keys.checkpoints_of(&self.id), Isolation::Snapshot).await? {
            let shard = keys.checkpoint_shard(&key)?;
            let checkpoint = checkpoint_position(&value).map_err(|error| error.at(&key))?;
            let status = ShardStatus { shard, owner: None, checkpoint, progress_ms: None, trouble: None };
            shards.insert(shard, status);
        }
        for (key, value) in tx.all_rows(keys.leases(&self.id.pool()), Isolation::Snapshot).await? {
            let (_, resource, lease) = keys.lease_row(&key, &value)?;
            if let Some(status) = shards.get_mut(&ShardId(resource)) {
                status.owner = lease.owner.map(|owner| owner.node);
            }
        }
        let [progresses, troubles] = keys.statuses_of(&self.id);
        for (key, value) in tx.all_rows(progresses, Isolation::Snapshot).await? {
            if let Some(status) = shards.get_mut(&keys.status_shard(&key)?) {
                status.progress_ms = Some(milliseconds(&value).map_err(|error| error.at(&key))?);
            }
        }
        for (key, value) in tx.all_rows(troubles, Isolation::Snapshot).await? {
            if let Some(status) = shards.get_mut(&keys.status_shard(&key)?) {
                status.trouble = Some(Trouble::from_bytes(&value).map_err(|error| error.at(&key))?.into());
            }
        }
        let idle = tx.get(&keys.group_idle(&self.id), Isolation::Snapshot).await?;
        let has_row = async |range| {
            let page = tx.get_range(&RangeRead::new(range).limit(1), Isolation::Snapshot).await?;
            Ok::<_, Error>(!page.rows.is_empty())
        };
        let members = members(tx, keys, &self.id.role()).await?;
        Ok(GroupStatus {
            name: self.id.name.clone(),
            instance: self.instance(),
            start: if row.start.knew_nothing() { Cursor::NOTHING } else { row.start },
            generation: row.generation,
            created_ms: row.created_ms,
            idle_expiry_ms: Some(row.expiry_ms).filter(|ms| *ms > 0),
            idle_ms: idle
                .map(|value| Idleness::from_bytes(&value))
                .transpose()?
                .map_or(0, |idle| idle.idle_ms),
            members: members.into_iter().map(|(node, _)| node).collect(),
            shards: shards.into_values().collect(),
            has_dead_letters: has_row(keys.dead_letters(&self.id)).await?,
            has_parked: has_row(keys.group_parked_ids(&self.id)).await?,
        })
    }
}

fn milliseconds(value: &[u8]) -> Result<u64> {
    let bytes =
        value.try_into().map_err(|_| Error::corrupt("milliseconds", format!("{} bytes", value.len())))?;
    Ok(u64::from_be_bytes(bytes))
}
