//! Replicates documents between databases: a document of `_replicator` describes a replication by its field, `source target`,
//! and the documents of the source go to the target whenever the source changes. Two triggers do it: one hears of the
//! `_replicator` databases and keeps the list of replications, the other one hears of all other databases and copies what has
//! changed since it last looked.
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
    Bus, BusOptions, Cursor, Db, DispatcherOptions, Filter, NotifierOptions, Result, Scan, TaskResult,
    Trigger, TriggerJob, TriggerOptions, replication_trigger, store::Database,
};

/// Databases of documents, and rounds of edits.
const DBS: usize = 6;
/// See [`DBS`].
const ROUNDS: usize = 40;

/// The replications that there are, by `_replicator` database and document: from where to where.
type Replications = Arc<Mutex<BTreeMap<(Db, String), (String, String)>>>;

/// Keeps the list of replications.
struct Manager {
    /// The documents.
    layer: Layer,
    /// The list.
    replications: Replications,
    /// The databases, by name.
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
                    copy(&self.layer, &self.dbs[from], &self.dbs[to]).await?;
                    self.replications.lock().unwrap_or_else(PoisonError::into_inner).insert(entry, ends);
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

/// Copies all documents of a source once, before its changes are followed.
async fn copy(layer: &Layer, from: &Db, to: &Db) -> Result<()> {
    for some in layer.all(from).await?.chunks(100) {
        layer.edit(to, some).await?;
    }
    Ok(())
}

/// Copies what has changed.
struct Copier {
    /// The documents.
    layer: Layer,
    /// The list.
    replications: Replications,
    /// The databases, by name.
    dbs: Arc<BTreeMap<String, Db>>,
}

impl TriggerJob<Scan> for Copier {
    async fn run(&self, mut scan: Scan) -> TaskResult {
        let name = scan.db().name.to_string();
        loop {
            let page = scan.page(100).await?;
            let targets: Vec<String> = {
                let replications = self.replications.lock().unwrap_or_else(PoisonError::into_inner);
                let of_this = replications.values().filter(|(from, _)| *from == name);
                of_this.map(|(_, to)| to.clone()).collect()
            };
            let mut edits = Vec::new();
            for row in &page.rows {
                let id = row.doc.id.as_str();
                let read = async |tx| self.layer.get(&tx, scan.db(), id).await;
                let doc = self.layer.store.run(read).await?;
                edits.push((id.to_owned(), doc.map(|doc| doc.field).unwrap_or_default()));
            }
            for target in targets.iter().filter(|_| !edits.is_empty()) {
                self.layer.edit(&self.dbs[target], &edits).await?;
            }
            // What was copied is not copied again if this one fails later.
            scan.reporter().report(page.to).await?;
            if !page.more {
                return Ok(());
            }
        }
    }
}

/// The two triggers.
async fn start(
    dispatcher: &notibus::Dispatcher,
    (layer, replications, dbs): (&Layer, &Replications, &Arc<BTreeMap<String, Db>>),
) -> Result<[Trigger; 2]> {
    let interval = Duration::from_millis(50);
    let manager =
        Manager { layer: layer.clone(), replications: Arc::clone(replications), dbs: Arc::clone(dbs) };
    let options =
        TriggerOptions { checkpoint_interval: interval, ..TriggerOptions::replication("replicator") };
    let managing = replication_trigger(dispatcher, options, manager).await?;
    let copier =
        Copier { layer: layer.clone(), replications: Arc::clone(replications), dbs: Arc::clone(dbs) };
    let options = TriggerOptions {
        filter: Filter::prefix("db"),
        debounce: Duration::from_millis(10),
        checkpoint_interval: interval,
        ..TriggerOptions::replication("copier")
    };
    Ok([managing, replication_trigger(dispatcher, options, copier).await?])
}

/// Waits until neither trigger has anything left to do. What they write is news to them as well.
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

/// Deletes a `_replicator` database, and fails unless its replications end, and the others go on.
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

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = Database::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let notifier = bus.notifier(NotifierOptions::default()).await?;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await?;
    let layer = Layer::new(&store, &bus);
    let mut dbs = BTreeMap::new();
    for n in 0..DBS {
        dbs.insert(format!("db{n}"), layer.create(&format!("db{n}"), 2).await?);
    }
    let (dbs, replications) = (Arc::new(dbs), Replications::default());
    let replicator = layer.create("_replicator", 1).await?;
    let shop = layer.create("shop/_replicator", 1).await?;
    let describe = async |db: &Db, id: &str, ends: &str| layer.edit(db, &[(id.into(), ends.into())]).await;

    // db0 to db1 from the beginning; db1 on to db2 described in another place; and one that is deleted again with its database.
    let mut triggers = start(&dispatcher, (&layer, &replications, &dbs)).await?;
    describe(&replicator, "r1", "db0 db1").await?;
    describe(&shop, "r2", "db4 db5").await?;
    rest(&bus, &triggers).await?;
    let mut random = fastrand::Rng::new();
    let mut edited = 0;
    for round in 0..ROUNDS {
        let source = if random.bool() { "db0" } else { "db4" };
        // An empty field deletes the document.
        let field = if random.u8(..5) == 0 { String::new() } else { format!("text {round}") };
        layer.edit(&dbs[source], &[(format!("{:03}", random.u32(..300)), field)]).await?;
        edited += 1;
        match round {
            10 => describe(&replicator, "r3", "db1 db2").await?,
            // Both triggers crash. The list of replications is that of the process: so it begins again, and is scanned again.
            20 => {
                drop(triggers);
                replications.lock().unwrap_or_else(PoisonError::into_inner).clear();
                bus.cursor("replicator")?.delete().await?;
                triggers = start(&dispatcher, (&layer, &replications, &dbs)).await?;
                rest(&bus, &triggers).await?;
            }
            30 => rest(&bus, &triggers).await?,
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
    rest(&bus, &triggers).await?;
    for (from, to) in [("db0", "db1"), ("db1", "db2"), ("db4", "db5")] {
        let (source, target) = (layer.all(&dbs[from]).await?, layer.all(&dbs[to]).await?);
        println!("{from} → {to}: {} documents", source.len());
        if source != target {
            return Err(format!("{to} differs from {from}").into());
        }
    }

    check_end(&bus, &triggers, (&layer, &shop), &dbs).await?;
    let done: u64 = triggers.iter().map(|trigger| trigger.status().done).sum();
    println!("{edited} edits, {done} scans since the restart");
    for trigger in triggers {
        trigger.shutdown().await?;
    }
    dispatcher.shutdown().await;
    notifier.shutdown().await?;
    Ok(())
}
