//! Databases with which an observer fails repeatedly: they are parked, and their shard goes on.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, Notification, Sequence,
    group::{
        CheckpointPolicy, ConcurrentRow, ConsumerOptions, FailurePolicy, FencingToken, Group, GroupBatch,
        ParkedId, each_concurrent,
    },
    store::{
        AtomicOp, Database, Isolation, KeyRange, RangeRead, RetryPolicy, StoreError,
        testing::{Attempt, CommitFault, Operation},
    },
};

use crate::{
    common::{NEVER, joined, until},
    fixture::{GroupFixture, Log, names, pass, until_done},
};

/// Consumers that park soon, and try again each second.
pub fn parking() -> ConsumerOptions {
    let retry = RetryPolicy::default()
        .attempts_max(Some(3))
        .elapsed_max(None)
        .backoff_min(Duration::from_millis(10))
        .backoff_max(Duration::from_secs(1));
    let parked_retry = retry.clone().backoff_min(Duration::from_secs(1));
    ConsumerOptions::default()
        .retry(retry)
        .parked_retry(parked_retry)
        .failure(FailurePolicy::Park)
        .poll_interval(NEVER)
}

async fn parked(group: &Group<Notification>) -> Vec<ParkedId> {
    group.parked("", 100).await.unwrap()
}

/// Waits until `count` ids are parked.
async fn until_parked(group: &Group<Notification>, count: usize) {
    until(&format!("{count} are parked"), async || parked(group).await.len() == count).await;
}

/// Observers that fail with rows of databases whose names begin with "bad", until they are repaired; and the rows with which they
/// have succeeded.
struct Picky {
    log: Log,
    is_mended: Arc<AtomicBool>,
    done: Arc<Mutex<Vec<(String, Sequence)>>>,
}

impl Picky {
    fn new() -> Self {
        let (is_mended, done) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (mended, adds) = (Arc::clone(&is_mended), Arc::clone(&done));
        let log = Log::doing(move |batch| {
            let is_bad = batch.rows.iter().any(|row| row.name.as_str().starts_with("bad"));
            let fails = is_bad && !mended.load(Ordering::SeqCst);
            if !fails {
                let rows = batch.rows.iter().map(|row| (row.name.as_str().to_owned(), row.sequence));
                adds.lock().unwrap().extend(rows);
            }
            std::future::ready(if fails { Err("it is bad".into()) } else { Ok(()) })
        });
        Self { log, is_mended, done }
    }

    /// The sequences of the rows of `name` with which it has succeeded.
    fn done(&self, name: &str) -> Vec<Sequence> {
        self.done.lock().unwrap().iter().filter(|(of, _)| of == name).map(|(_, sequence)| *sequence).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_database_that_fails_forever_waits_and_its_shard_goes_on() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["good0", "bad", "good1"]).await;
    let picky = Picky::new();
    let consumer = picky.log.consume(&fixture.bus, &group, parking()).await;
    until_done(&group).await;
    let [waits] = &parked(&group).await[..] else { panic!("one is parked") };
    assert_eq!((&waits.id[..], &waits.error[..]), ("bad", "it is bad"));
    assert!(waits.attempts >= 3 && group.status().await.unwrap().has_parked);
    assert_eq!(fixture.bus.stats().group_parked, 1);
    assert_eq!((picky.done("good0").len(), picky.done("good1").len()), (1, 1));

    // Its later rows wait behind it, the newest replacing the ones before; rows of other databases do not wait.
    let mut last = waits.sequence;
    for n in 0..3 {
        last = fixture.update("bad", n).await;
        fixture.update("good0", n).await;
        until_done(&group).await;
    }
    until("the newest one waits", async || parked(&group).await[0].sequence == last).await;
    assert_eq!(parked(&group).await[0].after, waits.after, "nothing of it is done");
    assert_eq!(picky.done("good0").len(), 4);
    assert!(picky.done("bad").is_empty());
    pass(Duration::from_secs(10)).await;
    assert!(parked(&group).await[0].attempts > waits.attempts, "it is tried again by itself");

