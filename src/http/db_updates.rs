//! `/_db_updates`: which databases were created, updated and deleted.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header},
    response::{IntoResponse, Response},
    routing::any,
};
use xxhash_rust::xxh3::xxh3_128;

use super::{
    Api, Failure, Inner,
    query::{Mode, Query, Start},
    stream::{Stream, respond},
    updates::{Backwards, Updates},
};
use crate::store::Isolation;

/// The methods of feeds.
const METHODS: &str = "GET,HEAD,POST";

impl Api {
    /// `/_db_updates`, for admins.
    pub fn db_updates(&self) -> Router {
        self.guarded(Router::new().route("/_db_updates", any(answer)))
    }
}

/// Answers.
async fn answer(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    feed(&inner, request).await.unwrap_or_else(IntoResponse::into_response)
}

/// The feed that is asked for.
async fn feed(inner: &Arc<Inner>, request: Request) -> Result<Response, Failure> {
    let (parts, body) = request.into_parts();
    check_method(&parts.method)?;
    if !inner.options.keeps_db_updates {
        return Err(Failure::no_database());
    }
    let text = parts.uri.query().unwrap_or_default();
    let mut query = Query::parse(text, &parts.headers, &inner.options)?;
    check_body(&parts.method, body).await?;

    let tag = if query.mode == Mode::Normal { Some(tag(inner, text).await?) } else { None };
    if let Some(tag) = &tag
        && parts.method != Method::POST
        && matches(&parts.headers, tag)
    {
        let mut response = respond(query.mode.into(), Body::empty());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response.headers_mut().remove(header::CONTENT_TYPE);
        response.headers_mut().insert(header::ETAG, tag.clone());
        return Ok(response);
    }

    let around = inner.surroundings(&parts.extensions)?;
    let is_live = query.mode != Mode::Normal && !query.descending;
    let mut response = if query.descending {
        // It ends by itself.
        query.heartbeat = None;
        let since = match query.start {
            Start::Now => None,
            Start::After(seq) => Some(seq),
        };
        let source = Backwards::new(inner, query.types, since).await?;
        Stream::new(source, &query, around).into_response()
    } else {
        let source = match query.start {
            Start::Now => Updates::from_now(inner, query.types, is_live).await?,
            Start::After(seq) => Updates::after(inner, query.types, seq, is_live).await?,
        };
        Stream::new(source, &query, around).into_response()
    };
    if parts.method == Method::HEAD {
        *response.body_mut() = Body::empty();
    }
    if let Some(tag) = tag {
        response.headers_mut().insert(header::ETAG, tag);
    }
    Ok(response)
}

/// Fails if a feed has no such method.
pub(super) fn check_method(method: &Method) -> Result<(), Failure> {
    match *method {
        Method::GET | Method::HEAD | Method::POST => Ok(()),
        _ => Err(Failure::method_not_allowed(METHODS)),
    }
}

/// Fails if `body` says something: clients that post send nothing, or an empty object.
async fn check_body(method: &Method, body: Body) -> Result<(), Failure> {
    if *method != Method::POST {
        return Ok(());
    }
    let bad = || Failure::bad_request("The body has to be empty, or {}.");
    let bytes = to_bytes(body, 1_024).await.map_err(|_| bad())?;
    let text = bytes.trim_ascii();
    let is_empty = || serde_json::from_slice(text).is_ok_and(|map: serde_json::Map<_, _>| map.is_empty());
    if text.is_empty() || is_empty() { Ok(()) } else { Err(bad()) }
}

/// What the answer to the query `text` depends on, as an entity tag, a weak one because positions
/// may be told in several ways: the last row of the feed, which every change moves, and
/// what was dropped.
async fn tag(inner: &Inner, text: &str) -> Result<HeaderValue, Failure> {
    let feed = inner.feed.raw();
    let state = async |tx| {
        let horizon = feed.horizon(&tx, Isolation::Snapshot);
        let (last, horizon) = tokio::join!(feed.last_row(&tx), horizon);
        Ok((last?, horizon?))
    };
    let (last, horizon) = inner.feed.context.db.run(state).await?;
    let hash = xxh3_128(format!("{last:?} {horizon} {text}").as_bytes());
    Ok(HeaderValue::from_str(&format!("W/\"{hash:032x}\"")).expect("hexadecimal digits are visible"))
}

/// Whether the client has what `tag` stands for.
fn matches(headers: &HeaderMap, tag: &HeaderValue) -> bool {
    let tag = tag.to_str().unwrap_or_default();
    headers
        .get_all(header::IF_NONE_MATCH)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|known| known.split(',').map(str::trim).any(|known| known == "*" || known == tag))
}
