//! Consumers that move between shards, while the janitor drops the empty ones. Simulated worlds found the bugs behind the first tests.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, JanitorOptions, Notification, Sequence,
    consumer::{Batch, ConsumerOptions, Work},
    feed::ShardId,
    store::{
        Isolation, StoreError,
        testing::{Attempt, CommitFault, Gate, Operation},
    },
    test_util::inspect,
};
use tokio::sync::watch;

use crate::{
    common::{joined, until, within},
    fixture::{ConsumerFixture, Log, names, pass},
};

/// Returns options for a janitor that starts a pass every 100 ms.
fn eager() -> JanitorOptions {
    JanitorOptions::default().interval(Duration::from_millis(100))
}

/// Returns options for members that poll their shards every second.
fn polled() -> ConsumerOptions {
    ConsumerOptions::default().poll_interval(Duration::from_secs(1))
}

/// Returns the shards that the consumer is reading.
async fn begun(fixture: &ConsumerFixture) -> Vec<u64> {
    fixture.handle().status().await.unwrap().shards.iter().map(|shard| shard.shard.0).collect()
}

/// Returns the checkpoint in the first of the consumer's shards.
async fn checkpoint(fixture: &ConsumerFixture) -> Sequence {
    fixture.handle().status().await.unwrap().shards[0].checkpoint
}

/// Makes a log whose handlers hold each batch of `shard` until `true` is sent.
fn held_up(shard: ShardId) -> (Log<Batch<Notification>>, watch::Sender<bool>) {
    let (goes_on, received) = watch::channel(false);
    let log = Log::doing(move |batch: Batch<Notification>| {
        let mut received = received.clone();
        async move {
            if batch.shard() == shard {
                received.wait_for(|goes_on| *goes_on).await?;
            }
            Ok(())
        }
    });
    (log, goes_on)
}