    picky.is_mended.store(true, Ordering::SeqCst);
    until_parked(&group, 0).await;
    assert_eq!(picky.done("bad"), [last]);
    let next = fixture.update("bad", 3).await;
    until_done(&group).await;
    assert_eq!(picky.done("bad"), [last, next], "it is as any other again");
    assert!(!group.status().await.unwrap().has_parked);
    consumer.shutdown().await.unwrap();
    picky.log.check(true);
}

/// By then the observer could work on the newer row, whose turn comes with that of the parked one.
#[tokio::test(start_paused = true)]
async fn a_newer_row_waits_for_the_turn_of_a_parked_one() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["bad"]).await;
    let picky = Picky::new();
    let hour = Duration::from_hours(1);
    let slow = parking().parked_retry.backoff_min(hour).backoff_max(hour);
    let options = parking().parked_retry(slow);
    let consumer = picky.log.consume(&fixture.bus, &group, options).await;
    until_parked(&group, 1).await;
    picky.is_mended.store(true, Ordering::SeqCst);
    let newer = fixture.update("bad", 0).await;
    pass(Duration::from_mins(5)).await;
    assert!(picky.done("bad").is_empty(), "it is not time yet");
    pass(2 * hour).await;
    assert_eq!(picky.done("bad"), [newer], "it has taken the place of the one before");
    consumer.shutdown().await.unwrap();
    picky.log.check(true);
}

/// Regression: a row waited in memory behind a parked one, which was then worked on. The idle shard saved its position, which parked the
/// row; and nobody tried it until another row of the shard came.
#[tokio::test(start_paused = true)]
async fn what_an_idle_shard_parks_is_tried_again() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["bad"]).await;
    let picky = Picky::new();
    let options = parking().checkpoint(CheckpointPolicy::Interval(NEVER));
    let consumer = picky.log.consume(&fixture.bus, &group, options).await;
    until_parked(&group, 1).await;
    let first = parked(&group).await[0].sequence;
    let last = fixture.update("bad", 0).await;
    pass(Duration::from_millis(200)).await;
    picky.is_mended.store(true, Ordering::SeqCst);
    pass(Duration::from_mins(2)).await;
    assert_eq!(picky.done("bad"), [first, last]);
    assert!(parked(&group).await.is_empty());
    consumer.shutdown().await.unwrap();
    picky.log.check(true);
}

/// Regression: the task of a shard rested while another task saved what the observer had worked on. A row that had failed since could be
/// parked from then on, or was parked by that; and nobody parked it, or tried it again, until another row of the shard came.
#[tokio::test(start_paused = true)]
async fn what_waits_for_a_save_of_the_observer_goes_on_with_it() {
    for is_followed in [false, true] {
        let fixture = GroupFixture::new(1).await;
        let group = fixture.group(Cursor::NOTHING).await;
        let (is_mended, given) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (mended, keeps) = (Arc::clone(&is_mended), Arc::clone(&given));
        let log = Log::doing(move |batch: GroupBatch<Notification>| {
            let is_bad = batch.rows.iter().any(|row| row.name.as_str() == "bad");
            let fails = is_bad && !mended.load(Ordering::SeqCst);
            if !fails {
                keeps.lock().unwrap().push((batch.rows[0].name.to_string(), batch.checkpointer()));
            }
            std::future::ready(if fails { Err("it is bad".into()) } else { Ok(()) })
        });
        let options = parking().checkpoint(CheckpointPolicy::Explicit);
        let consumer = log.consume(&fixture.bus, &group, options).await;
        for name in ["a", "bad", "c"].into_iter().take(if is_followed { 3 } else { 2 }) {
            fixture.create([name]).await;
            pass(Duration::from_secs(1)).await;
        }
        assert!(parked(&group).await.is_empty(), "the observer has saved nothing");
        is_mended.store(true, Ordering::SeqCst);
        let saved = given.lock().unwrap().last().unwrap().1.clone();
        saved.checkpoint().await.unwrap();
        pass(Duration::from_secs(5)).await;
        let names: Vec<_> = given.lock().unwrap().iter().map(|(name, _)| name.clone()).collect();
        assert_eq!(names.last().unwrap(), "bad", "{names:?}");
        consumer.shutdown().await.unwrap();
    }
}

