//! [`ConsumerPlan`]: what is drawn for a consumer: what its handlers do, and how its members come and go.

use std::time::Duration;

use fastrand::Rng;
use notibus::{
    consumer::{ConsumerOptions, ConsumerSettings, FailurePolicy},
    cursor::{Cursor, Start},
    event::{DbName, EventKind, Kinds},
};

use super::{WorldPlan, rates};
use crate::{
    oracle::{GLOBS, Interest, Which},
    witness::Fault,
};

/// The maximum number of databases whose documents are followed.
const FOLLOWED_MAX: usize = 2;

/// The plan of a consumer.
#[derive(Debug, Clone)]
pub(crate) struct ConsumerPlan {
    pub name: String,
    /// The database whose documents the consumer follows, as long as that database exists; `None` if it follows notifications.
    pub documents: Option<DbName>,
    pub start: Start,
    /// What the consumer wants.
    pub interest: Interest,
    /// Whether the handlers work on batches; otherwise they work on ids, concurrently.
    pub is_batch: bool,
    /// Whether the transaction that finishes work is also the one with its effect. Otherwise, transactions are only verified.
    pub is_exact: bool,
    /// The ids on which the handlers always fail.
    pub failing: Vec<String>,
    /// The maximum number of transactions before the last one of a run.
    pub steps_max: u64,
    /// The longest pause within a run, in milliseconds.
    pub work_max_ms: u64,
    /// The longest time that a member stays, in milliseconds.
    pub stay_max_ms: u64,
    /// Whether an operator manages the consumer.
    pub is_operated: bool,
    /// The maximum number of concurrent runs for the ids of one tenant, if the ids have tenants.
    pub tenants_max: Option<usize>,
    pub options: ConsumerOptions,
    /// The absences of the members, if the consumer can expire.
    pub absences: Option<AbsencePlan>,
}

/// How long a consumer has no members, and after how long without them it is deleted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AbsencePlan {
    pub expiry: Duration,
    /// The longest absence of a member, in milliseconds.
    pub away_max_ms: u64,
    /// Whether the members come back after the faults. Otherwise the consumer has to expire.
    pub returns: bool,
}

impl AbsencePlan {
    fn draw(random: &mut Rng) -> Self {
        let expiry_ms = random.u64(300..=3_000);
        Self {
            expiry: Duration::from_millis(expiry_ms),
            away_max_ms: expiry_ms * [1, 3][random.usize(0..2)],
            returns: random.bool(),
        }
    }
}

impl ConsumerPlan {
    /// Whether the consumer has no members after the faults, so that it has to expire.
    pub fn is_given_up(&self) -> bool {
        self.absences.is_some_and(|absences| !absences.returns)
    }

    /// Returns the settings of the consumer, which must follow notifications.
    pub fn settings(&self) -> ConsumerSettings {
        let settings = ConsumerSettings::default().filter(self.interest.filter()).start(self.start);
        settings.expiry(self.absences.map(|absences| absences.expiry))
    }

    /// Draws a consumer of notifications with the number `number`.
    fn draw(random: &mut Rng, world: &WorldPlan, number: usize) -> Self {
        let ms = |random: &mut Rng, from: u64, to: u64| Duration::from_millis(random.u64(from..=to));
        let names = &world.names;
        let which = match random.u32(0..8) {
            0 => Which::Prefix("shop/".into()),
            1 => Which::Suffix("/_replicator".into()),
            2 => Which::Glob(GLOBS[random.usize(0..GLOBS.len())]),
            3 => Which::Names(names[..names.len().min(2)].to_vec()),
            _ => Which::All,
        };
        let kinds = match random.u32(0..4) {
            0 => Kinds::from(EventKind::Created) | EventKind::DdocUpdated.into(),
            1 => EventKind::Updated.into(),
            _ => Kinds::ALL,
        };
        let failure = if random.u32(0..4) == 0 { FailurePolicy::Hold } else { FailurePolicy::Defer };
        let failing = match failure {
            FailurePolicy::Defer if random.u32(0..3) == 0 => vec![names[0].as_str().to_owned()],
            _ => Vec::new(),
        };
        let options = ConsumerOptions::default()
            .max_concurrency([1, 2, 4, 16][random.usize(0..4)])
            .debounce(if random.bool() { Duration::ZERO } else { ms(random, 1, 300) })
            .attempts_max(random.u32(1..=3))
            .backoff_min(ms(random, 5, 50))
            .backoff_max(ms(random, 50, 2_000))
            .stall_limit(ms(random, 500, 3_000))
            .failure(failure)
            .batch_rows_max(random.usize(1..=10))
            .batch_bytes_max(if random.bool() { 300 } else { 1_000_000 })
            .checkpoint_interval(ms(random, 5, 500))
            .in_hand_max([1, 3, 1_000][random.usize(0..3)])
            .poll_interval(ms(random, 500, 5_000))
            .balance(world.notifier.balance.clone().leases_max(None));
        Self {
            name: format!("consumer-{number}"),
            documents: None,
            start: if random.bool() { Start::Now } else { Cursor::BEGINNING.into() },
            interest: Interest { kinds, ..Interest::of(which) },
            is_batch: random.u32(0..3) == 0,
            is_exact: random.u32(0..3) > 0,
            failing,
            steps_max: random.u64(0..=2),
            work_max_ms: [5, 50, 800][random.usize(0..3)],
            stay_max_ms: [300, 3_000, 30_000][random.usize(0..3)],
            is_operated: random.u32(0..3) > 0,
            tenants_max: (random.u32(0..4) == 0).then(|| random.usize(1..=2)),
            options,
            absences: None,
        }
    }

