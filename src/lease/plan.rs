//! What a node does in one round of balancing, as a pure function of what it has read.
//!
//! [`balance`](super::balance) says how many leases to get, and from whom. Here its answer meets what is under way:
//! requests, handovers, and leases that the node owns without working on them.
//!
//! A lease that is asked for counts to the one who asks, so a node sees at once what it will have, and all the leases that
//! it lacks are asked for in one round: each step of the rule sees the steps before it. Requests of several nodes for the
//! same lease cannot go wrong, because a round is a transaction that fails when leases or requests have changed meanwhile.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{
    BalanceOptions,
    balance::{self, Action, Holder},
};
use crate::keys::{Lease, NodeId, Owner, Request};

/// What a node has read, and knows of itself.
#[derive(Debug, Clone)]
pub(super) struct Scene<'a> {
    /// The node that decides.
    pub me: NodeId,
    /// Nodes that live and have the pool's role, the one that decides among them.
    pub nodes: BTreeSet<NodeId>,
    /// Nodes that it takes for dead, although their rows are still there.
    pub expired: BTreeSet<NodeId>,
    /// The resources that there are.
    pub resources: Vec<u64>,
    /// The leases that there are.
    pub leases: BTreeMap<u64, Lease>,
    /// The requests, and for how long the node has seen each.
    pub requests: BTreeMap<u64, (Request, Duration)>,
    /// The acquisitions on which it works: owner and epoch by resource.
    pub held: BTreeMap<u64, (Owner, u64)>,
    /// What it signs the acquisitions of this round with. A lease that is so signed already was acquired by an attempt
    /// whose result was unknown.
    pub token: [u8; 16],
    /// How it takes its part.
    pub options: &'a BalanceOptions,
}

/// What a node does in a round.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// It acquires these.
    pub acquire: Vec<u64>,
    /// It has acquired these in this round already, under these epochs.
    pub acquired: Vec<(u64, u64)>,
    /// It asks for these.
    pub ask: Vec<u64>,
    /// It removes the requests for these.
    pub forget: Vec<u64>,
    /// It gives these back, which it owns without working on them.
    pub release: Vec<u64>,
    /// It is asked for these and ends its work on them.
    pub hand_over: Vec<u64>,
    /// These leases are of resources that are there no more: it removes them, and aborts its work on them, if any.
    pub gone: Vec<u64>,
    /// It has lost these to others and aborts its work on them.
    pub lost: Vec<u64>,
    /// Whether it waits for owners that it has asked.
    pub waits: bool,
}

impl Plan {
    /// Whether there is nothing to do, and nothing to wait for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether leases or requests change by it.
    pub fn writes(&self) -> bool {
        [&self.acquire, &self.ask, &self.forget, &self.release, &self.gone]
            .iter()
            .any(|part| !part.is_empty())
    }
}

/// How a resource stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// The node works on it.
    Held,
    /// No living node has it.
    Free(Holder),
    /// Another node has it.
    Other(NodeId),
}