/// The janitor does not drop an entry that a consumer is in, nor the entry that it moves to next, even if they have no rows.
///
/// Bug: one shard was drained, and its mark was the first sequence of its successors. The janitor dropped these successors before the other
/// shard was drained, so the end of the other shard was now after the mark of the first one, and both waited for each other forever.
#[tokio::test(start_paused = true)]
async fn the_entries_to_which_a_consumer_goes_over_are_kept() {
    let fixture = ConsumerFixture::new(2).await;
    let (log, goes_on) = held_up(ShardId(2));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(polled());
    let consumer = member.run_batches(log.handler()).await.unwrap();
    fixture.create(names("db", 8)).await;
    log.until_names(&names("db", 8)).await;
    pass(Duration::from_secs(3)).await;
    let (feed, before) = (fixture.other.feed(), checkpoint(&fixture).await);
    feed.reshard(3, None).await.unwrap();
    until("one shard is drained", async || checkpoint(&fixture).await > before).await;
    feed.reshard(1, None).await.unwrap();
    let janitor = joined(&fixture.other).await.janitor(eager()).await.unwrap();
    pass(Duration::from_secs(30)).await;
    assert_eq!((begun(&fixture).await, feed.topology().await.unwrap().len()), (vec![1, 2], 3));
    goes_on.send_replace(true);
    until("the consumer has gone over", async || begun(&fixture).await == [6]).await;
    // The rows of the first entry are still there.
    until("the empty entry is gone", async || feed.topology().await.unwrap().len() == 2).await;
    fixture.create(["new"]).await;
    fixture.until_done().await;
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// Bug: the janitor dropped an entry once its shards were empty, although a node was still working on rows that had been in one of them.
/// The consumer moved to the next shards, so another node could deliver newer rows of the same databases before the older batch had ended,
/// and a checkpoint written then left the consumer stuck in shards of two entries.
#[tokio::test(start_paused = true)]
async fn an_empty_entry_is_kept_until_the_work_in_it_has_ended() {
    let fixture = ConsumerFixture::new(2).await;
    let (log, goes_on) = held_up(ShardId(1));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(polled());
    let consumer = member.run_batches(log.handler()).await.unwrap();
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
    assert_eq!((begun(&fixture).await, log.names().len()), (vec![1, 2], 8));
    assert_eq!(feed.topology().await.unwrap().len(), 2);
    goes_on.send_replace(true);
    until("the consumer has gone over", async || begun(&fixture).await == [3]).await;
    fixture.until_done().await;
    until("the entry is gone", async || feed.topology().await.unwrap().len() == 1).await;
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// Whether an attempt removes a key of a deferred id, as a move does.
pub fn moves_a_key(attempt: &Attempt) -> bool {
    let deferred = b"notibus\x15\x19\x15\x02\x02c\x00";
    attempt
        .mutations()
        .any(|mutation| matches!(mutation, Operation::Clear { key } if key.starts_with(deferred)))
}

/// A request to work again finds the key of its id, whether or not the key was moved to a successor: a second key would lack what was
/// finished, or be lost.
#[tokio::test(start_paused = true)]
async fn a_request_during_a_reshard_finds_the_key_wherever_it_is() {
    for (is_moved, is_held) in [(true, false), (false, false), (false, true)] {
        let fixture = ConsumerFixture::new(2).await;
        let gate = Gate::default();
        let (goes_on, received) = watch::channel(false);
        let again = Arc::new(Mutex::new(Vec::new()));
        let known = Arc::clone(&again);
        let log = Log::doing(move |batch: Batch<Notification>| {
            let (mut received, is_new) = (received.clone(), batch.rows[0].totals.updated == 0);
            if batch.is_again() {
                known.lock().unwrap().push(batch.since().position());
            }
            let fails = batch.shard() == ShardId(1) && !is_new;
            async move {
                if batch.shard() == ShardId(2) && !is_new {
                    received.wait_for(|goes_on| *goes_on).await?;
                }
                if fails { Err("not yet".into()) } else { Ok(()) }
            }
        });
        let pause = Duration::from_hours(1);
        let options = polled().attempts_max(1).backoff_min(pause).backoff_max(pause);
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = member.run_batches(log.handler()).await.unwrap();
        fixture.create(names("db", 8)).await;
        fixture.until_done().await;
        let feed = fixture.other.feed();
        let first_of = async |shard| {
            let page = feed.shard_page(ShardId(shard), Cursor::BEGINNING, 1).await.unwrap();
            (page.rows[0].name.to_string(), page.rows[0].sequence)
        };
        let ((deferred, finished), (held, _)) = (first_of(1).await, first_of(2).await);
        fixture.update(&deferred, 0).await;
        fixture.update(&held, 0).await;
        until("it is deferred", async || !fixture.is_none_deferred().await).await;
        if !is_moved {
            let held = gate.clone();
            fixture.faults.plan_commits(move |attempt| {
                let fault = || CommitFault::Before(StoreError::NOT_COMMITTED);
                let holds = || CommitFault::Hold(held.clone());
                moves_a_key(attempt).then(|| if is_held { holds() } else { fault() })
            });
        }
        let before = checkpoint(&fixture).await;
        feed.reshard(1, None).await.unwrap();
        until("it is drained", async || checkpoint(&fixture).await > before).await;
        let handle = fixture.handle();
        if is_moved {
            let is_there = async || handle.deferred(None, 1).await.unwrap()[0].shard == ShardId(3);
            until("the key is in the successor", is_there).await;
        }
        if is_held {
            within("a move is about to be committed", gate.reached()).await;
        }
        assert_eq!(handle.again(&deferred, true).await.unwrap(), 1);
        pass(Duration::from_secs(3)).await;
        fixture.faults.heal();
        gate.open();
        goes_on.send_replace(true);
        fixture.until_done().await;
        let again = again.lock().unwrap().clone();
        assert!(again.len() == 1 && again[0] >= finished, "{is_moved}: {again:?}, {finished}");
        consumer.shutdown().await.unwrap();
    }
}

/// Several reshards in a row, with rows in between and two members, both by ids and in batches.
#[tokio::test(start_paused = true)]
async fn reshards_in_a_row_lose_nothing() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(2).await;
        let (ids, rows) = (Log::<Work<Notification>>::new(), Log::<Batch<Notification>>::new());
        let (mut consumers, mut all) = (Vec::new(), BTreeSet::new());
        for member in [fixture.member().await, fixture.other_member().await] {
            let member = member.start_from(Cursor::BEGINNING).options(polled());
            consumers.push(if is_ordered {
                member.run_batches(rows.handler()).await.unwrap()
            } else {
                member.run(ids.handler()).await.unwrap()
            });
        }
        let janitor = joined(&fixture.other).await.janitor(eager()).await.unwrap();
        for (round, shards) in [3, 1, 5, 2, 2, 4].into_iter().enumerate() {
            let some = names(&format!("r{round}-"), 10);
            fixture.create(&some).await;
            all.extend(some);
            if shards != 2 || round == 3 {
                fixture.other.feed().reshard(shards, None).await.unwrap();
            }
        }
        until("it has gone over", async || begun(&fixture).await.len() == 4).await;
        fixture.until_done().await;
        let got = if is_ordered { rows.names() } else { ids.names() };
        assert_eq!(got.len(), 60, "each once: {is_ordered}");
        assert_eq!(got.into_iter().collect::<BTreeSet<_>>(), all);
        for replaced in 1..begun(&fixture).await[0] {
            let lease = inspect::lease(b"notibus", "consumer/c", replaced).unwrap();
            let lease = fixture.store.begin().get(&lease, Isolation::Snapshot).await.unwrap();
            assert_eq!(lease, None, "of shard {replaced}");
        }
        janitor.shutdown().await.unwrap();
        for consumer in consumers {
            consumer.shutdown().await.unwrap();
        }
    }
}

