//! The audit: reads the feeds in small pages once everything is at rest, and has the oracle judge the rows.

use std::sync::Arc;

use notibus::{
    Result,
    cursor::Cursor,
    feed::{Feed, FeedRow},
};

use super::context::ActorContext;

/// The number of rows in a page: few, so that there are several pages.
const PAGE_ROWS: usize = 3;

/// Reads the feed of notifications, and has the oracle judge whether each database is in it once, in one total order. The feed is read
/// again if a fold came in between: nobody waits until the last events of a replaced database are folded.
pub(super) async fn feed(actor: &ActorContext) {
    loop {
        let before = actor.shared.oracle().rows_in_order();
        let rows = match all_rows(&actor.bus.feed()).await {
            Ok(rows) => rows,
            Err(error) => return actor.shared.fail(format!("the feed cannot be read: {error}")),
        };
        let oracle = actor.shared.oracle();
        if before == oracle.rows_in_order() {
            let judged = oracle.judge_pages(&rows);
            drop(oracle);
            return judged.unwrap_or_else(|reason| actor.shared.fail(reason));
        }
    }
}

/// Reads the documents of all databases, and has the oracle judge the rows.
pub(super) async fn documents(actor: &ActorContext) {
    if actor.shared.plan.documents.is_none() {
        return;
    }
    let changes = actor.bus.changes();
    let living = actor.shared.oracle().living();
    for db in living {
        let rows = match all_rows(&changes.feed(&db)).await {
            Ok(rows) => rows,
            Err(error) => {
                return actor.shared.fail(format!("the documents of {db:?} cannot be read: {error}"));
            }
        };
        if let Err(reason) = actor.shared.oracle().judge_doc_pages(db.instance, &rows) {
            actor.shared.fail(reason);
        }
    }
}

/// Reads all rows of `feed`, each page in its own transaction.
async fn all_rows<R: FeedRow>(feed: &Feed<R>) -> Result<Vec<Arc<R>>> {
    let (mut cursor, mut rows) = (Cursor::BEGINNING, Vec::new());
    loop {
        let page = feed.page(cursor, PAGE_ROWS).await?;
        rows.extend(page.rows);
        cursor = page.next;
        if !page.more {
            return Ok(rows);
        }
    }
}
