//! A model of leases with membership and assignment at a small size, with everything that can happen between two
//! steps: rounds whose commit is late, or whose result is unknown; nodes that crash during a commit and come back
//! under their id; nodes that are removed although they live.
//!
//! A round is [`View::plan`], the function that nodes run. The store is as optimistic as the real one: a commit fails
//! if a lease that it claims, or the members, have changed since they were read.

use std::{collections::BTreeMap, time::Duration};

use super::plan::{OwnState, View};
use crate::{
    base::explore::{Model, explore},
    state::keys::{Lease, NodeId, Owner},
};

/// How long an owner has to end its work.
const HANDOVER: Duration = Duration::from_secs(1);

/// A mistake that a programmer could make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// An acquisition does not raise the epoch, and has the token of the one before.
    AcquisitionsLookAlike,
    /// The leases that a round claims are not in its conflict set.
    ClaimsNotInConflictSet,
    /// A removed node counts as a member.
    RemovedAreMembers,
}

/// The size of the model, and the faults that can happen.
struct Membership {
    nodes: u8,
    resources: u64,
    commits: u8,
    /// How many crashes and removals happen.
    mishaps: u8,
    /// The mistake in the model, if any.
    mistake: Option<Mistake>,
}

/// A write of a lease: the resource, its new epoch, and the owner with the number of its acquisition, if it gets one.
type Write = (u64, u64, Option<(u8, u8)>);

/// A commit of a round.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Flight {
    /// The written leases.
    writes: Vec<Write>,
    /// Whether the members are in its conflict set.
    is_claim: bool,
    /// Whether nothing of its conflict set has changed.
    is_valid: bool,
}

/// A transaction of the work under a lease.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct WorkTransaction {
    /// The node, and its acquisition.
    node: (u8, u8),
    resource: u64,
    /// Whether its lease has not changed since it was read.
    is_valid: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Node {
    /// Whether its process runs.
    lives: bool,
    life: u8,
    /// The number of its next acquisition.
    number: u8,
    /// The held leases: the epoch and the number of the acquisition of each.
    held: BTreeMap<u64, (u64, u8)>,
    /// The epochs of the leases that it waits for.
    awaited: BTreeMap<u64, u64>,
    /// Its commit under way, if any.
    flight: Option<Flight>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    /// The leases: the epoch, and the owner with the number of its acquisition.
    leases: BTreeMap<u64, (u64, Option<(u8, u8)>)>,
    members: Vec<bool>,
    nodes: Vec<Node>,
    /// Commits of processes that have crashed.
    orphans: Vec<Flight>,
    work: Vec<WorkTransaction>,
    commits: u8,
    /// How many crashes and removals are left.
    mishaps: u8,
    /// Whether the epoch of a lease has gone back.
    has_gone_back: bool,
}

impl State {
    /// Invalidates the transactions that have `resource`, or the members, in their conflict sets.
    fn changed(&mut self, resource: Option<u64>, mistake: Option<Mistake>) {
        let flights = self.nodes.iter_mut().filter_map(|node| node.flight.as_mut()).chain(&mut self.orphans);
        let is_checked = mistake != Some(Mistake::ClaimsNotInConflictSet);
        for flight in flights.filter(|_| is_checked) {
            flight.is_valid &= match resource {
                Some(resource) => flight.writes.iter().all(|(of, ..)| *of != resource),
                None => !flight.is_claim,
            };
        }
        for work in self.work.iter_mut().filter(|work| Some(work.resource) == resource) {
            work.is_valid = false;
        }
    }

    /// Applies `flight` to the store. Returns whether it was committed.
    fn commit(&mut self, flight: &Flight, mistake: Option<Mistake>) -> bool {
        if !flight.is_valid || self.commits == 0 {
            return false;
        }
        self.commits -= 1;
        for (resource, epoch, owner) in &flight.writes {
            let before = self.leases.get(resource);
            let is_same = before == Some(&(*epoch, *owner));
            self.has_gone_back |= before.is_some_and(|(before, _)| before > epoch);
            self.leases.insert(*resource, (*epoch, *owner));
            if !is_same {
                self.changed(Some(*resource), mistake);
            }
        }
        true
    }
}

/// The id of node number `node`.
fn id(node: u8) -> NodeId {
    NodeId([node; 16])
}

/// The stored owner of an acquisition.
fn owner((node, number): (u8, u8)) -> Owner {
    Owner { node: id(node), token: [number; 16] }
}

