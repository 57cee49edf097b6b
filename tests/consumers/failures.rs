//! Handlers that fail, panic or hang: nothing is lost, and every failure is reported.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, Notification,
    consumer::{Batch, CloseReason, FailurePolicy, Handler, HandlerResult, Work},
    feed::ShardId,
    store::{StoreError, testing::Operation},
};
use tokio::time::Instant;

use crate::{
    common::{self, db, record, until, within},
    fixture::{ConsumerFixture, Log, hinted, names, pass},
};

type Ids = Log<Work<Notification>>;
type Rows = Log<Batch<Notification>>;

/// Other libraries skip the very first batch if its handler fails.
#[tokio::test(start_paused = true)]
async fn a_first_batch_that_fails_comes_again() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(names("db", 3)).await;
    let left = Arc::new(AtomicU64::new(2));
    let log = Rows::doing(move |_| {
        let fails =
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        async move { if fails { Err("not yet".into()) } else { Ok(()) } }
    });
    let options = hinted().failure(FailurePolicy::Hold);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run_batches(log.handler()).await.unwrap();
    fixture.until_done().await;
    consumer.shutdown().await.unwrap();
    // First the whole batch, then each row alone, and the first row twice because it fails again.
    assert_eq!(log.names(), ["db0", "db1", "db2", "db0", "db0", "db1", "db2"]);
    assert_eq!(fixture.bus.stats().consumer_failures, 2);
}

/// How the work fails on an id that holds its shard.
#[derive(Debug, Clone, Copy)]
enum Fails {
    Error,
    Panic,
    Stall,
}

/// With `FailurePolicy::Hold`, an id that fails holds back the checkpoint but no other ids, and gets no key.
#[tokio::test(start_paused = true)]
async fn a_failing_id_holds_the_checkpoint_and_nothing_else_if_it_is_to() {
    for how in [Fails::Error, Fails::Panic, Fails::Stall] {
        let fixture = ConsumerFixture::new(1).await;
        let all = names("db", 50);
        fixture.create(&all).await;
        let mended = Arc::new(AtomicBool::new(false));
        let is_mended = Arc::clone(&mended);
        let log = Ids::doing(move |work: Work<Notification>| {
            let fails = work.id() == b"db30" && !is_mended.load(Ordering::Relaxed);
            async move {
                match how {
                    _ if !fails => Ok(()),
                    Fails::Error => Err("it fails".into()),
                    Fails::Panic => panic!("it fails"),
                    Fails::Stall => std::future::pending().await,
                }
            }
        });
        let options = hinted().failure(FailurePolicy::Hold).attempts_max(2).max_concurrency(4);
        let options = options.stall_limit(Duration::from_secs(20)).backoff_max(Duration::from_secs(10));
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = member.run(log.handler()).await.unwrap();
        log.until_names(&all).await;
        pass(Duration::from_mins(5)).await;
        assert!(log.names().iter().filter(|name| *name == "db30").count() > 5, "{how:?}: it is tried again");
        assert!(fixture.is_none_deferred().await, "{how:?}");
        let mut places = Vec::new();
        for name in &all {
            places.push(fixture.other.feed().newest(&name.parse().unwrap()).await.unwrap().unwrap().sequence);
        }
        let behind = places.iter().filter(|place| **place >= places[30]).count();
        assert_eq!(fixture.behind().await, behind as u64, "{how:?}");
        mended.store(true, Ordering::Relaxed);
        fixture.until_done().await;
        for name in all.iter().filter(|name| *name != "db30") {
            assert_eq!(log.names().iter().filter(|given| *given == name).count(), 1, "{how:?}: {name}");
        }
        consumer.shutdown().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn only_the_rows_that_fail_are_deferred() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        let all: Vec<_> =
            names("good", 6).into_iter().chain(names("bad", 2)).chain(names("fine", 4)).collect();
        fixture.create(&all).await;
        let mended = Arc::new(AtomicBool::new(false));
        let (of_ids, of_rows) = (Arc::clone(&mended), Arc::clone(&mended));
        let why = || std::io::Error::other("the disk of the index is full");
        let ids = Ids::doing(move |work| {
            let fails = work.id().starts_with(b"bad") && !of_ids.load(Ordering::Relaxed);
            std::future::ready(if fails { Err(why().into()) } else { Ok(()) })
        });
        let rows = Rows::doing(move |batch| {
            let is_bad = batch.rows.iter().any(|row| row.name.as_str().starts_with("bad"));
            let fails = is_bad && !of_rows.load(Ordering::Relaxed);
            std::future::ready(if fails { Err(why().into()) } else { Ok(()) })
        });
        let options = hinted().attempts_max(3).backoff_max(Duration::from_mins(10));
        let options = options.backoff_min(Duration::from_millis(10));
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        consumer.caught_up().await.unwrap();
        let deferred = fixture.handle().deferred(None, 100).await.unwrap();
        assert_eq!(deferred.iter().map(|id| &id.id[..]).collect::<Vec<_>>(), ["bad0", "bad1"]);
        assert!(deferred.iter().all(|id| id.attempts >= 3 && id.error.contains("disk of the index")));
        let after = (deferred[0].shard, &deferred[0].id[..]);
        assert_eq!(fixture.handle().deferred(Some(after), 100).await.unwrap().len(), 1);
        assert_eq!(fixture.bus.stats().consumer_deferred, 2, "{is_ordered}");
        // The other ids continue. After a repair, a request delivers the deferred ids at once.
        fixture.create(names("new", 3)).await;
        consumer.caught_up().await.unwrap();
        pass(Duration::from_mins(2)).await;
        mended.store(true, Ordering::Relaxed);
        assert_eq!(fixture.handle().again("bad*", true).await.unwrap(), 2);
        fixture.until_done().await;
        consumer.shutdown().await.unwrap();
        let status = fixture.handle().status().await.unwrap();
        assert!(!status.has_deferred);
    }
}

