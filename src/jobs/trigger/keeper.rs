//! The task of a trigger: takes in what the subscription tells, starts what is due, and puts down how far it has come.

use std::{
    collections::HashMap, error::Error as StdError, panic::AssertUnwindSafe, sync::Arc, time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
};
use tokio::sync::watch;
use tokio_stream::StreamExt;

use super::{
    Trigger, TriggerOptions, TriggerStatus, cursor, is_gone,
    plan::{self, End, Outcome, Plan, Seen, Work},
    search::{Found, Search},
};
use crate::{
    context::Context,
    cursor::Cursor,
    dispatcher::{Delivery, Dispatcher, Interruption, Subscription},
    error::{Error, Result, panic_text},
    event::{Db, DbName},
    named_cursor::OpenCursor,
    notification_feed::NotificationFeed,
    tasks::{self, Canceller, Joined, Task, Tasks},
};

/// How long the subscription is not asked for more after the feed could not be read.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// Why a task has not done its part.
pub(in crate::jobs) enum Failure {
    /// The job has failed.
    Job(Box<dyn StdError + Send + Sync>),
    /// What is kept with the cursor could not be read or written, which is no attempt of the job.
    Store(Error),
    /// It was not begun: the job has to be told first that these instances of the name are gone.
    Replaced(Vec<Db>),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

/// How a task ends: other instances of the name that it has found to be gone, of which the job was not told.
pub(in crate::jobs) type Ended = Result<Vec<Db>, Failure>;

/// What a trigger is for.
pub(in crate::jobs) trait Kind: Send + Sync + 'static {
    /// What is to be done for a database.
    type Work: Work;

    /// Whether it wants to know which design documents have changed.
    const DDOCS: bool;

    /// What `delivery`, of a living database, asks for.
    fn work(&self, delivery: &Delivery) -> Self::Work;

    /// Does it.
    fn run(
        self: Arc<Self>,
        cursor: OpenCursor,
        db: Db,
        work: Self::Work,
        attempt: u32,
    ) -> BoxFuture<'static, Ended>;

    /// Tells that a database is gone.
    fn deleted(self: Arc<Self>, cursor: OpenCursor, db: Db) -> BoxFuture<'static, Ended>;
}

/// Starts a trigger.
pub(in crate::jobs) async fn start<K: Kind>(
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
    /// The instance that is gone, if it tells so.
    gone: Option<Db>,
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
        let ended = match ended {
            Ok(()) => {
                let done_to = self.done_to();
                self.cursor.save(done_to).await
            }
            lost => lost,
        };
        ended
    }

    /// Works until the dispatcher has ended, or the cursor is lost.
    async fn work(&mut self) -> Result<()> {
        self.note_position();
        loop {
            self.start_due();
            let reserved = self.search_on();
            let now = self.context.env().now();
            let due = self.plan.next_due().map(|due| self.context.env().sleep(due.saturating_sub(now)));
            // For whoever starts again, all that is received below comes after this.
            let known = self.subscription.cursor();
            let may_receive = self.pause.is_none() && self.plan.len() + reserved < self.options.pending_max;
            tokio::select! {
                Some(ended) = self.jobs.join_next() => {
                    if let Some(failed) = self.end(ended).await? && self.plan.len() >= self.options.pending_max {
                        self.look_after(&failed).await;
                    }
                }
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

    /// Starts the jobs that are due.
    fn start_due(&mut self) {
        while let Some((number, task, attempt)) = self.plan.start(self.context.env().now()) {
            let (kind, cursor) = (Arc::clone(&self.kind), self.cursor.clone());
            let (name, gone, work) = match task {
                plan::Task::Gone(db) => (db.name.clone(), Some(db.clone()), kind.deleted(cursor, db)),
                plan::Task::Work(db, work) => (db.name.clone(), None, kind.run(cursor, db, work, attempt)),
            };
            let canceller = self.jobs.spawn(number, work);
            self.started.insert(number, Started { name, canceller, gone });
            self.tell(|_| ());
        }
    }

    /// Takes in the end of a job; the name of its database, if it is to be tried again. Fails if the cursor is lost.
    async fn end(&mut self, (number, ended): (u64, Joined<Ended>)) -> Result<Option<DbName>> {
        let result = match ended {
            Ok(result) => result,
            Err(panicked @ tasks::Ended::Panicked(_)) => Err(Failure::Job(panicked.into())),
            // Whoever has cancelled it does not wait for it.
            Err(tasks::Ended::Cancelled) => Ok(Vec::new()),
        };
        let Started { name, gone, .. } = self.started.remove(&number).expect("every job is a task");
        let trigger = &self.options.name;
        let end = match result {
            Ok(others) => End::Done(others),
            Err(Failure::Replaced(others)) => End::PutOff(others),
            Err(Failure::Job(error)) => {
                tracing::warn!(trigger, database = %name, %error, "a job has failed");
                End::Failed
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
        self.tell(|status| match outcome {
            Outcome::Done => status.done += 1,
            Outcome::Failed => status.failed += 1,
            Outcome::GivenUp => status.given_up += 1,
            Outcome::PutOff | Outcome::Stale => {}
        });
        if let Some(gone) = gone.filter(|_| outcome == Outcome::GivenUp) {
            self.forget(&gone).await?;
        }
        Ok((outcome == Outcome::Failed).then_some(name))
    }

    /// Forgets the mark of `gone`, of which the job will not be told any more: it would keep its successor from being worked on.
    /// Fails if the cursor is lost.
    async fn forget(&mut self, gone: &Db) -> Result<()> {
        match self.cursor.unmark(gone).await {
            Err(error) if !matches!(error, Error::CursorLost { .. }) => {
                let trigger = &self.options.name;
                tracing::warn!(trigger, database = %gone.name, %error, "a mark stays, and is told once more");
                Ok(())
            }
            done => done,
        }
    }

    /// Finds out whether the database `name`, of which a job has failed, is gone. While there is no room for more, nothing else
    /// tells, and nothing would ever make room.
    async fn look_after(&mut self, name: &DbName) {
        let Some(db) = self.plan.waiting_for(name).cloned() else { return };
        let feed = NotificationFeed::new(Arc::clone(&self.context), self.context.feed.clone());
        match feed.newest(name).await {
            Ok(row) if is_gone(&db, row.as_ref()) => {
                let since = self.subscription.cursor();
                self.see_gone(db, since);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(trigger = self.options.name, %error, "a database cannot be looked up");
            }
        }
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
