//! [`ChangesWriter`]: writes changes of documents inside the transaction that edits them.

use std::{fmt, sync::Arc};

use super::{Changes, DocSummary};
use crate::{
    base::{
        encoding::{Incarnation, Sequence, versionstamped},
        error::{Error, Result},
        event::{Db, DdocId},
    },
    state::{
        feed::{RawFeed, RowPlace, Topology, append},
        keys::FeedId,
    },
    store::{Committed, Transaction},
};

/// The sequence that a row will have once its transaction has committed.
///
/// A layer stores it with the document, because the next edit has to name it: as the operand of
/// `SET_VERSIONSTAMPED_VALUE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingSequence {
    /// How often the bus has moved.
    incarnation: Incarnation,
    /// The place of the row in its transaction.
    order: u16,
}

impl PendingSequence {
    /// The operand of [`AtomicOp::SetVersionstampedValue`](crate::store::AtomicOp) that stores `before`, the 13 bytes of the
    /// sequence, and `after`.
    pub fn operand(&self, before: &[u8], after: &[u8]) -> Vec<u8> {
        let before = [before, &[self.incarnation.0]].concat();
        versionstamped(&before, &[&self.order.to_be_bytes()[..], after].concat())
    }

    /// The sequence, now that the transaction has committed.
    pub fn of(&self, committed: Committed) -> Sequence {
        Sequence::new(self.incarnation, committed.versionstamp, self.order)
    }
}

/// Writes changes of the documents of one database in one transaction.
///
/// It holds the shards that are written to now, which are in the transaction's read-conflict set: a reshard in between makes
/// the transaction fail and try again.
pub struct ChangesWriter<'a> {
    /// The changes feeds.
    changes: &'a Changes,
    /// The transaction.
    tx: &'a Transaction,
    /// The database.
    db: &'a Db,
    /// Its feed.
    feed: FeedId,
    /// Where rows go and have gone.
    topology: Arc<Topology>,
    /// How often the transaction had been reset when the topology was read, and the feed removed in it.
    read_at: (u64, u64),
}

impl<'a> ChangesWriter<'a> {
    /// A writer of the feed of `db`, whose current topology is this.
    pub(super) fn new(
        changes: &'a Changes,
        tx: &'a Transaction,
        db: &'a Db,
        topology: Arc<Topology>,
    ) -> Self {
        let feed = FeedId::documents(db.instance);
        let read_at = (tx.resets(), tx.removals(feed.bytes()));
        Self { changes, tx, db, feed, topology, read_at }
    }

    /// Writes that `doc` was edited, and records the event for the database: `ddoc_updated` for a design document, else
    /// `updated`. `previous` is the sequence of the document's last edit, which the caller has read with the document;
    /// `None` if it is new.
    ///
    /// It reads nothing. It clears the previous row, if there is one, inserts the new one, and counts the row of a new document. A
    /// document that is recorded again in the same transaction has one row, the last one; its `previous` is the same each time.
    ///
    /// Fails with [`Error::Invalid`] if there can be no such document, the transaction was reset since, or 65,535 others were
    /// recorded in the transaction; and with [`Error::NoFeed`] if the feed was removed in it since.
    pub fn record(&self, doc: &DocSummary, previous: Option<Sequence>) -> Result<PendingSequence> {
        doc.check()?;
        let (resets, removals) = self.read_at;
        if self.tx.resets() != resets {
            let reason = "its transaction was reset since; ask for another one";
            return Err(Error::invalid("changes writer", reason));
        }
        if self.tx.removals(self.feed.bytes()) != removals {
            return Err(Error::NoFeed { feed: self.feed.to_string() });
        }
        let Changes { context, producer, .. } = self.changes;
        let id = doc.id.as_str();
        let place = self.tx.place_of_row(self.feed.bytes(), id.as_bytes());
        let (order, is_first) = place.ok_or_else(|| {
            Error::invalid("documents", "a transaction records at most 65,535 documents of a database")
        })?;
        let feed = RawFeed::new(context, &self.feed);
        let (of, place) = ((id.as_bytes(), previous), RowPlace { order, is_first });
        append(self.tx, feed, &self.topology, of, place, &doc.to_bytes())?;
        if doc.id.is_design() {
            // An id that is too long for an event is left out of it; the event is what matters.
            producer.ddoc_updated(self.tx, self.db, DdocId::new(id).ok().as_ref());
        } else {
            producer.updated(self.tx, self.db);
        }
        Ok(PendingSequence { incarnation: context.config.incarnation, order })
    }
}

impl fmt::Debug for ChangesWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChangesWriter").field("db", &self.db).finish_non_exhaustive()
    }
}
