//! [`Registry`]: who has subscribed, and to which exact names.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Waker},
};

use dashmap::DashMap;
use futures_util::task::AtomicWaker;

use super::{slots::Mailbox, wake};
use crate::{encoding::Sequence, event::DbName, notification::Notification};

/// Which subscriber of a dispatcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SubscriberId(u64);

impl fmt::Display for SubscriberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who has subscribed, and to which exact names.
#[derive(Debug)]
pub(super) struct Registry {
    /// For each name, the slots to put its rows into.
    names: DashMap<DbName, Vec<Target>>,
    /// All subscribers.
    seats: DashMap<SubscriberId, Arc<Seat>>,
    /// The id of the next one.
    next_id: AtomicU64,
    /// Everything up to here was put into the slots, and there was nothing more to read.
    filled: Mutex<Sequence>,
    /// How often all were woken.
    alarms: AtomicU64,
}

/// A subscriber, as the registry sees it.
#[derive(Debug, Default)]
pub(super) struct Seat {
    /// One of the constants below.
    state: AtomicU8,
    /// Wakes the subscriber when the state changes.
    waker: AtomicWaker,
}

impl Seat {
    /// More may come.
    const OPEN: u8 = 0;
    /// Nothing more will come: what waits is for it to take at once.
    const CLOSED: u8 = 1;
    /// It was told to end, and what waits is not for it.
    const ENDED: u8 = 2;

    /// Moves on to `state`, and wakes the subscriber.
    fn move_to(&self, state: u8) {
        self.state.fetch_max(state, Ordering::AcqRel);
        self.wake();
    }

    /// Wakes the subscriber.
    fn wake(&self) {
        wake::guarded(|| self.waker.wake());
    }

    /// Wakes the task of `context` when the state changes.
    pub fn register(&self, context: &Context<'_>) {
        self.waker.register(context.waker());
    }

    /// Whether nothing more will come.
    pub fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) != Self::OPEN
    }

    /// Whether it was told to end.
    pub fn is_ended(&self) -> bool {
        self.state.load(Ordering::Acquire) == Self::ENDED
    }
}

/// A slot of a mailbox.
#[derive(Debug)]
struct Target {
    /// The mailbox.
    mailbox: Arc<Mailbox>,
    /// The number of the slot.
    slot: usize,
}

impl Registry {
    /// A registry without subscribers, at `start`.
    pub fn new(start: Sequence) -> Self {
        let (names, seats) = (DashMap::new(), DashMap::new());
        let (next_id, alarms) = (AtomicU64::new(1), AtomicU64::new(0));
        Self { names, seats, next_id, filled: Mutex::new(start), alarms }
    }

    /// Seats a subscriber, until the guard is dropped.
    pub fn enter(self_: &Arc<super::Shared>) -> Seated {
        let registry = &self_.registry;
        let id = SubscriberId(registry.next_id.fetch_add(1, Ordering::Relaxed));
        let seat = Arc::<Seat>::default();
        registry.seats.insert(id, Arc::clone(&seat));
        // A registry that was closed in between has not seen it.
        if self_.ring.is_closed() {
            seat.move_to(Seat::CLOSED);
        }
        Seated { shared: Arc::clone(self_), id, seat }
    }

    /// Puts the rows of `names`, in their order, into the slots of `mailbox` from now on, until the guard is dropped.
    pub fn list(
        self_: &Arc<super::Shared>,
        mailbox: &Arc<Mailbox>,
        names: &Arc<BTreeSet<DbName>>,
    ) -> Listing {
        for (slot, name) in names.iter().enumerate() {
            let target = Target { mailbox: Arc::clone(mailbox), slot };
            self_.registry.names.entry(name.clone()).or_default().push(target);
        }
        if self_.ring.is_closed() {
            mailbox.close();
        }
        Listing { shared: Arc::clone(self_), mailbox: Arc::clone(mailbox), names: Arc::clone(names) }
    }

