//! [`Account`]: what one subscriber must still receive, by names of databases and kinds of events.
//!
//! The account is computed from the subscriber's start and interest, and from the [`Ledger`]. The only other input is which rows were
//! delivered to the subscriber, with the kinds of their news.
//!
//! - The newest fact of each wanted kind about the newest instance of a name is due if it came after the start. A row of the name at or
//!   after that fact, with that kind among its news, settles it.
//! - A deletion is due, by name, to every subscriber that may know the name: because the name existed at the subscriber's start or at a
//!   position that it claimed, or because a row of a living instance was delivered to it. A row at or after the first deletion since then,
//!   with `Deleted` among its news, settles the deletion, whichever instance the news names. A deletion stays due whatever happens to the
//!   subscriber, except that after `Expired` the subscriber knows nothing, and after `Lagged` nothing that it skipped is due.

use std::collections::BTreeMap;

use notibus::event::{DbName, EventKind, Kinds, Sequence};

use super::{given::Start, ledger::Ledger};

/// The kinds of events that are wanted for each name.
pub(super) type Wants = BTreeMap<DbName, Kinds>;

/// What a subscriber must still receive.
#[derive(Debug, Clone, Default)]
pub(super) struct Account {
    /// The wanted kinds for each name, each with the position after which its facts are due.
    from: BTreeMap<(DbName, EventKind), Start>,
    /// The newest row with news of each kind that was delivered for each name.
    delivered: BTreeMap<(DbName, EventKind), Sequence>,
    /// The names that the subscriber may know to exist, each with the newest position at which it knows that the name existed.
    known: BTreeMap<DbName, Sequence>,
}

impl Account {
    /// Opens the account of a subscriber that wants `wants`, after `start`.
    pub fn new(ledger: &Ledger, wants: &Wants, start: Start) -> Self {
        let mut account = Self::default();
        account.want(ledger, wants, start);
        account
    }

    /// Replaces the interest of the subscriber: newly wanted facts are due if they came after `start`.
    pub fn replace(&mut self, ledger: &Ledger, wants: &Wants, start: Start) {
        self.from.retain(|(name, kind), _| wants.get(name).is_some_and(|kinds| kinds.contains(*kind)));
        self.want(ledger, wants, start);
    }

    /// Records the subscriber's claim that everything up to `position` was delivered, so that it knows which names exist.
    pub fn stand(&mut self, ledger: &Ledger, position: Sequence) {
        let deletions = self.from.iter().filter(|((_, kind), from)| {
            // The subscriber already knows more than `position` says about names that it wants only from a later position on.
            *kind == EventKind::Deleted && **from <= Start::At(position)
        });
        for ((name, _), _) in deletions {
            if !self.known.contains_key(name) && ledger.existed_at(name, position) {
                self.known.insert(name.clone(), position);
            }
        }
    }

    /// Adds `wants`; newly wanted facts are due if they came after `start`.
    fn want(&mut self, ledger: &Ledger, wants: &Wants, start: Start) {
        for (name, kinds) in wants {
            let mut is_new = false;
            for kind in kinds.iter() {
                let key = (name.clone(), kind);
                is_new |= kind == EventKind::Deleted && !self.from.contains_key(&key);
                self.from.entry(key).or_insert(start);
            }
            if is_new {
                self.know(ledger, name, start);
            }
        }
    }

    /// Counts everything about `name` up to `start` as delivered.
    fn know(&mut self, ledger: &Ledger, name: &DbName, start: Start) {
        let Start::At(start) = start else { return };
        if self.known.get(name).is_some_and(|known| *known > start) {
            return;
        }
        if ledger.existed_at(name, start) {
            self.known.insert(name.clone(), start);
        } else {
            self.known.remove(name);
        }
    }

