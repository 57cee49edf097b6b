//! Keeps an index of each database up to date: a trigger learns which databases have changed, and a parallel job reads their
//! changes since the last build. Meanwhile databases are created, changed and deleted, and the trigger crashes; in
//! the end the indexes are compared with the documents.
//!
//! Run it with `cargo run --release --example index_trigger`. It exits with 1 if an index differs from its documents.

mod layer;

use std::{collections::BTreeSet, error::Error, time::Duration};

use layer::Layer;
use notibus::{
    Bus, BusOptions, Cursor, Db, Result, Roles, Trigger,
    changes::Change,
    jobs::{Batch, IndexBuild, ParallelJob, TaskResult, TriggerJob, TriggerOptions, index_trigger},
    store::{Database, Isolation, KeyRange, Transaction},
};

/// Databases at the beginning.
const DBS: usize = 8;

/// Rounds of edits, and the edits of each.
const ROUNDS: usize = 40;
/// See [`ROUNDS`].
const EDITS: usize = 200;

/// The key prefix of the index of `db`.
fn index(db: &Db) -> String {
    format!("index/{}/{}/", db.name, db.instance)
}

/// Builds indexes: an entry per field and document, and per document the field under which it is indexed, so that an edit finds
/// the entry that it replaces.
#[derive(Clone)]
struct Indexer(Layer);

impl Indexer {
    /// The cursor up to which the index of `db` is built.
    async fn built_to(&self, db: &Db) -> Result<Cursor> {
        let key = format!("{}to", index(db));
        let stored = self.0.store.run(async |tx| tx.get(key.as_bytes(), Isolation::Snapshot).await).await?;
        stored.map_or(Ok(Cursor::NOTHING), |bytes| Cursor::from_bytes(&bytes))
    }

    /// Indexes the present versions of the documents in `batch`.
    async fn index(&self, db: &Db, batch: &Batch<Change>) -> Result<()> {
        let (layer, of) = (&self.0, index(db));
        let work = async |tx: Transaction| {
            // A commit may happen after its task was stopped, but not after `deleted` has cleared the index.
            batch.check_in(&tx).await?;
            for row in &batch.rows {
                let id = row.doc.id.as_str();
                let field = layer.get(&tx, db, id).await?.map(|doc| doc.field).unwrap_or_default();
                let reverse = format!("{of}of/{id}").into_bytes();
                if let Some(old) = tx.get(&reverse, Isolation::Serializable).await? {
                    tx.clear(format!("{of}by/{}/{id}", String::from_utf8_lossy(&old)).as_bytes());
                    tx.clear(&reverse);
                }
                if !field.is_empty() {
                    tx.set(format!("{of}by/{field}/{id}").as_bytes(), b"");
                    tx.set(&reverse, field.as_bytes());
                }
            }
            Ok(())
        };
        layer.store.run(work).await
    }
}

impl TriggerJob<IndexBuild> for Indexer {
    async fn run(&self, build: IndexBuild) -> TaskResult {
        let db = build.db.clone();
        let since = self.built_to(&db).await?;
        let (this, of) = (self.clone(), db.clone());
        let work = move |batch: Batch<Change>| {
            let (this, of) = (this.clone(), of.clone());
            async move { Ok(this.index(&of, &batch).await?) }
        };
        let job = ParallelJob::new(self.0.changes.feed(&db), since).with_fence(build.fence.clone());
        let to = job.run(work).await?;
        let key = format!("{}to", index(&db));
        let store = async |tx: Transaction| {
            build.check_in(&tx).await?;
            tx.set(key.as_bytes(), &to.to_bytes());
            Ok(())
        };
        Ok(self.0.store.run(store).await?)
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        let clear = async |tx: Transaction| {
            tx.clear_range(&KeyRange::prefix(index(&db)));
            Ok(())
        };
        Ok(self.0.store.run(clear).await?)
    }
}

/// Fails unless the index of `db` matches its documents.
async fn check(layer: &Layer, db: &Db) -> Result<usize, Box<dyn Error>> {
    let docs: BTreeSet<_> =
        layer.all(db).await?.into_iter().map(|(id, field)| format!("{field}/{id}")).collect();
    let entries = layer.rows(&format!("{}by/", index(db))).await?;
    let entries: BTreeSet<_> = entries.into_iter().map(|(key, _)| key).collect();
    if entries == docs { Ok(docs.len()) } else { Err(format!("the index of {} differs", db.name).into()) }
}

/// Edits random documents of `db`.
async fn edit(layer: &Layer, db: &Db, random: &mut fastrand::Rng) -> Result<()> {
    let fields = ["", "red", "green", "blue"];
    let edits: Vec<_> = (0..EDITS)
        .map(|_| (format!("{:04}", random.u32(..2_000)), fields[random.usize(..fields.len())].to_owned()))
        .collect();
    let mut unique: Vec<(String, String)> = Vec::new();
    for (id, field) in edits {
        if !unique.iter().any(|(known, _)| *known == id) {
            unique.push((id, field));
        }
    }
    layer.edit(db, &unique).await
}

/// Waits until the trigger has no work left.
async fn rest(bus: &Bus, trigger: &Trigger) -> Result<(), Box<dyn Error>> {
    let last = bus.feed().last_sequence().await?.map_or(Cursor::NOTHING, Cursor::from);
    let is_at_rest = |status: &notibus::jobs::TriggerStatus| {
        status.position >= last && status.waiting == 0 && status.running == 0
    };
    if trigger.wait_for(is_at_rest).await { Ok(()) } else { Err("the trigger has ended".into()) }
}

/// Runs the example.
#[tokio::main]
pub async fn main() -> Result<(), Box<dyn Error>> {
    let store = Database::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(Roles::default()).await?;
    let dispatcher = running.dispatcher();
    let layer = Layer::new(&store, &bus);
    let start = async || {
        let options = TriggerOptions::index("by field")
            .debounce(Duration::from_millis(20))
            .checkpoint_interval(Duration::from_millis(50));
        index_trigger(dispatcher, options, Indexer(layer.clone())).await
    };

    let mut trigger = start().await?;
    let (mut random, mut dbs, mut gone) = (fastrand::Rng::new(), Vec::new(), Vec::new());
    for n in 0..DBS {
        dbs.push(layer.create(&format!("db{n}"), 4).await?);
    }
    let mut builds = 0;
    for round in 0..ROUNDS {
        let place = random.usize(..dbs.len());
        edit(&layer, &dbs[place], &mut random).await?;
        match round % 10 {
            // A database is deleted, and another one created under its name.
            3 => {
                layer.delete(&dbs[place]).await?;
                let name = dbs[place].name.to_string();
                gone.push(std::mem::replace(&mut dbs[place], layer.create(&name, 2).await?));
            }
            // The trigger crashes in the middle of its work.
            7 => {
                builds += trigger.status().done;
                drop(trigger);
                trigger = start().await?;
            }
            _ => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
    rest(&bus, &trigger).await?;
    builds += trigger.status().done;
    trigger.shutdown().await?;

    println!("{builds} jobs for {ROUNDS} rounds of edits of {} databases", dbs.len());
    for db in &dbs {
        println!("{:4} {} documents are indexed", db.name.as_str(), check(&layer, db).await?);
    }
    for db in &gone {
        if !layer.rows(&index(db)).await?.is_empty() {
            return Err(format!("the index of the deleted {} is left", db.name).into());
        }
    }
    running.shutdown().await?;
    Ok(())
}
