//! `/_up`, `/_all_dbs` and `/{db}`, which CouchDB's clients request before they follow a server. The answers have what this server
//! knows.

use std::sync::Arc;

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::get,
};
use futures_util::stream;
use serde_json::json;

use super::{
    Api, Caller, Databases, Failure, Inner,
    answer::{PathSegments, at, json as answer},
    caller::Permission,
    manage::parameters,
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
        let open = at(
            Router::new(),
            "/_up",
            get(async || answer(StatusCode::OK, &json!({ "status": "ok", "seeds": {} }))),
        );
        let [list, info] = [("/_all_dbs", get(list)), ("/{db}", get(info))]
            .map(|(path, methods)| at(Router::new(), path, methods));
        let [open, list, info] = [open, list, info].map(|router| {
            let allowed = async || Failure::method_not_allowed("GET,HEAD");
            router.method_not_allowed_fallback(allowed).with_state(Arc::clone(&catalogue))
        });
        self.counted(open)
            .merge(self.guarded(list, Permission::Updates))
            .merge(self.guarded(info, Permission::Known))
    }
}

/// Answers with the names of all databases. CouchDB's parameters for a part of them are refused.
async fn list(State(catalogue): State<Arc<Catalogue>>, request: Request) -> Response {
    let (parts, _) = request.into_parts();
    let first = async {
        parameters(&parts, &[])?;
        catalogue.names(None).await?.ok_or_else(|| Failure::not_found("missing"))
    };
    match first.await {
        Ok(page) => {
            let listing = Listing { catalogue, page, last: None, mark: b'[', is_over: false };
            respond(WireFormat::Array, Body::from_stream(stream::try_unfold(listing, Listing::next)))
        }
        Err(failure) => failure.into_response(),
    }
}

/// A list of names that is being sent. It reads a page when the client has room for it, so a client that does not read holds one
/// page, however many databases there are.
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
    caller: Option<Extension<Caller>>,
) -> Response {
    let find = async {
        let name = DbName::new(&name).map_err(|_| Failure::no_database())?;
        let databases = &catalogue.databases;
        let find = async |tx| databases.find(&tx, &name).await;
        let db = catalogue.inner.feed.context.db.run(find).await?.ok_or_else(Failure::no_database)?;
        if !databases.may_read(caller.as_deref(), &db).await? {
            return Err(Failure::not_readable());
        }
        let row = catalogue.inner.feed.newest(&db.name).await?;
        let update_seq = row.map_or_else(|| "0".to_owned(), |row| row.sequence.to_string());
        // CouchDB's clients take a database for another one if this value changes, so it identifies the creation.
        let known =
            json!({ "db_name": db.name, "update_seq": update_seq, "instance_start_time": db.instance });
        Ok::<_, Failure>(answer(StatusCode::OK, &known))
    };
    find.await.unwrap_or_else(IntoResponse::into_response)
}
