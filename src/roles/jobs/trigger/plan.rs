//! [`Plan`]: what a trigger has to do, and when: pure, from what was seen and what has ended to what is to be started.
//!
//! # Invariants
//!
//! 1. Of one database at most one task runs; one that is cancelled counts until it has ended.
//! 2. That an instance is gone is told before anything is done for the next one of the name.
//! 3. What is seen while a task of its database runs is done by another task afterwards.
//! 4. Whoever starts again from [`Plan::since`] sees everything again that is not done.

use std::{
    collections::{BTreeSet, HashMap, hash_map},
    time::Duration,
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
pub(super) struct Seen<W> {
    /// The database.
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

/// A task that was started.
#[derive(Debug)]
struct Running<W> {
    /// Tells it from all others.
    number: u64,
    /// What it does.
    task: Task<W>,
    /// Whoever starts again from here sees the cause again; `None` for a parked database, which the store knows.
    since: Option<Cursor>,
    /// Whether its end counts for nothing.
    is_cancelled: bool,
    /// Whether its database is parked.
    is_retry: bool,
}

/// What is to be done for one name.
#[derive(Debug)]
struct Entry<W> {
    /// Instances that are gone, which is to be told.
    gone: Vec<Db>,
    /// The work that waits.
    work: Option<(Db, W)>,
    /// Whoever starts again from here sees all that waits again.
    since: Option<Cursor>,
    /// When the next task is due; `None` while one runs.
    due: Option<Duration>,
    /// The task that runs.
    running: Option<Running<W>>,
    /// How often the next task has failed.
    attempts: u32,
}

impl<W> Entry<W> {
    /// Nothing to do.
    fn new() -> Self {
        Self { gone: Vec::new(), work: None, since: None, due: None, running: None, attempts: 0 }
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
    /// When which name is due.
    due: BTreeSet<(Duration, DbName)>,
    /// How many tasks run.
    running: usize,
    /// How many of them are of parked databases.
    retrying: usize,
    /// The number of the next task.
    next: u64,
}

impl<W: Work> Plan<W> {
    /// Nothing to do.
    pub fn new(pacing: Pacing) -> Self {
        Self { pacing, entries: HashMap::new(), due: BTreeSet::new(), running: 0, retrying: 0, next: 0 }
    }

    /// How many names have something waiting or running.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// How many names have something waiting, and nothing running.
    pub fn waiting(&self) -> usize {
        self.due.len()
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
        let (due, _) = self.due.first()?;
        self.has_room().then_some(*due)
    }

    /// Whether a task is due at `now`, and there is room for it.
    pub fn is_due(&self, now: Duration) -> bool {
        self.next_due().is_some_and(|due| due <= now)
    }

    /// Whoever starts again from here sees everything again that is not done; `None` if all is done.
    pub fn since(&self) -> Option<Cursor> {
        let of = |entry: &Entry<W>| {
            entry.running.as_ref().and_then(|running| running.since).into_iter().chain(entry.since)
        };
        self.entries.values().flat_map(of).min()
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
    pub fn see(&mut self, now: Duration, seen: Seen<W>) -> Option<u64> {
        let Seen { db, replaced, work, since } = seen;
        let entry = self.entries.entry(db.name.clone()).or_insert_with(Entry::new);
        entry.since = Some(entry.since.map_or(since, |known| known.min(since)));
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
        let due = if has_new { now } else { now.saturating_add(self.pacing.debounce) };
        Self::bring_forward(&mut self.due, &db.name, entry, due);
        cancelled
    }

    /// Takes in at `now` that `db` is gone, whatever has its name by now; the number of a task that is to be cancelled, if one is.
    pub fn forget(&mut self, now: Duration, db: Db, since: Cursor) -> Option<u64> {
        let entry = self.entries.entry(db.name.clone()).or_insert_with(Entry::new);
        entry.since = Some(entry.since.map_or(since, |known| known.min(since)));
        let (_, cancelled) = entry.end_instances(|known| known.instance != db.instance);
        let name = db.name.clone();
        entry.tell_gone([db]);
        Self::bring_forward(&mut self.due, &name, entry, now);
        cancelled
    }

    /// Starts the next task that is due, if there is room: its number, what it does, and which attempt it is.
    pub fn start(&mut self, now: Duration) -> Option<(u64, Task<W>, u32)> {
        let due = self.next_due()?;
        if due > now {
            return None;
        }
        let (_, name) = self.due.pop_first()?;
        let entry = self.entries.get_mut(&name).expect("what is due is there");
        entry.due = None;
        let since = entry.since;
        let task = if entry.gone.is_empty() {
            let (db, work) = entry.work.take().expect("something waits");
            Task::Work(db, work)
        } else {
            Task::Gone(entry.gone.remove(0))
        };
        if !entry.waits() {
            entry.since = None;
        }
        self.next += 1;
        self.running += 1;
        let (number, is_cancelled, is_retry) = (self.next, false, false);
        entry.running = Some(Running { number, task: task.clone(), since, is_cancelled, is_retry });
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
        if !self.has_room() || !is_free {
            return None;
        }
        self.next += 1;
        (self.running, self.retrying) = (self.running + 1, self.retrying + 1);
        let (number, is_cancelled, is_retry) = (self.next, false, true);
        let entry = self.entries.entry(name.clone()).or_insert_with(Entry::new);
        if let Some(due) = entry.due.take() {
            self.due.remove(&(due, name.clone()));
        }
        entry.running = Some(Running { number, task: task.clone(), since: None, is_cancelled, is_retry });
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
        let Running { task, since, is_cancelled, is_retry, .. } = running;
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
            entry.since = entry.since.into_iter().chain(since).min();
        }
        // No task runs that could be of one of them.
        entry.end_instances(|known| !gone.contains(known));
        entry.tell_gone(gone);
        if entry.waits() {
            Self::bring_forward(&mut self.due, name, entry, due);
        } else {
            place.remove();
        }
        outcome
    }

    /// Notes that `entry` is due, unless it is so earlier: however often a database changes, its work is not put off. While a
    /// task runs, nothing is due.
    fn bring_forward(
        all: &mut BTreeSet<(Duration, DbName)>,
        name: &DbName,
        entry: &mut Entry<W>,
        due: Duration,
    ) {
        if entry.running.is_some() || entry.due.is_some_and(|known| known <= due) {
            return;
        }
        if let Some(before) = entry.due.replace(due) {
            all.remove(&(before, name.clone()));
        }
        all.insert((due, name.clone()));
    }

    /// The database of the task of `name` that runs.
    #[cfg(test)]
    fn runs(&self, name: &DbName) -> Option<&Db> {
        self.entries.get(name)?.running.as_ref().map(|running| running.task.db())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{
        encoding::{Incarnation, Sequence, Versionstamp},
        event::DbInstance,
    };

    impl Work for Vec<u32> {
        fn merge(&mut self, later: Self) {
            self.extend(later);
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn db(instance: u8) -> Db {
        Db::new(DbName::new("db").unwrap(), DbInstance([instance; 16]))
    }

    fn at(version: u64) -> Cursor {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0).into()
    }

    fn plan() -> Plan<Vec<u32>> {
        Plan::new(Pacing { debounce: SECOND, tasks_max: 2 })
    }

    fn seen(instance: u8, work: u32, since: u64) -> Seen<Vec<u32>> {
        Seen { db: db(instance), replaced: None, work: Some(vec![work]), since: at(since) }
    }

    fn end(plan: &mut Plan<Vec<u32>>, now: Duration, number: u64, is_done: bool) -> Outcome {
        let end = if is_done { End::Done(Vec::new()) } else { End::Failed };
        plan.end(now, (&db(1).name, number), end, |failures| SECOND * 10 * failures)
    }

    #[test]
    fn work_waits_for_more_of_the_same_but_is_not_put_off() {
        let mut plan = plan();
        plan.see(SECOND, seen(1, 1, 1));
        plan.see(SECOND * 19 / 10, seen(1, 2, 2));
        assert_eq!(plan.start(SECOND * 19 / 10), None);
        let (number, task, attempt) = plan.start(SECOND * 2).unwrap();
        assert_eq!((task, attempt), (Task::Work(db(1), vec![1, 2]), 1));
        assert_eq!(plan.since(), Some(at(1)));
        assert_eq!(end(&mut plan, SECOND * 3, number, true), Outcome::Done);
        assert_eq!((plan.len(), plan.since(), plan.next_due()), (0, None, None));
    }

    #[test]
    fn what_could_not_be_begun_waits_for_the_news_of_others_and_is_no_attempt() {
        let mut plan = plan();
        let backoff = |failures| SECOND * 10 * failures;
        let name = db(3).name;
        plan.see(SECOND, seen(3, 1, 1));
        let (number, ..) = plan.start(SECOND * 2).unwrap();
        let put_off = End::PutOff(Vec::new());
        assert_eq!(plan.end(SECOND * 2, (&name, number), put_off, backoff), Outcome::Failed);
        let (number, task, attempt) = plan.start(SECOND * 12).unwrap();
        assert_eq!((task, attempt), (Task::Work(db(3), vec![1]), 1));
        let put_off = End::PutOff(vec![db(2)]);
        assert_eq!(plan.end(SECOND * 12, (&name, number), put_off, backoff), Outcome::PutOff);
        assert_eq!(plan.since(), Some(at(1)));
        let (number, task, _) = plan.start(SECOND * 12).unwrap();
        assert_eq!(task, Task::Gone(db(2)));
        // It is told of one that it finds, too, before the work is done.
        let done = End::Done(vec![db(1)]);
        assert_eq!(plan.end(SECOND * 12, (&name, number), done, backoff), Outcome::Done);
        let (number, task, _) = plan.start(SECOND * 12).unwrap();
        assert_eq!(task, Task::Gone(db(1)));
        assert_eq!(plan.end(SECOND * 12, (&name, number), End::Parked, backoff), Outcome::Parked);
        let (_, task, attempt) = plan.start(SECOND * 13).unwrap();
        assert_eq!((task, attempt), (Task::Work(db(3), vec![1]), 1));
    }

    #[test]
    fn what_comes_while_a_task_runs_causes_another_one_afterwards() {
        let mut plan = plan();
        plan.see(SECOND, seen(1, 1, 1));
        let (first, ..) = plan.start(SECOND * 2).unwrap();
        plan.see(SECOND * 2, seen(1, 2, 2));
        assert_eq!(plan.start(SECOND * 100), None, "one at a time");
        assert_eq!(end(&mut plan, SECOND * 100, first, true), Outcome::Done);
        assert_eq!(plan.since(), Some(at(2)), "the first is done");
        let (second, task, _) = plan.start(SECOND * 101).unwrap();
        assert_eq!(task, Task::Work(db(1), vec![2]));
        assert_eq!(end(&mut plan, SECOND * 102, first, true), Outcome::Stale);
        assert_eq!(end(&mut plan, SECOND * 102, second, true), Outcome::Done);
        assert_eq!(end(&mut plan, SECOND * 102, second, true), Outcome::Stale);
    }

    #[test]
    fn a_failure_is_tried_again_later_with_what_came_since() {
        let mut plan = plan();
        plan.see(SECOND, seen(1, 1, 1));
        let (number, ..) = plan.start(SECOND * 2).unwrap();
        plan.see(SECOND * 2, seen(1, 2, 2));
        assert_eq!(end(&mut plan, SECOND * 2, number, false), Outcome::Failed);
        assert_eq!(plan.since(), Some(at(1)));
        assert_eq!(plan.next_due(), Some(SECOND * 12));
        let (number, task, attempt) = plan.start(SECOND * 12).unwrap();
        assert_eq!((task, attempt), (Task::Work(db(1), vec![1, 2]), 2));
        assert_eq!(end(&mut plan, SECOND * 12, number, false), Outcome::Failed);
        assert_eq!(plan.next_due(), Some(SECOND * 32));
    }

    #[test]
    fn what_is_parked_holds_nothing_back_and_is_tried_again_beside_the_rest() {
        let mut plan = plan();
        let name = db(1).name;
        let backoff = |failures| SECOND * 10 * failures;
        plan.see(SECOND, seen(1, 1, 1));
        let (number, ..) = plan.start(SECOND * 2).unwrap();
        assert_eq!(plan.end(SECOND * 2, (&name, number), End::Parked, backoff), Outcome::Parked);
        assert_eq!((plan.len(), plan.since()), (0, None));
        let task = Task::Work(db(1), vec![9]);
        let number = plan.start_retry(&task).unwrap();
        assert_eq!((plan.len(), plan.since(), plan.running(), plan.retrying()), (1, None, 1, 1));
        assert_eq!(plan.start_retry(&task), None, "one at a time");
        // What comes meanwhile is done afterwards, and is told again until then.
        plan.see(SECOND * 3, seen(1, 2, 5));
        assert_eq!(plan.since(), Some(at(5)));
        let put_off = End::PutOff(Vec::new());
        assert_eq!(plan.end(SECOND * 3, (&name, number), put_off, backoff), Outcome::Failed);
        assert_eq!((plan.running(), plan.retrying()), (0, 0));
        let (number, task, _) = plan.start(SECOND * 13).unwrap();
        assert_eq!(task, Task::Work(db(1), vec![2]), "the store knows the rest");
        assert_eq!(plan.end(SECOND * 13, (&name, number), End::WasParked, backoff), Outcome::Stale);
        assert_eq!((plan.len(), plan.since()), (0, None));
        // One that is deleted while it is tried again.
        let number = plan.start_retry(&Task::Work(db(1), vec![9])).unwrap();
        let gone = Seen { db: db(1), replaced: None, work: None, since: at(7) };
        assert_eq!(plan.see(SECOND * 14, gone), Some(number));
        assert_eq!(plan.end(SECOND * 14, (&name, number), End::Parked, backoff), Outcome::Stale);
        assert_eq!(plan.start(SECOND * 14).unwrap().1, Task::Gone(db(1)));
        assert_eq!(plan.retrying(), 0);
    }

    #[test]
    fn a_deletion_cancels_and_is_told_once_the_task_has_ended() {
        let mut plan = plan();
        plan.see(SECOND, seen(1, 1, 1));
        let (number, ..) = plan.start(SECOND * 2).unwrap();
        let gone = Seen { db: db(1), replaced: None, work: None, since: at(2) };
        assert_eq!(plan.see(SECOND * 3, gone), Some(number));
        assert_eq!(plan.start(SECOND * 3), None, "it has not ended yet");
        assert_eq!(end(&mut plan, SECOND * 4, number, true), Outcome::Stale);
        let (number, task, _) = plan.start(SECOND * 4).unwrap();
        assert_eq!(task, Task::Gone(db(1)));
        assert_eq!(end(&mut plan, SECOND * 4, number, true), Outcome::Done);
        assert_eq!(plan.len(), 0);
    }

    #[test]
    fn a_recreation_is_begun_afresh_after_the_end_of_the_old_one_was_told() {
        let mut plan = plan();
        plan.see(SECOND, seen(1, 1, 1));
        let (number, ..) = plan.start(SECOND * 2).unwrap();
        plan.see(SECOND * 2, seen(1, 2, 2));
        let again = Seen { replaced: Some(db(1)), ..seen(2, 7, 3) };
        assert_eq!(plan.see(SECOND * 3, again), Some(number));
        assert_eq!(plan.runs(&db(1).name), Some(&db(1)));
        assert_eq!(end(&mut plan, SECOND * 3, number, false), Outcome::Stale);
        let (number, task, _) = plan.start(SECOND * 3).unwrap();
        assert_eq!(task, Task::Gone(db(1)));
        assert_eq!(plan.living(), [db(2)]);
        end(&mut plan, SECOND * 3, number, true);
        let (_, task, attempt) = plan.start(SECOND * 4).unwrap();
        assert_eq!((task, attempt), (Task::Work(db(2), vec![7]), 1), "nothing of the old one is left");
    }

    #[test]
    fn an_instance_that_is_found_to_be_gone_does_not_take_its_successor_along() {
        let mut plan = plan();
        plan.see(SECOND, seen(2, 1, 5));
        assert_eq!(plan.forget(SECOND, db(1), at(6)), None);
        let (number, task, _) = plan.start(SECOND).unwrap();
        assert_eq!(task, Task::Gone(db(1)));
        end(&mut plan, SECOND, number, true);
        let (number, task, _) = plan.start(SECOND).unwrap();
        assert_eq!(task, Task::Work(db(2), vec![1]));
        assert_eq!(plan.forget(SECOND, db(2), at(6)), Some(number));
        end(&mut plan, SECOND, number, false);
        assert_eq!(plan.start(SECOND).unwrap().1, Task::Gone(db(2)));
    }

    #[test]
    fn no_more_tasks_run_at_once_than_may() {
        let mut plan = plan();
        for n in 0..3 {
            let name = DbName::new(&format!("db{n}")).unwrap();
            let db = Db::new(name, DbInstance([1; 16]));
            plan.see(SECOND, Seen { db, ..seen(1, n, 1) });
        }
        let now = SECOND * 2;
        let (number, task, _) = plan.start(now).unwrap();
        assert!(plan.start(now).is_some() && plan.start(now).is_none() && plan.next_due().is_none());
        let name = task.db().name.clone();
        plan.end(now, (&name, number), End::Done(Vec::new()), |_| SECOND);
        assert!(plan.start(now).is_some());
    }
}
