//! Databases whose job fails or hangs cost the others nothing: they wait in the store, and are tried again.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, BusOptions, Db, DispatcherOptions, EventKind, Trigger,
    jobs::{IndexBuild, ParkedDb, TaskResult, TriggerJob, TriggerOptions, index_trigger},
    store::{
        Database, Isolation, KeyRange, RangeRead, StoreError,
        testing::{CommitFault, Faults, Operation},
    },
};

use crate::{
    common::{db, joined, until},
    fixture::{TriggerFixture, at_rest, quick},
};

/// Builds every database. Builds of names that begin with `bad` fail until they are repaired; those of `hung` hang.
#[derive(Clone, Default)]
struct Fussy {
    /// Databases that were built.
    built: Arc<Mutex<BTreeSet<Db>>>,
    /// Databases that were reported as gone.
    gone: Arc<Mutex<BTreeSet<Db>>>,
    /// Number of attempts.
    tries: Arc<AtomicUsize>,
    /// Whether all can be built.
    is_mended: Arc<AtomicBool>,
}

impl Fussy {
    fn has_built(&self, db: &Db) -> bool {
        self.built.lock().unwrap().contains(db)
    }
}

impl TriggerJob<IndexBuild> for Fussy {
    async fn run(&self, build: IndexBuild) -> TaskResult {
        self.tries.fetch_add(1, Ordering::SeqCst);
        let name = build.db.name.as_str();
        let is_mended = self.is_mended.load(Ordering::SeqCst);
        if name.starts_with("hung") && !is_mended {
            std::future::pending::<()>().await;
        }
        if name.starts_with("bad") && !is_mended {
            return Err("no disk".into());
        }
        self.built.lock().unwrap().insert(build.db);
        Ok(())
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        if db.name.as_str().starts_with("stubborn") && !self.is_mended.load(Ordering::SeqCst) {
            return Err("no access".into());
        }
        self.gone.lock().unwrap().insert(db);
        Ok(())
    }
}

async fn start(fixture: &TriggerFixture, options: TriggerOptions, job: &Fussy) -> Trigger {
    index_trigger(&fixture.dispatcher, options, job.clone()).await.unwrap()
}

async fn parked(fixture: &TriggerFixture) -> Vec<ParkedDb> {
    fixture.bus.trigger("views").unwrap().parked(None, 100).await.unwrap()
}

/// Regression: databases that fail forever filled the room for waiting work: with ten places and ten such databases, a healthy one
/// was not built within a day, and a deletion was not reported.
#[tokio::test(start_paused = true)]
async fn databases_that_fail_forever_do_not_keep_others_from_being_built() {
    let fixture = TriggerFixture::new().await;
    let fussy = Fussy::default();
    let bad: Vec<_> = (0..10).map(|n| db(&format!("bad{n}"), 1)).collect();
    for db in &bad {
        fixture.event(db, EventKind::Created).await;
    }
    let trigger = start(&fixture, quick().pending_max(10), &fussy).await;
    until("the failures", async || trigger.status().parked >= 10).await;
    let listed: BTreeSet<_> = parked(&fixture).await.iter().map(ParkedDb::db).collect();
    assert_eq!(listed, bad.iter().cloned().collect());
    let good = db("good", 1);
    fixture.event(&good, EventKind::Created).await;
    fixture.event(&bad[0], EventKind::Deleted).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(fussy.has_built(&good));
    assert_eq!(*fussy.gone.lock().unwrap(), [bad[0].clone()].into());
    assert_eq!(parked(&fixture).await.len(), 9, "nothing is left of what is gone");
    trigger.shutdown().await.unwrap();
}

/// Regression: a database that failed forever held the cursor back: after an orderly shutdown everything that had come since was
/// built again.
#[tokio::test(start_paused = true)]
async fn a_database_that_fails_forever_does_not_hold_the_cursor_back() {
    let fixture = TriggerFixture::new().await;
    let fussy = Fussy::default();
    let trigger = start(&fixture, quick(), &fussy).await;
    fixture.event(&db("bad", 1), EventKind::Created).await;
    until("the failures", async || trigger.status().parked == 1).await;
    for n in 0..20 {
        fixture.event(&db(&format!("good{n}"), 1), EventKind::Created).await;
    }
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
    let before = fussy.tries.load(Ordering::SeqCst);
    let trigger = start(&fixture, quick(), &fussy).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(fussy.tries.load(Ordering::SeqCst), before + 1, "only what was not done");
    trigger.shutdown().await.unwrap();
}

