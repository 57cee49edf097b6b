//! [`DocFeed`] and [`DocTail`]: what the oracle knows about a database's documents, and about a reader of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use notibus::{
    changes::{Change as DocChange, DocSummary},
    event::{DbInstance, Sequence},
    feed::{FeedRow, ShardId},
    test_util::inspect,
};

use crate::{
    app::Document,
    findings::Findings,
    guarantee::Guarantee,
    kernel::Issuer,
    oracle::{
        commit::{Change, ObservedCommit, Verdict},
        models::consumer::Followed,
    },
    witness::Witness,
};

/// The number of a tail of documents.
pub(crate) type DocTailId = u64;

/// The feed of the documents of a database.
#[derive(Debug, Clone, Default)]
pub(crate) struct DocFeed {
    /// The shards of all topology entries so far.
    pub entries: Vec<Range<u64>>,
    pub rows: BTreeMap<Sequence, (ShardId, DocSummary)>,
    /// All rows so far, including removed ones.
    pub past: BTreeMap<Sequence, DocSummary>,
}

/// A tail of the documents of a database.
#[derive(Debug, Clone)]
pub(crate) struct DocTail {
    /// The process of the tail.
    pub issuer: Issuer,
    /// The database whose documents the tail reads.
    pub instance: DbInstance,
    /// Everything after this must reach the tail.
    pub start: Sequence,
    pub read: BTreeSet<Sequence>,
    /// The position of the tail.
    pub at: Sequence,
}

impl DocTail {
    pub fn take(&mut self, at: Sequence) {
        self.at = at;
        self.read.insert(at);
    }
}

/// The changes that a commit made to the document feed of a database.
#[derive(Default)]
pub(crate) struct Touched<'a> {
    /// The topology entries that changed.
    pub entries: Vec<(Sequence, &'a Change)>,
    pub rows: Vec<(ShardId, Sequence, &'a Change)>,
    /// The edits that the layer made.
    pub edits: Vec<Document>,
}

impl DocFeed {
    /// Returns the newest row of each document, with its shard. A document has older rows as well if a layer named wrong previous edits.
    pub fn newest(&self) -> impl Iterator<Item = (ShardId, Followed<'_>)> {
        let mut newest = BTreeMap::new();
        for (at, (shard, doc)) in &self.rows {
            newest.insert(&doc.id, (*shard, Followed { id: doc.id.as_str(), at: *at, notification: None }));
        }
        newest.into_values()
    }

    /// Whether there is or was a row at `at` with this document and revision, which was a deletion or not.
    pub fn was(&self, at: Sequence, id: &str, revision: &str, is_deleted: bool) -> bool {
        self.past.get(&at).is_some_and(|doc| {
            let DocSummary { id: known, revision: last, is_deleted: ended, .. } = doc;
            (known.as_str(), &*last.to_string(), *ended) == (id, revision, is_deleted)
        })
    }

    /// Returns the id of the document that has or had a row at `at`.
    pub fn id_at(&self, at: Sequence) -> Option<String> {
        self.past.get(&at).map(|doc| doc.id.as_str().to_owned())
    }

    /// Records new topology entries.
    pub fn take_entries(&mut self, findings: &Findings, entries: &[(Sequence, &Change)]) -> Verdict {
        for (first, change) in entries {
            if let Change { before: None, after: Some(value) } = change {
                if !self.entries.is_empty() {
                    findings.witness(Witness::DocumentsResharded);
                }
                self.entries.push(inspect::topology(*first, value).map_err(|error| error.to_string())?);
            }
        }
        Ok(())
    }

    /// Judges and records edits, and the rows that changed with them.
    pub fn take_edits(
        &mut self,
        findings: &Findings,
        seen: &ObservedCommit<'_>,
        touched: &Touched<'_>,
    ) -> Verdict {
        let mut added = BTreeMap::new();
        let mut removed = BTreeSet::new();
        for (shard, at, change) in &touched.rows {
            match (&change.before, &change.after) {
                (None, Some(value)) => {
                    let row = DocChange::from_stored(*at, value).map_err(|error| error.to_string())?;
                    added.insert(*at, (*shard, row.doc));
                }
                (Some(_), None) => drop(removed.insert(*at)),
                (before, after) if before == after => {}
                _ => return Guarantee::Consistent.fails(format!("the row at {at} was overwritten")),
            }
        }
        if let (Some(newest), Some(at)) = (self.past.keys().next_back(), added.keys().next())
            && at <= newest
        {
            return Guarantee::Ordered.fails(format!("a row stands at {at}, not after the one at {newest}"));
        }
        for edit in &touched.edits {
            let (id, at) = (&edit.doc.id, edit.edited);
            if at.versionstamp() != seen.stamp {
                return Guarantee::Consistent
                    .fails(format!("{id} is said to have been edited at {at}, which is not its commit"));
            }
            let row = match added.remove(&at) {
                Some(row) if row.1 == edit.doc => row,
                row => {
                    return Guarantee::Consistent
                        .fails(format!("{:?} was recorded at {at}, and {row:?} written", edit.doc));
                }
            };
            let before = edit.previous.filter(|before| self.id_at(*before).as_deref() == Some(id.as_str()));
            if before.is_some_and(|before| self.rows.contains_key(&before)) {
                let before = before.expect("it is there");
                if !removed.remove(&before) {
                    return Guarantee::Consistent
                        .fails(format!("the row of {id} at {before} stays beside that at {at}"));
                }
                self.rows.remove(&before);
            } else if edit.previous.is_some() || self.rows.values().any(|(_, doc)| doc.id == *id) {
                findings.witness(Witness::WrongEditNamed);
            }
            self.past.insert(at, edit.doc.clone());
            self.rows.insert(at, row);
        }
        if !added.is_empty() || !removed.is_empty() {
            return Guarantee::Consistent.fails(format!(
                "rows of no edited document were written and removed: {added:?}, {removed:?}"
            ));
        }
        Ok(())
    }
}