    /// Turns the plan into one for the documents of the database `db`, which has the number `number`.
    fn of_documents(self, db: &DbName, number: usize) -> Self {
        Self {
            name: format!("documents-{number}"),
            documents: Some(db.clone()),
            interest: Interest::of(Which::All),
            failing: self.failing.iter().map(|_| "p:0".to_owned()).collect(),
            absences: None,
            ..self
        }
    }
}

impl WorldPlan {
    /// Adds consumers in most worlds.
    pub(super) fn with_consumers(mut self, random: &mut Rng) -> Self {
        let number = if random.u32(0..4) == 0 { 0 } else { random.usize(1..=2) };
        let mut consumers: Vec<_> =
            (0..number).map(|number| ConsumerPlan::draw(random, &self, number)).collect();
        let expires = self.has_janitor() && random.u32(0..3) == 0;
        for consumer in consumers.iter_mut().filter(|_| expires) {
            consumer.absences = (random.u32(0..3) > 0).then(|| AbsencePlan::draw(random));
        }
        if self.has_janitor() && number > 0 && !self.sizes.is_crowded && random.u32(0..6) == 0 {
            self.churn_consumers(random);
        }
        if self.documents.is_some() && random.u32(0..3) > 0 {
            let plan = ConsumerPlan::draw(random, &self, 0);
            let followed = (0..).zip(self.names.iter().take(FOLLOWED_MAX));
            consumers.extend(followed.map(|(number, db)| plan.clone().of_documents(db, number)));
        }
        if consumers.is_empty() {
            return self;
        }
        if self.sizes.is_crowded || self.sizes.has_many_shards {
            for consumer in &mut consumers {
                let options = &mut consumer.options;
                (options.batch_rows_max, options.batch_bytes_max) = (100, 1_000_000);
                (options.max_concurrency, options.in_hand_max) = (16, 1_000);
                (consumer.work_max_ms, consumer.steps_max) = (5, 0);
            }
        }
        self.consumers = consumers;
        for process in &mut self.processes {
            process.works = process.is_node() && random.u32(0..3) > 0;
        }
        self.processes[0].works = true;
        self.rates.extend(rates(random, Fault::is_of_handlers));
        self
    }

    /// Adds everything that exposes the janitor to consumers that come and go: an operator that only deletes and creates consumers, many
    /// tombstones that soon reach their retention, and slow transactions.
    fn churn_consumers(&mut self, random: &mut Rng) {
        self.churns_consumers = true;
        self.documents = None;
        if !self.processes.iter().any(|process| process.operator) {
            self.processes.push(super::ProcessPlan { operator: true, ..super::ProcessPlan::default() });
        }
        self.latency_us = [3_000, 20_000][random.usize(0..2)];
        self.think_max_ms = 20;
        self.operate_max_ms = 50;
        self.janitor.interval = Duration::from_millis(random.u64(10..=40));
        self.janitor.tombstone_retention = Duration::from_millis(random.u64(1..=20));
    }

    /// In some worlds, makes the results of many commits unknown and their answers late, so that others act before a transaction is
    /// retried. Consumers there give up on a row after two attempts, so that a first attempt whose commit had an unknown result is decided
    /// between the two. More consumers also expire, each after a few passes of the janitor, some of which fail.
    pub(super) fn with_doubts(mut self, random: &mut Rng) -> Self {
        if random.u32(0..6) > 0 {
            return self;
        }
        self.doubts_last = true;
        for fault in [Fault::UnknownCommitted, Fault::LateCommit, Fault::TimedOut] {
            let rate = random.f64() * 0.15;
            if random.u32(0..3) > 0 {
                self.rates.retain(|(of, _)| *of != fault);
                self.rates.push((fault, rate));
            }
        }
        for consumer in &mut self.consumers {
            let options = &mut consumer.options;
            (options.attempts_max, options.backoff_min) = (2, Duration::from_millis(random.u64(10..=50)));
        }
        if self.has_janitor() && !self.churns_consumers && random.bool() {
            for consumer in self.consumers.iter_mut().filter(|consumer| consumer.documents.is_none()) {
                let absences = consumer.absences.get_or_insert_with(|| AbsencePlan::draw(random));
                self.janitor.interval = absences.expiry / random.u32(3..=8);
            }
        }
        self
    }
}
