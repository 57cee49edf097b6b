//! Workers: how they begin, supervise and end the work on their leases, with work that misbehaves on demand.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Error, NodeOptions, Result,
    node::{BalanceOptions, NodeId},
    store::{Isolation, Store, StoreError, Transaction, testing::Faults},
    test_util::{
        inspect,
        pool::{PoolLease, PoolNode, PoolWork, PoolWorker},
    },
};
use parking_lot::Mutex;

const PREFIX: &[u8] = b"p";

/// How the work behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// The work ends as soon as it is asked to, but on resources below this number only after this time.
    Slow(u64, Duration),
    Panics,
    /// The work fails after this time.
    Fails(Duration),
    /// The work ends as soon as it starts.
    Ends,
    /// Reading the resources of the work panics.
    Unreadable,
    /// The work has lost its pool.
    Over,
}

const GOOD: Manner = Manner::Slow(0, Duration::ZERO);

/// Work that records what happens to it.
struct Probe {
    /// The number of resources.
    count: AtomicU64,
    manner: Mutex<Manner>,
    /// What happened so far: each event with its epoch.
    events: Mutex<Vec<(&'static str, u64)>>,
    /// The lease of each acquisition.
    leases: Mutex<Vec<PoolLease>>,
}

impl Probe {
    fn new(count: u64, manner: Manner) -> Arc<Self> {
        Arc::new(Self {
            count: AtomicU64::new(count),
            manner: Mutex::new(manner),
            events: Mutex::default(),
            leases: Mutex::default(),
        })
    }

    /// Returns the resource and the epoch of each acquisition.
    fn acquired(&self) -> Vec<(u64, u64)> {
        self.leases.lock().iter().map(PoolLease::resource_and_epoch).collect()
    }

    /// Takes the events.
    fn take(&self) -> Vec<(&'static str, u64)> {
        std::mem::take(&mut self.events.lock())
    }
}

/// The work on one lease. If it is dropped before its end, the drop is recorded.
struct ProbeRun {
    probe: Arc<Probe>,
    epoch: u64,
    has_ended: bool,
}

impl ProbeRun {
    fn end(mut self) {
        self.has_ended = true;
    }

    fn record(&self, what: &'static str) {
        self.probe.events.lock().push((what, self.epoch));
    }
}

impl Drop for ProbeRun {
    fn drop(&mut self) {
        if !self.has_ended {
            self.record("aborted");
        }
    }
}

/// A probe that its runs share.
struct Shared(Arc<Probe>);

impl PoolWork for Shared {
    fn resources(&self) -> Result<Vec<u64>> {
        match *self.0.manner.lock() {
            Manner::Unreadable => panic!("as planned"),
            Manner::Over => Err(Error::NoConsumer { consumer: "probe".to_owned() }),
            _ => Ok((0..self.0.count.load(Ordering::Relaxed)).collect()),
        }
    }

