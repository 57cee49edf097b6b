//! Transactions that are committed exactly once: unknown results, late commits, repeated runs with one key, and concurrent sweeps.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use common::{dice, joined, wide_bus};
use notibus::{
    Bus, CommittedOnce, Error, JanitorOptions, Result,
    event::Incarnation,
    store::{
        AtomicOp, Isolation, Store, StoreError, Transaction,
        testing::{CommitFault, Faults, Gate, Operation, Trace},
    },
};

/// 1021: the result is unknown, but settled: the commit has happened by now, or never will.
const UNKNOWN: StoreError = StoreError::COMMIT_UNKNOWN_RESULT;

/// 1039: the transaction is tried again although the commit may still happen.
const UNSETTLED: StoreError = StoreError::CLUSTER_VERSION_CHANGED;

const CONFLICT: StoreError = StoreError::NOT_COMMITTED;

/// A bus in memory, seen by a process whose store fails on demand.
struct Fixture {
    store: Store,
    faults: Faults,
    bus: Bus,
}

impl Fixture {
    async fn new() -> Self {
        let store = Store::memory();
        let faults = Faults::new(&store);
        let bus = wide_bus(&faults.store()).await;
        Self { store, faults, bus }
    }

    async fn with(faults: impl IntoIterator<Item = CommitFault>) -> Self {
        let fixture = Self::new().await;
        fixture.faults.script_commits(faults);
        fixture
    }

    async fn get(&self, key: &[u8]) -> Vec<u8> {
        self.store.begin().get(key, Isolation::Snapshot).await.unwrap().unwrap_or_default().to_vec()
    }

    async fn number(&self, key: &[u8]) -> u64 {
        self.get(key).await.try_into().map_or(0, u64::from_le_bytes)
    }

    /// Checks that exactly one attempt is in the store, and that `done` describes it.
    async fn check(&self, done: &CommittedOnce<u32>) {
        assert_eq!(self.number(b"n").await, 1);
        assert_eq!(self.get(b"attempt").await, done.value.to_be_bytes());
        assert_eq!(self.get(b"stamp").await, done.committed.versionstamp.0);
    }

    /// Opens the bus again, as another process would, whose commits do not fail.
    async fn other(&self) -> Bus {
        wide_bus(&self.store).await
    }

    /// Runs the janitor until it has completed a pass.
    async fn sweep(&self) {
        let options = JanitorOptions::default().interval(Duration::from_secs(1));
        let janitor = joined(&self.other().await).await.janitor(options).await.unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        janitor.shutdown().await.unwrap();
    }
}

fn add(tx: &Transaction, key: &[u8]) {
    tx.atomic(AtomicOp::Add, key, &1_u64.to_le_bytes());
}

/// Returns a body that adds one to `n`, writes its attempt and its versionstamp, and returns the attempt, counted from 1.
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

#[tokio::test(start_paused = true)]
async fn it_happens_once_whatever_the_commits_say() {
    use CommitFault::{After, Before};
    for (faults, committed) in [
        (vec![], 1),
        (vec![After(UNKNOWN)], 1),
        (vec![Before(UNKNOWN)], 2),
        (vec![After(UNSETTLED)], 1),
        (vec![Before(CONFLICT), After(UNKNOWN)], 2),
        (vec![Before(UNKNOWN), Before(CONFLICT), Before(UNKNOWN), After(UNKNOWN)], 4),
    ] {
        for key in [None, Some(&b"key"[..])] {
            let fixture = Fixture::with(faults.clone()).await;
            let attempts = Arc::default();
            let done = fixture.bus.run_exactly_once(key, body(&attempts)).await.unwrap();
            fixture.check(&done).await;
            assert_eq!((done.value, attempts.load(Ordering::SeqCst)), (committed, committed));
            assert!(!done.is_repeat, "it was this run");
            assert_eq!(fixture.faults.scripted(), 0);
        }
    }
}

#[tokio::test]
async fn without_doubt_nothing_is_read() {
    let trace = Trace::new(&Store::memory());
    let bus = wide_bus(&trace.store()).await;
    trace.take();
    bus.run_exactly_once(None, body(&Arc::default())).await.unwrap();
    let [attempt] = &trace.take()[..] else { panic!("there was one attempt") };
    assert_eq!(attempt.reads().collect::<Vec<_>>(), [&Operation::ReadVersion]);
    assert_eq!(attempt.read_conflicts().count(), 1);
    assert_eq!(attempt.mutations().count(), 4, "one more than the body makes");
}

