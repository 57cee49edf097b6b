//! Observers that fail, panic or hang: nothing is lost, nothing is silent.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, Notification, Observer, Sequence,
    cursor::Start,
    feed::ShardId,
    group::{
        CheckpointPolicy, Checkpointer, CloseReason, ConsumerOptions, FailurePolicy, GroupBatch,
        ObserverResult, Replayed,
    },
    store::{
        AtomicOp, Isolation, RetryPolicy, StoreError,
        testing::{Attempt, CommitFault, Operation},
    },
};

use crate::{
    common::{NEVER, joined, until},
    fixture::{GroupFixture, Happened, Log, behind, names, pass, until_done},
};

/// Consumers that give up soon.
fn hasty(failure: FailurePolicy) -> ConsumerOptions {
    let retry = RetryPolicy::default()
        .attempts_max(Some(3))
        .elapsed_max(None)
        .backoff_min(Duration::from_millis(10))
        .backoff_max(Duration::from_secs(1));
    ConsumerOptions::default().retry(retry).failure(failure).poll_interval(NEVER)
}

/// The attempts of the batches, with how many rows each had.
fn attempts(log: &Log) -> Vec<(usize, u32)> {
    let attempts = log.all().into_iter().filter_map(|(_, happened)| match happened {
        Happened::Batch(_, rows, attempt) => Some((rows.len(), attempt)),
        _ => None,
    });
    attempts.collect()
}

/// Other libraries skip the first batch of all if it fails.
#[tokio::test(start_paused = true)]
async fn a_first_batch_that_fails_comes_again() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Start::Now).await;
    fixture.create(names("db", 3)).await;
    let failed = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&failed);
    let log = Log::doing(move |_| {
        let fails = count.fetch_add(1, Ordering::Relaxed) < 2;
        std::future::ready(if fails { Err("not yet".into()) } else { Ok(()) })
    });
    let consumer = log.consume(&fixture.bus, &group, hasty(FailurePolicy::KeepRetrying)).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    assert_eq!(attempts(&log), [(3, 1), (3, 2), (3, 3)]);
    assert_eq!(fixture.bus.stats().group_errors, 2);
    log.check(true);
}

