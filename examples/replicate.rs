//! Replicates documents between databases. A document in `_replicator` describes a replication by its field, `source target`. The documents
//! of the source are copied to the target whenever the source changes. Two consumers do this: one follows the `_replicator` databases and
//! keeps the list of replications in the store; the other follows all other databases and updates their targets.
//!
//! # Why nothing is lost
//!
//! A replication is listed before it begins. Both consumers update a target in the same way: from the changes feed of its source, deletions
//! included, in transactions that read the current documents, write them to the target, and save the target's position. So however the
//! consumers overlap, whatever was copied before, and wherever a process dies, the target continues exactly at its position. If both copy
//! the same page, one of them conflicts, and then finds that the page is done. If the target were in a different store than the source, its
//! transaction would still read and write its position, but the page would be read before the transaction.
//!
//! Run it with `cargo run --release --example replicate`. It exits with 1 if a target differs from its source.

mod layer;

use std::{collections::BTreeMap, error::Error, sync::Arc, time::Duration};

use layer::Layer;
use notibus::{
    Bus, BusOptions, Cursor, Db, Filter, NodeOptions, Notification, Result, StartOptions,
    consumer::{
        Consumer, ConsumerBuilder, ConsumerOptions, DbHandler, DeletedDb, HandlerResult, Scan, Work,
        replicate,
    },
    store::{Isolation, KeyRange, Store, Transaction},
};

/// The number of databases of documents.
const DBS: usize = 6;

/// The number of edits of documents.
const EDITS: usize = 1_000;

/// How many times members of both consumers crash during the run.
const ROUNDS: usize = 10;

type Dbs = Arc<BTreeMap<String, Db>>;

/// Returns the key of a listed replication, by the document that describes it; the value is source and target.
fn described(by: &Db, id: &str) -> String {
    format!("list/{}\0{}\0{id}", by.name, by.instance)
}

/// Returns the key of a listed replication, by its source and [`described`]; the value is the target.
fn listed(from: &str, described: &str) -> String {
    format!("from/{from}\0{described}")
}

