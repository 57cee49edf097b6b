//! [`Trace`]: records the operations on a store.

use std::{collections::BTreeMap, fmt, sync::Arc};

use parking_lot::{Mutex, MutexGuard};

use super::{
    operation::{Attempt, Operation},
    wrapper::{Interceptor, wrap},
};
use crate::store::Store;

/// Wraps a store, and records the operations on it. Clones share the record.
#[derive(Clone)]
pub struct Trace {
    database: Store,
    record: Arc<Record>,
}

/// The operations, by attempt.
#[derive(Default)]
struct Record(Mutex<BTreeMap<u64, Attempt>>);

impl Trace {
    /// Wraps `store` in a store that records the operations on it.
    pub fn new(store: &Store) -> Self {
        let record = Arc::default();
        Self { database: wrap(store, &record), record }
    }

    /// Returns the store whose operations are recorded.
    pub fn store(&self) -> Store {
        self.database.clone()
    }

    /// Takes the operations since the last call, by attempt, in the order in which the attempts began. Attempts without operations are left
    /// out.
    pub fn take(&self) -> Vec<Attempt> {
        std::mem::take(&mut *self.record.attempts()).into_values().collect()
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").finish_non_exhaustive()
    }
}

impl Record {
    fn attempts(&self) -> MutexGuard<'_, BTreeMap<u64, Attempt>> {
        self.0.lock()
    }
}

impl Interceptor for Record {
    fn sees(&self, attempt: u64, operation: &Operation) {
        self.attempts().entry(attempt).or_default().operations.push(operation.clone());
    }
}
