//! Finds out whether a row that could not be decoded was removed or repaired.

use crate::{
    base::{
        error::{Error, Result},
        notification::Notification,
    },
    roles::changes::Change,
    state::{
        context::Context,
        feed::{FeedRow, RawFeed, StoredRow},
        keys::FeedId,
        skipped::SkippedAt,
    },
    store::{Isolation, Transaction},
};

/// Whether the row at `place` is gone or can be decoded now. A damaged fold mark is never repaired: the fold has replaced it at
/// once, so it is reported as long as the process lives.
pub(super) async fn is_repaired(context: &Context, tx: &Transaction, place: &SkippedAt) -> Result<bool> {
    let keys = &context.keys;
    match place {
        SkippedAt::Key(key) => {
            let Some(value) = tx.get(key, Isolation::Snapshot).await? else { return Ok(true) };
            if keys.all_fold_marks().contains(key) {
                return Ok(false);
            }
            let Ok((feed, id)) = keys.newest_id(key) else {
                return Ok(keys.is_decodable(&(key.clone(), value)));
            };
            // The row that it points at may be missing.
            let raw = RawFeed::new(context, &feed);
            let row = async { raw.newest_of(tx, &raw.topology(tx).await?, &id).await };
            present(&feed, row.await)
        }
        SkippedAt::Row(id, sequence) => present(id, RawFeed::new(context, id).row_at(tx, *sequence).await),
    }
}

/// Whether a row of the feed `id` that was read is gone, or can be decoded.
fn present(id: &FeedId, row: Result<Option<StoredRow>>) -> Result<bool> {
    match row {
        Err(Error::NoFeed { .. }) => Ok(true),
        Err(Error::Corrupt { .. }) => Ok(false),
        row => Ok(row?.is_none_or(|row| match id.instance() {
            None => Notification::from_stored(row.sequence, &row.value).is_ok(),
            Some(_) => Change::from_stored(row.sequence, &row.value).is_ok(),
        })),
    }
}
