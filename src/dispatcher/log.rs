//! [`Log`]: which rows of the ring a pattern matches, and who waits for more; and [`SubscriberState`]: how a subscriber is woken.
//!
//! Rows of the ring have consecutive numbers. The tail appends the numbers that match; a subscriber reads from its own place
//! on. A log takes no part in what a row says, and none in who wants what of it.
//!
//! # The wake protocol
//!
//! ```text
//! tail                                        subscriber at place p
//! 1. put the batch into the ring              a. read where the ring ends
//! 2. append to the log, take who waits        b. read the log from p on: rows, take them
//!    (one critical section)                   c. none: p is where the ring ends, as read in (a)
//! 3. move the end of the ring                 d. register the waker
//! 4. wake whom it took                        e. look into the log again, and get on its list
//!                                                (one critical section)
//! ```
//!
//! # Invariants
//!
//! 1. A number in a log is that of a row in the ring, or of one that has left it.
//! 2. Whoever finds no row from its place on, after having read where the ring ends, has none before that end: the end moves
//!    last. So (c) skips nothing.
//! 3. Whoever is on the list of a log was on it before the next row was appended, and is woken after it: (e) and (2) exclude
//!    each other, and the waker is registered before. So no wake is lost.
//! 4. A subscriber is on the list at most once, and so woken at most once per batch.

use std::{collections::VecDeque, fmt, task::Waker};

use super::sync::{Arc, AtomicU8, AtomicUsize, AtomicWaker, Mutex, MutexGuard, Ordering, PoisonError};

/// The index of a subscriber that is on no list.
const UNLISTED: usize = usize::MAX;

/// How a subscriber is woken, and whether more will come.
pub struct SubscriberState {
    /// One of the constants below.
    phase: AtomicU8,
    /// Its index in the list of its log, or [`UNLISTED`]; changed under the lock of the log only.
    index: AtomicUsize,
    /// The task of the subscriber.
    waker: AtomicWaker,
}

impl SubscriberState {
    /// More may come.
    const OPEN: u8 = 0;
    /// Nothing more will come; what waits is still delivered.
    const CLOSED: u8 = 1;
    /// It was told to end, and what waits is not delivered.
    const ENDED: u8 = 2;

    /// A subscriber for which more may come.
    pub fn new() -> Self {
        Self {
            phase: AtomicU8::new(Self::OPEN),
            index: AtomicUsize::new(UNLISTED),
            waker: AtomicWaker::new(),
        }
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

    /// Whether it was told to end.
    pub fn is_ended(&self) -> bool {
        self.phase.load(Ordering::Acquire) == Self::ENDED
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
pub enum Found {
    /// Rows, whose numbers were added to the list that was passed.
    Rows,
    /// None.
    Nothing,
    /// Rows that have left the ring, or may have.
    Behind,
}

/// Which rows a pattern matches.
pub struct Log {
    /// What changes.
    state: Mutex<State>,
    /// Whether every row of the ring matches, so that no number need be kept.
    is_dense: bool,
}

/// The part of a log behind its lock.
struct State {
    /// The numbers of the rows that match and are in the ring; none if all match.
    numbers: VecDeque<u64>,
    /// The number after the last row that matched.
    end: u64,
    /// A row before this number may have left the ring, or was never looked at.
    begin: u64,
    /// Who waits for more.
    waiting: Vec<Arc<SubscriberState>>,
}

impl Log {
    /// The log of a pattern that is matched from row number `begin` on; `is_dense` if every row matches.
    pub fn new(begin: u64, is_dense: bool) -> Self {
        let state = State { numbers: VecDeque::new(), end: begin, begin, waiting: Vec::new() };
        Self { state: Mutex::new(state), is_dense }
    }

    /// The changing part. No holder of the lock can panic with it half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends the rows `numbers`, which are in order and at least one, and adds to `woken` who waits for them.
    pub fn append(&self, numbers: impl Iterator<Item = u64>, woken: &mut Vec<Arc<SubscriberState>>) {
        let mut state = self.state();
        for number in numbers {
            if !self.is_dense {
                state.numbers.push_back(number);
            }
            state.end = number + 1;
        }
        state.take_waiting(woken);
    }

    /// Forgets the rows before number `to`, which have left the ring.
    pub fn prune(&self, to: u64) {
        let mut state = self.state();
        if self.is_dense {
            state.begin = to;
            return;
        }
        while let Some(&number) = state.numbers.front()
            && number < to
        {
            state.begin = number + 1;
            state.numbers.pop_front();
        }
        if state.numbers.is_empty() && state.numbers.capacity() > 64 {
            state.numbers = VecDeque::new();
        }
    }

    /// Forgets all rows before number `to`, where the ring begins again, and has whoever stands before it be behind. Adds to
    /// `woken` who waits.
    pub fn skip_to(&self, to: u64, woken: &mut Vec<Arc<SubscriberState>>) {
        let mut state = self.state();
        state.numbers.clear();
        (state.begin, state.end) = (to, to);
        state.take_waiting(woken);
    }

    /// The oldest place from which the log has all rows.
    pub fn begin(&self) -> u64 {
        self.state().begin
    }

    /// Adds the numbers of the rows from `place` on, at most `limit`, to `found`.
    pub fn read(&self, place: u64, limit: usize, found: &mut Vec<u64>) -> Found {
        let state = self.state();
        if place < state.begin {
            return Found::Behind;
        }
        let before = found.len();
        if self.is_dense {
            found.extend((place..state.end).take(limit));
        } else {
            let first = state.numbers.partition_point(|number| *number < place);
            found.extend(state.numbers.range(first..).take(limit));
        }
        if found.len() > before { Found::Rows } else { Found::Nothing }
    }

    /// Whether there is a row from `place` on, or it has left the ring.
    pub fn has_rows(&self, place: u64) -> bool {
        let state = self.state();
        state.end > place || place < state.begin
    }

    /// Has `subscriber`, whose waker is registered, woken by the next row; false if there is one from `place` on already, or it
    /// is behind.
    pub fn wait(&self, place: u64, subscriber: &Arc<SubscriberState>) -> bool {
        let mut state = self.state();
        if state.end > place || place < state.begin {
            return false;
        }
        if subscriber.index.load(Ordering::Relaxed) == UNLISTED {
            subscriber.index.store(state.waiting.len(), Ordering::Relaxed);
            state.waiting.push(Arc::clone(subscriber));
        }
        true
    }

    /// Takes `subscriber` off the list of those who wait.
    pub fn leave(&self, subscriber: &Arc<SubscriberState>) {
        let mut state = self.state();
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

impl State {
    /// Moves those who wait to `woken`.
    fn take_waiting(&mut self, woken: &mut Vec<Arc<SubscriberState>>) {
        for subscriber in self.waiting.drain(..) {
            subscriber.index.store(UNLISTED, Ordering::Relaxed);
            woken.push(subscriber);
        }
    }
}

impl fmt::Debug for SubscriberState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubscriberState").field("is_closed", &self.is_closed()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").finish_non_exhaustive()
    }
}
