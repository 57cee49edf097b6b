//! [`ChangesWriter`]: writes changes of documents in the transaction that edits them.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Changes, DocSummary};
use crate::{
    base::{
        encoding::{Incarnation, Sequence, versionstamped},
        error::{Error, Result},
        event::{Db, DdocId},
    },
    state::{
        feed::{PendingRows, RawFeed, RowPlace, Topology, append},
        keys::FeedId,
    },
    store::{Committed, Transaction},
};

/// The sequence that a row will have once its transaction has committed.
///
/// A layer stores the sequence with the document, as the operand of `SET_VERSIONSTAMPED_VALUE`, because the next edit needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingSequence {
    /// How many times the bus was moved.
    incarnation: Incarnation,
    /// The order of the row in its transaction.
    order: u16,
}

impl PendingSequence {
    /// Returns the operand of [`AtomicOp::SetVersionstampedValue`](crate::store::AtomicOp) that stores `before`, the 13 bytes of the
    /// sequence, and `after`.
    pub fn operand(&self, before: &[u8], after: &[u8]) -> Vec<u8> {
        let before = [before, &[self.incarnation.0]].concat();
        versionstamped(&before, &[&self.order.to_be_bytes()[..], after].concat())
    }

    /// Returns the sequence, once the transaction has committed.
    pub fn of(&self, committed: Committed) -> Sequence {
        Sequence::new(self.incarnation, committed.versionstamp, self.order)
    }
}

/// Writes changes to the documents of one database in one transaction.
///
/// The topology that the writer uses is in the transaction's read-conflict set: the transaction fails and is retried if the feed is
/// resharded before the commit.
pub struct ChangesWriter<'a> {
    changes: &'a Changes,
    tx: &'a Transaction,
    db: &'a Db,
    feed: FeedId,
    /// The key of the feed's pulse, which identifies the feed of this bus in the transaction.
    pulse: Vec<u8>,
    topology: Arc<Topology>,
    /// How many times the transaction had been reset, and how many times it had removed the feed, when the topology was read.
    read_at: (u64, u64),
}

impl<'a> ChangesWriter<'a> {
    pub(super) fn new(
        changes: &'a Changes,
        tx: &'a Transaction,
        db: &'a Db,
        topology: Arc<Topology>,
    ) -> Self {
        let feed = FeedId::documents(db.instance);
        let pulse = changes.context.keys.pulse(&feed);
        let read_at = (tx.resets(), PendingRows::removals(tx, &pulse));
        Self { changes, tx, db, feed, pulse, topology, read_at }
    }

    /// Records an edit of `doc`, and the event of the database: `ddoc_updated` for a design document, otherwise `updated`. `previous` is
    /// the sequence of the document's last edit, which the caller read with the document; `None` if the document is new.
    ///
    /// This call reads nothing. It clears the previous row, if there is one, inserts the new one, and counts the row of a new document. If
    /// a document is recorded again in the same transaction, only its last row is kept; pass the same `previous` each time.
    ///
    /// Fails with [`Error::Invalid`] if `doc` has impossible values, if the transaction was reset after the writer was made, or if 65,535
    /// other documents were already recorded in it; and with [`Error::NoFeed`] if the transaction has removed the feed since.
    pub fn record(&self, doc: &DocSummary, previous: Option<Sequence>) -> Result<PendingSequence> {
        doc.check()?;
        let (resets, removals) = self.read_at;
        if self.tx.resets() != resets {
            let reason = "its transaction was reset since; make another writer";
            return Err(Error::invalid("changes writer", reason));
        }
        if PendingRows::removals(self.tx, &self.pulse) != removals {
            return Err(Error::NoFeed { feed: self.feed.to_string() });
        }
        let Changes { context, producer, .. } = self.changes;
        let id = doc.id.as_str();
        let place = PendingRows::index_of(self.tx, &self.pulse, id.as_bytes());
        let (order, is_first) = place.ok_or_else(|| {
            Error::invalid("documents", "a transaction records at most 65,535 documents of a database")
        })?;
        let feed = RawFeed::new(context, &self.feed);
        let (of, place) = ((id.as_bytes(), previous), RowPlace { order, is_first });
        append(self.tx, feed, &self.topology, of, place, &doc.to_bytes(previous.is_some()))?;
        if doc.id.is_design() {
            // If the id is too long for an event, the event is recorded without it.
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
