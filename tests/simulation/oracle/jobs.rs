//! [`Jobs`]: the oracle on triggers, whose jobs derive rows from the documents of databases.
//!
//! It knows nothing of how triggers work. It sees which rows jobs write, and which process has last begun, ended or removed the mark of
//! the work on a database.

use std::collections::{BTreeMap, BTreeSet};

use notibus::{
    cursor::Cursor,
    event::{Db, DbInstance, DbName, Sequence},
    test_util::rooms,
};

use super::{
    commit::{Change, ObservedCommit, StoredChanges, Verdict},
    models::documents::DocFeed,
    stored_item::StoredItem,
};
use crate::{
    app::{AppKey, trigger},
    findings::Findings,
    guarantee::{Broken, Guarantee},
    kernel::Issuer,
    witness::Witness,
};

/// The work of a trigger on a database.
type TriggerWork = (String, DbInstance);

/// The feeds of the documents of all databases that exist.
type Feeds = BTreeMap<DbInstance, DocFeed>;

/// The work of triggers.
pub(super) struct Jobs {
    /// The names of the databases whose jobs fail forever.
    failing: Vec<DbName>,
    /// The derived rows: by document, the edit from which they were derived.
    derived: BTreeMap<TriggerWork, BTreeMap<String, Sequence>>,
    saved: BTreeSet<TriggerWork>,
    /// Work after which the job has cleaned up.
    cleaned: BTreeSet<TriggerWork>,
    /// The marks of work, and the process that has last begun or ended it.
    marks: BTreeMap<TriggerWork, Issuer>,
    parked: BTreeSet<TriggerWork>,
    /// Names with work that is listed as owed, by trigger.
    owed: BTreeSet<(String, DbName)>,
}

impl Jobs {
    /// No work yet, where the jobs of the databases with `failing` names fail forever.
    pub fn new(failing: Vec<DbName>) -> Self {
        let (derived, saved, cleaned) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let (marks, parked, owed) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self { failing, derived, saved, cleaned, marks, parked, owed }
    }

