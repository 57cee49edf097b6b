//! The documents of a database: reading, listing, and editing one at a time or in bulk.

use std::collections::HashSet;

use notibus::{
    Db, DbName,
    changes::{DocId, DocSummary, Revision},
    store::{AtomicOp, Isolation, RangeRead, Transaction},
};

use super::{
    couch::{Couch, database_in},
    document::{Document, Edit},
    keys::{self, Count},
    problem::Problem,
};

/// The maximum number of edits that a bulk request makes in one transaction.
const EDITS_MAX: usize = 500;

/// Once a transaction has reached this size in bytes, no further edit of a bulk request is added. It is far below the store's limit,
/// because the store also counts the keys of mutations and the ranges of conflicts, which are the larger part if ids are long.
const SIZE_MAX: usize = 2_000_000;

impl Couch {
    /// Reads a document, even if it is deleted.
    pub async fn document(&self, name: &DbName, id: &DocId) -> Result<Option<Document>, Problem> {
        self.read(async |tx| {
            let db = database_in(&tx, name).await?;
            document_in(&tx, &db, id).await
        })
        .await
    }

    /// Reads the documents with `ids` at one version, even if they are deleted.
    pub async fn documents(
        &self,
        name: &DbName,
        ids: &[Option<DocId>],
    ) -> Result<Vec<Option<Document>>, Problem> {
        self.read(async |tx| {
            let db = database_in(&tx, name).await?;
            let mut documents = Vec::with_capacity(ids.len());
            for id in ids {
                documents.push(match id {
                    Some(id) => document_in(&tx, &db, id).await?,
                    None => None,
                });
            }
            Ok(documents)
        })
        .await
    }

    /// Makes one edit. Returns the new revision.
    pub async fn edit(&self, name: &DbName, edit: &Edit) -> Result<Revision, Problem> {
        self.write(async |tx| {
            let db = database_in(&tx, name).await?;
            self.edit_in(&tx, &db, edit).await
        })
        .await
    }

    /// Makes many edits, several per transaction and in order. Each succeeds or fails by itself. If the store fails, earlier edits remain.
    pub async fn edit_many(
        &self,
        name: &DbName,
        edits: &[Edit],
    ) -> Result<Vec<Result<Revision, Problem>>, Problem> {
        self.read(async |tx| database_in(&tx, name).await).await?;
        let mut results = Vec::with_capacity(edits.len());
        while results.len() < edits.len() {
            let some = edits[results.len()..].iter().take(EDITS_MAX);
            let done = self.write(async |tx| {
                let db = database_in(&tx, name).await?;
                let mut edited = HashSet::new();
                let mut done = Vec::new();
                for edit in some.clone() {
                    // A repeated id always conflicts: no client can have read a revision that this transaction makes.
                    let result = if edited.contains(&edit.id) {
                        Err(Problem::Conflict)
                    } else {
                        self.edit_in(&tx, &db, edit).await
                    };
                    match &result {
                        Ok(_) => edited.insert(&edit.id),
                        Err(Problem::Store(error)) => return Err(error.clone().into()),
                        Err(_) => false,
                    };
                    done.push(result);
                    if tx.approximate_size().await? >= SIZE_MAX {
                        break;
                    }
                }
                Ok(done)
            });
            results.extend(done.await?);
        }
        Ok(results)
    }

    /// Reads at most `limit` documents that are not deleted, in the order of their ids.
    pub async fn documents_between(
        &self,
        name: &DbName,
        from: Option<&str>,
        to: Option<&str>,
        limit: usize,
    ) -> Result<Vec<Document>, Problem> {
        self.read(async |tx| {
            let db = database_in(&tx, name).await?;
            let read = RangeRead::new(keys::documents_between(&db, from, to)).limit(limit.clamp(100, 10_000));
            let mut pages = tx.pages(read, Isolation::Snapshot);
            let mut found = Vec::new();
            while let Some(page) = pages.next().await? {
                for (_, value) in page {
                    let document = Document::from_stored(&value)?;
                    if !document.is_deleted && found.len() < limit {
                        found.push(document);
                    }
                }
                if found.len() >= limit {
                    break;
                }
            }
            Ok(found)
        })
        .await
    }

    /// Makes an edit in `tx`.
    async fn edit_in(&self, tx: &Transaction, db: &Db, edit: &Edit) -> Result<Revision, Problem> {
        let present = document_in(tx, db, &edit.id).await?;
        let (revision, json) = edit.apply(present.as_ref())?;
        let doc = DocSummary { id: edit.id.clone(), revision, branches: 1, is_deleted: edit.is_deleted };
        let previous = present.as_ref().map(|present| present.edited);
        let edited = self.changes().writer(tx, db).await?.record(&doc, previous)?; // 2
        let key = keys::document(db, &edit.id);
        tx.atomic(AtomicOp::SetVersionstampedValue, &key, &edited.operand(&[], &json)); // 2

        let of = |is_deleted| if is_deleted { Count::Deleted } else { Count::Living };
        if let Some(present) = &present {
            add(tx, db, of(present.is_deleted), -1);
            add(tx, db, Count::Bytes, -len(&present.json));
        }
        add(tx, db, of(edit.is_deleted), 1);
        add(tx, db, Count::Bytes, len(&json));
        Ok(revision)
    }
}

/// Reads a document of `db` in `tx`.
async fn document_in(tx: &Transaction, db: &Db, id: &DocId) -> Result<Option<Document>, Problem> {
    let row = tx.get(&keys::document(db, id), Isolation::Serializable).await?;
    row.map(|row| Document::from_stored(&row)).transpose()
}

/// Adds to a count with an atomic operation, so that edits in one database do not conflict over it.
fn add(tx: &Transaction, db: &Db, what: Count, number: i64) {
    tx.atomic(AtomicOp::Add, &keys::count(db, what), &number.to_le_bytes());
}

/// Reads a count of `db`.
pub async fn count(tx: &Transaction, db: &Db, what: Count) -> Result<i64, Problem> {
    let row = tx.get(&keys::count(db, what), Isolation::Snapshot).await?;
    let bytes = row.and_then(|row| row.as_ref().try_into().ok());
    Ok(bytes.map_or(0, i64::from_le_bytes))
}

/// Returns the length of `json` in bytes.
fn len(json: &[u8]) -> i64 {
    i64::try_from(json.len()).expect("a document fits into a value of the store")
}
