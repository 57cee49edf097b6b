//! The whole bus, from the commit of an event to its delivery: many writers share the databases and record one event of each, as fast as
//! the store allows; one subscriber receives all events.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use notibus::{Bus, BusOptions, Db, DbInstance, Filter, NotifierOptions, StartOptions, store::Store};
use tokio::task::JoinSet;
use tokio_stream::StreamExt;

const DATABASES: usize = 20_000;

/// What a case varies.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub partitions: u32,
    /// The longest pause after a fold; the default if `None`.
    pub pause: Option<Duration>,
    pub writers: usize,
}

impl Case {
    /// Lists all cases: with and without pauses, for few and many writers.
    pub fn all() -> impl Iterator<Item = Self> {
        [4, 64, 256].into_iter().flat_map(|writers| {
            [None, Some(Duration::ZERO)].map(|pause| Self { partitions: 64, pause, writers })
        })
    }
}

/// Runs `case` on `store`, and prints the rate and the time from before the commit to the delivery.
pub async fn print(what: &str, store: &Store, case: Case) {
    let prefix = format!("whole/{:016x}/", fastrand::u64(..)).into_bytes();
    let options = BusOptions::default().prefix(prefix).partitions(case.partitions);
    let bus = Bus::open(store, options).await.unwrap();
    let mut notifier = NotifierOptions::default();
    if let Some(pause) = case.pause {
        notifier = notifier.fold_interval_max(pause);
    }
    let running = bus.start(StartOptions::default().notifier(Some(notifier))).await.unwrap();
    let mut deliveries =
        running.dispatcher().subscribe(Filter::all()).deliveries(|trouble| panic!("{trouble}"));
    let db = |n| Db::new(format!("db-{n}").parse().unwrap(), DbInstance::new());
    let dbs: Arc<Vec<Db>> = Arc::new((0..DATABASES).map(db).collect());
    let began: Arc<Vec<AtomicU32>> = Arc::new((0..DATABASES).map(|_| AtomicU32::new(0)).collect());
    let start = Instant::now();
    let mut writers = JoinSet::new();
    for writer in 0..case.writers {
        let (store, producer) = (store.clone(), bus.producer());
        let (dbs, began) = (Arc::clone(&dbs), Arc::clone(&began));
        writers.spawn(async move {
            for (db, began) in dbs.iter().zip(&*began).skip(writer).step_by(case.writers) {
                began.store(micros(start), Ordering::Release);
                store
                    .run(async |tx| {
                        producer.updated(&tx, db);
                        Ok(())
                    })
                    .await
                    .unwrap();
            }
        });
    }
    let mut latencies = Vec::with_capacity(DATABASES);
    while latencies.len() < DATABASES {
        let delivery = deliveries.next().await.unwrap();
        let number: usize = delivery.notification().name.as_str()[3..].parse().unwrap();
        latencies.push(micros(start) - began[number].load(Ordering::Acquire));
    }
    let took = start.elapsed();
    writers.join_all().await;
    latencies.sort_unstable();
    let at = |part: usize| f64::from(latencies[latencies.len() * part / 100]) / 1_000.0;
    let stats = bus.stats();
    println!(
        "{what}, {} partitions, {} writers, {}: {:.0} events/s, p50 {:.1} ms, p99 {:.1} ms, {} folds, {} retries",
        case.partitions,
        case.writers,
        case.pause.map_or("default pauses".to_owned(), |pause| format!("pauses of {pause:?}")),
        per_second(took),
        at(50),
        at(99),
        stats.folds,
        stats.fold_retries,
    );
    drop(deliveries);
    running.shutdown().await.unwrap();
}

fn micros(since: Instant) -> u32 {
    u32::try_from(since.elapsed().as_micros()).unwrap()
}

#[expect(clippy::cast_precision_loss, reason = "it is a rate")]
fn per_second(took: Duration) -> f64 {
    DATABASES as f64 / took.as_secs_f64()
}
