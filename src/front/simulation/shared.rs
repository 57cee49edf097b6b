//! [`Shared`]: the state that all parts of a world share.

use std::{
    collections::BTreeMap,
    fmt::Write,
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering},
    },
    time::Duration,
};

use foundationdb_tuple::Element;

use super::{
    Options, app,
    draw::Plan,
    guarantee::Broken,
    oracle::Oracle,
    time::{ProcessId, Time},
    trace::Trace,
    witness::{Fault, Witness},
    world::Event,
};
use crate::{state::stats::Stats, store::Mutation};

/// The value of an undecodable row, and the end of the key of one among the counters.
pub(super) const BROKEN: &[u8] = b"broken";

/// The prefix of all keys of the bus.
pub(super) const BUS_PREFIX: &[u8] = b"bus";

/// The prefix of all keys of another bus in the store: it begins with the same bytes.
pub(super) const OTHER_BUS_PREFIX: &[u8] = b"bus2";

/// The message of planned panics of listeners.
pub(super) const PLANNED_PANIC: &str = "a listener of a simulation panics";

/// The rows of a store.
type Rows = Vec<(Vec<u8>, Vec<u8>)>;

/// A process in one of its lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Issuer {
    pub process: ProcessId,
    /// How often it was started before.
    pub generation: u64,
}

/// The phase of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Phase {
    /// Actors work, and faults strike.
    Chaos,
    /// No fault strikes any more, and no actor begins new work: everything has to come to rest.
    Rest,
    /// All processes shut down.
    End,
}

/// The state that all parts of a world share.
pub(super) struct Shared {
    pub time: Time,
    pub plan: Plan,
    trace: Trace,
    oracle: Mutex<Oracle>,
    /// The randomness of faults.
    random: Mutex<fastrand::Rng>,
    /// The faults that struck, and how often.
    faults: Mutex<BTreeMap<Fault, u64>>,
    /// The interesting states that were met, and how often.
    witnesses: Mutex<BTreeMap<Witness, u64>>,
    /// What each life of a process counts; it outlives that.
    stats: Mutex<Vec<Arc<Stats>>>,
    /// The first breach of a promise.
    failure: Mutex<Option<Broken>>,
    /// Whether there is a failure.
    has_failed: AtomicBool,
    phase: AtomicU8,
    /// The number of actors at work that end by themselves after the faults: producers, operators, and processes that
    /// start.
    busy: AtomicUsize,
    /// The rows of the store at the end of the faults; `None` if they were not asked for.
    rows: Mutex<Option<Rows>>,
}

