//! [`Mailbox`]: what a subscriber of exact names is given. One slot per name holds the newest row; a row that comes before
//! the last one was taken replaces it, and the receiver derives what both have brought.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use super::{
    delivery::{Delivery, Interruption},
    filter::Filter,
};
use crate::{encoding::Sequence, notification::Notification};

/// What a subscriber of exact names is given.
#[derive(Debug)]
pub(super) struct Mailbox {
    /// What it wants of them.
    filter: Filter,
    /// The slots.
    state: Mutex<State>,
}

/// The changing part of a mailbox.
#[derive(Debug)]
struct State {
    /// A slot for each name.
    slots: Vec<Slot>,
    /// Slots with a row that was not taken.
    ready: VecDeque<usize>,
    /// The task that waits for one.
    waker: Option<Waker>,
    /// Whether no more will come.
    closed: bool,
    /// The horizon, if rows may have been dropped that the receiver was not given, and it was not told so.
    expired: Option<Sequence>,
    /// Everything up to here was taken. It stays behind while rows wait, or it is still to be told that it has expired.
    known: Sequence,
}

/// What is known of one name.
#[derive(Debug)]
struct Slot {
    /// The newest row, until it is taken.
    row: Option<Arc<Notification>>,
    /// Up to where the receiver has been told about the name.
    told: Sequence,
}

impl Mailbox {
    /// A mailbox whose receiver knows everything up to `known`, and of each name, in the order of the slots, what `told` says.
    pub fn new(filter: Filter, told: impl IntoIterator<Item = Sequence>, known: Sequence) -> Self {
        let slots = told.into_iter().map(|told| Slot { row: None, told }).collect();
        let (ready, waker, closed, expired) = (VecDeque::new(), None, false, None);
        Self { filter, state: Mutex::new(State { slots, ready, waker, closed, expired, known }) }
    }

    /// The changing part. No holder of the lock can panic with it half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `row` into `slot`, unless the receiver knows it or a newer one, or wants nothing of it. Returns whom to wake.
    pub fn put(&self, slot: usize, row: &Arc<Notification>) -> Option<Waker> {
        let mut state = self.state();
        let State { slots, ready, waker, .. } = &mut *state;
        let place = &mut slots[slot];
        let newest = place.row.as_ref().map_or(place.told, |row| row.sequence);
        if row.sequence <= newest || !self.filter.passes_exact(row, place.told) {
            return None;
        }
        if place.row.replace(Arc::clone(row)).is_none() {
            ready.push_back(slot);
        }
        waker.take()
    }

    /// Takes the row that waits longest. `None` once the mailbox is closed and empty. After `Expired` the receiver knows
    /// nothing of any name, and somebody has to look all of them up.
    pub fn poll_take(&self, context: &mut Context<'_>) -> Poll<Option<Result<Delivery, Interruption>>> {
        let mut state = self.state();
        if let Some(horizon) = state.expired.take() {
            state.known = Sequence::ZERO;
            return Poll::Ready(Some(Err(Interruption::Expired { horizon })));
        }
        let Some(slot) = state.ready.pop_front() else {
            if state.closed {
                return Poll::Ready(None);
            }
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        };
        let place = &mut state.slots[slot];
        let row = place.row.take().expect("a slot that is ready has a row");
        let since = std::mem::replace(&mut place.told, row.sequence);
        Poll::Ready(Some(Ok(Delivery::new(row, since))))
    }

    /// The horizon, if the receiver is still to be told that it has expired.
    pub fn expired(&self) -> Option<Sequence> {
        self.state().expired
    }

    /// How many rows wait, a horizon that was not told included.
    pub fn waiting(&self) -> usize {
        let state = self.state();
        state.ready.len() + usize::from(state.expired.is_some())
    }

    /// Everything up to here was taken; `filled` is the position up to which, before this was called, all rows were put in.
    pub fn known(&self, filled: Sequence) -> Sequence {
        let mut state = self.state();
        if state.ready.is_empty() && state.expired.is_none() {
            state.known = state.known.max(filled);
        }
        state.known
    }

    /// Everything up to here was taken, as far as that was noted.
    pub fn noted(&self) -> Sequence {
        self.state().known
    }

    /// Up to where the receiver has been told about each name, in the order of the slots.
    pub fn told(&self) -> Vec<Sequence> {
        self.state().slots.iter().map(|slot| slot.told).collect()
    }

    /// Notes that rows up to `horizon` may have been dropped that the receiver was not given: it knows nothing any more, and
    /// is told so. What was noted of how far it has come stays until then: whoever starts again from there is told as well.
    /// Returns whom to wake.
    pub fn expire(&self, horizon: Sequence) -> Option<Waker> {
        let mut state = self.state();
        for slot in &mut state.slots {
            *slot = Slot { row: None, told: Sequence::ZERO };
        }
        state.ready.clear();
        state.expired = Some(horizon);
        state.waker.take()
    }

    /// Ends the mailbox once it is empty. Returns whom to wake.
    pub fn close(&self) -> Option<Waker> {
        let mut state = self.state();
        state.closed = true;
        state.waker.take()
    }
}
