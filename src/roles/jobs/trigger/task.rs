//! The task of a trigger: receives deliveries, starts due jobs, and saves its progress.

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
};
use tokio::sync::watch;
use tokio_stream::StreamExt;

use super::{
    FAILURE_PAUSE, Trigger, TriggerOptions,
    attempt::{self, AttemptLimits},
    cursor,
    kind::{Ended, Failure, Kind},
    owed::{self, Owed},
    plan::{self, End, Observed, Outcome, Plan},
    retries::Retries,
    search::{Found, Search},
};
use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result, panic_text},
        event::{Db, DbName},
        tasks::{self, Canceller, Joined, RestartPauses, Task, Tasks},
    },
    roles::dispatcher::{Delivery, Dispatcher, Interruption, Subscribe, Subscription},
    state::{
        context::Context,
        keys::{OwedRow, ParkedRow},
        named_cursor::OpenCursor,
        trigger_board::TriggerStatus,
    },
};

/// How long work may hold the cursor back. After that the store lists it as owed, so that work that others have done meanwhile is
/// not repeated after a crash.
const HOLD_MAX: Duration = Duration::from_secs(10);

/// How many names one transaction adds to the list or removes from it.
const OWED_BATCH: usize = 500;

/// How many names are added to the list at shutdown. The feed delivers the others again.
const OWED_AT_END_MAX: usize = 20_000;

pub(in crate::roles::jobs) async fn start<K: Kind>(
    dispatcher: &Dispatcher,
    options: TriggerOptions,
    kind: K,
) -> Result<Trigger> {
    options.check()?;
    let subscribe = subscribe::<K>(dispatcher, &options, Cursor::NOTHING);
    let mut subscription = subscribe.durable_from(&cursor(dispatcher, &options)?, true).await?.stream();
    // Nothing below may fail, because the earlier holder of the cursor has lost it by now.
    let cursor = subscription.take_cursor().expect("it is durable");
    let (stop, stopped) = watch::channel(false);
    let (status, watched) = watch::channel(TriggerStatus::new(cursor.stored()));
    let context = Arc::clone(dispatcher.context());
    let env = context.env().clone();
    context.triggers.note(&options.name, watched.clone());
    let task = Task::spawn(
        Supervisor { dispatcher: dispatcher.subscriptions(), options, kind: Arc::new(kind), cursor, status }
            .run(subscription, stopped),
    );
    Ok(Trigger { task, stop, status: watched, env })
}

/// A subscription for what the trigger wants, from `start` on.
fn subscribe<K: Kind>(dispatcher: &Dispatcher, options: &TriggerOptions, start: Cursor) -> Subscribe {
    let subscribe = dispatcher.subscribe(options.filter.clone()).since(start);
    if K::DDOCS { subscribe.with_ddocs() } else { subscribe }
}

/// Starts the work of a trigger again after a panic.
struct Supervisor<K: Kind> {
    dispatcher: Dispatcher,
    options: TriggerOptions,
    kind: Arc<K>,
    /// The cursor as it was when the trigger began.
    cursor: OpenCursor,
    status: watch::Sender<TriggerStatus>,
}

impl<K: Kind> Supervisor<K> {
    /// Works until the trigger is asked to end, the dispatcher has ended, the cursor is lost, or the bus is gone.
    async fn run(mut self, mut subscription: Subscription, mut stop: watch::Receiver<bool>) -> Result<()> {
        // This guard also acts if the future is dropped, so that the status does not show a running trigger.
        let _finished = Finished(self.status.clone());
        let mut pauses = RestartPauses::new();
        loop {
            let context = Arc::clone(self.dispatcher.context());
            let env = context.env().clone();
            let begun = env.now();
            let task = self.task(subscription);
            // A panic drops the task with all its jobs.
            let panic = match AssertUnwindSafe(task.run(stop.clone())).catch_unwind().await {
                Ok(ended) => return ended,
                Err(panic) => panic,
            };
            let what = format!("trigger {}", self.options.name);
            context.stats.health.panicked(&env, &what, panic_text(&*panic));
            context.stats.trigger_restarts.add(1);
            self.status.send_modify(|status| (status.restarts, status.running) = (status.restarts + 1, 0));
            let pause = pauses.next_after(env.now().saturating_sub(begun));
            tokio::select! {
                () = env.sleep(pause) => {}
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            }
            self.cursor = match self.cursor.read_again().await {
                Ok(cursor) => cursor,
                Err(error @ Error::CursorLost { .. }) => return Err(error),
                // It is always right to start where it began.
                Err(_) => self.cursor,
            };
            subscription = subscribe::<K>(&self.dispatcher, &self.options, self.cursor.stored()).stream();
        }
    }

