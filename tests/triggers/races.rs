//! What a second look at triggers has found: moments in which what is kept in memory and what is stored could differ.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use notibus::{
    Db, EventKind,
    jobs::{IndexBuild, TaskResult, TriggerJob, index_trigger},
    store::{
        Isolation, KeyRange, RangeRead, StoreError,
        testing::{Attempt, CommitFault, Gate, Operation},
    },
};

use crate::{
    common::{db, until, within},
    fixture::{TriggerFixture, at_rest, quick},
    marks::faulty,
};

/// What the key of a name that is owed something begins with, by the trigger `views`.
const OWED: &[u8] = b"notibus\x15\x10\x01\x00\x02views\x00\x15\x04";

/// What the key of a database that the trigger `views` has parked begins with.
const PARKED: &[u8] = b"notibus\x15\x10\x01\x00\x02views\x00\x15\x02";

/// What the keys of the marks of the databases `a` begin with, by the trigger `views`.
const MARKS_OF_A: &[u8] = b"notibus\x15\x10\x01\x00\x02views\x00\x15\x01\x02a\x00";

/// A parked database waited for its turn in memory. Meanwhile it was deleted, and its clean-up done. Then its turn came, and it was
/// built: its index stayed forever, since nobody was to be informed again that it is gone.
#[tokio::test(start_paused = true)]
async fn a_parked_database_that_is_deleted_before_its_turn_is_not_built() {
    let fixture = TriggerFixture::new().await;
    let options = quick().attempts_max(1).jobs_max(2);
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    let (first, second) = (db("a", 1), db("b", 1));
    for db in [&first, &second] {
        fixture.event(db, EventKind::Created).await;
        reports.fails().await;
    }
    until("both to be parked", async || trigger.status().parked == 2).await;
    fixture.bus.trigger("views").unwrap().retry(None).await.unwrap();
    let (build, decide) = reports.next_work().await;
    assert_eq!(build.db, first, "of two places one is for parked databases");
    fixture.event(&second, EventKind::Deleted).await;
    assert_eq!(within("the news", reports.gone.recv()).await.unwrap(), second);
    decide.send(Ok(())).unwrap();
    assert!(reports.is_quiet().await, "a database is built that is gone");
    assert!(fixture.bus.trigger("views").unwrap().parked(None, 9).await.unwrap().is_empty());
    trigger.shutdown().await.unwrap();
}

/// A trigger was asked to end while it saved: the save was dropped, but what it was to note as owed counted as noted. So the last save
/// moved the cursor past it, and it was never done.
#[tokio::test(start_paused = true)]
async fn a_save_that_is_dropped_by_the_end_of_a_trigger_has_noted_nothing() {
    let (fixture, faults) = faulty().await;
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let slow = db("slow", 1);
    fixture.event(&slow, EventKind::Created).await;
    let (_, _undecided) = reports.next_work().await;
    let gate = Gate::default();
    let mut held = Some(CommitFault::Hold(gate.clone()));
    let is_owed = |op: &Operation| matches!(op, Operation::Atomic { key, .. } if key.starts_with(OWED));
    faults.plan_commits(
        move |attempt: &Attempt| {
            if attempt.mutations().any(is_owed) { held.take() } else { None }
        },
    );
    within("the save", gate.reached()).await;
    fixture.event(&db("other", 1), EventKind::Created).await;
    trigger.shutdown().await.unwrap();
    drop(reports);

    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    let built = [reports.done().await.db, reports.done().await.db];
    assert!(built.contains(&slow), "{built:?}");
    at_rest(&fixture, &trigger).await;
    trigger.shutdown().await.unwrap();
}

