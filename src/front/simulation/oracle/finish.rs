//! The end: everything has come to rest, and the store agrees with the model, key by key.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;

use super::{
    FEED, Oracle,
    commit::Verdict,
    stored_item::StoredItem,
};
use crate::{
    base::{
        encoding::{Counters, Sequence},
        event::{Db, DbName, DdocId},
        notification::Notification,
    },
    front::simulation::{
        app::AppKey,
        guarantee::Guarantee,
        keyspace::{BROKEN, show_key},
    },
    state::keys::{CursorRow, Lease, ShardId},
};

impl Oracle {
    /// The promise that is broken if everything does not come to rest.
    pub fn unrest_breaks(&self) -> Guarantee {
        let is_owed = self.subscribers_are_owed().is_some();
        let is_dropped = |text: String| text.contains("whose tombstone was dropped");
        if self.subscribers_are_owed().is_some_and(is_dropped) {
            Guarantee::ExpiredNotSilent
        } else if !self.waiting.is_empty() {
            Guarantee::FoldedOnce
        } else if is_owed {
            Guarantee::Complete
        } else if self.groups_owe().is_some() {
            Guarantee::AtLeastOnce
        } else if self.jobs_owe().is_some() {
            Guarantee::Worked
        } else {
            Guarantee::Live
        }
    }

    /// Something that still has to happen before everything is at rest.
    pub fn unrest(&self) -> Option<String> {
        if let Some((db, counters)) = self.waiting.first_key_value() {
            return Some(format!("{counters:?} of {db:?} have still to be folded"));
        }
        if let Some((db, id)) = self.unreported_ddoc() {
            return Some(format!("it has still to be informed that {id:?} of {db:?} has changed"));
        }
        self.subscribers_are_owed()
            .or_else(|| self.groups_owe())
            .or_else(|| self.followers_owe())
            .or_else(|| self.doc_tails_owe())
            .or_else(|| self.jobs_owe())
            .or_else(|| self.janitor_owes())
            .or_else(|| self.lease_without_work())
            .or_else(|| {
                #[cfg(feature = "http")]
                return self.web_clients_owe();
                #[cfg(not(feature = "http"))]
                None
            })
    }

    /// Work that the jobs of triggers have still to do.
    fn jobs_owe(&self) -> Option<String> {
        self.jobs.as_ref()?.owe(&self.databases, &self.documents)
    }

    /// A recorded change of a design document that no row has reported since. Nobody reads rows of databases whose
    /// names others have taken.
    fn unreported_ddoc(&self) -> Option<&(Db, Option<DdocId>)> {
        let is_reported = |(ddoc, recorded): &(&(Db, Option<DdocId>), &Sequence)| {
            let found = self.reported_ddocs.get(*ddoc);
            found.is_some_and(|found| found > *recorded)
        };
        let newest =
            |db: &Db| self.rows.get(&db.name).is_some_and(|placed| placed.row.instance == db.instance);
        let own = self.recorded_ddocs.iter().filter(|((db, _), _)| newest(db));
        own.into_iter().find(|entry| !is_reported(entry)).map(|(ddoc, _)| ddoc)
    }

    /// Judges whether the rows agree with the history.
    pub fn judge_history(&self) -> Verdict {
        for name in self.recorded.keys().map(|db| &db.name) {
            self.judge_history_of(name)?;
        }
        for (number, times) in &self.once {
            if *times != 1 {
                return Guarantee::ExactlyOnce.fails(format!("number {number} was committed {times} times"));
            }
        }
        Ok(())
    }

    /// Judges whether the row of `name` agrees with its history.
    fn judge_history_of(&self, name: &DbName) -> Verdict {
        let row = self.rows.get(name).map(|placed| &placed.row);
        let zero = Counters::ZERO;
        let Some(row) = row else {
            let lives = self.databases.contains_key(name);
            let is_dropped = self.dropped.keys().any(|db| db.name == *name);
            return if lives || !is_dropped {
                Guarantee::Consistent.fails(format!("{name:?} has no row"))
            } else {
                Ok(())
            };
        };
        match self.databases.get(name) {
            Some(lives) if *lives != row.instance || row.is_deleted() => {
                return Guarantee::Consistent
                    .fails(format!("{name:?} lives as {lives:?}, and its row says {row:?}"));
            }
            None if !row.is_deleted() => {
                return Guarantee::Consistent.fails(format!("{name:?} is deleted, and its row says {row:?}"));
            }
            _ => {}
        }
        let db = row.db();
        let recorded = self.recorded.get(&db).copied().unwrap_or(zero);
        let mut found = row.totals;
        found += self.stale.get(&db).copied().unwrap_or(zero);
        found += self.dropped.get(&db).copied().unwrap_or(zero);
        if found != recorded {
            return Guarantee::FoldedOnce
                .fails(format!("{recorded:?} was recorded of {db:?}, and {found:?} was counted"));
        }
        Ok(())
    }