#[tokio::test(start_paused = true)]
async fn only_the_rows_that_fail_become_dead_letters() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let all: Vec<_> = names("good", 6).into_iter().chain(names("bad", 2)).chain(names("fine", 4)).collect();
    fixture.create(&all).await;
    let mended = Arc::new(AtomicBool::new(false));
    let is_mended = Arc::clone(&mended);
    let log = Log::doing(move |batch| {
        let is_bad = batch.rows.iter().any(|row| row.name.as_str().starts_with("bad"));
        let fails = is_bad && !is_mended.load(Ordering::Relaxed);
        let why = std::io::Error::other("the disk of the index is full");
        std::future::ready(if fails { Err(why.into()) } else { Ok(()) })
    });
    let consumer = log.consume(&fixture.bus, &group, hasty(FailurePolicy::DeadLetter)).await;
    until_done(&group).await;
    let letters = group.dead_letters(Sequence::MIN, 100).await.unwrap();
    assert_eq!(letters.len(), 2);
    assert!(letters.iter().all(|letter| letter.attempts == 3 && letter.error.contains("disk of the index")));
    assert!(group.dead_letters(letters[1].sequence, 100).await.unwrap().is_empty());
    assert_eq!(fixture.bus.stats().group_dead_letters, 2);
    assert!(group.status().await.unwrap().has_dead_letters);
    // The batch three times; then each row alone, bad ones three times; then the next rows as a whole again.
    let alone = attempts(&log)[3..].to_vec();
    assert_eq!(attempts(&log)[..3], [(12, 1), (12, 2), (12, 3)]);
    assert_eq!((alone.len(), alone.iter().filter(|(_, attempt)| *attempt > 1).count()), (10 + 2 * 3, 4));
    fixture.create(names("new", 3)).await;
    until_done(&group).await;

    // They are replayed: one fails again, and stays with its new error.
    let replay = async |bad: &'static str| {
        let work = move |letter: Arc<notibus::group::DeadLetter<Notification>>| async move {
            if letter.row.name.as_str() == bad { Err("still".into()) } else { Ok(()) }
        };
        group.replay_dead_letters(work).await.unwrap()
    };
    assert_eq!(replay("bad1").await, Replayed { succeeded: 1, failed: 1 });
    let [letter] = &group.dead_letters(Sequence::MIN, 100).await.unwrap()[..] else { panic!("one is left") };
    assert_eq!((letter.attempts, &letter.error[..]), (4, "still"));
    assert!(group.delete_dead_letter(letter.sequence).await.unwrap());
    assert!(!group.delete_dead_letter(letter.sequence).await.unwrap(), "it is gone");
    assert!(!group.status().await.unwrap().has_dead_letters);

    // After the repair there are no dead letters any more.
    mended.store(true, Ordering::Relaxed);
    fixture.update("bad0", 0).await;
    until_done(&group).await;
    assert!(group.dead_letters(Sequence::MIN, 100).await.unwrap().is_empty());
    consumer.shutdown().await.unwrap();
    log.check(true);
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_is_replayed_with_effects_that_happen_once() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["bad"]).await;
    let log = Log::doing(async |_| Err("no".into()));
    let consumer = log.consume(&fixture.bus, &group, hasty(FailurePolicy::DeadLetter)).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
    fixture.faults.script_commits([CommitFault::After(unknown)]);
    let store = fixture.faults.database();
    let work = move |letter: Arc<notibus::group::DeadLetter<Notification>>| {
        let store = store.clone();
        async move {
            let body = async |tx: notibus::store::Transaction| {
                if letter.remove_in(&tx).await? {
                    tx.atomic(AtomicOp::Add, b"replayed", &1_u64.to_le_bytes());
                }
                Ok(())
            };
            store.run(body).await?;
            Ok(())
        }
    };
    assert_eq!(group.replay_dead_letters(work).await.unwrap().succeeded, 1);
    let replayed = fixture.store.begin().get(b"replayed", Isolation::Snapshot).await.unwrap();
    assert_eq!(replayed.unwrap()[..], 1_u64.to_le_bytes());
    assert!(group.dead_letters(Sequence::MIN, 1).await.unwrap().is_empty());
}

/// A shard that makes no progress is tried forever by default. People can see why, and for how long.
#[tokio::test(start_paused = true)]
async fn a_stuck_shard_is_reported_and_goes_on_once_it_can() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["a", "bad", "z"]).await;
    let is_mended = Arc::new(AtomicBool::new(false));
    let mended = Arc::clone(&is_mended);
    let log = Log::doing(move |batch| {
        let is_bad = batch.rows.iter().any(|row| row.name.as_str() == "bad");
        let fails = is_bad && !mended.load(Ordering::Relaxed);
        std::future::ready(if fails { Err("no such mailbox".into()) } else { Ok(()) })
    });
    let consumer = log.consume(&fixture.bus, &group, hasty(FailurePolicy::KeepRetrying)).await;
    until("it is reported", async || fixture.bus.stats().group_stuck > 0).await;
    let rows = behind(&group).await;
    assert!((1..=2).contains(&rows), "the row before was worked on: {rows}");
    let status = group.status().await.unwrap();
    let trouble = status.shards[0].trouble.clone().unwrap();
    assert!(trouble.is_current && trouble.is_stuck && trouble.error == "no such mailbox", "{trouble:?}");
    assert!(trouble.attempts > 3 && status.shards[0].owner.is_some(), "{trouble:?}");
    assert!(log.closed().contains(&CloseReason::ObserverError), "another observer has its chance");
    is_mended.store(true, Ordering::Relaxed);
    until_done(&group).await;
    let recovered = async || !group.status().await.unwrap().shards[0].trouble.as_ref().unwrap().is_current;
    until("people see that it is over", recovered).await;
    consumer.shutdown().await.unwrap();
    log.check(true);
}

