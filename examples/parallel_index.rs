//! Builds an index of documents by their field `city`, with one task per shard of the database's changes feed, while writers edit documents
//! and the feed is resharded. Then it updates the index from its position, and checks it.
//!
//! The index has two parts: an entry per city and document, and for each document the city under which it is indexed, so that an edit finds
//! the entry that it replaces. One transaction per batch writes both. Working on a batch again writes the same entries again, so it does
//! not matter how many times that happens.
//!
//! Run it with `cargo run --release --example parallel_index`. It exits with 1 if the index differs from the documents.

#[allow(dead_code, reason = "this example deletes no database")]
mod layer;

use std::{collections::BTreeSet, error::Error, sync::Arc, time::Instant};

use layer::Layer;
use notibus::{
    Bus, BusOptions, Cursor, Db, Result,
    changes::Change,
    consumer::{ParallelBatch, ParallelJob, ParallelJobOptions},
    store::{Isolation, Store, Transaction},
};
use tokio::task::JoinSet;

const CITIES: [&str; 6] = ["Berlin", "Kyiv", "Lima", "Nairobi", "Osaka", "Quebec"];

/// The number of documents.
const DOCS: u32 = 20_000;

/// The number of writers.
const WRITERS: u32 = 3;
/// The number of edits that each writer makes while the index is built.
const EDITS: u32 = 5_000;

/// The key of the cursor up to which everything is indexed.
const INDEXED_TO: &[u8] = b"index/to";

/// Returns the key of the city under which the document `id` is indexed.
fn reverse_key(id: &str) -> Vec<u8> {
    format!("index/of/{id}").into_bytes()
}

/// Returns the key of an index entry.
fn index_key(city: &str, id: &str) -> Vec<u8> {
    format!("index/by/{city}/{id}").into_bytes()
}

/// The index of a database whose documents have cities as their fields.
#[derive(Clone)]
struct CityIndex {
    layer: Layer,
    db: Db,
}

impl CityIndex {
    /// Edits random documents.
    async fn write(self, mut random: fastrand::Rng) -> Result<()> {
        for _ in 0..EDITS {
            let city = if random.u8(..10) == 0 { "" } else { random.choice(CITIES).expect("there are some") };
            let edit = (format!("{:06}", random.u32(..DOCS)), city.to_owned());
            self.layer.edit(&self.db, &[edit]).await?;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Indexes the current versions of the documents in `rows`. A document that was edited after the rows were read has a newer row, which
    /// is read later.
    async fn index(&self, rows: &[Arc<Change>]) -> Result<()> {
        let index = async |tx: Transaction| {
            for row in rows {
                let id = row.doc.id.as_str();
                let city = self.layer.get(&tx, &self.db, id).await?.map(|doc| doc.field).unwrap_or_default();
                let indexed = tx.get(&reverse_key(id), Isolation::Serializable).await?;
                if let Some(old) = indexed {
                    tx.clear(&index_key(&String::from_utf8_lossy(&old), id));
                }
                if city.is_empty() {
                    tx.clear(&reverse_key(id));
                } else {
                    tx.set(&index_key(&city, id), b"");
                    tx.set(&reverse_key(id), city.as_bytes());
                }
            }
            Ok(())
        };
        self.layer.store.run(index).await
    }

    /// Returns the cursor up to which everything is indexed.
    async fn indexed_to(&self) -> Result<Cursor> {
        let stored = self.layer.store.run(async |tx| tx.get(INDEXED_TO, Isolation::Snapshot).await).await?;
        stored.map_or(Ok(Cursor::BEGINNING), |bytes| Cursor::from_bytes(&bytes))
    }

    /// Indexes everything that was written since the last time, and stores the new cursor.
    async fn bring_up_to_date(&self) -> Result<()> {
        let started = Instant::now();
        let since = self.indexed_to().await?;
        let options = ParallelJobOptions::default().batch_rows_max(200);
        let index = self.clone();
        let work = move |batch: ParallelBatch<Change>| {
            let index = index.clone();
            async move { Ok(index.index(&batch.rows).await?) }
        };
        let feed = self.layer.changes.feed(&self.db);
        let to = ParallelJob::new(feed, since).with_options(options).run(work).await?;
        let store = async |tx: Transaction| {
            tx.set(INDEXED_TO, &to.to_bytes());
            Ok(())
        };
        self.layer.store.run(store).await?;
        println!("indexed everything after {since} up to {to} in {:.1?}", started.elapsed());
        Ok(())
    }

    /// Fails unless both parts of the index match the documents.
    async fn check(&self) -> Result<(), Box<dyn Error>> {
        let docs = self.layer.all(&self.db).await?;
        let documents: BTreeSet<_> = docs.into_iter().map(|(id, city)| (city, id)).collect();
        let entry = |key: String| key.split_once('/').map(|(city, id)| (city.to_owned(), id.to_owned()));
        let index: BTreeSet<_> =
            self.layer.rows("index/by/").await?.into_iter().filter_map(|(key, _)| entry(key)).collect();
        let reverse = self.layer.rows("index/of/").await?.into_iter();
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

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let layer = Layer::new(&store, &bus);
    let db = layer.create("people", 8).await?;
    let city = |n: u32| CITIES[n as usize % CITIES.len()].to_owned();
    let docs: Vec<_> = (0..DOCS).map(|n| (format!("{n:06}"), city(n))).collect();
    for some in docs.chunks(500) {
        layer.edit(&db, some).await?;
    }

    // While the index is built, writers edit documents, and the feed gets fewer shards, then more.
    let index = CityIndex { layer: layer.clone(), db };
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        writers.spawn(index.clone().write(fastrand::Rng::new()));
    }
    let feed = layer.changes.feed(&index.db);
    let reshards = async {
        feed.reshard(3, None).await?;
        feed.reshard(12, None).await
    };
    tokio::try_join!(index.bring_up_to_date(), reshards)?;

    // The index is as old as its cursor says: later edits are still missing.
    while let Some(ended) = writers.join_next().await {
        ended??;
    }
    println!("{} documents were edited since", feed.pending(index.indexed_to().await?).await?);
    index.bring_up_to_date().await?;
    index.check().await
}
