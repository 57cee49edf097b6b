//! A model of the end of a topology entry at a small size: shards come to their ends in any order, their transactions overlap, and
//! commits fail or have an unknown result.
//!
//! Whose turn it is and what counts as drained is decided by the functions that consumers run. The store is as optimistic as the real one:
//! a commit fails if a key of its conflict set has changed since it was read.

use super::{has_turn, is_drained};
use crate::{
    base::{
        encoding::Sequence,
        explore::{Model, explore},
    },
    state::keys::ShardId,
};

/// A mistake that a programmer could make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    /// A shard begins the successors without reading the checkpoints of others.
    OthersNotRead,
    /// All reads are snapshot reads. (That the turn is in the conflict set is enough here: each replacement clears it.)
    SnapshotReads,
    TurnNotInConflictSet,
    /// The checkpoint of the shard to which the turn passes is not in the conflict set.
    NextNotInConflictSet,
}

/// The size of the model.
struct Drain {
    shards: u8,
    mistake: Option<Mistake>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Checkpoint(u8),
    Turn,
}

/// A transaction that has read, and is not committed yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Flight {
    conflicts: Vec<Key>,
    /// Whether it saves the end of its shard.
    saves: bool,
    /// The shard to which it passes the turn.
    passes: Option<u8>,
    /// Whether it replaces all checkpoints by those of the successors.
    replaces: bool,
    /// Whether nothing of its conflict set has changed.
    is_valid: bool,
}

/// What the owner of a shard does.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Phase {
    Works,
    /// It is at the end of its rows, and about to read.
    AtEnd,
    Commits(Flight),
    /// It waits for other shards, until its next poll.
    Waits,
    /// Its shard was replaced.
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    /// The checkpoints of the entry; `None` once they are replaced.
    checkpoints: Vec<Option<Sequence>>,
    turn: Option<u8>,
    phases: Vec<Phase>,
    /// How often the successors were begun.
    replaced: u8,
}

fn end() -> Sequence {
    Sequence::MAX
}

fn id(shard: u8) -> ShardId {
    ShardId(shard.into())
}

impl Drain {
    /// The transaction of `shard`; `None` if its checkpoint was replaced.
    fn read(&self, state: &State, shard: u8) -> Option<Flight> {
        let stored = state.checkpoints[usize::from(shard)]?;
        let others = || {
            let others = state.checkpoints.iter().zip(0_u8..).filter(move |(_, other)| *other != shard);
            others.filter_map(|(checkpoint, other)| Some((other, (*checkpoint)?)))
        };
        let first = (0..self.shards).find(|shard| state.checkpoints[usize::from(*shard)].is_some());
        let mut conflicts = vec![Key::Checkpoint(shard)];
        if self.mistake != Some(Mistake::TurnNotInConflictSet) {
            conflicts.push(Key::Turn);
        }
        let has_turn = has_turn(id(shard), state.turn.map(id), first.map(id));
        let passes = others().find(|(other, checkpoint)| *other > shard && !is_drained(*checkpoint, end()));
        let passes = passes.map(|(other, _)| other).filter(|_| has_turn);
        if self.mistake != Some(Mistake::NextNotInConflictSet) {
            conflicts.extend(passes.map(Key::Checkpoint));
        }
        if self.mistake == Some(Mistake::SnapshotReads) {
            conflicts.clear();
        }
        let replaces = has_turn && passes.is_none() || self.mistake == Some(Mistake::OthersNotRead);
        Some(Flight {
            conflicts,
            saves: !replaces && !is_drained(stored, end()),
            passes,
            replaces,
            is_valid: true,
        })
    }

    /// Applies the commit of `shard` to the store.
    fn commit(&self, state: &mut State, shard: u8, flight: &Flight) {
        let mut changed = Vec::new();
        if flight.replaces {
            state.checkpoints.fill(None);
            state.turn = None;
            state.replaced += 1;
            changed.extend((0..self.shards).map(Key::Checkpoint).chain([Key::Turn]));
        } else {
            if flight.saves {
                state.checkpoints[usize::from(shard)] = Some(end());
                changed.push(Key::Checkpoint(shard));
            }
            if flight.passes.is_some() {
                state.turn = flight.passes;
                changed.push(Key::Turn);
            }
        }
        for phase in &mut state.phases {
            if let Phase::Commits(other) = phase {
                other.is_valid &= !other.conflicts.iter().any(|key| changed.contains(key));
            }
        }
    }
}

impl Model for Drain {
    type State = State;

    fn start(&self) -> State {
        State {
            checkpoints: vec![Some(Sequence::MIN); self.shards.into()],
            turn: None,
            phases: vec![Phase::Works; self.shards.into()],
            replaced: 0,
        }
    }

    fn steps(&self, state: &State) -> Vec<(String, Result<State, String>)> {
        let mut steps = Vec::new();
        for (shard, phase) in (0_u8..).zip(&state.phases) {
            let with = |phase: Phase| {
                let mut next = state.clone();
                next.phases[usize::from(shard)] = phase;
                next
            };
            let mut step = |name: &str, next: State| steps.push((format!("{shard} {name}"), Ok(next)));
            match phase {
                Phase::Works => step("comes to its end", with(Phase::AtEnd)),
                Phase::AtEnd => {
                    step("reads", with(self.read(state, shard).map_or(Phase::Ended, Phase::Commits)));
                }
                Phase::Commits(flight) => {
                    step("fails, or has another owner", with(Phase::AtEnd));
                    if flight.is_valid {
                        let after = if flight.replaces { Phase::Ended } else { Phase::Waits };
                        for (name, after) in [("commits", after), ("commits, unknown", Phase::AtEnd)] {
                            let mut next = with(after);
                            self.commit(&mut next, shard, flight);
                            step(name, next);
                        }
                    }
                }
                Phase::Waits => step("polls", with(Phase::AtEnd)),
                Phase::Ended => {}
            }
        }
        steps
    }

    fn check(&self, state: &State) -> Result<(), String> {
        if state.replaced > 0 && state.phases.contains(&Phase::Works) {
            return Err("the successors began before the entry was drained".to_owned());
        }
        if state.replaced > 1 {
            return Err("the successors began twice".to_owned());
        }
        if state.replaced > 0 && state.checkpoints.iter().any(Option::is_some) {
            return Err("a replaced checkpoint has come back".to_owned());
        }
        // A poll would help, but it comes late.
        if state.phases.iter().all(|phase| *phase == Phase::Waits) {
            return Err("all shards wait for each other".to_owned());
        }
        Ok(())
    }
}

#[test]
fn the_successors_begin_once_and_without_a_poll() {
    for shards in 1..=4 {
        let states = explore(Drain { shards, mistake: None });
        let states = states.unwrap_or_else(|(steps, reason)| panic!("{reason}: {steps:#?}"));
        println!("{shards} shards: {states} states");
    }
}

#[test]
fn mistakes_in_a_drain_are_found() {
    for (mistake, expected) in [
        (Mistake::OthersNotRead, "began before"),
        (Mistake::SnapshotReads, "wait for each other"),
        (Mistake::TurnNotInConflictSet, "wait for each other"),
        (Mistake::NextNotInConflictSet, "wait for each other"),
    ] {
        let found = explore(Drain { shards: 3, mistake: Some(mistake) });
        let (steps, reason) = found.expect_err("a mistake is found");
        println!("{mistake:?}: {reason}, after {steps:?}");
        assert!(reason.contains(expected), "{mistake:?}: {reason}");
    }
}
