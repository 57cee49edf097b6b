//! [`Findings`]: what was found in a world so far: the faults that struck, the states that it was in, its trace, and the first breach of a
//! promise.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::{
    guarantee::Broken,
    kernel::{time::Time, trace::Trace},
    witness::{Fault, Witness},
};

/// What was found in a world so far, with the world's clock, which dates the findings.
#[derive(Default)]
pub struct Findings {
    pub time: Time,
    trace: Trace,
    /// How many times each fault struck.
    faults: Mutex<BTreeMap<Fault, u64>>,
    /// How many times the world was in each interesting state.
    witnesses: Mutex<BTreeMap<Witness, u64>>,
    /// The first breach of a promise.
    failure: Mutex<Option<Broken>>,
}

impl Findings {
    /// Returns empty findings at the beginning of time. The trace is kept if `is_traced`.
    pub fn new(is_traced: bool) -> Self {
        Self { trace: Trace::new(is_traced), ..Self::default() }
    }

    /// Counts `fault`.
    pub fn count(&self, fault: Fault) {
        *self.faults.lock().entry(fault).or_default() += 1;
        self.note(|| format!("fault: {fault:?}"));
    }

    /// Returns how many times each fault struck.
    pub fn faults(&self) -> BTreeMap<Fault, u64> {
        self.faults.lock().clone()
    }

    /// Counts `witness` as seen.
    pub fn witness(&self, witness: Witness) {
        *self.witnesses.lock().entry(witness).or_default() += 1;
        self.note(|| format!("witness: {witness:?}"));
    }

    /// Returns how many times the world was in each interesting state.
    pub fn witnesses(&self) -> BTreeMap<Witness, u64> {
        self.witnesses.lock().clone()
    }

    /// Fails the world with `broken`, unless there was a breach before.
    pub fn fail(&self, broken: impl Into<Broken>) {
        let broken = broken.into();
        self.note(|| format!("FAILURE: {broken}"));
        self.failure.lock().get_or_insert(broken);
    }

    /// Whether a promise was broken.
    pub fn has_failed(&self) -> bool {
        self.failure.lock().is_some()
    }

    /// Returns the first breach of a promise.
    pub fn failure(&self) -> Option<Broken> {
        self.failure.lock().clone()
    }

    /// Adds a line to the trace.
    pub fn note(&self, line: impl FnOnce() -> String) {
        self.trace.add(self.time.now(), line);
    }

    /// Takes the trace, if it was kept.
    pub fn take_trace(&self) -> Option<String> {
        self.trace.take()
    }
}
