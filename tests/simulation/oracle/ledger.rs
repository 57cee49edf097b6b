//! [`Ledger`]: every fact that a fold has made visible, by the name of its database.
//!
//! The ledger is computed from the recorded events and from the counters that folds took. What rows say about earlier instances and times
//! is not used. A name has at most one living instance: when a fold makes another one visible, the previous one is gone at that moment,
//! even if its own deletion was not folded.

use std::collections::BTreeMap;

use notibus::event::{DbInstance, DbName, EventKind, Kinds, Sequence};

use super::given::Start;

#[derive(Debug, Clone, Default)]
pub(super) struct Ledger(BTreeMap<DbName, Facts>);

/// The state of a name that readers of the feed see from a certain row on.
#[derive(Debug, Clone, Copy)]
struct Visible {
    /// The position of the row.
    at: Sequence,
    instance: DbInstance,
    lives: bool,
}

#[derive(Debug, Clone, Default)]
struct Facts {
    /// The visible states, in the order of their rows.
    rows: Vec<Visible>,
    /// The rows that show that a visible instance was gone.
    deletions: Vec<Sequence>,
    /// The newest fact of each kind about the newest instance.
    newest: BTreeMap<EventKind, Sequence>,
    first: BTreeMap<(DbInstance, EventKind), Sequence>,
    /// The tombstones that were dropped.
    dropped: Vec<Sequence>,
    /// The last row that reports the end of an instance that no reader can have known, because it came and went within one fold.
    shown: Option<Sequence>,
}

impl Facts {
    /// Whether the newest row is a tombstone that was dropped.
    fn is_dropped(&self) -> bool {
        self.rows.last().is_some_and(|row| self.dropped.last() == Some(&row.at))
    }
}

impl Ledger {
    /// Records that a fold made `kinds` of `instance` visible in a row of `name` at `at`.
    pub fn fold(&mut self, name: &DbName, at: Sequence, instance: DbInstance, kinds: Kinds) {
        let facts = self.0.entry(name.clone()).or_default();
        let before = facts.rows.last().copied();
        if let Some(before) = before.filter(|before| before.instance != instance) {
            facts.newest.clear();
            if before.lives {
                facts.deletions.push(at);
                facts.first.entry((before.instance, EventKind::Deleted)).or_insert(at);
            }
        }
        for kind in kinds.iter() {
            facts.newest.insert(kind, at);
            facts.first.entry((instance, kind)).or_insert(at);
        }
        let is_deleted = kinds.contains(EventKind::Deleted);
        if is_deleted && facts.deletions.last() != Some(&at) {
            facts.deletions.push(at);
        }
        let was_deleted = before.is_some_and(|before| before.instance == instance && !before.lives);
        facts.rows.push(Visible { at, instance, lives: !is_deleted && !was_deleted });
    }

    /// Records that the row of `name` at `at` reports an instance that came and went within its fold.
    pub fn show_end(&mut self, name: &DbName, at: Sequence) {
        self.0.entry(name.clone()).or_default().shown = Some(at);
    }

    /// Whether a row of `name` after `to` reports an instance that came and went within its fold, and so also covers an earlier end.
    pub fn is_shown_after(&self, name: &DbName, to: Sequence) -> bool {
        self.0.get(name).is_some_and(|facts| facts.shown > Some(to))
    }

    /// Records that the tombstone of `name` at `at` was dropped.
    pub fn drop_tombstone(&mut self, name: &DbName, at: Sequence) {
        self.0.entry(name.clone()).or_default().dropped.push(at);
    }

    /// Returns the names about which there is any fact.
    pub fn names(&self) -> impl Iterator<Item = &DbName> {
        self.0.keys()
    }

    /// Whether `name` existed for a reader that has seen everything up to `at`.
    pub fn existed_at(&self, name: &DbName, at: Sequence) -> bool {
        self.0.get(name).is_some_and(|facts| {
            let rows = facts.rows.partition_point(|row| row.at <= at);
            rows > 0 && facts.rows[rows - 1].lives
        })
    }

    /// Returns the rows after `after` that show that an instance of `name` was gone.
    pub fn deletions_after(&self, name: &DbName, after: Start) -> &[Sequence] {
        self.0.get(name).map_or(&[], |facts| {
            &facts.deletions[facts.deletions.partition_point(|deleted| !after.is_before(*deleted))..]
        })
    }

    /// Returns the newest fact of this kind about the newest instance of `name`, unless its tombstone was dropped.
    pub fn newest(&self, name: &DbName, kind: EventKind) -> Option<Sequence> {
        let facts = self.0.get(name).filter(|facts| !facts.is_dropped())?;
        facts.newest.get(&kind).copied()
    }

    /// Whether this event of the instance `instance` of `name` was a fact as of the row at `at`.
    pub fn was(&self, name: &DbName, instance: DbInstance, kind: EventKind, at: Sequence) -> bool {
        let first = self.0.get(name).and_then(|facts| facts.first.get(&(instance, kind)));
        first.is_some_and(|first| *first <= at)
    }

    /// Whether a tombstone of `name` at or after `at` was dropped.
    pub fn was_dropped_after(&self, name: &DbName, at: Sequence) -> bool {
        self.0.get(name).is_some_and(|facts| facts.dropped.last().is_some_and(|dropped| *dropped >= at))
    }
}

pub mod tests {
    use super::*;
    use notibus::event::{Incarnation, Versionstamp};

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    pub fn the_creation_of_another_instance_is_the_deletion_of_the_one_before() {
        let (name, mut ledger) = (DbName::new("a").unwrap(), Ledger::default());
        let (one, two, three) = (DbInstance([1; 16]), DbInstance([2; 16]), DbInstance([3; 16]));
        ledger.fold(&name, at(1), one, EventKind::Created.into());
        ledger.fold(&name, at(3), two, EventKind::Created.into());
        assert_eq!(ledger.deletions_after(&name, Start::At(at(1))), [at(3)]);
        assert!(ledger.was(&name, one, EventKind::Deleted, at(3)));
        assert!(ledger.existed_at(&name, at(2)) && !ledger.existed_at(&name, at(0)));
        ledger.fold(&name, at(5), two, EventKind::Deleted.into());
        assert!(!ledger.existed_at(&name, at(5)));
        assert_eq!(ledger.newest(&name, EventKind::Deleted), Some(at(5)));
        ledger.drop_tombstone(&name, at(5));
        assert_eq!(ledger.newest(&name, EventKind::Deleted), None);
        ledger.fold(&name, at(7), three, EventKind::Created.into());
        assert_eq!(
            ledger.deletions_after(&name, Start::At(at(1))),
            [at(3), at(5)],
            "a tombstone is no second deletion"
        );
        assert_eq!(ledger.newest(&name, EventKind::Created), Some(at(7)));
        assert!(ledger.was_dropped_after(&name, at(4)));
    }
}
