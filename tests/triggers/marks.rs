//! The marks of a trigger when the clean-up or the store fails.

use std::{sync::atomic::AtomicBool, sync::atomic::Ordering, time::Duration};

use notibus::{
    Db, DispatcherOptions, EventKind,
    jobs::{IndexBuild, TaskResult, TriggerJob, index_trigger},
    store::{
        Database, Isolation, KeyRange, RangeRead, StoreError,
        testing::{CommitFault, Faults, Operation},
    },
};

use crate::{
    common::{db, eager, forgetful, joined, until, wide_bus},
    fixture::{ReportingJob, TriggerFixture, at_rest, job, quick},
};

/// The key prefix of cursors and marks.
const CURSORS: &[u8] = b"notibus\x15\x10";

/// A job that cannot clean up.
struct Stubborn(ReportingJob<IndexBuild>);

impl TriggerJob<IndexBuild> for Stubborn {
    async fn run(&self, build: IndexBuild) -> TaskResult {
        self.0.run(build).await
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        self.0.deleted(db).await?;
        Err("no access".into())
    }
}

/// A bus with all its roles in a store that can fail.
pub async fn faulty() -> (TriggerFixture, Faults) {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.database()).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    (TriggerFixture { store, bus, _notifier: notifier, dispatcher }, faults)
}

/// Number of cursor and mark keys with `name`.
async fn marks(fixture: &TriggerFixture, name: &str) -> usize {
    let read = RangeRead::new(KeyRange::prefix(CURSORS));
    let page = fixture.store.begin().get_range(&read, Isolation::Snapshot).await.unwrap();
    page.rows.iter().filter(|(key, _)| key.windows(name.len()).any(|part| part == name.as_bytes())).count()
}

/// Regression: the mark of a database whose clean-up had failed too often stayed. Each build of its successor reported it again first,
/// failed by that, and was given up without an attempt.
#[tokio::test(start_paused = true)]
async fn a_clean_up_that_has_failed_too_often_does_not_keep_the_successor_from_being_built() {
    let fixture = TriggerFixture::new().await;
    let (old, new) = (db("again", 1), db("again", 2));
    let options = quick().attempts_max(2);
    let (reporting, mut reports) = job::<IndexBuild>();
    let trigger = index_trigger(&fixture.dispatcher, options.clone(), Stubborn(reporting)).await.unwrap();
    fixture.event(&old, EventKind::Created).await;
    reports.done().await;
    at_rest(&fixture, &trigger).await;
    fixture.event(&old, EventKind::Deleted).await;
    fixture.event(&new, EventKind::Created).await;
    let build = reports.done().await;
    assert_eq!((&build.db, build.attempt), (&new, 1));
    at_rest(&fixture, &trigger).await;
    assert_eq!(trigger.status().parked, 1, "the clean-up");
    assert_eq!((reports.gone.try_recv().unwrap(), reports.gone.try_recv().unwrap()), (old.clone(), old));
    assert_eq!(marks(&fixture, "again").await, 2, "the successor is marked, and the clean-up parked");
    trigger.shutdown().await.unwrap();
    // Another trigger of the name reports it again, which does not affect the successor.
    let (reporting, mut reports) = job::<IndexBuild>();
    let trigger = index_trigger(&fixture.dispatcher, options, Stubborn(reporting)).await.unwrap();
    fixture.event(&new, EventKind::Updated).await;
    assert_eq!(reports.done().await.db, new);
    assert_eq!(reports.gone.try_recv().unwrap(), db("again", 1));
    assert!(reports.gone.try_recv().is_err());
    trigger.shutdown().await.unwrap();
}

