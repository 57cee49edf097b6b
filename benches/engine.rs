//! The embedded engine: transactions committed and keys read per second, in memory and in a folder; how long a large folder takes to open,
//! and how many bytes it occupies on disk.
//!
//! Each commit writes one key of 32 bytes with a value of 100 bytes, without reading. `writers` tasks commit concurrently, each one
//! transaction after another; in a folder they share the syncs.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::{
    cell::OnceCell,
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use notibus::store::{Isolation, KeyRange, RangeRead, Store};
use tokio::{runtime::Runtime, task::JoinSet};

/// Returns key number `n`, spread over the key space.
fn key(n: u64) -> [u8; 32] {
    let mut key = [b'k'; 32];
    key[1..9].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

/// Commits `count` transactions with `writers` tasks.
async fn commit(store: &Store, writers: u64, count: u64) -> Duration {
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for writer in 0..writers {
        let store = store.clone();
        tasks.spawn(async move {
            for n in (writer..count).step_by(usize::try_from(writers).unwrap()) {
                let tx = store.begin();
                tx.set(&key(n), &[7; 100]);
                tx.commit().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    started.elapsed()
}

/// The number of rows in the folder that is opened, and whose size is printed.
const OPENED_ROWS: u64 = 1_000_000;

fn open(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("open");
    group.sample_size(10);
    let folder = OnceCell::new();
    group.bench_function("1,000,000 rows", |b| {
        // The folder is only filled if this benchmark is requested.
        let dir = folder.get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            let store = Store::open_dir(dir.path()).unwrap();
            runtime.block_on(commit(&store, 1_000, OPENED_ROWS));
            drop(store);
            let files = std::fs::read_dir(dir.path()).unwrap();
            let len: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
            println!("{OPENED_ROWS} rows of 132 bytes: {len} bytes on disk");
            dir
        });
        b.iter_custom(|count| {
            let opened = (0..count).map(|_| {
                let started = Instant::now();
                let _db = black_box(Store::open_dir(dir.path()).unwrap());
                started.elapsed()
            });
            opened.sum()
        });
    });
    group.finish();
}

fn engine(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("engine");
    group.throughput(Throughput::Elements(1));
    for writers in [1, 8] {
        group.bench_function(format!("commit/memory/{writers} writers"), |b| {
            b.iter_custom(|count| {
                let store = Store::memory();
                runtime.block_on(commit(&store, writers, count))
            });
        });
    }
    group.sample_size(10);
    for writers in [1, 8, 256] {
        group.bench_function(format!("commit/folder/{writers} writers"), |b| {
            b.iter_custom(|count| {
                let dir = tempfile::tempdir().unwrap();
                let store = Store::open_dir(dir.path()).unwrap();
                runtime.block_on(commit(&store, writers, count))
            });
        });
    }
    group.sample_size(100);

    let rows = 100_000;
    let store = Store::memory();
    runtime.block_on(commit(&store, 1, rows));
    let mut next = 0;
    group.bench_function("get", |b| {
        b.iter_custom(|count| {
            runtime.block_on(async {
                let started = Instant::now();
                let mut tx = store.begin();
                for n in 0..count {
                    // A transaction is too old after 5 s.
                    if n % 100_000 == 99_999 {
                        tx = store.begin();
                    }
                    next = (next + 1) % rows;
                    black_box(tx.get(&key(next), Isolation::Snapshot).await.unwrap());
                }
                started.elapsed()
            })
        });
    });
    group.throughput(Throughput::Elements(rows));
    group.bench_function("scan of 100,000 rows", |b| {
        b.iter(|| {
            runtime.block_on(async {
                let tx = store.begin();
                let mut pages = tx.pages(RangeRead::new(KeyRange::prefix("k")), Isolation::Snapshot);
                let mut found = 0;
                while let Some(page) = pages.next().await.unwrap() {
                    found += page.len() as u64;
                }
                assert_eq!(found, rows);
            });
        });
    });
    group.finish();
}

criterion_group!(benches, engine, open);
criterion_main!(benches);
