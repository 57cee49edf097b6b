//! What the consumers of a node cost: at their start, at rest, for an event, and when they stop; and what a trickle of events costs them.
//!
//! Hundreds of consumers by default. `NOTIBUS_LOAD=full cargo test --release --test scale consumers -- --nocapture` uses 10,000 and 1,000.

use std::time::Duration;

use notibus::{
    Bus, Node, Notification,
    consumer::{Batch, Consumer},
    store::testing::OperationCounts,
};

use crate::{
    ScaleFixture,
    common::{db, joined, record, row_with, until},
    is_full,
};

/// Starts members of `consumers` consumers on `node` together. Their handlers do nothing.
pub(crate) async fn members(node: &Node, consumers: usize) -> Vec<Consumer> {
    let start = (0..consumers).map(|number| {
        let member = node.consumer(&format!("consumer{number:05}")).unwrap();
        member.run_batches(async |_: Batch<Notification>| Ok(()))
    });
    futures_util::future::try_join_all(start).await.unwrap()
}

/// Records an event of the database `a`, number `count` of its updates, and waits until `consumers` consumers have worked on it.
pub(crate) async fn update(fixture: &ScaleFixture, count: u64, consumers: usize) {
    let (bus, a): (&Bus, _) = (&fixture.counted, db("a", 1));
    let rows = bus.stats().consumer_rows + consumers as u64;
    record(&fixture.store, &fixture.others, &a, [0, 0, 1, 0]).await;
    row_with(&fixture.others, &a, [0, 0, count, 0]).await;
    until("all have it", async || bus.stats().consumer_rows == rows).await;
}

/// Formats these operations as cells of a table.
fn cells(spent: &OperationCounts) -> String {
    let kilobytes = |bytes: u64| bytes.div_ceil(1_000);
    format!(
        "{} reads, {} kB; {} writes, {} kB",
        spent.reads,
        kilobytes(spent.read_bytes),
        spent.write_commits,
        kilobytes(spent.written_bytes)
    )
}

/// Returns the operations of one node's consumers: in their first minute, in an idle hour, in the minute of an event, and at shutdown.
async fn life(consumers: usize) -> [OperationCounts; 4] {
    let fixture = ScaleFixture::new(1, 4).await;
    let notifier = joined(&fixture.others).await.notifier(crate::common::unpolled()).await.unwrap();
    let node = joined(&fixture.counted).await;
    let mut all = Vec::new();
    let start = async {
        all = members(&node, consumers).await;
        tokio::time::sleep(Duration::from_mins(1)).await;
    };
    let start = fixture.during(start).await;
    tokio::time::sleep(Duration::from_mins(5)).await;
    let rest = fixture.during(tokio::time::sleep(Duration::from_hours(1))).await;
    // The first event of a feed moves all lanes of its pulse.
    update(&fixture, 1, consumers).await;
    tokio::time::sleep(Duration::from_mins(1)).await;
    let event = async {
        update(&fixture, 2, consumers).await;
        tokio::time::sleep(Duration::from_mins(1)).await;
    };
    let event = fixture.during(event).await;
    let stop = async {
        let stop = all.into_iter().map(Consumer::shutdown);
        futures_util::future::try_join_all(stop).await.unwrap();
    };
    let stop = fixture.during(stop).await;
    notifier.shutdown().await.unwrap();
    [start, rest, event, stop]
}

/// Regression: the cost of starting and stopping many consumers was quadratic, so 200 took 121,400 mutations.
#[tokio::test(start_paused = true)]
async fn consumers_of_a_node_cost_in_proportion_to_their_number() {
    println!("| consumers of 4 shards | start | an hour of rest | an event | stop |");
    let sizes = if is_full() { [10, 1_000, 10_000] } else { [10, 50, 200] };
    let mut before: Option<(u64, [OperationCounts; 4])> = None;
    for consumers in sizes {
        let spent = life(consumers).await;
        println!("| {consumers} | {} |", spent.each_ref().map(cells).join(" | "));
        let consumers = consumers as u64;
        // Besides an idle minute of the node and its reads of the feed, each consumer reads its lease and checkpoint, then row, checkpoints
        // and low watermark.
        assert!(spent[2].reads <= 200 + 5 * consumers, "an event: {:?}", spent[2]);
        assert!(spent[2].write_commits <= 40 + 2 * consumers, "an event: {:?}", spent[2]);
        // Two reads for the leases, and three for the low watermark.
        assert!(spent[3].reads <= 10 + 5 * consumers, "a stop: {:?}", spent[3]);
        if let Some((fewer, less)) = before.replace((consumers, spent)) {
            for (what, less, spent) in [0, 2, 3].map(|part| (part, less[part], spent[part])) {
                let grows = |less: u64, more: u64| more * fewer <= (less + 200) * consumers * 3 / 2;
                assert!(grows(less.reads, spent.reads), "part {what}: {less:?} of {fewer}, {spent:?}");
                assert!(grows(less.write_commits, spent.write_commits), "part {what}: {less:?}, {spent:?}");
                assert!(grows(less.written_bytes, spent.written_bytes), "part {what}: {less:?}, {spent:?}");
            }
            let (less, rest) = (less[1], spent[1]);
            assert!(rest.reads <= less.reads * 21 / 20 && rest.write_commits <= less.write_commits * 21 / 20);
        }
    }
}

/// Returns the operations of `consumers` consumers with `shards` shards each, over ten minutes with 30 events.
async fn trickle(consumers: usize, shards: u32) -> OperationCounts {
    let fixture = ScaleFixture::new(1, shards).await;
    let notifier = joined(&fixture.others).await.notifier(crate::common::unpolled()).await.unwrap();
    let node = joined(&fixture.counted).await;
    let members = members(&node, consumers).await;
    tokio::time::sleep(Duration::from_mins(5)).await;
    let events = async {
        for count in 1..=30 {
            update(&fixture, count, consumers).await;
            tokio::time::sleep(Duration::from_secs(20)).await;
        }
    };
    let spent = fixture.during(events).await;
    assert!(members.iter().all(|member| member.shards().len() == shards as usize));
    notifier.shutdown().await.unwrap();
    spent
}

/// Regression: a trickle of events, or the bus's self-test, made every shard of every consumer write every half minute, so 16 consumers of
/// 64 shards made 21,253 commits in ten minutes.
#[tokio::test(start_paused = true)]
async fn consumers_of_many_shards_pay_for_the_events_and_not_for_the_shards() {
    println!("| consumers | shards | 30 events in ten minutes |");
    for consumers in if is_full() { [1, 100, 1_000] } else { [1, 4, 16] } {
        let [narrow, wide] = [trickle(consumers, 4).await, trickle(consumers, 64).await];
        for (shards, spent) in [(4, narrow), (64, wide)] {
            println!("| {consumers} | {shards} | {} |", cells(&spent));
        }
        // One checkpoint for each event, and one low watermark for each half minute.
        let most = consumers as u64 * (30 + 30) + 400;
        assert!(wide.write_commits <= most, "{consumers}: {narrow:?}, with 64 shards {wide:?}");
        assert!(wide.write_commits * 10 <= narrow.write_commits * 11, "{narrow:?}, with 64 shards {wide:?}");
        // The node looks for an event in the shards of its lane of the pulse (four of 64, or one of 4), once for all of its consumers.
        let most = narrow.reads * 21 / 20 + 30 * 30;
        assert!(wide.reads <= most, "{consumers}: {narrow:?}, with 64 shards {wide:?}");
    }
}
