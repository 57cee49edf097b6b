//! [`Changes`]: the edited documents of a database, in the order of their last edits (`_changes`).
//!
//! Each database has its own feed, sharded like the notification feed (CouchDB RFC 018). A row has the winning revision of a document after
//! its last edit (RFC 003). It is written in the transaction that edits the document, together with the event of the database. An insert
//! costs one key, and an update clears one more key. Neither reads anything from the feed except the one key that shows that its shards
//! have not changed.
//!
//! This is not a document store. A layer keeps the documents, each with the sequence of its last edit, which the next edit needs.

mod doc;
mod rows;
mod tail;
mod writer;

use std::sync::Arc;

use dashmap::DashMap;

pub use self::{
    doc::{Change, DocId, DocSummary, Revision},
    rows::{ChangeRow, ChangesPage, ChangesQuery, DocSource, Leaf},
    tail::ChangesTail,
    writer::{ChangesWriter, PendingSequence},
};
use crate::{
    base::{
        cursor::Cursor,
        encoding::Sequence,
        error::{Error, Result},
        event::{Db, DbInstance},
    },
    roles::{
        dispatcher::{Dispatcher, Filter},
        producer::Producer,
    },
    state::{
        context::Context,
        feed::{Feed, FeedRow, NewTopology, PendingRows, RawFeed, Topology, check_legacy_prefix},
        history::History,
        keys::{FeedId, RowSpace},
        routing::SchemeId,
    },
    store::{Isolation, KeyRange, RangeRead, Transaction},
};

/// The maximum number of cached topologies. With more databases than that, some topologies are read again.
const TOPOLOGIES_MAX: usize = 10_000;

/// Options for creating the changes feed of a database.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChangesOptions {
    /// The number of shards, 1 to 1,000. It can be changed at any time ([`Feed::reshard`]). Default: 1.
    pub shards: u32,
    /// The scheme that routes documents to shards; [`SchemeId::PARTITION_KEY`] for partitioned databases. Default:
    /// [`SchemeId::ID`].
    pub scheme: SchemeId,
}

crate::base::macros::setters!(ChangesOptions { shards: u32, scheme: SchemeId });

impl Default for ChangesOptions {
    fn default() -> Self {
        Self { shards: 1, scheme: SchemeId::ID }
    }
}

/// The changes feeds of all databases. Clones are cheap and share a cache of topologies.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> notibus::Result<()> {
/// use notibus::{Bus, BusOptions, changes::{ChangesOptions, DocId, DocSummary}, Cursor, Db, DbInstance, Sequence, store::{AtomicOp, Store, Isolation}};
///
/// let store = Store::memory();
/// let bus = Bus::open(&store, BusOptions::default()).await?;
/// let changes = bus.changes();
/// let db = Db::new("orders".parse()?, DbInstance::new());
/// store.run(async |tx| changes.create(&tx, &db, &ChangesOptions::default()).await).await?;
///
/// for revision in ["1-7051cbe5c8faecd085a3fa619e6e6337", "2-eec205a9d413992850a6e32678485900"] {
///     bus
///         .run_exactly_once(None, async |tx| {
///             // The layer's own row of the document says when it was last edited.
///             let previous = tx.get(b"last edit of x", Isolation::Serializable).await?;
///             let previous = previous.map(|bytes| Sequence::from_bytes(&bytes)).transpose()?;
///             let id = DocId::new("x")?;
///             let doc = DocSummary { id, revision: revision.parse()?, branches: 1, is_deleted: false };
///             let edited = changes.writer(&tx, &db).await?.record(&doc, previous)?;
///             tx.atomic(AtomicOp::SetVersionstampedValue, b"last edit of x", &edited.operand(&[], &[]));
///             Ok(())
///         })
///         .await?;
/// }
/// let page = changes.feed(&db).page(Cursor::BEGINNING, 100).await?;
/// assert_eq!(page.rows.len(), 1, "each document once");
/// assert_eq!(page.rows[0].doc.revision.position, 2);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Changes {
    context: Arc<Context>,
    /// Records the events of the databases.
    producer: Producer,
    /// The cached topologies. Each transaction checks that the topology it uses is current.
    topologies: Arc<DashMap<DbInstance, Arc<Topology>>>,
}

impl Changes {
    pub(crate) fn new(context: Arc<Context>, producer: Producer) -> Self {
        Self { context, producer, topologies: Arc::default() }
    }

    /// Creates the changes feed of `db` in the transaction that creates the database. A retry after an unknown result
    /// changes nothing.
    ///
    /// Fails with [`Error::Invalid`](crate::Error::Invalid) if an option is outside its limits or the feed exists with other options, and
    /// with [`Error::UnknownScheme`](crate::Error::UnknownScheme).
    pub async fn create(&self, tx: &Transaction, db: &Db, options: &ChangesOptions) -> Result<()> {
        let new = self.new_topology(db, options)?;
        self.raw(&FeedId::documents(db.instance)).create(tx, &new).await
    }

    /// Creates the changes feed of `db` from its old, unsharded rows under `prefix`. Their keys consist of the prefix and a tuple of
    /// incarnation and versionstamp; their values are those of RFC 003. The rows become the first shard of the feed, number 0; new rows go
    /// to other shards, and an edit of a document removes its row from the old range.
    ///
    /// Old writers must no longer write to the range.
    ///
    /// Before the feed is created, all rows are read and checked, in as many transactions as it takes.
    ///
    /// Fails as [`Changes::create`] does; if the prefix is empty or longer than 1,024 bytes; if a row is from a later incarnation than the
    /// bus ([`Bus::raise_incarnation`](crate::Bus::raise_incarnation)); and with [`Error::Corrupt`](crate::Error::Corrupt), which names the
    /// row, if a row cannot be decoded. After a failure nothing has changed.
    pub async fn adopt(&self, db: &Db, prefix: &[u8], options: &ChangesOptions) -> Result<()> {
        let new = self.new_topology(db, options)?;
        let feed = FeedId::documents(db.instance);
        let rows = self.check_legacy(prefix).await?;
        self.context.store.run(async |tx| self.raw(&feed).adopt(&tx, (prefix, rows), &new).await).await
    }

