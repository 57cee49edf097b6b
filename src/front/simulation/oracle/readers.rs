//! The debts to subscribers and to followers of shards, and what they have received.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    Interest, Issuer, Oracle, Shared, Verdict, Witness,
    account::{Account, Wants},
    given::{Given, GivenDdocs, GivenRow, Start},
    history::{Row, Seen},
    ledger::Ledger,
};
use crate::{
    base::{
        encoding::Sequence,
        event::{Db, DbInstance, DbName, DdocId, EventKind, Kinds},
        notification::Notification,
    },
    front::simulation::guarantee::Guarantee,
    state::keys::ShardId,
};

/// The number of a subscriber.
pub(in crate::front::simulation) type SubscriberId = u64;

/// The number of a follower of shards.
pub(in crate::front::simulation) type FollowerId = u64;

/// How a subscriber receives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::front::simulation) struct Manner {
    /// The kind of its receiver: a word for messages.
    pub form: Cow<'static, str>,
    /// Whether it would rather skip rows that it has missed.
    pub skips: bool,
    /// Whether it panics now and then, and then gets its delivery again.
    pub panics: bool,
}

/// A subscriber.
#[derive(Debug)]
pub(super) struct Subscriber {
    /// Its process.
    pub issuer: Issuer,
    /// The cursor by which it survives a crash of its process, if it has one.
    pub cursor: Option<String>,
    pub interest: Interest,
    /// Its earlier filters, as far as deliveries of them may still come.
    before: Vec<Interest>,
    manner: Manner,
    /// How often it has resumed in another life.
    life: u64,
    /// Everything after this is owed to it. The account is more precise, by kinds of events and names.
    start: Start,
    account: Account,
    /// Everything up to here was certainly delivered to it.
    surely: Start,
    /// Whether it knew nothing when it began, or when it last expired, and claims no other position yet.
    is_scanning: bool,
    /// Whether it got `Expired`, so that its cursor goes back.
    pub has_expired: bool,
    /// The horizon of its last `Expired`.
    pub expired_by: Option<Sequence>,
    /// The newest row that was delivered of each database.
    last: BTreeMap<DbName, Sequence>,
    /// The notable events of its life, for messages.
    story: BTreeSet<&'static str>,
    /// The newest delivered row with a change of each design document of each instance. Without an id: the newest
    /// with a change that may be of any.
    delivered_ddocs: BTreeMap<(DbInstance, Option<DdocId>), Sequence>,
}

/// The changed design documents that a subscriber should have received.
struct Changed<'a> {
    /// The last row with a change of each design document, those of databases that are gone included.
    ever: &'a BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The stored rows of design documents.
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

/// A follower, which reads the feed shard by shard.
#[derive(Debug)]
pub(super) struct Follower {
    /// Its process.
    pub issuer: Issuer,
    /// The rows that it has read.
    read: BTreeSet<Sequence>,
    /// The shards whose end it has received.
    ended: BTreeSet<ShardId>,
}

impl Oracle {
    /// Adds a subscriber, which is owed everything after `start`.
    pub fn subscribed(
        &mut self,
        issuer: Issuer,
        interest: Interest,
        manner: Manner,
        start: Start,
    ) -> SubscriberId {
        let id = self.next_reader + 1;
        self.keep(|| Seen::Subscribed {
            id,
            by: issuer.into(),
            interest: (&interest).into(),
            manner: manner.clone(),
            start,
        });
        self.add_subscriber(issuer, interest, manner, start)
    }

    /// Adds a subscriber.
    pub(super) fn add_subscriber(
        &mut self,
        issuer: Issuer,
        interest: Interest,
        manner: Manner,
        start: Start,
    ) -> SubscriberId {
        self.next_reader += 1;
        let account = Account::new(&self.ledger, &self.wants(&interest), start);
        let subscriber = Subscriber {
            issuer,
            cursor: None,
            interest,
            before: Vec::new(),
            manner,
            life: 0,
            start,
            account,
            surely: start,
            is_scanning: start == Start::Nothing,
            has_expired: false,
            expired_by: None,
            last: BTreeMap::new(),
            story: BTreeSet::new(),
            delivered_ddocs: BTreeMap::new(),
        };
        self.subscribers.insert(self.next_reader, subscriber);
        self.next_reader
    }

