//! The one check of history: whether this store has given out a position in its past.
//!
//! A store that is restored from a copy has lost everything after the copy, and its versions may be lower than before. Two things must not
//! happen then: a new row must not be placed before an old one, where no reader would find it; and a reader that knows more than the store
//! must not continue as if nothing were missing. So the store keeps a table with the last sequence that is known to exist in each
//! incarnation. Folds and reshards move the entry of the current incarnation. A move or a raise begins another incarnation, and ends the
//! previous one where the copy ended. If the store knows which versions it has given out, these are stored with that end.

use crate::{
    base::{
        cursor::{Cursor, Knowledge},
        encoding::{Incarnation, Sequence},
        error::{Error, Result},
    },
    state::{
        context::Context,
        keys::{EndOfIncarnation, Keys},
    },
    store::{Isolation, Store, Transaction},
};

/// What must belong to the history of the store.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Claim {
    /// The rows of the store itself. Code that writes or removes rows checks this.
    Rows,
    /// The cursor of a reader, which may come from another store, and a row of its feed that the store has, if one is known.
    Reader(Cursor, Option<Sequence>),
    /// A position that is stored with the rows, and so is as old as they are.
    Kept(Sequence),
}

/// The history of a bus.
#[derive(Debug, Clone, Copy)]
pub(crate) struct History<'a> {
    pub store: &'a Store,
    pub keys: &'a Keys,
    /// The current incarnation.
    pub incarnation: Incarnation,
}

impl<'a> History<'a> {
    pub fn of(context: &'a Context) -> Self {
        Self { store: &context.store, keys: &context.keys, incarnation: context.config.incarnation }
    }

    /// Fails unless everything in `asked` belongs to the history of the store. Returns the last sequence that `tx` can see.
    ///
    /// [`Error::OlderThanRows`]: the store is older than its own rows. [`Error::Expired`]: the position belongs to another history, or to a
    /// part of an earlier incarnation that was not copied; what such a reader knows may never have happened here, and it may not know what
    /// did. [`Error::Invalid`]: no store has given out the position, because read versions never go back.
    pub async fn check(self, tx: &Transaction, asked: Claim) -> Result<Sequence> {
        let last = Sequence::last_at(self.incarnation, tx.read_version().await?);
        let positions = match asked {
            // A reader that knows nothing must find all rows.
            Claim::Rows | Claim::Reader(Cursor::BEGINNING, _) => {
                let end = self.end_of(tx, self.incarnation).await?;
                [end.map(|end| end.last), None, None, None]
            }
            Claim::Kept(position) => [Some(position), None, None, None],
            Claim::Reader(cursor, _) => {
                let known = match cursor.knowledge() {
                    Knowledge::Nothing => None,
                    Knowledge::UpTo(known) => Some(known),
                };
                [known, cursor.began(), cursor.readable(), Some(cursor.position())]
            }
        };
        for position in positions.into_iter().flatten() {
            let (of, at) = (position.incarnation(), self.incarnation);
            if of > at {
                let reason = format!("{position} belongs to incarnation {}, the bus is at {}", of.0, at.0);
                return Err(Error::invalid("sequence", reason));
            }
            if position > last
                && let Some(rows) = self.end_of(tx, at).await?
                && rows.last > last
            {
                return Err(Error::OlderThanRows { rows: rows.last, store: last });
            }
            if let Claim::Reader(cursor, row) = asked
                && cursor != Cursor::BEGINNING
                && self.is_foreign(tx, position, row).await?
            {
                return Err(Error::Expired { horizon: last });
            }
            if position > last {
                let reason = format!("{position} is ahead of the store, which is at {last}");
                return Err(Error::invalid("sequence", reason));
            }
        }
        Ok(last)
    }

    /// Fails if a position that is given out now would be before existing rows: if the store is older than its rows, or with
    /// [`Error::BusGone`] if the incarnation was raised since the bus was opened. Returns the last sequence that `tx` can see. Code that writes
    /// positions without a lease checks this; a raise removes all leases.
    pub async fn check_opened(context: &'a Context, tx: &Transaction) -> Result<Sequence> {
        let stored = tx.get(&context.keys.config(), Isolation::Serializable).await?;
        context.config.check_stored(stored.as_deref())?;
        Self::of(context).check(tx, Claim::Rows).await
    }

    /// Does the same check for an edit of a document. Reads nothing unless this process has noted, when it opened the bus or at a later
    /// check, that the store is older than its rows. That is enough, because versions of one store never go back.
    pub async fn check_edit(context: &'a Context, tx: &Transaction) -> Result<()> {
        if context.is_older() {
            context.note_history(Self::of(context).check(tx, Claim::Rows).await)?;
        }
        Ok(())
    }

    /// Whether no part of this store's history has given out `position`, given that the store has `row`. The beginning, which is before all
    /// positions, belongs to every history.
    async fn is_foreign(self, tx: &Transaction, position: Sequence, row: Option<Sequence>) -> Result<bool> {
        if position == Sequence::MIN {
            return Ok(false);
        }
        let version = position.versionstamp().version();
        if position.incarnation() == self.incarnation {
            return Ok(!self.store.may_have_used(version));
        }
        let end = self.end_of(tx, position.incarnation()).await?;
        let row = row.filter(|row| row.incarnation() == position.incarnation());
        let last = end.as_ref().map(|end| end.last).max(row);
        // A layer can bring rows of an earlier incarnation from another store, and adopt them. The openings then say nothing about them.
        let is_lost = |end: EndOfIncarnation| {
            !end.may_have_used(version)
                && row.is_none_or(|row| end.may_have_used(row.versionstamp().version()))
        };
        Ok(last.is_none_or(|last| position > last) || end.is_some_and(is_lost))
    }

    /// Returns the versions that the store has given out, for the end of the current incarnation. None are returned if the store keeps no
    /// history, or if its rows were copied from another store, whose history is not known.
    pub async fn openings(self, tx: &Transaction) -> Result<Vec<(u64, u64)>> {
        let rows = self.end_of(tx, self.incarnation).await?;
        let are_own = rows.is_none_or(|rows| self.store.may_have_used(rows.last.versionstamp().version()));
        Ok(if are_own { self.store.openings() } else { Vec::new() })
    }

    /// Returns the end of `incarnation`.
    pub async fn end_of(
        self,
        tx: &Transaction,
        incarnation: Incarnation,
    ) -> Result<Option<EndOfIncarnation>> {
        let key = self.keys.end_of_incarnation(incarnation);
        let stored = tx.get(&key, Isolation::Snapshot).await?;
        stored.map(|stored| EndOfIncarnation::from_bytes(&stored).map_err(|error| error.at(&key))).transpose()
    }
}
