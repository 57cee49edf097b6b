//! [`Subscriber`]: what the oracle knows about a subscriber, and its verdicts on what a subscriber receives, and in which order.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use notibus::event::{Db, DbInstance, DbName, DdocId, EventKind, Notification, Sequence};

use crate::{
    findings::Findings,
    guarantee::Guarantee,
    kernel::Issuer,
    oracle::{
        account::Account,
        commit::Verdict,
        given::{GivenDdocs, GivenRow, Start},
        interest::Interest,
        ledger::Ledger,
    },
    witness::Witness,
};

pub(crate) type SubscriberId = u64;

/// How a subscriber receives its deliveries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Manner {
    /// The kind of receiver, as a phrase for messages.
    pub form: Cow<'static, str>,
    /// Whether the subscriber prefers to skip rows that it missed.
    pub skips: bool,
    /// Whether the subscriber panics now and then, and then gets its delivery again.
    pub panics: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Subscriber {
    /// The process of the subscriber.
    pub issuer: Issuer,
    pub interest: Interest,
    pub manner: Manner,
    /// Everything after this must reach the subscriber. The account says this more precisely, by kind of event and by name.
    pub start: Start,
    pub account: Account,
    /// Everything up to here was certainly delivered to the subscriber.
    pub surely: Start,
    /// Whether the subscriber knew nothing when it began, or when it last expired, and has claimed no other position since.
    pub is_scanning: bool,
    pub order: DeliveryOrder,
    /// The notable events in the life of the subscriber, for messages.
    pub story: BTreeSet<&'static str>,
    /// The newest delivered row with a change to each design document of each instance; without an id, the newest row with a change that
    /// may be to any of them.
    pub delivered_ddocs: BTreeMap<(DbInstance, Option<DdocId>), Sequence>,
}

/// The changed design documents that a subscriber should have received.
pub(crate) struct Changed<'a> {
    /// The last row with a change to each design document, including documents of databases that are gone.
    pub ever: &'a BTreeMap<(Db, Option<DdocId>), Sequence>,
    /// The stored rows of design documents.
    pub stored: &'a BTreeMap<(Db, Option<DdocId>), Sequence>,
}

impl<'a> Changed<'a> {
    /// Returns the design documents of the database `db` among `all`.
    pub fn of(
        all: &'a BTreeMap<(Db, Option<DdocId>), Sequence>,
        db: &'a Db,
    ) -> impl Iterator<Item = (Option<&'a DdocId>, Sequence)> {
        let own = all.range((db.clone(), None)..).take_while(move |((of, _), _)| of == db);
        own.map(|((_, id), at)| (id.as_ref(), *at))
    }
}

impl Subscriber {
    /// Receives a row; fails if this row cannot reach the subscriber.
    pub fn take(&mut self, real: Option<&Arc<Notification>>, row: &Notification) -> Verdict {
        if real.is_none_or(|real| **real != *row) {
            return Guarantee::Truthful
                .fails(format!("it was given a row at {} that never was", row.sequence));
        }
        self.order.take(&row.name, row.sequence, self.manner.panics)
    }

    /// Describes the subscriber, for messages.
    pub fn describe(&self) -> String {
        let Self { interest, manner, start, story, .. } = self;
        let story: Vec<_> = story.iter().copied().collect();
        let start = match start {
            Start::Nothing => "nothing".to_owned(),
            Start::At(start) => start.to_string(),
        };
        let exact = if interest.is_exact() { " of exact names" } else { "" };
        format!("({}{exact}, from {start} on; {})", manner.form, story.join(", "))
    }