    /// Judges whether the whole feed, read in pages, has each database once, in order.
    pub fn judge_pages(&mut self, rows: &[Arc<Notification>]) -> Verdict {
        let mut expected: Vec<_> = self.rows.values().map(|placed| Arc::clone(&placed.row)).collect();
        expected.sort_unstable_by_key(|row| row.sequence);
        // A tombstone can be dropped after it was read.
        let is_there = |row: &&Arc<Notification>| !row.is_deleted() || self.rows.contains_key(&row.name);
        let rows: Vec<_> = rows.iter().filter(is_there).cloned().collect();
        if rows != expected {
            return Guarantee::Consistent
                .fails(format!("the feed is read as {rows:?} instead of {expected:?}"));
        }
        Ok(())
    }

    /// Judges whether the store agrees with the model, after all processes have shut down.
    pub fn judge_store(&self, rows: &BTreeMap<Bytes, Bytes>) -> Verdict {
        let mut newest = 0;
        let mut placed = 0;
        let mut ddocs = 0;
        let items = rows.keys().map(|key| StoredItem::of(key));
        let owed: BTreeSet<_> = items
            .filter_map(|item| match item {
                StoredItem::Owed(trigger, name) => Some((trigger, name)),
                _ => None,
            })
            .collect();
        for (key, value) in rows {
            let item = StoredItem::of(key);
            match &item {
                StoredItem::Broken => {}
                // The end has cut off the work on an instance that is gone; the trigger goes on with the name when it starts again.
                StoredItem::Mark(trigger, db) if owed.contains(&(trigger.clone(), db.name.clone())) => {}
                StoredItem::Row(feed, ..) if feed == Self::feed() && value == BROKEN => {}
                StoredItem::Row(feed, shard, at) if feed == Self::feed() => {
                    placed += 1;
                    let known = self.rows.values().find(|placed| placed.row.sequence == *at);
                    if known.is_none_or(|known| known.shard != *shard) {
                        return Guarantee::Consistent.fails(format!(
                            "there is a row at {at} of shard {shard}, which is no newest row"
                        ));
                    }
                }
                StoredItem::Newest(feed, id) if feed == FEED => {
                    newest += 1;
                    let name = self.rows.iter().find(|(name, _)| name.as_str().as_bytes() == &id[..]);
                    let at = name.map(|(_, placed)| placed.row.sequence);
                    if at != Sequence::from_bytes(value).ok() {
                        return Guarantee::Consistent.fails(format!(
                            "the newest row of {id:?} is at {at:?}, and not where its key says"
                        ));
                    }
                }
                StoredItem::Ddoc(db, id) => {
                    ddocs += 1;
                    let found = self.ddocs.get(&(db.clone(), id.clone()));
                    if found != Sequence::from_bytes(value).ok().as_ref() {
                        return Guarantee::Consistent.fails(format!(
                            "{id:?} of {db:?} is recorded elsewhere, and should be at {found:?}"
                        ));
                    }
                }
                _ => self.judge_key(&item, value).map_err(|broken| broken.about(show_key(key)))?,
            }
        }
        if (newest, placed) != (self.rows.len(), self.rows.len()) || ddocs != self.ddocs.len() {
            return Guarantee::Consistent.fails(format!(
                "{placed} rows, {newest} names and {ddocs} design documents are stored, of {}, {} and {}",
                self.rows.len(),
                self.rows.len(),
                self.ddocs.len()
            ));
        }
        Ok(())
    }

