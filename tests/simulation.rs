//! Simulated worlds: the guarantees of the bus hold in each of them, and the same seed makes the same world.
//!
//! `NOTIBUS_SEEDS` sets the number of worlds, `NOTIBUS_SEED` the first one. `docs/testing.md` explains how to examine a
//! world.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use notibus::simulation::{Options, Part, Witness, is_replayable, simulate};

/// The number in the environment variable `name`.
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("it is a number"))
}

#[test]
fn what_is_promised_holds_in_every_world() {
    let (seeds, from) = (number("NOTIBUS_SEEDS", 100), number("NOTIBUS_SEED", 0));
    let (next, met) = (AtomicU64::new(0), Mutex::new(BTreeSet::new()));
    let threads = thread::available_parallelism().unwrap().get();
    thread::scope(|scope| {
        let worlds = || loop {
            let seed = from + next.fetch_add(1, Ordering::Relaxed);
            if seed >= from + seeds {
                break;
            }
            let outcome = simulate(seed, &Options::default());
            met.lock().unwrap().extend(outcome.witnesses.into_keys());
            let replay = format!(
                "NOTIBUS_SEEDS=1 NOTIBUS_SEED={seed} cargo test --release --features simulation --test simulation"
            );
            assert!(outcome.failure.is_none(), "seed {seed}: {}\nreplay: {replay}", outcome.failure.unwrap());
        };
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(worlds)).collect();
        // A failing one prints the reason by itself.
        for worlds in running {
            worlds.join().expect("a world has failed");
        }
    });
    let met = met.into_inner().unwrap();
    let missed: Vec<_> = Witness::ALL.iter().filter(|witness| !met.contains(witness)).collect();
    println!("{seeds} worlds have not met {missed:?}");
    let due: Vec<_> = missed.iter().filter(|witness| witness.is_due(seeds)).collect();
    assert!(due.is_empty(), "{seeds} worlds have not met {due:?}");
}

#[test]
fn the_same_seed_makes_the_same_world() {
    assert!(
        is_replayable(),
        "tokio was built without `--cfg tokio_unstable`: RUSTFLAGS replaces the flags of .cargo/config.toml, add it there"
    );
    let options = Options { trace: true, ..Options::default() };
    for seed in [0, 3, 16, 24, 105, 1_000_003] {
        let (first, second) = (simulate(seed, &options), simulate(seed, &options));
        let (one, other) = (first.trace.as_deref().unwrap(), second.trace.as_deref().unwrap());
        let differs = one.lines().zip(other.lines()).enumerate().find(|(_, (one, other))| one != other);
        assert!(differs.is_none(), "seed {seed} differs from line {differs:?} on");
        assert_eq!(first, second, "seed {seed}");
        assert!(one.lines().count() > 100, "a world is more than this");
    }
}

/// Shrinks a failing world.
#[test]
fn a_world_can_do_without_any_of_its_parts() {
    for without in Part::all() {
        let outcome = simulate(11, &Options { without: vec![without], ..Options::default() });
        assert_eq!(outcome.failure, None, "without {without}");
        let Part::Fault(fault) = without else { continue };
        assert!(!outcome.faults.contains_key(&fault), "{fault}");
    }
}

#[test]
fn a_world_without_faults_has_none() {
    let outcome = simulate(7, &Options { intensity: 0.0, nodes: Some(2), ..Options::default() });
    assert_eq!(outcome.failure, None);
    assert!(outcome.faults.is_empty(), "{:?}", outcome.faults);
}
