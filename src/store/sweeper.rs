//! [`TransactionIdSweeper`]: clears the transaction ids that crashed processes have left behind.
//!
//! The store does not show whether a process lives, and wall clocks are not compared. So the sweeper remembers when
//! it has first seen the greatest counter of each process. Once that is `max_age` ago by its own clock, it clears the
//! ids up to that counter: every run with such a counter had begun by then, and is too old to trust a missing id
//! ([`Database::UNKNOWN_RESULT_AGE_MAX`]). It reads two keys per process, however many ids there are.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use bytes::Bytes;

use super::{
    Database, Isolation, KeyRange, Priority, RangeRead, Transaction, TransactionOption,
    transaction_ids::Process,
};
use crate::base::error::{Error, Result};

const PROCESSES_PER_TRANSACTION: usize = 100;

/// How many times of observation are remembered per process within `max_age`.
const MARKS_PER_AGE: u32 = 8;

/// Clears the ids that runs of [`Database::run_once`] in crashed processes have left in the store. One janitor of a store
/// calls [`TransactionIdSweeper::sweep`] from time to time; several do not harm.
///
/// The sweeper's knowledge is in memory: a new one begins to wait again. Its memory is bounded by the number of
/// processes with ids in the store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> notibus::Result<()> {
/// use notibus::store::{Database, TransactionIdSweeper};
/// use std::time::Duration;
///
/// let db = Database::memory();
/// db.run_once(async |tx| Ok(tx.set(b"k", b"v"))).await?;
///
/// let age = Duration::from_mins(15);
/// let mut sweeper = TransactionIdSweeper::new(&db, age)?;
/// assert_eq!(sweeper.sweep().await?.cleared, 0);
/// tokio::time::sleep(age).await;
/// assert_eq!(sweeper.sweep().await?.cleared, 1);
/// assert_eq!(sweeper.sweep().await?.processes, 0);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct TransactionIdSweeper {
    db: Database,
    /// How long ago an id must have been seen to be cleared.
    max_age: Duration,
    /// The counters seen of each process.
    marks: BTreeMap<Process, Marks>,
}

/// The result of a sweep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// How many processes had ids in the store.
    pub processes: usize,
    /// How many of them had ids that were old enough, and were cleared.
    pub cleared: usize,
}

/// The counters of a process and the times when they were seen, both growing.
#[derive(Debug, Default)]
struct Marks(VecDeque<(u64, Duration)>);

/// The counters of a process that one transaction has seen.
#[derive(Debug)]
struct SeenCounters {
    process: Process,
    /// The least counter in the store.
    least: u64,
    greatest: u64,
    /// The counter up to which the transaction has cleared ids.
    cleared: Option<u64>,
}

impl Marks {
    /// The greatest counter that was seen `max_age` ago.
    fn old_enough(&self, now: Duration, max_age: Duration) -> Option<u64> {
        let is_old_enough = |&&(_, at): &&(u64, Duration)| now.saturating_sub(at) >= max_age;
        self.0.iter().rev().find(is_old_enough).map(|&(counter, _)| counter)
    }

    /// Records `seen` at `now`, and forgets counters that are no longer in the store.
    fn update(&mut self, seen: &SeenCounters, now: Duration, max_age: Duration) {
        let gone = seen.cleared;
        self.0.retain(|&(counter, _)| counter >= seen.least && gone.is_none_or(|gone| counter > gone));
        if gone.is_some_and(|gone| seen.greatest <= gone) {
            return;
        }
        let is_news = self.0.back().is_none_or(|&(counter, at)| {
            seen.greatest > counter && now >= at.saturating_add(max_age / MARKS_PER_AGE)
        });
        if is_news {
            self.0.push_back((seen.greatest, now));
        }
    }
}

