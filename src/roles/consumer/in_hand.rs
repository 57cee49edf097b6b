//! [`InHand`]: the ids that a shard's task has in memory. It uses neither the store nor a clock.
//!
//! Each id is in hand only once, however many of its rows were read: a newer row replaces the previous one. An id that no key in the store
//! covers holds the watermark back, just before its first unfinished row.
//!
//! ```text
//!             offer                due                    start
//!   feed ──────────────► waiting ───────► ready (by tenant) ───────► running ──► done
//!                          ▲                                            │
//!                          └────────────── retry, with a pause ─────────┘
//! ```

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;

use crate::base::encoding::Sequence;

/// A function that returns the tenant of an id.
pub(super) type TenantOf = dyn Fn(&[u8]) -> Bytes + Send + Sync;

/// Divides ids into tenants, which share the concurrency of a consumer fairly on each node.
#[derive(Clone)]
pub(super) struct Tenants {
    pub of: Arc<TenantOf>,
    /// How many ids of one tenant may run at once.
    pub running_max: usize,
}

/// One id in hand. `T` is the type of its work.
pub(super) struct Entry<T> {
    pub work: T,
    /// How many times in a row the work has failed.
    pub attempts: u32,
    /// When the work on the first unfinished row began.
    pub began: Option<Duration>,
    /// The position of the first unfinished row; `None` if a key covers the id.
    first: Option<Sequence>,
    /// The position of the first row that arrived during the run, and the work on the newest such row.
    next: Option<(Sequence, T)>,
    /// The tenant of the id, as determined when the id became ready.
    tenant: Bytes,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting(Duration),
    /// In the queue of its tenant, under this ticket.
    Ready(u64),
    Running,
    /// Between two of the other states.
    Idle,
}

/// The ready and running ids of one tenant.
#[derive(Default)]
struct Tenant {
    running: usize,
    ready: VecDeque<(u64, Bytes)>,
    /// The place of the tenant among those with the same number of running ids.
    turn: u64,
}

pub(super) struct InHand<T> {
    entries: HashMap<Bytes, Entry<T>>,
    /// The first unfinished rows of all entries that hold the watermark back.
    firsts: BTreeSet<Sequence>,
    timers: BTreeSet<(Duration, Bytes)>,
    tenants: HashMap<Bytes, Tenant>,
    /// The tenants with ready ids, those with the fewest running ids first.
    turns: BTreeSet<(usize, u64, Bytes)>,
    divide: Option<Tenants>,
    next_number: u64,
    running: usize,
    /// How many entries are covered by keys.
    covered: usize,
    /// The entries that were taken as deferred ids.
    due: BTreeSet<Bytes>,
}

