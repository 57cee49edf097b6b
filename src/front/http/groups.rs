//! `/_notibus/groups` creates groups of durable consumers. `/_notibus/status` lists the groups, and says how far each is behind.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{Method, StatusCode, header},
    response::{IntoResponse, Response},
    routing::any,
};
use serde::Deserialize;

use super::{
    Api, Failure, Inner,
    answer::{at, json},
    caller::Right,
};
use crate::{
    base::{cursor::Start, error::Error},
    roles::group::GroupOptions,
};

/// A group, as a client posts it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Posted {
    name: String,
    /// The feed that the group follows: `notifications`, or the instance of a database for the changes of its documents.
    feed: Option<String>,
    /// Where the group starts: `now`, `0`, or a sequence.
    start: Option<String>,
    /// After how many milliseconds without a living member the group is deleted.
    idle_expiry_ms: Option<u64>,
}

impl Api {
    /// Serves `/_notibus/groups`, for admins only.
    pub fn groups(&self) -> Router {
        let router = at(Router::new(), "/_notibus/groups", any(answer));
        self.guarded(router.with_state(Arc::clone(&self.inner)), Right::Admin)
    }
}

async fn answer(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    create(&inner, request).await.unwrap_or_else(IntoResponse::into_response)
}

/// Creates a group. Answers 201, or 200 if the group exists already.
async fn create(inner: &Inner, request: Request) -> Result<Response, Failure> {
    let (parts, body) = request.into_parts();
    if parts.method != Method::POST {
        return Err(Failure::method_not_allowed("POST"));
    }
    // Any page can make a browser send requests, even to a server that only this machine can reach.
    if parts.headers.contains_key(header::ORIGIN) {
        let reason = "A web page may not create groups.";
        return Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", reason));
    }
    let body = inner.body(&parts.headers, body).await?;
    let posted: Posted = serde_json::from_slice(&body).map_err(|error| {
        Failure::bad_request(format!("The body has to be as {{\"name\":\"mailer\"}}: {error}"))
    })?;
    let bad = |error: Error| Failure::bad_request(error.to_string());
    let instance = match posted.feed.as_deref() {
        None | Some("notifications") => None,
        Some(instance) => Some(instance.parse().map_err(bad)?),
    };
    let start = posted.start.map_or(Ok(Start::Now), |start| start.parse()).map_err(bad)?;
    let idle_expiry = posted.idle_expiry_ms.map(Duration::from_millis);
    let group = inner.bus.any_group(instance, &posted.name).map_err(bad)?;
    let is_new = group.create(&GroupOptions { start, idle_expiry }).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(json(status, &serde_json::json!({ "ok": true, "created": is_new })))
}
