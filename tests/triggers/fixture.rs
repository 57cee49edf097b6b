//! A bus with all its roles, and jobs whose results the test decides.

use std::time::Duration;

use notibus::{
    Bus, Cursor, Db, Dispatcher, DispatcherOptions, EventKind, Notifier, Trigger,
    changes::{ChangesOptions, DocId, DocSummary, Revision},
    event::DdocId,
    jobs::{IndexBuild, TaskResult, TriggerJob, TriggerOptions, index_trigger},
    store::Database,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::common::{eager, joined, record, until, wide_bus, within};

/// A bus with all its roles in one process.
pub struct TriggerFixture {
    pub store: Database,
    pub bus: Bus,
    /// Folds at once.
    pub _notifier: Notifier,
    pub dispatcher: Dispatcher,
}

impl TriggerFixture {
    /// A bus in a new store.
    pub async fn new() -> Self {
        let store = Database::memory();
        let bus = wide_bus(&store).await;
        let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        Self { store, bus, _notifier: notifier, dispatcher }
    }

    /// Starts an index trigger whose job reports its calls.
    pub async fn index_trigger(&self, options: TriggerOptions) -> (Trigger, JobReports<IndexBuild>) {
        let (reporting, reports) = job();
        (index_trigger(&self.dispatcher, options, reporting).await.unwrap(), reports)
    }

    /// Commits an event, and waits until the dispatcher has read it.
    pub async fn event(&self, db: &Db, kind: EventKind) {
        let before = self.bus.stats().folded.total();
        record(&self.store, &self.bus, db, kind.once().lanes()).await;
        self.settled(before).await;
    }

    /// Waits until more than `before` events are folded, and the dispatcher has read them.
    pub async fn settled(&self, before: u64) {
        until("the fold", async || self.bus.stats().folded.total() > before).await;
        let last = self.bus.feed().last_sequence().await.unwrap();
        until("the tail", async || Some(self.dispatcher.position()) >= last).await;
    }

    /// Commits a change of a design document.
    pub async fn ddoc(&self, db: &Db, id: Option<&str>) {
        let before = self.bus.stats().folded.total();
        let (producer, id) = (self.bus.producer(), id.map(|id| id.parse::<DdocId>().unwrap()));
        let write = async |tx| {
            producer.ddoc_updated(&tx, db, id.as_ref());
            Ok(())
        };
        self.store.run(write).await.unwrap();
        self.settled(before).await;
    }

    /// Creates a database with a feed of documents.
    pub async fn create(&self, db: &Db) {
        let before = self.bus.stats().folded.total();
        let (changes, producer) = (self.bus.changes(), self.bus.producer());
        let create = async |tx| {
            changes.create(&tx, db, &ChangesOptions::default()).await?;
            producer.created(&tx, db);
            Ok(())
        };
        self.store.run(create).await.unwrap();
        self.settled(before).await;
    }

    /// Deletes a database with its feed of documents.
    pub async fn delete(&self, db: &Db) {
        let before = self.bus.stats().folded.total();
        let (changes, producer) = (self.bus.changes(), self.bus.producer());
        let delete = async |tx| {
            changes.remove(&tx, db);
            producer.deleted(&tx, db);
            Ok(())
        };
        self.store.run(delete).await.unwrap();
        self.settled(before).await;
    }

    /// Writes a new document.
    pub async fn document(&self, db: &Db, id: &str) {
        let before = self.bus.stats().folded.total();
        let changes = self.bus.changes();
        let revision = Revision { position: 1, hash: [1; 16] };
        let doc = DocSummary { id: DocId::new(id).unwrap(), revision, branches: 1, is_deleted: false };
        let write = async |tx| {
            changes.writer(&tx, db).await?.record(&doc, None)?;
            Ok(())
        };
        self.store.run(write).await.unwrap();
        self.settled(before).await;
    }
}

/// A job that reports its calls, and whose results the test decides.
pub struct ReportingJob<W> {
    pub works: UnboundedSender<(W, tokio::sync::oneshot::Sender<TaskResult>)>,
    /// Databases that were reported to it as gone.
    pub gone: UnboundedSender<Db>,
}

/// Receives the reports of a job.
pub struct JobReports<W> {
    pub works: UnboundedReceiver<(W, tokio::sync::oneshot::Sender<TaskResult>)>,
    /// Databases that were reported to it as gone.
    pub gone: UnboundedReceiver<Db>,
}

/// Makes a job and the receiver of its reports.
pub fn job<W>() -> (ReportingJob<W>, JobReports<W>) {
    let (works, heard) = unbounded_channel();
    let (gone, left) = unbounded_channel();
    (ReportingJob { works, gone }, JobReports { works: heard, gone: left })
}

impl<W: Send + 'static> TriggerJob<W> for ReportingJob<W> {
    async fn run(&self, work: W) -> TaskResult {
        let (decide, decided) = tokio::sync::oneshot::channel();
        self.works.send((work, decide)).map_err(|_| "nobody hears")?;
        decided.await?
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        self.gone.send(db)?;
        Ok(())
    }
}

impl<W> JobReports<W> {
    /// The next work, undecided.
    pub async fn next_work(&mut self) -> (W, tokio::sync::oneshot::Sender<TaskResult>) {
        within("a job", self.works.recv()).await.unwrap()
    }

    /// The next work, which succeeds.
    pub async fn done(&mut self) -> W {
        let (work, decide) = self.next_work().await;
        decide.send(Ok(())).unwrap();
        work
    }

    /// The next work, which fails.
    pub async fn fails(&mut self) -> W {
        let (work, decide) = self.next_work().await;
        decide.send(Err("no disk".into())).unwrap();
        work
    }

    /// Whether nothing comes within a good while.
    pub async fn is_quiet(&mut self) -> bool {
        tokio::time::timeout(Duration::from_secs(30), self.works.recv()).await.is_err()
    }
}

/// Options of an index trigger with a debounce of a second.
pub fn quick() -> TriggerOptions {
    TriggerOptions::index("views").debounce(Duration::from_secs(1))
}

/// Waits until no work is left, and that is saved.
pub async fn at_rest(fixture: &TriggerFixture, trigger: &Trigger) {
    tokio::time::sleep(Duration::from_secs(5)).await;
    until("rest", async || {
        let status = trigger.status();
        status.waiting == 0 && status.running == 0
    })
    .await;
    let now = fixture.bus.feed().last_sequence().await.unwrap().map_or(Cursor::NOTHING, Cursor::from);
    until("the checkpoint", async || trigger.status().position >= now).await;
}
