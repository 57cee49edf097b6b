//! The arguments of the simulation, its trials, and its report.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    io::{self, Write},
    num::NonZeroUsize,
    process::{Command, ExitCode},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use libtest_mimic::{Arguments, Failed, Trial};
use parking_lot::Mutex;

use crate::{
    kernel, oracle,
    witness::{Fault, Witness},
    world::{Outcome, simulate},
};

/// How many worlds `cargo test` runs.
const SEEDS: u64 = 40;

/// The number of worlds in a trial.
const CHUNK: u64 = 10;

/// Simulated worlds, one per seed. Without the options about seeds, this runs trials like any other test.
#[derive(Debug, Parser)]
#[command(name = "simulation", disable_version_flag = true)]
struct Args {
    /// Run this many worlds, and report what happened in them.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "seed")]
    seeds: Option<u64>,
    /// The first seed.
    #[arg(long, default_value_t = 0, requires = "seeds")]
    from: u64,
    /// Continue after a seed fails.
    #[arg(long, requires = "seeds")]
    keep_going: bool,
    /// Run the world of this seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Print what happens in the world, line by line.
    #[arg(long, requires = "seed")]
    trace: bool,
    #[command(flatten)]
    trials: Arguments,
}

pub fn run() -> ExitCode {
    let args = Args::parse();
    if let Some(seed) = args.seed {
        return one(seed, args.trace);
    }
    match args.seeds {
        Some(seeds) => many(seeds, &args),
        None => libtest_mimic::run(&args.trials, trials()).exit_code(),
    }
}

/// Runs the world of `seed`.
fn one(seed: u64, is_traced: bool) -> ExitCode {
    let outcome = simulate(seed, is_traced);
    if let Some(trace) = &outcome.trace
        && io::stdout().write_all(trace.as_bytes()).is_err()
    {
        // The reader of the trace has seen enough.
        return ExitCode::SUCCESS;
    }
    match outcome.failure {
        None => ExitCode::SUCCESS,
        Some(failure) => {
            eprintln!("seed {seed} failed: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the command that replays the world of `seed`.
fn replay(seed: u64) -> String {
    format!("cargo test --release --test simulation -- --seed {seed} --trace")
}

/// Totals over all worlds.
#[derive(Default)]
struct Total {
    seeds: u64,
    /// How many times each fault struck.
    faults: BTreeMap<Fault, u64>,
    /// The number of worlds in which each interesting state occurred.
    witnesses: BTreeMap<Witness, u64>,
    /// The simulated time.
    elapsed: Duration,
    failed: u64,
}

impl Total {
    fn add(&mut self, outcome: &Outcome) {
        self.seeds += 1;
        self.elapsed += outcome.elapsed;
        self.failed += u64::from(outcome.failure.is_some());
        for (&fault, count) in &outcome.faults {
            *self.faults.entry(fault).or_default() += count;
        }
        for &witness in outcome.witnesses.keys() {
            *self.witnesses.entry(witness).or_default() += 1;
        }
    }
}

/// Runs this many worlds, and reports what happened in them.
fn many(seeds: u64, args: &Args) -> ExitCode {
    let threads =
        args.trials.test_threads.or_else(|| thread::available_parallelism().ok().map(NonZeroUsize::get));
    let began = Instant::now();
    let (next, total) = (AtomicU64::new(0), Mutex::new(Total::default()));
    thread::scope(|scope| {
        for _ in 0..threads.unwrap_or(1) {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    if place >= seeds {
                        break;
                    }
                    let outcome = simulate(args.from.wrapping_add(place), false);
                    if let Some(failure) = &outcome.failure {
                        eprintln!("seed {} failed: {failure}\n  {}", outcome.seed, replay(outcome.seed));
                        if !args.keep_going {
                            next.store(seeds, Ordering::Relaxed);
                        }
                    }
                    total.lock().add(&outcome);
                }
            });
        }
    });
    let total = total.into_inner();
    // If standard output is closed, its reader has seen enough.
    let _ = report(&total, began.elapsed());
    let missed = |witness: &&Witness| witness.is_due(total.seeds) && !total.witnesses.contains_key(witness);
    let missed: Vec<_> = Witness::ALL.iter().filter(missed).collect();
    if total.failed > 0 {
        eprintln!("{} of {} seeds failed", total.failed, total.seeds);
    } else if !missed.is_empty() {
        eprintln!("{} seeds have not met {missed:?}", total.seeds);
    } else {
        return ExitCode::SUCCESS;
    }
    ExitCode::FAILURE
}

#[expect(clippy::cast_precision_loss, reason = "a rate is for people")]
fn report(total: &Total, took: Duration) -> io::Result<()> {
    let rate = total.seeds as f64 / took.as_secs_f64().max(0.001);
    let hours = total.elapsed.as_secs_f64() / 3_600.0;
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{} seeds in {took:.1?}, {rate:.1} per second, {hours:.1} h of simulated time",
        total.seeds
    )?;
    writeln!(out, "\nfaults")?;
    let faults = Fault::ALL.iter().map(|&fault| (fault, total.faults.get(&fault), fault.explanation()));
    list(&mut out, faults)?;
    writeln!(out, "\nwitnesses, by the number of seeds that met them")?;
    let witnesses =
        Witness::ALL.iter().map(|&witness| (witness, total.witnesses.get(&witness), witness.explanation()));
    list(&mut out, witnesses)
}

