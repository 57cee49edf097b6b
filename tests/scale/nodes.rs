//! Many nodes in one world: what each of them reads, and how soon the work of those that die has owners again.
//!
//! 100 nodes by default. `NOTIBUS_LOAD=full cargo test --release --test scale many_nodes -- --nocapture` takes 1,000.

use std::time::Duration;

use notibus::{
    Bus, BusOptions, NodeOptions, Notifier,
    store::{
        Database,
        testing::{CommitFault, Faults, Gate, OperationCounts},
    },
};
use tokio::time::Instant;

use crate::common::{joined, unpolled};

/// How long each commit takes.
const COMMIT: Duration = Duration::from_millis(5);

/// Nodes with a notifier each, in processes of their own as far as the bus can see.
struct Fleet {
    faults: Faults,
    partitions: u32,
    notifiers: Vec<Notifier>,
}

impl Fleet {
    fn new(partitions: u32) -> Self {
        let faults = Faults::new(&Database::memory());
        faults.plan_commits(|attempt| {
            attempt.mutations().next()?;
            let gate = Gate::default();
            let opened = gate.clone();
            tokio::spawn(async move {
                tokio::time::sleep(COMMIT).await;
                opened.open();
            });
            Some(CommitFault::Hold(gate))
        });
        Self { faults, partitions, notifiers: Vec::new() }
    }

    /// Adds `count` nodes, which join within 2 s.
    async fn add(&mut self, count: u32) {
        let (store, partitions) = (self.faults.database(), self.partitions);
        let start = (0..count).map(|number| {
            let store = store.clone();
            async move {
                tokio::time::sleep(Duration::from_secs(2) * number / count).await;
                let options = BusOptions::default().partitions(partitions);
                let bus = Bus::open(&store, options).await.unwrap();
                joined(&bus).await.notifier(unpolled()).await.unwrap()
            }
        });
        self.notifiers.extend(futures_util::future::join_all(start).await);
    }

    /// The number of partitions that have an owner which works on them; fails if one has two.
    fn owned(&self) -> usize {
        let mut owned: Vec<_> = self.notifiers.iter().flat_map(Notifier::partitions).collect();
        let all = owned.len();
        owned.sort_unstable();
        owned.dedup();
        assert_eq!(owned.len(), all, "no partition has two owners");
        all
    }

    /// Whether all partitions have owners, with even shares.
    fn is_even(&self) -> bool {
        let shares = self.notifiers.iter().map(|notifier| notifier.partitions().len());
        let (least, most) = (shares.clone().min().unwrap(), shares.max().unwrap());
        self.owned() == self.partitions as usize && most - least <= 1
    }

    /// How long it takes until `is_so`, and the operations of all nodes meanwhile.
    async fn until(&self, is_so: impl Fn(&Self) -> bool) -> (Duration, OperationCounts) {
        let (began, before) = (Instant::now(), self.faults.counts());
        while !is_so(self) {
            assert!(began.elapsed() < Duration::from_mins(2), "{} are owned", self.owned());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        (began.elapsed(), self.faults.counts() - before)
    }

    /// The operations of all nodes during a minute.
    async fn minute(&self) -> OperationCounts {
        let before = self.faults.counts();
        tokio::time::sleep(Duration::from_mins(1)).await;
        self.faults.counts() - before
    }
}

/// The life of `count` nodes: they start, rest, are joined by one and left by one, and a third of them is killed at once. Returns
/// the operations of a minute of rest.
async fn life_of(count: u32, partitions: u32) -> OperationCounts {
    let mut fleet = Fleet::new(partitions);
    fleet.add(count).await;
    let (started, _) = fleet.until(Fleet::is_even).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    let rest = fleet.minute().await;
    fleet.add(1).await;
    let (joined, of_join) = fleet.until(Fleet::is_even).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    let (left, began) = (fleet.notifiers.remove(count as usize / 2), Instant::now());
    left.shutdown().await.unwrap();
    fleet.until(Fleet::is_even).await;
    let left = began.elapsed();
    tokio::time::sleep(Duration::from_mins(1)).await;
    let mut number = 0;
    fleet.notifiers.retain(|_| {
        number += 1;
        number % 3 > 0
    });
    let lost = partitions as usize - fleet.owned();
    let (owned, of_takeover) = fleet.until(|fleet| fleet.owned() == partitions as usize).await;
    println!(
        "{count} nodes, {partitions} partitions: even {started:?} after the start; a minute of rest: {rest:?}; even {joined:?} after a \
         join: {of_join:?}; even {left:?} after a leave; a third dies with {lost} partitions, all owned after {owned:?}: {of_takeover:?}"
    );
    assert!(lost > 0);
    let most = NodeOptions::default().expiry + Duration::from_secs(3);
    assert!(owned <= most, "{count} nodes: all partitions are owned {owned:?} after a third has died");
    fleet.until(Fleet::is_even).await;
    rest
}

/// A node reads as much among many as among some, and dead nodes are replaced as soon, however many die at once.
#[tokio::test(start_paused = true)]
async fn many_nodes_live_as_few_do() {
    let is_full = std::env::var("NOTIBUS_LOAD").is_ok_and(|size| size == "full");
    let (some, many, partitions) = if is_full { (100, 1_000, 1_024) } else { (20, 100, 128) };
    let (of_some, of_many) = (life_of(some, partitions).await, life_of(many, partitions).await);
    let per_node = |counts: u64, nodes: u32| counts / u64::from(nodes);
    for (what, less, more) in [
        ("reads", of_some.reads, of_many.reads),
        ("bytes", of_some.read_bytes, of_many.read_bytes),
        ("writes", of_some.write_commits, of_many.write_commits),
    ] {
        let (less, more) = (per_node(less, some), per_node(more, many));
        assert!(more * 10 <= less * 11, "{what} of a node in a minute: {less} of {some}, {more} of {many}");
    }
}