/// A trigger had looked up an owed database in the store. Then its dispatcher, which was behind, delivered the instance before, and
/// the job was informed that the living one was gone.
#[tokio::test(start_paused = true)]
async fn a_database_that_was_looked_up_is_not_gone_because_the_feed_is_behind() {
    let (fixture, faults) = faulty().await;
    let (old, new) = (db("a", 1), db("a", 2));
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    fixture.event(&old, EventKind::Created).await;
    let (_, _undecided) = reports.next_work().await;
    trigger.shutdown().await.unwrap();

    // The name is owed. Two others take all places while that is being read, so that its next row waits as well.
    let is_hidden = Arc::new(AtomicBool::new(true));
    let hides = Arc::clone(&is_hidden);
    faults.plan_reads(move |operation| {
        let is_owed = matches!(operation, Operation::GetRange { range, .. } if range.begin.starts_with(OWED));
        (is_owed && hides.load(Ordering::Relaxed)).then_some(StoreError::IO_ERROR)
    });
    let options = quick().pending_max(2);
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    for other in [db("x", 1), db("y", 1)] {
        fixture.event(&other, EventKind::Created).await;
    }
    until("both to wait", async || trigger.status().waiting == 2).await;
    is_hidden.store(false, Ordering::Relaxed);
    let (_, first) = reports.next_work().await;
    let (_, second) = reports.next_work().await;
    fixture.event(&old, EventKind::Updated).await;

    let (before, producer) = (fixture.bus.stats().folded.total(), fixture.bus.producer());
    let replace = async |tx| {
        producer.deleted(&tx, &old);
        producer.created(&tx, &new);
        Ok(())
    };
    fixture.store.run(replace).await.unwrap();
    fixture.settled(before).await;
    first.send(Ok(())).unwrap();
    let (build, _undecided) = reports.next_work().await;
    assert_eq!(build.db, new, "it is looked up in the store");
    second.send(Ok(())).unwrap();
    assert_eq!(reports.done().await.db, new);
    at_rest(&fixture, &trigger).await;
    let mut gone = Vec::new();
    while let Ok(db) = reports.gone.try_recv() {
        gone.push(db);
    }
    assert!(gone.contains(&old) && !gone.contains(&new), "the new one lives: {gone:?}");
    trigger.shutdown().await.unwrap();
}

/// The job that stalls the look-up of a name until it is informed that the database is gone.
struct Informed {
    stalls: Arc<AtomicBool>,
    /// What was called, in order: whether it was a build.
    calls: Arc<Mutex<Vec<bool>>>,
}

impl TriggerJob<IndexBuild> for Informed {
    async fn run(&self, _: IndexBuild) -> TaskResult {
        self.calls.lock().unwrap().push(true);
        Ok(())
    }

    async fn deleted(&self, _: Db) -> TaskResult {
        self.calls.lock().unwrap().push(false);
        self.stalls.store(false, Ordering::Relaxed);
        Ok(())
    }
}

/// An owed database was being looked up, its row had been read and its marks had not, when the feed delivered its end. The job was
/// informed, and nothing of the name was left in the plan. Then the look-up ended with the row of before: the database was built
/// once more although it is gone, its mark came back, and nobody was ever to be informed again.
#[tokio::test(start_paused = true)]
async fn a_database_that_is_deleted_while_it_is_looked_up_is_not_built_afterwards() {
    let (fixture, faults) = faulty().await;
    let gone = db("a", 1);
    let (trigger, mut reports) = fixture.index_trigger(quick()).await;
    fixture.event(&gone, EventKind::Created).await;
    let (_, _undecided) = reports.next_work().await;
    trigger.shutdown().await.unwrap();

    let (stalls, stalled) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU32::new(0)));
    let (is_stalled, count) = (Arc::clone(&stalls), Arc::clone(&stalled));
    faults.plan_reads(move |operation| {
        let is_mark =
            matches!(operation, Operation::GetRange { range, .. } if range.begin.starts_with(MARKS_OF_A));
        let fails = is_mark && is_stalled.load(Ordering::Relaxed);
        count.fetch_add(fails.into(), Ordering::Relaxed);
        fails.then_some(StoreError::PROCESS_BEHIND)
    });
    let calls = Arc::new(Mutex::new(Vec::new()));
    let job = Informed { stalls, calls: Arc::clone(&calls) };
    let trigger = index_trigger(&fixture.dispatcher, quick(), job).await.unwrap();
    until("the look-up", async || stalled.load(Ordering::Relaxed) > 5).await;
    fixture.event(&gone, EventKind::Deleted).await;
    until("the news", async || !calls.lock().unwrap().is_empty()).await;
    at_rest(&fixture, &trigger).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(*calls.lock().unwrap(), [false], "a database is built that is gone");
    let marks = RangeRead::new(KeyRange::prefix(MARKS_OF_A));
    assert!(fixture.store.begin().get_range(&marks, Isolation::Snapshot).await.unwrap().rows.is_empty());
    let owed = RangeRead::new(KeyRange::prefix(OWED));
    assert!(fixture.store.begin().get_range(&owed, Isolation::Snapshot).await.unwrap().rows.is_empty());
    trigger.shutdown().await.unwrap();
}

