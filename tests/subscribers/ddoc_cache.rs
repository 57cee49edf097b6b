//! The cache of the example `ddoc_cache`: it has no stale reads after a barrier, and recovers after it has expired.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use notibus::{
    Bus, CommittedOnce, Db, Dispatcher, DispatcherOptions, EventKind, Notifier,
    event::DdocId,
    store::{Store, Transaction},
};

use crate::{
    cache::{DdocCache, key},
    common::{self, db, eager, forgetful, joined, until, wide_bus},
};

struct Layer {
    store: Store,
    bus: Bus,
    /// The notifier, which folds at once.
    notifier: Notifier,
    dispatcher: Dispatcher,
    cache: Arc<DdocCache>,
}

impl Layer {
    async fn new() -> Self {
        let store = Store::memory();
        let bus = wide_bus(&store).await;
        let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let cache = Arc::new(DdocCache::start(&store, &dispatcher).await.unwrap());
        Self { store, bus, notifier, dispatcher, cache }
    }

    /// Writes a version of `id`, or deletes `id`, and records the change, with or without the id. Waits until the cache has reached it.
    async fn write(&self, db: &Db, id: &DdocId, version: Option<u64>, with_id: bool) {
        let producer = self.bus.producer();
        let write = async |tx: Transaction| {
            match version {
                Some(version) => tx.set(&key(&db.name, id), &version.to_be_bytes()),
                None => tx.clear(&key(&db.name, id)),
            }
            producer.ddoc_updated(&tx, db, with_id.then_some(id));
            Ok(())
        };
        self.reach(self.bus.run_exactly_once(None, write).await.unwrap()).await;
    }

    /// Waits until the cache has reached the commit.
    async fn reach(&self, done: CommittedOnce<()>) {
        self.cache.wait_until(done.committed.versionstamp.version()).await.unwrap();
    }

    /// Reads `id` from the cache, and returns its version.
    async fn read(&self, db: &Db, id: &DdocId) -> Option<u64> {
        version(self.cache.get(&db.name, id).await.unwrap())
    }
}

fn version(doc: Option<Vec<u8>>) -> Option<u64> {
    doc.map(|bytes| u64::from_be_bytes(bytes.try_into().unwrap()))
}

#[tokio::test(start_paused = true)]
async fn a_change_is_seen_once_it_is_reached_and_what_has_not_changed_stays_in_memory() {
    let layer = Layer::new().await;
    let (a, b) = (db("a", 1), db("b", 1));
    let [x, y]: [DdocId; 2] = ["_design/x", "_design/y"].map(|id| id.parse().unwrap());
    for (db, id) in [(&a, &x), (&a, &y), (&b, &x)] {
        layer.write(db, id, Some(1), true).await;
        assert_eq!(layer.read(db, id).await, Some(1));
    }
    let (_, misses) = layer.cache.hits();
    layer.write(&a, &x, Some(2), true).await;
    assert_eq!((layer.read(&a, &y).await, layer.read(&b, &x).await), (Some(1), Some(1)));
    assert_eq!(layer.cache.hits().1, misses, "others are still there");
    assert_eq!(layer.read(&a, &x).await, Some(2));
    assert_eq!(layer.cache.hits().1, misses + 1);
    // Deletions are delivered, too, and so are changes whose id is not recorded.
    layer.write(&a, &x, None, true).await;
    assert_eq!(layer.read(&a, &x).await, None);
    layer.write(&a, &y, Some(3), false).await;
    assert_eq!(layer.read(&a, &y).await, Some(3));
    // This holds even if such a change is folded together with one whose id is recorded.
    layer.read(&a, &x).await;
    let producer = layer.bus.producer();
    let write = async |tx: Transaction| {
        for (id, with_id) in [(&x, true), (&y, false)] {
            tx.set(&key(&a.name, id), &4_u64.to_be_bytes());
            producer.ddoc_updated(&tx, &a, with_id.then_some(id));
        }
        Ok(())
    };
    layer.reach(layer.bus.run_exactly_once(None, write).await.unwrap()).await;
    assert_eq!((layer.read(&a, &x).await, layer.read(&a, &y).await), (Some(4), Some(4)));
}

