//! `/_notibus/consumers`: lists consumers and how far they have come; creates, resets, pauses and deletes them, and shows what they have
//! deferred.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{Method, StatusCode, request::Parts},
    routing::any,
};
use serde::Deserialize;
use serde_json::json;

use super::{
    Api, Failure, Inner,
    answer::{Answered, PathSegments, Shared, done, json as answer, routes},
    caller::Permission,
    manage::{check_reads, instance_of, parameters, posted, reads},
};
use crate::{
    base::{cursor::Start, error::Error, filter::Filter},
    roles::consumer::{ConsumerHandle, ConsumerSettings},
    state::keys::ShardId,
};

/// How many deferred ids are listed at once.
const PAGE_IDS: usize = 1_000;

/// A consumer, as it is posted.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Posted {
    name: String,
    /// The feed that it follows: `notifications`, or the instance of a database for the changes of its documents.
    feed: Option<String>,
    /// A glob on the names of the databases that it wants.
    names: Option<String>,
    /// Where it starts: `now`, `0`, or after a sequence.
    start: Option<String>,
    /// After how many milliseconds without a member it is deleted.
    expiry_ms: Option<u64>,
}

/// How to reset or delete a consumer.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Forced {
    /// Where to: `now`, `0`, or after a sequence.
    to: Option<String>,
    /// Also while nodes are its members.
    #[serde(default)]
    force: bool,
}

/// Which ids are meant.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ids {
    /// One id.
    id: Option<String>,
    /// A glob on ids.
    filter: Option<String>,
    /// Only ids that are deferred.
    #[serde(default)]
    deferred: bool,
}

impl Api {
    /// The consumers of the bus: `/_notibus/consumers`, `…/{consumer}` and `…/{consumer}/lag` for those who may see the status; to create,
    /// reset, pause, resume and delete them, and what they have deferred, for admins.
    pub fn consumers(&self) -> Router {
        let at = "/_notibus/consumers";
        let seen = [("", any(consumers)), ("/{consumer}", any(show)), ("/{consumer}/lag", any(lag))];
        let managed = [
            ("/{consumer}/reset", any(reset)),
            ("/{consumer}/delete", any(delete)),
            ("/{consumer}/pause", any(pause)),
            ("/{consumer}/resume", any(resume)),
            ("/{consumer}/again", any(again)),
            ("/{consumer}/deferred", any(deferred)),
            ("/{consumer}/deferred/discard", any(discard)),
        ];
        let [seen, managed] =
            [routes(at, seen), routes(at, managed)].map(|router| router.with_state(Arc::clone(&self.inner)));
        self.guarded(seen, Permission::Metrics).merge(self.guarded(managed, Permission::Admin))
    }
}

fn find(inner: &Inner, name: &str) -> Result<ConsumerHandle, Failure> {
    Ok(inner.bus.consumer(name)?)
}

/// Lists consumers, or creates one.
async fn consumers(State(inner): Shared, request: Request) -> Answered {
    if request.method() == Method::POST {
        return create(&inner, request).await;
    }
    let (parts, _) = request.into_parts();
    check_reads(&parts).map_err(|_| Failure::method_not_allowed("GET,HEAD,POST"))?;
    parameters(&parts, &[])?;
    Ok(answer(StatusCode::OK, &json!({ "consumers": inner.bus.consumers().await? })))
}

/// Where a consumer starts, as it is posted.
fn start_of(text: &str) -> Result<Start, Failure> {
    let accepted = "say \"now\", \"0\" for all, or a sequence of 26 hexadecimal digits, to start behind it";
    text.parse().map_err(|error: Error| Failure::bad_request(format!("{error}: {accepted}.")))
}

/// Creates a consumer: 201, or 200 if it is there already.
async fn create(inner: &Inner, request: Request) -> Answered {
    let asked: Posted = posted(inner, request, "{\"name\":\"mailer\"}").await?;
    let filter = asked.names.map_or(Ok(Filter::all()), |names| Filter::glob(&names))?;
    let settings = ConsumerSettings::default()
        .documents(instance_of(asked.feed.as_deref())?)
        .filter(filter)
        .start(asked.start.as_deref().map_or(Ok(Start::Now), start_of)?)
        .expiry(asked.expiry_ms.map(Duration::from_millis));
    let is_new = find(inner, &asked.name)?.create(&settings).await?;
    let status = if is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok(answer(status, &json!({ "ok": true, "created": is_new })))
}

