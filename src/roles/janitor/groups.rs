//! Deleting groups that nobody has worked for, if they were created so.
//!
//! No clocks are compared. Time is that for which janitors have worked, one after the other; while none works, it stands still.
//! When a pass finds a group without members for the first time, it writes down that there may have been one until now; a later
//! pass deletes the group once that is longer ago than its expiry. Whoever works for it meanwhile removes the mark. So a group is
//! deleted later than was promised, never sooner; and what a pass has written may be written again by the next.
//!
//! Who is a member is a fact of the store: nodes that have died are removed by others, the janitor's own node among them.

use std::time::Duration;

use super::Pass;
use crate::{
    base::{env::Env, error::Result},
    state::{
        keys::{GroupId, GroupRow, Idleness},
        membership::pool_removed,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// The time that janitors have worked, as one of them goes on with it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WorkClock {
    /// For how long others had worked before, at least, and when this one began, on its own clock; `None` before it knows.
    began: Option<(Duration, Duration)>,
}

impl WorkClock {
    /// How long they have worked by now, in milliseconds.
    fn now_ms(self, env: &Env) -> u64 {
        let (earlier, began) = self.began.unwrap_or((Duration::ZERO, env.now()));
        let worked = earlier.saturating_add(env.now().saturating_sub(began));
        u64::try_from(worked.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Pass<'_> {
    /// Deletes the groups whose time has come. Returns how many.
    pub async fn expire_groups(&self, worked: &mut WorkClock) -> Result<u64> {
        let (env, groups) = (self.context.env(), self.expiring_groups().await?);
        if worked.began.is_none() {
            let mut earlier_ms = 0;
            for (group, _) in &groups {
                if let Some(idleness) = self.read(async |tx| self.idleness(&tx, group).await).await? {
                    earlier_ms = earlier_ms.max(idleness.alive_ms.saturating_add(idleness.idle_ms));
                }
            }
            worked.began = Some((Duration::from_millis(earlier_ms), env.now()));
        }
        let mut expired = 0;
        for (group, row) in groups {
            if self.write(async |tx| self.expire(&tx, &group, &row, *worked).await).await? {
                tracing::info!(%group, "a group is deleted: nobody has worked for it");
                expired += 1;
            }
        }
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

    /// What is stored of the time for which `group` has had no member.
    async fn idleness(&self, tx: &Transaction, group: &GroupId) -> Result<Option<Idleness>> {
        let stored = tx.get(&self.context.keys.group_idle(group), Isolation::Serializable).await?;
        stored.map(|value| Idleness::from_bytes(&value)).transpose()
    }

    /// Deletes `group` if it has had no member for long enough, else saves how long that is. Returns whether it is deleted.
    /// A consumer that joins before the commit makes `tx` fail.
    async fn expire(
        &self,
        tx: &Transaction,
        group: &GroupId,
        row: &GroupRow,
        worked: WorkClock,
    ) -> Result<bool> {
        let (keys, env) = (&self.context.keys, self.context.env());
        let before_ms = worked.now_ms(env);
        let (stored, member) = (keys.group(group), RangeRead::new(keys.nodes_with(&group.role())).limit(1));
        let (stored, member, idleness) = tokio::try_join!(
            tx.get(&stored, Isolation::Serializable),
            tx.get_range(&member, Isolation::Serializable),
            self.idleness(tx, group),
        )?;
        let stored = stored.map(|value| GroupRow::from_bytes(&value)).transpose()?;
        let key = keys.group_idle(group);
        if stored.is_none_or(|stored| stored.identity != row.identity) || !member.rows.is_empty() {
            if idleness.is_some() {
                tx.clear(&key);
            }
            return Ok(false);
        }
        let alive_ms = match idleness {
            Some(idleness) => idleness.alive_ms,
            // One may have left just before what was read.
            None => worked.now_ms(env),
        };
        let idle_ms = before_ms.saturating_sub(alive_ms);
        if idle_ms < row.expiry_ms {
            tx.set(&key, &Idleness { alive_ms, idle_ms }.to_bytes());
            return Ok(false);
        }
        for range in keys.whole_group(group) {
            tx.clear_range(&range);
        }
        pool_removed(tx, keys);
        Ok(true)
    }
}