/// Successors of a consumer, and shards after a reshard, know the parked ids.
#[tokio::test(start_paused = true)]
async fn what_is_parked_is_passed_on_to_other_nodes_and_shards() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let bad = names("bad", 6);
    fixture.create(&bad).await;
    let picky = Picky::new();
    let first = picky.log.consume(&fixture.bus, &group, parking()).await;
    until_parked(&group, 6).await;
    drop(first);
    let second = picky.log.consume(&fixture.other, &group, parking()).await;
    for name in &bad {
        fixture.update(name, 0).await;
    }
    until_done(&group).await;
    fixture.other.feed().reshard(5, None).await.unwrap();
    let mut last = Vec::new();
    for name in &bad {
        last.push(fixture.update(name, 1).await);
    }
    until("the successors are read", async || group.status().await.unwrap().shards.len() == 5).await;
    until_done(&group).await;
    assert!(bad.iter().all(|name| picky.done(name).is_empty()), "they wait for those before");
    assert_eq!(parked(&group).await.len(), 6);
    picky.is_mended.store(true, Ordering::SeqCst);
    until_parked(&group, 0).await;
    for (name, last) in bad.iter().zip(last) {
        assert_eq!(picky.done(name), [last], "{name}");
    }
    second.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_is_parked_is_tried_at_once_dropped_or_forgotten_when_asked() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["bad0", "bad1", "bad2"]).await;
    let picky = Picky::new();
    let hour = Duration::from_hours(1);
    let slow = parking().parked_retry.backoff_min(hour).backoff_max(hour);
    let options = parking().parked_retry(slow);
    let consumer = picky.log.consume(&fixture.bus, &group, options.clone()).await;
    until_parked(&group, 3).await;
    assert!(group.delete_parked("bad1").await.unwrap());
    assert!(!group.delete_parked("bad1").await.unwrap(), "it is gone");
    picky.is_mended.store(true, Ordering::SeqCst);
    pass(Duration::from_mins(5)).await;
    assert_eq!(parked(&group).await.len(), 2, "they wait for their time");
    assert_eq!(group.parked("bad0", 100).await.unwrap().len(), 1, "those after one");
    assert_eq!(group.retry_parked().await.unwrap(), 2);
    pass(Duration::from_secs(10)).await;
    assert!(parked(&group).await.is_empty());
    assert_eq!([0, 1, 2].map(|n| picky.done(&format!("bad{n}")).len()), [1, 0, 1]);
    // An id that was dropped without its consumer's knowledge does not block its later rows.
    fixture.update("bad1", 0).await;
    until("it comes", async || picky.done("bad1").len() == 1).await;

    picky.is_mended.store(false, Ordering::SeqCst);
    fixture.update("bad2", 0).await;
    until_parked(&group, 1).await;
    consumer.shutdown().await.unwrap();
    group.reset(notibus::cursor::Start::Now, false).await.unwrap();
    assert!(parked(&group).await.is_empty(), "a reset goes elsewhere");
}

/// How often the effect of each row was written, by name and sequence.
async fn effects(store: &Database) -> Vec<(String, u64)> {
    let read = RangeRead::new(KeyRange::prefix("effect/")).limit(1_000);
    let rows = store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows;
    let count = |value: &[u8]| u64::from_le_bytes(value.try_into().unwrap());
    rows.iter().map(|(key, value)| (String::from_utf8_lossy(key).into_owned(), count(value))).collect()
}

/// Writes the effects of a batch with its checkpoint, exactly once.
async fn take_effect(store: &Database, batch: &GroupBatch<Notification>) -> notibus::Result<()> {
    let body = async |tx: notibus::store::Transaction| {
        if batch.checkpoint_in(&tx).await?.is_done() {
            return Ok(());
        }
        for row in &batch.rows {
            let key = format!("effect/{}/{}", row.name, row.sequence);
            tx.atomic(AtomicOp::Add, key.as_bytes(), &1_u64.to_le_bytes());
        }
        Ok(())
    };
    store.run(body).await
}

