//! What a pool costs: a change in one of them the members of others, and many resources those who divide them.
//!
//! Small by default. `NOTIBUS_LOAD=full cargo test --release --test scale pools -- --nocapture` takes the sizes of `docs/scale.md`.

use std::time::{Duration, Instant};

use notibus::{
    Bus, Node, NodeOptions, Notification, NotifierOptions,
    cursor::Start,
    group::{Consumer, ConsumerOptions, Group, GroupBatch, GroupOptions},
};

use crate::{
    ScaleFixture,
    common::{joined, until},
};

fn is_full() -> bool {
    std::env::var("NOTIBUS_LOAD").is_ok_and(|size| size == "full")
}

/// A consumer of `group` on a node of `bus`, that does nothing.
async fn consumer(node: &Node, group: &Group<Notification>) -> Consumer {
    let observe = |_: GroupBatch<Notification>| std::future::ready(Ok(()));
    node.consumer(group, move |_| observe, ConsumerOptions::default()).await.unwrap()
}

async fn group(bus: &Bus, name: &str) -> Group<Notification> {
    let group = bus.group(name).unwrap();
    group.create(&GroupOptions::default()).await.unwrap();
    group
}

/// Names of the groups that [`BusyBus`] consumes.
fn names(groups: usize) -> impl Iterator<Item = String> {
    (0..groups).map(|number| format!("group{number:04}"))
}

/// `nodes` nodes that count what they read, with a consumer of each of `groups` groups on each of them; and another group.
struct BusyBus {
    fixture: ScaleFixture,
    other: Group<Notification>,
    _members: Vec<Node>,
    _consumers: Vec<Consumer>,
}

impl BusyBus {
    async fn new(nodes: usize, groups: usize) -> Self {
        let fixture = ScaleFixture::new(1, 4).await;
        let (mut members, mut consumers) = (Vec::new(), Vec::new());
        for name in names(groups) {
            group(&fixture.others, &name).await;
        }
        for _ in 0..nodes {
            let node = joined(&fixture.counted).await;
            for name in names(groups) {
                let group = fixture.counted.group(&name).unwrap();
                consumers.push(consumer(&node, &group).await);
            }
            members.push(node);
        }
        let other = group(&fixture.others, "other").await;
        Self { fixture, other, _members: members, _consumers: consumers }
    }

    /// The reads, and their bytes, that the nodes make during `change`, which takes a minute, more than in a minute at rest.
    async fn reads_beside(&self, change: impl Future<Output = ()>) -> (u64, u64) {
        tokio::time::sleep(Duration::from_mins(5)).await;
        let rest = self.fixture.during(tokio::time::sleep(Duration::from_mins(1))).await;
        let changed = self.fixture.during(change).await;
        println!("at rest {rest:?}, beside the change {changed:?}");
        (changed.reads.saturating_sub(rest.reads), changed.read_bytes.saturating_sub(rest.read_bytes))
    }
}

/// [`BusyBus::reads_beside`] a change of the leases of another group.
async fn change_beside(nodes: usize, groups: usize) -> (u64, u64) {
    let bus = BusyBus::new(nodes, groups).await;
    let _other = consumer(&joined(&bus.fixture.others).await, &bus.other).await;
    let change = async {
        bus.other.reset(Start::Now, true).await.unwrap();
        tokio::time::sleep(Duration::from_mins(1)).await;
    };
    Box::pin(bus.reads_beside(change)).await
}

/// [`BusyBus::reads_beside`] a consumer of another group that joins and leaves.
async fn join_beside(nodes: usize, groups: usize) -> (u64, u64) {
    let bus = BusyBus::new(nodes, groups).await;
    let node = joined(&bus.fixture.others).await;
    let change = async {
        let joined = consumer(&node, &bus.other).await;
        tokio::time::sleep(Duration::from_secs(30)).await;
        joined.shutdown().await.unwrap();
        tokio::time::sleep(Duration::from_secs(30)).await;
    };
    Box::pin(bus.reads_beside(change)).await
}

/// Regression: each consumer that joined or left made every worker of every node read the members, leases and resources of its own pool.
#[tokio::test(start_paused = true)]
async fn pools_beside_a_join_read_their_versions_only() {
    for (nodes, groups) in [(4, 4), (16, 16)] {
        let (reads, bytes) = join_beside(nodes, groups).await;
        let pools = (nodes * groups) as u64;
        println!("{nodes} × {groups}: {reads} reads and {bytes} bytes more");
        // The members change twice, and so does the pool. Polls are jittered, and a role may share its version with another.
        let most = pools * 5 + 8 * nodes as u64;
        assert!(reads <= most, "{reads} reads of {pools} pools");
        assert!(bytes <= most * 150, "{bytes} bytes of {pools} pools");
    }
}

/// Each change of any lease made every worker of every node read all nodes and roles: 19 kB at 4 nodes × 4 groups, and 1.5 MB at 16 × 16.
#[tokio::test(start_paused = true)]
async fn pools_beside_a_changed_one_read_their_versions_only() {
    for (nodes, groups) in [(4, 4), (16, 16)] {
        let (reads, bytes) = change_beside(nodes, groups).await;
        let pools = (nodes * groups) as u64;
        println!("{nodes} × {groups}: {reads} reads and {bytes} bytes more");
        // The pool changes twice, with the reset and with the acquisition after it. Polls are jittered.
        let most = pools * 2 + pools / 2 + 8 * nodes as u64;
        assert!(reads <= most, "{reads} reads of {pools} pools");
        assert!(bytes <= most * 150, "{bytes} bytes of {pools} pools");
    }
}

/// How long the second notifier of `partitions` works until both have their halves: in paused time, all that passes is work.
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

/// The plan was quadratic: a second notifier took 0.15, 0.58 and 2.8 s to start with 1,024, 2,048 and 4,096 partitions.
#[tokio::test(start_paused = true)]
async fn pools_of_many_partitions_are_joined() {
    for partitions in if is_full() { &[1_024, 2_048, 4_096][..] } else { &[256] } {
        work_of_a_join(*partitions).await;
    }
}

/// A second consumer of 10,000 shards had not started after 25 s.
#[tokio::test(start_paused = true)]
async fn pools_of_many_shards_are_divided_among_three() {
    let shards = if is_full() { 10_000 } else { 500 };
    let fixture = ScaleFixture::new(1, shards).await;
    let group = group(&fixture.counted, "group").await;
    let (began, wall) = (tokio::time::Instant::now(), Instant::now());
    let mut consumers = Vec::new();
    for _ in 0..3 {
        consumers.push(consumer(&joined(&fixture.counted).await, &group).await);
    }
    let held = |consumer: &Consumer| consumer.shards().len();
    let is_divided = || {
        let counts: Vec<_> = consumers.iter().map(held).collect();
        counts.iter().sum::<usize>() == shards as usize
            && counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1
    };
    while !is_divided() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("{shards} shards are divided after {:?}, with {:?} of work", began.elapsed(), wall.elapsed());
    assert!(began.elapsed() <= Duration::from_secs(10), "{shards} shards: {:?}", began.elapsed());
    for consumer in consumers {
        consumer.shutdown().await.unwrap();
    }
}
