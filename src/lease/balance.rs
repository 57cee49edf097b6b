//! The rule of balance, as a pure function: what one node does, given what it sees.
//!
//! It is the rule of Azure's change feed processor, with the nodes known by their heartbeats instead of by the leases that
//! they own, so that a node without any counts too:
//!
//! 1. A node's target is its even share, rounded up; capped by its maximum, then raised to its minimum.
//! 2. If it has fewer, it takes what nobody owns, then what dead nodes owned, up to the target; and asks nobody.
//! 3. If all are owned by living nodes, it asks the one that has most for one lease, if that one has more than the target;
//!    or as many, if the node itself lacks more than one.
//!
//! Rule 3 ends with shares that differ by at most one: as long as two differ by more, the smaller one either lacks two of
//! the target, or sees another above it.

use std::collections::{BTreeMap, BTreeSet};

use super::BalanceOptions;
use crate::keys::NodeId;

/// Who holds a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Holder {
    /// Nobody.
    Nobody,
    /// A node that is dead.
    Expired,
    /// A living node.
    Node(NodeId),
}

/// What a node does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// It takes a resource that no living node holds.
    Take(u64),
    /// It asks for one that a living node holds.
    Steal {
        /// The resource.
        resource: u64,
        /// Who holds it.
        from: NodeId,
    },
}

/// What `me` does when it sees `nodes` alive and `resources` so held. Holders and `me` count as alive in any case.
pub(super) fn balance(
    me: NodeId,
    nodes: &BTreeSet<NodeId>,
    resources: &BTreeMap<u64, Holder>,
    options: &BalanceOptions,
    random: &mut fastrand::Rng,
) -> Vec<Action> {
    let mut shares: BTreeMap<NodeId, usize> = nodes.iter().map(|&node| (node, 0)).collect();
    shares.entry(me).or_default();
    for holder in resources.values() {
        if let Holder::Node(node) = holder {
            *shares.entry(*node).or_default() += 1;
        }
    }
    let target = target(resources.len(), shares.len(), options);
    let need = target.saturating_sub(shares[&me]);
    if need == 0 {
        return Vec::new();
    }
    let of = |wanted: Holder| {
        resources.iter().filter(move |(_, holder)| **holder == wanted).map(|(&resource, _)| resource)
    };
    let free: Vec<_> = of(Holder::Nobody).chain(of(Holder::Expired)).take(need).map(Action::Take).collect();
    if !free.is_empty() || !options.steal {
        return free;
    }
    shares.remove(&me);
    let most = shares.values().copied().max().unwrap_or(0);
    let bearable = target - usize::from(need > 1);
    if most <= bearable {
        return Vec::new();
    }
    let largest: Vec<_> = shares.into_iter().filter(|(_, share)| *share == most).collect();
    let (from, _) = largest[random.usize(..largest.len())];
    let candidates: Vec<_> = of(Holder::Node(from)).collect();
    // What is next to mine is as good as any, and a run of neighbours can be looked after in one read.
    let is_mine = |resource| resources.get(&resource) == Some(&Holder::Node(me));
    let is_next = |&resource: &u64| {
        resource.checked_sub(1).is_some_and(is_mine) || resource.checked_add(1).is_some_and(is_mine)
    };
    let neighbours: Vec<_> = candidates.iter().copied().filter(is_next).collect();
    let choice = if neighbours.is_empty() { &candidates } else { &neighbours };
    vec![Action::Steal { resource: choice[random.usize(..choice.len())], from }]
}

