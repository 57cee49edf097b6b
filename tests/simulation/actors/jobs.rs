//! Triggers, which processes take over from each other: an index trigger with parallel jobs, and a replication trigger with scans.
//! The jobs of both derive a row from each document, in transactions that are checked by the fence of their work.

use std::{
    future::pending,
    panic::resume_unwind,
    sync::{Arc, Weak},
    time::Duration,
};

use notibus::{
    Error, Result,
    changes::{Change, Changes, DocId},
    cursor::Cursor,
    dispatcher::{Dispatcher, Filter},
    event::Db,
    jobs::{
        Batch, IndexBuild, ParallelJob, Scan, TaskResult, Trigger, TriggerJob, index_trigger,
        replication_trigger,
    },
    store::{Isolation, Transaction},
};
use tokio::task::JoinSet;

use super::context::ActorContext;
use crate::{
    app::{self, Document, trigger},
    draw::JobPlan,
    shared::Phase,
    witness::Fault,
};

/// How often a trigger polls whether the phase has changed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The longest pause before a process starts a trigger, in milliseconds.
const PAUSE_MAX_MS: u64 = 300;

/// Starts the triggers of a world, if it has any. They end by themselves.
pub(super) fn start(actor: &ActorContext, dispatcher: &Arc<Dispatcher>) -> JoinSet<()> {
    let mut running = JoinSet::new();
    for name in trigger::ALL {
        let Some(plan) = actor.shared.plan.jobs.clone() else { continue };
        let job = Job { actor: actor.clone(), changes: actor.bus.changes(), plan: Arc::new(plan), name };
        running.spawn(job.run_trigger(Arc::downgrade(dispatcher)));
    }
    running
}

#[derive(Clone)]
struct Job {
    actor: ActorContext,
    changes: Changes,
    plan: Arc<JobPlan>,
    name: &'static str,
}

/// Checks transactions of work.
enum Check<'a> {
    Batch(&'a Batch<Change>),
    Scan(&'a Scan),
}

impl Check<'_> {
    async fn check_in(&self, tx: &Transaction) -> Result<()> {
        match self {
            Self::Batch(batch) => batch.check_in(tx).await,
            Self::Scan(scan) => scan.check_in(tx).await,
        }
    }
}

impl Job {
    /// Starts the trigger again and again, and thereby takes it from other processes. After the faults only the first process does.
    async fn run_trigger(self, dispatcher: Weak<Dispatcher>) {
        let actor = &self.actor;
        while actor.is_chaos() || actor.issuer.process == 0 && actor.phase() != Phase::End {
            actor.pause(PAUSE_MAX_MS).await;
            let phase = actor.phase();
            let Some(dispatcher) = dispatcher.upgrade() else { return };
            let started = self.start(&dispatcher).await;
            drop(dispatcher);
            match started {
                Ok(trigger) => self.keep(trigger, phase).await,
                Err(error) => actor.note(|| format!("cannot start trigger {}: {error}", self.name)),
            }
        }
    }

    /// Starts the trigger for all databases or, while faults strike, for some.
    async fn start(&self, dispatcher: &Dispatcher) -> Result<Trigger> {
        let is_narrow = self.plan.narrows && self.actor.is_chaos() && self.actor.random(2) == 0;
        let filter = if is_narrow { Filter::prefix("shop/") } else { Filter::all() };
        self.actor.note(|| format!("starts trigger {}; for some databases only: {is_narrow}", self.name));
        let options = self.plan.options.clone().name(self.name.to_owned()).filter(filter);
        match self.name {
            trigger::INDEX => index_trigger(dispatcher, options, self.clone()).await,
            _ => replication_trigger(dispatcher, options, self.clone()).await,
        }
    }

    /// Has `trigger` run until the end of `phase` at the latest, and then stops it: in order, or, while faults strike, as a crash does.
    async fn keep(&self, trigger: Trigger, phase: Phase) {
        let Self { actor, plan, .. } = self;
        let env = actor.db.env();
        let until = env.now() + Duration::from_millis(1 + actor.random(plan.runs_max_ms));
        while !trigger.status().is_finished
            && actor.phase() == phase
            && (phase != Phase::Chaos || env.now() < until)
        {
            env.sleep(POLL_INTERVAL).await;
        }
        if phase == Phase::Chaos && actor.random(2) == 0 {
            actor.note(|| format!("drops trigger {}", self.name));
            return;
        }
        match trigger.shutdown().await {
            Err(error) if actor.shared.phase() == Phase::End => {
                actor.shared.fail(format!("trigger {} does not shut down: {error}", self.name));
            }
            ended => actor.note(|| format!("has ended trigger {}: {ended:?}", self.name)),
        }
    }

