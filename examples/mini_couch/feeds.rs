//! Implements the traits through which the feeds of the library read from the layer.

use std::sync::Arc;

use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Db, DbName, Result,
    changes::{DocSource, DocSummary},
    http::{ChangesRequest, Databases, DocView, Failure},
    store::{Isolation, Transaction},
};
use serde_json::Value;

use super::{
    couch::{Couch, find_in},
    document::{SEQUENCE_LEN, doc_id},
    keys,
    problem::Problem,
};

/// The feeds find databases through this.
impl Databases for Couch {
    fn find<'a>(&'a self, tx: &'a Transaction, name: &'a DbName) -> BoxFuture<'a, Result<Option<Db>>> {
        find_in(tx, name).boxed()
    }

    /// This layer does not run functions of design documents. If such a function does not exist, the layer reports that, as CouchDB does.
    fn lens<'a>(
        &'a self,
        db: &'a Db,
        asked: &'a ChangesRequest,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn DocView>>, Failure>> {
        async {
            let filter = asked.filter.as_deref().and_then(|filter| filter.split_once('/'));
            let Some((design, function)) = filter else { return Ok(None) };
            let id = doc_id(&format!("_design/{design}")).map_err(failure)?;
            let found = self.document(&db.name, &id).await.map_err(failure)?;
            let found = found.filter(|found| !found.is_deleted).ok_or(Failure::not_found("missing"))?;
            let found: Value = serde_json::from_slice(&found.json).unwrap_or_default();
            if found["filters"][function].is_null() {
                return Err(Failure::not_found(format!("missing json key: {function}")));
            }
            Ok(None)
        }
        .boxed()
    }
}

/// Returns the answer to a request for documents that failed with `problem`.
fn failure(problem: Problem) -> Failure {
    match problem {
        Problem::Store(error) => error.into(),
        _ => Failure::not_found("missing"),
    }
}

/// The feeds read documents through this. Each document has one branch.
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
