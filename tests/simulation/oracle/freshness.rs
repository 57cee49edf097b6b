//! Barriers and mirrors: a reader that waited for all commits must know all of them.

use std::{collections::BTreeMap, sync::Arc};

use notibus::event::{Counters, Db, Kinds, Notification, Sequence};

use super::{Oracle, commit::Verdict, given::Start, interest::Interest, models::subscriber::SubscriberId};
use crate::{findings::Findings, guarantee::Guarantee};

impl Oracle {
    /// Returns all events recorded so far, for [`Oracle::passed_barrier`].
    pub fn recorded_so_far(&self) -> BTreeMap<Db, Counters> {
        self.recorded.clone()
    }

    /// Judges a barrier that returned `at` to a waiter that arrived after the events in `recorded`. All of these events must be folded.
    pub fn passed_barrier(&self, findings: &Findings, recorded: &BTreeMap<Db, Counters>, at: Sequence) {
        for (db, before) in
            recorded.iter().filter(|(db, _)| self.databases.get(&db.name) == Some(&db.instance))
        {
            let row = self.rows.get(&db.name).filter(|placed| placed.row.instance == db.instance);
            let folded = row.map_or(Counters::ZERO, |placed| placed.row.totals);
            if before.lanes().iter().zip(folded.lanes()).any(|(before, folded)| folded < *before) {
                let reason =
                    format!("a barrier was passed at {at}, and {before:?} of {db:?} have still to be folded");
                return findings.fail(Guarantee::Complete.broken(reason));
            }
        }
    }

    /// Judges a barrier that let a subscriber pass at `at` directly after `Expired`: nothing up to `at` may still be due to the subscriber.
    pub fn passed_after_expiry(&self, findings: &Findings, id: SubscriberId, at: Sequence) {
        if let Some(owed) = self.is_owed(id, at) {
            let reason = format!("a barrier was passed at {at} after `Expired`, and {owed}");
            findings.fail(Guarantee::Bookmarkable.broken(reason));
        }
    }

    /// Judges the `rows` that a mirror with this `interest` shows. The mirror must show everything up to `at`, and only what existed.
    pub fn judge_mirror<'a>(
        &self,
        interest: &Interest,
        rows: impl Iterator<Item = &'a Arc<Notification>>,
        at: Sequence,
    ) -> Verdict {
        let shown: BTreeMap<_, _> = rows.map(|row| (&row.name, row)).collect();
        for row in shown.values() {
            if self.past.get(&row.sequence) != Some(*row) || row.is_deleted() {
                return Guarantee::Truthful.fails(format!("it shows {row:?}, which never lived"));
            }
            let is_gone = !self.rows.contains_key(&row.name);
            if is_gone && self.ledger.deletions_after(&row.name, Start::At(at)).is_empty() {
                return Guarantee::Complete.fails(format!("it shows {row:?}, and was to know up to {at}"));
            }
        }
        let wanted = self.rows.values().map(|placed| &placed.row);
        for row in wanted.filter(|row| interest.kinds_of(&row.name) != Kinds::NONE && row.sequence <= at) {
            let expected = (!row.is_deleted()).then_some(row);
            if shown.get(&row.name).copied() != expected {
                let instead = shown.get(&row.name);
                return Guarantee::Complete
                    .fails(format!("up to {at} it shows {instead:?} instead of {row:?}"));
            }
        }
        Ok(())
    }
}
