//! What pools cost: what a change in one pool costs the members of others, and what many resources cost the nodes that divide them.
//!
//! Small by default. `NOTIBUS_LOAD=full cargo test --release --test scale pools -- --nocapture` uses the sizes of `docs/scale.md`.

use std::time::{Duration, Instant};

use notibus::{
    Bus, Node, NodeOptions, Notification, NotifierOptions,
    consumer::{Batch, Consumer, ConsumerHandle, ConsumerSettings},
    cursor::Start,
};

use crate::{
    ScaleFixture,
    common::{joined, until},
    is_full,
};

/// Starts a member of the consumer `name` on `node`, whose handler does nothing.
async fn member(node: &Node, name: &str) -> Consumer {
    let nothing = |_: Batch<Notification>| std::future::ready(Ok(()));
    node.consumer(name).unwrap().run_batches(nothing).await.unwrap()
}

async fn consumer(bus: &Bus, name: &str) -> ConsumerHandle {
    let consumer = bus.consumer(name).unwrap();
    consumer.create(&ConsumerSettings::default()).await.unwrap();
    consumer
}

/// Returns the names of the consumers that the nodes of a [`BusyBus`] run.
fn names(consumers: usize) -> impl Iterator<Item = String> {
    (0..consumers).map(|number| format!("consumer{number:04}"))
}

/// Nodes that count what they read, with a member of each consumer on each of them; and another consumer.
struct BusyBus {
    fixture: ScaleFixture,
    other: ConsumerHandle,
    _nodes: Vec<Node>,
    _members: Vec<Consumer>,
}

impl BusyBus {
    async fn new(nodes: usize, consumers: usize) -> Self {
        let fixture = ScaleFixture::new(1, 4).await;
        let (mut all, mut members) = (Vec::new(), Vec::new());
        for name in names(consumers) {
            consumer(&fixture.others, &name).await;
        }
        for _ in 0..nodes {
            let node = joined(&fixture.counted).await;
            for name in names(consumers) {
                members.push(member(&node, &name).await);
            }
            all.push(node);
        }
        let other = consumer(&fixture.others, "other").await;
        Self { fixture, other, _nodes: all, _members: members }
    }

    /// Returns the reads, and their bytes, that the nodes make during `change`, which takes a minute, beyond those of a minute at rest.
    async fn reads_beside(&self, change: impl Future<Output = ()>) -> (u64, u64) {
        tokio::time::sleep(Duration::from_mins(5)).await;
        let rest = self.fixture.during(tokio::time::sleep(Duration::from_mins(1))).await;
        let changed = self.fixture.during(change).await;
        println!("at rest {rest:?}, beside the change {changed:?}");
        (changed.reads.saturating_sub(rest.reads), changed.read_bytes.saturating_sub(rest.read_bytes))
    }
}

/// Returns the [`BusyBus::reads_beside`] a change to the leases of another consumer.
async fn change_beside(nodes: usize, consumers: usize) -> (u64, u64) {
    let bus = BusyBus::new(nodes, consumers).await;
    let _other = member(&joined(&bus.fixture.others).await, "other").await;
    let change = async {
        bus.other.reset(Start::Now, true).await.unwrap();
        tokio::time::sleep(Duration::from_mins(1)).await;
    };
    Box::pin(bus.reads_beside(change)).await
}

/// Returns the [`BusyBus::reads_beside`] a member of another consumer that joins and leaves.
async fn join_beside(nodes: usize, consumers: usize) -> (u64, u64) {
    let bus = BusyBus::new(nodes, consumers).await;
    let node = joined(&bus.fixture.others).await;
    let change = async {
        let joined = member(&node, "other").await;
        tokio::time::sleep(Duration::from_secs(30)).await;
        joined.shutdown().await.unwrap();
        tokio::time::sleep(Duration::from_secs(30)).await;
    };
    Box::pin(bus.reads_beside(change)).await
}

