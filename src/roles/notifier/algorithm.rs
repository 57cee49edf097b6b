//! How a fold turns the present row of a name and the observed counters into the next row: a pure function.

use crate::base::{
    encoding::{Counters, Sequence, Tally, Versionstamp},
    event::{DbInstance, DbName, EventKind, Kinds},
    notification::{DRAFT, Notification, Replaced},
};

/// The unfolded events of one instance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Observed {
    /// The events of all slots of the instance.
    pub tally: Tally,
    /// Whether an id of a changed design document is waiting.
    pub has_ddocs: bool,
    /// The versionstamp of the newest transaction that recorded an event, if producers record versionstamps.
    pub versionstamp: Option<Versionstamp>,
}

impl Observed {
    fn kinds(&self) -> Kinds {
        let ddocs = if self.has_ddocs { EventKind::DdocUpdated.into() } else { Kinds::NONE };
        Kinds::counted(&self.tally.counters) | ddocs
    }

    fn is_deleted(&self) -> bool {
        self.tally.counters.deleted > 0
    }
}

/// The result of folding one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Folded {
    /// The new row, as a draft; `None` if the row stays as it is.
    pub row: Option<Notification>,
    /// Events of instances that had already been replaced.
    pub stale: Counters,
}

/// Folds the observed events of `name` into its row `present`.
///
/// Events of the present instance come first, then those of instances that are already deleted, then those of the living one. An instance
/// counts as already replaced if it is neither the present one nor created by these events; its events are stale. If the name has no row,
/// no instance can have been replaced, and any counted event brings the instance into the feed. Ids of design documents without a count are
/// not events.
pub(super) fn fold(
    name: &DbName,
    present: Option<Notification>,
    observed: Vec<(DbInstance, Observed)>,
    written_ms: u64,
) -> Folded {
    let mut stale = Counters::ZERO;
    let mut kinds = Kinds::NONE;
    let known = present.is_some();
    let previous = present.as_ref().map(|row| row.sequence);
    let mut row = present.map(|present| Draft { row: present, is_new: false });
    let present_instance = row.as_ref().map(|draft| draft.row.instance);

    let (own, mut others): (Vec<_>, Vec<_>) =
        observed.into_iter().partition(|(instance, _)| Some(*instance) == present_instance);
    for (_, events) in own {
        kinds |= events.kinds();
        row.as_mut().expect("the present instance has a row").add(&events);
    }

    others.sort_by_key(|(instance, events)| {
        (!events.is_deleted(), events.tally.counters.created > 0, *instance)
    });
    for (instance, events) in others {
        // A fold takes all counters of an instance before the first of its design documents. So ids without counters are left over from a
        // fold that stopped in between. That fold wrote the row of the instance, and the row has been removed since.
        if events.tally.counters == Counters::ZERO {
            continue;
        }
        let lives = row.as_ref().is_some_and(|draft| draft.row.deleted_at.is_none());
        let replaced_before = known && (events.tally.counters.created == 0 || (events.is_deleted() && lives));
        if replaced_before {
            stale += events.tally.counters;
            continue;
        }
        kinds |= events.kinds();
        let mut draft = Draft::first(name, instance);
        draft.row.replaced = row.and_then(Draft::replaced);
        draft.add(&events);
        row = Some(draft);
    }

    let row = row.filter(|_| !kinds.is_empty()).map(|draft| Notification {
        previous,
        kinds,
        written_ms,
        ..draft.at_draft()
    });
    Folded { row, stale }
}

/// A row that is being built.
struct Draft {
    /// The row. Its positions are [`DRAFT`] wherever these events set them.
    row: Notification,
    /// Whether no reader can have seen a row of the instance so far.
    is_new: bool,
}

impl Draft {
    /// Returns an empty row for a new instance.
    fn first(name: &DbName, instance: DbInstance) -> Self {
        let row = Notification {
            sequence: DRAFT,
            name: name.clone(),
            instance,
            kinds: Kinds::NONE,
            totals: Counters::ZERO,
            created_at: None,
            updated_at: None,
            ddoc_updated_at: None,
            deleted_at: None,
            replaced: None,
            previous: None,
            versionstamp: None,
            written_ms: 0,
        };
        Self { row, is_new: true }
    }