/// A failing database is tried again in rounds, less and less often; one that an earlier trigger has parked as well.
#[tokio::test(start_paused = true)]
async fn what_is_parked_is_tried_again_less_and_less_often_until_it_succeeds() {
    let fixture = TriggerFixture::new().await;
    let fussy = Fussy::default();
    let trigger = start(&fixture, quick(), &fussy).await;
    let bad = db("bad", 1);
    fixture.event(&bad, EventKind::Created).await;
    until("the failures", async || trigger.status().parked == 1).await;
    assert_eq!(fussy.tries.load(Ordering::SeqCst), 5);
    trigger.shutdown().await.unwrap();
    let trigger = start(&fixture, quick(), &fussy).await;
    tokio::time::sleep(Duration::from_hours(10)).await;
    let retries = fussy.tries.load(Ordering::SeqCst) - 5;
    // 120 rounds of 5 min, of which it is tried in every 16th after the first ones.
    assert!((8..=13).contains(&retries), "{retries} retries in ten hours");
    let row = parked(&fixture).await.remove(0);
    assert_eq!((row.attempts as usize, row.error.as_str()), (5 + retries, "no disk"));
    fussy.is_mended.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_hours(2)).await;
    assert!(fussy.has_built(&bad) && parked(&fixture).await.is_empty());
    trigger.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_is_parked_is_tried_soon_if_it_changes_or_somebody_asks() {
    let fixture = TriggerFixture::new().await;
    let options = quick().attempts_max(1);
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    let bad = db("bad", 1);
    fixture.event(&bad, EventKind::Created).await;
    let fail = async |reports: &mut crate::fixture::JobReports<IndexBuild>| {
        // It may take hours.
        let (build, decide) = reports.works.recv().await.unwrap();
        decide.send(Err("no disk".into())).unwrap();
        build
    };
    assert_eq!(fail(&mut reports).await.attempt, 1);
    for attempt in 2..=4 {
        assert_eq!(fail(&mut reports).await.attempt, attempt, "in the next rounds");
    }
    // It changes: the pauses are short again.
    fixture.event(&bad, EventKind::Updated).await;
    let asked_at = tokio::time::Instant::now();
    let build = fail(&mut reports).await;
    assert!(asked_at.elapsed() <= Duration::from_secs(320), "{:?}", asked_at.elapsed());
    assert_eq!((build.attempt, build.is_fresh), (5, true), "nothing of it was done yet");
    // A retry is requested.
    until("it is parked", async || trigger.status().running == 0).await;
    let stored = fixture.bus.trigger("views").unwrap();
    assert_eq!(stored.retry(Some(&"other".parse().unwrap())).await.unwrap(), 0);
    assert_eq!(stored.retry(Some(&bad.name)).await.unwrap(), 1);
    assert!(parked(&fixture).await[0].is_asked);
    let asked_at = tokio::time::Instant::now();
    assert_eq!(reports.done().await.attempt, 6);
    assert!(asked_at.elapsed() <= Duration::from_secs(11), "{:?}", asked_at.elapsed());
    until("the end", async || parked(&fixture).await.is_empty()).await;
    assert_eq!(fixture.bus.triggers().await.unwrap(), ["views"]);
    trigger.shutdown().await.unwrap();
    stored.reset().await.unwrap();
    assert_eq!((stored.position().await.unwrap(), fixture.bus.triggers().await.unwrap().len()), (None, 0));
}

/// Regression: four jobs that hung stopped a trigger, without any message.
#[tokio::test(start_paused = true)]
async fn jobs_that_hang_are_cancelled_parked_and_reported() {
    let fixture = TriggerFixture::new().await;
    let fussy = Fussy::default();
    let trigger = start(&fixture, quick(), &fussy).await;
    for n in 0..4 {
        fixture.event(&db(&format!("hung{n}"), 1), EventKind::Created).await;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let good = db("good", 1);
    fixture.event(&good, EventKind::Created).await;
    tokio::time::sleep(Duration::from_mins(11)).await;
    assert!(fussy.has_built(&good));
    assert_eq!(trigger.status().stuck, 4);
    assert_eq!(fixture.bus.stats().trigger_stuck, 4);
    // However often they hang again, half of the jobs are left to others.
    for round in 0..10 {
        tokio::time::sleep(Duration::from_mins(5)).await;
        assert!(trigger.status().running <= 2);
        let good = db(&format!("good{round}"), 1);
        fixture.event(&good, EventKind::Created).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(fussy.has_built(&good), "round {round}");
    }
    trigger.shutdown().await.unwrap();
}

/// A long job that notes its progress is not cancelled.
#[tokio::test(start_paused = true)]
async fn a_job_that_shows_progress_may_take_as_long_as_it_takes() {
    let fixture = TriggerFixture::new().await;
    let build = |build: IndexBuild| async move {
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_mins(9)).await;
            build.fence.note_progress();
        }
        Ok(())
    };
    let trigger = index_trigger(&fixture.dispatcher, quick(), build).await.unwrap();
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert!(trigger.wait_for(|status| status.done + status.stuck > 0).await);
    assert_eq!((trigger.status().done, trigger.status().stuck), (1, 0));
    trigger.shutdown().await.unwrap();
}

