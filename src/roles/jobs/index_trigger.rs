//! The index trigger: starts index builds for the databases and design documents that need them.
//!
//! CouchDB's `ken` and `fabric2_index` keep pending builds in memory: they are lost with the process. Here the feed delivers
//! them again, because the cursor of the trigger stays before them.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    Fence,
    trigger::{self, Kind, Merge, SeenCursor, Trigger, TriggerJob, TriggerOptions, Turn},
};
use crate::{
    base::{
        error::Result,
        event::{Db, DdocId, EventKind},
    },
    roles::dispatcher::{Delivery, Dispatcher},
    state::{context::Context, named_cursor::ScanMark},
    store::Transaction,
};

/// The indexes of a database that need a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IndexDdocs {
    /// Those of all design documents: documents have changed, or unknown design documents.
    All,
    /// Those of these design documents, which were written or deleted.
    Only(BTreeSet<DdocId>),
}

/// A build of indexes that a database needs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct IndexBuild {
    /// The database.
    pub db: Db,
    /// The indexes to build.
    pub ddocs: IndexDdocs,
    /// Whether the database was created since its last build, as far as the trigger knows: there is no index yet, or the
    /// trigger starts over.
    pub is_fresh: bool,
    /// 1, or more if the build has failed before.
    pub attempt: u32,
    /// Makes its transactions fail once it is cancelled.
    pub fence: Fence,
}

impl IndexBuild {
    /// Makes `tx` fail if the build is cancelled, as [`Fence::check_in`] does. For each transaction that writes the index.
    pub async fn check_in(&self, tx: &Transaction) -> Result<()> {
        self.fence.check_in(tx).await
    }
}

/// The pending build of a database.
#[derive(Debug, Clone)]
struct Wanted {
    ddocs: IndexDdocs,
    /// Whether the database was created since its last build.
    is_fresh: bool,
}

impl Merge for Wanted {
    fn merge(&mut self, later: Self) {
        self.is_fresh |= later.is_fresh;
        match (&mut self.ddocs, later.ddocs) {
            (IndexDdocs::Only(ids), IndexDdocs::Only(more)) => ids.extend(more),
            (all, _) => *all = IndexDdocs::All,
        }
    }
}

struct Indexing<J>(J);

impl<J: TriggerJob<IndexBuild>> Kind for Indexing<J> {
    type Work = Wanted;
    type Given = IndexBuild;
    type Job = J;

    const DDOCS: bool = true;

    fn job(&self) -> &J {
        &self.0
    }

    fn work(delivery: &Delivery) -> Wanted {
        let ids: BTreeSet<_> =
            delivery.ddocs().unwrap_or_default().iter().map(|(id, _)| id.clone()).collect();
        let news = delivery.news().kinds();
        let is_fresh = news.contains(EventKind::Created);
        let has_docs = is_fresh || news.contains(EventKind::Updated);
        let ddocs = if has_docs || ids.is_empty() || delivery.may_be_any_ddoc() {
            IndexDdocs::All
        } else {
            IndexDdocs::Only(ids)
        };
        Wanted { ddocs, is_fresh }
    }

    fn all_work(is_fresh: bool) -> Wanted {
        Wanted { ddocs: IndexDdocs::All, is_fresh }
    }

    fn is_fresh(work: &Wanted) -> bool {
        work.is_fresh
    }

    fn given(
        _: &Arc<Context>,
        db: Db,
        work: Wanted,
        (mark, turn): (ScanMark, Turn),
    ) -> (IndexBuild, Option<SeenCursor>) {
        let Wanted { ddocs, is_fresh } = work;
        let fence = Fence::new(mark, turn.progress);
        (IndexBuild { db, ddocs, is_fresh, attempt: turn.attempt, fence }, None)
    }
}

/// Starts a trigger that calls `job` for the databases whose indexes need a build: after they were created or updated, or
/// their design documents changed. When it is started for the first time, all databases need one.
///
/// The needs of a database are gathered for [`TriggerOptions::debounce`], and built once. If a database is created again, its build
/// starts over; if it is deleted, its build is cancelled, and [`TriggerJob::deleted`] is called. No build is lost:
/// after a restart, unfinished builds begin again. No deletion is lost either, however long ago: the cursor keeps the list of
/// databases that were built.
///
/// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is out of its limits.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Db, DbInstance, Roles, jobs::{IndexBuild, TriggerOptions, index_trigger}, store::Database};
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(Roles::default()).await?;
/// let build = |build: IndexBuild| async move {
///     println!("building {:?} of {}", build.ddocs, build.db.name);
///     Ok(())
/// };
/// let options = TriggerOptions::index("views").debounce(std::time::Duration::ZERO);
/// let trigger = index_trigger(running.dispatcher(), options, build).await?;
///
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// assert!(trigger.wait_for(|status| status.done == 1).await);
/// trigger.shutdown().await?;
/// running.shutdown().await
/// # }
/// ```
pub async fn index_trigger(
    dispatcher: &Dispatcher,
    options: TriggerOptions,
    job: impl TriggerJob<IndexBuild>,
) -> Result<Trigger> {
    trigger::start(dispatcher, options, Indexing(job)).await
}
