//! [`Plan`]: the work of a trigger, and when it is due. It is pure: observations and ends of tasks come in, tasks to start come out.
//!
//! # Invariants
//!
//! 1. At most one task per database runs; a cancelled task counts until it has ended.
//! 2. The job is informed that an instance is gone before any work on the next instance of the name.
//! 3. What is observed while a task of its database runs causes another task afterwards.
//! 4. A trigger that starts again from [`Plan::since_without`], and with the names that the store lists as owed, observes all unfinished
//!    work again.
//!
//! A name whose work takes long, because its job hangs, fails, or waits for its tenant's turn, would hold the cursor back. Then all
//! that other jobs have done meanwhile would be repeated after a restart. So such names are listed in the store
//! ([`Plan::overdue`]), and do not hold the cursor back any more; nor do names whose tenants have no room left in the plan.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map},
    time::Duration,
};

use super::{
    queue::Queue,
    tenants::{Tenant, Tenants},
};

use crate::base::{
    cursor::Cursor,
    event::{Db, DbName},
};

/// Work for a database, which that of later observations is merged into.
pub(in crate::roles::jobs) trait Merge: Clone + Send + Sync + 'static {
    fn merge(&mut self, later: Self);
}

pub(super) struct Observed<W> {
    pub db: Db,
    /// The instance that it has replaced.
    pub replaced: Option<Db>,
    /// The work; `None` if the database is gone.
    pub work: Option<W>,
    /// A trigger that starts again from here observes it again.
    pub since: Cursor,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PlannedTask<W> {
    /// Informs the job that a database is gone.
    Gone(Db),
    Work(Db, W),
}

impl<W> PlannedTask<W> {
    pub fn db(&self) -> &Db {
        match self {
            Self::Gone(db) | Self::Work(db, _) => db,
        }
    }
}

/// Holds the cursor back.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    /// A trigger that starts again from here observes the cause again.
    since: Cursor,
    /// When the cause was observed.
    at: Duration,
}

/// Names that are to be listed in the store as owed: the cause of each, and whether its database is fresh.
pub(super) type Spilled = BTreeMap<DbName, (Hold, bool)>;

/// Merges two causes.
fn both(one: Option<Hold>, other: Option<Hold>) -> Option<Hold> {
    let merged = |a: Hold, b: Hold| Hold { since: a.since.min(b.since), at: a.at.min(b.at) };
    one.into_iter().chain(other).reduce(merged)
}

#[derive(Debug)]
struct Running<W> {
    /// Distinguishes it from all other tasks.
    number: u64,
    task: PlannedTask<W>,
    /// Its cause; `None` for a parked database, which the store knows.
    hold: Option<Hold>,
    /// Whether its end is to be ignored.
    is_cancelled: bool,
    /// Whether its database is parked.
    is_retry: bool,
}

/// Whether the store lists a name as owed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listed {
    No,
    /// The name was listed; its removal was asked for, and may have happened.
    Perhaps,
    /// It does, so that the name does not hold the cursor back. It may list other work of the name as well, which is not in the plan:
    /// it found no room there, or was not read yet.
    Yes,
    /// It does, and all that it lists of the name is in the plan.
    Read,
}

impl Listed {
    fn is_certain(self) -> bool {
        matches!(self, Self::Yes | Self::Read)
    }
}

/// The work of one name.
#[derive(Debug)]
struct Entry<W> {
    tenant: Tenant,
    /// Whether the store lists it as owed.
    listed: Listed,
    /// Gone instances of which the job is to be informed.
    gone: Vec<Db>,
    work: Option<(Db, W)>,
    /// The causes of all that waits.
    hold: Option<Hold>,
    /// When the next task is due; `None` while one runs.
    due: Option<Duration>,
    running: Option<Running<W>>,
    /// Failures of the next task.
    attempts: u32,
}

impl<W> Entry<W> {
    fn new(tenant: Tenant, listed: Listed) -> Self {
        let (gone, work, hold, due, running, attempts) = (Vec::new(), None, None, None, None, 0);
        Self { tenant, listed, gone, work, hold, due, running, attempts }
    }

