//! Restoring an older state of a bus into a cluster, and moving a bus to one by copying the rows of a store with later versions.

use crate::{
    fixture::{open, prefix, shared},
    restored_steps::{an_import_ends_what_was_not_copied, an_older_state_folds_nothing_until_it_is_raised},
};

pub(crate) async fn an_older_state_on_a_cluster() {
    an_older_state_folds_nothing_until_it_is_raised(&open(shared()).await, &prefix("restored")).await;
}

pub(crate) async fn an_import_into_a_cluster() {
    an_import_ends_what_was_not_copied(&open(shared()).await, &prefix("imported")).await;
}
