//! Saves of an observer whose result is unknown, while the task of its shard goes on.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, Notification,
    group::{CheckpointPolicy, Checkpointer, ConsumerOptions, GroupBatch},
    store::{
        AtomicOp, Database, Isolation, RetryPolicy, StoreError, Transaction,
        testing::{Attempt, CommitFault, Gate, Operation},
    },
};

use crate::{
    fixture::{GroupFixture, Log, behind, pass},
    parking::parking,
};

/// An observer that saves by other tasks, and parks soon.
fn explicit() -> ConsumerOptions {
    parking().checkpoint(CheckpointPolicy::Explicit)
}

/// The names of the rows with which an observer has succeeded, each with the checkpoint of its batch.
type Given = Arc<Mutex<Vec<(String, Checkpointer)>>>;

/// Saves up to `saved` in a transaction with an effect, as another task of the observer would, and does not try again.
async fn save_once(store: &Database, saved: &Checkpointer) -> notibus::Result<()> {
    let once = RetryPolicy::default().attempts_max(Some(1));
    let save = async |tx: Transaction| {
        let _ = saved.checkpoint_in(&tx).await?;
        tx.atomic(AtomicOp::Add, b"effect", &1_u64.to_le_bytes());
        Ok(())
    };
    store.run_with(&once, save).await
}

/// Observers that keep the checkpoints of what they have worked on, and fail with the row of `bad` until they are repaired.
fn keeping() -> (Log, Arc<AtomicBool>, Given) {
    let (is_mended, given) = (Arc::new(AtomicBool::new(false)), Given::default());
    let (mended, keeps) = (Arc::clone(&is_mended), Arc::clone(&given));
    let log = Log::doing(move |batch: GroupBatch<Notification>| {
        let is_bad = batch.rows.iter().any(|row| row.name.as_str() == "bad");
        let fails = is_bad && !mended.load(Ordering::SeqCst);
        if !fails {
            keeps.lock().unwrap().push((batch.rows[0].name.to_string(), batch.checkpointer()));
        }
        std::future::ready(if fails { Err("it is bad".into()) } else { Ok(()) })
    });
    (log, is_mended, given)
}

/// Whether an attempt writes the effect.
fn has_effect(attempt: &Attempt) -> bool {
    attempt
        .mutations()
        .any(|mutation| matches!(mutation, Operation::Atomic { key, .. } if key.starts_with(b"effect")))
}

/// An observer saved the first row together with its effect, from a task of its own, while a later row waited to be parked. The commit
/// did not happen, and its result was unknown. The shard took the row for saved all the same, and saved the later one: so the retry
/// learned that an earlier attempt had committed, and its effect was lost.
#[tokio::test(start_paused = true)]
async fn a_save_that_may_have_failed_does_not_let_the_shard_save_for_it() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (log, _, given) = keeping();
    let consumer = log.consume(&fixture.bus, &group, explicit()).await;
    for name in ["a", "bad"] {
        fixture.create([name]).await;
        pass(Duration::from_secs(1)).await;
    }
    let mut is_first = true;
    fixture.faults.plan_commits(move |attempt| {
        let fails = has_effect(attempt) && std::mem::take(&mut is_first);
        fails.then_some(CommitFault::Before(StoreError::COMMIT_UNKNOWN_RESULT))
    });
    let saved = given.lock().unwrap()[0].1.clone();
    let work = async |tx: Transaction| {
        if saved.checkpoint_in(&tx).await?.is_done() {
            return Ok(());
        }
        tx.atomic(AtomicOp::Add, b"effect", &1_u64.to_le_bytes());
        Ok(())
    };
    fixture.faults.database().run(work).await.unwrap();
    pass(Duration::from_secs(5)).await;
    let effect = fixture.store.begin().get(b"effect", Isolation::Snapshot).await.unwrap();
    assert_eq!(effect.as_deref(), Some(&1_u64.to_le_bytes()[..]), "it has its effect once");
    consumer.shutdown().await.unwrap();
}