    fn add(&mut self, events: &Observed) {
        let kinds = events.kinds();
        let set = |at: &mut Option<Sequence>, kind| {
            if kinds.contains(kind) {
                *at = Some(DRAFT);
            }
        };
        set(&mut self.row.created_at, EventKind::Created);
        set(&mut self.row.updated_at, EventKind::Updated);
        set(&mut self.row.ddoc_updated_at, EventKind::DdocUpdated);
        set(&mut self.row.deleted_at, EventKind::Deleted);
        self.row.totals += events.tally.counters;
        // The events folded now are newer, even if a move to another store made their versionstamps smaller.
        self.row.versionstamp = events.versionstamp.or(self.row.versionstamp);
    }

    /// Returns how the row of the next instance describes this one. An instance that came and went unseen is skipped in favour of the one
    /// before it, which readers know.
    fn replaced(self) -> Option<Replaced> {
        if self.is_new && self.row.replaced.is_some() {
            return self.row.replaced;
        }
        let deleted_at = self.row.deleted_at.unwrap_or(DRAFT);
        Some(Replaced { instance: self.row.instance, deleted_at })
    }

    /// Returns the row as a draft of its next version.
    fn at_draft(self) -> Notification {
        Notification { sequence: DRAFT, ..self.row }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::encoding::Incarnation;

    const A: DbInstance = DbInstance([1; 16]);
    const B: DbInstance = DbInstance([2; 16]);

    fn name() -> DbName {
        DbName::new("db").unwrap()
    }

    fn events(created: u64, deleted: u64, updated: u64, ddoc_updated: u64) -> Observed {
        let counters = Counters { created, deleted, updated, ddoc_updated };
        Observed { tally: counters.into(), ..Observed::default() }
    }

    fn at(version: u64) -> Sequence {
        Sequence::new(Incarnation(0), Versionstamp::new(version, 0), 0)
    }

    /// Folds `observed` into `present`, and commits the row at `version`.
    fn step(
        present: Option<&Notification>,
        observed: Vec<(DbInstance, Observed)>,
        version: u64,
    ) -> (Option<Notification>, Counters) {
        let folded = fold(&name(), present.cloned(), observed, 0);
        let row = folded.row.map(|row| Notification::from_bytes(at(version), &row.to_bytes()).unwrap());
        (row, folded.stale)
    }

    fn kinds(row: &Notification, cursor: Sequence) -> Vec<(DbInstance, EventKind)> {
        row.news_since(cursor).iter().collect()
    }

    #[test]
    fn events_add_up_over_rows() {
        let (first, _) = step(None, vec![(A, events(1, 0, 2, 0))], 1);
        let first = first.unwrap();
        let (second, _) = step(Some(&first), vec![(A, events(0, 0, 3, 1))], 2);
        let second = second.unwrap();
        assert_eq!(second.totals, Counters { created: 1, deleted: 0, updated: 5, ddoc_updated: 1 });
        assert_eq!(
            (second.created_at, second.updated_at, second.ddoc_updated_at),
            (Some(at(1)), Some(at(2)), Some(at(2)))
        );
        assert_eq!(second.kinds.iter().collect::<Vec<_>>(), [EventKind::Updated, EventKind::DdocUpdated]);
    }

    #[test]
    fn nothing_observed_changes_nothing() {
        let (first, _) = step(None, vec![(A, events(1, 0, 0, 0))], 1);
        assert_eq!(step(first.as_ref(), vec![(A, Observed::default())], 2), (None, Counters::ZERO));
        assert_eq!(step(None, vec![], 2), (None, Counters::ZERO));
    }

    #[test]
    fn a_recreation_within_one_fold_delivers_both_instances() {
        let (first, _) = step(None, vec![(B, events(1, 0, 0, 0))], 1);
        let (second, stale) = step(first.as_ref(), vec![(A, events(1, 0, 1, 0)), (B, events(0, 1, 4, 0))], 2);
        let second = second.unwrap();
        assert_eq!(stale, Counters::ZERO);
        assert_eq!((second.instance, second.is_deleted()), (A, false));
        assert_eq!(second.totals, Counters { created: 1, deleted: 0, updated: 1, ddoc_updated: 0 });
        assert_eq!(
            kinds(&second, at(1)),
            [(B, EventKind::Deleted), (A, EventKind::Created), (A, EventKind::Updated)]
        );
    }

    #[test]
    fn a_recreation_after_the_tombstone_is_no_second_deletion() {
        let (first, _) = step(None, vec![(A, events(1, 0, 0, 0))], 1);
        let (gone, _) = step(first.as_ref(), vec![(A, events(0, 1, 0, 0))], 2);
        let gone = gone.unwrap();
        assert!(gone.is_deleted());
        let (back, _) = step(Some(&gone), vec![(B, events(1, 0, 0, 0))], 3);
        let back = back.unwrap();
        assert_eq!(kinds(&back, at(2)), [(B, EventKind::Created)]);
        assert_eq!(kinds(&back, at(1)), [(A, EventKind::Deleted), (B, EventKind::Created)]);
        // Later updates keep the deletion for late readers.
        let (later, _) = step(Some(&back), vec![(B, events(0, 0, 1, 0))], 4);
        assert_eq!(kinds(&later.unwrap(), at(1))[0], (A, EventKind::Deleted));
    }

    #[test]
    fn an_instance_that_came_and_went_unseen_does_not_hide_the_one_readers_know() {
        const C: DbInstance = DbInstance([3; 16]);
        let (first, _) = step(None, vec![(A, events(1, 0, 0, 0))], 1);
        let all = vec![(A, events(0, 1, 0, 0)), (B, events(1, 1, 0, 0)), (C, events(1, 0, 0, 0))];
        let (row, _) = step(first.as_ref(), all, 2);
        assert_eq!(kinds(&row.unwrap(), at(1)), [(A, EventKind::Deleted), (C, EventKind::Created)]);
    }

    #[test]
    fn events_of_a_replaced_instance_are_stale() {
        let (first, _) = step(None, vec![(B, events(1, 0, 0, 0))], 1);
        let late = events(0, 1, 2, 0);
        let (row, stale) = step(first.as_ref(), vec![(A, late.clone())], 2);
        assert_eq!((row, stale), (None, late.tally.counters));
        let unseen = events(1, 1, 0, 0);
        let (row, stale) = step(first.as_ref(), vec![(A, unseen.clone())], 2);
        assert_eq!(
            (row, stale),
            (None, unseen.tally.counters),
            "it must have been replaced by the one that lives"
        );
    }

    #[test]
    fn a_database_older_than_the_bus_is_adopted_by_any_event() {
        let (row, stale) = step(None, vec![(A, events(0, 0, 1, 0))], 1);
        let row = row.unwrap();
        assert_eq!((row.created_at, stale), (None, Counters::ZERO));
        assert_eq!(kinds(&row, Sequence::MIN), [(A, EventKind::Updated)]);
        let (row, _) = step(None, vec![(B, events(0, 1, 0, 0)), (A, events(1, 0, 0, 0))], 1);
        assert_eq!(row.unwrap().instance, A, "the living one comes last");
    }

    #[test]
    fn an_id_without_a_count_is_a_ddoc_update() {
        let (first, _) = step(None, vec![(A, events(1, 0, 0, 0))], 1);
        let only_id = Observed { has_ddocs: true, ..Observed::default() };
        let (row, _) = step(first.as_ref(), vec![(A, only_id)], 2);
        assert_eq!(kinds(&row.unwrap(), at(1)), [(A, EventKind::DdocUpdated)]);
    }

    #[test]
    fn an_id_without_a_count_is_no_sign_of_life() {
        let only_id = Observed { has_ddocs: true, ..Observed::default() };
        assert_eq!(step(None, vec![(A, only_id.clone())], 1), (None, Counters::ZERO));
        let (row, _) = step(None, vec![(A, only_id), (B, events(0, 1, 0, 0))], 1);
        assert_eq!(row.unwrap().instance, B, "only counted events make a row");
    }
}
