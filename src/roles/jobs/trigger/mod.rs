//! Triggers: they follow the notifications, and run a job for each database that needs it.
//!
//! A trigger is a durable subscriber ([`NamedCursor`](crate::cursor::NamedCursor)), a plan of the waiting work ([`plan`]), and the
//! running jobs ([`task`]). Its cursor stays before all unfinished work, except for names that the store lists as owed
//! ([`owed`]). So work that is lost with the process comes again, from the feed or from that list: triggers may run twice, but are
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
    kind::{Kind, SeenCursor, Turn},
    plan::Merge,
    task::start,
};
pub use self::{
    stored::{ParkedDb, StoredTrigger},
    tenants::Tenants,
};
use super::TaskResult;
use crate::{
    base::{
        env::Env,
        error::{Error, Result},
        event::Db,
        notification::Notification,
        tasks::{Task, in_time},
    },
    roles::dispatcher::{Dispatcher, Filter},
    state::trigger_board::TriggerStatus,
    store::RetryPolicy,
};

/// The job of a trigger. A closure that returns a future of [`TaskResult`] is a job, too, which does
/// nothing when a database is deleted.
pub trait TriggerJob<W>: Send + Sync + 'static {
    /// Works on a database. It may be called again for the same work, and must tolerate that. After a failure or a panic it is tried
    /// again later.
    ///
    /// If the database is deleted meanwhile, the future is dropped. All that it has started must end with it, as a
    /// [`ParallelJob`](crate::jobs::ParallelJob) does. Check each transaction that writes
    /// ([`Fence::check_in`](crate::jobs::Fence::check_in)): then a commit that is on its way cannot come after
    /// [`TriggerJob::deleted`].
    fn run(&self, work: W) -> impl Future<Output = TaskResult> + Send;

    /// Called when a database was deleted: what was done for it is not needed any more. It is called before any work on a database that
    /// was created under the same name since. It may be called again, or for a database without any work.
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

/// How many names one read looks up in the feed.
const LOOK_UPS_MAX: usize = 64;

/// Pause after a failed read.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

const YEAR: Duration = Duration::from_hours(366 * 24);

/// How a trigger works. Values out of these limits are refused; [`Duration::MAX`] means never:
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
#[non_exhaustive]
pub struct TriggerOptions {
    /// The name of its cursor, 1 to 256 bytes: after a restart, a trigger of the same name continues where it was. If triggers of one
    /// name run on two nodes, the one that was started last continues, and the other one ends.
    pub name: String,
    /// The databases to follow, by their names. It must want all kinds of events, and have no predicate: a trigger with another filter
    /// than before begins again, and predicates cannot be compared.
    pub filter: Filter,
    /// How long work waits for more changes: however often a database changes, its work is done once per this time, and
    /// not later than this time after the first change. Default: 5 s for indexes, none for replications.
    pub debounce: Duration,
    /// How many jobs run at once, 1 to 10,000; one per database. Default: 4.
    pub jobs_max: usize,
    /// Attempts of a failing job before its database is parked. A parked database costs the others nothing: it waits in the
    /// store, takes no room in memory and does not hold the cursor back. It is tried again in rounds that begin
    /// [`TriggerOptions::backoff_max`] apart: in each round at first, then in every second, up to every sixteenth, and in each again
    /// after a change. At most half of the running jobs are such retries, but at least one may be. A database whose clean-up after a
    /// deletion has failed as often is parked as well, and does not block work on its successor. Default: 5.
    pub attempts_max: u32,
    /// How long a job may make no progress before it is cancelled, and its database parked. Progress is each transaction that
    /// it has checked ([`Fence::check_in`](crate::jobs::Fence::check_in)), each page of a scan, and each batch of a
    /// [`ParallelJob`](crate::jobs::ParallelJob) with its fence. A job that does other work for longer calls
    /// [`Fence::note_progress`](crate::jobs::Fence::note_progress). Default: 10 min.
    pub stall_limit: Duration,
    /// The first pause before a failed job is tried again. Each further pause is twice as long. Default: 1 s.
    pub backoff_min: Duration,
    /// The longest such pause. Default: 5 min.
    pub backoff_max: Duration,
    /// The most databases with waiting work, 1 to 10,000,000. At this limit the trigger stops reading the feed, which keeps the
    /// rest. Default: 10,000.
    pub pending_max: usize,
    /// How often the cursor is saved. Default: 1 s.
    pub checkpoint_interval: Duration,
    /// The tenants of the databases. The jobs are divided in fair shares among the tenants that have work; work of a tenant that
    /// exceeds its room in memory waits in the store. Default: the tenant is the part of the database's name before the first `/`.
    pub tenants: Tenants,
}

