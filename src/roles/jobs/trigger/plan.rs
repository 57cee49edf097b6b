//! [`Plan`]: what a trigger has to do, and when: pure, from what was seen and what has ended to what is to be started.
//!
//! # Invariants
//!
//! 1. Of one database at most one task runs; one that is cancelled counts until it has ended.
//! 2. That an instance is gone is told before anything is done for the next one of the name.
//! 3. What is seen while a task of its database runs is done by another task afterwards.
//! 4. Whoever starts again from [`Plan::since`], and with the names that the store knows to be owed something, sees everything again
//!    that is not done.
//!
//! One name for which something waits or runs for long, because its job hangs, fails, or waits for its tenant's turn, would hold
//! the cursor back, and all that others have done meanwhile would be done again after a restart. So such names are noted in the store
//! ([`Plan::overdue`]), and hold nothing back any more; nor do they if their tenant has no place left in the plan.

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

/// What is to be done for a database, gathered from all that was seen of it.
pub(in crate::roles::jobs) trait Work: Clone + Send + Sync + 'static {
    /// Adds what was seen later.
    fn merge(&mut self, later: Self);
}

/// What was seen of a database.
pub(super) struct Observed<W> {
    pub db: Db,
    /// The instance that it has replaced.
    pub replaced: Option<Db>,
    /// What is to be done for it; `None` if it is gone.
    pub work: Option<W>,
    /// Whoever starts again from here sees it again.
    pub since: Cursor,
}

/// What is to be done by a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Task<W> {
    /// To tell that a database is gone.
    Gone(Db),
    /// The work on one.
    Work(Db, W),
}

impl<W> Task<W> {
    /// Of which database.
    pub fn db(&self) -> &Db {
        match self {
            Self::Gone(db) | Self::Work(db, _) => db,
        }
    }
}

/// What holds the cursor back.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    /// Whoever starts again from here sees the cause again.
    since: Cursor,
    /// When it was seen.
    at: Duration,
}

/// Names that the store is to know to be owed something: the cause of each, and whether its database is fresh.
pub(super) type Spilled = BTreeMap<DbName, (Hold, bool)>;

/// What holds the cursor back of two things.
fn both(one: Option<Hold>, other: Option<Hold>) -> Option<Hold> {
    let merged = |a: Hold, b: Hold| Hold { since: a.since.min(b.since), at: a.at.min(b.at) };
    one.into_iter().chain(other).reduce(merged)
}

/// A task that was started.
#[derive(Debug)]
struct Running<W> {
    /// Tells it from all others.
    number: u64,
    /// What it does.
    task: Task<W>,
    /// Its cause; `None` for a parked database, which the store knows.
    hold: Option<Hold>,
    /// Whether its end counts for nothing.
    is_cancelled: bool,
    /// Whether its database is parked.
    is_retry: bool,
}

/// What is to be done for one name.
#[derive(Debug)]
struct Entry<W> {
    /// Whose it is.
    tenant: Tenant,
    /// Whether the store knows that something is to be done for it: it does not hold the cursor back.
    is_owed: bool,
    /// Instances that are gone, which is to be told.
    gone: Vec<Db>,
    /// The work that waits.
    work: Option<(Db, W)>,
    /// The causes of all that waits.
    hold: Option<Hold>,
    /// When the next task is due; `None` while one runs.
    due: Option<Duration>,
    /// The task that runs.
    running: Option<Running<W>>,
    /// How often the next task has failed.
    attempts: u32,
}

impl<W> Entry<W> {
    /// Nothing to do.
    fn new(tenant: Tenant, is_owed: bool) -> Self {
        let (gone, work, hold, due, running, attempts) = (Vec::new(), None, None, None, None, 0);
        Self { tenant, is_owed, gone, work, hold, due, running, attempts }
    }

    /// What of it holds the cursor back.
    fn held(&self) -> Option<Hold> {
        let running = self.running.as_ref().and_then(|running| running.hold);
        both(self.hold, running).filter(|_| !self.is_owed)
    }

    /// Whether it is of a database that was created since it was worked on last, as `is_fresh` knows.
    fn is_fresh(&self, is_fresh: impl Fn(&W) -> bool) -> bool {
        let running = match &self.running {
            Some(Running { task: Task::Work(_, work), is_cancelled: false, .. }) => Some(work),
            _ => None,
        };
        self.work.as_ref().map(|(_, work)| work).into_iter().chain(running).any(is_fresh)
    }

    /// Whether something waits.
    fn waits(&self) -> bool {
        !self.gone.is_empty() || self.work.is_some()
    }

