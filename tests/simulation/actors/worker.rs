//! Members of consumers, with handlers that work exactly once or in verified transactions, and that fail, hang and panic.

use std::{future::pending, panic::resume_unwind, sync::Arc, time::Duration};

use bytes::Bytes;
use notibus::{
    Cursor, Error, Node, Notification, Result,
    changes::Change,
    consumer::{
        Batch, CommitState, ConsumedRow, Consumer, ConsumerBuilder, ConsumerHandle, FencingToken,
        HandlerResult, Work,
    },
    event::EventKind,
    feed::ShardId,
    store::Transaction,
};

use super::context::ActorContext;
use crate::{
    app,
    draw::ConsumerPlan,
    guarantee::Guarantee,
    oracle::{RunId, Shown},
    shared::Phase,
    witness::{Fault, Witness},
};

/// The longest pause between two checks of whether the consumer still exists, in milliseconds.
const CHECK_PAUSE_MAX_MS: u64 = 500;

/// The longest pause of a task that a handler leaves behind, in milliseconds.
const LEFT_MAX_MS: u64 = 3_000;

/// The longest pause of a handler once the faults have ended, in milliseconds: shorter than any stall limit.
const REST_WORK_MAX_MS: u64 = 400;

/// Works for the consumer of `plan` until the end. While faults strike, the member joins, stays for a while and leaves.
pub(super) async fn run(actor: &ActorContext, node: &Node, plan: ConsumerPlan) {
    let plan = Arc::new(plan);
    let away_max_ms = plan.absences.map_or(CHECK_PAUSE_MAX_MS, |absences| absences.away_max_ms);
    // A process that may create a consumer that has to expire counts as busy until the faults have ended.
    let mut busy = plan.is_given_up().then(|| actor.shared.begin());
    while actor.phase() != Phase::End {
        if plan.is_given_up() && !actor.is_chaos() {
            busy = None;
        } else {
            match join(actor, node, &plan).await {
                Ok(Some(member)) => stay(actor, &plan, member).await,
                Ok(None) => {}
                Err(error) => actor.note(|| format!("cannot work for {}: {error}", plan.name)),
            }
        }
        actor.pause(if actor.is_chaos() { away_max_ms } else { CHECK_PAUSE_MAX_MS }).await;
    }
    drop(busy);
}

/// Becomes a member; returns `None` if there is nothing to follow.
async fn join(actor: &ActorContext, node: &Node, plan: &Arc<ConsumerPlan>) -> Result<Option<Consumer>> {
    let builder = node.consumer(&plan.name)?;
    let Some(name) = &plan.documents else {
        let builder = builder.filter(plan.interest.filter());
        return start(actor, plan, builder).await.map(Some);
    };
    let living = actor.shared.oracle().living();
    let Some(db) = living.into_iter().find(|db| db.name == *name) else { return Ok(None) };
    let joined = start(actor, plan, builder.documents(&actor.bus.changes().feed(&db))).await;
    if let Err(Error::Invalid { .. }) = &joined
        && actor.shared.oracle().living().contains(&db)
    {
        actor.note(|| format!("deletes {}, which follows a database that was before {db:?}", plan.name));
        actor.bus.consumer(&plan.name)?.delete(true).await?;
    }
    joined.map(Some)
}

async fn start<R: Worked>(
    actor: &ActorContext,
    plan: &Arc<ConsumerPlan>,
    builder: ConsumerBuilder<R>,
) -> Result<Consumer> {
    let mut builder = builder.start_from(plan.start).options(plan.options.clone());
    if let Some(absences) = plan.absences {
        builder = builder.expire_after(absences.expiry);
    }
    let worker = Worker { actor: actor.clone(), plan: Arc::clone(plan) };
    if plan.is_batch {
        let builder = builder.options(plan.options.clone().debounce(Duration::ZERO));
        return builder.run_batches(move |batch| worker.clone().batch(batch)).await;
    }
    if let Some(running_max) = plan.tenants_max {
        builder = builder.tenants(running_max, |id| Bytes::copy_from_slice(&id[..1.min(id.len())]));
    }
    builder.run(move |work| worker.clone().work(work)).await
}

