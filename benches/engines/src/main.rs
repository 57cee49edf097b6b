//! The embedded engine compared with the roots of an `imbl::OrdMap` of `Bytes`: what each keeps in memory, and how fast it commits, opens,
//! and reads at an older version.
//!
//! A database has two rows, like its row in the feed and the pointer to that row: keys of 60 bytes, values of 60 bytes. A commit sets five
//! random rows. Commits are 100 µs apart on their own clock, so that 50,000 of them are younger than the maximum age of a transaction: both
//! engines can read at the version of each. The map keeps a root for each version and nothing else: it detects no conflicts, has no
//! transactions and fires no watches. So its commits are an upper bound, and its memory is what persistent maps of rows cost.
//!
//! It prints one line. Run it once for each engine and size, because memory is measured for the whole process.
//!
//! On two cores (AMD EPYC), 2026-11-27:
//!
//! | databases | engine | a database | versions of 5 s | commits/s | opened in | a read at an older version |
//! |---|---|---|---|---|---|---|
//! | 10,000 | imbl | 419 B | 750 MB | 54 k | 4 ms | 3 µs |
//! | 10,000 | notibus | 865 B | 52 MB | 400 k | 24 ms | 40 ms |
//! | 1,000,000 | imbl | 488 B | 1,235 MB | 22 k | 0.48 to 0.74 s | 4 µs |
//! | 1,000,000 | notibus | 464 B | 48 MB | 117 to 135 k | 0.43 s | 223 ms |
//!
//! An older version is rebuilt for the first read of a transaction; further reads cost as much as any others.

