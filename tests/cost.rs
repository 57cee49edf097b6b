//! What an event costs the store from its commit to its delivery, and from then until everything is idle again, counted key by key. Nothing
//! here is timed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{collections::BTreeMap, time::Duration};

use common::{NEVER, db, next_news, record, within};
use notibus::{
    Bus, BusOptions, DispatcherOptions, Filter, NodeOptions, NotifierOptions,
    dispatcher::Subscription,
    node::BalanceOptions,
    store::{
        AtomicOp, Store,
        testing::{Attempt, Operation, Trace},
    },
};

/// The families of keys, by number.
const FAMILIES: [&str; 19] = [
    "config",
    "counters",
    "doorbell",
    "fold mark",
    "row",
    "newest",
    "(6)",
    "topology",
    "horizon",
    "ddoc",
    "role",
    "lease",
    "(12)",
    "age",
    "polled",
    "pulse",
    "(16)",
    "name",
    "row count",
];

/// Returns the family of the key. Its number follows the default prefix, as an integer in a tuple.
fn family(key: &[u8]) -> &'static str {
    match key.strip_prefix(b"notibus") {
        Some([0x14, ..]) => FAMILIES[0],
        Some([0x15, 26, ..]) => "incarnation",
        Some([0x15, number, ..]) => FAMILIES[usize::from(*number)],
        _ => "none of the bus",
    }
}

/// The operations on the store, by family of keys.
#[derive(Debug, Default)]
struct Cost {
    /// Keys and ranges that were read, and watches.
    reads: BTreeMap<String, usize>,
    mutations: BTreeMap<String, usize>,
}

impl Cost {
    fn of(attempts: &[Attempt]) -> Self {
        let mut cost = Self::default();
        for operation in attempts.iter().flat_map(|attempt| &attempt.operations) {
            let (counted, what) = match operation {
                Operation::Get { key, .. } => (&mut cost.reads, family(key).to_owned()),
                Operation::GetRange { range, .. } => (&mut cost.reads, family(&range.begin).to_owned()),
                Operation::Watch { key } => (&mut cost.reads, format!("watch of {}", family(key))),
                Operation::Set { key, .. } | Operation::Clear { key } | Operation::Atomic { key, .. } => {
                    (&mut cost.mutations, family(key).to_owned())
                }
                Operation::ClearRange { range } => (&mut cost.mutations, family(&range.begin).to_owned()),
                _ => continue,
            };
            *counted.entry(what).or_default() += 1;
        }
        println!("reads {:?}, mutations {:?}", cost.reads, cost.mutations);
        cost
    }

    fn reads(&self) -> usize {
        self.reads.values().sum()
    }

    fn mutations(&self) -> usize {
        self.mutations.values().sum()
    }
}

/// Whether `attempt` is the producer's own, which adds to counters and does nothing else.
fn is_producers(attempt: &Attempt) -> bool {
    attempt.reads().next().is_none()
        && attempt.mutations().all(|done| {
            matches!(done, Operation::Atomic { op: AtomicOp::Add, key, .. } if family(key) == "counters")
        })
}

/// Whether `attempt` is one that nodes make at intervals to keep track of each other.
fn is_members(attempt: &Attempt) -> bool {
    attempt.operations.iter().any(|done| match done {
        Operation::Get { key, .. } => family(key) == "polled",
        Operation::GetRange { range, .. } => family(&range.begin) == "polled",
        _ => false,
    })
}

/// The roles of a node, without anything periodic: everything that they do is caused by the event.
struct Node {
    trace: Trace,
    bus: Bus,
    /// The handles that must be kept while the roles are working.
    roles: Vec<Box<dyn std::any::Any>>,
    subscription: Subscription,
}

