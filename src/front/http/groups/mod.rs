//! `/_notibus/groups`: lists the groups of durable consumers and their lag; creates, resets, replays and deletes them.

mod dead_letters;
mod found;
mod parked;
mod replay;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{Method, StatusCode, request::Parts},
    routing::any,
};
use serde::Deserialize;
use serde_json::json;

use self::found::find;
use super::{
    Api, Failure, Inner,
    answer::{Answered, PathSegments, Shared, done, json as answer, routes},
    caller::Permission,
    manage::{check_reads, parameters, posted, reads},
};
use crate::{
    base::cursor::Start,
    roles::group::{Group, GroupOptions},
};

/// A group, as it is posted.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Posted {
    name: String,
    /// The feed that it follows: `notifications`, or the instance of a database for the changes of its documents.
    feed: Option<String>,
    /// Where it starts: `now`, `0`, or after a sequence.
    start: Option<String>,
    /// After how many milliseconds without a living member it is deleted.
    idle_expiry_ms: Option<u64>,
}

/// How to reset or delete a group.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupRequest {
    feed: Option<String>,
    /// Where to: `now`, `0`, or after a sequence.
    to: Option<String>,
    /// Also if members live.
    #[serde(default)]
    force: bool,
}

impl Api {
    /// The groups of the bus: `/_notibus/groups` and `…/{group}/lag` for those who may see the status; to create, reset, replay and
    /// delete them, what they could not work on, and what they have parked, for admins.
    pub fn groups(&self) -> Router {
        let at = "/_notibus/groups";
        let seen = routes(at, [("", any(groups)), ("/{group}/lag", any(lag))]);
        let managed = [
            ("/{group}/reset", any(reset)),
            ("/{group}/delete", any(delete)),
            ("/{group}/replay", any(replay::replay)),
            ("/{group}/dead_letters", any(dead_letters::list)),
            ("/{group}/dead_letters/delete", any(dead_letters::delete)),
            ("/{group}/parked", any(parked::list)),
            ("/{group}/parked/retry", any(parked::retry)),
            ("/{group}/parked/delete", any(parked::delete)),
        ];
        let [seen, managed] =
            [seen, routes(at, managed)].map(|router| router.with_state(Arc::clone(&self.inner)));
        self.guarded(seen, Permission::Metrics).merge(self.guarded(managed, Permission::Admin))
    }
}

/// Lists groups, or creates one.
async fn groups(State(inner): Shared, request: Request) -> Answered {
    if request.method() == Method::POST {
        return create(&inner, request).await;
    }
    let (parts, _) = request.into_parts();
    check_reads(&parts).map_err(|_| Failure::method_not_allowed("GET,HEAD,POST"))?;
    parameters(&parts, &[])?;
    Ok(answer(StatusCode::OK, &json!({ "groups": inner.bus.groups().await? })))
}

/// Creates a group: 201, or 200 if it is there already.
async fn create(inner: &Inner, request: Request) -> Answered {
    let asked: Posted = posted(inner, request, "{\"name\":\"mailer\"}").await?;
    let group = find(inner, &asked.name, asked.feed.as_deref())?;
    let start = asked.start.map_or(Ok(Start::Now), |start| start.parse())?;
    let idle_expiry = asked.idle_expiry_ms.map(Duration::from_millis);
    let is_new = group.create(&GroupOptions { start, idle_expiry }).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(answer(status, &json!({ "ok": true, "created": is_new })))
}

/// How far a group is behind in each shard.
async fn lag(State(inner): Shared, PathSegments(name): PathSegments<String>, parts: Parts) -> Answered {
    let given = reads(&parts, &["feed"])?;
    let group = find(&inner, &name, given.get("feed").map(String::as_str))?;
    Ok(answer(StatusCode::OK, &json!({ "lag": group.lag().await? })))
}

async fn changed(inner: &Inner, name: &str, request: Request) -> Result<(Group<()>, GroupRequest), Failure> {
    let asked: GroupRequest = posted(inner, request, "{\"to\":\"now\",\"force\":false}").await?;
    Ok((find(inner, name, asked.feed.as_deref())?, asked))
}

/// Sets a group to another position.
async fn reset(State(inner): Shared, PathSegments(name): PathSegments<String>, request: Request) -> Answered {
    let (group, asked) = changed(&inner, &name, request).await?;
    let to = asked.to.ok_or_else(|| Failure::bad_request("Say where to: \"to\":\"now\"."))?;
    group.reset(to.parse::<Start>()?, asked.force).await?;
    Ok(done())
}

async fn delete(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let (group, asked) = changed(&inner, &name, request).await?;
    if asked.to.is_some() {
        return Err(Failure::bad_request("A group that is deleted goes nowhere."));
    }
    group.delete(asked.force).await?;
    Ok(done())
}
