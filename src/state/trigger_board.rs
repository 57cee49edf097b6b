//! [`TriggerBoard`]: the triggers of this process, and their status.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::watch;

use crate::base::cursor::Cursor;

/// The status of a trigger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TriggerStatus {
    /// How many databases have waiting work, running jobs not included.
    pub waiting: usize,
    /// How many jobs run.
    pub running: usize,
    /// Jobs that have completed since the trigger was started.
    pub done: u64,
    /// Attempts that have failed or panicked.
    pub failed: u64,
    /// How often a database was parked since the trigger was started, because its job has failed too often, or was
    /// stuck. [`Bus::trigger`](crate::Bus::trigger) lists them.
    pub parked: u64,
    /// Jobs that were cancelled because they had shown no progress for [`TriggerOptions::stall_limit`](crate::jobs::TriggerOptions::stall_limit).
    pub stuck: u64,
    /// Jobs that were cancelled because their database was deleted.
    pub cancelled: u64,
    /// How often the trigger itself has panicked and begun again. Panics of jobs do not count.
    pub restarts: u64,
    /// The position of its cursor: everything before it is done, parked, or recorded in the store as unfinished.
    pub position: Cursor,
    /// Whether it has ended: it was shut down, its dispatcher has ended, or another trigger has opened its cursor.
    pub is_finished: bool,
}

impl TriggerStatus {
    pub(crate) fn new(position: Cursor) -> Self {
        let (waiting, running, done, failed, parked, stuck, cancelled, restarts) = (0, 0, 0, 0, 0, 0, 0, 0);
        Self {
            waiting,
            running,
            done,
            failed,
            parked,
            stuck,
            cancelled,
            restarts,
            position,
            is_finished: false,
        }
    }
}

/// The triggers that were started in this process, by their names.
#[derive(Debug, Default)]
pub(crate) struct TriggerBoard(Mutex<BTreeMap<String, watch::Receiver<TriggerStatus>>>);

impl TriggerBoard {
    /// Records that a trigger of this name was started.
    pub fn note(&self, name: &str, status: watch::Receiver<TriggerStatus>) {
        let mut triggers = self.0.lock();
        triggers.retain(|_, status| !status.borrow().is_finished);
        triggers.insert(name.to_owned(), status);
    }

    /// The status of the trigger of this name, if it was started in this process.
    #[cfg(feature = "http")]
    pub fn status(&self, name: &str) -> Option<TriggerStatus> {
        let triggers = self.0.lock();
        triggers.get(name).map(|status| status.borrow().clone())
    }
}
