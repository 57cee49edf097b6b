//! Parallel jobs: all tasks end at one state of the feed, whatever happens while they run, or the job has no result.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::{db, wide_bus};
use notibus::{
    Bus, Cursor, Db, Error, Sequence,
    changes::{Change, Changes, ChangesOptions, DocId, DocSummary, Revision},
    consumer::{ParallelBatch, ParallelJob, ParallelJobOptions},
    store::{AtomicOp, Isolation, Store, Transaction},
};

/// A layer with one database of documents.
#[derive(Clone)]
struct Layer {
    bus: Bus,
    changes: Changes,
    db: Db,
    /// Every edit: the document, its number, and its sequence.
    history: Arc<Mutex<Vec<(String, u64, Sequence)>>>,
}

/// Returns the layer's key for the last edit of the document `id`, and its number of edits.
fn key(id: &str) -> Vec<u8> {
    format!("doc/{id}").into_bytes()
}

/// Returns the number of edits in the layer's row of a document.
fn edits(stored: &[u8]) -> u64 {
    u64::from_be_bytes(stored[13..].try_into().unwrap())
}

impl Layer {
    async fn new(store: &Store, shards: u32) -> Self {
        let bus = wide_bus(store).await;
        let layer = Self { changes: bus.changes(), bus, db: db("docs", 1), history: Arc::default() };
        let options = ChangesOptions::default().shards(shards);
        store.run(async |tx| layer.changes.create(&tx, &layer.db, &options).await).await.unwrap();
        layer
    }

    async fn edit(&self, id: &str) {
        let edit = async |tx: Transaction| {
            let stored = tx.get(&key(id), Isolation::Serializable).await?;
            let previous = stored.as_ref().map(|stored| Sequence::from_bytes(&stored[..13])).transpose()?;
            let position = stored.as_ref().map_or(0, |stored| edits(stored)) + 1;
            let revision = Revision { position, hash: [0; 16] };
            let doc = DocSummary { id: DocId::new(id)?, revision, branches: 1, is_deleted: false };
            let edited = self.changes.writer(&tx, &self.db).await?.record(&doc, previous)?;
            let value = edited.operand(&[], &position.to_be_bytes());
            tx.atomic(AtomicOp::SetVersionstampedValue, &key(id), &value);
            Ok((position, edited))
        };
        let edited = self.bus.run_exactly_once(None, edit).await.unwrap();
        let (position, sequence) = edited.value;
        self.history.lock().unwrap().push((id.to_owned(), position, sequence.of(edited.committed)));
    }

    async fn fill(&self, docs: u32) {
        for n in 0..docs {
            self.edit(&format!("doc{n}")).await;
        }
    }

    fn job(&self, since: impl Into<Cursor>) -> ParallelJob<Change> {
        let options = ParallelJobOptions::default().batch_rows_max(7);
        ParallelJob::new(self.changes.feed(&self.db), since).with_options(options)
    }

    /// Returns how many times each document had been edited at `to`.
    fn state_at(&self, to: Cursor) -> BTreeMap<String, u64> {
        let to = to.position();
        let mut state = BTreeMap::new();
        for (id, position, sequence) in &*self.history.lock().unwrap() {
            if *sequence <= to {
                let last = state.entry(id.clone()).or_default();
                *last = (*position).max(*last);
            }
        }
        state
    }
}

/// An index: the newest revision of each document. The test fails if an older revision arrives after a newer one.
#[derive(Clone, Default)]
struct Index(Arc<Mutex<BTreeMap<String, u64>>>);

impl Index {
    fn put(&self, batch: &ParallelBatch<Change>) {
        let mut index = self.0.lock().unwrap();
        for row in &batch.rows {
            let before = index.insert(row.doc.id.to_string(), row.doc.revision.position);
            assert!(before <= Some(row.doc.revision.position), "{} went back", row.doc.id);
        }
    }

