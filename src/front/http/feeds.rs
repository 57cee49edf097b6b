//! `/_notibus/feeds`: over which shards a feed is spread, and to change it; and the rows of the notifications as they are kept.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{StatusCode, request::Parts},
    routing::any,
};
use serde_json::{Value, json};
use tokio_stream::StreamExt;

use super::{
    Api, Failure, Inner,
    answer::{Answered, PathSegments, Shared, at, json as answer},
    caller::Permission,
    manage::{ReshardRequest, instance_of, posted, reads},
    page::{PageSize, cut_at},
    updates::size_of_row,
};
use crate::{
    base::{
        cursor::{Cursor, Start},
        error::{Error, Result as BusResult},
        filter::Filter,
    },
    state::{
        feed::{Feed, FeedRow, TopologyEntry},
        routing::SchemeId,
    },
};

/// The most rows of a page, and how many it has if nothing is said.
const PAGE_ROWS: usize = 1_000;

impl Api {
    /// The shards of feeds below `/_notibus/feeds/{feed}/topology`, for those who may see the status, and `…/reshard`, for admins;
    /// and `/_notibus/feeds/notifications/rows` for those who may read `_db_updates`.
    pub fn feeds(&self) -> Router {
        let with_state = |router: Router<Arc<Inner>>| router.with_state(Arc::clone(&self.inner));
        let seen = with_state(at(Router::new(), "/_notibus/feeds/{feed}/topology", any(topology)));
        let changed = with_state(at(Router::new(), "/_notibus/feeds/{feed}/reshard", any(reshard)));
        let rows = with_state(at(Router::new(), "/_notibus/feeds/notifications/rows", any(rows)));
        self.guarded(seen, Permission::Metrics)
            .merge(self.guarded(changed, Permission::Admin))
            .merge(self.guarded(rows, Permission::Updates))
    }
}

/// The history of a feed's shards, with `rows` also how many rows each has.
async fn topology(State(inner): Shared, PathSegments(feed): PathSegments<String>, parts: Parts) -> Answered {
    let counts = match reads(&parts, &["rows"])?.get("rows").map(String::as_str) {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(Failure::bad_request("The parameter rows is neither true nor false.")),
    };
    let entries = match instance_of(Some(&feed))? {
        None => entries(&inner.bus.feed(), counts).await,
        Some(instance) => entries(&inner.bus.changes().feed_of(instance), counts).await,
    };
    Ok(answer(StatusCode::OK, &json!({ "entries": entries.map_err(named)? })))
}

async fn entries<R: FeedRow>(feed: &Feed<R>, counts: bool) -> BusResult<Vec<Value>> {
    let mut entries = Vec::new();
    for entry in feed.topology().await? {
        let mut shown = object(&entry);
        if counts {
            let mut rows = Vec::with_capacity(entry.shards.len());
            for &shard in &entry.shards {
                rows.push(feed.shard_rows(shard).await?);
            }
            shown["rows"] = rows.into();
        }
        entries.push(shown);
    }
    Ok(entries)
}

/// An error that says which feed there is not: only admins, and those who may see the status, ask here.
fn named(error: Error) -> Failure {
    match error {
        Error::NoFeed { .. } => Failure::not_found(error.to_string()),
        error => error.into(),
    }
}

fn object(entry: &TopologyEntry) -> Value {
    serde_json::to_value(entry).expect("it has only plain fields")
}

/// Spreads a feed over another number of shards.
async fn reshard(
    State(inner): Shared,
    PathSegments(feed): PathSegments<String>,
    request: Request,
) -> Answered {
    let wanted: ReshardRequest = posted(&inner, request, "{\"shards\":8}").await?;
    let scheme = wanted.scheme.map(SchemeId);
    let entry = match instance_of(Some(&feed))? {
        None => inner.bus.feed().reshard(wanted.shards, scheme).await,
        Some(instance) => inner.bus.changes().feed_of(instance).reshard(wanted.shards, scheme).await,
    };
    let entry = entry.map_err(named)?;
    Ok(answer(StatusCode::OK, &object(&entry)))
}

/// A page of the notifications, as they are kept: `since` says behind what, `timeout` for how many milliseconds to wait for a row if
/// there is none.
async fn rows(State(inner): Shared, parts: Parts) -> Answered {
    let given = reads(&parts, &["since", "limit", "timeout"])?;
    let number = |name: &str, most: u64| match given.get(name).map(|text| text.parse::<u64>()) {
        None => Ok(None),
        Some(Ok(number)) if (1..=most).contains(&number) => Ok(Some(number)),
        Some(_) => Err(Failure::bad_request(format!("The parameter {name} is no number from 1 to {most}."))),
    };
    let limit = number("limit", PAGE_ROWS as u64)?.unwrap_or(PAGE_ROWS as u64) as usize;
    let most = u64::try_from(inner.options.timeout_max.as_millis()).unwrap_or(u64::MAX);
    let timeout = number("timeout", most)?.map(Duration::from_millis);
    let feed = inner.bus.feed();
    let cursor: Cursor = match given.get("since").map_or(Ok(Cursor::NOTHING.into()), |text| text.parse())? {
        Start::At(cursor) => cursor,
        Start::Now => feed.now().await?.into(),
    };
    let read = async || {
        let _turn = inner.reads.acquire().await.expect("the semaphore is never closed");
        Ok::<_, Failure>(feed.page(cursor, limit).await?)
    };
    let mut page = read().await?;
    if let Some(timeout) = timeout.filter(|_| page.rows.is_empty() && !page.more) {
        let _place = inner.admission.enter(&parts.extensions)?;
        wait(&inner, page.next, timeout).await;
        page = read().await?;
    }
    // A client that does not read holds no more than that of a feed.
    let kept = PageSize::new(limit).keep(page.rows.iter().map(|row| size_of_row(row)));
    if kept < page.rows.len() {
        page.rows.truncate(kept);
        (page.next, page.more) = (cut_at(cursor, page.next, page.rows[kept - 1].sequence), true);
    }
    let rows: Vec<_> = page.rows.iter().map(|row| &**row).collect();
    Ok(answer(StatusCode::OK, &json!({ "rows": rows, "next": page.next, "more": page.more })))
}

/// Waits until there is something behind `cursor`, or for so long, or until all feeds have to end.
async fn wait(inner: &Inner, cursor: Cursor, timeout: Duration) {
    let mut closing = inner.closing.subscribe();
    let mut rows = inner.dispatcher.subscribe(Filter::all()).since(cursor).stream();
    tokio::select! {
        _ = rows.next() => {}
        () = inner.env().sleep(timeout) => {}
        _ = closing.wait_for(|closing| *closing) => {}
    }
}
