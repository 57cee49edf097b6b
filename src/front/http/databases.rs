//! [`Databases`]: what a layer tells the routers of its databases; [`Lens`]: how it shows their documents to who asks in a way that
//! only the layer understands.

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

/// Which databases there are, and what the layer knows of their documents.
///
/// Over HTTP the body of a document ([`DocSource::body`]) has to be its JSON object, with `_id`, `_rev` and, if so, `_deleted`.
pub trait Databases: DocSource + 'static {
    /// The database that has `name` now, as `tx` sees it; `None` if there is none.
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>>;

    /// The names of all databases, in order, for `/_all_dbs`; `None` if the layer has that route itself. Default: none.
    fn names(&self) -> BoxFuture<'_, Result<Option<Vec<DbName>>>> {
        Box::pin(ready(Ok(None)))
    }

    /// Whether `caller` may read `db`; there is none where everyone may ask. Default: by its credentials ([`Caller::may_read`]).
    fn may_read<'a>(&'a self, caller: Option<&'a Caller>, db: &'a Db) -> BoxFuture<'a, Result<bool>> {
        Box::pin(ready(Ok(caller.is_none_or(|caller| caller.may_read(&db.name)))))
    }

    /// How a feed shows documents for which the routers know no way: those of a filter of the layer's (`_selector`, `_view`, a design
    /// document's function), or bodies with conflicts or attachments. `None` if the layer does not know it either: the request is
    /// refused then, as it is with a failure of the layer's own. Default: none.
    fn lens<'a>(
        &'a self,
        _db: &'a Db,
        _asked: &'a Asked,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Lens>>, Failure>> {
        Box::pin(ready(Ok(None)))
    }
}

/// What a request asks of the documents of a feed that only a layer can answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Asked {
    /// The name of a filter: all but `_doc_ids` and `_design`, which the routers know.
    pub filter: Option<String>,
    /// The parameters that are the filter's, in the order in which they came.
    pub parameters: Vec<(String, String)>,
    /// The body of the request: empty, or a JSON object, as `{"selector":{}}`.
    pub body: Bytes,
    /// Bodies are to have their conflicts (`conflicts=true`).
    pub conflicts: bool,
    /// Bodies are to have their attachments (`attachments=true`).
    pub attachments: bool,
    /// Who asks, if it is known.
    pub caller: Option<Caller>,
}

/// How a layer shows documents to one feed: their leaves and bodies, and which of them at all.
pub trait Lens: DocSource + 'static {
    /// Whether the feed has the row of `doc`, whose `body` is what [`DocSource::body`] gave for it.
    fn keeps<'a>(&'a self, doc: &'a DocSummary, body: Option<&'a Bytes>) -> BoxFuture<'a, Result<bool>>;
}