    /// Its cause for holding the cursor back, if any.
    fn held(&self) -> Option<Hold> {
        let running = self.running.as_ref().and_then(|running| running.hold);
        both(self.hold, running).filter(|_| !self.listed.is_certain())
    }

    /// Whether its database was created since the last work on it, as `is_fresh` says.
    fn is_fresh(&self, is_fresh: impl Fn(&W) -> bool) -> bool {
        let running = match &self.running {
            Some(Running { task: PlannedTask::Work(_, work), is_cancelled: false, .. }) => Some(work),
            _ => None,
        };
        self.work.as_ref().map(|(_, work)| work).into_iter().chain(running).any(is_fresh)
    }

    fn waits(&self) -> bool {
        !self.gone.is_empty() || self.work.is_some()
    }

    /// Removes all instances but those that are `kept`. Returns them, and the number of the task to be cancelled.
    fn end_instances(&mut self, kept: impl Fn(&Db) -> bool) -> (Vec<Db>, Option<u64>) {
        let mut over: Vec<_> =
            self.work.take_if(|(known, _)| !kept(known)).into_iter().map(|(db, _)| db).collect();
        let mut cancelled = None;
        if let Some(Running { number, task: PlannedTask::Work(known, _), is_cancelled, .. }) =
            &mut self.running
            && !*is_cancelled
            && !kept(known)
        {
            *is_cancelled = true;
            cancelled = Some(*number);
            over.push(known.clone());
        }
        (over, cancelled)
    }

    /// Makes a task wait again, before newer work.
    fn put_back(&mut self, task: PlannedTask<W>)
    where
        W: Merge,
    {
        match task {
            PlannedTask::Gone(db) => self.gone.insert(0, db),
            PlannedTask::Work(db, mut work) => {
                if let Some((_, later)) = self.work.take() {
                    work.merge(later);
                }
                self.work = Some((db, work));
            }
        }
    }

