//! `/{db}/_changes` returns the documents of a database in the order of their edits, from all shards or one shard. `/{db}/_changes/_meta`
//! lists the shards at a sequence.

mod source;
mod wanted;

use std::sync::Arc;

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{Method, StatusCode, request::Parts},
    routing::get,
};
use serde_json::json;

use self::source::{Counts, DocChanges, Served, Shown};
use super::{
    Api, Databases, Failure,
    answer::{Answered, PathSegments, json as answer_json, parameters, routes},
    api::caller,
    caller::Permission,
    databases::Catalogue,
    query::{Mode, Query, Topic},
    stream::{METHODS, answer, tag},
};
use crate::{
    base::{
        cursor::{Cursor, Start},
        error::Result as BusResult,
    },
    roles::changes::{Change, Changes},
    state::{feed::Feed, keys::ShardId},
};

impl Api {
    /// Serves the changes of the documents in a layer's databases: `/{db}/_changes`, `/{db}/_changes/{shard}` and
    /// `/{db}/_changes/_meta`.
    pub fn changes(&self, changes: &Changes, databases: Arc<dyn Databases>) -> Router {
        let catalogue = Catalogue { inner: Arc::clone(&self.inner), databases };
        let served = Arc::new(Served { catalogue, changes: changes.clone(), counts: Counts::default() });
        let feeds = routes(
            "/{db}/_changes",
            [
                ("", METHODS, get(whole).post(whole)),
                ("/_meta", "GET,HEAD", get(meta)),
                ("/{shard}", METHODS, get(one_shard).post(one_shard)),
            ],
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
    let shard = shard.parse().map_err(|_| Failure::not_found("A shard is a number; _meta lists them."))?;
    feed(&served, &name, Some(ShardId(shard)), (parts, body)).await
}

/// Creates the feed that the request asks for.
async fn feed(
    served: &Arc<Served>,
    name: &str,
    shard: Option<ShardId>,
    (parts, body): (Parts, Bytes),
) -> Answered {
    let Catalogue { inner, databases } = &served.catalogue;
    let text = parts.uri.query().unwrap_or_default();
    let query = Query::parse(text, &parts.headers, &inner.options, Topic::Documents)?;
    let body = if parts.method == Method::POST { body } else { Bytes::new() };
    let wanted = wanted::wanted(&query, &body, &inner.bodies)?;
    let caller = &caller(&parts.extensions);
    let db = served.catalogue.find(name, caller).await?;
    let lens = match wanted::asked(&query, &body, caller) {
        None => None,
        Some(asked) => {
            let lens = databases.lens(&db, &asked).await?;
            Some(lens.ok_or_else(|| {
                Failure::bad_request(match asked.filter {
                    Some(_) => "Supported filters: _doc_ids, _design",
                    None => {
                        "The documents of this database have neither `conflicts` nor `attachments` to show."
                    }
                })
            })?)
        }
    };
    if shard.is_some() && query.descending {
        return Err(Failure::bad_request("The rows of a single shard come oldest first."));
    }
    let feed = served.changes.feed(&db);
    let tag = match query.mode {
        Mode::Normal if shard.is_none() => {
            // What a layer shows may depend on the caller.
            let shown_to = if lens.is_some() { caller.name() } else { "" };
            Some(tag(&feed, &format!("{shown_to} {text}")).await?)
        }
        _ => None,
    };
    let begin = async {
        let since = begin_of(&feed, query.start).await?;
        DocChanges::begin(served, db, shard, &query, Shown { wanted, lens }, since).await
    };
    answer(inner, &parts, &query, tag, begin).await
}

/// Returns the cursor of a reader that begins at `start`.
async fn begin_of(feed: &Feed<Change>, start: Start) -> BusResult<Cursor> {
    Ok(match start {
        Start::Now => feed.now().await?.into(),
        Start::At(cursor) => cursor,
    })
}

/// Answers with the shards that were live at `since`.
async fn meta(
    State(served): State<Arc<Served>>,
    PathSegments(name): PathSegments<String>,
    parts: Parts,
) -> Answered {
    parameters(&parts, &["since"])?;
    let text = parts.uri.query().unwrap_or_default();
    let query = Query::parse(text, &parts.headers, &served.catalogue.inner.options, Topic::Documents)?;
    let db = served.catalogue.find(&name, &caller(&parts.extensions)).await?;
    let feed = served.changes.feed(&db);
    let since = begin_of(&feed, query.start).await?;
    let entry = feed.topology_at(since).await?;
    let body = json!({
        "db_name": name,
        "shards": entry.shards,
        "first_seq": entry.first,
        "scheme": entry.scheme,
        "closed": entry.is_closed,
    });
    Ok(answer_json(StatusCode::OK, &body))
}
