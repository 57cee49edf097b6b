//! Tests of workers, with a work that records what happens to it, and misbehaves on demand.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::{FutureExt, future::BoxFuture};
use parking_lot::Mutex;

use super::*;
use crate::state::keys::Role;
use crate::{
    base::error::StoreError,
    state::{keys::Keys, membership::NodeOptions, polls::Polls},
    store::{Database, Transaction},
};

/// How the work behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// It ends when it is asked to.
    Good,
    /// It takes so long to end.
    Slow(Duration),
    /// It takes so long to end on the first resource; on the others it ends when it is asked to.
    FirstIsSlow(Duration),
    /// It panics when it starts.
    Panics,
    /// It fails when it starts.
    Fails,
    /// It ends when it starts.
    Ends,
    /// It fails after so long.
    FailsAfter(Duration),
}

/// A work that records what happens to it.
struct Probe {
    count: u64,
    manner: Mutex<Manner>,
    /// How long it takes to read the resources.
    delay: Mutex<Duration>,
    /// Whether the resources cannot be read.
    is_blind: AtomicBool,
    /// Whether reading them panics.
    is_mad: AtomicBool,
    /// The events, each with its epoch.
    events: Mutex<Vec<(&'static str, u64)>>,
    /// Each acquisition: resource and epoch.
    acquired: Mutex<Vec<(u64, u64)>>,
}

impl Probe {
    fn new(count: u64, manner: Manner) -> Arc<Self> {
        Arc::new(Self {
            count,
            manner: Mutex::new(manner),
            delay: Mutex::default(),
            is_blind: AtomicBool::new(false),
            is_mad: AtomicBool::new(false),
            events: Mutex::default(),
            acquired: Mutex::default(),
        })
    }

    fn record(&self, what: &'static str, epoch: u64) {
        self.events.lock().push((what, epoch));
    }

    /// Takes the events.
    fn take(&self) -> Vec<(&'static str, u64)> {
        std::mem::take(&mut self.events.lock())
    }
}

/// Records that work was dropped before it has ended.
struct Aborted<'a>(Option<(&'a Probe, u64)>);

impl Drop for Aborted<'_> {
    fn drop(&mut self) {
        if let Some((probe, epoch)) = self.0 {
            probe.record("aborted", epoch);
        }
    }
}

impl Work for Probe {
    fn resources<'a>(&'a self, _: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        assert!(!self.is_mad.load(Ordering::SeqCst), "as planned");
        let resources = if self.is_blind.load(Ordering::SeqCst) {
            Err(StoreError::TRANSACTION_TIMED_OUT.into())
        } else {
            Ok((0..self.count).collect())
        };
        let delay = *self.delay.lock();
        async move {
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            resources
        }
        .boxed()
    }

    fn acquired(&self, _: &Transaction, resource: u64, epoch: u64) {
        self.acquired.lock().push((resource, epoch));
    }

    fn run(self: Arc<Self>, lease: Held, mut stop: Stop) -> BoxFuture<'static, Result<()>> {
        async move {
            let manner = *self.manner.lock();
            self.record("started", lease.epoch);
            let mut aborted = Aborted(Some((&self, lease.epoch)));
            match manner {
                Manner::Panics => panic!("as planned"),
                Manner::Fails => {
                    aborted.0 = None;
                    return Err(StoreError::IO_ERROR.into());
                }
                Manner::Ends => {
                    aborted.0 = None;
                    return Ok(());
                }
                Manner::FailsAfter(pause) => {
                    tokio::time::sleep(pause + Duration::from_millis(200 * lease.resource)).await;
                    aborted.0 = None;
                    return Err(StoreError::IO_ERROR.into());
                }
                Manner::Good => stop.requested().await,
                Manner::FirstIsSlow(_) if lease.resource > 0 => stop.requested().await,
                Manner::Slow(pause) | Manner::FirstIsSlow(pause) => {
                    stop.requested().await;
                    self.record("asked", lease.epoch);
                    tokio::time::sleep(pause).await;
                }
            }
            aborted.0 = None;
            self.record("ended", lease.epoch);
            Ok(())
        }
        .boxed()
    }
}

