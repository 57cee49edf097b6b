//! Transactions that are committed exactly once: unknown results, late commits, and rows that stay in the store.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use common::{dice, until};
use notibus::{
    Error, Result,
    store::{
        AtomicOp, CommittedOnce, Database, Isolation, KeyRange, RangeRead, RetryPolicy, Row, StoreError,
        Transaction, TransactionIdSweeper,
        testing::{CommitFault, Faults, Gate, Operation, Trace},
    },
};

/// 1021, settled.
const UNKNOWN: StoreError = StoreError::COMMIT_UNKNOWN_RESULT;

/// 1039: tried again although the commit may still happen.
const UNSETTLED: StoreError = StoreError::CLUSTER_VERSION_CHANGED;

const CONFLICT: StoreError = StoreError::NOT_COMMITTED;

/// How long sweepers of these tests wait.
const AGE: Duration = Duration::from_mins(10);

async fn rows(store: &Database, prefix: &[u8]) -> Vec<Row> {
    let read = RangeRead::new(KeyRange::prefix(prefix.to_vec())).limit(100_000).target_bytes(usize::MAX);
    store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows
}

async fn ids(store: &Database) -> Vec<Row> {
    rows(store, Database::TRANSACTION_IDS_PREFIX).await
}

async fn number(store: &Database, key: &[u8]) -> u64 {
    let value = store.begin().get(key, Isolation::Snapshot).await.unwrap();
    value.map_or(0, |value| u64::from_le_bytes(value[..].try_into().unwrap()))
}

fn add(tx: &Transaction, key: &[u8]) {
    tx.atomic(AtomicOp::Add, key, &1_u64.to_le_bytes());
}

/// The body of a run that adds one to the number at `key`.
fn adding(tx: &Transaction, key: &[u8]) -> std::future::Ready<Result<()>> {
    add(tx, key);
    std::future::ready(Ok(()))
}

/// A body that adds one to `n`, writes its attempt and its versionstamp, and returns the attempt, counted from 1.
fn body(attempts: &Arc<AtomicU32>) -> impl Fn(Transaction) -> std::future::Ready<Result<u32>> + use<> {
    let attempts = Arc::clone(attempts);
    move |tx| {
        let attempt = attempts.fetch_add(1, Ordering::SeqCst) + 1;
        add(&tx, b"n");
        tx.set(b"attempt", &attempt.to_be_bytes());
        tx.atomic(AtomicOp::SetVersionstampedValue, b"stamp", &[0; 14]);
        std::future::ready(Ok(attempt))
    }
}

/// Checks that exactly one attempt is in the store, and that `done` describes it.
async fn check_once(store: &Database, done: &CommittedOnce<u32>) {
    assert_eq!(number(store, b"n").await, 1);
    let get = async |key| store.begin().get(key, Isolation::Snapshot).await.unwrap().unwrap();
    assert_eq!(get(b"attempt").await[..], done.value.to_be_bytes());
    assert_eq!(get(b"stamp").await[..], done.committed.versionstamp.0);
}

/// Runs [`body`] through `faults` and checks that it is done once, by attempt `committed` of `tried`.
async fn run_through(faults: impl IntoIterator<Item = CommitFault>, committed: u32, tried: u32) {
    let store = Database::memory();
    let wrapper = Faults::new(&store);
    wrapper.script_commits(faults);
    let attempts = Arc::default();
    let done = wrapper.database().run_once(body(&attempts)).await.unwrap();
    check_once(&store, &done).await;
    assert_eq!((done.value, attempts.load(Ordering::SeqCst)), (committed, tried));
    assert_eq!(wrapper.scripted(), 0);
}

#[tokio::test(start_paused = true)]
async fn it_happens_once_whatever_the_commits_say() {
    use CommitFault::{After, Before};
    run_through([], 1, 1).await;
    run_through([After(UNKNOWN)], 1, 1).await;
    run_through([Before(UNKNOWN)], 2, 2).await;
    run_through([After(UNSETTLED)], 1, 1).await;
    run_through([Before(CONFLICT), After(UNKNOWN)], 2, 2).await;
    run_through([Before(UNKNOWN), Before(CONFLICT), Before(UNKNOWN), After(UNKNOWN)], 4, 4).await;
    run_through([Before(UNKNOWN), Before(UNKNOWN), Before(CONFLICT)], 4, 4).await;
}

