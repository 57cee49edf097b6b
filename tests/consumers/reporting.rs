//! Shared by the tests of recipes: handlers that report their calls, and whose results the test decides.

use std::time::Duration;

use notibus::{
    Cursor, Db, EventKind,
    changes::{ChangesOptions, DocId, DocSummary, Revision},
    consumer::{
        Consumer, ConsumerBuilder, ConsumerOptions, DbHandler, DeletedDb, HandlerResult, IndexBuild, Scan,
        index, replicate,
    },
    event::{Counters, DdocId},
    store::Transaction,
};
use tokio::sync::{
    mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    oneshot,
};

use crate::{
    common::{NEVER, until, within},
    fixture::ConsumerFixture,
};

/// The prefix of the keys at which scans save their positions.
pub const SEEN: &str = "seen/";

impl ConsumerFixture {
    /// Commits an event, and waits until it is in the feed.
    pub async fn event(&self, db: &Db, kind: EventKind) {
        self.events(std::slice::from_ref(db), kind).await;
    }

    /// Commits an event of each database, and waits until the events are in the feed.
    pub async fn events(&self, dbs: &[Db], kind: EventKind) {
        let (producer, lanes) = (self.other.producer(), Counters::from_lanes(kind.once().lanes()));
        self.committed(dbs.len() as u64, async |tx| {
            for db in dbs {
                producer.record_all(tx, db, &lanes)?;
            }
            Ok(())
        })
        .await;
    }

    /// Commits the writes of `write`, and waits until the `events` events that it records are in the feed.
    pub async fn committed(&self, events: u64, write: impl AsyncFn(&Transaction) -> notibus::Result<()>) {
        let before = self.other.stats().folded.total();
        self.store.run(async |tx| write(&tx).await).await.unwrap();
        until("the fold", async || self.other.stats().folded.total() >= before + events).await;
    }

    /// Commits a change to the design document `id`, or a change without an id.
    pub async fn ddoc(&self, db: &Db, id: Option<&str>) {
        let (producer, id) = (self.other.producer(), id.map(ddoc));
        self.committed(1, async |tx| {
            producer.ddoc_updated(tx, db, id.as_ref());
            Ok(())
        })
        .await;
    }

    /// Creates a database with a feed of documents.
    pub async fn create_with_feed(&self, db: &Db) {
        let (changes, producer) = (self.other.changes(), self.other.producer());
        self.committed(1, async |tx| {
            changes.create(tx, db, &ChangesOptions::default()).await?;
            producer.created(tx, db);
            Ok(())
        })
        .await;
    }

    /// Creates a database with a feed of `shards` shards that has `docs` documents.
    pub async fn create_with_docs(&self, db: &Db, shards: u32, docs: u8) {
        let (changes, producer) = (self.other.changes(), self.other.producer());
        let create =
            async |tx: Transaction| changes.create(&tx, db, &ChangesOptions::default().shards(shards)).await;
        self.store.run(create).await.unwrap();
        self.committed(1, async |tx| {
            let writer = changes.writer(tx, db).await?;
            for n in 0..docs {
                let (id, revision) =
                    (DocId::new(&format!("doc{n}"))?, Revision { position: 1, hash: [n; 16] });
                writer.record(&DocSummary { id, revision, branches: 1, is_deleted: false }, None)?;
            }
            producer.created(tx, db);
            Ok(())
        })
        .await;
    }

    /// Deletes a database with its feed of documents.
    pub async fn delete_with_feed(&self, db: &Db) {
        let (changes, producer) = (self.other.changes(), self.other.producer());
        self.committed(1, async |tx| {
            changes.remove(tx, db);
            producer.deleted(tx, db);
            Ok(())
        })
        .await;
    }

    /// Writes a new document.
    pub async fn document(&self, db: &Db, id: &str) {
        let changes = self.other.changes();
        let revision = Revision { position: 1, hash: [1; 16] };
        let doc = DocSummary { id: DocId::new(id).unwrap(), revision, branches: 1, is_deleted: false };
        self.committed(1, async |tx| changes.writer(tx, db).await?.record(&doc, None).map(drop)).await;
    }

    /// Makes a member of the consumer `c` that begins with all databases.
    pub async fn member_of_all(&self, options: ConsumerOptions) -> ConsumerBuilder<notibus::Notification> {
        self.member().await.start_from(Cursor::BEGINNING).options(options)
    }

    /// Starts a member that builds indexes and reports its calls.
    pub async fn views(&self, options: ConsumerOptions) -> (Consumer, Reports<IndexBuild>) {
        let (reporting, reports) = reporting();
        (self.member_of_all(options).await.run(index(reporting)).await.unwrap(), reports)
    }

    /// Starts a member that scans databases and reports its calls.
    pub async fn scans(&self) -> (Consumer, Reports<Scan>) {
        let (reporting, reports) = reporting();
        let member = self.member_of_all(ConsumerOptions::default().poll_interval(NEVER)).await;
        (member.run(replicate(SEEN, reporting)).await.unwrap(), reports)
    }
}

pub fn ddoc(id: &str) -> DdocId {
    id.parse().unwrap()
}

/// Returns options with a debounce of one second.
pub fn quick() -> ConsumerOptions {
    ConsumerOptions::index().debounce(Duration::from_secs(1)).poll_interval(NEVER)
}

pub type Decision = oneshot::Sender<HandlerResult>;

/// A handler that reports its calls, and whose results the test decides.
pub struct Reporting<W> {
    works: UnboundedSender<(W, Decision)>,
    gone: UnboundedSender<DeletedDb>,
}

/// The reports of a handler.
pub struct Reports<W> {
    pub works: UnboundedReceiver<(W, Decision)>,
    pub gone: UnboundedReceiver<DeletedDb>,
}

pub fn reporting<W>() -> (Reporting<W>, Reports<W>) {
    let ((works, heard), (gone, left)) = (unbounded_channel(), unbounded_channel());
    (Reporting { works, gone }, Reports { works: heard, gone: left })
}

impl<W: Send + 'static> DbHandler<W> for Reporting<W> {
    async fn handle(&self, work: W) -> HandlerResult {
        let (decide, decided) = oneshot::channel();
        self.works.send((work, decide)).map_err(|_| "nobody hears")?;
        decided.await?
    }

    async fn deleted(&self, deleted: DeletedDb) -> HandlerResult {
        Ok(self.gone.send(deleted)?)
    }
}

impl<W> Reports<W> {
    /// Returns the next work, undecided.
    pub async fn next_work(&mut self) -> (W, Decision) {
        within("work", self.works.recv()).await.unwrap()
    }

    /// Returns the next work, and lets it succeed.
    pub async fn done(&mut self) -> W {
        let (work, decide) = self.next_work().await;
        decide.send(Ok(())).unwrap();
        work
    }

    /// Returns the next work, and makes it fail.
    pub async fn fails(&mut self) -> W {
        let (work, decide) = self.next_work().await;
        decide.send(Err("no disk".into())).unwrap();
        work
    }

    /// Returns the next database that has ended.
    pub async fn next_gone(&mut self) -> Db {
        within("an end", self.gone.recv()).await.unwrap().db
    }

    /// Whether no work arrives for 30 s.
    pub async fn is_quiet(&mut self) -> bool {
        tokio::time::timeout(Duration::from_secs(30), self.works.recv()).await.is_err()
    }
}

/// Waits until a run that waits for `decide` is cancelled.
pub async fn cancelled(decide: &Decision) {
    until("the cancelling", async || decide.is_closed()).await;
}
