//! Sharded feeds: resharding under load, the write path, readers of shards, bad input.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;
mod counting;
mod feeds;
mod folds;
mod notifications;
mod scenario;

use notibus::store::Store;
use scenario::Size;

/// A small world, in which every fifth commit fails.
const SIZE: Size = Size { writes: 25, reshards: 12, readers: 3, faults_percent: 20 };

#[test]
fn readers_see_every_change_once_and_in_order_through_any_reshard() {
    for seed in 0..40 {
        println!("seed {seed}");
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(scenario::check(&Store::memory(), "", seed, SIZE));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_same_holds_with_many_threads() {
    let size = Size { writes: 100, reshards: 40, readers: 4, faults_percent: 5 };
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    scenario::check(&Store::memory(), "", seed, size).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_same_holds_in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    scenario::check(&Store::open_dir(folder.path()).unwrap(), "", seed, SIZE).await;
}
