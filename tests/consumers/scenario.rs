//! Nodes that join, leave, die and hang, reshards, and commits that fail in every way, all at once; then the guarantees are checked.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use notibus::{
    Bus, BusOptions, Cursor, Notification, NotifierOptions,
    consumer::{
        Batch, CloseReason, Consumer, ConsumerOptions, ConsumerSettings, FailurePolicy, Handler,
        HandlerResult,
    },
    cursor::Start,
    feed::ShardId,
    store::{
        AtomicOp, Isolation, KeyRange, RangeRead, Store, StoreError, Transaction,
        testing::{CommitFault, Faults, Gate},
    },
};

use crate::common::{db, joined, record, until};

const DATABASES: usize = 20;

/// Works on the rows of a batch in its transaction: counts them, and checks that those of each database are in order.
async fn work_on(tx: &Transaction, batch: &Batch<Notification>) -> notibus::Result<()> {
    for row in &batch.rows {
        let seen = [b"seen/", &row.sequence.as_bytes()[..]].concat();
        tx.atomic(AtomicOp::Add, &seen, &1_u64.to_le_bytes());
        let last = [b"last/", row.name.as_str().as_bytes()].concat();
        let before = tx.get(&last, Isolation::Serializable).await?;
        if before.is_some_and(|before| before[..] >= row.sequence.as_bytes()[..]) {
            tx.set(b"out of order", row.name.as_str().as_bytes());
        }
        tx.set(&last, row.sequence.as_bytes());
    }
    Ok(())
}

/// The calls of each handler, by the handler's number, for all nodes.
type Calls = Arc<Mutex<Vec<Vec<&'static str>>>>;

/// A handler that counts exactly once in `store`, and sometimes fails: before its commit, after it, or with a panic.
struct Shaky {
    store: Store,
    luck: Arc<Mutex<fastrand::Rng>>,
    fails_percent: u8,
    calls: Calls,
    number: usize,
}

impl Shaky {
    fn note(&self, call: &'static str) {
        self.calls.lock().unwrap()[self.number].push(call);
    }
}

impl Handler<Batch<Notification>> for Shaky {
    async fn opened(&self, _: ShardId) {
        self.note("opened");
    }

    async fn handle(&self, batch: Batch<Notification>) -> HandlerResult {
        self.note("batch");
        let (fate, pause) = {
            let mut luck = self.luck.lock().unwrap();
            let fails = luck.u8(..100) < self.fails_percent;
            (if fails { luck.u8(1..4) } else { 0 }, luck.u64(..20))
        };
        tokio::time::sleep(Duration::from_millis(pause)).await;
        if fate == 1 {
            return Err("before".into());
        }
        assert!(fate != 2, "a panic of a handler");
        let body = async |tx: Transaction| {
            if batch.commit_in(&tx).await?.is_already_committed() {
                return Ok(());
            }
            work_on(&tx, &batch).await
        };
        self.store.run(body).await?;
        if fate == 3 { Err("after".into()) } else { Ok(()) }
    }

    async fn closed(&self, _: ShardId, _: CloseReason) {
        self.note("closed");
    }
}

/// A node with a member of the consumer.
struct Running {
    faults: Faults,
    consumer: Consumer,
}

struct Scenario {
    /// The store without faults.
    store: Store,
    /// The bus without faults.
    bus: Bus,
    /// Makes all random choices.
    random: fastrand::Rng,
    calls: Calls,
    nodes: Vec<Running>,
    /// How many times each database was updated.
    updates: BTreeMap<usize, u64>,
    /// The percentage of commits that fail.
    faults_percent: u8,
}

impl Scenario {
    /// Starts a node, on its own store, whose commits sometimes fail.
    async fn start(&mut self) {
        let faults = Faults::new(&self.store);
        let bus = Bus::open_existing(&faults.store(), b"notibus").await.unwrap();
        let luck = Arc::new(Mutex::new(fastrand::Rng::with_seed(self.random.u64(..))));
        let (store, calls, fails_percent) =
            (faults.store(), Arc::clone(&self.calls), self.faults_percent / 2);
        let make = move |_| {
            let mut all = calls.lock().unwrap();
            all.push(Vec::new());
            let number = all.len() - 1;
            let (store, luck, calls) = (store.clone(), Arc::clone(&luck), Arc::clone(&calls));
            Shaky { store, luck, fails_percent, calls, number }
        };
        let options = ConsumerOptions::default()
            .batch_rows_max(self.random.usize(1..8))
            .failure(FailurePolicy::Hold)
            .attempts_max(self.random.u32(1..4))
            .backoff_max(Duration::from_millis(500));
        let member = joined(&bus).await.consumer("c").unwrap().options(options);
        let consumer = member.run_batches_with(make).await.unwrap();
        let (mut luck, percent) = (self.random.fork(), self.faults_percent);
        faults.plan_commits(move |attempt| {
            let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
            let fails = attempt.writes() && luck.u8(..100) < percent;
            fails.then(|| match luck.u8(..3) {
                0 => CommitFault::Before(StoreError::NOT_COMMITTED),
                1 => CommitFault::Before(unknown),
                _ => CommitFault::After(unknown),
            })
        });
        self.nodes.push(Running { faults, consumer });
    }

