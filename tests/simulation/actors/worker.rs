//! Members of consumers, with handlers that work exactly once, or in transactions that are verified, and that fail, hang and panic.

use std::{future::pending, panic::resume_unwind, sync::Arc, time::Duration};

use notibus::{
    Cursor, Error, Node, Notification, Result,
    consumer::{Batch, CommitState, Consumer, FencingToken, HandlerResult, Work},
    cursor::Start,
    event::{EventKind, Kinds},
    feed::ShardId,
    store::Transaction,
};

use super::context::ActorContext;
use crate::{
    app,
    draw::ConsumerPlan,
    oracle::{RunId, Told},
    shared::Phase,
    witness::{Fault, Witness},
};

/// The longest pause between two looks at whether the consumer is still there, in milliseconds.
const CHECK_PAUSE_MAX_MS: u64 = 500;

/// The longest pause of a task that a handler has left, in milliseconds.
const LEFT_MAX_MS: u64 = 3_000;

/// Works for the consumer of `plan` until the end: comes, stays and goes away while faults strike.
pub(super) async fn run(actor: &ActorContext, node: &Node, plan: ConsumerPlan) {
    let plan = Arc::new(plan);
    while actor.phase() != Phase::End {
        match join(actor, node, &plan).await {
            Ok(member) => stay(actor, &plan, member).await,
            Err(error) => actor.note(|| format!("cannot work for {}: {error}", plan.name)),
        }
        actor.pause(CHECK_PAUSE_MAX_MS).await;
    }
}

async fn join(actor: &ActorContext, node: &Node, plan: &Arc<ConsumerPlan>) -> Result<Consumer> {
    let builder = node.consumer_named(&plan.name)?;
    let builder = builder.filter(plan.interest.filter()).start_from(plan.start).options(plan.options.clone());
    let worker = Worker { actor: actor.clone(), plan: Arc::clone(plan) };
    if plan.is_batch {
        builder.run_batches(move |batch| worker.clone().batch(batch)).await
    } else {
        builder.run(move |work| worker.clone().work(work)).await
    }
}

/// Stays for a while, or until the end, as long as the consumer is there.
async fn stay(actor: &ActorContext, plan: &ConsumerPlan, member: Consumer) {
    let env = actor.db.env();
    let until = env.now() + Duration::from_millis(1 + actor.random(plan.stay_max_ms));
    let phase = actor.phase();
    while actor.phase() != Phase::End && !(phase == Phase::Chaos && (env.now() >= until || !actor.is_chaos()))
    {
        actor.pause(CHECK_PAUSE_MAX_MS).await;
        if let Err(Error::NoConsumer { .. }) = member.handle().status().await {
            break;
        }
    }
    if actor.is_chaos() && actor.random(2) == 0 {
        actor.note(|| format!("drops its member of {}", plan.name));
        return;
    }
    match member.shutdown().await {
        Err(error) if actor.phase() == Phase::End => {
            actor.shared.fail(format!("a member of {} does not shut down: {error}", plan.name));
        }
        ended => actor.note(|| format!("its member of {} has ended: {ended:?}", plan.name)),
    }
}

#[derive(Clone)]
struct Worker {
    actor: ActorContext,
    plan: Arc<ConsumerPlan>,
}

/// What checks the transactions of a run.
#[derive(Clone)]
enum Check {
    Work(Work<Notification>),
    Batch(Batch<Notification>),
}

impl Check {
    async fn commit_in(&self, tx: &Transaction) -> Result<CommitState> {
        match self {
            Self::Work(work) => work.commit_in(tx).await,
            Self::Batch(batch) => batch.commit_in(tx).await,
        }
    }

    async fn verify(&self, tx: &Transaction) -> Result<()> {
        match self {
            Self::Work(work) => work.verify(tx).await,
            Self::Batch(batch) => batch.verify(tx).await,
        }
    }
}

/// What a handler is told of `row`, where `since` is finished.
fn told(row: &Notification, since: Cursor) -> Told {
    let news = row.news_since(since).kinds();
    let is_end = row.is_deleted() || news.contains(EventKind::Deleted);
    Told { id: row.name.as_str().to_owned(), at: Some(row.sequence), news, is_end }
}

impl Worker {
    async fn work(self, work: Work<Notification>) -> HandlerResult {
        let id = String::from_utf8_lossy(work.id()).into_owned();
        let is_end = work.gone().is_some();
        let given = match work.row() {
            Some(row) => Told { is_end, ..told(row, work.since()) },
            None => Told { id, at: None, news: Kinds::NONE, is_end },
        };
        let place = (work.fencing_token(), work.shard());
        self.perform(vec![given], place, Check::Work(work)).await
    }

    async fn batch(self, batch: Batch<Notification>) -> HandlerResult {
        let given = batch.rows.iter().map(|row| told(row, batch.since())).collect();
        let place = (batch.fencing_token(), batch.shard());
        self.perform(given, place, Check::Batch(batch)).await
    }

