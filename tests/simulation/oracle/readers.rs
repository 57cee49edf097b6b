//! What subscribers and followers of shards must still receive, and what they have received.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use notibus::{
    event::{Db, DbInstance, DbName, EventKind, Kinds, Notification, Sequence},
    feed::ShardId,
};

use super::{
    Oracle,
    account::{Account, Wants},
    commit::Verdict,
    given::{Given, GivenRow, Start},
    interest::Interest,
    models::subscriber::{Changed, DeliveryOrder, Manner, Subscriber, SubscriberId},
};
use crate::{findings::Findings, guarantee::Guarantee, kernel::Issuer, witness::Witness};

/// The number of a follower of shards.
pub(crate) type FollowerId = u64;

/// A follower, which reads the feed shard by shard.
#[derive(Debug, Clone)]
pub(crate) struct Follower {
    /// The process of the follower.
    pub(super) issuer: Issuer,
    /// The rows that the follower has read.
    read: BTreeSet<Sequence>,
    /// The shards whose end the follower has received.
    ended: BTreeSet<ShardId>,
}

impl Oracle {
    /// Adds a subscriber that must receive everything after `start`.
    pub fn subscribed(
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
            interest,
            manner,
            start,
            account,
            surely: start,
            is_scanning: start == Start::Nothing,
            order: DeliveryOrder::default(),
            story: BTreeSet::new(),
            delivered_ddocs: BTreeMap::new(),
        };
        self.subscribers.insert(self.next_reader, subscriber);
        self.next_reader
    }

    /// Records that a subscriber resumes from `start`, its claimed position. Earlier deliveries still count.
    pub fn resumed(&mut self, findings: &Findings, id: SubscriberId, manner: Manner, start: Start) {
        self.judge_claim(findings, id, start, (Guarantee::Resumable, "goes on at"));
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        if start == Start::Nothing && subscriber.account.knows_any() {
            findings.witness(Witness::RestartWithinFirstScan);
            subscriber.story.insert("restarted within its first scan");
        }
        subscriber.account.resume(&self.ledger, start);
        subscriber.start = subscriber.start.min(start);
        subscriber.surely = subscriber.surely.min(start);
        subscriber.is_scanning = start == Start::Nothing;
        // Rows after the claimed position may be delivered again.
        subscriber.order.clear();
        subscriber.manner = manner;
    }

    /// Replaces the filter of a subscriber with `interest`. Newly wanted facts are due if they came after `start`, the claimed position.
    pub fn replaced(&mut self, findings: &Findings, id: SubscriberId, interest: &Interest, start: Start) {
        self.judge_claim(findings, id, start, (Guarantee::Bookmarkable, "has its filter replaced at"));
        let wants = self.wants(interest);
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        findings.witness(Witness::FilterReplaced);
        if subscriber.is_scanning && subscriber.account.knows_any() && start == Start::Nothing {
            findings.witness(Witness::ReplacedWithinFirstScan);
            subscriber.story.insert("given another filter within its first scan");
        }
        subscriber.interest = interest.clone();
        subscriber.account.replace(&self.ledger, &wants, start);
        // Rows that both filters want may be delivered again.
        subscriber.order.clear();
    }

    /// Records a subscriber's claim to have everything up to `position`: later events of the databases that existed there must reach it.
    pub fn stands(&mut self, findings: &Findings, id: SubscriberId, position: Start) {
        self.judge_claim(findings, id, position, (Guarantee::Bookmarkable, "stands at"));
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        // A barrier can name a position that was already passed. Such a claim is not news: the subscriber knows what has existed since.
        let is_news = position >= subscriber.surely;
        subscriber.surely = subscriber.surely.max(position);
        if let Start::At(position) = position {
            subscriber.is_scanning = false;
            if is_news {
                subscriber.account.stand(&self.ledger, position);
            }
        }
    }

    /// Judges a subscriber's claim that everything up to `start` was delivered to it.
    fn judge_claim(
        &self,
        findings: &Findings,
        id: SubscriberId,
        start: Start,
        (guarantee, what): (Guarantee, &str),
    ) {
        if let Start::At(position) = start
            && position >= self.horizon
            && let Some(owed) = self.is_owed(id, position)
        {
            findings.fail(guarantee.broken(format!("it {what} {position}, and {owed}")));
        }
    }

    /// Returns the kinds of events that `interest` wants for each name. For a subscriber of some design documents, changes to design
    /// documents are judged by their ids instead.
    fn wants(&self, interest: &Interest) -> Wants {
        let kinds = |name: &DbName| -> Kinds {
            let by_id = |kind: &EventKind| *kind == EventKind::DdocUpdated && interest.ddocs.is_some();
            interest.kinds_of(name).iter().filter(|kind| !by_id(kind)).collect()
        };
        self.names.iter().map(|name| (name.clone(), kinds(name))).collect()
    }

    /// Returns the position of one of the rows so far, chosen by `random`; `None` if there is none.
    pub fn some_position(&self, random: u64) -> Option<Sequence> {
        let place = random % (self.past.len() as u64).max(1);
        self.past.keys().nth(place as usize).copied()
    }

    /// Judges something that a subscriber received.
    pub fn received(&mut self, findings: &Findings, id: SubscriberId, given: &Given) {
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return };
        let taken = match given {
            Given::Failed => Ok(()),
            Given::CaughtUp { at } => {
                self.stands(findings, id, Start::At(*at));
                return;
            }
            Given::Lagged { from, to } => subscriber.lag(findings, &self.ledger, (*from, *to)),
            Given::Expired { horizon } => subscriber.expire(findings, *horizon, self.horizon),
            Given::Row(given) => self.receive_row(findings, id, given),
        };
        if let Err(broken) = taken {
            let who = self.subscribers.get(&id).map(Subscriber::describe).unwrap_or_default();
            findings.fail(broken.about(format!("subscriber {id} {who}")));
        }
    }

    /// Judges a row that a subscriber received; fails if this row cannot reach the subscriber, or if news that is due is missing.
    fn receive_row(&mut self, findings: &Findings, id: SubscriberId, given: &GivenRow) -> Verdict {
        let (row, real) = (&*given.row, self.past.get(&given.row.sequence));
        let was = |&(instance, kind): &(DbInstance, EventKind)| {
            // An instance that came and went within one fold can be reported as the previous one.
            let counters = self.recorded.get(&Db::new(row.name.clone(), instance));
            let is_gone = counters.is_some_and(|counters| counters.deleted > 0);
            self.ledger.was(&row.name, instance, kind, row.sequence) || kind == EventKind::Deleted && is_gone
        };
        let never = given.news.iter().find(|news| !was(news));
        let changed = Changed { ever: &self.reported_ddocs, stored: &self.ddocs };
        let Some(subscriber) = self.subscribers.get_mut(&id) else { return Ok(()) };
        if subscriber.order.is_last(&row.name, row.sequence) && subscriber.manner.panics {
            findings.witness(Witness::GivenAgainAfterPanic);
        }
        subscriber.take(real, row)?;
        if let Some(never) = never {
            return Guarantee::Truthful
                .fails(format!("it received {never:?} of {:?}, which never was", row.name));
        }
        subscriber.take_news(findings, given)?;
        let paid = subscriber
            .account
            .deliver(&self.ledger, &row.name, row.sequence, given.kinds())
            .map_err(|reason| Guarantee::Atomic.broken(reason))?;
        if paid > 1 {
            findings.witness(Witness::RecreatedTwiceBetween);
        }
        subscriber.take_ddocs(findings, given, &changed)
    }

    /// Records that a tombstone was dropped: a subscriber that may know the database and did not receive the tombstone has to expire.
    pub(super) fn note_drop(&self, findings: &Findings, name: &DbName) {
        let is_owed = |subscriber: &Subscriber| !subscriber.account.deletions(&self.ledger, name).is_empty();
        if self.subscribers.values().any(is_owed) {
            findings.witness(Witness::TombstoneDroppedWhileWaiting);
        }
    }

    pub(super) fn subscribers_are_owed(&self) -> Option<String> {
        self.subscribers.keys().find_map(|id| self.is_owed(*id, Sequence::MAX))
    }

    /// Describes something that happened up to `to` and that the subscriber `id` must still receive.
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

    /// Adds a follower, which reads the feed shard by shard from the very beginning.
    pub fn followed(&mut self, issuer: Issuer) -> FollowerId {
        self.next_reader += 1;
        let follower = Follower { issuer, read: BTreeSet::new(), ended: BTreeSet::new() };
        self.followers.insert(self.next_reader, follower);
        self.next_reader
    }

    /// Removes a follower, which has to start over.
    pub fn unfollowed(&mut self, id: FollowerId) {
        self.followers.remove(&id);
    }

    /// Judges rows that a follower read.
    pub fn followed_rows(&mut self, findings: &Findings, id: FollowerId, rows: &[Arc<Notification>]) {
        let Some(follower) = self.followers.get_mut(&id) else { return };
        for row in rows {
            if self.past.get(&row.sequence) != Some(row) {
                findings.fail(
                    Guarantee::Truthful
                        .broken(format!("follower {id} has read a row at {} that never was", row.sequence)),
                );
            }
            if !follower.read.insert(row.sequence) {
                findings.fail(
                    Guarantee::Unique
                        .broken(format!("follower {id} has read the row at {} twice", row.sequence)),
                );
            }
        }
    }

    /// Judges and records that a follower received the end of a shard.
    pub fn followed_over(&mut self, findings: &Findings, id: FollowerId, shard: ShardId) {
        let Some(follower) = self.followers.get_mut(&id) else { return };
        findings.witness(Witness::ShardFollowedOver);
        if !follower.ended.insert(shard) {
            findings.fail(
                Guarantee::Unique.broken(format!("follower {id} received the end of shard {shard} twice")),
            );
        }
    }

    /// Describes a row that a follower must still read.
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
