//! [`NotificationFeed::folded`]: waits until everything that was committed by some time has been folded.

use std::{collections::BTreeMap, time::Duration};

use super::NotificationFeed;
use crate::{
    base::{
        backoff::{Backoff, Failures},
        encoding::{Counters, Sequence},
        error::{Error, Result},
        event::Db,
    },
    state::{
        feed::Newest,
        keys::{DrainKey, Partition},
    },
    store::{Isolation, RangeRead, Transaction},
};

/// The pauses between polls for unfolded events.
const POLLS: Backoff = Backoff { min: Duration::from_millis(2), max: Duration::from_millis(50) };

/// How many rows one transaction reads, or databases it looks up.
const READS_MAX: usize = 200;

impl NotificationFeed {
    /// Completes once everything that was committed at `version` or before is folded. Returns the position of the
    /// last row at that time.
    pub(crate) async fn folded(&self, version: u64) -> Result<Sequence> {
        let mut waiting = self.unfolded(version).await?;
        let mut polls = Failures::default();
        while !waiting.is_empty() {
            let env = self.context.env();
            env.sleep(polls.again(&POLLS, Duration::ZERO, env)).await;
            let all: Vec<_> = waiting.into_iter().collect();
            waiting = BTreeMap::new();
            for some in all.chunks(READS_MAX) {
                waiting.extend(self.context.db.run(async |tx| self.still_unfolded(&tx, some).await).await?);
            }
        }
        // The last row may have been a tombstone that is dropped by now: then the horizon is behind it.
        let last = self.last_sequence().await?.unwrap_or(Sequence::MIN);
        Ok(last.max(self.horizon().await?))
    }

    /// The databases with events that are not folded at `version` or later, and the totals that their rows will have
    /// afterwards.
    async fn unfolded(&self, version: u64) -> Result<BTreeMap<Db, Counters>> {
        let (keys, last) = (&self.context.keys, Partition(self.context.config.partitions - 1));
        let mut rest = Some(RangeRead::new(keys.drains(Partition(0), last)).limit(READS_MAX));
        let mut waiting: BTreeMap<Db, Counters> = BTreeMap::new();
        while let Some(read) = rest {
            let page = async |tx: Transaction| {
                let readable = tx.read_version().await?;
                if readable < version {
                    let reason = format!("{version} is ahead of the store, which is at {readable}");
                    return Err(Error::invalid("version", reason));
                }
                let page = tx.get_range(&read, Isolation::Snapshot).await?;
                let rest = read.clone().after(&page);
                let mut found: BTreeMap<Db, Counters> = BTreeMap::new();
                for row in page.rows {
                    // The notifier reports rows that cannot be decoded, and never folds them.
                    if let Ok((_, row)) = keys.drain_row(row)
                        && let DrainKey::Counters(tally) = row.says
                    {
                        *found.entry(row.db).or_default() += tally.counters;
                    }
                }
                let folded = self.totals_of(&tx, found.keys()).await?;
                Ok((found, folded, rest))
            };
            let (found, folded);
            (found, folded, rest) = self.context.db.run(page).await?;
            for ((db, counters), folded) in found.into_iter().zip(folded) {
                let Some(folded) = folded else { continue };
                // The slots of a database can be on two pages: events folded before the first page are counted once.
                *waiting.entry(db).or_insert(folded) += counters;
            }
        }
        Ok(waiting)
    }

    /// Those of `waiting` that are not folded yet.
    async fn still_unfolded(
        &self,
        tx: &Transaction,
        waiting: &[(Db, Counters)],
    ) -> Result<Vec<(Db, Counters)>> {
        let mut left = Vec::new();
        let folded = self.totals_of(tx, waiting.iter().map(|(db, _)| db)).await?;
        for ((db, totals), folded) in waiting.iter().zip(folded) {
            let lanes = folded.map(|folded| folded.lanes().into_iter().zip(totals.lanes()));
            if lanes.is_none_or(|mut lanes| lanes.all(|(folded, expected)| folded >= expected)) {
                continue;
            }
            // No row counts events of an instance that is gone; they are folded once none of them waits.
            let partition = Partition::of(db.name.as_str(), self.context.config.partitions);
            let drains = self.context.keys.drains_of_db(partition, db);
            let rows = tx.all_rows(drains, Isolation::Snapshot).await?;
            if rows.into_iter().any(|row| self.context.keys.drain_row(row).is_ok()) {
                left.push((db.clone(), *totals));
            }
        }
        Ok(left)
    }

    /// The totals of each of `dbs` in the row of its name, zero if that row is of another instance; `None` if it cannot be read: then
    /// notifiers report it, and never fold the name.
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
