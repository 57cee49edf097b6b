//! [`NotificationFeed`]: the notifications in the order of their sequences; and how to wait until events are folded.

mod tail;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::future::try_join_all;

pub use self::tail::NotificationTail;
pub(crate) use self::tail::TailProgress;
#[cfg(feature = "http")]
use crate::store::Row;
use crate::{
    base::{
        backoff::{Backoff, Failures},
        cursor::Cursor,
        encoding::{Counters, Sequence},
        error::{Error, Result},
        event::{Db, DbName, DdocId},
        notification::Notification,
    },
    state::{
        context::Context,
        feed::{Feed, FeedPage, FeedRow, Newest},
        keys::{DrainKey, Partition},
        skipped::SkippedAt,
    },
    store::{Isolation, KeyRange, RangeRead, Transaction},
};

/// The maximum number of names that one transaction looks up.
const LOOK_UPS_MAX: usize = 100;

/// The maximum number of names that one transaction lists.
#[cfg(feature = "http")]
const NAMES_PER_READ: usize = 256;

/// The feed of notifications: one row per database, ordered by sequence over all shards. Clones are cheap.
pub type NotificationFeed = Feed<Notification>;

/// Some notifications, in order. Derive their news ([`Notification::news_since`]) from the position where the first page began, until there
/// is nothing more to read.
pub type NotificationPage = FeedPage<Notification>;

/// The changed design documents of a database.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangedDdocs {
    /// The documents whose ids producers have recorded, in order, each with the sequence of its last notification.
    pub ids: Vec<(DdocId, Sequence)>,
    /// The sequence of the last notification about a change without an id, which may concern any document.
    pub nameless: Option<Sequence>,
}

impl FeedRow for Notification {
    fn from_stored(sequence: Sequence, bytes: &[u8]) -> Result<Self> {
        Self::from_bytes(sequence, bytes)
    }

    fn sequence(&self) -> Sequence {
        self.sequence
    }

    fn id(&self) -> &[u8] {
        self.name.as_str().as_bytes()
    }
}

impl NotificationFeed {
    /// Returns a reader that follows the feed as it grows, from `after` on.
    pub fn tail(&self, after: impl Into<Cursor>) -> NotificationTail {
        NotificationTail::new(self.clone(), after.into())
    }

    /// Returns the newest row of the database `name`, if it has one.
    pub async fn newest(&self, name: &DbName) -> Result<Option<Notification>> {
        self.context.store.run(async |tx| self.newest_in(&tx, name).await).await
    }

    /// Does the same as [`NotificationFeed::newest`], within the caller's transaction.
    pub async fn newest_in(&self, tx: &Transaction, name: &DbName) -> Result<Option<Notification>> {
        let row = self.raw().newest_of(tx, name.as_str().as_bytes()).await?;
        row.map(|row| Notification::from_bytes(row.sequence, &row.value)).transpose()
    }

    /// Returns the names of some databases that are not deleted, in order, beginning after `after`; an empty list if there are no more.
    #[cfg(feature = "http")]
    pub(crate) async fn living_names(&self, after: Option<&DbName>) -> Result<Vec<DbName>> {
        let mut after = after.map(|name| name.as_str().as_bytes().to_vec());
        loop {
            let (living, last) =
                self.context.store.run(async |tx| self.names_in(&tx, after.as_deref()).await).await?;
            if !living.is_empty() || last.is_none() {
                return Ok(living);
            }
            after = last;
        }
    }

    /// Returns the names of databases that are not deleted among the next ids after `after`, and the last of those ids. Leaves out rows
    /// that cannot be decoded.
    #[cfg(feature = "http")]
    async fn names_in(
        &self,
        tx: &Transaction,
        after: Option<&[u8]>,
    ) -> Result<(Vec<DbName>, Option<Vec<u8>>)> {
        let (feed, keys) = (self.raw(), &self.context.keys);
        let range = keys.newest_after(feed.id, after);
        let read = RangeRead::new(range).limit(NAMES_PER_READ);
        let (page, topology) = tokio::join!(tx.get_range(&read, Isolation::Snapshot), feed.topology(tx));
        let (page, topology) = (page?, topology?);
        let row = async |(key, newest): &Row| {
            let (_, id) = keys.newest_id(key)?;
            let sequence = Sequence::from_bytes(newest).unwrap_or(Sequence::MIN);
            let stored = feed.newest_at(tx, &topology, &id, sequence).await;
            match stored.and_then(|row| Notification::from_bytes(row.sequence, &row.value)) {
                Err(error @ Error::Corrupt { .. }) => {
                    self.context.skip(&SkippedAt::Row(feed.id.clone(), sequence), &error);
                    Ok(None)
                }
                decoded => decoded.map(Some),
            }
        };
        let rows: Vec<Option<Notification>> = try_join_all(page.rows.iter().map(row)).await?;
        let last = page.rows.last().map(|(key, _)| keys.newest_id(key)).transpose()?.map(|(_, id)| id);
        let living = rows.into_iter().flatten().filter(|row| !row.is_deleted()).map(|row| row.name);
        Ok((living.collect(), last))
    }

