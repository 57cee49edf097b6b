//! [`Newest`]: the newest row of each name among the batches of a log, for subscribers that take a *round*: everything that waits for them,
//! each database once.
//!
//! Rounds are taken by subscribers with a pace, and by those for which more than a page waits in the ring. Subscribers with equal patterns
//! share one index, which exists only while one of them is slow, so a subscriber that keeps up has no cost here, and never waits. An entry
//! of the log is read once, however many subscribers are slow. While no waiting row has a newer one, a slow subscriber continues batch by
//! batch, by reference.
//!
//! A round is a reading, like a reading of the feed: its rows come in pages, in order. A row that gets a newer one before its page is taken
//! is left out, so the reader's knowledge stays where it was until the round is complete.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use super::{
    delivery::Matched,
    log::{Empty, Log},
};
use crate::base::{cursor::Cursor, encoding::Sequence, event::DbName, notification::Notification};

/// How many entries of the log are read under one lock.
const ENTRIES_MAX: usize = 1_024;

#[derive(Default)]
pub(super) struct Newest {
    /// The rows of the entries read so far, in order.
    rows: VecDeque<Slot>,
    /// The place of the first row. Rows are added at both ends, and places do not change.
    first: u64,
    /// The place of the newest row of each name. Callers choose the names, so the hashes are seeded.
    names: HashMap<DbName, u64, foldhash::fast::RandomState>,
    /// The entries with batch numbers from `begin` to before `end` have been read.
    begin: u64,
    end: u64,
    /// The cursor after the last entry read.
    to: Option<Cursor>,
    /// The last row that a newer one covers.
    pub superseded: Option<Sequence>,
}

struct Slot {
    at: Sequence,
    /// The number of the row's batch.
    number: u64,
    /// `None` once a newer row of the same name covers it.
    row: Option<Arc<Notification>>,
}

/// A part of a round.
pub(super) struct Page {
    pub rows: Vec<Arc<Notification>>,
    /// The place in the log of the next row of the round, or the end of the log.
    pub next: u64,
    /// The cursor at the end of the round; `None` if nothing waits.
    pub end: Option<Cursor>,
    /// Whether the round has further rows, which come before `end`.
    pub more: bool,
}

impl Newest {
    /// Returns the first rows after `after`, at most `rows_max`.
    pub fn page(&self, after: Sequence, rows_max: usize) -> Page {
        let begin = self.rows.partition_point(|slot| slot.at <= after);
        let mut slots = self.rows.range(begin..);
        let mut next = || slots.find_map(|slot| Some((slot.number, slot.row.as_ref()?)));
        let mut rows = Vec::new();
        while rows.len() < rows_max {
            let Some((_, row)) = next() else { break };
            rows.push(Arc::clone(row));
        }
        match next() {
            Some((number, _)) => Page { rows, next: number, end: self.to, more: true },
            None => Page { rows, next: self.end, end: self.to, more: false },
        }
    }

    /// Reads the entries of `log` from `batch_number` on that are not in the index yet, and drops rows that have left the ring, which
    /// begins at `begin`. The caller must read `begin` under the lock of this index, so that no later row has been dropped.
    pub fn read(
        &mut self,
        log: &Log<Matched>,
        batch_number: u64,
        begin: (u64, Sequence),
    ) -> Result<(), Empty> {
        if batch_number < begin.0 {
            return Err(Empty::Behind);
        }
        if self.to.is_none() || log.begin() > self.end {
            *self = Self { first: 1 << 63, begin: batch_number, end: batch_number, ..Self::default() };
        }
        let mut older = Vec::new();
        let mut from = batch_number;
        while from < self.begin {
            let entries = log.read_many(from, ENTRIES_MAX)?;
            from = entries.last().map_or(self.begin, |(number, _)| number + 1);
            older.extend(entries.into_iter().filter(|(number, _)| *number < self.begin));
        }
        for (number, matched) in older.iter().rev() {
            for place in (0..matched.len()).rev() {
                self.add_older(*number, matched.row(place));
            }
        }
        self.begin = self.begin.min(batch_number);
        loop {
            let entries = log.read_many(self.end, ENTRIES_MAX)?;
            for (number, matched) in &entries {
                for row in matched.rows() {
                    self.add(*number, row);
                }
                (self.end, self.to) = (number + 1, Some(matched.batch.cursor_after(matched.batch.since)));
            }
            if entries.len() < ENTRIES_MAX {
                break;
            }
        }
        self.drop_up_to(begin.1);
        Ok(())
    }

