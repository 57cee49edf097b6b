//! The oracle on the documents of databases: the feed of a database has each document with its last edit, and nothing
//! else; the feed begins and ends with its database.
//!
//! It trusts what the layer keeps of its documents in the same transactions. A layer that names a wrong previous edit
//! harms only itself: the row that it should have removed stays.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    Change, Issuer, Items, ObservedCommit, Oracle, Shared, StoredItem, Verdict, Witness,
    history::{Row, Seen, Text},
};
use crate::{
    base::{
        encoding::Sequence,
        event::{Db, DbInstance},
    },
    front::simulation::{
        app::{AppKey, Document},
        guarantee::{Broken, Guarantee},
    },
    roles::changes::{Change as DocChange, DocSummary},
    state::{
        feed::FeedRow,
        keys::{FeedId, Layout, ShardId, TopologyRow},
        routing::{SchemeId, Schemes},
    },
};

/// The number of a tail of documents.
pub(in crate::front::simulation) type DocTailId = u64;

/// The feed of the documents of a database.
#[derive(Debug, Default)]
pub(super) struct DocFeed {
    /// The present topology entries.
    topology: BTreeMap<Sequence, TopologyRow>,
    /// All topology entries so far.
    entries: Vec<TopologyRow>,
    rows: BTreeMap<Sequence, (ShardId, DocSummary)>,
    /// All rows so far.
    past: BTreeMap<Sequence, DocSummary>,
}

/// A tail of the documents of a database.
#[derive(Debug)]
pub(super) struct DocTail {
    /// Its process.
    pub issuer: Issuer,
    /// Its database.
    pub instance: DbInstance,
    /// Everything after this is owed to it.
    start: Sequence,
    read: BTreeSet<Sequence>,
    /// Its position.
    pub at: Sequence,
}

#[cfg(feature = "http")]
impl DocTail {
    pub fn take(&mut self, at: Sequence) {
        self.at = at;
        self.read.insert(at);
    }
}