    /// A subscriber resumes in another life, from `start`, as it claims. Earlier deliveries count.
    pub fn resumed(
        &mut self,
        shared: &Shared,
        (issuer, id): (Issuer, SubscriberId),
        manner: Manner,
        start: Start,
    ) {
        self.keep(|| Seen::Resumed { id, by: issuer.into(), manner: manner.clone(), start });
        self.go_on(shared, (issuer, id), manner, start);
    }

    /// A subscriber goes on in another life.
    pub(super) fn go_on(
        &mut self,
        shared: &Shared,
        (issuer, id): (Issuer, SubscriberId),
        manner: Manner,
        start: Start,
    ) {
        self.judge_claim(shared, id, start, (Guarantee::Resumable, "goes on at"));
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        if start == Start::Nothing && subscriber.account.knows_any() {
            shared.witness(Witness::RestartWithinFirstScan);
            subscriber.story.insert("restarted within its first scan");
        }
        subscriber.account.resume(&self.ledger, start);
        subscriber.start = subscriber.start.min(start);
        subscriber.surely = subscriber.surely.min(start);
        subscriber.is_scanning = start == Start::Nothing;
        // Rows after its position may come again.
        subscriber.last.clear();
        (subscriber.issuer, subscriber.manner) = (issuer, manner);
        subscriber.life += 1;
        subscriber.before.clear();
    }

    /// How often a subscriber has resumed in another life. The oracle ignores a receiver that is left from an earlier
    /// life.
    pub fn life(&self, id: SubscriberId) -> Option<u64> {
        self.subscribers.get(&id).map(|subscriber| subscriber.life)
    }

    /// Replaces the filter of a subscriber by `interest`. Newly wanted facts are owed after `start`, its claimed
    /// position. Without a start the moment is not known, and deliveries for the earlier filter may still come.
    pub fn replaced(&mut self, shared: &Shared, id: SubscriberId, interest: &Interest, start: Option<Start>) {
        self.keep(|| Seen::Replaced { id, interest: interest.into(), start });
        if let Some(start) = start {
            self.judge_claim(shared, id, start, (Guarantee::Bookmarkable, "has its filter replaced at"));
        }
        let wants = self.wants(interest);
        let Some(known) = self.subscribers.get(&id) else { return };
        let earlier = |name: &&DbName| {
            let mut wishes = known.before.iter().chain([&known.interest]);
            wishes.all(|interest| interest.kinds_of(name) == Kinds::NONE)
        };
        let unwanted: BTreeSet<_> = self.names.iter().filter(earlier).cloned().collect();
        let subscriber = self.subscribers.get_mut(&id).expect("it was just there");
        shared.witness(Witness::FilterReplaced);
        if subscriber.is_scanning
            && subscriber.account.knows_any()
            && start.is_none_or(|at| at == Start::Nothing)
        {
            shared.witness(Witness::ReplacedWithinFirstScan);
            subscriber.story.insert("given another filter within its first scan");
        }
        let before = std::mem::replace(&mut subscriber.interest, interest.clone());
        if let Some(start) = start {
            subscriber.account.replace(&self.ledger, &wants, start);
        } else {
            subscriber.before.push(before);
            subscriber.account.replace_soon(&self.ledger, &wants, unwanted);
        }
        // Rows that both filters want can be delivered again.
        subscriber.last.clear();
    }

    /// A subscriber claims that everything up to `position` was delivered to it.
    pub fn stands(&mut self, shared: &Shared, id: SubscriberId, position: Start) {
        self.keep(|| Seen::Stands { id, at: position });
        self.stand(shared, id, position);
    }

