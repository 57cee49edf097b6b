//! The actions of a node in one round, as a pure function of what it has read and of its own state.
//!
//! [`assign`] says which resources the node should own. The plan combines this with the present state: leases that
//! others have not released yet, and leases that the node owns without working on them.

use std::{collections::BTreeMap, time::Duration};

use super::assignment::assign;
use crate::state::keys::{Lease, NodeId};

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
    /// The leases with running work.
    pub held: BTreeMap<u64, Lease>,
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
    /// Wait for the ends of the pauses of these.
    pub paused: Vec<u64>,
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
        let owner_of = |&resource| (resource, self.lease(resource).owner.map(|owner| owner.node));
        let owners: Vec<_> = self.resources.iter().map(owner_of).collect();
        let assignment = assign(&owners, &self.members);
        let mut plan = RoundPlan::default();
        for &(resource, owner) in &assignment {
            self.decide(&mut plan, resource, owner == Some(self.me));
        }
        let is_gone =
            |resource: u64| assignment.binary_search_by_key(&resource, |(known, _)| *known).is_err();
        // The lease of work under way may be removed already.
        plan.gone.extend(self.own.held.keys().filter(|resource| is_gone(**resource)));
        // One member is enough to remove leases of missing resources.
        let is_first = self.members.first().is_some_and(|(member, _)| *member == self.me);
        for (&resource, lease) in &self.leases {
            let is_mine = lease.owner.is_some_and(|owner| owner.node == self.me);
            let is_free = lease.owner.is_none_or(|owner| !self.is_member(owner.node));
            let is_held = self.own.held.contains_key(&resource);
            if !is_held && (is_mine || is_free && is_first) && is_gone(resource) {
                plan.gone.push(resource);
            }
        }
        plan
    }

    /// Decides about `resource`, which the node should own if `is_to_be_mine`.
    fn decide(&self, plan: &mut RoundPlan, resource: u64, is_to_be_mine: bool) {
        let lease = self.lease(resource);
        if let Some(held) = self.own.held.get(&resource) {
            if *held != lease {
                // The work on a lost lease ends before anything else.
                plan.lost.push(resource);
            } else if !is_to_be_mine {
                plan.hand_over.push(resource);
            }
            return;
        }
        let owner = lease.owner.map(|owner| owner.node);
        if !is_to_be_mine {
            if owner == Some(self.me) {
                plan.release.push(resource);
            }
            return;
        }
        match owner {
            Some(owner) if owner != self.me && self.is_member(owner) => {
                let since = self.own.awaited.get(&resource).filter(|(epoch, _)| *epoch == lease.epoch);
                if since.is_some_and(|(_, since)| self.own.now.saturating_sub(*since) >= self.own.handover) {
                    plan.acquire.push(resource);
                } else {
                    plan.awaits.push((resource, lease.epoch));
                }
            }
            _ if self.own.paused.get(&resource).is_some_and(|until| *until > self.own.now) => {
                plan.paused.push(resource);
            }
            Some(owner) if owner == self.me => plan.renew.push(resource),
            _ => plan.acquire.push(resource),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::state::keys::Owner;

    const ME: NodeId = NodeId([0; 16]);
    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);
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
                held: held.iter().map(|&resource| (resource, owned(mine))).collect(),
                awaited: NOBODY,
                paused: BTreeMap::new(),
                now: Duration::from_hours(1),
                handover: HANDOVER,
            },
        }
    }

    #[test]
    fn what_has_no_living_owner_is_taken_at_once() {
        let all = RoundPlan { acquire: (0..4).collect(), ..RoundPlan::default() };
        assert_eq!(view(4, &[], &[]).plan(), all);
        let mut gone = view(4, &[], &[(0, A), (1, A), (2, A), (3, A)]);
        gone.members.retain(|(member, _)| *member == ME);
        assert_eq!(gone.plan(), all);
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
        assert_eq!(orphan.plan(), RoundPlan { paused: vec![1], ..RoundPlan::default() });
        orphan.own.paused.insert(1, orphan.own.now);
        assert_eq!(orphan.plan(), renewed);
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
