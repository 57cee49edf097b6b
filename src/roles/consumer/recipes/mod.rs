//! Recipes: what most layers want from a consumer. Each recipe is a handler with a little code of its own.
//!
//! [`index`] finds out which indexes of a database need a build, [`replicate`] scans the changes of a database from where the last scan
//! ended, and [`ParallelJob`] reads the shards of one database side by side, for use in either.

mod index;
mod parallel;
mod replicate;

use std::{future::ready, ops::Deref};

pub use self::{
    index::{Index, IndexBuild, IndexDdocs, index},
    parallel::{ParallelBatch, ParallelJob, ParallelJobOptions},
    replicate::{Replicate, Scan, replicate},
};
use super::{HandlerResult, Work};
use crate::base::{
    error::{Error, Result},
    event::{Db, DbInstance, DbName},
    notification::Notification,
};

/// Works on databases: a handler of [`IndexBuild`] builds their indexes, and a handler of [`Scan`] scans their changes. A closure that
/// takes either is a handler, too; it does nothing when a database is deleted.
pub trait DbHandler<W>: Send + Sync + 'static {
    /// Works on a database. After a failure it is called again, for the same build or from the saved position, and must tolerate that.
    ///
    /// If the database is deleted during the work, the future is dropped. Everything that it has started must end with it, as a
    /// [`ParallelJob`] does, and each transaction that writes must call [`Run::verify`](crate::consumer::Run::verify) or [`Scan::save_in`],
    /// so that a commit in flight fails when the future is dropped.
    fn handle(&self, work: W) -> impl Future<Output = HandlerResult> + Send;

    /// Called when databases have ended, before any work on a successor. Drop what was made for each database of the name except the
    /// successor, in transactions that call [`Run::verify`](crate::consumer::Run::verify), because another node may already be working for
    /// a later successor. This may be called again, or for a name on which no work was done.
    fn deleted(&self, deleted: DeletedDb) -> impl Future<Output = HandlerResult> + Send {
        let _ = deleted;
        ready(Ok(()))
    }
}

impl<W, F, H> DbHandler<W> for F
where
    F: Fn(W) -> H + Send + Sync + 'static,
    H: Future<Output = HandlerResult> + Send,
{
    fn handle(&self, work: W) -> impl Future<Output = HandlerResult> + Send {
        self(work)
    }
}

/// The end of a database.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeletedDb {
    /// The database that ended. If several databases of the name have ended since the last work on the name, this is the last of them.
    pub db: Db,
    /// The database that has the name now. All others of the name have ended.
    pub successor: Option<DbInstance>,
    /// The run of the consumer that this call is part of.
    pub work: Work<Notification>,
}

impl Deref for DeletedDb {
    type Target = Work<Notification>;

    fn deref(&self) -> &Work<Notification> {
        &self.work
    }
}

/// Returns the database whose end is news, and the one that exists now.
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
