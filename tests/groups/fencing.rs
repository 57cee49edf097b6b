//! Exactly once: a consumer that has lost its lease, or does not know what it has committed, does no harm.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, Error, Sequence,
    group::{CheckpointPolicy, CloseReason, ConsumerOptions, FailurePolicy, FencingToken},
    store::{
        AtomicOp, Database, Isolation, RetryPolicy, StoreError,
        testing::{Attempt, CommitFault, Faults, Gate, Operation},
    },
};
use tokio::sync::Notify;

use crate::{
    common::{until, within},
    fixture::{GroupFixture, Log, behind, hinted, names, pass, until_done},
};

async fn counter(store: &Database, key: &[u8]) -> u64 {
    let value = store.begin().get(key, Isolation::Snapshot).await.unwrap();
    value.map_or(0, |value| u64::from_le_bytes(value[..].try_into().unwrap()))
}

/// Whether an attempt writes the row of a node.
fn beats(attempt: &Attempt) -> bool {
    attempt
        .mutations()
        .any(|mutation| matches!(mutation, Operation::Set { key, .. } if key.starts_with(b"notibus\x15\x0a")))
}

/// Observers that count rows, exactly once, in `store`.
fn counting(store: &Database) -> Log {
    let store = store.clone();
    Log::doing(move |batch| {
        let store = store.clone();
        async move {
            let body = async |tx: notibus::store::Transaction| {
                if batch.checkpoint_in(&tx).await?.is_done() {
                    return Ok(());
                }
                tx.atomic(AtomicOp::Add, b"rows", &(batch.rows.len() as u64).to_le_bytes());
                Ok(())
            };
            store.run(body).await?;
            Ok(())
        }
    })
}

/// Node A has a pending transaction with its checkpoint when B takes over. A cannot commit it, however late it wakes.
#[tokio::test(start_paused = true)]
async fn a_zombie_cannot_commit() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["a"]).await;
    let (wake, outcome) = (Arc::new(Notify::new()), Arc::new(Mutex::new(None)));
    let (woken, outcomes, store) = (Arc::clone(&wake), Arc::clone(&outcome), fixture.store.clone());
    let zombie = Log::doing(move |batch| {
        let (woken, outcomes, tx) = (Arc::clone(&woken), Arc::clone(&outcomes), store.begin());
        let work = tokio::spawn(async move {
            assert!(!batch.checkpoint_in(&tx).await.unwrap().is_done());
            tx.set(b"effect", b"of the zombie");
            woken.notified().await;
            let committed = tx.commit().await.map(drop);
            let late = batch.checkpoint().await;
            *outcomes.lock().unwrap() = Some((committed, late));
        });
        async move {
            work.await?;
            Ok(())
        }
    });
    let a = zombie.consume(&fixture.bus, &group, hinted()).await;
    zombie.until_names(&["a".to_owned()]).await;
    let fault =
        |attempt: &Attempt| beats(attempt).then_some(CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT));
    fixture.faults.plan_commits(fault);
    let log = Log::new();
    let b = log.consume(&fixture.other, &group, hinted()).await;
    until_done(&group).await;
    until("its work is ended", async || zombie.closed() == [CloseReason::LeaseLost]).await;
    wake.notify_one();
    until("the zombie has tried", async || outcome.lock().unwrap().is_some()).await;
    let (committed, late) = outcome.lock().unwrap().take().unwrap();
    // Embedded transactions are too old after 5 s; a younger one would conflict.
    assert!(matches!(committed.unwrap_err().code(), Some(1007 | 1020)));
    assert!(matches!(late, Err(Error::LeaseLost { .. })), "{late:?}");
    assert_eq!(fixture.store.begin().get(b"effect", Isolation::Snapshot).await.unwrap(), None);
    fixture.faults.heal();
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
    zombie.check(true);
    log.check(true);
}