/// How many of `resources` a node should have if there are `nodes`.
pub(super) fn target(resources: usize, nodes: usize, options: &BalanceOptions) -> usize {
    let even = if resources > nodes { resources.div_ceil(nodes) } else { 1 };
    let capped = options.leases_max.map_or(even, |max| even.min(max as usize));
    capped.max(options.leases_min as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn node(number: u8) -> NodeId {
        NodeId([number; 16])
    }

    const ME: u8 = 0;

    /// Resources of which each node has as many as `live` says, dead ones `expired`, and nobody `unowned`.
    fn resources(live: &[(u8, usize)], expired: usize, unowned: usize) -> BTreeMap<u64, Holder> {
        let live = live.iter().flat_map(|&(number, count)| vec![Holder::Node(node(number)); count]);
        let expired = vec![Holder::Expired; expired];
        (0..).zip(live.chain(expired).chain(vec![Holder::Nobody; unowned])).collect()
    }

    /// What I do.
    fn decide(resources: &BTreeMap<u64, Holder>, options: &BalanceOptions) -> Vec<Action> {
        let mut random = fastrand::Rng::with_seed(1);
        balance(node(ME), &BTreeSet::new(), resources, options, &mut random)
    }

    /// Live leases by owner, expired ones, unowned ones; options; how many are taken, from whom they are stolen.
    type Case<'a> = (&'a [(u8, usize)], usize, usize, &'a BalanceOptions, usize, &'a [u8]);

    #[test]
    fn the_cases_of_the_change_feed_processor() {
        let plain = BalanceOptions::default();
        let min7 = BalanceOptions { leases_min: 7, ..plain.clone() };
        let max3 = BalanceOptions { leases_max: Some(3), ..plain.clone() };
        let cases: [Case<'_>; 14] = [
            (&[], 0, 0, &plain, 0, &[]),
            (&[(ME, 2)], 0, 0, &plain, 0, &[]),
            (&[], 0, 2, &plain, 2, &[]),
            (&[], 2, 0, &plain, 2, &[]),
            (&[(1, 2)], 0, 0, &plain, 1, &[1]),
            (&[(1, 3)], 1, 0, &plain, 1, &[]),
            (&[(1, 1)], 10, 0, &plain, 6, &[]),
            (&[(1, 1)], 10, 0, &min7, 7, &[]),
            (&[(1, 1)], 10, 0, &max3, 3, &[]),
            (&[(1, 5), (2, 10)], 0, 0, &plain, 1, &[2]),
            (&[(1, 5), (ME, 6)], 0, 0, &plain, 0, &[]),
            (&[(1, 5), (ME, 5)], 0, 0, &plain, 0, &[]),
            (&[(1, 4), (ME, 3)], 0, 0, &plain, 0, &[]),
            (&[(1, 4), (ME, 2)], 0, 0, &plain, 1, &[1]),
        ];
        for (live, expired, unowned, options, count, victims) in cases {
            let resources = resources(live, expired, unowned);
            let actions = decide(&resources, options);
            assert_eq!(actions.len(), count, "{live:?} +{expired} -> {actions:?}");
            for action in actions {
                match action {
                    Action::Steal { resource, from } => {
                        assert!(victims.contains(&from.0[0]), "{live:?} -> {action:?}");
                        assert_eq!(resources[&resource], Holder::Node(from));
                    }
                    Action::Take(resource) => {
                        assert!(victims.is_empty(), "{live:?} -> {action:?}");
                        assert!(matches!(resources[&resource], Holder::Nobody | Holder::Expired));
                    }
                }
            }
        }
        // The last one: of two that have as many, either is asked.
        let resources = resources(&[(1, 10), (2, 10), (ME, 8)], 0, 0);
        assert!(matches!(decide(&resources, &plain)[..], [Action::Steal { .. }]));
    }

    #[test]
    fn unowned_ones_go_before_expired_ones() {
        let seen = resources(&[(1, 3)], 3, 2);
        assert_eq!(decide(&seen, &BalanceOptions::default()), [6, 7, 3, 4].map(Action::Take));
    }

    #[test]
    fn victims_and_ties_are_at_random() {
        let seen = resources(&[(1, 9), (2, 9)], 0, 0);
        let mut chosen = BTreeSet::new();
        for seed in 0..1_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let options = BalanceOptions::default();
            match balance(node(ME), &BTreeSet::new(), &seen, &options, &mut random)[..] {
                [Action::Steal { resource, .. }] => chosen.insert(resource),
                ref other => panic!("{other:?}"),
            };
        }
        assert_eq!(chosen.len(), 18);
    }

    #[test]
    fn neighbours_of_mine_are_preferred() {
        let mut seen = resources(&[(1, 20)], 0, 0);
        seen.insert(7, Holder::Node(node(ME)));
        for _ in 0..9 {
            let mut random = fastrand::Rng::new();
            let options = BalanceOptions::default();
            match balance(node(ME), &BTreeSet::new(), &seen, &options, &mut random)[..] {
                [Action::Steal { resource, .. }] => seen.insert(resource, Holder::Node(node(ME))),
                ref other => panic!("{other:?}"),
            };
        }
        let mine: Vec<_> =
            seen.iter().filter(|(_, h)| **h == Holder::Node(node(ME))).map(|(r, _)| r).collect();
        assert_eq!(*mine[9] - *mine[0], 9, "{mine:?}");
    }

    #[test]
    fn without_stealing_only_free_ones_are_taken() {
        let options = BalanceOptions { steal: false, ..BalanceOptions::default() };
        assert_eq!(decide(&resources(&[(1, 9)], 0, 0), &options), []);
        assert_eq!(decide(&resources(&[(1, 9)], 1, 0), &options), [Action::Take(9)]);
    }

    #[test]
    fn a_node_without_leases_counts() {
        let nodes = [node(1), node(2), node(3)].into();
        let mut random = fastrand::Rng::with_seed(1);
        let seen = resources(&[(1, 2), (2, 2)], 0, 4);
        let actions = balance(node(ME), &nodes, &seen, &BalanceOptions::default(), &mut random);
        assert_eq!(actions.len(), 2);
    }

    /// Shares of a start, from any holders to nodes `0..nodes`.
    fn start() -> impl Strategy<Value = (u8, Vec<Holder>, u64)> {
        (1..9_u8).prop_flat_map(|nodes| {
            let holder = prop_oneof![
                1 => Just(Holder::Nobody),
                1 => Just(Holder::Expired),
                6 => (0..nodes).prop_map(|number| Holder::Node(node(number))),
            ];
            (Just(nodes), proptest::collection::vec(holder, 0..100), any::<u64>())
        })
    }

    proptest! {
        #[test]
        fn rounds_in_any_order_end_in_even_shares_and_then_nothing_moves((count, holders, seed) in start()) {
            let mut random = fastrand::Rng::with_seed(seed);
            let nodes: BTreeSet<_> = (0..count).map(node).collect();
            let mut seen: BTreeMap<u64, _> = (0..).zip(holders).collect();
            let mut moves = 0;
            let mut order: Vec<_> = nodes.iter().copied().collect();
            loop {
                let mut is_still = true;
                random.shuffle(&mut order);
                for &me in &order {
                    for action in balance(me, &nodes, &seen, &BalanceOptions::default(), &mut random) {
                        let (Action::Take(resource) | Action::Steal { resource, .. }) = action;
                        seen.insert(resource, Holder::Node(me));
                        is_still = false;
                        moves += 1;
                    }
                }
                // Each resource moves at most once: to one that has too few, from nobody or from one that has too many.
                prop_assert!(moves <= seen.len(), "{moves} moves of {} resources", seen.len());
                if is_still {
                    break;
                }
            }
            let shares = nodes.iter().map(|&node| seen.values().filter(|h| **h == Holder::Node(node)).count());
            let (least, most) = (shares.clone().min().unwrap(), shares.max().unwrap());
            prop_assert!(most - least <= 1, "{least} to {most}");
            prop_assert!(seen.values().all(|holder| matches!(holder, Holder::Node(_))));
        }
    }
}