#[tokio::test(start_paused = true)]
async fn an_observer_that_hangs_is_reported_and_dropped_at_the_end() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["a"]).await;
    let log = Log::doing(async |_| std::future::pending().await);
    let consumer = log.consume(&fixture.bus, &group, hasty(FailurePolicy::KeepRetrying)).await;
    until("it is reported", async || fixture.bus.stats().group_stuck > 0).await;
    let trouble = group.status().await.unwrap().shards[0].trouble.clone().unwrap();
    assert!(trouble.is_stuck && trouble.error.contains("has not returned"), "{trouble:?}");
    consumer.shutdown().await.unwrap();
    assert_eq!(log.closed(), [CloseReason::Shutdown]);
    assert_eq!(behind(&group).await, 1);
    log.check(true);
}

/// An observer that hangs when it is closed blocks its shard, and this is reported.
#[tokio::test(start_paused = true)]
async fn an_observer_that_does_not_close_is_reported() {
    struct Clinging;
    impl Observer<Notification> for Clinging {
        async fn batch(&mut self, _: GroupBatch<Notification>) -> ObserverResult {
            Ok(())
        }
        async fn closed(&mut self, _: CloseReason) {
            std::future::pending::<()>().await;
        }
    }
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["a"]).await;
    let consumer =
        joined(&fixture.bus).await.consumer(&group, |_| Clinging, ConsumerOptions::default()).await.unwrap();
    until_done(&group).await;
    fixture.other.feed().reshard(2, None).await.unwrap();
    until("it is reported", async || fixture.bus.stats().group_stuck > 0).await;
    let began = tokio::time::Instant::now();
    consumer.shutdown().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_caught_counted_and_tried_again_with_another_observer() {
    for (failure, letters) in [(FailurePolicy::KeepRetrying, 0), (FailurePolicy::DeadLetter, 1)] {
        let fixture = GroupFixture::new(1).await;
        let group = fixture.group(Cursor::NOTHING).await;
        fixture.create(["bad"]).await;
        let panics = if letters == 0 { 2 } else { u64::MAX };
        let left = Arc::new(AtomicU64::new(panics));
        let log = Log::doing(move |_| {
            let panics = left.fetch_sub(1, Ordering::Relaxed) > 0 && left.load(Ordering::Relaxed) < panics;
            assert!(!panics, "the observer has lost its head");
            std::future::ready(Ok(()))
        });
        let consumer = log.consume(&fixture.bus, &group, hasty(failure)).await;
        until_done(&group).await;
        consumer.shutdown().await.unwrap();
        let stats = fixture.bus.stats();
        assert_eq!(stats.group_panics, if letters == 0 { 2 } else { 3 });
        assert_eq!((stats.group_dead_letters, stats.work_panics), (letters, 0));
        let found = group.dead_letters(Sequence::MIN, 9).await.unwrap();
        assert!(found.iter().all(|letter| letter.error.contains("lost its head")), "{found:?}");
        let replaced = log.closed().iter().filter(|reason| **reason == CloseReason::ObserverError).count();
        assert_eq!(replaced as u64, stats.group_panics);
        log.check(true);
    }
}

/// An observer that panics in the calls of `opened` as long as there are `panics` left: in the call itself, or in its future.
struct Shy {
    log: Log,
    panics: Arc<AtomicU64>,
    in_call: bool,
    has_panicked: bool,
}

impl Shy {
    fn opens(&mut self) {
        let is_due = |left: u64| left.checked_sub(1);
        self.has_panicked = self.panics.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_due).is_ok();
        assert!(!self.has_panicked, "it does not want to begin");
    }
}

impl Observer<Notification> for Shy {
    fn opened(&mut self, _: ShardId, _: Sequence) -> impl Future<Output = ()> + Send {
        if self.in_call {
            self.opens();
        }
        async move {
            if !self.in_call {
                self.opens();
            }
        }
    }

