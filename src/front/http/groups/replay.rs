//! `/_notibus/groups/{group}/replay`: gives a group rows again that it has worked on already.

use axum::{
    extract::{Request, State},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::json;

use super::found::find;
use crate::{
    base::filter::glob_matcher,
    front::http::{
        answer::{Answered, PathSegments, Shared, json as answer},
        manage::posted,
    },
};

/// How many pages of rows a request reads at most, so that it is answered soon.
const PAGES_MAX: usize = 20;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReplayRequest {
    /// The feed that the group follows.
    feed: Option<String>,
    /// A glob on the names of databases, or on the ids of documents. Without it all rows are meant.
    filter: Option<String>,
    /// The `next` of the answer before.
    after: Option<String>,
}

/// Replays a part: the answer says how many rows wait for consumers because of it, and where the next request goes on.
pub(super) async fn replay(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let wanted: ReplayRequest = posted(&inner, request, "{\"filter\":\"eu/*\"}").await?;
    let group = find(&inner, &name, wanted.feed.as_deref())?;
    let glob = wanted.filter.as_deref().map(glob_matcher).transpose()?;
    let wants = |id: &str| glob.as_ref().is_none_or(|glob| glob.is_match(id));
    let mut next = wanted.after.as_deref().map(str::parse).transpose()?;
    let mut rows = 0;
    for _ in 0..PAGES_MAX {
        let page = group.replay_page_of_ids(next, wants).await?;
        (rows, next) = (rows + page.rows, page.next);
        if next.is_none() || page.is_full {
            break;
        }
    }
    let next = next.map(|next| next.to_string());
    Ok(answer(StatusCode::ACCEPTED, &json!({ "ok": true, "rows": rows, "next": next })))
}