impl<T> InHand<T> {
    pub fn new(divide: Option<Tenants>) -> Self {
        Self {
            entries: HashMap::new(),
            firsts: BTreeSet::new(),
            timers: BTreeSet::new(),
            tenants: HashMap::new(),
            turns: BTreeSet::new(),
            divide,
            next_number: 0,
            running: 0,
            covered: 0,
            due: BTreeSet::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn running(&self) -> usize {
        self.running
    }

    /// How many entries are covered by keys.
    pub fn covered(&self) -> usize {
        self.covered
    }

    /// Returns the number of deferred ids in hand, except those that wait because their tenant is busy.
    pub fn due(&self) -> usize {
        let waits = |entry: &&Entry<T>| !entry.is_running() && self.is_busy(&entry.tenant);
        self.due.iter().filter_map(|id| self.entries.get(id)).filter(|entry| !waits(entry)).count()
    }

    pub fn get(&self, id: &[u8]) -> Option<&Entry<T>> {
        self.entries.get(id)
    }

    pub fn get_mut(&mut self, id: &[u8]) -> Option<&mut Entry<T>> {
        self.entries.get_mut(id)
    }

    pub fn contains(&self, id: &[u8]) -> bool {
        self.entries.contains_key(id)
    }

    /// Whether a deferred id can be taken together with those in `taken`. Each tenant may have one more id in hand than may run, so that a
    /// deferred id can wait in the queue even if the tenant is always busy.
    pub fn has_turn<'a>(&self, id: &[u8], taken: impl Iterator<Item = &'a Bytes>) -> bool {
        let Some(divide) = &self.divide else { return true };
        let tenant = self.tenant_of(id);
        let running = self.tenants.get(&tenant).map_or(0, |tenant| tenant.running);
        let waits = |entry: &&Entry<T>| !entry.is_running() && entry.tenant == tenant;
        let waiting = self.due.iter().filter_map(|id| self.entries.get(id)).filter(waits).count();
        let taken = taken.filter(|id| self.tenant_of(id) == tenant).count();
        running + waiting + taken <= divide.running_max
    }

    /// Whether `tenant` already has the maximum number of running ids.
    fn is_busy(&self, tenant: &Bytes) -> bool {
        self.divide.as_ref().is_some_and(|divide| {
            self.tenants.get(tenant).is_some_and(|tenant| tenant.running >= divide.running_max)
        })
    }

    /// Takes the row of `id` at `at`, which no key covers, to be worked on at `due`. If the id is in hand, `merge` combines the waiting
    /// work with the new work, and its pause continues. Returns whether the id is running; if so, the row waits for the end of the run.
    pub fn offer(
        &mut self,
        id: &Bytes,
        at: Sequence,
        work: T,
        due: Option<Duration>,
        merge: impl FnOnce(&mut T, T),
    ) -> bool {
        let Some(entry) = self.entries.get_mut(id) else {
            self.firsts.insert(at);
            self.insert(id, work, Some(at), due);
            return false;
        };
        if entry.state == State::Running {
            match &mut entry.next {
                Some((_, next)) => merge(next, work),
                next => {
                    *next = Some((at, work));
                    self.firsts.insert(at);
                }
            }
            return true;
        }
        merge(&mut entry.work, work);
        false
    }

    /// Takes an id that is covered by its key, to be worked on now.
    pub fn offer_covered(&mut self, id: &Bytes, work: T, attempts: u32) {
        if !self.entries.contains_key(id) {
            self.covered += 1;
            self.due.insert(id.clone());
            self.insert(id, work, None, None);
            self.entries.get_mut(id).expect("it was just put there").attempts = attempts;
        }
    }

    fn insert(&mut self, id: &Bytes, work: T, first: Option<Sequence>, due: Option<Duration>) {
        let state = State::Waiting(due.unwrap_or_default());
        self.entries.insert(
            id.clone(),
            Entry { work, attempts: 0, began: None, first, next: None, tenant: Bytes::new(), state },
        );
        match due {
            Some(due) => drop(self.timers.insert((due, id.clone()))),
            None => self.make_ready(id),
        }
    }

    fn make_ready(&mut self, id: &Bytes) {
        let (ticket, tenant) = (self.number(), self.tenant_of(id));
        let entry = self.entries.get_mut(id).expect("it is in hand");
        (entry.state, entry.tenant) = (State::Ready(ticket), tenant.clone());
        let turn = self.number();
        let queue = self.tenants.entry(tenant.clone()).or_default();
        queue.ready.push_back((ticket, id.clone()));
        if queue.ready.len() == 1 {
            queue.turn = turn;
            self.turns.insert((queue.running, turn, tenant));
        }
    }

    /// Calls the user's code to get the tenant of `id`. If the call panics, the tenant has an empty name.
    fn tenant_of(&self, id: &[u8]) -> Bytes {
        let Some(divide) = &self.divide else { return Bytes::new() };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (divide.of)(id))).unwrap_or_default()
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Starts the next id that is due, if fewer than `running_max` ids run. The tenant with the fewest running ids is next.
    pub fn start(&mut self, now: Duration, running_max: usize) -> Option<Bytes> {
        while self.timers.first().is_some_and(|(due, _)| *due <= now) {
            let (_, id) = self.timers.pop_first().expect("there is one");
            self.make_ready(&id);
        }
        let tenant_max = self.divide.as_ref().map_or(usize::MAX, |divide| divide.running_max);
        while self.running < running_max {
            let (running, _, _) = self.turns.first()?;
            if *running >= tenant_max {
                return None;
            }
            let (_, _, tenant) = self.turns.pop_first().expect("there is one");
            let queue = self.tenants.get_mut(&tenant).expect("it has a turn");
            let (ticket, id) = queue.ready.pop_front().expect("it has a turn");
            // The id may have been removed since.
            let entry = self.entries.get_mut(&id).filter(|entry| entry.state == State::Ready(ticket));
            let is_there = entry.is_some();
            if let Some(entry) = entry {
                entry.state = State::Running;
                entry.began.get_or_insert(now);
                queue.running += 1;
                self.running += 1;
            }
            self.give_turn(tenant);
            if is_there {
                return Some(id);
            }
        }
        None
    }