/// Bug: the shard lost its count of attempts when it replaced a handler that had panicked, so a row that causes panics was never deferred.
#[tokio::test(start_paused = true)]
async fn a_row_at_which_the_handler_panics_is_deferred() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        fixture.create(["a", "bad", "z"]).await;
        let ids = Ids::doing(async |work: Work<Notification>| {
            assert!(work.id() != b"bad", "the handler has lost its head");
            Ok(())
        });
        let rows = Rows::doing(async |batch: Batch<Notification>| {
            let is_bad = batch.rows.iter().any(|row| row.name.as_str() == "bad");
            assert!(!is_bad, "the handler has lost its head");
            Ok(())
        });
        let options = hinted().attempts_max(3).backoff_max(Duration::from_mins(1));
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        until("it is deferred", async || !fixture.is_none_deferred().await).await;
        let deferred = fixture.handle().deferred(None, 9).await.unwrap();
        assert!(deferred[0].id == "bad" && deferred[0].error.contains("lost its head"), "{deferred:?}");
        consumer.caught_up().await.unwrap();
        let got = if is_ordered { rows.names() } else { ids.names() };
        assert!(got.contains(&"z".to_owned()));
        let stats = fixture.bus.stats();
        assert!(stats.consumer_panics >= 3 && stats.work_panics == 0, "{is_ordered}");
        consumer.shutdown().await.unwrap();
    }
}

/// Bug: the shard counted attempts on a row that then moved away for the row after it, so that row was deferred too early.
#[tokio::test(start_paused = true)]
async fn attempts_of_one_row_do_not_count_for_another() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(["x"]).await;
    fixture.create(["y"]).await;
    let failed: Arc<Mutex<Vec<String>>> = Arc::default();
    let notes = Arc::clone(&failed);
    let log = Rows::doing(move |batch| {
        let name = batch.rows[0].name.to_string();
        let fails = batch.rows[0].totals.updated == 0
            && notes.lock().unwrap().iter().filter(|n| **n == name).count() < 4;
        if fails {
            notes.lock().unwrap().push(name);
        }
        async move { if fails { Err("not yet".into()) } else { Ok(()) } }
    });
    let second = Duration::from_secs(10);
    let options = hinted().batch_rows_max(1).backoff_min(second).backoff_max(second);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run_batches(log.handler()).await.unwrap();
    until("x has failed four times", async || failed.lock().unwrap().len() == 4).await;
    fixture.update("x", 0).await;
    fixture.until_done().await;
    assert_eq!(fixture.bus.stats().consumer_deferred, 0, "y has failed four times, not five");
    consumer.shutdown().await.unwrap();
}