    /// Records the delivery of a row of `name` at `at` with news of these kinds. Returns how many deletions that settles; fails if a
    /// deletion is due and not among the news.
    pub fn deliver(
        &mut self,
        ledger: &Ledger,
        name: &DbName,
        at: Sequence,
        kinds: Kinds,
    ) -> Result<usize, String> {
        let owed: Vec<_> = self.deletions(ledger, name).iter().copied().filter(|due| *due <= at).collect();
        if let Some(due) = owed.first().filter(|_| !kinds.contains(EventKind::Deleted)) {
            let debt = self.describe(ledger, name, *due);
            return Err(format!("it was given {kinds:?} of {name:?} at {at}, without {debt}"));
        }
        // After a restart an older row may be delivered again.
        for kind in kinds.iter() {
            let delivered = self.delivered.entry((name.clone(), kind)).or_insert(at);
            *delivered = (*delivered).max(at);
        }
        self.know(ledger, name, Start::At(at));
        Ok(owed.len())
    }

    /// Records that the subscriber skipped everything up to `to`.
    pub fn lag(&mut self, ledger: &Ledger, to: Sequence) {
        for start in self.from.values_mut() {
            *start = (*start).max(Start::At(to));
        }
        for name in ledger.names() {
            self.know(ledger, name, Start::At(to));
        }
    }

    /// Records that the subscriber got `Expired`.
    pub fn expire(&mut self) {
        for start in self.from.values_mut() {
            *start = Start::Nothing;
        }
        self.delivered.clear();
        self.known.clear();
    }

    /// Records that the subscriber resumes, and knows everything up to `start`; earlier deliveries still count. It may have skipped more
    /// than that, and crashed before it saved its position.
    pub fn resume(&mut self, ledger: &Ledger, start: Start) {
        for ((name, _), from) in &mut self.from {
            if *from <= start {
                continue;
            }
            *from = start;
            if let Start::At(start) = start
                && ledger.existed_at(name, start)
            {
                let known = self.known.entry(name.clone()).or_insert(start);
                *known = (*known).min(start);
            }
        }
        if let Start::At(start) = start {
            self.stand(ledger, start);
        }
    }

    /// Whether the subscriber may know that any name exists.
    pub fn knows_any(&self) -> bool {
        !self.known.is_empty()
    }

    /// Returns the deletions of `name` that are due.
    pub fn deletions<'a>(&self, ledger: &'a Ledger, name: &DbName) -> &'a [Sequence] {
        let key = (name.clone(), EventKind::Deleted);
        let (Some(known), Some(from)) = (self.known.get(name), self.from.get(&key)) else { return &[] };
        let paid = self.delivered.get(&key).map_or(Start::Nothing, |paid| Start::At(*paid));
        ledger.deletions_after(name, Start::At(*known).max(*from).max(paid))
    }

    /// Describes something that happened up to `to` and is still due. A name whose newest deletion came after `to` will be delivered later.
    pub fn is_owed(&self, ledger: &Ledger, to: Sequence) -> Option<String> {
        self.is_owed_of(ledger, to, |_, _| true)
    }

    /// Describes the same, but only for the names and kinds that `is_sent` selects.
    pub fn is_owed_of(
        &self,
        ledger: &Ledger,
        to: Sequence,
        is_sent: impl Fn(&DbName, EventKind) -> bool,
    ) -> Option<String> {
        let fact = self.from.iter().find_map(|((name, kind), start)| {
            let at = ledger.newest(name, *kind).filter(|at| start.is_before(*at) && *at <= to)?;
            if !is_sent(name, *kind) {
                return None;
            }
            let is_delivered =
                self.delivered.get(&(name.clone(), *kind)).is_some_and(|delivered| *delivered >= at);
            (!is_delivered).then(|| format!("{kind:?} of {name:?} at {at}, since {start:?}"))
        });
        let deletion = || {
            self.known.keys().find_map(|name| {
                let owed = self.deletions(ledger, name);
                let is_later = |last: &Sequence| *last > to || ledger.is_shown_after(name, to);
                let due = owed.first().filter(|_| !owed.last().is_some_and(is_later))?;
                Some(self.describe(ledger, name, *due))
            })
        };
        deletion().or(fact)
    }

    /// Describes the deletion of `name` that has been due since `due`.
    fn describe(&self, ledger: &Ledger, name: &DbName, due: Sequence) -> String {
        let known = self.known.get(name).map_or_else(|| "nowhere".to_owned(), ToString::to_string);
        let dropped = if ledger.was_dropped_after(name, due) { ", whose tombstone was dropped" } else { "" };
        format!("the deletion of {name:?} at {due}{dropped}, which it knew to exist at {known}")
    }
}

