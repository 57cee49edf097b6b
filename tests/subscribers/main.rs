//! Subscribers in the process: everything that a layer can request from a dispatcher beyond a plain stream, and how failures are handled.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod batches;
#[path = "../../examples/ddoc_cache/cache.rs"]
mod cache;
mod callbacks;
mod catch_ups;
#[path = "../common/mod.rs"]
mod common;
mod cursors;
mod ddoc_cache;
mod deletions;
mod durations;
mod filters;
mod fixture;
mod forms;
mod many_names;
mod memory;
mod mirror;
mod order;
mod pace;
mod parity;
mod regressions;
mod restarts;
mod shutdown;
mod slow;
mod streams;