/// A row that always fails is replaced between attempts by a newer one, which comes after rows that succeed. Regression: the shard counted
/// attempts on the newer row from one, so the id was never deferred, and held up its shard for as long as it was updated.
#[tokio::test(start_paused = true)]
async fn a_failing_row_is_deferred_however_often_its_id_is_updated() {
    let fixture = ConsumerFixture::new(1).await;
    fixture.create(["able", "bad"]).await;
    let (store, bus) = (fixture.store.clone(), fixture.other.clone());
    let log = Rows::doing(move |batch| {
        let (store, bus) = (store.clone(), bus.clone());
        async move {
            if batch.rows.iter().all(|row| row.name.as_str() != "bad") {
                return Ok(());
            }
            for name in ["able", "bad"] {
                record(&store, &bus, &db(name, 1), [0, 0, 1, 0]).await;
            }
            Err("never".into())
        }
    });
    let options =
        hinted().attempts_max(3).backoff_min(Duration::from_secs(1)).backoff_max(Duration::from_hours(1));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run_batches(log.handler()).await.unwrap();
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    let calls = log.names().iter().filter(|name| *name == "bad").count();
    assert!(calls <= 7, "{calls} calls: alone, and with others, for each of three attempts");
    consumer.shutdown().await.unwrap();
}

/// Handlers that panic in the first `panics` calls of `opened`: in the call itself (`in_call`), or in its future.
#[derive(Clone)]
struct Shy {
    panics: Arc<AtomicU64>,
    in_call: bool,
    closed: Arc<Mutex<Vec<CloseReason>>>,
    got: Arc<Mutex<Vec<String>>>,
}

impl Shy {
    fn opens(&self) {
        let is_due = |left: u64| left.checked_sub(1);
        let has_panicked = self.panics.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_due).is_ok();
        assert!(!has_panicked, "it does not want to begin");
    }

    fn opened(&self) -> impl Future<Output = ()> + Send + use<> {
        if self.in_call {
            self.opens();
        }
        let later = (!self.in_call).then(|| self.clone());
        async move {
            if let Some(shy) = later {
                shy.opens();
            }
        }
    }
}

impl Handler<Batch<Notification>> for Shy {
    fn opened(&self, _: ShardId) -> impl Future<Output = ()> + Send {
        Shy::opened(self)
    }

    async fn handle(&self, batch: Batch<Notification>) -> HandlerResult {
        self.got.lock().unwrap().extend(batch.rows.iter().map(|row| row.name.to_string()));
        Ok(())
    }

    async fn closed(&self, _: ShardId, reason: CloseReason) {
        self.closed.lock().unwrap().push(reason);
    }
}

impl Handler<Work<Notification>> for Shy {
    fn opened(&self, _: ShardId) -> impl Future<Output = ()> + Send {
        Shy::opened(self)
    }

    async fn handle(&self, work: Work<Notification>) -> HandlerResult {
        self.got.lock().unwrap().push(work.row().unwrap().name.to_string());
        Ok(())
    }

    async fn closed(&self, _: ShardId, reason: CloseReason) {
        self.closed.lock().unwrap().push(reason);
    }
}

/// Regression: the shard only logged a panic in `opened`, so the same handler got rows although its state was undefined. It did not even
/// catch a panic in the call itself, before there is a future, so that panic ended the task of the shard.
#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_when_it_is_opened_gets_nothing() {
    for (is_ordered, in_call) in [(false, false), (false, true), (true, false), (true, true)] {
        let fixture = ConsumerFixture::new(1).await;
        fixture.create(names("db", 3)).await;
        let shy =
            Shy { panics: Arc::new(AtomicU64::new(3)), in_call, closed: Arc::default(), got: Arc::default() };
        let member = fixture.member().await.start_from(Cursor::BEGINNING);
        let made = shy.clone();
        let consumer = if is_ordered {
            member.run_batches(shy.clone()).await.unwrap()
        } else {
            member.run_with(move |_| made.clone()).await.unwrap()
        };
        fixture.until_done().await;
        consumer.shutdown().await.unwrap();
        let stats = fixture.bus.stats();
        assert_eq!((stats.consumer_panics, stats.work_panics), (3, 0), "{is_ordered}, in call: {in_call}");
        let mut got = shy.got.lock().unwrap().clone();
        got.sort_unstable();
        assert_eq!(got, names("db", 3));
        let closed = [[CloseReason::Panicked; 3].as_slice(), &[CloseReason::Shutdown]].concat();
        assert_eq!(*shy.closed.lock().unwrap(), closed, "each is closed, once");
    }
}

