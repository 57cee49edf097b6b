//! [`Owners`]: whether each partition is owned by a notifier that lives. Events of a partition without
//! a living owner wait in the store.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    base::error::Result,
    state::{
        keys::{Keys, NodeId, Role},
        membership::{LastSeen, member_rows},
    },
    store::{Isolation, Transaction},
};

const POOL: &str = "partition";

/// How long a partition that had an owner may be without one while a notifier lives: nodes that come and go hand partitions over.
const HANDOVER_MAX: Duration = Duration::from_secs(3);

/// The owners of the partitions, as the store has them.
#[derive(Debug, Default)]
pub(super) struct Ownership {
    /// The owner of each partition, if it has one, and the epoch of its lease.
    owners: BTreeMap<u32, (Option<NodeId>, u64)>,
    /// The nodes with a notifier: start, beat and expiry in milliseconds.
    notifiers: BTreeMap<NodeId, (u64, u64, u64)>,
}

impl Ownership {
    /// Reads by snapshot, so that `tx` gets no read conflicts.
    pub async fn read(tx: &Transaction, keys: &Keys) -> Result<Self> {
        let mut ownership = Self::default();
        for (key, value) in tx.all_rows(keys.leases(POOL), Isolation::Snapshot).await? {
            let (_, partition, lease) = keys.lease_row(&key, &value)?;
            if let Ok(partition) = u32::try_from(partition) {
                ownership.owners.insert(partition, (lease.owner.map(|owner| owner.node), lease.epoch));
            }
        }
        for (node, row) in member_rows(tx, keys, &Role::NOTIFIER).await? {
            ownership.notifiers.insert(node, (row.started_ms, row.beat, row.expiry_ms));
        }
        Ok(ownership)
    }
}

#[derive(Debug, Default)]
pub(super) struct Owners(Mutex<OwnersState>);

/// What was seen before.
#[derive(Debug, Default)]
struct OwnersState {
    /// The start and beat of each node.
    beats: LastSeen<NodeId, (u64, u64)>,
    /// Whether all partitions had an owner at some time.
    were_owned: bool,
    /// Since when each of the others has had none, and under which epoch: the next handover has another one.
    unowned: BTreeMap<u32, (u64, Duration)>,
}

impl Owners {
    /// The partitions of `count` that no living node owns at `now`; none while they may be handed over.
    pub fn unowned(&self, count: u32, found: &Ownership, now: Duration) -> BTreeSet<u32> {
        self.0.lock().unowned(count, found, now)
    }
}

impl OwnersState {
    /// As [`Owners::unowned`].
    fn unowned(&mut self, count: u32, found: &Ownership, now: Duration) -> BTreeSet<u32> {
        let beats = found.notifiers.iter().map(|(&node, &(started_ms, beat, _))| (node, (started_ms, beat)));
        self.beats.adopt(beats, now);
        // Its neighbours remove a dead node after its expiry. If it has no neighbours, this check finds it.
        let lives = |(node, (started_ms, beat, expiry_ms)): (&NodeId, &(u64, u64, u64))| {
            let silent = self.beats.age(node, &(*started_ms, *beat), now);
            (silent <= Duration::from_millis(*expiry_ms)).then_some(*node)
        };
        let living: BTreeSet<_> = found.notifiers.iter().filter_map(lives).collect();
        let mut unowned = BTreeMap::new();
        for partition in 0..count {
            let (owner, epoch) = found.owners.get(&partition).copied().unwrap_or_default();
            if owner.is_none_or(|owner| !living.contains(&owner)) {
                let before = self.unowned.get(&partition).filter(|(before, _)| *before == epoch);
                unowned.insert(partition, (epoch, before.map_or(now, |(_, since)| *since)));
            }
        }
        self.were_owned |= unowned.is_empty();
        self.unowned = unowned;
        let may_be_handed_over = self.were_owned && !living.is_empty();
        let is_late = |since: Duration| !may_be_handed_over || now.saturating_sub(since) >= HANDOVER_MAX;
        self.unowned
            .iter()
            .filter(|(_, (_, since))| is_late(*since))
            .map(|(partition, _)| *partition)
            .collect()
    }
}

/// Numbers in order, as ranges of the first and the last.
pub(super) fn ranges(numbers: &BTreeSet<u32>) -> String {
    let numbers: Vec<_> = numbers.iter().copied().collect();
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [only] => only.to_string(),
        _ => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three partitions, of which one node owns the first and another one the rest, with these beats.
    fn found(beats: [u64; 2]) -> Ownership {
        let [a, b] = [1, 2].map(|id| NodeId([id; 16]));
        Ownership {
            owners: BTreeMap::from([(0, (Some(a), 1)), (1, (Some(b), 1)), (2, (Some(b), 1))]),
            notifiers: BTreeMap::from([(a, (0, beats[0], 10_000)), (b, (0, beats[1], 10_000))]),
        }
    }

    #[test]
    fn a_partition_is_owned_while_its_owner_beats() {
        let (owners, second) = (Owners::default(), Duration::from_secs);
        let none = BTreeSet::new();
        assert_eq!(owners.unowned(4, &found([1, 1]), second(0)), BTreeSet::from([3]), "it never had one");
        assert_eq!(owners.unowned(3, &found([1, 1]), second(1)), none);
        assert_eq!(owners.unowned(3, &found([2, 1]), second(10)), none);
        // The second one has been silent for longer than its expiry; and for as long as a handover may take.
        assert_eq!(owners.unowned(3, &found([3, 1]), second(11)), none);
        assert_eq!(owners.unowned(3, &found([4, 1]), second(14)), BTreeSet::from([1, 2]));
        assert_eq!(owners.unowned(3, &found([4, 2]), second(15)), none, "it beats again");
        let mut gone = found([5, 3]);
        gone.notifiers.remove(&NodeId([1; 16]));
        assert_eq!(owners.unowned(3, &gone, second(16)), none);
        assert_eq!(owners.unowned(3, &gone, second(19)), BTreeSet::from([0]), "its row is gone");
        // Nobody is left who could take over.
        gone.notifiers.clear();
        assert_eq!(owners.unowned(3, &found([6, 4]), second(20)), none);
        assert_eq!(owners.unowned(3, &gone, second(21)), BTreeSet::from([0, 1, 2]));
        assert_eq!(ranges(&BTreeSet::from([0, 1, 2, 7])), "0-2, 7");
    }
}