/// The row of a parked database was damaged, or a later version had written it. No parked database of the trigger was tried or listed
/// any more.
#[tokio::test(start_paused = true)]
async fn a_parked_row_that_cannot_be_decoded_keeps_no_other_one_waiting() {
    let fixture = TriggerFixture::new().await;
    let options = quick().attempts_max(1).backoff_max(Duration::from_secs(10));
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    let (broken, other) = (db("a", 1), db("b", 1));
    for db in [&broken, &other] {
        fixture.event(db, EventKind::Created).await;
        reports.fails().await;
    }
    until("both to be parked", async || trigger.status().parked == 2).await;
    let read = RangeRead::new(KeyRange::prefix(PARKED)).limit(1);
    let damage = async |tx: notibus::store::Transaction| {
        let page = tx.get_range(&read, Isolation::Serializable).await?;
        tx.set(&page.rows[0].0, b"\x02 of a later version");
        Ok(())
    };
    fixture.store.run(damage).await.unwrap();

    let stored = fixture.bus.trigger("views").unwrap();
    assert_eq!(stored.retry(None).await.unwrap(), 1, "nobody can ask for what cannot be decoded");
    assert_eq!(reports.done().await.db, other);
    until("one to be left", async || stored.parked(None, 9).await.unwrap().len() == 1).await;
    let listed = stored.parked(None, 9).await.unwrap();
    assert_eq!(listed[0].db(), broken);
    assert!(listed[0].error.contains("cannot be decoded"), "{listed:?}");
    assert!(reports.is_quiet().await, "a later version may know what is to be done");
    assert_eq!(fixture.bus.skipped_rows().len(), 1);
    // New events replace it.
    fixture.event(&broken, EventKind::Updated).await;
    assert_eq!(reports.done().await.db, broken);
    until("none to be left", async || stored.parked(None, 9).await.unwrap().is_empty()).await;
    trigger.shutdown().await.unwrap();
}

/// A retry was requested while one was under way, perhaps of a job that hung. The end of that one removed the request.
#[tokio::test(start_paused = true)]
async fn a_retry_that_is_requested_during_a_retry_comes_after_it() {
    let fixture = TriggerFixture::new().await;
    let options = quick().attempts_max(1).backoff_max(Duration::from_hours(1));
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    let stored = fixture.bus.trigger("views").unwrap();
    fixture.event(&db("a", 1), EventKind::Created).await;
    reports.fails().await;
    until("it to be parked", async || trigger.status().parked == 1).await;
    assert_eq!(stored.retry(None).await.unwrap(), 1);
    let (_, decide) = reports.next_work().await;
    assert_eq!(stored.retry(None).await.unwrap(), 1);
    tokio::time::sleep(Duration::from_secs(30)).await;
    decide.send(Err("still no disk".into())).unwrap();
    assert_eq!(reports.fails().await.attempt, 3);
    assert!(reports.is_quiet().await, "nobody has asked since");
    trigger.shutdown().await.unwrap();
}

/// A retry was requested, and the read of the parked databases failed. The request counted as served: they were tried again only in
/// the next round, perhaps an hour later.
#[tokio::test(start_paused = true)]
async fn a_request_for_a_retry_outlives_a_failed_read() {
    let (fixture, faults) = faulty().await;
    let options = quick().attempts_max(1).backoff_max(Duration::from_hours(1));
    let (trigger, mut reports) = fixture.index_trigger(options).await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    reports.fails().await;
    until("it to be parked", async || trigger.status().parked == 1).await;
    assert_eq!(fixture.bus.trigger("views").unwrap().retry(None).await.unwrap(), 1);
    let left = Arc::new(AtomicU32::new(3));
    let fails = Arc::clone(&left);
    faults.plan_reads(move |operation| {
        let is_parked =
            matches!(operation, Operation::GetRange { range, .. } if range.begin.starts_with(PARKED));
        let one_less = |left: u32| left.checked_sub(1);
        let fails = is_parked && fails.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok();
        fails.then_some(StoreError::IO_ERROR)
    });
    let begun = tokio::time::Instant::now();
    reports.done().await;
    assert_eq!(left.load(Ordering::Relaxed), 0, "the reads have failed");
    let passed = begun.elapsed();
    assert!(passed < Duration::from_mins(5), "{passed:?} of paused time");
    trigger.shutdown().await.unwrap();
}
