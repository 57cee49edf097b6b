//! Deferred ids: work that failed, stalls or takes long, and work that was requested again.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, DbInstance, Filter, Notification,
    consumer::{Batch, Work},
    store::{AtomicOp, Transaction},
};
use tokio::sync::Notify;

use crate::{
    common::{NEVER, db, record, row_with, until},
    fixture::{ConsumerFixture, Given, Log, counter, hinted, names, pass},
};

type Ids = Log<Work<Notification>>;
type Rows = Log<Batch<Notification>>;

/// Bug: the turn of deferred ids skipped an id that was running, and did not read its key again, so the requested work was never done.
#[tokio::test(start_paused = true)]
async fn work_asked_for_while_the_id_runs_follows() {
    let fixture = ConsumerFixture::new(1).await;
    let (opens, waits) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(true)));
    let (gate, holds) = (Arc::clone(&opens), Arc::clone(&waits));
    let log = Ids::doing(move |_| {
        let (gate, holds) = (Arc::clone(&gate), holds.swap(false, Ordering::Relaxed));
        async move {
            if holds {
                gate.notified().await;
            }
            Ok(())
        }
    });
    fixture.create(["a"]).await;
    let options = hinted().checkpoint_interval(Duration::from_mins(10));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    log.until_calls(1).await;
    assert_eq!(fixture.handle().again("a", false).await.unwrap(), 1);
    pass(Duration::from_secs(10)).await;
    assert_eq!(log.calls(), 1, "an id does not run twice at once");
    opens.notify_one();
    log.until_calls(2).await;
    until("nothing is deferred", async || fixture.is_none_deferred().await).await;
    pass(Duration::from_mins(5)).await;
    assert_eq!(log.calls(), 2);
    consumer.shutdown().await.unwrap();
}

/// Work on an id is requested again during a long run of the id that already has a key: the id runs once more after that run.
#[tokio::test(start_paused = true)]
async fn work_asked_for_during_a_long_run_follows() {
    let fixture = ConsumerFixture::new(1).await;
    let (opens, waits) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(true)));
    let (gate, holds) = (Arc::clone(&opens), Arc::clone(&waits));
    let log = Ids::doing(move |work| {
        let (gate, holds) = (Arc::clone(&gate), holds.swap(false, Ordering::Relaxed));
        async move {
            if holds {
                gate.notified().await;
            } else {
                assert!(work.is_again());
            }
            Ok(())
        }
    });
    fixture.create(["a"]).await;
    let consumer = fixture.member().await.start_from(Cursor::BEGINNING).run(log.handler()).await.unwrap();
    until("the run has a key", async || !fixture.is_none_deferred().await).await;
    assert_eq!(fixture.handle().again("a", true).await.unwrap(), 1);
    pass(Duration::from_secs(10)).await;
    assert_eq!(log.calls(), 1, "an id does not run twice at once");
    opens.notify_one();
    log.until_calls(2).await;
    fixture.until_done().await;
    assert_eq!(log.calls(), 2);
    consumer.shutdown().await.unwrap();
}

/// A request for all ids does not deliver ids that the consumer does not want.
#[tokio::test(start_paused = true)]
async fn only_wanted_ids_are_worked_on_again() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::new();
    fixture.create(["wanted", "other"]).await;
    let member = fixture.member().await.start_from(Cursor::BEGINNING).filter(Filter::name("wanted").unwrap());
    let consumer = member.run(log.handler()).await.unwrap();
    log.until_calls(1).await;
    fixture.handle().again("*", false).await.unwrap();
    until("nothing is deferred", async || fixture.is_none_deferred().await).await;
    log.until_calls(2).await;
    pass(Duration::from_mins(5)).await;
    assert_eq!(log.names(), ["wanted", "wanted"]);
    consumer.shutdown().await.unwrap();
}

