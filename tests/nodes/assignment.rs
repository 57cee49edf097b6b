//! The assignment of resources to members, as a pure function: fair, moving as little as possible, and stable while it is carried out.

use std::collections::{BTreeMap, BTreeSet};

use notibus::{node::NodeId, test_util::pool::assign};
use proptest::prelude::*;

fn node(number: u16) -> NodeId {
    let mut id = [0; 16];
    id[..2].copy_from_slice(&number.to_be_bytes());
    NodeId(id)
}

type Resources = Vec<(u64, Option<NodeId>)>;
type Members = Vec<(NodeId, u32)>;

/// Generates pools whose owners may or may not be members, and members with a small, a large or no maximum.
fn pools() -> impl Strategy<Value = (Resources, Members)> {
    let owner = proptest::option::weighted(0.8, 0_u16..12).prop_map(|owner| owner.map(node));
    let resources = proptest::collection::btree_map(0_u64..200, owner, 0..60);
    let max = prop_oneof![2 => Just(u32::MAX), 1 => 0_u32..20];
    let members = proptest::collection::btree_map((0_u16..10).prop_map(node), max, 0..8);
    (resources, members)
        .prop_map(|(resources, members)| (resources.into_iter().collect(), members.into_iter().collect()))
}

fn shares(assignment: &Resources) -> BTreeMap<NodeId, usize> {
    let mut shares = BTreeMap::new();
    for node in assignment.iter().filter_map(|(_, owner)| *owner) {
        *shares.entry(node).or_default() += 1;
    }
    shares
}

/// Returns the number of resources that change their owner, or get their first owner.
fn moves(resources: &Resources, assignment: &Resources) -> usize {
    let before: BTreeMap<_, _> = resources.iter().copied().collect();
    assignment.iter().filter(|(resource, owner)| owner.is_some() && before[resource] != *owner).count()
}

/// Returns the sorted shares that are as equal as the maxima allow: each resource goes to the member with the fewest.
fn fair(count: usize, members: &Members) -> Vec<usize> {
    let mut shares: Vec<_> = members.iter().map(|(_, max)| (0_usize, *max as usize)).collect();
    for _ in 0..count {
        if let Some(least) = shares.iter_mut().filter(|(share, max)| share < max).min() {
            least.0 += 1;
        }
    }
    let mut shares: Vec<_> = shares.into_iter().map(|(share, _)| share).collect();
    shares.sort_unstable();
    shares
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn all_that_may_be_owned_is_and_shares_are_as_equal_as_maxima_allow(
        (resources, members) in pools(), seed: u64,
    ) {
        let assignment = assign(&resources, &members);
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut shuffled, mut mixed) = (resources.clone(), members.clone());
        random.shuffle(&mut shuffled);
        random.shuffle(&mut mixed);
        prop_assert_eq!(&assign(&shuffled, &mixed), &assignment, "the order does not matter");
        prop_assert!(assignment.iter().map(|(resource, _)| resource).eq(resources.iter().map(|(resource, _)| resource)));
        let shares = shares(&assignment);
        let mut all: Vec<_> = members.iter().map(|(node, _)| *shares.get(node).unwrap_or(&0)).collect();
        all.sort_unstable();
        prop_assert_eq!(all, fair(resources.len(), &members));
        for (node, share) in &shares {
            let max = members.iter().find(|(member, _)| member == node).expect("only members own").1;
            prop_assert!(*share <= max as usize);
        }
    }

    #[test]
    fn no_fair_assignment_moves_less((resources, members) in pools()) {
        let assignment = assign(&resources, &members);
        // A member that owns more than its share must lose the difference. The fewest resources move if the members that own most get the
        // shares that are larger by one. Every resource without an owner moves, as far as the maxima allow.
        let fair = fair(resources.len(), &members);
        let total: usize = fair.iter().sum();
        let owned: BTreeMap<_, usize> = members
            .iter()
            .map(|(node, _)| (*node, resources.iter().filter(|(_, owner)| *owner == Some(*node)).count()))
            .collect();
        let level = fair.last().copied().unwrap_or(0);
        let mut kept: usize = 0;
        let mut odd = fair.iter().filter(|share| **share == level).count();
        // The shares of members with smaller maxima are fixed; of the others, some have `level` and some one less.
        let mut free: Vec<_> = Vec::new();
        for (node, max) in &members {
            if (*max as usize) < level {
                kept += owned[node].min(*max as usize);
            } else {
                free.push(owned[node]);
            }
        }
        free.sort_unstable_by_key(|owned| std::cmp::Reverse(*owned));
        for owned in free {
            let share = if odd > 0 { level } else { level.saturating_sub(1) };
            odd = odd.saturating_sub(1);
            kept += owned.min(share);
        }
        prop_assert_eq!(moves(&resources, &assignment), total - kept);
    }

    /// While some moves are done, in any order, and others are in progress, the assignment remains the same.
    #[test]
    fn a_move_that_was_made_changes_nothing((resources, members) in pools(), seed: u64) {
        let assignment = assign(&resources, &members);
        let mut random = fastrand::Rng::with_seed(seed);
        let under_way: Resources = resources
            .iter()
            .zip(&assignment)
            .map(|(&(resource, owner), &(_, wanted))| {
                (resource, match random.u8(0..3) {
                    0 => owner,
                    1 if owner != wanted => None,
                    _ => wanted,
                })
            })
            .collect();
        prop_assert_eq!(assign(&under_way, &members), assignment);
    }

    /// However members join and leave, each member owns few runs of neighbours: at most one more for each member that has joined or left.
    #[test]
    fn neighbours_stay_together(changes in proptest::collection::vec(0_u16..16, 1..20)) {
        let mut members = BTreeSet::new();
        let mut resources: Resources = (0..256).map(|resource| (resource, None)).collect();
        let mut most = 1;
        for number in &changes {
            if !members.remove(number) {
                members.insert(*number);
            }
            let present: Members = members.iter().map(|member| (node(*member), u32::MAX)).collect();
            resources = assign(&resources, &present);
            most += members.len().max(1);
        }
        let runs = 1 + resources.windows(2).filter(|pair| pair[0].1 != pair[1].1).count();
        prop_assert!(runs <= most, "{runs} runs");
        // If no resource has an owner, there is one run for each member.
        let fresh: Resources = (0..256).map(|resource| (resource, None)).collect();
        let present: Members = members.iter().map(|member| (node(*member), u32::MAX)).collect();
        let assignment = assign(&fresh, &present);
        let runs = 1 + assignment.windows(2).filter(|pair| pair[0].1 != pair[1].1).count();
        prop_assert_eq!(runs, members.len().max(1));
    }
}
