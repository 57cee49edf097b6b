//! Triggers: they follow the notifications, and have a job done for each database that needs it.
//!
//! A trigger is thin: a durable subscriber ([`NamedCursor`](crate::cursor::NamedCursor)), a plan of what waits ([`plan`]), and the tasks
//! that run ([`keeper`]). Its cursor stays before everything that is not done, but for names that are noted in the store as owed
//! something ([`owed`]); so whatever is lost with the process, the feed tells again, or the store: triggers may come twice, and are
//! never lost.

mod attempt;
mod kind;
mod marks;
mod owed;
mod plan;
mod queue;
mod retries;
mod search;
mod stored;
mod task;
mod tenants;

use std::{fmt, sync::Arc, time::Duration};

use tokio::sync::watch;

use self::plan::Pacing;
pub(super) use self::{
    kind::{Ended, Failure, Kind, Turn},
    marks::{begin, find_gone},
    plan::Work,
    task::start,
};
pub use self::{
    stored::{ParkedDb, StoredTrigger},
    tenants::Tenants,
};
use super::TaskResult;
use crate::{
    base::{
        error::{Error, Result},
        event::Db,
        notification::Notification,
        tasks::Task,
    },
    roles::dispatcher::{Dispatcher, Filter},
    state::trigger_board::TriggerStatus,
    store::RetryPolicy,
};

/// What a trigger has done for its databases. A closure that returns a future of [`TaskResult`] is a job, too, which has
/// nothing to do when a database is deleted.
pub trait TriggerJob<W>: Send + Sync + 'static {
    /// Does the work on a database. It may be done again, and has to bear that. After a failure or a panic it is tried again
    /// later.
    ///
    /// If the database is deleted meanwhile, the future is dropped, and with it all that it has not handed to tasks of its own:
    /// what it starts has to end with it, as a [`ParallelJob`](crate::jobs::ParallelJob) does. What it writes has to be checked in
    /// each transaction ([`Fence::check_in`](crate::jobs::Fence::check_in)): a commit that is on its way then cannot come after
    /// [`TriggerJob::deleted`].
    fn run(&self, work: W) -> impl Future<Output = TaskResult> + Send;

    /// A database was deleted: what was done for it is not needed any more. It is told before any work on a database that was
    /// created under the same name since; perhaps again, or of a database for which nothing was done.
    fn deleted(&self, db: Db) -> impl Future<Output = TaskResult> + Send {
        let _ = db;
        std::future::ready(Ok(()))
    }
}

impl<W, F, R> TriggerJob<W> for F
where
    F: Fn(W) -> R + Send + Sync + 'static,
    R: Future<Output = TaskResult> + Send,
{
    fn run(&self, work: W) -> impl Future<Output = TaskResult> + Send {
        self(work)
    }
}

/// The most jobs that may run at once.
const JOBS_MAX: usize = 10_000;

/// The most databases for which something may wait.
const PENDING_MAX: usize = 10_000_000;

/// The longest times.
const YEAR: Duration = Duration::from_hours(366 * 24);