/// Stays a member for a while, or until the end, but only as long as the consumer exists.
async fn stay(actor: &ActorContext, plan: &ConsumerPlan, member: Consumer) {
    let env = actor.store.env();
    let until = env.now() + Duration::from_millis(1 + actor.random(plan.stay_max_ms));
    let ends = actor.is_chaos() || plan.is_given_up();
    while actor.phase() != Phase::End && !(ends && (env.now() >= until || !actor.is_chaos())) {
        tokio::select! {
            biased;
            error = member.ended() => {
                actor.note(|| format!("{} has ended: {error}", plan.name));
                match error {
                    Error::NoFeed { .. } => actor.shared.witness(Witness::DocumentConsumerEnded),
                    Error::NoConsumer { .. } => actor.shared.witness(Witness::ConsumerFoundGone),
                    // The incarnation was raised.
                    Error::BusGone { .. } => {}
                    _ => actor.shared.fail(format!("{} has ended for another reason: {error}", plan.name)),
                }
                break;
            }
            () = actor.pause(CHECK_PAUSE_MAX_MS) => {}
        }
        if !is_there(actor, member.handle()).await {
            actor.shared.witness(Witness::ConsumerFoundGone);
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

/// Whether the consumer exists, as far as the member can know. Judges the answer unless something changes in between.
async fn is_there(actor: &ActorContext, handle: &ConsumerHandle) -> bool {
    let name = handle.name().to_string();
    let before = actor.shared.oracle().existence(&name);
    let status = handle.status().await;
    let is_gone = matches!(status, Err(Error::NoConsumer { .. }));
    if before == actor.shared.oracle().existence(&name)
        && (is_gone && before.0 || status.is_ok() && !before.0)
    {
        let reason =
            format!("{name} exists: {}, and a member got an answer that it does not: {is_gone}", before.0);
        actor.shared.fail(Guarantee::Consistent.broken(reason));
    }
    !is_gone
}

#[derive(Clone)]
struct Worker {
    actor: ActorContext,
    plan: Arc<ConsumerPlan>,
}

/// The guard that checks the transactions of a run.
#[derive(Clone)]
enum Check<R> {
    Work(Work<R>),
    Batch(Batch<R>),
}

impl<R> Check<R> {
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

/// A row that handlers work on.
trait Worked: ConsumedRow {
    /// Returns what a handler is shown of the row if the work is finished up to `since`.
    fn shown(&self, _since: Cursor) -> Shown {
        Shown { at: Some(self.sequence()), ..Shown::end_of(self.id(), None) }
    }
}

impl Worked for Change {}

impl Worked for Notification {
    fn shown(&self, since: Cursor) -> Shown {
        let news = self.news_since(since);
        let deleted = news.iter().find(|(_, kind)| *kind == EventKind::Deleted).map(|(instance, _)| instance);
        let end = deleted.or(self.is_deleted().then_some(self.instance));
        Shown { id: self.name.as_str().to_owned(), at: Some(self.sequence), news: news.kinds(), end }
    }
}

/// A call of a handler, which counts as ended when this value is dropped.
struct Running {
    actor: ActorContext,
    run: RunId,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.actor.shared.oracle().run_ended(self.run);
    }
}

impl Worker {
    async fn work<R: Worked>(self, work: Work<R>) -> HandlerResult {
        let end = work.gone();
        let given = match work.row() {
            Some(row) => Shown { end, ..row.shown(work.since()) },
            None => Shown::end_of(work.id(), end),
        };
        let place = (work.fencing_token(), work.shard());
        self.perform(vec![given], place, Check::Work(work)).await
    }

    async fn batch<R: Worked>(self, batch: Batch<R>) -> HandlerResult {
        let mut given: Vec<_> = batch.rows.iter().map(|row| row.shown(batch.since())).collect();
        given.extend(batch.gone().map(|(id, end)| Shown::end_of(id, Some(end))));
        let place = (batch.fencing_token(), batch.shard());
        self.perform(given, place, Check::Batch(batch)).await
    }

    async fn perform<R: Worked>(
        &self,
        given: Vec<Shown>,
        place: (FencingToken, ShardId),
        check: Check<R>,
    ) -> HandlerResult {
        let Self { actor, plan } = self;
        let who = (actor.issuer, &*plan.name);
        let run = actor.shared.oracle().run_began(&actor.shared, who, place, given.clone());
        let _running = Running { actor: actor.clone(), run };
        actor.note(|| format!("begins run {run} of {} in {}: {given:?}", plan.name, place.1));
        self.take_time().await;
        let fails = given.iter().any(|shown| plan.failing.contains(&shown.id));
        if actor.shared.strikes(Fault::HandlerHangs) {
            return pending().await;
        }
        if actor.shared.strikes(Fault::HandlerPanic) {
            // This unwinds without printing a message to the terminal.
            resume_unwind(Box::new("a handler of a simulation panics"));
        }
        if actor.shared.strikes(Fault::HandlerError) {
            return Err("a handler of a simulation fails".into());
        }
        if actor.random(2) == 0 {
            for _ in 0..actor.random(plan.steps_max + 1) {
                self.step(run, &given, &check).await?;
                self.take_time().await;
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

    /// Takes some time: once the faults have ended, too little to count as a stall. Otherwise work could seem lost only because several
    /// runs in a row happened to stall.
    async fn take_time(&self) {
        let Self { actor, plan } = self;
        let is_at_rest = actor.shared.phase() == Phase::Rest;
        actor.pause(if is_at_rest { plan.work_max_ms.min(REST_WORK_MAX_MS) } else { plan.work_max_ms }).await;
    }

    /// Does part of the work.
    async fn step<R>(&self, run: RunId, given: &[Shown], check: &Check<R>) -> Result<()> {
        let step = async |tx: Transaction| {
            check.verify(&tx).await?;
            self.write(&tx, run, given, false);
            Ok(())
        };
        self.actor.store.run(step).await
    }

    /// Finishes the work.
    async fn finish<R>(&self, run: RunId, given: &[Shown], check: &Check<R>) -> Result<()> {
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
        self.actor.store.run(finish).await
    }

    fn write(&self, tx: &Transaction, run: RunId, given: &[Shown], is_final: bool) {
        for shown in given {
            let work = app::work(run, is_final, self.actor.bits());
            tx.set(&app::worked(&self.plan.name, shown.id.as_bytes()), &work);
        }
    }
}
