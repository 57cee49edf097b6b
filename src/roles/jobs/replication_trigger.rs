//! The replication trigger: follows the databases that describe replications, and starts scans of their changes.
//!
//! It does what CouchDB's `couch_multidb_changes` does for its replicator. That reads all such databases from the beginning
//! after every restart; here the last seen sequence of each is saved.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{
    Fence,
    trigger::{self, Kind, Merge, SeenCursor, Trigger, TriggerJob, TriggerOptions, Turn},
};
use crate::{
    base::{cursor::Cursor, error::Result, event::Db},
    roles::{
        changes::Change,
        dispatcher::{Delivery, Dispatcher},
    },
    state::{
        context::Context,
        feed::{Feed, FeedPage},
        keys::FeedId,
        named_cursor::ScanMark,
    },
    store::Transaction,
};

/// A scan of the changes of a database, from the last seen sequence on.
#[derive(Debug)]
pub struct Scan {
    db: Db,
    feed: Feed<Change>,
    cursor: Cursor,
    reporter: ScanReporter,
    /// Up to where pages were returned.
    read_to: SeenCursor,
    attempt: u32,
    /// Makes its transactions fail once it is cancelled.
    fence: Fence,
}

impl Scan {
    /// The database.
    pub fn db(&self) -> &Db {
        &self.db
    }

    /// The position of earlier scans; [`Cursor::NOTHING`] in a database that is new to the trigger.
    pub fn since(&self) -> Cursor {
        self.reporter.0.position
    }

    /// 1, or more if the scan has failed before.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The next changes, at most `limit`; none if all were read. If the job succeeds, all that was returned counts as
    /// seen.
    ///
    /// Fails as [`Feed::page`] does.
    pub async fn page(&mut self, limit: usize) -> Result<FeedPage<Change>> {
        let page = loop {
            let page = self.feed.page(self.cursor, limit).await?;
            self.cursor = page.next;
            // A page without rows is not the end if there is more: its rows could not be decoded.
            if !page.rows.is_empty() || !page.more {
                break page;
            }
        };
        *self.read_to.lock() = page.next;
        self.fence.note_progress();
        Ok(page)
    }

    /// Makes `tx` fail if the scan is cancelled, as [`Fence::check_in`] does. For each transaction that writes on its behalf.
    pub async fn check_in(&self, tx: &Transaction) -> Result<()> {
        self.fence.check_in(tx).await
    }

    /// The fence of the scan, for transactions that are written elsewhere.
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Reports how far the changes are seen, before the scan has ended or without [`Scan::page`].
    pub fn reporter(&self) -> ScanReporter {
        self.reporter.clone()
    }
}

/// Reports the progress of a scan. Clones report for the same scan.
#[derive(Debug, Clone)]
pub struct ScanReporter(ScanMark);

impl ScanReporter {
    /// Reports that everything up to `to` is seen: the next scan begins there. Returns false, and changes nothing, if the scan is over:
    /// its database was deleted, another scan has begun, or another trigger has taken over.
    pub async fn report(&self, to: impl Into<Cursor>) -> Result<bool> {
        self.0.report(to.into()).await
    }
}

/// A pending scan.
#[derive(Debug, Clone)]
struct Wanted;

impl Merge for Wanted {
    fn merge(&mut self, _: Self) {}
}

struct Scanning<J>(J);

impl<J: TriggerJob<Scan>> Kind for Scanning<J> {
    type Work = Wanted;
    type Given = Scan;
    type Job = J;

    const DDOCS: bool = false;

    fn job(&self) -> &J {
        &self.0
    }

    fn work(_: &Delivery) -> Wanted {
        Wanted
    }

    fn all_work(_: bool) -> Wanted {
        Wanted
    }

    fn is_fresh(_: &Wanted) -> bool {
        false
    }

    fn given(
        context: &Arc<Context>,
        db: Db,
        _: Wanted,
        (mark, turn): (ScanMark, Turn),
    ) -> (Scan, Option<SeenCursor>) {
        let read_to = Arc::new(Mutex::new(mark.position));
        let scan = Scan {
            feed: Feed::new(Arc::clone(context), FeedId::documents(db.instance)),
            db,
            cursor: mark.position,
            reporter: ScanReporter(mark.clone()),
            fence: Fence::new(mark, turn.progress),
            read_to: Arc::clone(&read_to),
            attempt: turn.attempt,
        };
        (scan, Some(read_to))
    }
}

/// Starts a trigger that calls `job` to scan the databases of [`TriggerOptions::filter`], such as `_replicator` and
/// `*/_replicator`: from the beginning when one is created or found, and from the last seen sequence when it is updated. When
/// it is started for the first time, it finds all databases.
///
/// An update during a scan causes another one afterwards. When a database is deleted, its scan is cancelled and
/// [`TriggerJob::deleted`] is called, so that the job can stop what it started for it. No scan is lost: after a restart,
/// unfinished scans begin again from their last report.
///
/// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is out of its limits.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, changes::ChangesOptions, Db, DbInstance, Roles, jobs::{Scan, TriggerOptions, replication_trigger}, store::Database};
///
/// let store = Database::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(Roles::default()).await?;
/// let scan = |mut scan: Scan| async move {
///     loop {
///         let page = scan.page(1_000).await?;
///         page.rows.iter().for_each(|change| println!("{} in {}", change.doc.id, scan.db().name));
///         if !page.more {
///             return Ok(());
///         }
///     }
/// };
/// let options = TriggerOptions::replication("replicator");
/// let trigger = replication_trigger(running.dispatcher(), options, scan).await?;
///
/// let (changes, producer) = (bus.changes(), bus.producer());
/// let db = Db::new("shop/_replicator".parse()?, DbInstance::new());
/// store
///     .run(async |tx| {
///         changes.create(&tx, &db, &ChangesOptions::default()).await?;
///         producer.created(&tx, &db);
///         Ok(())
///     })
///     .await?;
/// assert!(trigger.wait_for(|status| status.done == 1).await);
/// trigger.shutdown().await?;
/// running.shutdown().await
/// # }
/// ```
pub async fn replication_trigger(
    dispatcher: &Dispatcher,
    options: TriggerOptions,
    job: impl TriggerJob<Scan>,
) -> Result<Trigger> {
    trigger::start(dispatcher, options, Scanning(job)).await
}
