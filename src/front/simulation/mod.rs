//! Deterministic simulation: whole buses in one thread, with every fault of a distributed system.
//!
//! A [`simulate`]d world is made from a seed: a store, several processes with all roles, and faults. Transactions
//! fail, with and without having happened; watches are lost; processes crash, pause and come back; clocks run apart.
//! An oracle judges every commit when it happens. The same seed makes the same world, step by step, so that every
//! failure can be replayed.
//!
//! How it fits together:
//!
//! ```text
//!            seed ──► plan (sizes, options, mix of faults)
//!                       │
//!  process 0 ─┐         ▼
//!  process 1 ─┼─ simulated store ──► embedded engine ──► oracle
//!  process 2 ─┘  delays, faults      one commit after      judges each commit,
//!  a runtime     commits in flight   the other             and the end
//!  and a clock each
//! ```
//!
//! `docs/testing.md` says what it promises, how to replay a seed, and what it does not cover.
//!
//! It is not for measuring: time is not real here.

mod actors;
mod app;
mod commits;
mod draw;
mod event;
mod findings;
mod flight;
mod guarantee;
mod issuer;
mod keyspace;
mod link;
mod machine;
mod options;
mod oracle;
mod part;
mod process;
mod relocation;
mod restore;
mod shared;
mod store;
mod time;
mod trace;
mod witness;
mod world;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

pub use guarantee::{Broken, Guarantee};
pub use options::Options;
pub use part::{Actor, Part};
pub use witness::{Fault, Witness};

use self::{draw::WorldPlan, findings::Findings, shared::Shared, trace::Listener, world::World};

/// The result of a world.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// The first breach of a promise; `None` if there was none.
    pub failure: Option<Broken>,
    /// The trace, line by line, if it was asked for.
    pub trace: Option<String>,
    /// The faults that struck, and how often.
    pub faults: BTreeMap<Fault, u64>,
    /// The interesting states that it has met, and how often.
    pub witnesses: BTreeMap<Witness, u64>,
    /// How much time has passed in the world.
    pub elapsed: Duration,
    /// The rows of the store at the end of the faults, if they were asked for.
    pub rows: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Whether the same seed makes the same world in this build: tokio must have been built with `--cfg tokio_unstable`, as it is in
/// this workspace.
pub fn is_replayable() -> bool {
    process::IS_REPLAYABLE
}

/// Makes the world of `seed`, and runs it to its end. It blocks the thread, and must not be called within a runtime.
pub fn simulate(seed: u64, options: &Options) -> Outcome {
    run(
        seed,
        WorldPlan::draw(seed, options),
        options,
        Findings::new(options.trace),
    )
}

/// Runs the world of `plan`, which was drawn from `seed`, to its end.
fn run(seed: u64, plan: WorldPlan, options: &Options, findings: Findings) -> Outcome {
    let mut random = fastrand::Rng::with_seed(seed ^ 0x6e6f_7469_6275_7321);
    let shared = Shared::new(plan, random.fork(), findings);
    shared.keep_rows(options.rows);
    shared.note(|| format!("seed {seed}: {:#?}", shared.plan));
    let listener = Listener::new({
        let shared = Arc::clone(&shared);
        move |level, message, fields| shared.hear(level, message, fields)
    });
    tracing::subscriber::with_default(listener, || World::new(&shared, random).run());
    outcome(&shared, seed)
}

/// What the world of `seed` has found.
fn outcome(shared: &Shared, seed: u64) -> Outcome {
    Outcome {
        seed,
        failure: shared.failure(),
        trace: shared.take_trace(),
        faults: shared.faults(),
        witnesses: shared.witnesses(),
        elapsed: shared.time.now(),
        rows: shared.take_rows(),
    }
}