impl TransactionIdSweeper {
    /// A sweeper of the ids under the prefix of `db`, of all processes. It clears ids that it has first seen at least
    /// `max_age` ago. An id is cleared at most `max_age` and one interval of its calls after a sweep has seen it; if
    /// sweeps are less than an eighth of `max_age` apart, it may take that eighth longer.
    ///
    /// Fails with [`Error::Invalid`] unless `max_age` is longer than [`Database::UNKNOWN_RESULT_AGE_MAX`], the time for which
    /// runs trust their ids. Twice that leaves room for clocks of different speed.
    pub fn new(db: &Database, max_age: Duration) -> Result<Self> {
        if max_age <= Database::UNKNOWN_RESULT_AGE_MAX {
            let trusted = Database::UNKNOWN_RESULT_AGE_MAX;
            let reason = format!("{max_age:?} is too short: runs look for their ids for {trusted:?}");
            return Err(Error::invalid("max_age", reason));
        }
        Ok(Self { db: db.clone(), max_age, marks: BTreeMap::new() })
    }

    /// Reads all ids, and clears old ones. It works at batch priority, and conflicts only with runs that are older
    /// than `max_age`, whose attempts in progress may be repeated.
    ///
    /// # Errors
    ///
    /// As [`Database::run`], and [`Error::Corrupt`] if another key is under the prefix. Progress up to the error
    /// counts.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, some ids may be cleared; the next sweep does the rest.
    pub async fn sweep(&mut self) -> Result<Swept> {
        let mut swept = Swept::default();
        let mut present = BTreeSet::new();
        let mut rest = Some(self.db.ids().range());
        while let Some(range) = rest {
            let now = self.db.env().now();
            let (page, next) = self.db.run(async |tx| self.sweep_page(&tx, &range, now).await).await?;
            // The later of the two times makes ids younger than they are, never older.
            let now = self.db.env().now();
            for seen in page {
                swept.processes += 1;
                swept.cleared += usize::from(seen.cleared.is_some());
                self.marks.entry(seen.process).or_default().update(&seen, now, self.max_age);
                present.insert(seen.process);
            }
            rest = next.map(|begin| KeyRange { begin, end: range.end });
        }
        self.marks.retain(|process, marks| present.contains(process) && !marks.0.is_empty());
        Ok(swept)
    }

    /// Sweeps the first processes of `range`, clearing ids that are old enough at `now`. Returns what it saw, and
    /// where to go on if there may be more.
    async fn sweep_page(
        &self,
        tx: &Transaction,
        range: &KeyRange,
        now: Duration,
    ) -> Result<(Vec<SeenCounters>, Option<Bytes>)> {
        tx.set_option(TransactionOption::Priority(Priority::Batch));
        let ids = self.db.ids();
        let mut rest = range.clone();
        let mut page = Vec::new();
        while page.len() < PROCESSES_PER_TRANSACTION {
            let Some((process, least)) = self.first(tx, RangeRead::new(rest.clone())).await? else {
                return Ok((page, None));
            };
            let of_process = ids.process_range(process);
            let newest = self.first(tx, RangeRead::new(of_process.clone()).reverse()).await?;
            let (_, greatest) = newest.expect("a transaction reads at one version");
            let old_enough = self.marks.get(&process).and_then(|marks| marks.old_enough(now, self.max_age));
            let cleared = old_enough.filter(|&old_enough| old_enough >= least);
            if let Some(counter) = cleared {
                tx.clear_range(&ids.range_to(process, counter));
            }
            page.push(SeenCounters { process, least, greatest, cleared });
            rest.begin = of_process.end;
            if rest.is_empty() {
                return Ok((page, None));
            }
        }
        Ok((page, Some(rest.begin)))
    }

    async fn first(&self, tx: &Transaction, read: RangeRead) -> Result<Option<(Process, u64)>> {
        let page = tx.get_range(&read.limit(1), Isolation::Snapshot).await?;
        page.rows.first().map(|(key, _)| self.db.ids().decode(key)).transpose()
    }
}
