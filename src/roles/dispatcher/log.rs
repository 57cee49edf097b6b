//! [`Log`]: the batches of the ring with rows that a pattern matches, and the subscribers that wait for more; and [`SubscriberState`]: how
//! a subscriber is woken.
//!
//! Batches of the ring have ascending numbers. The tail appends an entry for each batch that matches; the entry has the matching
//! rows. Each subscriber reads the log from its own place on.
//!
//! # The wake protocol
//!
//! ```text
//! tail                                        subscriber at place p
//! 1. append the batch to the ring             a. register the waker
//! 2. append to the log, take the waiting      b. if it is on the waiting list: there is no entry from p on; else read
//!    list (one critical section)                 the first one, and if there is none, or none after it, join the
//! 3. move the end of the ring                    waiting list (one critical section)
//! 4. wake the subscribers that were taken     c. asked for its cursor: read the end of the ring, then the log;
//!                                                if the log has no entry from p on, its cursor is that end
//! ```
//!
//! # Invariants
//!
//! 1. No wake is lost. A subscriber registers its waker, then joins the waiting list; (b) and (2) exclude each other. So a subscriber on
//!    the list joined it before the next entry was appended, and that append wakes it. A subscriber that was on the list before it
//!    registered its waker checks the list afterwards: either it is still there, and the next append wakes it, or it reads the log. So a
//!    subscriber takes the lock of the log, for which all subscribers of the pattern compete, only once per wake.
//! 2. (c) skips nothing. The end of the ring moves last. So a subscriber that has read the end, and then finds no entry from its place
//!    on, has none before that end.
//! 3. A subscriber is on the list at most once, so an append wakes it at most once.
//! 4. A subscriber that was taken off the list has missed nothing before the entry that took it, and [`Mark`] gives the beginning of that
//!    entry. However late the subscriber polls, and whatever has left the ring by then, it knows everything up to there.

use std::{collections::VecDeque, fmt};

use smallvec::SmallVec;

use super::sync::{
    Arc, AtomicBool, AtomicU32, AtomicU64, AtomicWaker, Mutex, MutexGuard, Ordering, PoisonError,
};

/// How many entries at the end are tried before a binary search.
const NEAR: usize = 8;

/// An encoded position; later positions are larger. The log does not interpret it.
pub type Mark = [u64; 2];

/// The id of a subscriber of a dispatcher.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriberId(pub(super) u64);

impl fmt::Display for SubscriberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a subscriber is woken, and whether it has ended.
#[derive(Default)]
pub struct SubscriberState {
    pub id: SubscriberId,
    is_ended: AtomicBool,
    /// The subscriber's number in the waiting list of the log, from 1 on, or 0 if it is not listed. Changed only under the lock of the log.
    listed: AtomicU32,
    /// While the subscriber is on the list: a place at or after which there was no entry when it joined. Afterwards: the beginning of the
    /// entry that took it off. Changed only under the lock of the log.
    mark: [AtomicU64; 2],
    /// Wakes the subscriber's task. The waker is the subscriber's own code, and may panic.
    pub waker: AtomicWaker,
}

impl SubscriberState {
    pub fn new(id: SubscriberId) -> Self {
        Self { id, ..Self::default() }
    }

    /// Ends the subscriber at once. The caller must wake it afterwards.
    pub fn end(&self) {
        self.is_ended.store(true, Ordering::Release);
    }

    #[inline]
    pub fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    /// Whether the subscriber is on the list, and the log has no entry from `batch_number` on or is about to wake the subscriber.
    fn waits(&self, batch_number: u64) -> bool {
        // An append may store its own mark between the two loads. In that case it wakes the subscriber afterwards.
        self.listed.load(Ordering::Acquire) != 0 && self.mark[0].load(Ordering::Relaxed) <= batch_number
    }

