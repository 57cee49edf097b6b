//! The task of a trigger: takes in what the subscription tells, starts what is due, and puts down how far it has come.

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture, try_join_all},
};
use tokio::{
    sync::watch,
    task::{AbortHandle, Id, JoinSet},
};
use tokio_stream::StreamExt;

use super::{
    Trigger, TriggerOptions, TriggerStatus, cursor,
    plan::{Outcome, Plan, Seen, Task, Work},
};
use crate::{
    context::Context,
    dispatcher::{Delivery, Dispatcher, Interruption, Since, Subscription},
    encoding::Sequence,
    error::{Error, Result, panic_text},
    event::{Db, DbName},
    jobs::TaskResult,
    named_cursor::OpenCursor,
    notification::Notification,
    notification_feed::NotificationFeed,
};

/// How long the subscription is not asked for more after the feed could not be read.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// How many databases are looked up at once, after it has expired.
const LOOK_UPS_MAX: usize = 64;

/// How many marks are read at once.
const MARKS_PAGE: usize = 1_000;

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
    ) -> BoxFuture<'static, TaskResult>;

    /// Tells that a database is gone.
    fn deleted(self: Arc<Self>, cursor: OpenCursor, db: Db) -> BoxFuture<'static, TaskResult>;
}

/// Starts a trigger.
pub(in crate::jobs) async fn start<K: Kind>(
    dispatcher: &Dispatcher,
    options: TriggerOptions,
    kind: K,
) -> Result<Trigger> {
    options.check()?;
    let subscribe = dispatcher.subscribe(options.filter.clone()).since(Since::After(Sequence::ZERO));
    let subscribe = if K::DDOCS { subscribe.with_ddocs() } else { subscribe };
    let mut subscription = subscribe.durable(&cursor(dispatcher, &options)?).await?.stream();
    let cursor = subscription.take_cursor().expect("it is durable");
    let position = cursor.stored();
    // An earlier one may have expired, or was about to tell what was gone, and has not come to it.
    let is_unsure = position == Sequence::ZERO && !cursor.marked(None, 1).await?.is_empty();
    let (stop, stopped) = watch::channel(false);
    let (status, watched) = watch::channel(TriggerStatus::new(position));
    let keeper = Keeper {
        context: Arc::clone(dispatcher.context()),
        plan: Plan::new(options.pacing()),
        options,
        kind: Arc::new(kind),
        subscription,
        cursor,
        jobs: JoinSet::new(),
        tasks: HashMap::new(),
        handles: HashMap::new(),
        status,
        is_unsure,
        pause: None,
        checkpoint: None,
    };
    let task = tokio::spawn(keeper.run(stopped));
    Ok(Trigger { task: Some(task), stop, status: watched })
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
    jobs: JoinSet<TaskResult>,
    /// Which job is which task of the plan.
    tasks: HashMap<Id, (DbName, u64)>,
    /// Stops them, by the numbers of the plan.
    handles: HashMap<u64, AbortHandle>,
    /// What it is at.
    status: watch::Sender<TriggerStatus>,
    /// Whether databases may be gone without its having been told: the subscription has expired, and reads everything anew.
    is_unsure: bool,
    /// Completes when the subscription may be asked again.
    pause: Option<BoxFuture<'static, ()>>,
    /// Completes when how far it has come is to be put down; `None` before it works.
    checkpoint: Option<BoxFuture<'static, ()>>,
}

impl<K: Kind> Keeper<K> {
    /// Works until it is told to end, the dispatcher has ended, or the cursor is lost.
    async fn run(mut self, mut stop: watch::Receiver<bool>) -> Result<()> {
        let ended = tokio::select! {
            ended = self.work() => ended,
            // An error says that the handle was dropped, and then this task is aborted.
            _ = stop.wait_for(|stop| *stop) => Ok(()),
        };
        // They may be writing: what comes after must not meet them.
        self.jobs.shutdown().await;
        let ended = match ended {
            Ok(()) => self.cursor.save(self.done_to()).await,
            lost => lost,
        };
        self.status.send_modify(|status| {
            (status.running, status.is_finished) = (0, true);
        });
        ended
    }

