//! [`assign`]: the member that should own each resource of a pool, as a pure function of what is stored. All nodes
//! compute the same assignment from the same facts, and each does its own part of it; so nobody negotiates.
//!
//! 1. Targets are even shares: as equal as the members' maxima allow. Resources beyond one member's maximum go to the
//!    others. Where shares cannot be equal, members that already own one more keep it, then members with smaller ids
//!    get one more.
//! 2. An owner keeps its resources, the first ones in order, up to its target.
//! 3. The rest goes in order to the members below their targets, in the order of their ids: so neighbours stay
//!    together.
//!
//! A completed move does not change the answer: whether a resource is still with its former owner, free, or with the
//! new one, all others get the same owners. So nodes that read at different moments of a rearrangement agree. Nothing
//! is random, and the time is linear in resources and members, except for sorting if they do not come in order.

use crate::state::keys::NodeId;

/// A member while resources are divided.
struct Share {
    node: NodeId,
    /// The most resources that it may own.
    max: usize,
    owned: usize,
    /// The number that it can still get.
    left: usize,
}

/// Divides `resources`, each given once and with its present owner, among `members`, each given once and with its
/// maximum. An owner that is no member does not count. The order of either does not matter. Returns the resources, in
/// order, with the member that should own each; `None` if none may.
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
        // The owner keeps this one, or it goes to another.
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

/// Sets `left` of each share to its target, for `count` resources in all.
fn set_targets(shares: &mut [Share], count: usize) {
    let given =
        |level: usize| shares.iter().fold(0_usize, |sum, share| sum.saturating_add(share.max.min(level)));
    // Find the highest level that every member can reach.
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
