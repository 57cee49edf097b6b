//! A fleet of processes with notifiers and members of a consumer, which share the work while some die, sleep and join.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use notibus::{
    Bus, BusOptions, Cursor, Error, NodeOptions, Notification, NotifierOptions,
    consumer::{Batch, ConsumerOptions, ConsumerSettings},
    cursor::Start,
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Store, Transaction},
};
use tokio::sync::oneshot;

use crate::{
    child::{self, Child},
    common::{LIMIT, until},
    fixture,
    load::{Load, until_folded},
};

/// The expiry of the nodes.
const EXPIRY: Duration = Duration::from_secs(2);

/// How often the nodes balance their shares.
const BALANCE: Duration = Duration::from_millis(500);

/// How long each count is held before its commit: long enough to stop the process in between.
const IN_HAND: Duration = Duration::from_millis(200);

/// The bus of the fleet: more partitions and shards than nodes.
async fn bus(store: &Store, prefix: &[u8]) -> Bus {
    let options = BusOptions::default().prefix(prefix.to_vec()).partitions(32).shards(12);
    Bus::open(store, options).await.unwrap()
}

/// The part of a process: runs a node that folds, and counts each row in the transaction that saves the progress. It reports the id of the
/// node, each pending count, and each count that the store refused because the lease was lost.
pub(crate) async fn worker(file: &str, prefix: &[u8], end: oneshot::Receiver<()>) {
    let store = fixture::open(file).await;
    let bus = bus(&store, prefix).await;
    let times = NodeOptions::default().heartbeat(Duration::from_millis(400)).expiry(EXPIRY);
    let node = bus.node(times).await.unwrap();
    let mut folding = NotifierOptions::default();
    folding.balance.interval = BALANCE;
    let notifier = node.notifier(folding).await.unwrap();
    let mut consuming = ConsumerOptions::default().batch_rows_max(5);
    consuming.balance.interval = BALANCE;
    let effects: Arc<[u8]> = effects(prefix).into();
    let count = move |batch: Batch<Notification>| {
        let (store, effects) = (store.clone(), Arc::clone(&effects));
        // This task continues even if its handler is dropped, which happens when the process wakes and finds its node expired.
        let counting = tokio::spawn(async move {
            let body = async |tx: Transaction| {
                if batch.commit_in(&tx).await?.is_already_committed() {
                    return Ok(());
                }
                for row in &batch.rows {
                    let key = [&effects[..], row.sequence.as_bytes()].concat();
                    tx.atomic(AtomicOp::Add, &key, &1_u64.to_le_bytes());
                }
                // If the process is stopped now, it wakes as a zombie with a pending count.
                child::report("counting");
                tokio::time::sleep(IN_HAND).await;
                Ok(())
            };
            let counted = store.run(body).await;
            if let Err(Error::LeaseLost { .. }) = &counted {
                child::report("refused");
            }
            counted
        });
        async move { Ok(counting.await??) }
    };
    let consumer = node.consumer("counter").unwrap().options(consuming).run_batches(count).await.unwrap();
    child::report(&node.id().to_string());
    let _ = end.await;
    consumer.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
    node.shutdown().await.unwrap();
}

/// Returns the key prefix of the counts.
fn effects(prefix: &[u8]) -> Vec<u8> {
    [prefix, b"effects/"].concat()
}

/// Returns how many times each row was counted, by its sequence.
async fn counted(store: &Store, prefix: &[u8]) -> BTreeMap<Vec<u8>, u64> {
    let tx = store.begin();
    let effects = effects(prefix);
    let mut pages = tx.pages(RangeRead::new(KeyRange::prefix(effects.clone())), Isolation::Snapshot);
    let mut counts = BTreeMap::new();
    while let Some(rows) = pages.next().await.unwrap() {
        for (key, value) in rows {
            let count = u64::from_le_bytes(value[..].try_into().unwrap());
            counts.insert(key[effects.len()..].to_vec(), count);
        }
    }
    counts
}

/// Starts a process of the fleet. Returns the process and the id of its node.
async fn start(file: &std::path::Path, prefix: &[u8]) -> (Child, String) {
    let mut child = Child::start("worker", file, prefix);
    let id = child.line().await;
    (child, id)
}

