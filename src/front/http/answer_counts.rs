//! [`AnswerCounts`] counts what the routers do.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;

/// Counts what the routers do. Clones share their counts.
#[derive(Debug, Clone, Default)]
pub(super) struct AnswerCounts(pub Arc<Counts>);

#[derive(Debug, Default)]
pub(super) struct Counts {
    /// By route, method and status.
    pub answers: Mutex<BTreeMap<(String, &'static str, u16), u64>>,
    /// The rows that feeds sent.
    pub rows: AtomicU64,
    /// The bytes that feeds gave to connections.
    pub bytes: AtomicU64,
    /// The feeds that a failure cut off.
    pub failures: AtomicU64,
}

impl AnswerCounts {
    pub fn answered(&self, route: &str, method: &'static str, status: u16) {
        *self.0.answers.lock().entry((route.to_owned(), method, status)).or_default() += 1;
    }

    pub fn sent(&self, rows: u64, bytes: u64) {
        self.0.rows.fetch_add(rows, Ordering::Relaxed);
        self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn failed(&self) {
        self.0.failures.fetch_add(1, Ordering::Relaxed);
    }
}
