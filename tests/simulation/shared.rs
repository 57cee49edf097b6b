//! [`Shared`]: the state that all parts of a world share.

use std::{
    ops::{Deref, RangeInclusive},
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};

use crate::{
    draw::WorldPlan,
    findings::Findings,
    kernel::{Event, Issuer},
    oracle::Oracle,
    witness::Fault,
};

/// The message of panics that callbacks raise on purpose.
pub const PLANNED_PANIC: &str = "a callback of a simulation panics";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Actors work, and faults strike.
    Chaos,
    /// Faults no longer strike, and actors begin no new work: everything must come to rest.
    Rest,
    /// All processes shut down.
    End,
}

/// The state that all parts of a world share. It dereferences to its findings, so that each part can add to them.
pub struct Shared {
    pub plan: WorldPlan,
    findings: Findings,
    oracle: Mutex<Oracle>,
    random: Mutex<fastrand::Rng>,
    phase: AtomicU8,
    /// The number of working actors that end by themselves after the faults: producers, operators, and processes that are starting.
    busy: AtomicUsize,
    /// Each process with a mirror holds a clone until the mirror is judged at rest. The mirror may still wait for folds of stale events,
    /// which no promise covers, so notifiers run until no process holds a clone.
    pub unjudged: Arc<()>,
}

/// Counts an actor as at work until this value is dropped.
pub struct Busy(Arc<Shared>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Deref for Shared {
    type Target = Findings;

    fn deref(&self) -> &Findings {
        &self.findings
    }
}

impl Shared {
    /// Makes the state of a world with `plan`, whose faults are drawn from `random`.
    pub fn new(plan: WorldPlan, random: fastrand::Rng, findings: Findings) -> Arc<Self> {
        let mut oracle = Oracle::new(plan.names.clone(), plan.documents.is_some());
        oracle.expect_consumers(&plan.consumers);
        oracle.has_steady_clocks = plan.rate(Fault::ClockJump) == 0.0;
        oracle.leaves_rows = plan.documents.as_ref().is_some_and(|documents| documents.misuses);
        if plan.has_janitor() {
            let given_up = plan.consumers.iter().filter(|consumer| consumer.is_given_up());
            oracle.expect_janitor(given_up.map(|consumer| consumer.name.clone()).collect());
        }
        Arc::new(Self {
            plan,
            findings,
            oracle: Mutex::new(oracle),
            random: Mutex::new(random),
            phase: AtomicU8::new(Phase::Chaos as u8),
            busy: AtomicUsize::new(0),
            unjudged: Arc::default(),
        })
    }

    /// Locks the oracle, which judges what happens.
    pub fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock()
    }

    /// Draws a random number.
    pub fn draw(&self, range: RangeInclusive<u64>) -> u64 {
        self.random.lock().u64(range)
    }

    /// Whether `fault` strikes now.
    pub fn strikes(&self, fault: Fault) -> bool {
        let rate = self.plan.rate(fault);
        if rate == 0.0 || self.phase() > Phase::Chaos || self.random.lock().f64() >= rate {
            return false;
        }
        self.count(fault);
        true
    }

    /// Makes the process crash soon, if the fault strikes.
    pub fn may_crash(&self, issuer: Issuer) {
        if self.strikes(Fault::Crash) {
            let pause = Duration::from_micros(self.draw(0..=5_000));
            self.time.after(pause, Event::Crash(issuer));
        }
    }

    /// Makes the process crash now, although its commit happened, if the fault strikes.
    pub fn may_crash_before_answer(&self, issuer: Issuer) {
        if self.strikes(Fault::CrashBeforeAnswer) {
            self.time.after(Duration::ZERO, Event::Crash(issuer));
        }
    }

    /// Counts an actor as at work.
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.busy.fetch_add(1, Ordering::Relaxed);
        Busy(Arc::clone(self))
    }

    /// Returns the number of actors at work.
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

    /// Receives a log line of the library.
    pub fn hear(&self, level: tracing::Level, message: &str, fields: &str) {
        self.note(|| format!("{level} {message}{fields}"));
        // Panics that callbacks raise on purpose are logged too.
        let is_panic = message.contains("panicked") && !fields.contains(PLANNED_PANIC);
        if is_panic || fields.contains("corrupt ") {
            self.fail(format!("the library says: {message}{fields}"));
        }
    }
}
