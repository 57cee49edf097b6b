//! [`Embedded`]: an engine as a backend of the store.

use std::sync::Arc;

use futures_util::future::BoxFuture;

#[cfg(any(test, feature = "test-util"))]
use super::folder::History;
use super::{engine::Engine, transaction::EmbeddedTransaction};
use crate::{
    base::error::StoreError,
    store::backend::{Backend, TransactionBackend},
};

/// A shared engine, as a backend.
pub(crate) struct Embedded(Arc<Engine>);

impl Embedded {
    pub(in crate::store) fn new(engine: Engine) -> Self {
        Self(Arc::new(engine))
    }

    /// The versions that it had used before it was opened.
    #[cfg(any(test, feature = "test-util"))]
    pub fn history(&self) -> &History {
        self.0.history()
    }

    /// Closes the folder in order. No commit succeeds afterwards.
    #[cfg(any(test, feature = "test-util"))]
    pub fn close(&self) {
        self.0.close();
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