/// A reset takes the lease while a transaction with a checkpoint is pending: it conflicts.
#[tokio::test(start_paused = true)]
async fn a_transaction_from_before_a_reset_cannot_commit() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["a"]).await;
    let outcome = Arc::new(Mutex::new(None));
    let (outcomes, store, resets) = (Arc::clone(&outcome), fixture.store.clone(), group.clone());
    let is_first = AtomicBool::new(true);
    let log = Log::doing(move |batch| {
        let is_first = is_first.swap(false, Ordering::Relaxed);
        let (outcomes, tx, resets) = (Arc::clone(&outcomes), store.begin(), resets.clone());
        let work = tokio::spawn(async move {
            if is_first {
                assert!(!batch.checkpoint_in(&tx).await.unwrap().is_done());
                resets.reset(Cursor::NOTHING, true).await.unwrap();
                *outcomes.lock().unwrap() = Some(tx.commit().await);
            }
        });
        async move {
            work.await?;
            Ok(())
        }
    });
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    until("it comes again", async || log.names() == ["a", "a"]).await;
    until_done(&group).await;
    assert_eq!(outcome.lock().unwrap().take().unwrap().unwrap_err().code(), Some(1020));
    consumer.shutdown().await.unwrap();
    assert_eq!(log.closed(), [CloseReason::LeaseLost, CloseReason::Shutdown]);
    log.check(true);
}

/// The effect happens once, whether a commit of unknown result has happened or not; and no second checkpoint is written.
#[tokio::test(start_paused = true)]
async fn unknown_results_do_not_double_effects() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let observers = Faults::new(&fixture.store);
    let log = counting(&observers.database());
    let consumer = log.consume(&fixture.bus, &group, hinted()).await;
    let unknown = StoreError::COMMIT_UNKNOWN_RESULT;
    for (n, fault) in [
        CommitFault::After(unknown.clone()),
        CommitFault::Before(unknown.clone()),
        CommitFault::Before(StoreError::NOT_COMMITTED),
        // The client gives up, but the observer fails only after it has committed.
        CommitFault::After(StoreError::TRANSACTION_TIMED_OUT),
        CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT),
    ]
    .into_iter()
    .enumerate()
    {
        observers.script_commits([fault]);
        fixture.create([format!("db{n}")]).await;
        until_done(&group).await;
        assert_eq!(counter(&fixture.store, b"rows").await, n as u64 + 1);
    }
    assert_eq!(log.rows().len(), 6, "only what had not been committed came again");
    pass(Duration::from_secs(1)).await;
    assert_eq!(fixture.bus.stats().group_checkpoints, 0, "the observer's own ones are enough");
    consumer.shutdown().await.unwrap();
    log.check(true);
}

/// A commit that was given up happens later, when the same rows are in work again together with others.
#[tokio::test(start_paused = true)]
async fn a_commit_that_comes_late_does_not_double_effects() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let observers = Faults::new(&fixture.store);
    fixture.create(["a"]).await;
    let (late, store) = (observers.clone(), observers.database());
    let partly = Arc::new(AtomicBool::new(false));
    let was_partly = Arc::clone(&partly);
    let log = Log::doing(move |batch| {
        let (late, store, partly) = (late.clone(), store.clone(), Arc::clone(&partly));
        async move {
            if batch.rows.len() == 2 {
                let landed = late.commit_late().await;
                assert!(landed.iter().all(Result::is_ok), "{landed:?}");
            }
            let body = async |tx: notibus::store::Transaction| {
                if batch.checkpoint_in(&tx).await?.is_done() {
                    return Ok(());
                }
                tx.atomic(AtomicOp::Add, b"rows", &(batch.rows.len() as u64).to_le_bytes());
                Ok(())
            };
            let done = store.run(body).await;
            partly.fetch_or(matches!(done, Err(Error::PartlyDone { .. })), Ordering::Relaxed);
            Ok(done?)
        }
    });
    observers.script_commits([CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT)]);
    let mut options = hinted();
    options.retry.backoff_min = Duration::from_secs(2);
    let consumer = log.consume(&fixture.bus, &group, options).await;
    log.until_names(&["a".to_owned()]).await;
    fixture.create(["b"]).await;
    until_done(&group).await;
    assert_eq!(counter(&fixture.store, b"rows").await, 2, "each once");
    assert!(was_partly.load(Ordering::Relaxed), "the retry has met the late commit");
    consumer.shutdown().await.unwrap();
    log.check(true);
}