    /// Adds a row after all others.
    fn add(&mut self, number: u64, row: &Arc<Notification>) {
        let place = self.first + self.rows.len() as u64;
        if let Some(older) = self.names.insert(row.name.clone(), place) {
            let older = &mut self.rows[(older - self.first) as usize];
            if older.row.take_if(|older| covers(row, older)).is_some() {
                self.superseded = self.superseded.max(Some(older.at));
            }
        }
        self.rows.push_back(Slot { at: row.sequence, number, row: Some(Arc::clone(row)) });
    }

    /// Adds a row before all others, unless one of them covers it.
    fn add_older(&mut self, number: u64, row: &Arc<Notification>) {
        let newest = self.names.get(&row.name).and_then(|place| {
            let slot = &self.rows[(place - self.first) as usize];
            slot.row.as_ref()
        });
        if newest.is_some_and(|newest| covers(newest, row)) {
            self.superseded = self.superseded.max(Some(row.sequence));
            return;
        }
        let is_newest = newest.is_none();
        self.first -= 1;
        self.rows.push_front(Slot { at: row.sequence, number, row: Some(Arc::clone(row)) });
        if is_newest {
            self.names.insert(row.name.clone(), self.first);
        }
    }

    fn drop_up_to(&mut self, end: Sequence) {
        while let Some(Slot { row, .. }) = self.rows.pop_front_if(|slot| slot.at <= end) {
            if let Some(row) = row
                && self.names.get(&row.name) == Some(&self.first)
            {
                self.names.remove(&row.name);
            }
            self.first += 1;
        }
    }
}

/// Whether a reader that gets `newer` instead of `older`, a row of the same name, learns of every deletion. Once the janitor has dropped a
/// tombstone, later rows of the name do not show the deletion.
fn covers(newer: &Notification, older: &Notification) -> bool {
    let last_deletion =
        |row: &Notification| row.deleted_at.max(row.replaced.map(|replaced| replaced.deleted_at));
    last_deletion(newer) >= last_deletion(older)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        base::{
            encoding::{Incarnation, Versionstamp},
            notification::tests::row,
        },
        roles::dispatcher::delivery::{Batch, to_mark},
    };

    /// Regression: while a reader was about to take its next page, the tail pushed that page out of the ring, and the index that it shared
    /// with others dropped the rows. So the reader continued after them, and never got them.
    #[test]
    fn a_reader_whose_rows_have_left_the_ring_is_behind() {
        let at = |version| Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0);
        let log = Log::new(0);
        for number in 0..3 {
            let (before, to) = (at(100 + number), at(101 + number));
            let row = Notification { name: DbName::new(&format!("db{number}")).unwrap(), ..row(to) };
            let batch = Batch::new(vec![Arc::new(row)], before.into(), to, to);
            log.append(number, to_mark(before), 1, Matched::all(batch), &mut Vec::new());
        }
        let mut newest = Newest::default();
        newest.read(&log, 0, (0, at(100))).unwrap();
        // Another reader with the same pattern is further ahead.
        newest.read(&log, 2, (1, at(101))).unwrap();
        assert_eq!(newest.read(&log, 0, (1, at(101))), Err(Empty::Behind));
        assert_eq!(newest.page(at(101), 10).rows.len(), 2);
    }
}
