//! What subscribers and followers of shards are owed, and what they were told.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{Issuer, Oracle, Shared, Witness};
use crate::{
    dispatcher::{Delivery, Filter, Interruption},
    encoding::Sequence,
    event::{DbInstance, DbName, EventKind},
    keys::ShardId,
    notification::Notification,
};

/// The number of a subscriber.
pub(in crate::simulation) type SubscriberId = u64;

/// The number of a follower of shards.
pub(in crate::simulation) type FollowerId = u64;

/// Which databases a subscriber wants.
#[derive(Debug, Clone)]
pub(in crate::simulation) enum Wish {
    /// All.
    All,
    /// These.
    Names(Vec<DbName>),
    /// Those that begin so.
    Prefix(String),
    /// Those that end so.
    Suffix(String),
}

impl Wish {
    /// Whether `name` is wanted.
    fn wants(&self, name: &DbName) -> bool {
        match self {
            Self::All => true,
            Self::Names(names) => names.contains(name),
            Self::Prefix(prefix) => name.as_str().starts_with(&prefix[..]),
            Self::Suffix(suffix) => name.as_str().ends_with(&suffix[..]),
        }
    }

    /// It as a filter.
    pub fn filter(&self) -> Filter {
        match self {
            Self::All => Filter::all(),
            Self::Names(names) => Filter::names(names.iter().cloned()).expect("there is a name"),
            Self::Prefix(prefix) => Filter::prefix(prefix.clone()),
            Self::Suffix(suffix) => Filter::suffix(suffix.clone()),
        }
    }
}

/// A subscriber.
#[derive(Debug)]
pub(super) struct Subscriber {
    /// In which process it is.
    pub issuer: Issuer,
    /// What it wants.
    wish: Wish,
    /// What came after this is owed to it.
    start: Sequence,
    /// Whether it began as one who knows nothing.
    knows_nothing: bool,
    /// The newest row that it was given of each database.
    last: BTreeMap<DbName, Sequence>,
    /// The newest row by which it was told of each kind of event of each instance.
    told: BTreeMap<(DbInstance, EventKind), Sequence>,
}

/// Who reads the feed shard by shard.
#[derive(Debug)]
pub(super) struct Follower {
    /// In which process it is.
    pub issuer: Issuer,
    /// The rows that it has read.
    read: BTreeSet<Sequence>,
    /// The shards whose end it was told.
    ended: BTreeSet<ShardId>,
}

impl Oracle {
    /// A subscriber has begun, which is owed all that comes after `start`.
    pub fn subscribed(&mut self, issuer: Issuer, wish: Wish, start: Sequence) -> SubscriberId {
        self.next_reader += 1;
        let (last, told) = (BTreeMap::new(), BTreeMap::new());
        let knows_nothing = start == Sequence::ZERO;
        self.subscribers
            .insert(self.next_reader, Subscriber { issuer, wish, start, knows_nothing, last, told });
        self.next_reader
    }

    /// Where a row stands or stood, if there ever was one; `random` decides which.
    pub fn some_position(&self, random: u64) -> Option<Sequence> {
        let place = random % (self.past.len() as u64).max(1);
        self.past.keys().nth(place as usize).copied()
    }

    /// A subscriber was given something.
    pub fn told(&mut self, shared: &Shared, id: SubscriberId, given: &Result<Delivery, Interruption>) {
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        let delivery = match given {
            Ok(delivery) => delivery,
            Err(Interruption::Lagged { from, to }) => {
                shared.witness(Witness::SubscriberLagged);
                if from > to {
                    shared.fail(format!("subscriber {id} lagged backwards, from {from} to {to}"));
                }
                subscriber.start = subscriber.start.max(*to);
                subscriber.knows_nothing = false;
                return;
            }
            Err(Interruption::Expired { .. }) => {
                shared.witness(Witness::SubscriberExpired);
                subscriber.start = Sequence::ZERO;
                subscriber.knows_nothing = true;
                subscriber.told.clear();
                subscriber.last.clear();
                return;
            }
            Err(_) => return,
        };
        let row = delivery.notification();
        if let Err(reason) = subscriber.take(self.past.get(&row.sequence), row, delivery) {
            shared.fail(format!("subscriber {id}: {reason}"));
        }
    }