    /// The task that works on the items of `subscription`.
    fn task(&self, subscription: Subscription) -> TriggerTask<K> {
        // An earlier trigger may have expired, or may not have informed its job of all gone databases.
        let is_unsure = self.cursor.stored().knew_nothing() && self.cursor.has_marks();
        TriggerTask {
            context: Arc::clone(self.dispatcher.context()),
            plan: Plan::new(self.options.pacing(), self.options.tenants_with_limits()),
            options: self.options.clone(),
            kind: Arc::clone(&self.kind),
            subscription,
            cursor: self.cursor.clone(),
            jobs: Tasks::new(),
            started: HashMap::new(),
            status: self.status.clone(),
            search: is_unsure.then(Search::default),
            retries: Retries::new(self.options.backoff_max, self.dispatcher.context().env()),
            owed: Owed::new(),
            is_turn_of_retry: false,
            pause: None,
            checkpoint: None,
        }
    }
}

struct TriggerTask<K: Kind> {
    context: Arc<Context>,
    options: TriggerOptions,
    kind: Arc<K>,
    subscription: Subscription,
    cursor: OpenCursor,
    plan: Plan<K::Work>,
    jobs: Tasks<Ended>,
    /// The running tasks by their numbers, which are those of the plan.
    started: HashMap<u64, Started>,
    status: watch::Sender<TriggerStatus>,
    /// The search for databases that have gone without a delivery; needed when the subscription has expired, and
    /// reads everything again.
    search: Option<Search>,
    /// When parked databases are tried again.
    retries: Retries,
    /// Reads work that the store lists as owed.
    owed: Owed,
    /// Whether the next job should be one of a parked database, if one has its turn.
    is_turn_of_retry: bool,
    /// Completes when the subscription may be polled again.
    pause: Option<BoxFuture<'static, ()>>,
    /// Completes when the progress is to be saved; `None` before there is any.
    checkpoint: Option<BoxFuture<'static, ()>>,
}

/// A task of the plan whose job runs.
struct Started {
    name: DbName,
    canceller: Canceller,
}

/// Shows when it is dropped that a trigger has ended.
struct Finished(watch::Sender<TriggerStatus>);

impl Drop for Finished {
    fn drop(&mut self) {
        self.0.send_modify(|status| (status.running, status.is_finished) = (0, true));
    }
}

impl<K: Kind> TriggerTask<K> {
    /// Works until it is asked to end, the dispatcher has ended, the cursor is lost, or the bus is gone.
    async fn run(mut self, mut stop: watch::Receiver<bool>) -> Result<()> {
        let ended = tokio::select! {
            ended = self.work() => ended,
            // An error says that the handle was dropped, and then this task is aborted.
            _ = stop.wait_for(|stop| *stop) => Ok(()),
        };
        // Running jobs may be writing; they must end before what follows.
        self.jobs.cancel_all();
        match ended {
            Ok(()) => {
                // Unfinished work is listed as owed, so that work that others have done since is not repeated.
                for _ in 0..OWED_AT_END_MAX / OWED_BATCH {
                    if !self.save(Duration::ZERO).await? {
                        break;
                    }
                }
                Ok(())
            }
            lost => lost,
        }
    }

