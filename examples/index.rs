//! Keeps an index of each database up to date: a consumer on two nodes learns which databases have changed, and a parallel job reads their
//! changes since the last build. Meanwhile databases are created, changed and deleted, and members crash; at the end the indexes are
//! compared with the documents.
//!
//! Run it with `cargo run --release --example index`. It exits with 1 if an index differs from its documents.

mod layer;

use std::{
    collections::BTreeSet,
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use layer::Layer;
use notibus::{
    Bus, BusOptions, Cursor, Db, DbName, NodeOptions, Result, StartOptions,
    changes::Change,
    consumer::{
        Consumer, ConsumerOptions, DbHandler, DeletedDb, HandlerResult, IndexBuild, ParallelBatch,
        ParallelJob, index,
    },
    store::{Isolation, KeyRange, Store, Transaction},
};

/// The number of databases at the beginning.
const DBS: usize = 8;

/// The number of rounds of edits.
const ROUNDS: usize = 40;
/// The number of edits in each round.
const EDITS: usize = 200;

/// Returns the key prefix of the indexes of all databases with a name. The name is followed by a byte that no other name here contains.
fn indexes(name: &DbName) -> String {
    format!("index/{name}/")
}

/// Returns the key prefix of the index of `db`.
fn index_of(db: &Db) -> String {
    format!("{}{}/", indexes(&db.name), db.instance)
}

/// Builds indexes: an entry per field and document, and for each document the field under which it is indexed, so that an edit finds the
/// entry that it replaces.
#[derive(Clone)]
struct Indexer {
    layer: Layer,
    builds: Arc<AtomicUsize>,
}

impl Indexer {
    /// Returns the cursor up to which the index of `db` is built.
    async fn built_to(&self, db: &Db) -> Result<Cursor> {
        let key = format!("{}to", index_of(db));
        let stored =
            self.layer.store.run(async |tx| tx.get(key.as_bytes(), Isolation::Snapshot).await).await?;
        stored.map_or(Ok(Cursor::BEGINNING), |bytes| Cursor::from_bytes(&bytes))
    }

    /// Indexes the current versions of the documents in `batch`.
    async fn index(&self, db: &Db, batch: &ParallelBatch<Change>) -> Result<()> {
        let (layer, of) = (&self.layer, index_of(db));
        let work = async |tx: Transaction| {
            // A commit may happen after its task was stopped, but not after `deleted` has cleared the index.
            batch.verify(&tx).await?;
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

impl DbHandler<IndexBuild> for Indexer {
    async fn handle(&self, build: IndexBuild) -> HandlerResult {
        self.builds.fetch_add(1, Ordering::Relaxed);
        let db = build.db.clone();
        let since = self.built_to(&db).await?;
        let (this, of) = (self.clone(), db.clone());
        let work = move |batch: ParallelBatch<Change>| {
            let (this, of) = (this.clone(), of.clone());
            async move { Ok(this.index(&of, &batch).await?) }
        };
        let job = ParallelJob::new(self.layer.changes.feed(&db), since).with_work(&build.work);
        let to = match job.run(work).await {
            // The database has been deleted; `deleted` will be called.
            Err(notibus::Error::NoFeed { .. }) => return Ok(()),
            // The store may be a restored copy. The next attempt starts the index from scratch.
            Err(error @ notibus::Error::Expired { .. }) => {
                let clear = async |tx: Transaction| {
                    build.verify(&tx).await?;
                    tx.clear_range(&KeyRange::prefix(index_of(&db)));
                    Ok(())
                };
                self.layer.store.run(clear).await?;
                return Err(error.into());
            }
            ended => ended?,
        };
        let key = format!("{}to", index_of(&db));
        let store = async |tx: Transaction| {
            build.verify(&tx).await?;
            tx.set(key.as_bytes(), &to.to_bytes());
            Ok(())
        };
        Ok(self.layer.store.run(store).await?)
    }

    async fn deleted(&self, deleted: DeletedDb) -> HandlerResult {
        let name = &deleted.db.name;
        let kept = deleted.successor.map(|instance| index_of(&Db::new(name.clone(), instance)));
        let clear = async |tx: Transaction| {
            deleted.verify(&tx).await?;
            // Other databases with that name may have been created and deleted since.
            let all = KeyRange::prefix(indexes(name));
            match &kept {
                None => tx.clear_range(&all),
                Some(kept) => {
                    let kept = KeyRange::prefix(kept.clone());
                    tx.clear_range(&KeyRange { begin: all.begin, end: kept.begin });
                    tx.clear_range(&KeyRange { begin: kept.end, end: all.end });
                }
            }
            Ok(())
        };
        Ok(self.layer.store.run(clear).await?)
    }
}

/// Fails unless the index of `db` matches its documents.
async fn check(layer: &Layer, db: &Db) -> Result<usize, Box<dyn Error>> {
    let docs: BTreeSet<_> =
        layer.all(db).await?.into_iter().map(|(id, field)| format!("{field}/{id}")).collect();
    let entries = layer.rows(&format!("{}by/", index_of(db))).await?;
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

/// Starts a member of the consumer on its own node.
async fn start(bus: &Bus, indexer: &Indexer) -> Result<Consumer> {
    let interval = Duration::from_millis(50);
    let options = ConsumerOptions::index()
        .debounce(Duration::from_millis(20))
        .checkpoint_interval(interval)
        .backoff_max(Duration::from_secs(1));
    let node = bus.node(NodeOptions::default().heartbeat(interval * 4).expiry(interval * 20)).await?;
    let member = node.consumer("by field")?.start_from(Cursor::BEGINNING).options(options);
    member.run(index(indexer.clone())).await
}

/// Waits until nothing is left to do.
async fn rest(bus: &Bus, member: &Consumer) -> Result<()> {
    loop {
        while !bus.is_drained().await? {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        member.caught_up().await?;
        if member.handle().deferred(None, 1).await?.is_empty() {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Runs the example.
#[tokio::main]
pub async fn main() -> Result<(), Box<dyn Error>> {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(StartOptions::default()).await?;
    let layer = Layer::new(&store, &bus);
    let indexer = Indexer { layer: layer.clone(), builds: Arc::default() };
    let (stays, mut crashes) = (start(&bus, &indexer).await?, start(&bus, &indexer).await?);
    let (mut random, mut dbs, mut gone) = (fastrand::Rng::new(), Vec::new(), Vec::new());
    for n in 0..DBS {
        dbs.push(layer.create(&format!("db{n}"), 4).await?);
    }
    for round in 0..ROUNDS {
        let place = random.usize(..dbs.len());
        edit(&layer, &dbs[place], &mut random).await?;
        match round % 10 {
            // A database is deleted, and another one is created under its name.
            3 => {
                layer.delete(&dbs[place]).await?;
                let name = dbs[place].name.to_string();
                gone.push(std::mem::replace(&mut dbs[place], layer.create(&name, 2).await?));
            }
            // One of the members crashes in the middle of its work.
            7 => {
                drop(crashes);
                crashes = start(&bus, &indexer).await?;
            }
            _ => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
    rest(&bus, &stays).await?;
    stays.shutdown().await?;
    crashes.shutdown().await?;

    let builds = indexer.builds.load(Ordering::Relaxed);
    println!("{builds} builds for {ROUNDS} rounds of edits of {} databases", dbs.len());
    for db in &dbs {
        println!("{:4} {} documents are indexed", db.name.as_str(), check(&layer, db).await?);
    }
    for db in &gone {
        if !layer.rows(&index_of(db)).await?.is_empty() {
            return Err(format!("the index of the deleted {} is still there", db.name).into());
        }
    }
    running.shutdown().await?;
    Ok(())
}