/// A handler that hangs is dropped at shutdown, and the next member works on its rows.
#[tokio::test(start_paused = true)]
async fn a_handler_that_hangs_is_dropped_at_the_end() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        fixture.create(["a"]).await;
        let hang = async |()| -> HandlerResult { std::future::pending().await };
        let ids = Ids::doing(move |_| hang(()));
        let rows = Rows::doing(move |_| hang(()));
        let member = fixture.member().await.start_from(Cursor::BEGINNING);
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        until("it hangs", async || ids.calls() + rows.calls() == 1).await;
        let began = Instant::now();
        consumer.shutdown().await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        let log = Ids::new();
        let heir = fixture.other_member().await.run(log.handler()).await.unwrap();
        fixture.until_done().await;
        assert_eq!(log.names(), ["a"]);
        heir.shutdown().await.unwrap();
    }
}

/// Bug: a shard reset the timer of its poll for rows whenever a deferred id was due, so without hints it was never polled while an id
/// failed more often than the poll was due.
#[tokio::test(start_paused = true)]
async fn a_failing_id_does_not_put_off_the_poll_for_rows() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        let ids = Ids::doing(
            async |work: Work<Notification>| {
                if work.id() == b"bad" { Err("it is bad".into()) } else { Ok(()) }
            },
        );
        let rows = Rows::doing(async |batch: Batch<Notification>| {
            let is_bad = batch.rows.iter().any(|row| row.name.as_str() == "bad");
            if is_bad { Err("it is bad".into()) } else { Ok(()) }
        });
        fixture.create(["bad"]).await;
        let options = notibus::consumer::ConsumerOptions::default();
        let options = options.attempts_max(1).backoff_max(Duration::from_secs(5));
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        until("it is deferred", async || !fixture.is_none_deferred().await).await;
        pass(Duration::from_secs(30)).await;
        // Make all reads of the pulse of the feed fail.
        fixture.faults.plan_reads(|operation| match operation {
            Operation::Get { key, .. } => key.starts_with(b"notibus\x15\x0f").then_some(StoreError::IO_ERROR),
            Operation::GetRange { range, .. } => {
                range.end.starts_with(b"notibus\x15\x0f").then_some(StoreError::IO_ERROR)
            }
            _ => None,
        });
        fixture.create(["good"]).await;
        let got = || if is_ordered { rows.names() } else { ids.names() };
        until("it is polled", async || got().contains(&"good".to_owned())).await;
        drop(consumer);
    }
}

/// A handler that hangs in `closed`.
#[derive(Clone)]
struct Clinging;

impl Handler<Work<Notification>> for Clinging {
    async fn handle(&self, _: Work<Notification>) -> HandlerResult {
        Ok(())
    }

    async fn closed(&self, _: ShardId, _: CloseReason) {
        std::future::pending::<()>().await;
    }
}

impl Handler<Batch<Notification>> for Clinging {
    async fn handle(&self, _: Batch<Notification>) -> HandlerResult {
        Ok(())
    }

    async fn closed(&self, _: ShardId, _: CloseReason) {
        std::future::pending::<()>().await;
    }
}

/// A handler that hangs in `closed` holds up its shard, but not the shutdown, and the next member continues.
#[tokio::test(start_paused = true)]
async fn a_handler_that_does_not_close_is_dropped_at_the_end() {
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        fixture.create(["a"]).await;
        let member = fixture.member().await.start_from(Cursor::BEGINNING);
        let consumer = if is_ordered {
            member.run_batches(Clinging).await.unwrap()
        } else {
            member.run(Clinging).await.unwrap()
        };
        fixture.until_done().await;
        fixture.other.feed().reshard(2, None).await.unwrap();
        fixture.create(["b"]).await;
        // The handler is dropped when the time for a handover is over, and another handler works on the successors.
        fixture.until_done().await;
        within("the shutdown", consumer.shutdown()).await.unwrap();
    }
}