    /// Works until the dispatcher has ended, the cursor is lost, or the bus is gone.
    async fn work(&mut self) -> Result<()> {
        self.note_position();
        loop {
            if let Some(gone) = self.context.stats.health.ended() {
                return Err(gone.clone());
            }
            self.retries.begin(self.context.env(), self.cursor.named());
            self.start_due();
            let reserved = self.search_on();
            if self.owed.is_idle() && self.plan.has_place_for_left() {
                self.owed.read_again();
            }
            let taken = self.plan.len() + reserved;
            let places = self.options.pending_max.saturating_sub(taken + self.owed.reserved());
            self.owed.begin(&self.context, &self.cursor, places);
            let now = self.context.env().now();
            let due = self.plan.next_due().map(|due| self.context.env().sleep(due.saturating_sub(now)));
            // All items that are received below come after this cursor.
            let known = self.subscription.cursor();
            let has_place = taken + self.owed.reserved() < self.options.pending_max;
            let may_receive = self.pause.is_none() && has_place && self.plan.spilled() < 2 * OWED_BATCH;
            tokio::select! {
                Some(ended) = self.jobs.join_next() => self.end(ended)?,
                // A predicate of the filter can panic. It has seen the row then.
                received = AssertUnwindSafe(self.subscription.next()).catch_unwind(), if may_receive => {
                    match received {
                        Ok(Some(item)) => self.receive(item, known)?,
                        Ok(None) => return Ok(()),
                        Err(panic) => {
                            let Context { stats, .. } = &*self.context;
                            stats.listener_panics.add(1);
                            let what = format!("predicate of trigger {}", self.options.name);
                            stats.health.panicked(self.context.env(), &what, panic_text(&*panic));
                        }
                    }
                }
                Some(found) = OptionFuture::from(self.search.as_mut().and_then(Search::step)) => {
                    self.find(found);
                }
                Some(step) = OptionFuture::from(self.owed.step()) => self.observe_owed(step),
                Some(step) = OptionFuture::from(self.retries.step()) => {
                    if let Err(error) = self.retries.end(self.context.env().now(), step) {
                        self.complain("reading of parked databases", &error);
                    }
                }
                Some(()) = OptionFuture::from(due) => {}
                Some(()) = OptionFuture::from(self.pause.as_mut()) => self.pause = None,
                Some(()) = OptionFuture::from(self.checkpoint.as_mut()) => self.save_progress().await?,
            }
        }
    }

    /// The cursor to save: a trigger that starts again from it gets all unfinished work again.
    /// Of `listed` names the store knows by then.
    fn done_to(&mut self, listed: &[(DbName, bool)]) -> Cursor {
        if self.search.is_some() {
            return Cursor::NOTHING;
        }
        let position = self.subscription.cursor();
        let listed = listed.iter().map(|(name, _)| name).collect();
        self.plan.since_without(&listed).map_or(position, |since| since.min(position))
    }

    /// Schedules the next save.
    fn note_position(&mut self) {
        if self.checkpoint.is_none() {
            self.checkpoint = Some(self.context.env().sleep(self.options.checkpoint_interval));
        }
    }

    /// Saves the progress. Fails if the cursor is lost.
    async fn save_progress(&mut self) -> Result<()> {
        // Rows that the filter does not want move the position as well, so the next save is scheduled in any case.
        self.checkpoint = None;
        self.note_position();
        match self.save(HOLD_MAX).await {
            // There is more to save.
            Ok(true) => self.checkpoint = Some(self.context.env().sleep(Duration::ZERO)),
            Ok(false) => {}
            Err(error @ Error::CursorLost { .. }) => {
                tracing::warn!(trigger = self.options.name, %error, "a trigger has lost its cursor and ends");
                return Err(error);
            }
            Err(error) => self.complain("saving of a trigger's cursor", &error),
        }
        self.update_status(|_| ());
        Ok(())
    }

    /// Reports that `what` has failed, and is tried again.
    fn complain(&self, what: &'static str, error: &Error) {
        self.context.stats.health.complain(self.context.env(), what, error);
    }

    /// Whether to log `what` of this trigger now, because it was not logged lately. Returns how often it was not.
    fn remark(&self, what: &str) -> Option<u64> {
        let what = format!("{what} of trigger {}", self.options.name);
        self.context.stats.health.remark(self.context.env(), &what)
    }

    /// Saves the cursor, lists work that has held it back for `age` as owed, and removes finished work from that list. Returns whether
    /// there is more to list or remove.
    async fn save(&mut self, age: Duration) -> Result<bool> {
        let now = self.context.env().now();
        let owed = self.plan.overdue(now, (age, OWED_BATCH), K::is_fresh);
        let settled = self.plan.settled(OWED_BATCH);
        let done_to = self.done_to(&owed);
        // Results that were read before the removal no longer count.
        self.owed.forget(&settled);
        if done_to != self.cursor.stored() || !owed.is_empty() || !settled.is_empty() {
            let rows: Vec<_> =
                owed.iter().map(|(name, is_fresh)| (name.clone(), OwedRow { is_fresh: *is_fresh })).collect();
            self.cursor.save_owing(done_to, &rows, &settled).await?;
        } else if self.plan.running() > 0 {
            // The cursor need not be written, but jobs must not go on if another trigger has opened it.
            self.cursor.verify().await?;
        }
        // The plan changes only after the commit: a save that fails or is dropped has listed and removed nothing.
        let without_room = self.plan.set_listed(owed.iter().map(|(name, _)| name));
        // What was read of them before does not include their newest work. They are read again.
        self.owed.forget(&without_room);
        self.plan.set_unlisted(&settled);
        Ok(owed.len() == OWED_BATCH || settled.len() == OWED_BATCH)
    }

