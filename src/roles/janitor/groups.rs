//! Deletes groups that have had no member for longer than the expiry they were created with.
//!
//! The janitor compares no clocks. It measures time by how long janitors have worked, one after the other; this time stands still while
//! no janitor works. When a pass first finds a group without members, it saves that the group may have had one until now. A later pass
//! deletes the group once that is longer ago than the expiry. A pass that finds a member removes the saved time, and so does a node
//! in the transaction that makes it one. So a group may be deleted later than promised, but never sooner. A pass may be
//! repeated: it then writes the same again.
//!
//! The store says which nodes are members. Other nodes remove a dead node, the janitor's own node among them.

use std::time::Duration;

use futures_util::{StreamExt, future::try_join_all, stream};

use super::pass::{Failed, Pass};
use crate::{
    base::{env::Env, error::Result},
    state::{
        keys::{GroupId, GroupRow, Idleness},
        membership::pool_removed,
    },
    store::{Isolation, RangeRead, Transaction},
};

/// How many rows are read at once. What is behind the groups of a feed is skipped, up to a page of it.
const PAGE_ROWS: usize = 100;

/// How many groups are judged at once, each in a transaction of its own.
const JUDGED_AT_ONCE: usize = 16;

/// The time for which janitors have worked, continued by the present one.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WorkClock {
    /// At least how long earlier janitors worked, and when this one began on its own clock. `None` until the former is read.
    began: Option<(Duration, Duration)>,
}

impl WorkClock {
    /// Time worked until now, in milliseconds.
    fn now_ms(self, env: &Env) -> u64 {
        let (earlier, began) = self.began.unwrap_or((Duration::ZERO, env.now()));
        let worked = earlier.saturating_add(env.now().saturating_sub(began));
        u64::try_from(worked.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Pass<'_> {
    /// Deletes the groups that have expired. A group that cannot be judged does not keep others from being deleted.
    pub async fn expire_groups(&self, worked: &mut WorkClock) -> Result<()> {
        let (env, groups) = (self.context.env(), self.expiring_groups().await?);
        if worked.began.is_none() {
            let earlier_ms = self.worked_before(&groups).await?;
            worked.began = Some((Duration::from_millis(earlier_ms), env.now()));
        }
        let worked = *worked;
        let judged = groups.iter().map(|(group, row)| async move {
            (group, self.write(async |tx| self.expire(&tx, group, row, worked).await).await)
        });
        // Collected first, because the compiler cannot name the type of the futures otherwise.
        let judged: Vec<_> = judged.collect();
        let (mut judged, mut failed) =
            (stream::iter(judged).buffer_unordered(JUDGED_AT_ONCE), Failed::default());
        while let Some((group, expired)) = judged.next().await {
            if failed.note(expired)? == Some(true) {
                tracing::info!(%group, "a group is deleted: nobody has worked for it");
                self.context.stats.groups_expired.add(1);
            }
        }
        failed.end()
    }

    /// At least how long earlier janitors have worked, in milliseconds, as they have saved it with `groups`.
    async fn worked_before(&self, groups: &[(GroupId, GroupRow)]) -> Result<u64> {
        let mut earlier_ms = 0;
        for some in groups.chunks(PAGE_ROWS) {
            let read = async |tx: Transaction| {
                let tx = &tx;
                try_join_all(some.iter().map(|(group, _)| async move { self.idleness(tx, group).await }))
                    .await
            };
            for idleness in self.read(read).await?.into_iter().flatten() {
                earlier_ms = earlier_ms.max(idleness.alive_ms.saturating_add(idleness.idle_ms));
            }
        }
        Ok(earlier_ms)
    }

    async fn expiring_groups(&self) -> Result<Vec<(GroupId, GroupRow)>> {
        let keys = &self.context.keys;
        let (mut groups, mut last) = (Vec::new(), None);
        let mut rest = Some(RangeRead::new(keys.all_groups()).limit(PAGE_ROWS));
        while let Some(read) = rest {
            let page = self.read(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
            let (found, next) = keys.groups_in(read, &page, &mut last)?;
            groups.extend(found.into_iter().filter(|(_, row)| row.expiry_ms > 0));
            rest = next;
        }
        Ok(groups)
    }

    /// Reads since when `group` has had no member, as saved by an earlier pass.
    async fn idleness(&self, tx: &Transaction, group: &GroupId) -> Result<Option<Idleness>> {
        let key = self.context.keys.group_idle(group);
        let stored = tx.get(&key, Isolation::Serializable).await?;
        stored.map(|value| Idleness::from_bytes(&value).map_err(|error| error.at(&key))).transpose()
    }

    /// Deletes `group` if it has had no member for long enough, else saves for how long it has had none. Returns whether it was deleted.
    /// `tx` fails if a consumer joins before the commit.
    async fn expire(
        &self,
        tx: &Transaction,
        group: &GroupId,
        row: &GroupRow,
        worked: WorkClock,
    ) -> Result<bool> {
        let (keys, env) = (&self.context.keys, self.context.env());
        let before_ms = worked.now_ms(env);
        let (group_key, member) =
            (keys.group(group), RangeRead::new(keys.nodes_with(&group.role())).limit(1));
        let (stored, member, idleness) = tokio::try_join!(
            tx.get(&group_key, Isolation::Serializable),
            tx.get_range(&member, Isolation::Serializable),
            self.idleness(tx, group),
        )?;
        let stored = stored.map(|value| GroupRow::from_bytes(&value)).transpose();
        let stored = stored.map_err(|error| error.at(&group_key))?;
        let key = keys.group_idle(group);
        if stored.is_none_or(|stored| stored.identity != row.identity) || !member.rows.is_empty() {
            if idleness.is_some() {
                tx.clear(&key);
            }
            return Ok(false);
        }
        let alive_ms = match idleness {
            Some(idleness) => idleness.alive_ms,
            // A member may have left just before this read.
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