/// The changes of a commit to the feed of a database.
#[derive(Default)]
struct Touched<'a> {
    /// Changes of topology entries.
    entries: Vec<(Sequence, &'a Change)>,
    rows: Vec<(ShardId, Sequence, &'a Change)>,
    /// The edits of the layer.
    edits: Vec<Document>,
}

impl DocFeed {
    /// The shards and positions of its rows.
    pub fn places(&self) -> impl Iterator<Item = (ShardId, Sequence)> {
        self.rows.iter().map(|(at, (shard, _))| (*shard, *at))
    }

    /// The last edit of each of its documents, and whether that was the deletion of the document.
    pub fn last_edits(&self) -> BTreeMap<&str, (Sequence, bool)> {
        self.past.iter().map(|(at, doc)| (doc.id.as_str(), (*at, doc.is_deleted))).collect()
    }

    /// All topology entries so far.
    pub fn entries(&self) -> &[TopologyRow] {
        &self.entries
    }

    /// Whether there is or was a row at `at` of this document, revision and kind.
    #[cfg(feature = "http")]
    pub fn was(&self, at: Sequence, id: &str, revision: &str, is_deleted: bool) -> bool {
        self.past.get(&at).is_some_and(|doc| {
            let DocSummary { id: known, revision: last, is_deleted: ended, .. } = doc;
            (known.as_str(), &*last.to_string(), *ended) == (id, revision, is_deleted)
        })
    }

    /// The document of which there is or was a row at `at`.
    pub fn id_at(&self, at: Sequence) -> Option<String> {
        self.past.get(&at).map(|doc| doc.id.as_str().to_owned())
    }

    /// Judges and records changes of topology entries.
    fn take_entries(&mut self, shared: &Shared, entries: &[(Sequence, &Change)]) -> Verdict {
        for (first, change) in entries {
            let Some(value) = &change.after else {
                let entry = self.topology.remove(first);
                let is_used = |entry: &TopologyRow| self.places().any(|(shard, _)| entry.has(shard));
                if entry.is_none_or(|entry| !entry.closed || is_used(&entry)) {
                    return Guarantee::Kept
                        .fails(format!("the topology entry of {first} was dropped, and is needed"));
                }
                shared.witness(Witness::DocumentTopologyDropped);
                continue;
            };
            let entry = TopologyRow::from_bytes(*first, value).map_err(|error| error.to_string())?;
            if change.before.is_none() {
                let next = self.entries.last().map_or(1, |last| last.next_shard().0);
                if entry.shards().next().is_some_and(|shard| shard.0 < next) {
                    return Guarantee::Consistent.fails(format!("a shard id was used again: {entry:?}"));
                }
                if !self.entries.is_empty() {
                    shared.witness(Witness::DocumentsResharded);
                }
                self.entries.push(entry.clone());
            }
            self.topology.insert(*first, entry);
        }
        let open = self.topology.values().filter(|entry| !entry.closed).count();
        if open != 1 || self.topology.values().next_back().is_none_or(|last| last.closed) {
            return Guarantee::Consistent.fails(format!("{open} topology entries are open"));
        }
        Ok(())
    }

    /// The shard where a row of `id` belongs now.
    fn shard_of(&self, id: &str) -> Result<ShardId, Broken> {
        let open = self.topology.values().next_back().ok_or("there is no topology")?;
        let Layout::Sharded { scheme, first, count } = open.layout else {
            return Guarantee::Consistent.fails("the open entry is a legacy range".to_owned());
        };
        let place = Schemes::default().place(SchemeId(scheme), id.as_bytes(), count);
        let place = place.map_err(|error| error.to_string())?;
        Ok(ShardId(first.0 + u64::from(place)))
    }

    /// Judges and records edits, and the changes of rows.
    fn take_edits(&mut self, shared: &Shared, seen: &ObservedCommit<'_>, touched: &Touched<'_>) -> Verdict {
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
        for edit in &touched.edits {
            let (id, at) = (&edit.doc.id, edit.edited);
            if at.versionstamp() != seen.stamp {
                return Guarantee::Consistent
                    .fails(format!("{id} is said to have been edited at {at}, which is not its commit"));
            }
            let expected = (self.shard_of(id.as_str())?, edit.doc.clone());
            match added.remove(&at) {
                Some(row) if row == expected => {}
                row => {
                    return Guarantee::Consistent
                        .fails(format!("{expected:?} was recorded at {at}, and {row:?} written"));
                }
            }
            let before = edit.previous.filter(|before| self.id_at(*before).as_deref() == Some(id.as_str()));
            if before.is_some_and(|before| self.rows.contains_key(&before)) {
                let before = before.expect("it is there");
                if !removed.remove(&before) {
                    return Guarantee::Consistent
                        .fails(format!("the row of {id} at {before} stays beside that at {at}"));
                }
                self.rows.remove(&before);
            } else if edit.previous.is_some() || self.rows.values().any(|(_, doc)| doc.id == *id) {
                shared.witness(Witness::WrongEditNamed);
            }
            self.past.insert(at, edit.doc.clone());
            self.rows.insert(at, expected);
        }
        if !added.is_empty() || !removed.is_empty() {
            return Guarantee::Consistent.fails(format!(
                "rows of no edited document were written and removed: {added:?}, {removed:?}"
            ));
        }
        Ok(())
    }
}

impl Oracle {
    /// One of the present databases, as `random` decides.
    pub fn some_database(&self, random: u64) -> Option<Db> {
        let place = random % (self.databases.len() as u64).max(1);
        let (name, instance) = self.databases.iter().nth(place as usize)?;
        Some(Db::new(name.clone(), *instance))
    }

    /// The present databases.
    pub fn living(&self) -> Vec<Db> {
        self.databases.iter().map(|(name, instance)| Db::new(name.clone(), *instance)).collect()
    }

    /// One of the edits of a document so far, as `random` decides.
    pub fn some_edit(&self, instance: DbInstance, id: &str, random: u64) -> Option<Sequence> {
        let feed = self.documents.get(&instance)?;
        let edits: Vec<_> = feed.past.iter().filter(|(_, doc)| doc.id.as_str() == id).collect();
        edits.get((random % (edits.len() as u64).max(1)) as usize).map(|(at, _)| **at)
    }

    /// Judges the changes of a commit to documents.
    pub(super) fn judge_documents(
        &mut self,
        shared: &Shared,
        seen: &ObservedCommit<'_>,
        items: &Items<'_>,
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
                StoredItem::Newest(feed, _) | StoredItem::Pulse(feed) | StoredItem::Horizon(feed)
                    if of(feed).is_some() && change.after.is_some() =>
                {
                    return Guarantee::Consistent
                        .fails(format!("{item:?} was written, and is kept of no documents"));
                }
                StoredItem::App(AppKey::Document(instance, id)) => {
                    let Some(value) = &change.after else { continue };
                    let document = Document::from_bytes(id, value).map_err(|error| error.to_string())?;
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
            shared.witness(Witness::DocumentsRemoved);
        }
        for (instance, touched) in all {
            // A database that came and went within the commit leaves nothing.
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
                .take_entries(shared, &touched.entries)
                .and_then(|()| feed.take_edits(shared, seen, &touched));
            judged.map_err(|broken| broken.about(format!("documents of {instance}")))?;
        }
        match lives.iter().find(|instance| !self.documents.contains_key(instance)) {
            Some(instance) => {
                Guarantee::Consistent.fails(format!("the feed of the documents of {instance} has not begun"))
            }
            None => Ok(()),
        }
    }

    /// Judges the end of `feed` with its database: nothing of it may be left.
    fn judge_end(instance: DbInstance, feed: &DocFeed, touched: &Touched<'_>) -> Verdict {
        let is_removed = |at: &Sequence| {
            touched.rows.iter().any(|(_, place, change)| place == at && change.after.is_none())
        };
        let left = feed.rows.keys().find(|at| !is_removed(at));
        let entries = touched.entries.iter().filter(|(_, change)| change.after.is_none()).count();
        let comes = touched.rows.iter().any(|(_, _, change)| change.after.is_some());
        if comes || left.is_some() || entries != feed.topology.len() {
            return Guarantee::Consistent
                .fails(format!("{instance} was deleted, and of its documents {left:?} is left"));
        }
        Ok(())
    }

    /// Whether `pool` belongs to a group of the documents of a deleted database.
    pub(super) fn is_pool_of_gone(&self, pool: &str) -> bool {
        let instance = pool.strip_prefix("group/").and_then(|rest| rest.split_once('/'));
        let Some((instance, _)) = instance.filter(|(instance, _)| *instance != "notifications") else {
            return false;
        };
        !self.documents.keys().any(|known| known.to_string() == instance)
    }

    /// Judges a key of the feed of documents `feed` at the end.
    pub(super) fn judge_left_of_documents(&self, feed: &[u8]) -> Verdict {
        let known = self.documents.keys().any(|instance| FeedId::documents(*instance).bytes() == feed);
        if known {
            Ok(())
        } else {
            Guarantee::Consistent.fails(format!("something of the documents {feed:?} was left behind"))
        }
    }

    /// Judges the rows read in pages of the documents of `instance`.
    pub fn judge_doc_pages(&mut self, instance: DbInstance, read: &[Arc<DocChange>]) -> Verdict {
        self.keep(|| Seen::DocPages { instance: Text(instance), rows: Row::of_docs(read) });
        let Some(feed) = self.documents.get(&instance) else { return Ok(()) };
        let read: Vec<_> = read.iter().map(|row| (row.sequence, &row.doc)).collect();
        let expected: Vec<_> = feed.rows.iter().map(|(at, (_, doc))| (*at, doc)).collect();
        if read == expected {
            return Ok(());
        }
        Guarantee::Consistent
            .fails(format!("the documents of {instance} are read as {read:?} instead of {expected:?}"))
    }

    /// Adds a tail of the documents of `instance`, after `start`.
    pub fn doc_tailed(&mut self, issuer: Issuer, instance: DbInstance, start: Sequence) -> DocTailId {
        self.next_reader += 1;
        let id = self.next_reader;
        self.keep(|| Seen::DocTailed { id, by: issuer.into(), instance: Text(instance), start });
        let tail = DocTail { issuer, instance, start, read: BTreeSet::new(), at: start };
        self.doc_tails.insert(self.next_reader, tail);
        self.next_reader
    }

    /// Judges rows that a tail of documents has read.
    pub fn doc_tail_read(&mut self, shared: &Shared, id: DocTailId, rows: &[Arc<DocChange>]) {
        self.keep(|| Seen::DocTailRead { id, rows: Row::of_docs(rows) });
        let Some(tail) = self.doc_tails.get_mut(&id) else { return };
        let feed = self.documents.get(&tail.instance);
        for row in rows {
            let at = row.sequence;
            // The database and its feed may be gone by now.
            if feed.is_some_and(|feed| feed.past.get(&at) != Some(&row.doc)) {
                shared
                    .fail(Guarantee::Truthful.broken(format!("tail {id} has read {row:?}, which never was")));
            }
            if at <= tail.at {
                shared.fail(
                    Guarantee::Ordered
                        .broken(format!("tail {id} has read the row at {at} after that at {}", tail.at)),
                );
            }
            tail.at = at;
            tail.read.insert(at);
        }
    }

    /// Judges the end of a tail for `reason`, which is right only if the database is gone.
    pub fn doc_tail_ended(&mut self, shared: &Shared, id: DocTailId, reason: &str) {
        self.keep(|| Seen::DocTailEnded { id, reason: reason.to_owned() });
        let Some(tail) = self.doc_tails.remove(&id) else { return };
        if self.documents.contains_key(&tail.instance) {
            let reason =
                format!("tail {id} of {} has ended, and the database is there: {reason}", tail.instance);
            shared.fail(Guarantee::ExpiredForReason.broken(reason));
        }
    }

    /// A row that a tail of documents still has to read.
    pub(super) fn doc_tails_owe(&self) -> Option<String> {
        self.doc_tails.iter().find_map(|(id, tail)| {
            let feed = self.documents.get(&tail.instance)?;
            let left = feed.rows.keys().find(|at| **at > tail.start && !tail.read.contains(at))?;
            Some(format!("tail {id} of process {} has not read the row at {left}", tail.issuer.process))
        })
    }
}