#[tokio::test]
async fn without_doubt_nothing_is_read() {
    let trace = Trace::new(&Database::memory());
    trace.database().run_once(|tx| adding(&tx, b"n")).await.unwrap();
    let [attempt] = &trace.take()[..] else { panic!("there was one attempt") };
    let reads: Vec<_> = attempt.reads().collect();
    assert_eq!(reads, [&Operation::ReadVersion]);
    let [Operation::ReadConflict { range }] = attempt.read_conflicts().collect::<Vec<_>>()[..] else {
        panic!("there was one conflict range")
    };
    assert!(
        range.begin.starts_with(Database::TRANSACTION_IDS_PREFIX) && *range == KeyRange::key(&range.begin)
    );
    assert_eq!(attempt.mutations().count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_late_commit_makes_the_next_attempt_look_again() {
    // A commit that has failed with 1021 should not happen later, but if it does, it does no harm either.
    for late in [UNSETTLED, UNKNOWN] {
        let store = Database::memory();
        let faults = Faults::new(&store);
        let gate = Gate::default();
        let hold = CommitFault::Hold(gate.clone());
        faults.script_commits([CommitFault::Before(UNKNOWN), CommitFault::Late(late), hold]);
        let (db, attempts) = (faults.database(), Arc::default());
        let running = tokio::spawn(async move { db.run_once(body(&attempts)).await });
        // The third attempt has found nothing, and waits before its commit.
        gate.reached().await;
        assert!(matches!(faults.commit_late().await[..], [Ok(())]));
        gate.open();
        let done = running.await.unwrap().unwrap();
        assert_eq!(done.value, 2);
        check_once(&store, &done).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_is_later_than_the_next_attempt_does_not_happen() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    faults.script_commits([CommitFault::Late(UNSETTLED)]);
    let done = faults.database().run_once(body(&Arc::default())).await.unwrap();
    assert_eq!(done.value, 2);
    let late = faults.commit_late().await;
    assert_eq!(late[0].as_ref().unwrap_err().code(), Some(1020));
    check_once(&store, &done).await;
}

#[tokio::test(start_paused = true)]
async fn a_timeout_ends_the_run_and_its_commit_may_come_late_once() {
    for is_cleared in [false, true] {
        let store = Database::memory();
        let faults = Faults::new(&store);
        faults.script_commits([CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT)]);
        let (db, attempts) = (faults.database(), Arc::default());
        let error = db.run_once(body(&attempts)).await.unwrap_err();
        assert!(error.code() == Some(1031) && error.is_maybe_committed());
        if is_cleared {
            db.clear_finished_ids().await.unwrap();
        }
        assert_eq!(faults.commit_late().await[0].is_err(), is_cleared, "clearing makes it conflict");
        assert_eq!(number(&store, b"n").await, u64::from(!is_cleared));
        assert_eq!(attempts.load(Ordering::SeqCst), 1);
        db.clear_finished_ids().await.unwrap();
        assert!(ids(&store).await.is_empty());
    }
}

/// The result of a run among many: its number, and what it returned.
type Outcome = (u32, CommittedOnce<u32>);

/// One of many runs: adds to a common number and its own, writes its attempt and stamp, and may conflict with others.
async fn one_of_many(db: &Database, run: u32, contends: bool) -> Result<Outcome> {
    let key = |what: &str| format!("{what}/{run}").into_bytes();
    let attempts = AtomicU32::new(0);
    let policy = RetryPolicy::default().elapsed_max(None);
    let done = db.run_once_with(&policy, async |tx| {
        let attempt = attempts.fetch_add(1, Ordering::SeqCst);
        if contends {
            tx.get(b"contended", Isolation::Serializable).await?;
            tokio::task::yield_now().await;
            tx.set(b"contended", &run.to_be_bytes());
        }
        add(&tx, b"n");
        add(&tx, &key("own"));
        tx.set(&key("attempt"), &attempt.to_be_bytes());
        tx.atomic(AtomicOp::SetVersionstampedValue, &key("stamp"), &[0; 14]);
        Ok(attempt)
    });
    Ok((run, done.await?))
}

#[tokio::test(start_paused = true)]
async fn thousands_of_runs_with_random_faults_count_exactly() {
    const TASKS: u32 = 8;
    const RUNS: u32 = 4_000;
    let mut rng = dice();
    let mut deciding = rng.fork();
    let store = Database::memory();
    let faults = Faults::new(&store);
    faults.plan_commits(move |attempt| match deciding.u32(..20) {
        _ if !attempt.writes() => None,
        0..2 => Some(CommitFault::Before(CONFLICT)),
        2..4 => Some(CommitFault::Before(UNKNOWN)),
        4..7 => Some(CommitFault::After(UNKNOWN)),
        7 => Some(CommitFault::After(UNSETTLED)),
        8..10 => Some(CommitFault::Late(UNSETTLED)),
        _ => None,
    });
    let outcomes: Arc<Mutex<Vec<Outcome>>> = Arc::default();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (db, faults, outcomes, mut rng) =
            (faults.database(), faults.clone(), Arc::clone(&outcomes), rng.fork());
        tasks.spawn(async move {
            for run in (task..RUNS).step_by(TASKS as usize) {
                let done = one_of_many(&db, run, rng.u32(..4) == 0).await.unwrap();
                outcomes.lock().unwrap().push(done);
                if rng.u32(..3) == 0 {
                    faults.commit_late().await;
                }
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    let most = 2 * Database::FINISHED_IDS_MAX as usize;
    assert!(ids(&store).await.len() < most, "{} ids are left", ids(&store).await.len());
    faults.heal();
    faults.database().clear_finished_ids().await.unwrap();
    faults.commit_late().await;
    assert!(ids(&store).await.is_empty());
    assert_eq!(number(&store, b"n").await, u64::from(RUNS));
    let outcomes = std::mem::take(&mut *outcomes.lock().unwrap());
    assert_eq!(outcomes.len(), RUNS as usize);
    assert!(outcomes.iter().any(|(_, done)| done.value > 2), "there were faults");
    for (run, done) in outcomes {
        let get = async |what: &str| {
            let key = format!("{what}/{run}").into_bytes();
            store.begin().get(&key, Isolation::Snapshot).await.unwrap().unwrap()
        };
        assert_eq!(get("own").await[..], 1_u64.to_le_bytes(), "run {run}");
        assert_eq!(get("attempt").await[..], done.value.to_be_bytes(), "run {run}");
        assert_eq!(get("stamp").await[..], done.committed.versionstamp.0, "run {run}");
    }
}

/// A policy under which a run sleeps between its attempts until the test has finished all else.
fn sleepy(backoff: Duration) -> RetryPolicy {
    RetryPolicy::default().attempts_max(None).elapsed_max(None).backoff_min(backoff).backoff_max(backoff)
}

#[tokio::test(start_paused = true)]
async fn an_error_says_whether_anything_may_be_committed() {
    let limited = |attempts| RetryPolicy::default().attempts_max(Some(attempts));
    let fails = |faults: &[CommitFault], attempts: u32, reads_fail: bool| {
        let wrapper = Faults::new(&Database::memory());
        wrapper.script_commits(faults.to_vec());
        wrapper.plan_reads(move |read| {
            (reads_fail && matches!(read, Operation::Get { .. })).then_some(StoreError::PROCESS_BEHIND)
        });
        async move { wrapper.database().run_once_with(&limited(attempts), body(&Arc::default())).await }
    };
    let (before, after) = (CommitFault::Before, CommitFault::After);
    let late = CommitFault::Late(UNSETTLED);
    for (faults, attempts, reads_fail, code) in [
        // The last failure leaves it open.
        (vec![after(UNKNOWN)], 1, false, 1021),
        // The read of the id failed.
        (vec![after(UNKNOWN)], 2, true, 1021),
        // The read has shown that nothing was committed, and a settled commit does not happen later.
        (vec![before(UNKNOWN), before(CONFLICT)], 2, false, 1020),
        // But an unsettled commit may.
        (vec![late.clone(), before(CONFLICT)], 2, false, 1039),
        (vec![late, before(UNKNOWN), before(CONFLICT)], 3, false, 1039),
    ] {
        let case = format!("{faults:?}, {reads_fail}");
        let error = fails(&faults, attempts, reads_fail).await.unwrap_err();
        assert!(matches!(error, Error::RetriesExhausted { .. }), "{case}: {error}");
        assert_eq!((error.code(), error.is_maybe_committed()), (Some(code), code != 1020), "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_body_refuses_is_the_error_unless_an_attempt_may_still_commit() {
    for (fault, code) in [(CommitFault::Before(UNKNOWN), None), (CommitFault::Late(UNSETTLED), Some(1039))] {
        let faults = Faults::new(&Database::memory());
        faults.script_commits([fault]);
        let attempts = AtomicU32::new(0);
        let db = faults.database();
        let error = db.run_once(async |tx| {
            if attempts.fetch_add(1, Ordering::SeqCst) > 0 {
                return Err(Error::Invalid { what: "document", reason: "it was changed".to_owned() });
            }
            adding(&tx, b"n").await
        });
        let error = error.await.unwrap_err();
        assert_eq!((error.code(), error.is_maybe_committed()), (code, code.is_some()), "{error}");
        assert_eq!(matches!(error, Error::Invalid { .. }), code.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_too_old_does_not_trust_a_missing_id() {
    for is_swept in [true, false] {
        let store = Database::memory();
        let faults = Faults::new(&store);
        faults.script_commits([CommitFault::After(UNKNOWN)]);
        let (db, policy) =
            (faults.database(), sleepy(2 * Database::UNKNOWN_RESULT_AGE_MAX + Duration::from_secs(2)));
        let running = tokio::spawn(async move { db.run_once_with(&policy, body(&Arc::default())).await });
        until("the commit", async || number(&store, b"n").await == 1).await;
        if is_swept {
            let range = KeyRange::prefix(Database::TRANSACTION_IDS_PREFIX);
            let tx = store.begin();
            tx.clear_range(&range);
            tx.commit().await.unwrap();
        }
        let result = running.await.unwrap();
        assert_eq!(number(&store, b"n").await, 1);
        match result {
            Ok(done) => assert!(!is_swept && done.value == 1),
            Err(error) => assert!(is_swept && error.code() == Some(1021) && error.is_maybe_committed()),
        }
    }
}

/// Commits `runs` times, one after the other.
async fn run_often(db: &Database, runs: u64) {
    for _ in 0..runs {
        db.run_once(|tx| adding(&tx, b"often")).await.unwrap();
    }
}

/// How many ranges each committed or failed attempt has cleared.
fn clears(trace: &Trace) -> Vec<usize> {
    let is_clear = |op: &&Operation| matches!(op, Operation::ClearRange { .. });
    trace.take().iter().map(|attempt| attempt.mutations().filter(is_clear).count()).collect()
}

#[tokio::test]
async fn finished_ids_are_cleared_by_the_way() {
    let store = Database::memory();
    let trace = Trace::new(&store);
    let db = trace.database();
    for _ in 0..3 {
        run_often(&db, Database::FINISHED_IDS_MAX).await;
        let cleared = clears(&trace);
        assert_eq!(cleared[1..].iter().sum::<usize>(), 0, "one range of {} attempts", cleared.len());
        assert_eq!(ids(&store).await.len() as u64, Database::FINISHED_IDS_MAX);
    }
    // Clones share the counter, other processes do not.
    let other = db.clone().with_transaction_ids(Database::TRANSACTION_IDS_PREFIX).unwrap();
    run_often(&other, 1).await;
    run_often(&db.clone(), 1).await;
    assert_eq!(clears(&trace), [0, 1]);
    assert_eq!(ids(&store).await.len(), 2);
    db.clear_finished_ids().await.unwrap();
    other.clear_finished_ids().await.unwrap();
    assert!(ids(&store).await.is_empty());
    trace.take();
    db.clear_finished_ids().await.unwrap();
    assert!(trace.take().is_empty(), "there was nothing to do");
}

#[tokio::test(start_paused = true)]
async fn a_failed_attempt_leaves_the_clearing_to_the_next() {
    let store = Database::memory();
    let trace = Trace::new(&store);
    let faults = Faults::new(&trace.database());
    let db = faults.database();
    run_often(&db, Database::FINISHED_IDS_MAX).await;
    let timed_out = CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT);
    faults.script_commits([CommitFault::Before(CONFLICT), timed_out]);
    clears(&trace);
    let error = db.run_once(|tx| adding(&tx, b"n")).await.unwrap_err();
    assert_eq!(error.code(), Some(1031));
    assert_eq!(clears(&trace), [1, 1]);
    assert_eq!(ids(&store).await.len() as u64, Database::FINISHED_IDS_MAX);
    run_often(&db, 2).await;
    assert_eq!(clears(&trace), [1, 0]);
    assert_eq!(ids(&store).await.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn ids_in_doubt_are_not_cleared() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    faults.script_commits([CommitFault::After(UNKNOWN)]);
    let (db, attempts) = (faults.database(), Arc::default());
    run_often(&store, 1).await;
    let in_doubt = tokio::spawn({
        let (db, attempts) = (db.clone(), Arc::clone(&attempts));
        async move { db.run_once_with(&sleepy(Duration::from_mins(4)), body(&attempts)).await }
    });
    until("the commit", async || number(&store, b"n").await == 1).await;
    // Its id is the first of its process, so later ids stay, too, until it is cleared explicitly.
    let often = 3 * Database::FINISHED_IDS_MAX;
    run_often(&db, often).await;
    assert_eq!(ids(&store).await.len() as u64, 1 + 1 + often);
    db.clear_finished_ids().await.unwrap();
    assert_eq!(ids(&store).await.len(), 1 + 1);
    let done = in_doubt.await.unwrap().unwrap();
    check_once(&store, &done).await;
    assert_eq!(attempts.load(Ordering::SeqCst), 1);
    run_often(&db, 1).await;
    assert_eq!(ids(&store).await.len(), 1 + 1, "what was held up is cleared by the way");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_run_holds_nothing_up() {
    let store = Database::memory();
    let faults = Faults::new(&store);
    let db = faults.database();
    let gate = Gate::default();
    // The second run is dropped while it clears.
    for before in [0, Database::FINISHED_IDS_MAX - 1] {
        run_often(&db, before).await;
        faults.script_commits([CommitFault::Hold(gate.clone())]);
        let running = tokio::spawn({
            let db = db.clone();
            async move { db.run_once(|tx| adding(&tx, b"dropped")).await }
        });
        until("the commit", async || faults.scripted() == 0).await;
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
    }
    run_often(&db, 1).await;
    assert_eq!(ids(&store).await.len(), 1);
    assert_eq!(number(&store, b"dropped").await, 0);
}

#[tokio::test(start_paused = true)]
async fn the_ids_of_a_crashed_process_are_swept_when_they_are_old_enough() {
    let store = Database::memory();
    let crashed = store.clone().with_transaction_ids(Database::TRANSACTION_IDS_PREFIX).unwrap();
    run_often(&crashed, 10).await;
    drop(crashed);
    let mut sweeper = TransactionIdSweeper::new(&store, AGE).unwrap();
    let swept = sweeper.sweep().await.unwrap();
    assert_eq!((swept.processes, swept.cleared), (1, 0));
    let almost = AGE.saturating_sub(Duration::from_millis(1));
    tokio::time::advance(almost).await;
    // Other ids come meanwhile: of this process, and of one whose counter is ahead.
    run_often(&store, 3).await;
    let fresh = ids(&store).await.len() - 10;
    let swept = sweeper.sweep().await.unwrap();
    assert_eq!((swept.processes, swept.cleared), (2, 0));
    tokio::time::advance(Duration::from_millis(1)).await;
    let swept = sweeper.sweep().await.unwrap();
    assert_eq!((swept.processes, swept.cleared), (2, 1));
    assert_eq!(ids(&store).await.len(), fresh);
    tokio::time::advance(AGE).await;
    assert_eq!(sweeper.sweep().await.unwrap().cleared, 1);
    assert!(ids(&store).await.is_empty());
    assert_eq!(sweeper.sweep().await.unwrap().processes, 0);
}

#[tokio::test(start_paused = true)]
async fn every_id_is_swept_at_its_age_also_of_a_process_that_lives() {
    let store = Database::memory();
    let interval = AGE / 5;
    let mut sweeper = TransactionIdSweeper::new(&store, AGE).unwrap();
    for sweeps in 0..40 {
        // One id more has come before each sweep.
        run_often(&store, 1).await;
        sweeper.sweep().await.unwrap();
        assert_eq!(ids(&store).await.len(), (sweeps + 1).min(5), "after {sweeps} sweeps");
        tokio::time::advance(interval).await;
    }
    // However often it is called, it has few marks to remember, and no id stays for long.
    let other = store.clone().with_transaction_ids(Database::TRANSACTION_IDS_PREFIX).unwrap();
    for sweeps in 0..250 {
        run_often(&other, 1).await;
        sweeper.sweep().await.unwrap();
        let left = ids(&store).await.len();
        assert!(sweeps < 120 || (100..=113).contains(&left), "{left} after {sweeps} sweeps");
        assert!(format!("{sweeper:?}").len() < 500, "{sweeper:?}");
        tokio::time::advance(AGE / 100).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_rare_sweep_clears_all_that_is_old_enough() {
    let store = Database::memory();
    let mut sweeper = TransactionIdSweeper::new(&store, AGE).unwrap();
    for _ in 0..2 {
        run_often(&store, 1).await;
        sweeper.sweep().await.unwrap();
        tokio::time::advance(AGE / 2).await;
    }
    tokio::time::advance(AGE).await;
    assert_eq!(sweeper.sweep().await.unwrap().cleared, 1);
    assert!(ids(&store).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_a_process_has_cleared_itself_is_forgotten() {
    let store = Database::memory();
    let mut sweeper = TransactionIdSweeper::new(&store, AGE).unwrap();
    run_often(&store, 1).await;
    sweeper.sweep().await.unwrap();
    tokio::time::advance(AGE).await;
    store.clear_finished_ids().await.unwrap();
    run_often(&store, 1).await;
    let swept = sweeper.sweep().await.unwrap();
    assert_eq!((swept.processes, swept.cleared), (1, 0), "what is left is young");
    store.clear_finished_ids().await.unwrap();
    assert_eq!(sweeper.sweep().await.unwrap().processes, 0);
    assert!(format!("{sweeper:?}").contains("marks: {}"), "{sweeper:?}");
}

#[tokio::test(start_paused = true)]
async fn many_processes_are_swept_in_parts() {
    let store = Database::memory();
    for _ in 0..250 {
        run_often(&store.clone().with_transaction_ids(Database::TRANSACTION_IDS_PREFIX).unwrap(), 2).await;
    }
    let trace = Trace::new(&store);
    let mut sweeper = TransactionIdSweeper::new(&trace.database(), AGE).unwrap();
    assert_eq!(sweeper.sweep().await.unwrap().processes, 250);
    assert_eq!(trace.take().len(), 3);
    tokio::time::advance(AGE).await;
    assert_eq!(sweeper.sweep().await.unwrap().cleared, 250);
    assert!(ids(&store).await.is_empty());
    let conflicts = trace.take().iter().map(|attempt| attempt.read_conflicts().count()).sum::<usize>();
    assert_eq!(conflicts, 0, "it conflicts with nothing");
}

#[tokio::test(start_paused = true)]
async fn a_sweep_that_failed_halfway_is_made_good() {
    let store = Database::memory();
    run_often(&store, 2).await;
    let faults = Faults::new(&store);
    let mut sweeper = TransactionIdSweeper::new(&faults.database(), AGE).unwrap();
    sweeper.sweep().await.unwrap();
    tokio::time::advance(AGE).await;
    faults.script_commits([
        CommitFault::Before(UNKNOWN),
        CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT),
    ]);
    assert_eq!(sweeper.sweep().await.unwrap_err().code(), Some(1031));
    assert_eq!(ids(&store).await.len(), 2);
    assert_eq!(sweeper.sweep().await.unwrap().cleared, 1);
    assert!(ids(&store).await.is_empty());
}

#[tokio::test]
async fn arguments_have_limits() {
    let store = Database::memory();
    let error = TransactionIdSweeper::new(&store, Database::UNKNOWN_RESULT_AGE_MAX).unwrap_err();
    assert!(matches!(error, Error::Invalid { what: "max_age", .. }), "{error}");
    let error = store.clone().with_transaction_ids(b"").unwrap_err();
    assert!(matches!(error, Error::Invalid { what: "prefix", .. }), "{error}");

    let other = store.clone().with_transaction_ids(b"other/").unwrap();
    run_often(&other, 1).await;
    assert_eq!((ids(&store).await.len(), rows(&store, b"other/").await.len()), (0, 1));
    // Foreign rows stay.
    let tx = store.begin();
    tx.set(b"other/key", b"");
    tx.commit().await.unwrap();
    let swept = TransactionIdSweeper::new(&other, AGE).unwrap().sweep().await;
    assert!(matches!(swept, Err(Error::Corrupt { .. })), "{swept:?}");
}

#[tokio::test]
async fn its_futures_can_be_spawned() {
    let store = Database::memory();
    let task = tokio::spawn(async move {
        // A body that is `Send`, but not `Sync`.
        let count = std::cell::Cell::new(0);
        let body = move |tx: Transaction| {
            count.set(count.get() + 1);
            add(&tx, b"n");
            std::future::ready(Ok(()))
        };
        store.run(body.clone()).await?;
        store.run_once(body).await?;
        store.clear_finished_ids().await?;
        TransactionIdSweeper::new(&store, AGE)?.sweep().await
    });
    assert_eq!(task.await.unwrap().unwrap().processes, 0);
}
