//! [`Served`] holds the state that the routes of a layer's databases share.

use std::sync::Arc;

use super::counts::Counts;
use crate::{
    base::event::{Db, DbName},
    front::http::{Asked, Caller, Databases, Failure, Inner, Lens},
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
    pub async fn find_for(&self, name: &str, caller: Option<&Caller>) -> Result<Db, Failure> {
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
