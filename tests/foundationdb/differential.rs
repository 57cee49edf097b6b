//! The embedded store against the cluster: both run the same random interleavings, and must give the same results.
//!
//! It compares [`Trace`]s: every read, the result of every commit, and all rows at the end, with the numbers of commits in place of their
//! stamps. The generator and the executor are those of `tests/interleavings`, where the embedded store is checked against a model. A
//! difference is shrunk, each candidate below its own prefix, and printed.
//!
//! Some things cannot be compared and are left out. On a cluster versions advance by time, so no step asks for a version that no
//! transaction has read (whether that gives 1009 is up to the cluster), and each commit is followed by another, because whether a read
//! version can equal the version of a stamp differs. The run waits until a new cluster refuses reads at its first versions, because some
//! steps need a read version that is too old. A watched key is read first, because timing decides whether a watch counts as a read if its
//! own transaction writes the key right after it. The errors of a cluster that is slow or recovers are allowed: above all 1007, for a
//! transaction older than 5 s. An interleaving with such an error is compared up to the error, and run again. If each run has such an
//! error, the interleaving is counted, and reported at the end.
//!
//! `NOTIBUS_DIFFERENTIAL` sets how many interleavings are run, `NOTIBUS_SEED` replays a run.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::try_join_all;
use notibus::store::Store;
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

use crate::{
    common::until,
    execute::execute,
    fixture,
    steps::{self, Step},
    trace::{Event, Trace},
};

/// The default number of interleavings.
const INTERLEAVINGS: usize = 3_000;

/// The number of interleavings that run at once. Each mostly waits for the cluster.
const AT_ONCE: usize = 48;

/// The maximum number of attempts to shrink an interleaving.
const SHRINKS_MAX: usize = 500;

/// A long run prints its progress each time that it has compared this many interleavings.
const PROGRESS: usize = 10_000;

/// The maximum number of runs of an interleaving for which the cluster is too slow.
const TRIES: usize = 10;

/// A cluster at this version refuses reads at its first versions, because it keeps only the last 5 million.
const OLD: u64 = 10_000_000;

/// Reads a number from the environment.
fn setting<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

/// Runs many interleavings on both stores.
pub(crate) async fn the_embedded_store_does_what_a_cluster_does() {
    let seed: u64 = setting("NOTIBUS_SEED").unwrap_or_else(|| fastrand::u64(..));
    let count = setting("NOTIBUS_DIFFERENTIAL").unwrap_or(INTERLEAVINGS);
    println!("{count} interleavings, NOTIBUS_SEED={seed}");
    let cluster = fixture::open(fixture::shared()).await;
    until("the cluster to be old enough", async || cluster.begin().read_version().await.unwrap() > OLD).await;
    let compared = AtomicUsize::new(0);
    let workers = (0..AT_ONCE).map(|worker| {
        let count = (count + worker) / AT_ONCE;
        compare_many(&cluster, seed, worker as u64, count, &compared)
    });
    match try_join_all(workers).await {
        Ok(whole) => {
            let whole: usize = whole.into_iter().sum();
            println!(
                "{whole} of {count} interleavings agree to their end, the others up to where the cluster was slow"
            );
            assert!(whole > 0, "the cluster was too slow for each of them");
        }
        Err(difference) => panic!("NOTIBUS_SEED={seed}: {difference}"),
    }
}

/// Compares `count` random interleavings one by one, and adds them to `compared`. Returns how many were compared to their end.
async fn compare_many(
    cluster: &Store,
    seed: u64,
    worker: u64,
    count: usize,
    compared: &AtomicUsize,
) -> Result<usize, String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..16].copy_from_slice(&worker.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let interleavings = steps::interleaving();
    let mut whole = 0;
    for _ in 0..count {
        let tree = interleavings.new_tree(&mut runner).expect("nothing is filtered out");
        match compare(cluster, &tree.current()).await {
            Ok(is_whole) => whole += usize::from(is_whole),
            Err(difference) => return Err(shrink(cluster, tree, difference).await),
        }
        let all = compared.fetch_add(1, Ordering::Relaxed) + 1;
        if all.is_multiple_of(PROGRESS) {
            println!("{all} compared");
        }
    }
    Ok(whole)
}

/// Shrinks an interleaving that differs, and describes it.
async fn shrink(cluster: &Store, mut tree: impl ValueTree<Value = Vec<Step>>, difference: String) -> String {
    let mut smallest = (tree.current(), difference);
    let mut goes_on = tree.simplify();
    for _ in 0..SHRINKS_MAX {
        if !goes_on {
            break;
        }
        let steps = tree.current();
        goes_on = match compare(cluster, &steps).await {
            Ok(_) => tree.complicate(),
            Err(difference) => {
                smallest = (steps, difference);
                tree.simplify()
            }
        };
    }
    format!("{}\nsmallest interleaving: {:#?}", smallest.1, smallest.0)
}

/// Runs `steps` on both stores. Fails with the first difference; returns whether they were compared to their end.
async fn compare(cluster: &Store, steps: &[Step]) -> Result<bool, String> {
    let embedded = execute(&Store::memory(), b"", steps).await;
    for _ in 0..TRIES {
        let found = execute(cluster, &fixture::prefix("differential"), steps).await;
        let disturbed = first_disturbed(&found);
        differ(steps, &embedded, &found, disturbed)?;
        if disturbed.is_none() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the first step that failed because the cluster was slow or recovered: too old, an unknown result, a process behind.
fn first_disturbed(trace: &Trace) -> Option<usize> {
    trace.events.iter().position(|event| {
        let code = match event {
            Event::Silent => None,
            Event::Value(result) => result.as_ref().err(),
            Event::Rows(result) => result.as_ref().err(),
            Event::Commit(result) => result.as_ref().err(),
        };
        code.is_some_and(|code| [1007, 1009, 1021, 1037, 1039].contains(code))
    })
}

/// Fails with the first difference between two traces, up to the `end`th step if there is an end.
fn differ(steps: &[Step], embedded: &Trace, cluster: &Trace, end: Option<usize>) -> Result<(), String> {
    let both = embedded.events.iter().zip(&cluster.events).enumerate();
    let mut both = both.take(end.unwrap_or(usize::MAX));
    if let Some((n, (embedded, cluster))) = both.find(|(_, (embedded, cluster))| embedded != cluster) {
        return Err(format!("step {n}, {:?}: embedded {embedded:?}, on the cluster {cluster:?}", steps[n]));
    }
    if end.is_some() || embedded.rows == cluster.rows {
        return Ok(());
    }
    Err(format!("in the end: embedded {:?}, on the cluster {:?}", embedded.rows, cluster.rows))
}