/// Prints a table of counts.
fn list<'a, T: Debug>(
    out: &mut impl Write,
    mut rows: impl Iterator<Item = (T, Option<&'a u64>, &'a str)>,
) -> io::Result<()> {
    rows.try_for_each(|(what, count, explanation)| {
        writeln!(out, "{:>10}  {:<30}{explanation}", count.copied().unwrap_or_default(), format!("{what:?}"))
    })
}

fn trials() -> Vec<Trial> {
    let worlds = (0..SEEDS / CHUNK).map(|chunk| {
        let from = chunk * CHUNK;
        Trial::test(format!("what_is_promised_holds_in_worlds_from_{from}"), move || worlds(from))
    });
    let trial = |(name, test): (&'static str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let meta: [(&'static str, fn()); 2] = [
        ("the_same_seed_makes_the_same_world", the_same_seed_makes_the_same_world),
        ("two_processes_make_the_same_world", two_processes_make_the_same_world),
    ];
    worlds.chain(meta.into_iter().chain(oracle::tests()).chain(kernel::tests()).map(trial)).collect()
}

/// Runs the worlds of a trial.
fn worlds(from: u64) -> Result<(), Failed> {
    for seed in from..from + CHUNK {
        if let Some(failure) = simulate(seed, false).failure {
            return Err(format!("seed {seed}: {failure}\nreplay: {}", replay(seed)).into());
        }
    }
    Ok(())
}

fn the_same_seed_makes_the_same_world() {
    let is_replayable = cfg!(tokio_unstable);
    assert!(
        is_replayable,
        "tokio was built without `--cfg tokio_unstable`: RUSTFLAGS replaces the flags of .cargo/config.toml, add it there"
    );
    for seed in [0, 3, 16, 24, 105, 1_000_003] {
        let (first, second) = (simulate(seed, true), simulate(seed, true));
        let (one, other) = (first.trace.as_deref().unwrap(), second.trace.as_deref().unwrap());
        let differs = one.lines().zip(other.lines()).enumerate().find(|(_, (one, other))| one != other);
        assert!(differs.is_none(), "seed {seed} differs from line {differs:?} on");
        assert_eq!(first, second, "seed {seed}");
        assert!(one.lines().count() > 100, "a world is more than this");
    }
}

/// Regression: the trace contained an address, which differs between processes, so one seed gave different traces.
fn two_processes_make_the_same_world() {
    let run = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--seed", "1632", "--trace"]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let (one, other) = (run(), run());
    assert!(one.lines().count() > 1_000, "a world is more than this");
    let differs = one.lines().zip(other.lines()).find(|(one, other)| one != other);
    assert_eq!(differs, None);
    assert_eq!(one.len(), other.len());
}
