//! The examples that users copy, run again and again: their members crash at different moments each time, and each run ends with a
//! comparison of the result with the expected one.
//!
//! Few runs by default. `NOTIBUS_LOAD=full cargo test --release --test examples` makes a thousand of each.

#![allow(clippy::duplicate_mod, reason = "each example brings the layer that it is about")]

#[path = "../examples/audit.rs"]
mod audit;
#[path = "../examples/index.rs"]
mod index;
#[path = "../examples/replicate.rs"]
mod replicate;
#[cfg(feature = "http")]
#[path = "../examples/whole_program.rs"]
mod whole_program;

/// A few runs, or a thousand if they were asked for.
fn runs(few: u32) -> std::ops::Range<u32> {
    let is_full = std::env::var("NOTIBUS_LOAD").is_ok_and(|size| size == "full");
    0..if is_full { 1_000 } else { few }
}

/// Regression: the example of replication copied a source before it listed it, so that changes in between were lost; and it never
/// copied a deletion.
#[test]
fn a_target_is_what_its_sources_are_however_often_the_replication_crashes() {
    for run in runs(10) {
        replicate::main().unwrap_or_else(|error| panic!("run {run}: {error}"));
    }
}

#[test]
fn each_database_is_counted_once_although_a_member_dies_and_commits_are_unknown() {
    for run in runs(3) {
        audit::main().unwrap_or_else(|error| panic!("run {run}: {error}"));
    }
}

/// Regression: what was built for a database when it was deleted stayed in its index forever.
#[test]
fn indexes_are_what_their_documents_are_and_nothing_is_left_of_deleted_ones() {
    for run in runs(5) {
        index::main().unwrap_or_else(|error| panic!("run {run}: {error}"));
    }
}

/// The program that a new user copies: each of its receivers gets the event of one document, and it ends by itself.
#[cfg(feature = "http")]
#[test]
fn each_receiver_of_the_whole_program_gets_its_event() {
    whole_program::main().unwrap();
}