/// Bug: a request for all ids gave even an unwanted id a key that named its database, as if the id had been worked on, so a second request,
/// after the end of the database, delivered the id to the handler.
#[tokio::test(start_paused = true)]
async fn an_unwanted_id_is_not_given_however_often_somebody_asks() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::new();
    fixture.create(["wanted", "other"]).await;
    let options = hinted().checkpoint_interval(Duration::from_mins(10));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.filter(Filter::name("wanted").unwrap()).run(log.handler()).await.unwrap();
    log.until_calls(1).await;
    fixture.handle().again("*", false).await.unwrap();
    until("nothing is deferred", async || fixture.is_none_deferred().await).await;
    record(&fixture.store, &fixture.other, &db("other", 1), [0, 1, 0, 0]).await;
    row_with(&fixture.other, &db("other", 1), [1, 1, 0, 0]).await;
    fixture.handle().again("*", false).await.unwrap();
    until("nothing is deferred", async || fixture.is_none_deferred().await).await;
    pass(Duration::from_mins(1)).await;
    assert!(log.names().iter().all(|name| name == "wanted"), "{:?}", log.names());
    consumer.shutdown().await.unwrap();
}

/// A request to work on a deferred id again does not report events as news if the work on them is already finished.
#[tokio::test(start_paused = true)]
async fn work_asked_for_of_a_deferred_id_tells_only_what_is_not_finished() {
    let fixture = ConsumerFixture::new(1).await;
    let (known, is_mended) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
    let (all_known, mended) = (Arc::clone(&known), Arc::clone(&is_mended));
    let log = Ids::doing(move |work| {
        all_known.lock().unwrap().push(work.since().position());
        let fails = work.row().unwrap().totals.updated > 0 && !mended.load(Ordering::Relaxed);
        async move { if fails { Err("not yet".into()) } else { Ok(()) } }
    });
    let pause = Duration::from_hours(1);
    let options = hinted().attempts_max(1).backoff_min(pause).backoff_max(pause);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(["a"]).await;
    fixture.until_done().await;
    let first = fixture.other.feed().newest(&db("a", 1).name).await.unwrap().unwrap().sequence;
    fixture.update("a", 0).await;
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    is_mended.store(true, Ordering::Relaxed);
    assert_eq!(fixture.handle().again("a", true).await.unwrap(), 1);
    fixture.until_done().await;
    let known = known.lock().unwrap().clone();
    assert!(known[0] < first && known[1..] == [known[1]; 2] && known[1] >= first, "{known:?}, {first}");
    consumer.shutdown().await.unwrap();
}

/// Requested work on a finished id, or on an id in a drained shard, is done exactly once more, both by ids and in batches.
#[tokio::test(start_paused = true)]
async fn effects_of_work_done_again_happen_once_more() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(2).await;
        let (ids, rows) = (counting_ids(&fixture), counting_rows(&fixture));
        fixture.create(names("db", 6)).await;
        let options = hinted().poll_interval(Duration::from_secs(10));
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        until("all are counted", async || counter(&fixture.store, b"count").await == 6).await;
        assert_eq!(fixture.handle().again("db*", false).await.unwrap(), 6);
        until("all are counted again", async || counter(&fixture.store, b"count").await == 12).await;
        fixture.other.feed().reshard(3, None).await.unwrap();
        until("it has gone over", async || fixture.handle().status().await.unwrap().shards.len() == 3).await;
        assert_eq!(fixture.handle().again("db*", false).await.unwrap(), 6);
        until("all are counted again", async || counter(&fixture.store, b"count").await == 18).await;
        fixture.until_done().await;
        pass(Duration::from_mins(5)).await;
        assert_eq!(counter(&fixture.store, b"count").await, 18, "{is_ordered}");
        consumer.shutdown().await.unwrap();
    }
}

fn counting_ids(fixture: &ConsumerFixture) -> Ids {
    let store = fixture.store.clone();
    Ids::doing(move |work| {
        let store = store.clone();
        async move {
            let count = async |tx: Transaction| {
                if !work.commit_in(&tx).await?.is_already_committed() {
                    tx.atomic(AtomicOp::Add, b"count", &1_u64.to_le_bytes());
                }
                Ok(())
            };
            Ok(store.run(count).await?)
        }
    })
}

