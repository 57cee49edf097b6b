//! [`Roles`]: the roles that a node has entered, and which of them other nodes have to learn of. What a change costs does not grow with
//! the number of roles.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    time::Duration,
};

use bytes::Bytes;

use super::leases::Stop;
use crate::state::keys::Role;

/// A role that the node has entered.
#[derive(Debug)]
pub(super) struct Entered {
    /// The most resources that the node may own by it.
    pub max: u32,
    /// The key of the note that nobody has the role, if there may be one.
    pub idle: Option<Bytes>,
    /// `None` for a role that ends as soon as it is dropped.
    pub worker: Option<EnteredWorker>,
}

/// The worker of a role.
#[derive(Debug)]
pub(super) struct EnteredWorker {
    /// Requested once it was dropped or shuts down.
    pub stop: Stop,
    /// The slot of its pool's version.
    pub slot: u16,
    /// How often it polls that version.
    pub interval: Duration,
}

/// What has to be stored of a role: [`Entered::max`] and [`Entered::idle`], or nothing if the node has left it.
pub(super) type News = (Role, Option<(u32, Option<Bytes>)>);

#[derive(Debug, Default)]
pub(super) struct Roles {
    entered: BTreeMap<Role, Entered>,
    /// Roles that may be stored otherwise.
    unpublished: BTreeSet<Role>,
}

impl Roles {
    pub fn get(&self, role: &Role) -> Option<&Entered> {
        self.entered.get(role)
    }

    /// Enters `role`. Returns false if the node has it already.
    pub fn enter(&mut self, role: &Role, entered: Entered) -> bool {
        let Entry::Vacant(vacant) = self.entered.entry(role.clone()) else { return false };
        vacant.insert(entered);
        self.unpublished.insert(role.clone());
        true
    }

    pub fn leave(&mut self, role: &Role) {
        if self.entered.remove(role).is_some() {
            self.unpublished.insert(role.clone());
        }
    }

    /// Makes a role that the node has own nothing. Returns whether that is a change.
    pub fn give_up(&mut self, role: &Role) -> bool {
        let entered = self.entered.get_mut(role).expect("the node has the role");
        let is_news = std::mem::take(&mut entered.max) > 0;
        if is_news {
            self.unpublished.insert(role.clone());
        }
        is_news
    }

    /// Sets how often the worker of `role` polls. Returns whether that is a change.
    pub fn set_interval(&mut self, role: &Role, interval: Duration) -> bool {
        let worker = self.entered.get_mut(role).and_then(|entered| entered.worker.as_mut());
        worker.is_some_and(|worker| std::mem::replace(&mut worker.interval, interval) != interval)
    }

    /// The workers of the node.
    pub fn workers(&self) -> impl Iterator<Item = &EnteredWorker> {
        self.entered.values().filter_map(|entered| entered.worker.as_ref())
    }

    /// All roles have to be stored: the node joins.
    pub fn forget_published(&mut self) {
        self.unpublished.extend(self.entered.keys().cloned());
    }

    pub fn is_published(&self) -> bool {
        self.unpublished.is_empty()
    }

    /// What has to be stored next, of at most `limit` roles.
    pub fn news(&self, limit: usize) -> Vec<News> {
        self.unpublished.iter().take(limit).map(|role| (role.clone(), self.to_store(role))).collect()
    }

    fn to_store(&self, role: &Role) -> Option<(u32, Option<Bytes>)> {
        self.entered.get(role).map(|entered| (entered.max, entered.idle.clone()))
    }

    /// `news` are stored. What has changed since is not.
    pub fn were_published(&mut self, news: &[News]) {
        for (role, stored) in news {
            if self.to_store(role) == *stored {
                self.unpublished.remove(role);
            }
        }
    }
}