    async fn batch(&mut self, batch: GroupBatch<Notification>) -> ObserverResult {
        assert!(!self.has_panicked, "it must not be used any more");
        self.log.took(&batch);
        Ok(())
    }

    async fn closed(&mut self, reason: CloseReason) {
        self.log.was_closed(reason);
    }
}

/// Regression: a panic of `opened` was only logged, and the same observer got batches although its state was undefined. One in the call
/// itself, before there is a future, was not even caught: it ended the task of the shard.
#[tokio::test(start_paused = true)]
async fn an_observer_that_panics_when_it_is_opened_gets_no_batch() {
    for in_call in [false, true] {
        let fixture = GroupFixture::new(1).await;
        let group = fixture.group(Cursor::NOTHING).await;
        fixture.create(names("db", 3)).await;
        let (log, panics) = (Log::new(), Arc::new(AtomicU64::new(3)));
        let observers = log.clone();
        let make = move |_| {
            let (log, panics) = (observers.clone(), Arc::clone(&panics));
            Shy { log, panics, in_call, has_panicked: false }
        };
        let node = joined(&fixture.bus).await;
        let of = fixture.bus.group("g").unwrap();
        let consumer = node.consumer(&of, make, hasty(FailurePolicy::KeepRetrying)).await.unwrap();
        until_done(&group).await;
        let trouble = group.status().await.unwrap().shards.remove(0).trouble.unwrap();
        assert!(trouble.error.contains("does not want to begin") && !trouble.is_current, "{trouble:?}");
        consumer.shutdown().await.unwrap();
        let stats = fixture.bus.stats();
        assert_eq!(
            (stats.group_panics, stats.group_errors, stats.work_panics),
            (3, 3, 0),
            "in call: {in_call}"
        );
        assert_eq!(log.names(), names("db", 3));
        let closed = [[CloseReason::ObserverError; 3].as_slice(), &[CloseReason::Shutdown]].concat();
        assert_eq!(log.closed(), closed, "each is closed, once");
    }
}

/// A row that another version of the program has written cannot be decoded. Regression: the shard was tried forever, or as often as
/// if that could have helped. The row is listed, it can be a dead letter, and the shard goes on at once.
#[tokio::test(start_paused = true)]
async fn a_row_that_cannot_be_decoded_is_skipped() {
    for failure in [FailurePolicy::KeepRetrying, FailurePolicy::DeadLetter] {
        skips_a_row_that_cannot_be_decoded(failure).await;
    }
}

async fn skips_a_row_that_cannot_be_decoded(failure: FailurePolicy) {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["a", "b", "c"]).await;
    let rows = notibus::store::RangeRead::new(notibus::store::KeyRange::prefix(&b"notibus\x15\x04"[..]));
    let rows = fixture.store.begin().get_range(&rows, Isolation::Snapshot).await.unwrap().rows;
    let spoil = async |tx: notibus::store::Transaction| {
        tx.set(&rows[1].0, b"spoilt");
        Ok(())
    };
    fixture.store.run(spoil).await.unwrap();
    let log = Log::new();
    let consumer = log.consume(&fixture.bus, &group, hasty(failure)).await;
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    assert_eq!(log.rows().len(), 2);
    assert_eq!((fixture.bus.skipped_rows().len(), fixture.bus.stats().group_errors), (1, 0));
    if failure == FailurePolicy::KeepRetrying {
        assert_eq!(group.dead_letters(Sequence::MIN, 9).await.unwrap().len(), 0);
        return;
    }
    let [letter] = &group.dead_letters(Sequence::MIN, 9).await.unwrap()[..] else { panic!("there is one") };
    assert!(letter.error.contains("corrupt"), "{letter:?}");
    let replayed = group.replay_dead_letters(async |_| Ok(())).await.unwrap();
    assert_eq!(replayed, Replayed { succeeded: 0, failed: 1 });
}

