//! `/_up`, `/_all_dbs` and `/{db}`, which CouchDB's clients request before they follow a server. The answers have what this server
//! knows.

use std::sync::Arc;

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::State,
    http::{StatusCode, request::Parts},
    routing::get,
};
use futures_util::stream;
use serde_json::json;

use super::{
    Api, Caller, Databases, Failure, Inner,
    answer::{Answered, PathSegments, at, json as answer, parameters},
    caller::Permission,
    page::PageSize,
    stream::respond,
    wire_format::{WireFormat, write_string},
};
use crate::base::{error::Result, event::DbName};

/// The state that the routes share.
struct Catalogue {
    inner: Arc<Inner>,
    databases: Arc<dyn Databases>,
}

impl Catalogue {
    /// Returns the next names after `after`, as [`Databases::names`] does.
    async fn names(&self, after: Option<&DbName>) -> Result<Option<Vec<DbName>>> {
        let _turn = self.inner.reads.acquire().await.expect("the semaphore is never closed");
        self.databases.names(after).await
    }
}

impl Api {
    /// Serves `/_up` for everyone, `/_all_dbs` for callers that may read `_db_updates`, and `/{db}` of `databases` for callers that
    /// may read the database. It is for servers without a layer; a layer has these routes itself.
    pub fn catalogue(&self, databases: Arc<dyn Databases>) -> Router {
        let catalogue = Arc::new(Catalogue { inner: Arc::clone(&self.inner), databases });
        let routed = |path, methods| {
            let allowed = async || Failure::method_not_allowed("GET,HEAD");
            let router = at(Router::new(), path, methods).method_not_allowed_fallback(allowed);
            router.with_state(Arc::clone(&catalogue))
        };
        let up = async || answer(StatusCode::OK, &json!({ "status": "ok", "seeds": {} }));
        self.counted(routed("/_up", get(up)))
            .merge(self.limited(routed("/_all_dbs", get(list)), Permission::Updates))
            .merge(self.limited(routed("/{db}", get(info)), Permission::Known))
    }
}

/// Answers with the names of all databases. CouchDB's parameters for a part of them are refused.
async fn list(State(catalogue): State<Arc<Catalogue>>, parts: Parts) -> Answered {
    parameters(&parts, &[])?;
    let page = catalogue.names(None).await?.ok_or_else(|| Failure::not_found("missing"))?;
    let listing = Listing { catalogue, page, last: None, mark: b'[', is_over: false };
    Ok(respond(WireFormat::Array, Body::from_stream(stream::try_unfold(listing, Listing::next))))
}

/// A list of names that is being sent. It reads a page when the client has room for it, so a client that does not read holds one
/// page of some 64 KB, and its text, however many databases there are and however long their names.
struct Listing {
    catalogue: Arc<Catalogue>,
    /// The names that were read and not sent.
    page: Vec<DbName>,
    /// The last name that was sent.
    last: Option<DbName>,
    /// The character before the next name.
    mark: u8,
    is_over: bool,
}

impl Listing {
    /// Returns the next bytes of the list. A failure cuts the connection off.
    async fn next(mut self) -> Result<Option<(Bytes, Self)>> {
        if self.is_over {
            return Ok(None);
        }
        if self.page.is_empty() {
            self.page = self.catalogue.names(self.last.as_ref()).await?.unwrap_or_default();
        }
        let kept = PageSize::new(self.page.len()).keep(self.page.iter().map(|name| name.as_str().len()));
        // The rest is read again.
        self.page.truncate(kept);
        let mut bytes = Vec::new();
        for name in &self.page {
            bytes.push(self.mark);
            write_string(&mut bytes, name.as_str());
            self.mark = b',';
        }
        if self.page.is_empty() {
            self.is_over = true;
            bytes.extend_from_slice(if self.mark == b'[' { b"[]\n" } else { b"]\n" });
        }
        self.last = self.page.pop().or(self.last);
        self.page = Vec::new();
        Ok(Some((bytes.into(), self)))
    }
}

/// Answers with the properties of a database that the bus knows.
async fn info(
    State(catalogue): State<Arc<Catalogue>>,
    PathSegments(name): PathSegments<String>,
    Extension(caller): Extension<Caller>,
) -> Answered {
    let name = DbName::new(&name).map_err(|_| Failure::no_database())?;
    let databases = &catalogue.databases;
    let find = async |tx| databases.find(&tx, &name).await;
    let db = catalogue.inner.feed.context.db.run(find).await?.ok_or_else(Failure::no_database)?;
    if !databases.may_read(&caller, &db).await? {
        return Err(Failure::not_readable());
    }
    let row = catalogue.inner.feed.newest(&db.name).await?;
    let update_seq = row.map_or_else(|| "0".to_owned(), |row| row.sequence.to_string());
    // CouchDB's clients take a database for another one if this value changes, so it identifies the creation.
    let known = json!({ "db_name": db.name, "update_seq": update_seq, "instance_start_time": db.instance });
    Ok(answer(StatusCode::OK, &known))
}
