//! [`Couch`]: databases in a store, and how a layer records their events.
//!
//! The numbers mark what a layer has to do for the bus, here and in `documents`:
//!
//! 1. A transaction that creates or deletes a database creates or removes its changes feed, and records the event.
//! 2. A transaction that edits a document records the change, which also records the event for the database, and stores the sequence of the
//!    change with the document.
//! 3. Each creation of a database makes a new instance, so that data of a deleted database cannot reappear.
//!
//! All of this happens in the transaction of the edit itself, so an event exists if and only if the edit does.

use notibus::{
    Bus, Db, DbInstance, DbName, Producer, Sequence,
    changes::{Changes, ChangesOptions},
    store::{Isolation, RangeRead, Store, Transaction},
};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    documents::count,
    keys::{self, Count},
    problem::Problem,
};

/// A summary of a database.
pub struct Info {
    /// The number of documents that are not deleted.
    pub living: i64,
    /// The number of deleted documents.
    pub deleted: i64,
    /// The size of all documents as JSON, in bytes.
    pub bytes: i64,
    /// The sequence of the last edit.
    pub last_change: Sequence,
}

/// Databases and their documents.
pub struct Couch {
    store: Store,
    bus: Bus,
    changes: Changes,
    producer: Producer,
}

impl Couch {
    /// Makes a layer for the databases in `store`, whose bus is `bus`.
    pub fn new(store: Store, bus: &Bus) -> Self {
        Self { store, bus: bus.clone(), changes: bus.changes(), producer: bus.producer() }
    }

    /// Returns the changes feeds.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Creates a database.
    pub async fn create_database(&self, name: &DbName) -> Result<(), Problem> {
        check_name(name)?;
        // The instance is drawn before the transaction, so that every attempt creates the same one.
        let db = &Db::new(name.clone(), DbInstance::new());
        self.write(async |tx| {
            if find_in(&tx, name).await?.is_some() {
                return Err(Problem::DatabaseExists);
            }
            tx.set(&keys::database(name), &db.instance.0);
            self.changes.create(&tx, db, &ChangesOptions::default()).await?; // 1
            self.producer.created(&tx, db); // 1
            Ok(())
        })
        .await
    }

    /// Deletes a database with all its documents.
    pub async fn delete_database(&self, name: &DbName) -> Result<(), Problem> {
        self.write(async |tx| {
            let db = database_in(&tx, name).await?;
            tx.clear(&keys::database(name));
            tx.clear_range(&keys::contents(&db));
            self.changes.remove(&tx, &db); // 1
            self.producer.deleted(&tx, &db); // 1
            Ok(())
        })
        .await
    }

    /// Lists the names of all databases, in order.
    pub async fn databases(&self) -> Result<Vec<String>, Problem> {
        self.read(async |tx| {
            let mut pages = tx.pages(RangeRead::new(keys::databases()), Isolation::Snapshot);
            let mut names = Vec::new();
            while let Some(page) = pages.next().await? {
                for (key, _) in page {
                    names.push(keys::name_of(&key)?);
                }
            }
            Ok(names)
        })
        .await
    }

    /// Returns a summary of a database.
    pub async fn info(&self, name: &DbName) -> Result<Info, Problem> {
        let (db, living, deleted, bytes) = self
            .read(async |tx| {
                let db = database_in(&tx, name).await?;
                let living = count(&tx, &db, Count::Living).await?;
                let deleted = count(&tx, &db, Count::Deleted).await?;
                let bytes = count(&tx, &db, Count::Bytes).await?;
                Ok((db, living, deleted, bytes))
            })
            .await?;
        let last_change = self.changes.last_change(&db).await?.unwrap_or(Sequence::MIN);
        Ok(Info { living, deleted, bytes, last_change })
    }

    /// Runs a read-only transaction.
    pub async fn read<T, F, R>(&self, body: F) -> Result<T, Problem>
    where
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T, Problem>>,
    {
        self.store.run(async |tx| tried(body(tx).await)).await?
    }

    /// Commits the writes of `body` exactly once, despite unknown results: a repeated edit would conflict with itself. If `body` returns a
    /// problem, it must not have written anything.
    pub async fn write<T, F, R>(&self, body: F) -> Result<T, Problem>
    where
        T: Serialize + DeserializeOwned,
        F: Fn(Transaction) -> R,
        R: Future<Output = Result<T, Problem>>,
    {
        self.bus.run_exactly_once(None, async |tx| tried(body(tx).await)).await?.value
    }
}

/// Separates failures of the store, after which a transaction may be tried again, from other problems, which count as results.
fn tried<T>(result: Result<T, Problem>) -> notibus::Result<Result<T, Problem>> {
    match result {
        Err(Problem::Store(error)) => Err(error),
        result => Ok(result),
    }
}

/// Finds the database that has `name` now. The transaction conflicts with the deletion of that database.
pub async fn find_in(tx: &Transaction, name: &DbName) -> notibus::Result<Option<Db>> {
    let row = tx.get(&keys::database(name), Isolation::Serializable).await?;
    let instance = row.and_then(|row| row.as_ref().try_into().ok());
    Ok(instance.map(|instance| Db::new(name.clone(), DbInstance(instance)))) // 3
}

/// Finds the database that has `name` now; fails if there is none.
pub async fn database_in(tx: &Transaction, name: &DbName) -> Result<Db, Problem> {
    find_in(tx, name).await?.ok_or(Problem::NoDatabase)
}

/// Checks CouchDB's rule for names.
fn check_name(name: &DbName) -> Result<(), Problem> {
    let is_allowed =
        |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'$' | b'(' | b')' | b'+' | b'-' | b'/');
    let text = name.as_str();
    let is_fine = text.starts_with(|first: char| first.is_ascii_lowercase()) && text.bytes().all(is_allowed);
    if is_fine { Ok(()) } else { Err(Problem::BadName(text.to_owned())) }
}