/// An actor at work, until it is dropped.
pub(super) struct Busy(Arc<Shared>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Locks `mutex`. No panic leaves the state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// A world of `plan`, whose faults are drawn from `random`.
    pub fn new(plan: Plan, random: fastrand::Rng, trace: Trace) -> Arc<Self> {
        let failing = plan.jobs.as_ref().map(|jobs| jobs.failing.clone());
        let oracle = Oracle::new(plan.partitions, plan.names.clone(), plan.documents.is_some(), failing);
        Arc::new(Self {
            time: Time::default(),
            plan,
            trace,
            oracle: Mutex::new(oracle),
            random: Mutex::new(random),
            faults: Mutex::default(),
            witnesses: Mutex::default(),
            stats: Mutex::default(),
            failure: Mutex::default(),
            has_failed: AtomicBool::new(false),
            phase: AtomicU8::new(Phase::Chaos as u8),
            busy: AtomicUsize::new(0),
            rows: Mutex::default(),
        })
    }

    /// A world in which nothing happens: verdicts on the history of `seed` come into it.
    pub fn of_nothing(seed: u64) -> Arc<Self> {
        let plan = Plan::draw(seed, &Options::default());
        Self::new(plan, fastrand::Rng::with_seed(seed), Trace::new(false))
    }

    /// Judges what happens.
    pub fn oracle(&self) -> MutexGuard<'_, Oracle> {
        lock(&self.oracle)
    }

    /// A random number.
    pub fn draw(&self, range: RangeInclusive<u64>) -> u64 {
        lock(&self.random).u64(range)
    }

    /// Whether `fault` strikes now.
    pub fn strikes(&self, fault: Fault) -> bool {
        let rate = self.plan.rate(fault);
        if rate == 0.0 || self.phase() > Phase::Chaos || lock(&self.random).f64() >= rate {
            return false;
        }
        self.count(fault);
        true
    }

    /// Counts `fault`.
    pub fn count(&self, fault: Fault) {
        *lock(&self.faults).entry(fault).or_default() += 1;
        self.note(|| format!("fault: {fault}"));
    }

    /// How often `fault` has struck.
    pub fn fault_count(&self, fault: Fault) -> u64 {
        lock(&self.faults).get(&fault).copied().unwrap_or_default()
    }

    /// The faults that struck, and how often.
    pub fn faults(&self) -> BTreeMap<Fault, u64> {
        lock(&self.faults).clone()
    }

    /// Counts `witness` as met.
    pub fn witness(&self, witness: Witness) {
        *lock(&self.witnesses).entry(witness).or_default() += 1;
        self.note(|| format!("witness: {witness}"));
    }

    /// From now on a life of a process counts in `stats`.
    pub fn counts_in(&self, stats: &Arc<Stats>) {
        lock(&self.stats).push(Arc::clone(stats));
    }

    /// The interesting states that were met, and how often.
    pub fn witnesses(&self) -> BTreeMap<Witness, u64> {
        let mut met = lock(&self.witnesses).clone();
        for stats in &*lock(&self.stats) {
            let counts =
                [(Witness::LeaseLost, &stats.leases_lost), (Witness::NodeFellOut, &stats.nodes_fallen_out)];
            for (witness, count) in counts.into_iter().filter(|(_, count)| count.get() > 0) {
                *met.entry(witness).or_default() += count.get();
            }
        }
        met
    }

    /// Lets the process crash soon, if the fault strikes.
    pub fn may_crash(&self, issuer: Issuer) {
        if self.strikes(Fault::Crash) {
            let pause = Duration::from_micros(self.draw(0..=5_000));
            self.time.after(pause, Event::Crash(issuer));
        }
    }

    /// Lets the process crash now, although its commit has happened, if the fault strikes.
    pub fn may_crash_before_answer(&self, issuer: Issuer, records: bool) {
        if self.strikes(Fault::CrashBeforeAnswer) {
            if records {
                self.witness(Witness::RingNeverCame);
            }
            self.time.after(Duration::ZERO, Event::Crash(issuer));
        }
    }

    /// Counts an actor as at work.
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    /// The number of actors at work.
    pub fn busy(&self) -> usize {
        self.busy.load(Ordering::Relaxed)
    }

    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Chaos,
            1 => Phase::Rest,
            _ => Phase::End,
        }
    }

    pub fn enter(&self, phase: Phase) {
        self.note(|| format!("phase: {phase:?}"));
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Fails the world with `broken`, if it is the first breach.
    pub fn fail(&self, broken: impl Into<Broken>) {
        let broken = broken.into();
        self.note(|| format!("FAILURE: {broken}"));
        lock(&self.failure).get_or_insert(broken);
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Whether a promise was broken.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// The first breach of a promise.
    pub fn failure(&self) -> Option<Broken> {
        lock(&self.failure).clone()
    }

    /// Hears a log line of the library.
    pub fn hear(&self, level: tracing::Level, message: &str, fields: &str) {
        self.note(|| format!("{level} {message}{fields}"));
        // Some panics of observers and some broken rows are planned.
        let is_panic = message.contains("panicked") && !fields.contains(PLANNED_PANIC);
        if is_panic || fields.contains("corrupt ") && !self.plan.breaks_rows {
            self.fail(format!("the library says: {message}{fields}"));
        }
    }

    /// Keeps the rows of the store at the end of the faults, if `is_asked`.
    pub fn keep_rows(&self, is_asked: bool) {
        *lock(&self.rows) = is_asked.then(Vec::new);
    }

    /// Keeps the rows that `read` returns, if they were asked for.
    pub fn see_rows(&self, read: impl FnOnce() -> Rows) {
        if let Some(rows) = &mut *lock(&self.rows) {
            *rows = read();
        }
    }

    /// Takes the kept rows.
    pub fn take_rows(&self) -> Rows {
        lock(&self.rows).take().unwrap_or_default()
    }

    /// Adds a line to the trace.
    pub fn note(&self, line: impl FnOnce() -> String) {
        self.trace.add(self.time.now(), line);
    }

    /// Takes the trace.
    pub fn take_trace(&self) -> Option<String> {
        self.trace.take()
    }
}

/// Mutations for readers of the trace.
pub(super) fn show_all(mutations: &[Mutation]) -> String {
    let mut text = String::from("{");
    for mutation in mutations {
        let (what, key) = match mutation {
            Mutation::Set(key, _) => ("set ", key),
            Mutation::Clear(key) => ("clear ", key),
            Mutation::ClearRange(begin, _) => ("clear from ", begin),
            Mutation::Atomic(_, key, _) => ("atomic ", key),
        };
        write!(text, " {what}{}", show_key(key)).expect("writing to a string cannot fail");
    }
    text + " }"
}

/// A key for readers of the trace.
pub(super) fn show_key(key: &[u8]) -> String {
    let owners = [("other", OTHER_BUS_PREFIX), ("bus", BUS_PREFIX), ("app", app::PREFIX)];
    let mut parts = owners.into_iter().filter_map(|(owner, prefix)| Some((owner, key.strip_prefix(prefix)?)));
    let Some((owner, rest)) = parts.next() else {
        return format!("{:?}", bytes::Bytes::copy_from_slice(key));
    };
    // The ends of ranges are no tuples.
    for rest in [rest, rest.strip_suffix(b"\0").unwrap_or(rest)] {
        if let Ok(elements) = foundationdb_tuple::unpack::<Vec<Element<'_>>>(rest) {
            return format!("{owner}{elements:?}");
        }
    }
    format!("{owner}+{:?}", bytes::Bytes::copy_from_slice(rest))
}
