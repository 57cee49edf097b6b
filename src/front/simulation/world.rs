//! [`World`]: processes, a store and faults.
//!
//! The world draws one of the processes that can run, and runs it until it has nothing left to do. When no process
//! can run, time leaps to the next entry of the schedule. So a seed determines everything that happens. Where processes have threads of
//! their own, they run by themselves, and this thread is the store: commits arrive, and are judged, one after the other.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;

use super::{
    actors,
    commits::{Doubt, ready},
    draw::Plan,
    event::Event,
    flight::Flight,
    guarantee::Guarantee,
    issuer::{Issuer, ProcessId},
    link::Link,
    machine::Machine,
    process::Process,
    restore::{self, Restored},
    shared::{Phase, Shared},
    time::{Clock, true_time},
    witness::{Fault, Witness},
};
use crate::{
    base::{encoding::Versionstamp, env::Env},
    store::{
        Backend, Database, Isolation, KeyRange, RangeRead, TRANSACTION_LIFETIME, TransactionBackend,
        testing::{SimulatedDisk, Wrapper},
    },
};

/// How often pauses and jumps are drawn.
const MISHAP_INTERVAL: Duration = Duration::from_millis(250);

/// How often the world checks whether everything is at rest.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The longest time until everything is at rest.
const REST_MAX: Duration = Duration::from_mins(2);

/// The additional time for each topology entry, because a group goes from one to the next in a round of balancing.
const REST_PER_ENTRY: Duration = Duration::from_secs(3);

/// The longest time until all processes have shut down.
const END_MAX: Duration = Duration::from_mins(1);

/// A process, with its lives one after the other.
struct Slot {
    /// How often it was started before.
    generation: u64,
    /// Its present life.
    process: Option<Process>,
    clock: Arc<Clock>,
    is_paused: bool,
    /// Whether it has shut down.
    is_done: Arc<AtomicBool>,
}

impl Slot {
    fn pause(&mut self) {
        self.is_paused = true;
        self.process.iter().for_each(Process::pause);
    }

    fn resume(&mut self) {
        self.is_paused = false;
        self.process.iter().for_each(Process::resume);
    }
}

/// A world.
pub(super) struct World {
    shared: Arc<Shared>,
    engine: Arc<dyn Backend>,
    /// The machine of a durable store.
    machine: Option<Machine>,
    /// The folder of the store, if it is on the disk of this machine.
    folder: Option<PathBuf>,
    /// A copy of the folder, which was made while it was in use, and the version at which that was.
    copy: Option<(SimulatedDisk, u64)>,
    slots: Vec<Slot>,
    /// Chooses the process to run, and seeds the processes.
    random: fastrand::Rng,
    /// When the present phase began.
    since: Duration,
    /// When an actor was last at work.
    calm_since: Duration,
    is_over: bool,
}

impl World {
    /// A world in which nothing has happened yet.
    pub fn new(shared: &Arc<Shared>, mut random: fastrand::Rng, folder: Option<PathBuf>) -> Self {
        let time = &shared.time;
        let machine = shared
            .plan
            .is_durable
            .then(|| Machine::new(&mut random, true_time(time)).expect("an empty disk can be used"));
        let engine = match (&machine, &folder) {
            (Some(machine), _) => machine.store(),
            (None, Some(folder)) => Database::folder_backend(folder, true_time(time)).expect("it is empty"),
            (None, None) => Database::memory_backend(true_time(time)),
        };
        let slots = (0..shared.plan.processes.len()).map(|process| Slot {
            generation: 0,
            process: None,
            clock: Arc::new(Clock::new(time, process, 1_000_000, random.fork())),
            is_paused: false,
            is_done: Arc::default(),
        });
        let slots = slots.collect();
        Self {
            shared: Arc::clone(shared),
            engine,
            machine,
            folder,
            copy: None,
            slots,
            random,
            since: Duration::ZERO,
            calm_since: Duration::ZERO,
            is_over: false,
        }
    }

    /// Runs the world to its end.
    pub fn run(mut self) {
        let Plan { chaos, processes, .. } = &self.shared.plan;
        let time = self.shared.time.clone();
        for process in 0..processes.len() {
            time.after(Duration::from_millis(self.random.u64(0..500)), Event::Start(process));
        }
        time.after(MISHAP_INTERVAL, Event::Mishap);
        time.after(*chaos, Event::Rest);
        while !self.is_over && !self.shared.has_failed() {
            let slots = &self.slots;
            let waits = |process: ProcessId| slots[process].is_paused || slots[process].process.is_none();
            let runnable = time.runnable(waits);
            if runnable.is_empty() {
                let event = time.leap().expect("a world always has something due until it is over");
                self.happen(event);
            } else {
                let process = runnable[self.random.usize(0..runnable.len())];
                time.take_runnable(process);
                self.slots[process].process.as_ref().expect("it is there").run();
            }
        }
        for slot in &mut self.slots {
            if let Some(process) = slot.process.take() {
                process.crash();
            }
        }
    }

