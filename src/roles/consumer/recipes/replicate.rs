//! [`replicate`]: scans the changes of databases, such as those that describe replications.
//!
//! This does what CouchDB's `couch_multidb_changes` does for the replicator. CouchDB reads all such databases from the beginning after
//! every restart; here the position of each scan is saved in the user's own keys, in the same transactions as its effects.
//!
//! The checkpoint of the consumer cannot serve as that position, because a change is in the feed of its database at once, but its
//! notification follows only after a fold. The checkpoint of a shard may be between the two:
//!
//! ```text
//!   notifications   ── db ─────────── other ──── db ──►
//!                      │ scanned      │ finished  │ the checkpoint is at `other`, after the edit
//!   changes of db   ── · ──── edit ───┴───────────┴───►
//! ```

use std::{ops::Deref, sync::Arc};

use parking_lot::Mutex;

use super::{
    super::{Handler, HandlerResult, Work},
    DbHandler, databases,
};
use crate::{
    base::{
        cursor::Cursor,
        error::Result,
        event::{Db, DbInstance},
        notification::Notification,
    },
    roles::changes::Change,
    state::{
        feed::{Feed, FeedPage},
        keys::FeedId,
    },
    store::{Isolation, KeyRange, Transaction, key_after},
};

/// A scan of the changes of a database, from the saved position on.
#[derive(Debug)]
pub struct Scan {
    db: Db,
    feed: Feed<Change>,
    since: Cursor,
    /// Up to where pages were returned.
    read_to: Arc<Mutex<Cursor>>,
    /// The key under which the position is saved.
    key: Vec<u8>,
    work: Work<Notification>,
}

async fn saved(tx: &Transaction, key: &[u8]) -> Result<Cursor> {
    let stored = tx.get(key, Isolation::Serializable).await?;
    stored.map_or(Ok(Cursor::BEGINNING), |value| Cursor::from_bytes(&value).map_err(|error| error.at(key)))
}

impl Scan {
    /// Returns the database that is scanned.
    pub fn db(&self) -> &Db {
        &self.db
    }

    /// Returns where the scan begins; [`Cursor::BEGINNING`] in a database that was never scanned.
    pub fn since(&self) -> Cursor {
        self.since
    }

    /// Returns the next changes, at most `limit`; none if all were read. If the handler succeeds, all returned changes count as seen.
    ///
    /// Fails as [`Feed::page`] does: with [`Error::Expired`](crate::Error::Expired) if deletions after the position were dropped.
    pub async fn page(&mut self, limit: usize) -> Result<FeedPage<Change>> {
        loop {
            let from = *self.read_to.lock();
            let page = self.feed.page(from, limit).await?;
            *self.read_to.lock() = page.next;
            // If there is more, an empty page is not the end: its rows could not be decoded.
            if !page.rows.is_empty() || !page.more {
                self.work.progress();
                return Ok(page);
            }
        }
    }

    /// Begins again at [`Cursor::BEGINNING`], for a scan that has expired. First drop what was derived from the database, because the scan
    /// does not return what was deleted since.
    pub fn begin_again(&mut self) {
        (self.since, *self.read_to.lock()) = (Cursor::BEGINNING, Cursor::BEGINNING);
    }

    /// Saves in `tx`, together with the effects of a page, that everything up to `to` (the page's [`FeedPage::next`]) has been seen. The
    /// next scan begins there, whatever happens to this one. Fails as [`Run::verify`](crate::consumer::Run::verify) does.
    pub async fn save_in(&self, tx: &Transaction, to: Cursor) -> Result<()> {
        self.work.verify(tx).await?;
        tx.set(&self.key, &to.to_bytes());
        Ok(())
    }
}

impl Deref for Scan {
    type Target = Work<Notification>;

    fn deref(&self) -> &Work<Notification> {
        &self.work
    }
}

/// The handler of a consumer that scans databases. [`replicate`] makes one.
#[derive(Debug, Clone)]
pub struct Replicate<H> {
    prefix: Vec<u8>,
    handler: H,
}

