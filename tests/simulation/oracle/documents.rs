//! The oracle for the documents of databases: the feed of a database has each document with its last edit, and nothing else; the feed
//! begins and ends with its database.
//!
//! The oracle trusts what the layer stores about its documents in the same transactions. A layer that names a wrong previous edit harms
//! only itself: the row that should have been removed stays.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use notibus::{
    changes::Change as DocChange,
    event::{Db, DbInstance, Sequence},
};

use super::{
    Oracle,
    commit::{Change, ObservedCommit, StoredChanges, Verdict},
    models::documents::{DocFeed, DocTail, DocTailId, Touched},
    stored_item::StoredItem,
};
use crate::{
    app::{AppKey, Document},
    findings::Findings,
    guarantee::Guarantee,
    kernel::Issuer,
    witness::Witness,
};

impl Oracle {
    /// Returns one of the existing databases, chosen by `random`.
    pub fn some_database(&self, random: u64) -> Option<Db> {
        let place = random % (self.databases.len() as u64).max(1);
        let (name, instance) = self.databases.iter().nth(place as usize)?;
        Some(Db::new(name.clone(), *instance))
    }

    /// Returns the existing databases.
    pub fn living(&self) -> Vec<Db> {
        self.databases.iter().map(|(name, instance)| Db::new(name.clone(), *instance)).collect()
    }

    /// Returns the position of one of the document's edits so far, chosen by `random`.
    pub fn some_edit(&self, instance: DbInstance, id: &str, random: u64) -> Option<Sequence> {
        let feed = self.documents.get(&instance)?;
        let edits: Vec<_> = feed.past.iter().filter(|(_, doc)| doc.id.as_str() == id).collect();
        edits.get((random % (edits.len() as u64).max(1)) as usize).map(|(at, _)| **at)
    }

    /// Judges the changes that a commit made to the documents of databases.
    pub(super) fn judge_documents(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        items: &StoredChanges<'_>,
    ) -> Verdict {
        if !self.has_documents {
            return Ok(());
        }
        let mut all: BTreeMap<DbInstance, Touched<'_>> = BTreeMap::new();
        let of = |feed: &[u8]| Some(DbInstance(feed.strip_prefix(b"d")?.try_into().ok()?));
        for (item, change) in items {
            match item {
                StoredItem::Row(feed, place, at) => {
                    let Some(instance) = of(feed) else { continue };
                    all.entry(instance).or_default().rows.push((*place, *at, change));
                }
                StoredItem::Topology(feed, first) => {
                    let Some(instance) = of(feed) else { continue };
                    all.entry(instance).or_default().entries.push((*first, change));
                }
                StoredItem::App(AppKey::Document(instance, id)) => {
                    let Some(value) = &change.after else { continue };
                    let document = Document::from_bytes(id, value);
                    all.entry(*instance).or_default().edits.push(document);
                }
                _ => {}
            }
        }
        let lives: BTreeSet<_> = self.databases.values().copied().collect();
        let gone: Vec<_> = self.documents.keys().filter(|known| !lives.contains(known)).copied().collect();
        for instance in gone {
            let feed = self.documents.remove(&instance).expect("it was just there");
            Self::judge_end(instance, &feed, &all.remove(&instance).unwrap_or_default())?;
            findings.witness(Witness::DocumentsRemoved);
        }
        for (instance, touched) in all {
            // A database that was created and deleted in the same commit leaves nothing behind.
            let is_left = |change: &Change| change.after.is_some();
            if !lives.contains(&instance) {
                let mut changes = touched.entries.iter().map(|(_, change)| *change);
                let mut rows = touched.rows.iter().map(|(_, _, change)| *change);
                if changes.any(is_left) || rows.any(is_left) || !touched.edits.is_empty() {
                    return Guarantee::Consistent
                        .fails(format!("documents of {instance} were written, which is gone"));
                }
                continue;
            }
            let feed = self.documents.entry(instance).or_default();
            let judged = feed
                .take_entries(findings, &touched.entries)
                .and_then(|()| feed.take_edits(findings, seen, &touched));
            judged.map_err(|broken| broken.about(format!("documents of {instance}")))?;
        }
        match lives.iter().find(|instance| !self.documents.contains_key(instance)) {
            Some(instance) => {
                Guarantee::Consistent.fails(format!("the feed of the documents of {instance} has not begun"))
            }
            None => Ok(()),
        }
    }

