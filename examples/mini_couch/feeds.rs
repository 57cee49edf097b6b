//! Implements the traits through which the feeds of the library read the layer.

use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Db, DbName, Result,
    changes::{DocSource, DocSummary},
    http::Databases,
    store::{Isolation, Transaction},
};

use super::{
    couch::{Couch, find_in},
    document::SEQUENCE_LEN,
    keys,
};

/// The feeds find databases by it.
impl Databases for Couch {
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>> {
        find_in(tx, name).boxed()
    }
}

/// The feeds read documents by it. Documents have one branch each.
impl DocSource for Couch {
    fn body<'a>(
        &'a self,
        tx: &'a Transaction,
        db: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, Result<Option<bytes::Bytes>>> {
        async {
            let row = tx.get(&keys::document(db, &doc.id), Isolation::Snapshot).await?;
            Ok(row.map(|row| row.slice(SEQUENCE_LEN..)))
        }
        .boxed()
    }
}