    /// Removes a random node from the list.
    fn take(&mut self) -> Running {
        let place = self.random.usize(..self.nodes.len());
        self.nodes.swap_remove(place)
    }

    async fn step(&mut self) {
        match self.random.u8(..16) {
            0 | 1 if self.nodes.len() < 4 => self.start().await,
            // A node dies.
            2 if self.nodes.len() > 1 => drop(self.take().consumer),
            3 if self.nodes.len() > 1 => self.take().consumer.shutdown().await.unwrap(),
            // A node hangs in all of its commits, possibly for longer than its expiry; its handlers continue when they can.
            4 => {
                let gate = Gate::default();
                let held = gate.clone();
                let place = self.random.usize(..self.nodes.len());
                let node = &self.nodes[place];
                node.faults
                    .plan_commits(move |attempt| attempt.writes().then(|| CommitFault::Hold(held.clone())));
                tokio::time::sleep(Duration::from_secs(self.random.u64(1..20))).await;
                self.nodes[place].faults.heal();
                gate.open();
            }
            5 => {
                let shards = self.random.u32(1..7);
                self.bus.feed().reshard(shards, None).await.unwrap();
            }
            _ => {
                for _ in 0..self.random.usize(1..12) {
                    let place = self.random.usize(..DATABASES);
                    record(&self.store, &self.bus, &db(&format!("db{place}"), 1), [0, 0, 1, 0]).await;
                    *self.updates.entry(place).or_default() += 1;
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(self.random.u64(..800))).await;
    }

    async fn check(&self) {
        let feed = self.bus.feed();
        for (place, updates) in &self.updates {
            let name = format!("db{place}").parse().unwrap();
            let is_folded =
                async || feed.newest(&name).await.unwrap().is_some_and(|r| r.totals.updated == *updates);
            until("all is folded", is_folded).await;
        }
        let handle = self.bus.consumer("c").unwrap();
        let open = feed.topology().await.unwrap().pop().unwrap().shards;
        let is_done = async || {
            // The lag does not include the open shards until the consumer works on them.
            let shards = handle.status().await.unwrap().shards;
            shards.iter().map(|shard| shard.shard).eq(open.iter().copied())
                && handle.lag().await.unwrap().iter().all(|shard| shard.rows == 0)
        };
        until("the consumer has worked on everything", is_done).await;
        let seen = RangeRead::new(KeyRange::prefix("seen/")).limit(100_000).target_bytes(usize::MAX);
        let seen = self.store.begin().get_range(&seen, Isolation::Snapshot).await.unwrap().rows;
        let seen: BTreeMap<_, _> = seen
            .iter()
            .map(|(key, value)| (&key[5..], u64::from_le_bytes(value[..].try_into().unwrap())))
            .collect();
        assert!(seen.values().all(|count| *count == 1), "each row exactly once: {seen:?}");
        let rows = feed.page(Cursor::BEGINNING, 10_000).await.unwrap().rows;
        assert_eq!(rows.len(), self.updates.len());
        for row in rows {
            assert!(seen.contains_key(&row.sequence.as_bytes()[..]), "{} at {}", row.name, row.sequence);
        }
        let disorder = self.store.begin().get(b"out of order", Isolation::Snapshot).await.unwrap();
        assert_eq!(disorder, None, "rows of a database come in order");
    }
}

/// Runs all steps, and checks the result.
async fn run(seed: u64, steps: u32, faults_percent: u8) {
    println!("seed {seed}");
    let store = Store::memory();
    let mut random = fastrand::Rng::with_seed(seed);
    let shards = random.u32(1..5);
    let bus = Bus::open(&store, BusOptions::default().partitions(2).shards(shards)).await.unwrap();
    let notifier = joined(&bus).await.notifier(NotifierOptions::default()).await.unwrap();
    let start = if random.bool() { Cursor::BEGINNING.into() } else { Start::Now };
    bus.consumer("c").unwrap().create(&ConsumerSettings::default().start(start)).await.unwrap();
    let (nodes, updates, calls) = (Vec::new(), BTreeMap::new(), Calls::default());
    let mut scenario = Scenario { store, bus, random, calls, nodes, updates, faults_percent };
    scenario.start().await;
    for _ in 0..steps {
        scenario.step().await;
    }
    scenario.nodes.iter().for_each(|node| node.faults.heal());
    scenario.check().await;
    for node in std::mem::take(&mut scenario.nodes) {
        node.consumer.shutdown().await.unwrap();
    }
    // Handlers of dead nodes are closed in the background.
    tokio::time::sleep(Duration::from_secs(30)).await;
    for calls in &*scenario.calls.lock().unwrap() {
        let count = |call: &str| calls.iter().filter(|it| **it == call).count();
        let is_whole = calls.first() == Some(&"opened") && calls.last() == Some(&"closed");
        assert!(
            calls.is_empty() || (is_whole && count("opened") == 1 && count("closed") == 1),
            "it is opened first, and closed last: {calls:?}"
        );
    }
    notifier.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn each_row_is_counted_exactly_once_whatever_happens() {
    for seed in 0..12 {
        run(seed, 60, 15).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_random_seed_too() {
    run(fastrand::u64(..), 120, 30).await;
}
