//! A feed of document changes in memory: the cost of reading it merged, by number of shards; the cost that writing to it adds to an edit;
//! and how jobs scale with shards.
//!
//! `read` reads 1,000,000 rows in order, page by page, over and over; a sample reads 100,000 of them. First it reads all of them once and
//! prints how much the memory of the process grew: by a page, not by the feed.
//!
//! `write` edits documents of 100 bytes; each edit reads its document if there is one. `and change` also writes the row of the feed, and
//! the event for the database. No notifier runs. Throughput is in documents.
//!
//! `job` hashes 2 KB per row, in tasks on as many threads as there are cores. It prints the largest number of concurrently working tasks,
//! which distinguishes a job that does not scale from a busy machine.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::{
    hash::{DefaultHasher, Hasher},
    hint::black_box,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, Sequence,
    changes::{Change, Changes, ChangesOptions, DocId, DocSummary, Revision},
    consumer::{HandlerResult, ParallelBatch, ParallelJob},
    feed::Feed,
    store::{AtomicOp, Isolation, Store, Transaction},
};
use tokio::runtime::Runtime;

/// The number of rows in the feed that is read.
const ROWS: u64 = 1_000_000;

const SAMPLE_ROWS: u64 = 100_000;

const JOB_ROWS: u64 = 100_000;

/// The number of documents that are updated.
const DOCS: u64 = 10_000;

/// A store with the changes feed of a database.
struct FeedFixture {
    store: Store,
    changes: Changes,
    db: Db,
}

/// Makes the summary of document number `n`.
fn summary(n: u64) -> DocSummary {
    let id = DocId::new(&format!("document-{n:08}")).unwrap();
    DocSummary { id, revision: Revision { position: 1, hash: [7; 16] }, branches: 1, is_deleted: false }
}

/// Returns the layer's key of document number `n`.
fn key(n: u64) -> Vec<u8> {
    [b"doc/", &n.to_be_bytes()[..]].concat()
}

impl FeedFixture {
    /// Makes an empty feed with this many shards.
    async fn new(shards: u32) -> Self {
        let store = Store::memory();
        let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
        let db = Db::new("docs".parse().unwrap(), DbInstance::new());
        let options = ChangesOptions::default().shards(shards);
        let changes = bus.changes();
        store.run(async |tx| changes.create(&tx, &db, &options).await).await.unwrap();
        Self { store, changes, db }
    }

    async fn filled(shards: u32, rows: u64) -> Self {
        let fixture = Self::new(shards).await;
        for first in (0..rows).step_by(1_000) {
            let tx = fixture.store.begin();
            let writer = fixture.changes.writer(&tx, &fixture.db).await.unwrap();
            for n in first..rows.min(first + 1_000) {
                writer.record(&summary(n), None).unwrap();
            }
            tx.commit().await.unwrap();
        }
        fixture
    }

    fn feed(&self) -> Feed<Change> {
        self.changes.feed(&self.db)
    }

    /// Edits the documents `docs` in one transaction; updates read the documents that they replace.
    async fn edit(&self, docs: impl Iterator<Item = u64>, is_update: bool, with_change: bool) {
        let tx = self.store.begin();
        let writer = if with_change { Some(self.changes.writer(&tx, &self.db).await.unwrap()) } else { None };
        for n in docs {
            let key = key(n);
            let previous = if is_update { read_doc(&tx, &key).await } else { None };
            match &writer {
                Some(writer) => {
                    let edited = writer.record(&summary(n), previous).unwrap();
                    tx.atomic(AtomicOp::SetVersionstampedValue, &key, &edited.operand(&[], &[7; 87]));
                }
                None => tx.set(&key, &[7; 100]),
            }
        }
        tx.commit().await.unwrap();
    }

    /// Edits `count` documents in transactions of `at_once`; updates cycle through the existing documents.
    async fn edits(&self, count: u64, at_once: u64, is_update: bool, with_change: bool) -> Duration {
        let started = Instant::now();
        for first in (0..count).step_by(usize::try_from(at_once).unwrap()) {
            let docs = first..count.min(first + at_once);
            self.edit(docs.map(|n| if is_update { n % DOCS } else { n }), is_update, with_change).await;
        }
        started.elapsed()
    }
}

/// Reads the sequence of the last edit of the document at `key`, which must exist.
async fn read_doc(tx: &Transaction, key: &[u8]) -> Option<Sequence> {
    let doc = tx.get(key, Isolation::Serializable).await.unwrap().unwrap();
    Some(Sequence::from_bytes(&doc[..13]).unwrap())
}

/// Returns the resident memory of this process, in KB.
fn resident_kb() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * 4
}

