//! What the oracle knows of named cursors, and of the durable subscribers that keep them.
//!
//! A durable subscriber lives on when its process crashes: what it was told counts, and what came after its cursor is owed to
//! it. Nothing may be owed to it that came before.

use super::{Change, Issuer, Item, Items, Oracle, Shared, SubscriberId, Verdict, Wish, Witness};
use crate::{encoding::Sequence, keys::CursorRow, simulation::time::ProcessId};

impl Oracle {
    /// The durable subscribers of `process`: their cursors, and what they want.
    pub fn durables_of(&self, process: ProcessId) -> Vec<(String, Wish)> {
        let own = self.subscribers.values().filter(|subscriber| subscriber.issuer.process == process);
        own.filter_map(|subscriber| Some((subscriber.cursor.clone()?, subscriber.wish.clone()))).collect()
    }

    /// A durable subscriber has begun, or goes on, at `position`.
    pub fn subscribed_durably(
        &mut self,
        shared: &Shared,
        issuer: Issuer,
        (cursor, wish): (String, Wish),
        position: Sequence,
    ) -> SubscriberId {
        if self.cursors.get(&cursor) != Some(&position) {
            let stored = self.cursors.get(&cursor);
            shared.fail(format!("{cursor} goes on at {position}, and stands at {stored:?}"));
        }
        let known = self.subscribers.iter_mut();
        let known = known.into_iter().find(|(_, known)| known.cursor.as_ref() == Some(&cursor));
        if let Some((id, subscriber)) = known {
            if self.rows.values().any(|placed| placed.row.sequence > position) {
                shared.witness(Witness::DurableWentOn);
            }
            // What came after the cursor may come again.
            subscriber.last.clear();
            subscriber.issuer = issuer;
            // It was told that it had skipped something, and died before that was put down: it begins before that again.
            if position < subscriber.start {
                subscriber.start = position;
                subscriber.knows_nothing = position == Sequence::ZERO;
            }
            return *id;
        }
        let id = self.subscribed(issuer, wish, position);
        self.subscribers.get_mut(&id).expect("it was just added").cursor = Some(cursor);
        id
    }

    /// Judges what a commit has done to named cursors.
    pub(super) fn judge_cursors(&mut self, items: &Items<'_>) -> Verdict {
        for (item, change) in items {
            if let Item::Cursor(cursor) = item {
                self.judge_cursor(cursor, change)?;
            }
        }
        Ok(())
    }

    /// Judges a write of `cursor`.
    fn judge_cursor(&mut self, cursor: &str, change: &Change) -> Verdict {
        let row = |value: &Option<bytes::Bytes>| {
            let row = value.as_ref().map(|value| CursorRow::from_bytes(value)).transpose();
            row.map_err(|error| error.to_string())
        };
        let (before, after) = (row(&change.before)?, row(&change.after)?);
        let after = after.ok_or_else(|| format!("{cursor} was removed"))?;
        self.cursors.insert(cursor.to_owned(), after.position);
        let Some(before) = before else { return Ok(()) };
        if before.token != after.token {
            if before.position != after.position {
                return Err(format!(
                    "{cursor} was opened at {}, and stood at {}",
                    after.position, before.position
                ));
            }
            return Ok(());
        }
        // Its owner has tried again, and had written it.
        if after.position == before.position {
            return Ok(());
        }
        let mut subscribers = self.subscribers.iter();
        let Some((&id, subscriber)) = subscribers.find(|(_, known)| known.cursor.as_deref() == Some(cursor))
        else {
            return Err(format!("{cursor} was moved, and nobody has it"));
        };
        // Only one who was told that it knows nothing begins anew.
        if after.position < before.position && !subscriber.knows_nothing {
            return Err(format!("{cursor} went back from {} to {}", before.position, after.position));
        }
        // Whoever goes on below the horizon is told that it has expired.
        if after.position < self.horizon {
            return Ok(());
        }
        match self.is_owed(id, after.position) {
            Some(owed) => Err(format!("{cursor} was moved to {}, and {owed}", after.position)),
            None => Ok(()),
        }
    }
}
