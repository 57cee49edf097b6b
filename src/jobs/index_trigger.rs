//! The index trigger: which databases and design documents need an index build, and when.
//!
//! CouchDB's `ken` and `fabric2_index` do this from memory: what was to be built is lost with the process. Here it is told
//! again, because the cursor of the trigger stays before it.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures_util::{FutureExt, future::BoxFuture};

use super::trigger::{self, Ended, Failure, Kind, Trigger, TriggerJob, TriggerOptions, Work};
use crate::{
    context::Context,
    dispatcher::{Delivery, Dispatcher},
    error::Result,
    event::{Db, DdocId, EventKind},
    named_cursor::OpenCursor,
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
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// The most databases that are known to be marked. When there are more, all are forgotten, and looked up once more.
const KNOWN_MAX: usize = 10_000;

/// A trigger that has indexes built.
///
/// Each database that is built is marked in the store before, and no more once the job knows that it is gone. What is known
/// to be marked need not be looked up again, so that a build costs nothing more than itself.
struct Indexing<J> {
    /// What the roles share.
    context: Arc<Context>,
    /// The build.
    job: J,
    /// Databases that are marked, and of their names no other instance that was gone when they were.
    known: Mutex<HashSet<Db>>,
}

impl<J: TriggerJob<IndexBuild>> Indexing<J> {
    /// The databases that are known to be marked. Nothing is done under the lock that could be left half done.
    fn known(&self) -> MutexGuard<'_, HashSet<Db>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks `db`. Fails if the job has first to be told of other instances of its name that they are gone.
    async fn mark(&self, cursor: &OpenCursor, db: &Db) -> Result<(), Failure> {
        if self.known().contains(db) {
            return Ok(());
        }
        let marked = trigger::find_marked(&self.context, cursor, Some(db), &db.name).await?;
        if !marked.gone.is_empty() {
            return Err(Failure::Replaced(marked.gone));
        }
        if !marked.is_living {
            cursor.mark(db).await?;
        }
        let mut known = self.known();
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.insert(db.clone());
        Ok(())
    }
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

    fn run(
        self: Arc<Self>,
        cursor: OpenCursor,
        db: Db,
        work: Wanted,
        attempt: u32,
    ) -> BoxFuture<'static, Ended> {
        let Wanted { ddocs, is_fresh } = work;
        async move {
            self.mark(&cursor, &db).await?;
            self.job.run(IndexBuild { db, ddocs, is_fresh, attempt }).await.map_err(Failure::Job)?;
            Ok(Vec::new())
        }
        .boxed()
    }

    fn deleted(self: Arc<Self>, cursor: OpenCursor, db: Db) -> BoxFuture<'static, Ended> {
        async move {
            self.known().remove(&db);
            self.job.deleted(db.clone()).await.map_err(Failure::Job)?;
            cursor.unmark(&db).await?;
            Ok(trigger::find_marked(&self.context, &cursor, None, &db.name).await?.gone)
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
/// use notibus::{Bus, BusOptions, Db, DbInstance, IndexBuild, TriggerOptions, index_trigger, store::Database};
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
    trigger::start(dispatcher, options, Indexing { context, job, known: Mutex::default() }).await
}
