//! [`Databases`] describes the databases of a layer, and [`DocView`] shows their documents to one request in a way that only the layer
//! understands. `/_up`, `/_all_dbs` and `/{db}` are what CouchDB's clients request before they follow a server.

use std::{future::ready, sync::Arc};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::State,
    http::{StatusCode, request::Parts},
    routing::get,
};
use futures_util::{future::BoxFuture, stream};
use serde_json::json;

use super::{
    Api, Caller, Failure, Inner,
    answer::{Answered, PathSegments, json as answer, parameters, routes},
    caller::Permission,
    page::PageSize,
    stream::respond,
    wire_format::{WireFormat, write_string},
};
use crate::{
    base::{
        error::Result,
        event::{Db, DbName},
    },
    roles::{
        changes::{DocSource, DocSummary},
        notifier::row_if_folded,
    },
    state::notification_feed::NotificationFeed,
    store::Transaction,
};

/// Which databases exist, and what the layer knows about their documents.
///
/// Over HTTP the body of a document ([`DocSource::body`]) has to be its JSON object with `_id`, `_rev` and, if the document is
/// deleted, `_deleted`.
pub trait Databases: DocSource + 'static {
    /// Returns the database that currently has `name`, as `tx` sees it; `None` if there is none.
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>>;

    /// Returns the names of some databases after the name `after`, in order, for `/_all_dbs`, or an empty list if there are no more.
    /// Returns `None` if the layer serves that route itself. Default: `None`.
    fn names<'a>(&'a self, _after: Option<&'a DbName>) -> BoxFuture<'a, Result<Option<Vec<DbName>>>> {
        Box::pin(ready(Ok(None)))
    }

    /// Returns whether `caller` may read `db`. Default: the caller's grant decides ([`Caller::may_read`]).
    fn may_read<'a>(&'a self, caller: &'a Caller, db: &'a Db) -> BoxFuture<'a, Result<bool>> {
        Box::pin(ready(Ok(caller.may_read(&db.name))))
    }

    /// Returns how a feed shows documents in the cases that the routers cannot handle: with a filter of the layer (`_selector`, `_view`, a
    /// function of a design document), or with conflicts or attachments. Return `None` if the layer cannot either; the request then gets
    /// 400. If the layer fails, the client gets that failure. Default: `None`.
    fn lens<'a>(
        &'a self,
        _db: &'a Db,
        _asked: &'a ChangesRequest,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn DocView>>, Failure>> {
        Box::pin(ready(Ok(None)))
    }
}

/// The part of a request for documents that only a layer can answer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ChangesRequest {
    /// The name of a filter. The routers handle `_doc_ids` and `_design` themselves.
    pub filter: Option<String>,
    /// The parameters of the filter, in the order in which they were given.
    pub parameters: Vec<(String, String)>,
    /// The body of the request: empty, or a JSON object, for example `{"selector":{}}`.
    pub body: Bytes,
    /// Whether bodies should include conflicts (`conflicts=true`).
    pub conflicts: bool,
    /// Whether bodies should include attachments (`attachments=true`).
    pub attachments: bool,
    /// Who sent the request.
    pub caller: Caller,
}

/// How a layer shows documents to one feed. A view provides their leaves and bodies, and decides which documents are in the feed.
pub trait DocView: DocSource + 'static {
    /// Returns whether the row of `doc` is in the feed. `body` is what [`DocSource::body`] returned for the document.
    fn keeps<'a>(&'a self, doc: &'a DocSummary, body: Option<&'a Bytes>) -> BoxFuture<'a, Result<bool>>;
}

/// The state that the routes of a layer's databases share.
pub(super) struct Catalogue {
    pub inner: Arc<Inner>,
    pub databases: Arc<dyn Databases>,
}

impl Catalogue {
    /// Returns the database that currently has `name`. Fails with 404 if there is none, and with 403 if `caller` may not read it, both with
    /// CouchDB's messages.
    pub async fn find(&self, name: &str, caller: &Caller) -> Result<Db, Failure> {
        let missing = || Failure::not_found("Database does not exist.");
        let name = DbName::new(name).map_err(|_| missing())?;
        let find = async |tx| self.databases.find(&tx, &name).await;
        let db = self.inner.feed.context.store.run(find).await?.ok_or_else(missing)?;
        if self.databases.may_read(caller, &db).await? {
            return Ok(db);
        }
        Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", "You are not allowed to access this db."))
    }