    /// Puts `tenant` back into the queue, or forgets it if it has nothing to do.
    fn give_turn(&mut self, tenant: Bytes) {
        let turn = self.number();
        let Some(queue) = self.tenants.get_mut(&tenant) else { return };
        if !queue.ready.is_empty() {
            queue.turn = turn;
            self.turns.insert((queue.running, turn, tenant));
        } else if queue.running == 0 {
            self.tenants.remove(&tenant);
        }
    }

    /// Accounts for the end of the run of `id`.
    fn end_run(&mut self, id: &Bytes) {
        let entry = self.entries.get_mut(id).filter(|entry| entry.state == State::Running);
        if let Some(entry) = entry {
            entry.state = State::Idle;
            self.running -= 1;
            // The run counts for the tenant that it started with, even if the user's code would return another one by now.
            let tenant = entry.tenant.clone();
            if let Some(queue) = self.tenants.get_mut(&tenant) {
                self.turns.remove(&(queue.running, queue.turn, tenant.clone()));
                queue.running -= 1;
            }
            self.give_turn(tenant);
        }
    }

    /// Accounts for finished work on `id`. Returns whether a newer row of the id waits; that row will be worked on at `due`.
    pub fn done(&mut self, id: &Bytes, due: Option<Duration>) -> bool {
        self.end_run(id);
        let Some(entry) = self.entries.get_mut(id) else { return false };
        if let Some((at, work)) = entry.next.take() {
            (entry.work, entry.attempts, entry.began) = (work, 0, None);
            match entry.first.replace(at) {
                Some(first) => drop(self.firsts.remove(&first)),
                None => self.covered -= 1,
            }
            self.wait(id, due);
            return true;
        }
        self.remove(id);
        false
    }

    /// Accounts for failed work on `id`, which will be tried again at `due`, with the newest row.
    pub fn retry(&mut self, id: &Bytes, due: Duration, merge: impl FnOnce(&mut T, T)) {
        self.end_run(id);
        if let Some(entry) = self.entries.get_mut(id) {
            if let Some((at, next)) = entry.next.take() {
                merge(&mut entry.work, next);
                if entry.first.is_some() {
                    self.firsts.remove(&at);
                } else {
                    (entry.first, self.covered) = (Some(at), self.covered - 1);
                }
            }
            self.wait(id, Some(due));
        }
    }

    fn wait(&mut self, id: &Bytes, due: Option<Duration>) {
        match due {
            Some(due) => {
                self.entries.get_mut(id).expect("it is in hand").state = State::Waiting(due);
                self.timers.insert((due, id.clone()));
            }
            None => self.make_ready(id),
        }
    }

    /// Notes that a key covers `id` from now on: the id no longer holds the watermark back.
    pub fn cover(&mut self, id: &[u8]) {
        let Some(entry) = self.entries.get_mut(id) else { return };
        if let Some(first) = entry.first.take() {
            self.firsts.remove(&first);
            self.covered += 1;
        }
        if let Some((at, _)) = entry.next.take() {
            self.firsts.remove(&at);
        }
    }

    /// Forgets `id`, whatever its state.
    pub fn remove(&mut self, id: &Bytes) -> Option<Entry<T>> {
        self.end_run(id);
        let entry = self.entries.remove(id)?;
        self.due.remove(id);
        match entry.first {
            Some(first) => drop(self.firsts.remove(&first)),
            None => self.covered -= 1,
        }
        if let Some((at, _)) = &entry.next {
            self.firsts.remove(at);
        }
        if let State::Waiting(due) = entry.state {
            self.timers.remove(&(due, id.clone()));
        }
        Some(entry)
    }

    /// Returns the position up to which everything is finished or covered by keys. Rows were taken up to `read`.
    pub fn watermark(&self, read: Sequence) -> Sequence {
        self.firsts.first().map_or(read, |first| first.before().min(read))
    }

    /// Returns when the next waiting id is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.timers.first().map(|(due, _)| *due)
    }
}

