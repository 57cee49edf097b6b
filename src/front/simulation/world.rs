//! [`World`]: processes, a store and faults.
//!
//! The world draws one of the processes that can run, and runs it until it has nothing left to do. When no process
//! can run, time leaps to the next entry of the schedule. So a seed determines everything that happens.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::future::Either;

use super::{
    actors::{self, mover::Mover},
    commits::{Doubt, ready, rows},
    draw::WorldPlan,
    event::Event,
    flight::Flight,
    guarantee::Guarantee,
    issuer::{Issuer, ProcessId},
    keyspace::BUS_PREFIX,
    link::Link,
    machine::Machine,
    process::Process,
    relocation::Relocation,
    restore::{self, Restored},
    shared::{Phase, Shared},
    time::{Clock, true_time},
    witness::{Fault, Witness},
};
use crate::{
    base::{encoding::Versionstamp, env::Env},
    state::keys::Keys,
    store::{
        Backend, Database, Isolation, TRANSACTION_LIFETIME,
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

/// The longest time until processes that have to stop for a move of the bus have done so, before they crash.
const STOP_MAX: Duration = Duration::from_secs(2);

/// The longest time for which faults strike a move of the bus.
const MOVE_MAX: Duration = Duration::from_mins(1);

/// How long the world waits for a bus that can move.
const BUS_PAUSE: Duration = Duration::from_millis(500);

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

pub(super) struct World {
    shared: Arc<Shared>,
    engine: Arc<dyn Backend>,
    /// The machine of a durable store.
    machine: Option<Machine>,
    /// A copy of the folder, which was made while it was in use, and the version at which that was.
    copy: Option<(SimulatedDisk, u64)>,
    /// The move of the bus, while it is under way.
    relocation: Option<Relocation>,
    /// The processes, and the one of the operator who moves the bus.
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
    pub fn new(shared: &Arc<Shared>, mut random: fastrand::Rng) -> Self {
        let time = &shared.time;
        let machine = shared
            .plan
            .is_durable
            .then(|| Machine::new(&mut random, true_time(time)).expect("an empty disk can be used"));
        let engine = match &machine {
            Some(machine) => machine.store(),
            None => Database::memory_backend(true_time(time)),
        };
        let slots = shared.mover() + usize::from(shared.plan.relocation.is_some());
        let slots = (0..slots).map(|process| Slot {
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
            copy: None,
            relocation: None,
            slots,
            random,
            since: Duration::ZERO,
            calm_since: Duration::ZERO,
            is_over: false,
        }
    }

    /// Runs the world to its end.
    pub fn run(mut self) {
        let WorldPlan { chaos, processes, relocation, .. } = &self.shared.plan;
        let time = self.shared.time.clone();
        for process in 0..processes.len() {
            time.after(Duration::from_millis(self.random.u64(0..500)), Event::Start(process));
        }
        time.after(MISHAP_INTERVAL, Event::Mishap);
        match relocation {
            Some(relocation) => {
                time.after(relocation.at, Event::Move);
                time.after(*chaos + MOVE_MAX, Event::Rest);
            }
            None => time.after(*chaos, Event::Rest),
        }
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
                    self.slots[issuer.process].is_paused = false;
                    self.shared.note(|| format!("process {}.{} goes on", issuer.process, issuer.generation));
                }
            }
            Event::Mishap => self.mishap(),
            Event::Move => self.begin_move(),
            Event::Stopped => self.stopped(),
            Event::Silent => self.silent(),
            Event::Moved => self.moved(),
            Event::Rest => self.rest(),
            Event::Poll => self.poll(),
        }
    }

    /// Starts a process, if it does not run. While the bus moves, only its operator works.
    fn start(&mut self, process: ProcessId) {
        let shared = Arc::clone(&self.shared);
        let is_mover = process == shared.mover();
        let may_start = match &self.relocation {
            Some(relocation) => is_mover && relocation.is_ready,
            None => !is_mover,
        };
        if !may_start || self.slots[process].process.is_some() {
            return;
        }
        let issuer = Issuer { process, generation: self.slots[process].generation };
        shared.note(|| {
            let plan = shared.plan.processes.get(process);
            format!("process {process}.{} starts: {plan:?}", issuer.generation)
        });
        let drift = shared.plan.drift_ppm;
        let ppm = 1_000_000 - drift + self.random.u64(0..=2 * drift);
        let clock = Arc::new(Clock::new(&shared.time, process, ppm, self.random.fork()));
        let store = |engine: &Arc<dyn Backend>| {
            let link = Link::new(Arc::clone(&shared), issuer);
            let store = Wrapper::new(Arc::clone(engine), Arc::new(link));
            Database::over(Arc::new(store), Env::new(Arc::clone(&clock)))
        };
        let old = store(&self.engine);
        let main = match (&self.relocation, shared.plan.relocation) {
            (Some(relocation), Some(plan)) => {
                let (new, engine) = (store(&relocation.engine), Arc::clone(&relocation.engine));
                let mover = Mover { shared: Arc::clone(&shared), issuer, plan, old, new, engine };
                Either::Left(mover.run())
            }
            _ => Either::Right(actors::main(Arc::clone(&shared), issuer, old)),
        };
        let is_done: Arc<AtomicBool> = Arc::default();
        let ends = Arc::clone(&is_done);
        let main = async move {
            main.await;
            ends.store(true, Ordering::Relaxed);
        };
        let seed = self.random.u64(..);
        let started = Process::start(seed, main);
        let slot = &mut self.slots[process];
        (slot.clock, slot.is_paused, slot.is_done) = (clock, false, is_done);
        slot.process = Some(started);
        shared.time.make_runnable(process);
    }

    /// The bus begins to move: all processes stop, some in order, some as by a crash.
    fn begin_move(&mut self) {
        let Some(plan) = self.shared.plan.relocation else { return };
        if self.shared.phase() != Phase::Chaos {
            return;
        }
        let shared = Arc::clone(&self.shared);
        if !self.has_bus() {
            return shared.time.after(BUS_PAUSE, Event::Move);
        }
        shared.note(|| format!("the bus begins to move: {plan:?}"));
        self.relocation = Some(Relocation::new(&shared, plan, &mut self.random));
        shared.stop(true);
        let in_order = self.random.bool();
        for process in 0..shared.mover() {
            let Slot { generation, process: living, is_paused, .. } = &self.slots[process];
            let issuer = Issuer { process, generation: *generation };
            if living.is_some() && (*is_paused || !in_order && self.random.bool()) {
                self.crash(issuer);
            }
        }
        shared.time.after(STOP_MAX, Event::Stopped);
    }

    /// Whether there is a bus in the store.
    fn has_bus(&self) -> bool {
        let config = Keys::new(BUS_PREFIX).expect("the prefix is short").config();
        ready(self.engine.begin().get(&config, Isolation::Snapshot))
            .expect("the engine can be read")
            .is_some()
    }

    /// Processes that have not stopped crash. When nothing is under way to the old store any more, the operator begins.
    fn stopped(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut are_in_order = true;
        for process in 0..shared.mover() {
            let slot = &mut self.slots[process];
            let issuer = Issuer { process, generation: slot.generation };
            if slot.process.is_none() {
                are_in_order = false;
            } else if slot.is_done.load(Ordering::Relaxed) {
                slot.process = None;
                slot.generation += 1;
                shared.oracle().gone(issuer);
            } else {
                are_in_order = false;
                self.crash(issuer);
            }
        }
        if are_in_order {
            shared.witness(Witness::StoppedInOrder);
        }
        shared.time.after(TRANSACTION_LIFETIME, Event::Silent);
    }

    /// Nothing is under way to the old store any more.
    fn silent(&mut self) {
        let Some(relocation) = &mut self.relocation else { return };
        relocation.get_ready(&*self.engine);
        self.start(self.shared.mover());
    }

    /// The bus has moved: all processes start at its new place.
    fn moved(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(relocation) = self.relocation.take() else { return };
        relocation.finish(&shared, &*self.engine);
        self.slots[shared.mover()].process = None;
        (self.engine, self.machine, self.copy) = (relocation.engine, relocation.machine, None);
        shared.stop(false);
        for process in 0..shared.mover() {
            shared.time.after(Duration::from_millis(self.random.u64(0..500)), Event::Start(process));
        }
        self.since = shared.time.now();
        if let Some(plan) = shared.plan.relocation {
            shared.time.after(shared.plan.chaos.saturating_sub(plan.at), Event::Rest);
        }
    }

    /// A commit arrives at the store. The power may fail.
    fn arrive(&mut self, flight: &Flight) {
        if self.relocation.as_ref().is_some_and(|relocation| flight.is_for(&relocation.engine)) {
            flight.arrive(&self.shared);
            return;
        }
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
        if let Some(struck) = self.machine.as_ref().and_then(Machine::struck) {
            self.shared.witness(struck);
        }
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
        let keys = Keys::new(BUS_PREFIX).expect("the prefix is short");
        let nodes = found.keys().filter_map(|key| keys.node_of(key).ok());
        shared.oracle().opened_again(nodes.collect());
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
                slot.is_paused = true;
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
        if self.shared.phase() > Phase::Chaos {
            return;
        }
        self.enter(Phase::Rest);
        self.shared.see_rows(|| {
            let rows = rows(&*self.engine.begin()).into_iter();
            rows.map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
        });
        for process in 0..self.slots.len() {
            self.slots[process].is_paused = false;
            self.start(process);
        }
        self.shared.time.after(POLL_INTERVAL, Event::Poll);
    }

    fn enter(&mut self, phase: Phase) {
        self.since = self.shared.time.now();
        self.shared.enter(phase);
    }

    /// Enters the next phase, if this one is over.
    fn poll(&mut self) {
        let shared = Arc::clone(&self.shared);
        let passed = shared.time.now().saturating_sub(self.since);
        if self.relocation.is_some() {
            if passed > REST_MAX {
                shared.fail(
                    Guarantee::Live.broken(format!("after {passed:?} without faults the bus has not moved")),
                );
            }
        } else if shared.phase() == Phase::Rest {
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
                    self.enter(Phase::End);
                }
                Some(unrest) if passed > REST_MAX + REST_PER_ENTRY * shared.oracle().entries() => {
                    let guarantee = shared.oracle().unrest_breaks();
                    shared.fail(guarantee.broken(format!("after {passed:?} without faults: {unrest}")));
                }
                Some(_) => {}
            }
        } else if self.slots[..shared.mover()].iter().all(|slot| slot.is_done.load(Ordering::Relaxed)) {
            self.finish();
            return;
        } else if passed > END_MAX {
            let is_late = |slot: &Slot| !slot.is_done.load(Ordering::Relaxed);
            let late: Vec<_> = self.slots[..shared.mover()].iter().map(is_late).collect();
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
        let oracle = self.shared.oracle();
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
