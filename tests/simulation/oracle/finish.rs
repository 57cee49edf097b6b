//! The end of a world: everything is at rest, and the rows agree with the history.

use std::sync::Arc;

use notibus::event::{Db, DdocId, Notification, Sequence};

use super::{Oracle, commit::Verdict};
use crate::{findings::Findings, guarantee::Guarantee};

impl Oracle {
    /// Returns the guarantee that is broken if the world does not come to rest.
    pub fn unrest_breaks(&self, findings: &Findings) -> Guarantee {
        let is_owed = self.subscribers_are_owed().is_some();
        let is_dropped = |text: String| text.contains("whose tombstone was dropped");
        if self.subscribers_are_owed().is_some_and(is_dropped) {
            Guarantee::ExpiredNotSilent
        } else if self.unfolded().is_some() {
            Guarantee::FoldedOnce
        } else if is_owed {
            Guarantee::Complete
        } else if self.consumers_owe(findings).is_some() {
            Guarantee::Worked
        } else {
            Guarantee::Live
        }
    }

    /// Describes something that must still happen before everything is at rest.
    pub fn unrest(&self, findings: &Findings) -> Option<String> {
        if let Some(unfolded) = self.unfolded() {
            return Some(unfolded);
        }
        if let Some((db, id)) = self.unreported_ddoc() {
            return Some(format!("it has still to be informed that {id:?} of {db:?} has changed"));
        }
        self.subscribers_are_owed()
            .or_else(|| self.followers_owe())
            .or_else(|| self.doc_tails_owe())
            .or_else(|| self.consumers_owe(findings))
            .or_else(|| self.janitor_owes())
            .or_else(|| self.web_clients_owe())
    }

    /// Finds a recorded change to a design document that no row has reported since. Databases whose name was taken by another one do not
    /// count, because nobody reads their rows.
    fn unreported_ddoc(&self) -> Option<&(Db, Option<DdocId>)> {
        let is_reported = |(ddoc, recorded): &(&(Db, Option<DdocId>), &Sequence)| {
            let found = self.reported_ddocs.get(*ddoc);
            found.is_some_and(|found| found > *recorded)
        };
        let newest = |db: &Db| {
            self.rows.get(&db.name).is_some_and(|placed| placed.row.db() == *db && !placed.row.is_deleted())
        };
        let own = self.recorded_ddocs.iter().filter(|((db, _), _)| newest(db));
        own.into_iter().find(|entry| !is_reported(entry)).map(|(ddoc, _)| ddoc)
    }

    /// Judges whether the rows agree with the history.
    pub fn judge_history(&self) -> Verdict {
        if let Some(unfolded) = self.unfolded() {
            return Guarantee::FoldedOnce.fails(unfolded);
        }
        match self.once.iter().find(|(_, times)| **times != 1) {
            Some((number, times)) => {
                Guarantee::ExactlyOnce.fails(format!("number {number} was committed {times} times"))
            }
            None => Ok(()),
        }
    }

    /// Returns the rows of all databases, in the order of the feed.
    pub fn rows_in_order(&self) -> Vec<Arc<Notification>> {
        let mut rows: Vec<_> = self.rows.values().map(|placed| Arc::clone(&placed.row)).collect();
        rows.sort_unstable_by_key(|row| row.sequence);
        rows
    }

    /// Judges whether the whole feed, read in pages, has each database once, in order.
    pub fn judge_pages(&self, rows: &[Arc<Notification>]) -> Verdict {
        let expected = self.rows_in_order();
        // A tombstone may be dropped after it was read.
        let is_there = |row: &&Arc<Notification>| !row.is_deleted() || self.rows.contains_key(&row.name);
        let rows: Vec<_> = rows.iter().filter(is_there).cloned().collect();
        if rows != expected {
            return Guarantee::Unique.fails(format!("the feed is read as {rows:?} instead of {expected:?}"));
        }
        Ok(())
    }
}
