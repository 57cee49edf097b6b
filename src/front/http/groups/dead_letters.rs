//! `/_notibus/groups/{group}/dead_letters`: rows that a group could not work on.

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
    base::encoding::Sequence,
    front::http::{
        Failure, Inner,
        answer::json as answer,
        manage::{check_changes, parameters, posted},
    },
};

/// Which ones to delete: one or all.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeadLettersRequest {
    /// The feed that the group follows.
    feed: Option<String>,
    /// The one that stood there.
    seq: Option<String>,
    /// All of them.
    #[serde(default)]
    all: bool,
}

/// A page of them.
pub(super) async fn list(
    State(inner): State<Arc<Inner>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let (parts, _) = request.into_parts();
    let listed = async {
        let (group, after) = looked_at(&inner, &name, &parts).await?;
        let after = after.map_or(Ok(Sequence::MIN), |text| text.parse())?;
        let page = group.dead_letters(after, PAGE_ROWS).await?;
        let next = page.last().filter(|_| page.len() == PAGE_ROWS);
        let next = next.map_or(Value::Null, |last| json!(last.sequence));
        Ok(answer(StatusCode::OK, &json!({ "dead_letters": page, "next": next })))
    };
    listed.await.unwrap_or_else(|failure: Failure| failure.into_response())
}

/// Deletes one, or all.
pub(super) async fn delete(
    State(inner): State<Arc<Inner>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let deleted = async {
        check_changes(&parts)?;
        parameters(&parts, &[])?;
        let wanted: DeadLettersRequest =
            posted(&inner, &parts, body, "{\"seq\":\"…\"} or {\"all\":true}").await?;
        let group = find(&inner, &name, wanted.feed.as_deref())?;
        group.status().await?;
        match (wanted.seq, wanted.all) {
            (None, true) => group.delete_dead_letters().await?,
            (Some(seq), false) => {
                let sequence: Sequence = seq.parse()?;
                if !group.delete_dead_letter(sequence).await? {
                    return Err(Failure::not_found(format!("there is no dead letter of {sequence}")));
                }
            }
            _ => return Err(Failure::bad_request("Say which: \"seq\", or \"all\":true.")),
        }
        Ok(answer(StatusCode::OK, &json!({ "ok": true })))
    };
    deleted.await.unwrap_or_else(|failure: Failure| failure.into_response())
}
