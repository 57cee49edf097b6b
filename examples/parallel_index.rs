//! Builds an index of documents by their field `city`, with one task per shard of the database's changes feed, while
//! writers edit documents and the feed is resharded. Then it brings the index up to date from its position, and checks it.
//!
//! The index has two parts: an entry per city and document, and per document the city under which it is indexed, so
//! that an edit finds the entry that it replaces. One transaction per batch writes both. To work on a batch
//! again writes the same again, so it does not matter how often that happens.
//!
//! Run it with `cargo run --release --example parallel_index`. It exits with 1 if the index differs from the documents.

use std::{collections::BTreeSet, error::Error, sync::Arc, time::Instant};

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, Result, Sequence,
    changes::{Change, Changes, ChangesOptions, DocId, DocSummary, Revision},
    jobs::{Batch, ParallelJob, ParallelJobOptions},
    store::{AtomicOp, Database, Isolation, KeyRange, RangeRead, Transaction},
};
use tokio::task::JoinSet;

const CITIES: [&str; 6] = ["Berlin", "Kyiv", "Lima", "Nairobi", "Osaka", "Quebec"];

/// Documents.
const DOCS: u32 = 20_000;

/// Writers, and the edits of each while the index is built.
const WRITERS: u32 = 3;
/// See [`WRITERS`].
const EDITS: u32 = 5_000;

/// The key of the cursor up to which everything is indexed.
const INDEXED_TO: &[u8] = b"index/to";

/// The key of a document. Its value is the sequence of its last edit, the number of its revision, and its city; empty if deleted.
fn doc_key(id: &str) -> Vec<u8> {
    format!("doc/{id}").into_bytes()
}

/// The key of the city under which the document `id` is indexed.
fn reverse_key(id: &str) -> Vec<u8> {
    format!("index/of/{id}").into_bytes()
}

/// The entry of the index.
fn index_key(city: &str, id: &str) -> Vec<u8> {
    format!("index/by/{city}/{id}").into_bytes()
}

/// The city of a stored document.
fn city_of(doc: &[u8]) -> &str {
    std::str::from_utf8(&doc[21..]).expect("cities are text")
}

/// The layer: documents in a store, and the feed of their changes.
#[derive(Clone)]
struct Layer {
    store: Database,
    changes: Changes,
    db: Db,
}