/// How a trigger works. What is out of these limits is refused; [`Duration::MAX`] is never:
///
/// | option | least | most |
/// |---|---|---|
/// | `name` | 1 byte | 256 bytes |
/// | `debounce` | none | 1 year |
/// | `jobs_max` | 1 | 10,000 |
/// | `attempts_max` | 1 | |
/// | `stall_limit` | 1 ms | 1 year |
/// | `backoff_min` | none | `backoff_max` |
/// | `backoff_max` | none | 1 year |
/// | `pending_max` | 1 | 10,000,000 |
/// | `checkpoint_interval` | 1 ms | 1 h |
/// | `tenants`: `jobs_max`, `pending_max` | 1 | |
#[derive(Debug, Clone)]
pub struct TriggerOptions {
    /// The name of its cursor, 1 to 256 bytes: after a restart, a trigger of the same name goes on where it was. If it runs on
    /// another node as well, whichever was started last goes on, and the other one ends.
    pub name: String,
    /// Which databases, by their names; of all kinds of events.
    pub filter: Filter,
    /// How long work waits for more of the same: however often a database changes, its work is done once per that time, and
    /// not later than that after the first change. Default: 5 s for indexes, none for replications.
    pub debounce: Duration,
    /// How many jobs run at once, 1 to 10,000; of one database, one. Default: 4.
    pub jobs_max: usize,
    /// How often a job that fails is tried before its database is parked. A parked one costs the others nothing: it waits in the
    /// store, holds no place in what waits and does not hold the cursor back. It is tried again in rounds that begin
    /// [`TriggerOptions::backoff_max`] apart: in each of them, then in every second, up to every sixteenth, and in each again once
    /// it has changed. At most half of the jobs that run are such, or one. One whose clean-up after a deletion has
    /// failed so often is parked as well, and does not keep its successor from being worked on. Default: 5.
    pub attempts_max: u32,
    /// How long a job may show no progress before it is cancelled, and its database parked: of a build or scan each transaction that
    /// it has checked in ([`Fence::check_in`](crate::jobs::Fence::check_in)), each page of a scan and each batch of a
    /// [`ParallelJob`](crate::jobs::ParallelJob) with its fence is one. One that works for longer on something else says so
    /// ([`Fence::note_progress`](crate::jobs::Fence::note_progress)). Default: 10 min.
    pub stall_limit: Duration,
    /// The first pause before a job that has failed is tried again. Each further one is twice as long. Default: 1 s.
    pub backoff_min: Duration,
    /// The longest such pause. Default: 5 min.
    pub backoff_max: Duration,
    /// For how many databases something waits at most, 1 to 10,000,000. While it does for so many, the feed is not read on, and keeps the
    /// rest. Default: 10,000.
    pub pending_max: usize,
    /// How often it saves how far it has come. Default: 1 s.
    pub checkpoint_interval: Duration,
    /// Whose databases are. The jobs are divided among the tenants that have work, in fair shares; what of one tenant has no place in
    /// memory waits in the store. Default: a database belongs to the tenant that its name begins with, up to the first `/`.
    pub tenants: Tenants,
}