async fn join(db: &Database) -> Arc<Member> {
    let (heartbeat, expiry) = (Duration::from_secs(3), Duration::from_secs(10));
    join_with(db, NodeOptions { heartbeat, expiry, ..NodeOptions::default() }).await
}

async fn join_with(db: &Database, options: NodeOptions) -> Arc<Member> {
    let keys = Keys::new(b"p").unwrap();
    let reports = (&Arc::default(), &Polls::new(db.env()));
    Member::join(db, &keys, None, reports, options).await.unwrap()
}

fn pool() -> Pool {
    Pool { name: "probe".into(), role: Role::new("prober").unwrap(), idle: None }
}

/// The options whose times the tests count with.
fn balance() -> BalanceOptions {
    BalanceOptions { interval: Duration::from_secs(3), ..BalanceOptions::default() }
}

async fn start(member: &Arc<Member>, work: &Arc<Probe>) -> Worker {
    Worker::start(member, pool(), Arc::<Probe>::clone(work), balance()).await.unwrap()
}

async fn seconds(count: u64) {
    tokio::time::sleep(Duration::from_secs(count)).await;
}

async fn rows(db: &Database) -> Vec<Lease> {
    let keys = Keys::new(b"p").unwrap();
    let rows = db.begin().all_rows(keys.leases("probe"), Isolation::Snapshot).await.unwrap();
    rows.iter().map(|(key, value)| keys.lease_row(key, value).unwrap().2).collect()
}

#[tokio::test(start_paused = true)]
async fn work_that_panics_fails_or_ends_is_taken_again_with_the_next_epoch() {
    for manner in [Manner::Panics, Manner::Fails, Manner::Ends] {
        let db = Database::memory();
        let member = join(&db).await;
        let probe = Probe::new(1, manner);
        let worker = start(&member, &probe).await;
        seconds(16).await;
        let events = probe.take();
        let starts: Vec<_> =
            events.iter().filter(|(what, _)| *what == "started").map(|(_, epoch)| *epoch).collect();
        assert_eq!(starts, [1, 2, 3, 4, 5], "{manner:?}: at first, and after 1, 3, 7 and 15 s");
        let panics = if manner == Manner::Panics { 5 } else { 0 };
        assert_eq!(member.shared().stats.snapshot().work_panics, panics);
        *probe.manner.lock() = Manner::Good;
        seconds(60).await;
        assert_eq!(probe.take(), [("started", 6)]);
        worker.shutdown().await.unwrap();
        assert_eq!(probe.take(), [("ended", 6)]);
        assert_eq!(rows(&db).await, [Lease { epoch: 6, owner: None }]);
    }
}

