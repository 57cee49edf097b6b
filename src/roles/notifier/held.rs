//! [`HeldPartitions`]: shared by the tasks of a notifier and its poll.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::{Mutex, MutexGuard};

use crate::state::keys::Partition;

/// The partitions on which a notifier works at the moment. Each has the epoch of its lease, and whether its last pass has left
/// rows in place because they cannot be decoded.
#[derive(Debug, Clone, Default)]
pub(super) struct HeldPartitions(Arc<Mutex<BTreeMap<(Partition, u64), bool>>>);

impl HeldPartitions {
    /// The map, locked.
    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<(Partition, u64), bool>> {
        self.0.lock()
    }

    pub fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<_> = self.lock().keys().map(|(partition, _)| partition.0).collect();
        numbers.dedup();
        numbers
    }

    /// Whether the last pass of `partition` has left rows in place.
    pub fn has_left(&self, partition: Partition) -> bool {
        self.lock().range((partition, 0)..=(partition, u64::MAX)).any(|(_, has_left)| *has_left)
    }
}
