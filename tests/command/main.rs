//! The command, run as a process: what it prints, what it changes, and its exit codes.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod bad_input;
#[path = "../common/mod.rs"]
mod common;
mod consumers;
mod folders;
mod full_disk;
mod record;
mod relocate;
mod serve;
#[path = "../served/mod.rs"]
mod served;
mod status;
mod topology;