fn counting_rows(fixture: &ConsumerFixture) -> Rows {
    let store = fixture.store.clone();
    Rows::doing(move |batch| {
        let store = store.clone();
        async move {
            let count = async |tx: Transaction| {
                if !batch.commit_in(&tx).await?.is_already_committed() {
                    tx.atomic(AtomicOp::Add, b"count", &(batch.rows.len() as u64).to_le_bytes());
                }
                Ok(())
            };
            Ok(store.run(count).await?)
        }
    })
}

/// Bug: a run whose id was discarded while it ran moved the finished position of the id back to its own row, so the id was worked on again.
#[tokio::test(start_paused = true)]
async fn a_discarded_id_is_not_worked_on_again_by_the_end_of_its_run() {
    for succeeds in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        let opens = Arc::new(Notify::new());
        let gate = Arc::clone(&opens);
        let log = Ids::doing(move |_| {
            let gate = Arc::clone(&gate);
            async move {
                gate.notified().await;
                if succeeds { Ok(()) } else { Err("it fails".into()) }
            }
        });
        fixture.create(["a"]).await;
        let consumer = fixture.member().await.start_from(Cursor::BEGINNING).run(log.handler()).await.unwrap();
        until("the run has a key", async || !fixture.is_none_deferred().await).await;
        fixture.update("a", 0).await;
        pass(Duration::from_secs(5)).await;
        assert!(fixture.handle().discard(b"a").await.unwrap());
        opens.notify_one();
        fixture.until_done().await;
        pass(Duration::from_mins(20)).await;
        assert_eq!(log.calls(), 1, "succeeds: {succeeds}");
        assert!(!fixture.handle().discard(b"a").await.unwrap());
        // Later rows are still worked on.
        fixture.update("a", 1).await;
        log.until_calls(2).await;
        drop(consumer);
    }
}

/// Bug: a request to work again on all deferred ids included an id that had just been discarded, so it was worked on again.
#[tokio::test(start_paused = true)]
async fn a_discarded_id_is_not_deferred_any_longer() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(["bad", "good"]).await;
    let is_repaired = Arc::new(AtomicBool::new(false));
    let repaired = Arc::clone(&is_repaired);
    let log = Log::doing(move |_: Work<Notification>| {
        let is_repaired = repaired.load(Ordering::Relaxed);
        async move { if is_repaired { Ok(()) } else { Err("the mail server is away".into()) } }
    });
    let options = hinted().attempts_max(1).backoff_min(Duration::from_mins(1));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    let handle = fixture.handle();
    until("both are deferred", async || handle.deferred(None, 10).await.unwrap().len() == 2).await;
    handle.pause().await.unwrap();
    assert!(handle.discard(b"bad").await.unwrap());
    is_repaired.store(true, Ordering::Relaxed);
    let before = log.calls();
    assert_eq!(handle.again("*", true).await.unwrap(), 1);
    handle.resume().await.unwrap();
    fixture.until_done().await;
    assert_eq!(log.names()[before..], ["good"]);
    consumer.shutdown().await.unwrap();
}

/// A run whose id was discarded can no longer commit anything.
#[tokio::test(start_paused = true)]
async fn a_discarded_run_commits_nothing() {
    let fixture = ConsumerFixture::new(1).await;
    let (opens, refused) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
    let (gate, counts, store) = (Arc::clone(&opens), Arc::clone(&refused), fixture.store.clone());
    let log = Ids::doing(move |work| {
        let (gate, counts, store) = (Arc::clone(&gate), Arc::clone(&counts), store.clone());
        async move {
            gate.notified().await;
            let tx = store.begin();
            counts.fetch_add(work.verify(&tx).await.is_err().into(), Ordering::Relaxed);
            let tx = store.begin();
            assert!(work.commit_in(&tx).await?.is_already_committed());
            Ok(())
        }
    });
    fixture.create(["a"]).await;
    let consumer = fixture.member().await.start_from(Cursor::BEGINNING).run(log.handler()).await.unwrap();
    until("the run has a key", async || !fixture.is_none_deferred().await).await;
    assert!(fixture.handle().discard(b"a").await.unwrap());
    opens.notify_one();
    until("the run is refused", async || refused.load(Ordering::Relaxed) > 0).await;
    fixture.until_done().await;
    assert_eq!((log.calls(), refused.load(Ordering::Relaxed)), (1, 1));
    consumer.shutdown().await.unwrap();
}