/// Waits until exactly the nodes `ids` share all work, with shares that differ by at most one; returns how long that took.
async fn until_balanced(bus: &Bus, what: &str, ids: impl Iterator<Item = &String>) {
    let ids: BTreeSet<_> = ids.cloned().collect();
    let began = Instant::now();
    let is_balanced = async || {
        let nodes = bus.nodes().await.unwrap();
        let live: BTreeSet<_> = nodes.iter().map(|node| node.id.to_string()).collect();
        let pools = ["partition", "consumer"].map(|pool| {
            let of = |node: &notibus::node::NodeStatus| {
                node.leases
                    .iter()
                    .filter(|(name, _)| name.starts_with(pool))
                    .map(|(_, count)| count)
                    .sum::<u64>()
            };
            let counts: Vec<_> = nodes.iter().map(of).collect();
            (counts.iter().sum::<u64>(), counts.iter().max().copied(), counts.iter().min().copied())
        });
        let is_even =
            |(_, most, least): &(u64, Option<u64>, Option<u64>)| most.unwrap_or(9) <= least.unwrap_or(0) + 1;
        live == ids && pools[0].0 == 32 && pools[1].0 == 12 && pools.iter().all(is_even)
    };
    until(what, is_balanced).await;
    println!("{what} within {:?}; expiry {EXPIRY:?}, balance interval {BALANCE:?}", began.elapsed());
    assert!(began.elapsed() < LIMIT);
}

fn send(child: &Child, signal: &str) {
    let status = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Of five processes under load, two are killed, one is stopped for longer than its expiry and wakes, and two more join. Every event is
/// folded, every row is counted exactly once, and the pending count of the process that woke is refused.
pub(crate) async fn processes_share_the_work_while_some_die_sleep_or_come() {
    let (file, prefix) = (fixture::shared(), fixture::prefix("fleet"));
    let store = fixture::open(&file).await;
    let bus = bus(&store, &prefix).await;
    let counter = bus.consumer("counter").unwrap();
    counter.create(&ConsumerSettings::default().start(Start::from(Cursor::BEGINNING))).await.unwrap();
    let mut fleet = Vec::new();
    for _ in 0..5 {
        fleet.push(start(&file, &prefix).await);
    }
    until_balanced(&bus, "five share the work", fleet.iter().map(|(_, id)| id)).await;
    let load = Load::start(&store, &bus, &fixture::prefix("markers"));
    load.advance(300).await;
    for _ in 0..2 {
        fleet.swap_remove(0).0.kill();
    }
    load.advance(100).await;
    until_balanced(&bus, "three took over from the killed", fleet.iter().map(|(_, id)| id)).await;

    let (mut sleeper, id) = fleet.swap_remove(0);
    while sleeper.next_line().await != "counting" {}
    send(&sleeper, "-STOP");
    until_balanced(&bus, "two took over from the stopped", fleet.iter().map(|(_, id)| id)).await;
    load.advance(100).await;
    send(&sleeper, "-CONT");
    // The commit that was pending when the process stopped is refused.
    while sleeper.line().await != "refused" {}
    fleet.push((sleeper, id));
    for _ in 0..2 {
        fleet.push(start(&file, &prefix).await);
    }
    load.advance(300).await;
    until_balanced(&bus, "the woken and two new ones share the work", fleet.iter().map(|(_, id)| id)).await;

    let totals = load.stop().await;
    until_folded(&bus, &totals).await;
    let is_done = async || counter.lag().await.unwrap().iter().all(|shard| shard.rows == 0);
    until("the consumer has counted everything", is_done).await;
    let effects = counted(&store, &prefix).await;
    assert!(effects.values().all(|count| *count == 1), "{effects:?}");
    let rows = bus.feed().page(Cursor::BEGINNING, 1_000).await.unwrap().rows;
    assert!(
        rows.iter().all(|row| effects.contains_key(&row.sequence.as_bytes()[..])),
        "every row was counted"
    );
    for (child, _) in fleet {
        child.end();
    }
    assert!(bus.nodes().await.unwrap().is_empty(), "all have left");
}