    /// Ends the work on all instances but those that are `kept`: which they are, and the number of the task to be cancelled.
    fn end_instances(&mut self, kept: impl Fn(&Db) -> bool) -> (Vec<Db>, Option<u64>) {
        let mut over: Vec<_> =
            self.work.take_if(|(known, _)| !kept(known)).into_iter().map(|(db, _)| db).collect();
        let mut cancelled = None;
        if let Some(Running { number, task: Task::Work(known, _), is_cancelled, .. }) = &mut self.running
            && !*is_cancelled
            && !kept(known)
        {
            *is_cancelled = true;
            cancelled = Some(*number);
            over.push(known.clone());
        }
        (over, cancelled)
    }

    /// Has it wait again, before what has come since.
    fn put_back(&mut self, task: Task<W>)
    where
        W: Work,
    {
        match task {
            Task::Gone(db) => self.gone.insert(0, db),
            Task::Work(db, mut work) => {
                if let Some((_, later)) = self.work.take() {
                    work.merge(later);
                }
                self.work = Some((db, work));
            }
        }
    }

    /// That `over` are gone is to be told, before all that waits.
    fn tell_gone(&mut self, over: impl IntoIterator<Item = Db>) {
        for db in over {
            if !self.gone.contains(&db) {
                self.gone.push(db);
                self.attempts = 0;
            }
        }
    }
}

/// How a task has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// It has done its work, and found that these instances are gone.
    Done(Vec<Db>),
    /// Its job has failed, which was an attempt.
    Failed,
    /// Its job has failed, and its database was parked.
    Parked,
    /// Its database was parked already.
    WasParked,
    /// It could not do its part, which is no attempt of the job: that these instances are gone is to be told first, or, if
    /// there are none, something else has failed.
    PutOff(Vec<Db>),
}

/// What has become of a task that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It has done its work.
    Done,
    /// It has failed, and will be tried again.
    Failed,
    /// It has failed as often as it may, and waits in the store.
    Parked,
    /// It comes after the news that others are gone.
    PutOff,
    /// Nobody waits for it any more.
    Stale,
}

/// How tasks are spaced.
#[derive(Debug, Clone)]
pub(super) struct Pacing {
    /// How long work waits for more of the same.
    pub debounce: Duration,
    /// How many tasks run at once.
    pub tasks_max: usize,
}

/// What a trigger has to do, and when.
#[derive(Debug)]
pub(super) struct Plan<W> {
    /// How tasks are spaced.
    pacing: Pacing,
    /// By name, where something waits or runs.
    entries: HashMap<DbName, Entry<W>>,
    /// Which name comes next.
    queue: Queue,
    /// Names that the store knows to be owed something, which is done.
    settled: BTreeSet<DbName>,
    /// Names whose tenants have no place left.
    spilled: Spilled,
    /// Tenants of names that were left in the store.
    left: BTreeSet<Tenant>,
    /// How many tasks run.
    running: usize,
    /// How many of them are of parked databases.
    retrying: usize,
    /// The number of the next task.
    next: u64,
}

impl<W: Work> Plan<W> {
    /// Nothing to do.
    pub fn new(pacing: Pacing, tenants: Tenants) -> Self {
        Self {
            pacing,
            entries: HashMap::new(),
            queue: Queue::new(tenants),
            settled: BTreeSet::new(),
            spilled: BTreeMap::new(),
            left: BTreeSet::new(),
            running: 0,
            retrying: 0,
            next: 0,
        }
    }

    /// How many names have something waiting or running.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// How many names have something waiting, and nothing running.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// How many tasks run.
    pub fn running(&self) -> usize {
        self.running
    }

    /// How many tasks of parked databases run.
    pub fn retrying(&self) -> usize {
        self.retrying
    }

    /// Whether another task may run.
    pub fn has_room(&self) -> bool {
        self.running < self.pacing.tasks_max
    }

    /// When the next task is due, if there is room for it.
    pub fn next_due(&self) -> Option<Duration> {
        self.queue.next_due().filter(|_| self.has_room())
    }

    /// Whether a task is due at `now`, and there is room for it.
    pub fn is_due(&mut self, now: Duration) -> bool {
        self.has_room() && self.queue.is_due(now)
    }

    /// Whoever starts again from here sees everything again that is not done, but what the store knows; `None` if there is nothing
    /// else.
    pub fn since(&self) -> Option<Cursor> {
        let spilled = self.spilled.values().map(|(hold, _)| *hold);
        self.entries.values().filter_map(Entry::held).chain(spilled).map(|hold| hold.since).min()
    }