impl TriggerOptions {
    /// The defaults of an index trigger of this name, for all databases.
    pub fn index(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            filter: Filter::all(),
            debounce: Duration::from_secs(5),
            jobs_max: 4,
            attempts_max: 5,
            stall_limit: Duration::from_mins(10),
            backoff_min: Duration::from_secs(1),
            backoff_max: Duration::from_mins(5),
            pending_max: 10_000,
            checkpoint_interval: Duration::from_secs(1),
            tenants: Tenants::default(),
        }
    }

    /// The defaults of a replication trigger of this name, for the databases `_replicator` and `…/_replicator`.
    pub fn replication(name: impl Into<String>) -> Self {
        let filter = Filter::glob("{_replicator,*/_replicator}").expect("the pattern is right");
        Self { filter, debounce: Duration::ZERO, ..Self::index(name) }
    }

    /// Fails if an option is out of its limits.
    fn check(&self) -> Result<()> {
        let counts = [
            ("jobs at once", self.jobs_max, JOBS_MAX),
            ("pending databases", self.pending_max, PENDING_MAX),
            ("attempts", self.attempts_max as usize, usize::MAX),
            ("jobs of a tenant", self.tenants.jobs_max, usize::MAX),
            ("pending databases of a tenant", self.tenants.pending_max, usize::MAX),
        ];
        let is_out = |(_, count, max): &(&str, usize, usize)| !(1..=*max).contains(count);
        if let Some((what, count, max)) = counts.into_iter().find(is_out) {
            return Err(Error::invalid(what, format!("{count} is not 1 to {max}")));
        }
        let (none, millisecond) = (Duration::ZERO, Duration::from_millis(1));
        let times = [
            ("debounce", self.debounce, none, YEAR),
            ("stall limit", self.stall_limit, millisecond, YEAR),
            ("back-off", self.backoff_max, none, YEAR),
            ("checkpoint interval", self.checkpoint_interval, millisecond, Duration::from_hours(1)),
        ];
        let is_out = |(_, time, min, max): &(_, Duration, Duration, Duration)| {
            *time != Duration::MAX && !(*min..=*max).contains(time)
        };
        if let Some((what, time, min, max)) = times.into_iter().find(is_out) {
            return Err(Error::invalid(what, format!("{time:?} is not {min:?} to {max:?}")));
        }
        if self.backoff_min > self.backoff_max {
            let (min, max) = (self.backoff_min, self.backoff_max);
            return Err(Error::invalid("back-off", format!("at least {min:?} is more than at most {max:?}")));
        }
        if !self.filter.wants_all_kinds() {
            let reason = "a trigger needs all kinds of events: narrow the names only";
            return Err(Error::invalid("filter", reason));
        }
        Ok(())
    }

    /// How tasks are spaced.
    fn pacing(&self) -> Pacing {
        Pacing { debounce: self.debounce, tasks_max: self.jobs_max }
    }

    /// Whose databases are, with what each tenant may have.
    fn tenants(&self) -> Tenants {
        let mut tenants = self.tenants.clone();
        if tenants.pending_max == usize::MAX {
            tenants.pending_max = (self.pending_max / 8).max(self.jobs_max).min(self.pending_max);
        }
        tenants
    }

    /// The pauses after failures.
    fn retry(&self) -> RetryPolicy {
        RetryPolicy {
            attempts_max: None,
            elapsed_max: None,
            backoff_min: self.backoff_min,
            backoff_max: self.backoff_max,
        }
    }
}

/// A running trigger. Dropping it stops it and its jobs at once, as a crash would: when the drop has returned, nothing of them runs
/// any more. [`Trigger::shutdown`] also saves how far it has come.
#[must_use = "dropping it stops the trigger"]
pub struct Trigger {
    /// Its task. Dropping it ends it, with all jobs.
    task: Task<Result<()>>,
    /// Tells it to end.
    stop: watch::Sender<bool>,
    /// What it is at.
    status: watch::Receiver<TriggerStatus>,
}

impl Trigger {
    /// What it is at.
    pub fn status(&self) -> TriggerStatus {
        self.status.borrow().clone()
    }

    /// Waits until `holds` of what it is at; false if it has ended before.
    pub async fn wait_for(&self, mut holds: impl FnMut(&TriggerStatus) -> bool) -> bool {
        self.status.clone().wait_for(|status| holds(status)).await.is_ok()
    }

    /// Stops its jobs, and saves how far it has come. What they had under way is begun again by the next trigger of the name.
    ///
    /// Fails with [`Error::CursorLost`] if another one had opened its cursor.
    pub async fn shutdown(self) -> Result<()> {
        self.stop.send_replace(true);
        let stopped = |ended| Error::Task { shard: None, attempts: 1, source: Arc::new(ended) };
        self.task.await.unwrap_or_else(|ended| Err(stopped(ended)))
    }
}

impl fmt::Debug for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trigger").field("status", &self.status()).finish_non_exhaustive()
    }
}

/// Whether `db` is gone, if `row` is the newest one of its name.
fn is_gone(db: &Db, row: Option<&Notification>) -> bool {
    row.is_none_or(|row| row.is_deleted() || row.instance != db.instance)
}

/// The cursor of a trigger of this bus.
fn cursor(
    dispatcher: &Dispatcher,
    options: &TriggerOptions,
) -> Result<crate::state::named_cursor::NamedCursor> {
    crate::state::named_cursor::NamedCursor::new(dispatcher.context(), None, &options.name)
}