    fn happen(&mut self, event: Event) {
        let is_living = |slots: &[Slot], issuer: Issuer| {
            let slot = &slots[issuer.process];
            slot.generation == issuer.generation && slot.process.is_some()
        };
        match event {
            Event::Nothing => {}
            Event::Arrival(flight) => self.arrive(&flight),
            Event::Crash(issuer) => {
                if is_living(&self.slots, issuer) && self.shared.phase() == Phase::Chaos {
                    self.crash(issuer);
                }
            }
            Event::Start(process) => self.start(process),
            Event::Resume(issuer) => {
                if is_living(&self.slots, issuer) {
                    self.slots[issuer.process].resume();
                    self.shared.note(|| format!("process {}.{} goes on", issuer.process, issuer.generation));
                }
            }
            Event::Mishap => self.mishap(),
            Event::Rest => self.rest(),
            Event::Poll => self.poll(),
        }
    }

    /// Starts a process, if it does not run.
    fn start(&mut self, process: ProcessId) {
        let (shared, slot) = (&self.shared, &mut self.slots[process]);
        if slot.process.is_some() {
            return;
        }
        let issuer = Issuer { process, generation: slot.generation };
        shared.note(|| {
            format!("process {process}.{} starts: {:?}", slot.generation, shared.plan.processes[process])
        });
        let drift = shared.plan.drift_ppm;
        let ppm = 1_000_000 - drift + self.random.u64(0..=2 * drift);
        slot.clock = Arc::new(Clock::new(&shared.time, process, ppm, self.random.fork()));
        slot.is_paused = false;
        slot.is_done = Arc::default();
        let link = Link::new(Arc::clone(shared), issuer);
        let store = Wrapper::new(Arc::clone(&self.engine), Arc::new(link));
        let db = Database::over(Arc::new(store), Env::new(Arc::clone(&slot.clock)));
        let is_done = Arc::clone(&slot.is_done);
        let main = actors::main(Arc::clone(shared), issuer, db);
        let main = async move {
            main.await;
            is_done.store(true, Ordering::Relaxed);
        };
        let seed = self.random.u64(..);
        slot.process = Some(match shared.plan.threads {
            None => Process::start(seed, main),
            Some(threads) => Process::start_threads(threads, main),
        });
        shared.time.make_runnable(process);
    }

    /// A commit arrives at the store. The power may fail.
    fn arrive(&mut self, flight: &Flight) {
        if !flight.is_for(&self.engine) {
            // Commits under way when the power failed are lost.
            return;
        }
        if let Some(machine) = &self.machine {
            if self.shared.strikes(Fault::PowerLoss) {
                machine.lose_power(&mut self.random);
            } else if self.shared.strikes(Fault::DiskFault) {
                machine.fail(&mut self.random);
            }
        }
        let in_doubt = flight.arrive(&self.shared).map(|doubt| (flight, doubt));
        if in_doubt.is_some() || self.machine.as_ref().is_some_and(Machine::is_dark) {
            self.lose_power(in_doubt);
        }
    }