/// The same, but the observer leaves it at that: its next save covers the row as well. The shard took what waited to be parked for
/// parked, so the next save passed its row without parking it, and nobody worked on it any more.
#[tokio::test(start_paused = true)]
async fn what_a_save_may_not_have_parked_is_parked_by_the_next_one() {
    for is_committed in [false, true] {
        let fixture = GroupFixture::new(1).await;
        let group = fixture.group(Cursor::NOTHING).await;
        let (log, is_mended, given) = keeping();
        let consumer = log.consume(&fixture.bus, &group, explicit()).await;
        for name in ["a", "bad", "c"] {
            fixture.create([name]).await;
            pass(Duration::from_secs(1)).await;
        }
        let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
        let fault = if is_committed { CommitFault::After(unknown) } else { CommitFault::Before(unknown) };
        let mut fault = Some(fault);
        fixture.faults.plan_commits(move |attempt| has_effect(attempt).then(|| fault.take()).flatten());
        let saved = given.lock().unwrap()[1].1.clone();
        assert!(save_once(&fixture.faults.database(), &saved).await.unwrap_err().is_maybe_committed());
        pass(Duration::from_secs(5)).await;
        is_mended.store(true, Ordering::SeqCst);
        fixture.create(["d"]).await;
        pass(Duration::from_secs(1)).await;
        let last = given.lock().unwrap().iter().find(|(name, _)| name == "d").unwrap().1.clone();
        last.checkpoint().await.unwrap();
        pass(Duration::from_mins(1)).await;
        assert_eq!(behind(&group).await, 0);
        let names: Vec<_> = given.lock().unwrap().iter().map(|(name, _)| name.clone()).collect();
        assert!(names.contains(&"bad".to_owned()), "committed: {is_committed}; {names:?}");
        consumer.shutdown().await.unwrap();
    }
}

/// A row waited to be parked when its observer panicked. The next observer worked on the row, while a save of the observer before, which
/// came late, parked it. So the next one learned that an earlier transaction had saved the row; and its next save took the row off
/// those that are parked, as one that it had worked on since. Nobody had worked on it.
#[tokio::test(start_paused = true)]
async fn what_a_late_save_has_parked_is_tried() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (given, has_panicked) = (Given::default(), Arc::new(AtomicBool::new(false)));
    let (begun, go_on) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (keeps, panicked, begins, waits) =
        (Arc::clone(&given), Arc::clone(&has_panicked), Arc::clone(&begun), Arc::clone(&go_on));
    let is_held = Arc::new(AtomicBool::new(true));
    let store = fixture.store.clone();
    let log = Log::doing(move |batch: GroupBatch<Notification>| {
        let (keeps, panicked, is_held) = (Arc::clone(&keeps), Arc::clone(&panicked), Arc::clone(&is_held));
        let (begins, waits, store) = (Arc::clone(&begins), Arc::clone(&waits), store.clone());
        async move {
            let name = batch.rows[0].name.to_string();
            if !panicked.load(Ordering::SeqCst) {
                assert!(name != "d" || panicked.swap(true, Ordering::SeqCst), "as planned");
                if name == "bad" {
                    return Err("it is bad".into());
                }
                keeps.lock().unwrap().push((name, batch.checkpointer()));
                return Ok(());
            }
            if name == "bad" && is_held.swap(false, Ordering::SeqCst) {
                begins.notify_one();
                waits.notified().await;
            }
            let work = async |tx: Transaction| {
                if !batch.checkpoint_in(&tx).await?.is_done() {
                    tx.atomic(AtomicOp::Add, format!("effect/{name}").as_bytes(), &1_u64.to_le_bytes());
                }
                Ok(())
            };
            store.run(work).await?;
            Ok(())
        }
    });
    let consumer = log.consume(&fixture.bus, &group, explicit().rows_max(1)).await;
    for name in ["a", "bad", "c"] {
        fixture.create([name]).await;
        pass(Duration::from_secs(1)).await;
    }
    fixture.create(["d"]).await;
    begun.notified().await;
    let late = given.lock().unwrap()[1].1.clone();
    late.checkpoint().await.unwrap();
    go_on.notify_one();
    pass(Duration::from_mins(1)).await;
    assert_eq!(behind(&group).await, 0);
    let effect = fixture.store.begin().get(b"effect/bad", Isolation::Snapshot).await.unwrap();
    assert_eq!(effect.as_deref(), Some(&1_u64.to_le_bytes()[..]), "{:?}", group.parked("", 10).await);
    consumer.shutdown().await.unwrap();
}