/// Bug: the successor of a shard cancelled the runs of its deferred ids when it got its checkpoint, but did not end them in the store, so
/// their transactions could be committed while the next run of the id was in progress.
#[tokio::test(start_paused = true)]
async fn a_run_in_a_successor_goes_on_when_the_predecessors_are_drained() {
    let fixture = ConsumerFixture::new(2).await;
    let (calls, ends, is_mended) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let held: Arc<Mutex<Option<ShardId>>> = Arc::default();
    let (goes_on, received) = watch::channel(false);
    let (of_calls, of_ends, mended, holds) =
        (Arc::clone(&calls), Arc::clone(&ends), Arc::clone(&is_mended), Arc::clone(&held));
    let log = Log::doing(move |work: Work<Notification>| {
        let (calls, ends, mended) = (Arc::clone(&of_calls), Arc::clone(&of_ends), Arc::clone(&mended));
        let (holds, mut received) = (Arc::clone(&holds), received.clone());
        async move {
            if work.id() == b"bad" {
                holds.lock().unwrap().get_or_insert(work.shard());
                if !mended.load(Ordering::Relaxed) {
                    return Err("not yet".into());
                }
                calls.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_mins(1)).await;
                ends.fetch_add(1, Ordering::Relaxed);
            } else if Some(work.shard()) != *holds.lock().unwrap() && work.shard().0 <= 2 {
                received.wait_for(|goes_on| *goes_on).await?;
            }
            Ok(())
        }
    });
    let options = polled().attempts_max(1).backoff_max(Duration::from_secs(1));
    // The long interval keeps the run that holds the other shard from getting a key.
    let options = options.checkpoint_interval(Duration::from_mins(5));
    fixture.create(["bad"]).await;
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    fixture.create(names("db", 8)).await;
    fixture.other.feed().reshard(1, None).await.unwrap();
    until("it has moved", async || {
        fixture.handle().deferred(None, 1).await.unwrap().iter().any(|id| id.shard == ShardId(3))
    })
    .await;
    is_mended.store(true, Ordering::Relaxed);
    until("it runs in the successor", async || calls.load(Ordering::Relaxed) == 1).await;
    goes_on.send_replace(true);
    until("the consumer has gone over", async || begun(&fixture).await == [3]).await;
    fixture.until_done().await;
    assert_eq!((calls.load(Ordering::Relaxed), ends.load(Ordering::Relaxed)), (1, 1));
    consumer.shutdown().await.unwrap();
}

