//! `notibus torture`: runs worlds in real time, each process with threads of its own, and judges them as `simulate` does. On a cluster,
//! processes are this program again.

use std::{
    collections::BTreeMap,
    fs, io,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use indicatif::{ProgressBar, ProgressStyle};
use notibus::simulation::{
    Cluster, Done, Fault, Member, Options, Outcome, Part, take_part, torture, torture_cluster,
};
use parking_lot::Mutex;
use tokio::{runtime::Handle, task};

use crate::{failure::Failure, out, store::Store};

/// How often the progress is shown.
const SHOWN_EVERY: Duration = Duration::from_millis(250);

/// What to torture, and for how long.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How long new worlds begin. Each then still has to come to rest, which takes some seconds.
    #[arg(long = "for", default_value = "1m", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// How many threads each process of a world has. Default: as many as there are processors, and at least two.
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// How many worlds run at once. Default: as many as there are processors.
    #[arg(long)]
    worlds: Option<NonZeroUsize>,
    /// The seed of the first world's draw of sizes, options and faults. Default: from the clock.
    #[arg(long)]
    from: Option<u64>,
    /// How long things go wrong in each world.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    chaos: Duration,
    /// How many times more often things go wrong than the seeds draw.
    #[arg(long, default_value_t = 1.0, value_parser = crate::simulate::intensity)]
    intensity: f64,
    /// Parts and faults to leave out of the worlds, separated by commas.
    #[arg(long, value_delimiter = ',')]
    without: Vec<Part>,
    /// The kind of store: in memory, where in some worlds a disk and its power fail as well; or in folders on the disk of this machine.
    #[arg(long, value_enum, default_value_t)]
    store: Kind,
    /// A cluster file. Worlds run on this cluster, one after the other, and each process of theirs is one of the operating system, which
    /// is killed and stopped. The cluster has to be empty: worlds use all its keys, and clear them.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["store", "worlds", "without"])]
    cluster_file: Option<PathBuf>,
    /// The process of a world that this one is to be.
    #[arg(long, hide = true, requires = "cluster_file", value_parser = member)]
    member: Option<Member>,
    /// The folder in which the history of a world that breaks a guarantee is kept. Default: a new one among the temporary files.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
}

fn member(text: &str) -> Result<Member, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// Where the stores of worlds are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// In memory.
    #[default]
    Memory,
    /// In folders.
    Dir,
}

impl Args {
    /// Runs the world of `seed`.
    fn world(
        &self,
        seed: u64,
        threads: NonZeroUsize,
        cluster: Option<&Cluster<'_>>,
        done: &Arc<Done>,
    ) -> notibus::Result<Outcome> {
        if let Some(cluster) = cluster {
            return self.world_on(cluster, seed, threads, done);
        }
        let folder = (self.store == Kind::Dir).then(|| self.folder().join(format!("store-{seed}")));
        let options = Options { folder: folder.clone(), ..self.options() };
        let outcome = torture(seed, threads, &options, done);
        // It stays beside the history of a world that has failed.
        if let Some(folder) = folder.filter(|_| outcome.failure.is_none()) {
            drop(fs::remove_dir_all(folder));
        }
        Ok(outcome)
    }

    /// Runs the world of `seed` on a cluster.
    fn world_on(
        &self,
        cluster: &Cluster<'_>,
        seed: u64,
        threads: NonZeroUsize,
        done: &Arc<Done>,
    ) -> notibus::Result<Outcome> {
        let folder = self.folder().join(format!("notes-{seed}"));
        fs::create_dir_all(&folder).map_err(|error| notibus::Error::Open {
            path: folder.clone(),
            cause: notibus::store::OpenCause::from(&error),
            reason: error.to_string(),
        })?;
        let first = Member {
            seed,
            chaos_ms: self.chaos.as_millis() as u64,
            intensity: self.intensity,
            process: 0,
            generation: 0,
            threads: threads.get(),
            folder: folder.clone(),
        };
        let outcome = torture_cluster(&first, cluster, done)?;
        if outcome.failure.is_none() {
            drop(fs::remove_dir_all(folder));
        }
        Ok(outcome)
    }

    fn options(&self) -> Options {
        Options {
            chaos: Some(self.chaos),
            intensity: self.intensity,
            without: self.without.clone(),
            history: true,
            ..Options::default()
        }
    }

    fn folder(&self) -> PathBuf {
        let new = || std::env::temp_dir().join(format!("notibus-torture-{}", std::process::id()));
        self.keep.clone().unwrap_or_else(new)
    }
}

/// What has happened in all worlds.
#[derive(Default)]
struct Total {
    worlds: u64,
    /// Number of faults by kind.
    faults: BTreeMap<Fault, u64>,
    /// The worlds that have broken a guarantee.
    broken: Vec<Outcome>,
}

impl Total {
    fn add(&mut self, outcome: Outcome) {
        self.worlds += 1;
        for (&fault, count) in &outcome.faults {
            *self.faults.entry(fault).or_default() += count;
        }
        if outcome.failure.is_some() {
            self.broken.push(outcome);
        }
    }

    /// How often any of `faults` has struck.
    fn of(&self, faults: &[Fault]) -> u64 {
        faults.iter().filter_map(|fault| self.faults.get(fault)).sum()
    }
}