/// On real threads, with readers that never pause: a read that begins after the cache has reached a change never returns an older version.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_stale_read_of_what_was_reached_is_impossible() {
    let layer = Arc::new(Layer::new().await);
    let (a, x): (Db, DdocId) = (db("a", 1), "_design/x".parse().unwrap());
    let (delivered, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let readers = (0..3).map(|_| {
        let (layer, a, x) = (Arc::clone(&layer), a.clone(), x.clone());
        let (delivered, is_over) = (Arc::clone(&delivered), Arc::clone(&is_over));
        tokio::spawn(async move {
            let mut reads = 0_u64;
            while !is_over.load(Ordering::Acquire) {
                let least = delivered.load(Ordering::Acquire);
                let read = layer.read(&a, &x).await.unwrap_or(0);
                assert!(read >= least, "read {read} after {least} was delivered");
                reads += 1;
                tokio::task::yield_now().await;
            }
            reads
        })
    });
    let readers: Vec<_> = readers.collect();
    for version in 1..=300 {
        layer.write(&a, &x, Some(version), true).await;
        delivered.store(version, Ordering::Release);
    }
    is_over.store(true, Ordering::Release);
    for reader in readers {
        assert!(reader.await.unwrap() > 0);
    }
    assert!(layer.cache.hits().0 > 0, "it does remember");
}

#[tokio::test(start_paused = true)]
async fn the_cache_recovers_from_having_expired() {
    let Layer { store, bus, notifier, dispatcher, cache } = Layer::new().await;
    let layer = Layer { store, bus, notifier, dispatcher, cache };
    let (gone, stays): (Db, Db) = (db("gone", 1), db("stays", 1));
    let x: DdocId = "_design/x".parse().unwrap();
    for db in [&gone, &stays] {
        layer.write(db, &x, Some(1), true).await;
        assert_eq!(layer.read(db, &x).await, Some(1));
    }
    let Layer { store, bus, notifier, dispatcher, cache } = layer;
    let suspended = dispatcher.suspend();
    // While the dispatcher is suspended, a database is deleted with its documents, and its tombstone is removed: no row shows its end.
    let producer = bus.producer();
    store
        .run(async |tx| {
            tx.clear(&key(&gone.name, &x));
            producer.deleted(&tx, &gone);
            Ok(())
        })
        .await
        .unwrap();
    let _janitor = joined(&bus).await.janitor(forgetful()).await.unwrap();
    until("the tombstone's end", async || bus.stats().tombstones_dropped == 1).await;
    let read = async |db: &Db| version(cache.get(&db.name, &x).await.unwrap());
    assert_eq!(read(&gone).await, Some(1), "no row has informed it");
    let dispatcher = suspended.resume();
    until("the news", async || read(&gone).await.is_none()).await;
    assert_eq!(read(&stays).await, Some(1));
    let layer = Layer { store, bus, notifier, dispatcher, cache };
    layer.write(&stays, &x, Some(2), true).await;
    assert_eq!(layer.read(&stays, &x).await, Some(2), "it goes on");
    layer.cache.stop().await;
    let created = common::record(&layer.store, &layer.bus, &gone, EventKind::Created.once().lanes());
    created.await;
}

/// Regression: a cache did not notice the end of its subscription, so it returned its cached documents forever.
#[tokio::test(start_paused = true)]
async fn a_cache_that_nobody_keeps_right_reads_the_store() {
    let layer = Layer::new().await;
    let (a, x): (Db, DdocId) = (db("a", 1), "_design/x".parse().unwrap());
    layer.write(&a, &x, Some(1), true).await;
    assert_eq!(layer.read(&a, &x).await, Some(1));
    layer.cache.stop().await;
    let write = async |tx: Transaction| {
        tx.set(&key(&a.name, &x), &2_u64.to_be_bytes());
        layer.bus.producer().ddoc_updated(&tx, &a, Some(&x));
        Ok(())
    };
    layer.store.run(write).await.unwrap();
    assert_eq!(layer.read(&a, &x).await, Some(2));
}