/// A node dies in the middle of a batch: the batch comes again, to another observer, after the first was closed.
#[tokio::test(start_paused = true)]
async fn a_batch_whose_node_dies_comes_again_unless_it_was_committed() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let store = fixture.store.clone();
    let hangs = Log::doing(move |batch| {
        let store = store.clone();
        async move {
            if batch.rows[0].name.as_str() == "committed" {
                let body = async |tx: notibus::store::Transaction| {
                    let _ = batch.checkpoint_in(&tx).await?;
                    tx.atomic(AtomicOp::Add, b"rows", &1_u64.to_le_bytes());
                    Ok(())
                };
                store.run(body).await?;
            }
            std::future::pending().await
        }
    });
    for (n, name) in ["committed", "open"].into_iter().enumerate() {
        let dies = hangs.consume(&fixture.bus, &group, hinted()).await;
        fixture.create([name]).await;
        hangs.until_names(&[name.to_owned()]).await;
        pass(Duration::from_secs(1)).await;
        drop(dies);
        until("it is closed", async || hangs.closed().len() == n + 1).await;
        let log = counting(&fixture.store);
        let heir = log.consume(&fixture.other, &group, hinted()).await;
        until_done(&group).await;
        pass(Duration::from_secs(30)).await;
        assert_eq!(log.names().len(), n, "{name}");
        assert_eq!(counter(&fixture.store, b"rows").await, n as u64 + 1);
        within("it ends", heir.shutdown()).await.unwrap();
        log.check(true);
    }
    hangs.check(true);
}

/// The lease is handed over between batches: nothing comes twice.
#[tokio::test(start_paused = true)]
async fn a_handover_between_living_nodes_repeats_nothing() {
    let fixture = GroupFixture::new(8).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let log = Log::doing(async |_| {
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok(())
    });
    let options = hinted().rows_max(2);
    let all = names("db", 150);
    fixture.create(&all).await;
    let a = log.consume(&fixture.bus, &group, options.clone()).await;
    pass(Duration::from_secs(1)).await;
    let b = log.consume(&fixture.other, &group, options).await;
    until_done(&group).await;
    assert!(b.shards().len() == 4 && a.shards().len() == 4, "{:?} {:?}", a.shards(), b.shards());
    assert_eq!(log.rows().len(), 150, "each once");
    assert_eq!(behind(&group).await, 0);
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
    log.check(true);
}

/// Whether an attempt writes a checkpoint of a group.
fn writes_checkpoint(attempt: &Attempt) -> bool {
    attempt.mutations().any(
        |mutation| matches!(mutation, Operation::Set { key, .. } if key.starts_with(b"notibus\x15\x0c\x01n\0\x15\x01")),
    )
}

/// Regression: a checkpoint timed out (1031), was written again, and then the next one was written. After that the first one was
/// committed all the same. It had only the lease in its read-conflict set, and moved the group back.
#[tokio::test(start_paused = true)]
async fn a_checkpoint_that_comes_late_sets_nobody_back() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let mut is_first = true;
    fixture.faults.plan_commits(move |attempt| {
        let is_late = writes_checkpoint(attempt) && std::mem::take(&mut is_first);
        is_late.then_some(CommitFault::Late(StoreError::TRANSACTION_TIMED_OUT))
    });
    let consumer = Log::new().consume(&fixture.bus, &group, hinted()).await;
    fixture.create(["a"]).await;
    until_done(&group).await;
    fixture.update("a", 0).await;
    until_done(&group).await;

    let late = fixture.faults.commit_late().await;
    assert_eq!(late.len(), 1);
    assert_eq!(late[0].as_ref().unwrap_err().code(), Some(1020));
    assert_eq!(behind(&group).await, 0);
    consumer.shutdown().await.unwrap();
}

/// Whether an attempt writes a dead letter.
fn buries(attempt: &Attempt) -> bool {
    let letters = b"notibus\x15\x0c\x01n\x00\x15\x02";
    attempt
        .mutations()
        .any(|mutation| matches!(mutation, Operation::Set { key, .. } if key.starts_with(letters)))
}