/// The state of a consumer, with what needs attention in words.
async fn show(State(inner): Shared, PathSegments(name): PathSegments<String>, parts: Parts) -> Answered {
    reads(&parts, &[])?;
    let consumer = find(&inner, &name)?;
    let (status, lag) = tokio::try_join!(consumer.status(), consumer.lag())?;
    let troubles = status.troubles(&lag);
    Ok(answer(StatusCode::OK, &json!({ "consumer": status, "lag": lag, "troubles": troubles })))
}

/// How far a consumer is behind in each shard.
async fn lag(State(inner): Shared, PathSegments(name): PathSegments<String>, parts: Parts) -> Answered {
    reads(&parts, &[])?;
    Ok(answer(StatusCode::OK, &json!({ "lag": find(&inner, &name)?.lag().await? })))
}

async fn forced(inner: &Inner, name: &str, request: Request) -> Result<(ConsumerHandle, Forced), Failure> {
    let asked: Forced = posted(inner, request, "{\"to\":\"now\",\"force\":false}").await?;
    Ok((find(inner, name)?, asked))
}

async fn reset(State(inner): Shared, PathSegments(name): PathSegments<String>, request: Request) -> Answered {
    let (consumer, asked) = forced(&inner, &name, request).await?;
    let to = asked.to.ok_or_else(|| Failure::bad_request("Say where to: \"to\":\"now\"."))?;
    consumer.reset(start_of(&to)?, asked.force).await?;
    Ok(done())
}

async fn delete(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let (consumer, asked) = forced(&inner, &name, request).await?;
    if asked.to.is_some() {
        return Err(Failure::bad_request("`to` has no meaning when a consumer is deleted."));
    }
    consumer.delete(asked.force).await?;
    Ok(done())
}

async fn pause(State(inner): Shared, PathSegments(name): PathSegments<String>, request: Request) -> Answered {
    let _: Forced = posted(&inner, request, "{}").await?;
    find(&inner, &name)?.pause().await?;
    Ok(done())
}

async fn resume(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let _: Forced = posted(&inner, request, "{}").await?;
    find(&inner, &name)?.resume().await?;
    Ok(done())
}

/// Has the consumer work on ids again.
async fn again(State(inner): Shared, PathSegments(name): PathSegments<String>, request: Request) -> Answered {
    let which: Ids = posted(&inner, request, "{\"filter\":\"shop/*\",\"deferred\":true}").await?;
    if which.id.is_some() {
        return Err(Failure::bad_request("Name ids by \"filter\", a glob."));
    }
    let ids = find(&inner, &name)?.again(which.filter.as_deref().unwrap_or("*"), which.deferred).await?;
    Ok(answer(StatusCode::ACCEPTED, &json!({ "ok": true, "ids": ids })))
}

/// Lists a page of deferred ids.
async fn deferred(State(inner): Shared, PathSegments(name): PathSegments<String>, parts: Parts) -> Answered {
    let given = reads(&parts, &["shard", "after"])?;
    let shard = given.get("shard").map(|shard| shard.parse::<u64>()).transpose();
    let shard = shard.map_err(|_| Failure::bad_request("`shard` is not a number."))?;
    let after = match (shard, given.get("after")) {
        (Some(shard), Some(id)) => Some((ShardId(shard), id.as_str())),
        (None, None) => None,
        _ => return Err(Failure::bad_request("`shard` and `after` belong together.")),
    };
    let ids = find(&inner, &name)?.deferred(after, PAGE_IDS).await?;
    let next = ids.last().filter(|_| ids.len() == PAGE_IDS);
    let next = next.map(|last| json!({ "shard": last.shard.to_string(), "after": last.id }));
    Ok(answer(StatusCode::OK, &json!({ "deferred": ids, "next": next })))
}

/// Gives up the work on a deferred id.
async fn discard(
    State(inner): Shared,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let which: Ids = posted(&inner, request, "{\"id\":\"shop/orders\"}").await?;
    let id = which.id.ok_or_else(|| Failure::bad_request("Say which: \"id\"."))?;
    if !find(&inner, &name)?.discard(id.as_bytes()).await? {
        return Err(Failure::not_found(format!("{id:?} is not deferred")));
    }
    Ok(done())
}