    /// Waits for a turn to read, and returns the next names after `after`, as [`Databases::names`] does.
    async fn names(&self, after: Option<&DbName>) -> Result<Option<Vec<DbName>>> {
        let _turn = self.inner.reads.acquire().await.expect("the semaphore is never closed");
        self.databases.names(after).await
    }
}

impl Api {
    /// Serves `/_up` for everyone, `/_all_dbs` for callers that may read `_db_updates`, and `/{db}` of `databases` for callers that may
    /// read the database. This is for servers without a layer; a layer has such routes itself.
    pub fn catalogue(&self, databases: Arc<dyn Databases>) -> Router {
        let catalogue = Arc::new(Catalogue { inner: Arc::clone(&self.inner), databases });
        let routed =
            |path, methods| routes(path, [("", "GET,HEAD", methods)]).with_state(Arc::clone(&catalogue));
        let up = async || answer(StatusCode::OK, &json!({ "status": "ok", "seeds": {} }));
        self.counted(routed("/_up", get(up)))
            .merge(self.limited(routed("/_all_dbs", get(list)), Permission::Updates))
            .merge(self.limited(routed("/{db}", get(info)), Permission::Known))
    }

    /// Returns the databases that the recorded events describe. Use them for [`Api::changes`] if there is no layer in the process. About
    /// documents they know only what the changes say.
    pub fn recorded_databases(&self) -> Arc<dyn Databases> {
        Arc::new(Recorded(self.inner.feed.clone()))
    }
}

/// Answers with the names of all databases. CouchDB's parameters that select a part of the list are refused.
async fn list(State(catalogue): State<Arc<Catalogue>>, parts: Parts) -> Answered {
    parameters(&parts, &[])?;
    let page = catalogue.names(None).await?.ok_or_else(|| Failure::not_found("missing"))?;
    let listing = Listing { catalogue, page, last: None, mark: b'[', is_over: false };
    Ok(respond(WireFormat::Array, Body::from_stream(stream::try_unfold(listing, Listing::next))))
}

/// A list of names that is being sent. It reads a page when the client can take more, so a client that does not read costs one page of
/// about 64 KB, and its text, however many databases there are and however long their names are.
struct Listing {
    catalogue: Arc<Catalogue>,
    /// The names that were read but not yet sent.
    page: Vec<DbName>,
    /// The last name that was sent.
    last: Option<DbName>,
    /// The character before the next name.
    mark: u8,
    is_over: bool,
}

impl Listing {
    /// Returns the next bytes of the list. A failure cuts off the connection.
    async fn next(mut self) -> Result<Option<(Bytes, Self)>> {
        if self.is_over {
            return Ok(None);
        }
        if self.page.is_empty() {
            self.page = self.catalogue.names(self.last.as_ref()).await?.unwrap_or_default();
        }
        // Names that are cut off here are read again for the next page.
        PageSize::new(self.page.len()).cut(&mut self.page, |name| name.as_str().len());
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
    let db = catalogue.find(&name, &caller).await?;
    let row = catalogue.inner.feed.newest(&db.name).await?;
    let update_seq = row.map_or_else(|| "0".to_owned(), |row| row.sequence.to_string());
    // CouchDB's clients treat a database as a different one if this value changes, so the value identifies the creation.
    let known = json!({ "db_name": db.name, "update_seq": update_seq, "instance_start_time": db.instance });
    Ok(answer(StatusCode::OK, &known))
}

/// The databases that the recorded events describe.
struct Recorded(NotificationFeed);

impl Databases for Recorded {
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>> {
        Box::pin(async move {
            let row = row_if_folded(&self.0.context, tx, name).await?;
            Ok(row.filter(|row| !row.is_deleted()).map(|row| row.db()))
        })
    }

    fn names<'a>(&'a self, after: Option<&'a DbName>) -> BoxFuture<'a, Result<Option<Vec<DbName>>>> {
        Box::pin(async move { self.0.living_names(after).await.map(Some) })
    }
}

/// About these documents the bus knows only what their changes say.
impl DocSource for Recorded {}