    /// Judges the changes of a commit by jobs and triggers.
    pub fn judge(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
        feeds: &Feeds,
    ) -> Verdict {
        for (item, change) in items {
            match item {
                StoredItem::App(AppKey::Derived(trigger, instance, id)) => {
                    let work = (trigger.clone(), *instance);
                    self.judge_derived(findings, seen.issuer, (work, id), change)?;
                }
                StoredItem::App(AppKey::DerivedTo(trigger, instance)) => {
                    let work = (trigger.clone(), *instance);
                    self.judge_saved(seen.issuer, &work, change, feeds)?;
                }
                StoredItem::App(AppKey::Cleaned(trigger, instance)) => {
                    self.cleaned.insert((trigger.clone(), *instance));
                }
                StoredItem::Mark(trigger, db) => {
                    let work = (trigger.clone(), db.instance);
                    self.judge_mark(findings, seen.issuer, &work, change, feeds)?;
                }
                StoredItem::Parked(trigger, db) => self.see_parked(findings, (trigger, db), change, feeds),
                StoredItem::Owed(trigger, name) => {
                    let owed = (trigger.clone(), name.clone());
                    if change.after.is_none() {
                        self.owed.remove(&owed);
                    } else if self.owed.insert(owed) {
                        findings.witness(Witness::WorkOwed);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Judges whether `issuer` may write on behalf of `work`.
    fn judge_writer(&self, issuer: Issuer, work: &TriggerWork) -> Verdict {
        let (trigger, instance) = work;
        if self.cleaned.contains(work) {
            let reason = format!("{trigger} has cleaned up after {instance}, and wrote again");
            return Guarantee::Ended.fails(reason);
        }
        match self.marks.get(work) {
            Some(begun_by) if *begun_by == issuer => Ok(()),
            begun_by => {
                let reason =
                    format!("{trigger} wrote on behalf of {instance}, which is work of {begun_by:?}");
                Guarantee::Ended.fails(reason)
            }
        }
    }

    /// Judges the change of a derived row.
    fn judge_derived(
        &mut self,
        findings: &Findings,
        issuer: Issuer,
        (work, id): (TriggerWork, &str),
        change: &Change,
    ) -> Verdict {
        let Some(value) = &change.after else {
            let rows = self.derived.entry(work).or_default();
            if rows.remove(id).is_some() && rows.is_empty() {
                findings.witness(Witness::DerivedRowsRemoved);
            }
            return Ok(());
        };
        self.judge_writer(issuer, &work)?;
        let edited = Sequence::from_bytes(value).map_err(|error| error.to_string())?;
        self.derived.entry(work).or_default().insert(id.to_owned(), edited);
        Ok(())
    }

    /// Judges the change of the saved position of `work`.
    fn judge_saved(&mut self, issuer: Issuer, work: &TriggerWork, change: &Change, feeds: &Feeds) -> Verdict {
        let Some(value) = &change.after else {
            self.saved.remove(work);
            return Ok(());
        };
        self.judge_writer(issuer, work)?;
        self.saved.insert(work.clone());
        let to = Cursor::from_bytes(value).map_err(|error| error.to_string())?;
        self.judge_position(work, to, feeds)
    }

    /// Judges the change of the mark of `work`. The position of a scan is kept in it.
    fn judge_mark(
        &mut self,
        findings: &Findings,
        issuer: Issuer,
        work: &TriggerWork,
        change: &Change,
        feeds: &Feeds,
    ) -> Verdict {
        let row = |value: &Option<bytes::Bytes>| {
            let row = value.as_ref().map(|value| rooms::cursor(value)).transpose();
            row.map_err(|error| Broken::from(error.to_string()))
        };
        let (before, after) = (row(&change.before)?, row(&change.after)?);
        let Some(after) = after else {
            self.marks.remove(work);
            return Ok(());
        };
        if before.is_none_or(|before| before.token != after.token) {
            let begun_by = self.marks.insert(work.clone(), issuer);
            if begun_by.is_some_and(|begun_by| begun_by.process != issuer.process) {
                findings.witness(Witness::TriggerTakenOver);
            }
        }
        self.judge_position(work, after.cursor, feeds)
    }

    /// Judges whether everything up to `to` was derived.
    fn judge_position(&self, work: &TriggerWork, to: Cursor, feeds: &Feeds) -> Verdict {
        let (trigger, instance) = work;
        let Some(feed) = feeds.get(instance) else { return Ok(()) };
        let rows = self.derived.get(work);
        for (id, (edited, is_deleted)) in feed.last_edits() {
            let row = rows.and_then(|rows| rows.get(id));
            let is_done = if is_deleted { row.is_none() } else { row == Some(&edited) };
            if edited <= to.position() && !is_done {
                return Guarantee::Bookmarkable.fails(format!(
                    "{trigger} has saved {to} of {instance}, and derived {row:?} from {id}, edited at {edited}"
                ));
            }
        }
        Ok(())
    }

    fn see_parked(
        &mut self,
        findings: &Findings,
        (trigger, db): (&str, &Db),
        change: &Change,
        feeds: &Feeds,
    ) {
        let work = (trigger.to_owned(), db.instance);
        if change.after.is_some() {
            if self.parked.insert(work) {
                findings.witness(Witness::JobParked);
            }
        } else if self.parked.remove(&work) {
            let is_living = feeds.contains_key(&db.instance);
            let is_done = is_living && !self.failing.contains(&db.name);
            findings.witness(if is_done { Witness::ParkedJobDone } else { Witness::ParkedDatabaseForgotten });
        }
    }

    /// Work that jobs have still to do.
    pub fn owe(&self, databases: &BTreeMap<DbName, DbInstance>, feeds: &Feeds) -> Option<String> {
        let succeeding = || databases.iter().filter(|(name, _)| !self.failing.contains(name));
        for trigger in trigger::ALL {
            for (name, instance) in succeeding() {
                let edits = feeds.get(instance)?.last_edits().into_iter();
                let expected: BTreeMap<_, _> = edits
                    .filter_map(|(id, (edited, is_deleted))| (!is_deleted).then_some((id, edited)))
                    .collect();
                let rows = self.derived.get(&(trigger.to_owned(), *instance)).into_iter().flatten();
                let found: BTreeMap<_, _> = rows.map(|(id, edited)| (id.as_str(), *edited)).collect();
                if found != expected {
                    return Some(format!("{trigger} has {found:?} of {name:?}, instead of {expected:?}"));
                }
            }
        }
        let derived = self.derived.iter().filter(|(_, rows)| !rows.is_empty()).map(|(work, _)| work);
        let mut known = derived.chain(&self.saved).chain(self.marks.keys()).chain(&self.parked);
        if let Some((trigger, instance)) = known.find(|(_, instance)| !feeds.contains_key(instance)) {
            return Some(format!("{trigger} has not cleaned up after {instance}, which is gone"));
        }
        let owed = self.owed.iter().find(|(_, name)| !self.failing.contains(name));
        owed.map(|(trigger, name)| format!("{trigger} has listed {name:?} as owed"))
    }
}
