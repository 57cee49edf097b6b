//! `ready` names the part that is dead: the notifier, the tail or the cluster.

use notibus::{StartOptions, store::Store};

use crate::{
    cluster::Cluster,
    fixture::{open, prefix, shared},
    parts::{Claim, SOON, a_dead_notifier_is_named, a_dead_tail_is_named},
};

pub(crate) async fn a_dead_notifier_is_named_on_a_cluster() {
    a_dead_notifier_is_named(&open(shared()).await, &prefix("ready")).await;
}

pub(crate) async fn a_dead_tail_is_named_on_a_cluster() {
    a_dead_tail_is_named(&open(shared()).await, &prefix("ready")).await;
}

pub(crate) async fn a_dead_cluster_is_named() {
    let mut cluster = tokio::task::block_in_place(Cluster::start);
    let store = Store::foundationdb(cluster.file()).await.unwrap();
    let asked = Claim::start(&store, b"notibus", StartOptions::default()).await;
    asked.until_ready().await;
    tokio::task::block_in_place(|| cluster.kill_server(0));
    asked.names("store", SOON).await;
    tokio::task::block_in_place(|| cluster.restart_server(0));
    asked.until_ready().await;
    asked.end().await;
}