/// A clean-up that fails is parked, too, and repeated later.
#[tokio::test(start_paused = true)]
async fn a_clean_up_that_fails_is_made_good_later() {
    let fixture = TriggerFixture::new().await;
    let fussy = Fussy::default();
    let trigger = start(&fixture, quick(), &fussy).await;
    let gone = db("stubborn", 1);
    fixture.event(&gone, EventKind::Created).await;
    until("the build", async || fussy.has_built(&gone)).await;
    fixture.event(&gone, EventKind::Deleted).await;
    until("the failures", async || trigger.status().parked == 1).await;
    assert!(parked(&fixture).await[0].is_gone);
    at_rest(&fixture, &trigger).await;
    fussy.is_mended.store(true, Ordering::SeqCst);
    fixture.bus.trigger("views").unwrap().retry(None).await.unwrap();
    until("the clean-up", async || fussy.gone.lock().unwrap().contains(&gone)).await;
    until("nothing is left", async || parked(&fixture).await.is_empty()).await;
    trigger.shutdown().await.unwrap();
}

/// Regression: a database that changed all the time was never tried again once it was parked, because work always waited for it.
#[tokio::test(start_paused = true)]
async fn what_is_parked_is_tried_again_although_it_goes_on_changing() {
    let fixture = TriggerFixture::new().await;
    let fussy = Fussy::default();
    let hour = Duration::from_hours(1);
    let trigger = start(&fixture, quick().debounce(hour), &fussy).await;
    let bad = db("bad", 1);
    fixture.event(&bad, EventKind::Created).await;
    tokio::time::sleep(hour).await;
    until("the failures", async || trigger.status().parked == 1).await;
    fussy.is_mended.store(true, Ordering::SeqCst);
    // It waits for an hour.
    fixture.event(&bad, EventKind::Updated).await;
    fixture.bus.trigger("views").unwrap().retry(None).await.unwrap();
    tokio::time::sleep(hour / 2).await;
    assert!(fussy.has_built(&bad), "six rounds have come, and somebody has asked");
    trigger.shutdown().await.unwrap();
}

/// Regression: a mark that could not be decoded kept its database from being parked, and the cursor from moving on.
#[tokio::test(start_paused = true)]
async fn a_mark_that_cannot_be_decoded_is_begun_again() {
    let fixture = TriggerFixture::new().await;
    let fussy = Fussy::default();
    let trigger = start(&fixture, quick(), &fussy).await;
    let broken = db("broken", 1);
    fixture.event(&broken, EventKind::Created).await;
    until("the build", async || fussy.has_built(&broken)).await;
    at_rest(&fixture, &trigger).await;
    let read = RangeRead::new(KeyRange::prefix("notibus")).limit(100_000);
    let all = fixture.store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows;
    let has = |key: &[u8], part: &[u8]| key.windows(part.len()).any(|some| some == part);
    let marks: Vec<_> = all.iter().filter(|(key, _)| has(key, b"views") && has(key, b"broken")).collect();
    assert_eq!(marks.len(), 1);
    let key = &marks[0].0;
    fixture
        .store
        .run(async |tx| {
            tx.set(key, b"junk");
            Ok(())
        })
        .await
        .unwrap();
    fussy.built.lock().unwrap().clear();
    fixture.event(&broken, EventKind::Updated).await;
    tokio::time::sleep(Duration::from_mins(15)).await;
    assert!(fussy.has_built(&broken), "it was parked, and begun again");
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
}

/// Regression: the end of a retry that was committed late removed work that had come for the database since.
#[tokio::test(start_paused = true)]
async fn an_end_of_a_retry_that_comes_late_forgets_nothing() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let bus = Bus::open(&faults.database(), BusOptions::default()).await.unwrap();
    let notifier = joined(&bus).await.notifier(crate::common::eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let fixture = TriggerFixture { store, bus, _notifier: notifier, dispatcher };
    let options = quick().attempts_max(1).debounce(Duration::ZERO);
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    let bad = db("bad", 1);
    fixture.event(&bad, EventKind::Created).await;
    reports.fails().await;
    until("it is parked", async || trigger.status().parked == 1).await;
    // In the next round.
    let (_, decide) = reports.works.recv().await.unwrap();
    let has = |key: &[u8], part: &[u8]| key.windows(part.len()).any(|some| some == part);
    let mut late = Some(CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT));
    faults.plan_commits(move |attempt| {
        let all: Vec<_> = attempt.mutations().collect();
        let is_end = matches!(&all[..], [Operation::Clear { key }] if has(key, b"views") && has(key, b"bad"));
        is_end.then(|| late.take()).flatten()
    });
    decide.send(Ok(())).unwrap();
    until("the end", async || trigger.status().running == 0).await;
    fixture.event(&bad, EventKind::Updated).await;
    at_rest(&fixture, &trigger).await;
    faults.commit_late().await;
    let again = tokio::time::timeout(Duration::from_mins(30), reports.works.recv()).await;
    again.expect("the update is worked on").unwrap().1.send(Ok(())).unwrap();
    trigger.shutdown().await.unwrap();
}
