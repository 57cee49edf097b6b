//! What an idle consumer costs: nothing that grows with shards; with groups, a round of balancing each.

use std::time::Duration;

use notibus::{
    BalanceOptions, ConsumerOptions, GroupOptions, NodeOptions, StoreError,
    store::testing::{Operation, OperationCounts},
};

use crate::world::{Log, World, pass};

/// For how long is counted.
const TIME: Duration = Duration::from_mins(10);

/// What a node with `groups` groups of a feed of `shards` shards asks of the store in [`TIME`] while nothing happens.
async fn idle(shards: u32, groups: usize, poll_interval: Duration, balance: Duration) -> OperationCounts {
    let world = World::new(shards).await;
    let node = world.bus.node(NodeOptions::default()).await.unwrap();
    let (log, mut consumers) = (Log::new(), Vec::new());
    for number in 0..groups {
        let group = world.bus.group(&format!("g{number}")).unwrap();
        group.create(&GroupOptions::default()).await.unwrap();
        let balance = BalanceOptions { interval: balance, ..BalanceOptions::default() };
        let options = ConsumerOptions { poll_interval, balance, ..ConsumerOptions::default() };
        let observe = |_: notibus::GroupBatch<notibus::Notification>| std::future::ready(Ok(()));
        consumers.push(node.consumer(&group, move |_| observe, options).await.unwrap());
    }
    world.create(["a"]).await;
    pass(Duration::from_mins(5)).await;
    let before = world.faults.counts();
    pass(TIME).await;
    let after = world.faults.counts();
    assert!(
        log.rows().is_empty() && consumers.iter().all(|consumer| consumer.shards().len() == shards as usize)
    );
    println!("{shards} shards, {groups} groups: {before:?} to {after:?}");
    let mut spent = after;
    spent.reads -= before.reads;
    spent.mutations -= before.mutations;
    spent.commits -= before.commits;
    spent.write_commits -= before.write_commits;
    spent
}

/// So rare that it does not happen.
const NEVER: Duration = Duration::from_hours(24);

/// The default interval of balancing.
const BALANCE: Duration = Duration::from_secs(3);

#[tokio::test(start_paused = true)]
async fn an_idle_node_does_not_cost_more_with_more_shards() {
    let (one, many) = (idle(1, 1, NEVER, BALANCE).await, idle(16, 1, NEVER, BALANCE).await);
    let seconds = TIME.as_secs();
    // Heads and topology each second; heartbeat and round of balancing each 3 s, a few percent more often than that.
    assert!(one.reads <= seconds * 4 && one.commits <= seconds * 2, "{one:?}");
    // Rounds are jittered.
    assert!(many.reads <= one.reads * 105 / 100, "{many:?} after {one:?}");
    assert!(many.commits <= one.commits * 105 / 100, "{many:?} after {one:?}");
    assert!(many.write_commits <= one.write_commits + 5, "{many:?} after {one:?}");
}

/// The watcher of the process looks at all shards at once, so their own polls have nothing to do.
#[tokio::test(start_paused = true)]
async fn shards_are_not_polled_as_long_as_the_watcher_looks() {
    let poll_interval = ConsumerOptions::default().poll_interval;
    let (without, with) = (idle(16, 1, NEVER, BALANCE).await, idle(16, 1, poll_interval, BALANCE).await);
    assert!(with.reads <= without.reads * 103 / 100, "{with:?} after {without:?}");
    assert!(with.commits <= without.commits * 103 / 100, "{with:?} after {without:?}");
}

/// If the watcher cannot look, each shard is polled for itself, and rows come all the same.
#[tokio::test(start_paused = true)]
async fn shards_are_polled_when_the_watcher_cannot_look() {
    let world = World::new(3).await;
    let group = world.group(notibus::GroupStart::Now).await;
    let log = Log::new();
    let consumer = log.consume(&world.bus, &group, ConsumerOptions::default()).await;
    pass(Duration::from_mins(5)).await;
    // The heads of the shards cannot be read.
    world.faults.plan_reads(|operation| match operation {
        Operation::GetRange { range, .. } if range.begin.starts_with(b"notibus\x15\x06") => {
            Some(StoreError::IO_ERROR)
        }
        _ => None,
    });
    pass(Duration::from_mins(2)).await;
    world.create(["a"]).await;
    log.until_names(&["a".to_owned()]).await;
    consumer.shutdown().await.unwrap();
    log.check(true);
}

#[tokio::test(start_paused = true)]
async fn another_group_costs_its_rounds_of_balancing_and_nothing_else() {
    let (one, many) = (idle(4, 1, NEVER, BALANCE).await, idle(4, 4, NEVER, BALANCE).await);
    let rounds = 3 * TIME.as_secs() / 3 * 115 / 100;
    assert!(many.commits <= one.commits + rounds, "{many:?} after {one:?}");
    assert!(many.reads <= one.reads + rounds * 4, "{many:?} after {one:?}");
    assert!(many.write_commits <= one.write_commits + 5, "{many:?} after {one:?}");
    let (one, many) = (idle(4, 1, NEVER, NEVER).await, idle(4, 4, NEVER, NEVER).await);
    assert!(many.reads <= one.reads + 5 && many.commits <= one.commits + 5, "{many:?} after {one:?}");
}
