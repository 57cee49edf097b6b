//! The actions of a node in one round, as a pure function of what it has read and of its own state.
//!
//! [`assign`] says which resources the node should own. The plan combines this with the present state: leases that
//! others have not released yet, and leases that the node owns without working on them. Work that fails is tried again where it is,
//! with back-off.

use std::{collections::BTreeMap, time::Duration};

use super::assignment::assign;
use crate::state::keys::{Lease, NodeId, Owner};

/// What a node has read, and its own state.
#[derive(Debug, Clone)]
pub(super) struct View<'a> {
    /// The node that decides.
    pub me: NodeId,
    /// Living nodes with the pool's role, each with the most resources that it may own.
    pub members: Vec<(NodeId, u32)>,
    pub resources: Vec<u64>,
    pub leases: BTreeMap<u64, Lease>,
    pub own: OwnState<'a>,
}

/// What a node knows about a pool before a round, without reading.
#[derive(Debug, Clone)]
pub(super) struct OwnState<'a> {
    /// The acquisitions with running work: owner and epoch by resource.
    pub held: BTreeMap<u64, (Owner, u64)>,
    /// The token for the acquisitions of this round. A lease that already has it was acquired by an attempt whose
    /// result was unknown.
    pub token: [u8; 16],
    /// The leases that others have not released, each with its epoch and since when the node waits for it.
    pub awaited: &'a BTreeMap<u64, (u64, Duration)>,
    /// The resources whose work has failed, each with the end of its pause.
    pub paused: BTreeMap<u64, Duration>,
    /// The present time.
    pub now: Duration,
    /// How long an owner may take to end its work.
    pub handover: Duration,
}

/// The actions of a node in a round.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RoundPlan {
    /// Acquire: free resources, and those that others have kept for too long.
    pub acquire: Vec<u64>,
    /// Acquire again: resources that the node owns without working on them.
    pub renew: Vec<u64>,
    /// Acquired in this round already, under these epochs.
    pub acquired: Vec<(u64, u64)>,
    /// Release: resources that the node owns without working on them.
    pub release: Vec<u64>,
    /// End the work, because others should own these.
    pub hand_over: Vec<u64>,
    /// Remove the leases, because the resources no longer exist, and abort the work on them, if any.
    pub gone: Vec<u64>,
    /// Abort the work, because others have taken the leases.
    pub lost: Vec<u64>,
    /// Wait for these leases of others, under these epochs.
    pub awaits: Vec<(u64, u64)>,
}

impl RoundPlan {
    /// Whether the plan changes `leases` in a way that other nodes must see. Taking its own lease again does not
    /// matter to them, and a lease that was removed before, with its consumer or feed, does not change.
    pub fn concerns_others(&self, leases: &BTreeMap<u64, Lease>) -> bool {
        let is_there = |resource: &u64| leases.contains_key(resource);
        !self.acquire.is_empty() || !self.release.is_empty() || self.gone.iter().any(is_there)
    }
}

