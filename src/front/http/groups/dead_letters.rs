//! `/_notibus/groups/{group}/dead_letters`: rows that a group could not work on.

use axum::{
    extract::{Request, State},
    http::request::Parts,
};
use serde::Deserialize;

use super::found::{PAGE_ROWS, find_existing, listed_after, page};
use crate::{
    base::encoding::Sequence,
    front::http::{
        Failure,
        answer::{Answered, PathSegments, Shared, done},
        manage::posted,
    },
};

/// Which dead letters to delete: one or all.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeadLettersRequest {
    /// The feed that the group follows.
    feed: Option<String>,
    /// The one that stood there.
    seq: Option<String>,
    #[serde(default)]
    all: bool,
}

/// Lists a page of dead letters.
pub(super) async fn list(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    parts: Parts,
) -> Answered {
    let (group, after) = listed_after(&inner, &name, &parts).await?;
    let after = after.map_or(Ok(Sequence::MIN), |text| text.parse())?;
    Ok(page("dead_letters", &group.dead_letters(after, PAGE_ROWS).await?, |last| last.sequence))
}

/// Deletes one, or all.
pub(super) async fn delete(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let which: DeadLettersRequest = posted(&inner, request, "{\"seq\":\"…\"} or {\"all\":true}").await?;
    let group = find_existing(&inner, &name, which.feed.as_deref()).await?;
    match (which.seq, which.all) {
        (None, true) => group.delete_dead_letters().await?,
        (Some(seq), false) => {
            let sequence: Sequence = seq.parse()?;
            if !group.delete_dead_letter(sequence).await? {
                return Err(Failure::not_found(format!("there is no dead letter of {sequence}")));
            }
        }
        _ => return Err(Failure::bad_request("Say which: \"seq\", or \"all\":true.")),
    }
    Ok(done())
}