    /// Adds instances of whose end the job is to be informed before all waiting work.
    fn add_gone(&mut self, over: impl IntoIterator<Item = Db>) {
        for db in over {
            if !self.gone.contains(&db) {
                self.gone.push(db);
                self.attempts = 0;
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// It has finished, and found that these instances are gone.
    Done(Vec<Db>),
    /// Its job has failed, which counts as an attempt.
    Failed,
    /// Its job has failed, and its database was parked.
    Parked,
    /// It did not begin, because its database is parked, or because it is not parked any more.
    OutOfTurn,
    /// It could not begin, which is no attempt of the job: the job has to be informed first that these instances are gone, or, if
    /// there are none, something else has failed.
    PutOff(Vec<Db>),
}

/// The result of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// It has failed, and will be tried again.
    Failed,
    /// It has failed as often as allowed, and waits in the store.
    Parked,
    /// It has to wait until the job is informed that other instances are gone.
    PutOff,
    Stale,
}

/// How tasks are spaced.
#[derive(Debug, Clone)]
pub(super) struct Pacing {
    /// How long work waits for more of the same.
    pub debounce: Duration,
    pub tasks_max: usize,
}

/// The work of a trigger, and when it is due.
#[derive(Debug)]
pub(super) struct Plan<W> {
    pacing: Pacing,
    /// Names with waiting or running work.
    entries: HashMap<DbName, Entry<W>>,
    /// Orders the names.
    queue: Queue,
    /// Names that the store lists as owed, but whose work is done.
    settled: BTreeSet<DbName>,
    /// Names that found no room in the plan.
    spilled: Spilled,
    /// Tenants with names that are only in the store.
    left: BTreeSet<Tenant>,
    /// The tenants among them whose names are being read.
    reading: BTreeSet<Tenant>,
    /// Whether the list was read to its end since the start.
    is_list_read: bool,
    running: usize,
    /// How many of them are of parked databases.
    retrying: usize,
    next: u64,
}

impl<W: Merge> Plan<W> {
    pub fn new(pacing: Pacing, tenants: Tenants) -> Self {
        Self {
            pacing,
            entries: HashMap::new(),
            queue: Queue::new(tenants),
            settled: BTreeSet::new(),
            spilled: BTreeMap::new(),
            left: BTreeSet::new(),
            reading: BTreeSet::new(),
            is_list_read: false,
            running: 0,
            retrying: 0,
            next: 0,
        }
    }

    /// Number of names with waiting or running work.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Number of names with waiting, but no running work.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    pub fn running(&self) -> usize {
        self.running
    }

    /// Number of running tasks of parked databases.
    pub fn retrying(&self) -> usize {
        self.retrying
    }

    pub fn has_room(&self) -> bool {
        self.running < self.pacing.tasks_max
    }

    /// When the next task is due, if one more may run.
    pub fn next_due(&self) -> Option<Duration> {
        self.queue.next_due().filter(|_| self.has_room())
    }

    /// Whether a task is due at `now`, and one more may run.
    pub fn is_due(&mut self, now: Duration) -> bool {
        self.has_room() && self.queue.is_due(now)
    }

    /// A trigger that starts again from here observes all unfinished work, but for that of `listed` names and of those that the
    /// store lists already; `None` if there is no such work.
    pub fn since_without(&self, listed: &BTreeSet<&DbName>) -> Option<Cursor> {
        let spilled = self.spilled.iter().map(|(name, (hold, _))| (name, *hold));
        let held = self.entries.iter().filter_map(|(name, entry)| Some((name, entry.held()?)));
        held.chain(spilled).filter(|(name, _)| !listed.contains(name)).map(|(_, hold)| hold.since).min()
    }

    /// At most `limit` names to be listed in the store as owed, each with whether its database is fresh: names whose
    /// tenants have no room left, and names that have held the cursor back for `age`, the oldest first.
    pub fn overdue(
        &self,
        now: Duration,
        (age, limit): (Duration, usize),
        is_fresh: impl Fn(&W) -> bool,
    ) -> Vec<(DbName, bool)> {
        let spilled = self.spilled.iter().map(|(name, (_, is_fresh))| (name.clone(), *is_fresh));
        let mut overdue: Vec<_> = spilled.take(limit).collect();
        let held = self.entries.iter().filter_map(|(name, entry)| Some((entry.held()?, name, entry)));
        let mut held: Vec<_> = held.filter(|(hold, ..)| hold.at.saturating_add(age) <= now).collect();
        held.sort_unstable_by_key(|&(hold, name, _)| (hold.since, name));
        held.truncate(limit - overdue.len());
        overdue.extend(held.into_iter().map(|(_, name, entry)| (name.clone(), entry.is_fresh(&is_fresh))));
        overdue
    }

    /// Notes that the store lists `names` as owed. Returns those without room in the plan, which wait there.
    pub fn set_listed<'a>(&mut self, names: impl Iterator<Item = &'a DbName>) -> Vec<DbName> {
        let mut without_room = Vec::new();
        for name in names {
            let was_spilled = self.spilled.remove(name).is_some();
            let tenant = self.queue.tenant(name);
            let may_list_more = was_spilled || self.may_list_more(&tenant);
            if let Some(entry) = self.entries.get_mut(name)
                && (was_spilled || entry.listed != Listed::Read)
            {
                entry.listed = if may_list_more { Listed::Yes } else { Listed::Read };
            }
            if was_spilled {
                self.left.insert(tenant);
                without_room.push(name.clone());
            }
        }
        without_room
    }

    /// Whether the store may list work of the tenant that is not in the plan.
    fn may_list_more(&self, tenant: &Tenant) -> bool {
        !self.is_list_read || self.left.contains(tenant) || self.reading.contains(tenant)
    }

    /// At most `limit` names whose work is done and that the store is to remove from its list.
    pub fn settled(&self, limit: usize) -> Vec<DbName> {
        self.settled.iter().take(limit).cloned().collect()
    }

    /// Notes that the store does not list `names` any more.
    pub fn set_unlisted(&mut self, names: &[DbName]) {
        for name in names {
            self.settled.remove(name);
        }
    }

    /// Schedules the removal of `name` from the list of the store, unless the name has to be listed again.
    fn settle(settled: &mut BTreeSet<DbName>, spilled: &Spilled, name: &DbName) {
        if !spilled.contains_key(name) {
            settled.insert(name.clone());
        }
    }

