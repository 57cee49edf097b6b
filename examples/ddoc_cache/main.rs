//! A cache of design documents that the bus keeps right: it reads each document once, and again after it was changed, while
//! writers change them.
//!
//! Run it with `cargo run --release --example ddoc_cache`. It exits with 1 if a read was older than an event that had been
//! delivered before.

mod cache;

use std::{error::Error, sync::Arc};

use cache::{DdocCache, key};
use notibus::{
    Bus, BusOptions, Db, DbInstance, DdocId, DispatcherOptions, NotifierOptions, Producer, Result, Sequence,
    store::Database,
};

/// Databases.
const DBS: u64 = 20;

/// Changes of design documents.
const CHANGES: u64 = 500;

/// Reads after each.
const READS: u64 = 200;

/// Writes version `version` of the design document `id`, and tells so.
async fn write(store: &Database, producer: &Producer, db: &Db, id: &DdocId, version: u64) -> Result<()> {
    store
        .run(async |tx| {
            tx.set(&key(&db.name, id), &version.to_be_bytes());
            producer.ddoc_updated(&tx, db, Some(id));
            Ok(())
        })
        .await
}

/// The version in a document.
fn version(doc: Option<&[u8]>) -> u64 {
    doc.and_then(|bytes| Some(u64::from_be_bytes(bytes.try_into().ok()?))).unwrap_or(0)
}

/// Waits until the cache has worked on the last event of `db`.
async fn delivered(bus: &Bus, cache: &DdocCache, db: &Db, after: Sequence) -> Result<Sequence> {
    loop {
        let row = bus.feed().newest(&db.name).await?;
        if let Some(row) = row.filter(|row| row.sequence > after && cache.position() >= row.sequence) {
            return Ok(row.sequence);
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = Database::memory();
    let bus = Bus::open(&store, BusOptions::default()).await?;
    let options = NotifierOptions { fold_interval: std::time::Duration::ZERO, ..Default::default() };
    let notifier = bus.notifier(options).await?;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await?;
    let (cache, listener) = DdocCache::start(&store, &dispatcher)?;

    let names = (0..DBS).map(|n| format!("db{n}").parse());
    let dbs: Vec<_> =
        names.map(|name| Ok(Db::new(name?, DbInstance::random(store.env())))).collect::<Result<Vec<_>>>()?;
    let (producer, id): (_, DdocId) = (bus.producer(), "_design/app".parse()?);
    let mut random = fastrand::Rng::new();
    let mut versions = vec![0; dbs.len()];
    let mut last = vec![Sequence::MIN; dbs.len()];
    let mut stale = 0;
    for change in 1..=CHANGES {
        let place = random.usize(..dbs.len());
        write(&store, &producer, &dbs[place], &id, change).await?;
        versions[place] = change;
        last[place] = delivered(&bus, &cache, &dbs[place], last[place]).await?;
        for _ in 0..READS {
            let place = random.usize(..dbs.len());
            let read = Arc::clone(&cache).get(&dbs[place].name, &id).await?;
            stale += u64::from(version(read.as_deref()) < versions[place]);
        }
    }
    let (hits, misses) = cache.hits();
    println!("{hits} reads from memory, {misses} from the store, {stale} stale");
    listener.stop().await;
    dispatcher.shutdown().await;
    notifier.shutdown().await?;
    if stale > 0 { Err("stale reads".into()) } else { Ok(()) }
}
