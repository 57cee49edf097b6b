//! Reads the feed for subscribers that start or have fallen behind, and reads the design documents that have changed.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, TryStreamExt, future::BoxFuture, stream};

use super::{batch::batch_len, delivery::DeliveryBatch, shared::Shared};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::Result,
        event::{DbName, EventKind},
        notification::Notification,
        tasks::Task,
    },
    state::notification_feed::ChangedDdocs,
};

/// Pause after a failed read of the feed.
const FAILURE_PAUSE: Duration = Duration::from_millis(100);

/// How many databases' design documents are read at once.
const DDOC_READS_MAX: usize = 8;

/// The result of a read of the feed.
pub(super) struct Page {
    pub rows: Vec<Arc<Notification>>,
    /// The end of the feed when the reading began.
    pub began: Sequence,
    pub to: Sequence,
    pub more: bool,
}

/// A read of the feed, in its own task: it holds one of a few permits, and must finish even if the subscriber is not polled.
pub(super) type Load = Task<Result<Page>>;

/// Reads the feed after `cursor` once a permit is free. With `names` it looks up the newest rows of these names.
pub(super) fn load(shared: &Arc<Shared>, cursor: Cursor, names: Vec<DbName>, has_failed: bool) -> Load {
    let shared = Arc::clone(shared);
    Task::spawn(async move {
        if has_failed {
            shared.context.env().sleep(FAILURE_PAUSE).await;
        }
        let _turn = shared.turns.acquire().await.expect("the semaphore is never closed");
        if names.is_empty() {
            return page(&shared, cursor).await;
        }
        let (rows, to) = shared.feed.newest_after(&names, cursor).await?;
        Ok(Page { rows, began: to, to, more: false })
    })
}

async fn page(shared: &Shared, cursor: Cursor) -> Result<Page> {
    let mut page = shared.feed.page(cursor, shared.batch_rows_max).await?;
    let began = page.next.began().unwrap_or(page.to);
    let kept = batch_len(&page.rows, shared.batch_rows_max);
    if kept < page.rows.len() {
        page.rows.truncate(kept);
        (page.to, page.more) = (page.rows[kept - 1].sequence, true);
    }
    Ok(Page { rows: page.rows, began, to: page.to, more: page.more })
}

/// A read of the changed design documents, for each delivery of a batch.
pub(super) type DdocRead = BoxFuture<'static, Result<Vec<Arc<ChangedDdocs>>>>;

/// Reads the changed design documents for each delivery of `batch`.
pub(super) fn read_ddocs(shared: &Arc<Shared>, batch: DeliveryBatch) -> DdocRead {
    let shared = Arc::clone(shared);
    Box::pin(async move {
        let read = async |index: usize| {
            let delivery = batch.delivery(index);
            if !delivery.news().kinds().contains(EventKind::DdocUpdated) {
                return Ok(Arc::default());
            }
            let since = *delivery.as_ref().batch_since();
            shared.feed.ddocs(&delivery.notification().db(), since).await.map(Arc::new)
        };
        stream::iter(0..batch.len()).map(read).buffered(DDOC_READS_MAX).try_collect().await
    })
}
