//! `/_notibus/groups/{group}/parked`: databases, or documents, with which a group's work has failed too often.

use axum::{
    extract::{Request, State},
    http::{StatusCode, request::Parts},
};
use serde::Deserialize;
use serde_json::json;

use super::found::{PAGE_ROWS, find_existing, listed_after, page};
use crate::{
    front::http::{
        Failure, Inner,
        answer::{Answered, PathSegments, Shared, done, json as answer},
        manage::posted,
    },
    roles::group::Group,
};

/// What to try again, or to drop.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ParkedRequest {
    /// The feed that the group follows.
    feed: Option<String>,
    /// The name of the database, or the id of the document.
    id: Option<String>,
}

/// Lists a page of parked ids.
pub(super) async fn list(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    parts: Parts,
) -> Answered {
    let (group, after) = listed_after(&inner, &name, &parts).await?;
    Ok(page("parked", &group.parked(&after.unwrap_or_default(), PAGE_ROWS).await?, |last| &last.id))
}

/// The group of a request to change something, and of which id.
async fn changed(
    inner: &Inner,
    name: &str,
    request: Request,
) -> Result<(Group<()>, Option<String>), Failure> {
    let which: ParkedRequest = posted(inner, request, "{\"id\":\"shop/orders\"}").await?;
    Ok((find_existing(inner, name, which.feed.as_deref()).await?, which.id))
}

/// Has all of them tried again soon.
pub(super) async fn retry(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let (group, id) = changed(&inner, &name, request).await?;
    if id.is_some() {
        return Err(Failure::bad_request("All are tried again; there is no choice of one."));
    }
    Ok(answer(StatusCode::ACCEPTED, &json!({ "ok": true, "ids": group.retry_parked().await? })))
}

/// Drops what waits of one.
pub(super) async fn delete(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let (group, id) = changed(&inner, &name, request).await?;
    let id = id.ok_or_else(|| Failure::bad_request("Say which: \"id\"."))?;
    if !group.delete_parked(&id).await? {
        return Err(Failure::not_found(format!("nothing is parked of {id:?}")));
    }
    Ok(done())
}