    /// Number of names to be listed in the store because their tenants have no room left.
    pub fn spilled(&self) -> usize {
        self.spilled.len()
    }

    /// Whether the tenant of `name` has no room left for it.
    pub fn is_full_for(&self, name: &DbName) -> bool {
        !self.entries.contains_key(name) && self.queue.is_full(&self.queue.tenant(name))
    }

    /// Notes at `now` that `name` has work, but no room in the plan.
    pub fn spill(&mut self, now: Duration, name: DbName, since: Cursor, is_fresh: bool) {
        let hold = Hold { since, at: now };
        self.settled.remove(&name);
        let spilled = self.spilled.entry(name).or_insert((hold, false));
        *spilled = (both(Some(spilled.0), Some(hold)).unwrap_or(hold), spilled.1 || is_fresh);
    }

    /// Whether to look up the owed `name`: what the store lists of it is not in the plan, and there is room for it. If there is no
    /// room, notes its tenant.
    pub fn wants_owed(&mut self, name: &DbName) -> bool {
        let is_read = |entry: &Entry<W>| entry.listed == Listed::Read;
        if self.settled.contains(name) || self.entries.get(name).is_some_and(is_read) {
            return false;
        }
        let is_full = self.is_full_for(name);
        if is_full {
            self.left.insert(self.queue.tenant(name));
        }
        !is_full
    }

    /// Whether names that are only in the store have room again; returns true once. To be asked when the list was read to its end.
    pub fn has_place_for_left(&mut self) -> bool {
        self.is_list_read = true;
        let Self { left, queue, reading, .. } = self;
        *reading = left.extract_if(.., |tenant| queue.is_half_empty(tenant)).collect();
        !reading.is_empty()
    }

    /// Adds at `now` the owed work of `name`: all work of its living database or, if none lives, its gone
    /// instances.
    pub fn observe_owed(&mut self, now: Duration, name: &DbName, work: Option<(Db, W)>, gone: Vec<Db>) {
        let is_known = self.entries.contains_key(name);
        if !is_known && work.is_none() && gone.is_empty() {
            Self::settle(&mut self.settled, &self.spilled, name);
            return;
        }
        let (entry, queue) = self.entry(name);
        // What the feed has delivered of the name is newer. A retry of a parked one did not come from
        // the feed.
        let is_new = !entry.waits() && entry.running.as_ref().is_none_or(|running| running.is_retry);
        let is_adopted = match (&mut entry.work, work) {
            (Some((known, waiting)), Some((db, work))) if *known == db => {
                waiting.merge(work);
                true
            }
            (Some(_), Some(_)) => false,
            (None, Some((db, work))) => {
                // The feed may have delivered the end of this instance since, or another one, which is newer. A retry of
                // a parked one did not come from the feed, and is older.
                let is_over = match &entry.running {
                    Some(Running { task: PlannedTask::Gone(known), .. }) => *known == db,
                    Some(Running { task: PlannedTask::Work(known, _), is_retry, .. }) => {
                        *known != db && !is_retry
                    }
                    None => false,
                };
                let is_wanted = !is_over && !entry.gone.contains(&db);
                if is_wanted {
                    entry.work = Some((db, work));
                }
                is_wanted
            }
            (_, None) => is_new,
        };
        // The work in the plan may still be older: it was read before the name found no room and was listed again. So the work that
        // is left out here is looked up again later, and not removed undone.
        entry.listed = if is_adopted { Listed::Read } else { Listed::Yes };
        if is_new {
            entry.add_gone(gone);
        }
        if entry.waits() {
            Self::bring_forward(queue, name, entry, now);
        }
    }

    /// The entry of `name`, and the queue.
    fn entry(&mut self, name: &DbName) -> (&mut Entry<W>, &mut Queue) {
        let Self { entries, queue, settled, .. } = self;
        let entry = entries.entry(name.clone()).or_insert_with(|| {
            let tenant = queue.tenant(name);
            queue.enter(&tenant);
            let listed = if settled.remove(name) { Listed::Perhaps } else { Listed::No };
            Entry::new(tenant, listed)
        });
        (entry, queue)
    }