    /// Ends the subscriber `id`; whether there was one.
    pub fn end(&self, id: SubscriberId) -> bool {
        let seat = self.seats.get(&id).map(|seat| Arc::clone(&seat));
        seat.inspect(|seat| seat.move_to(Seat::ENDED)).is_some()
    }

    /// Notes that everything up to `to` was put into the slots.
    pub fn set_filled(&self, to: Sequence) {
        *self.filled.lock().unwrap_or_else(PoisonError::into_inner) = to;
    }

    /// Everything up to here was put into the slots.
    pub fn filled(&self) -> Sequence {
        *self.filled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many subscribers there are to the exact name `name`.
    pub fn listed(&self, name: &str) -> usize {
        self.names.get(name).map_or(0, |targets| targets.len())
    }

    /// Puts `row` into the slots of its name, and adds whom to wake to `woken`. Nobody is woken while the map is locked: an
    /// executor may drop a task instead, and with it a registration.
    pub fn put(&self, row: &Arc<Notification>, woken: &mut Vec<Waker>) {
        if let Some(targets) = self.names.get(row.name.as_str()) {
            woken.extend(targets.iter().filter_map(|target| target.mailbox.put(target.slot, row)));
        }
    }

    /// Whether nobody has subscribed to an exact name.
    pub fn has_no_names(&self) -> bool {
        self.names.is_empty()
    }

    /// How many subscriptions there are.
    pub fn len(&self) -> usize {
        self.seats.len()
    }

    /// Ends all mailboxes once they are empty.
    pub fn close(&self) {
        wake::all(self.change_all(Mailbox::close));
        for seat in self.all_seats() {
            seat.move_to(Seat::CLOSED);
        }
    }

    /// Tells all mailboxes that rows up to `horizon` may have been dropped unseen. Returns whom to wake.
    pub fn expire(&self, horizon: Sequence) -> Vec<Waker> {
        self.change_all(|mailbox| mailbox.expire(horizon))
    }

    /// Changes all mailboxes, and returns whom to wake.
    fn change_all(&self, change: impl Fn(&Mailbox) -> Option<Waker>) -> Vec<Waker> {
        let mut woken = Vec::new();
        for targets in &self.names {
            woken.extend(targets.iter().filter_map(|target| change(&target.mailbox)));
        }
        woken
    }

    /// The seats, without the map that holds them.
    fn all_seats(&self) -> Vec<Arc<Seat>> {
        self.seats.iter().map(|seat| Arc::clone(&seat)).collect()
    }

    /// Wakes all subscribers, because some that should have been woken were not.
    pub fn alarm(&self) {
        // It counts first: who is about to wait, and cannot be woken yet, sees by it that it must not.
        self.alarms.fetch_add(1, Ordering::AcqRel);
        for seat in self.all_seats() {
            seat.wake();
        }
    }

    /// How often all were woken by [`Registry::alarm`].
    pub fn alarms(&self) -> u64 {
        self.alarms.load(Ordering::Acquire)
    }
}

/// A seat in the registry. Dropping it leaves.
#[derive(Debug)]
pub(super) struct Seated {
    /// Where the registry is.
    shared: Arc<super::Shared>,
    /// Which subscriber.
    pub id: SubscriberId,
    /// The seat.
    pub seat: Arc<Seat>,
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.shared.registry.seats.remove(&self.id);
    }
}

/// The names of a subscriber in the registry. Dropping it takes them out.
#[derive(Debug)]
pub(super) struct Listing {
    /// Where the registry is.
    shared: Arc<super::Shared>,
    /// Where their rows are put.
    mailbox: Arc<Mailbox>,
    /// The names.
    names: Arc<BTreeSet<DbName>>,
}

impl Drop for Listing {
    fn drop(&mut self) {
        for name in &*self.names {
            self.shared.registry.names.remove_if_mut(name.as_str(), |_, targets| {
                targets.retain(|target| !Arc::ptr_eq(&target.mailbox, &self.mailbox));
                targets.is_empty()
            });
        }
    }
}