/// Regression: each member that joined or left made every worker of every node read the members, leases and resources of its own pool.
#[tokio::test(start_paused = true)]
async fn pools_beside_a_join_read_their_versions_only() {
    for (nodes, consumers) in [(4, 4), (16, 16)] {
        let (reads, bytes) = join_beside(nodes, consumers).await;
        let pools = (nodes * consumers) as u64;
        println!("{nodes} × {consumers}: {reads} reads and {bytes} bytes more");
        // The members change twice, and so does the pool. Polls are jittered, and a role may share its version with another.
        let most = pools * 5 + 8 * nodes as u64;
        assert!(reads <= most, "{reads} reads of {pools} pools");
        assert!(bytes <= most * 150, "{bytes} bytes of {pools} pools");
    }
}

/// Regression: each change of any lease made every worker of every node read all nodes and roles: 19 kB at 4 nodes × 4 consumers, and 1.5
/// MB at 16 × 16.
#[tokio::test(start_paused = true)]
async fn pools_beside_a_changed_one_read_their_versions_only() {
    for (nodes, consumers) in [(4, 4), (16, 16)] {
        let (reads, bytes) = change_beside(nodes, consumers).await;
        let pools = (nodes * consumers) as u64;
        println!("{nodes} × {consumers}: {reads} reads and {bytes} bytes more");
        // The pool changes twice, with the reset and with the acquisition after it. Polls are jittered.
        let most = pools * 2 + pools / 2 + 8 * nodes as u64;
        assert!(reads <= most, "{reads} reads of {pools} pools");
        assert!(bytes <= most * 150, "{bytes} bytes of {pools} pools");
    }
}

/// Returns how long the second notifier of `partitions` works until both have their halves: in paused time, only work takes time.
async fn work_of_a_join(partitions: u32) -> Duration {
    let fixture = ScaleFixture::new(partitions, 1).await;
    let options = || NotifierOptions::default().poll_interval(Duration::from_hours(10));
    let first = joined(&fixture.others).await.notifier(options()).await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    let began = Instant::now();
    let node = fixture.counted.node(NodeOptions::default()).await.unwrap();
    let second = node.notifier(options()).await.unwrap();
    let started = began.elapsed();
    let half = partitions as usize / 2;
    until("both have a half", async || second.partitions().len() == half).await;
    println!(
        "{partitions} partitions: the start of the second works {started:?}, until both have a half {:?}",
        began.elapsed()
    );
    assert_eq!(first.partitions().len(), half);
    started
}

/// Regression: the cost of a plan was quadratic, so a second notifier took 0.15, 0.58 and 2.8 s to start with 1,024, 2,048 and 4,096
/// partitions.
#[tokio::test(start_paused = true)]
async fn pools_of_many_partitions_are_joined() {
    for partitions in if is_full() { &[1_024, 2_048, 4_096][..] } else { &[256] } {
        work_of_a_join(*partitions).await;
    }
}

/// Regression: a second member of a consumer of 10,000 shards had not started after 25 s.
#[tokio::test(start_paused = true)]
async fn pools_of_many_shards_are_divided_among_three() {
    let shards = if is_full() { 1_000 } else { 500 };
    let fixture = ScaleFixture::new(1, shards).await;
    let (began, wall) = (tokio::time::Instant::now(), Instant::now());
    let mut members = Vec::new();
    for _ in 0..3 {
        members.push(member(&joined(&fixture.counted).await, "c").await);
    }
    let held = |member: &Consumer| member.shards().len();
    let is_divided = || {
        let counts: Vec<_> = members.iter().map(held).collect();
        counts.iter().sum::<usize>() == shards as usize
            && counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1
    };
    while !is_divided() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("{shards} shards are divided after {:?}, with {:?} of work", began.elapsed(), wall.elapsed());
    assert!(began.elapsed() <= Duration::from_secs(10), "{shards} shards: {:?}", began.elapsed());
    for member in members {
        member.shutdown().await.unwrap();
    }
}