/// Regression: a newer row of a parked database was parked behind it in its own transaction, before the rest of its chunk was worked
/// on. The observer panicked on that rest, the parked row succeeded, and then the chunk came again: the effect was written twice.
#[tokio::test(start_paused = true)]
async fn a_parked_row_has_its_effect_once_though_its_chunk_comes_again() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (is_bad, panics) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (bad, shaky, store) = (Arc::clone(&is_bad), Arc::clone(&panics), fixture.store.clone());
    let log = Log::doing(move |batch| {
        let (bad, shaky, store) = (Arc::clone(&bad), Arc::clone(&shaky), store.clone());
        async move {
            let has = |name: &str| batch.rows.iter().any(|row| row.name.as_str() == name);
            if has("x") && shaky.fetch_add(1, Ordering::SeqCst) == 0 {
                bad.store(false, Ordering::SeqCst);
                panic!("as planned");
            }
            if has("b") && bad.load(Ordering::SeqCst) {
                return Err("it is bad".into());
            }
            take_effect(&store, &batch).await?;
            Ok(())
        }
    });
    fixture.create(["a", "b"]).await;
    let options = parking().checkpoint(CheckpointPolicy::Explicit);
    let consumer = log.consume(&fixture.bus, &group, options.clone()).await;
    until_parked(&group, 1).await;
    consumer.shutdown().await.unwrap();
    let newest = fixture.update("b", 0).await;
    fixture.create(["x"]).await;
    let consumer = log.consume(&fixture.bus, &group, options).await;
    until_done(&group).await;
    until_parked(&group, 0).await;
    pass(Duration::from_secs(30)).await;
    assert!(panics.load(Ordering::SeqCst) > 1, "it came again");
    let effects = effects(&fixture.store).await;
    assert!(effects.iter().all(|(_, count)| *count == 1), "{effects:?}");
    for name in ["a", "x"] {
        assert_eq!(
            effects.iter().filter(|(key, _)| key.contains(&format!("/{name}/"))).count(),
            1,
            "{effects:?}"
        );
    }
    assert!(effects.iter().any(|(key, _)| *key == format!("effect/b/{newest}")), "{effects:?}");
    consumer.shutdown().await.unwrap();
}

/// Whether an attempt parks something.
fn parks(attempt: &Attempt) -> bool {
    let parked = b"notibus\x15\x0c\x01n\x00\x15\x04";
    attempt
        .mutations()
        .any(|mutation| matches!(mutation, Operation::Set { key, .. } if key.starts_with(parked)))
}

/// Regression: a row was parked by a transaction that timed out (1031), parked again, succeeded, and was followed by a newer one. Then
/// the first transaction was committed after all: the older row was parked again, and came after the newer one.
#[tokio::test(start_paused = true)]
async fn a_row_that_is_parked_late_does_not_come_after_a_newer_one() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let mut is_first = true;
    fixture.faults.plan_commits(move |attempt| {
        let is_late = parks(attempt) && std::mem::take(&mut is_first);
        is_late.then_some(CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT))
    });
    let picky = Picky::new();
    let consumer = picky.log.consume(&fixture.bus, &group, parking()).await;
    fixture.create(["bad"]).await;
    until_parked(&group, 1).await;
    let first = parked(&group).await[0].sequence;
    picky.is_mended.store(true, Ordering::SeqCst);
    until_parked(&group, 0).await;
    let second = fixture.update("bad", 0).await;
    until_done(&group).await;
    let late = fixture.faults.commit_late().await;
    assert_eq!(late.len(), 1);
    assert_eq!(late[0].as_ref().unwrap_err().code(), Some(1020));
    pass(Duration::from_secs(30)).await;
    assert!(parked(&group).await.is_empty());
    assert_eq!(picky.done("bad"), [first, second]);
    consumer.shutdown().await.unwrap();
}

