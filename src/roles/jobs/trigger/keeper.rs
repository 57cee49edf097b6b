//! The task of a trigger: takes in what the subscription tells, starts what is due, and puts down how far it has come.

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
};
use tokio::sync::watch;
use tokio_stream::StreamExt;

use super::{
    Trigger, TriggerOptions, TriggerStatus,
    attempt::{self, Terms},
    cursor,
    kind::{Ended, Failure, Kind},
    plan::{self, End, Outcome, Plan, Seen},
    retries::Retries,
    search::{Found, Search},
};
use crate::{
    base::{
        cursor::Cursor,
        error::{Error, Result, panic_text},
        event::{Db, DbName},
        tasks::{self, Canceller, Joined, Task, Tasks},
    },
    roles::dispatcher::{Delivery, Dispatcher, Interruption, Subscription},
    state::{context::Context, keys::ParkedRow, named_cursor::OpenCursor},
};

/// How long the subscription is not asked for more after the feed could not be read.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// Starts a trigger.
pub(in crate::roles::jobs) async fn start<K: Kind>(
    dispatcher: &Dispatcher,
    options: TriggerOptions,
    kind: K,
) -> Result<Trigger> {
    options.check()?;
    let subscribe = dispatcher.subscribe(options.filter.clone()).since(Cursor::NOTHING);
    let subscribe = if K::DDOCS { subscribe.with_ddocs() } else { subscribe };
    let mut subscription = subscribe.durable_work(&cursor(dispatcher, &options)?).await?.stream();
    // From here on nothing can fail: whoever had the cursor has lost it.
    let cursor = subscription.take_cursor().expect("it is durable");
    let position = cursor.stored();
    // An earlier one may have expired, or was about to tell what was gone, and has not come to it.
    let is_unsure = position.knew_nothing() && cursor.has_marks();
    let (stop, stopped) = watch::channel(false);
    let (status, watched) = watch::channel(TriggerStatus::new(position));
    let retries = Retries::new(options.backoff_max, dispatcher.context().env());
    let keeper = Keeper {
        context: Arc::clone(dispatcher.context()),
        plan: Plan::new(options.pacing()),
        options,
        kind: Arc::new(kind),
        subscription,
        cursor,
        jobs: Tasks::new(),
        started: HashMap::new(),
        status,
        search: is_unsure.then(Search::default),
        retries,
        is_turn_of_retry: false,
        pause: None,
        checkpoint: None,
    };
    let task = Task::spawn(keeper.run(stopped));
    Ok(Trigger { task, stop, status: watched })
}

/// The task of a trigger.
struct Keeper<K: Kind> {
    /// What the roles share.
    context: Arc<Context>,
    /// How it works.
    options: TriggerOptions,
    /// What it is for.
    kind: Arc<K>,
    /// What is told.
    subscription: Subscription,
    /// How far it has come.
    cursor: OpenCursor,
    /// What is to be done.
    plan: Plan<K::Work>,
    /// The jobs that run.
    jobs: Tasks<Ended>,
    /// What they do, by their numbers, which are those of the plan.
    started: HashMap<u64, Started>,
    /// What it is at.
    status: watch::Sender<TriggerStatus>,
    /// The search for what is gone, if databases may be so without its having been told: the subscription has expired, and
    /// reads everything again.
    search: Option<Search>,
    /// When parked databases are tried again.
    retries: Retries,
    /// Whether the next job that is started is that of a parked one, if there is one whose turn it is.
    is_turn_of_retry: bool,
    /// Completes when the subscription may be asked again.
    pause: Option<BoxFuture<'static, ()>>,
    /// Completes when how far it has come is to be put down; `None` before it works.
    checkpoint: Option<BoxFuture<'static, ()>>,
}

/// A task of the plan that a job is at.
struct Started {
    /// The name of its database.
    name: DbName,
    /// Ends it.
    canceller: Canceller,
}

/// Tells by being dropped that a trigger has ended.
struct Finished(watch::Sender<TriggerStatus>);

impl Drop for Finished {
    fn drop(&mut self) {
        self.0.send_modify(|status| (status.running, status.is_finished) = (0, true));
    }
}

impl<K: Kind> Keeper<K> {
    /// Works until it is told to end, the dispatcher has ended, or the cursor is lost.
    async fn run(mut self, mut stop: watch::Receiver<bool>) -> Result<()> {
        // Also if it panics: nobody is to take it for running.
        let _finished = Finished(self.status.clone());
        let ended = tokio::select! {
            ended = self.work() => ended,
            // An error says that the handle was dropped, and then this task is aborted.
            _ = stop.wait_for(|stop| *stop) => Ok(()),
        };
        // They may be writing: what comes after must not meet them.
        self.jobs.cancel_all();
        match ended {
            Ok(()) => {
                let done_to = self.done_to();
                self.cursor.save(done_to).await
            }
            lost => lost,
        }
    }