crate::base::macros::setters!(TriggerOptions {
    name: String,
    filter: Filter,
    debounce: Duration,
    jobs_max: usize,
    attempts_max: u32,
    stall_limit: Duration,
    backoff_min: Duration,
    backoff_max: Duration,
    pending_max: usize,
    checkpoint_interval: Duration,
    tenants: Tenants
});

impl TriggerOptions {
    /// The most jobs at once.
    pub const JOBS_MAX: usize = 10_000;
    /// The most databases with waiting work.
    pub const PENDING_MAX: usize = 10_000_000;

    /// Defaults of an index trigger of this name, for all databases.
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

    /// Defaults of a replication trigger of this name, for the databases `_replicator` and `…/_replicator`.
    pub fn replication(name: impl Into<String>) -> Self {
        let filter = Filter::glob("{_replicator,*/_replicator}").expect("the pattern is right");
        Self { filter, debounce: Duration::ZERO, ..Self::index(name) }
    }

    fn check(&self) -> Result<()> {
        let counts = [
            ("jobs at once", self.jobs_max, Self::JOBS_MAX),
            ("pending databases", self.pending_max, Self::PENDING_MAX),
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
        if self.filter.has_predicate() {
            let reason = "a trigger cannot notice that it has another predicate than before: follow names, and let the job return";
            return Err(Error::invalid("filter", reason));
        }
        Ok(())
    }

    fn pacing(&self) -> Pacing {
        Pacing { debounce: self.debounce, tasks_max: self.jobs_max }
    }

    /// The tenants, with the limits of each.
    fn tenants_with_limits(&self) -> Tenants {
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
/// any more. [`Trigger::shutdown`] also saves the cursor.
#[must_use = "dropping it stops the trigger"]
pub struct Trigger {
    /// Dropping it ends the trigger, with all jobs.
    task: Task<Result<()>>,
    stop: watch::Sender<bool>,
    status: watch::Receiver<TriggerStatus>,
    env: Env,
}

impl Trigger {
    /// Its present status.
    pub fn status(&self) -> TriggerStatus {
        self.status.borrow().clone()
    }

    /// Waits until `holds` returns true for its status. Returns false if it ends before.
    pub async fn wait_for(&self, mut holds: impl FnMut(&TriggerStatus) -> bool) -> bool {
        self.status.clone().wait_for(|status| holds(status)).await.is_ok()
    }

    /// Stops its jobs, and saves the cursor. The next trigger of the name begins unfinished work again.
    ///
    /// Fails with [`Error::CursorLost`] if another trigger has opened its cursor, with [`Error::BusGone`] if the bus is gone, and with
    /// [`Error::GaveUp`] if the store does not answer within 10 s: then the next trigger repeats what was not saved.
    pub async fn shutdown(self) -> Result<()> {
        let Self { task, stop, env, .. } = self;
        stop.send_replace(true);
        let stopped = |ended| Error::Task { shard: None, attempts: 1, source: Arc::new(ended) };
        let ended = async { task.await.unwrap_or_else(|ended| Err(stopped(ended))) };
        in_time(&env, "saving the progress of a trigger", ended).await
    }
}

impl fmt::Debug for Trigger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trigger").field("status", &self.status()).finish_non_exhaustive()
    }
}

/// Whether `db` is gone, where `row` is the newest row of its name.
fn is_gone(db: &Db, row: Option<&Notification>) -> bool {
    row.is_none_or(|row| row.is_deleted() || row.instance != db.instance)
}

fn cursor(
    dispatcher: &Dispatcher,
    options: &TriggerOptions,
) -> Result<crate::state::named_cursor::NamedCursor> {
    crate::state::named_cursor::NamedCursor::new(dispatcher.context(), None, &options.name)
}
