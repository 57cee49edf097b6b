//! [`Relocation`]: a move of the bus to another store, in the middle of the life of a world.
//!
//! All processes stop, some in order and some as by a crash. After the lifetime of a transaction nothing is under way to the old store
//! any more, and an operator moves the bus, in a process of its own that faults strike as any other: it is paused, crashes, and begins
//! again (`actors/mover.rs`). Then all processes start at the new place.

use std::sync::Arc;

use bytes::Bytes;

use super::{
    app,
    commits::{ready, rows},
    draw::{RelocationPlan, Way},
    keyspace::{BUS_PREFIX, Rows},
    machine::Machine,
    oracle::{judge_moved, unfinished},
    shared::Shared,
    time::{Clock, Time},
    witness::Witness,
};
use crate::{
    base::env::Env,
    store::{Backend, Database, Mutation},
};

/// How many rows are copied in one transaction.
const COPIED_AT_ONCE: usize = 500;

/// A move that is under way.
pub(super) struct Relocation {
    plan: RelocationPlan,
    /// The new store.
    pub engine: Arc<dyn Backend>,
    /// Its machine, if it is durable.
    pub machine: Option<Machine>,
    /// Whether nothing is under way to the old store any more, so that the operator can begin.
    pub is_ready: bool,
}

impl Relocation {
    /// A move to an empty store.
    pub fn new(shared: &Shared, plan: RelocationPlan, random: &mut fastrand::Rng) -> Self {
        let env = env_of(&shared.time, plan);
        let machine = shared
            .plan
            .is_durable
            .then(|| Machine::new(random, env.clone()).expect("an empty disk can be used"));
        let engine = machine.as_ref().map_or_else(|| Database::memory_backend(env), Machine::store);
        Self { plan, engine, machine, is_ready: false }
    }

    /// Nothing is under way to the `old` store any more. If the whole store moves, this copies it.
    pub fn get_ready(&mut self, old: &dyn Backend) {
        if self.plan.way == Way::Raise {
            copy(&rows(&*old.begin()), &*self.engine);
        }
        self.is_ready = true;
    }

    /// The operator says that the bus has moved. Judges what has come of it, and moves the rows of the layer.
    pub fn finish(&self, shared: &Shared, old: &dyn Backend) {
        let (before, found) = (rows(&*old.begin()), rows(&*self.engine.begin()));
        if let Err(broken) = judge_moved(&before, &found, self.plan.way) {
            shared.fail(broken);
        }
        if before.keys().any(|key| unfinished(key)) {
            shared.witness(Witness::UnfinishedWorkMoved);
        }
        shared.witness(match self.plan.way {
            Way::Export => Witness::BusMoved,
            Way::Raise => Witness::IncarnationRaised,
        });
        if self.plan.way == Way::Export {
            let of_layer = |(key, _): &(&Bytes, &Bytes)| key.starts_with(app::PREFIX);
            let own = before.iter().filter(of_layer).map(|(key, value)| (key.clone(), value.clone()));
            copy(&own.collect(), &*self.engine);
        }
        shared.oracle().moved();
    }
}

/// True time for the new store, whose versions are behind those of the old one.
fn env_of(time: &Time, plan: RelocationPlan) -> Env {
    Env::new(Arc::new(Clock::exact(time, usize::MAX).behind(plan.behind)))
}

fn copy(rows: &Rows, engine: &dyn Backend) {
    let rows: Vec<_> = rows.iter().collect();
    for rows in rows.chunks(COPIED_AT_ONCE) {
        let tx = engine.begin();
        for (key, value) in rows {
            tx.mutate(Mutation::Set((*key).clone(), (*value).clone()));
        }
        ready(tx.commit()).expect("nobody else writes");
    }
}

/// The rows of `engine` under the prefix of the bus.
pub(super) fn rows_of_bus(engine: &dyn Backend) -> Rows {
    let mut rows = rows(&*engine.begin());
    rows.retain(|key, _| key.starts_with(BUS_PREFIX));
    rows
}

/// Removes the rows of `engine` under the prefix of the bus.
pub(super) fn wipe(engine: &dyn Backend) {
    let tx = engine.begin();
    for key in rows_of_bus(engine).into_keys() {
        tx.mutate(Mutation::Clear(key));
    }
    ready(tx.commit()).expect("nobody else writes");
}