    /// Removes the changes feed of `db` in the transaction that deletes the database. An adopted old range is not cleared. Writers of the
    /// feed in this transaction become invalid.
    pub fn remove(&self, tx: &Transaction, db: &Db) {
        let feed = FeedId::documents(db.instance);
        for range in &self.context.keys.whole_feed(&feed) {
            tx.clear_range(range);
        }
        PendingRows::note_removal(tx, &self.context.keys.pulse(&feed));
        self.topologies.remove(&db.instance);
    }

    /// Makes a writer for changes of `db` in `tx`. Reads one key, so that `tx` fails if the feed is resharded before the commit.
    ///
    /// Fails with [`Error::NoFeed`](crate::Error::NoFeed) if the feed was not created, or was removed, and with
    /// [`Error::OlderThanRows`](crate::Error::OlderThanRows) if this process already knows that the store is older than its rows.
    pub async fn writer<'a>(&'a self, tx: &'a Transaction, db: &'a Db) -> Result<ChangesWriter<'a>> {
        let feed = FeedId::documents(db.instance);
        let feed = self.raw(&feed);
        History::check_edit(&self.context, tx).await?;
        let known = self.topologies.get(&db.instance).map(|known| Arc::clone(&known));
        let topology = match known {
            Some(known) if known.is_current(tx, feed).await? => known,
            _ => {
                let read = Arc::new(Topology::read(tx, feed, Isolation::Serializable).await?);
                if self.topologies.len() >= TOPOLOGIES_MAX {
                    self.topologies.clear();
                }
                self.topologies.insert(db.instance, Arc::clone(&read));
                read
            }
        };
        Ok(ChangesWriter::new(self, tx, db, topology))
    }

    /// Returns the changes feed of `db`, for reading or resharding.
    pub fn feed(&self, db: &Db) -> Feed<Change> {
        self.feed_of(db.instance)
    }

    /// Returns the changes feed of the database that was created as `instance`, for callers that know only the instance.
    pub fn feed_of(&self, instance: DbInstance) -> Feed<Change> {
        Feed::new(Arc::clone(&self.context), FeedId::documents(instance))
    }

    /// Returns the sequence of the last edit of any document of `db`; `None` if there was none.
    pub async fn last_change(&self, db: &Db) -> Result<Option<Sequence>> {
        self.feed(db).last_sequence().await
    }

    /// Reads the changes of `db` that `query` asks for, with the leaves and bodies that `source` returns, in one transaction.
    pub async fn rows(&self, db: &Db, query: &ChangesQuery, source: &dyn DocSource) -> Result<ChangesPage> {
        let feed = self.feed(db);
        self.context.store.run(async |tx| rows::read(&tx, &feed, db, query, source).await).await
    }

    /// Reads the changes of `db` as they appear, from `after` on; notifications from `dispatcher` wake the tail.
    pub fn tail(&self, dispatcher: &Dispatcher, db: &Db, after: impl Into<Cursor>) -> ChangesTail {
        let name = Filter::name(db.name.as_str()).expect("it is the name of a database");
        let updates = dispatcher.subscribe(name).stream();
        ChangesTail::new(self.feed(db), after.into(), updates)
    }

    /// Counts the rows under `prefix`. Fails if one of them is not a row of a changes feed.
    async fn check_legacy(&self, prefix: &[u8]) -> Result<u64> {
        check_legacy_prefix(&self.context, prefix)?;
        let space = RowSpace::new(prefix.to_vec());
        let (mut rest, mut rows) = (Some(RangeRead::new(KeyRange::prefix(prefix.to_vec()))), 0);
        while let Some(read) = rest {
            let page =
                self.context.store.run(async |tx| tx.get_range(&read, Isolation::Snapshot).await).await?;
            for (key, value) in &page.rows {
                let row = space.sequence(key).and_then(|sequence| Change::from_stored(sequence, value));
                if let Err(error) = row {
                    let reason = format!("the row at key {} cannot be adopted: {error}", key.escape_ascii());
                    return Err(Error::corrupt("legacy range", reason));
                }
                let (incarnation, current) =
                    (space.sequence(key)?.incarnation(), self.context.config.incarnation);
                if incarnation > current {
                    let reason = format!(
                        "the row at key {} has incarnation {}, but the bus has {}, so new rows would come before it: raise the \
                         incarnation of the bus first",
                        key.escape_ascii(),
                        incarnation.0,
                        current.0
                    );
                    return Err(Error::invalid("legacy range", reason));
                }
            }
            rows += page.rows.len() as u64;
            rest = read.after(&page);
        }
        Ok(rows)
    }

    /// Makes the first topology of a feed. Its token is the instance of the database, because an instance is created only once.
    fn new_topology(&self, db: &Db, options: &ChangesOptions) -> Result<NewTopology> {
        let new = NewTopology::new(options.shards, Some(options.scheme), self.context.env())?;
        Ok(new.with_token(db.instance.0))
    }

    fn raw<'a>(&'a self, feed: &'a FeedId) -> RawFeed<'a> {
        RawFeed::new(&self.context, feed)
    }
}
