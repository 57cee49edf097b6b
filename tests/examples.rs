//! Many runs of the examples that users copy: members crash at different moments in each run, and each run ends by comparing its result
//! with the expected one.
//!
//! Few runs by default. `NOTIBUS_LOAD=full cargo test --release --test examples` runs each a thousand times.

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

/// Returns the numbers of a few runs, or of a thousand if the environment asks for them.
fn runs(few: u32) -> std::ops::Range<u32> {
    let is_full = std::env::var("NOTIBUS_LOAD").is_ok_and(|size| size == "full");
    0..if is_full { 1_000 } else { few }
}

/// Regression: the replication example copied a source before it listed the replication, so changes in between were lost. It also never
/// copied deletions.
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

/// Regression: if a database was deleted while its index was built, the entries of that build stayed in the index forever.
#[test]
fn indexes_are_what_their_documents_are_and_nothing_is_left_of_deleted_ones() {
    for run in runs(5) {
        index::main().unwrap_or_else(|error| panic!("run {run}: {error}"));
    }
}

/// The program that new users copy: each of its receivers gets the event of one document, and the program ends by itself.
#[cfg(feature = "http")]
#[test]
fn each_receiver_of_the_whole_program_gets_its_event() {
    whole_program::main().unwrap();
}