    /// The power has failed, or the store has failed with its disk, and both come back. All processes were on the
    /// same machine. Every answered commit must be there, and the commit under way, if there is one, as a whole or
    /// not at all.
    fn lose_power(&mut self, in_doubt: Option<(&Flight, Doubt)>) {
        let (shared, time) = (Arc::clone(&self.shared), true_time(&self.shared.time));
        for process in 0..self.slots.len() {
            if self.slots[process].process.is_some() {
                self.crash(Issuer { process, generation: self.slots[process].generation });
            }
        }
        let Some(machine) = &self.machine else { return };
        let is_dark = machine.is_dark() || self.random.bool();
        shared.note(|| format!("the store ends; power has failed: {is_dark}"));
        if is_dark && machine.is_making_files() {
            shared.witness(Witness::PowerFailedWithinSnapshot);
        }
        if !machine.is_dark() {
            shared.witness(Witness::StoreFailedWithDisk);
        }
        let restarted =
            if is_dark { machine.restarted(&mut self.random, &time) } else { machine.killed(time) };
        let machine = match restarted {
            Ok(machine) => machine,
            Err(error) => {
                return shared.fail(
                    Guarantee::Durable.broken(format!("after the power or the disk had failed: {error}")),
                );
            }
        };
        let engine = machine.store();
        let (before, after) = (self.engine.begin(), engine.begin());
        let from = ready(before.read_version()).expect("the engine can be read");
        let Some(to) = machine.recovered(from) else {
            return shared.fail(
                Guarantee::Durable
                    .broken(format!("the store does not know any more that it was at version {from}")),
            );
        };
        let (mut expected, found) = (rows(&*before), rows(&*after));
        if let Some((flight, Doubt { mut touched, answer })) = in_doubt {
            if to > from {
                if !answer.is_maybe_committed() {
                    let reason = format!("the answer to a commit was {answer}, and it is on the disk");
                    return shared.fail(Guarantee::Durable.broken(reason));
                }
                let stamp = Versionstamp::new(to, 0);
                flight.add_stamped(&mut touched, stamp);
                // The oracle judges the rows that the commit under way touches.
                expected.retain(|key, _| !touched.contains_key(key));
                let written = found.iter().filter(|(key, _)| touched.contains_key(*key));
                expected.extend(written.map(|(key, value)| (key.clone(), value.clone())));
                flight.judge((&*shared, &mut shared.oracle()), (&*before, &*after), touched, stamp);
                shared.witness(Witness::CommitOutlivedPower);
            } else {
                shared.witness(Witness::CommitWentWithPower);
                if machine.unsynced().kept > 0 && machine.unsynced().lost > 0 {
                    shared.witness(Witness::CommitTorn);
                }
            }
        } else if to > from {
            shared.fail(
                Guarantee::Durable.broken(format!(
                    "nothing was under way at version {from}, and the store came back at {to}"
                )),
            );
        }
        if to < from || found != expected {
            shared.fail(Guarantee::Durable.broken(format!(
                "the power failed after version {from}, and came back at {to} with other rows"
            )));
        }
        (self.engine, self.machine) = (engine, Some(machine));
    }

    /// A process crashes, and starts again some time.
    fn crash(&mut self, issuer: Issuer) {
        let slot = &mut self.slots[issuer.process];
        self.shared.note(|| format!("process {}.{} crashes", issuer.process, issuer.generation));
        slot.process.take().expect("it lives").crash();
        slot.generation += 1;
        slot.is_paused = false;
        self.shared.oracle().crashed(issuer);
        let pause = Duration::from_millis(self.random.u64(0..=self.shared.plan.pause_max_ms));
        self.shared.time.after(pause, Event::Start(issuer.process));
    }

    /// Pauses processes, and lets clocks jump, if the faults strike.
    fn mishap(&mut self) {
        if self.shared.phase() > Phase::Chaos {
            return;
        }
        let shared = Arc::clone(&self.shared);
        if let Some(machine) = &self.machine
            && self.copy.is_none()
            && shared.time.now() > shared.plan.chaos / 2
        {
            let version = ready(self.engine.begin().read_version()).expect("the engine can be read");
            self.copy = Some((machine.copied(), version));
        }
        for (process, slot) in self.slots.iter_mut().enumerate() {
            if slot.process.is_none() || slot.is_paused {
                continue;
            }
            let issuer = Issuer { process, generation: slot.generation };
            let mut pause = || Duration::from_millis(self.random.u64(1..=shared.plan.pause_max_ms));
            if shared.strikes(Fault::Pause) {
                let pause = pause();
                shared.note(|| format!("process {process}.{} pauses for {pause:?}", issuer.generation));
                slot.pause();
                shared.time.after(pause, Event::Resume(issuer));
            }
            if shared.strikes(Fault::ClockJump) {
                let by = pause();
                shared
                    .note(|| format!("the clock of process {process}.{} jumps by {by:?}", issuer.generation));
                slot.clock.jump(by);
            }
        }
        shared.time.after(MISHAP_INTERVAL, Event::Mishap);
    }

    /// Ends the faults, and starts and resumes all processes.
    fn rest(&mut self) {
        self.enter(Phase::Rest);
        self.shared.see_rows(|| {
            let rows = rows(&*self.engine.begin()).into_iter();
            rows.map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
        });
        for process in 0..self.slots.len() {
            self.slots[process].resume();
            self.start(process);
        }
        self.shared.time.after(POLL_INTERVAL, Event::Poll);
    }