/// Regression: the same, if the next observer leaves it to the shard to save. The shard learned that all was saved, took its doubts for
/// settled, and did not look at what is parked, so that nobody tried the row until somebody asked for it. That takes a parked id which is
/// deleted without the shard's knowledge: its next row waits behind it, and is given to the next observer.
#[tokio::test(start_paused = true)]
async fn what_a_late_save_has_parked_is_tried_although_the_shard_saves() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (is_mended, saves) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
    let (begun, go_on) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (mended, saving, begins, waits) =
        (Arc::clone(&is_mended), Arc::clone(&saves), Arc::clone(&begun), Arc::clone(&go_on));
    let store = fixture.faults.database();
    let log = Log::doing(move |batch: GroupBatch<Notification>| {
        let (is_mended, store) = (mended.load(Ordering::SeqCst), store.clone());
        let (saving, begins, waits) = (Arc::clone(&saving), Arc::clone(&begins), Arc::clone(&waits));
        async move {
            let has = |name: &str| batch.rows.iter().any(|row| row.name.as_str() == name);
            if has("bad") && !is_mended {
                return Err("it is bad".into());
            }
            if has("x") && saving.swap(false, Ordering::SeqCst) {
                let answer = save_once(&store, &batch.checkpointer()).await;
                panic!("as planned: {answer:?}");
            }
            if has("x") || has("gate") {
                begins.notify_one();
                waits.notified().await;
            }
            Ok(())
        }
    });
    let mut is_first = true;
    fixture.faults.plan_commits(move |attempt| {
        let is_late = has_effect(attempt) && std::mem::take(&mut is_first);
        is_late.then_some(CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT))
    });
    let hour = Duration::from_hours(1);
    let slow = explicit().parked_retry.backoff_min(hour).backoff_max(hour);
    let checkpoint = CheckpointPolicy::EveryBatch;
    let options = explicit().parked_retry(slow).checkpoint(checkpoint);
    let consumer = log.consume(&fixture.bus, &group, options).await;
    fixture.create(["bad"]).await;
    pass(Duration::from_secs(1)).await;
    assert!(group.delete_parked("bad").await.unwrap());
    is_mended.store(true, Ordering::SeqCst);
    fixture.create(["gate"]).await;
    begun.notified().await;
    fixture.update("bad", 0).await;
    fixture.create(["x"]).await;
    go_on.notify_one();
    begun.notified().await;
    assert!(fixture.faults.commit_late().await[0].is_ok());
    assert_eq!(group.parked("", 10).await.unwrap().len(), 1);
    go_on.notify_one();
    pass(Duration::from_mins(1)).await;
    assert_eq!(behind(&group).await, 0);
    assert!(group.parked("", 10).await.unwrap().is_empty(), "{:?}", log.all());
    consumer.shutdown().await.unwrap();
}

/// Regression: an observer that saves by other tasks gave a save up, which came late and parked a row that had waited for it. The shard took
/// the row for one that still waited, as its observer had reported no other save. Until another row of the shard came and was saved, nobody
/// tried the parked one. Now an idle shard with rows that wait for a save asks the store at each of its polls.
#[tokio::test(start_paused = true)]
async fn what_a_late_save_has_parked_is_tried_although_no_other_save_follows() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (log, is_mended, given) = keeping();
    let consumer = log.consume(&fixture.bus, &group, explicit().poll_interval(Duration::from_secs(5))).await;
    for name in ["a", "bad", "c"] {
        fixture.create([name]).await;
        pass(Duration::from_secs(1)).await;
    }
    let mut fault = Some(CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT));
    fixture.faults.plan_commits(move |attempt| has_effect(attempt).then(|| fault.take()).flatten());
    let saved = given.lock().unwrap()[1].1.clone();
    save_once(&fixture.faults.database(), &saved).await.unwrap_err();
    pass(Duration::from_secs(5)).await;
    is_mended.store(true, Ordering::SeqCst);
    assert!(fixture.faults.commit_late().await[0].is_ok());
    assert_eq!(group.parked("", 10).await.unwrap().len(), 1);
    pass(Duration::from_hours(1)).await;
    assert_eq!(behind(&group).await, 0);
    assert!(group.parked("", 10).await.unwrap().is_empty(), "{:?}", log.all());
    consumer.shutdown().await.unwrap();
}

