//! [`JobPlan`]: the draw of the triggers of a world, and of their jobs.

use std::time::Duration;

use fastrand::Rng;
use notibus::{
    event::DbName,
    jobs::{ParallelJobOptions, TriggerOptions},
};

/// The triggers, whose jobs derive an index and a copy from the documents of each database.
#[derive(Debug, Clone)]
pub(crate) struct JobPlan {
    /// Options of both triggers, but for their names and filters.
    pub options: TriggerOptions,
    /// Options of the parallel jobs, whose batches have as many rows as the pages of scans.
    pub parallel: ParallelJobOptions,
    /// The names of the databases whose jobs fail forever.
    pub failing: Vec<DbName>,
    /// Whether these jobs hang instead.
    pub hangs: bool,
    /// Whether triggers begin with a narrower filter now and then.
    pub narrows: bool,
    /// The longest time until a trigger is stopped, and started again, in milliseconds.
    pub runs_max_ms: u64,
}

impl JobPlan {
    /// The draw of a world with databases of these names.
    pub fn draw(random: &mut Rng, names: &[DbName]) -> Self {
        let ms = |random: &mut Rng, from: u64, to: u64| Duration::from_millis(random.u64(from..=to));
        // Parked databases are tried again in rounds that begin `backoff_max` apart, but at least a second.
        let options = TriggerOptions::index("any")
            .debounce(if random.bool() { Duration::ZERO } else { ms(random, 1, 300) })
            .jobs_max(random.usize(1..=4))
            .attempts_max(random.u32(1..=3))
            .stall_limit(ms(random, 1_000, 3_000))
            .backoff_min(ms(random, 10, 100))
            .backoff_max(ms(random, 200, 2_000))
            .pending_max([1, 3, 10, 1_000][random.usize(0..4)])
            .checkpoint_interval(ms(random, 10, 500));
        let parallel = ParallelJobOptions::default()
            .tasks_max(random.usize(1..=3))
            .batch_rows_max(random.usize(1..=3))
            .attempts_max(random.u32(1..=2));
        // At least one name has jobs that succeed.
        let failing = random.usize(0..=3).min(names.len() - 1);
        Self {
            options,
            parallel,
            failing: names[..failing].to_vec(),
            hangs: random.u32(0..3) == 0,
            narrows: random.bool(),
            runs_max_ms: [300, 3_000, 30_000][random.usize(0..3)],
        }
    }
}