    fn get(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn an_index_is_built_and_goes_on_from_where_it_was() {
    let layer = Layer::new(&Store::memory(), 4).await;
    layer.fill(50).await;
    let index = Index::default();
    let put = |index: &Index| {
        let index = index.clone();
        move |batch: ParallelBatch<Change>| {
            index.put(&batch);
            async { Ok(()) }
        }
    };
    let first = layer.job(Cursor::BEGINNING).run(put(&index)).await.unwrap();
    assert_eq!(index.get(), layer.state_at(first));
    assert_eq!(index.get().len(), 50);
    layer.edit("doc3").await;
    layer.edit("new").await;
    let news = Index::default();
    let second = layer.job(first).run(put(&news)).await.unwrap();
    assert_eq!(news.get(), BTreeMap::from([("doc3".to_owned(), 2), ("new".to_owned(), 1)]));
    assert!(second > first);
    let nothing = Index::default();
    layer.job(second).run(put(&nothing)).await.unwrap();
    assert!(nothing.get().is_empty());
}

/// Writers write and the feed is resharded while the tasks work; the tasks are so slow that their snapshots expire. At the end their
/// index is the state of one snapshot.
#[tokio::test(start_paused = true)]
async fn all_tasks_end_at_one_state_while_everything_goes_on() {
    for seed in 0..30 {
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let layer = Layer::new(&Store::memory(), random.u32(1..6)).await;
        layer.fill(120).await;
        let done = Arc::new(AtomicBool::new(false));
        let load = {
            let (layer, done, mut random) = (layer.clone(), Arc::clone(&done), random.fork());
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    layer.edit(&format!("doc{}", random.u32(..200))).await;
                    if random.u8(..20) == 0 {
                        layer.changes.feed(&layer.db).reshard(random.u32(1..6), None).await.unwrap();
                    }
                    tokio::time::sleep(Duration::from_millis(random.u64(50..600))).await;
                }
            })
        };
        let index = Index::default();
        let work = {
            let (index, random) = (index.clone(), Mutex::new(random.fork()));
            move |batch: ParallelBatch<Change>| {
                // Up to 3 s for a batch: a shard of many batches takes longer than a snapshot is valid.
                let pause = Duration::from_millis(random.lock().unwrap().u64(..3_000));
                let index = index.clone();
                async move {
                    tokio::time::sleep(pause).await;
                    index.put(&batch);
                    Ok(())
                }
            }
        };
        let to = layer.job(Cursor::BEGINNING).run(work).await.unwrap();
        assert_eq!(index.get(), layer.state_at(to), "the state of one moment, no more and no less");
        done.store(true, Ordering::Relaxed);
        load.await.unwrap();
    }
}

