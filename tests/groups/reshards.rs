//! Groups that move from shard to shard, while the janitor drops empty shards. Simulated worlds found these defects.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, JanitorOptions, Notification, Sequence,
    feed::ShardId,
    group::{CloseReason, ConsumerOptions, Group},
    store::{Isolation, KeyRange, RangeRead, StoreError, Transaction, testing::Operation},
};
use tokio::sync::watch;

use crate::{
    common::{joined, until},
    fixture::{GroupFixture, Log, names, pass, until_done},
};

/// The beginning of the keys of the checkpoints of the group `g`.
const CHECKPOINTS: &[u8] = b"notibus\x15\x0c\x01n\x00\x15\x01\x02g\x00";

/// A janitor that works all the time.
fn eager() -> JanitorOptions {
    JanitorOptions::default().interval(Duration::from_millis(100))
}

/// Consumers that poll their shards each second.
fn polled() -> ConsumerOptions {
    ConsumerOptions::default().poll_interval(Duration::from_secs(1))
}

/// The shards that the group is reading.
async fn begun(group: &Group<Notification>) -> Vec<u64> {
    group.status().await.unwrap().shards.iter().map(|shard| shard.shard.0).collect()
}

/// The position of the group in the first of its shards.
async fn checkpoint(group: &Group<Notification>) -> Sequence {
    group.status().await.unwrap().shards[0].checkpoint
}

/// A log whose observers of `shard` wait with each batch until `true` is sent.
fn held_up(shard: ShardId) -> (Log, watch::Sender<bool>) {
    let (goes_on, received) = watch::channel(false);
    let log = Log::doing(move |batch| {
        let mut received = received.clone();
        async move {
            if batch.shard == shard {
                received.wait_for(|goes_on| *goes_on).await?;
            }
            Ok(())
        }
    });
    (log, goes_on)
}

/// Regression: one shard was drained, and saved that, up to the begin of its successors. Before the other shard was drained, the
/// janitor dropped these successors, which were empty. So the end of the other shard was further on, the first one did not
/// seem to have reached it, and both waited for each other forever.
#[tokio::test(start_paused = true)]
async fn successors_that_are_dropped_meanwhile_hold_nobody_up() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (log, goes_on) = held_up(ShardId(2));
    let consumer = log.consume(&fixture.bus, &group, polled()).await;
    fixture.create(names("db", 8)).await;
    log.until_names(&names("db", 8)).await;
    let (feed, before) = (fixture.other.feed(), checkpoint(&group).await);
    feed.reshard(3, None).await.unwrap();
    let is_drained = async || checkpoint(&group).await > before;
    until("one shard is drained", is_drained).await;
    feed.reshard(1, None).await.unwrap();
    let janitor = joined(&fixture.other).await.janitor(eager()).await.unwrap();
    until("the empty entry is gone", async || feed.topology().await.unwrap().len() == 2).await;

    goes_on.send_replace(true);
    until("the group has gone over", async || begun(&group).await == [6]).await;
    fixture.create(["new"]).await;
    until_done(&group).await;
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// Regression: an entry was dropped once its shards were empty, although a node was still working on rows that had been in one of them.
/// The group moved to the next shards, and another node could deliver newer rows of the same databases before the older batch had ended.
/// A checkpoint that was written then left the group in shards of two entries, where it got stuck.
#[tokio::test(start_paused = true)]
async fn an_entry_is_kept_until_all_groups_have_left_it() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (log, goes_on) = held_up(ShardId(1));
    let consumer = log.consume(&fixture.bus, &group, polled()).await;
    let all = names("db", 8);
    fixture.create(&all).await;
    log.until_names(&all).await;
    let feed = fixture.other.feed();
    feed.reshard(1, None).await.unwrap();
    for name in &all {
        fixture.update(name, 0).await;
    }
    // Newer rows have replaced all rows of the first entry.
    let janitor = joined(&fixture.other).await.janitor(eager()).await.unwrap();
    pass(Duration::from_secs(30)).await;
    assert_eq!((begun(&group).await, feed.topology().await.unwrap().len()), (vec![1, 2], 2));
    assert_eq!(log.closed(), [CloseReason::Resharded], "of the other shard; the batch goes on");

    goes_on.send_replace(true);
    until("the group has gone over", async || begun(&group).await == [3]).await;
    until_done(&group).await;
    until("the entry is gone", async || feed.topology().await.unwrap().len() == 1).await;
    assert!(!log.closed().contains(&CloseReason::LeaseLost));
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// Regression: a node took the lease of a shard that a reset had just taken out of its group, and waited there to be stopped. The group came
/// back to the shard before the node had looked at its leases again: so it kept the lease, and nobody worked on the shard.
#[tokio::test(start_paused = true)]
async fn a_shard_that_leaves_its_group_and_comes_back_is_worked_on() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    // How many reads of the checkpoint have failed, until they are let through; and then how many were made.
    let (reads, is_blocked) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(true)));
    let (counted, blocked) = (Arc::clone(&reads), Arc::clone(&is_blocked));
    fixture.faults.plan_reads(move |operation| match operation {
        Operation::Get { key, .. } if key.starts_with(CHECKPOINTS) => {
            counted.fetch_add(1, Ordering::Relaxed);
            blocked.load(Ordering::Relaxed).then_some(StoreError::TRANSACTION_TOO_OLD)
        }
        _ => None,
    });
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, polled()).await;
    until("the node has the lease", async || reads.load(Ordering::Relaxed) > 0).await;
    let read = RangeRead::new(KeyRange::prefix(CHECKPOINTS));
    let [(key, value)] = &fixture.store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows[..]
    else {
        panic!("a group has a checkpoint of its only shard");
    };
    let change = async |tx: Transaction| {
        tx.clear(key);
        Ok(())
    };
    fixture.store.run(change).await.unwrap();
    is_blocked.store(false, Ordering::Relaxed);
    reads.store(0, Ordering::Relaxed);
    until("the node has found no checkpoint", async || reads.load(Ordering::Relaxed) > 0).await;
    assert!(log.all().is_empty(), "the group does not read the shard");
    let change = async |tx: Transaction| {
        tx.set(key, value);
        Ok(())
    };
    fixture.store.run(change).await.unwrap();
    fixture.create(names("a", 1)).await;
    log.until_names(&names("a", 1)).await;
    consumer.shutdown().await.unwrap();
}
