//! [`Databases`] is what a layer says about its databases. [`Lens`] shows their documents to one request in a way that only the
//! layer understands.

use std::{future::ready, sync::Arc};

use axum::body::Bytes;
use futures_util::future::BoxFuture;

use super::{Caller, Failure};
use crate::{
    base::{
        error::Result,
        event::{Db, DbName},
    },
    roles::changes::{DocSource, DocSummary},
    store::Transaction,
};

/// Which databases there are, and what the layer knows about their documents.
///
/// Over HTTP the body of a document ([`DocSource::body`]) has to be its JSON object with `_id`, `_rev` and, if the document is
/// deleted, `_deleted`.
pub trait Databases: DocSource + 'static {
    /// Returns the database that has `name` now, as `tx` sees it; `None` if there is none.
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>>;

    /// Returns the names of some databases after the name `after`, in order, for `/_all_dbs`; none if there are no more. Returns
    /// `None` if the layer has that route itself. Default: `None`.
    fn names<'a>(&'a self, _after: Option<&'a DbName>) -> BoxFuture<'a, Result<Option<Vec<DbName>>>> {
        Box::pin(ready(Ok(None)))
    }

    /// Returns whether `caller` may read `db`. Default: the caller's grant decides ([`Caller::may_read`]).
    fn may_read<'a>(&'a self, caller: &'a Caller, db: &'a Db) -> BoxFuture<'a, Result<bool>> {
        Box::pin(ready(Ok(caller.may_read(&db.name))))
    }

    /// Returns how a feed shows documents where the routers do not know how: with a filter of the layer (`_selector`, `_view`, a
    /// function of a design document), or with conflicts or attachments. Return `None` if the layer does not know either: then the
    /// request gets 400. If the layer fails, the client gets its failure. Default: `None`.
    fn lens<'a>(
        &'a self,
        _db: &'a Db,
        _asked: &'a Asked,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Lens>>, Failure>> {
        Box::pin(ready(Ok(None)))
    }
}

/// The part of a request for documents that only a layer can answer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Asked {
    /// The name of a filter. The routers handle `_doc_ids` and `_design` themselves.
    pub filter: Option<String>,
    /// The parameters of the filter, in the order in which they came.
    pub parameters: Vec<(String, String)>,
    /// The body of the request: empty, or a JSON object, for example `{"selector":{}}`.
    pub body: Bytes,
    /// Whether bodies should have their conflicts (`conflicts=true`).
    pub conflicts: bool,
    /// Whether bodies should have their attachments (`attachments=true`).
    pub attachments: bool,
    /// Who asks.
    pub caller: Caller,
}

/// How a layer shows documents to one feed. A lens gives their leaves and bodies, and decides which documents the feed has.
pub trait Lens: DocSource + 'static {
    /// Returns whether the feed has the row of `doc`. [`DocSource::body`] returned `body` for it.
    fn keeps<'a>(&'a self, doc: &'a DocSummary, body: Option<&'a Bytes>) -> BoxFuture<'a, Result<bool>>;
}