/// An idle worker polls, finds nothing new, and stays idle. It once did so although the work on one of its own leases
/// had failed a moment before: a consumer stood still in that shard, under a living owner, for up to an hour.
#[tokio::test(start_paused = true)]
async fn work_that_fails_while_the_worker_rests_is_taken_again() {
    let db = Database::memory();
    let member = join(&db).await;
    let probe = Probe::new(1, Manner::FailsAfter(Duration::from_mins(10)));
    let worker = start(&member, &probe).await;
    seconds(595).await;
    assert_eq!(probe.take(), [("started", 1)]);
    *probe.manner.lock() = Manner::Good;
    seconds(10).await;
    assert_eq!(probe.take(), [("started", 2)]);
    worker.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn work_that_is_asked_for_ends_in_peace_within_the_deadline() {
    let db = Database::memory();
    let (old, new) = (Probe::new(2, Manner::Slow(Duration::from_secs(7))), Probe::new(2, Manner::Good));
    let (a, b) = (join(&db).await, join(&db).await);
    let _a = start(&a, &old).await;
    let _b = start(&b, &new).await;
    seconds(9).await;
    assert_eq!(new.take(), [], "it waits");
    seconds(2).await;
    assert_eq!(old.take(), [("started", 1), ("started", 1), ("asked", 1), ("ended", 1)]);
    assert_eq!(new.take(), [("started", 2)]);
}

#[tokio::test(start_paused = true)]
async fn work_that_does_not_end_within_the_deadline_is_fenced_off() {
    let db = Database::memory();
    let (old, new) = (Probe::new(2, Manner::Slow(Duration::from_hours(1))), Probe::new(2, Manner::Good));
    let (a, b) = (join(&db).await, join(&db).await);
    let first = start(&a, &old).await;
    let _b = start(&b, &new).await;
    seconds(12).await;
    assert_eq!(new.take(), [("started", 2)]);
    seconds(3).await;
    assert_eq!(old.take(), [("started", 1), ("started", 1), ("asked", 1), ("aborted", 1)]);
    assert_eq!(a.shared().stats.snapshot().leases_lost, 1);
    // A shutdown does not wait for it longer either.
    let began = tokio::time::Instant::now();
    first.shutdown().await.unwrap();
    assert_eq!(began.elapsed().as_secs(), 10);
    assert_eq!(old.take(), [("asked", 1), ("aborted", 1)]);
    seconds(4).await;
    assert_eq!(new.take(), [("started", 2)]);
}

/// A single slow consumer once kept all leases of its node until it had ended, too.
#[tokio::test(start_paused = true)]
async fn what_has_ended_is_given_back_while_other_work_still_ends() {
    let db = Database::memory();
    let slow = Manner::FirstIsSlow(Duration::from_secs(9));
    let (old, new) = (Probe::new(4, slow), Probe::new(4, Manner::Good));
    let (a, b) = (join(&db).await, join(&db).await);
    let first = start(&a, &old).await;
    let _b = start(&b, &new).await;
    seconds(8).await;
    assert_eq!(*new.acquired.lock(), [(2, 2), (3, 2)]);
    let ending = tokio::spawn(first.shutdown());
    seconds(5).await;
    assert_eq!(*new.acquired.lock(), [(2, 2), (3, 2), (1, 2)], "the slow one is not taken from it");
    ending.await.unwrap().unwrap();
    seconds(5).await;
    assert_eq!(*new.acquired.lock(), [(2, 2), (3, 2), (1, 2), (0, 2)]);
    assert_eq!(old.take().last(), Some(&("ended", 1)), "nothing was aborted");
}

/// The node for which the owner ends its work dies before it could take the lease.
#[tokio::test(start_paused = true)]
async fn what_was_released_for_a_node_that_has_died_is_taken_back() {
    let db = Database::memory();
    let (old, new) = (Probe::new(2, Manner::Slow(Duration::from_secs(8))), Probe::new(2, Manner::Good));
    let (a, b) = (join(&db).await, join(&db).await);
    let _a = start(&a, &old).await;
    let second = start(&b, &new).await;
    seconds(4).await;
    drop((second, b));
    seconds(40).await;
    assert_eq!(rows(&db).await.len(), 2);
    assert_eq!(
        old.take(),
        [("started", 1), ("started", 1), ("asked", 1), ("ended", 1), ("started", 2)],
        "it is free once the node is removed"
    );
}

#[tokio::test(start_paused = true)]
async fn a_node_that_leaves_while_it_waits_leaves_nothing_behind() {
    let db = Database::memory();
    let (old, new) = (Probe::new(2, Manner::Good), Probe::new(2, Manner::Good));
    let (a, b) = (join(&db).await, join(&db).await);
    let _a = start(&a, &old).await;
    let second = start(&b, &new).await;
    second.shutdown().await.unwrap();
    seconds(10).await;
    assert_eq!(old.take(), [("started", 1), ("started", 1)]);
    // The role is gone, so the node can take it up again.
    let _again = start(&b, &new).await;
    seconds(10).await;
    assert_eq!(new.take(), [("started", 2)]);
}

/// A resource whose work failed at once was once acquired every second, and each time all workers of all nodes read
/// the whole pool.
#[tokio::test(start_paused = true)]
async fn work_that_fails_costs_other_nodes_nothing() {
    let db = Database::memory();
    let faults = crate::store::testing::Faults::new(&db);
    let (bad, good) = (Probe::new(2, Manner::Fails), Probe::new(2, Manner::Good));
    let (a, b) = (join(&db).await, join(&faults.database()).await);
    let _b = start(&b, &good).await;
    seconds(10).await;
    let reads = async || {
        let before = faults.counts().reads;
        seconds(600).await;
        faults.counts().reads - before
    };
    let alone = reads().await;
    let _a = start(&a, &bad).await;
    seconds(20).await;
    let beside = reads().await;
    assert!(bad.take().len() > 10, "it is tried again and again");
    assert!(beside <= alone + 4, "{beside} reads instead of {alone}");
}

/// A panic outside of the work, such as one while resources are read, ends the worker's round, not the worker.
#[tokio::test(start_paused = true)]
async fn a_worker_that_panics_begins_again() {
    let db = Database::memory();
    let member = join(&db).await;
    let probe = Probe::new(2, Manner::Good);
    let worker = start(&member, &probe).await;
    probe.is_mad.store(true, Ordering::SeqCst);
    let keys = Keys::new(b"p").unwrap();
    let change = async || {
        db.run(async |tx| {
            changed(&tx, &keys, "probe");
            Ok(())
        })
        .await
        .unwrap();
    };
    change().await;
    seconds(5).await;
    assert!(member.shared().stats.snapshot().work_panics > 0);
    probe.is_mad.store(false, Ordering::SeqCst);
    seconds(5).await;
    probe.take();
    worker.shutdown().await.unwrap();
    assert_eq!(probe.take(), [("ended", 2), ("ended", 2)], "it works on both again");
}

/// Times that mean "never" are fine everywhere.
#[tokio::test(start_paused = true)]
async fn a_node_that_never_beats_and_never_takes_over_works() {
    let db = Database::memory();
    let never = NodeOptions { heartbeat: Duration::MAX, expiry: Duration::MAX, ..NodeOptions::default() };
    let member = join_with(&db, never).await;
    let probe = Probe::new(2, Manner::Good);
    let balance =
        BalanceOptions { handover: Duration::MAX, interval: Duration::MAX, ..BalanceOptions::default() };
    let worker = Worker::start(&member, pool(), Arc::<Probe>::clone(&probe), balance).await.unwrap();
    let (other, new) = (join(&db).await, Probe::new(2, Manner::Good));
    let _other = start(&other, &new).await;
    seconds(3_600).await;
    assert_eq!(probe.take(), [("started", 1), ("started", 1), ("ended", 1)]);
    assert_eq!(new.take(), [("started", 2)]);
    worker.shutdown().await.unwrap();
    member.leave().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_start_that_fails_leaves_nothing_and_a_round_that_fails_is_repeated() {
    let db = Database::memory();
    let member = join(&db).await;
    let probe = Probe::new(2, Manner::Good);
    probe.is_blind.store(true, Ordering::SeqCst);
    let refused = Worker::start(&member, pool(), Arc::<Probe>::clone(&probe), balance()).await;
    assert_eq!(refused.unwrap_err().code(), Some(1031));
    assert_eq!(rows(&db).await, []);

    probe.is_blind.store(false, Ordering::SeqCst);
    let worker = start(&member, &probe).await;
    probe.is_blind.store(true, Ordering::SeqCst);
    seconds(60).await;
    assert_eq!(probe.take(), [("started", 1), ("started", 1)], "what is held is worked on");
    probe.is_blind.store(false, Ordering::SeqCst);
    worker.shutdown().await.unwrap();
    assert_eq!(*probe.acquired.lock(), [(0, 1), (1, 1)]);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_dropped_ends_its_work_and_its_node_lets_others_have_it() {
    let db = Database::memory();
    let (old, new) = (Probe::new(1, Manner::Good), Probe::new(1, Manner::Good));
    let (a, b) = (join(&db).await, join(&db).await);
    let first = start(&a, &old).await;
    let _b = start(&b, &new).await;
    drop(first);
    seconds(1).await;
    assert_eq!(old.take(), [("started", 1), ("aborted", 1)]);
    // The node lives and does not list the role any more.
    seconds(6).await;
    assert_eq!(new.take(), [("started", 2)]);
}

/// Regression: the role of a dropped worker stayed with the node until the aborted task had ended, and a start before that was refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_is_dropped_can_be_started_again_at_once() {
    let db = Database::memory();
    let member = join(&db).await;
    for _ in 0..20 {
        let probe = Probe::new(3, Manner::Good);
        drop(start(&member, &probe).await);
        let next = Probe::new(3, Manner::Good);
        let worker = start(&member, &next).await;
        assert!(probe.take().iter().filter(|(what, _)| *what == "started").count() <= 3);
        assert_eq!(Arc::strong_count(&probe), 1, "the work before has ended");
        assert_eq!(next.acquired.lock().len(), 3);
        let role = member.enter(pool().role).await.unwrap_err();
        assert!(matches!(role, Error::Invalid { .. }), "a worker that goes on is not waited for: {role}");
        // Nor does it wait for one that shuts down.
        let (ended, last) = tokio::join!(worker.shutdown(), start(&member, &probe));
        ended.unwrap();
        last.shutdown().await.unwrap();
    }
}

/// A pause that ended during a round was once seen by nobody: the lease had an owner and no work for an hour.
#[tokio::test(start_paused = true)]
async fn work_whose_pause_ends_during_a_round_is_taken_again() {
    let db = Database::memory();
    let member = join(&db).await;
    let probe = Probe::new(2, Manner::FailsAfter(Duration::from_secs(10)));
    let worker = start(&member, &probe).await;
    seconds(5).await;
    assert_eq!(probe.take(), [("started", 1), ("started", 1)]);
    *probe.delay.lock() = Duration::from_millis(500);
    // Running work fails all the same, one job a little later than the other.
    *probe.manner.lock() = Manner::Good;
    seconds(30).await;
    assert_eq!(probe.take(), [("started", 2), ("started", 2)], "both are taken again");
    worker.shutdown().await.unwrap();
}

/// A work that has its worker stopped when it is aborted.
struct StopsWhenAborted(Arc<Mutex<Option<watch::Sender<bool>>>>);

impl Drop for StopsWhenAborted {
    fn drop(&mut self) {
        if let Some(stop) = self.0.lock().take() {
            stop.send_replace(true);
        }
    }
}

impl Work for StopsWhenAborted {
    fn resources<'a>(&'a self, _: &'a Transaction) -> BoxFuture<'a, Result<Vec<u64>>> {
        std::future::ready(Ok(vec![0])).boxed()
    }

    fn acquired(&self, _: &Transaction, _: u64, _: u64) {}

    fn run(self: Arc<Self>, _: Held, _: Stop) -> BoxFuture<'static, Result<()>> {
        let guard = Self(Arc::clone(&self.0));
        async move {
            std::future::pending::<()>().await;
            drop(guard);
            Ok(())
        }
        .boxed()
    }
}

/// A node fell out, aborted its work, and was asked to stop before it had seen the end of that work: then the end was
/// counted and logged as a panic.
#[tokio::test(start_paused = true)]
async fn work_that_is_aborted_while_its_worker_stops_has_not_panicked() {
    let db = Database::memory();
    let member = join(&db).await;
    let stopping = Arc::new(Mutex::new(None));
    let work: Arc<dyn Work> = Arc::new(StopsWhenAborted(Arc::clone(&stopping)));
    let Worker { stop, mut task, .. } =
        Worker::start(&member, pool(), Arc::clone(&work), balance()).await.unwrap();
    seconds(1).await;
    *stopping.lock() = Some(stop);
    let keys = member.keys();
    db.run(async |tx| {
        tx.clear_range(&keys.all_of_nodes());
        Ok(())
    })
    .await
    .unwrap();
    task.join_next().await.unwrap().unwrap().unwrap();
    assert!(stopping.lock().is_none(), "it was stopped by the abort");
    assert_eq!(member.shared().stats.snapshot().work_panics, 0);
}

/// A lease that cannot be decoded is neither replaced nor guessed: all who need it fail with its key until it is repaired.
#[tokio::test(start_paused = true)]
async fn a_damaged_lease_is_named_and_stays() {
    let db = Database::memory();
    let node = join(&db).await;
    let worker = start(&node, &Probe::new(9, Manner::Good)).await;
    let key = Keys::new(b"p").unwrap().lease("probe", 4);
    let stored = async || db.begin().get(&key, Isolation::Snapshot).await.unwrap().unwrap();
    let put = async |value: &[u8]| {
        let put = async |tx: Transaction| {
            tx.set(&key, value);
            Ok(())
        };
        db.run(put).await.unwrap();
    };
    let good = stored().await;
    let lease = Lease::from_bytes(&good).unwrap();
    let held = Held::new(node.keys(), &"probe".into(), 4, lease.epoch, lease.owner.unwrap());
    put(b"broken").await;
    let error = db.run(async |tx| held.check(&tx).await).await.unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains(&key.escape_ascii().to_string()), "{error}");
    let second = join(&db).await;
    let refused =
        Worker::start(&second, pool(), Probe::new(9, Manner::Good), BalanceOptions::default()).await;
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    seconds(20).await;
    assert_eq!(&stored().await[..], b"broken");
    put(&good).await;
    seconds(60).await;
    assert_eq!(rows(&db).await.iter().filter(|lease| lease.owner.is_some()).count(), 9);
    worker.shutdown().await.unwrap();
}

