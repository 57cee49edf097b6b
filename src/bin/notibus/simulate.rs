//! `notibus simulate`: runs simulated worlds, one per seed, and reports what they have met.

use std::{
    collections::BTreeMap,
    fmt::Display,
    fs,
    io::{self, Write},
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use notibus::simulation::{Fault, Options, Outcome, Part, Witness, is_replayable, judge, simulate};
use parking_lot::Mutex;

use crate::failure::Failure;

/// If set to anything but 0, the timeline of each seed is printed.
const TRACE: &str = "NOTIBUS_TRACE";

/// What to simulate.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How many seeds: 1000, if not said, or the one whose history is saved.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// How many nodes each world has. Default: as its seed draws.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=100))]
    nodes: Option<u16>,
    /// How long things go wrong in each world, in simulated time, up to an hour, such as 3s. Default: as its seed draws.
    #[arg(long, value_parser = chaos)]
    chaos: Option<Duration>,
    /// How many times more often things go wrong than the seeds draw.
    #[arg(long, default_value_t = 1.0, value_parser = intensity)]
    intensity: f64,
    /// How many worlds run at once. Default: as many as there are processors.
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// Parts and faults to leave out of the worlds that the seeds draw, separated by commas; the report of a failing seed lists
    /// such parts.
    #[arg(long, value_delimiter = ',')]
    without: Vec<Part>,
    /// How many smaller worlds to try when a seed fails, to find a smaller one that fails.
    #[arg(long, default_value_t = 60)]
    shrink: u32,
    /// Go on after a seed that fails.
    #[arg(long)]
    keep_going: bool,
    /// A file to save the history of the world in, of which there can be one only: all that its judge was informed of, as lines of
    /// JSON.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Judges a saved history again, and runs no world.
    #[arg(long, value_name = "FILE", exclusive = true)]
    judge: Option<PathBuf>,
}

/// Parses `--chaos`.
fn chaos(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let is_allowed = (Duration::from_secs(1)..=Duration::from_hours(1)).contains(&time);
    is_allowed.then_some(time).ok_or_else(|| "it has to be from 1s to 1h".to_owned())
}

/// Parses `--intensity`.
pub fn intensity(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (0.0..=1_000.0).contains(number));
    number.ok_or_else(|| "it has to be a number from 0 to 1000".to_owned())
}

impl Args {
    fn seeds(&self) -> u64 {
        self.seeds.unwrap_or(if self.save.is_some() { 1 } else { 1_000 })
    }

    /// Fails if the history cannot be saved, before its world runs.
    fn check(&self) -> Result<(), Failure> {
        let Some(file) = &self.save else { return Ok(()) };
        if self.seeds() != 1 {
            return Err(Failure::BadInput(
                "a history is of one world: --save goes with --seeds 1".to_owned(),
            ));
        }
        fs::write(file, "")
            .map_err(|error| Failure::BadInput(format!("{} cannot be written: {error}", file.display())))
    }

    fn options(&self, trace: bool) -> Options {
        Options {
            nodes: self.nodes.map(usize::from),
            chaos: self.chaos,
            intensity: self.intensity,
            trace,
            without: self.without.clone(),
            history: self.save.is_some(),
            ..Options::default()
        }
    }
}

/// The command that runs `seed` with `options` again.
fn replay(seed: u64, options: &Options) -> String {
    let without: Vec<_> = options.without.iter().map(Part::to_string).collect();
    let options = [
        options.nodes.map(|nodes| format!(" --nodes {nodes}")),
        options.chaos.map(|chaos| {
            format!(" --chaos {}", humantime::format_duration(chaos).to_string().replace(' ', ""))
        }),
        Some(format!(" --intensity {}", options.intensity)),
        (!without.is_empty()).then(|| format!(" --without {}", without.join(","))),
    ];
    let options: String = options.into_iter().flatten().collect();
    format!("{TRACE}=1 notibus simulate --seeds 1 --from {seed}{options}")
}

/// The options of the smallest world of `seed` that breaks the same guarantee, after at most `tries` tries: with fewer nodes, a
/// shorter time of faults, and without parts that are not needed.
fn shrink(failed: &Outcome, options: &Options, tries: u32) -> Options {
    let guarantee = failed.failure.as_ref().map(|broken| broken.guarantee);
    let (mut smallest, mut left) = (options.clone(), tries);
    let mut holds = |smaller: &Options| {
        left = left.saturating_sub(1);
        let fails = |outcome: Outcome| outcome.failure.map(|broken| broken.guarantee) == guarantee;
        left > 0 && fails(simulate(failed.seed, smaller))
    };
    for part in Part::all() {
        let mut smaller = smallest.clone();
        smaller.without.push(part);
        if !smallest.without.contains(&part) && holds(&smaller) {
            smallest = smaller;
        }
    }
    for seconds in [1, 2, 4, 8] {
        let smaller = Options { chaos: Some(Duration::from_secs(seconds)), ..smallest.clone() };
        if holds(&smaller) {
            return smaller;
        }
    }
    smallest
}