impl Scene<'_> {
    /// The lease of `resource` as it stands.
    fn lease(&self, resource: u64) -> Lease {
        self.leases.get(&resource).copied().unwrap_or_default()
    }

    /// How `resource` stands, whoever asks for it.
    fn standing(&self, resource: u64) -> Standing {
        let lease = self.lease(resource);
        match lease.owner {
            Some(owner) if self.held.get(&resource) == Some(&(owner, lease.epoch)) => Standing::Held,
            Some(owner) if owner.node == self.me && owner.token == self.token => Standing::Held,
            Some(owner) if self.expired.contains(&owner.node) => Standing::Free(Holder::Expired),
            Some(owner) if owner.node != self.me && self.nodes.contains(&owner.node) => {
                Standing::Other(owner.node)
            }
            _ => Standing::Free(Holder::Nobody),
        }
    }

    /// Who holds a resource that stands so, if nobody asks for it.
    fn holder(&self, standing: Standing) -> Holder {
        match standing {
            Standing::Held => Holder::Node(self.me),
            Standing::Other(node) => Holder::Node(node),
            Standing::Free(holder) => holder,
        }
    }

    /// Who asks for `resource`, if the request holds good.
    fn asker(&self, resource: u64) -> Option<NodeId> {
        let (request, age) = self.requests.get(&resource)?;
        let owner = self.lease(resource).owner.map(|owner| owner.node);
        let holds_good = self.nodes.contains(&request.node)
            && request.epoch == self.lease(resource).epoch
            && owner != Some(request.node)
            && *age < self.options.handover.saturating_mul(2);
        holds_good.then_some(request.node)
    }

    /// Whether the node may take what it has asked for, because the owner has gone or has let the deadline pass.
    fn is_due(&self, resource: u64) -> bool {
        let age = self.requests.get(&resource).map_or(Duration::ZERO, |(_, age)| *age);
        !matches!(self.standing(resource), Standing::Other(_)) || age >= self.options.handover
    }

    /// What the node does.
    pub fn plan(&self, random: &mut fastrand::Rng) -> Plan {
        let mut plan = Plan::default();
        let mut holders = BTreeMap::new();
        let mut mine = Vec::new();
        for &resource in &self.resources {
            let standing = self.standing(resource);
            let asker = self.asker(resource);
            if asker.is_none()
                && self.requests.contains_key(&resource)
                && !matches!(standing, Standing::Other(_))
            {
                plan.forget.push(resource);
            }
            holders.insert(resource, asker.map_or_else(|| self.holder(standing), Holder::Node));
            match (asker, standing) {
                (Some(node), _) if node == self.me => mine.push(resource),
                (Some(_), Standing::Held) => plan.hand_over.push(resource),
                _ => {}
            }
        }
        self.look_after_held(&mut plan, &holders);
        self.take(&mut plan, &mut holders, mine, random);
        for (&resource, lease) in &self.leases {
            let is_mine = lease.owner.is_some_and(|owner| owner.node == self.me);
            let is_held = self.standing(resource) == Standing::Held;
            if !holders.contains_key(&resource) {
                if !matches!(self.standing(resource), Standing::Other(_)) {
                    plan.gone.push(resource);
                }
            } else if is_mine && !is_held && !plan.acquire.contains(&resource) {
                plan.release.push(resource);
            }
        }
        plan
    }

    /// Finds what the node has lost, and what it has without knowing it.
    fn look_after_held(&self, plan: &mut Plan, resources: &BTreeMap<u64, Holder>) {
        for (&resource, &(owner, epoch)) in &self.held {
            if !resources.contains_key(&resource) {
                // Its lease may be removed already.
                plan.gone.push(resource);
            } else if self.lease(resource) != (Lease { epoch, owner: Some(owner) }) {
                plan.lost.push(resource);
            }
        }
        for (&resource, lease) in &self.leases {
            let is_signed = lease.owner == Some(Owner { node: self.me, token: self.token });
            if is_signed && resources.contains_key(&resource) && !self.held.contains_key(&resource) {
                plan.acquired.push((resource, lease.epoch));
            }
        }
    }

    /// Takes what is due of the node's requests `asked`, drops those that it needs no more, and follows the rule of
    /// balance.
    fn take(
        &self,
        plan: &mut Plan,
        holders: &mut BTreeMap<u64, Holder>,
        mut asked: Vec<u64>,
        random: &mut fastrand::Rng,
    ) {
        let me = Holder::Node(self.me);
        let owners = holders.values().filter_map(|holder| match holder {
            Holder::Node(node) => Some(*node),
            _ => None,
        });
        let nodes: BTreeSet<_> = self.nodes.iter().copied().chain(owners).collect();
        let share = holders.values().filter(|holder| **holder == me).count();
        let target = balance::target(holders.len(), nodes.len(), self.options);
        for _ in target..share {
            let Some(resource) = asked.pop() else { break };
            holders.insert(resource, self.holder(self.standing(resource)));
            plan.forget.push(resource);
        }
        for resource in asked {
            if self.is_due(resource) {
                plan.acquire.push(resource);
            } else {
                plan.waits = true;
            }
        }
        loop {
            let actions = balance::balance(self.me, &nodes, holders, self.options, random);
            for action in &actions {
                let &(Action::Take(resource) | Action::Steal { resource, .. }) = action;
                holders.insert(resource, me);
                match self.standing(resource) {
                    Standing::Free(_) => plan.acquire.push(resource),
                    Standing::Other(_) => {
                        plan.ask.push(resource);
                        plan.waits = true;
                    }
                    // Another node has asked for it, which has enough without it.
                    Standing::Held => {
                        plan.hand_over.retain(|&other| other != resource);
                        plan.forget.push(resource);
                    }
                }
            }
            if !matches!(actions[..], [Action::Steal { .. }]) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = NodeId([0; 16]);
    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);
    const TOKEN: [u8; 16] = [9; 16];
    const EPOCH: u64 = 5;
    const OLD: Duration = Duration::from_hours(1);

    /// `count` resources, of which `held` are mine and those of `others` are theirs.
    fn scene(options: &BalanceOptions, count: u64, held: &[u64], others: &[(u64, NodeId)]) -> Scene<'static> {
        let options = Box::leak(Box::new(options.clone()));
        let mine = Owner { node: ME, token: [8; 16] };
        let owned = |owner| Lease { epoch: EPOCH, owner: Some(owner) };
        let theirs = others.iter().map(|&(resource, node)| (resource, owned(Owner { node, token: [7; 16] })));
        Scene {
            me: ME,
            nodes: others.iter().map(|&(_, node)| node).chain([ME]).collect(),
            expired: BTreeSet::new(),
            resources: (0..count).collect(),
            leases: held.iter().map(|&resource| (resource, owned(mine))).chain(theirs).collect(),
            requests: BTreeMap::new(),
            held: held.iter().map(|&resource| (resource, (mine, EPOCH))).collect(),
            token: TOKEN,
            options,
        }
    }

    fn plan(scene: &Scene<'_>) -> Plan {
        scene.plan(&mut fastrand::Rng::with_seed(1))
    }

    fn request(scene: &mut Scene<'_>, resource: u64, node: NodeId, age: Duration) {
        scene.requests.insert(resource, (Request { node, epoch: EPOCH }, age));
    }

    #[test]
    fn leases_of_resources_that_are_gone_are_removed_unless_another_works_on_them() {
        let mut scene = scene(&BalanceOptions::default(), 6, &[0, 1], &[(2, A), (3, A)]);
        let free = Lease { epoch: EPOCH, owner: None };
        scene.leases.insert(4, free);
        scene.resources = vec![0];
        let plan = plan(&scene);
        let gone: BTreeSet<_> = plan.gone.iter().copied().collect();
        assert_eq!(gone, BTreeSet::from([1, 4]), "{plan:?}");
        assert!(plan.lost.is_empty() && plan.release.is_empty() && plan.acquire.is_empty());
    }

    #[test]
    fn a_node_alone_takes_everything_at_once() {
        let options = BalanceOptions::default();
        let plan = plan(&scene(&options, 100, &[], &[]));
        assert_eq!(plan.acquire, (0..100).collect::<Vec<_>>());
        assert!(!plan.waits);
    }

    #[test]
    fn leases_of_nodes_without_a_row_or_a_role_are_free_and_those_of_dead_ones_too() {
        let options = BalanceOptions::default();
        let mut gone = scene(&options, 4, &[], &[(0, A), (1, A), (2, A), (3, A)]);
        gone.nodes.remove(&A);
        assert_eq!(plan(&gone).acquire, [0, 1, 2, 3]);
        gone.expired.insert(A);
        assert_eq!(plan(&gone).acquire, [0, 1, 2, 3]);
    }

    #[test]
    fn all_that_a_node_lacks_is_asked_for_in_one_round() {
        let options = BalanceOptions::default();
        let all: Vec<_> = (0..64).map(|resource| (resource, A)).collect();
        let plan = plan(&scene(&options, 64, &[], &all));
        assert_eq!((plan.ask.len(), plan.acquire.len(), plan.waits), (32, 0, true));
    }

    #[test]
    fn a_request_counts_to_the_one_who_asks_until_the_deadline_or_the_release() {
        let options = BalanceOptions::default();
        let mut asked = scene(&options, 2, &[], &[(0, A), (1, A)]);
        request(&mut asked, 1, ME, Duration::ZERO);
        assert_eq!(plan(&asked), Plan { waits: true, ..Plan::default() });
        request(&mut asked, 1, ME, options.handover);
        assert_eq!(plan(&asked).acquire, [1]);
        request(&mut asked, 1, ME, Duration::ZERO);
        asked.leases.insert(1, Lease { epoch: EPOCH, owner: None });
        assert_eq!(plan(&asked).acquire, [1]);
    }

    #[test]
    fn a_request_is_handed_over_unless_it_is_void() {
        let options = BalanceOptions::default();
        let mut asked = scene(&options, 2, &[0, 1], &[]);
        asked.nodes.insert(A);
        request(&mut asked, 1, A, Duration::ZERO);
        assert_eq!(plan(&asked), Plan { hand_over: vec![1], ..Plan::default() });

        // The one who asked is gone, has died, lets it wait for too long, or means an acquisition before this one.
        let mut gone = asked.clone();
        gone.nodes.remove(&A);
        let mut dead = gone.clone();
        dead.expired.insert(A);
        let mut slow = asked.clone();
        request(&mut slow, 1, A, OLD);
        let mut past = asked.clone();
        past.requests.insert(1, (Request { node: A, epoch: EPOCH - 1 }, Duration::ZERO));
        for void in [gone, dead, slow, past] {
            assert_eq!(plan(&void), Plan { forget: vec![1], ..Plan::default() }, "{void:?}");
        }
    }

    #[test]
    fn what_was_released_for_another_is_kept_for_it_for_a_while() {
        let options = BalanceOptions::default();
        let mut kept = scene(&options, 3, &[0], &[(1, A)]);
        kept.leases.insert(2, Lease { epoch: EPOCH, owner: None });
        request(&mut kept, 2, A, Duration::ZERO);
        assert_eq!(plan(&kept), Plan::default());
        request(&mut kept, 2, A, OLD);
        let taken = plan(&kept);
        assert_eq!((taken.acquire, taken.forget), (vec![2], vec![2]));
    }

    #[test]
    fn requests_that_are_not_needed_any_more_are_dropped() {
        let options = BalanceOptions::default();
        let mut asked = scene(&options, 4, &[0, 1], &[(2, A), (3, B)]);
        request(&mut asked, 2, ME, Duration::ZERO);
        assert_eq!(plan(&asked), Plan { forget: vec![2], ..Plan::default() });
    }

    #[test]
    fn what_is_owned_without_work_is_taken_anew_or_released() {
        let options = BalanceOptions::default();
        let mut orphan = scene(&options, 2, &[0, 1], &[]);
        orphan.held.remove(&1);
        assert_eq!(plan(&orphan), Plan { acquire: vec![1], ..Plan::default() });
        let max = BalanceOptions { leases_max: Some(1), ..options };
        orphan.options = &max;
        assert_eq!(plan(&orphan), Plan { release: vec![1], ..Plan::default() });
        // It is not even a resource any more.
        orphan.resources.pop();
        assert_eq!(plan(&orphan), Plan { gone: vec![1], ..Plan::default() });
    }

    #[test]
    fn an_acquisition_with_an_unknown_result_is_recognised() {
        let options = BalanceOptions::default();
        let mut unknown = scene(&options, 2, &[0], &[]);
        let signed = Owner { node: ME, token: TOKEN };
        unknown.leases.insert(1, Lease { epoch: 7, owner: Some(signed) });
        assert_eq!(plan(&unknown), Plan { acquired: vec![(1, 7)], ..Plan::default() });
    }

    #[test]
    fn what_was_lost_is_seen() {
        let options = BalanceOptions::default();
        let mut lost = scene(&options, 2, &[0, 1], &[]);
        lost.nodes.insert(A);
        let theirs = Owner { node: A, token: [7; 16] };
        lost.leases.insert(1, Lease { epoch: EPOCH + 1, owner: Some(theirs) });
        assert_eq!(plan(&lost), Plan { lost: vec![1], ..Plan::default() });
    }
}