    /// What a subscriber is still owed.
    pub(super) fn subscribers_are_owed(&self) -> Option<String> {
        self.subscribers.iter().find_map(|(id, subscriber)| {
            let mut rows = self.rows.values().map(|placed| &placed.row);
            let owed = rows.find_map(|row| subscriber.is_owed(row))?;
            Some(format!("subscriber {id} of process {} is owed {owed}", subscriber.issuer.process))
        })
    }

    /// Somebody begins to follow the feed shard by shard, from the very beginning.
    pub fn followed(&mut self, issuer: Issuer) -> FollowerId {
        self.next_reader += 1;
        let follower = Follower { issuer, read: BTreeSet::new(), ended: BTreeSet::new() };
        self.followers.insert(self.next_reader, follower);
        self.next_reader
    }

    /// A follower gives up, as it has to begin anew.
    pub fn unfollowed(&mut self, id: FollowerId) {
        self.followers.remove(&id);
    }

    /// A follower has read rows of a shard.
    pub fn followed_rows(&mut self, shared: &Shared, id: FollowerId, rows: &[Arc<Notification>]) {
        let Some(follower) = self.followers.get_mut(&id) else { return };
        for row in rows {
            if self.past.get(&row.sequence) != Some(row) {
                shared.fail(format!("follower {id} has read a row at {} that never was", row.sequence));
            }
            if !follower.read.insert(row.sequence) {
                shared.fail(format!("follower {id} has read the row at {} twice", row.sequence));
            }
        }
    }

    /// A follower was told the end of a shard.
    pub fn followed_over(&mut self, world: &Shared, id: FollowerId, shard: ShardId) {
        let Some(follower) = self.followers.get_mut(&id) else { return };
        world.witness(Witness::ShardFollowedOver);
        if !follower.ended.insert(shard) {
            world.fail(format!("follower {id} was told the end of shard {shard} twice"));
        }
    }

    /// What a follower has still to read.
    pub(super) fn followers_owe(&self) -> Option<String> {
        self.followers.iter().find_map(|(id, follower)| {
            let mut rows = self.rows.values().map(|placed| placed.row.sequence);
            let left = rows.find(|at| !follower.read.contains(at))?;
            Some(format!(
                "follower {id} of process {} has not read the row at {left}",
                follower.issuer.process
            ))
        })
    }
}

impl Subscriber {
    /// Takes a delivery; fails if it is none that it could get.
    fn take(
        &mut self,
        real: Option<&Arc<Notification>>,
        row: &Notification,
        delivery: &Delivery,
    ) -> Result<(), String> {
        if real.is_none_or(|real| **real != *row) {
            return Err(format!("it was given a row at {} that never was", row.sequence));
        }
        if !self.wish.wants(&row.name) {
            return Err(format!("it was told of {:?}, which it does not want", row.name));
        }
        if let Some(last) = self.last.insert(row.name.clone(), row.sequence)
            && last >= row.sequence
        {
            return Err(format!("it was told of {:?} at {} after {last}", row.name, row.sequence));
        }
        for (instance, kind) in delivery.news().iter() {
            self.told.insert((instance, kind), row.sequence);
        }
        Ok(())
    }

    /// What it is owed of the database of `row`, its newest row.
    fn is_owed(&self, row: &Notification) -> Option<String> {
        if !self.wish.wants(&row.name) {
            return None;
        }
        let kinds = [
            (EventKind::Created, row.created_at),
            (EventKind::Deleted, row.deleted_at),
            (EventKind::Updated, row.updated_at),
            (EventKind::DdocUpdated, row.ddoc_updated_at),
        ];
        let own = kinds.into_iter().filter_map(|(kind, at)| Some((row.instance, kind, at?)));
        let before = row.replaced.filter(|_| !self.knows_nothing);
        let before = before.map(|replaced| (replaced.instance, EventKind::Deleted, replaced.deleted_at));
        let mut owed = own.chain(before).filter(|(_, _, at)| *at > self.start);
        let (instance, kind, at) = owed
            .find(|(instance, kind, at)| self.told.get(&(*instance, *kind)).is_none_or(|told| told < at))?;
        Some(format!("{kind:?} of {:?} {instance:?} at {at}, since {}", row.name, self.start))
    }
}
