//! Restores: the store is replaced with a copy, and everything that was written after the copy is lost.
//!
//! A folder is copied with its own history, and its versions continue: the incarnation may be raised, but need not be. A store in memory
//! stands for a cluster: its rows are copied into a fresh store whose versions are all lower than those of the copy, and the incarnation is
//! raised, either before any process starts or later.

use std::{sync::Arc, time::Duration};

use notibus::{
    Bus,
    event::{Incarnation, Sequence},
    store::{Env, Store},
};

use super::World;
use crate::{
    disk::SimulatedDisk,
    guarantee::Guarantee,
    kernel::{
        Event,
        commits::{ready, rows},
        machine::Machine,
    },
    keyspace::{BUS_PREFIX, Rows},
    oracle::{Oracle, Restored},
    shared::Phase,
    witness::Witness,
};

/// The maximum number of rows that a transaction of a restore writes.
const ROWS_AT_ONCE: usize = 500;

/// A copy of the store, and what the oracle knew when the copy was taken.
pub(super) struct StoreCopy {
    rows: Rows,
    /// The copied disk, if the store is durable.
    disk: Option<SimulatedDisk>,
    oracle: Oracle,
    version: u64,
    /// The last sequence that the table of incarnations contains.
    end: Sequence,
}

/// Makes a fresh store with these rows.
fn filled(env: Env, all: &Rows) -> Store {
    let store = Store::memory_in(env);
    let rows: Vec<_> = all.iter().collect();
    for rows in rows.chunks(ROWS_AT_ONCE) {
        let tx = store.begin();
        for (key, value) in rows {
            tx.set(key, value);
        }
        ready(tx.commit()).expect("nothing conflicts in a fresh store");
    }
    store
}

impl World {
    /// Copies the store, unless the bus has written no sequence yet and so has nothing to lose.
    pub(super) fn copy(&mut self) {
        let (rows, version) = (rows(&self.engine), ready(self.engine.begin().read_version()));
        let end = [BUS_PREFIX, &foundationdb_tuple::pack(&(26_u16, 0_u16))].concat();
        let Some(end) = rows.get(&end[..]) else { return };
        let end = Sequence::from_bytes(end).expect("the bus has written it");
        let version = version.expect("the engine can be read");
        self.shared.note(|| format!("the store is copied at version {version}, its rows end at {end}"));
        let disk = self.machine.as_ref().map(Machine::copied);
        self.copy = Some(StoreCopy { rows, disk, oracle: self.shared.oracle().clone(), version, end });
    }

    /// Crashes all processes, and replaces the store with the copy.
    pub(super) fn restore(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(plan) = shared.plan.restore.filter(|_| shared.phase() == Phase::Chaos) else { return };
        let Some(copy) = self.copy.take() else { return };
        self.crash_where(|_| true);
        self.ahead_ms = plan.ahead_ms;
        let env = self.store_time();
        let mut machine = None;
        if let (Some(original), Some(disk)) = (&self.machine, copy.disk) {
            let open = |disk| original.with(disk, env.clone());
            let opened = open(disk);
            let opened =
                if plan.opened_before { opened.and_then(|machine| open(machine.copied())) } else { opened };
            match opened {
                Ok(opened) => machine = Some(opened),
                Err(error) => {
                    return shared
                        .fail(Guarantee::Durable.broken(format!("a copy cannot be opened: {error}")));
                }
            }
        }
        let engine = machine.as_ref().map_or_else(|| filled(env, &copy.rows), Machine::store);
        if rows(&engine) != copy.rows {
            return shared.fail(Guarantee::Durable.broken("a copy of the folder has other rows"));
        }
        let version = ready(engine.begin().read_version()).expect("the engine can be read");
        shared.note(|| format!("the copy is put in the place of the store, at version {version}: {plan:?}"));
        shared.witness(Witness::StoreRestored);
        let seen = Sequence::last_at(Incarnation(0), copy.version);
        let is_raised = plan.raised_after.is_some();
        let (kept, lost) = (if is_raised { copy.end } else { seen }, seen);
        let incarnation = Incarnation(u8::from(is_raised));
        let versions = (copy.version, version);
        let is_older = version < copy.version;
        shared.oracle().restored(copy.oracle, &Restored { versions, kept, lost, incarnation, is_older });
        if machine.is_some() {
            shared.oracle().opened_again();
        }
        (self.engine, self.machine) = (Arc::new(engine), machine);
        match plan.raised_after {
            Some(Duration::ZERO) => self.raise(),
            Some(after) => shared.time.after(after, Event::Raise),
            None => {}
        }
    }

    /// Raises the incarnation if the store is still older than its own rows. Nodes notice that by themselves; processes without a node, and
    /// those with producers, which write without a lease, are crashed.
    pub(super) fn heal(&mut self) {
        if !self.shared.oracle().is_older() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let is_stopped = |process: usize| {
            let plan = shared.plan.processes[process];
            !plan.is_node() || plan.producers > 0
        };
        self.crash_where(is_stopped);
        self.raise();
    }

    fn raise(&mut self) {
        let force = self.machine.is_some();
        self.shared.note(|| "the incarnation is raised".to_owned());
        if let Err(error) = ready(Bus::raise_incarnation(&self.engine, BUS_PREFIX, Incarnation(0), force)) {
            let reason = format!("the incarnation cannot be raised: {error}");
            return self.shared.fail(Guarantee::Live.broken(reason));
        }
        let version = ready(self.engine.begin().read_version()).expect("the engine can be read");
        self.shared.oracle().raised(version);
    }
}