impl Membership {
    /// The read, decision and write of a round of `node`; `is_late` if it has waited for longer than the handover.
    fn round(&self, state: &State, node: u8, is_late: bool) -> State {
        let mut next = state.clone();
        let me = &state.nodes[usize::from(node)];
        if !state.members[usize::from(node)] {
            // It has fallen out: it gives everything up, and joins again.
            next.nodes[usize::from(node)].held.clear();
            next.nodes[usize::from(node)].awaited.clear();
            next.members[usize::from(node)] = true;
            next.changed(None, self.mistake);
            return next;
        }
        let leases = state
            .leases
            .iter()
            .map(|(resource, (epoch, of))| (*resource, Lease { epoch: *epoch, owner: of.map(owner) }));
        let awaited =
            me.awaited.iter().map(|(resource, epoch)| (*resource, (*epoch, Duration::ZERO))).collect();
        let is_member =
            |node: &u8| state.members[usize::from(*node)] || self.mistake == Some(Mistake::RemovedAreMembers);
        let members = (0..self.nodes).filter(is_member);
        let held =
            me.held.iter().map(|(resource, (epoch, number))| (*resource, (owner((node, *number)), *epoch)));
        let view = View {
            me: id(node),
            members: members.map(|node| (id(node), u32::MAX)).collect(),
            resources: (0..self.resources).collect(),
            leases: leases.collect(),
            own: OwnState {
                held: held.collect(),
                token: [me.number; 16],
                awaited: &awaited,
                paused: BTreeMap::new(),
                now: if is_late { HANDOVER } else { Duration::ZERO },
                handover: HANDOVER,
            },
        };
        let plan = view.plan();
        let epoch_of = |resource: &u64| state.leases.get(resource).map_or(0, |(epoch, _)| *epoch);
        let raised = u64::from(self.mistake != Some(Mistake::AcquisitionsLookAlike));
        let me = &mut next.nodes[usize::from(node)];
        me.awaited = plan.awaits.iter().copied().collect();
        for resource in plan.lost.iter().chain(&plan.hand_over) {
            me.held.remove(resource);
        }
        me.held.extend(plan.acquired.iter().map(|(resource, epoch)| (*resource, (*epoch, me.number))));
        let taken = plan.acquire.iter().chain(&plan.renew);
        let taken = taken.map(|resource| (*resource, epoch_of(resource) + raised, Some((node, me.number))));
        let given = plan.release.iter().chain(&plan.hand_over);
        let given = given.map(|resource| (*resource, epoch_of(resource), None));
        let writes: Vec<_> = taken.chain(given).collect();
        if !plan.acquired.is_empty() && writes.is_empty() {
            self.end(me);
        }
        if !writes.is_empty() {
            me.flight = Some(Flight { writes, is_claim: true, is_valid: true });
        }
        next
    }

    /// Ends a round of `node`: the next acquisition has another number.
    fn end(&self, node: &mut Node) {
        if self.mistake != Some(Mistake::AcquisitionsLookAlike) {
            node.number += 1;
        }
    }

    /// The commit of `node` reaches the store; `is_known` if the node learns the result.
    fn land(&self, state: &State, node: u8, is_known: bool) -> State {
        let mut next = state.clone();
        let flight = next.nodes[usize::from(node)].flight.take().expect("it is on its way");
        let is_committed = next.commit(&flight, self.mistake);
        let me = &mut next.nodes[usize::from(node)];
        if is_known && is_committed {
            let taken = flight.writes.iter().filter(|(.., owner)| owner.is_some());
            let number = me.number;
            me.held.extend(taken.map(|(resource, epoch, _)| (*resource, (*epoch, number))));
            self.end(me);
        }
        next
    }

    /// The state after the faults have ended and all nodes have taken turns.
    fn settled(&self, state: &State) -> State {
        let mut state = State { commits: u8::MAX, ..state.clone() };
        for orphan in std::mem::take(&mut state.orphans) {
            state.commit(&orphan, self.mistake);
        }
        for node in 0..self.nodes {
            if !state.nodes[usize::from(node)].lives && state.members[usize::from(node)] {
                state.members[usize::from(node)] = false;
                state.changed(None, self.mistake);
            }
        }
        for _ in 0..8 {
            for node in 0..self.nodes {
                if state.nodes[usize::from(node)].lives {
                    if state.nodes[usize::from(node)].flight.is_some() {
                        state = self.land(&state, node, true);
                    }
                    state = self.round(&state, node, true);
                }
            }
        }
        state
    }
}

impl Model for Membership {
    type State = State;

    fn start(&self) -> State {
        let node = Node {
            lives: true,
            life: 0,
            number: 0,
            held: BTreeMap::new(),
            awaited: BTreeMap::new(),
            flight: None,
        };
        State {
            leases: BTreeMap::new(),
            members: vec![true; self.nodes.into()],
            nodes: vec![node; self.nodes.into()],
            orphans: Vec::new(),
            work: Vec::new(),
            commits: self.commits,
            mishaps: self.mishaps,
            has_gone_back: false,
        }
    }