use std::{
    collections::VecDeque,
    env, fs,
    hint::black_box,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use imbl::OrdMap;
use notibus::store::{Env, Environment, Isolation, Store};
use tokio::runtime::Runtime;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The time between commits, in microseconds of their own clock.
const STEP_US: u64 = 100;

/// How long an old version remains readable, in microseconds of the same clock.
const LIFETIME_US: u64 = 5_000_000;

/// The number of rows that a commit sets.
const MUTATIONS: u64 = 5;

/// The number of commits. In the second half, one version expires with each commit.
const COMMITS: u64 = 2 * LIFETIME_US / STEP_US;

/// The number of rows that a transaction sets while the store is filled.
const LOAD: u64 = 1_000;

/// The number of older versions that are read.
const OLD_READS: u64 = 40;

/// Returns the key of row `n`, spread over the key space of its kind.
fn key(n: u64) -> [u8; 60] {
    let mut key = [b'k'; 60];
    key[10] = b'0' + (n % 2) as u8;
    key[11..19].copy_from_slice(&(n / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

fn value(n: u64) -> [u8; 60] {
    let mut value = [7; 60];
    value[..8].copy_from_slice(&n.to_be_bytes());
    value
}

/// Chooses the rows, out of `rows`, that commit `n` sets.
fn chosen(n: u64, rows: u64) -> impl Iterator<Item = u64> {
    (0..MUTATIONS)
        .map(move |m| (n * MUTATIONS + m).wrapping_mul(0xd134_2543_de82_ef95).rotate_left(29) % rows)
}

/// Returns the resident memory of the process, in bytes.
fn resident() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4_096
}

/// The measurements of one engine.
#[derive(Default)]
struct Figures {
    /// The memory of the rows alone, and together with all versions of the last 5 s, in bytes.
    rows: u64,
    with_versions: u64,
    commits: Duration,
    opening: Duration,
    old_reads: Duration,
}

fn main() {
    let mut arguments = env::args().skip(1);
    let (engine, databases) = (arguments.next().unwrap(), arguments.next().unwrap().parse::<u64>().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let figures = match engine.as_str() {
        "imbl" => imbl(2 * databases, folder.path()),
        "notibus" => notibus(2 * databases, folder.path()),
        _ => panic!("the engine is imbl or notibus"),
    };
    let half = COMMITS / 2;
    println!(
        "{engine}, {databases} databases: {} B a database, {} MB more with the versions of 5 s, {} commits/s, opened in {:.3} s, \
         a read at an older version {} µs",
        figures.rows / databases,
        figures.with_versions.saturating_sub(figures.rows) / 1_000_000,
        u128::from(half) * 1_000_000 / figures.commits.as_micros(),
        figures.opening.as_secs_f64(),
        figures.old_reads.as_micros() / u128::from(OLD_READS),
    );
}

/// A map of rows at one version.
type Map = OrdMap<Bytes, Bytes>;

fn imbl(rows: u64, folder: &Path) -> Figures {
    let (mut figures, before) = (Figures::default(), resident());
    let mut map = Map::new();
    for n in 0..rows {
        map.insert(Bytes::copy_from_slice(&key(n)), Bytes::copy_from_slice(&value(n)));
    }
    figures.rows = resident() - before;
    let mut roots = VecDeque::new();
    for n in 0..COMMITS {
        let started = Instant::now();
        for row in chosen(n, rows) {
            map.insert(Bytes::copy_from_slice(&key(row)), Bytes::copy_from_slice(&value(n)));
        }
        let now = n * STEP_US;
        roots.push_back((now, map.clone()));
        while roots.pop_front_if(|(at, _)| now - *at > LIFETIME_US).is_some() {}
        if n >= COMMITS / 2 {
            figures.commits += started.elapsed();
        }
    }
    figures.with_versions = resident() - before;
    let started = Instant::now();
    for n in 0..OLD_READS {
        let version = (COMMITS - 1 - n * COMMITS / 2 / OLD_READS) * STEP_US;
        let place = roots.partition_point(|(at, _)| *at < version);
        black_box(roots[place].1.get(&key(n)[..]));
    }
    figures.old_reads = started.elapsed();
    // The rows are written in order, as in a snapshot.
    let file = folder.join("rows");
    let bytes: Vec<u8> = map.iter().flat_map(|(key, value)| [key.clone(), value.clone()].concat()).collect();
    fs::write(&file, bytes).unwrap();
    drop((map, roots));
    let started = Instant::now();
    let bytes = fs::read(&file).unwrap();
    let rows = bytes.as_chunks::<120>().0.iter();
    black_box(
        rows.map(|row| (Bytes::copy_from_slice(&row[..60]), Bytes::copy_from_slice(&row[60..])))
            .collect::<Map>(),
    );
    figures.opening = started.elapsed();
    figures
}

/// A clock that advances by one step with each commit.
struct Clock(Arc<AtomicU64>);

impl Environment for Clock {
    fn now(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }

    fn wall_ms(&self) -> u64 {
        1_000
    }

    fn random(&self) -> u64 {
        0
    }

    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }
}

/// Sets `rows` to `value`, and returns the version.
async fn set(store: &Store, rows: impl Iterator<Item = u64>, value: impl Fn(u64) -> [u8; 60]) -> u64 {
    let tx = store.begin();
    rows.for_each(|row| tx.set(&key(row), &value(row)));
    tx.commit().await.unwrap().unwrap().versionstamp.version()
}

fn notibus(rows: u64, folder: &Path) -> Figures {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (mut figures, before, time) = (Figures::default(), resident(), Arc::new(AtomicU64::new(0)));
    let store = Store::memory_in(Env::new(Clock(Arc::clone(&time))));
    let load = |store: &Store, step: u64| {
        for first in (0..rows).step_by(LOAD as usize) {
            runtime.block_on(set(store, first..rows.min(first + LOAD), value));
            time.fetch_add(step, Ordering::Relaxed);
        }
    };
    load(&store, LIFETIME_US + 1);
    // The last group of commits is forgotten with the next commit.
    runtime.block_on(set(&store, 0..1, value));
    time.fetch_add(LIFETIME_US + 1, Ordering::Relaxed);
    runtime.block_on(set(&store, 0..1, value));
    figures.rows = resident() - before;
    let mut versions = Vec::new();
    for n in 0..COMMITS {
        let started = Instant::now();
        versions.push(runtime.block_on(set(&store, chosen(n, rows), |_| value(n))));
        time.fetch_add(STEP_US, Ordering::Relaxed);
        if n >= COMMITS / 2 {
            figures.commits += started.elapsed();
        }
    }
    figures.with_versions = resident() - before;
    let started = Instant::now();
    for n in 0..OLD_READS {
        let tx = store.begin();
        tx.set_read_version(versions[(COMMITS - 1 - n * COMMITS / 2 / OLD_READS) as usize]);
        black_box(runtime.block_on(tx.get(&key(n), Isolation::Snapshot)).unwrap());
    }
    figures.old_reads = started.elapsed();
    drop(store);
    figures.opening = opening(&runtime, folder, |store| load(store, 0));
    figures
}

/// Measures how long it takes to open a folder with the rows that `load` writes, all of them in a snapshot.
fn opening(runtime: &Runtime, folder: &Path, load: impl Fn(&Store)) -> Duration {
    let (filled, copy) = (folder.join("filled"), folder.join("copy"));
    let store = Store::open_dir(&filled).unwrap();
    load(&store);
    runtime.block_on(set(&store, 0..1, value));
    drop(store);
    // A copy consists of a snapshot alone.
    Store::backup_dir(&filled, &copy).unwrap();
    let started = Instant::now();
    black_box(Store::open_dir(&copy).unwrap());
    started.elapsed()
}
