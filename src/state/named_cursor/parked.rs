//! Databases that a trigger has parked, kept with its cursor.

use std::sync::Arc;

use super::{NamedCursor, OpenCursor};
use crate::{
    base::{
        error::Result,
        event::{Db, DbName},
    },
    state::{context::Context, keys::ParkedRow, skipped::SkippedAt},
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Row, Transaction, key_after},
};

/// How many rows one transaction reads or writes.
const PAGE_ROWS: usize = 500;

/// A parked database and its row, which cannot be decoded if it is damaged or a later version has written it.
pub(crate) type Parked = (Db, Result<ParkedRow>);

impl NamedCursor {
    /// The cursors of the bus as a whole, one read for each.
    pub(crate) async fn all(context: &Arc<Context>) -> Result<Vec<Self>> {
        let KeyRange { mut begin, end } = context.keys.shared_cursors();
        let mut found = Vec::new();
        loop {
            let read = RangeRead::new(KeyRange { begin: begin.clone(), end: end.clone() }).limit(1);
            let page = context
                .db
                .run(async |tx: Transaction| tx.get_range(&read, Isolation::Snapshot).await)
                .await?;
            let Some((key, _)) = page.rows.first() else { return Ok(found) };
            let id = context.keys.cursor_id(key)?;
            begin = context.keys.whole_cursor(&id).end;
            found.push(Self { context: Arc::clone(context), id });
        }
    }

    /// Whether it belongs to a trigger: it has marks, parked databases or unfinished work.
    pub(crate) async fn is_of_trigger(&self) -> Result<bool> {
        let Self { context, id } = self;
        let ranges = [context.keys.scans(id), context.keys.all_parked(id), context.keys.all_owed(id)];
        let read = async |tx: Transaction| {
            for range in &ranges {
                let read = RangeRead::new(range.clone()).limit(1);
                if !tx.get_range(&read, Isolation::Snapshot).await?.rows.is_empty() {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        context.db.run(read).await
    }

    /// At most `limit` of the parked databases after `last`, in the order of their names. A row that cannot be decoded is
    /// reported as skipped.
    pub(crate) async fn parked(&self, last: Option<&Db>, limit: usize) -> Result<Vec<Parked>> {
        let Self { context, id } = self;
        let KeyRange { begin, end } = context.keys.all_parked(id);
        let begin = last.map_or(begin, |last| key_after(&context.keys.parked(id, last)));
        let read = RangeRead::new(KeyRange { begin, end }).limit(limit);
        let page =
            context.db.run(async |tx: Transaction| tx.get_range(&read, Isolation::Snapshot).await).await?;
        let parked = |row: &Row| {
            let (db, parked) = context.keys.parked_row(row)?;
            if let Err(error) = &parked {
                context.skip(&SkippedAt::Key(row.0.clone()), error);
            }
            Ok((db, parked))
        };
        page.rows.iter().map(parked).collect()
    }

    /// How often a retry of parked databases was asked for.
    pub(crate) async fn asked(&self) -> Result<u64> {
        let key = self.context.keys.asked(&self.id);
        let stored = self.context.db.run(async |tx| tx.get(&key, Isolation::Snapshot).await).await?;
        Ok(stored.map_or(0, |count| {
            count.iter().take(8).rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
        }))
    }

    /// Asks for a retry of the parked databases of this name, or of all, but for those whose rows cannot be decoded. Returns their
    /// number.
    pub(crate) async fn ask(&self, name: Option<&DbName>) -> Result<u64> {
        let Self { context, id } = self;
        let KeyRange { mut begin, end } = match name {
            Some(name) => context.keys.parked_as(id, name),
            None => context.keys.all_parked(id),
        };
        let mut total = 0;
        loop {
            let range = KeyRange { begin: begin.clone(), end: end.clone() };
            let ask = async |tx: Transaction| {
                let read = RangeRead::new(range.clone()).limit(PAGE_ROWS);
                let page = tx.get_range(&read, Isolation::Serializable).await?;
                let mut count = 0;
                for row in &page.rows {
                    if let (_, Ok(parked)) = context.keys.parked_row(row)? {
                        tx.set(&row.0, &ParkedRow { is_asked: true, ..parked }.to_bytes());
                        count += 1;
                    }
                }
                if count > 0 {
                    tx.atomic(AtomicOp::Add, &context.keys.asked(id), &1_u64.to_le_bytes());
                }
                Ok((count, page.rows.last().filter(|_| page.more).map(|(key, _)| key.clone())))
            };
            let (count, last) = context.db.run(ask).await?;
            total += count;
            match last {
                Some(last) => begin = key_after(&last),
                None => return Ok(total),
            }
        }
    }
}

impl OpenCursor {
    /// The cursor without its owner.
    pub fn named(&self) -> &NamedCursor {
        &self.cursor
    }

    /// Parks `db`, merging an earlier parked row of it, with what was requested since the work on it began. If the database is gone, its mark is removed, so that its
    /// successor need not wait. Fails with [`Error::CursorLost`](crate::Error::CursorLost) if another subscriber has
    /// opened the cursor.
    pub async fn park(&self, db: &Db, row: &ParkedRow) -> Result<()> {
        let NamedCursor { context, id } = &self.cursor;
        let key = context.keys.parked(id, db);
        let park = async |tx: Transaction| {
            self.check(&tx).await?;
            let stored = tx.get(&key, Isolation::Serializable).await?;
            // A row that cannot be decoded is replaced, or it would never be tried again.
            let stored = stored.and_then(|bytes| ParkedRow::from_bytes(&bytes).ok());
            let is_fresh = row.is_fresh || stored.as_ref().is_some_and(|stored| stored.is_fresh);
            let is_asked = !row.is_gone && stored.is_some_and(|stored| stored.is_asked);
            tx.set(&key, &ParkedRow { is_fresh, is_asked, ..row.clone() }.to_bytes());
            if row.is_gone {
                tx.clear(&context.keys.scan(id, db));
            }
            Ok(())
        };
        context.db.run(park).await
    }

    /// Removes the parked row of `db`. Fails as [`OpenCursor::park`] does.
    pub async fn unpark(&self, db: &Db) -> Result<()> {
        let NamedCursor { context, id } = &self.cursor;
        let unpark = async |tx: Transaction| {
            self.check(&tx).await?;
            let key = context.keys.parked(id, db);
            // A late commit of this must not remove news that were noted since.
            tx.add_read_conflict(&KeyRange::key(&key));
            tx.clear(&key);
            Ok(())
        };
        context.db.run(unpark).await
    }
}