    /// The living databases with waiting or running work, in order: a seed always makes the same world.
    pub fn living(&self) -> Vec<Db> {
        let of = |entry: &Entry<W>| match (&entry.work, &entry.running) {
            (Some((db, _)), _) | (None, Some(Running { task: PlannedTask::Work(db, _), .. })) => {
                Some(db.clone())
            }
            _ => None,
        };
        let mut living: Vec<_> = self.entries.values().filter_map(of).collect();
        living.sort_unstable();
        living
    }

    /// Adds an observation at `now`. Returns the number of a task that is to be cancelled, if any.
    pub fn observe(&mut self, now: Duration, seen: Observed<W>) -> Option<u64> {
        let Observed { db, replaced, work, since } = seen;
        let debounced = now.saturating_add(self.pacing.debounce);
        let (entry, queue) = self.entry(&db.name);
        entry.hold = both(entry.hold, Some(Hold { since, at: now }));
        // All other instances of the name are gone, and this one as well if the observation says so.
        let lives = work.is_some();
        let (mut over, cancelled) = entry.end_instances(|known| lives && known.instance == db.instance);
        over.extend(replaced.filter(|replaced| replaced.instance != db.instance));
        if !lives {
            over.push(db.clone());
        }
        let has_new = !over.is_empty();
        entry.add_gone(over);
        match (&mut entry.work, work) {
            (Some((_, waiting)), Some(work)) => waiting.merge(work),
            (None, Some(work)) => entry.work = Some((db.clone(), work)),
            (_, None) => {}
        }
        Self::bring_forward(queue, &db.name, entry, if has_new { now } else { debounced });
        cancelled
    }

    /// Notes at `now` that `db` is gone, whatever has its name now. Returns the number of a task that is to be cancelled, if any.
    pub fn forget(&mut self, now: Duration, db: Db, since: Cursor) -> Option<u64> {
        let (entry, queue) = self.entry(&db.name);
        entry.hold = both(entry.hold, Some(Hold { since, at: now }));
        let (_, cancelled) = entry.end_instances(|known| known.instance != db.instance);
        let name = db.name.clone();
        entry.add_gone([db]);
        Self::bring_forward(queue, &name, entry, now);
        cancelled
    }

    /// Starts the next due task, if one more may run. Returns its number, the task, and the number of the attempt.
    pub fn start(&mut self, now: Duration) -> Option<(u64, PlannedTask<W>, u32)> {
        let name = if self.has_room() { self.queue.next(now)? } else { return None };
        let entry = self.entries.get_mut(&name).expect("what is due is there");
        entry.due = None;
        let hold = entry.hold;
        let task = if entry.gone.is_empty() {
            let (db, work) = entry.work.take().expect("something waits");
            PlannedTask::Work(db, work)
        } else {
            PlannedTask::Gone(entry.gone.remove(0))
        };
        if !entry.waits() {
            entry.hold = None;
        }
        self.next += 1;
        self.running += 1;
        self.queue.started(&entry.tenant);
        let (number, is_cancelled, is_retry) = (self.next, false, false);
        entry.running = Some(Running { number, task: task.clone(), hold, is_cancelled, is_retry });
        Some((number, task, entry.attempts + 1))
    }

    /// Starts `task` of a parked database. Returns its number; `None` if no more may run, or the name has running work, or waiting work
    /// of another instance. Waiting work of the same instance is done afterwards: else a database that changes all the time would never
    /// be tried.
    pub fn start_retry(&mut self, task: &PlannedTask<W>) -> Option<u64> {
        let name = &task.db().name;
        let is_free = self.entries.get(name).is_none_or(|entry| {
            let is_same = entry.work.as_ref().is_none_or(|(db, _)| db == task.db());
            entry.running.is_none()
                && entry.gone.is_empty()
                && (is_same || matches!(task, PlannedTask::Gone(_)))
        });
        if !self.has_room() || !is_free || !self.queue.may_run(&self.queue.tenant(name)) {
            return None;
        }
        self.next += 1;
        (self.running, self.retrying) = (self.running + 1, self.retrying + 1);
        let (number, is_cancelled, is_retry) = (self.next, false, true);
        let (entry, queue) = self.entry(name);
        if let Some(due) = entry.due.take() {
            queue.take(&entry.tenant, name, due);
        }
        queue.started(&entry.tenant);
        entry.running = Some(Running { number, task: task.clone(), hold: None, is_cancelled, is_retry });
        Some(number)
    }

