//! [`Log`]: which batches of the ring have rows that a pattern matches, and who waits for more; and [`SubscriberState`]: how a
//! subscriber is woken.
//!
//! Batches of the ring have ascending numbers. The tail appends an entry for each batch that matches, which says what of it does; a
//! subscriber reads from its own place on.
//!
//! # The wake protocol
//!
//! ```text
//! tail                                        subscriber at place p
//! 1. put the batch into the ring              a. register the waker
//! 2. append to the log, take who waits        b. read the entry at p or after it: there is one, take it;
//!    (one critical section)                      there is none, get on the list (one critical section)
//! 3. move the end of the ring
//! 4. wake whom it took                        c. asked where it stands: read where the ring ends, then whether
//!                                                the log has an entry from p on; if not, it stands there
//! ```
//!
//! # Invariants
//!
//! 1. Anyone who is on the list of a log was on it before the next entry was appended, and is woken after it: (b) and (2) exclude
//!    each other, and the waker is registered before. So no wake is lost.
//! 2. Whoever finds no entry from its place on, after having read where the ring ends, has none before that end: the end moves
//!    last. So (c) skips nothing.
//! 3. A subscriber is on the list at most once, and so woken at most once per append.
//! 4. A subscriber that is taken off the list has missed nothing before the entry that took it, and is informed where that begins
//!    ([`Mark`]): however long it takes to come, and whatever has left the ring by then, it knows everything up to there.

use std::{collections::VecDeque, fmt, task::Waker};

use smallvec::SmallVec;

use super::sync::{
    Arc, AtomicU8, AtomicU64, AtomicUsize, AtomicWaker, Mutex, MutexGuard, Ordering, PoisonError,
};

/// How many entries from the end one is looked for before it is searched.
const NEAR: usize = 8;

/// The index of a subscriber that is on no list.
const UNLISTED: usize = usize::MAX;

/// A position, which the log only carries: later ones are larger.
pub type Mark = [u64; 2];

/// Which subscriber of a dispatcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriberId(pub(super) u64);

impl fmt::Display for SubscriberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a subscriber is woken, and whether more will come.
pub struct SubscriberState {
    phase: AtomicU8,
    /// Its index in the list of its log, or [`UNLISTED`]; changed under the lock of the log only.
    index: AtomicUsize,
    /// Where the entry begins that last took it off a list; changed and read under the lock of the log only.
    taken_at: [AtomicU64; 2],
    waker: AtomicWaker,
}

impl SubscriberState {
    const OPEN: u8 = 0;
    const CLOSED: u8 = 1;
    const ENDED: u8 = 2;

    /// A subscriber for which more may come.
    pub fn new() -> Self {
        let (index, taken_at) = (AtomicUsize::new(UNLISTED), [AtomicU64::new(0), AtomicU64::new(0)]);
        Self { phase: AtomicU8::new(Self::OPEN), index, taken_at, waker: AtomicWaker::new() }
    }

    /// Delivers what waits, and ends then. Wake the subscriber afterwards.
    pub fn close(&self) {
        self.phase.fetch_max(Self::CLOSED, Ordering::AcqRel);
    }

    /// Ends, whatever waits. Wake the subscriber afterwards.
    pub fn end(&self) {
        self.phase.fetch_max(Self::ENDED, Ordering::AcqRel);
    }

    /// Whether nothing more will come.
    pub fn is_closed(&self) -> bool {
        self.phase.load(Ordering::Acquire) != Self::OPEN
    }

    /// Whether it was asked to end.
    pub fn is_ended(&self) -> bool {
        self.phase.load(Ordering::Acquire) == Self::ENDED
    }

    fn take_at(&self, begin: Mark) {
        for (part, begin) in self.taken_at.iter().zip(begin) {
            part.store(begin, Ordering::Relaxed);
        }
    }

    /// Has `waker` woken from now on.
    pub fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Wakes the subscriber's task. A waker is the subscriber's own code, and may panic.
    pub fn wake(&self) {
        self.waker.wake();
    }
}

/// What a log has from a place on.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<P> {
    /// The first entry, the number of its batch, and whether there are `more` after it.
    Entry { number: u64, entry: P, more: bool },
    /// No entry.
    Nothing,
    /// Entries that have left the ring, or may have.
    Behind,
}

/// The batches that a pattern matches. `P` is what an entry says of its batch, and cheap to clone.
pub struct Log<P>(Mutex<State<P>>);

struct State<P> {
    /// The batches in the ring with rows that match, by their numbers, and what of them matches.
    entries: VecDeque<(u64, P)>,
    /// Batches before this number may have left the ring, or were never looked at.
    begin: u64,
    /// Mostly there is one, beside what the lock guards anyway.
    waiting: SmallVec<[Arc<SubscriberState>; 1]>,
}

impl<P: Clone> Log<P> {
    /// The log of a pattern that is matched from batch number `begin` on.
    pub fn new(begin: u64) -> Self {
        Self(Mutex::new(State { entries: VecDeque::new(), begin, waiting: SmallVec::new() }))
    }

