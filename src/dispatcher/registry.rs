//! [`Registry`]: who has subscribed, and to which exact names.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Waker,
};

use dashmap::DashMap;

use super::slots::Mailbox;
use crate::{encoding::Sequence, event::DbName, notification::Notification};

/// Who has subscribed, and to which exact names.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// For each name, the slots to put its rows into.
    names: DashMap<DbName, Vec<Target>>,
    /// How many subscriptions there are, of whatever filter.
    count: AtomicUsize,
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
    /// Counts a subscription. It is counted until the guard is dropped, and so are its names, if it has any.
    pub fn enter(
        self_: &Arc<super::Shared>,
        exact: Option<(Arc<Mailbox>, BTreeSet<DbName>)>,
    ) -> Registration {
        let registry = &self_.registry;
        registry.count.fetch_add(1, Ordering::Relaxed);
        if let Some((mailbox, names)) = &exact {
            for (slot, name) in names.iter().enumerate() {
                registry
                    .names
                    .entry(name.clone())
                    .or_default()
                    .push(Target { mailbox: Arc::clone(mailbox), slot });
            }
        }
        Registration { shared: Arc::clone(self_), exact }
    }

    /// Puts `row` into the slots of its name.
    pub fn put(&self, row: &Arc<Notification>) {
        // Nobody is woken while the map is locked: an executor may drop a task instead, and with it a registration.
        let woken: Vec<Waker> = match self.names.get(row.name.as_str()) {
            Some(targets) => {
                targets.iter().filter_map(|target| target.mailbox.put(target.slot, row)).collect()
            }
            None => return,
        };
        woken.into_iter().for_each(Waker::wake);
    }

    /// Whether nobody has subscribed to an exact name.
    pub fn has_no_names(&self) -> bool {
        self.names.is_empty()
    }

    /// How many subscriptions there are.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Ends all mailboxes once they are empty.
    pub fn close(&self) {
        self.wake_all(Mailbox::close);
    }

    /// Tells all mailboxes that rows up to `horizon` may have been dropped unseen.
    pub fn expire(&self, horizon: Sequence) {
        self.wake_all(|mailbox| mailbox.expire(horizon));
    }

    /// Changes all mailboxes, and wakes whom that gives.
    fn wake_all(&self, change: impl Fn(&Mailbox) -> Option<Waker>) {
        let mut woken = Vec::new();
        for targets in &self.names {
            woken.extend(targets.iter().filter_map(|target| change(&target.mailbox)));
        }
        woken.into_iter().for_each(Waker::wake);
    }
}

/// A subscription in the registry. Dropping it takes it out.
#[derive(Debug)]
pub(super) struct Registration {
    /// Where the registry is.
    shared: Arc<super::Shared>,
    /// The names it is registered under, and the mailbox for them.
    exact: Option<(Arc<Mailbox>, BTreeSet<DbName>)>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let registry = &self.shared.registry;
        registry.count.fetch_sub(1, Ordering::Relaxed);
        let Some((mailbox, names)) = &self.exact else {
            return;
        };
        for name in names {
            registry.names.remove_if_mut(name.as_str(), |_, targets| {
                targets.retain(|target| !Arc::ptr_eq(&target.mailbox, mailbox));
                targets.is_empty()
            });
        }
    }
}
