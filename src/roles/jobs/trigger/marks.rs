//! Which databases a job was done for, as it is kept with the cursor of its trigger: so that each of their instances is told
//! to be gone, whatever has happened to it while no trigger was there to see it.

use std::sync::Arc;

use super::kind::{Failure, Turn};
use crate::{
    base::{
        error::Result,
        event::{Db, DbName},
    },
    state::{
        context::Context,
        named_cursor::{Begun, OpenCursor, ScanMark},
        notification_feed::NotificationFeed,
    },
};

/// Begins work on `db`, which is marked by it. Fails if the job has first to be informed of other instances of its name that they
/// are gone.
pub(in crate::roles::jobs) async fn begin(
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
        Begun::Parked => Err(Failure::WasParked),
    }
}

/// Finds out which instances of the database `name` are marked besides `living`, and gone; some of them, if they are many. A row
/// tells of one that was replaced: of several, only these marks know.
pub(in crate::roles::jobs) async fn find_gone(
    context: &Arc<Context>,
    cursor: &OpenCursor,
    living: Option<&Db>,
    name: &DbName,
) -> Result<Vec<Db>> {
    let mut gone = cursor.marked_as(name).await?;
    gone.retain(|db| Some(db) != living);
    if !gone.is_empty() {
        let feed = NotificationFeed::new(Arc::clone(context), context.feed.clone());
        let row = feed.newest(name).await?.filter(|row| !row.is_deleted());
        gone.retain(|db| row.as_ref().is_none_or(|row| row.instance != db.instance));
    }
    Ok(gone)
}