    /// Judges the end of `feed`, which ends with its database: none of its rows may be left.
    fn judge_end(instance: DbInstance, feed: &DocFeed, touched: &Touched<'_>) -> Verdict {
        let is_removed = |at: &Sequence| {
            touched.rows.iter().any(|(_, place, change)| place == at && change.after.is_none())
        };
        let left = feed.rows.keys().find(|at| !is_removed(at));
        let comes = touched.rows.iter().any(|(_, _, change)| change.after.is_some());
        if comes || left.is_some() {
            return Guarantee::Consistent
                .fails(format!("{instance} was deleted, and of its documents {left:?} is left"));
        }
        Ok(())
    }

    /// Judges the rows that were read in pages from the documents of `instance`.
    pub fn judge_doc_pages(&self, instance: DbInstance, read: &[Arc<DocChange>]) -> Verdict {
        let Some(feed) = self.documents.get(&instance) else { return Ok(()) };
        let read: Vec<_> = read.iter().map(|row| (row.sequence, &row.doc)).collect();
        let expected: Vec<_> = feed.rows.iter().map(|(at, (_, doc))| (*at, doc)).collect();
        if read == expected {
            return Ok(());
        }
        Guarantee::Consistent
            .fails(format!("the documents of {instance} are read as {read:?} instead of {expected:?}"))
    }

    /// Adds a tail of the documents of `instance` that begins after `start`.
    pub fn doc_tailed(&mut self, issuer: Issuer, instance: DbInstance, start: Sequence) -> DocTailId {
        self.next_reader += 1;
        let tail = DocTail { issuer, instance, start, read: BTreeSet::new(), at: start };
        self.doc_tails.insert(self.next_reader, tail);
        self.next_reader
    }

    /// Judges the rows that a tail of documents has read.
    pub fn doc_tail_read(&mut self, findings: &Findings, id: DocTailId, rows: &[Arc<DocChange>]) {
        let Some(tail) = self.doc_tails.get_mut(&id) else { return };
        let feed = self.documents.get(&tail.instance);
        for row in rows {
            let at = row.sequence;
            // The database and its feed may be gone by now, and then the rows cannot be judged.
            if feed.is_some_and(|feed| feed.past.get(&at) != Some(&row.doc)) {
                findings
                    .fail(Guarantee::Truthful.broken(format!("tail {id} has read {row:?}, which never was")));
            }
            if at <= tail.at {
                findings.fail(
                    Guarantee::Ordered
                        .broken(format!("tail {id} has read the row at {at} after that at {}", tail.at)),
                );
            }
            tail.at = at;
            tail.read.insert(at);
        }
    }

    /// Judges whether a tail could rightly end for `reason`: its database must be gone, or the tail must have read past what was certainly
    /// copied.
    pub fn doc_tail_ended(&mut self, findings: &Findings, id: DocTailId, reason: &str) {
        let Some(tail) = self.doc_tails.remove(&id) else { return };
        let is_behind = |at: &Sequence| *at > self.end && at.incarnation() < self.incarnation;
        if self.documents.contains_key(&tail.instance) && !tail.read.last().is_some_and(is_behind) {
            let reason =
                format!("tail {id} of {} has ended, and the database is there: {reason}", tail.instance);
            findings.fail(Guarantee::ExpiredForReason.broken(reason));
        }
    }

    /// Describes a row that a tail of documents must still read.
    pub(super) fn doc_tails_owe(&self) -> Option<String> {
        self.doc_tails.iter().find_map(|(id, tail)| {
            let feed = self.documents.get(&tail.instance)?;
            let left = feed.rows.keys().find(|at| **at > tail.start && !tail.read.contains(at))?;
            Some(format!("tail {id} of process {} has not read the row at {left}", tail.issuer.process))
        })
    }
}
