//! The test of the simulation: it finds each of the deliberate bugs, within a number of worlds.
//!
//! `NOTIBUS_BUG` names one to try alone.

use notibus::{
    Bug,
    simulation::{Options, simulate},
};

/// So many worlds must be enough.
const SEEDS_MAX: u64 = 1_000;

/// The first seed that finds `bug`, and what it finds.
fn hunt(bug: Bug) -> Option<(u64, String)> {
    let options = Options { bug: Some(bug), ..Options::default() };
    (0..SEEDS_MAX).find_map(|seed| Some((seed, simulate(seed, &options).failure?)))
}

#[test]
fn the_simulation_finds_every_bug() {
    let only = std::env::var("NOTIBUS_BUG").ok();
    let mut missed = Vec::new();
    for &bug in Bug::ALL.iter().filter(|bug| only.as_ref().is_none_or(|only| format!("{bug:?}") == *only)) {
        match hunt(bug) {
            Some((seed, failure)) => {
                println!("| `{bug:?}` | {} | {} | {failure} |", bug.explanation(), seed + 1);
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "{SEEDS_MAX} worlds have not found {missed:?}");
}