    /// Receives owed work.
    fn observe_owed(&mut self, step: owed::Step) {
        let Self { owed, plan, .. } = self;
        let found = owed.end(step, |name| plan.wants_owed(name)).unwrap_or_else(|error| {
            self.context.stats.health.complain(self.context.env(), "reading of owed work", &error);
            Vec::new()
        });
        let now = self.context.env().now();
        for owed::OwedDb { name, living, gone } in found {
            if self.plan.wants_owed(&name) {
                let work = living.map(|(db, is_fresh)| (db, K::all_work(is_fresh)));
                self.plan.observe_owed(now, &name, work, gone);
            }
        }
        self.update_status(|_| ());
    }

    /// Receives an item of the subscription, which comes after `known`. Fails if the bus is gone.
    fn receive(&mut self, item: Result<Delivery, Interruption>, known: Cursor) -> Result<()> {
        let delivery = match item {
            Ok(delivery) => delivery,
            Err(Interruption::Synced { .. }) => return Ok(()),
            Err(Interruption::Failed(gone @ Error::BusGone { .. })) => return Err(gone),
            Err(interruption) => {
                match interruption {
                    Interruption::Expired { .. } => {
                        tracing::warn!(trigger = self.options.name, %interruption, "subscription interrupted");
                        self.search = Some(Search::default());
                    }
                    Interruption::Failed(error) => {
                        self.complain("subscription of a trigger", &error);
                        self.pause = Some(self.context.env().sleep(FAILURE_PAUSE));
                    }
                    Interruption::Lagged { .. } | Interruption::Synced { .. } => {}
                }
                return Ok(());
            }
        };
        let row = delivery.notification();
        let db = row.db();
        let replaced = delivery.news().iter().find(|(instance, _)| *instance != db.instance);
        let seen = Observed {
            replaced: replaced.map(|(instance, _)| Db::new(db.name.clone(), instance)),
            work: (!row.is_deleted()).then(|| K::work(&delivery)),
            // The delivery of a quiet database may reach back further than the cursor.
            since: delivery.since().max(known),
            db,
        };
        self.observe(seen);
        Ok(())
    }

    /// Receives an observation of a database.
    fn observe(&mut self, seen: Observed<K::Work>) {
        if seen.work.is_none() || seen.replaced.is_some() {
            self.owed.outdate(&seen.db.name);
        }
        if self.plan.is_full_for(&seen.db.name) {
            // Its work is looked up in the store when there is room.
            let is_fresh = seen.work.as_ref().is_some_and(K::is_fresh);
            self.plan.spill(self.context.env().now(), seen.db.name, seen.since, is_fresh);
            if self.plan.spilled() >= OWED_BATCH {
                self.checkpoint = Some(self.context.env().sleep(Duration::ZERO));
            }
            return;
        }
        let cancelled = self.plan.observe(self.context.env().now(), seen);
        self.cancel(cancelled);
        self.update_status(|_| ());
    }

    /// Starts the due jobs, and those of parked databases whose turn it is.
    fn start_due(&mut self) {
        loop {
            let now = self.context.env().now();
            // Every second job, and at most half of the running ones, may be of a parked database.
            if (self.is_turn_of_retry || !self.plan.is_due(now)) && self.start_retry() {
                self.is_turn_of_retry = false;
                continue;
            }
            let Some((number, task, attempt)) = self.plan.start(now) else { return };
            self.is_turn_of_retry = true;
            self.spawn(number, task, attempt, None);
        }
    }

    /// Starts the job of the next parked database whose turn it is. Returns false if there is none, or no room for it.
    fn start_retry(&mut self) -> bool {
        if self.plan.retrying() >= (self.options.jobs_max / 2).max(1) || !self.plan.has_room() {
            return false;
        }
        // A database with waiting or running work has its turn later.
        while let Some((db, row)) = self.retries.next() {
            let task = if row.is_gone {
                plan::PlannedTask::Gone(db)
            } else {
                plan::PlannedTask::Work(db, K::all_work(row.is_fresh))
            };
            if let Some(number) = self.plan.start_retry(&task) {
                self.spawn(number, task, row.attempts.saturating_add(1), Some(row));
                return true;
            }
            self.retries.put_off(&row);
        }
        false
    }