    /// Works until the dispatcher has ended, or the cursor is lost.
    async fn work(&mut self) -> Result<()> {
        self.note_position();
        loop {
            self.retries.begin(self.context.env(), self.cursor.named());
            self.start_due();
            let reserved = self.search_on();
            let now = self.context.env().now();
            let due = self.plan.next_due().map(|due| self.context.env().sleep(due.saturating_sub(now)));
            // For whoever starts again, all that is received below comes after this.
            let known = self.subscription.cursor();
            let may_receive = self.pause.is_none() && self.plan.len() + reserved < self.options.pending_max;
            tokio::select! {
                Some(ended) = self.jobs.join_next() => self.end(ended)?,
                // A predicate of the filter can panic. It has seen the row then.
                received = AssertUnwindSafe(self.subscription.next()).catch_unwind(), if may_receive => {
                    match received {
                        Ok(Some(item)) => self.receive(item, known),
                        Ok(None) => return Ok(()),
                        Err(panic) => {
                            self.context.stats.listener_panics.add(1);
                            let text = panic_text(&*panic);
                            tracing::error!(trigger = self.options.name, panic = text, "a predicate has panicked");
                        }
                    }
                }
                Some(found) = OptionFuture::from(self.search.as_mut().and_then(Search::step)) => {
                    self.find(found);
                }
                Some(step) = OptionFuture::from(self.retries.step()) => {
                    self.retries.end(self.context.env().now(), step);
                }
                Some(()) = OptionFuture::from(due) => {}
                Some(()) = OptionFuture::from(self.pause.as_mut()) => self.pause = None,
                Some(()) = OptionFuture::from(self.checkpoint.as_mut()) => self.put_down().await?,
            }
        }
    }

    /// Whoever starts again from here has everything told again that is not done.
    fn done_to(&mut self) -> Cursor {
        if self.search.is_some() {
            return Cursor::NOTHING;
        }
        let position = self.subscription.cursor();
        self.plan.since().map_or(position, |since| since.min(position))
    }

    /// Has it put down in a while how far it has come.
    fn note_position(&mut self) {
        if self.checkpoint.is_none() {
            self.checkpoint = Some(self.context.env().sleep(self.options.checkpoint_interval));
        }
    }

    /// Puts down how far it has come. Fails if the cursor is lost.
    async fn put_down(&mut self) -> Result<()> {
        // Also databases that it does not want move its position on.
        self.checkpoint = None;
        self.note_position();
        let done_to = self.done_to();
        let put_down = if done_to != self.cursor.stored() {
            self.cursor.save(done_to).await
        } else if self.plan.running() > 0 {
            // Jobs may run on, although another trigger has begun with them again.
            self.cursor.verify().await
        } else {
            Ok(())
        };
        match put_down {
            Ok(()) => {}
            Err(error @ Error::CursorLost { .. }) => {
                tracing::warn!(trigger = self.options.name, %error, "a trigger ends");
                return Err(error);
            }
            Err(error) => {
                tracing::warn!(trigger = self.options.name, %error, "a cursor cannot be written, trying again");
            }
        }
        self.tell(|_| ());
        Ok(())
    }

    /// Takes in what the subscription tells, which comes after `known`.
    fn receive(&mut self, item: Result<Delivery, Interruption>, known: Cursor) {
        let delivery = match item {
            Ok(delivery) => delivery,
            Err(Interruption::Synced { .. }) => return,
            Err(interruption) => {
                tracing::warn!(trigger = self.options.name, %interruption, "subscription interrupted");
                match interruption {
                    Interruption::Expired { .. } => self.search = Some(Search::default()),
                    _ => self.pause = Some(self.context.env().sleep(FAILURE_PAUSE)),
                }
                return;
            }
        };
        let row = delivery.notification();
        let db = row.db();
        let replaced = delivery.news().iter().find(|(instance, _)| *instance != db.instance);
        let seen = Seen {
            replaced: replaced.map(|(instance, _)| Db::new(db.name.clone(), instance)),
            work: (!row.is_deleted()).then(|| self.kind.work(&delivery)),
            // A database that was quiet for long may be known from long ago.
            since: delivery.since().max(known),
            db,
        };
        self.see(seen);
    }

    /// Takes in what was seen of a database.
    fn see(&mut self, seen: Seen<K::Work>) {
        let cancelled = self.plan.see(self.context.env().now(), seen);
        self.cancel(cancelled);
        self.tell(|_| ());
    }

    /// Starts the jobs that are due, and those of parked databases whose turn it is.
    fn start_due(&mut self) {
        loop {
            let now = self.context.env().now();
            // Of two that are started one may be parked, and no more than half of those that run.
            if (self.is_turn_of_retry || !self.plan.is_due(now)) && self.start_retry() {
                self.is_turn_of_retry = false;
                continue;
            }
            let Some((number, task, attempt)) = self.plan.start(now) else { return };
            self.is_turn_of_retry = true;
            self.spawn(number, task, attempt, None);
        }
    }