    /// A subscriber says so, or was informed so.
    fn stand(&mut self, shared: &Shared, id: SubscriberId, position: Start) {
        self.judge_claim(shared, id, position, (Guarantee::Bookmarkable, "stands at"));
        self.note_position(id, position);
    }

    /// Records a claimed position of a subscriber. It is owed later events of the databases that exist there.
    pub(super) fn note_position(&mut self, id: SubscriberId, position: Start) {
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        subscriber.surely = subscriber.surely.max(position);
        if let Start::At(position) = position {
            subscriber.is_scanning = false;
            subscriber.account.stand(&self.ledger, position);
        }
    }

    /// Judges a subscriber's claim that everything up to `start` was delivered to it.
    fn judge_claim(
        &self,
        shared: &Shared,
        id: SubscriberId,
        start: Start,
        (guarantee, what): (Guarantee, &str),
    ) {
        if let Start::At(position) = start
            && position >= self.horizon
            && let Some(owed) = self.is_owed(id, position)
        {
            shared.fail(guarantee.broken(format!("it {what} {position}, and {owed}")));
        }
    }

    /// The kinds of events that `interest` wants of each name. For a subscriber of some design documents, their changes
    /// are judged by their ids.
    fn wants(&self, interest: &Interest) -> Wants {
        let kinds = |name: &DbName| -> Kinds {
            let by_id = |kind: &EventKind| *kind == EventKind::DdocUpdated && interest.ddocs.is_some();
            interest.kinds_of(name).iter().filter(|kind| !by_id(kind)).collect()
        };
        self.names.iter().map(|name| (name.clone(), kinds(name))).collect()
    }

    /// The position of one of the rows so far, as `random` decides, if there is one.
    pub fn some_position(&self, random: u64) -> Option<Sequence> {
        let place = random % (self.past.len() as u64).max(1);
        self.past.keys().nth(place as usize).copied()
    }

    /// Judges something that a subscriber has received.
    pub fn received(&mut self, shared: &Shared, id: SubscriberId, given: &Given) {
        self.keep(|| Seen::Given { id, given: given.into() });
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        let taken = match given {
            Given::Failed => Ok(()),
            Given::Synced { at } => {
                self.stand(shared, id, Start::At(*at));
                return;
            }
            Given::Lagged { from, to } => subscriber.lag(shared, &self.ledger, (*from, *to)),
            Given::Expired { horizon } => subscriber.expire(shared, *horizon, self.horizon),
            Given::Row(given) => self.receive_row(shared, id, given),
        };
        if let Err(broken) = taken {
            let who = self.subscribers.get(&id).map(Subscriber::describe).unwrap_or_default();
            shared.fail(broken.about(format!("subscriber {id} {who}")));
        }
    }