    /// Starts a job for `task`.
    fn spawn(
        &mut self,
        number: u64,
        task: plan::PlannedTask<K::Work>,
        attempt: u32,
        parked: Option<ParkedRow>,
    ) {
        let name = task.db().name.clone();
        let terms = AttemptLimits {
            number: attempt,
            attempts_max: self.options.attempts_max,
            stall_limit: self.options.stall_limit,
            parked,
        };
        let (context, kind) = (Arc::clone(&self.context), Arc::clone(&self.kind));
        let work = attempt::attempt(context, kind, self.cursor.clone(), task, terms);
        let canceller = self.jobs.spawn(number, work);
        self.started.insert(number, Started { name, canceller });
        self.update_status(|_| ());
    }

    /// Receives the end of a job. Fails if the cursor is lost.
    fn end(&mut self, (number, ended): (u64, Joined<Ended>)) -> Result<()> {
        let result = match ended {
            Ok(result) => result,
            Err(panicked @ tasks::Ended::Panicked(_)) => Err(Failure::Job(panicked.into())),
            // The plan does not wait for a cancelled task.
            Err(tasks::Ended::Cancelled) => Ok(Vec::new()),
        };
        let Started { name, .. } = self.started.remove(&number).expect("every job is a task");
        let (trigger, stats) = (&self.options.name, &self.context.stats);
        let mut was_stuck = false;
        let end = match result {
            Ok(others) => End::Done(others),
            Err(Failure::Replaced(others)) => End::PutOff(others),
            Err(Failure::OutOfTurn) => End::OutOfTurn,
            Err(Failure::Job(error)) => {
                if let Some(unsaid) = self.remark("failed job") {
                    tracing::warn!(trigger, database = %name, %error, unsaid, "a job has failed");
                }
                stats.trigger_failures.add(1);
                End::Failed
            }
            Err(Failure::Parked { error, is_stuck }) => {
                if let Some(unsaid) = self.remark("parked database") {
                    tracing::warn!(trigger, database = %name, %error, unsaid, "a job has failed, its database is parked");
                }
                stats.trigger_failures.add(1);
                stats.trigger_parked.add(1);
                was_stuck = is_stuck;
                End::Parked
            }
            Err(Failure::Store(error)) => {
                if matches!(error, Error::CursorLost { .. }) {
                    tracing::warn!(trigger, database = %name, %error, "a trigger has lost its cursor and ends");
                    return Err(error);
                }
                self.complain("mark of a trigger", &error);
                End::PutOff(Vec::new())
            }
        };
        let (now, retry) = (self.context.env().now(), self.options.retry());
        let backoff = |failures| retry.backoff(failures, self.context.env());
        let outcome = self.plan.end(now, (&name, number), end, backoff);
        self.update_status(|status| {
            match outcome {
                Outcome::Done => status.done += 1,
                Outcome::Failed => status.failed += 1,
                Outcome::Parked => (status.failed, status.parked) = (status.failed + 1, status.parked + 1),
                Outcome::PutOff | Outcome::Stale => {}
            }
            status.stuck += u64::from(was_stuck);
        });
        Ok(())
    }

    /// Continues the search for databases that have gone without a delivery, if there is one, once all existing databases
    /// were delivered again. Returns how many places in the plan are reserved for its results.
    fn search_on(&mut self) -> usize {
        let Some(search) = &mut self.search else { return 0 };
        if !self.subscription.cursor().knew_nothing() {
            search.begin(&self.context, &self.cursor, &self.plan, self.options.pending_max);
        }
        search.reserved()
    }

    /// Receives a result of the search.
    fn find(&mut self, found: Found) {
        if self.search.as_mut().is_some_and(|search| search.end(&found)) {
            self.search = None;
        }
        for db in found.gone {
            // No row shows it, so a trigger that starts again has to search again.
            self.note_gone(db, Cursor::NOTHING);
        }
    }

    /// Notes that an instance is gone, whatever has its name now.
    fn note_gone(&mut self, db: Db, since: Cursor) {
        self.owed.outdate(&db.name);
        let cancelled = self.plan.forget(self.context.env().now(), db, since);
        self.cancel(cancelled);
        self.update_status(|_| ());
    }

    /// Ends the job of task `number`, with all that it has started: when this returns, nothing of it runs any more.
    fn cancel(&self, number: Option<u64>) {
        if let Some(started) = number.and_then(|number| self.started.get(&number)) {
            started.canceller.cancel();
            self.update_status(|status| status.cancelled += 1);
        }
    }

    fn update_status(&self, change: impl FnOnce(&mut TriggerStatus)) {
        let (running, len) = (self.plan.running(), self.plan.waiting());
        let position = self.cursor.stored();
        self.status.send_modify(|status| {
            change(status);
            (status.running, status.waiting, status.position) = (running, len, position);
        });
    }
}
