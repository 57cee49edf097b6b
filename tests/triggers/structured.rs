//! All that a job starts ends inside it: nothing of it runs or commits once anything reports that it is over.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use notibus::{
    Cursor, Db, Error, EventKind,
    changes::{Change, Changes, ChangesOptions, DocId, DocSummary, Revision},
    jobs::{Batch, IndexBuild, ParallelJob, TaskResult, TriggerJob, TriggerOptions, index_trigger},
    store::{
        Database, Isolation, KeyRange, RangeRead, StoreError, Transaction,
        testing::{CommitFault, Operation},
    },
};

use crate::{
    common::{db, until},
    fixture::{TriggerFixture, quick},
    marks::faulty,
};

/// The batches of a job, and when it was reported to be over.
#[derive(Clone)]
struct Watched {
    changes: Changes,
    /// Batches that were begun.
    begun: Arc<AtomicUsize>,
    /// Whether it was reported to be over.
    is_over: Arc<AtomicBool>,
    /// Batches that ended after that.
    late: Arc<AtomicUsize>,
}

impl Watched {
    fn new(fixture: &TriggerFixture) -> Self {
        let (begun, is_over, late) = Default::default();
        Self { changes: fixture.bus.changes(), begun, is_over, late }
    }

    /// Works on a batch like a layer that uses the processor for a while.
    fn work(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(20));
        self.late.fetch_add(usize::from(self.is_over.load(Ordering::SeqCst)), Ordering::SeqCst);
    }

    /// Works through the changes of `db`, document by document; fails after `fails_after` of them.
    fn job(&self, db: &Db, fails_after: usize) -> impl Future<Output = notibus::Result<Cursor>> + use<> {
        let options = notibus::jobs::ParallelJobOptions::default().batch_rows_max(1).attempts_max(1);
        let job = ParallelJob::new(self.changes.feed(db), Cursor::NOTHING).with_options(options);
        let this = self.clone();
        async move {
            let work = move |_: Batch<Change>| {
                let this = this.clone();
                async move {
                    this.work();
                    if this.begun.load(Ordering::SeqCst) > fails_after {
                        return Err("it fails".into());
                    }
                    Ok(())
                }
            };
            job.run(work).await
        }
    }
}

impl TriggerJob<IndexBuild> for Watched {
    async fn run(&self, build: IndexBuild) -> TaskResult {
        self.job(&build.db, usize::MAX).await?;
        Ok(())
    }

    async fn deleted(&self, _: Db) -> TaskResult {
        self.is_over.store(true, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(())
    }
}

/// A database with documents in several shards.
async fn fill(fixture: &TriggerFixture, db: &Db, docs: usize) {
    let (changes, producer) = (fixture.bus.changes(), fixture.bus.producer());
    let options = ChangesOptions::default().shards(4);
    let revision = Revision { position: 1, hash: [1; 16] };
    let write = async |tx| {
        changes.create(&tx, db, &options).await?;
        producer.created(&tx, db);
        let writer = changes.writer(&tx, db).await?;
        for n in 0..docs {
            let id = DocId::new(&format!("doc{n}"))?;
            writer.record(&DocSummary { id, revision, branches: 1, is_deleted: false }, None)?;
        }
        Ok(())
    };
    fixture.store.run(write).await.unwrap();
}

/// A trigger of these jobs that begins at once.
async fn start(fixture: &TriggerFixture, job: &Watched) -> notibus::Trigger {
    let options = TriggerOptions::index("views").debounce(Duration::ZERO);
    index_trigger(&fixture.dispatcher, options, job.clone()).await.unwrap()
}

/// Regression: the tasks of a parallel job were only asked to end when it was dropped: of 20 databases that were deleted while they
/// were built, 14 had rows in their index forever, which were written after `deleted` had cleared it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_of_a_cancelled_build_runs_once_its_database_is_reported_as_gone() {
    for round in 0..5 {
        let fixture = TriggerFixture::new().await;
        let job = Watched::new(&fixture);
        let trigger = start(&fixture, &job).await;
        let db = db(&format!("db{round}"), 1);
        fill(&fixture, &db, 200).await;
        until("the build", async || job.begun.load(Ordering::SeqCst) > 2).await;
        fixture.delete(&db).await;
        until("the end", async || job.is_over.load(Ordering::SeqCst)).await;
        tokio::time::sleep(Duration::from_millis(60)).await;
        assert_eq!(job.late.load(Ordering::SeqCst), 0, "batches of the build ended after `deleted`");
        trigger.shutdown().await.unwrap();
    }
}

/// Regression: both returned while batches were still in work.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_trigger_that_has_shut_down_or_was_dropped_has_no_work_left() {
    for is_orderly in [true, false] {
        let fixture = TriggerFixture::new().await;
        let job = Watched::new(&fixture);
        let trigger = start(&fixture, &job).await;
        fill(&fixture, &db("a", 1), 200).await;
        until("the build", async || job.begun.load(Ordering::SeqCst) > 2).await;
        if is_orderly {
            trigger.shutdown().await.unwrap();
        } else {
            drop(trigger);
        }
        job.is_over.store(true, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(60));
        assert_eq!(job.late.load(Ordering::SeqCst), 0, "orderly: {is_orderly}");
    }
}