/// Runs worlds until the time is over, or a guarantee is broken; or one process of one.
pub async fn run(args: Args, timeout: Duration) -> Result<(), Failure> {
    let db = match &args.cluster_file {
        Some(file) => Some(Store::FoundationDb(file.clone()).open(timeout).await?),
        None => None,
    };
    let runtime = Handle::current();
    let work = move || match (&args.cluster_file, db, &args.member) {
        (Some(_), Some(db), Some(member)) => match take_part(member, &db)? {
            None => Ok(()),
            Some(broken) => {
                out::line(&broken.to_string())?;
                Err(Failure::Failed(broken.to_string()))
            }
        },
        (Some(file), Some(db), None) => {
            let start = |member: &Member| start(file, member);
            run_worlds(&args, Some(&Cluster { db, runtime, start: &start }))
        }
        _ => run_worlds(&args, None),
    };
    task::spawn_blocking(work).await.map_err(|error| Failure::Failed(error.to_string()))?
}

/// Starts a process of a world on the cluster of `file`.
fn start(file: &Path, member: &Member) -> io::Result<Child> {
    let member = serde_json::to_string(member).map_err(io::Error::other)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["torture", "--member", &member, "--cluster-file"]).arg(file);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
}

/// Runs worlds until the time is over, or a guarantee is broken.
fn run_worlds(args: &Args, cluster: Option<&Cluster<'_>>) -> Result<(), Failure> {
    if args.duration.is_zero() {
        return Err(Failure::BadInput("no world begins within --for 0s".to_owned()));
    }
    if let Some(folder) = &args.keep {
        fs::create_dir_all(folder)
            .map_err(|error| Failure::BadInput(format!("{} cannot be made: {error}", folder.display())))?;
    }
    let processors = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let worlds = if cluster.is_some() { NonZeroUsize::MIN } else { args.worlds.unwrap_or(processors) };
    let threads = args.threads.unwrap_or(processors.max(NonZeroUsize::MIN.saturating_add(1)));
    let micros = || SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_micros() as u64);
    let first = args.from.unwrap_or_else(micros);
    let next = AtomicU64::new(first);
    let done = Arc::new(Done::default());
    let (began, total) = (Instant::now(), Mutex::new(Total::default()));
    let progress = ProgressBar::new_spinner().with_style(
        ProgressStyle::with_template("{spinner} {elapsed_precise} {msg}")
            .expect("the template is well-formed"),
    );
    thread::scope(|scope| {
        let work = || {
            while began.elapsed() < args.duration && total.lock().broken.is_empty() {
                let outcome = args.world(next.fetch_add(1, Ordering::Relaxed), threads, cluster, &done)?;
                total.lock().add(outcome);
            }
            Ok(())
        };
        let running: Vec<_> = (0..worlds.get()).map(|_| scope.spawn(work)).collect();
        while running.iter().any(|world| !world.is_finished()) {
            progress.set_message(rates(&done, &total.lock(), began.elapsed()));
            progress.tick();
            thread::sleep(SHOWN_EVERY);
        }
        running
            .into_iter()
            .try_for_each(|world| world.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
    .map_err(|error: notibus::Error| Failure::from(error))?;
    progress.finish_and_clear();
    let total = total.into_inner();
    out::line(&report(first, &done, &total, began.elapsed()))?;
    let Some(outcome) = total.broken.into_iter().next() else {
        if args.keep.is_none() {
            // It is empty, if there is one.
            drop(fs::remove_dir(args.folder()));
        }
        return out::line("nothing was lost");
    };
    Err(kept(args, &outcome))
}

/// Keeps the history of a world that has broken a guarantee, and says which.
fn kept(args: &Args, Outcome { seed, failure, history, .. }: &Outcome) -> Failure {
    let broken = failure.as_ref().map(ToString::to_string).unwrap_or_default();
    let folder = args.folder();
    let file = folder.join(format!("{seed}.ndjson"));
    let saved = fs::create_dir_all(&folder)
        .and_then(|()| fs::write(&file, history.as_deref().unwrap_or_default()))
        .map_or_else(
            |error| format!("could not be kept: {error}"),
            |()| format!("is kept in {}", file.display()),
        );
    Failure::Failed(format!(
        "{broken}\n  in the world of seed {seed}. Its history {saved}; judge it again with: notibus simulate --judge FILE"
    ))
}

/// What is done each second, for the line of progress.
#[expect(clippy::cast_precision_loss, reason = "a rate is for people")]
fn rates(done: &Done, total: &Total, elapsed: Duration) -> String {
    let each = |count: &AtomicU64| count.load(Ordering::Relaxed) as f64 / elapsed.as_secs_f64().max(0.001);
    let Done { commits, events, deliveries, .. } = done;
    format!(
        "{} worlds; per second {:.0} commits, {:.0} events, {:.0} deliveries",
        total.worlds,
        each(commits),
        each(events),
        each(deliveries)
    )
}

fn report(first: u64, done: &Done, total: &Total, took: Duration) -> String {
    let Done { commits, events, deliveries, .. } = done;
    let [commits, events, deliveries] =
        [commits, events, deliveries].map(|count| count.load(Ordering::Relaxed));
    let kills = total.of(&[Fault::Crash, Fault::CrashBeforeAnswer]);
    let (stops, restarts) = (total.of(&[Fault::Pause]), total.of(&[Fault::PowerLoss, Fault::DiskFault]));
    let all: u64 = total.faults.values().sum();
    format!(
        "{} worlds from seed {first} in {took:.1?}: {commits} commits with {events} events, {deliveries} deliveries; processes killed {kills} times and \
         stopped {stops} times, failures of power or disk {restarts}, other faults {}",
        total.worlds,
        all - kills - stops - restarts
    )
}