    /// Notes how task `number` of `name` has ended; `backoff` gives the pause after a number of failures.
    pub fn end(
        &mut self,
        now: Duration,
        (name, number): (&DbName, u64),
        end: End,
        backoff: impl FnOnce(u32) -> Duration,
    ) -> Outcome {
        let hash_map::Entry::Occupied(mut place) = self.entries.entry(name.clone()) else {
            return Outcome::Stale;
        };
        let entry = place.get_mut();
        let Some(running) = entry.running.take_if(|running| running.number == number) else {
            return Outcome::Stale;
        };
        self.running -= 1;
        self.queue.ended(&entry.tenant);
        let Running { task, hold, is_cancelled, is_retry, .. } = running;
        self.retrying -= usize::from(is_retry);
        let debounced = now.saturating_add(self.pacing.debounce);
        let (outcome, gone, due) = match end {
            _ if is_cancelled => (Outcome::Stale, Vec::new(), now),
            End::Done(gone) => {
                entry.attempts = 0;
                // Work that waited for the end of another instance may have waited long enough.
                let is_news = matches!(task, PlannedTask::Gone(_));
                (Outcome::Done, gone, if is_news { now } else { debounced })
            }
            End::Parked => {
                entry.attempts = 0;
                (Outcome::Parked, Vec::new(), debounced)
            }
            End::OutOfTurn => {
                entry.attempts = 0;
                (Outcome::Stale, Vec::new(), debounced)
            }
            End::Failed => {
                entry.attempts += 1;
                entry.put_back(task);
                (Outcome::Failed, Vec::new(), now.saturating_add(backoff(entry.attempts)))
            }
            End::PutOff(gone) => {
                // The store keeps a parked one.
                if !is_retry {
                    entry.put_back(task);
                }
                let (outcome, pause) = match gone[..] {
                    [] => (Outcome::Failed, backoff(entry.attempts + 1)),
                    _ => (Outcome::PutOff, Duration::ZERO),
                };
                (outcome, gone, now.saturating_add(pause))
            }
        };
        if !matches!(outcome, Outcome::Stale | Outcome::Parked)
            && (outcome != Outcome::Done || !gone.is_empty())
        {
            entry.hold = both(entry.hold, hold);
        }
        // No running task can be of one of them.
        entry.end_instances(|known| !gone.contains(known));
        entry.add_gone(gone);
        if entry.waits() {
            Self::bring_forward(&mut self.queue, name, entry, due);
        } else {
            let entry = place.remove();
            self.queue.leave(&entry.tenant);
            match entry.listed {
                Listed::No => {}
                // Other work of the name may be only in the store. It is looked up once more, rather than removed undone.
                Listed::Yes => {
                    self.left.insert(entry.tenant);
                }
                Listed::Perhaps | Listed::Read => {
                    Self::settle(&mut self.settled, &self.spilled, name);
                }
            }
        }
        outcome
    }

    /// Makes `entry` due at `due` at the latest: further changes of a database do not postpone its work. While a
    /// task runs, nothing is due.
    fn bring_forward(queue: &mut Queue, name: &DbName, entry: &mut Entry<W>, due: Duration) {
        if entry.running.is_some() || entry.due.is_some_and(|known| known <= due) {
            return;
        }
        if let Some(before) = entry.due.replace(due) {
            queue.take(&entry.tenant, name, before);
        }
        queue.put(&entry.tenant, name, due);
    }

    #[cfg(test)]
    fn runs(&self, name: &DbName) -> Option<&Db> {
        self.entries.get(name)?.running.as_ref().map(|running| running.task.db())
    }
}

#[cfg(test)]
mod tests;