/// Regression: another process lived under the id of a node that had fallen out. The node logged that four times a second forever, and
/// knew of no trouble; a role that it entered meanwhile counted as published.
#[tokio::test(start_paused = true)]
async fn a_node_whose_id_another_process_has_enters_no_role() {
    let db = Database::memory();
    let member = join(&db).await;
    let key = member.keys().node(member.id());
    let other = db.clone();
    let living = tokio::spawn(async move {
        for beat in 0.. {
            let row = NodeRow { beat, token: [9; 16], started_ms: 0, expiry_ms: 5_000 };
            let beat = async |tx: Transaction| {
                tx.set(&key, &row.to_bytes());
                Ok(())
            };
            other.run(beat).await.unwrap();
            seconds(1).await;
        }
    });
    seconds(30).await;
    let shared = member.shared();
    assert!(shared.registration().borrow().is_none());
    #[cfg(feature = "http")]
    assert!(shared.stats.health.troubles().iter().any(|trouble| trouble.what == "heartbeat of a node"));
    let refused = member.enter(pool().role).await.unwrap_err();
    assert!(matches!(refused, Error::Invalid { what: "node id", .. }), "{refused}");
    living.abort();
    seconds(60).await;
    assert!(shared.registration().borrow().is_some());
    member.enter(pool().role).await.unwrap();
}