    /// Works until the dispatcher has ended, or the cursor is lost.
    async fn work(&mut self) -> Result<()> {
        self.note_position();
        loop {
            self.start_due();
            let now = self.context.env().now();
            let due = self.plan.next_due().map(|due| self.context.env().sleep(due.saturating_sub(now)));
            // For whoever starts again, all that is received below comes after this.
            let known = self.subscription.position();
            let may_receive = self.pause.is_none() && self.plan.len() < self.options.pending_max;
            tokio::select! {
                Some(ended) = self.jobs.join_next_with_id() => {
                    if let Some(failed) = self.end(ended)? && self.plan.len() >= self.options.pending_max {
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
                Some(()) = OptionFuture::from(due) => {}
                Some(()) = OptionFuture::from(self.pause.as_mut()) => self.pause = None,
                Some(()) = OptionFuture::from(self.checkpoint.as_mut()) => self.put_down().await?,
            }
            if self.is_unsure && self.subscription.position() > Sequence::ZERO {
                self.find_gone().await;
            }
        }
    }

    /// Whoever starts again from here has everything told again that is not done.
    fn done_to(&self) -> Sequence {
        if self.is_unsure {
            return Sequence::ZERO;
        }
        let position = self.subscription.position();
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
            // Jobs may run on, although another trigger has begun with them anew.
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
    fn receive(&mut self, item: Result<Delivery, Interruption>, known: Sequence) {
        let delivery = match item {
            Ok(delivery) => delivery,
            Err(interruption) => {
                tracing::warn!(trigger = self.options.name, %interruption, "subscription interrupted");
                match interruption {
                    Interruption::Expired { .. } => self.is_unsure = true,
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
        if let Some(handle) = cancelled.and_then(|number| self.handles.get(&number)) {
            handle.abort();
            self.tell(|status| status.cancelled += 1);
        }
        self.tell(|_| ());
    }

    /// Starts the jobs that are due.
    fn start_due(&mut self) {
        while let Some((number, task, attempt)) = self.plan.start(self.context.env().now()) {
            let (kind, cursor) = (Arc::clone(&self.kind), self.cursor.clone());
            let (name, work) = match task {
                Task::Gone(db) => (db.name.clone(), kind.deleted(cursor, db)),
                Task::Work(db, work) => (db.name.clone(), kind.run(cursor, db, work, attempt)),
            };
            let handle = self.jobs.spawn(work);
            self.tasks.insert(handle.id(), (name, number));
            self.handles.insert(number, handle);
            self.tell(|_| ());
        }
    }

    /// Takes in the end of a job; the name of its database, if it is to be tried again. Fails if the cursor is lost.
    fn end(&mut self, ended: Result<(Id, TaskResult), tokio::task::JoinError>) -> Result<Option<DbName>> {
        let (id, result) = match ended {
            Ok((id, result)) => (id, result.map_err(Some)),
            Err(error) => {
                let (id, is_panic) = (error.id(), error.is_panic());
                (id, Err(is_panic.then(|| error.into())))
            }
        };
        let (name, number) = self.tasks.remove(&id).expect("every job is a task");
        self.handles.remove(&number);
        if let Err(Some(error)) = &result {
            let trigger = &self.options.name;
            tracing::warn!(trigger, database = %name, %error, "a job has failed");
            if let Some(lost @ Error::CursorLost { .. }) = error.downcast_ref() {
                return Err(lost.clone());
            }
        }
        let (now, retry) = (self.context.env().now(), self.options.retry());
        let backoff = |failures| retry.backoff(failures, self.context.env());
        let outcome = self.plan.end(now, (&name, number), result.is_ok(), backoff);
        self.tell(|status| match outcome {
            Outcome::Done => status.done += 1,
            Outcome::Failed => status.failed += 1,
            Outcome::GivenUp => status.given_up += 1,
            Outcome::Stale => {}
        });
        Ok((outcome == Outcome::Failed).then_some(name))
    }

    /// Finds out whether the database `name`, of which a job has failed, is gone. While there is no room for more, nothing else
    /// tells, and nothing would ever make room.
    async fn look_after(&mut self, name: &DbName) {
        let Some(db) = self.plan.waiting_for(name).cloned() else { return };
        let feed = NotificationFeed::new(Arc::clone(&self.context), self.context.feed.clone());
        match feed.newest(name).await {
            Ok(row) if row.as_ref().is_none_or(|row| row.is_deleted() || row.instance != db.instance) => {
                let since = self.subscription.position();
                self.see_gone(db, since);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(trigger = self.options.name, %error, "a database cannot be looked up");
            }
        }
    }

    /// Finds out which databases are gone without its having been told. All that are there have been told anew.
    async fn find_gone(&mut self) {
        let feed = NotificationFeed::new(Arc::clone(&self.context), self.context.feed.clone());
        let find = async {
            let mut known = self.plan.living();
            let mut last = None;
            let mut gone = Vec::new();
            loop {
                for some in known.chunks(LOOK_UPS_MAX) {
                    let rows = try_join_all(some.iter().map(|db| feed.newest(&db.name))).await?;
                    let is_gone = |(db, row): &(&Db, Option<Notification>)| {
                        row.as_ref().is_none_or(|row| row.is_deleted() || row.instance != db.instance)
                    };
                    gone.extend(some.iter().zip(rows).filter(is_gone).map(|(db, _)| db.clone()));
                }
                known = self.cursor.marked(last.as_ref(), MARKS_PAGE).await?;
                last = known.last().cloned();
                if known.is_empty() {
                    return Ok::<_, Error>(gone);
                }
            }
        };
        match find.await {
            Ok(gone) => {
                self.is_unsure = false;
                for db in gone {
                    // No row tells of it: whoever starts again has to find it out as this one has.
                    self.see_gone(db, Sequence::ZERO);
                }
            }
            Err(error) => {
                tracing::warn!(trigger = self.options.name, %error, "gone databases cannot be found, trying again");
                self.context.env().sleep(FAILURE_PAUSE).await;
            }
        }
    }

    /// Takes in that an instance is gone, whatever has its name now.
    fn see_gone(&mut self, db: Db, since: Sequence) {
        if let Some(number) = self.plan.forget(self.context.env().now(), db, since)
            && let Some(handle) = self.handles.get(&number)
        {
            handle.abort();
            self.tell(|status| status.cancelled += 1);
        }
        self.tell(|_| ());
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