    /// Judges a row that a subscriber has received; fails if it cannot get this row, or if owed news are missing.
    fn receive_row(&mut self, shared: &Shared, id: SubscriberId, given: &GivenRow) -> Verdict {
        let (row, real) = (&*given.row, self.past.get(&given.row.sequence));
        let was = |&(instance, kind): &(DbInstance, EventKind)| {
            // An instance that came and went within a fold can be delivered as the previous one.
            let counters = self.recorded.get(&Db::new(row.name.clone(), instance));
            let is_gone = counters.is_some_and(|counters| counters.deleted > 0);
            self.ledger.was(&row.name, instance, kind, row.sequence) || kind == EventKind::Deleted && is_gone
        };
        let never = given.news.iter().find(|news| !was(news));
        let changed = Changed { ever: &self.reported_ddocs, stored: &self.ddocs };
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return Ok(()) };
        if subscriber.last.get(&row.name) == Some(&row.sequence) && subscriber.manner.panics {
            shared.witness(Witness::GivenAgainAfterPanic);
        }
        subscriber.take(real, row)?;
        if let Some(never) = never {
            return Guarantee::Truthful
                .fails(format!("it received {never:?} of {:?}, which never was", row.name));
        }
        subscriber.take_news(shared, given)?;
        let paid = subscriber
            .account
            .deliver(&self.ledger, &row.name, row.sequence, given.kinds())
            .map_err(|reason| Guarantee::Atomic.broken(reason))?;
        if paid > 1 {
            shared.witness(Witness::RecreatedTwiceBetween);
        }
        subscriber.take_ddocs(shared, given, &changed)
    }

    /// Records a dropped tombstone: a subscriber that may know its database, and did not receive it, has to expire.
    pub(super) fn note_drop(&self, shared: &Shared, name: &DbName) {
        let is_owed = |subscriber: &Subscriber| !subscriber.account.deletions(&self.ledger, name).is_empty();
        if self.subscribers.values().any(is_owed) {
            shared.witness(Witness::TombstoneDroppedWhileWaiting);
        }
    }

    /// A debt to any subscriber.
    pub(super) fn subscribers_are_owed(&self) -> Option<String> {
        self.subscribers.keys().find_map(|id| self.is_owed(*id, Sequence::MAX))
    }

    /// A debt to the subscriber `id` of something that happened up to `to`.
    pub(super) fn is_owed(&self, id: SubscriberId, to: Sequence) -> Option<String> {
        let subscriber = self.subscribers.get(&id)?;
        let changed = Changed { ever: &self.reported_ddocs, stored: &self.ddocs };
        let ddocs = || {
            let mut rows = self.rows.values().map(|placed| &placed.row);
            rows.find_map(|row| subscriber.is_owed_ddocs(row, to, &changed))
        };
        let owed = subscriber.account.is_owed(&self.ledger, to).or_else(ddocs)?;
        let Issuer { process, .. } = subscriber.issuer;
        Some(format!("subscriber {id} of process {process} {} is owed {owed}", subscriber.describe()))
    }

    /// Adds a follower, which reads the feed shard by shard, from the very beginning.
    pub fn followed(&mut self, issuer: Issuer) -> FollowerId {
        self.next_reader += 1;
        let id = self.next_reader;
        self.keep(|| Seen::Followed { id, by: issuer.into() });
        let follower = Follower { issuer, read: BTreeSet::new(), ended: BTreeSet::new() };
        self.followers.insert(self.next_reader, follower);
        self.next_reader
    }

    /// Removes a follower, which has to begin again.
    pub fn unfollowed(&mut self, id: FollowerId) {
        self.keep(|| Seen::Unfollowed { id });
        self.followers.remove(&id);
    }

    /// Judges rows that a follower has read.
    pub fn followed_rows(&mut self, shared: &Shared, id: FollowerId, rows: &[Arc<Notification>]) {
        self.keep(|| Seen::FollowedRows { id, rows: rows.iter().map(|row| Row::of(row)).collect() });
        let Some(follower) = self.followers.get_mut(&id) else { return };
        for row in rows {
            if self.past.get(&row.sequence) != Some(row) {
                shared.fail(
                    Guarantee::Truthful
                        .broken(format!("follower {id} has read a row at {} that never was", row.sequence)),
                );
            }
            if !follower.read.insert(row.sequence) {
                shared.fail(
                    Guarantee::Unique
                        .broken(format!("follower {id} has read the row at {} twice", row.sequence)),
                );
            }
        }
    }

    /// Judges the end of a shard that a follower has received.
    pub fn followed_over(&mut self, world: &Shared, id: FollowerId, shard: ShardId) {
        self.keep(|| Seen::FollowedOver { id, shard: shard.0 });
        let Some(follower) = self.followers.get_mut(&id) else { return };
        world.witness(Witness::ShardFollowedOver);
        if !follower.ended.insert(shard) {
            world.fail(
                Guarantee::Unique.broken(format!("follower {id} received the end of shard {shard} twice")),
            );
        }
    }

    /// A row that a follower still has to read.
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
    /// Receives a row; fails if it cannot get this row.
    fn take(&mut self, real: Option<&Arc<Notification>>, row: &Notification) -> Verdict {
        if real.is_none_or(|real| **real != *row) {
            return Guarantee::Truthful
                .fails(format!("it was given a row at {} that never was", row.sequence));
        }
        // When its filter is replaced at an unknown moment, it may read rows again that were delivered before that
        // moment.
        let is_order_known = self.before.is_empty();
        if let Some(last) = self.last.insert(row.name.clone(), row.sequence)
            && is_order_known
            && (last > row.sequence || last == row.sequence && !self.manner.panics)
        {
            return (if last > row.sequence { Guarantee::Ordered } else { Guarantee::Unique })
                .fails(format!("it was informed of {:?} at {} after {last}", row.name, row.sequence));
        }
        Ok(())
    }

    /// A description for messages.
    fn describe(&self) -> String {
        let Self { interest, manner, start, story, .. } = self;
        let story: Vec<_> = story.iter().copied().collect();
        let start = match start {
            Start::Nothing => "nothing".to_owned(),
            Start::At(start) => start.to_string(),
        };
        let exact = if interest.is_exact() { " of exact names" } else { "" };
        format!("({}{exact}, from {start} on; {})", manner.form, story.join(", "))
    }

    /// Receives `Lagged`; fails if it had not asked for that.
    fn lag(&mut self, shared: &Shared, ledger: &Ledger, (from, to): (Sequence, Sequence)) -> Verdict {
        shared.witness(Witness::SubscriberLagged);
        self.start = self.start.max(Start::At(to));
        self.surely = self.surely.max(Start::At(to));
        self.is_scanning = false;
        self.account.lag(ledger, to);
        if !self.manner.skips {
            return Guarantee::Truthful
                .fails(format!("it lagged from {from} to {to}, and had not asked for that"));
        }
        if from > to {
            return Guarantee::Truthful.fails(format!("it lagged backwards, from {from} to {to}"));
        }
        Ok(())
    }

    /// Receives `Expired`; fails if everything up to the horizon was certainly delivered to it.
    fn expire(&mut self, shared: &Shared, horizon: Sequence, real: Sequence) -> Verdict {
        shared.witness(Witness::SubscriberExpired);
        if self.cursor.is_some() {
            shared.witness(Witness::DurableExpired);
        }
        let surely = std::mem::replace(&mut self.surely, Start::Nothing);
        (self.start, self.has_expired, self.is_scanning) = (Start::Nothing, true, true);
        self.expired_by = Some(horizon);
        self.account.expire();
        self.delivered_ddocs.clear();
        self.last.clear();
        if horizon > real {
            return Guarantee::ExpiredForReason
                .fails(format!("it has expired by {horizon}, and the horizon is at {real}"));
        }
        match surely {
            Start::At(surely) if surely >= horizon => Guarantee::ExpiredForReason
                .fails(format!("it has expired by {horizon}, and knew everything up to {surely}")),
            _ => Ok(()),
        }
    }

    /// Receives the news of a row; fails if it wants none of them.
    fn take_news(&mut self, shared: &Shared, given: &GivenRow) -> Verdict {
        let (name, news) = (&given.row.name, given.kinds());
        let wants = |interest: &Interest| interest.kinds_of(name).intersects(news);
        let wishes = || self.before.iter().chain([&self.interest]);
        if !wishes().any(wants) {
            let wanted = self.interest.kinds_of(name);
            return Guarantee::Truthful
                .fails(format!("it was informed of {news:?} of {name:?}, and wants {wanted:?}"));
        }
        if !wishes().any(|interest| interest.wanted_by(name, news) == given.wanted_by) {
            let by = &given.wanted_by;
            return Guarantee::Truthful
                .fails(format!("{news:?} of {name:?} are said to be wanted by {by:?} of its set"));
        }
        if given.wanted_by.len() > 1 {
            shared.witness(Witness::WantedByMany);
        }
        let instance = given.row.instance;
        if given.news.iter().skip(1).any(|(of, _)| *of != instance) {
            return Guarantee::Truthful
                .fails(format!("it was informed of {name:?} in another order: {:?}", given.news));
        }
        Ok(())
    }

    /// Receives the design documents of a delivery; fails if one is missing or never changed, or if none of them, and
    /// nothing else, is wanted.
    fn take_ddocs(&mut self, shared: &Shared, given: &GivenRow, changed: &Changed<'_>) -> Verdict {
        if given.ddocs.is_some() != self.interest.names_ddocs() {
            return Guarantee::Truthful
                .fails("it was informed of design documents unasked, or not at all".to_owned());
        }
        let Some(GivenDdocs { since, ids, may_be_any }) = &given.ddocs else { return Ok(()) };
        let (row, since, may_be_any) = (&given.row, *since, *may_be_any);
        let (db, news) = (row.db(), given.kinds());
        let ever = |id: Option<&DdocId>| changed.ever.get(&(db.clone(), id.cloned())).copied();
        for (id, at) in ids {
            if ever(Some(id)).is_none_or(|newest| *at > newest) || !since.is_before(*at) {
                return Guarantee::Truthful
                    .fails(format!("it was informed that {id} of {db:?} has changed at {at}"));
            }
            if *at > row.sequence {
                shared.witness(Witness::DdocAheadOfRow);
            }
            self.delivered_ddocs.insert((db.instance, Some(id.clone())), *at);
        }
        if may_be_any {
            if !ids.is_empty() && ever(None).is_none_or(|newest| !since.is_before(newest)) {
                return Guarantee::Truthful
                    .fails(format!("it was informed that any of {db:?} may have changed, and all had ids"));
            }
            self.delivered_ddocs.insert((db.instance, None), row.sequence);
        }
        let is_delivered = |id: Option<&DdocId>| match id {
            Some(id) => ids.iter().any(|(found, _)| found == id),
            None => may_be_any,
        };
        let left_out = Changed::of(changed.stored, &db)
            .find(|(id, at)| since.is_before(*at) && *at <= row.sequence && !is_delivered(*id));
        if let Some((id, at)) = left_out {
            return Guarantee::Atomic
                .fails(format!("it was not informed that {id:?} of {db:?} has changed at {at}"));
        }
        let besides = self
            .interest
            .kinds_of(&row.name)
            .iter()
            .any(|kind| kind != EventKind::DdocUpdated && news.contains(kind));
        let is_wanted = may_be_any || ids.iter().any(|(id, _)| self.interest.wants_ddoc(Some(id)));
        if !besides && !is_wanted {
            return Guarantee::Truthful
                .fails(format!("it was informed of {ids:?} of {db:?}, and wants {:?}", self.interest));
        }
        if self.interest.ddocs.is_some() && !besides && may_be_any {
            let is_gone = ids.is_empty() && row.is_deleted();
            shared.witness(if is_gone { Witness::DdocsGone } else { Witness::DdocMayBeAny });
        }
        Ok(())
    }

    /// A design document of the database of `row`, its newest row, that was recorded up to `to` and not delivered. A
    /// deleted database has no ids any more: the subscriber learns that any may have changed.
    fn is_owed_ddocs(&self, row: &Notification, to: Sequence, changed: &Changed<'_>) -> Option<String> {
        let wants = self.interest.kinds_of(&row.name).contains(EventKind::DdocUpdated);
        if !wants || !self.interest.names_ddocs() {
            return None;
        }
        let db = row.db();
        let delivered = |id: Option<&DdocId>| self.delivered_ddocs.get(&(db.instance, id.cloned())).copied();
        let (id, at) = Changed::of(changed.ever, &db)
            .filter(|(id, at)| self.start.is_before(*at) && *at <= to && self.interest.wants_ddoc(*id))
            .find(|(id, at)| {
                delivered(*id) < Some(*at) && (!row.is_deleted() || delivered(None) < Some(*at))
            })?;
        Some(format!("{id:?} of {db:?} at {at}, since {:?}", self.start))
    }
}
