//! Reads the feed for subscribers that start or have fallen behind, and reads the design documents that have changed.

use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, future::BoxFuture, stream};

use super::{batch::batch_len, delivery::DeliveryBatch, shared::Shared};
use crate::{
    base::{
        backoff::FAILURE_PAUSE,
        cursor::Cursor,
        error::{Error, Result},
        event::{DbName, EventKind},
        tasks::Task,
    },
    state::notification_feed::{ChangedDdocs, NotificationPage},
};

const DDOC_READS_MAX: usize = 8;

/// A read of the feed, in its own task: it holds one of a few permits, and must finish even if the subscriber is not polled.
pub(super) type Load = Task<Result<NotificationPage>>;

/// Reads the feed after `cursor` once a permit is free. With `names` it looks up the newest rows of these names.
pub(super) fn load(shared: &Arc<Shared>, cursor: Cursor, names: Vec<DbName>, has_failed: bool) -> Load {
    let closed = Arc::clone(shared);
    let read = read(Arc::clone(shared), cursor, names, has_failed);
    Task::spawn(async move {
        // A subscriber that has ended does not read on.
        let until_closed = async {
            tokio::select! {
                biased;
                () = closed.closed() => None,
                page = read => Some(page),
            }
        };
        let page = Arc::clone(&closed).until_cut_off(until_closed).await.flatten();
        page.unwrap_or_else(|| Err(Error::NoSubscriber { subscriber: "reader".into() }))
    })
}

async fn read(
    shared: Arc<Shared>,
    cursor: Cursor,
    names: Vec<DbName>,
    has_failed: bool,
) -> Result<NotificationPage> {
    pause(&shared, has_failed).await;
    let _turn = shared.turns.acquire().await.expect("the semaphore is never closed");
    if !names.is_empty() {
        let (rows, to) = shared.feed.newest_after(&names, cursor).await?;
        return Ok(NotificationPage { rows, to, next: to.into(), more: false });
    }
    let mut page = shared.feed.page(cursor, shared.batch_rows_max).await?;
    let kept = batch_len(&page.rows, shared.batch_rows_max);
    if kept < page.rows.len() {
        page.rows.truncate(kept);
        page.next = page.next.begin(page.to);
        (page.to, page.more) = (page.rows[kept - 1].sequence, true);
    }
    Ok(page)
}

async fn pause(shared: &Shared, has_failed: bool) {
    if has_failed {
        shared.context.env().sleep(FAILURE_PAUSE).await;
    }
}

pub(super) type DdocRead = BoxFuture<'static, Result<Vec<Arc<ChangedDdocs>>>>;

pub(super) fn read_ddocs(shared: &Arc<Shared>, batch: DeliveryBatch, has_failed: bool) -> DdocRead {
    let shared = Arc::clone(shared);
    Box::pin(async move {
        pause(&shared, has_failed).await;
        let read = async |index: usize| {
            let delivery = batch.delivery(index);
            if !delivery.news().kinds().contains(EventKind::DdocUpdated) {
                return Ok(Arc::default());
            }
            shared.feed.ddocs(&delivery.notification().db(), *delivery.batch_since()).await.map(Arc::new)
        };
        stream::iter(0..batch.len()).map(read).buffered(DDOC_READS_MAX).try_collect().await
    })
}
