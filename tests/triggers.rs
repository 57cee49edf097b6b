//! Triggers: what is to be done is gathered, done, tried again, cancelled, and never lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::{db, eager, record, until, wide_bus, within};
use notibus::{
    Bus, ChangesOptions, Db, DdocId, Dispatcher, DispatcherOptions, DocId, DocSummary, Error, EventKind,
    Filter, IndexBuild, IndexDdocs, JanitorOptions, Notifier, Revision, Scan, ScanReporter, Sequence,
    TaskResult, Trigger, TriggerJob, TriggerOptions, index_trigger, replication_trigger, store::Database,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A bus with all its roles in one process.
struct World {
    /// The store.
    store: Database,
    /// The bus.
    bus: Bus,
    /// Folds at once.
    _notifier: Notifier,
    /// Dispatches.
    dispatcher: Dispatcher,
}

impl World {
    /// A bus in a new store.
    async fn new() -> Self {
        let store = Database::memory();
        let bus = wide_bus(&store).await;
        let notifier = bus.notifier(eager()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        Self { store, bus, _notifier: notifier, dispatcher }
    }

    /// Commits an event, and waits until the dispatcher has read it.
    async fn event(&self, db: &Db, kind: EventKind) {
        let before = self.bus.stats().folded.total();
        record(&self.store, &self.bus, db, kind.once().lanes()).await;
        self.settled(before).await;
    }

    /// Waits until more than `before` events are folded, and the dispatcher has read them.
    async fn settled(&self, before: u64) {
        until("the fold", async || self.bus.stats().folded.total() > before).await;
        let last = self.bus.feed().last_sequence().await.unwrap();
        until("the tail", async || Some(self.dispatcher.position()) >= last).await;
    }

    /// Commits a change of a design document.
    async fn ddoc(&self, db: &Db, id: Option<&str>) {
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
    async fn create(&self, db: &Db) {
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
    async fn delete(&self, db: &Db) {
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
    async fn document(&self, db: &Db, id: &str) {
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

/// A job that tells what it is given, and whose end is decided from outside.
struct Told<W> {
    /// What it is given.
    works: UnboundedSender<(W, tokio::sync::oneshot::Sender<TaskResult>)>,
    /// Databases that it was told to be gone.
    gone: UnboundedSender<Db>,
}

/// What hears of a job.
struct Ear<W> {
    /// What it is given, with the decision.
    works: UnboundedReceiver<(W, tokio::sync::oneshot::Sender<TaskResult>)>,
    /// Databases that it was told to be gone.
    gone: UnboundedReceiver<Db>,
}

/// A job, and what hears of it.
fn job<W>() -> (Told<W>, Ear<W>) {
    let (works, heard) = unbounded_channel();
    let (gone, left) = unbounded_channel();
    (Told { works, gone }, Ear { works: heard, gone: left })
}

impl<W: Send + 'static> TriggerJob<W> for Told<W> {
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

impl<W> Ear<W> {
    /// The next work, undecided.
    async fn hear(&mut self) -> (W, tokio::sync::oneshot::Sender<TaskResult>) {
        within("a job", self.works.recv()).await.unwrap()
    }

    /// The next work, which is done.
    async fn done(&mut self) -> W {
        let (work, decide) = self.hear().await;
        decide.send(Ok(())).unwrap();
        work
    }

    /// Whether nothing comes within a good while.
    async fn is_quiet(&mut self) -> bool {
        tokio::time::timeout(Duration::from_secs(30), self.works.recv()).await.is_err()
    }
}

/// Options of an index trigger with a debounce of a second.
fn quick() -> TriggerOptions {
    TriggerOptions { debounce: Duration::from_secs(1), ..TriggerOptions::index("views") }
}

/// Options of a janitor that soon drops tombstones.
fn forgetful() -> JanitorOptions {
    let (interval, tombstone_retention) = (Duration::from_secs(1), Duration::from_secs(10));
    JanitorOptions { interval, tombstone_retention, ..JanitorOptions::default() }
}

/// Waits until nothing is left to do, and that is put down.
async fn at_rest(world: &World, trigger: &Trigger) {
    tokio::time::sleep(Duration::from_secs(5)).await;
    until("rest", async || {
        let status = trigger.status();
        status.waiting == 0 && status.running == 0
    })
    .await;
    let now = world.bus.feed().last_sequence().await.unwrap().unwrap_or(Sequence::ZERO);
    until("the checkpoint", async || trigger.status().position >= now).await;
}

#[tokio::test]
async fn options_out_of_their_limits_are_typed_errors() {
    let world = World::new().await;
    let created = Filter::all().kinds(EventKind::Created.into()).unwrap();
    for bad in [
        TriggerOptions { name: String::new(), ..quick() },
        TriggerOptions { jobs_max: 0, ..quick() },
        TriggerOptions { pending_max: 0, ..quick() },
        TriggerOptions { attempts_max: Some(0), ..quick() },
        TriggerOptions { checkpoint_interval: Duration::ZERO, ..quick() },
        TriggerOptions { backoff_min: Duration::from_hours(1), ..quick() },
        TriggerOptions { filter: created.clone(), ..quick() },
        TriggerOptions { filter: Filter::any([created]).unwrap(), ..quick() },
    ] {
        let refused = index_trigger(&world.dispatcher, bad.clone(), job::<IndexBuild>().0).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{bad:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn builds_are_debounced_deduplicated_and_name_their_design_documents() {
    let world = World::new().await;
    let (told, mut ear) = job::<IndexBuild>();
    let trigger = index_trigger(&world.dispatcher, quick(), told).await.unwrap();
    let a = db("a", 1);
    world.event(&a, EventKind::Created).await;
    for _ in 0..10 {
        world.event(&a, EventKind::Updated).await;
    }
    let build = ear.done().await;
    assert_eq!((&build.db, build.is_fresh, build.attempt), (&a, true, 1));
    assert_eq!(build.ddocs, IndexDdocs::All);
    assert!(ear.is_quiet().await, "ten updates, one build");
    world.ddoc(&a, Some("_design/x")).await;
    world.ddoc(&a, Some("_design/y")).await;
    let build = ear.done().await;
    let ids: BTreeSet<DdocId> = ["_design/x", "_design/y"].map(|id| id.parse().unwrap()).into();
    assert_eq!((build.ddocs, build.is_fresh), (IndexDdocs::Only(ids), false));
    world.ddoc(&a, Some("_design/x")).await;
    world.event(&a, EventKind::Updated).await;
    assert_eq!(ear.done().await.ddocs, IndexDdocs::All, "documents have changed, too");
    world.ddoc(&a, None).await;
    assert_eq!(ear.done().await.ddocs, IndexDdocs::All, "it may be any");
    at_rest(&world, &trigger).await;
    assert_eq!((trigger.status().done, trigger.status().failed), (4, 0));
    trigger.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn no_more_builds_run_at_once_than_may_and_one_per_database() {
    let world = World::new().await;
    for n in 0..10 {
        world.event(&db(&format!("db{n}"), 1), EventKind::Created).await;
    }
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let names = Arc::new(Mutex::new(BTreeMap::new()));
    let (count, peak, known) = (Arc::clone(&running), Arc::clone(&most), Arc::clone(&names));
    let build = move |build: IndexBuild| {
        let (count, peak, known) = (Arc::clone(&count), Arc::clone(&peak), Arc::clone(&known));
        async move {
            let name = build.db.name.clone();
            assert!(known.lock().unwrap().insert(name.clone(), true) != Some(true), "one per database");
            peak.fetch_max(count.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(3)).await;
            count.fetch_sub(1, Ordering::SeqCst);
            known.lock().unwrap().insert(name, false);
            Ok(())
        }
    };
    // Also with less room for what waits than there are databases.
    let options = TriggerOptions { jobs_max: 3, pending_max: 4, ..quick() };
    let trigger = index_trigger(&world.dispatcher, options, build).await.unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    for n in 0..10 {
        world.event(&db(&format!("db{n}"), 1), EventKind::Updated).await;
    }
    at_rest(&world, &trigger).await;
    assert_eq!(most.load(Ordering::SeqCst), 3);
    assert_eq!(names.lock().unwrap().len(), 10);
    assert_eq!(trigger.status().failed, 0);
}

#[tokio::test(start_paused = true)]
async fn a_build_that_fails_or_panics_is_tried_again_with_pauses() {
    let world = World::new().await;
    let times = Arc::new(Mutex::new(Vec::new()));
    let tried = Arc::clone(&times);
    let build = move |build: IndexBuild| {
        tried.lock().unwrap().push(tokio::time::Instant::now());
        async move {
            match build.attempt {
                1 => Err("no disk".into()),
                2 => panic!("it breaks"),
                _ => Ok(()),
            }
        }
    };
    let trigger = index_trigger(&world.dispatcher, quick(), build).await.unwrap();
    world.event(&db("a", 1), EventKind::Created).await;
    assert!(within("the build", trigger.wait_for(|status| status.done == 1)).await);
    assert_eq!(trigger.status().failed, 2);
    let times = times.lock().unwrap().clone();
    let pauses: Vec<_> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    assert!((0.5..1.1).contains(&pauses[0]) && (1.0..2.1).contains(&pauses[1]), "{pauses:?}");
}

#[tokio::test(start_paused = true)]
async fn a_build_that_fails_too_often_is_given_up_until_the_database_changes() {
    let world = World::new().await;
    let options = TriggerOptions { attempts_max: Some(2), ..quick() };
    let (told, mut ear) = job::<IndexBuild>();
    let trigger = index_trigger(&world.dispatcher, options, told).await.unwrap();
    world.event(&db("a", 1), EventKind::Created).await;
    for attempt in 1..=2 {
        let (build, decide) = ear.hear().await;
        assert_eq!(build.attempt, attempt);
        decide.send(Err("no disk".into())).unwrap();
    }
    assert!(ear.is_quiet().await);
    assert_eq!(trigger.status().given_up, 1);
    world.event(&db("a", 1), EventKind::Updated).await;
    assert_eq!(ear.done().await.attempt, 1);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_database_cancels_and_a_recreated_one_is_built_afresh() {
    let world = World::new().await;
    let (told, mut ear) = job::<IndexBuild>();
    let trigger = index_trigger(&world.dispatcher, quick(), told).await.unwrap();
    let (old, new) = (db("a", 1), db("a", 2));
    world.event(&old, EventKind::Created).await;
    let (_, decide) = ear.hear().await;
    world.event(&old, EventKind::Deleted).await;
    within("the cancelling", async {
        while !decide.is_closed() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(within("the end", ear.gone.recv()).await.unwrap(), old);
    assert!(ear.is_quiet().await, "nothing is built of what is gone");
    assert_eq!((trigger.status().cancelled, trigger.status().done), (1, 1));
    // Recreated while a build runs: the trigger sees only the newest row.
    world.event(&new, EventKind::Created).await;
    let (build, decide) = ear.hear().await;
    assert_eq!((&build.db, build.is_fresh), (&new, true));
    let third = db("a", 3);
    let before = world.bus.stats().folded.total();
    record(&world.store, &world.bus, &new, [0, 1, 0, 0]).await;
    record(&world.store, &world.bus, &third, [1, 0, 1, 0]).await;
    world.settled(before + 2).await;
    within("the cancelling", async {
        while !decide.is_closed() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(within("the end", ear.gone.recv()).await.unwrap(), new, "before the next one is begun");
    let build = ear.done().await;
    assert_eq!((build.db, build.is_fresh, build.ddocs), (third, true, IndexDdocs::All));
    // Waiting for its debounce, and deleted before.
    world.event(&db("b", 1), EventKind::Created).await;
    world.event(&db("b", 1), EventKind::Deleted).await;
    assert_eq!(within("the end", ear.gone.recv()).await.unwrap(), db("b", 1));
    assert!(ear.is_quiet().await);
}

/// CouchDB 4 waits for a minute before it triggers a build, and loses it if the process ends within.
#[tokio::test(start_paused = true)]
async fn no_build_is_lost_by_a_crash_wherever_it_happens() {
    let world = World::new().await;
    let start = async || {
        let (told, ear) = job::<IndexBuild>();
        (index_trigger(&world.dispatcher, quick(), told).await.unwrap(), ear)
    };
    let (a, b) = (db("a", 1), db("b", 1));
    let (trigger, mut ear) = start().await;
    world.event(&a, EventKind::Created).await;
    ear.done().await;
    at_rest(&world, &trigger).await;
    // Within the debounce.
    world.event(&a, EventKind::Updated).await;
    drop((trigger, ear));
    let (trigger, mut ear) = start().await;
    assert_eq!(ear.done().await.db, a);
    at_rest(&world, &trigger).await;
    // While it runs, after others were done and their end was put down.
    world.event(&a, EventKind::Updated).await;
    let (_build, _decide) = ear.hear().await;
    world.event(&b, EventKind::Created).await;
    assert_eq!(ear.done().await.db, b);
    tokio::time::sleep(Duration::from_secs(5)).await;
    drop((trigger, ear));
    // And what happens while there is no trigger.
    world.event(&db("c", 1), EventKind::Created).await;
    let (trigger, mut ear) = start().await;
    let mut built = BTreeSet::new();
    while built.len() < 2 || !built.contains("c") {
        built.insert(ear.done().await.db.name.to_string());
    }
    assert!(built.contains("a"), "{built:?}");
    while !ear.is_quiet().await {}
    at_rest(&world, &trigger).await;
    // After an orderly end nothing comes again.
    trigger.shutdown().await.unwrap();
    let (_trigger, mut ear) = start().await;
    assert!(ear.is_quiet().await);
}

#[tokio::test(start_paused = true)]
async fn databases_that_are_not_wanted_move_the_cursor_on() {
    let world = World::new().await;
    let options = TriggerOptions { filter: Filter::suffix("/quiet"), ..quick() };
    let trigger = index_trigger(&world.dispatcher, options, job::<IndexBuild>().0).await.unwrap();
    world.event(&db("loud", 1), EventKind::Created).await;
    at_rest(&world, &trigger).await;
    assert_eq!(trigger.status().done, 0);
}

#[tokio::test(start_paused = true)]
async fn a_trigger_that_is_started_elsewhere_takes_over() {
    let world = World::new().await;
    let (told, mut first) = job::<IndexBuild>();
    let old = index_trigger(&world.dispatcher, quick(), told).await.unwrap();
    world.event(&db("a", 1), EventKind::Created).await;
    let (_build, decide) = first.hear().await;
    let other = world.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let (told, mut second) = job::<IndexBuild>();
    let _new = index_trigger(&other, quick(), told).await.unwrap();
    assert_eq!(second.done().await.db, db("a", 1), "what was not done");
    world.event(&db("b", 1), EventKind::Created).await;
    assert_eq!(second.done().await.db, db("b", 1));
    until("the end of the old one", async || old.status().is_finished).await;
    assert!(decide.is_closed(), "its jobs are stopped");
    assert!(matches!(old.shutdown().await, Err(Error::CursorLost { .. })));
}

/// The documents that a scan finds.
async fn ids(scan: &mut Scan) -> Vec<String> {
    let mut ids = Vec::new();
    loop {
        let page = scan.page(2).await.unwrap();
        ids.extend(page.rows.iter().map(|change| change.doc.id.to_string()));
        if !page.more {
            return ids;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn databases_are_scanned_from_the_beginning_and_then_from_the_last_seen_sequence() {
    let world = World::new().await;
    let found = db("_replicator", 1);
    world.create(&found).await;
    world.document(&found, "x").await;
    let (told, mut ear) = job::<Scan>();
    let trigger =
        replication_trigger(&world.dispatcher, TriggerOptions::replication("r"), told).await.unwrap();
    let (mut scan, decide) = ear.hear().await;
    assert_eq!((scan.db(), scan.since()), (&found, Sequence::ZERO), "it is found");
    assert_eq!(ids(&mut scan).await, ["x"]);
    decide.send(Ok(())).unwrap();
    let created = db("shop/_replicator", 2);
    for (n, stranger) in ["shop/_replicator2", "replicator", "shop/_users"].into_iter().enumerate() {
        world.create(&db(stranger, 10 + n as u8)).await;
    }
    world.create(&created).await;
    let (mut scan, decide) = ear.hear().await;
    assert_eq!((scan.db().clone(), ids(&mut scan).await.len()), (created.clone(), 0), "and no other");
    decide.send(Ok(())).unwrap();
    for some in [["a", "b", "c"], ["d", "e", "f"]] {
        for id in some {
            world.document(&created, id).await;
        }
        let mut seen = Vec::new();
        while seen.len() < 3 {
            let (mut scan, decide) = ear.hear().await;
            assert!(scan.since() > Sequence::ZERO || seen.is_empty());
            seen.extend(ids(&mut scan).await);
            decide.send(Ok(())).unwrap();
        }
        assert_eq!(seen, some, "each once");
        // An update that came during a scan that had read it already causes another one.
        while let Ok(Some((mut scan, decide))) =
            tokio::time::timeout(Duration::from_secs(5), ear.works.recv()).await
        {
            assert!(ids(&mut scan).await.is_empty());
            decide.send(Ok(())).unwrap();
        }
    }
    at_rest(&world, &trigger).await;
    trigger.shutdown().await.unwrap();
    // Another process goes on, unlike CouchDB, which begins from zero.
    world.document(&created, "g").await;
    let (told, mut ear) = job::<Scan>();
    let trigger =
        replication_trigger(&world.dispatcher, TriggerOptions::replication("r"), told).await.unwrap();
    let (mut scan, decide) = ear.hear().await;
    assert_eq!((scan.db().clone(), ids(&mut scan).await), (created, vec!["g".to_owned()]));
    decide.send(Ok(())).unwrap();
    assert!(ear.is_quiet().await);
    trigger.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_update_during_a_scan_causes_another_one_afterwards() {
    let world = World::new().await;
    let a = db("_replicator", 1);
    world.create(&a).await;
    let (told, mut ear) = job::<Scan>();
    let _trigger =
        replication_trigger(&world.dispatcher, TriggerOptions::replication("r"), told).await.unwrap();
    let (mut scan, decide) = ear.hear().await;
    assert!(ids(&mut scan).await.is_empty());
    for id in ["x", "y"] {
        world.document(&a, id).await;
    }
    assert!(ear.is_quiet().await, "one scan at a time");
    decide.send(Ok(())).unwrap();
    let (mut scan, decide) = ear.hear().await;
    assert_eq!(ids(&mut scan).await, ["x", "y"]);
    decide.send(Ok(())).unwrap();
    assert!(ear.is_quiet().await, "one for both updates");
}

#[tokio::test(start_paused = true)]
async fn a_scan_that_fails_goes_on_from_its_last_report() {
    let world = World::new().await;
    let a = db("_replicator", 1);
    world.create(&a).await;
    for id in ["x", "y", "z"] {
        world.document(&a, id).await;
    }
    let (told, mut ear) = job::<Scan>();
    let _trigger =
        replication_trigger(&world.dispatcher, TriggerOptions::replication("r"), told).await.unwrap();
    let (mut scan, decide) = ear.hear().await;
    let page = scan.page(1).await.unwrap();
    assert!(scan.reporter().report(page.to).await.unwrap());
    scan.page(1).await.unwrap();
    decide.send(Err("no network".into())).unwrap();
    let (mut scan, decide) = ear.hear().await;
    assert_eq!((scan.attempt(), scan.since()), (2, page.to));
    assert_eq!(ids(&mut scan).await, ["y", "z"], "what was not reported comes again");
    decide.send(Ok(())).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_deleted_database_stops_and_stale_reports_are_ignored() {
    let world = World::new().await;
    let (old, new) = (db("_replicator", 1), db("_replicator", 2));
    world.create(&old).await;
    let (told, mut ear) = job::<Scan>();
    let trigger =
        replication_trigger(&world.dispatcher, TriggerOptions::replication("r"), told).await.unwrap();
    let (mut scan, decide) = ear.hear().await;
    world.document(&old, "x").await;
    let page = scan.page(10).await.unwrap();
    let first: ScanReporter = scan.reporter();
    assert!(first.report(page.to).await.unwrap());
    decide.send(Ok(())).unwrap();
    let (scan, decide) = ear.hear().await;
    assert!(!first.report(page.to).await.unwrap(), "another scan has begun");
    let second = scan.reporter();
    world.delete(&old).await;
    within("the cancelling", async {
        while !decide.is_closed() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(within("the end", ear.gone.recv()).await.unwrap(), old);
    until("rest", async || trigger.status().running == 0).await;
    assert!(!second.report(page.to).await.unwrap(), "its database is gone");
    assert_eq!(trigger.status().cancelled, 1);
    world.create(&new).await;
    let (scan, decide) = ear.hear().await;
    assert_eq!((scan.db(), scan.since()), (&new, Sequence::ZERO));
    assert!(!second.report(page.to).await.unwrap(), "nor is it the new one");
    decide.send(Ok(())).unwrap();
    trigger.shutdown().await.unwrap();
}

/// Deleted while the trigger was away for longer than tombstones are kept: no row tells of it any more.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_has_expired_finds_out_what_is_gone() {
    let mut world = World::new().await;
    let (gone, again, stays) = (db("a/_replicator", 1), db("b/_replicator", 2), db("c/_replicator", 3));
    for db in [&gone, &again, &stays] {
        world.create(db).await;
    }
    let start = async |world: &World| {
        let (told, ear) = job::<Scan>();
        let options = TriggerOptions::replication("r");
        (replication_trigger(&world.dispatcher, options, told).await.unwrap(), ear)
    };
    let (trigger, mut ear) = start(&world).await;
    for _ in 0..3 {
        ear.done().await;
    }
    at_rest(&world, &trigger).await;
    trigger.shutdown().await.unwrap();
    world.delete(&gone).await;
    world.delete(&again).await;
    let _janitor = world.bus.janitor(forgetful()).await.unwrap();
    until("the tombstones' end", async || world.bus.stats().tombstones_dropped == 2).await;
    let back = db("b/_replicator", 4);
    world.create(&back).await;
    // Another process: the ring of the old one may still hold the tombstones.
    world.dispatcher = world.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let (trigger, mut ear) = start(&world).await;
    let mut scanned = BTreeSet::new();
    let mut ended = BTreeSet::new();
    while scanned.len() < 2 || ended.len() < 2 {
        tokio::select! {
            scan = ear.works.recv() => {
                let (scan, decide) = scan.unwrap();
                scanned.insert(scan.db().clone());
                decide.send(Ok(())).unwrap();
            }
            db = ear.gone.recv() => {
                ended.insert(db.unwrap());
            }
        }
    }
    assert_eq!(scanned, [back, stays].into());
    assert_eq!(ended, [gone, again].into());
    trigger.shutdown().await.unwrap();
}

/// Once, a trigger that crashed after it had learnt that it had expired forgot to find out what was gone.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_crashes_after_it_has_expired_still_finds_out_what_is_gone() {
    for is_done in [false, true] {
        let mut world = World::new().await;
        let (gone, stays) = (db("a/_replicator", 1), db("c/_replicator", 3));
        world.create(&gone).await;
        world.create(&stays).await;
        let start = async |world: &World, told| {
            let options =
                TriggerOptions { backoff_min: Duration::from_mins(5), ..TriggerOptions::replication("r") };
            replication_trigger(&world.dispatcher, options, told).await.unwrap()
        };
        let (told, mut ear) = job::<Scan>();
        let trigger = start(&world, told).await;
        ear.done().await;
        ear.done().await;
        at_rest(&world, &trigger).await;
        trigger.shutdown().await.unwrap();
        world.delete(&gone).await;
        let _janitor = world.bus.janitor(forgetful()).await.unwrap();
        until("the tombstone's end", async || world.bus.stats().tombstones_dropped == 1).await;
        world.dispatcher = world.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        // It is told, cannot act on it, and puts down how far it has come.
        let (told, Ear { mut works, gone: deaf }) = job::<Scan>();
        drop(deaf);
        let trigger = start(&world, told).await;
        let (_, decide) = within("a scan", works.recv()).await.unwrap();
        let mut decide = Some(decide);
        if is_done {
            decide.take().unwrap().send(Ok(())).unwrap();
        }
        tokio::time::sleep(Duration::from_secs(30)).await;
        drop(trigger);
        let (told, mut ear) = job::<Scan>();
        let trigger = start(&world, told).await;
        assert_eq!(within("that it is gone", ear.gone.recv()).await.unwrap(), gone);
        trigger.shutdown().await.unwrap();
    }
}

/// Once, of a database that was created anew twice while the trigger was away, the first instance was never told to be gone,
/// and what was started for it ran on.
#[tokio::test(start_paused = true)]
async fn an_instance_is_told_to_be_gone_however_many_have_come_since() {
    for lives in [true, false] {
        let mut world = World::new().await;
        let start = async |world: &World, told| {
            replication_trigger(&world.dispatcher, TriggerOptions::replication("r"), told).await.unwrap()
        };
        let [first, second, third] = [1, 2, 3].map(|instance| db("a/_replicator", instance));
        world.create(&first).await;
        let (told, mut ear) = job::<Scan>();
        let trigger = start(&world, told).await;
        ear.done().await;
        at_rest(&world, &trigger).await;
        trigger.shutdown().await.unwrap();
        world.delete(&first).await;
        world.create(&second).await;
        world.delete(&second).await;
        world.create(&third).await;
        if !lives {
            world.delete(&third).await;
        }
        // Another process: the ring of the old one holds every row.
        world.dispatcher = world.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let (told, mut ear) = job::<Scan>();
        let trigger = start(&world, told).await;
        let mut gone = BTreeSet::new();
        while !gone.contains(&first) {
            gone.insert(within("that it is gone", ear.gone.recv()).await.unwrap());
        }
        if lives {
            assert_eq!(ear.done().await.db(), &third);
            assert!(!gone.contains(&third));
        }
        at_rest(&world, &trigger).await;
        trigger.shutdown().await.unwrap();
    }
}

/// Once, a quiet database that changed had the cursor of a trigger of exact names go back to its last change.
#[tokio::test(start_paused = true)]
async fn the_cursor_of_a_trigger_never_goes_back() {
    let world = World::new().await;
    let (quiet, busy) = (db("quiet", 1), db("busy", 1));
    world.event(&quiet, EventKind::Created).await;
    world.event(&busy, EventKind::Created).await;
    let filter = Filter::names([quiet.name.clone(), busy.name.clone()]).unwrap();
    let (told, mut ear) = job::<IndexBuild>();
    let options = TriggerOptions { filter, ..quick() };
    let trigger = index_trigger(&world.dispatcher, options, told).await.unwrap();
    ear.done().await;
    ear.done().await;
    world.event(&busy, EventKind::Updated).await;
    ear.done().await;
    at_rest(&world, &trigger).await;
    let position = trigger.status().position;
    world.event(&quiet, EventKind::Updated).await;
    let (_, _undecided) = ear.hear().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(trigger.status().position >= position, "{:?} < {position:?}", trigger.status().position);
    trigger.shutdown().await.unwrap();
}

/// Once, a trigger that had as much to do as it may never read that the databases in question were gone, and stood still.
#[tokio::test(start_paused = true)]
async fn builds_of_databases_that_are_gone_do_not_stop_a_trigger_that_is_full() {
    let world = World::new().await;
    let (gone, other) = (db("gone", 1), db("other", 1));
    let (told, mut ear) = job::<IndexBuild>();
    let options = TriggerOptions { pending_max: 1, ..quick() };
    let trigger = index_trigger(&world.dispatcher, options, told).await.unwrap();
    world.event(&gone, EventKind::Created).await;
    let (_, decide) = ear.hear().await;
    world.event(&gone, EventKind::Deleted).await;
    world.event(&other, EventKind::Created).await;
    decide.send(Err("no such database".into())).unwrap();
    loop {
        let (build, decide) = ear.hear().await;
        if build.db == other {
            break;
        }
        decide.send(Err("no such database".into())).unwrap();
    }
    trigger.shutdown().await.unwrap();
}

/// Crashes at random between updates: at the end every document was seen.
#[tokio::test(start_paused = true)]
async fn no_change_is_missed_by_scans_that_crash_at_random() {
    let mut random = common::dice();
    let world = World::new().await;
    let dbs = [("_replicator", 1), ("a/_replicator", 2), ("b/_replicator", 3)].map(|(name, n)| db(name, n));
    for db in &dbs {
        world.create(db).await;
    }
    let (mut written, seen) = (BTreeSet::new(), Arc::new(Mutex::new(BTreeSet::new())));
    for round in 0..20 {
        let (seen, mut dice) = (Arc::clone(&seen), random.fork());
        let fails: Vec<_> = (0..64).map(|_| dice.u8(..4) == 0).collect();
        let scans = AtomicUsize::new(0);
        let scan = move |mut scan: Scan| {
            let seen = Arc::clone(&seen);
            let fails = fails[scans.fetch_add(1, Ordering::Relaxed) % fails.len()] && round < 19;
            async move {
                let name = scan.db().name.to_string();
                loop {
                    let page = scan.page(2).await?;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    if fails {
                        return Err("it fails".into());
                    }
                    let found = page.rows.iter().map(|change| (name.clone(), change.doc.id.to_string()));
                    seen.lock().unwrap().extend(found);
                    if !page.more {
                        return Ok(());
                    }
                }
            }
        };
        let options = TriggerOptions::replication("r");
        let trigger = replication_trigger(&world.dispatcher, options, scan).await.unwrap();
        for n in 0..random.usize(..6) {
            let db = random.choice(&dbs).unwrap();
            let id = format!("{round}-{n}");
            world.document(db, &id).await;
            written.insert((db.name.to_string(), id));
        }
        tokio::time::sleep(Duration::from_millis(random.u64(..3_000))).await;
        if round == 19 {
            at_rest(&world, &trigger).await;
        }
        if random.bool() {
            trigger.shutdown().await.unwrap();
        }
    }
    assert_eq!(*seen.lock().unwrap(), written);
}
