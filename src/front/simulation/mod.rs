//! Deterministic simulation: whole buses in one thread, in which everything goes wrong that can.
//!
//! A [`simulate`]d world is made from a seed: a store, several processes with all roles, and everything that a distributed system
//! does to them: transactions that fail, with and without having happened; watches that are lost; processes that crash, pause
//! and come back; clocks that run apart. An oracle judges every commit when it happens. The same seed makes the same world, step
//! by step, so that whatever is found can be looked at again.
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
//! What is promised by it, how to replay a seed, and what it does not cover is in `docs/testing.md`.
//!
//! It is not for measuring: time is not real here.

mod actors;
mod app;
mod decoders;
mod draw;
mod guarantee;
mod machine;
mod oracle;
mod part;
mod process;
mod shared;
mod store;
mod time;
mod trace;
mod witness;
mod world;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

pub use decoders::Decoder;
pub use guarantee::{Broken, Guarantee};
pub use part::{Actor, Part};
pub use witness::{Fault, Witness};

use self::{
    draw::Plan,
    shared::Shared,
    trace::{Listener, Trace},
    world::World,
};

/// What is asked of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// How many nodes there are, besides a producer and, in most worlds, an operator. Default: 2 to 4, as the seed draws.
    pub nodes: Option<usize>,
    /// For how long things go wrong, in the time of the world. Default: 4 to 15 s, as the seed draws.
    pub chaos: Option<Duration>,
    /// By how much more often things go wrong than the seed draws; 0 for never. Default: 1.
    pub intensity: f64,
    /// Whether to keep the trace of what happens. Default: false.
    pub trace: bool,
    /// What of the world its seed drew is left out, to see what it takes for it to fail. Default: nothing.
    pub without: Vec<Part>,
    /// Whether to keep what stands in the store when the time of faults is over. Default: false.
    pub rows: bool,
    /// A deliberate bug in the code that runs. Default: none.
    #[cfg(feature = "mutations")]
    pub bug: Option<crate::base::bugs::Bug>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: None,
            chaos: None,
            intensity: 1.0,
            trace: false,
            without: Vec::new(),
            rows: false,
            #[cfg(feature = "mutations")]
            bug: None,
        }
    }
}

/// What has come of a world.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// The first thing that was not as it should be; `None` if everything was.
    pub failure: Option<Broken>,
    /// What happened, line by line, if that was asked for.
    pub trace: Option<String>,
    /// What went wrong in it, and how often.
    pub faults: BTreeMap<Fault, u64>,
    /// Which interesting states it has met, and how often.
    pub witnesses: BTreeMap<Witness, u64>,
    /// How much time has passed in it.
    pub elapsed: Duration,
    /// What stood in the store when the time of faults was over, if that was asked for.
    pub rows: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Whether the same seed makes the same world in this build: tokio must have been built with `--cfg tokio_unstable`, as it is in
/// this workspace.
pub fn is_replayable() -> bool {
    process::IS_REPLAYABLE
}

/// Makes the world of `seed`, and lets it come to its end. It blocks the thread, and must not be called within a runtime.
pub fn simulate(seed: u64, options: &Options) -> Outcome {
    let mut random = fastrand::Rng::with_seed(seed ^ 0x6e6f_7469_6275_7321);
    let plan = Plan::draw(seed, options).without(&options.without);
    let shared = Shared::new(plan, random.fork(), Trace::new(options.trace));
    shared.keep_rows(options.rows);
    shared.note(|| format!("seed {seed}: {:#?}", shared.plan));
    let listener = Listener::new({
        let shared = Arc::clone(&shared);
        move |level, message, fields| shared.hear(level, message, fields)
    });
    let run = || tracing::subscriber::with_default(listener, || World::new(&shared, random).run());
    #[cfg(feature = "mutations")]
    crate::base::bugs::with(options.bug, run);
    #[cfg(not(feature = "mutations"))]
    run();
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