    fn run(&self, lease: PoolLease, stop: BoxFuture<'static, ()>) -> BoxFuture<'static, Result<()>> {
        let (resource, epoch) = lease.resource_and_epoch();
        self.0.leases.lock().push(lease);
        let run = ProbeRun { probe: Arc::clone(&self.0), epoch, has_ended: false };
        async move {
            let manner = *run.probe.manner.lock();
            run.record("started");
            let mut ended = Ok(());
            match manner {
                Manner::Panics | Manner::Unreadable | Manner::Over => panic!("as planned"),
                Manner::Fails(after) => {
                    tokio::time::sleep(after).await;
                    ended = Err(StoreError::IO_ERROR.into());
                }
                Manner::Ends => {}
                Manner::Slow(first, pause) => {
                    stop.await;
                    if resource < first {
                        run.record("asked");
                        tokio::time::sleep(pause).await;
                    }
                    run.record("ended");
                }
            }
            run.end();
            ended
        }
        .boxed()
    }
}

async fn join(store: &Store) -> PoolNode {
    let options = NodeOptions::default().heartbeat(Duration::from_secs(3)).expiry(Duration::from_secs(10));
    PoolNode::join(store, PREFIX, options).await.unwrap()
}

async fn start(node: &PoolNode, probe: &Arc<Probe>) -> PoolWorker {
    let balance = BalanceOptions::default().interval(Duration::from_secs(3));
    node.start("probe", &Arc::new(Shared(Arc::clone(probe))), balance).await.unwrap()
}

async fn seconds(count: u64) {
    tokio::time::sleep(Duration::from_secs(count)).await;
}

/// Returns the epoch and the owner of each of the first `count` leases that is stored.
async fn stored(store: &Store, count: u64) -> Vec<(u64, Option<NodeId>)> {
    let (tx, mut stored) = (store.begin(), Vec::new());
    for resource in 0..count {
        let key = inspect::lease(PREFIX, "probe", resource).unwrap();
        let Some(lease) = tx.get(&key, Isolation::Snapshot).await.unwrap() else { continue };
        let epoch = u64::from_be_bytes(lease[..8].try_into().unwrap());
        stored.push((epoch, inspect::owner(&lease).unwrap()));
    }
    stored
}

/// Lets another member join and leave, so that all members make a round.
async fn change(store: &Store) {
    let other = join(store).await;
    start(&other, &Probe::new(0, GOOD)).await.shutdown().await.unwrap();
    seconds(5).await;
}

async fn check(store: &Store, lease: &PoolLease) -> Result<()> {
    store.run(async |tx: Transaction| lease.check(&tx).await).await
}

#[tokio::test(start_paused = true)]
async fn work_that_panics_fails_or_ends_is_taken_again_with_the_next_epoch() {
    for manner in [Manner::Panics, Manner::Fails(Duration::ZERO), Manner::Ends] {
        let store = Store::memory();
        let member = join(&store).await;
        let probe = Probe::new(1, manner);
        let worker = start(&member, &probe).await;
        seconds(16).await;
        let starts = probe.take().into_iter().filter(|(what, _)| *what == "started");
        let epochs: Vec<_> = starts.map(|(_, epoch)| epoch).collect();
        let last = epochs.len() as u64;
        assert_eq!(epochs, (1..=last).collect::<Vec<_>>());
        assert!(
            (5..=6).contains(&last),
            "{manner:?}: after pauses of up to 1, 2, 4 and 8 s, at least half as long"
        );
        let panics = if manner == Manner::Panics { last } else { 0 };
        assert_eq!(member.stats().work_panics, panics);
        *probe.manner.lock() = GOOD;
        seconds(60).await;
        assert_eq!(probe.take(), [("started", last + 1)]);
        worker.shutdown().await.unwrap();
        assert_eq!(probe.take(), [("ended", last + 1)]);
        assert_eq!(stored(&store, 1).await, [(last + 1, None)], "a released lease keeps its epoch");
    }
}

/// Bug: an idle worker remained idle when the work on one of its own leases failed, so this work stood still for up to an hour. Fix: each
/// end of work makes a round due.
#[tokio::test(start_paused = true)]
async fn work_that_fails_while_the_worker_rests_is_taken_again() {
    let store = Store::memory();
    let member = join(&store).await;
    let probe = Probe::new(1, Manner::Fails(Duration::from_mins(10)));
    let worker = start(&member, &probe).await;
    seconds(595).await;
    assert_eq!(probe.take(), [("started", 1)]);
    *probe.manner.lock() = GOOD;
    seconds(10).await;
    assert_eq!(probe.take(), [("started", 2)]);
    worker.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn work_that_is_asked_to_end_does_in_peace_or_is_fenced_off_after_the_deadline() {
    for (takes, last) in [(Duration::from_secs(7), "ended"), (Duration::from_hours(1), "aborted")] {
        let store = Store::memory();
        let (old, new) = (Probe::new(2, Manner::Slow(2, takes)), Probe::new(2, GOOD));
        let (a, b) = (join(&store).await, join(&store).await);
        let first = start(&a, &old).await;
        let _b = start(&b, &new).await;
        seconds(9).await;
        assert_eq!(new.take(), [], "it waits");
        seconds(6).await;
        assert_eq!(new.take(), [("started", 2)]);
        assert_eq!(old.take(), [("started", 1), ("started", 1), ("asked", 1), (last, 1)]);
        assert_eq!(a.stats().leases_lost, u64::from(last == "aborted"));
        // A shutdown does not wait longer for this work either.
        let began = tokio::time::Instant::now();
        first.shutdown().await.unwrap();
        assert_eq!(began.elapsed(), takes.min(Duration::from_secs(10)));
        assert_eq!(old.take(), [("asked", 1), (last, 1)]);
        seconds(4).await;
        assert_eq!(new.take(), [("started", 2)]);
    }
}

/// Regression: a node released its leases only when all its work had ended, so one slow consumer held back all of them.
#[tokio::test(start_paused = true)]
async fn what_has_ended_is_given_back_while_other_work_still_ends() {
    let store = Store::memory();
    let slow = Manner::Slow(1, Duration::from_secs(9));
    let (old, new) = (Probe::new(4, slow), Probe::new(4, GOOD));
    let (a, b) = (join(&store).await, join(&store).await);
    let first = start(&a, &old).await;
    let _b = start(&b, &new).await;
    seconds(8).await;
    assert_eq!(new.acquired(), [(2, 2), (3, 2)]);
    let ending = tokio::spawn(first.shutdown());
    seconds(5).await;
    assert_eq!(new.acquired(), [(2, 2), (3, 2), (1, 2)], "the slow one is not taken from it");
    ending.await.unwrap().unwrap();
    seconds(5).await;
    assert_eq!(new.acquired(), [(2, 2), (3, 2), (1, 2), (0, 2)]);
    assert_eq!(old.take().last(), Some(&("ended", 1)), "nothing was aborted");
}

/// Bug: a worker acquired a resource whose work failed at once every second, so each time all workers of all nodes read the whole pool.
/// Fix: the resource stays where it is, back-off grows to a minute, and an acquisition of the node's own lease moves no version.
#[tokio::test(start_paused = true)]
async fn work_that_fails_backs_off_where_it_is_and_costs_other_nodes_nothing() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (bad, good) = (Probe::new(4, Manner::Panics), Probe::new(4, GOOD));
    let (a, b) = (join(&store).await, join(&faults.store()).await);
    let second = start(&b, &good).await;
    seconds(20).await;
    let reads_in_an_hour = async || {
        let before = faults.counts().reads;
        seconds(3_600).await;
        faults.counts().reads - before
    };
    let alone = reads_in_an_hour().await;
    let first = start(&a, &bad).await;
    seconds(20).await;
    let owners = async || stored(&store, 4).await.into_iter().map(|(_, owner)| owner).collect::<Vec<_>>();
    let before = owners().await;
    let beside = reads_in_an_hour().await;
    assert!(beside <= alone + 4, "{beside} reads instead of {alone}");
    assert_eq!(owners().await, before);
    let tried = bad.acquired().len();
    assert!((120..=300).contains(&tried), "{tried} acquisitions of two resources in an hour");
    *bad.manner.lock() = GOOD;
    seconds(2 * 60).await;
    assert_eq!(owners().await, before);
    first.shutdown().await.unwrap();
    second.shutdown().await.unwrap();
}

/// A panic outside of the work, such as one while resources are read, ends the worker's round, not the worker.
#[tokio::test(start_paused = true)]
async fn a_worker_that_panics_begins_again() {
    let store = Store::memory();
    let member = join(&store).await;
    let probe = Probe::new(2, GOOD);
    let worker = start(&member, &probe).await;
    *probe.manner.lock() = Manner::Unreadable;
    change(&store).await;
    assert!(member.stats().work_panics > 0);
    *probe.manner.lock() = GOOD;
    seconds(5).await;
    probe.take();
    worker.shutdown().await.unwrap();
    assert_eq!(probe.take(), [("ended", 2), ("ended", 2)], "it works on both again");
}

/// Bug: a member of a consumer that was created again with another filter still owned shards but did not work on them, so no member did.
/// Fix: its worker ends.
#[tokio::test(start_paused = true)]
async fn a_worker_whose_pool_is_no_longer_its_own_leaves_it_to_the_others() {
    let store = Store::memory();
    let (old, new) = (Probe::new(4, GOOD), Probe::new(4, GOOD));
    let (a, b) = (join(&store).await, join(&store).await);
    let first = start(&a, &old).await;
    seconds(1).await;
    *old.manner.lock() = Manner::Over;
    let second = start(&b, &new).await;
    seconds(20).await;
    assert_eq!(old.take().last(), Some(&("aborted", 1)));
    let mut owned = new.acquired();
    owned.sort_unstable();
    assert_eq!(owned.iter().map(|(resource, _)| *resource).collect::<Vec<_>>(), [0, 1, 2, 3]);
    // The node can be a member of the pool again.
    *old.manner.lock() = GOOD;
    let again = start(&a, &old).await;
    seconds(20).await;
    assert_eq!(stored(&store, 4).await.iter().filter(|(_, owner)| *owner == Some(a.id())).count(), 2);
    for worker in [first, second, again] {
        worker.shutdown().await.unwrap();
    }
}

/// The former owner of a lease that another node has taken can neither commit with the lease nor release it, however late it finds out.
#[tokio::test(start_paused = true)]
async fn only_the_newest_acquisition_holds_a_lease() {
    let store = Store::memory();
    let (old, new) = (Probe::new(2, Manner::Slow(2, Duration::from_hours(1))), Probe::new(2, GOOD));
    let (a, b) = (join(&store).await, join(&store).await);
    let first = start(&a, &old).await;
    let leases = old.leases.lock().clone();
    check(&store, &leases[1]).await.unwrap();
    let second = start(&b, &new).await;
    seconds(30).await;
    assert_eq!(new.acquired(), [(1, 2)], "its owner has kept it for too long");
    let lost = check(&store, &leases[1]).await.unwrap_err();
    assert!(matches!(lost, Error::LeaseLost { held: 1, found: 2, .. }), "{lost}");
    assert!(lost.to_string().contains("probe 1"), "{lost}");
    check(&store, &leases[0]).await.unwrap();
    first.shutdown().await.unwrap();
    assert_eq!(stored(&store, 2).await[1], (2, Some(b.id())));
    second.shutdown().await.unwrap();
}

/// Work on resources that are gone ends at once, and their leases are removed, even those without an owner.
#[tokio::test(start_paused = true)]
async fn leases_of_resources_that_are_gone_are_removed() {
    let store = Store::memory();
    let probes = [Probe::new(8, GOOD), Probe::new(8, GOOD)];
    let nodes = [join(&store).await, join(&store).await];
    let first = start(&nodes[0], &probes[0]).await;
    let second = start(&nodes[1], &probes[1]).await;
    seconds(20).await;
    assert_eq!(stored(&store, 8).await.len(), 8);
    for probe in &probes {
        probe.take();
        probe.count.store(3, Ordering::Relaxed);
    }
    change(&store).await;
    assert_eq!(stored(&store, 8).await.iter().filter(|(_, owner)| owner.is_some()).count(), 3);
    assert_eq!(stored(&store, 8).await.len(), 3);
    let aborted = probes.iter().flat_map(|probe| probe.take()).filter(|(what, _)| *what == "aborted").count();
    assert!((3..=5).contains(&aborted), "{aborted}");
    // The next member removes the leases that the last one left behind.
    first.shutdown().await.unwrap();
    second.shutdown().await.unwrap();
    probes[0].count.store(1, Ordering::Relaxed);
    let last = start(&nodes[0], &probes[0]).await;
    assert_eq!(stored(&store, 8).await.len(), 1);
    last.shutdown().await.unwrap();
}
