//! `/{db}/_changes/_meta` lists the shards of a database's changes at a sequence. `/_changes_shards/{db}` shows and changes how
//! many there are.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::{Method, StatusCode, request::Parts},
};

use super::served::Served;
use crate::{
    base::cursor::Start,
    front::http::{
        Caller, Failure,
        answer::{Answered, PathSegments, json},
        manage::{ReshardRequest, check_page, parameters, reads},
        query::{Query, Topic},
    },
    state::{feed::TopologyEntry, routing::SchemeId},
};

/// Answers with the shards that were live at `since`.
pub(super) async fn meta(
    State(served): State<Arc<Served>>,
    PathSegments(name): PathSegments<String>,
    parts: Parts,
) -> Answered {
    reads(&parts, &["since"])?;
    let text = parts.uri.query().unwrap_or_default();
    let query = Query::parse(text, &parts.headers, &served.inner.options, Topic::Documents)?;
    let db = served.find_for(&name, parts.extensions.get::<Caller>()).await?;
    let feed = served.changes.feed(&db);
    let since = match query.start {
        Start::Now => feed.now().await?.into(),
        Start::At(cursor) => cursor,
    };
    Ok(json(StatusCode::OK, &entry(&name, &feed.topology_at(since).await?)))
}

/// Shows or changes the number of shards.
pub(super) async fn administer(
    State(served): State<Arc<Served>>,
    PathSegments(name): PathSegments<String>,
    request: Request,
) -> Answered {
    let (parts, body) = request.into_parts();
    parameters(&parts, &[])?;
    match parts.method {
        Method::GET | Method::HEAD => {
            let topology = served.changes.feed(&served.find(&name).await?).topology().await?;
            let current = topology.last().expect("a topology is never empty");
            Ok(json(StatusCode::OK, &entry(&name, current)))
        }
        Method::PUT => {
            check_page(&parts)?;
            let body = served.inner.body(&parts.headers, body).await?;
            let asked: ReshardRequest = serde_json::from_slice(&body).map_err(|error| {
                Failure::bad_request(format!("The body has to be as {{\"shards\":4}}: {error}"))
            })?;
            let feed = served.changes.feed(&served.find(&name).await?);
            let written = feed.reshard(asked.shards, asked.scheme.map(SchemeId)).await?;
            Ok(json(StatusCode::CREATED, &entry(&name, &written)))
        }
        _ => Err(Failure::method_not_allowed("GET,HEAD,PUT")),
    }
}

fn entry(name: &str, entry: &TopologyEntry) -> serde_json::Value {
    serde_json::json!({
        "db_name": name,
        "shards": entry.shards,
        "first_seq": entry.first,
        "scheme": entry.scheme,
        "closed": entry.is_closed,
    })
}
