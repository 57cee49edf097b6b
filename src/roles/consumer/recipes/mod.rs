//! Recipes: what most layers want of a consumer, each a handler with a little code of its own.
//!
//! [`index`] tells which indexes of a database need a build, [`replicate`] scans the changes of a database from where the last scan ended,
//! and [`ParallelJob`] reads the shards of one database side by side, for either of them.

mod index;
mod parallel;
mod replicate;

pub use self::{
    index::{Index, IndexBuild, IndexDdocs, IndexHandler, index},
    parallel::{ParallelBatch, ParallelJob, ParallelJobOptions},
    replicate::{Replicate, Scan, ScanHandler, replicate},
};
use super::Work;
use crate::{
    base::{
        error::{Error, Result},
        event::{Db, DbInstance, DbName},
        notification::Notification,
    },
    store::Transaction,
};

/// The end of a database.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeletedDb {
    /// The database. If several of its name have ended since the last work on the name, it is the last of them.
    pub db: Db,
    /// The database that has the name now. All others of the name have ended.
    pub successor: Option<DbInstance>,
    /// The run of the consumer.
    pub work: Work<Notification>,
}

impl DeletedDb {
    /// Makes `tx` fail if the run is over, as [`Run::verify`](crate::consumer::Run::verify) does. For each transaction that cleans up: by then another node may have
    /// begun to work for a later successor.
    pub async fn verify(&self, tx: &Transaction) -> Result<()> {
        self.work.verify(tx).await
    }
}

/// The database whose end is news, and the one that lives.
fn databases(work: &Work<Notification>) -> Result<(Option<DeletedDb>, Option<Db>)> {
    let name = if let Some(row) = work.row() {
        row.name.clone()
    } else {
        let id = std::str::from_utf8(work.id())
            .map_err(|_| Error::invalid("id", "it is not the name of a database".to_owned()))?;
        DbName::new(id)?
    };
    let living = work.row().filter(|row| !row.is_deleted()).map(|row| row.db());
    let successor = living.as_ref().map(|db| db.instance);
    let deleted =
        work.gone().map(|gone| DeletedDb { db: Db::new(name, gone), successor, work: work.clone() });
    Ok((deleted, living))
}
