//! A node on a machine whose CPU is saturated by producers and other processes: overload causes delays, not failures.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use notibus::{Bus, BusOptions, Db, DbInstance};
use tokio::{task::JoinSet, task::block_in_place};

use crate::{
    cluster::Cluster,
    fixture,
    stage::{Stage, status_of},
};

/// How long the CPU is saturated.
const BUSY: Duration = Duration::from_secs(10);

/// The number of tasks that record events as fast as they can.
const PRODUCERS: u64 = 32;

/// The node never drops out, `ready` is answered, and events are still delivered. The only deadline that the node must meet is its expiry.
pub(crate) async fn a_node_works_beside_producers_that_take_all_processor_time() {
    let stage = block_in_place(|| Stage::start(Cluster::start()));
    let mut follower = stage.follow();
    let store = fixture::open(stage.cluster.file()).await;
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let (is_over, recorded) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut producers = JoinSet::new();
    for number in 0..PRODUCERS {
        let (store, producer) = (store.clone(), bus.producer());
        let (is_over, recorded) = (Arc::clone(&is_over), Arc::clone(&recorded));
        producers.spawn(async move {
            let db = Db::new(format!("busy-{number}").parse().unwrap(), DbInstance([1; 16]));
            let update = async |tx| {
                producer.updated(&tx, &db);
                Ok(())
            };
            while !is_over.load(Ordering::Relaxed) {
                store.run(update).await.unwrap();
                recorded.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let threads = 2 * thread::available_parallelism().map_or(1, usize::from);
    let mut rounds = 0;
    block_in_place(|| {
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let began = Instant::now();
            while began.elapsed() < BUSY || rounds == 0 {
                let ready = status_of(&stage.served.get("/_notibus/health/ready"));
                assert!(["200", "503"].contains(&&ready[..]), "it is answered: {ready}");
                follower.seen.clear();
                assert_eq!(stage.post(), "201");
                follower.until_all_rows();
                rounds += 1;
            }
            is_over.store(true, Ordering::Relaxed);
        });
    });
    while let Some(produced) = producers.join_next().await {
        produced.unwrap();
    }
    println!("{rounds} posts delivered beside {} events of others", recorded.load(Ordering::Relaxed));
    let log = stage.log.text();
    assert!(!log.contains("dropped out"), "{log}");
    block_in_place(|| stage.works(&mut follower));
    assert!(stage.served.stop(), "it ends in order");
}