/// Regression: a role whose publication had panicked counted as published, and nothing counted the panic.
#[tokio::test(start_paused = true)]
async fn a_heartbeat_that_panics_is_counted_and_publishes_nothing() {
    let faults = crate::store::testing::Faults::new(&Database::memory());
    let member = join(&faults.database()).await;
    let key = member.keys().node(member.id());
    faults.plan_reads(move |operation| {
        let is_mine =
            matches!(operation, crate::store::testing::Operation::Get { key: read, .. } if *read == key);
        assert!(!is_mine, "as planned");
        None
    });
    let refused = member.enter(pool().role).await.unwrap_err();
    assert!(matches!(refused, Error::Task { .. }), "{refused}");
    faults.heal();
    assert_eq!(member.shared().stats.snapshot().task_panics, 1);
    let _role = member.enter(pool().role).await.unwrap();
}

/// Work that fails is tried again where it is, with back-off: the leases do not go round, and nothing waits once it can be done.
#[tokio::test(start_paused = true)]
async fn what_fails_backs_off_where_it_is() {
    let db = Database::memory();
    let probes = [Probe::new(4, Manner::Panics), Probe::new(4, Manner::Panics)];
    let (a, b) = (join(&db).await, join(&db).await);
    let (first, second) = (start(&a, &probes[0]).await, start(&b, &probes[1]).await);
    seconds(20).await;
    let owners =
        async || rows(&db).await.iter().map(|lease| lease.owner.map(|it| it.node)).collect::<Vec<_>>();
    let before = owners().await;
    seconds(3_600).await;
    assert_eq!(owners().await, before);
    let tried: usize = probes.iter().map(|probe| probe.acquired.lock().len()).sum();
    assert!((120..=600).contains(&tried), "{tried} acquisitions of four resources in an hour");
    for probe in &probes {
        *probe.manner.lock() = Manner::Good;
    }
    seconds(2 * 60).await;
    assert_eq!(owners().await, before);
    first.shutdown().await.unwrap();
    second.shutdown().await.unwrap();
}
