//! The index trigger: which databases and design documents need an index build, and when.
//!
//! CouchDB's `ken` and `fabric2_index` do this from memory: what was to be built is lost with the process. Here it is told
//! again, because the cursor of the trigger stays before it.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};

use super::{
    Fence,
    trigger::{self, Ended, Failure, Kind, Trigger, TriggerJob, TriggerOptions, Turn, Work},
};
use crate::{
    base::{
        error::Result,
        event::{Db, DdocId, EventKind},
    },
    roles::dispatcher::{Delivery, Dispatcher},
    state::{context::Context, named_cursor::OpenCursor},
    store::Transaction,
};

/// Which indexes of a database need a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IndexDdocs {
    /// Those of all design documents: documents have changed, or nobody knows which design documents have.
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
    /// Which of its indexes.
    pub ddocs: IndexDdocs,
    /// Whether the database was created since it was built last, as far as the trigger knows: there is no index yet, or the
    /// trigger begins again.
    pub is_fresh: bool,
    /// 1, or more if the build has failed before.
    pub attempt: u32,
    /// What makes its transactions fail once it was cancelled.
    pub fence: Fence,
}

impl IndexBuild {
    /// Makes `tx` fail if the build was cancelled, as [`Fence::check_in`] says: for each transaction that writes the index.
    pub async fn check_in(&self, tx: &Transaction) -> Result<()> {
        self.fence.check_in(tx).await
    }
}

/// What is to be built of a database.
#[derive(Debug, Clone)]
struct Wanted {
    /// Which of its indexes.
    ddocs: IndexDdocs,
    /// Whether it was created.
    is_fresh: bool,
}

impl Work for Wanted {
    fn merge(&mut self, later: Self) {
        self.is_fresh |= later.is_fresh;
        match (&mut self.ddocs, later.ddocs) {
            (IndexDdocs::Only(ids), IndexDdocs::Only(more)) => ids.extend(more),
            (all, _) => *all = IndexDdocs::All,
        }
    }
}

/// A trigger that has indexes built.
struct Indexing<J> {
    context: Arc<Context>,
    /// The build.
    job: J,
}

impl<J: TriggerJob<IndexBuild>> Kind for Indexing<J> {
    type Work = Wanted;

    const DDOCS: bool = true;

    fn work(&self, delivery: &Delivery) -> Wanted {
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

    fn run(
        self: Arc<Self>,
        cursor: OpenCursor,
        db: Db,
        work: Wanted,
        turn: Turn,
    ) -> BoxFuture<'static, Ended> {
        let Wanted { ddocs, is_fresh } = work;
        async move {
            let mark = trigger::begin(&self.context, &cursor, &db, (&turn, is_fresh)).await?;
            let fence = Fence::new(mark, turn.progress);
            let build = IndexBuild { db, ddocs, is_fresh, attempt: turn.attempt, fence };
            self.job.run(build).await.map_err(Failure::Job)?;
            Ok(Vec::new())
        }
        .boxed()
    }

    fn deleted(self: Arc<Self>, cursor: OpenCursor, db: Db) -> BoxFuture<'static, Ended> {
        async move {
            cursor.end_scan(&db).await?;
            self.job.deleted(db.clone()).await.map_err(Failure::Job)?;
            cursor.unmark(&db).await?;
            Ok(trigger::find_gone(&self.context, &cursor, None, &db.name).await?)
        }
        .boxed()
    }
}

/// Starts a trigger that has `job` build the indexes of the databases that need it: after they were created or updated, or
/// their design documents were. When it is started for the first time, all databases need it.
///
/// What is needed is gathered per database for [`TriggerOptions::debounce`], and built once. A database that is created again
/// is built afresh; the build of one that is deleted is cancelled, and [`TriggerJob::deleted`] is called. No build is lost:
/// after a restart, whatever was not done is begun again. Nor is a deletion, however long ago: which databases were built is
/// kept with the cursor.
///
/// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is out of its limits.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, Db, DbInstance, jobs::{IndexBuild, TriggerOptions, index_trigger}, store::Database};
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let notifier = bus.notifier(Default::default()).await?;
/// let dispatcher = bus.dispatcher(Default::default()).await?;
/// let build = |build: IndexBuild| async move {
///     println!("building {:?} of {}", build.ddocs, build.db.name);
///     Ok(())
/// };
/// let options = TriggerOptions { debounce: std::time::Duration::ZERO, ..TriggerOptions::index("views") };
/// let trigger = index_trigger(&dispatcher, options, build).await?;
///
/// let db = Db::new("orders".parse()?, DbInstance::random(store.env()));
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// assert!(trigger.wait_for(|status| status.done == 1).await);
/// trigger.shutdown().await?;
/// notifier.shutdown().await
/// # }
/// ```
pub async fn index_trigger(
    dispatcher: &Dispatcher,
    options: TriggerOptions,
    job: impl TriggerJob<IndexBuild>,
) -> Result<Trigger> {
    let context = Arc::clone(dispatcher.context());
    trigger::start(dispatcher, options, Indexing { context, job }).await
}