    /// Receives `Lagged`; fails if the subscriber did not ask for that.
    pub fn lag(&mut self, findings: &Findings, ledger: &Ledger, (from, to): (Sequence, Sequence)) -> Verdict {
        findings.witness(Witness::SubscriberLagged);
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

    /// Receives `Expired`; fails if everything up to the horizon was certainly delivered to the subscriber.
    pub fn expire(&mut self, findings: &Findings, horizon: Sequence, real: Sequence) -> Verdict {
        findings.witness(Witness::SubscriberExpired);
        let surely = std::mem::replace(&mut self.surely, Start::Nothing);
        (self.start, self.is_scanning) = (Start::Nothing, true);
        self.account.expire();
        self.delivered_ddocs.clear();
        self.order.clear();
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

    /// Receives the news of a row; fails if the subscriber wants none of it.
    pub fn take_news(&mut self, findings: &Findings, given: &GivenRow) -> Verdict {
        let (name, news) = (&given.row.name, given.kinds());
        let wanted = self.interest.kinds_of(name);
        if !wanted.intersects(news) {
            return Guarantee::Truthful
                .fails(format!("it was informed of {news:?} of {name:?}, and wants {wanted:?}"));
        }
        if self.interest.wanted_by(name, news) != given.wanted_by {
            let by = &given.wanted_by;
            return Guarantee::Truthful
                .fails(format!("{news:?} of {name:?} are said to be wanted by {by:?} of its set"));
        }
        if given.wanted_by.len() > 1 {
            findings.witness(Witness::WantedByMany);
        }
        let instance = given.row.instance;
        if given.news.iter().skip(1).any(|(of, _)| *of != instance) {
            return Guarantee::Truthful
                .fails(format!("it was informed of {name:?} in another order: {:?}", given.news));
        }
        Ok(())
    }

    /// Receives the design documents of a delivery; fails if one is missing or never changed, or if neither they nor anything else in the
    /// delivery is wanted.
    pub fn take_ddocs(&mut self, findings: &Findings, given: &GivenRow, changed: &Changed<'_>) -> Verdict {
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
                findings.witness(Witness::DdocAheadOfRow);
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
            findings.witness(if is_gone { Witness::DdocsGone } else { Witness::DdocMayBeAny });
        }
        Ok(())
    }

    /// Describes a design document whose change was recorded up to `to` and not delivered; `row` is the newest row of its database. A
    /// deleted database has no ids left, so the subscriber only learns that any design document may have changed.
    pub fn is_owed_ddocs(&self, row: &Notification, to: Sequence, changed: &Changed<'_>) -> Option<String> {
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

/// The rows that were delivered to a subscriber since it began, resumed, expired or had its filter replaced, whichever was last.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeliveryOrder {
    /// The last row that was delivered for each database.
    last: BTreeMap<DbName, Sequence>,
    rows: BTreeSet<Sequence>,
}

impl DeliveryOrder {
    /// Takes the row of `name` at `at`. Fails unless the row is newer than the previous one, or was already delivered to a subscriber that
    /// `panics`: such a subscriber gets its batch again from the first row on, even if the batch has a newer row of the name.
    pub fn take(&mut self, name: &DbName, at: Sequence, panics: bool) -> Verdict {
        let is_again = !self.rows.insert(at) && panics;
        match self.last.insert(name.clone(), at) {
            Some(last) if last >= at && !is_again => {
                let guarantee = if last > at { Guarantee::Ordered } else { Guarantee::Unique };
                guarantee.fails(format!("it was informed of {name:?} at {at} after {last}"))
            }
            _ => Ok(()),
        }
    }

    /// Whether the row at `at` was the last one delivered for `name`.
    pub fn is_last(&self, name: &DbName, at: Sequence) -> bool {
        self.last.get(name) == Some(&at)
    }

    /// Forgets all rows: from now on, any row may be delivered again.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

pub mod tests {
    use super::*;
    use notibus::event::{Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    /// Returns the guarantee that the last of these rows of one name breaks, if it breaks one.
    fn broken(versions: &[u64], panics: bool) -> Option<Guarantee> {
        let (name, mut order) = (DbName::new("a").unwrap(), DeliveryOrder::default());
        let taken = versions.iter().map(|version| order.take(&name, at(*version), panics)).last().unwrap();
        taken.err().map(|broken| broken.guarantee)
    }

    /// Regression: the oracle did not expect an older row again when a callback had panicked on the second of two rows of a name in a
    /// batch, so the repeated delivery of the first row was reported as a breach of the order.
    pub fn a_batch_comes_again_from_its_first_row_on_after_a_panic() {
        assert_eq!(broken(&[1, 3, 1], true), None);
        assert_eq!(broken(&[1, 3, 1, 3], true), None);
        assert_eq!(broken(&[1, 3, 2], true), Some(Guarantee::Ordered));
        assert_eq!(broken(&[1, 3, 1], false), Some(Guarantee::Ordered));
        assert_eq!(broken(&[1, 1], false), Some(Guarantee::Unique));
    }
}