    /// Returns the newest rows of the databases `names` after `cursor`, in the order of their sequences, and a position up to which all of
    /// them were read. Leaves out rows that cannot be decoded. Fails as [`Feed::page`] does.
    pub(crate) async fn newest_after(
        &self,
        names: &[DbName],
        cursor: Cursor,
    ) -> Result<(Vec<Arc<Notification>>, Sequence)> {
        let read = async |names: &[DbName]| {
            let read = async |tx| {
                let ids: Vec<_> = names.iter().map(|name| name.as_str().as_bytes()).collect();
                let (rows, last) = self.raw().newest_after(&tx, &ids, cursor).await?;
                let decoded = rows.iter().filter_map(|row| self.decode(row)).map(Arc::new);
                Ok((decoded.collect::<Vec<_>>(), last))
            };
            self.context.store.run(read).await
        };
        let parts = try_join_all(names.chunks(LOOK_UPS_MAX).map(read)).await?;
        let to = parts.iter().map(|(_, last)| *last).min().unwrap_or_else(|| cursor.position());
        let mut rows: Vec<_> = parts.into_iter().flat_map(|(rows, _)| rows).collect();
        rows.sort_unstable_by_key(|row| row.sequence);
        Ok((rows, to))
    }

    /// Returns the design documents of `db` that were written or deleted after `since`, as far as notifiers have recorded them; none for a
    /// deleted database. Leaves out rows that cannot be decoded.
    pub async fn ddocs(&self, db: &Db, since: impl Into<Cursor>) -> Result<ChangedDdocs> {
        let since = since.into();
        let Context { store, keys, .. } = &*self.context;
        store
            .run(async |tx| {
                let mut pages = tx.pages(RangeRead::new(keys.ddocs(db)), Isolation::Snapshot);
                let mut found = ChangedDdocs::default();
                while let Some(rows) = pages.next().await? {
                    for row in &rows {
                        match keys.ddoc_row(row) {
                            Err(error) => self.context.skip(&SkippedAt::Key(row.0.clone()), &error),
                            Ok((_, at)) if !since.is_news(at) => {}
                            Ok((Some(id), at)) => found.ids.push((id, at)),
                            Ok((None, at)) => found.nameless = Some(at),
                        }
                    }
                }
                Ok(found)
            })
            .await
    }
}

/// The pauses between polls for unfolded events.
const POLLS: Backoff = Backoff { min: Duration::from_millis(2), max: Duration::from_millis(50) };

/// The maximum number of rows that one transaction reads, or of databases that it looks up.
const READS_MAX: usize = 200;

/// The events of an instance that wait to be folded.
#[derive(Debug, Clone)]
struct Unfolded {
    /// The totals that the row of the database will have once the events are folded.
    totals: Counters,
    /// The changed design documents. A fold may leave some of them to later folds, although it has counted the events.
    ddocs: BTreeMap<DdocId, Folds>,
}

/// The folds of a design document that a wait has seen.
#[derive(Debug, Clone, Copy, Default)]
struct Folds {
    last: Option<Sequence>,
    count: u32,
}

impl Folds {
    /// The first fold may have been made before the wait, and the second may have read before it. The third has read after the second.
    const ENOUGH: u32 = 3;
}

impl NotificationFeed {
    /// Waits until everything that was committed at or before `version` is folded. Returns the position of the last row at that time.
    pub(crate) async fn folded(&self, version: u64) -> Result<Sequence> {
        let mut waiting = self.unfolded(version).await?;
        let mut polls = Failures::default();
        while !waiting.is_empty() {
            let env = self.context.env();
            env.sleep(polls.again(&POLLS, Duration::ZERO, env)).await;
            let all: Vec<_> = waiting.into_iter().collect();
            waiting = BTreeMap::new();
            for some in all.chunks(READS_MAX) {
                waiting
                    .extend(self.context.store.run(async |tx| self.still_unfolded(&tx, some).await).await?);
            }
        }
        // The last row may have been a tombstone that has been dropped since. In that case the horizon is after it.
        let last = self.last_sequence().await?.unwrap_or(Sequence::MIN);
        Ok(last.max(self.horizon().await?))
    }