/// A run that takes longer than a checkpoint interval does not hold back the checkpoint, and is repeated after a crash.
#[tokio::test(start_paused = true)]
async fn a_long_run_does_not_hold_the_checkpoint() {
    let fixture = ConsumerFixture::new(1).await;
    let waits = Arc::new(AtomicBool::new(true));
    let holds = Arc::clone(&waits);
    let log = Ids::doing(move |work| {
        let holds = work.id() == b"long" && holds.load(Ordering::Relaxed);
        async move {
            if holds {
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    });
    fixture.create(["long", "a", "b"]).await;
    let consumer = fixture.member().await.start_from(Cursor::BEGINNING).run(log.handler()).await.unwrap();
    consumer.caught_up().await.unwrap();
    let [shard] = &fixture.handle().lag().await.unwrap()[..] else { panic!("there is one") };
    assert_eq!(shard.rows, 0);
    let [deferred] = &fixture.handle().deferred(None, 10).await.unwrap()[..] else { panic!("there is one") };
    assert_eq!((&deferred.id[..], deferred.attempts, &deferred.error[..]), ("long", 0, ""));
    drop(consumer);
    waits.store(false, Ordering::Relaxed);
    let consumer = fixture.other_member().await.run(log.handler()).await.unwrap();
    fixture.until_done().await;
    let mut names = log.names();
    assert_eq!(names.pop().unwrap(), "long");
    names.sort_unstable();
    assert_eq!(names, ["a", "b", "long"]);
    consumer.shutdown().await.unwrap();
}

/// Work that makes no progress is cancelled and deferred; progress keeps it alive.
#[tokio::test(start_paused = true)]
async fn work_without_progress_is_cancelled() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        let tries = Arc::new(AtomicUsize::new(0));
        let (ids_count, rows_count) = (Arc::clone(&tries), tries);
        let ids = Ids::doing(move |work| {
            let name = work.names().remove(0);
            let hangs = name != "good" && (name == "slow" || ids_count.fetch_add(1, Ordering::Relaxed) == 0);
            async move {
                if hangs {
                    for _ in 0..20 {
                        tokio::time::sleep(Duration::from_secs(30)).await;
                        if name == "slow" {
                            work.progress();
                        }
                    }
                }
                Ok(())
            }
        });
        let rows = Rows::doing(move |batch| {
            let name = batch.names().remove(0);
            let hangs = name != "good" && (name == "slow" || rows_count.fetch_add(1, Ordering::Relaxed) == 0);
            async move {
                if hangs {
                    for _ in 0..20 {
                        tokio::time::sleep(Duration::from_secs(30)).await;
                        if name == "slow" {
                            batch.progress();
                        }
                    }
                }
                Ok(())
            }
        });
        fixture.create(["hangs", "good", "slow"]).await;
        let options = hinted().stall_limit(Duration::from_mins(1)).batch_rows_max(1);
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        let got = || if is_ordered { rows.names() } else { ids.names() };
        until("it is deferred", async || {
            let deferred = fixture.handle().deferred(None, 10).await.unwrap();
            deferred.iter().any(|id| id.id == "hangs" && id.error.contains("no progress"))
        })
        .await;
        pass(Duration::from_mins(11)).await;
        fixture.until_done().await;
        let times = |name: &str| got().iter().filter(|got| *got == name).count();
        assert_eq!((times("hangs"), times("good"), times("slow")), (2, 1, 1), "{is_ordered}");
        consumer.shutdown().await.unwrap();
    }
}

