//! `/{db}/_changes` returns the documents of a database in the order of their edits, from all shards or from one.

mod counts;
mod query;
mod shards;
mod source;

use std::sync::Arc;

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{Method, request::Parts},
    routing::any,
};

use self::{
    counts::Counts,
    shards::Served,
    source::{DocChanges, Shown},
};
use super::{
    Api, Databases, Failure,
    answer::{Answered, PathSegments, routes},
    api::caller,
    caller::Permission,
    db_updates::{check_method, finish, is_known, not_modified, tag},
    query::{Mode, Query, Topic},
    stream::Stream,
};
use crate::{base::cursor::Start, roles::changes::Changes, state::keys::ShardId};

impl Api {
    /// Serves the changes of the documents in a layer's databases: `/{db}/_changes`, `/{db}/_changes/{shard}` and
    /// `/{db}/_changes/_meta`.
    pub fn changes(&self, changes: &Changes, databases: Arc<dyn Databases>) -> Router {
        let (inner, changes) = (Arc::clone(&self.inner), changes.clone());
        let served = Arc::new(Served { inner, changes, databases, counts: Counts::default() });
        let feeds = routes(
            "/{db}/_changes",
            [("", any(whole)), ("/_meta", any(shards::meta)), ("/{shard}", any(one_shard))],
        );
        self.limited(feeds.with_state(served), Permission::Known)
    }
}

/// Answers with the changes of all shards.
async fn whole(
    served: State<Arc<Served>>,
    PathSegments(name): PathSegments<String>,
    parts: Parts,
    body: Bytes,
) -> Answered {
    feed(&served, &name, None, (parts, body)).await
}

/// Answers with the changes of one shard.
async fn one_shard(
    served: State<Arc<Served>>,
    PathSegments((name, shard)): PathSegments<(String, String)>,
    parts: Parts,
    body: Bytes,
) -> Answered {
    let shard =
        shard.parse().map_err(|_| Failure::not_found("A shard is a number; _meta tells which there are."))?;
    feed(&served, &name, Some(ShardId(shard)), (parts, body)).await
}

/// Makes the feed that the request asks for.
async fn feed(
    served: &Arc<Served>,
    name: &str,
    shard: Option<ShardId>,
    (parts, body): (Parts, Bytes),
) -> Answered {
    check_method(&parts.method)?;
    let inner = &served.inner;
    let text = parts.uri.query().unwrap_or_default();
    let mut query = Query::parse(text, &parts.headers, &inner.options, Topic::Documents)?;
    let body = if parts.method == Method::POST { body } else { Bytes::new() };
    let wanted = query::wanted(&query, &body, &inner.bodies)?;
    let caller = &caller(&parts.extensions);
    let db = served.find_for(name, caller).await?;
    let lens = match query::asked(&query, &body, caller) {
        None => None,
        Some(asked) => Some(served.lens(&db, &asked).await?),
    };
    if shard.is_some() && query.descending {
        return Err(Failure::bad_request("The rows of one shard come oldest first."));
    }
    let tag = match query.mode {
        Mode::Normal if shard.is_none() => {
            // What a layer shows may depend on the caller.
            let shown_to = if lens.is_some() { caller.name() } else { "" };
            Some(tag(&served.changes.feed(&db), &format!("{shown_to} {text}")).await?)
        }
        _ => None,
    };
    if let Some(tag) = &tag
        && is_known(&parts, tag)
    {
        return Ok(not_modified(tag));
    }

    let context = inner.feed_context(query.mode, &parts.extensions)?;
    if query.descending {
        // This feed ends by itself.
        query.heartbeat = None;
    }
    let since = match query.start {
        Start::Now => served.changes.feed(&db).now().await?.into(),
        Start::At(cursor) => cursor,
    };
    let shown = Shown { wanted, lens };
    let source = DocChanges::begin(served, db, shard, &query, shown, since).await?;
    let mut response = Stream::new(source, &query, context).into_response();
    finish(&mut response, &parts.method, tag);
    Ok(response)
}