    /// Returns the databases that have unfolded events at a read version of `version` or later.
    async fn unfolded(&self, version: u64) -> Result<BTreeMap<Db, Unfolded>> {
        let (keys, last) = (&self.context.keys, Partition(self.context.config.partitions - 1));
        let mut rest = Some(RangeRead::new(keys.drains(Partition(0), last)).limit(READS_MAX));
        let mut waiting: BTreeMap<Db, Unfolded> = BTreeMap::new();
        while let Some(read) = rest {
            let page = async |tx: Transaction| {
                let readable = tx.read_version().await?;
                if readable < version {
                    let reason = format!("{version} is ahead of the store, which is at {readable}");
                    return Err(Error::invalid("version", reason));
                }
                let page = tx.get_range(&read, Isolation::Snapshot).await?;
                let (mut rest, mut rows) = (read.clone().after(&page), page.rows);
                let last = rows.last().and_then(|row| keys.drain_row(row.clone()).ok());
                if let (Some(next), Some((partition, last))) = (&mut rest, last) {
                    // A fold between two transactions takes events from all slots of a database, so these are read by one.
                    let end = keys.drains_of_db(partition, &last.db).end;
                    let begin = std::mem::replace(&mut next.range.begin, end.clone());
                    rows.extend(tx.all_rows(KeyRange { begin, end }, Isolation::Snapshot).await?);
                }
                let mut found: BTreeMap<Db, (Counters, Vec<DdocId>)> = BTreeMap::new();
                for row in rows {
                    // The notifier reports rows that cannot be decoded, and never folds them.
                    let Ok((_, row)) = keys.drain_row(row) else { continue };
                    match row.says {
                        DrainKey::Counters(tally) => found.entry(row.db).or_default().0 += tally.counters,
                        DrainKey::Ddoc(id) => found.entry(row.db).or_default().1.push(id),
                        DrainKey::LastUpdate(_) => {}
                    }
                }
                let folded = self.totals_of(&tx, found.keys()).await?;
                Ok((found, folded, rest))
            };
            let (found, folded);
            (found, folded, rest) = self.context.store.run(page).await?;
            for ((db, (counters, ddocs)), folded) in found.into_iter().zip(folded) {
                let Some(totals) = folded else { continue };
                let of_db = waiting.entry(db).or_insert(Unfolded { totals, ddocs: BTreeMap::new() });
                of_db.totals += counters;
                of_db.ddocs.extend(ddocs.into_iter().map(|id| (id, Folds::default())));
            }
        }
        Ok(waiting)
    }

    /// Returns those of `waiting` whose events are not folded yet.
    async fn still_unfolded(
        &self,
        tx: &Transaction,
        waiting: &[(Db, Unfolded)],
    ) -> Result<Vec<(Db, Unfolded)>> {
        let keys = &self.context.keys;
        let mut left = Vec::new();
        let folded = self.totals_of(tx, waiting.iter().map(|(db, _)| db)).await?;
        for ((db, unfolded), folded) in waiting.iter().zip(folded) {
            let Some(folded) = folded else { continue };
            let mut lanes = folded.lanes().into_iter().zip(unfolded.totals.lanes());
            let is_counted = lanes.all(|(folded, expected)| folded >= expected);
            if is_counted && unfolded.ddocs.is_empty() {
                continue;
            }
            let drains =
                keys.drains_of_db(Partition::of(db.name.as_str(), self.context.config.partitions), db);
            let rows = tx.all_rows(drains, Isolation::Snapshot).await?;
            let rows: Vec<_> = rows.into_iter().filter_map(|row| keys.drain_row(row).ok()).collect();
            if !is_counted {
                // No row counts the events of an instance that is gone. They are folded once no rows of the instance wait to be folded.
                left.extend((!rows.is_empty()).then(|| (db.clone(), unfolded.clone())));
                continue;
            }
            let known = tx.all_rows(keys.ddocs(db), Isolation::Snapshot).await?;
            let known: BTreeMap<_, _> = known.iter().filter_map(|row| keys.ddoc_row(row).ok()).collect();
            let pending = rows.into_iter().filter_map(|(_, row)| match row.says {
                DrainKey::Ddoc(id) => unfolded.ddocs.get(&id).map(|&folds| (id, folds)),
                _ => None,
            });
            let mut ddocs: BTreeMap<_, _> = pending.collect();
            for (id, folds) in &mut ddocs {
                let last = known.get(&Some(id.clone())).copied();
                folds.count += u32::from(last != folds.last);
                folds.last = last;
            }
            ddocs.retain(|_, folds| folds.count < Folds::ENOUGH);
            if !ddocs.is_empty() {
                left.push((db.clone(), Unfolded { ddocs, ..*unfolded }));
            }
        }
        Ok(left)
    }

    /// Returns the totals of each of `dbs` from the row of its name: zero if there is no row or if it belongs to another instance, `None`
    /// if it cannot be read. Notifiers report an unreadable row, and never fold the name.
    async fn totals_of(
        &self,
        tx: &Transaction,
        dbs: impl Iterator<Item = &Db> + Clone,
    ) -> Result<Vec<Option<Counters>>> {
        let ids: Vec<_> = dbs.clone().map(|db| db.name.as_str().as_bytes()).collect();
        let newest = self.raw().newest_of_each(tx, &ids).await?;
        let totals = dbs.zip(newest).map(|(db, newest)| match newest {
            Newest::Gone => Some(Counters::ZERO),
            Newest::Damaged => None,
            Newest::Row(row) => {
                let row = self.decode(&row)?;
                Some(if row.instance == db.instance { row.totals } else { Counters::ZERO })
            }
        });
        Ok(totals.collect())
    }
}