/// Deferred ids whose runs hang leave room for the shard, and the shard leaves room for them.
#[tokio::test(start_paused = true)]
async fn deferred_ids_and_the_shard_do_not_starve_each_other() {
    let fixture = ConsumerFixture::new(1).await;
    let is_first = Arc::new(AtomicBool::new(true));
    let firsts = Arc::clone(&is_first);
    let log = Ids::doing(move |work| {
        let is_bad = work.id().starts_with(b"bad");
        let (is_mended, fails) = (work.id() == b"mended", firsts.load(Ordering::Relaxed));
        async move {
            if is_bad && !fails {
                std::future::pending::<()>().await;
            }
            if (is_bad || is_mended) && fails {
                return Err("it fails".into());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok(())
        }
    });
    let options = hinted().attempts_max(1).max_concurrency(4).backoff_max(Duration::from_secs(1));
    let options = options.stall_limit(Duration::from_secs(10));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(names("bad", 6).into_iter().chain(["mended".to_owned()])).await;
    until("all are deferred", async || fixture.handle().deferred(None, 10).await.unwrap().len() == 7).await;
    is_first.store(false, Ordering::Relaxed);
    pass(Duration::from_secs(5)).await;
    fixture.create(names("good", 500)).await;
    log.until_names(&names("good", 500)).await;
    until("the mended one has its turn", async || {
        let deferred = fixture.handle().deferred(None, 10).await.unwrap();
        deferred.iter().all(|id| id.id != "mended")
    })
    .await;
    drop(consumer);
}

/// Even the largest possible number of hanging runs of deferred ids must not keep a shard from working on its rows.
#[tokio::test(start_paused = true)]
async fn deferred_ids_that_hang_leave_room_for_rows() {
    let fixture = ConsumerFixture::new(1).await;
    let hangs = Arc::new(AtomicBool::new(false));
    let do_hang = Arc::clone(&hangs);
    let log = Ids::doing(move |work| {
        let (is_bad, hangs) = (work.id().starts_with(b"bad"), do_hang.load(Ordering::Relaxed));
        async move {
            if is_bad && hangs {
                std::future::pending::<()>().await;
            }
            if is_bad { Err("it fails".into()) } else { Ok(()) }
        }
    });
    let options = hinted().attempts_max(1).max_concurrency(4).stall_limit(NEVER);
    let options = options.backoff_max(Duration::from_secs(1));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(names("bad", 6)).await;
    until("all are deferred", async || fixture.handle().deferred(None, 10).await.unwrap().len() == 6).await;
    hangs.store(true, Ordering::Relaxed);
    pass(Duration::from_secs(5)).await;
    fixture.create(names("good", 20)).await;
    log.until_names(&names("good", 20)).await;
    drop(consumer);
}

/// A deferred id must not wait until the whole backlog of batches is finished.
#[tokio::test(start_paused = true)]
async fn a_deferred_id_has_its_turn_between_batches() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(["bad"]).await;
    fixture.create(names("good", 100)).await;
    let is_first = Arc::new(AtomicBool::new(true));
    let log = Rows::doing(move |batch: Batch<Notification>| {
        let fails = batch.rows[0].name.as_str() == "bad" && is_first.swap(false, Ordering::Relaxed);
        async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            if fails { Err("it fails".into()) } else { Ok(()) }
        }
    });
    let pause = Duration::from_secs(3);
    let options = hinted().attempts_max(1).batch_rows_max(1).backoff_min(pause).backoff_max(pause);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run_batches(log.handler()).await.unwrap();
    fixture.until_done().await;
    let names = log.names();
    let last = names.iter().rposition(|name| name == "bad").unwrap();
    assert!((10..60).contains(&last), "{last} of {}", names.len());
    consumer.shutdown().await.unwrap();
}

/// Bug: running ids with keys occupied places that are meant for other ids, so the member read no rows while they ran.
#[tokio::test(start_paused = true)]
async fn long_runs_do_not_keep_a_small_member_from_reading() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::doing(async |work: Work<Notification>| {
        if work.id() == b"long" {
            std::future::pending::<()>().await;
        }
        Ok(())
    });
    fixture.create(["long"]).await;
    let options = hinted().in_hand_max(1).max_concurrency(2);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    until("the run has a key", async || !fixture.is_none_deferred().await).await;
    fixture.create(["a", "b"]).await;
    log.until_names(&["a".to_owned(), "b".to_owned()]).await;
    drop(consumer);
}

