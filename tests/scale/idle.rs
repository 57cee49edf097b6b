//! What idle nodes with all roles cost the store, per node and second: the same for one and for eight, without and with consumers.
//!
//! Hundreds of consumers by default. `NOTIBUS_LOAD=full cargo test --release --test scale idle -- --nocapture` uses 10,000.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, BusOptions, Notification, StartOptions,
    consumer::Batch,
    store::{
        Store,
        testing::{Faults, Operation, OperationCounts},
    },
};

use crate::is_full;

/// How long everything rests before operations are counted, and how long they are counted: two passes of the janitor.
const REST: Duration = Duration::from_mins(5);
const COUNTED: Duration = Duration::from_mins(20);

/// Returns the operations of `nodes` nodes at rest, which divide 64 partitions and run `consumers` consumers of 4 shards between them.
/// Reads are gets and range requests; requests for a read version do not count.
async fn idle(nodes: usize, consumers: usize) -> OperationCounts {
    let faults = Faults::new(&Store::memory());
    let mut running = Vec::new();
    for _ in 0..nodes {
        // The nodes start one at a time, so that most of them hold partitions that are not adjacent.
        let bus = Bus::open(&faults.store(), BusOptions::default()).await.unwrap();
        running.push(bus.start(StartOptions::default()).await.unwrap());
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    let members = (0..consumers).map(|number| {
        let member = running[number % nodes].consumer(&format!("consumer{number:05}")).unwrap();
        member.run_batches(async |_: Batch<Notification>| Ok(()))
    });
    let members = futures_util::future::try_join_all(members).await.unwrap();
    tokio::time::sleep(REST).await;
    let (reads, before) = (Arc::new(AtomicU64::new(0)), faults.counts());
    let counted = Arc::clone(&reads);
    faults.plan_reads(move |operation| {
        let is_read = matches!(operation, Operation::Get { .. } | Operation::GetRange { .. });
        counted.fetch_add(is_read.into(), Ordering::Relaxed);
        None
    });
    tokio::time::sleep(COUNTED).await;
    let mut spent = faults.counts() - before;
    spent.reads = reads.load(Ordering::Relaxed);
    assert_eq!(members.iter().map(|member| member.shards().len()).sum::<usize>(), consumers * 4);
    spent
}

/// Bug: an idle node made five reads a second, for two keys, two ranges and its own row, and one more for each run of adjacent partitions
/// that it held, so each of eight nodes made more than a single one did.
#[tokio::test(start_paused = true)]
async fn an_idle_node_makes_three_reads_a_second_at_most() {
    println!("| nodes | consumers | reads | bytes read | commits |");
    for consumers in [0, if is_full() { 10_000 } else { 200 }] {
        for nodes in [1, 8] {
            let spent = idle(nodes, consumers).await;
            let seconds = nodes as u64 * COUNTED.as_secs();
            let each = |count: u64| {
                let hundredths = count * 100 / seconds;
                format!("{}.{:02}", hundredths / 100, hundredths % 100)
            };
            let [reads, bytes, commits] = [spent.reads, spent.read_bytes, spent.write_commits].map(each);
            println!("| {nodes} | {consumers} | {reads} | {bytes} | {commits} |");
            assert!(spent.reads <= 3 * seconds, "{nodes} nodes, {consumers} consumers: {spent:?}");
            assert!(
                spent.write_commits * 10 <= 6 * seconds,
                "{nodes} nodes, {consumers} consumers: {spent:?}"
            );
        }
    }
}
