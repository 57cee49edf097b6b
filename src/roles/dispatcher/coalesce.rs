//! Decides which waiting rows of a database its newest row replaces.

use std::{collections::HashMap, sync::Arc};

use super::batch::Matched;
use crate::base::{
    cursor::Cursor,
    event::{DbName, EventKind},
    notification::Notification,
};

/// Whether `row` has news of a deletion for a subscriber at `since`.
fn has_deletion(row: &Notification, since: &Cursor) -> bool {
    row.news_since(*since).kinds().contains(EventKind::Deleted)
}

/// Replaces an older row of the same database by `row`, for a subscriber at `since`. The older row is kept as well if it has news of
/// a deletion that the newer row no longer has, because the janitor deleted the tombstone in between.
pub(super) fn coalesce(
    since: &Cursor,
    row: &Arc<Notification>,
    newest: &mut HashMap<DbName, Arc<Notification>>,
    kept: &mut Vec<Arc<Notification>>,
) {
    let Some(older) = newest.insert(row.name.clone(), Arc::clone(row)) else { return };
    if has_deletion(&older, since) && !has_deletion(row, since) {
        kept.push(older);
    }
}

/// Whether the row of `latest` has all the news for a subscriber at `since` that the row of `first` and the rows of the same name
/// between them have. Once the janitor has deleted a tombstone, later rows no longer show the deletion; but between two rows of the
/// same instance there is no deletion.
pub(super) fn has_all_news(latest: &Matched, first: &Matched, since: &Cursor) -> bool {
    let (Some(latest), Some(first)) = (latest.rows().next(), first.rows().next()) else { return false };
    has_deletion(latest, since) || (latest.instance == first.instance && !has_deletion(first, since))
}