/// A barrier waits for work in a shard. The feed is resharded before the barrier reads the rows of that shard, and the rows move.
/// Regression: the barrier read none of the shards to which the rows had moved, so it claimed that the consumer had caught up.
#[tokio::test(start_paused = true)]
async fn a_reshard_while_a_barrier_looks_holds_the_barrier() {
    let fixture = ConsumerFixture::new(1).await;
    let (goes_on, received) = watch::channel(false);
    let log = Log::doing(move |work: Work<Notification>| {
        let mut received = received.clone();
        async move {
            if work.row().is_some_and(|row| row.name.as_str() == "a") {
                received.wait_for(|goes_on| *goes_on).await?;
            }
            Ok(())
        }
    });
    fixture.create(["b"]).await;
    let options = polled().checkpoint_interval(Duration::from_mins(5)).stall_limit(Duration::from_hours(9));
    let member = fixture.other_member().await.start_from(Cursor::BEGINNING).options(options.clone());
    let consumer = member.run(log.handler()).await.unwrap();
    log.until_calls(1).await;
    fixture.handle().pause().await.unwrap();
    fixture.create(["a"]).await;
    // Nobody else reads rows here. The reads of the barrier fail until the test lets them continue.
    let looks = fixture.member().await.options(options).run(log.handler()).await.unwrap();
    let (is_held, reads) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (held, count) = (Arc::clone(&is_held), Arc::clone(&reads));
    fixture.faults.plan_reads(move |operation| {
        let rows = b"notibus\x15\x04\x01n\x00\x15\x01";
        let is_row = matches!(operation, Operation::GetRange { range, .. } if range.begin.starts_with(rows));
        if is_row {
            count.fetch_add(1, Ordering::Relaxed);
        }
        (is_row && held.load(Ordering::Relaxed)).then_some(StoreError::TRANSACTION_TOO_OLD)
    });
    let barrier = tokio::spawn(async move { (looks.caught_up().await, looks) });
    until("the barrier looks", async || reads.load(Ordering::Relaxed) > 0).await;
    let feed = fixture.other.feed();
    feed.reshard(1, None).await.unwrap();
    for name in ["a", "b"] {
        fixture.update(name, 0).await;
    }
    is_held.store(false, Ordering::Relaxed);
    pass(Duration::from_secs(20)).await;
    assert!(!barrier.is_finished(), "nobody has worked on the creation: {:?}", log.names());
    fixture.handle().resume().await.unwrap();
    goes_on.send_replace(true);
    pass(Duration::from_mins(6)).await;
    let (caught_up, looks) = within("it catches up", barrier).await.unwrap();
    caught_up.unwrap();
    looks.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// A member takes over a drained shard whose keys are not moved yet, because the member before it has crashed. Due ids wait there until
/// their keys are in the successor, where new rows of the same ids are worked on.
#[tokio::test(start_paused = true)]
async fn keys_of_a_drained_shard_are_not_worked_on_before_they_have_moved() {
    let fixture = ConsumerFixture::new(1).await;
    let (worked, is_mended) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
    let (shards, mended) = (Arc::clone(&worked), Arc::clone(&is_mended));
    let log = Log::doing(move |batch: Batch<Notification>| {
        let fails = !mended.load(Ordering::Relaxed);
        if !fails {
            shards.lock().unwrap().push(batch.shard());
        }
        async move { if fails { Err("not yet".into()) } else { Ok(()) } }
    });
    let pause = Duration::from_secs(5);
    let options = || polled().attempts_max(1).backoff_min(pause).backoff_max(pause);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options());
    let consumer = member.run_batches(log.handler()).await.unwrap();
    fixture.create(["db"]).await;
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    fixture.faults.plan_commits(|attempt| {
        moves_a_key(attempt).then_some(CommitFault::Before(StoreError::NOT_COMMITTED))
    });
    let before = checkpoint(&fixture).await;
    fixture.other.feed().reshard(1, None).await.unwrap();
    until("it is drained", async || checkpoint(&fixture).await > before).await;
    drop(consumer);
    is_mended.store(true, Ordering::Relaxed);
    let consumer = fixture.member().await.options(options()).run_batches(log.handler()).await.unwrap();
    until("it has taken over", async || consumer.shards().contains(&ShardId(1))).await;
    pass(pause * 10).await;
    assert_eq!(*worked.lock().unwrap(), []);
    fixture.faults.heal();
    fixture.until_done().await;
    assert_eq!(*worked.lock().unwrap(), [ShardId(2)]);
    consumer.shutdown().await.unwrap();
}
