//! The embedded engine: FoundationDB's semantics in one process.
//!
//! All rows are in a persistent ordered map. A reader takes the map as it is, in constant time; a commit makes a new one that shares the
//! unchanged parts. [`core::Core`] decides commits one at a time. Without a folder, each caller commits its own transaction, under the lock
//! that also guards snapshots. With a folder, one thread commits all waiting transactions as a group ([`folder`]), and does not hold that
//! lock while it writes or syncs.

mod atomic;
mod committer;
mod conflicts;
mod core;
mod engine;
mod folder;
mod overlay;
mod packed;
mod recent;
mod rows;
mod transaction;
mod undo;
mod watches;

use std::sync::Arc;

use futures_util::future::BoxFuture;

#[cfg(feature = "test-util")]
pub use self::folder::{Access, File, Files, FolderTuning, Lock};
pub use self::folder::{Damage, FolderReport};
use self::transaction::EmbeddedTransaction;
pub(super) use self::{
    engine::Engine,
    folder::{Inspection, copy_to, inspect, open_folder},
};
use super::backend::{Backend, TransactionBackend};
use crate::base::error::StoreError;

/// A shared engine, as a backend.
pub(super) struct Embedded(Arc<Engine>);

impl Embedded {
    pub fn new(engine: Arc<Engine>) -> Self {
        Self(engine)
    }
}

impl Backend for Embedded {
    fn begin(&self) -> Box<dyn TransactionBackend> {
        Box::new(EmbeddedTransaction::new(Arc::clone(&self.0)))
    }

    fn is_unused(&self, name: &[u8]) -> bool {
        self.0.is_unused(name)
    }

    fn mark_used(&self, name: &[u8]) {
        self.0.mark_used(name);
    }

    fn may_have_used(&self, version: u64) -> bool {
        self.0.may_have_used(version)
    }

    fn openings(&self) -> Vec<(u64, u64)> {
        self.0.openings()
    }

    fn shortage(&self) -> Option<StoreError> {
        self.0.failed().shortage()
    }

    fn failure(&self) -> Option<StoreError> {
        self.0.failed().get()
    }

    fn failed(&self) -> BoxFuture<'static, StoreError> {
        let failed = Arc::clone(self.0.failed());
        Box::pin(async move { failed.happened().await })
    }
}
