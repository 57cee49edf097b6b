//! Which databases a job was done for, as it is kept with the cursor of its trigger: so that each of their instances is told
//! to be gone, whatever has happened to it while no trigger was there to see it.

use std::sync::Arc;

use crate::{
    context::Context,
    error::Result,
    event::{Db, DbName},
    named_cursor::OpenCursor,
    notification_feed::NotificationFeed,
};

/// What is marked of the instances of a name.
pub(in crate::jobs) struct Marked {
    /// Whether the one that lives is.
    pub is_living: bool,
    /// Those that are gone; some of them, if they are many.
    pub gone: Vec<Db>,
}

/// Finds out which instances of the database `name` are marked besides `living`, and gone. A row tells of one that was
/// replaced: of several, only these marks know.
pub(in crate::jobs) async fn find_marked(
    context: &Arc<Context>,
    cursor: &OpenCursor,
    living: Option<&Db>,
    name: &DbName,
) -> Result<Marked> {
    let mut gone = cursor.marked_as(name).await?;
    let count = gone.len();
    gone.retain(|db| Some(db) != living);
    let is_living = gone.len() < count;
    if !gone.is_empty() {
        let feed = NotificationFeed::new(Arc::clone(context), context.feed.clone());
        let row = feed.newest(name).await?.filter(|row| !row.is_deleted());
        gone.retain(|db| row.as_ref().is_none_or(|row| row.instance != db.instance));
    }
    Ok(Marked { is_living, gone })
}
