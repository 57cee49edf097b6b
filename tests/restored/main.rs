//! Stores in which an older state was restored, and moves that did not copy everything that a reader saw; here in memory and in a folder.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod random;
mod roles;
mod steps;

use notibus::store::Store;
use steps::{an_import_ends_what_was_not_copied, an_older_state_folds_nothing_until_it_is_raised};

const PREFIX: &[u8] = b"notibus";

#[tokio::test(start_paused = true)]
async fn an_older_state_in_memory() {
    an_older_state_folds_nothing_until_it_is_raised(&Store::memory(), PREFIX).await;
}

#[tokio::test]
async fn an_older_state_in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open_dir(folder.path()).unwrap();
    an_older_state_folds_nothing_until_it_is_raised(&store, PREFIX).await;
}

#[tokio::test(start_paused = true)]
async fn an_import_into_memory() {
    an_import_ends_what_was_not_copied(&Store::memory(), PREFIX).await;
}

#[tokio::test]
async fn an_import_into_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    an_import_ends_what_was_not_copied(&Store::open_dir(folder.path()).unwrap(), PREFIX).await;
}