    /// Enters `phase`.
    fn enter(&mut self, phase: Phase) {
        self.since = self.shared.time.now();
        self.shared.enter(phase);
    }

    /// Enters the next phase, if this one is over.
    fn poll(&mut self) {
        let shared = Arc::clone(&self.shared);
        let passed = shared.time.now().saturating_sub(self.since);
        if shared.phase() == Phase::Rest {
            // By then late and slow commits have arrived, and dead nodes have been removed.
            let has_struck = |fault| shared.fault_count(fault) > 0;
            let is_late = has_struck(Fault::LateCommit) || has_struck(Fault::SlowCommit);
            let late = if is_late { TRANSACTION_LIFETIME } else { Duration::ZERO };
            let least = late + shared.plan.expiry_max() * 2 + Duration::from_secs(1);
            let (busy, now) = (shared.busy(), shared.time.now());
            if busy > 0 {
                self.calm_since = now;
            }
            let is_calm = passed >= least && now.saturating_sub(self.calm_since) >= least;
            let unrest = if is_calm {
                shared.oracle().unrest()
            } else {
                Some(format!("{busy} are still at work, or have been a moment ago"))
            };
            match unrest {
                None => {
                    shared.oracle().rested();
                    self.enter(Phase::End);
                }
                Some(unrest) if passed > REST_MAX + REST_PER_ENTRY * shared.oracle().entries() => {
                    let guarantee = shared.oracle().unrest_breaks();
                    shared.fail(guarantee.broken(format!("after {passed:?} without faults: {unrest}")));
                }
                Some(_) => {}
            }
        } else if self.slots.iter().all(|slot| slot.is_done.load(Ordering::Relaxed)) {
            self.finish();
            return;
        } else if passed > END_MAX {
            let is_late = |slot: &Slot| !slot.is_done.load(Ordering::Relaxed);
            let late: Vec<_> = self.slots.iter().map(is_late).collect();
            shared.fail(
                Guarantee::Live
                    .broken(format!("after {passed:?} these processes have not shut down: {late:?}")),
            );
        }
        shared.time.after(POLL_INTERVAL, Event::Poll);
    }

    /// Judges the store after all processes have shut down.
    fn finish(&mut self) {
        self.is_over = true;
        let left = rows(&*self.engine.begin());
        if let Some(folder) = &self.folder {
            let read = Database::open_dir_to_read(folder).map(|(store, _)| rows(&*store.backend().begin()));
            if !read.as_ref().is_ok_and(|rows| *rows == left) {
                let reason = format!("its folder has other rows than the store: {:?}", read.err());
                self.shared.fail(Guarantee::Durable.broken(reason));
            }
        }
        if let Some(machine) = &self.machine {
            machine.close();
            match machine.restarted(&mut self.random, &true_time(&self.shared.time)) {
                Ok(machine) if rows(&*machine.store().begin()) == left => {}
                Ok(_) => self.shared.fail("the store was closed in order, and has other rows".to_owned()),
                Err(error) => self.shared.fail(format!("the store was closed in order: {error}")),
            }
            if let Some((disk, version)) = self.copy.take() {
                self.restore(machine, disk, version);
            }
        }
        let mut oracle = self.shared.oracle();
        oracle.ended();
        if let Err(reason) = oracle.judge_history().and_then(|()| oracle.judge_store(&left)) {
            self.shared.fail(reason);
        }
    }

    /// Puts a copy of the folder, made at `version`, in its place.
    fn restore(&self, machine: &Machine, disk: SimulatedDisk, version: u64) {
        let (shared, env) = (&self.shared, true_time(&self.shared.time));
        let restored = match machine.restored(disk, env.clone()) {
            Ok(restored) => restored,
            Err(error) => {
                return shared.fail(Guarantee::Durable.broken(format!("a copy of the folder: {error}")));
            }
        };
        match restore::judge((machine.store(), restored.store()), version, &env, version) {
            Restored::Nothing => {}
            Restored::Well => shared.witness(Witness::CopyRestored),
            Restored::Wrong(broken) => shared.fail(broken),
        }
    }
}

/// All rows that `tx` sees.
fn rows(tx: &dyn TransactionBackend) -> BTreeMap<Bytes, Bytes> {
    let mut rows = BTreeMap::new();
    let mut rest = Some(RangeRead::new(KeyRange::new(&b""[..], &b"\xff"[..])));
    while let Some(read) = rest {
        let page = ready(tx.get_range(&read, Isolation::Snapshot)).expect("the engine can be read");
        rest = read.after(&page);
        rows.extend(page.rows);
    }
    rows
}