    /// Starts the job of the next parked database whose turn it is; whether there is one, and room for it.
    fn start_retry(&mut self) -> bool {
        if self.plan.retrying() >= (self.options.jobs_max / 2).max(1) || !self.plan.has_room() {
            return false;
        }
        // One of which something waits or runs has its turn in the next round.
        while let Some((db, row)) = self.retries.next() {
            let task = if row.is_gone {
                plan::Task::Gone(db)
            } else {
                plan::Task::Work(db, K::all_work(row.is_fresh))
            };
            if let Some(number) = self.plan.start_retry(&task) {
                self.spawn(number, task, row.attempts.saturating_add(1), Some(row));
                return true;
            }
        }
        false
    }

    /// Has the job do `task`.
    fn spawn(&mut self, number: u64, task: plan::Task<K::Work>, attempt: u32, parked: Option<ParkedRow>) {
        let name = task.db().name.clone();
        let terms = Terms {
            number: attempt,
            attempts_max: self.options.attempts_max,
            stall_limit: self.options.stall_limit,
            parked,
        };
        let (context, kind) = (Arc::clone(&self.context), Arc::clone(&self.kind));
        let work = attempt::attempt(context, kind, self.cursor.clone(), task, terms);
        let canceller = self.jobs.spawn(number, work);
        self.started.insert(number, Started { name, canceller });
        self.tell(|_| ());
    }

    /// Takes in the end of a job. Fails if the cursor is lost.
    fn end(&mut self, (number, ended): (u64, Joined<Ended>)) -> Result<()> {
        let result = match ended {
            Ok(result) => result,
            Err(panicked @ tasks::Ended::Panicked(_)) => Err(Failure::Job(panicked.into())),
            // Whoever has cancelled it does not wait for it.
            Err(tasks::Ended::Cancelled) => Ok(Vec::new()),
        };
        let Started { name, .. } = self.started.remove(&number).expect("every job is a task");
        let (trigger, stats) = (&self.options.name, &self.context.stats);
        let mut was_stuck = false;
        let end = match result {
            Ok(others) => End::Done(others),
            Err(Failure::Replaced(others)) => End::PutOff(others),
            Err(Failure::WasParked) => End::WasParked,
            Err(Failure::Job(error)) => {
                tracing::warn!(trigger, database = %name, %error, "a job has failed");
                stats.trigger_failures.add(1);
                End::Failed
            }
            Err(Failure::Parked { error, is_stuck }) => {
                tracing::warn!(trigger, database = %name, %error, "a job has failed, its database is parked");
                stats.trigger_failures.add(1);
                stats.trigger_parked.add(1);
                was_stuck = is_stuck;
                End::Parked
            }
            Err(Failure::Store(error)) => {
                tracing::warn!(trigger, database = %name, %error, "a mark cannot be read or written");
                if matches!(error, Error::CursorLost { .. }) {
                    return Err(error);
                }
                End::PutOff(Vec::new())
            }
        };
        let (now, retry) = (self.context.env().now(), self.options.retry());
        let backoff = |failures| retry.backoff(failures, self.context.env());
        let outcome = self.plan.end(now, (&name, number), end, backoff);
        self.tell(|status| {
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

    /// Goes on with the search for databases that are gone without its having been told, if there is one, once all that are
    /// there have been told again. How many places in the plan are kept for what is found.
    fn search_on(&mut self) -> usize {
        let Some(search) = &mut self.search else { return 0 };
        if !self.subscription.cursor().knew_nothing() {
            search.begin(&self.context, &self.cursor, &self.plan, self.options.pending_max);
        }
        search.reserved()
    }

    /// Takes in what the search has found.
    fn find(&mut self, found: Found) {
        if self.search.as_mut().is_some_and(|search| search.end(&found)) {
            self.search = None;
        }
        for db in found.gone {
            // No row tells of it: whoever starts again has to find it out as this one has.
            self.see_gone(db, Cursor::NOTHING);
        }
    }

    /// Takes in that an instance is gone, whatever has its name now.
    fn see_gone(&mut self, db: Db, since: Cursor) {
        let cancelled = self.plan.forget(self.context.env().now(), db, since);
        self.cancel(cancelled);
        self.tell(|_| ());
    }

    /// Ends the job of task `number`, with all that it has started: when this returns, nothing of it runs any more.
    fn cancel(&self, number: Option<u64>) {
        if let Some(started) = number.and_then(|number| self.started.get(&number)) {
            started.canceller.cancel();
            self.tell(|status| status.cancelled += 1);
        }
    }

    /// Shows what it is at.
    fn tell(&self, change: impl FnOnce(&mut TriggerStatus)) {
        let (running, len) = (self.plan.running(), self.plan.waiting());
        let position = self.cursor.stored();
        self.status.send_modify(|status| {
            change(status);
            (status.running, status.waiting, status.position) = (running, len, position);
        });
    }
}
