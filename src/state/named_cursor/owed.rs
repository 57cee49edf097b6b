//! Names with unfinished work of a trigger that its cursor has passed, kept with the cursor.

use super::{NamedCursor, OpenCursor};
use crate::{
    base::{cursor::Cursor, error::Result, event::DbName},
    state::keys::{CursorRow, OwedRow},
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Transaction, key_after},
};

impl NamedCursor {
    /// At most `limit` of the names with unfinished work after `last`, in their order. A row that cannot be decoded
    /// counts as one of a database that may be fresh.
    pub(crate) async fn owed(&self, last: Option<&DbName>, limit: usize) -> Result<Vec<(DbName, OwedRow)>> {
        let Self { context, id } = self;
        let KeyRange { begin, end } = context.keys.all_owed(id);
        let begin = last.map_or(begin, |last| key_after(&context.keys.owed(id, last)));
        let read = RangeRead::new(KeyRange { begin, end }).limit(limit);
        let page =
            context.db.run(async |tx: Transaction| tx.get_range(&read, Isolation::Snapshot).await).await?;
        let row = |bytes: &[u8]| OwedRow::from_bytes(bytes).unwrap_or(OwedRow { is_fresh: true });
        page.rows.iter().map(|stored| Ok((context.keys.owed_name(stored)?, row(&stored.1)))).collect()
    }
}

impl OpenCursor {
    /// Saves `position`, adds the names with new unfinished work and removes the finished ones, all in one
    /// transaction. Fails as [`OpenCursor::save`] does.
    pub async fn save_owing(
        &mut self,
        position: Cursor,
        owed: &[(DbName, OwedRow)],
        settled: &[DbName],
    ) -> Result<()> {
        if owed.is_empty() && settled.is_empty() {
            return self.save(position).await;
        }
        let Self { cursor: NamedCursor { context, id }, token, filter, .. } = &*self;
        let save = async |tx: Transaction| {
            self.check(&tx).await?;
            for (name, row) in owed {
                // A row that lists the name already may not have been read yet: what is fresh stays so.
                tx.atomic(AtomicOp::ByteMax, &context.keys.owed(id, name), &row.to_bytes());
            }
            for name in settled {
                tx.clear(&context.keys.owed(id, name));
            }
            let row = CursorRow { token: *token, cursor: position, filter: *filter };
            tx.set(&context.keys.cursor(id), &row.to_bytes());
            Ok(())
        };
        context.db.run(save).await?;
        self.stored = position;
        Ok(())
    }
}
