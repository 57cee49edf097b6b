//! The test of the simulation: it finds each of the deliberate bugs, within a number of worlds.
//!
//! `NOTIBUS_BUG` names one to try alone.

use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use notibus::{
    Bug,
    simulation::{Options, simulate},
};

/// A bug must be found within this many worlds.
const SEEDS_MAX: u64 = 4_000;

/// Bugs that worlds meet too rarely. Tests by name catch them, which docs/testing.md names.
const RARE: &[Bug] = &[Bug::OwedCountedBeforeListed];

/// The first seed that finds `bug`, and its failure.
fn hunt(bug: Bug) -> Option<(u64, String)> {
    let options = Options { bug: Some(bug), ..Options::default() };
    (0..SEEDS_MAX).find_map(|seed| Some((seed, simulate(seed, &options).failure?.to_string())))
}

#[test]
fn the_simulation_finds_every_bug() {
    let only = std::env::var("NOTIBUS_BUG").ok();
    let is_asked_for = |bug: &Bug| match &only {
        Some(only) => format!("{bug:?}") == *only,
        None => !RARE.contains(bug),
    };
    let bugs: Vec<_> = Bug::ALL.iter().copied().filter(is_asked_for).collect();
    assert!(!bugs.is_empty(), "there is no bug of this name: {:?}", Bug::ALL);
    let (next, found) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&bug) = bugs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let first = hunt(bug);
                    found.lock().expect("nobody panics with it").insert(bug, first);
                }
            });
        }
    });
    let found = found.into_inner().expect("nobody panics with it");
    for (bug, first) in &found {
        match first {
            Some((seed, failure)) => {
                println!("| `{bug:?}` | {} | {} | {failure} |", bug.explanation(), seed + 1);
            }
            None => println!("| `{bug:?}` | {} | not found |", bug.explanation()),
        }
    }
    let missed: Vec<_> = found.iter().filter(|(_, first)| first.is_none()).map(|(bug, _)| bug).collect();
    assert!(missed.is_empty(), "{SEEDS_MAX} worlds have not found {missed:?}");
}
