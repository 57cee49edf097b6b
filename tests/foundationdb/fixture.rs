//! Shared by the trials: a cluster, a runtime, and unique keys.

use std::{
    future::Future,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use notibus::{Bus, BusOptions, store::Store};

use crate::cluster::Cluster;

/// The cluster that all harmless trials share, once one of them has asked for it.
static CLUSTER: Mutex<Option<Cluster>> = Mutex::new(None);

/// Returns the cluster file of the shared cluster, and starts the cluster if it does not run yet.
pub(crate) fn shared() -> PathBuf {
    let mut cluster = CLUSTER.lock().unwrap_or_else(PoisonError::into_inner);
    cluster.get_or_insert_with(Cluster::start).file()
}

/// Stops the shared cluster, if there is one.
pub(crate) fn stop_cluster() {
    *CLUSTER.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Runs `trial` on a runtime of its own. Parts of a trial may block their thread.
pub(crate) fn block_on(trial: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
    runtime.expect("a runtime can be built").block_on(trial);
}

/// Opens a new client for the cluster of `file`.
pub(crate) async fn open(file: impl AsRef<Path>) -> Store {
    Store::foundationdb(file).await.expect("the cluster can be opened")
}

/// Returns a prefix that no other trial uses.
pub(crate) fn prefix(name: &str) -> Vec<u8> {
    format!("{name}/{:016x}/", fastrand::u64(..)).into_bytes()
}

/// The number of partitions of the trials' buses.
pub(crate) const PARTITIONS: u32 = 4;

pub(crate) async fn bus(store: &Store, prefix: &[u8]) -> Bus {
    let options = BusOptions::default().prefix(prefix.to_vec()).partitions(PARTITIONS);
    Bus::open(store, options).await.expect("the bus can be opened")
}