    /// Puts the subscriber on the list as number `listed`, or takes it off if that is 0.
    fn list(&self, listed: usize, mark: Mark) {
        for (part, mark) in self.mark.iter().zip(mark) {
            part.store(mark, Ordering::Relaxed);
        }
        self.listed.store(listed as u32, Ordering::Relaxed);
    }
}

/// The first entry of a log at or after a place.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry<P> {
    pub number: u64,
    pub content: P,
    /// The number of rows in all later entries; 0 if there are none.
    pub rows_after: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Empty {
    /// There is no entry yet.
    Nothing,
    /// The entry was evicted, or may have been.
    Behind,
}

/// The batches that a pattern matches. `P` is the content of an entry; cloning it is cheap.
pub struct Log<P>(Mutex<State<P>>);

struct State<P> {
    /// The matching batches in the ring.
    entries: VecDeque<Slot<P>>,
    /// Batches before this number may have left the ring, or were never matched against the pattern.
    begin: u64,
    /// Subscribers that wait for the next entry; usually just one.
    waiting: SmallVec<[Arc<SubscriberState>; 1]>,
}

struct Slot<P> {
    number: u64,
    /// How many rows this entry and the entries before it have, counted from an arbitrary start.
    rows: u64,
    content: P,
}

impl<P: Clone> Log<P> {
    /// Creates the log of a pattern that is matched from batch number `begin` on.
    pub fn new(begin: u64) -> Self {
        Self(Mutex::new(State { entries: VecDeque::new(), begin, waiting: SmallVec::new() }))
    }

    /// Locks the state, ignoring poisoning, because no holder of the lock can panic in the middle of a change.
    fn state(&self) -> MutexGuard<'_, State<P>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends the batch `number`, which comes after all others and begins at `begin`. `rows` is the number of its rows that match, at
    /// least one. Adds the waiting subscribers to `woken`.
    pub fn append(
        &self,
        number: u64,
        begin: Mark,
        rows: usize,
        content: P,
        woken: &mut Vec<Arc<SubscriberState>>,
    ) {
        let mut state = self.state();
        let rows = rows as u64 + state.entries.back().map_or(0, |last| last.rows);
        state.entries.push_back(Slot { number, rows, content });
        state.take_waiting(begin, woken);
    }

    /// Drops the batches before number `to`, which have left the ring.
    pub fn prune(&self, to: u64) {
        let mut state = self.state();
        while let Some(Slot { number, .. }) = state.entries.pop_front_if(|first| first.number < to) {
            state.begin = number + 1;
        }
        if state.entries.is_empty() {
            // Free the memory: the pattern may not match again for a long time.
            state.entries = VecDeque::new();
        }
    }

    /// Drops all batches before number `to`, where the ring starts over, so that readers before it are behind. Adds the waiting subscribers
    /// to `woken`.
    pub fn skip_to(&self, to: u64, woken: &mut Vec<Arc<SubscriberState>>) {
        let mut state = self.state();
        state.entries.clear();
        state.begin = to;
        state.take_waiting([0, 0], woken);
    }

    /// Returns the oldest place from which the log is complete.
    pub fn begin(&self) -> u64 {
        self.state().begin
    }

    /// Returns up to `count` entries from `batch_number` on, with their numbers. It does not wait for entries.
    pub fn read_many(&self, batch_number: u64, count: usize) -> Result<Vec<(u64, P)>, Empty> {
        let state = self.state();
        let first = state.place_of(batch_number)?;
        let entries = state.entries.range(first..).take(count);
        Ok(entries.map(|entry| (entry.number, entry.content.clone())).collect())
    }

    /// Whether there is an entry from `batch_number` on, or may have been one that was evicted.
    pub fn has_entries(&self, batch_number: u64) -> bool {
        let state = self.state();
        batch_number < state.begin || state.entries.back().is_some_and(|newest| newest.number >= batch_number)
    }

