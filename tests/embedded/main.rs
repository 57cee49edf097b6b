//! The embedded store: its folders, its disks, and its engine, which is checked against simple models.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../common/mod.rs"]
mod common;
mod crash;
#[path = "../disk/mod.rs"]
mod disk;
mod disk_failures;
mod history;
mod model;
mod open_dir;
mod room;
