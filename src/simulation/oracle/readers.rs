//! What subscribers and followers of shards are owed, and what they were told.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{Issuer, Oracle, Shared, Verdict, Wish, Witness};
use crate::{
    dispatcher::{Delivery, Interruption},
    encoding::Sequence,
    event::{Db, DbInstance, DbName, DdocId, EventKind, Kinds},
    keys::ShardId,
    notification::Notification,
};

/// The number of a subscriber.
pub(in crate::simulation) type SubscriberId = u64;

/// The number of a follower of shards.
pub(in crate::simulation) type FollowerId = u64;

/// A subscriber.
#[derive(Debug)]
pub(super) struct Subscriber {
    /// In which process it is.
    pub issuer: Issuer,
    /// The cursor by which it outlives its process, if it does.
    pub cursor: Option<String>,
    /// What it wants.
    pub wish: Wish,
    /// What came after this is owed to it.
    pub start: Sequence,
    /// Whether it began as one who knows nothing.
    pub knows_nothing: bool,
    /// The newest row that it was given of each database.
    pub last: BTreeMap<DbName, Sequence>,
    /// The newest row by which it was told of each kind of event of each instance.
    told: BTreeMap<(DbInstance, EventKind), Sequence>,
    /// The newest row of which it knows that it told of each design document of each instance. Without an id, the newest by
    /// which it was told that it may be any.
    told_ddocs: BTreeMap<(DbInstance, Option<DdocId>), Sequence>,
}

/// What has changed in design documents, as a subscriber should have been told of it.
struct Changed<'a> {
    /// The rows that told of each design document last, those of databases that are gone included.
    ever: &'a BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// Those that are stored.
    stored: &'a BTreeMap<(Db, Option<DdocId>), Sequence>,
}