/// Bug: deferred ids got no turn while long runs used half of the concurrency, so an id stayed deferred although its work would have
/// succeeded by then.
#[tokio::test(start_paused = true)]
async fn long_runs_do_not_keep_deferred_ids_from_their_turn() {
    let fixture = ConsumerFixture::new(1).await;
    let is_mended = Arc::new(AtomicBool::new(false));
    let mended = Arc::clone(&is_mended);
    let log = Ids::doing(move |work| {
        let (is_long, fails) = (work.id().starts_with(b"long"), !mended.load(Ordering::Relaxed));
        async move {
            if is_long {
                std::future::pending::<()>().await;
            }
            if fails { Err("it fails".into()) } else { Ok(()) }
        }
    });
    let options = hinted().attempts_max(1).max_concurrency(4).stall_limit(NEVER);
    let options = options.backoff_max(Duration::from_secs(1));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(["bad", "long1", "long2"]).await;
    until("all are deferred", async || fixture.handle().deferred(None, 10).await.unwrap().len() == 3).await;
    is_mended.store(true, Ordering::Relaxed);
    until("the mended one has its turn", async || {
        fixture.handle().deferred(None, 10).await.unwrap().len() == 2
    })
    .await;
    drop(consumer);
}

/// What each call of a handler learned about databases named `a`: the instance that is gone, and that of the row, unless it is a tombstone.
type Lives = Arc<Mutex<Vec<(Option<DbInstance>, Option<DbInstance>)>>>;

fn living(lives: &Lives, fails: impl Fn(&Work<Notification>) -> bool + Send + Sync + 'static) -> Ids {
    let lives = Arc::clone(lives);
    Ids::doing(move |work| {
        let row = work.row().filter(|row| !row.is_deleted()).map(|row| row.instance);
        lives.lock().unwrap().push((work.gone(), row));
        let fails = fails(&work);
        async move { if fails { Err("it fails".into()) } else { Ok(()) } }
    })
}

async fn change(fixture: &ConsumerFixture, instance: u8, lanes: [u64; 4], totals: [u64; 4]) {
    record(&fixture.store, &fixture.other, &db("a", instance), lanes).await;
    row_with(&fixture.other, &db("a", instance), totals).await;
}

/// Bug: the member forgot a failed attempt for a database if its successor came before the next attempt, so its end was never reported.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_database_whose_work_has_failed_is_reported() {
    let [one, two] = [1, 2].map(|instance| DbInstance([instance; 16]));
    for attempts_max in [1, 5] {
        let fixture = ConsumerFixture::new(1).await;
        let lives = Lives::default();
        let log = living(&lives, move |work| work.row().is_some_and(|row| row.instance == one));
        let slow = Duration::from_secs(20);
        let options = hinted().attempts_max(attempts_max).backoff_max(slow).backoff_min(slow);
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = member.run(log.handler()).await.unwrap();
        change(&fixture, 1, [1, 0, 0, 0], [1, 0, 0, 0]).await;
        log.until_calls(1).await;
        change(&fixture, 1, [0, 1, 0, 0], [1, 1, 0, 0]).await;
        change(&fixture, 2, [1, 0, 0, 0], [1, 0, 0, 0]).await;
        fixture.until_done().await;
        let seen = lives.lock().unwrap().clone();
        assert_eq!(seen[0], (None, Some(one)));
        assert_eq!(seen.last().unwrap().1, Some(two));
        assert!(seen.iter().any(|(gone, _)| *gone == Some(one)), "attempts {attempts_max}: {seen:?}");
        consumer.shutdown().await.unwrap();
    }
}

