//! The oracle on named cursors, and on their durable subscribers.
//!
//! A durable subscriber survives a crash of its process: earlier deliveries count, and everything after its cursor is
//! owed to it. Nothing before the cursor may be owed.

use notibus::test_util::rooms;

use super::{
    Oracle,
    commit::{Change, StoredChanges, Verdict},
    given::Start,
    interest::Interest,
    models::subscriber::{Manner, SubscriberId},
    stored_item::StoredItem,
};
use crate::{
    findings::Findings,
    guarantee::Guarantee,
    kernel::{Issuer, ProcessId},
    witness::Witness,
};

impl Oracle {
    /// The durable subscribers of `process`: their cursors, and what they want.
    pub fn durables_of(&self, process: ProcessId) -> Vec<(String, Interest)> {
        let own = self.subscribers.values().filter(|subscriber| subscriber.issuer.process == process);
        own.filter_map(|subscriber| Some((subscriber.cursor.clone()?, subscriber.interest.clone()))).collect()
    }

    /// The durable subscriber with this cursor.
    pub fn durable(&self, cursor: &str) -> Option<SubscriberId> {
        let known = self.subscribers.iter().find(|(_, known)| known.cursor.as_deref() == Some(cursor));
        known.map(|(&id, _)| id)
    }

    /// A durable subscriber begins or resumes at its cursor. Everything after the cursor is owed to it; deliveries
    /// before a restart count.
    pub fn subscribed_durably(
        &mut self,
        findings: &Findings,
        issuer: Issuer,
        (cursor, interest, manner): (String, Interest, Manner),
    ) -> SubscriberId {
        let known = self.durable(&cursor);
        let id = known.unwrap_or(self.next_reader + 1);
        let is_known = known.is_some();
        let stored = self.cursors.get(&cursor).copied();
        let start = stored.map_or(Start::Nothing, Start::from);
        if stored.is_none() {
            findings.fail(Guarantee::Bookmarkable.broken(format!("{cursor} is used, and was never saved")));
        }
        if stored == Some(rooms::SavedCursor::EXPIRED) {
            findings.witness(Witness::ExpiredCursorOpened);
        }
        if is_known {
            if self.rows.values().any(|placed| start.is_before(placed.row.sequence)) {
                findings.witness(Witness::DurableWentOn);
            }
            self.go_on(findings, (issuer, id), manner, start);
            return id;
        }
        let id = self.add_subscriber(issuer, interest, manner, start);
        self.subscribers.get_mut(&id).expect("it was just added").cursor = Some(cursor);
        id
    }

    /// Judges the changes of a commit to named cursors.
    pub(super) fn judge_cursors(&mut self, items: &StoredChanges<'_>) -> Verdict {
        for (item, change) in items {
            if let StoredItem::Cursor(cursor) = item {
                self.judge_cursor(cursor, change)?;
            }
        }
        Ok(())
    }

    /// Judges a write of `cursor`.
    fn judge_cursor(&mut self, cursor: &str, change: &Change) -> Verdict {
        let row = |value: &Option<bytes::Bytes>| {
            let row = value.as_ref().map(|value| rooms::cursor(value)).transpose();
            row.map_err(|error| error.to_string())
        };
        let (before, after) = (row(&change.before)?, row(&change.after)?);
        let after = after.ok_or_else(|| format!("{cursor} was removed"))?;
        self.cursors.insert(cursor.to_owned(), after.cursor);
        let Some(before) = before else { return Ok(()) };
        if before.token != after.token {
            // With another filter, or a predicate, a reading starts over.
            let starts_over = before.cursor.rewound() == after.cursor;
            if before.cursor != after.cursor && !starts_over {
                return Guarantee::Bookmarkable.fails(format!(
                    "{cursor} was opened at {}, and stood at {}",
                    after.cursor, before.cursor
                ));
            }
            return Ok(());
        }
        // Its owner has written it again after an unknown result.
        if (after.cursor, after.filter) == (before.cursor, before.filter) {
            return Ok(());
        }
        // It saves that it has expired before it gets `Expired`. Another owner of the cursor then gets it as well.
        if after.cursor == rooms::SavedCursor::EXPIRED {
            return if before.is_expired(self.horizon) {
                Ok(())
            } else {
                Guarantee::ExpiredForReason.fails(format!(
                    "{cursor} has expired at {}, and the horizon is at {}",
                    before.cursor, self.horizon
                ))
            };
        }
        let mut subscribers = self.subscribers.iter();
        let Some((&id, subscriber)) = subscribers.find(|(_, known)| known.cursor.as_deref() == Some(cursor))
        else {
            return Guarantee::Bookmarkable.fails(format!("{cursor} was moved, and nobody has it"));
        };
        let (from, to) = (Start::from(before.cursor), Start::from(after.cursor));
        // Only after `Expired` a cursor begins again.
        if to < from && !subscriber.has_expired {
            return Guarantee::Bookmarkable
                .fails(format!("{cursor} went back from {} to {}", before.cursor, after.cursor));
        }
        // A subscriber that resumes below the horizon gets `Expired`.
        if let Start::At(known) = to
            && known >= self.horizon
            && let Some(owed) = self.is_owed(id, known)
        {
            return Guarantee::Bookmarkable
                .fails(format!("{cursor} was moved to {}, and {owed}", after.cursor));
        }
        // A save that was under way when it expired does not count.
        if subscriber.expired_by.is_none_or(|horizon| !to.is_before(horizon)) {
            self.note_position(id, to);
        }
        Ok(())
    }
}