/// Regression: the failure of one task was returned while the others still worked; and a job that was dropped left them at work.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_parallel_job_that_has_failed_or_was_dropped_has_no_work_left() {
    for fails_after in [3, usize::MAX] {
        let fixture = TriggerFixture::new().await;
        let job = Watched::new(&fixture);
        fill(&fixture, &db("a", 1), 200).await;
        let run = job.job(&db("a", 1), fails_after);
        if fails_after < usize::MAX {
            run.await.unwrap_err();
        } else {
            tokio::select! {
                _ = run => unreachable!("it takes longer"),
                () = until("the work", async || job.begun.load(Ordering::SeqCst) > 2) => {}
            }
        }
        job.is_over.store(true, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(60));
        assert_eq!(job.late.load(Ordering::SeqCst), 0, "fails after {fails_after}");
    }
}

/// Builds an index of one key, in transactions that check the fence of the build.
struct OneKey(Database);

impl TriggerJob<IndexBuild> for OneKey {
    async fn run(&self, build: IndexBuild) -> TaskResult {
        let write = async |tx: Transaction| {
            build.check_in(&tx).await?;
            tx.set(b"index/a", b"");
            Ok(())
        };
        self.0.run(write).await?;
        Ok(())
    }

    async fn deleted(&self, _: Db) -> TaskResult {
        let clear = async |tx: Transaction| {
            tx.clear_range(&KeyRange::prefix("index/"));
            Ok(())
        };
        Ok(self.0.run(clear).await?)
    }
}

/// Regression: a commit continues without the task that has begun it. The commit of a build whose database is deleted meanwhile came
/// after `deleted` had cleared the index, and stayed forever.
#[tokio::test(start_paused = true)]
async fn a_commit_that_is_on_its_way_when_its_build_is_cancelled_does_not_happen() {
    let (fixture, faults) = faulty().await;
    let job = OneKey(faults.database());
    let trigger = index_trigger(&fixture.dispatcher, quick(), job).await.unwrap();
    let mut is_first = true;
    faults.plan_commits(move |attempt| {
        let is_index = |operation: &Operation| {
            matches!(operation, Operation::Set { key, .. } if key.starts_with(b"index/"))
        };
        let is_late = attempt.operations.iter().any(is_index) && std::mem::take(&mut is_first);
        is_late.then_some(CommitFault::Late(StoreError::IO_ERROR))
    });
    let a = db("a", 1);
    fixture.event(&a, EventKind::Created).await;
    until("the build", async || trigger.status().failed == 1).await;
    fixture.event(&a, EventKind::Deleted).await;
    until("the end", async || trigger.status().done == 1).await;
    let results = faults.commit_late().await;
    assert!(results.len() == 1 && results[0].is_err(), "it conflicts with the end of the build");
    let left = RangeRead::new(KeyRange::prefix("index/"));
    let left = fixture.store.begin().get_range(&left, Isolation::Snapshot).await.unwrap();
    assert!(left.rows.is_empty(), "the index of a deleted database");
    trigger.shutdown().await.unwrap();
}

/// The fence of a build that is over refuses later transactions, too.
#[tokio::test(start_paused = true)]
async fn the_fence_of_a_build_that_was_done_again_or_whose_database_is_gone_refuses() {
    let fixture = TriggerFixture::new().await;
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let a = db("a", 1);
    let checked = async |build: &IndexBuild| {
        let checked = fixture.store.run(async |tx| build.check_in(&tx).await).await;
        assert!(matches!(checked, Ok(()) | Err(Error::Cancelled { .. })), "{checked:?}");
        checked.is_ok()
    };
    fixture.event(&a, EventKind::Created).await;
    let (first, decide) = reports.next_work().await;
    assert!(checked(&first).await);
    decide.send(Err("once more".into())).unwrap();
    let (second, _undecided) = reports.next_work().await;
    assert!(!checked(&first).await && checked(&second).await);
    fixture.event(&a, EventKind::Deleted).await;
    assert_eq!(reports.gone.recv().await.unwrap(), a);
    assert!(!checked(&second).await);
    trigger.shutdown().await.unwrap();
}

/// Regression: a trigger took the cursor over and then failed to read other state that it needs: the old one ended, and none was left.
#[tokio::test(start_paused = true)]
async fn a_trigger_that_cannot_start_leaves_the_old_one_at_work() {
    let (fixture, faults) = faulty().await;
    let (reporting, mut reports) = crate::fixture::job::<IndexBuild>();
    let options = quick().checkpoint_interval(Duration::from_hours(1));
    fixture.event(&db("a", 1), EventKind::Created).await;
    let old = index_trigger(&fixture.dispatcher, options, reporting).await.unwrap();
    reports.done().await;
    faults.plan_reads(|operation| {
        let is_marks = matches!(operation, Operation::GetRange { range, .. }
            if range.begin.starts_with(b"notibus\x15\x10"));
        is_marks.then_some(StoreError::IO_ERROR)
    });
    let (reporting, _) = crate::fixture::job::<IndexBuild>();
    assert!(index_trigger(&fixture.dispatcher, quick(), reporting).await.is_err());
    faults.heal();
    fixture.event(&db("b", 1), EventKind::Created).await;
    assert_eq!(reports.done().await.db, db("b", 1));
    old.shutdown().await.unwrap();
}
