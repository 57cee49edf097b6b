//! Observers that work on several rows at once.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, Consumer, Cursor, Notification,
    group::{CheckpointPolicy, ConcurrentRow, FencingToken, each_concurrent},
};

use crate::{
    common::{joined, until},
    fixture::{GroupFixture, behind, hinted, names, pass, until_done},
};

/// How often a name was worked on, and what came with its last row: the attempt and the token.
type Done = (usize, u32, Option<FencingToken>);

#[derive(Clone, Default)]
struct Works {
    done: Arc<Mutex<BTreeMap<String, Done>>>,
}

impl Works {
    /// A consumer of the group `g` that works on four rows at once, each for 100 ms.
    async fn consume(&self, bus: &Bus, checkpoint: CheckpointPolicy) -> Consumer {
        let done = Arc::clone(&self.done);
        let work = move |work: ConcurrentRow<Notification>| {
            let done = Arc::clone(&done);
            async move {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let mut done = done.lock().unwrap();
                let (times, ..) = done.get(work.row.name.as_str()).copied().unwrap_or_default();
                assert!(work.row.sequence > work.after);
                let now = (times + 1, work.attempt, Some(work.fencing_token));
                done.insert(work.row.name.to_string(), now);
                Ok(())
            }
        };
        let group = bus.group("g").unwrap();
        let options = hinted().checkpoint(checkpoint);
        joined(bus).await.consumer(&group, move |_| each_concurrent(4, work.clone()), options).await.unwrap()
    }

    /// How many names were worked on more than once.
    fn repeated(&self) -> usize {
        self.done.lock().unwrap().values().filter(|(times, ..)| *times > 1).count()
    }
}

/// Regression: nothing was saved while a batch was in work, so a crash repeated all of it: up to 1,000 rows by default, whatever the
/// policy.
#[tokio::test(start_paused = true)]
async fn a_crash_within_a_batch_repeats_little_of_it() {
    for (checkpoint, most) in [
        (CheckpointPolicy::EveryBatch, 48),
        (CheckpointPolicy::Rows(10), 16),
        (CheckpointPolicy::Interval(Duration::from_millis(500)), 28),
        (CheckpointPolicy::Explicit, 48),
    ] {
        let fixture = GroupFixture::new(1).await;
        let group = fixture.group(Cursor::NOTHING).await;
        fixture.create(names("db", 200)).await;
        let works = Works::default();
        let first = works.consume(&fixture.bus, checkpoint).await;
        until("some are done", async || works.done.lock().unwrap().len() >= 150).await;
        drop(first);
        assert!(behind(&group).await <= 50 + most as u64, "{checkpoint:?}");
        let second = works.consume(&fixture.another().await, checkpoint).await;
        until_done(&group).await;
        second.shutdown().await.unwrap();
        assert_eq!(works.done.lock().unwrap().len(), 200);
        assert!(works.repeated() <= most, "{checkpoint:?}: {} of 150 came again", works.repeated());
        let done = works.done.lock().unwrap();
        assert!(done["db0"].2 < done["db199"].2, "of another consumer");
        assert!(done.values().all(|(_, attempt, _)| *attempt == 1));
    }
}

/// Regression: where only observers save, `each_concurrent` saved nothing when all had succeeded. So a closed shard was never
/// drained, and the group never went over to its successors.
#[tokio::test(start_paused = true)]
async fn where_only_observers_save_a_group_goes_over_all_the_same() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let works = Works::default();
    let consumer = works.consume(&fixture.bus, CheckpointPolicy::Explicit).await;
    fixture.create(names("db", 20)).await;
    until_done(&group).await;
    fixture.other.feed().reshard(3, None).await.unwrap();
    fixture.create(["new"]).await;
    until("it has gone over", async || group.status().await.unwrap().shards.len() == 3).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    let all = works.done.lock().unwrap().len();
    assert_eq!((all, works.repeated()), (21, 0));
}

/// What fails stops the others of its batch from being saved, but not from being done.
#[tokio::test(start_paused = true)]
async fn nothing_behind_a_failed_row_is_saved() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(names("db", 100)).await;
    let failed = Arc::new(AtomicUsize::new(0));
    let (fails, of) = (Arc::clone(&failed), fixture.bus.group("g").unwrap());
    let work = move |work: ConcurrentRow<Notification>| {
        let fails = Arc::clone(&fails);
        async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            if work.row.name.as_str() == "db30" {
                fails.fetch_add(1, Ordering::Relaxed);
                return Err("not this one".into());
            }
            Ok(())
        }
    };
    let options = hinted().checkpoint(CheckpointPolicy::Rows(1));
    let node = joined(&fixture.bus).await;
    let consumer = node.consumer(&of, move |_| each_concurrent(4, work.clone()), options).await.unwrap();
    until("it has failed often", async || failed.load(Ordering::Relaxed) >= 3).await;
    pass(Duration::from_secs(20)).await;
    let rows = fixture.other.feed().page(Cursor::NOTHING, 100).await.unwrap().rows;
    let before = rows.iter().position(|row| row.name.as_str() == "db30").unwrap() as u64;
    assert_eq!(behind(&group).await, 100 - before, "the row that fails, and those behind it");
    drop(consumer);
}
