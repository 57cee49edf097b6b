//! Servers that die, and servers that join and leave, under load: nothing is lost or counted twice.

use std::{
    cell::{Cell, RefCell},
    thread,
    time::{Duration, Instant},
};

use notibus::{
    Bus, Dispatcher, DispatcherOptions, Notifier,
    store::{Isolation, RetryPolicy, Store, Transaction},
};
use tokio::task::block_in_place;

use crate::{
    cluster::Cluster,
    common::{eager, joined, until, within},
    fixture,
    load::{Load, Observer, until_folded},
};

/// The key prefix of the load's markers.
const MARKERS: &[u8] = b"markers/";

/// A bus with all its roles, under load, on a cluster of its own.
struct Stage {
    bus: Bus,
    store: Store,
    notifier: Notifier,
    _dispatcher: Dispatcher,
    observer: Observer,
    load: Load,
}

impl Stage {
    async fn start(cluster: &Cluster) -> Self {
        let store = fixture::open(cluster.file()).await;
        let bus = fixture::bus(&store, b"notibus").await;
        let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let observer = Observer::start(&dispatcher);
        let load = Load::start(&store, &bus, MARKERS);
        load.advance(200).await;
        Self { bus, store, notifier, _dispatcher: dispatcher, observer, load }
    }

    /// Stops the load, and checks that everything recorded is folded exactly once and delivered.
    async fn check(self) {
        let totals = self.load.stop().await;
        until_folded(&self.bus, &totals).await;
        self.observer.until_delivered(&totals).await;
        // The rows include every fold, but the count of the process may lack folds whose result was unknown.
        assert!(self.bus.stats().folded.total() <= totals.values().sum());
        self.notifier.shutdown().await.unwrap();
    }
}

/// The only server is killed repeatedly, and returns with its data.
pub(crate) async fn a_killed_server_loses_nothing() {
    let mut cluster = block_in_place(Cluster::start);
    let stage = Stage::start(&cluster).await;
    for pause_ms in [0, 700, 3_000] {
        block_in_place(|| {
            cluster.kill_server(0);
            thread::sleep(Duration::from_millis(pause_ms));
            cluster.restart_server(0);
            cluster.wait_until_available();
        });
        stage.load.advance(200).await;
    }
    stage.check().await;
}

/// Regression: a run counted the time during which the client waited for the cluster as time spent trying, so after an outage longer than
/// its limit it gave up after one attempt, just when the cluster was back.
pub(crate) async fn a_run_goes_on_after_an_outage_that_is_longer_than_its_limit() {
    let cluster = block_in_place(Cluster::start);
    let store = fixture::open(cluster.file()).await;
    let cluster = RefCell::new(cluster);
    let limit = Transaction::LIFETIME + Duration::from_secs(2);
    let policy = RetryPolicy::default().elapsed_max(Some(limit));
    let (attempts, began) = (Cell::new(0), Instant::now());
    let run = store.run_with(&policy, async |tx: Transaction| {
        attempts.set(attempts.get() + 1);
        tx.read_version().await?;
        if attempts.get() == 1 {
            block_in_place(|| {
                let mut cluster = cluster.borrow_mut();
                cluster.kill_server(0);
                thread::sleep(2 * limit);
                cluster.restart_server(0);
            });
        }
        // This read waits for the cluster, and by then the transaction is too old.
        tx.get(b"k", Isolation::Serializable).await?;
        tx.set(b"k", b"v");
        Ok(())
    });
    within("the run", run).await.unwrap();
    assert!(attempts.get() > 1, "the first attempt was too old");
    assert!(began.elapsed() > limit, "the outage was longer than the limit");
}

/// The stateless roles are recruited again while transactions are in progress; each time the cluster recovers.
pub(crate) async fn recoveries_lose_nothing() {
    let mut cluster = block_in_place(Cluster::start);
    let stage = Stage::start(&cluster).await;
    block_in_place(|| cluster.add_server());
    for roles in ["resolvers=2", "commit_proxies=2 grv_proxies=2", "logs=2", "resolvers=1 logs=1"] {
        let answer = block_in_place(|| cluster.cli(&format!("configure {roles}")));
        assert!(answer.contains("Configuration changed"), "{answer}");
        stage.load.advance(200).await;
    }
    stage.check().await;
}

/// The coordinator and the data move to a server that joins under load; then the first server is removed.
pub(crate) async fn a_cluster_that_moves_to_another_server_loses_nothing() {
    let mut cluster = block_in_place(Cluster::start);
    let stage = Stage::start(&cluster).await;
    block_in_place(|| cluster.add_server());
    stage.load.advance(100).await;
    let (old, new) = (cluster.address(0), cluster.address(1));
    let cli = |command: String| block_in_place(|| cluster.cli(&command));
    until("the second server to join", async || cli("status details".to_owned()).contains(&new)).await;
    cli(format!("coordinators {new}"));
    let excluded = cli(format!("exclude FORCE {old}"));
    assert!(excluded.contains("safe to remove"), "{excluded}");
    stage.load.advance(200).await;
    block_in_place(|| cluster.kill_server(0));
    stage.load.advance(200).await;
    let late = fixture::open(cluster.file()).await;
    assert!(late.begin().read_version().await.is_ok(), "a new client finds the cluster at its new place");
    assert!(stage.store.begin().read_version().await.is_ok());
    stage.check().await;
}
