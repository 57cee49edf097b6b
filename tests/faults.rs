//! The test wrappers of a store do what their names say, and runs continue after outages.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use common::within;
use futures_util::future::BoxFuture;
use notibus::{
    Error,
    store::{
        AtomicOp, Env, Environment, Isolation, KeyRange, Store, StoreError, Transaction,
        testing::{CommitFault, Faults, Operation, Trace, WatchFault},
    },
};

async fn set(store: &Store, key: &[u8]) -> Result<(), Option<i32>> {
    let tx = store.begin();
    tx.set(key, b"");
    tx.commit().await.map(|_| ()).map_err(|error| error.code())
}

async fn is_set(store: &Store, key: &[u8]) -> bool {
    store.begin().get(key, Isolation::Snapshot).await.unwrap().is_some()
}

#[tokio::test]
async fn a_commit_fails_before_or_after_it_happens() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
    faults.script_commits([CommitFault::Before(unknown.clone()), CommitFault::After(unknown)]);
    let db = faults.store();
    assert_eq!(set(&db, b"before").await, Err(Some(1021)));
    assert_eq!(set(&db, b"after").await, Err(Some(1021)));
    assert_eq!(set(&db, b"then").await, Ok(()));
    assert!(!is_set(&store, b"before").await);
    assert!(is_set(&store, b"after").await && is_set(&store, b"then").await);
}

/// A body that could not tell a conflict from a commit of unknown result would either repeat an effect or read for nothing.
#[tokio::test]
async fn a_body_knows_whether_an_earlier_attempt_may_have_committed() {
    let doubts = async |commits: Vec<CommitFault>| {
        let faults = Faults::new(&Store::memory());
        faults.script_commits(commits);
        let doubts = std::sync::Mutex::new(Vec::new());
        let body = async |tx: Transaction| {
            doubts.lock().unwrap().push(tx.may_have_committed());
            tx.set(b"k", b"");
            Ok(())
        };
        faults.store().run(body).await.unwrap();
        doubts.into_inner().unwrap()
    };
    let conflict = || CommitFault::Before(StoreError::NOT_COMMITTED);
    let unknown = CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT);
    assert_eq!(doubts(vec![conflict()]).await, [false, false]);
    assert_eq!(doubts(vec![conflict(), unknown, conflict()]).await, [false, false, true, true]);
}

#[tokio::test]
async fn a_late_commit_happens_on_demand() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    faults.script_commits([CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT)]);
    assert_eq!(set(&faults.store(), b"k").await, Err(Some(1031)));
    assert!(!is_set(&store, b"k").await);
    assert!(matches!(faults.commit_late().await[..], [Ok(())]));
    assert!(is_set(&store, b"k").await);
}

#[tokio::test]
async fn plans_choose_and_healing_forgets_them() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let db = faults.store();
    faults.plan_commits(|attempt| {
        let fault = CommitFault::Before(StoreError::NOT_COMMITTED);
        attempt.applies(AtomicOp::Add).then_some(fault)
    });
    faults
        .plan_reads(|read| matches!(read, Operation::GetRange { .. }).then_some(StoreError::PROCESS_BEHIND));
    let tx = db.begin();
    tx.atomic(AtomicOp::Add, b"n", &[1]);
    assert_eq!(tx.commit().await.unwrap_err().code(), Some(1020));
    assert_eq!(set(&db, b"k").await, Ok(()));
    let all = notibus::store::RangeRead::new(KeyRange::prefix(""));
    let page = db.begin().get_range(&all, Isolation::Snapshot).await;
    assert_eq!(page.unwrap_err().code(), Some(1037));
    assert!(is_set(&db, b"k").await);
    faults.heal();
    let page = db.begin().get_range(&all, Isolation::Snapshot).await;
    assert_eq!(page.unwrap().rows.len(), 1);
    let counts = faults.counts();
    assert_eq!((counts.reads, counts.mutations, counts.commits), (3, 2, 2));
}

#[tokio::test(start_paused = true)]
async fn watches_are_refused_dropped_or_spurious() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let db = faults.store();
    let watch = async |key: &'static [u8]| db.run(async |tx| tx.watch(key).await).await;
    faults.plan_watches(|key| match key {
        b"refused" => Some(WatchFault::Refuse(StoreError::TOO_MANY_WATCHES)),
        b"dropped" => Some(WatchFault::Drop),
        b"spurious" => Some(WatchFault::Spurious),
        _ => None,
    });
    let refused = watch(b"refused").await.err().and_then(|error| error.code());
    assert_eq!(refused, Some(1032));
    within("a spurious watch", watch(b"spurious").await.unwrap()).await.unwrap();
    let (dropped, good) = (watch(b"dropped").await.unwrap(), watch(b"good").await.unwrap());
    set(&store, b"dropped").await.unwrap();
    set(&store, b"good").await.unwrap();
    within("a good watch", good).await.unwrap();
    assert!(tokio::time::timeout(common::LIMIT, dropped).await.is_err(), "a dropped watch does not fire");
}

#[tokio::test]
async fn a_trace_tells_attempts_apart() {
    let store = Store::memory();
    let trace = Trace::new(&store);
    let db = trace.store();
    let tx = db.begin();
    tx.get(b"a", Isolation::Serializable).await.unwrap();
    tx.get(b"b", Isolation::Snapshot).await.unwrap();
    tx.reset();
    tx.set(b"c", b"1");
    tx.add_read_conflict(&KeyRange::key(b"d"));
    tx.commit().await.unwrap();
    let attempts = trace.take();
    assert_eq!(attempts.len(), 2);
    assert_eq!((attempts[0].reads().count(), attempts[0].read_conflicts().count()), (2, 1));
    assert!(!attempts[0].writes() && attempts[1].writes());
    assert_eq!((attempts[1].reads().count(), attempts[1].read_conflicts().count()), (0, 1));
    assert!(trace.take().is_empty(), "what was taken is gone");
}

/// A clock that the test sets.
#[derive(Clone, Default)]
struct ByHand(Arc<AtomicU64>);

impl Environment for ByHand {
    fn now(&self) -> Duration {
        Duration::from_secs(self.0.load(Ordering::Relaxed))
    }

    fn wall_ms(&self) -> u64 {
        0
    }

    fn random(&self) -> u64 {
        0
    }

    fn sleep(&self, _duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async {})
    }
}

/// Regression: a run that had waited for a cluster for longer than its limit gave up after its first attempt, just when the cluster was
/// back.
#[tokio::test]
async fn an_outage_counts_for_no_more_than_an_attempt_can_take() {
    let clock = ByHand::default();
    let store = Store::memory_in(Env::new(clock.clone()));
    let attempts = Cell::new(0);
    let run = async |outage_secs: u64, last: u32| {
        attempts.set(0);
        store
            .run(async |_| {
                attempts.set(attempts.get() + 1);
                if attempts.get() > last {
                    return Ok(());
                }
                clock.0.fetch_add(outage_secs, Ordering::Relaxed);
                Err(StoreError::TRANSACTION_TOO_OLD.into())
            })
            .await
    };
    run(600, 1).await.unwrap();
    assert_eq!(attempts.get(), 2);
    // Retries still end.
    let error = run(600, 1_000).await.unwrap_err();
    assert!(matches!(error, Error::RetriesExhausted { attempts: 12, .. }), "{error}");
    let error = run(1, 1_000).await.unwrap_err();
    assert!(matches!(error, Error::RetriesExhausted { attempts: 60, .. }), "{error}");
}
