//! [`index`]: builds the indexes of databases when they need it.
//!
//! CouchDB's `ken` and `fabric2_index` keep pending builds in memory, and lose them with the process. Here the feed is the list of pending
//! builds: the consumer finishes the newest row of a database only once its indexes are built.

use std::{collections::BTreeSet, ops::Deref, time::Duration};

use super::{
    super::{ConsumerOptions, Handler, HandlerResult, Work},
    DbHandler, databases,
};
use crate::{
    base::{
        error::Result,
        event::{Db, DdocId, EventKind},
        notification::Notification,
    },
    state::notification_feed::NotificationFeed,
};

/// The indexes of a database that need a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IndexDdocs {
    /// The indexes of all design documents: documents have changed, or it is unknown which design documents have.
    All,
    /// The indexes of these design documents, which were written or deleted.
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
    /// Whether the database was created since its last build, as far as the consumer knows: either there is no index yet, or the consumer
    /// lost its position and builds everything again.
    pub is_fresh: bool,
    /// The run of the consumer that this build is part of.
    pub work: Work<Notification>,
}

impl Deref for IndexBuild {
    type Target = Work<Notification>;

    fn deref(&self) -> &Work<Notification> {
        &self.work
    }
}

/// The handler of a consumer that builds indexes. [`index`] makes one.
#[derive(Debug, Clone)]
pub struct Index<H>(H);

/// Makes a handler that builds the indexes of a database after the database was created or updated, or after its design documents changed.
/// Start the consumer with [`ConsumerOptions::index`], and at [`Cursor::BEGINNING`](crate::Cursor::BEGINNING), so that it first builds the
/// indexes of all databases.
///
/// All nodes that run a member build indexes. The changes to a database are collected for [`ConsumerOptions::debounce`], and indexed in one
/// build. If a database is deleted, its build is cancelled, and [`DbHandler::deleted`] is called.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use std::time::Duration;
///
/// use notibus::{Bus, BusOptions, Cursor, Db, DbInstance, StartOptions, consumer::{ConsumerOptions, IndexBuild, index}, store::Store};
///
/// let store = Store::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(StartOptions::default()).await?;
/// let build = |build: IndexBuild| async move {
///     println!("building {:?} of {}", build.ddocs, build.db.name);
///     Ok(())
/// };
/// let options = ConsumerOptions::index().debounce(Duration::ZERO);
/// let views = running.consumer("views")?.start_from(Cursor::BEGINNING).options(options);
/// let views = views.run(index(build)).await?;
///
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// store.run(async |tx| Ok(bus.producer().created(&tx, &db))).await?;
/// while !bus.is_drained().await? {
///     tokio::time::sleep(Duration::from_millis(5)).await;
/// }
/// views.caught_up().await?;
/// views.shutdown().await?;
/// running.shutdown().await
/// # }
/// ```
pub fn index<H: DbHandler<IndexBuild>>(handler: H) -> Index<H> {
    Index(handler)
}

impl<H: DbHandler<IndexBuild>> Handler<Work<Notification>> for Index<H> {
    async fn handle(&self, work: Work<Notification>) -> HandlerResult {
        let (deleted, living) = databases(&work)?;
        if let Some(deleted) = deleted {
            self.0.deleted(deleted).await?;
        }
        let Some(db) = living else { return Ok(()) };
        let (ddocs, is_fresh) = wanted(&work, &db).await?;
        self.0.handle(IndexBuild { db, ddocs, is_fresh, work }).await
    }
}

/// Returns the indexes of `db` that need a build, and whether `db` was created since the last build.
async fn wanted(work: &Work<Notification>, db: &Db) -> Result<(IndexDdocs, bool)> {
    let Some(news) = work.news() else { return Ok((IndexDdocs::All, false)) };
    let kinds = news.kinds();
    let is_fresh = kinds.contains(EventKind::Created);
    if is_fresh
        || work.is_again()
        || !kinds.contains(EventKind::DdocUpdated)
        || kinds.contains(EventKind::Updated)
    {
        return Ok((IndexDdocs::All, is_fresh));
    }
    let context = &work.run.held.context;
    let feed = NotificationFeed::new(context.clone(), context.feed.clone());
    // The design documents are read after the row, so they may include later changes, which will be built again.
    let changed = feed.ddocs(db, work.since()).await?;
    let ids: BTreeSet<_> = changed.ids.into_iter().map(|(id, _)| id).collect();
    let may_be_any = changed.nameless.is_some() || ids.is_empty();
    Ok((if may_be_any { IndexDdocs::All } else { IndexDdocs::Only(ids) }, is_fresh))
}

impl ConsumerOptions {
    /// Returns the defaults for building indexes: the changes of 5 s are collected into one build, and 4 builds run at once in a shard.
    pub fn index() -> Self {
        Self::default().debounce(Duration::from_secs(5)).max_concurrency(4)
    }
}
