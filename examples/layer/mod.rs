//! The layer for the examples of jobs: databases of documents, each with a field, and the feed of their changes.
//!
//! Each document has a row under its database and id, with the sequence of its last edit, the number of its revision, and its field; the
//! field of a deleted document is empty. One transaction writes the row, the change, and the event for the database.

use notibus::{
    Bus, Db, DbInstance, Producer, Result, Sequence,
    changes::{Changes, ChangesOptions, DocId, DocSummary, Revision},
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Store, Transaction},
};

/// A document as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Doc {
    /// The sequence of its last edit.
    pub edited: Sequence,
    /// The number of edits.
    pub edits: u64,
    /// The field of the document; empty if the document is deleted.
    pub field: String,
}

/// A layer: databases of documents in a store.
#[derive(Clone)]
pub struct Layer {
    pub store: Store,
    bus: Bus,
    /// The changes feeds.
    pub changes: Changes,
    /// Records the events of databases.
    producer: Producer,
}

/// Returns the key prefix of the documents of `db`.
pub fn docs(db: &Db) -> String {
    format!("doc/{}/{}/", db.name, db.instance)
}

/// Decodes a stored document.
pub fn doc(bytes: &[u8]) -> Result<Doc> {
    let edits = bytes[13..21].iter().fold(0, |number, &byte| number << 8 | u64::from(byte));
    let field = String::from_utf8_lossy(&bytes[21..]).into_owned();
    Ok(Doc { edited: Sequence::from_bytes(&bytes[..13])?, edits, field })
}

impl Layer {
    /// Makes a layer on `bus`.
    pub fn new(store: &Store, bus: &Bus) -> Self {
        Self { store: store.clone(), bus: bus.clone(), changes: bus.changes(), producer: bus.producer() }
    }

    /// Creates a database.
    pub async fn create(&self, name: &str, shards: u32) -> Result<Db> {
        let db = Db::new(name.parse()?, DbInstance::new());
        let options = ChangesOptions::default().shards(shards);
        self.store
            .run(async |tx| {
                self.changes.create(&tx, &db, &options).await?;
                self.producer.created(&tx, &db);
                Ok(())
            })
            .await?;
        Ok(db)
    }

    /// Deletes a database.
    pub async fn delete(&self, db: &Db) -> Result<()> {
        self.store
            .run(async |tx| {
                tx.clear_range(&KeyRange::prefix(docs(db)));
                self.changes.remove(&tx, db);
                self.producer.deleted(&tx, db);
                Ok(())
            })
            .await
    }

    /// Sets the fields of documents in one transaction; an empty field deletes the document. This commits exactly once, because a retry
    /// after an unknown result would raise the revision twice.
    pub async fn edit(&self, db: &Db, edits: &[(String, String)]) -> Result<()> {
        self.bus.run_exactly_once(None, async |tx| self.edit_in(&tx, db, edits).await).await.map(|_| ())
    }

    /// Does [`Layer::edit`] in the caller's transaction.
    pub async fn edit_in(&self, tx: &Transaction, db: &Db, edits: &[(String, String)]) -> Result<()> {
        let writer = self.changes.writer(tx, db).await?;
        for (id, field) in edits {
            let key = format!("{}{id}", docs(db)).into_bytes();
            let stored = tx.get(&key, Isolation::Serializable).await?;
            let stored = stored.map(|bytes| doc(&bytes)).transpose()?;
            let position = stored.as_ref().map_or(0, |doc| doc.edits) + 1;
            let revision = Revision { position, hash: [0; 16] };
            let is_deleted = field.is_empty();
            let summary = DocSummary { id: DocId::new(id)?, revision, branches: 1, is_deleted };
            let edited = writer.record(&summary, stored.map(|doc| doc.edited))?;
            let rest = [&position.to_be_bytes()[..], field.as_bytes()].concat();
            tx.atomic(AtomicOp::SetVersionstampedValue, &key, &edited.operand(&[], &rest));
        }
        Ok(())
    }

    /// Reads the document `id` of `db`.
    pub async fn get(&self, tx: &Transaction, db: &Db, id: &str) -> Result<Option<Doc>> {
        // This is a snapshot read, so that readers do not conflict with writers.
        let stored = tx.get(format!("{}{id}", docs(db)).as_bytes(), Isolation::Snapshot).await?;
        stored.map(|bytes| doc(&bytes)).transpose()
    }

    /// Reads the documents of `db` that are not deleted: ids and fields.
    pub async fn all(&self, db: &Db) -> Result<Vec<(String, String)>> {
        let docs = docs(db);
        let rows = self.rows(&docs).await?;
        let mut all = Vec::new();
        for (id, bytes) in rows {
            let doc = doc(&bytes)?;
            if !doc.field.is_empty() {
                all.push((id, doc.field));
            }
        }
        Ok(all)
    }

    /// Reads all keys that start with `prefix`, and returns the rest of each key, with its value.
    pub async fn rows(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
        let read = async |tx: Transaction| {
            let mut rows = Vec::new();
            let mut pages =
                tx.pages(RangeRead::new(KeyRange::prefix(prefix.to_owned())), Isolation::Snapshot);
            while let Some(page) = pages.next().await? {
                let text = |key: &[u8]| String::from_utf8_lossy(&key[prefix.len()..]).into_owned();
                rows.extend(page.iter().map(|(key, value)| (text(key), value.to_vec())));
            }
            Ok(rows)
        };
        self.store.run(read).await
    }
}