    fn steps(&self, state: &State) -> Vec<(String, Result<State, String>)> {
        let mut steps = Vec::new();
        let mut step = |name: String, next: State| steps.push((name, Ok(next)));
        for (place, node) in state.nodes.iter().enumerate() {
            let number = place as u8;
            if node.lives && node.flight.is_none() && state.commits > 0 {
                step(format!("{place} looks"), self.round(state, number, false));
                if !node.awaited.is_empty() {
                    step(format!("{place} looks late"), self.round(state, number, true));
                }
            }
            if node.flight.is_some() {
                step(format!("the commit of {place} comes"), self.land(state, number, true));
                step(format!("the commit of {place} comes, unknown"), self.land(state, number, false));
            }
            for (resource, (epoch, acquisition)) in node.held.iter().filter(|_| node.lives) {
                let is_held = state.leases.get(resource) == Some(&(*epoch, Some((number, *acquisition))));
                let work = WorkTransaction { node: (number, node.life), resource: *resource, is_valid: true };
                if is_held && state.work.len() < 2 && !state.work.contains(&work) {
                    let mut next = state.clone();
                    next.work.push(work);
                    next.work.sort();
                    step(format!("{place} works on {resource}"), next);
                }
            }
            if state.mishaps > 0 && node.lives {
                let mut next = state.clone();
                let crashed = &mut next.nodes[place];
                next.orphans.extend(crashed.flight.take());
                next.orphans.sort();
                (crashed.lives, crashed.life) = (false, crashed.life + 1);
                crashed.held.clear();
                crashed.awaited.clear();
                if self.mistake != Some(Mistake::AcquisitionsLookAlike) {
                    crashed.number += 1;
                }
                next.mishaps -= 1;
                step(format!("{place} crashes"), next);
            }
            if !node.lives {
                let mut next = state.clone();
                next.nodes[place].lives = true;
                next.members[place] = true;
                next.changed(None, self.mistake);
                step(format!("{place} comes back"), next);
            }
            if state.mishaps > 0 && state.members[place] {
                let mut next = state.clone();
                next.members[place] = false;
                next.mishaps -= 1;
                next.changed(None, self.mistake);
                step(format!("{place} is removed"), next);
            }
        }
        for place in 0..state.orphans.len() {
            let mut next = state.clone();
            let orphan = next.orphans.remove(place);
            next.commit(&orphan, self.mistake);
            step("a late commit comes".to_owned(), next);
        }
        for place in 0..state.work.len() {
            let mut next = state.clone();
            next.work.remove(place);
            step("work ends".to_owned(), next);
        }
        steps
    }

    fn check(&self, state: &State) -> Result<(), String> {
        for (place, one) in state.work.iter().enumerate().filter(|(_, work)| work.is_valid) {
            let is_other = |other: &&WorkTransaction| {
                other.is_valid && other.resource == one.resource && other.node != one.node
            };
            if let Some(other) = state.work[place + 1..].iter().find(is_other) {
                return Err(format!("{one:?} and {other:?} would both be committed"));
            }
        }
        if state.has_gone_back {
            return Err("an epoch has gone back".to_owned());
        }
        let settled = self.settled(state);
        if !settled.nodes.iter().any(|node| node.lives) {
            return Ok(());
        }
        let mut owned = vec![0_u64; self.nodes.into()];
        for resource in 0..self.resources {
            let lease = settled.leases.get(&resource).copied().unwrap_or_default();
            let (epoch, Some((node, number))) = lease else {
                return Err(format!("nobody comes to own {resource}"));
            };
            let holder = &settled.nodes[usize::from(node)];
            if !holder.lives || holder.held.get(&resource) != Some(&(epoch, number)) {
                return Err(format!("{node} comes to own {resource}, and does not work on it"));
            }
            owned[usize::from(node)] += 1;
        }
        let living = settled.nodes.iter().zip(&owned).filter(|(node, _)| node.lives).map(|(_, owned)| *owned);
        let (least, most) = (living.clone().min().unwrap_or(0), living.max().unwrap_or(0));
        if most > least + 1 { Err(format!("the shares are {owned:?}")) } else { Ok(()) }
    }
}

/// The size that every build explores.
const SMALL: Membership = Membership { nodes: 2, resources: 2, commits: 4, mishaps: 1, mistake: None };

#[test]
fn nobody_works_beside_another_and_everything_is_owned_in_the_end() {
    let states = explore(SMALL).unwrap_or_else(|(steps, reason)| panic!("{reason}: {steps:#?}"));
    println!("{states} states");
    assert!(states > 1_000, "{states} states are few");
}

#[test]
fn mistakes_are_found() {
    for (mistake, expected) in [
        (Mistake::AcquisitionsLookAlike, "would both be committed"),
        (Mistake::ClaimsNotInConflictSet, "gone back"),
        (Mistake::RemovedAreMembers, "comes to own"),
    ] {
        let found = explore(Membership { mistake: Some(mistake), ..SMALL });
        let (steps, reason) = found.expect_err("a mistake is found");
        println!("{mistake:?}: {reason}, after {steps:?}");
        assert!(reason.contains(expected), "{mistake:?}: {reason}");
    }
}
