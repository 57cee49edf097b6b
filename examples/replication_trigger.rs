//! Replicates documents between databases: a document of `_replicator` describes a replication by its field, `source target`.
//! The documents of the source are copied to the target whenever the source changes. Two triggers do it: one follows the
//! `_replicator` databases and keeps the list of replications; the other one follows all other databases and brings their
//! targets up to date.
//!
//! # Why nothing is lost
//!
//! A replication is listed before it begins. Both triggers bring a target up to date in the same way: from the changes feed of
//! its source, deletions included, in transactions that read the present documents, write them to the target, and save the target's
//! position. So however the triggers overlap, whatever was copied before, and wherever a process dies, the target continues
//! exactly at its position. If both copy the same, one conflicts and then finds it done. If the target were in another
//! store than the source, its transaction would still read and write its position, and the page would be read before.
//!
//! Run it with `cargo run --release --example replication_trigger`. It exits with 1 if a target differs from its source.

mod layer;

use std::{
    collections::BTreeMap,
    error::Error,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use layer::Layer;
use notibus::{
    Bus, BusOptions, Cursor, Db, Filter, Result, Roles, Trigger,
    jobs::{Fence, Scan, TaskResult, TriggerJob, TriggerOptions, replication_trigger},
    store::{Database, Isolation, KeyRange, Transaction},
};

/// Databases of documents.
const DBS: usize = 6;

/// Edits of documents.
const EDITS: usize = 1_000;

/// How often both triggers crash meanwhile.
const ROUNDS: usize = 10;

/// The listed replications by `_replicator` database and document: source and target.
type Replications = Arc<Mutex<BTreeMap<(Db, String), (String, String)>>>;

/// Keeps the list of replications.
struct Manager {
    layer: Layer,
    replications: Replications,
    dbs: Arc<BTreeMap<String, Db>>,
}

impl TriggerJob<Scan> for Manager {
    async fn run(&self, mut scan: Scan) -> TaskResult {
        loop {
            let page = scan.page(100).await?;
            for row in &page.rows {
                let id = row.doc.id.as_str();
                let read = async |tx| self.layer.get(&tx, scan.db(), id).await;
                let doc = self.layer.store.run(read).await?;
                let entry = (scan.db().clone(), id.to_owned());
                let field = doc.map(|doc| doc.field).unwrap_or_default();
                if let Some((from, to)) = field.split_once(' ') {
                    let ends = (from.to_owned(), to.to_owned());
                    // It is listed before it begins, so that the other trigger copies all changes from here on.
                    self.replications.lock().unwrap_or_else(PoisonError::into_inner).insert(entry, ends);
                    replicate(&self.layer, &self.dbs[from], &self.dbs[to], scan.fence()).await?;
                } else {
                    self.replications.lock().unwrap_or_else(PoisonError::into_inner).remove(&entry);
                }
            }
            if !page.more {
                return Ok(());
            }
        }
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        // Its replications end with it.
        let mut replications = self.replications.lock().unwrap_or_else(PoisonError::into_inner);
        replications.retain(|(of, _), _| *of != db);
        Ok(())
    }
}

/// The key of the cursor up to which the documents of `from` are replicated to `to`.
fn progress(from: &Db, to: &Db) -> Vec<u8> {
    format!("replicated/{}/{}", from.instance, to.instance).into_bytes()
}

/// Brings `to` up to date with `from`, from its saved position.
async fn replicate(layer: &Layer, from: &Db, to: &Db, fence: &Fence) -> Result<()> {
    let (feed, key) = (layer.changes.feed(from), progress(from, to));
    loop {
        let step = async |tx: Transaction| {
            // A scan that was cancelled, or has begun elsewhere, can write nothing more.
            fence.check_in(&tx).await?;
            let stored = tx.get(&key, Isolation::Serializable).await?;
            let since = stored.map_or(Ok(Cursor::NOTHING), |bytes| Cursor::from_bytes(&bytes))?;
            let page = feed.page_in(&tx, since, 100).await?;
            if page.rows.is_empty() {
                return Ok(false);
            }
            let mut edits = Vec::new();
            for row in &page.rows {
                let id = row.doc.id.to_string();
                // A deleted document has an empty field.
                let doc = layer.get(&tx, from, &id).await?;
                edits.push((id, doc.map(|doc| doc.field).unwrap_or_default()));
            }
            layer.edit_in(&tx, to, &edits).await?;
            tx.set(&key, &page.next.to_bytes());
            Ok(page.more)
        };
        if !layer.store.run(step).await? {
            return Ok(());
        }
    }
}

/// Copies changed documents.
struct Copier {
    layer: Layer,
    replications: Replications,
    dbs: Arc<BTreeMap<String, Db>>,
}

impl TriggerJob<Scan> for Copier {
    async fn run(&self, scan: Scan) -> TaskResult {
        let name = scan.db().name.as_str();
        let targets: Vec<String> = {
            let replications = self.replications.lock().unwrap_or_else(PoisonError::into_inner);
            let of_this = replications.values().filter(|(from, _)| from == name);
            of_this.map(|(_, to)| to.clone()).collect()
        };
        for target in targets {
            replicate(&self.layer, scan.db(), &self.dbs[&target], scan.fence()).await?;
        }
        Ok(())
    }

    async fn deleted(&self, db: Db) -> TaskResult {
        // The copies stay. The saved position is not needed any more.
        let clear = async |tx: Transaction| {
            tx.clear_range(&KeyRange::prefix(format!("replicated/{}/", db.instance)));
            Ok(())
        };
        Ok(self.layer.store.run(clear).await?)
    }
}

/// Starts the two triggers.
async fn start(
    dispatcher: &notibus::Dispatcher,
    (layer, replications, dbs): (&Layer, &Replications, &Arc<BTreeMap<String, Db>>),
) -> Result<[Trigger; 2]> {
    let interval = Duration::from_millis(50);
    let manager =
        Manager { layer: layer.clone(), replications: Arc::clone(replications), dbs: Arc::clone(dbs) };
    let options = TriggerOptions::replication("replicator").checkpoint_interval(interval);
    let managing = replication_trigger(dispatcher, options, manager).await?;
    let copier =
        Copier { layer: layer.clone(), replications: Arc::clone(replications), dbs: Arc::clone(dbs) };
    let options = TriggerOptions::replication("copier")
        .filter(Filter::prefix("db"))
        .debounce(Duration::from_millis(10))
        .checkpoint_interval(interval);
    Ok([managing, replication_trigger(dispatcher, options, copier).await?])
}

/// Waits until neither trigger has any work left. Their own writes are news to them as well.
async fn rest(bus: &Bus, triggers: &[Trigger; 2]) -> Result<()> {
    loop {
        let last = bus.feed().last_sequence().await?;
        let is_at_rest = triggers.iter().all(|trigger| {
            let status = trigger.status();
            status.waiting == 0 && status.running == 0 && Some(status.position) >= last.map(Cursor::from)
        });
        if is_at_rest && bus.is_drained().await? && bus.feed().last_sequence().await? == last {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Deletes a `_replicator` database. Fails unless its replications end, and the others continue.
async fn check_end(
    bus: &Bus,
    triggers: &[Trigger; 2],
    (layer, replicator): (&Layer, &Db),
    dbs: &BTreeMap<String, Db>,
) -> Result<(), Box<dyn Error>> {
    layer.delete(replicator).await?;
    rest(bus, triggers).await?;
    let last = [("last".to_owned(), "text".to_owned())];
    layer.edit(&dbs["db4"], &last).await?;
    layer.edit(&dbs["db0"], &last).await?;
    rest(bus, triggers).await?;
    let has_last = async |db: &str| -> Result<bool> {
        Ok(layer.all(&dbs[db]).await?.iter().any(|(id, _)| id == "last"))
    };
    if has_last("db5").await? || !has_last("db2").await? {
        return Err("replications go on that were ended, or do not go on that were not".into());
    }
    Ok(())
}

/// The expected documents of each database at the end: fields by id.
type Model = BTreeMap<String, BTreeMap<String, String>>;

/// Edits random documents while the rest of the example runs: those of two sources, and documents of their targets that no
/// replication writes. Returns the expected documents.
async fn edit_on(layer: Layer, dbs: Arc<BTreeMap<String, Db>>, mut random: fastrand::Rng) -> Result<Model> {
    let mut model = Model::new();
    for edit in 0..EDITS {
        let place = random.usize(..4);
        let db = ["db0", "db4", "db1", "db5"][place];
        let owner = ["doc", "local"][place / 2];
        let id = format!("{owner} {:03}", random.u32(..150));
        // An empty field deletes the document.
        let field = if random.u8(..5) == 0 { String::new() } else { format!("text {edit}") };
        layer.edit(&dbs[db], &[(id.clone(), field.clone())]).await?;
        let docs = model.entry(db.to_owned()).or_default();
        if field.is_empty() {
            docs.remove(&id)
        } else {
            docs.insert(id, field)
        };
        tokio::task::yield_now().await;
    }
    Ok(model)
}

/// Fails unless every target has its own documents and those of its sources.
async fn check(layer: &Layer, dbs: &BTreeMap<String, Db>, mut model: Model) -> Result<(), Box<dyn Error>> {
    for (from, to) in [("db0", "db1"), ("db1", "db2"), ("db4", "db5")] {
        let copied = model.get(from).cloned().unwrap_or_default();
        model.entry(to.to_owned()).or_default().extend(copied);
        let found: BTreeMap<_, _> = layer.all(&dbs[to]).await?.into_iter().collect();
        println!("{from} → {to}: {} documents", found.len());
        if Some(&found) != model.get(to) {
            return Err(format!("{to} differs from its sources").into());
        }
    }
    Ok(())
}

/// Runs the example.
#[tokio::main]
pub async fn main() -> Result<(), Box<dyn Error>> {
    let store = Database::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(Roles::default()).await?;
    let dispatcher = running.dispatcher();
    let layer = Layer::new(&store, &bus);
    let mut dbs = BTreeMap::new();
    for n in 0..DBS {
        dbs.insert(format!("db{n}"), layer.create(&format!("db{n}"), 2).await?);
    }
    let (dbs, replications) = (Arc::new(dbs), Replications::default());
    let replicator = layer.create("_replicator", 1).await?;
    let shop = layer.create("shop/_replicator", 1).await?;
    let describe = async |db: &Db, id: &str, ends: &str| layer.edit(db, &[(id.into(), ends.into())]).await;

    // Documents change from before the first replication is described until after the last.
    let mut random = fastrand::Rng::new();
    let edits = tokio::spawn(edit_on(layer.clone(), Arc::clone(&dbs), random.fork()));
    let mut triggers = start(dispatcher, (&layer, &replications, &dbs)).await?;
    describe(&replicator, "r1", "db0 db1").await?;
    describe(&shop, "r2", "db4 db5").await?;
    for round in 0..ROUNDS {
        if round == ROUNDS / 2 {
            describe(&replicator, "r3", "db1 db2").await?;
        }
        tokio::time::sleep(Duration::from_millis(random.u64(..50))).await;
        // Both triggers crash. The process loses the list of replications, so it is reset and scanned again.
        drop(triggers);
        replications.lock().unwrap_or_else(PoisonError::into_inner).clear();
        bus.trigger("replicator")?.reset().await?;
        triggers = start(dispatcher, (&layer, &replications, &dbs)).await?;
    }
    let model = edits.await??;
    rest(&bus, &triggers).await?;
    check(&layer, &dbs, model).await?;
    check_end(&bus, &triggers, (&layer, &shop), &dbs).await?;
    let done: u64 = triggers.iter().map(|trigger| trigger.status().done).sum();
    println!("{EDITS} edits, {done} scans since the last restart");
    for trigger in triggers {
        trigger.shutdown().await?;
    }
    running.shutdown().await?;
    Ok(())
}