/// Commits the effect of a batch with its checkpoint on demand, and reports when that is over.
#[derive(Clone, Default)]
struct Late {
    /// Whether the first attempt was made.
    is_begun: Arc<AtomicBool>,
    /// Asks for the commit.
    lands: Arc<Notify>,
    /// Reports the commit.
    landed: Arc<Notify>,
}

impl Late {
    /// An observer whose first attempt fails, as far as it knows; all others do `next`.
    fn observers<W>(&self, store: &Database, next: impl Fn(Self) -> W + Clone + Send + Sync + 'static) -> Log
    where
        W: Future<Output = notibus::group::ObserverResult> + Send,
    {
        let (late, store) = (self.clone(), store.clone());
        Log::doing(move |batch| {
            let (late, store, next) = (late.clone(), store.clone(), next.clone());
            async move {
                let work = async |tx: notibus::store::Transaction| {
                    if !batch.checkpoint_in(&tx).await?.is_done() {
                        tx.atomic(AtomicOp::Add, b"rows", &(batch.rows.len() as u64).to_le_bytes());
                    }
                    Ok::<_, Error>(tx)
                };
                if late.is_begun.swap(true, Ordering::Relaxed) {
                    next(late).await?;
                    let tx = work(store.begin()).await?;
                    tx.commit().await?;
                    return Ok(());
                }
                let tx = work(store.begin()).await?;
                tokio::spawn(async move {
                    late.lands.notified().await;
                    tx.commit().await.unwrap();
                    late.landed.notify_one();
                });
                Err("nobody knows whether it was committed".into())
            }
        })
    }
}

/// How often a row is tried before it is a dead letter: twice, with a pause that is shorter than a transaction may last.
fn twice() -> ConsumerOptions {
    let retry = RetryPolicy::default()
        .attempts_max(Some(2))
        .elapsed_max(None)
        .backoff_min(Duration::from_millis(100))
        .backoff_max(Duration::from_millis(100));
    let (checkpoint, failure) = (CheckpointPolicy::Explicit, FailurePolicy::DeadLetter);
    hinted().checkpoint(checkpoint).failure(failure).retry(retry)
}

/// Regression: the commit of a batch came late, after its next attempt had begun. That one had the same row, but had read further, so
/// that the checkpoint was found somewhere within it: it failed, and the row became a dead letter although it had been worked on. A
/// replay would have repeated the work.
#[tokio::test(start_paused = true)]
async fn a_row_that_was_committed_late_is_done_however_far_the_next_attempt_has_read() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["a"]).await;
    let (late, store) = (Late::default(), fixture.store.clone());
    let log = late.observers(&fixture.store, |late| async move {
        late.lands.notify_one();
        late.landed.notified().await;
        Ok(())
    });
    let consumer = log.consume(&fixture.bus, &group, twice()).await;
    until("the first attempt has failed", async || late.is_begun.load(Ordering::Relaxed)).await;
    // The store advances, so that the next attempt reads further.
    store
        .run(async |tx| {
            let _: () = tx.set(b"other", b"work");
            Ok(())
        })
        .await
        .unwrap();
    until_done(&group).await;
    pass(Duration::from_secs(10)).await;
    assert_eq!(group.dead_letters(Sequence::MIN, 10).await.unwrap(), []);
    assert_eq!(counter(&fixture.store, b"rows").await, 1);
    consumer.shutdown().await.unwrap();
}

/// The commit came after the consumer had found no checkpoint, and before the row was written to the dead letters.
#[tokio::test(start_paused = true)]
async fn a_row_that_is_committed_while_it_is_given_up_is_no_dead_letter() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    fixture.create(["a"]).await;
    let late = Late::default();
    let log = late.observers(&fixture.store, |_| async { Err("it fails".into()) });
    let gate = Gate::default();
    let held = gate.clone();
    fixture.faults.plan_commits(move |attempt| buries(attempt).then(|| CommitFault::Hold(held.clone())));
    let consumer = log.consume(&fixture.bus, &group, twice()).await;
    within("the row to be given up", gate.reached()).await;
    late.lands.notify_one();
    within("the commit to land", late.landed.notified()).await;
    fixture.faults.heal();
    gate.open();
    until_done(&group).await;
    pass(Duration::from_secs(10)).await;
    assert_eq!(group.dead_letters(Sequence::MIN, 10).await.unwrap(), []);
    assert_eq!(counter(&fixture.store, b"rows").await, 1);
    consumer.shutdown().await.unwrap();
}