/// Makes a handler that scans the changes of a database after it was created or updated: first from the beginning, and then from the saved
/// position. The handler stores the positions in the user's keys that begin with `prefix`, and removes those of deleted databases. Start
/// the consumer at [`Cursor::BEGINNING`], with a filter for the databases to scan.
///
/// All nodes that run a member scan databases. An update during a scan causes another scan afterwards. If a database is deleted, its scan
/// is cancelled, and [`DbHandler::deleted`] is called. Members on several nodes, or after a restart, share no memory, so keep what scans
/// find in the store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, changes::ChangesOptions, consumer::{Scan, replicate}, Cursor, Db, DbInstance, Filter, StartOptions, store::Store};
///
/// let store = Store::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let running = bus.start(StartOptions::default()).await?;
/// let scan = |mut scan: Scan| async move {
///     loop {
///         let page = scan.page(1_000).await?;
///         page.rows.iter().for_each(|change| println!("{} in {}", change.doc.id, scan.db().name));
///         if !page.more {
///             return Ok(());
///         }
///     }
/// };
/// let filter = Filter::glob("{_replicator,*/_replicator}")?;
/// let replicator = running.consumer("replicator")?.start_from(Cursor::BEGINNING).filter(filter);
/// let replicator = replicator.run(replicate("replicator/seen/", scan)).await?;
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
/// while !bus.is_drained().await? {
///     tokio::time::sleep(std::time::Duration::from_millis(5)).await;
/// }
/// replicator.caught_up().await?;
/// replicator.shutdown().await?;
/// running.shutdown().await
/// # }
/// ```
pub fn replicate<H: DbHandler<Scan>>(prefix: impl Into<Vec<u8>>, handler: H) -> Replicate<H> {
    Replicate { prefix: prefix.into(), handler }
}

impl<H: DbHandler<Scan>> Handler<Work<Notification>> for Replicate<H> {
    async fn handle(&self, work: Work<Notification>) -> HandlerResult {
        let (deleted, living) = databases(&work)?;
        if let Some(deleted) = deleted {
            let (name, successor) = (self.name_key(&deleted.db), deleted.successor);
            self.handler.deleted(deleted).await?;
            forget(&work, name, successor).await?;
        }
        let Some(db) = living else { return Ok(()) };
        let (key, context) = (self.key(&db), Arc::clone(&work.run.held.context));
        let since = context.store.run(async |tx| saved(&tx, &key).await).await?;
        let read_to = Arc::new(Mutex::new(since));
        let feed = Feed::new(Arc::clone(&context), FeedId::documents(db.instance));
        let (scanned, position) = (Arc::clone(&read_to), key.clone());
        self.handler.handle(Scan { db, feed, since, read_to, key, work: work.clone() }).await?;
        // Everything that was returned counts as seen.
        let read_to = *scanned.lock();
        let save = async |tx: Transaction| {
            // The handler may have saved a later position.
            if saved(&tx, &position).await?.position() < read_to.position() {
                work.verify(&tx).await?;
                tx.set(&position, &read_to.to_bytes());
            }
            Ok(())
        };
        Ok(context.store.run(save).await?)
    }
}

impl<H> Replicate<H> {
    /// Returns the prefix of the keys of all databases with this name. It includes the name's length, so no prefix begins with another.
    fn name_key(&self, db: &Db) -> Vec<u8> {
        let name = db.name.as_str().as_bytes();
        let len = u16::try_from(name.len()).expect("names are at most 1,024 bytes");
        [&self.prefix[..], &len.to_be_bytes(), name].concat()
    }

    fn key(&self, db: &Db) -> Vec<u8> {
        [&self.name_key(db)[..], &db.instance.0].concat()
    }
}

/// Removes the positions of all databases with this name except the successor.
async fn forget(work: &Work<Notification>, name: Vec<u8>, successor: Option<DbInstance>) -> Result<()> {
    let all = KeyRange::prefix(name.clone());
    let forget = async |tx: Transaction| {
        work.verify(&tx).await?;
        match successor {
            None => tx.clear_range(&all),
            Some(DbInstance(instance)) => {
                let key = [&name[..], &instance].concat();
                tx.clear_range(&KeyRange { begin: key_after(&key), end: all.end.clone() });
                tx.clear_range(&KeyRange { begin: all.begin.clone(), end: key.into() });
            }
        }
        Ok(())
    };
    work.run.held.context.store.run(forget).await
}