    /// At most `limit` names that the store is to know to be owed something, each with whether its database is fresh: those whose
    /// tenants have no place left, and those that have held the cursor back for `age`, the oldest ones first.
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
        held.sort_unstable_by_key(|(hold, ..)| hold.since);
        held.truncate(limit - overdue.len());
        overdue.extend(held.into_iter().map(|(_, name, entry)| (name.clone(), entry.is_fresh(&is_fresh))));
        overdue
    }

    /// Notes whether the store knows that `names` are owed something.
    pub fn set_owed<'a>(&mut self, names: impl Iterator<Item = &'a DbName>, is_owed: bool) {
        for name in names {
            if let Some(entry) = self.entries.get_mut(name) {
                entry.is_owed = is_owed;
            }
        }
    }

    /// Notes that the store knows of `names`: those that had no place in the plan wait there. Returns these.
    pub fn leave<'a>(&mut self, names: impl Iterator<Item = &'a DbName>) -> Spilled {
        let left: Spilled = names.filter_map(|name| self.spilled.remove_entry(name)).collect();
        self.left.extend(left.keys().map(|name| self.queue.tenant(name)));
        left
    }

    /// The store could not be made to know of `spilled`.
    pub fn put_back_spilled(&mut self, spilled: Spilled) {
        self.spilled.extend(spilled);
    }

    /// At most `limit` names to which nothing is owed any more, which the store is to forget.
    pub fn take_settled(&mut self, limit: usize) -> Vec<DbName> {
        let some: Vec<_> = self.settled.iter().take(limit).cloned().collect();
        self.settled.retain(|name| some.binary_search(name).is_err());
        some
    }

    /// The store could not be made to forget `names`.
    pub fn put_back_settled(&mut self, names: Vec<DbName>) {
        for name in names {
            match self.entries.get_mut(&name) {
                Some(entry) => entry.is_owed = true,
                None => _ = self.settled.insert(name),
            }
        }
    }

    /// How many names are to be noted in the store because their tenants have no place left.
    pub fn spilled(&self) -> usize {
        self.spilled.len()
    }

    /// Whether nothing can be taken in for `name`, because its tenant has no place left.
    pub fn is_full_for(&self, name: &DbName) -> bool {
        !self.entries.contains_key(name) && self.queue.is_full(&self.queue.tenant(name))
    }

    /// Takes in at `now` that something is to be done for `name`, for which there is no place.
    pub fn spill(&mut self, now: Duration, name: DbName, since: Cursor, is_fresh: bool) {
        let hold = Hold { since, at: now };
        let spilled = self.spilled.entry(name).or_insert((hold, false));
        *spilled = (both(Some(spilled.0), Some(hold)).unwrap_or(hold), spilled.1 || is_fresh);
    }

    /// Whether `name`, to which something is owed, is to be looked at: it is not in hand, and there is place for it. If not, its tenant
    /// is remembered until there is.
    pub fn wants_owed(&mut self, name: &DbName) -> bool {
        if self.settled.contains(name) || self.entries.get(name).is_some_and(|entry| entry.is_owed) {
            return false;
        }
        let is_full = self.is_full_for(name);
        if is_full {
            self.left.insert(self.queue.tenant(name));
        }
        !is_full
    }

    /// Whether there is place again for names that were left in the store; says so once.
    pub fn has_place_for_left(&mut self) -> bool {
        let before = self.left.len();
        let Self { left, queue, .. } = self;
        left.retain(|tenant| !queue.is_half_empty(tenant));
        left.len() < before
    }

    /// Takes in at `now` what is owed to `name` by the store: the living database with all that there can be to do for it, and else the
    /// instances that are gone.
    pub fn see_owed(&mut self, now: Duration, name: &DbName, work: Option<(Db, W)>, gone: Vec<Db>) {
        let is_known = self.entries.contains_key(name);
        if !is_known && work.is_none() && gone.is_empty() {
            self.settled.insert(name.clone());
            return;
        }
        let (entry, queue) = self.entry(name);
        entry.is_owed = true;
        match (&mut entry.work, work) {
            (Some((known, waiting)), Some((db, work))) if *known == db => waiting.merge(work),
            (None, Some((db, work))) => {
                // What the feed has told of another instance since is newer.
                let is_same = entry.running.as_ref().is_some_and(|running| *running.task.db() == db);
                if is_same || !is_known {
                    entry.work = Some((db, work));
                }
            }
            _ => {}
        }
        if !is_known {
            entry.tell_gone(gone);
        }
        if entry.waits() {
            Self::bring_forward(queue, name, entry, now);
        }
    }

    /// What there is of `name`, and the queue.
    fn entry(&mut self, name: &DbName) -> (&mut Entry<W>, &mut Queue) {
        let Self { entries, queue, settled, .. } = self;
        let entry = entries.entry(name.clone()).or_insert_with(|| {
            let tenant = queue.tenant(name);
            queue.enter(&tenant);
            Entry::new(tenant, settled.remove(name))
        });
        (entry, queue)
    }

    /// The living databases for which something waits or runs.
    pub fn living(&self) -> Vec<Db> {
        let of = |entry: &Entry<W>| match (&entry.work, &entry.running) {
            (Some((db, _)), _) | (None, Some(Running { task: Task::Work(db, _), .. })) => Some(db.clone()),
            _ => None,
        };
        self.entries.values().filter_map(of).collect()
    }

    /// Takes in what was seen at `now`; the number of a task that is to be cancelled, if one is.
    pub fn see(&mut self, now: Duration, seen: Observed<W>) -> Option<u64> {
        let Observed { db, replaced, work, since } = seen;
        let debounced = now.saturating_add(self.pacing.debounce);
        let (entry, queue) = self.entry(&db.name);
        entry.hold = both(entry.hold, Some(Hold { since, at: now }));
        // Any other instance of the name than this one is gone, and this one, too, if it says so.
        let lives = work.is_some();
        let (mut over, cancelled) = entry.end_instances(|known| lives && known.instance == db.instance);
        over.extend(replaced.filter(|replaced| replaced.instance != db.instance));
        if !lives {
            over.push(db.clone());
        }
        let has_new = !over.is_empty();
        entry.tell_gone(over);
        match (&mut entry.work, work) {
            (Some((_, waiting)), Some(work)) => waiting.merge(work),
            (None, Some(work)) => entry.work = Some((db.clone(), work)),
            (_, None) => {}
        }
        Self::bring_forward(queue, &db.name, entry, if has_new { now } else { debounced });
        cancelled
    }

    /// Takes in at `now` that `db` is gone, whatever has its name by now; the number of a task that is to be cancelled, if one is.
    pub fn forget(&mut self, now: Duration, db: Db, since: Cursor) -> Option<u64> {
        let (entry, queue) = self.entry(&db.name);
        entry.hold = both(entry.hold, Some(Hold { since, at: now }));
        let (_, cancelled) = entry.end_instances(|known| known.instance != db.instance);
        let name = db.name.clone();
        entry.tell_gone([db]);
        Self::bring_forward(queue, &name, entry, now);
        cancelled
    }

    /// Starts the next task that is due, if there is room: its number, what it does, and which attempt it is.
    pub fn start(&mut self, now: Duration) -> Option<(u64, Task<W>, u32)> {
        let name = if self.has_room() { self.queue.next(now)? } else { return None };
        let entry = self.entries.get_mut(&name).expect("what is due is there");
        entry.due = None;
        let hold = entry.hold;
        let task = if entry.gone.is_empty() {
            let (db, work) = entry.work.take().expect("something waits");
            Task::Work(db, work)
        } else {
            Task::Gone(entry.gone.remove(0))
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

    /// Starts `task` of a parked database: its number; `None` if there is no room, or something runs for the name, or waits for
    /// another instance of it. What waits for the same one is done afterwards: one that changes all the time would never be tried.
    pub fn start_retry(&mut self, task: &Task<W>) -> Option<u64> {
        let name = &task.db().name;
        let is_free = self.entries.get(name).is_none_or(|entry| {
            let is_same = entry.work.as_ref().is_none_or(|(db, _)| db == task.db());
            entry.running.is_none() && entry.gone.is_empty() && (is_same || matches!(task, Task::Gone(_)))
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

    /// Takes in how task `number` of `name` has ended; `backoff` is the pause after a number of failures.
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
                // After the news that one is gone, what waits for the next one may have waited long enough.
                let is_news = matches!(task, Task::Gone(_));
                (Outcome::Done, gone, if is_news { now } else { debounced })
            }
            End::Parked => {
                entry.attempts = 0;
                (Outcome::Parked, Vec::new(), debounced)
            }
            End::WasParked => {
                entry.attempts = 0;
                (Outcome::Stale, Vec::new(), debounced)
            }
            End::Failed => {
                entry.attempts += 1;
                entry.put_back(task);
                (Outcome::Failed, Vec::new(), now.saturating_add(backoff(entry.attempts)))
            }
            End::PutOff(gone) => {
                // The store knows of a parked one.
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
        // No task runs that could be of one of them.
        entry.end_instances(|known| !gone.contains(known));
        entry.tell_gone(gone);
        if entry.waits() {
            Self::bring_forward(&mut self.queue, name, entry, due);
        } else {
            let entry = place.remove();
            self.queue.leave(&entry.tenant);
            if entry.is_owed {
                self.settled.insert(name.clone());
            }
        }
        outcome
    }

    /// Notes that `entry` is due, unless it is so earlier: however often a database changes, its work is not put off. While a
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

    /// The database of the task of `name` that runs.
    #[cfg(test)]
    fn runs(&self, name: &DbName) -> Option<&Db> {
        self.entries.get(name)?.running.as_ref().map(|running| running.task.db())
    }
}

#[cfg(test)]
mod tests;