/// A database is deleted and created again while its id is deferred, and while its finished work has a key.
#[tokio::test(start_paused = true)]
async fn a_new_database_of_a_deferred_name_is_worked_on_at_once() {
    let [one, two] = [1, 2].map(|instance| DbInstance([instance; 16]));
    let fixture = ConsumerFixture::new(1).await;
    let lives = Lives::default();
    let log = living(&lives, move |work| work.row().is_some_and(|row| row.instance == one));
    let options = hinted().attempts_max(1).backoff_min(NEVER).backoff_max(NEVER);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    change(&fixture, 1, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    record(&fixture.store, &fixture.other, &db("a", 1), [0, 1, 0, 0]).await;
    change(&fixture, 2, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    fixture.until_done().await;
    let seen = lives.lock().unwrap().clone();
    assert_eq!(seen.last(), Some(&(Some(one), Some(two))), "{seen:?}");
    consumer.shutdown().await.unwrap();
}

/// Work on a database was committed, and its key says so when the database ends: the handler learns of the end once, then of the successor.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_database_with_finished_work_is_reported() {
    let fixture = ConsumerFixture::new(1).await;
    let (lives, store) = (Lives::default(), fixture.store.clone());
    let notes = Arc::clone(&lives);
    let log = Ids::doing(move |work| {
        let (notes, store) = (Arc::clone(&notes), store.clone());
        async move {
            let commit = async |tx: Transaction| {
                let state = work.commit_in(&tx).await?;
                tx.set(b"effect", b"");
                Ok(state)
            };
            let state = store.run(commit).await?;
            let row = work.row().filter(|row| !row.is_deleted()).map(|row| row.instance);
            assert!(!state.is_already_committed());
            notes.lock().unwrap().push((work.gone(), row));
            Ok(())
        }
    });
    let options = hinted().checkpoint_interval(Duration::from_mins(30));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options.clone());
    let consumer = member.run(log.handler()).await.unwrap();
    change(&fixture, 1, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    log.until_calls(1).await;
    change(&fixture, 1, [0, 1, 0, 0], [1, 1, 0, 0]).await;
    log.until_calls(2).await;
    change(&fixture, 2, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    log.until_calls(3).await;
    pass(Duration::from_secs(1)).await;
    let [one, two] = [1, 2].map(|instance| DbInstance([instance; 16]));
    let all = [(None, Some(one)), (Some(one), None), (None, Some(two))];
    let seen = lives.lock().unwrap().clone();
    assert_eq!(seen[..2], all[..2]);
    assert_eq!(seen[2].1, Some(two));
    // A crash before the checkpoint repeats none of this work.
    drop(consumer);
    let consumer = fixture.other_member().await.options(options).run(log.handler()).await.unwrap();
    consumer.caught_up().await.unwrap();
    assert_eq!(log.calls(), 3);
    consumer.shutdown().await.unwrap();
    fixture.until_done().await;
}

/// Bug: a member worked on the end of a database again after a crash although that work was committed, because ends are always wanted.
#[tokio::test(start_paused = true)]
async fn a_committed_end_is_not_worked_on_again_after_a_crash() {
    let fixture = ConsumerFixture::new(1).await;
    let log = counting_ids(&fixture);
    let options = hinted().checkpoint_interval(Duration::from_mins(30));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    change(&fixture, 1, [1, 1, 0, 0], [1, 1, 0, 0]).await;
    log.until_calls(1).await;
    pass(Duration::from_secs(1)).await;
    drop(consumer);
    let consumer = fixture.other_member().await.run(log.handler()).await.unwrap();
    fixture.until_done().await;
    assert_eq!(log.calls(), 1);
    consumer.shutdown().await.unwrap();
}

/// Bug: a request to work again on an id that was never deferred did not save the id's database, so if the database ended, and the work
/// failed until the tombstone was dropped, the handler never learned of the end. A second request must not forget the database, either.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_database_asked_for_again_is_reported_although_its_row_is_gone() {
    for asks_twice in [false, true] {
        let one = DbInstance([1; 16]);
        let fixture = ConsumerFixture::new(1).await;
        let (lives, fails) = (Lives::default(), Arc::new(AtomicBool::new(false)));
        let failing = Arc::clone(&fails);
        let log = living(&lives, move |_| failing.load(Ordering::Relaxed));
        let options = hinted().backoff_max(Duration::from_mins(1));
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = member.run(log.handler()).await.unwrap();
        change(&fixture, 1, [1, 0, 0, 0], [1, 0, 0, 0]).await;
        consumer.caught_up().await.unwrap();
        consumer.shutdown().await.unwrap();
        // For now, the consumer has no member.
        fails.store(true, Ordering::Relaxed);
        fixture.handle().again("a", false).await.unwrap();
        change(&fixture, 1, [0, 1, 0, 0], [1, 1, 0, 0]).await;
        let never = hinted().backoff_min(Duration::from_mins(1)).backoff_max(Duration::from_mins(1));
        let consumer = fixture.member().await.options(never).run(log.handler()).await.unwrap();
        let janitor = fixture.eager_janitor().await;
        until("the tombstone is dropped", async || {
            fixture.other.feed().newest(&"a".parse().unwrap()).await.unwrap().is_none()
        })
        .await;
        janitor.shutdown().await.unwrap();
        lives.lock().unwrap().clear();
        fails.store(false, Ordering::Relaxed);
        if asks_twice {
            assert_eq!(fixture.handle().again("a", true).await.unwrap(), 1);
        }
        fixture.until_done().await;
        let seen = lives.lock().unwrap().clone();
        assert!(seen.iter().any(|(gone, _)| *gone == Some(one)), "{seen:?}");
        consumer.shutdown().await.unwrap();
    }
}

/// New rows of an id whose work fails do not shorten its pause; the next attempt works on the newest row.
#[tokio::test(start_paused = true)]
async fn new_rows_do_not_shorten_the_pause_of_a_deferred_id() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        let updates = Arc::new(Mutex::new(Vec::new()));
        let (of_ids, of_rows) = (Arc::clone(&updates), Arc::clone(&updates));
        let ids = Ids::doing(move |work| {
            let count = work.row().unwrap().totals.updated;
            of_ids.lock().unwrap().push(count);
            async move { if count < 3 { Err("not yet".into()) } else { Ok(()) } }
        });
        let rows = Rows::doing(move |batch| {
            let count = batch.rows[0].totals.updated;
            of_rows.lock().unwrap().push(count);
            async move { if count < 3 { Err("not yet".into()) } else { Ok(()) } }
        });
        let pause = Duration::from_mins(1);
        let options = hinted().attempts_max(1).backoff_min(pause).backoff_max(pause);
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        fixture.create(["a"]).await;
        until("it is deferred", async || !fixture.is_none_deferred().await).await;
        for before in 0..3 {
            fixture.update("a", before).await;
            pass(Duration::from_secs(2)).await;
        }
        assert_eq!(updates.lock().unwrap().clone(), [0], "{is_ordered}");
        fixture.until_done().await;
        assert_eq!(updates.lock().unwrap().clone(), [0, 3], "{is_ordered}");
        consumer.shutdown().await.unwrap();
    }
}

