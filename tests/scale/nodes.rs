//! Many nodes in one world: what each of them reads, and how soon the work of dead nodes has owners again.
//!
//! 160 nodes by default. `NOTIBUS_LOAD=full cargo test --release --test scale many_nodes -- --nocapture` uses 1,000.

use std::time::Duration;

use notibus::{
    Bus, BusOptions, NodeOptions, Notifier,
    store::{
        Store,
        testing::{CommitFault, Faults, Gate, OperationCounts},
    },
};
use tokio::time::Instant;

use crate::common::{joined, unpolled};

/// How long each commit takes.
const COMMIT: Duration = Duration::from_millis(5);

/// Nodes with a notifier each, which are processes of their own as far as the bus can see.
struct Fleet {
    faults: Faults,
    partitions: u32,
    notifiers: Vec<Notifier>,
}

impl Fleet {
    fn new(partitions: u32) -> Self {
        let faults = Faults::new(&Store::memory());
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
        let (store, partitions) = (self.faults.store(), self.partitions);
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

    /// Returns the number of partitions that an owner works on; fails if one has two owners.
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

    /// Waits until `is_so`. Returns how long that took, and the operations of all nodes until then.
    async fn until(&self, is_so: impl Fn(&Self) -> bool) -> (Duration, OperationCounts) {
        let (began, before) = (Instant::now(), self.faults.counts());
        while !is_so(self) {
            assert!(began.elapsed() < Duration::from_mins(2), "{} are owned", self.owned());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        (began.elapsed(), self.faults.counts() - before)
    }

    /// Returns the operations of all nodes within `time`.
    async fn within(&self, time: Duration) -> OperationCounts {
        let before = self.faults.counts();
        tokio::time::sleep(time).await;
        self.faults.counts() - before
    }
}

/// How long a change is measured.
const CHANGE: Duration = Duration::from_secs(30);

/// The idle time before the next change.
const REST: Duration = Duration::from_secs(20);

/// The total cost of a change, minus the idle cost.
#[derive(Debug, Clone, Copy)]
struct Cost {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    /// How many nodes share the cost.
    nodes: u64,
}

impl Cost {
    /// Subtracts the idle cost from `spent`, the operations during a change that `nodes` nodes survive. `rest` is what `of` idle nodes do
    /// in a minute.
    fn beyond(rest: &OperationCounts, of: u64, spent: &OperationCounts, nodes: u64) -> Self {
        let beyond = |spent: u64, rest: u64| spent.saturating_sub(rest * nodes / of * CHANGE.as_secs() / 60);
        Self {
            reads: beyond(spent.reads, rest.reads),
            read_bytes: beyond(spent.read_bytes, rest.read_bytes),
            writes: beyond(spent.write_commits, rest.write_commits),
            nodes,
        }
    }

    /// Formats the cost as a table cell: reads and bytes per node, and the writes of all nodes together.
    fn cells(&self) -> String {
        format!(
            "{} reads, {} B; {} writes",
            self.reads / self.nodes,
            self.read_bytes / self.nodes,
            self.writes
        )
    }
}

/// The life of a number of nodes: they start, rest, are joined by one, lose one, and three of ten are killed at once.
struct Life {
    nodes: u64,
    partitions: u64,
    /// The operations of all nodes in a minute at rest.
    rest: OperationCounts,
    join: Cost,
    death: Cost,
    deaths: Cost,
    /// How many die at once, and how long until all partitions are owned again.
    killed: u64,
    owned: Duration,
}

impl Life {
    async fn of(count: u32, partitions: u32) -> Self {
        let (mut fleet, nodes) = (Fleet::new(partitions), u64::from(count));
        fleet.add(count).await;
        fleet.until(Fleet::is_even).await;
        let rest = async |fleet: &Fleet| {
            tokio::time::sleep(REST).await;
            fleet.within(Duration::from_mins(1)).await
        };
        let at_rest = rest(&fleet).await;
        let cost = |spent, left| Cost::beyond(&at_rest, nodes, &spent, left);
        fleet.add(1).await;
        let join = cost(fleet.within(CHANGE).await, nodes + 1);
        assert!(fleet.is_even());
        tokio::time::sleep(REST).await;
        drop(fleet.notifiers.remove(count as usize / 2));
        let death = cost(fleet.within(CHANGE).await, nodes);
        assert!(fleet.is_even());
        tokio::time::sleep(REST).await;
        let mut number = 0;
        fleet.notifiers.retain(|_| {
            number += 1;
            number % 10 < 7
        });
        let (left, began) = (fleet.notifiers.len() as u64, fleet.faults.counts());
        let lost = partitions as usize - fleet.owned();
        let (owned, _) = fleet.until(|fleet| fleet.owned() == partitions as usize).await;
        tokio::time::sleep(CHANGE.saturating_sub(owned)).await;
        let deaths = cost(fleet.faults.counts() - began, left);
        assert!(lost > 0 && fleet.is_even());
        let most = NodeOptions::default().expiry + Duration::from_secs(3);
        assert!(
            owned <= most,
            "{count} nodes: all partitions are owned {owned:?} after three of ten have died"
        );
        let killed = nodes - left;
        Self { nodes, partitions: u64::from(partitions), rest: at_rest, join, death, deaths, killed, owned }
    }

    /// Prints a line of the table in `docs/scale.md`.
    fn print(&self) {
        let rest = Cost {
            reads: self.rest.reads,
            read_bytes: self.rest.read_bytes,
            writes: self.rest.write_commits,
            nodes: self.nodes,
        };
        println!(
            "| {} | {} | {} | {} | {} die: {}; owned after {:.2?} |",
            self.nodes,
            rest.cells(),
            self.join.cells(),
            self.death.cells(),
            self.killed,
            self.deaths.cells(),
            self.owned
        );
    }
}

/// A node reads as much among many nodes as among a few. Dead nodes are replaced just as quickly, however many die at once. The cost grows
/// with the nodes, the partitions or the dead, but not with a product of these.
#[tokio::test(start_paused = true)]
async fn many_nodes_live_as_few_do() {
    let (sizes, partitions) = if crate::is_full() { ([10, 100, 1_000], 1_024) } else { ([10, 40, 160], 128) };
    println!("{partitions} partitions, for each node; writes of all together:");
    println!("| nodes | a minute of rest | a join | a death | three of ten die |");
    let mut before: Option<Life> = None;
    for size in sizes {
        let life = Life::of(size, partitions).await;
        life.print();
        if let Some(less) = before.replace(life)
            && let Some(more) = &before
        {
            grows_linearly(&less, more);
        }
    }
}

/// Checks that costs grow at most linearly from `less` to `more` nodes.
fn grows_linearly(less: &Life, more: &Life) {
    for (what, few, many) in [
        ("reads", less.rest.reads, more.rest.reads),
        ("bytes", less.rest.read_bytes, more.rest.read_bytes),
        ("writes", less.rest.write_commits, more.rest.write_commits),
    ] {
        let (few, many) = (few / less.nodes, many / more.nodes);
        // With few nodes, one read of a poll returns all of their rows along with the rest; with more it takes two, and three at the end of
        // the ring.
        let most = if less.nodes > 16 { few * 11 / 10 } else { few * 5 / 2 };
        assert!(
            many <= most,
            "{what} of a node in a minute: {few} of {}, {many} of {}",
            less.nodes,
            more.nodes
        );
    }
    for (what, few, many) in [
        ("a join", less.join, more.join),
        ("a death", less.death, more.death),
        ("deaths of three of ten", less.deaths, more.deaths),
    ] {
        let reads = |cost: Cost| cost.reads / cost.nodes + 10;
        assert!(reads(many) <= reads(few) * 2, "{what}: {few:?}, {many:?}");
        // Each member reads the rows of its pool: members and leases.
        let rows = |life: &Life| life.nodes + life.partitions;
        let bytes = |cost: Cost, life: &Life| cost.read_bytes / cost.nodes / rows(life) + 100;
        assert!(bytes(many, more) <= bytes(few, less) * 2, "{what}: {few:?}, {many:?}");
        let moved = |life: &Life| life.partitions + life.nodes;
        assert!(many.writes <= 3 * moved(more), "{what}: {many:?}");
    }
}

/// Returns the bytes that each survivor reads, beyond what it reads when idle, when a third of `count` nodes that divide no work die at
/// once.
async fn watch_of_deaths(count: usize) -> u64 {
    let faults = Faults::new(&Store::memory());
    let bus = Bus::open(&faults.store(), BusOptions::default()).await.unwrap();
    let mut nodes = Vec::new();
    for _ in 0..count {
        let bus = Bus::open(&faults.store(), BusOptions::default()).await.unwrap();
        nodes.push(joined(&bus).await);
    }
    let during = async || {
        let before = faults.counts();
        tokio::time::sleep(CHANGE).await;
        (faults.counts() - before).read_bytes
    };
    tokio::time::sleep(REST).await;
    let rest = during().await / count as u64;
    nodes.truncate(count - count / 3);
    let spent = during().await / nodes.len() as u64;
    assert_eq!(bus.nodes().await.unwrap().len(), nodes.len());
    println!("{count} nodes: each survivor reads {spent} bytes when a third dies, {rest} at rest");
    spent.saturating_sub(rest)
}

/// Bug: after a removal a node read all others at each poll, so when many died, all survivors together read the square of their number.
/// Fix: it watches as many more nodes as it has removed.
#[tokio::test(start_paused = true)]
async fn a_survivor_of_many_deaths_reads_as_much_among_many_as_among_some() {
    let (some, many) = (watch_of_deaths(60).await, watch_of_deaths(240).await);
    assert!(many <= some * 3 / 2, "{some} bytes among 60 nodes, {many} among 240");
}