/// Totals over all worlds.
#[derive(Default)]
struct Total {
    /// How many worlds there were.
    seeds: u64,
    /// Number of faults by kind.
    faults: BTreeMap<Fault, u64>,
    /// The interesting states, and how many worlds have met each.
    witnesses: BTreeMap<Witness, u64>,
    /// Simulated time.
    elapsed: Duration,
    /// The seeds that failed, and why.
    failures: BTreeMap<u64, String>,
}

impl Total {
    fn add(&mut self, outcome: &Outcome) {
        self.seeds += 1;
        self.elapsed += outcome.elapsed;
        for (&fault, count) in &outcome.faults {
            *self.faults.entry(fault).or_default() += count;
        }
        for &witness in outcome.witnesses.keys() {
            *self.witnesses.entry(witness).or_default() += 1;
        }
        if let Some(failure) = &outcome.failure {
            self.failures.insert(outcome.seed, failure.to_string());
        }
    }
}

/// Judges the history in `file`.
fn judge_again(file: &Path) -> Result<(), Failure> {
    let history = fs::read_to_string(file)
        .map_err(|error| Failure::BadInput(format!("{} cannot be read: {error}", file.display())))?;
    match judge(&history)? {
        None => {
            let lines = history.lines().count();
            writeln!(io::stdout(), "everything that was promised was kept, in {lines} lines")
                .map_err(crate::out::failed)
        }
        Some(broken) => Err(Failure::Failed(broken.to_string())),
    }
}

/// Runs the worlds, or judges one again that was saved.
pub fn run(args: &Args) -> Result<(), Failure> {
    if let Some(file) = &args.judge {
        return judge_again(file);
    }
    args.check()?;
    let seeds = args.seeds();
    let saved = Mutex::new(Ok(()));
    let trace = std::env::var(TRACE).is_ok_and(|value| value != "0");
    if !is_replayable() {
        eprintln!(
            "notibus: built without `--cfg tokio_unstable`: a seed does not always make the same world"
        );
    }
    let threads = if trace { Some(NonZeroUsize::MIN) } else { args.threads };
    let threads = threads.or_else(|| thread::available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN);
    let options = args.options(trace);
    let began = Instant::now();
    let (next, total) = (AtomicU64::new(0), Mutex::new(Total::default()));
    thread::scope(|scope| {
        for _ in 0..threads.get() {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    if place >= seeds {
                        break;
                    }
                    let outcome = simulate(args.from.wrapping_add(place), &options);
                    if let (Some(file), Some(history)) = (&args.save, &outcome.history) {
                        *saved.lock() = fs::write(file, history);
                    }
                    // If standard output is closed, its reader has seen enough.
                    if let Some(trace) = &outcome.trace
                        && write!(io::stdout(), "{trace}").is_err()
                    {
                        next.store(seeds, Ordering::Relaxed);
                    }
                    if let Some(failure) = &outcome.failure {
                        let seed = outcome.seed;
                        eprintln!(
                            "seed {seed} failed: {failure}\n  replay it with: {}",
                            replay(seed, &options)
                        );
                        if args.shrink > 0 && !trace {
                            let smaller = shrink(&outcome, &options, args.shrink);
                            eprintln!("  a smaller one: {}", replay(seed, &smaller));
                        }
                        if !args.keep_going {
                            next.store(seeds, Ordering::Relaxed);
                        }
                    }
                    total.lock().add(&outcome);
                }
            });
        }
    });
    if let Err(error) = saved.into_inner() {
        return Err(Failure::Failed(format!("the history could not be saved: {error}")));
    }
    let total = total.into_inner();
    report(&total, began.elapsed()).map_err(crate::out::failed)?;
    let is_missed =
        |witness: &&Witness| witness.is_due(total.seeds) && !total.witnesses.contains_key(witness);
    let missed: Vec<_> = Witness::ALL.iter().filter(is_missed).collect();
    match total.failures.len() {
        0 if missed.is_empty() => Ok(()),
        0 => Err(Failure::Failed(format!("{} seeds have not met {missed:?}", total.seeds))),
        failed => Err(Failure::Failed(format!("{failed} of {} seeds failed", total.seeds))),
    }
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
fn list<'a, T: Display>(
    out: &mut impl Write,
    mut rows: impl Iterator<Item = (T, Option<&'a u64>, &'a str)>,
) -> io::Result<()> {
    rows.try_for_each(|(what, count, explanation)| {
        writeln!(out, "{:>10}  {:<30}{explanation}", count.copied().unwrap_or_default(), what.to_string())
    })
}
