//! `/_db_updates` says which databases were created, updated and deleted.

use std::convert::Infallible;

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderValue, Method, StatusCode, header, request::Parts},
    response::Response,
    routing::any,
};
use futures_util::stream;
use xxhash_rust::xxh3::xxh3_128;

use super::{
    Api, Failure,
    answer::{Answered, Shared, at},
    caller::Permission,
    query::{Mode, Query, Topic},
    stream::Stream,
    updates::{Backwards, Updates},
};
use crate::{
    state::feed::{Feed, FeedRow},
    store::Isolation,
};

const METHODS: &str = "GET,HEAD,POST";

impl Api {
    /// Serves `/_db_updates` for admins and for callers with the role `_db_updates`.
    pub fn db_updates(&self) -> Router {
        self.guarded(at(Router::new(), "/_db_updates", any(feed)), Permission::Updates)
    }
}

/// Makes the feed that the request asks for.
async fn feed(State(inner): Shared, parts: Parts, body: Bytes) -> Answered {
    check_method(&parts.method)?;
    let text = parts.uri.query().unwrap_or_default();
    let mut query = Query::parse(text, &parts.headers, &inner.options, Topic::Databases)?;
    check_body(&parts.method, &body)?;
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
    let mut response = if query.descending {
        // This feed ends by itself.
        query.heartbeat = None;
        Stream::new(Backwards::new(&inner, &query), &query, context).into_response()
    } else {
        Stream::new(Updates::begin(&inner, &query).await?, &query, context).into_response()
    };
    finish(&mut response, &parts.method, tag);
    Ok(response)
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

/// Fails if a posted `body` has content: clients that post send nothing, or an empty object.
fn check_body(method: &Method, body: &[u8]) -> Result<(), Failure> {
    let text = body.trim_ascii();
    let is_empty = || serde_json::from_slice(text).is_ok_and(|map: serde_json::Map<_, _>| map.is_empty());
    if *method != Method::POST || text.is_empty() || is_empty() {
        return Ok(());
    }
    Err(Failure::bad_request("The body has to be empty, or {}."))
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