/// Reads that fail for long are reported, and do not end the consumer.
#[tokio::test(start_paused = true)]
async fn a_store_that_fails_is_waited_for() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let log = Log::new();
    let options = ConsumerOptions::default()
        .checkpoint(CheckpointPolicy::EveryBatch)
        .poll_interval(Duration::from_secs(5));
    let consumer = log.consume(&fixture.bus, &group, options).await;
    pass(Duration::from_secs(5)).await;
    // Only reads of rows fail, so that the node stays alive.
    fixture.faults.plan_reads(|operation| match operation {
        Operation::GetRange { range, .. } if range.begin.starts_with(b"notibus\x15\x04") => {
            Some(StoreError::IO_ERROR)
        }
        _ => None,
    });
    fixture.create(["a"]).await;
    until("the failures", async || fixture.bus.stats().group_errors > 3).await;
    let status = fixture.other.group("g").unwrap().status().await.unwrap();
    let troubles = status.shards.iter().filter_map(|shard| shard.trouble.as_ref());
    assert!(troubles.into_iter().any(|trouble| trouble.error.contains("io_error")), "{status:?}");
    fixture.faults.heal();
    until_done(&group).await;
    consumer.shutdown().await.unwrap();
    assert_eq!(log.names(), ["a"]);
    log.check(true);
}

/// Regression: an observer that writes its own checkpoints had nothing to write yet, because the shard was empty when it was first read.
/// Then a row panicked, and went to the dead letters without a checkpoint, as if there were unsaved rows before it. So the next observer
/// got the row again, and worked on a row that had been given up.
#[tokio::test(start_paused = true)]
async fn a_row_that_was_given_up_does_not_come_again() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let log = Log::doing(|_| async { panic!("not this one") });
    let retry = hasty(FailurePolicy::DeadLetter).retry.attempts_max(Some(1));
    let checkpoint = CheckpointPolicy::Explicit;
    let options = hasty(FailurePolicy::DeadLetter).retry(retry).checkpoint(checkpoint);
    let consumer = log.consume(&fixture.bus, &group, options).await;
    pass(Duration::from_secs(1)).await;
    fixture.create(["a"]).await;
    until_done(&group).await;
    pass(Duration::from_mins(1)).await;
    consumer.shutdown().await.unwrap();
    assert_eq!(attempts(&log), [(1, 1)]);
    assert_eq!(fixture.bus.stats().group_dead_letters, 1);
}

/// Consumers whose observers write their own checkpoints, and that give a row up at once.
fn hasty_and_explicit() -> ConsumerOptions {
    let options = hasty(FailurePolicy::DeadLetter);
    let retry = options.retry.clone().attempts_max(Some(1));
    options.retry(retry).checkpoint(CheckpointPolicy::Explicit).rows_max(1)
}

/// A consumer did not learn that the row that it had just given up was a dead letter now: the commit was of unknown result. It took
/// the row for one that its observer had worked on and not saved. From then on every row that it gave up went to the dead letters
/// without a checkpoint past it; the next owner of the shard was given these rows again, and worked on them.
#[tokio::test(start_paused = true)]
async fn a_row_that_was_given_up_by_a_commit_of_unknown_result_keeps_no_other_one_behind() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let letters = b"notibus\x15\x0c\x01n\x00\x15\x02";
    let is_first = AtomicBool::new(true);
    fixture.faults.plan_commits(move |attempt: &Attempt| {
        let gives_up = attempt
            .mutations()
            .any(|mutation| matches!(mutation, Operation::Set { key, .. } if key.starts_with(letters)));
        (gives_up && is_first.swap(false, Ordering::Relaxed))
            .then_some(CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT))
    });
    let log = Log::doing(async |_| Err("no".into()));
    let consumer = log.consume(&fixture.bus, &group, hasty_and_explicit()).await;
    for bad in ["bad0", "bad1"] {
        fixture.create([bad]).await;
        until_done(&group).await;
    }
    consumer.shutdown().await.unwrap();
    let next = log.consume(&fixture.bus, &group, hasty_and_explicit()).await;
    pass(Duration::from_mins(1)).await;
    next.shutdown().await.unwrap();
    assert_eq!(log.names(), ["bad0", "bad1"]);
    assert_eq!(fixture.bus.stats().group_dead_letters, 2);
    assert_eq!(group.dead_letters(Sequence::MIN, 9).await.unwrap().len(), 2);
}