/// Regression: a build with one allowed attempt was given up because the store failed before it: it was never tried.
#[tokio::test(start_paused = true)]
async fn a_mark_that_cannot_be_written_is_no_attempt_of_the_build() {
    let (fixture, faults) = faulty().await;
    let options = quick().attempts_max(1);
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    faults.plan_reads(|operation| match operation {
        Operation::GetRange { range, .. } => range.begin.starts_with(CURSORS).then_some(StoreError::IO_ERROR),
        Operation::Get { key, .. } => key.starts_with(CURSORS).then_some(StoreError::IO_ERROR),
        _ => None,
    });
    fixture.event(&db("a", 1), EventKind::Created).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    faults.heal();
    let build = reports.done().await;
    assert_eq!((build.db, build.attempt), (db("a", 1), 1));
    at_rest(&fixture, &trigger).await;
    assert_eq!(trigger.status().parked, 0);
    trigger.shutdown().await.unwrap();
}

/// Regression: if a database was deleted while its mark was being written, the mark came after it was removed, and stayed: the next
/// trigger that searched for gone databases reported it once more.
#[tokio::test(start_paused = true)]
async fn a_mark_that_comes_after_it_was_forgotten_does_not_happen() {
    let (fixture, faults) = faulty().await;
    let late = db("late", 1);
    let options = quick().checkpoint_interval(Duration::from_hours(1));
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    let mut is_first = true;
    faults.plan_commits(move |attempt| {
        let is_mark = attempt.operations.iter().any(|operation| {
            matches!(operation, Operation::Set { key, .. }
                if key.starts_with(CURSORS) && key.windows(4).any(|part| part == b"late"))
        });
        (is_mark && std::mem::take(&mut is_first)).then_some(CommitFault::Late(StoreError::IO_ERROR))
    });
    fixture.event(&late, EventKind::Created).await;
    until("the mark", async || trigger.status().failed == 1).await;
    fixture.event(&late, EventKind::Deleted).await;
    assert_eq!(reports.gone.recv().await.unwrap(), late);
    until("the end", async || trigger.status().running == 0).await;
    let results = faults.commit_late().await;
    assert_eq!(results.len(), 1);
    assert!(results[0].is_err(), "it conflicts");
    assert_eq!(marks(&fixture, "late").await, 0);
    trigger.shutdown().await.unwrap();
}

/// Regression: all databases that were found to be gone after an expiry were planned at once, however many there were.
#[tokio::test(start_paused = true)]
async fn what_is_gone_after_an_expiry_is_planned_as_far_as_there_is_room() {
    let mut fixture = TriggerFixture::new().await;
    let all: Vec<_> = (0..20).map(|n| db(&format!("db{n:02}"), 1)).collect();
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    for db in &all {
        fixture.event(db, EventKind::Created).await;
    }
    for _ in &all {
        reports.done().await;
    }
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    for db in &all {
        fixture.event(db, EventKind::Deleted).await;
    }
    let stays = db("stays", 1);
    fixture.event(&stays, EventKind::Created).await;
    let _janitor = joined(&fixture.bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstones' end", async || fixture.bus.stats().tombstones_dropped == 20).await;
    fixture.dispatcher = fixture.bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let (reporting, mut reports) = job::<IndexBuild>();
    let options = quick().pending_max(4).jobs_max(1);
    let trigger = index_trigger(&fixture.dispatcher, options, Slow(reporting)).await.unwrap();
    let is_over = AtomicBool::new(false);
    let watch = async {
        let mut most = 0;
        while !is_over.load(Ordering::SeqCst) {
            let status = trigger.status();
            most = most.max(status.waiting + status.running);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        most
    };
    let hear = async {
        reports.done().await;
        let mut gone = Vec::new();
        for _ in &all {
            gone.push(reports.gone.recv().await.unwrap());
        }
        at_rest(&fixture, &trigger).await;
        is_over.store(true, Ordering::SeqCst);
        gone.sort();
        gone
    };
    let (most, gone) = tokio::join!(watch, hear);
    assert_eq!(gone, all, "each once");
    assert!(most <= 4, "{most} at once");
    trigger.shutdown().await.unwrap();
}

/// A job that takes a second to clean up.
struct Slow(ReportingJob<IndexBuild>);

impl TriggerJob<IndexBuild> for Slow {
    async fn run(&self, build: IndexBuild) -> TaskResult {
        self.0.run(build).await
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.0.deleted(db).await
    }
}
