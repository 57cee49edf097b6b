//! The total cost of an event on a cluster, by the cluster's own counters in `status json`. What nodes do periodically is measured
//! beforehand, and subtracted.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use notibus::{
    Bus, Db, Filter, NodeHandle, Notification, Producer, StartOptions,
    consumer::Batch,
    dispatcher::Subscription,
    http::{ApiOptions, ServerOptions},
    store::Store,
};
use serde_json::Value;
use tokio::task::block_in_place;
use tokio_stream::StreamExt;

use crate::{cluster::Cluster, databases, open};

/// The servers add up their counters every 5 s.
const SETTLED: Duration = Duration::from_secs(7);

/// How long the idle cluster is observed.
const REST: Duration = Duration::from_secs(20);

const LONE: u64 = 200;

/// The pause after each event, so that everything is idle before the next one.
const PAUSE: Duration = Duration::from_millis(50);

const BATCH: u64 = 200;

const BATCHES: u64 = 20;

/// What a cluster counts, in this order: mutations, reads, bytes written, committed transactions, transactions.
const COUNTERS: [&str; 5] = [
    "/cluster/workload/operations/writes/counter",
    "/cluster/workload/operations/reads/counter",
    "/cluster/workload/bytes/written/counter",
    "/cluster/workload/transactions/committed/counter",
    "/cluster/workload/transactions/started/counter",
];

/// The counters, and when they were read.
struct Counts {
    values: [f64; 5],
    at: Instant,
}

impl Counts {
    /// Waits until the counters include everything that was done so far, and reads them.
    async fn read(cluster: &Cluster) -> Self {
        tokio::time::sleep(SETTLED).await;
        let status = block_in_place(|| cluster.cli("status json"));
        let status: Value = serde_json::from_str(&status).unwrap();
        let value = |counter| status.pointer(counter).and_then(Value::as_f64).unwrap();
        Self { values: COUNTERS.map(value), at: Instant::now() }
    }

    /// Returns the counts since `before`, and the time since then, in seconds.
    fn since(&self, before: &Self) -> ([f64; 5], f64) {
        let mut counted = self.values;
        counted.iter_mut().zip(before.values).for_each(|(value, before)| *value -= before);
        (counted, (self.at - before.at).as_secs_f64())
    }
}

/// Prints the cost of an event of each kind.
pub async fn print(cluster: &Cluster, store: &Store) {
    let bus = open(store, "cost").await;
    let running = bus.start(StartOptions::default()).await.unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let routes = running.api(ApiOptions::default()).unwrap().routes();
    let address = running.serve(listener, routes, ServerOptions::default()).await.unwrap();
    let mut deliveries = running.dispatcher().subscribe(Filter::all()).stream();
    let producer = bus.producer();
    let dbs = databases(BATCH);
    // Every database already has a row when counting begins.
    update(store, &producer, &dbs, &mut deliveries).await;
    post(address, "created");
    until_delivered(1, &mut deliveries).await;

    let before = Counts::read(cluster).await;
    tokio::time::sleep(REST).await;
    let (idle, seconds) = Counts::read(cluster).await.since(&before);
    let idle = idle.map(|value| value / seconds);
    line("a second at rest", idle);

    let before = Counts::read(cluster).await;
    for _ in 0..LONE {
        update(store, &producer, &dbs[..1], &mut deliveries).await;
        tokio::time::sleep(PAUSE).await;
    }
    report("a lone event", &Counts::read(cluster).await, &before, idle, LONE);

    let before = Counts::read(cluster).await;
    for _ in 0..LONE {
        block_in_place(|| post(address, "updated"));
        until_delivered(1, &mut deliveries).await;
        tokio::time::sleep(PAUSE).await;
    }
    report("a lone event by HTTP", &Counts::read(cluster).await, &before, idle, LONE);

    let before = Counts::read(cluster).await;
    for _ in 0..BATCHES {
        update(store, &producer, &dbs, &mut deliveries).await;
        tokio::time::sleep(PAUSE).await;
    }
    let after = Counts::read(cluster).await;
    report("each of 200 databases in a transaction", &after, &before, idle, BATCH * BATCHES);

    for count in [1, 10] {
        with_consumers(count, (cluster, store, &dbs), (&bus, &running, &mut deliveries)).await;
    }
    drop(deliveries);
    running.shutdown().await.unwrap();
}

/// Prints the cost of an event with `count` consumers on the node.
async fn with_consumers(
    count: u64,
    (cluster, store, dbs): (&Cluster, &Store, &[Db]),
    (bus, running, deliveries): (&Bus, &NodeHandle, &mut Subscription),
) {
    let producer = bus.producer();
    let mut members = Vec::new();
    for n in 0..count {
        let member = running.consumer(&format!("c{n}")).unwrap();
        members.push(member.run_batches(async |_: Batch<Notification>| Ok(())).await.unwrap());
    }
    let before = Counts::read(cluster).await;
    tokio::time::sleep(REST).await;
    let (idle, seconds) = Counts::read(cluster).await.since(&before);
    let idle = idle.map(|value| value / seconds);
    for (what, dbs, times) in [("a lone event", &dbs[..1], LONE), ("each of 200", dbs, BATCHES)] {
        let before = Counts::read(cluster).await;
        for _ in 0..times {
            let rows = bus.stats().consumer_rows + count * dbs.len() as u64;
            update(store, &producer, dbs, deliveries).await;
            while bus.stats().consumer_rows < rows {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(PAUSE).await;
        }
        let after = Counts::read(cluster).await;
        report(&format!("{what} for {count} consumers"), &after, &before, idle, times * dbs.len() as u64);
    }
    for (n, member) in members.into_iter().enumerate() {
        member.shutdown().await.unwrap();
        bus.consumer(&format!("c{n}")).unwrap().delete(true).await.unwrap();
    }
}

/// Updates `dbs` in one transaction, and waits until the updates are delivered.
async fn update(store: &Store, producer: &Producer, dbs: &[Db], deliveries: &mut Subscription) {
    let record = async |tx| {
        for db in dbs {
            producer.updated(&tx, db);
        }
        Ok(())
    };
    store.run(record).await.unwrap();
    until_delivered(dbs.len(), deliveries).await;
}

async fn until_delivered(rows: usize, deliveries: &mut Subscription) {
    for _ in 0..rows {
        deliveries.next().await.unwrap().into_delivery().unwrap();
    }
}

fn post(address: SocketAddr, kind: &str) {
    let body = format!(r#"[{{"db":"posted","type":"{kind}"}}]"#);
    let mut socket = TcpStream::connect(address).unwrap();
    let length = body.len();
    write!(
        socket,
        "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
}

/// Prints the counts between `before` and `after`, without those of an idle cluster, divided by `count`.
#[expect(clippy::cast_precision_loss, reason = "it counts a few thousands")]
fn report(what: &str, after: &Counts, before: &Counts, idle: [f64; 5], count: u64) {
    let (mut counted, seconds) = after.since(before);
    for (value, idle) in counted.iter_mut().zip(idle) {
        *value = (*value - idle * seconds) / count as f64;
    }
    line(what, counted);
}

fn line(what: &str, [mutations, reads, bytes, committed, started]: [f64; 5]) {
    println!(
        "cost of {what}: {mutations:.1} mutations, {reads:.1} reads, {bytes:.0} bytes written, {committed:.1} commits, \
         {started:.1} transactions"
    );
}
