//! Deterministic simulation: whole buses in one thread, with every fault of a distributed system.
//!
//! A world is made from a seed: a store, several processes with all roles, and faults. Transactions fail, whether or not they were
//! committed; watches are lost; processes crash, pause and come back; clocks drift apart. An oracle judges every commit as it happens, and
//! everything that a reader receives. The same seed makes the same world, step by step, so that every failure can be replayed.
//!
//! ```text
//!            seed ──► plan (sizes, options, mix of faults)
//!                       │
//!  process 0 ─┐         ▼
//!  process 1 ─┼─ simulated store ──► embedded engine ──► oracle
//!  process 2 ─┘  delays, faults      one commit after      judges each commit,
//!  a runtime     commits in flight   the other             each delivery, and the end
//!  and a clock each
//! ```
//!
//! `docs/testing.md` explains how to examine a world. A simulation cannot measure performance: its time is not real.

#![allow(clippy::unwrap_used, reason = "a trial fails by panicking")]
#![allow(
    clippy::wildcard_imports,
    reason = "a module of trials imports what is beside it, as a module of tests does"
)]

mod actors;
mod app;
#[path = "../disk/mod.rs"]
mod disk;
mod draw;
mod findings;
mod guarantee;
mod kernel;
mod keyspace;
mod oracle;
mod run;
mod shared;
mod witness;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    run::run()
}
