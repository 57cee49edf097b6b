//! [`World`]: processes, a store and faults.
//!
//! The world draws one of the processes that can run, and runs it until it has nothing left to do. When no process can run, time jumps to
//! the next entry in the schedule. So a seed determines everything that happens.

mod restored;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    event::Versionstamp,
    store::{Env, Store, testing::intercepted},
};

use crate::{
    actors,
    draw::WorldPlan,
    findings::Findings,
    guarantee::{Broken, Guarantee},
    kernel::{
        Event, Issuer, ProcessId,
        commits::{Doubt, Flight, ready, rows},
        link::Link,
        machine::Machine,
        process::Process,
        time::{Clock, store_time},
        trace::Listener,
    },
    shared::{Phase, Shared},
    witness::{Fault, Witness},
};

/// The lifetime of a transaction.
const TRANSACTION_LIFETIME: Duration = Duration::from_secs(5);

/// The result of a world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub seed: u64,
    /// The first breach of a promise; `None` if there was none.
    pub failure: Option<Broken>,
    /// The trace, line by line, if it was requested.
    pub trace: Option<String>,
    /// How many times each fault struck.
    pub faults: BTreeMap<Fault, u64>,
    /// How many times the world was in each interesting state.
    pub witnesses: BTreeMap<Witness, u64>,
    /// How much time passed in the world.
    pub elapsed: Duration,
}

/// Makes the world of `seed`, and runs it to its end. This blocks the thread, and must not be called within a runtime.
pub fn simulate(seed: u64, is_traced: bool) -> Outcome {
    let mut random = fastrand::Rng::with_seed(seed ^ 0x6e6f_7469_6275_7321);
    let shared = Shared::new(WorldPlan::draw(seed), random.fork(), Findings::new(is_traced));
    shared.note(|| format!("seed {seed}: {:#?}", shared.plan));
    let listener = Listener::new({
        let shared = Arc::clone(&shared);
        move |level, message, fields| shared.hear(level, message, fields)
    });
    tracing::subscriber::with_default(listener, || World::new(&shared, random).run());
    Outcome {
        seed,
        failure: shared.failure(),
        trace: shared.take_trace(),
        faults: shared.faults(),
        witnesses: shared.witnesses(),
        elapsed: shared.time.now(),
    }
}

/// The interval at which pauses of processes and jumps of clocks are drawn.
const MISHAP_INTERVAL: Duration = Duration::from_millis(250);

/// The interval at which the world checks whether everything is at rest.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The maximum time until everything is at rest.
const REST_MAX: Duration = Duration::from_mins(2);

/// The additional time for each topology entry, because a consumer needs a round of balancing to move on to the next entry.
const REST_PER_ENTRY: Duration = Duration::from_secs(3);

/// The maximum time until all processes have shut down.
const END_MAX: Duration = Duration::from_mins(1);

/// A process, with its successive lives.
struct Slot {
    /// The number of earlier starts.
    generation: u64,
    /// The current life of the process.
    process: Option<Process>,
    clock: Arc<Clock>,
    is_paused: bool,
    /// Whether the process has shut down.
    is_done: Arc<AtomicBool>,
}

struct World {
    shared: Arc<Shared>,
    engine: Arc<Store>,
    /// The machine of the store, if the store is durable.
    machine: Option<Machine>,
    slots: Vec<Slot>,
    /// Chooses the process to run, and seeds the processes.
    random: fastrand::Rng,
    /// When the current phase began.
    since: Duration,
    /// When any actor was last at work.
    calm_since: Duration,
    is_over: bool,
    /// A copy of the store, until it replaces the store.
    copy: Option<restored::StoreCopy>,
    /// How far the versions of the store are ahead of true time.
    ahead_ms: i64,
}