    /// Judges the counted number of rows of `shard`.
    fn judge_row_count(&self, shard: ShardId, value: &Bytes) -> Verdict {
        let rows = self.rows.values().filter(|placed| placed.shard == shard).count() as u64;
        if self.topology.iter().any(|entry| entry.has(shard)) && value[..] == rows.to_le_bytes() {
            return Ok(());
        }
        Err(format!("{value:?} rows are counted in shard {shard}, of {rows}").into())
    }

    /// Whether triggers and their jobs may leave `item`.
    fn is_of_jobs(&self, item: &StoredItem) -> bool {
        let instance = match item {
            StoredItem::App(AppKey::Derived(_, instance, _) | AppKey::DerivedTo(_, instance)) => instance,
            StoredItem::Mark(_, db) | StoredItem::Parked(_, db) => &db.instance,
            StoredItem::App(AppKey::Cleaned(..)) | StoredItem::Owed(..) => return self.jobs.is_some(),
            _ => return false,
        };
        self.documents.contains_key(instance)
    }

    /// Judges whether a key other than a row may exist.
    fn judge_key(&self, item: &StoredItem, value: &Bytes) -> Verdict {
        let leaked = |why: &str| Guarantee::Consistent.fails(format!("{item:?} was left behind: {why}"));
        match item {
            StoredItem::Config
            | StoredItem::MembershipVersion
            | StoredItem::RoleVersion
            | StoredItem::PoolVersion(None)
            | StoredItem::Age(_)
            | StoredItem::OtherBus
            | StoredItem::App(AppKey::History | AppKey::Once(_) | AppKey::Effect(..) | AppKey::Tally) => {
                Ok(())
            }
            StoredItem::App(AppKey::Database(name)) if self.databases.contains_key(name) => Ok(()),
            StoredItem::App(AppKey::Document(instance, _)) if self.documents.contains_key(instance) => Ok(()),
            item if self.is_of_jobs(item) => Ok(()),
            // Those of documents go with their database.
            StoredItem::PoolVersion(Some(pool)) if !self.is_pool_of_gone(pool) => Ok(()),
            StoredItem::Row(feed, ..) | StoredItem::Topology(feed, _) | StoredItem::RowCount(feed, _)
                if feed != FEED =>
            {
                self.judge_left_of_documents(feed)
            }
            StoredItem::Doorbell(partition) | StoredItem::FoldMark(partition)
                if *partition < self.partitions =>
            {
                Ok(())
            }
            StoredItem::RowCount(feed, shard) if feed == FEED => self.judge_row_count(*shard, value),
            StoredItem::Topology(_, first) if self.topology.iter().any(|entry| entry.first == *first) => {
                Ok(())
            }
            StoredItem::Horizon(feed) | StoredItem::Pulse(feed) if feed == FEED => Ok(()),
            StoredItem::Node(_) | StoredItem::Role(_) | StoredItem::Member(..) => {
                leaked("everybody has left")
            }
            StoredItem::Lease(pool, resource) => {
                let is_free = Lease::from_bytes(value).is_ok_and(|lease| lease.owner.is_none());
                let is_known = match &pool[..] {
                    "partition" => *resource < u64::from(self.partitions),
                    "janitor" => *resource == 0,
                    pool => self.groups.values().any(|group| group.id.pool() == *pool),
                };
                if is_free && is_known { Ok(()) } else { leaked("everybody has left") }
            }
            StoredItem::Group(name)
            | StoredItem::LowestCheckpoint(name)
            | StoredItem::DrainTurn(name)
            | StoredItem::DeadLetter(name, _)
            | StoredItem::Idle(name)
                if self.groups.contains_key(name) =>
            {
                Ok(())
            }
            StoredItem::GroupParked(name, id) if self.is_parked(name, id) => Ok(()),
            StoredItem::Checkpoint(name, shard)
            | StoredItem::Progress(name, shard)
            | StoredItem::Trouble(name, shard)
                if self.groups.get(name).is_some_and(|group| group.checkpoints.contains_key(shard)) =>
            {
                Ok(())
            }
            StoredItem::Cursor(name) => {
                let stands = CursorRow::from_bytes(value).ok().map(|row| row.cursor);
                let is_known = stands.is_some() && stands == self.cursors.get(name).copied();
                if is_known { Ok(()) } else { leaked("it was never written so") }
            }
            // Ids of crashed processes are there until they are swept.
            StoredItem::TransactionId if self.has_crashed => Ok(()),
            _ => leaked("nothing is known of it"),
        }
    }
}
