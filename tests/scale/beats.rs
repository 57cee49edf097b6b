//! How late heartbeats are while producers and others take all the processor time: the defaults of [`NodeOptions`] were chosen from these
//! figures.
//!
//! Five seconds by default. `NOTIBUS_LOAD=full cargo test --release --test scale beats -- --nocapture` makes four runs of a minute each.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use notibus::{
    Bus, NodeOptions, NotifierOptions,
    store::{
        Store,
        testing::{Faults, Operation},
    },
};

use crate::common::{db, record, wide_bus};

/// The prefix of the rows of nodes, after the default prefix.
const NODES: &[u8] = b"notibus\x15\x0e\x02main\x00\x15\x04";

const NODES_COUNT: usize = 8;

/// The time of each node's last heartbeat, and the longest gap between two heartbeats of one node.
#[derive(Default)]
struct Gaps {
    last: HashMap<Bytes, Instant>,
    longest: Duration,
}

/// Returns the longest gap between two heartbeats of a node within `time`, while `hogs` threads spin and producers record without pauses.
async fn longest_gap(store: Store, time: Duration, hogs: usize) -> Duration {
    let (faults, gaps) = (Faults::new(&store), Arc::new(Mutex::new(Gaps::default())));
    let seen = Arc::clone(&gaps);
    faults.plan_commits(move |attempt| {
        for operation in attempt.mutations() {
            if let Operation::Set { key, .. } = operation
                && key.starts_with(NODES)
            {
                let (mut gaps, now) = (seen.lock().unwrap(), Instant::now());
                if let Some(before) = gaps.last.insert(key.clone(), now) {
                    gaps.longest = gaps.longest.max(now - before);
                }
            }
        }
        None
    });
    let mut nodes: Vec<(Bus, _)> = Vec::new();
    for _ in 0..NODES_COUNT {
        let bus = wide_bus(&faults.store()).await;
        let node = bus.node(NodeOptions::default()).await.unwrap();
        nodes.push((bus, node.notifier(NotifierOptions::default()).await.unwrap()));
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let hogs: Vec<_> = (0..hogs)
        .map(|_| {
            let is_over = Arc::clone(&is_over);
            thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        })
        .collect();
    let producers: Vec<_> = (0..4)
        .map(|producer| {
            let (is_over, bus, store) = (Arc::clone(&is_over), nodes[producer].0.clone(), faults.store());
            tokio::spawn(async move {
                let mut count = 0_u64;
                while !is_over.load(Ordering::Relaxed) {
                    count += 1;
                    let db = db(&format!("db{producer}-{}", count % 1_000), 1);
                    record(&store, &bus, &db, [1, 0, 1, 0]).await;
                }
                count
            })
        })
        .collect();
    tokio::time::sleep(time).await;
    is_over.store(true, Ordering::Relaxed);
    for hog in hogs {
        hog.join().unwrap();
    }
    let mut events = 0;
    for producer in producers {
        events += producer.await.unwrap();
    }
    let longest = gaps.lock().unwrap().longest;
    let dropped_out: u64 = nodes.iter().map(|(bus, _)| bus.stats().nodes_dropped_out).sum();
    println!("{events} events in {time:?}: the longest gap between beats is {longest:?}");
    assert_eq!(dropped_out, 0, "no node takes itself, or is taken, for dead");
    longest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beats_go_on_where_others_take_all_processor_time() {
    let time = Duration::from_secs(if crate::is_full() { 60 } else { 5 });
    let cores = thread::available_parallelism().map_or(1, usize::from);
    for hogs in [0, cores * 4] {
        let folder = tempfile::tempdir().unwrap();
        for (what, store) in
            [("memory", Store::memory()), ("folder", Store::open_dir(folder.path()).unwrap())]
        {
            println!("{what}, {hogs} threads that never rest:");
            assert!(longest_gap(store, time, hogs).await > Duration::ZERO, "each node has beaten again");
        }
    }
}
