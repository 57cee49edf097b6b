//! Deleting groups that nobody has worked for, if they were created so.
//!
//! No clocks are compared: the janitor adds up the time between its own passes in which a group had no living member. A member
//! lives if its beat has changed since the pass before. While no janitor works, nothing is added, so that a group is kept longer
//! then, never shorter.

use std::{collections::BTreeMap, time::Duration};

use super::Pass;
use crate::{
    error::{Error, Result},
    keys::{GroupId, GroupRow, NodeId},
    lease::{changed, nodes, roles},
    store::{Isolation, RangeRead, Transaction},
};

/// What a janitor remembers from one pass to the next.
#[derive(Debug, Default)]
pub(super) struct Members {
    /// The beats of all nodes.
    beats: BTreeMap<NodeId, ([u8; 16], u64)>,
    /// When that was, on its own clock; `None` before the first pass.
    seen: Option<Duration>,
}

impl Pass<'_> {
    /// Deletes the groups whose time has come. Returns how many.
    pub async fn expire_groups(&self, members: &mut Members) -> Result<u64> {
        let groups = self.expiring_groups().await?;
        let now = self.context.env().now();
        let passed = members.seen.map_or(Duration::ZERO, |seen| now.saturating_sub(seen));
        let passed_ms = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
        let keys = &self.context.keys;
        let (nodes, mut roles) =
            self.read(async |tx| Ok((nodes(&tx, keys).await?, roles(&tx, keys).await?))).await?;
        let mut beats = BTreeMap::new();
        let mut living = Vec::new();
        for (node, row) in nodes {
            let beat = (row.token, row.beat);
            // In the first pass nothing is known, so all of them may live.
            if members.seen.is_none() || members.beats.get(&node) != Some(&beat) {
                living.push(roles.remove(&node).unwrap_or_default());
            }
            beats.insert(node, beat);
        }
        let mut expired = 0;
        for (group, row) in groups {
            let role = group.role();
            if living.iter().any(|roles| roles.contains(&role)) {
                self.write(async |tx| self.end_idleness(&tx, &group).await).await?;
            } else if self.write(async |tx| self.add_idleness(&tx, &group, &row, passed_ms).await).await? {
                tracing::info!(%group, "a group is deleted: nobody has worked for it");
                expired += 1;
            }
        }
        *members = Members { beats, seen: Some(now) };
        Ok(expired)
    }

    /// The groups that expire.
    async fn expiring_groups(&self) -> Result<Vec<(GroupId, GroupRow)>> {
        let keys = &self.context.keys;
        let (mut groups, mut last) = (Vec::new(), None);
        let mut rest = Some(RangeRead::new(keys.all_groups()).limit(1_000));
        while let Some(read) = rest {
            let page = self.read(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
            let (found, next) = keys.groups_in(read, &page, &mut last)?;
            groups.extend(found.into_iter().filter(|(_, row)| row.expiry_ms > 0));
            rest = next;
        }
        Ok(groups)
    }

    /// Puts down that somebody works for `group`, unless that is known.
    async fn end_idleness(&self, tx: &Transaction, group: &GroupId) -> Result<()> {
        let key = self.context.keys.group_idle(group);
        if tx.get(&key, Isolation::Snapshot).await?.is_some() {
            tx.clear(&key);
        }
        Ok(())
    }

    /// Adds `passed_ms` to the time for which nobody has worked for `group`; deletes the group if that was long enough. Returns
    /// whether it did. A consumer that joins before the commit makes `tx` fail.
    async fn add_idleness(
        &self,
        tx: &Transaction,
        group: &GroupId,
        row: &GroupRow,
        passed_ms: u64,
    ) -> Result<bool> {
        let keys = &self.context.keys;
        let stored = tx.get(&keys.group(group), Isolation::Serializable).await?;
        if stored.map(|value| GroupRow::from_bytes(&value)).transpose()?.as_ref() != Some(row) {
            return Ok(false);
        }
        let key = keys.group_idle(group);
        let idle_ms = match tx.get(&key, Isolation::Serializable).await? {
            None => 0,
            Some(value) => {
                let bytes = value[..].try_into();
                let bytes =
                    bytes.map_err(|_| Error::corrupt("milliseconds", format!("{} bytes", value.len())))?;
                u64::from_be_bytes(bytes)
            }
        };
        let idle_ms = idle_ms.saturating_add(passed_ms);
        if idle_ms < row.expiry_ms {
            tx.set(&key, &idle_ms.to_be_bytes());
            return Ok(false);
        }
        for range in keys.whole_group(group) {
            tx.clear_range(&range);
        }
        changed(tx, keys);
        Ok(true)
    }
}