/// The same without a second parking: a transaction with an unknown result parked the row, its consumer began again and
/// delivered the newer row, which was there by then.
#[tokio::test(start_paused = true)]
async fn a_row_that_is_parked_late_is_dropped_if_a_newer_one_was_delivered() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let is_mended = Arc::new(AtomicBool::new(false));
    let (mended, done) = (Arc::clone(&is_mended), Arc::new(Mutex::new(Vec::new())));
    let adds = Arc::clone(&done);
    let log = Log::doing(move |batch| {
        // A panicking observer is replaced, and the next one begins from the stored position.
        assert!(mended.load(Ordering::SeqCst), "as planned");
        adds.lock().unwrap().extend(batch.rows.iter().map(|row| row.sequence));
        std::future::ready(Ok(()))
    });
    let fails = Arc::new(AtomicBool::new(true));
    let (failing, mut is_first) = (Arc::clone(&fails), true);
    fixture.faults.plan_commits(move |attempt| match parks(attempt) && failing.load(Ordering::SeqCst) {
        true if std::mem::take(&mut is_first) => Some(CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT)),
        true => Some(CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT)),
        false => None,
    });
    let consumer = log.consume(&fixture.bus, &group, parking()).await;
    fixture.create(["bad"]).await;
    until("it was parked, for all that is known", async || fixture.bus.stats().group_parked > 0).await;
    pass(Duration::from_secs(1)).await;
    let newer = fixture.update("bad", 0).await;
    is_mended.store(true, Ordering::SeqCst);
    fails.store(false, Ordering::SeqCst);
    fixture.faults.commit_late().await;
    until_done(&group).await;
    until_parked(&group, 0).await;
    pass(Duration::from_secs(30)).await;
    let done = done.lock().unwrap().clone();
    assert!(done.is_sorted() && done.last() == Some(&newer), "{done:?}");
    consumer.shutdown().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn rows_are_worked_on_concurrently_and_what_is_done_is_saved_up_to_the_first_failure() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(names("db", 9)).await;
    let (running, most, is_mended) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let done = Arc::new(Mutex::new(Vec::new()));
    let work = {
        let (running, most, is_mended) = (Arc::clone(&running), Arc::clone(&most), Arc::clone(&is_mended));
        let done = Arc::clone(&done);
        move |ConcurrentRow { row, .. }: ConcurrentRow<Notification>| {
            let (running, most, is_mended) =
                (Arc::clone(&running), Arc::clone(&most), Arc::clone(&is_mended));
            let done = Arc::clone(&done);
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(100)).await;
                running.fetch_sub(1, Ordering::SeqCst);
                let name = row.name.as_str().to_owned();
                if name == "db5" && !is_mended.load(Ordering::SeqCst) {
                    return Err("not yet".into());
                }
                done.lock().unwrap().push((name, row.sequence));
                Ok(())
            }
        }
    };
    let group_of = fixture.bus.group("g").unwrap();
    let retry = parking().retry.attempts_max(Some(1_000));
    let options = parking().retry(retry).failure(FailurePolicy::KeepRetrying);
    let consumer = joined(&fixture.bus)
        .await
        .consumer(&group_of, move |_| each_concurrent(4, work.clone()), options)
        .await
        .unwrap();
    until("up to the failure all is saved", async || crate::fixture::behind(&group).await == 4).await;
    pass(Duration::from_secs(5)).await;
    is_mended.store(true, Ordering::SeqCst);
    until_done(&group).await;
    assert_eq!(most.load(Ordering::SeqCst), 4);
    let of = |name: &str| done.lock().unwrap().iter().filter(|(done, _)| done == name).count();
    for n in 0..5 {
        assert_eq!(of(&format!("db{n}")), 1, "what is before the failure does not come again");
    }
    assert_eq!(of("db5"), 1);
    consumer.shutdown().await.unwrap();
}

/// The newest token of each delivery of a database, in order.
#[tokio::test(start_paused = true)]
async fn fencing_tokens_grow_with_takeovers_resets_and_reshards() {
    let fixture = GroupFixture::new(2).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let tokens: Arc<Mutex<Vec<FencingToken>>> = Arc::default();
    let adds = Arc::clone(&tokens);
    let log = Log::doing(move |batch| {
        adds.lock().unwrap().push(batch.fencing_token);
        std::future::ready(Ok(()))
    });
    fixture.create(["a"]).await;
    let first = log.consume(&fixture.bus, &group, parking()).await;
    until_done(&group).await;
    first.shutdown().await.unwrap();
    let second = log.consume(&fixture.other, &group, parking()).await;
    fixture.update("a", 0).await;
    until_done(&group).await;
    fixture.other.feed().reshard(3, None).await.unwrap();
    fixture.update("a", 1).await;
    until("the successors are read", async || group.status().await.unwrap().shards.len() == 3).await;
    until_done(&group).await;
    group.reset(Cursor::NOTHING, true).await.unwrap();
    until("it comes again", async || tokens.lock().unwrap().len() == 4).await;
    let tokens = tokens.lock().unwrap().clone();
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    second.shutdown().await.unwrap();
}
