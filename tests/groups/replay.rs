//! Rows that a group has worked on, and gets once more.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, Error, Notification, Sequence,
    cursor::Start,
    group::{ConsumerOptions, Group},
};
use tokio::sync::Notify;

use crate::{
    common::until,
    fixture::{GroupFixture, Log, names, pass, until_done},
};

/// Waits until nothing is parked.
async fn until_none_is_parked(group: &Group<Notification>) {
    until("nothing is parked", async || group.parked("", 1).await.unwrap().is_empty()).await;
}

/// How often each name was delivered. The rows of each name came in order.
fn counts(log: &Log) -> BTreeMap<String, usize> {
    let mut last: BTreeMap<String, (usize, Sequence)> = BTreeMap::new();
    for (name, sequence) in log.rows() {
        let (count, before) = last.entry(name.to_string()).or_insert((0, sequence));
        assert!(*before <= sequence, "{name} at {sequence} came after {before}");
        (*count, *before) = (*count + 1, sequence);
    }
    last.into_iter().map(|(name, (count, _))| (name, count)).collect()
}

#[tokio::test(start_paused = true)]
async fn what_is_asked_for_comes_again_and_nothing_else() {
    let fixture = GroupFixture::new(3).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, ConsumerOptions::default()).await;
    fixture.create(names("a", 5).iter().chain(&names("b", 5))).await;
    until_done(&group).await;
    let before = group.status().await.unwrap();

    assert_eq!(group.replay(|row| row.name.as_str().starts_with('a')).await.unwrap(), 5);
    until_none_is_parked(&group).await;
    let times = counts(&log);
    assert!(names("a", 5).iter().all(|name| times[name] == 2), "{times:?}");
    assert!(names("b", 5).iter().all(|name| times[name] == 1), "{times:?}");
    for (shard, was) in group.status().await.unwrap().shards.iter().zip(&before.shards) {
        assert!(shard.checkpoint >= was.checkpoint);
    }

    // By ids, as the command does, and again.
    let untyped = fixture.bus.any_group(None, "g").unwrap();
    assert_eq!(untyped.replay_ids(|id| id == "a1" || id == "b1").await.unwrap(), 2);
    until_none_is_parked(&group).await;
    let times = counts(&log);
    assert_eq!((times["a1"], times["b1"], times["a2"]), (3, 2, 2));
    assert_eq!(group.replay(|_| false).await.unwrap(), 0);
    consumer.shutdown().await.unwrap();
    log.check(true);
}

/// What the group has still to read comes anyway; what it began after is not its.
#[tokio::test(start_paused = true)]
async fn only_what_was_worked_on_is_replayed() {
    let fixture = GroupFixture::new(2).await;
    fixture.create(["before"]).await;
    let group = fixture.group(Start::Now).await;
    fixture.create(["a", "b"]).await;
    assert_eq!(group.replay(|_| true).await.unwrap(), 0, "nobody has worked on them");
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, ConsumerOptions::default()).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    fixture.update("b", 0).await;
    assert_eq!(group.replay(|_| true).await.unwrap(), 1, "b has news that was not worked on");
    assert_eq!(group.replay(|_| true).await.unwrap(), 0, "a waits already");
    // News of a wait behind what is replayed, and take its place.
    fixture.update("a", 0).await;
    let consumer = log.consume(&fixture.bus, &group, ConsumerOptions::default()).await;
    until_done(&group).await;
    until_none_is_parked(&group).await;
    let times = counts(&log);
    assert_eq!((times.get("before"), times["b"]), (None, 2));
    assert!((2..=3).contains(&times["a"]), "{times:?}");
    consumer.shutdown().await.unwrap();
    let missing = fixture.bus.group("none").unwrap().replay(|_| true).await;
    assert!(matches!(missing, Err(Error::NoGroup { .. })));
}

/// A consumer hears of a replay at its next poll. What comes in between it delivers at once; then the row before must not follow.
#[tokio::test(start_paused = true)]
async fn a_row_that_was_overtaken_does_not_come_after_the_next() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, ConsumerOptions::default()).await;
    fixture.create(["a"]).await;
    until_done(&group).await;
    for before in 0..5 {
        assert_eq!(group.replay(|_| true).await.unwrap(), 1);
        pass(Duration::from_millis(before * 100)).await;
        fixture.update("a", before).await;
        until_done(&group).await;
        until_none_is_parked(&group).await;
    }
    assert!(counts(&log)["a"] >= 6);
    consumer.shutdown().await.unwrap();
}

/// Regression: the row before was delivered all the same if another one of the database was in the feed by then, and unread.
#[tokio::test(start_paused = true)]
async fn a_row_that_was_overtaken_does_not_come_although_another_is_unread() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (gate, is_closed) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
    let (opens, closed) = (Arc::clone(&gate), Arc::clone(&is_closed));
    let log = Log::doing(move |batch| {
        // What is replayed comes with the start of the group.
        let waits = batch.after > Sequence::MIN && closed.load(Ordering::Relaxed);
        let opens = Arc::clone(&opens);
        async move {
            if waits {
                opens.notified().await;
            }
            Ok(())
        }
    });
    let consumer = log.consume(&fixture.bus, &group, ConsumerOptions::default()).await;
    fixture.create(["a"]).await;
    until_done(&group).await;
    assert_eq!(group.replay(|_| true).await.unwrap(), 1);
    // The next row is being delivered when the consumer hears of the replay; behind it there is another one.
    is_closed.store(true, Ordering::Relaxed);
    let next = fixture.update("a", 0).await;
    until("it is delivered", async || log.rows().last().unwrap().1 == next).await;
    let last = fixture.update("a", 1).await;
    pass(Duration::from_secs(3)).await;
    is_closed.store(false, Ordering::Relaxed);
    gate.notify_waiters();
    until_done(&group).await;
    until_none_is_parked(&group).await;
    assert_eq!(log.rows().last().unwrap().1, last);
    // What was replayed is in the newest row, unless the consumer has heard of it early.
    assert!((3..=4).contains(&counts(&log)["a"]));
    consumer.shutdown().await.unwrap();
}

/// Beyond what can wait, a replay goes on as consumers work.
#[tokio::test(start_paused = true)]
async fn a_replay_of_many_rows_keeps_step_with_the_consumers() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, ConsumerOptions::default()).await;
    fixture.create(names("db", 1_200)).await;
    until_done(&group).await;
    let replay = group.replay(|_| true);
    let most = async {
        let mut most = 0;
        loop {
            most = most.max(group.parked("", 10_000).await.unwrap().len());
            if most > 0 && counts(&log).values().all(|count| *count >= 2) {
                return most;
            }
            pass(Duration::from_millis(50)).await;
        }
    };
    let (replayed, most) = tokio::join!(replay, tokio::time::timeout(Duration::from_mins(30), most));
    assert_eq!(replayed.unwrap(), 1_200);
    assert!(most.unwrap() <= 1_000);
    until_none_is_parked(&group).await;
    assert!(counts(&log).values().all(|count| *count == 2));
    consumer.shutdown().await.unwrap();
}
