//! [`Handovers`]: whether each partition is owned by a notifier that lives. Events of a partition without a living owner wait in the store.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use parking_lot::Mutex;

use super::snapshot::Members;
use crate::state::keys::NodeId;

/// How long a partition that had an owner may be without one while a notifier lives: nodes that come and go hand partitions over.
const HANDOVER_MAX: Duration = Duration::from_secs(3);

/// Since when partitions have had no living owner.
#[derive(Debug, Default)]
pub(super) struct Handovers(Mutex<HandoversState>);

#[derive(Debug, Default)]
struct HandoversState {
    /// Whether all partitions had an owner at some time.
    were_owned: bool,
    /// Since when each of the others has had none, and under which epoch: the next handover has another one.
    unowned: BTreeMap<u32, (u64, Duration)>,
}

impl Handovers {
    /// The partitions of `count` that no living node owns at `now`; none while they may be handed over.
    pub fn unowned(&self, count: u32, found: &Members, now: Duration) -> BTreeSet<u32> {
        let mut state = self.0.lock();
        let mut unowned = BTreeMap::new();
        // Its neighbours remove a dead node after its expiry. If it has no neighbours, this check finds it.
        let lives = |node: &NodeId| found.silent.get(node).is_some_and(|(_, is_silent)| !is_silent);
        let living: BTreeSet<_> = found.notifiers.iter().filter(|node| lives(node)).collect();
        for partition in 0..count {
            let (owner, epoch) = found.owners.get(&partition).copied().unwrap_or_default();
            if owner.is_none_or(|owner| !living.contains(&owner)) {
                let before = state.unowned.get(&partition).filter(|(before, _)| *before == epoch);
                unowned.insert(partition, (epoch, before.map_or(now, |(_, since)| *since)));
            }
        }
        state.were_owned |= unowned.is_empty();
        state.unowned = unowned;
        let may_be_handed_over = state.were_owned && !living.is_empty();
        let is_late = |since: Duration| !may_be_handed_over || now.saturating_sub(since) >= HANDOVER_MAX;
        let late = state.unowned.iter().filter(|(_, (_, since))| is_late(*since));
        late.map(|(partition, _)| *partition).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{keys::NodeRow, membership::LastSeen};

    /// Three partitions, of which one node owns the first and another one the rest, with these beats.
    fn found(beats: [u64; 2]) -> Members {
        let [a, b] = [1, 2].map(|id| NodeId([id; 16]));
        let row = |beat| NodeRow { beat, token: [1; 16], started_ms: 0, expiry_ms: 10_000 };
        Members {
            owners: BTreeMap::from([(0, (Some(a), 1)), (1, (Some(b), 1)), (2, (Some(b), 1))]),
            nodes: BTreeMap::from([(a, row(beats[0])), (b, row(beats[1]))]),
            notifiers: BTreeSet::from([a, b]),
            ..Members::default()
        }
    }

    #[test]
    fn a_partition_is_owned_while_its_owner_beats() {
        let (handovers, mut seen, second) = (Handovers::default(), LastSeen::default(), Duration::from_secs);
        let none = BTreeSet::new();
        let mut unowned = |count, mut found: Members, now| {
            found.judge(&mut seen, (now, now));
            handovers.unowned(count, &found, now)
        };
        assert_eq!(unowned(4, found([1, 1]), second(0)), BTreeSet::from([3]), "it never had one");
        assert_eq!(unowned(3, found([1, 1]), second(1)), none);
        assert_eq!(unowned(3, found([2, 1]), second(9)), none);
        // The second one has been silent for its expiry; and for as long as a handover may take.
        assert_eq!(unowned(3, found([3, 1]), second(11)), none);
        assert_eq!(unowned(3, found([4, 1]), second(14)), BTreeSet::from([1, 2]));
        assert_eq!(unowned(3, found([4, 2]), second(15)), none, "it beats again");
        let gone = |beats, left: &[u8]| {
            let mut gone = found(beats);
            gone.nodes.retain(|node, _| left.contains(&node.0[0]));
            gone.notifiers.retain(|node| left.contains(&node.0[0]));
            gone
        };
        assert_eq!(unowned(3, gone([5, 3], &[2]), second(16)), none);
        assert_eq!(unowned(3, gone([5, 3], &[2]), second(19)), BTreeSet::from([0]), "its row is gone");
        // Nobody is left who could take over.
        assert_eq!(unowned(3, found([6, 4]), second(20)), none);
        assert_eq!(unowned(3, gone([6, 4], &[]), second(21)), BTreeSet::from([0, 1, 2]));
    }
}