/// Regression: a shard could not decode a row written by another version of the program, and retried forever. Such a row is skipped,
/// counted and logged, whatever the policy for rows that fail.
#[tokio::test(start_paused = true)]
async fn a_row_that_cannot_be_decoded_is_skipped() {
    for (is_ordered, failure) in [
        (false, FailurePolicy::Defer),
        (false, FailurePolicy::Hold),
        (true, FailurePolicy::Defer),
        (true, FailurePolicy::Hold),
    ] {
        let fixture = ConsumerFixture::new(1).await;
        fixture.create(["a", "b", "c"]).await;
        let rows = common::stored(&fixture.store, b"notibus\x15\x04").await;
        common::set(&fixture.store, &rows[1].0, b"spoilt").await;
        let (ids, batches) = (Ids::new(), Rows::new());
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(hinted().failure(failure));
        let consumer = if is_ordered {
            member.run_batches(batches.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        fixture.until_done().await;
        consumer.shutdown().await.unwrap();
        let mut got = [ids.names(), batches.names()].concat();
        got.sort_unstable();
        assert_eq!(got, ["a", "c"], "ordered: {is_ordered}, {failure:?}");
        assert_eq!((fixture.bus.skipped_rows().len(), fixture.bus.stats().consumer_failures), (1, 0));
    }
}

/// Reads that fail for a long time are reported, but do not end the consumer.
#[tokio::test(start_paused = true)]
async fn a_store_that_fails_is_waited_for() {
    let fixture = ConsumerFixture::new(2).await;
    let log = Ids::new();
    let options = hinted().poll_interval(Duration::from_secs(5));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    pass(Duration::from_secs(5)).await;
    // Only reads of rows fail, so that the node stays alive.
    fixture.faults.plan_reads(|operation| match operation {
        Operation::GetRange { range, .. } if range.begin.starts_with(b"notibus\x15\x04") => {
            Some(StoreError::IO_ERROR)
        }
        _ => None,
    });
    fixture.create(["a"]).await;
    pass(Duration::from_mins(5)).await;
    assert!(log.names().is_empty());
    fixture.faults.heal();
    fixture.until_done().await;
    consumer.shutdown().await.unwrap();
    assert_eq!(log.names(), ["a"]);
}

/// The attempts on a deferred id are counted in its key, so a new member continues the count, and the pauses continue to grow. Bug: a pause in
/// an embedded store was counted from the last commit, so it was too short by up to a heartbeat. Fix: it is counted from the store's clock.
#[tokio::test(start_paused = true)]
async fn the_pauses_of_a_deferred_id_grow_over_restarts() {
    let fixture = ConsumerFixture::new(1).await;
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&attempts);
    let log = Ids::doing(move |work| {
        seen.lock().unwrap().push((work.attempt(), Instant::now()));
        std::future::ready(Err("never".into()))
    });
    fixture.create(["a"]).await;
    let options = hinted().attempts_max(1).backoff_min(Duration::from_millis(100));
    for attempt in 1..=7_u32 {
        let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options.clone());
        let consumer = member.run(log.handler()).await.unwrap();
        let deferred = async || fixture.handle().deferred(None, 1).await.unwrap().pop();
        until("it fails", async || deferred().await.is_some_and(|id| id.attempts == attempt)).await;
        let left = Duration::from_millis(deferred().await.unwrap().due_in_ms);
        // The attempt may have been made while the member was still starting.
        let passed = attempts.lock().unwrap().last().unwrap().1.elapsed();
        let longest = Duration::from_millis(100 << (attempt - 1));
        assert!(left <= longest && left + passed >= longest / 2, "{left:?} after attempt {attempt}");
        if attempt % 2 == 0 {
            consumer.shutdown().await.unwrap();
        }
    }
    assert!(attempts.lock().unwrap().iter().map(|(attempt, _)| *attempt).eq(1..=7));
}