/// Removes a replication from the list.
fn unlist(tx: &Transaction, described: &str, ends: &str) {
    tx.clear(described.as_bytes());
    if let Some((from, _)) = ends.split_once(' ') {
        tx.clear(listed(from, described).as_bytes());
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The handler that keeps the list of replications.
struct Manager {
    layer: Layer,
    dbs: Dbs,
}

impl Manager {
    /// Lists what the document `id` describes now. Returns the source and the target.
    async fn list(&self, scan: &Scan, id: &str) -> Result<Option<(String, String)>> {
        let key = described(scan.db(), id);
        let list = async |tx: Transaction| {
            scan.verify(&tx).await?;
            let stored = tx.get(key.as_bytes(), Isolation::Serializable).await?;
            if let Some(before) = stored {
                unlist(&tx, &key, &text(&before));
            }
            let doc = self.layer.get(&tx, scan.db(), id).await?;
            let field = doc.map(|doc| doc.field).unwrap_or_default();
            let Some((from, to)) = field.split_once(' ') else { return Ok(None) };
            tx.set(key.as_bytes(), field.as_bytes());
            tx.set(listed(from, &key).as_bytes(), to.as_bytes());
            Ok(Some((from.to_owned(), to.to_owned())))
        };
        self.layer.store.run(list).await
    }
}

impl DbHandler<Scan> for Manager {
    async fn handle(&self, mut scan: Scan) -> HandlerResult {
        loop {
            let page = scan.page(100).await?;
            for row in &page.rows {
                // The replication is listed before it begins, so that the other consumer copies all changes from here on.
                if let Some((from, to)) = self.list(&scan, row.doc.id.as_str()).await? {
                    copy(&self.layer, (&self.dbs[&from], &self.dbs[&to]), &scan).await?;
                }
            }
            if !page.more {
                return Ok(());
            }
        }
    }

    async fn deleted(&self, deleted: DeletedDb) -> HandlerResult {
        // The replications that the deleted database described end with it.
        let prefix = format!("list/{}\0", deleted.db.name);
        let kept = deleted.successor.map(|instance| instance.to_string());
        for (rest, ends) in self.layer.rows(&prefix).await? {
            if kept.as_ref().is_some_and(|kept| rest.starts_with(kept)) {
                continue;
            }
            let (key, ends) = (format!("{prefix}{rest}"), text(&ends));
            let end = async |tx: Transaction| {
                deleted.verify(&tx).await?;
                unlist(&tx, &key, &ends);
                Ok(())
            };
            self.layer.store.run(end).await?;
        }
        Ok(())
    }
}

/// Returns the prefix of the keys with the cursors up to which the documents of a database are replicated.
fn progress_of(from: &notibus::DbInstance) -> String {
    format!("replicated/{from}/")
}

/// Brings a target up to date with its source, from its saved position.
async fn copy(layer: &Layer, (from, to): (&Db, &Db), work: &Work<Notification>) -> Result<()> {
    let feed = layer.changes.feed(from);
    let key = format!("{}{}", progress_of(&from.instance), to.instance).into_bytes();
    loop {
        let step = async |tx: Transaction| {
            // A call that is over, or whose work has begun elsewhere, can no longer write anything.
            work.verify(&tx).await?;
            let stored = tx.get(&key, Isolation::Serializable).await?;
            let since = stored.map_or(Ok(Cursor::BEGINNING), |bytes| Cursor::from_bytes(&bytes))?;
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

/// Copies what changed in a database to the targets of its replications.
async fn copy_all(layer: Layer, dbs: Dbs, work: Work<Notification>) -> HandlerResult {
    if let Some(gone) = work.gone() {
        // The copies remain. The saved positions are no longer needed.
        let clear = async |tx: Transaction| {
            work.verify(&tx).await?;
            tx.clear_range(&KeyRange::prefix(progress_of(&gone)));
            Ok(())
        };
        layer.store.run(clear).await?;
    }
    let Some(row) = work.row().filter(|row| !row.is_deleted()) else { return Ok(()) };
    let from = row.db();
    for (_, to) in layer.rows(&listed(from.name.as_str(), "")).await? {
        copy(&layer, (&from, &dbs[&text(&to)]), &work).await?;
    }
    Ok(())
}

/// Starts a member of each consumer, both on one new node.
async fn start(bus: &Bus, layer: &Layer, dbs: &Dbs) -> Result<[Consumer; 2]> {
    let interval = Duration::from_millis(50);
    let node = bus.node(NodeOptions::default().heartbeat(interval * 4).expiry(interval * 20)).await?;
    let options =
        ConsumerOptions::default().checkpoint_interval(interval).backoff_max(Duration::from_secs(1));
    let member = |name: &str, filter, debounce| -> Result<ConsumerBuilder<Notification>> {
        let member = node.consumer(name)?.start_from(Cursor::BEGINNING).filter(filter);
        Ok(member.options(options.clone().debounce(debounce)))
    };
    let manager = Manager { layer: layer.clone(), dbs: Arc::clone(dbs) };
    let replicators = Filter::glob("{_replicator,*/_replicator}")?;
    let managing = member("replicator", replicators, Duration::ZERO)?;
    let managing = managing.run(replicate("seen/", manager)).await?;
    let (layer, dbs) = (layer.clone(), Arc::clone(dbs));
    let copying = member("copier", Filter::prefix("db"), Duration::from_millis(10))?;
    let copying = copying.run(move |work| copy_all(layer.clone(), Arc::clone(&dbs), work)).await?;
    Ok([managing, copying])
}

/// Waits until neither consumer has anything left to do. What the consumers write is news to them as well.
async fn rest(bus: &Bus, members: &[Consumer; 2]) -> Result<()> {
    loop {
        while !bus.is_drained().await? {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let last = bus.feed().last_sequence().await?;
        let mut is_at_rest = true;
        for member in members {
            member.caught_up().await?;
            is_at_rest &= member.handle().deferred(None, 1).await?.is_empty();
        }
        if is_at_rest && bus.is_drained().await? && bus.feed().last_sequence().await? == last {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Deletes a `_replicator` database. Fails unless its replications end and the others continue.
async fn check_end(
    bus: &Bus,
    members: &[Consumer; 2],
    (layer, replicator): (&Layer, &Db),
    dbs: &BTreeMap<String, Db>,
) -> Result<(), Box<dyn Error>> {
    layer.delete(replicator).await?;
    rest(bus, members).await?;
    let last = [("last".to_owned(), "text".to_owned())];
    layer.edit(&dbs["db4"], &last).await?;
    layer.edit(&dbs["db0"], &last).await?;
    rest(bus, members).await?;
    let has_last = async |db: &str| -> Result<bool> {
        Ok(layer.all(&dbs[db]).await?.iter().any(|(id, _)| id == "last"))
    };
    if has_last("db5").await? || !has_last("db2").await? {
        return Err("replications that were ended continue, or others do not".into());
    }
    Ok(())
}

/// The documents that each database should have at the end: fields by id.
type Model = BTreeMap<String, BTreeMap<String, String>>;

/// Edits random documents while the rest of the example runs: those of two sources, and documents in their targets that no replication
/// writes. Returns the expected documents.
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
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let running = bus.start(StartOptions::default()).await?;
    let layer = Layer::new(&store, &bus);
    let mut dbs = BTreeMap::new();
    for n in 0..DBS {
        dbs.insert(format!("db{n}"), layer.create(&format!("db{n}"), 2).await?);
    }
    let dbs = Arc::new(dbs);
    let replicator = layer.create("_replicator", 1).await?;
    let shop = layer.create("shop/_replicator", 1).await?;
    let describe = async |db: &Db, id: &str, ends: &str| layer.edit(db, &[(id.into(), ends.into())]).await;

    // The edits start before the first replication is described, and end after the last.
    let mut random = fastrand::Rng::new();
    let edits = tokio::spawn(edit_on(layer.clone(), Arc::clone(&dbs), random.fork()));
    let stay = start(&bus, &layer, &dbs).await?;
    let mut crash = start(&bus, &layer, &dbs).await?;
    describe(&replicator, "r1", "db0 db1").await?;
    describe(&shop, "r2", "db4 db5").await?;
    for round in 0..ROUNDS {
        if round == ROUNDS / 2 {
            describe(&replicator, "r3", "db1 db2").await?;
        }
        tokio::time::sleep(Duration::from_millis(random.u64(..50))).await;
        // One member of each consumer crashes.
        drop(crash);
        crash = start(&bus, &layer, &dbs).await?;
    }
    let model = edits.await??;
    rest(&bus, &stay).await?;
    check(&layer, &dbs, model).await?;
    check_end(&bus, &stay, (&layer, &shop), &dbs).await?;
    println!("{EDITS} edits, {} runs", bus.stats().consumer_rows);
    for member in stay.into_iter().chain(crash) {
        member.shutdown().await?;
    }
    running.shutdown().await?;
    Ok(())
}