impl<'a> Changed<'a> {
    /// Those of the database `db` among `all`.
    fn of(
        all: &'a BTreeMap<(Db, Option<DdocId>), Sequence>,
        db: &'a Db,
    ) -> impl Iterator<Item = (Option<&'a DdocId>, Sequence)> {
        let own = all.range((db.clone(), None)..).take_while(move |((of, _), _)| of == db);
        own.map(|((_, id), at)| (id.as_ref(), *at))
    }
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
        let subscriber = Subscriber {
            issuer,
            cursor: None,
            wish,
            start,
            knows_nothing: start == Sequence::ZERO,
            last: BTreeMap::new(),
            told: BTreeMap::new(),
            told_ddocs: BTreeMap::new(),
        };
        self.subscribers.insert(self.next_reader, subscriber);
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
                if subscriber.cursor.is_some() {
                    shared.witness(Witness::DurableExpired);
                }
                subscriber.told.clear();
                subscriber.told_ddocs.clear();
                subscriber.last.clear();
                return;
            }
            Err(_) => return,
        };
        let row = delivery.notification();
        let changed = Changed { ever: &self.told_ddocs, stored: &self.ddocs };
        let taken = subscriber
            .take(self.past.get(&row.sequence), row)
            .and_then(|()| subscriber.take_news(shared, row, delivery))
            .and_then(|()| subscriber.take_ddocs(shared, row, delivery, &changed));
        if let Err(reason) = taken {
            shared.fail(format!("subscriber {id}: {reason}"));
        }
    }

    /// What a subscriber is still owed.
    pub(super) fn subscribers_are_owed(&self) -> Option<String> {
        self.subscribers.keys().find_map(|id| self.is_owed(*id, Sequence::MAX))
    }

    /// What the subscriber `id` is still owed of what happened up to `to`.
    pub(super) fn is_owed(&self, id: SubscriberId, to: Sequence) -> Option<String> {
        let subscriber = self.subscribers.get(&id)?;
        let changed = Changed { ever: &self.told_ddocs, stored: &self.ddocs };
        let owed = self.rows.values().find_map(|placed| {
            let row = &placed.row;
            subscriber.is_owed(row, to).or_else(|| subscriber.is_owed_ddocs(row, to, &changed))
        })?;
        Some(format!("subscriber {id} of process {} is owed {owed}", subscriber.issuer.process))
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
    fn take(&mut self, real: Option<&Arc<Notification>>, row: &Notification) -> Verdict {
        if real.is_none_or(|real| **real != *row) {
            return Err(format!("it was given a row at {} that never was", row.sequence));
        }
        if let Some(last) = self.last.insert(row.name.clone(), row.sequence)
            && last >= row.sequence
        {
            return Err(format!("it was told of {:?} at {} after {last}", row.name, row.sequence));
        }
        Ok(())
    }

    /// Takes the news of a delivery; fails if it wants none of them.
    fn take_news(&mut self, shared: &Shared, row: &Notification, delivery: &Delivery) -> Verdict {
        let (wanted, news) = (self.wish.kinds_of(&row.name), delivery.news().kinds());
        if !wanted.intersects(news) {
            return Err(format!("it was told of {news:?} of {:?}, and wants {wanted:?}", row.name));
        }
        let (by, expected) = (delivery.wanted_by(), self.wish.wanted_by(&row.name, news));
        if by != expected {
            return Err(format!("{news:?} of {:?} are said to be wanted by {by:?} of its set", row.name));
        }
        if by.len() > 1 {
            shared.witness(Witness::WantedByMany);
        }
        for (instance, kind) in delivery.news().iter() {
            self.told.insert((instance, kind), row.sequence);
        }
        Ok(())
    }

    /// Takes what a delivery says of design documents; fails if it leaves one out, says what never was, or tells of none that it
    /// wants, and of nothing else.
    fn take_ddocs(
        &mut self,
        shared: &Shared,
        row: &Notification,
        delivery: &Delivery,
        changed: &Changed<'_>,
    ) -> Verdict {
        if delivery.ddocs().is_some() != self.wish.names_ddocs() {
            return Err("it was told of design documents unasked, or not told".to_owned());
        }
        let Some(ids) = delivery.ddocs() else { return Ok(()) };
        let (db, news, may_be_any) = (row.db(), delivery.news().kinds(), delivery.may_be_any_ddoc());
        let ever = |id: Option<&DdocId>| changed.ever.get(&(db.clone(), id.cloned())).copied();
        for (id, at) in ids {
            if ever(Some(id)).is_none_or(|newest| *at > newest) || *at <= delivery.since() {
                return Err(format!("it was told that {id} of {db:?} has changed at {at}"));
            }
            if *at > row.sequence {
                shared.witness(Witness::DdocAheadOfRow);
            }
            self.told_ddocs.insert((db.instance, Some(id.clone())), *at);
        }
        if may_be_any {
            if !ids.is_empty() && ever(None).is_none_or(|newest| newest <= delivery.since()) {
                return Err(format!("it was told that any of {db:?} may have changed, and all had ids"));
            }
            self.told_ddocs.insert((db.instance, None), row.sequence);
        }
        let is_told = |id: Option<&DdocId>| match id {
            Some(id) => ids.iter().any(|(told, _)| told == id),
            None => may_be_any,
        };
        let new = delivery.since()..=row.sequence;
        let left_out = Changed::of(changed.stored, &db)
            .find(|(id, at)| *at > delivery.since() && new.contains(at) && !is_told(*id));
        if let Some((id, at)) = left_out {
            return Err(format!("it was not told that {id:?} of {db:?} has changed at {at}"));
        }
        let besides = self
            .wish
            .kinds_of(&row.name)
            .iter()
            .any(|kind| kind != EventKind::DdocUpdated && news.contains(kind));
        let is_wanted = may_be_any || ids.iter().any(|(id, _)| self.wish.wants_ddoc(Some(id)));
        if !besides && !is_wanted {
            return Err(format!("it was told of {ids:?} of {db:?}, and wants {:?}", self.wish));
        }
        if self.wish.ddocs.is_some() && !besides && may_be_any {
            let is_gone = ids.is_empty() && row.is_deleted();
            shared.witness(if is_gone { Witness::DdocsGone } else { Witness::DdocMayBeAny });
        }
        Ok(())
    }

    /// What it is owed of the database of `row`, its newest row, of what happened up to `to`.
    fn is_owed(&self, row: &Notification, to: Sequence) -> Option<String> {
        let wanted = self.wish.kinds_of(&row.name);
        if wanted == Kinds::NONE {
            return None;
        }
        let kinds = [
            (EventKind::Created, row.created_at),
            (EventKind::Deleted, row.deleted_at),
            (EventKind::Updated, row.updated_at),
            (EventKind::DdocUpdated, row.ddoc_updated_at.filter(|_| self.wish.ddocs.is_none())),
        ];
        let own = kinds.into_iter().filter_map(|(kind, at)| Some((row.instance, kind, at?)));
        let before = row.replaced.filter(|_| !self.knows_nothing);
        let before = before.map(|replaced| (replaced.instance, EventKind::Deleted, replaced.deleted_at));
        let mut owed =
            own.chain(before).filter(|(_, kind, at)| wanted.contains(*kind) && *at > self.start && *at <= to);
        let (instance, kind, at) = owed
            .find(|(instance, kind, at)| self.told.get(&(*instance, *kind)).is_none_or(|told| told < at))?;
        Some(format!("{kind:?} of {:?} {instance:?} at {at}, since {}", row.name, self.start))
    }

    /// Which design document of the database of `row`, its newest row, it should have been told of, of those that were told up
    /// to `to`. Of a database that is deleted nobody knows them any more: it is told that it may be any.
    fn is_owed_ddocs(&self, row: &Notification, to: Sequence, changed: &Changed<'_>) -> Option<String> {
        let wants = self.wish.kinds_of(&row.name).contains(EventKind::DdocUpdated);
        if !wants || !self.wish.names_ddocs() {
            return None;
        }
        let db = row.db();
        let told = |id: Option<&DdocId>| {
            let told = self.told_ddocs.get(&(db.instance, id.cloned()));
            told.copied().unwrap_or(Sequence::ZERO)
        };
        let (id, at) = Changed::of(changed.ever, &db)
            .filter(|(id, at)| *at > self.start && *at <= to && self.wish.wants_ddoc(*id))
            .find(|(id, at)| told(*id) < *at && (!row.is_deleted() || told(None) < *at))?;
        Some(format!("{id:?} of {db:?} at {at}, since {}", self.start))
    }
}