impl View<'_> {
    fn lease(&self, resource: u64) -> Lease {
        self.leases.get(&resource).copied().unwrap_or_default()
    }

    /// Whether `node` lives and has the role.
    pub fn is_member(&self, node: NodeId) -> bool {
        self.members.binary_search_by_key(&node, |(member, _)| *member).is_ok()
    }

    pub fn plan(&self) -> RoundPlan {
        let owners: Vec<_> = self
            .resources
            .iter()
            .map(|&resource| (resource, self.lease(resource).owner.map(|owner| owner.node)))
            .collect();
        let mut plan = RoundPlan::default();
        let assignment = assign(&owners, &self.members);
        for (resource, owner) in assignment.iter() {
            self.decide(&mut plan, resource, owner == Some(self.me));
        }
        for (&resource, &(owner, epoch)) in &self.own.held {
            if !assignment.has(resource) {
                // Its lease may be removed already.
                plan.gone.push(resource);
            } else if self.lease(resource) != (Lease { epoch, owner: Some(owner) }) {
                plan.lost.push(resource);
            }
        }
        // One member is enough to remove leases of missing resources.
        let is_first = self.members.first().is_some_and(|(member, _)| *member == self.me);
        for (&resource, lease) in &self.leases {
            let is_mine = lease.owner.is_some_and(|owner| owner.node == self.me);
            let is_free = lease.owner.is_none_or(|owner| !self.is_member(owner.node));
            let is_gone = !assignment.has(resource) && !self.own.held.contains_key(&resource);
            if is_gone && (is_mine || is_free && is_first) {
                plan.gone.push(resource);
            }
        }
        plan
    }

    /// Decides about `resource`, which the node should own if `is_to_be_mine`.
    fn decide(&self, plan: &mut RoundPlan, resource: u64, is_to_be_mine: bool) {
        let lease = self.lease(resource);
        let held = self.own.held.get(&resource);
        let is_held =
            held.is_some_and(|(owner, epoch)| lease == Lease { epoch: *epoch, owner: Some(*owner) });
        let is_signed = lease.owner == Some(Owner { node: self.me, token: self.own.token });
        let is_paused = self.own.paused.get(&resource).is_some_and(|until| *until > self.own.now);
        match lease.owner {
            _ if is_held && is_to_be_mine => {}
            _ if is_held => plan.hand_over.push(resource),
            // The work on a lost lease ends first.
            _ if held.is_some() => {}
            Some(_) if is_signed => plan.acquired.push((resource, lease.epoch)),
            Some(owner) if owner.node == self.me => {
                if !is_to_be_mine {
                    plan.release.push(resource);
                } else if !is_paused {
                    plan.renew.push(resource);
                }
            }
            _ if !is_to_be_mine => {}
            Some(owner) if self.is_member(owner.node) => {
                let since = self.own.awaited.get(&resource).filter(|(epoch, _)| *epoch == lease.epoch);
                let waited = since.map_or(Duration::ZERO, |(_, since)| self.own.now.saturating_sub(*since));
                if since.is_some() && waited >= self.own.handover {
                    plan.acquire.push(resource);
                } else {
                    plan.awaits.push((resource, lease.epoch));
                }
            }
            _ if is_paused => {}
            _ => plan.acquire.push(resource),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const ME: NodeId = NodeId([0; 16]);
    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);
    const TOKEN: [u8; 16] = [9; 16];
    const EPOCH: u64 = 5;
    const NOBODY: &BTreeMap<u64, (u64, Duration)> = &BTreeMap::new();
    const HANDOVER: Duration = Duration::from_secs(10);

    /// A view of `count` resources, of which this node holds `held`, and others hold `others`.
    fn view(count: u64, held: &[u64], others: &[(u64, NodeId)]) -> View<'static> {
        let mine = Owner { node: ME, token: [8; 16] };
        let owned = |owner| Lease { epoch: EPOCH, owner: Some(owner) };
        let theirs = others.iter().map(|&(resource, node)| (resource, owned(Owner { node, token: [7; 16] })));
        let members: BTreeSet<_> = others.iter().map(|&(_, node)| node).chain([ME]).collect();
        View {
            me: ME,
            members: members.into_iter().map(|node| (node, u32::MAX)).collect(),
            resources: (0..count).collect(),
            leases: held.iter().map(|&resource| (resource, owned(mine))).chain(theirs).collect(),
            own: OwnState {
                held: held.iter().map(|&resource| (resource, (mine, EPOCH))).collect(),
                token: TOKEN,
                awaited: NOBODY,
                paused: BTreeMap::new(),
                now: Duration::from_hours(1),
                handover: HANDOVER,
            },
        }
    }

    #[test]
    fn a_node_alone_takes_everything_at_once() {
        let plan = view(100, &[], &[]).plan();
        assert_eq!(plan, RoundPlan { acquire: (0..100).collect(), ..RoundPlan::default() });
    }

    #[test]
    fn leases_of_nodes_that_are_no_members_are_free() {
        let mut gone = view(4, &[], &[(0, A), (1, A), (2, A), (3, A)]);
        gone.members.retain(|(member, _)| *member == ME);
        assert_eq!(gone.plan().acquire, [0, 1, 2, 3]);
    }

    #[test]
    fn what_a_living_node_has_is_awaited_until_the_deadline_or_the_release() {
        let all: Vec<_> = (0..4).map(|resource| (resource, A)).collect();
        let mut joined = view(4, &[], &all);
        assert_eq!(joined.plan(), RoundPlan { awaits: vec![(2, EPOCH), (3, EPOCH)], ..RoundPlan::default() });
        joined.leases.insert(2, Lease { epoch: EPOCH, owner: None });
        assert_eq!((joined.plan().acquire, joined.plan().awaits), (vec![2], vec![(3, EPOCH)]));

        // The other node has kept the last one for too long; but time that was spent on an earlier acquisition does
        // not count.
        let since = joined.own.now.checked_sub(HANDOVER).unwrap();
        let late = BTreeMap::from([(3, (EPOCH, since))]);
        joined.own.awaited = &late;
        assert_eq!(joined.plan().acquire, [2, 3]);
        let before = BTreeMap::from([(3, (EPOCH - 1, since))]);
        joined.own.awaited = &before;
        assert_eq!(joined.plan().acquire, [2]);
        joined.own.awaited = &late;
        joined.own.handover = Duration::MAX;
        assert_eq!(joined.plan().acquire, [2], "never");
    }

    #[test]
    fn an_owner_gives_up_what_is_to_be_anothers() {
        let mut asked = view(4, &[0, 1, 2, 3], &[]);
        asked.members.push((A, u32::MAX));
        assert_eq!(asked.plan(), RoundPlan { hand_over: vec![2, 3], ..RoundPlan::default() });
        asked.members[1].1 = 1;
        assert_eq!(asked.plan(), RoundPlan { hand_over: vec![3], ..RoundPlan::default() });
        // Owned without running work, so there is no work to end.
        asked.own.held.remove(&3);
        assert_eq!(asked.plan(), RoundPlan { release: vec![3], ..RoundPlan::default() });
    }

    /// Bug: a member of a deleted consumer removed leases that were gone already, and so wrote the version of their pool again, a key that
    /// stayed. Fix: a round removes only leases that exist.
    #[test]
    fn leases_of_resources_that_are_gone_are_removed_unless_another_works_on_them() {
        let mut view = view(6, &[0, 1], &[(2, B), (3, B)]);
        view.leases.insert(4, Lease { epoch: EPOCH, owner: None });
        view.resources = vec![0];
        let plan = view.plan();
        assert_eq!(plan, RoundPlan { gone: vec![1, 4], ..RoundPlan::default() });
        // The version of a pool that was removed with its leases was once written again for good, one key for each
        // deleted consumer.
        assert!(plan.concerns_others(&view.leases) && !plan.concerns_others(&BTreeMap::new()));
        view.me = B;
        view.own.held.clear();
        assert_eq!(view.plan().gone, [2, 3], "the first member removes what nobody owns");
    }

    #[test]
    fn what_is_owned_without_work_is_taken_again_after_its_pause() {
        let mut orphan = view(2, &[0, 1], &[]);
        orphan.own.held.remove(&1);
        let renewed = RoundPlan { renew: vec![1], ..RoundPlan::default() };
        assert_eq!(orphan.plan(), renewed);
        assert!(!renewed.concerns_others(&orphan.leases));
        orphan.own.paused.insert(1, orphan.own.now + Duration::from_millis(1));
        assert_eq!(orphan.plan(), RoundPlan::default());
        orphan.own.paused.insert(1, orphan.own.now);
        assert_eq!(orphan.plan(), renewed);
    }

    #[test]
    fn an_acquisition_with_an_unknown_result_is_recognised() {
        let mut unknown = view(2, &[0], &[]);
        let signed = Owner { node: ME, token: TOKEN };
        unknown.leases.insert(1, Lease { epoch: 7, owner: Some(signed) });
        assert_eq!(unknown.plan(), RoundPlan { acquired: vec![(1, 7)], ..RoundPlan::default() });
    }

    #[test]
    fn what_was_lost_is_seen() {
        let mut lost = view(2, &[0, 1], &[]);
        lost.members.push((A, u32::MAX));
        let theirs = Owner { node: A, token: [7; 16] };
        lost.leases.insert(1, Lease { epoch: EPOCH + 1, owner: Some(theirs) });
        assert_eq!(lost.plan(), RoundPlan { lost: vec![1], ..RoundPlan::default() });
    }
}