/// A table of another database, with the recipe of [`FencingToken`]: what was written last for each name.
#[derive(Default)]
struct Mirror(Mutex<BTreeMap<String, (FencingToken, Sequence, u64)>>);

impl Mirror {
    /// `UPDATE ... WHERE db = :name AND (token < :token OR token = :token AND seq < :seq)`; with `<=` if `takes_replays`.
    fn update(&self, name: &str, (token, seq, value): (FencingToken, Sequence, u64), takes_replays: bool) {
        let mut rows = self.0.lock().unwrap();
        let is_older = rows.get(name).is_none_or(|(old_token, old_seq, _)| {
            *old_token < token || *old_token == token && (*old_seq < seq || takes_replays && *old_seq == seq)
        });
        if is_older {
            rows.insert(name.to_owned(), (token, seq, value));
        }
    }

    /// The number of updates that it has of `name`, and the sequence.
    fn of(&self, name: &str) -> (u64, Sequence) {
        let (_, seq, value) = self.0.lock().unwrap()[name];
        (value, seq)
    }

    /// Somebody else has changed the value of `name`.
    fn damage(&self, name: &str) {
        self.0.lock().unwrap().get_mut(name).unwrap().2 = u64::MAX;
    }
}

/// Regression: the recipe asked for a greater sequence in any case. So a reset to an earlier position and a replay changed nothing in the
/// other database, although the group had worked on all rows.
#[tokio::test(start_paused = true)]
async fn the_recipe_lets_newer_consumers_resets_and_replays_write() {
    let fixture = GroupFixture::new(1).await;
    let group = fixture.group(Cursor::NOTHING).await;
    let (mirror, takes_replays) = (Arc::new(Mirror::default()), Arc::new(AtomicBool::new(false)));
    let batches: Arc<Mutex<Vec<(FencingToken, Sequence, u64)>>> = Arc::default();
    let (writes, replays, kept) = (Arc::clone(&mirror), Arc::clone(&takes_replays), Arc::clone(&batches));
    let log = Log::doing(move |batch| {
        for row in &batch.rows {
            let now = (batch.fencing_token, row.sequence, row.totals.updated);
            writes.update(row.name.as_str(), now, replays.load(Ordering::Relaxed));
            kept.lock().unwrap().push(now);
        }
        std::future::ready(Ok(()))
    });
    let first = log.consume(&fixture.bus, &group, hinted()).await;
    fixture.create(["a"]).await;
    let old = fixture.update("a", 0).await;
    until_done(&group).await;
    assert_eq!(mirror.of("a"), (1, old));
    first.shutdown().await.unwrap();

    let _second = log.consume(&fixture.other, &group, hinted()).await;
    let new = fixture.update("a", 1).await;
    until_done(&group).await;
    assert_eq!(mirror.of("a"), (2, new));
    // The first consumer sends what it had begun, too late.
    let stale = *batches.lock().unwrap().iter().find(|(_, at, _)| *at == old).unwrap();
    mirror.update("a", stale, true);
    assert_eq!(mirror.of("a"), (2, new), "an older consumer changes nothing");

    let again = async || {
        assert_eq!(group.replay(|_| true).await.unwrap(), 1);
        until("it is replayed", async || group.parked("", 1).await.unwrap().is_empty()).await;
    };
    mirror.damage("a");
    again().await;
    assert_eq!(mirror.of("a").0, u64::MAX, "the same consumer, and the same row");
    takes_replays.store(true, Ordering::Relaxed);
    again().await;
    assert_eq!(mirror.of("a"), (2, new));

    takes_replays.store(false, Ordering::Relaxed);
    mirror.damage("a");
    group.reset(Cursor::NOTHING, true).await.unwrap();
    until("the row comes again", async || mirror.of("a") == (2, new)).await;
}
