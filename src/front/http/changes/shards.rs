//! `/{db}/_changes/_meta` lists the shards of a database's changes at a sequence. [`Served`] holds the state that the routes of a
//! layer's databases share.

use std::sync::Arc;

use axum::{
    extract::State,
    http::{StatusCode, request::Parts},
};

use serde_json::json;

use super::counts::Counts;
use crate::{
    base::{
        cursor::Start,
        event::{Db, DbName},
    },
    front::http::{
        Asked, Caller, Databases, Failure, Inner, Lens,
        answer::{Answered, PathSegments, json as answer, reads},
        api::caller,
        query::{Query, Topic},
    },
    roles::changes::Changes,
};

/// The state that the routes of a layer's databases share.
pub(super) struct Served {
    pub inner: Arc<Inner>,
    pub changes: Changes,
    pub databases: Arc<dyn Databases>,
    pub counts: Counts,
}

impl Served {
    /// Returns the database that has `name` now. Fails with 404 if there is none.
    pub async fn find(&self, name: &str) -> Result<Db, Failure> {
        let name = DbName::new(name).map_err(|_| Failure::no_database())?;
        let find = async |tx| self.databases.find(&tx, &name).await;
        self.inner.feed.context.db.run(find).await?.ok_or_else(Failure::no_database)
    }

    /// Like [`Served::find`]. Also fails with 403, in CouchDB's words, if `caller` may not read the database.
    pub async fn find_for(&self, name: &str, caller: &Caller) -> Result<Db, Failure> {
        let db = self.find(name).await?;
        if self.databases.may_read(caller, &db).await? {
            return Ok(db);
        }
        Err(Failure::not_readable())
    }

    /// Returns the lens of the layer for this request. Fails with 400 if the layer has none.
    pub async fn lens(&self, db: &Db, asked: &Asked) -> Result<Arc<dyn Lens>, Failure> {
        let lens = self.databases.lens(db, asked).await?;
        lens.ok_or_else(|| {
            Failure::bad_request(match asked.filter {
                Some(_) => "Supported filters: _doc_ids, _design",
                None => "The documents of this database have neither `conflicts` nor `attachments` to show.",
            })
        })
    }
}

/// Answers with the shards that were live at `since`.
pub(super) async fn meta(
    State(served): State<Arc<Served>>,
    PathSegments(name): PathSegments<String>,
    parts: Parts,
) -> Answered {
    reads(&parts, &["since"])?;
    let text = parts.uri.query().unwrap_or_default();
    let query = Query::parse(text, &parts.headers, &served.inner.options, Topic::Documents)?;
    let db = served.find_for(&name, &caller(&parts.extensions)).await?;
    let feed = served.changes.feed(&db);
    let since = match query.start {
        Start::Now => feed.now().await?.into(),
        Start::At(cursor) => cursor,
    };
    let entry = feed.topology_at(since).await?;
    let body = json!({
        "db_name": name,
        "shards": entry.shards,
        "first_seq": entry.first,
        "scheme": entry.scheme,
        "closed": entry.is_closed,
    });
    Ok(answer(StatusCode::OK, &body))
}