/// A row that is given up while its observer has not saved the rows before it is no dead letter yet: the next owner of the shard is
/// given it again, and may succeed. It is one from the checkpoint on that is past it. The next observer of the same owner is not given
/// it again: one that panics with it would never get past it.
#[tokio::test(start_paused = true)]
async fn a_row_is_a_dead_letter_when_the_checkpoint_is_past_it() {
    for panics in [false, true] {
        gives_up_before_the_rows_before_are_saved(panics).await;
    }
}

async fn gives_up_before_the_rows_before_are_saved(panics: bool) {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let last: Arc<Mutex<Option<Checkpointer>>> = Arc::default();
    let keeps = Arc::clone(&last);
    let log = Log::doing(move |batch| {
        let is_bad = batch.rows[0].name.as_str() == "bad";
        assert!(!(is_bad && panics), "not this one");
        if !is_bad {
            *keeps.lock().unwrap() = Some(batch.checkpointer());
        }
        std::future::ready(if is_bad { Err("no".into()) } else { Ok(()) })
    });
    let letters = async || group.dead_letters(Sequence::MIN, 9).await.unwrap().len();
    for name in ["good", "bad"] {
        fixture.create([name]).await;
    }
    let consumer = log.consume(&fixture.bus, &group, hasty_and_explicit()).await;
    until("it is given up", async || fixture.bus.stats().group_dead_letters == 1).await;
    assert_eq!((behind(&group).await, letters().await), (2, 0));
    consumer.shutdown().await.unwrap();

    let next = log.consume(&fixture.bus, &group, hasty_and_explicit()).await;
    until("it is given up again", async || fixture.bus.stats().group_dead_letters == 2).await;
    fixture.create(["fine"]).await;
    log.until_names(&["fine".to_owned()]).await;
    assert_eq!(letters().await, 0);
    assert_eq!(log.names().iter().filter(|name| *name == "bad").count(), 2, "once for each owner");
    let save = last.lock().unwrap().take().unwrap();
    save.checkpoint().await.unwrap();
    assert_eq!((behind(&group).await, letters().await), (0, 1));
    next.shutdown().await.unwrap();
}

/// Rows that wait for a checkpoint to become dead letters are in memory, and all go into one transaction. So there is a bound to
/// them; the shard waits at it, and goes on when its observer has saved what stands before them.
#[tokio::test(start_paused = true)]
async fn a_shard_waits_while_too_many_rows_are_to_become_dead_letters() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let first: Arc<Mutex<Option<Checkpointer>>> = Arc::default();
    let keeps = Arc::clone(&first);
    let log = Log::doing(move |batch| {
        let is_good = batch.rows[0].name.as_str() == "good";
        if is_good {
            *keeps.lock().unwrap() = Some(batch.checkpointer());
        }
        std::future::ready(if is_good { Ok(()) } else { Err("no".into()) })
    });
    fixture.create(["good"]).await;
    fixture.create(names("bad", 120)).await;
    let consumer = log.consume(&fixture.bus, &group, hasty_and_explicit()).await;
    let given_up = || fixture.bus.stats().group_dead_letters;
    until("it waits", async || given_up() == 100 && fixture.bus.stats().group_errors > 103).await;
    let letters = async || group.dead_letters(Sequence::MIN, 1_000).await.unwrap().len();
    assert_eq!((given_up(), letters().await), (100, 0));
    let save = first.lock().unwrap().take().unwrap();
    save.checkpoint().await.unwrap();
    until_done(&group).await;
    assert_eq!((given_up(), letters().await), (120, 120));
    consumer.shutdown().await.unwrap();
}
