//! Which databases a job was done for, as it is kept with the cursor of its trigger: so that each of their instances is told to be
//! gone, whatever has happened to it while no trigger was there to see it.

use std::sync::Arc;

use super::{TaskResult, TriggerJob};
use crate::{
    context::Context,
    event::{Db, DbName},
    named_cursor::OpenCursor,
    notification_feed::NotificationFeed,
};

/// Tells `job` of all marked instances of the database `name` that they are gone, but of the one that lives. A row tells of one
/// that was replaced: of several, only these marks know. Says whether `living` is marked.
pub(in crate::jobs) async fn end_replaced<W, J: TriggerJob<W>>(
    context: &Arc<Context>,
    job: &J,
    cursor: &OpenCursor,
    living: Option<&Db>,
    name: &DbName,
) -> TaskResult<bool> {
    let mut marked = cursor.marked_as(name).await?;
    let count = marked.len();
    marked.retain(|db| Some(db) != living);
    let is_marked = marked.len() < count;
    if marked.is_empty() {
        return Ok(is_marked);
    }
    let feed = NotificationFeed::new(Arc::clone(context), context.feed.clone());
    let row = feed.newest(name).await?.filter(|row| !row.is_deleted());
    marked.retain(|db| row.as_ref().is_none_or(|row| row.instance != db.instance));
    for db in marked {
        job.deleted(db.clone()).await?;
        cursor.unmark(&db).await?;
    }
    Ok(is_marked)
}
