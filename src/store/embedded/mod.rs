//! The embedded engine: FoundationDB's semantics in one process.
//!
//! All rows are in a persistent ordered map. A reader takes the map as it is, in constant time; a commit makes a new
//! one that shares the unchanged parts. [`core::Core`] decides commits one after the other. In memory each caller
//! commits by itself, under the lock that also hands out snapshots. With a folder, one thread commits all waiting
//! transactions as a group ([`folder`]), and holds that lock neither while it writes nor while it syncs.

mod atomic;
mod backend;
mod committer;
mod conflicts;
mod core;
mod engine;
mod folder;
mod overlay;
mod packed;
mod recent;
mod rows;
mod scan;
mod transaction;
mod undo;
mod watches;

pub(crate) use self::backend::Embedded;
#[cfg(any(test, feature = "test-util"))]
pub(crate) use self::folder::{Access, File, Files, FolderTuning, Lock};
pub use self::folder::{Damage, FolderReport};
pub(super) use self::{
    engine::Engine,
    folder::{Inspection, copy_to, inspect, open_folder},
};