    /// Returns the first entry from `batch_number` on. If there is none, or none after it, the next append wakes `subscriber`, whose waker
    /// must be registered.
    pub fn read_or_wait(
        &self,
        batch_number: u64,
        subscriber: &Arc<SubscriberState>,
    ) -> Result<Entry<P>, Empty> {
        if subscriber.waits(batch_number) {
            return Err(Empty::Nothing);
        }
        let mut state = self.state();
        let found = state.read(batch_number);
        let from = match &found {
            Ok(Entry { number, rows_after: 0, .. }) => number + 1,
            Err(Empty::Nothing) => batch_number,
            _ => return found,
        };
        state.list(subscriber, from);
        found
    }

    /// Whether `subscriber`, whose waker must be registered, has nothing to read from `batch_number` on. If so, the next append wakes it.
    pub fn wait(&self, batch_number: u64, subscriber: &Arc<SubscriberState>) -> bool {
        if subscriber.waits(batch_number) {
            return true;
        }
        let mut state = self.state();
        let is_empty = state.place_of(batch_number) == Ok(state.entries.len());
        if is_empty {
            state.list(subscriber, batch_number);
        }
        is_empty
    }

    /// Returns the beginning of the entry that took `subscriber` off the list: the subscriber has missed nothing before it. All zeros if no
    /// entry did so, or if the subscriber is on the list again.
    pub fn taken_at(&self, subscriber: &SubscriberState) -> Mark {
        let _unchanged = self.state();
        if subscriber.listed.load(Ordering::Relaxed) != 0 {
            return [0, 0];
        }
        subscriber.mark.each_ref().map(|part| part.load(Ordering::Relaxed))
    }

    /// Takes `subscriber` off the waiting list for good.
    pub fn leave(&self, subscriber: &Arc<SubscriberState>) {
        let mut state = self.state();
        let listed = subscriber.listed.swap(0, Ordering::Relaxed);
        let Some(index) = listed.checked_sub(1) else { return };
        state.waiting.swap_remove(index as usize);
        if let Some(moved) = state.waiting.get(index as usize) {
            moved.listed.store(listed, Ordering::Relaxed);
        }
    }
}

impl<P: Clone> State<P> {
    /// Returns the index of the first entry from `batch_number` on, or the number of entries if there is none yet.
    fn place_of(&self, batch_number: u64) -> Result<usize, Empty> {
        if batch_number < self.begin {
            return Err(Empty::Behind);
        }
        // The entry is usually among the last ones.
        let is_first = |index: &usize| *index == 0 || self.entries[index - 1].number < batch_number;
        let near = (0..=self.entries.len()).rev().take(NEAR).find(is_first);
        Ok(near.unwrap_or_else(|| self.entries.partition_point(|entry| entry.number < batch_number)))
    }

    fn read(&self, batch_number: u64) -> Result<Entry<P>, Empty> {
        let index = self.place_of(batch_number)?;
        let (Some(entry), Some(last)) = (self.entries.get(index), self.entries.back()) else {
            return Err(Empty::Nothing);
        };
        Ok(Entry { number: entry.number, content: entry.content.clone(), rows_after: last.rows - entry.rows })
    }

    /// Puts `subscriber` on the waiting list, unless it is already there. The log must have no entry from `from` on.
    fn list(&mut self, subscriber: &Arc<SubscriberState>, from: u64) {
        let mut listed = subscriber.listed.load(Ordering::Relaxed) as usize;
        if listed == 0 {
            self.waiting.push(Arc::clone(subscriber));
            listed = self.waiting.len();
        }
        subscriber.list(listed, [from, 0]);
    }

    /// Moves the waiting subscribers to `woken`. They have missed nothing before `begin`.
    fn take_waiting(&mut self, begin: Mark, woken: &mut Vec<Arc<SubscriberState>>) {
        for subscriber in self.waiting.drain(..) {
            subscriber.list(0, begin);
            woken.push(subscriber);
        }
    }
}
