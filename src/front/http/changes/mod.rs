//! `/{db}/_changes` returns the documents of a database in the order of their edits, from all shards or from one. Related routes
//! list and change the shards.

mod counts;
mod ids;
mod query;
mod served;
mod shards;
mod source;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::Method,
    response::{IntoResponse, Response},
    routing::any,
};

use self::{
    counts::Counts,
    served::Served,
    source::{DocChanges, Shown},
};
use super::{
    Api, Caller, Databases, Failure,
    answer::{PathSegments, at, in_time, routes},
    caller::Permission,
    db_updates::{check_method, finish, is_known, not_modified, tag},
    query::{Mode, Query, Topic},
    stream::Stream,
};
use crate::{base::cursor::Start, roles::changes::Changes, state::keys::ShardId};

impl Api {
    /// Serves the changes of the documents in a layer's databases: `/{db}/_changes`, `/{db}/_changes/{shard}`,
    /// `/{db}/_changes/_meta`, and `/_changes_shards/{db}`, which reshards them.
    pub fn changes(&self, changes: &Changes, databases: Arc<dyn Databases>) -> Router {
        let (inner, changes) = (Arc::clone(&self.inner), changes.clone());
        let served = Arc::new(Served { inner, changes, databases, counts: Counts::default() });
        let feeds = routes(
            "/{db}/_changes",
            [("", any(whole)), ("/_meta", any(shards::meta)), ("/{shard}", any(one_shard))],
        );
        let shards = at(Router::new(), "/_changes_shards/{db}", any(shards::administer));
        let feeds = self.guarded(feeds.with_state(Arc::clone(&served)), Permission::Known);
        feeds.merge(self.guarded(shards.with_state(served), Permission::Admin))
    }
}

/// Answers with the changes of all shards.
async fn whole(
    State(served): State<Arc<Served>>,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Response {
    let began = in_time(&served.inner, "reading a feed", Box::pin(feed(&served, &name, None, request))).await;
    began.unwrap_or_else(IntoResponse::into_response)
}

/// Answers with the changes of one shard.
async fn one_shard(
    State(served): State<Arc<Served>>,
    PathSegments((name, shard)): PathSegments<(String, String)>,
    request: Request,
) -> Response {
    let answer = async {
        let shard = shard
            .parse()
            .map_err(|_| Failure::not_found("A shard is a number; _meta tells which there are."))?;
        in_time(
            &served.inner,
            "reading a feed",
            Box::pin(feed(&served, &name, Some(ShardId(shard)), request)),
        )
        .await
    };
    answer.await.unwrap_or_else(IntoResponse::into_response)
}

/// Makes the feed that the request asks for.
async fn feed(
    served: &Arc<Served>,
    name: &str,
    shard: Option<ShardId>,
    request: Request,
) -> Result<Response, Failure> {
    let (parts, body) = request.into_parts();
    check_method(&parts.method)?;
    let inner = &served.inner;
    let text = parts.uri.query().unwrap_or_default();
    let mut query = Query::parse(text, &parts.headers, &inner.options, Topic::Documents)?;
    let body = match parts.method {
        Method::POST => inner.body(&parts.headers, body).await?,
        _ => axum::body::Bytes::new(),
    };
    let wanted = query::wanted(&query, &body, &inner.bodies)?;
    let caller = parts.extensions.get::<Caller>();
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
            let shown_to = caller.filter(|_| lens.is_some()).map_or("", Caller::name);
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