pub mod tests {
    use super::*;
    use notibus::event::{DbInstance, Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    fn name() -> DbName {
        DbName::new("a").unwrap()
    }

    fn wants(kinds: impl Into<Kinds>) -> Wants {
        Wants::from([(name(), kinds.into())])
    }

    /// Makes a ledger with two instances: the first from 1 to 5, the second from 5 on.
    fn recreated() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.fold(&name(), at(1), DbInstance([1; 16]), EventKind::Created.into());
        ledger.fold(&name(), at(5), DbInstance([2; 16]), EventKind::Created.into());
        ledger
    }

    pub fn a_reader_that_may_know_a_name_is_owed_its_deletion() {
        let ledger = recreated();
        let owes = |account: &Account| account.is_owed(&ledger, Sequence::MAX).is_some();
        let deleted = wants(EventKind::Deleted);
        assert!(owes(&Account::new(&ledger, &deleted, Start::At(at(2)))));
        assert!(!owes(&Account::new(&ledger, &deleted, Start::At(at(5)))), "it knows of it");
        let mut account = Account::new(&ledger, &deleted, Start::Nothing);
        assert!(!owes(&account), "it knew nothing");
        account.deliver(&ledger, &name(), at(1), EventKind::Created.into()).unwrap();
        assert!(owes(&account));
        account.resume(&ledger, Start::Nothing);
        assert!(owes(&account), "a restart takes nothing away");
        assert!(account.deliver(&ledger, &name(), at(5), EventKind::Created.into()).is_err());
        account.deliver(&ledger, &name(), at(5), EventKind::Deleted.into()).unwrap();
        assert!(!owes(&account));
        let (mut ledger, account) = (recreated(), Account::new(&ledger, &deleted, Start::At(at(2))));
        ledger.show_end(&name(), at(9));
        assert_eq!(account.is_owed(&ledger, at(8)), None, "a later row covers it");
        assert!(account.is_owed(&ledger, at(9)).is_some());
    }

    pub fn one_who_has_expired_or_skipped_is_owed_nothing_of_before() {
        let ledger = recreated();
        let deleted = wants(EventKind::Deleted);
        let mut account = Account::new(&ledger, &deleted, Start::At(at(2)));
        account.expire();
        assert_eq!(account.is_owed(&ledger, Sequence::MAX), None);
        let mut account = Account::new(&ledger, &deleted, Start::At(at(2)));
        account.lag(&ledger, at(6));
        assert_eq!(account.is_owed(&ledger, Sequence::MAX), None);
        account.resume(&ledger, Start::At(at(3)));
        assert!(account.is_owed(&ledger, Sequence::MAX).is_some(), "it begins before that again");
    }

    pub fn what_a_new_filter_wants_is_owed_from_its_start() {
        let ledger = recreated();
        let mut account = Account::new(&ledger, &wants(EventKind::Created), Start::Nothing);
        assert!(account.is_owed(&ledger, Sequence::MAX).is_some());
        account.replace(&ledger, &wants(EventKind::Deleted), Start::At(at(2)));
        assert!(account.is_owed(&ledger, Sequence::MAX).is_some());
        account.replace(&ledger, &Wants::new(), Start::At(at(2)));
        account.replace(&ledger, &wants(EventKind::Deleted), Start::At(at(5)));
        assert_eq!(account.is_owed(&ledger, Sequence::MAX), None);
    }
}
