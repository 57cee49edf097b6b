//! The actions of a node in one round, as a pure function of what the node has read and of its own state.
//!
//! [`assign`] says which resources the node should own. The plan combines this with the current state: leases that others have not released
//! yet, and leases that the node owns without working on them.

use std::{collections::BTreeMap, time::Duration};

use crate::state::{
    keys::{Lease, NodeId},
    last_seen::LastSeen,
};

/// What a node has read about a pool, and its own state.
#[derive(Debug)]
pub(super) struct View<'a> {
    /// The node that decides.
    pub me: NodeId,
    /// The live nodes with the pool's role, each with the maximum number of resources that it may own.
    pub members: Vec<(NodeId, u32)>,
    pub resources: Vec<u64>,
    pub leases: BTreeMap<u64, Lease>,
    /// The leases with running work.
    pub held: BTreeMap<u64, Lease>,
    /// The epochs of the leases that other nodes must still release, and the time at which the node began to wait for each.
    pub awaited: &'a LastSeen<u64, u64>,
    /// The resources whose work has failed, each with the time at which its pause ends.
    pub paused: BTreeMap<u64, Duration>,
    /// The current time.
    pub now: Duration,
    /// How long an owner may take to end its work.
    pub handover: Duration,
}

/// The actions of a node in a round.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RoundPlan {
    /// Resources to acquire: free ones, and those that others have kept for too long.
    pub acquire: Vec<u64>,
    /// Resources to acquire again: the node owns them without working on them.
    pub renew: Vec<u64>,
    /// Resources to release: the node owns them without working on them.
    pub release: Vec<u64>,
    /// Resources whose work should end, because other nodes should own them.
    pub hand_over: Vec<u64>,
    /// Resources that no longer exist: their leases are removed, and the work on them, if any, is aborted.
    pub gone: Vec<u64>,
    /// Resources whose work is aborted, because other nodes have taken the leases.
    pub lost: Vec<u64>,
    /// Leases of other nodes to wait for, each with its epoch.
    pub awaits: Vec<(u64, u64)>,
    /// Resources whose pauses have not ended.
    pub paused: Vec<u64>,
}

impl RoundPlan {
    /// Whether the plan changes something that other nodes must see. They need not see that a node takes its own lease again.
    pub fn concerns_others(&self) -> bool {
        !self.acquire.is_empty() || !self.release.is_empty() || !self.gone.is_empty()
    }
}

impl View<'_> {
    fn lease(&self, resource: u64) -> Lease {
        self.leases.get(&resource).copied().unwrap_or_default()
    }

    /// Whether `node` is alive and has the role.
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
        // The lease of work in progress may already have been removed.
        plan.gone.extend(self.held.keys().filter(|resource| is_gone(**resource)));
        // It is enough if one member removes the leases of missing resources.
        let is_first = self.members.first().is_some_and(|(member, _)| *member == self.me);
        for (&resource, lease) in &self.leases {
            let is_mine = lease.owner.is_some_and(|owner| owner.node == self.me);
            let is_free = lease.owner.is_none_or(|owner| !self.is_member(owner.node));
            let is_held = self.held.contains_key(&resource);
            if !is_held && (is_mine || is_free && is_first) && is_gone(resource) {
                plan.gone.push(resource);
            }
        }
        plan
    }

    /// Decides what to do about `resource`, which the node should own if `is_to_be_mine`.
    fn decide(&self, plan: &mut RoundPlan, resource: u64, is_to_be_mine: bool) {
        let lease = self.lease(resource);
        if let Some(held) = self.held.get(&resource) {
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
                if self.awaited.age(&resource, &lease.epoch, self.now) >= self.handover {
                    plan.acquire.push(resource);
                } else {
                    plan.awaits.push((resource, lease.epoch));
                }
            }
            _ if self.paused.get(&resource).is_some_and(|until| *until > self.now) => {
                plan.paused.push(resource);
            }
            Some(owner) if owner == self.me => plan.renew.push(resource),
            _ => plan.acquire.push(resource),
        }
    }
}

/// The share of a member while resources are being divided.
struct Share {
    node: NodeId,
    /// The maximum number of resources that the member may own.
    max: usize,
    owned: usize,
    /// How many resources the member can still get.
    left: usize,
}

/// Divides `resources`, each given once and with its current owner, among `members`, each given once and with its maximum. An owner that is
/// not a member does not count. The order of the two lists does not matter. Returns the resources, in order, each with the member that
/// should own it; `None` if no member may.
pub(crate) fn assign(
    resources: &[(u64, Option<NodeId>)],
    members: &[(NodeId, u32)],
) -> Vec<(u64, Option<NodeId>)> {
    let mut owners = resources.to_vec();
    owners.sort_unstable_by_key(|(resource, _)| *resource);
    let mut shares: Vec<_> =
        members.iter().map(|&(node, max)| Share { node, max: max as usize, owned: 0, left: 0 }).collect();
    shares.sort_unstable_by_key(|share| share.node);
    let places: std::collections::HashMap<_, _> =
        shares.iter().enumerate().map(|(place, share)| (share.node, place)).collect();
    for (_, owner) in &owners {
        if let Some(place) = owner.and_then(|owner| places.get(&owner)) {
            shares[*place].owned += 1;
        }
    }
    set_targets(&mut shares, owners.len());
    for (_, owner) in &mut owners {
        // The owner keeps this resource, or it goes to another member.
        *owner = owner.filter(|node| {
            let left = places.get(node).map(|place| &mut shares[*place].left);
            left.is_some_and(|left| left.checked_sub(1).map(|rest| *left = rest).is_some())
        });
    }
    let mut lacking = shares.iter_mut();
    let mut next = lacking.next();
    for (_, owner) in owners.iter_mut().filter(|(_, owner)| owner.is_none()) {
        while next.as_ref().is_some_and(|share| share.left == 0) {
            next = lacking.next();
        }
        let Some(share) = &mut next else { break };
        share.left -= 1;
        *owner = Some(share.node);
    }
    owners
}

/// Sets `left` of each share to its target, for `count` resources in total.
fn set_targets(shares: &mut [Share], count: usize) {
    let given =
        |level: usize| shares.iter().fold(0_usize, |sum, share| sum.saturating_add(share.max.min(level)));
    // Find the highest level to which all members can be filled, each up to its own maximum.
    let (mut level, mut above) = (0, count + 1);
    while above - level > 1 {
        let middle = level + (above - level) / 2;
        if given(middle) <= count {
            level = middle;
        } else {
            above = middle;
        }
    }
    let mut more = count - given(level);
    for share in shares.iter_mut() {
        share.left = share.max.min(level);
    }
    for has_more in [true, false] {
        for share in shares.iter_mut().filter(|share| share.max > level) {
            if more > 0 && (share.owned > level) == has_more {
                share.left += 1;
                more -= 1;
            }
        }
    }
}