#[tokio::test(start_paused = true)]
async fn a_late_commit_makes_the_next_attempt_look_again() {
    // A commit that failed with 1021 should not take effect later, but if it does, it does no harm either.
    for late in [UNSETTLED, UNKNOWN] {
        let gate = Gate::default();
        let hold = CommitFault::Hold(gate.clone());
        let fixture = Fixture::with([CommitFault::Before(UNKNOWN), CommitFault::Late(late), hold]).await;
        let (bus, attempts) = (fixture.bus.clone(), Arc::default());
        let running = tokio::spawn(async move { bus.run_exactly_once(None, body(&attempts)).await });
        // The third attempt has found nothing, and waits before its commit.
        gate.reached().await;
        assert!(matches!(fixture.faults.commit_late().await[..], [Ok(())]));
        gate.open();
        let done = running.await.unwrap().unwrap();
        assert_eq!(done.value, 2);
        fixture.check(&done).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_is_later_than_the_next_attempt_does_not_happen() {
    let fixture = Fixture::with([CommitFault::Late(UNSETTLED)]).await;
    let done = fixture.bus.run_exactly_once(None, body(&Arc::default())).await.unwrap();
    assert_eq!(done.value, 2);
    let late = fixture.faults.commit_late().await;
    assert_eq!(late[0].as_ref().unwrap_err().code(), Some(1020));
    fixture.check(&done).await;
}

#[tokio::test(start_paused = true)]
async fn of_two_runs_of_a_key_at_once_one_commits_and_both_return_its_result() {
    // The first run waits before its commit; the other one commits, and may not learn that at once.
    for fault in [None, Some(CommitFault::After(UNKNOWN))] {
        let gate = Gate::default();
        let fixture = Fixture::with([CommitFault::Hold(gate.clone())].into_iter().chain(fault)).await;
        let (bus, attempts) = (fixture.bus.clone(), Arc::default());
        let slow = body(&attempts);
        let slow = tokio::spawn(async move { bus.run_exactly_once(Some(b"key"), slow).await });
        gate.reached().await;
        let fast = fixture.bus.run_exactly_once(Some(b"key"), body(&attempts)).await.unwrap();
        gate.open();
        let slow = slow.await.unwrap().unwrap();
        assert_eq!((slow.value, slow.committed), (fast.value, fast.committed));
        assert_eq!((fast.is_repeat, slow.is_repeat, attempts.load(Ordering::SeqCst)), (false, true, 2));
        fixture.check(&fast).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_of_a_key_that_was_committed_returns_the_result_and_calls_nothing() {
    let fixture = Fixture::with([CommitFault::After(StoreError::TRANSACTION_TIMED_OUT)]).await;
    let error = fixture.bus.run_exactly_once(Some(b"key"), body(&Arc::default())).await.unwrap_err();
    assert!(error.is_maybe_committed());
    let again = async |tx: Transaction| {
        add(&tx, b"n");
        Ok(9)
    };
    let done = fixture.other().await.run_exactly_once(Some(b"key"), again).await.unwrap();
    assert!(done.is_repeat);
    fixture.check(&done).await;
    let different = async |_: Transaction| Ok(vec!["a".to_owned()]);
    let error = fixture.bus.run_exactly_once(Some(b"key"), different).await.unwrap_err();
    assert!(matches!(error, Error::Invalid { what: "key", .. }), "{error}");
    // Another key is another run, and so is each run without a key.
    for key in [Some(&b"other"[..]), None, None] {
        assert!(!fixture.bus.run_exactly_once(key, again).await.unwrap().is_repeat);
    }
    assert_eq!(fixture.number(b"n").await, 4);
    for bad in [&b""[..], &[b'k'; 256]] {
        let error = fixture.bus.run_exactly_once(Some(bad), again).await.unwrap_err();
        assert!(matches!(error, Error::Invalid { what: "key", .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_says_whether_anything_may_be_committed() {
    let (before, after) = (CommitFault::Before, CommitFault::After);
    let late = CommitFault::Late(UNSETTLED);
    let give_up = before(StoreError::IO_ERROR);
    for (faults, reads_fail, code) in [
        // The read of the key failed.
        (vec![after(UNKNOWN)], true, 1021),
        // The read showed that nothing was committed, and a settled commit cannot take effect later.
        (vec![before(UNKNOWN), give_up.clone()], false, 1510),
        // But an unsettled commit may.
        (vec![late.clone(), give_up.clone()], false, 1039),
        (vec![late, before(UNKNOWN), give_up], false, 1039),
    ] {
        let case = format!("{faults:?}, {reads_fail}");
        let fixture = Fixture::with(faults).await;
        fixture.faults.plan_reads(move |read| {
            (reads_fail && matches!(read, Operation::Get { .. })).then_some(StoreError::IO_ERROR)
        });
        let error = fixture.bus.run_exactly_once(None, body(&Arc::default())).await.unwrap_err();
        assert_eq!((error.code(), error.is_maybe_committed()), (Some(code), code != 1510), "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_body_refuses_is_the_error_unless_an_attempt_may_still_commit() {
    for (fault, code) in [(CommitFault::Before(UNKNOWN), None), (CommitFault::Late(UNSETTLED), Some(1039))] {
        let fixture = Fixture::with([fault]).await;
        let attempts = AtomicU32::new(0);
        let error = fixture.bus.run_exactly_once(None, async |tx| {
            if attempts.fetch_add(1, Ordering::SeqCst) > 0 {
                return Err(Error::Invalid { what: "document", reason: "it was changed".to_owned() });
            }
            add(&tx, b"n");
            Ok(())
        });
        let error = error.await.unwrap_err();
        assert_eq!((error.code(), error.is_maybe_committed()), (code, code.is_some()), "{error}");
        assert_eq!(matches!(error, Error::Invalid { .. }), code.is_none());
    }
}

/// The second attempt of a run waits for its first read. Meanwhile the janitor sweeps, or does not.
#[tokio::test(start_paused = true)]
async fn a_run_whose_result_may_have_been_cleared_is_not_repeated() {
    let (young, old) = (Duration::from_mins(1), Duration::from_mins(6));
    for (fault, age, is_swept, result) in [
        (CommitFault::After(UNKNOWN), young, true, Ok(1)),
        (CommitFault::After(UNKNOWN), old, false, Ok(1)),
        (CommitFault::After(UNKNOWN), old, true, Err(1021)),
        // Nothing was committed, but a missing result no longer proves that.
        (CommitFault::Before(UNKNOWN), old, true, Err(1021)),
    ] {
        let fixture = Fixture::with([fault.clone()]).await;
        fixture.other().await.run_exactly_once(Some(b"before"), async |_| Ok(())).await.unwrap();
        fixture.faults.delay_reads(2 * old);
        let attempts = Arc::default();
        let running = tokio::spawn({
            let (bus, body) = (fixture.bus.clone(), body(&attempts));
            async move { bus.run_exactly_once(None, body).await }
        });
        tokio::time::sleep(2 * old + Duration::from_secs(1)).await;
        assert_eq!(fixture.faults.scripted(), 0, "the first attempt has ended");
        tokio::time::sleep(age).await;
        fixture.faults.heal();
        if is_swept {
            fixture.sweep().await;
        }
        let done = running.await.unwrap();
        let case = format!("{fault:?}, {age:?}, {is_swept}: {done:?}");
        assert_eq!(
            done.as_ref().map(|done| done.value).map_err(|error| error.code().unwrap()),
            result,
            "{case}"
        );
        assert!(done.map_or_else(|error| error.is_maybe_committed(), |done| !done.is_repeat), "{case}");
        assert_eq!(attempts.load(Ordering::SeqCst), 1, "{case}");
        let is_committed = matches!(fault, CommitFault::After(_));
        assert_eq!(fixture.number(b"n").await, u64::from(is_committed), "{case}");
    }
}

/// Makes one of many runs: adds to a common number and its own, writes its attempt and stamp, and may conflict with others.
async fn one_of_many(bus: &Bus, run: u32, is_keyed: bool, contends: bool) -> Result<CommittedOnce<u32>> {
    let key = |what: &str| format!("{what}/{run}").into_bytes();
    let attempts = AtomicU32::new(0);
    let run_key = is_keyed.then(|| run.to_be_bytes());
    let body = async |tx: Transaction| {
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
    };
    bus.run_exactly_once(run_key.as_ref().map(|key| &key[..]), body).await
}

/// Half of the runs have a key, and each of these is made by two tasks.
#[tokio::test(start_paused = true)]
async fn thousands_of_runs_with_random_faults_count_exactly() {
    const TASKS: u32 = 8;
    const RUNS: u32 = 2_000;
    let mut rng = dice();
    let mut deciding = rng.fork();
    let fixture = Fixture::new().await;
    fixture.faults.plan_commits(move |attempt| match deciding.u32(..20) {
        _ if !attempt.writes() => None,
        0..2 => Some(CommitFault::Before(CONFLICT)),
        2..4 => Some(CommitFault::Before(UNKNOWN)),
        4..7 => Some(CommitFault::After(UNKNOWN)),
        7 => Some(CommitFault::After(UNSETTLED)),
        8..10 => Some(CommitFault::Late(UNSETTLED)),
        _ => None,
    });
    let outcomes: Arc<Mutex<BTreeMap<u32, Vec<CommittedOnce<u32>>>>> = Arc::default();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (bus, faults, outcomes, mut rng) =
            (fixture.bus.clone(), fixture.faults.clone(), Arc::clone(&outcomes), rng.fork());
        tasks.spawn(async move {
            for run in 0..RUNS {
                let is_keyed = run % 2 == 0;
                if run % TASKS != task && !(is_keyed && (run + 1) % TASKS == task) {
                    continue;
                }
                let done = one_of_many(&bus, run, is_keyed, rng.u32(..4) == 0).await.unwrap();
                outcomes.lock().unwrap().entry(run).or_default().push(done);
                if rng.u32(..3) == 0 {
                    faults.commit_late().await;
                }
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    fixture.faults.heal();
    fixture.faults.commit_late().await;
    assert_eq!(fixture.number(b"n").await, u64::from(RUNS));
    let outcomes = std::mem::take(&mut *outcomes.lock().unwrap());
    assert!(outcomes.values().flatten().any(|done| done.value > 2), "there were faults");
    for (run, outcomes) in outcomes {
        assert_eq!(outcomes.len(), if run % 2 == 0 { 2 } else { 1 });
        assert_eq!(outcomes.iter().filter(|done| !done.is_repeat).count(), 1, "run {run}");
        for done in outcomes {
            assert_eq!(fixture.number(format!("own/{run}").as_bytes()).await, 1, "run {run}");
            let stored = fixture.get(format!("attempt/{run}").as_bytes()).await;
            assert_eq!(stored, done.value.to_be_bytes(), "run {run}");
            let stored = fixture.get(format!("stamp/{run}").as_bytes()).await;
            assert_eq!(stored, done.committed.versionstamp.0, "run {run}");
        }
    }
}

#[tokio::test]
async fn its_futures_can_be_spawned() {
    let bus = wide_bus(&Store::memory()).await;
    let task = tokio::spawn(async move {
        // A body that is `Send`, but not `Sync`.
        let count = std::cell::Cell::new(0);
        let body = move |tx: Transaction| {
            count.set(count.get() + 1);
            add(&tx, b"n");
            std::future::ready(Ok(()))
        };
        bus.run_exactly_once(None, body).await
    });
    assert!(!task.await.unwrap().unwrap().is_repeat);
}

async fn number(store: &Store, key: &[u8]) -> u64 {
    let found = store.begin().get(key, Isolation::Snapshot).await.unwrap().unwrap_or_default().to_vec();
    found.try_into().map_or(0, u64::from_le_bytes)
}

/// Bug: raising the incarnation cleared the results and the version before which they were swept, so a missing key seemed to prove that
/// nothing was committed. Fix: raising it keeps the results.
#[tokio::test(start_paused = true)]
async fn a_run_that_a_raise_of_the_incarnation_interrupts_is_not_repeated() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = wide_bus(&faults.store()).await;
    faults.script_commits([CommitFault::After(UNKNOWN)]);
    faults.delay_reads(Duration::from_secs(20));
    let attempts = Arc::new(AtomicU32::new(0));
    let running = tokio::spawn({
        let (bus, attempts) = (bus.clone(), Arc::clone(&attempts));
        async move {
            bus.run_exactly_once(None, async |tx: Transaction| {
                attempts.fetch_add(1, Ordering::SeqCst);
                add(&tx, b"n");
                Ok(())
            })
            .await
        }
    });
    tokio::time::sleep(Duration::from_secs(22)).await;
    assert_eq!(number(&store, b"n").await, 1, "the first attempt is committed");
    let raised = Bus::raise_incarnation(&store, b"notibus", Incarnation(0), true).await.unwrap();
    assert_eq!(raised, Incarnation(1));
    faults.heal();
    let done = running.await.unwrap();
    assert!(done.unwrap().committed.versionstamp.version() > 0);
    assert_eq!((number(&store, b"n").await, attempts.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_key_is_known_after_a_raise_of_the_incarnation() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let body = async |tx: Transaction| {
        add(&tx, b"n");
        Ok(())
    };
    bus.run_exactly_once(Some(b"order"), body).await.unwrap();
    Bus::raise_incarnation(&store, b"notibus", Incarnation(0), true).await.unwrap();
    let again = wide_bus(&store).await.run_exactly_once(Some(b"order"), body).await;
    assert!(again.unwrap().is_repeat);
    assert_eq!(number(&store, b"n").await, 1);
}

#[tokio::test(start_paused = true)]
async fn damaged_results_are_named_by_their_keys() {
    for key in [&b"notibus\x15\x18\x14\x01m\x00"[..], b"notibus\x15\x18\x15\x01"] {
        let store = Store::memory();
        let bus = wide_bus(&store).await;
        common::set(&store, key, b"junk").await;
        let error = bus.run_exactly_once(Some(b"m"), async |_: Transaction| Ok(())).await.unwrap_err();
        assert!(error.to_string().contains(&key.escape_ascii().to_string()), "{error}");
    }
}