    /// The changing part. No holder of the lock can panic with it half changed.
    fn state(&self) -> MutexGuard<'_, State<P>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends the batch `number`, which comes after all others and begins at `begin`, and adds to `woken` who waits for it.
    pub fn append(&self, number: u64, begin: Mark, entry: P, woken: &mut Vec<Arc<SubscriberState>>) {
        let mut state = self.state();
        state.entries.push_back((number, entry));
        for subscriber in &state.waiting {
            subscriber.take_at(begin);
        }
        state.take_waiting(woken);
    }

    /// Forgets the batches before number `to`, which have left the ring.
    pub fn prune(&self, to: u64) {
        let mut state = self.state();
        while let Some(&(number, _)) = state.entries.front()
            && number < to
        {
            state.begin = number + 1;
            state.entries.pop_front();
        }
        if state.entries.is_empty() && state.entries.capacity() > 16 {
            state.entries = VecDeque::new();
        }
    }

    /// Forgets all batches before number `to`, where the ring begins again, and has whoever stands before it be behind. Adds to
    /// `woken` who waits.
    pub fn skip_to(&self, to: u64, woken: &mut Vec<Arc<SubscriberState>>) {
        let mut state = self.state();
        state.entries.clear();
        state.begin = to;
        state.take_waiting(woken);
    }

    /// The oldest place from which the log has everything.
    pub fn begin(&self) -> u64 {
        self.state().begin
    }

    /// The first entry from `place` on.
    pub fn read(&self, place: u64) -> Found<P> {
        self.state().read(place)
    }

    /// The newest entry, if it is after the batch `number`.
    pub fn newest_after(&self, number: u64) -> Option<(u64, P)> {
        self.state().entries.back().filter(|(newest, _)| *newest > number).cloned()
    }

    /// Whether there is an entry from `place` on, or it has left the ring.
    pub fn has_entries(&self, place: u64) -> bool {
        self.state().has_entries(place)
    }

    /// The first entry from `place` on. If there is none, `subscriber`, whose waker is registered, is woken by the next.
    pub fn read_or_wait(&self, place: u64, subscriber: &Arc<SubscriberState>) -> Found<P> {
        let mut state = self.state();
        let found = state.read(place);
        if matches!(found, Found::Nothing) && subscriber.index.load(Ordering::Relaxed) == UNLISTED {
            subscriber.index.store(state.waiting.len(), Ordering::Relaxed);
            state.waiting.push(Arc::clone(subscriber));
        }
        found
    }

    /// Where the entry begins that last took `subscriber` off the list: it has missed nothing before. All zeros if none has.
    pub fn taken_at(&self, subscriber: &SubscriberState) -> Mark {
        let _unchanged = self.state();
        subscriber.taken_at.each_ref().map(|part| part.load(Ordering::Relaxed))
    }

    /// Takes `subscriber` off the list of those who wait, for good.
    pub fn leave(&self, subscriber: &Arc<SubscriberState>) {
        let mut state = self.state();
        // It may want something else next, of which it has missed more.
        subscriber.take_at([0, 0]);
        let index = subscriber.index.swap(UNLISTED, Ordering::Relaxed);
        if index == UNLISTED {
            return;
        }
        state.waiting.swap_remove(index);
        if let Some(moved) = state.waiting.get(index) {
            moved.index.store(index, Ordering::Relaxed);
        }
    }
}

impl<P: Clone> State<P> {
    fn has_entries(&self, place: u64) -> bool {
        place < self.begin || self.entries.back().is_some_and(|(newest, _)| *newest >= place)
    }

    fn read(&self, place: u64) -> Found<P> {
        if place < self.begin {
            return Found::Behind;
        }
        if !self.has_entries(place) {
            return Found::Nothing;
        }
        let index = self.first_from(place);
        let (number, entry) = self.entries[index].clone();
        Found::Entry { number, entry, more: index + 1 < self.entries.len() }
    }

    /// The index of the first entry from `place` on, which is there.
    fn first_from(&self, place: u64) -> usize {
        // Where no number is left out, the place says which one it is. Otherwise it is among the last ones, mostly.
        let guess = place.saturating_sub(self.entries[0].0) as usize;
        if self.entries.get(guess).is_some_and(|(number, _)| *number == place) {
            return guess;
        }
        let is_first = |index: &usize| *index == 0 || self.entries[index - 1].0 < place;
        let near = (0..self.entries.len()).rev().take(NEAR).find(is_first);
        near.unwrap_or_else(|| self.entries.partition_point(|(number, _)| *number < place))
    }

    /// Moves those who wait to `woken`.
    fn take_waiting(&mut self, woken: &mut Vec<Arc<SubscriberState>>) {
        for subscriber in self.waiting.drain(..) {
            subscriber.index.store(UNLISTED, Ordering::Relaxed);
            woken.push(subscriber);
        }
    }
}
