//! [`Signals`]: wake-ups of notifiers by the producers of their process, and the doorbells to ring for notifiers of other processes.
//!
//! A signal is a hint that saves latency and polling. Everything works without it, only later: each receiver also polls.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::state::keys::Partition;

/// The wake-ups of one bus in one process.
#[derive(Debug)]
pub(crate) struct Signals {
    partitions: Box<[PartitionSignal]>,
    /// The partitions whose doorbells must be rung, one bit each.
    dirty: Box<[AtomicU64]>,
    /// Wakes the doorbell ringer.
    ringer: Notify,
}

/// The wake-ups of a partition.
#[derive(Debug, Default)]
struct PartitionSignal {
    /// Wakes the notifier of this process.
    wake: Notify,
    /// How many notifiers of this process work on the partition; two while one replaces the other.
    notifiers: AtomicU32,
}

impl Signals {
    pub fn new(partitions: u32) -> Self {
        Self {
            partitions: (0..partitions).map(|_| PartitionSignal::default()).collect(),
            dirty: (0..partitions.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            ringer: Notify::new(),
        }
    }

    fn of(&self, partition: Partition) -> &PartitionSignal {
        &self.partitions[partition.0 as usize]
    }

    /// Reports committed events of `partition`: wakes the notifier of this process, or else has the doorbell rung for a notifier of another
    /// process.
    pub fn ring(&self, partition: Partition) {
        let signal = self.of(partition);
        if signal.notifiers.load(Ordering::SeqCst) > 0 {
            signal.wake.notify_one();
            // If the last notifier left in between, it did not see this wake-up. If it leaves later, it passes the wake-up on.
            if signal.notifiers.load(Ordering::SeqCst) > 0 {
                return;
            }
        }
        let bit = 1 << (partition.0 % 64);
        let before = self.dirty[partition.0 as usize / 64].fetch_or(bit, Ordering::AcqRel);
        if before & bit == 0 {
            self.ringer.notify_one();
        }
    }

    /// Completes when a doorbell must be rung.
    pub async fn dirtied(&self) {
        self.ringer.notified().await;
    }

    /// Takes the partitions whose doorbells must be rung.
    pub fn take_dirty(&self) -> Vec<Partition> {
        let mut partitions = Vec::new();
        for (word, bits) in self.dirty.iter().enumerate() {
            let mut bits = bits.swap(0, Ordering::AcqRel);
            while bits != 0 {
                partitions.push(Partition(word as u32 * 64 + bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
        partitions
    }

    /// Registers a notifier of this process that begins to work on `partition`.
    pub fn enter(&self, partition: Partition) {
        self.of(partition).notifiers.fetch_add(1, Ordering::SeqCst);
    }

    /// Removes a notifier of this process that has ended its work on `partition`. A wake-up that it took without using it is passed on: to
    /// another notifier of this process, or else through the doorbell to one of another process, which may have fenced this one off.
    pub fn leave(&self, partition: Partition) {
        self.of(partition).notifiers.fetch_sub(1, Ordering::SeqCst);
        self.ring(partition);
    }

    /// Wakes the notifier of `partition`.
    pub fn wake(&self, partition: Partition) {
        self.of(partition).wake.notify_one();
    }

    /// Waits until the notifier of `partition` is woken; returns at once if it was woken since the last call. Cancel safe.
    pub async fn woken(&self, partition: Partition) {
        self.of(partition).wake.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_ring_wakes_the_local_notifier_or_the_ringer() {
        let signals = Signals::new(100);
        signals.enter(Partition(70));
        for partition in [3, 70, 99, 3] {
            signals.ring(Partition(partition));
        }
        signals.woken(Partition(70)).await;
        signals.dirtied().await;
        assert_eq!(signals.take_dirty(), [Partition(3), Partition(99)]);
        assert!(signals.take_dirty().is_empty());
    }
}
