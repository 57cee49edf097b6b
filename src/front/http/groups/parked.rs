//! `/_notibus/groups/{group}/parked`: databases, or documents, with which a group's work has failed too often.

use std::sync::Arc;

use axum::{
    extract::{Path, Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::found::{PAGE_ROWS, find, looked_at};
use crate::{
    front::http::{
        Failure, Inner,
        answer::json as answer,
        manage::{check_changes, parameters, posted},
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
    State(inner): State<Arc<Inner>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let (parts, _) = request.into_parts();
    let listed = async {
        let (group, after) = looked_at(&inner, &name, &parts).await?;
        let page = group.parked(&after.unwrap_or_default(), PAGE_ROWS).await?;
        let next = page.last().filter(|_| page.len() == PAGE_ROWS);
        let next = next.map_or(Value::Null, |last| json!(last.id));
        Ok(answer(StatusCode::OK, &json!({ "parked": page, "next": next })))
    };
    listed.await.unwrap_or_else(|failure: Failure| failure.into_response())
}

/// The group of a request to change something, which there has to be, and of which id.
async fn requested(
    inner: &Inner,
    name: &str,
    request: Request,
) -> Result<(Group<()>, Option<String>), Failure> {
    let (parts, body) = request.into_parts();
    check_changes(&parts)?;
    parameters(&parts, &[])?;
    let wanted: ParkedRequest = posted(inner, &parts, body, "{\"id\":\"shop/orders\"}").await?;
    let group = find(inner, name, wanted.feed.as_deref())?;
    group.status().await?;
    Ok((group, wanted.id))
}

/// Has all of them tried again soon.
pub(super) async fn retry(
    State(inner): State<Arc<Inner>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let asked = async {
        let (group, id) = requested(&inner, &name, request).await?;
        if id.is_some() {
            return Err(Failure::bad_request("All are tried again; there is no choice of one."));
        }
        Ok(answer(StatusCode::ACCEPTED, &json!({ "ok": true, "ids": group.retry_parked().await? })))
    };
    asked.await.unwrap_or_else(|failure: Failure| failure.into_response())
}

/// Drops what waits of one.
pub(super) async fn delete(
    State(inner): State<Arc<Inner>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let dropped = async {
        let (group, id) = requested(&inner, &name, request).await?;
        let id = id.ok_or_else(|| Failure::bad_request("Say which: \"id\"."))?;
        if !group.delete_parked(&id).await? {
            return Err(Failure::not_found(format!("nothing is parked of {id:?}")));
        }
        Ok(answer(StatusCode::OK, &json!({ "ok": true })))
    };
    dropped.await.unwrap_or_else(|failure: Failure| failure.into_response())
}