impl Layer {
    /// Sets the cities of documents in one transaction; an empty city deletes the document.
    async fn edit(&self, edits: &[(String, &'static str)]) -> Result<()> {
        let edit = async |tx: Transaction| {
            let writer = self.changes.writer(&tx, &self.db).await?;
            for (id, city) in edits {
                let stored = tx.get(&doc_key(id), Isolation::Serializable).await?;
                let (previous, edits) = match stored {
                    Some(doc) => (Some(Sequence::from_bytes(&doc[..13])?), number(&doc[13..21])),
                    None => (None, 0),
                };
                let revision = Revision { position: edits + 1, hash: [0; 16] };
                let doc =
                    DocSummary { id: DocId::new(id)?, revision, branches: 1, is_deleted: city.is_empty() };
                let edited = writer.record(&doc, previous)?;
                let rest = [&revision.position.to_be_bytes()[..], city.as_bytes()].concat();
                tx.atomic(AtomicOp::SetVersionstampedValue, &doc_key(id), &edited.operand(&[], &rest));
            }
            Ok(())
        };
        // Commits exactly once: a retry after an unknown result would raise the revision twice.
        self.store.run_once(edit).await.map(|_| ())
    }

    /// Edits random documents.
    async fn write(self, mut random: fastrand::Rng) -> Result<()> {
        for _ in 0..EDITS {
            let city = if random.u8(..10) == 0 { "" } else { random.choice(CITIES).expect("there are some") };
            self.edit(&[(format!("{:06}", random.u32(..DOCS)), city)]).await?;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Indexes the present versions of the documents in `rows`. Documents that were edited since the rows were read
    /// have newer rows, which come later.
    async fn index(&self, rows: &[Arc<Change>]) -> Result<()> {
        let index = async |tx: Transaction| {
            for row in rows {
                let id = row.doc.id.as_str();
                // A snapshot read, so that the index does not conflict with writers.
                let doc = tx.get(&doc_key(id), Isolation::Snapshot).await?;
                let city = doc.as_deref().map_or("", city_of);
                let indexed = tx.get(&reverse_key(id), Isolation::Serializable).await?;
                if let Some(old) = indexed {
                    tx.clear(&index_key(&String::from_utf8_lossy(&old), id));
                }
                if city.is_empty() {
                    tx.clear(&reverse_key(id));
                } else {
                    tx.set(&index_key(city, id), b"");
                    tx.set(&reverse_key(id), city.as_bytes());
                }
            }
            Ok(())
        };
        self.store.run(index).await
    }

    /// The cursor up to which everything is indexed.
    async fn indexed_to(&self) -> Result<Cursor> {
        let stored = self.store.run(async |tx| tx.get(INDEXED_TO, Isolation::Snapshot).await).await?;
        stored.map_or(Ok(Cursor::NOTHING), |bytes| Cursor::from_bytes(&bytes))
    }

    /// Indexes what was written since the last time, and stores the new cursor.
    async fn bring_up_to_date(&self) -> Result<()> {
        let started = Instant::now();
        let since = self.indexed_to().await?;
        let options = ParallelJobOptions::default().batch_rows_max(200);
        let layer = self.clone();
        let work = move |batch: Batch<Change>| {
            let layer = layer.clone();
            async move { Ok(layer.index(&batch.rows).await?) }
        };
        let to = ParallelJob::new(self.changes.feed(&self.db), since).with_options(options).run(work).await?;
        let store = async |tx: Transaction| {
            tx.set(INDEXED_TO, &to.to_bytes());
            Ok(())
        };
        self.store.run(store).await?;
        println!("indexed what came after {since} up to {to} in {:.1?}", started.elapsed());
        Ok(())
    }

    /// The keys that start with `prefix`, without it, and their values.
    async fn all(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
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

    /// Fails unless both parts of the index match the documents.
    async fn check(&self) -> Result<(), Box<dyn Error>> {
        let docs = self.all("doc/").await?;
        let docs = docs.iter().map(|(id, doc)| (city_of(doc).to_owned(), id.clone()));
        let documents: BTreeSet<_> = docs.filter(|(city, _)| !city.is_empty()).collect();
        let entry = |key: String| key.split_once('/').map(|(city, id)| (city.to_owned(), id.to_owned()));
        let index: BTreeSet<_> =
            self.all("index/by/").await?.into_iter().filter_map(|(key, _)| entry(key)).collect();
        let reverse = self.all("index/of/").await?.into_iter();
        let reverse: BTreeSet<_> =
            reverse.map(|(id, city)| (String::from_utf8_lossy(&city).into(), id)).collect();
        for city in CITIES {
            println!("{city:8} {}", index.iter().filter(|(of, _)| of == city).count());
        }
        if index == documents && reverse == documents {
            println!("the index equals the {} living documents", documents.len());
            return Ok(());
        }
        let differences =
            index.symmetric_difference(&documents).chain(reverse.symmetric_difference(&documents));
        Err(format!("the index differs from the documents: {:?}", differences.take(10).collect::<Vec<_>>())
            .into())
    }
}

/// Decodes 8 bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = Database::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let db = Db::new("people".parse()?, DbInstance::new());
    let layer = Layer { store, changes: bus.changes(), db };
    let options = ChangesOptions::default().shards(8);
    layer.store.run(async |tx| layer.changes.create(&tx, &layer.db, &options).await).await?;

    let docs: Vec<_> = (0..DOCS).map(|n| (format!("{n:06}"), CITIES[n as usize % CITIES.len()])).collect();
    for some in docs.chunks(500) {
        layer.edit(some).await?;
    }

    // Writers edit, and the feed gets fewer shards, then more, while the index is built.
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        writers.spawn(layer.clone().write(fastrand::Rng::new()));
    }
    let feed = layer.changes.feed(&layer.db);
    let reshards = async {
        feed.reshard(3, None).await?;
        feed.reshard(12, None).await
    };
    tokio::try_join!(layer.bring_up_to_date(), reshards)?;

    // The index is as old as its cursor says: the edits since then remain.
    while let Some(ended) = writers.join_next().await {
        ended??;
    }
    println!("{} documents were edited since", feed.pending(layer.indexed_to().await?).await?);
    layer.bring_up_to_date().await?;
    layer.check().await
}
