//! Worlds on a real cluster: each process is one of the operating system, and is killed and stopped as such.
//!
//! The oracle cannot see the commits of a cluster when they happen. So each transaction also writes its own mutations, as a row of
//! the [`log`](super::log) under its versionstamp: the log has every commit, in the order of the store. A process writes what it
//! would report to the oracle as [`notes`](super::notes), each with the newest version that the process had read from or committed
//! at by then. The [`Merge`](merge::Merge) reads both, and informs the oracle: of a commit, and then of all that was noted between
//! its version and that of the next one.
//!
//! ```text
//!  process 0 ── commits and log ──► cluster ──► merge ──► oracle
//!      └─────── notes, line by line ──────────────┘
//! ```

mod conductor;
mod member;
mod merge;
mod signal;

use std::{io, path::PathBuf, process::Child};

use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

pub use self::{conductor::torture_cluster, member::take_part};
use crate::store::Database;

/// A process of a world on a cluster, in one of its lives.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Member {
    /// The seed of the world.
    pub seed: u64,
    /// For how many milliseconds things go wrong.
    pub chaos_ms: u64,
    /// How many times more often things go wrong than the seed draws.
    pub intensity: f64,
    /// Its number in the world.
    pub process: usize,
    /// How often it was started before.
    pub generation: u64,
    /// Its threads.
    pub threads: usize,
    /// The folder for its notes.
    pub folder: PathBuf,
}

/// A cluster for a world, and how its processes are started.
pub struct Cluster<'a> {
    /// The cluster, which must be empty: worlds use all its keys, and clear them in the end.
    pub db: Database,
    /// The runtime in which it is waited for.
    pub runtime: Handle,
    /// Starts a process that calls [`take_part`], with pipes for its standard input and output.
    pub start: &'a (dyn Fn(&Member) -> io::Result<Child> + Sync),
}
