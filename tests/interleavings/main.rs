//! Random interleavings of open transactions: the store against a deliberately naive model of FoundationDB.
//!
//! An interleaving is a list of [`steps::Step`]s of a few transactions over a tiny key space. [`execute::execute`] runs it
//! on any [`Store`] and returns all observations as a [`trace::Trace`]; [`model::predict`] returns the expected ones.
//! The two share nothing but the steps and the type of the trace. A failure is shrunk, and printed with its seed.
//!
//! `NOTIBUS_INTERLEAVINGS` sets their number, `NOTIBUS_SEED` replays a run.

mod execute;
mod model;
mod moved;
mod steps;
mod trace;

use notibus::store::Store;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use crate::{steps::Step, trace::Trace};

/// The default number of interleavings.
const INTERLEAVINGS: u32 = 4_000;

/// The number of interleavings on a folder, where every commit waits for the disk.
const INTERLEAVINGS_DURABLE: u32 = 40;

/// Returns a number from the environment.
fn setting<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

/// Runs `check` on `cases` random interleavings.
fn for_interleavings(cases: u32, check: impl Fn(&[Step]) -> Result<(), TestCaseError>) {
    let seed: u64 = setting("NOTIBUS_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("{cases} interleavings, NOTIBUS_SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let result = TestRunner::new_with_rng(config, rng).run(&steps::interleaving(), |steps| check(&steps));
    match result {
        Ok(()) => {}
        Err(TestError::Fail(reason, steps)) => {
            panic!("NOTIBUS_SEED={seed}: {reason}\nsmallest interleaving: {steps:#?}");
        }
        Err(error) => panic!("NOTIBUS_SEED={seed}: {error}"),
    }
}

/// Fails at the first difference between two traces.
fn compare(steps: &[Step], expected: &Trace, found: &Trace) -> Result<(), TestCaseError> {
    for (n, step) in steps.iter().enumerate() {
        if expected.events[n] != found.events[n] {
            return Err(TestCaseError::fail(format!(
                "step {n}, {step:?}: expected {:?}, found {:?}",
                expected.events[n], found.events[n]
            )));
        }
    }
    if expected.rows != found.rows {
        return Err(TestCaseError::fail(format!(
            "in the end: expected {:?}, found {:?}",
            expected.rows, found.rows
        )));
    }
    Ok(())
}

/// Makes a runtime; with paused time no transaction becomes too old.
fn runtime(paused: bool) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(paused)
        .build()
        .expect("a runtime can be built")
}

#[test]
fn the_store_in_memory_does_what_the_model_does() {
    let runtime = runtime(true);
    let cases = setting("NOTIBUS_INTERLEAVINGS").unwrap_or(INTERLEAVINGS);
    for_interleavings(cases, |steps| {
        let found = runtime.block_on(async { execute::execute(&Store::memory(), b"", steps).await });
        compare(steps, &model::predict(steps), &found)
    });
}

#[test]
fn the_store_in_a_folder_does_what_the_model_does() {
    let runtime = runtime(false);
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let store = Store::open_dir(folder.path()).expect("an empty folder can be opened");
    for_interleavings(INTERLEAVINGS_DURABLE, |steps| {
        let prefix = fastrand::u64(..).to_be_bytes();
        let prefix = [b"interleavings/", &prefix[..]].concat();
        let found = runtime.block_on(execute::execute(&store, &prefix, steps));
        compare(steps, &model::predict(steps), &found)
    });
}
