//! Which row of a database stands for others that wait with it.

use std::{collections::HashMap, sync::Arc};

use super::batch::Matched;
use crate::base::{
    bugs::{Bug, is_on},
    cursor::Cursor,
    event::{DbName, EventKind},
    notification::Notification,
};

/// Whether `row` tells a subscriber at `since` of a deletion.
fn tells_deletion(row: &Notification, since: &Cursor) -> bool {
    row.news_since(*since).kinds().contains(EventKind::Deleted)
}

/// Puts `row` in the place of an older one of its database, for a subscriber at `since`. The older one is kept as well if it tells of
/// a deletion of which the newer one says nothing: the janitor has dropped the tombstone in between.
pub(super) fn coalesce(
    since: &Cursor,
    row: &Arc<Notification>,
    newest: &mut HashMap<DbName, Arc<Notification>>,
    kept: &mut Vec<Arc<Notification>>,
) {
    let Some(older) = newest.insert(row.name.clone(), Arc::clone(row)) else { return };
    if tells_deletion(&older, since) && !tells_deletion(row, since) && !is_on(Bug::RoundForgetsTombstone) {
        kept.push(older);
    }
}

/// Whether the row of `latest` has all that the row of `first`, and whatever rows of the same name came between, would tell a
/// subscriber at `since`. Of a deletion nothing is left in later rows once the janitor has dropped the tombstone; one and the
/// same instance has none between its rows.
pub(super) fn tells_all(latest: &Matched, first: &Matched, since: &Cursor) -> bool {
    let (Some(latest), Some(first)) = (latest.rows().next(), first.rows().next()) else { return false };
    tells_deletion(latest, since) || (latest.instance == first.instance && !tells_deletion(first, since))
}