/// Regression: tasks that had to wait for their turn always found the round's version too old, so no round ended at its version.
#[tokio::test(start_paused = true)]
async fn a_job_ends_although_its_tasks_wait_for_each_other() {
    let layer = Layer::new(&Store::memory(), 32).await;
    layer.fill(300).await;
    let writer = {
        let layer = layer.clone();
        tokio::spawn(async move {
            for n in 0.. {
                layer.edit(&format!("new{n}")).await;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
    };
    let index = Index::default();
    let work = {
        let index = index.clone();
        move |batch: ParallelBatch<Change>| {
            let index = index.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(5_500)).await;
                index.put(&batch);
                Ok(())
            }
        }
    };
    let job = ParallelJob::new(layer.changes.feed(&layer.db), Cursor::BEGINNING);
    let to = tokio::time::timeout(Duration::from_mins(10), job.run(work)).await.unwrap().unwrap();
    writer.abort();
    assert_eq!(index.get(), layer.state_at(to));
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_fails_is_worked_on_again() {
    let layer = Layer::new(&Store::memory(), 3).await;
    layer.fill(30).await;
    let (index, failures) = (Index::default(), Arc::new(AtomicUsize::new(0)));
    let work = {
        let (index, failures) = (index.clone(), Arc::clone(&failures));
        move |batch: ParallelBatch<Change>| {
            let fails = batch.attempt < 3;
            failures.fetch_add(usize::from(fails), Ordering::Relaxed);
            if !fails {
                index.put(&batch);
            }
            async move { if fails { Err("not yet".into()) } else { Ok(()) } }
        }
    };
    let to = layer.job(Cursor::BEGINNING).run(work).await.unwrap();
    assert_eq!(index.get(), layer.state_at(to));
    assert!(failures.load(Ordering::Relaxed) >= 6);
}

struct UnderWay(Arc<AtomicUsize>);
impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_that_fails_for_good_fails_the_job_and_stops_the_others() {
    let layer = Layer::new(&Store::memory(), 8).await;
    layer.fill(100).await;
    let under_way = Arc::new(AtomicUsize::new(0));
    let work = |fails: fn() -> notibus::consumer::HandlerResult| {
        let under_way = Arc::clone(&under_way);
        move |batch: ParallelBatch<Change>| {
            under_way.fetch_add(1, Ordering::SeqCst);
            let guard = UnderWay(Arc::clone(&under_way));
            let is_bad = batch.rows.iter().any(|row| row.doc.id.as_str() == "doc50");
            async move {
                let _guard = guard;
                if is_bad {
                    return fails();
                }
                // Longer than anything else takes.
                tokio::time::sleep(Duration::from_hours(1)).await;
                Ok(())
            }
        }
    };
    let failed = layer.job(Cursor::BEGINNING).run(work(|| Err("it is bad".into()))).await.unwrap_err();
    assert!(matches!(failed, Error::Task { shard: Some(_), attempts: 5, .. }), "{failed}");
    assert!(failed.to_string().contains("it is bad") && std::error::Error::source(&failed).is_some());
    let panicked = layer.job(Cursor::BEGINNING).run(work(|| panic!("it is very bad"))).await.unwrap_err();
    assert!(matches!(panicked, Error::Task { shard: None, .. }), "{panicked}");
    tokio::task::yield_now().await;
    assert_eq!(under_way.load(Ordering::SeqCst), 0, "no task is left");
}

#[tokio::test(start_paused = true)]
async fn the_snapshot_of_a_batch_shows_the_store_as_it_was_with_the_rows() {
    let layer = Layer::new(&Store::memory(), 2).await;
    layer.fill(40).await;
    let (other, disturbed) = (layer.clone(), Arc::new(AtomicBool::new(false)));
    let work = move |batch: ParallelBatch<Change>| {
        let (other, disturbed) = (other.clone(), Arc::clone(&disturbed));
        async move {
            if !disturbed.swap(true, Ordering::SeqCst) {
                for row in &batch.rows {
                    other.edit(row.doc.id.as_str()).await;
                }
            }
            for row in &batch.rows {
                let stored = batch.snapshot.get(&key(row.doc.id.as_str()), Isolation::Snapshot).await?;
                assert_eq!(edits(&stored.unwrap()), row.doc.revision.position);
            }
            Ok(())
        }
    };
    layer.job(Cursor::BEGINNING).run(work).await.unwrap();
}

/// Bug: if a database was deleted while a job worked on it, the job ended after all attempts as if its work had failed, so an index builder
/// could not tell the two apart. Fix: an error from the check of a batch ends the job, which returns it unchanged.
#[tokio::test]
async fn a_job_whose_feed_is_removed_ends_with_no_feed() {
    let store = Store::memory();
    let layer = Layer::new(&store, 2).await;
    layer.fill(3).await;
    let job = ParallelJob::new(layer.changes.feed(&layer.db), Cursor::BEGINNING);
    let works = Arc::new(AtomicUsize::new(0));
    let (counted, removing) = (Arc::clone(&works), layer.clone());
    let ended = job.run(move |batch| {
        counted.fetch_add(1, Ordering::Relaxed);
        let (layer, store) = (removing.clone(), store.clone());
        async move {
            store
                .run(async |tx| {
                    layer.changes.remove(&tx, &layer.db);
                    Ok(())
                })
                .await?;
            Ok(store.run(async |tx| batch.verify(&tx).await).await?)
        }
    });
    assert!(matches!(ended.await, Err(Error::NoFeed { .. })));
    assert!(works.load(Ordering::Relaxed) <= 2, "no batch is tried again");
}

/// Bug: if the work read the removed feed of another database, the job ended as if its own feed had been removed.
#[tokio::test(start_paused = true)]
async fn a_job_whose_work_meets_another_feed_that_is_gone_has_failed() {
    let layer = Layer::new(&Store::memory(), 2).await;
    layer.fill(1).await;
    let other = layer.changes.feed(&db("other", 2));
    let job = layer.job(Cursor::BEGINNING);
    let ended = job.run(move |_| {
        let other = other.clone();
        async move {
            other.page(Cursor::BEGINNING, 1).await?;
            Ok(())
        }
    });
    assert!(matches!(ended.await, Err(Error::Task { .. })));
}

#[tokio::test]
async fn bad_input_is_a_typed_error() {
    let layer = Layer::new(&Store::memory(), 2).await;
    layer.fill(3).await;
    let job =
        |options| ParallelJob::new(layer.changes.feed(&layer.db), Cursor::BEGINNING).with_options(options);
    let default = ParallelJobOptions::default;
    for bad in [
        default().tasks_max(0),
        // More than a semaphore allows, which would panic.
        default().tasks_max(usize::MAX),
        default().attempts_max(0),
        default().batch_rows_max(0),
        default().batch_rows_max(10_001),
    ] {
        assert!(matches!(job(bad).run(|_| async { Ok(()) }).await, Err(Error::Invalid { .. })));
    }
    let ahead = ParallelJob::new(layer.changes.feed(&layer.db), Sequence::MAX);
    let refused = ahead.run(|_| async { Ok(()) }).await;
    assert!(matches!(refused, Err(Error::Invalid { what: "sequence", .. })));
    let none = ParallelJob::new(layer.changes.feed(&db("other", 9)), Cursor::BEGINNING);
    assert!(matches!(none.run(|_| async { Ok(()) }).await, Err(Error::NoFeed { .. })));
}