/// Whether an attempt saves the trouble of `bad2`.
fn notes_trouble(attempt: &Attempt) -> bool {
    attempt.mutations().any(|mutation| {
        matches!(mutation, Operation::Set { value, .. } if value.windows(10).any(|text| text == b"bad2 fails"))
    })
}

/// Holds the next commit that saves the trouble of `bad2`, once it `is_armed`.
fn hold_trouble(fixture: &GroupFixture, is_armed: &Arc<AtomicBool>) -> Gate {
    let gate = Gate::default();
    let (held, is_armed) = (gate.clone(), Arc::clone(is_armed));
    fixture.faults.plan_commits(move |attempt| {
        let holds = notes_trouble(attempt) && is_armed.swap(false, Ordering::SeqCst);
        holds.then(|| CommitFault::Hold(held.clone()))
    });
    gate
}

/// Regression: two rows waited to be parked when their observer panicked. The next observer failed with the first one again. While the shard noted
/// that, a late save of the observer before parked both. The shard parked the first one, took all of its doubts for settled, and gave the
/// second one to the observer, which learned that an earlier transaction had saved it. Nobody tried it, although it is parked.
#[tokio::test(start_paused = true)]
async fn what_a_late_save_has_parked_is_tried_although_the_shard_parks_a_row_before_it() {
    for is_late in [false, true] {
        let fixture = GroupFixture::new(1).await;
        let group = fixture.group(Cursor::NOTHING).await;
        let given: Arc<Mutex<Vec<(String, Checkpointer)>>> = Arc::default();
        let (has_panicked, is_armed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (keeps, panicked, arms) = (Arc::clone(&given), Arc::clone(&has_panicked), Arc::clone(&is_armed));
        let has_failed = Arc::new(AtomicBool::new(false));
        let store = fixture.faults.database();
        let log = Log::doing(move |batch: GroupBatch<Notification>| {
            let (keeps, panicked, arms) = (Arc::clone(&keeps), Arc::clone(&panicked), Arc::clone(&arms));
            let (has_failed, store) = (Arc::clone(&has_failed), store.clone());
            async move {
                let name = batch.rows[0].name.to_string();
                if !panicked.load(Ordering::SeqCst) {
                    assert!(name != "d" || panicked.swap(true, Ordering::SeqCst), "as planned");
                    if name.starts_with("bad") {
                        return Err("not yet".into());
                    }
                    keeps.lock().unwrap().push((name, batch.checkpointer()));
                    return Ok(());
                }
                if name == "bad2" && !has_failed.swap(true, Ordering::SeqCst) {
                    arms.store(true, Ordering::SeqCst);
                    return Err("bad2 fails".into());
                }
                let work = async |tx: Transaction| {
                    if !batch.checkpoint_in(&tx).await?.is_done() {
                        tx.atomic(AtomicOp::Add, format!("effect/{name}").as_bytes(), &1_u64.to_le_bytes());
                    }
                    Ok(())
                };
                store.run(work).await?;
                Ok(())
            }
        });
        let gate = hold_trouble(&fixture, &is_armed);
        let once = RetryPolicy::default().attempts_max(Some(1)).elapsed_max(None);
        let options = parking().checkpoint(CheckpointPolicy::Explicit).rows_max(1).retry(once);
        let consumer = log.consume(&fixture.bus, &group, options).await;
        for name in ["a", "bad2", "bad", "c"] {
            fixture.create([name]).await;
            pass(Duration::from_secs(1)).await;
        }
        fixture.create(["d"]).await;
        gate.reached().await;
        if is_late {
            let late = given.lock().unwrap()[1].1.clone();
            late.checkpoint().await.unwrap();
        }
        gate.open();
        pass(Duration::from_mins(10)).await;
        assert_eq!(behind(&group).await, 0);
        for name in ["bad2", "bad"] {
            let effect = format!("effect/{name}");
            let effect = fixture.store.begin().get(effect.as_bytes(), Isolation::Snapshot).await.unwrap();
            let parked = group.parked("", 10).await;
            assert_eq!(
                effect.as_deref(),
                Some(&1_u64.to_le_bytes()[..]),
                "late: {is_late}, {name}, {parked:?}"
            );
        }
        consumer.shutdown().await.unwrap();
    }
}