impl<T> Entry<T> {
    /// Whether a key covers the id.
    pub fn is_covered(&self) -> bool {
        self.first.is_none()
    }

    pub fn is_running(&self) -> bool {
        self.state == State::Running
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::{Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    fn id(name: &'static str) -> Bytes {
        Bytes::from_static(name.as_bytes())
    }

    fn newest(work: &mut u64, newer: u64) {
        *work = newer;
    }

    fn offer(hand: &mut InHand<u64>, name: &'static str, version: u64) -> bool {
        hand.offer(&id(name), at(version), version, None, newest)
    }

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn the_watermark_is_before_the_first_unfinished_row() {
        let mut hand = InHand::new(None);
        for (name, version) in [("a", 1), ("b", 2), ("c", 3)] {
            offer(&mut hand, name, version);
        }
        assert_eq!(hand.watermark(at(9)), at(1).before());
        assert_eq!(hand.start(NOW, 2), Some(id("a")));
        assert_eq!(hand.start(NOW, 2), Some(id("b")));
        assert_eq!(hand.start(NOW, 2), None, "two run");
        assert!(!hand.done(&id("b"), None));
        assert_eq!(hand.watermark(at(9)), at(1).before());
        assert!(!hand.done(&id("a"), None));
        assert_eq!(hand.watermark(at(9)), at(3).before());
        hand.cover(b"c");
        assert_eq!(hand.watermark(at(9)), at(9));
        assert_eq!((hand.covered(), hand.len()), (1, 1));
    }

    #[test]
    fn an_id_never_runs_twice_at_once_and_its_newest_row_follows() {
        let mut hand = InHand::new(None);
        offer(&mut hand, "a", 1);
        assert!(!offer(&mut hand, "a", 2));
        assert_eq!(hand.start(NOW, 9), Some(id("a")));
        assert_eq!(hand.get(b"a").unwrap().work, 2);
        assert!(offer(&mut hand, "a", 3));
        assert!(offer(&mut hand, "a", 4));
        assert_eq!(hand.start(NOW, 9), None);
        assert_eq!(hand.watermark(at(9)), at(1).before());
        assert!(hand.done(&id("a"), None));
        assert_eq!(hand.watermark(at(9)), at(3).before(), "3 came first, and was not worked on");
        assert_eq!(hand.start(NOW, 9), Some(id("a")));
        assert_eq!(hand.get(b"a").unwrap().work, 4);
        assert!(!hand.done(&id("a"), None));
        assert_eq!((hand.watermark(at(9)), hand.len()), (at(9), 0));
    }

    #[test]
    fn a_pause_is_not_shortened_by_new_rows() {
        let mut hand = InHand::new(None);
        offer(&mut hand, "a", 1);
        hand.start(NOW, 9);
        hand.retry(&id("a"), Duration::from_secs(5), newest);
        offer(&mut hand, "a", 2);
        assert_eq!(hand.start(Duration::from_secs(4), 9), None);
        assert_eq!(hand.next_due(), Some(Duration::from_secs(5)));
        assert_eq!(hand.start(Duration::from_secs(5), 9), Some(id("a")));
        assert_eq!(hand.get(b"a").unwrap().work, 2, "the newest row is tried");
    }

    #[test]
    fn tenants_take_turns_and_have_limits() {
        let tenants = Tenants { of: Arc::new(|id: &[u8]| Bytes::copy_from_slice(&id[..1])), running_max: 2 };
        let mut hand = InHand::new(Some(tenants));
        for (version, name) in ["a1", "a2", "a3", "a4", "b1"].into_iter().enumerate() {
            offer(&mut hand, name, version as u64 + 1);
        }
        let first: Vec<_> = std::iter::from_fn(|| hand.start(NOW, 3)).collect();
        assert_eq!(first, [id("a1"), id("b1"), id("a2")]);
        hand.done(&id("b1"), None);
        assert_eq!(hand.start(NOW, 3), None, "a has two running ids");
        hand.done(&id("a1"), None);
        assert_eq!(hand.start(NOW, 3), Some(id("a3")));
        hand.remove(&id("a4"));
        hand.done(&id("a2"), None);
        assert_eq!(hand.start(NOW, 3), None, "a4 was removed");
        hand.done(&id("a3"), None);
        assert_eq!((hand.running(), hand.len(), hand.tenants.len()), (0, 0, 0));
    }
}
