//! `/_db_updates` says which databases were created, updated and deleted.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{HeaderValue, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::any,
};
use futures_util::stream;
use xxhash_rust::xxh3::xxh3_128;

use super::{
    Api, Failure, Inner,
    answer::{at, in_time},
    caller::Permission,
    position::Position,
    query::{Mode, Query, Topic},
    stream::{Stream, UNBUFFERED},
    updates::{Backwards, Scope, Updates},
};
use crate::{
    base::cursor::{Cursor, Start},
    state::feed::{Feed, FeedRow},
    store::Isolation,
};

const METHODS: &str = "GET,HEAD,POST";

impl Api {
    /// Serves `/_db_updates` for admins and for callers with the role `_db_updates`.
    pub fn db_updates(&self) -> Router {
        let router = at(Router::new(), "/_db_updates", any(answer));
        self.guarded(router.with_state(Arc::clone(&self.inner)), Permission::Updates)
    }
}

async fn answer(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let began = in_time(&inner, "reading a feed", Box::pin(feed(&inner, request))).await;
    began.unwrap_or_else(IntoResponse::into_response)
}

/// Makes the feed that the request asks for.
async fn feed(inner: &Arc<Inner>, request: Request) -> Result<Response, Failure> {
    let (parts, body) = request.into_parts();
    check_method(&parts.method)?;
    if !inner.options.keeps_db_updates {
        return Err(Failure::no_database());
    }
    let text = parts.uri.query().unwrap_or_default();
    let mut query = Query::parse(text, &parts.headers, &inner.options, Topic::Databases)?;
    check_body(inner, &parts, body).await?;

    let tag = match query.mode {
        Mode::Normal => Some(tag(&inner.feed, text).await?),
        _ => None,
    };
    if let Some(tag) = &tag
        && is_known(&parts, tag)
    {
        return Ok(not_modified(tag));
    }
    let context = inner.feed_context(query.mode, &parts.extensions)?;
    let is_live = query.mode != Mode::Normal && !query.descending;
    let scope = Scope { kinds: query.types, limit: query.limit, is_live };
    let mut response = if query.descending {
        // This feed ends by itself.
        query.heartbeat = None;
        let source = Backwards::new(inner, scope);
        Stream::new(source, &query, context).into_response()
    } else {
        let source = match query.start {
            Start::Now => Updates::from_now(inner, scope).await?,
            Start::At(cursor) => {
                let start = Position { cursor, part: query.part };
                Updates::after(inner, scope, start).await?
            }
        };
        Stream::new(source, &query, context).into_response()
    };
    if parts.method == Method::GET && is_shareable(&query) {
        share(&mut response, inner.options.longpoll_max_age);
    }
    finish(&mut response, &parts.method, tag);
    Ok(response)
}

/// Returns whether all requests with this address wait for the same rows: the address has to name a position, and the position must
/// not depend on the present time.
fn is_shareable(query: &Query) -> bool {
    let is_bound = matches!(query.start, Start::At(cursor) if cursor != Cursor::NOTHING);
    query.mode == Mode::Longpoll && is_bound && !query.descending
}

/// Lets proxies keep `response` for this long, if a time is configured.
fn share(response: &mut Response, age: Option<Duration>) {
    let Some(age) = age else { return };
    let value = format!("public, max-age={}", age.as_secs().max(1));
    let value = HeaderValue::from_str(&value).expect("numbers are visible");
    response.headers_mut().insert(header::CACHE_CONTROL, value);
    // nginx caches only what it buffers.
    response.headers_mut().remove(UNBUFFERED);
}

/// Removes the body from an answer to HEAD, and adds the tag.
pub(super) fn finish(response: &mut Response, method: &Method, tag: Option<HeaderValue>) {
    if *method == Method::HEAD {
        // The answer to GET has a body of unknown length, so this one has, too: an empty body would say that the length is 0.
        *response.body_mut() = Body::from_stream(stream::empty::<Result<Bytes, Infallible>>());
    }
    if let Some(tag) = tag {
        response.headers_mut().insert(header::ETAG, tag);
    }
}

/// Fails if feeds do not have this method.
pub(super) fn check_method(method: &Method) -> Result<(), Failure> {
    match *method {
        Method::GET | Method::HEAD | Method::POST => Ok(()),
        _ => Err(Failure::method_not_allowed(METHODS)),
    }
}

/// Fails if `body` has content: clients that post send nothing, or an empty object.
async fn check_body(inner: &Inner, parts: &Parts, body: Body) -> Result<(), Failure> {
    if parts.method != Method::POST {
        return Ok(());
    }
    let bad = || Failure::bad_request("The body has to be empty, or {}.");
    let bytes = inner.body(&parts.headers, body).await?;
    let text = bytes.trim_ascii();
    let is_empty = || serde_json::from_slice(text).is_ok_and(|map: serde_json::Map<_, _>| map.is_empty());
    if text.is_empty() || is_empty() { Ok(()) } else { Err(bad()) }
}

/// Returns the entity tag of the answer to the query `text`. It depends on the last row of the feed, which every change moves, and
/// on the horizon. The tag is weak, because one position may have several texts.
pub(super) async fn tag<R: FeedRow>(feed: &Feed<R>, text: &str) -> Result<HeaderValue, Failure> {
    let raw = feed.raw();
    let state = async |tx| {
        let horizon = raw.horizon(&tx, Isolation::Snapshot);
        let (last, horizon) = tokio::join!(raw.last_row(&tx), horizon);
        Ok((last?, horizon?))
    };
    let (last, horizon) = feed.context.db.run(state).await?;
    let hash = xxh3_128(format!("{last:?} {horizon} {text}").as_bytes());
    Ok(HeaderValue::from_str(&format!("W/\"{hash:032x}\"")).expect("hexadecimal digits are visible"))
}

/// Returns whether the client already has the answer with this tag.
pub(super) fn is_known(parts: &Parts, tag: &HeaderValue) -> bool {
    // Clients may take the tag for a strong one, and omit the prefix that makes it weak.
    let bare = |tag: &str| tag.strip_prefix("W/").unwrap_or(tag).to_owned();
    let tag = bare(tag.to_str().unwrap_or_default());
    let known = parts.headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut known = known.flat_map(|value| value.split(',').map(str::trim));
    parts.method != Method::POST && known.any(|known| known == "*" || bare(known) == tag)
}

/// Makes the answer to a client that already has the answer with this tag.
pub(super) fn not_modified(tag: &HeaderValue) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("must-revalidate"));
    headers.insert(header::ETAG, tag.clone());
    response
}