impl World {
    /// Makes a world in which nothing has happened yet.
    pub fn new(shared: &Arc<Shared>, mut random: fastrand::Rng) -> Self {
        let time = &shared.time;
        let machine = shared
            .plan
            .is_durable
            .then(|| Machine::new(&mut random, store_time(time, 0)).expect("an empty disk can be used"));
        let engine = match &machine {
            Some(machine) => machine.store(),
            None => Store::memory_in(store_time(time, 0)),
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
            engine: Arc::new(engine),
            machine,
            slots,
            random,
            since: Duration::ZERO,
            calm_since: Duration::ZERO,
            is_over: false,
            copy: None,
            ahead_ms: 0,
        }
    }

    /// Runs the world to its end.
    pub fn run(mut self) {
        let WorldPlan { chaos, processes, restore, .. } = &self.shared.plan;
        let time = self.shared.time.clone();
        for process in 0..processes.len() {
            time.after(Duration::from_millis(self.random.u64(0..500)), Event::Start(process));
        }
        time.after(MISHAP_INTERVAL, Event::Mishap);
        time.after(*chaos, Event::Rest);
        if let Some(restore) = restore {
            time.after(restore.copied_after, Event::Copy);
            time.after(restore.copied_after + restore.lost, Event::Restore);
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
            Event::Copy => self.copy(),
            Event::Restore => self.restore(),
            Event::Raise => self.heal(),
            Event::Rest => self.rest(),
            Event::Poll => self.poll(),
        }
    }