    async fn perform(&self, given: Vec<Told>, place: (FencingToken, ShardId), check: Check) -> HandlerResult {
        let Self { actor, plan } = self;
        let run = actor.shared.oracle().run_began(&plan.name, place, given.clone());
        actor.note(|| format!("begins run {run} of {} in {}: {given:?}", plan.name, place.1));
        actor.pause(plan.work_max_ms).await;
        let fails = given.iter().any(|told| plan.failing.iter().any(|name| name.as_str() == told.id));
        if actor.shared.strikes(Fault::HandlerHangs) {
            return pending().await;
        }
        if actor.shared.strikes(Fault::HandlerPanic) {
            // It unwinds without a message on the terminal.
            resume_unwind(Box::new("a handler of a simulation panics"));
        }
        if actor.shared.strikes(Fault::HandlerError) {
            return Err("a handler of a simulation fails".into());
        }
        if actor.random(2) == 0 {
            for _ in 0..actor.random(plan.steps_max + 1) {
                self.step(run, &given, &check).await?;
                actor.pause(plan.work_max_ms).await;
            }
        }
        if fails {
            return Err("a handler of a simulation fails with this database forever".into());
        }
        if actor.shared.strikes(Fault::HandlerLeavesTask) {
            let left = self.clone();
            tokio::spawn(async move {
                left.actor.pause(LEFT_MAX_MS).await;
                let finished = left.finish(run, &given, &check).await;
                left.actor.note(|| format!("has finished run {run} apart: {finished:?}"));
            });
            return Err("a handler of a simulation leaves a task".into());
        }
        if let Err(error) = self.finish(run, &given, &check).await {
            if matches!(error, Error::Cancelled { .. } | Error::LeaseLost { .. }) {
                actor.shared.witness(Witness::WorkFoundCancelled);
            }
            return Err(error.into());
        }
        if actor.shared.strikes(Fault::HandlerError) {
            return Err("a handler of a simulation fails after its work".into());
        }
        actor.note(|| format!("ends run {run} of {}", plan.name));
        Ok(())
    }

    /// Does a part of the work.
    async fn step(&self, run: RunId, given: &[Told], check: &Check) -> Result<()> {
        let step = async |tx: Transaction| {
            check.verify(&tx).await?;
            self.write(&tx, run, given, false);
            Ok(())
        };
        self.actor.db.run(step).await
    }

    /// Finishes the work.
    async fn finish(&self, run: RunId, given: &[Told], check: &Check) -> Result<()> {
        let finish = async |tx: Transaction| {
            if !self.plan.is_exact {
                check.verify(&tx).await?;
            } else if check.commit_in(&tx).await?.is_already_committed() {
                self.actor.shared.witness(Witness::WorkFoundDone);
                return Ok(());
            }
            self.write(&tx, run, given, true);
            Ok(())
        };
        self.actor.db.run(finish).await
    }

    fn write(&self, tx: &Transaction, run: RunId, given: &[Told], is_final: bool) {
        for told in given {
            let work = app::work(run, is_final, self.actor.bits());
            tx.set(&app::worked(&self.plan.name, told.id.as_bytes()), &work);
        }
    }
}

/// Manages a consumer of the world, at random.
pub(super) async fn operate(actor: &ActorContext) -> Result<()> {
    let plans = &actor.shared.plan.consumers;
    let Some(plan) =
        plans.get(actor.random(plans.len().max(1) as u64) as usize).filter(|plan| plan.is_operated)
    else {
        return Ok(());
    };
    let handle = actor.bus.consumer(&plan.name)?;
    let force = actor.random(2) == 0;
    match actor.random(16) {
        0..4 => {
            let (glob, only_deferred) =
                (["*", "shop/*", "a"][actor.random(3) as usize], actor.random(2) == 0);
            actor.note(|| {
                format!("asks {} to work on {glob} again; on deferred ids only: {only_deferred}", plan.name)
            });
            handle.again(glob, only_deferred).await.map(drop)
        }
        4..8 => {
            let name = &actor.shared.plan.names[actor.random(actor.shared.plan.names.len() as u64) as usize];
            actor.note(|| format!("discards {name:?} of {}", plan.name));
            handle.discard(name.as_str().as_bytes()).await.map(drop)
        }
        8..12 => {
            actor.note(|| format!("pauses {}", plan.name));
            handle.pause().await?;
            actor.pause(1_000).await;
            handle.resume().await
        }
        12..15 => {
            let start = match actor.random(3) {
                0 => Cursor::NOTHING.into(),
                1 => actor.bus.feed().horizon().await?.into(),
                _ => Start::Now,
            };
            actor.note(|| format!("resets {} to {start:?}, by force: {force}", plan.name));
            handle.reset(start, force).await
        }
        _ => {
            actor.note(|| format!("deletes {}, by force: {force}", plan.name));
            handle.delete(force).await
        }
    }
}

/// Lets the consumers go on that an operator has paused.
pub(super) async fn resume(actor: &ActorContext) {
    for plan in &actor.shared.plan.consumers {
        let Ok(handle) = actor.bus.consumer(&plan.name) else { continue };
        let resumed = handle.resume().await;
        actor.note(|| format!("resumes {}: {resumed:?}", plan.name));
    }
}