/// However often an id changes, it is worked on once per debounce, and not later than one debounce after its first change.
#[tokio::test(start_paused = true)]
async fn changes_are_debounced() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::new();
    let options = hinted().debounce(Duration::from_secs(10));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(["a"]).await;
    for before in 0..30 {
        fixture.update("a", before).await;
        pass(Duration::from_secs(1)).await;
    }
    fixture.until_done().await;
    assert!((3..=5).contains(&log.calls()), "{}", log.calls());
    consumer.shutdown().await.unwrap();
}

/// A tenant with many slow ids leaves room for the others.
#[tokio::test(start_paused = true)]
async fn tenants_share_a_shard() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::doing(async |work: Work<Notification>| {
        if work.id().starts_with(b"slow") {
            tokio::time::sleep(Duration::from_secs(100)).await;
        }
        Ok(())
    });
    fixture.create(names("slow/", 40).into_iter().chain(names("fast/", 20))).await;
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(hinted().max_concurrency(3));
    let member = member.tenants(2, |id| bytes::Bytes::copy_from_slice(&id[..4]));
    let consumer = member.run(log.handler()).await.unwrap();
    log.until_names(&names("fast/", 20)).await;
    let slow = log.names().iter().filter(|name| name.starts_with("slow")).count();
    assert_eq!(slow, 2);
    drop(consumer);
}