    /// Starts a process, unless it is already running.
    fn start(&mut self, process: ProcessId) {
        let shared = Arc::clone(&self.shared);
        if self.slots[process].process.is_some() {
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
        let link = Link::new(Arc::clone(&shared), issuer, Arc::clone(&self.engine));
        let store = intercepted(&self.engine, clock.env(), &Arc::new(link));
        let main = actors::main(Arc::clone(&shared), issuer, store);
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

    /// Delivers a commit to the store. The power may fail at that moment.
    fn arrive(&mut self, flight: &Flight) {
        if !flight.is_for(&self.engine) {
            // Commits that were in flight when the power failed are lost.
            return;
        }
        if let Some(machine) = &self.machine {
            if self.shared.strikes(Fault::PowerLoss) {
                machine.lose_power(&mut self.random);
            } else if self.shared.strikes(Fault::DiskFails) {
                machine.fail(&mut self.random);
            } else if self.shared.strikes(Fault::NoRoom) {
                machine.fill(&mut self.random);
            }
            machine.make_room(&mut self.random);
        }
        let in_doubt = flight.arrive(&self.shared).map(|doubt| (flight, doubt));
        if self.machine.as_ref().is_some_and(Machine::has_struck) {
            self.shared.witness(Witness::DiskFailed);
        }
        if in_doubt.is_some() || self.machine.as_ref().is_some_and(Machine::is_dark) {
            self.lose_power(in_doubt);
        }
    }

    /// Restarts the machine after its power failed, or after the store failed with its disk. All processes run on this machine, so they
    /// crash, too. Every answered commit must survive, and the commit in flight, if there is one, must survive as a whole or not at all.
    fn lose_power(&mut self, in_doubt: Option<(&Flight, Doubt)>) {
        let (shared, time) = (Arc::clone(&self.shared), self.store_time());
        self.crash_where(|_| true);
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
        let engine = Arc::new(machine.store());
        let (before, after) = (self.engine.begin(), engine.begin());
        let from = ready(before.read_version()).expect("the engine can be read");
        let Some(to) = machine.recovered(from) else {
            return shared.fail(
                Guarantee::Durable
                    .broken(format!("the store does not know any more that it was at version {from}")),
            );
        };
        let (mut expected, found) = (rows(&self.engine), rows(&engine));
        if let Some((flight, Doubt { mut touched, answer })) = in_doubt {
            if to > from {
                if !answer.is_maybe_committed() {
                    let reason = format!("the answer to a commit was {answer}, and it is on the disk");
                    return shared.fail(Guarantee::Durable.broken(reason));
                }
                let stamp = Versionstamp::new(to, 0);
                flight.add_stamped(&mut touched, stamp);
                // The rows that the commit in flight touched are judged by the oracle instead.
                expected.retain(|key, _| !touched.contains_key(key));
                let written = found.iter().filter(|(key, _)| touched.contains_key(*key));
                expected.extend(written.map(|(key, value)| (key.clone(), value.clone())));
                flight.judge((&*shared, &mut shared.oracle()), (&before, &after), touched, stamp);
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
        shared.oracle().opened_again();
        (self.engine, self.machine) = (engine, Some(machine));
    }

    /// Returns an environment with the clock of the store.
    fn store_time(&self) -> Env {
        store_time(&self.shared.time, self.ahead_ms)
    }

    /// Crashes the processes that `is_meant` selects.
    fn crash_where(&mut self, is_meant: impl Fn(ProcessId) -> bool) {
        for process in 0..self.slots.len() {
            if self.slots[process].process.is_some() && is_meant(process) {
                self.crash(Issuer { process, generation: self.slots[process].generation });
            }
        }
    }

    /// Crashes a process, which starts again some time later.
    fn crash(&mut self, issuer: Issuer) {
        let slot = &mut self.slots[issuer.process];
        self.shared.note(|| format!("process {}.{} crashes", issuer.process, issuer.generation));
        slot.process.take().expect("it lives").crash();
        slot.generation += 1;
        slot.is_paused = false;
        self.shared.oracle().gone(issuer);
        let pause = Duration::from_millis(self.random.u64(0..=self.shared.plan.pause_max_ms));
        self.shared.time.after(pause, Event::Start(issuer.process));
    }

    /// Pauses processes and makes clocks jump, if these faults strike.
    fn mishap(&mut self) {
        if self.shared.phase() > Phase::Chaos {
            return;
        }
        let shared = Arc::clone(&self.shared);
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

    /// Ends the faults, and starts or resumes all processes.
    fn rest(&mut self) {
        if self.shared.phase() > Phase::Chaos {
            return;
        }
        self.enter(Phase::Rest);
        if let Some(machine) = &self.machine {
            machine.empty();
        }
        self.heal();
        self.shared.oracle().has_come_to_rest();
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

    /// Enters the next phase if the current one is over.
    fn poll(&mut self) {
        let shared = Arc::clone(&self.shared);
        let passed = shared.time.now().saturating_sub(self.since);
        if shared.phase() == Phase::Rest {
            // After `least`, late and slow commits have arrived, and dead nodes have been removed.
            let has_struck = |fault| shared.faults().contains_key(&fault);
            let is_late = has_struck(Fault::LateCommit) || has_struck(Fault::SlowCommit);
            let late = if is_late { TRANSACTION_LIFETIME } else { Duration::ZERO };
            let least = late + shared.plan.expiry_max() * 2 + Duration::from_secs(1);
            let (busy, now) = (shared.busy(), shared.time.now());
            if busy > 0 {
                self.calm_since = now;
            }
            let is_calm = passed >= least && now.saturating_sub(self.calm_since) >= least;
            let unrest = if is_calm {
                shared.oracle().unrest(&shared)
            } else {
                Some(format!("{busy} are still at work, or have been a moment ago"))
            };
            match unrest {
                None => {
                    self.enter(Phase::End);
                }
                Some(unrest) if passed > REST_MAX + REST_PER_ENTRY * shared.oracle().entries() => {
                    let guarantee = shared.oracle().unrest_breaks(&shared);
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
        let left = rows(&self.engine);
        if let Some(machine) = &self.machine {
            machine.close();
            let time = self.store_time();
            match machine.restarted(&mut self.random, &time) {
                Ok(machine) if rows(&machine.store()) == left => {}
                Ok(_) => self.shared.fail("the store was closed in order, and has other rows".to_owned()),
                Err(error) => self.shared.fail(format!("the store was closed in order: {error}")),
            }
        }
        let oracle = self.shared.oracle();
        if let Err(reason) = oracle.judge_history().and_then(|()| oracle.judge_left(&left)) {
            self.shared.fail(reason);
        }
    }
}
