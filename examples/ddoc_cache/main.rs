//! A cache of design documents that the bus keeps up to date: it reads each document from the store once, and again after each change,
//! while writers change the documents.
//!
//! Run it with `cargo run --release --example ddoc_cache`. It exits with 1 if a read returned a document older than a change that the cache
//! had already reached.

mod cache;

use std::error::Error;

use cache::{DdocCache, key};
use notibus::{
    Bus, BusOptions, Db, DbInstance, NotifierOptions, Producer, Result, StartOptions, event::DdocId,
    store::Store,
};

/// The number of databases.
const DBS: u64 = 20;

/// The number of changes to design documents.
const CHANGES: u64 = 500;

/// The number of reads after each change.
const READS: u64 = 200;

/// Writes version `change` of the design document `id`, and records the event. Returns the version of the commit.
async fn write(bus: &Bus, producer: &Producer, db: &Db, id: &DdocId, change: u64) -> Result<u64> {
    let done = bus
        .run_exactly_once(None, async |tx| {
            tx.set(&key(&db.name, id), &change.to_be_bytes());
            producer.ddoc_updated(&tx, db, Some(id));
            Ok(())
        })
        .await?;
    Ok(done.committed.versionstamp.version())
}

/// Returns the version in a document.
fn version(doc: Option<&[u8]>) -> u64 {
    doc.and_then(|bytes| Some(u64::from_be_bytes(bytes.try_into().ok()?))).unwrap_or(0)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let options = NotifierOptions::default().fold_interval_max(std::time::Duration::ZERO);
    let running = bus.start(StartOptions::default().notifier(Some(options))).await?;
    let dispatcher = running.dispatcher();
    let cache = DdocCache::start(&store, dispatcher).await?;

    let names = (0..DBS).map(|n| format!("db{n}").parse());
    let dbs: Vec<_> = names.map(|name| Ok(Db::new(name?, DbInstance::new()))).collect::<Result<Vec<_>>>()?;
    let (producer, id): (_, DdocId) = (bus.producer(), "_design/app".parse()?);
    let mut random = fastrand::Rng::new();
    let mut versions = vec![0; dbs.len()];
    let mut stale = 0;
    for change in 1..=CHANGES {
        let place = random.usize(..dbs.len());
        let committed = write(&bus, &producer, &dbs[place], &id, change).await?;
        versions[place] = change;
        cache.wait_until(committed).await?;
        for _ in 0..READS {
            let place = random.usize(..dbs.len());
            let read = cache.get(&dbs[place].name, &id).await?;
            stale += u64::from(version(read.as_deref()) < versions[place]);
        }
    }
    let (hits, misses) = cache.hits();
    println!("{hits} reads from memory, {misses} from the store, {stale} stale");
    cache.stop().await;
    running.shutdown().await?;
    if stale > 0 { Err("stale reads".into()) } else { Ok(()) }
}
