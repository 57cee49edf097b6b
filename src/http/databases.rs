//! [`Databases`]: what a layer tells the routers of its databases.

use futures_util::future::BoxFuture;

use crate::{
    changes::DocSource,
    error::Result,
    event::{Db, DbName},
    store::Transaction,
};

/// Which databases there are, and what the layer knows of their documents.
///
/// Over HTTP the body of a document ([`DocSource::body`]) has to be its JSON object, with `_id`, `_rev` and, if so, `_deleted`.
pub trait Databases: DocSource + 'static {
    /// The database that has `name` now, as `tx` sees it; `None` if there is none.
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>>;
}