/// Reads the whole feed, and prints the time and the memory.
async fn read_all(name: &str, feed: &Feed<Change>, page_rows: usize) {
    let before = resident_kb();
    let (mut cursor, mut rows, mut peak) = (Cursor::BEGINNING, 0, before);
    let started = Instant::now();
    loop {
        let page = feed.page(cursor, page_rows).await.unwrap();
        rows += page.rows.len() as u64;
        cursor = page.next;
        // The page is still allocated here.
        peak = peak.max(resident_kb());
        if !page.more {
            break;
        }
    }
    let took = started.elapsed();
    assert_eq!(rows, ROWS);
    println!(
        "{name}: all {rows} rows in {took:.2?}; resident {} MB before, {} MB at most, {} MB after: grown by {} KB at most",
        before / 1_024,
        peak / 1_024,
        resident_kb() / 1_024,
        peak - before
    );
}

/// Reads `rows` rows from `cursor` on, and starts over at the end of the feed.
async fn read_some(feed: &Feed<Change>, cursor: &mut Cursor, mut rows: u64, page_rows: usize) -> Duration {
    let started = Instant::now();
    while rows > 0 {
        let page = feed.page(*cursor, page_rows).await.unwrap();
        rows = rows.saturating_sub(page.rows.len() as u64);
        *cursor = if page.more { page.next } else { Sequence::MIN.into() };
        black_box(page);
    }
    started.elapsed()
}

fn reads(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("feed/read");
    group.throughput(Throughput::Elements(SAMPLE_ROWS)).sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for shards in [1, 4, 16, 64] {
        let mut filled = None;
        for page_rows in [1_000, 10_000] {
            let name = format!("{shards} shards, pages of {page_rows}");
            // The first benchmark that is not filtered out fills the feed.
            let (mut cursor, mut is_first) = (Cursor::BEGINNING, true);
            group.bench_function(&name, |b| {
                let fixture: &FeedFixture = filled.get_or_insert_with(|| {
                    let fixture = runtime.block_on(FeedFixture::filled(shards, ROWS));
                    // Conflict ranges and replaced values are kept for 5 s.
                    std::thread::sleep(Duration::from_secs(6));
                    fixture
                });
                let feed = fixture.feed();
                if std::mem::take(&mut is_first) {
                    runtime.block_on(read_all(&name, &feed, page_rows));
                }
                b.iter_custom(|count| {
                    runtime.block_on(read_some(&feed, &mut cursor, count * SAMPLE_ROWS, page_rows))
                });
            });
        }
    }
    group.finish();
}

fn writes(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("feed/write");
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group.throughput(Throughput::Elements(1));
    for (edit, is_update) in [("insert", false), ("update", true)] {
        for (what, with_change) in [("document", false), ("document and change", true)] {
            for at_once in [1, 100] {
                group.bench_function(format!("{edit} of {what}, {at_once} at once"), |b| {
                    b.iter_custom(|count| {
                        runtime.block_on(async {
                            let fixture = FeedFixture::new(8).await;
                            if is_update {
                                fixture.edits(DOCS, 100, false, true).await;
                            }
                            fixture.edits(count, at_once, is_update, with_change).await
                        })
                    });
                });
            }
        }
    }
    group.finish();
}

/// The number of job tasks that are working now.
static AT_ONCE: AtomicU32 = AtomicU32::new(0);
/// The maximum of [`AT_ONCE`] so far.
static AT_ONCE_MAX: AtomicU32 = AtomicU32::new(0);

/// The work of the jobs.
async fn hash(batch: ParallelBatch<Change>) -> HandlerResult {
    AT_ONCE_MAX.fetch_max(AT_ONCE.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
    for row in &batch.rows {
        let mut hasher = DefaultHasher::new();
        hasher.write(&[row.doc.id.as_str().len() as u8; 2_048]);
        black_box(hasher.finish());
    }
    AT_ONCE.fetch_sub(1, Ordering::Relaxed);
    Ok(())
}

fn jobs(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("feed/job");
    group.throughput(Throughput::Elements(JOB_ROWS)).sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(5));
    for shards in [1, 8] {
        let fixture = runtime.block_on(FeedFixture::filled(shards, JOB_ROWS));
        group.bench_function(format!("{shards} shards"), |b| {
            b.to_async(&runtime).iter(|| async {
                let job = ParallelJob::new(fixture.feed(), Cursor::BEGINNING);
                job.run(hash).await.unwrap()
            });
        });
        println!("{shards} shards: at most {} tasks at once", AT_ONCE_MAX.swap(0, Ordering::Relaxed));
    }
    group.finish();
}

criterion_group!(benches, reads, writes, jobs);
criterion_main!(benches);