impl Node {
    /// Starts a node of the bus in `store` with a dispatcher, and with a notifier if it `folds`.
    async fn start(store: &Store, options: BusOptions, folds: bool) -> Self {
        let trace = Trace::new(store);
        let bus = Bus::open(&trace.store(), options).await.unwrap();
        let node = NodeOptions::default().heartbeat(NEVER).expiry(NEVER * 3);
        let node = bus.node(node).await.unwrap();
        let mut roles: Vec<Box<dyn std::any::Any>> = Vec::new();
        if folds {
            let balance = BalanceOptions::default().interval(NEVER);
            let options = NotifierOptions::default().poll_interval(NEVER).balance(balance);
            roles.push(Box::new(node.notifier(options).await.unwrap()));
        }
        let options = DispatcherOptions::default().poll_interval(NEVER);
        let dispatcher = bus.dispatcher(options).await.unwrap();
        let subscription = dispatcher.subscribe(Filter::all()).stream();
        roles.push(Box::new(dispatcher));
        roles.push(Box::new(node));
        Self { trace, bus, roles, subscription }
    }

    /// Waits for the next delivery.
    async fn delivered(&mut self) {
        within("a delivery", next_news(&mut self.subscription)).await.unwrap().into_delivery().unwrap();
    }

    /// Waits until everything is idle. Returns the operations since the last call, without those of producers and members.
    async fn done(&self) -> Cost {
        tokio::time::sleep(Duration::from_secs(10)).await;
        let mut done = self.trace.take();
        done.retain(|attempt| !is_producers(attempt) && !is_members(attempt));
        Cost::of(&done)
    }
}

/// Returns the cost of the third event of a database on a node that folds and delivers, in a quiet bus with `shards` shards.
async fn lone_event(shards: u32) -> Cost {
    let store = Store::memory();
    let mut node = Node::start(&store, BusOptions::default().shards(shards), true).await;
    let (db, traced) = (db("a", 1), node.trace.store());
    for lanes in [[1, 0, 0, 0], [0, 0, 1, 0]] {
        record(&traced, &node.bus, &db, lanes).await;
        node.delivered().await;
        node.done().await;
    }
    record(&traced, &node.bus, &db, [0, 0, 1, 0]).await;
    node.delivered().await;
    let cost = node.done().await;
    assert!(!node.roles.is_empty());
    cost
}

/// Regression: each append moved the head of its shard and one of eight keys of the pulse, and then each tail read all shards and set eight
/// watches again, so a lone event cost 10 mutations and 87 reads.
#[tokio::test(start_paused = true)]
async fn a_lone_event_costs_eight_mutations_and_twelve_reads() {
    for shards in [4, 16] {
        let cost = lone_event(shards).await;
        assert!(cost.mutations() <= 8 && cost.reads() <= 12, "{shards} shards: {cost:?}");
    }
}

/// A node that folds nothing is woken by one watch of one key, and reads the pulse and the shard with the new row, which the pulse names.
#[tokio::test(start_paused = true)]
async fn a_node_that_only_delivers_reads_six_keys() {
    let store = Store::memory();
    let mut folding = Node::start(&store, BusOptions::default(), true).await;
    let mut other = Node::start(&store, BusOptions::default(), false).await;
    for lanes in [[1, 0, 0, 0], [0, 0, 1, 0]] {
        record(&folding.trace.store(), &folding.bus, &db("a", 1), lanes).await;
        folding.delivered().await;
        other.delivered().await;
        let cost = other.done().await;
        assert!(lanes[0] == 1 || (cost.mutations() == 0 && cost.reads() <= 6), "{cost:?}");
    }
}

/// Many databases in one fold cost five mutations and two reads each. The other costs of a fold and a tail do not grow with their number.
#[tokio::test(start_paused = true)]
async fn a_database_of_a_batch_costs_five_mutations_and_two_reads() {
    let store = Store::memory();
    let options = BusOptions::default().partitions(1);
    let mut node = Node::start(&store, options, true).await;
    let traced = node.trace.store();
    let names: Vec<_> = (0..100).map(|n| db(&format!("db{n}"), 1)).collect();
    for lanes in [[1, 0, 0, 0], [0, 0, 1, 0]] {
        let producer = node.bus.producer();
        let counters = common::counts(lanes);
        let record = async |tx| {
            for db in &names {
                producer.record_all(&tx, db, &counters)?;
            }
            Ok(())
        };
        node.done().await;
        traced.run(record).await.unwrap();
        for _ in &names {
            node.delivered().await;
        }
        let cost = node.done().await;
        assert!(lanes[0] == 1 || (cost.mutations() <= 503 && cost.reads() <= 220), "{cost:?}");
    }
}
