//! What limits folding on a cluster of one process: the cost of long names, the gain from several notifiers, and which threads and servers
//! are busy while they fold.

use std::{
    collections::BTreeMap,
    fs,
    sync::Arc,
    time::{Duration, Instant},
};

use notibus::{Db, DbInstance, NodeOptions, NotifierOptions, store::Store};
use serde_json::Value;
use tokio::task::{JoinSet, block_in_place};

use crate::{cluster::Cluster, open};

const DATABASES: usize = 4_000;

/// The number of databases in a transaction of the producer.
const BATCH: usize = 50;

/// The number of concurrent transactions of the producer.
const AT_ONCE: usize = 16;

/// Prints all cases.
pub async fn print(cluster: &Cluster, store: &Store) {
    for len in [8, 100, 1_000] {
        for notifiers in [1, 2, 4] {
            case(cluster, store, len, notifiers).await;
        }
    }
}

/// Records an event of each database twice, and folds it with this many notifiers each time: first without rows, then with earlier ones.
async fn case(cluster: &Cluster, store: &Store, len: usize, notifiers: usize) {
    let bus = open(store, "folding").await;
    let db = |n| {
        let name = format!("{n:08}{}", "x".repeat(len - 8));
        Db::new(name.parse().unwrap(), DbInstance([1; 16]))
    };
    let dbs: Arc<Vec<Db>> = Arc::new((0..DATABASES).map(db).collect());
    let mut folded = 0;
    for what in ["new", "known"] {
        let began = Instant::now();
        let mut producers = JoinSet::new();
        for number in 0..AT_ONCE {
            let (store, producer, dbs) = (store.clone(), bus.producer(), Arc::clone(&dbs));
            producers.spawn(async move {
                for some in dbs.chunks(BATCH).skip(number).step_by(AT_ONCE) {
                    let record = async |tx| {
                        for db in some {
                            producer.updated(&tx, db);
                        }
                        Ok(())
                    };
                    store.run(record).await.unwrap();
                }
            });
        }
        producers.join_all().await;
        let produced = began.elapsed();

        let (clocks, server, began) = (clocks(), server_clock(cluster), Instant::now());
        let mut running = Vec::new();
        for _ in 0..notifiers {
            let node = bus.node(NodeOptions::default()).await.unwrap();
            running.push(node.notifier(NotifierOptions::default()).await.unwrap());
        }
        folded += DATABASES as u64;
        while bus.stats().folded.total() < folded {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let took = began.elapsed();
        let of_server = (server_clock(cluster) - server) / took.as_secs_f64();
        let busy = busiest(&clocks, took);
        for notifier in running {
            notifier.shutdown().await.unwrap();
        }
        println!(
            "folding of {what} databases, names of {len} bytes, {notifiers} notifiers: {:.0} a second, {} folds; recording {:.0} a second; \
             busy: server {:.0} %, {busy}",
            per_second(took),
            bus.stats().folds,
            per_second(produced),
            of_server * 100.0
        );
    }
    let status = block_in_place(|| cluster.cli("status json"));
    let status: Value = serde_json::from_str(&status).unwrap();
    println!(
        "limited by: {}",
        status.pointer("/cluster/qos/performance_limited_by/name").unwrap_or(&Value::Null)
    );
}

#[expect(clippy::cast_precision_loss, reason = "it is a rate")]
fn per_second(took: Duration) -> f64 {
    DATABASES as f64 / took.as_secs_f64()
}

/// Returns the name and the processor time, in seconds, of a process or thread.
fn clock(stat: &str) -> Option<(String, f64)> {
    let text = fs::read_to_string(stat).ok()?;
    let (name, rest) = text.split_once('(')?.1.rsplit_once(')')?;
    let ticks =
        rest.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap_or_default());
    Some((name.to_owned(), ticks.sum::<f64>() / 100.0))
}

/// Reads the processor time of each thread of this process.
fn clocks() -> BTreeMap<String, (String, f64)> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads
        .filter_map(|thread| {
            let id = thread.file_name().to_string_lossy().into_owned();
            Some((id.clone(), clock(&format!("/proc/self/task/{id}/stat"))?))
        })
        .collect()
}

/// Reads the processor time of the servers.
fn server_clock(cluster: &Cluster) -> f64 {
    cluster.ids().iter().filter_map(|id| clock(&format!("/proc/{id}/stat"))).map(|(_, seconds)| seconds).sum()
}

/// Describes the threads of this process that were busiest since `before`.
fn busiest(before: &BTreeMap<String, (String, f64)>, took: Duration) -> String {
    let mut busy: Vec<_> = clocks()
        .into_iter()
        .map(|(id, (name, now))| (now - before.get(&id).map_or(0.0, |(_, before)| *before), name))
        .collect();
    busy.sort_by(|a, b| b.0.total_cmp(&a.0));
    let share =
        |(seconds, name): &(f64, String)| format!("{name} {:.0} %", seconds * 100.0 / took.as_secs_f64());
    busy.iter().take(3).map(share).collect::<Vec<_>>().join(", ")
}