    /// Derives rows from the present documents with these ids.
    async fn derive(&self, db: &Db, ids: &[DocId], check: Check<'_>) -> TaskResult {
        let derive = async |tx: Transaction| {
            check.check_in(&tx).await?;
            for id in ids {
                let stored = tx.get(&app::document(db.instance, id), Isolation::Serializable).await?;
                let doc = stored.map(|bytes| Document::from_bytes(id.as_str(), &bytes));
                let key = app::derived(self.name, db.instance, id);
                match doc.filter(|doc| !doc.doc.is_deleted) {
                    Some(doc) => tx.set(&key, doc.edited.as_bytes()),
                    None => tx.clear(&key),
                }
            }
            Ok(())
        };
        self.actor.db.run(derive).await?;
        self.fail_by_plan(db).await
    }

    /// Fails, panics or hangs, if that was drawn for the world.
    async fn fail_by_plan(&self, db: &Db) -> TaskResult {
        let Self { actor, plan, .. } = self;
        actor.pause(10).await;
        let fails = plan.failing.contains(&db.name);
        if actor.shared.strikes(Fault::JobHangs) || fails && plan.hangs {
            return pending().await;
        }
        if actor.shared.strikes(Fault::JobPanic) {
            // It unwinds without a message on the terminal.
            resume_unwind(Box::new("a job of a simulation panics"));
        }
        if actor.shared.strikes(Fault::JobError) || fails {
            return Err("a job of a simulation fails".into());
        }
        Ok(())
    }

    /// Removes what was derived from the documents of `db`.
    async fn clean_up(&self, db: &Db) -> TaskResult {
        if self.actor.shared.strikes(Fault::JobError) {
            return Err("a clean-up of a simulation fails".into());
        }
        let clean = async |tx: Transaction| {
            tx.clear_range(&app::all_derived(self.name, db.instance));
            tx.clear(&app::derived_to(self.name, db.instance));
            tx.set(&app::cleaned(self.name, db.instance), b"");
            Ok::<_, Error>(())
        };
        Ok(self.actor.db.run(clean).await?)
    }
}

impl TriggerJob<IndexBuild> for Job {
    async fn run(&self, build: IndexBuild) -> TaskResult {
        let (store, key) = (&self.actor.db, app::derived_to(self.name, build.db.instance));
        let stored = store.run(async |tx| tx.get(&key, Isolation::Serializable).await).await?;
        let since = stored.map_or(Ok(Cursor::NOTHING), |bytes| Cursor::from_bytes(&bytes))?;
        let job = ParallelJob::new(self.changes.feed(&build.db), since)
            .with_options(self.plan.parallel.clone())
            .with_fence(build.fence.clone());
        let (this, db) = (self.clone(), build.db.clone());
        let work = move |batch: Batch<Change>| {
            let (this, db) = (this.clone(), db.clone());
            async move {
                let ids: Vec<_> = batch.rows.iter().map(|row| row.doc.id.clone()).collect();
                this.derive(&db, &ids, Check::Batch(&batch)).await
            }
        };
        let to = job.run(work).await?;
        let save = async |tx: Transaction| {
            build.check_in(&tx).await?;
            tx.set(&key, &to.to_bytes());
            Ok(())
        };
        store.run(save).await?;
        self.fail_by_plan(&build.db).await
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        self.clean_up(&db).await
    }
}

impl TriggerJob<Scan> for Job {
    async fn run(&self, mut scan: Scan) -> TaskResult {
        loop {
            let page = scan.page(self.plan.parallel.batch_rows_max).await?;
            let ids: Vec<_> = page.rows.iter().map(|row| row.doc.id.clone()).collect();
            self.derive(&scan.db().clone(), &ids, Check::Scan(&scan)).await?;
            if self.actor.random(2) == 0 {
                scan.reporter().report(page.next).await?;
            }
            if !page.more {
                return Ok(());
            }
        }
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        self.clean_up(&db).await
    }
}
