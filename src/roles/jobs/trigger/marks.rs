//! Marks the databases for which a job was run. The marks are kept with the cursor of the trigger, so that the job is informed of
//! each instance that is gone, even if that happened while no trigger was running.

use std::sync::Arc;

use super::{
    is_gone,
    kind::{Failure, Turn},
};
use crate::{
    base::{
        error::{Error, Result},
        event::{Db, DbName},
    },
    state::{
        context::Context,
        named_cursor::{Begun, OpenCursor, ScanMark},
        notification_feed::NotificationFeed,
    },
};

/// Begins work on `db`, and marks it. Fails if the job has to be informed first that other instances of the name
/// are gone.
pub(super) async fn begin(
    context: &Arc<Context>,
    cursor: &OpenCursor,
    db: &Db,
    (turn, is_fresh): (&Turn, bool),
) -> Result<ScanMark, Failure> {
    let gone = find_gone(context, cursor, Some(db), &db.name).await?;
    if !gone.is_empty() {
        return Err(Failure::Replaced(gone));
    }
    match cursor.begin_scan(db, turn.is_retry, is_fresh).await? {
        Begun::Scan(mark) => Ok(mark),
        Begun::OutOfTurn => Err(Failure::OutOfTurn),
    }
}

/// Whether the newest row of its name shows that `db` lives. The dispatcher may be behind the store. Then it delivers the
/// predecessor of `db` as if that had replaced `db`.
pub(super) async fn lives(context: &Arc<Context>, db: &Db) -> Result<bool> {
    let feed = NotificationFeed::new(Arc::clone(context), context.feed.clone());
    match feed.newest(&db.name).await {
        Ok(row) => Ok(!is_gone(db, row.as_ref())),
        Err(Error::Corrupt { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Finds instances of the database `name` that are marked and gone; if they are many, some of them. A row names only one replaced
/// instance, so only the marks know all. If other instances than `next` are marked, `next` counts as well: the trigger may have seen
/// a newer one already.
pub(super) async fn find_gone(
    context: &Arc<Context>,
    cursor: &OpenCursor,
    next: Option<&Db>,
    name: &DbName,
) -> Result<Vec<Db>> {
    let mut gone = cursor.marked_as(name).await?;
    gone.retain(|db| Some(db) != next);
    if !gone.is_empty() {
        gone.extend(next.cloned());
        let feed = NotificationFeed::new(Arc::clone(context), context.feed.clone());
        let row = feed.newest(name).await?.filter(|row| !row.is_deleted());
        gone.retain(|db| row.as_ref().is_none_or(|row| row.instance != db.instance));
    }
    Ok(gone)
}
