//! Interleavings of members, operators and the janitor, most of them found by reasoning, the others by simulated worlds.

use std::{
    ops::Deref,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use notibus::{
    Cursor, DbInstance, Error, EventKind, Filter, JanitorOptions, Notification,
    changes::ChangesOptions,
    consumer::{Batch, ConsumerSettings, HandlerResult, Run, Work},
    cursor::Start,
    feed::ShardId,
    store::{
        AtomicOp, Store, StoreError, Transaction,
        testing::{Attempt, CommitFault, Gate, Operation},
    },
};
use tokio::sync::{Notify, watch};

use crate::{
    common::{counts, db, joined, record, row_with, until, within},
    fixture::{ConsumerFixture, Log, counter, hinted, names, pass},
    reshards::moves_a_key,
};

type Ids = Log<Work<Notification>>;

/// A run calls `commit_in`, finds that there is nothing to write, and succeeds without a commit. Regression: the shard treated a newer row
/// that had arrived during the run as finished because its id had no key, so the row was lost.
#[tokio::test(start_paused = true)]
async fn a_row_after_a_run_that_did_not_commit_is_not_lost() {
    let fixture = ConsumerFixture::new(1).await;
    let (goes_on, store) = (Arc::new(Notify::new()), fixture.store.clone());
    let opened = Arc::clone(&goes_on);
    let log = Ids::doing(move |work: Work<Notification>| {
        let (store, opened) = (store.clone(), Arc::clone(&opened));
        async move {
            if work.row().unwrap().totals.updated == 0 {
                let tx = store.begin();
                assert!(!work.commit_in(&tx).await?.is_already_committed());
                opened.notified().await;
                return Ok(());
            }
            let effect = async |tx: Transaction| {
                if !work.commit_in(&tx).await?.is_already_committed() {
                    tx.atomic(AtomicOp::Add, b"effects", &1_u64.to_le_bytes());
                }
                Ok(())
            };
            Ok(store.run(effect).await?)
        }
    });
    let options = hinted().checkpoint_interval(Duration::from_mins(1));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(["a"]).await;
    log.until_calls(1).await;
    fixture.update("a", 0).await;
    pass(Duration::from_secs(1)).await;
    goes_on.notify_one();
    log.until_calls(2).await;
    fixture.until_done().await;
    assert_eq!(counter(&fixture.store, b"effects").await, 1);
    consumer.shutdown().await.unwrap();
}

/// A member outlives its consumer because the feed of its documents is removed, and nobody watches `ended`. A consumer of another feed gets
/// the same name. Regression: the old member took the leases of the new consumer, found its own feed gone, and so removed the new consumer.
#[tokio::test(start_paused = true)]
async fn a_member_of_a_feed_that_is_gone_leaves_the_next_consumer_of_the_name_alone() {
    let fixture = ConsumerFixture::new(1).await;
    let (changes, old, new) = (fixture.bus.changes(), db("docs", 1), db("docs", 2));
    let options = ChangesOptions::default().shards(1);
    fixture.store.run(async |tx| changes.create(&tx, &old, &options).await).await.unwrap();
    let log = Log::<Work<notibus::changes::Change>>::new();
    let member = fixture.member().await.documents(&changes.feed(&old));
    let consumer = member.start_from(Cursor::BEGINNING).run(log.handler()).await.unwrap();
    until("it has its shard", async || !consumer.shards().is_empty()).await;
    let replace = async |tx: Transaction| {
        changes.remove(&tx, &old);
        changes.create(&tx, &new, &options).await?;
        Ok(())
    };
    fixture.store.run(replace).await.unwrap();
    record(&fixture.store, &fixture.other, &old, [0, 0, 1, 0]).await;
    within("it ends", consumer.ended()).await;
    let settings =
        ConsumerSettings::default().documents(Some(new.instance)).start(Start::At(Cursor::BEGINNING));
    assert!(fixture.handle().create(&settings).await.unwrap());
    pass(Duration::from_mins(2)).await;
    let status = fixture.handle().status().await;
    assert!(status.is_ok(), "{status:?}");
    drop(consumer);
}

/// A consumer is deleted and created again with another filter, while an earlier member is still running. Regression: the member worked on
/// the shards of the new consumer with its own filter, so rows that only the new consumer wants were lost.
#[tokio::test(start_paused = true)]
async fn a_member_with_the_filter_of_before_works_for_no_consumer_of_the_name() {
    let fixture = ConsumerFixture::new(1).await;
    let (old, new) = (Ids::new(), Ids::new());
    let filter = Filter::glob("x*").unwrap();
    let member = fixture.member().await.filter(filter).start_from(Cursor::BEGINNING);
    let before = member.run(old.handler()).await.unwrap();
    fixture.create(["x1"]).await;
    old.until_calls(1).await;
    fixture.handle().delete(true).await.unwrap();
    pass(Duration::from_secs(10)).await;
    assert!(fixture.handle().create(&ConsumerSettings::default()).await.unwrap());
    pass(Duration::from_secs(10)).await;
    fixture.create(["x2", "wanted"]).await;
    let ended = within("it is informed", before.ended()).await;
    assert!(matches!(ended, Error::NoConsumer { .. }), "{ended}");
    pass(Duration::from_mins(2)).await;
    before.shutdown().await.unwrap();
    let consumer = fixture.other_member().await.run(new.handler()).await.unwrap();
    fixture.until_done().await;
    consumer.shutdown().await.unwrap();
    let got = [old.names(), new.names()].concat();
    assert!(got.contains(&"wanted".to_owned()), "{got:?}");
}

/// Bug, found by simulated worlds: a cancelled run no longer held the checkpoint back although its key was not written yet, so when the
/// member was shut down, no handler ever learned of the end of the database.
#[tokio::test(start_paused = true)]
async fn a_cancelled_run_whose_key_cannot_be_written_is_not_passed() {
    let fixture = ConsumerFixture::new(1).await;
    let hangs = Ids::doing(async |_| std::future::pending().await);
    let member = fixture.member().await.start_from(Cursor::BEGINNING);
    let consumer = member.run(hangs.handler()).await.unwrap();
    change(&fixture, 1, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    hangs.until_calls(1).await;
    let writes = |attempt: &Attempt| {
        let deferred = |operation: &Operation| matches!(operation, Operation::Set { key, .. } if key.starts_with(b"notibus\x15\x19\x15\x02"));
        let is_key = attempt.mutations().any(deferred);
        is_key.then_some(CommitFault::Before(StoreError::TRANSACTION_TIMED_OUT))
    };
    fixture.faults.plan_commits(writes);
    change(&fixture, 1, [0, 1, 0, 0], [1, 1, 0, 0]).await;
    pass(Duration::from_secs(3)).await;
    consumer.shutdown().await.unwrap();
    fixture.faults.heal();
    let kinds = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&kinds);
    let log = Ids::doing(move |work: Work<Notification>| {
        notes.lock().unwrap().push(work.news().unwrap().kinds());
        async { Ok(()) }
    });
    let heir = fixture.other_member().await.run(log.handler()).await.unwrap();
    fixture.until_done().await;
    let all = kinds.lock().unwrap().iter().any(|kinds| kinds.contains(EventKind::Created));
    assert!(all, "nobody has finished the work on the creation: {kinds:?}");
    heir.shutdown().await.unwrap();
}

/// A consumer in empty shards has caught up only when it has begun to read the shards after them.
#[tokio::test(start_paused = true)]
async fn who_stands_in_empty_shards_has_not_caught_up() {
    let fixture = ConsumerFixture::new(2).await;
    let log = Ids::new();
    let member = fixture.member().await.start_from(Cursor::BEGINNING);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(names("db", 8)).await;
    fixture.until_done().await;
    fixture.handle().pause().await.unwrap();
    let feed = fixture.other.feed();
    feed.reshard(1, None).await.unwrap();
    for name in names("db", 8) {
        fixture.update(&name, 0).await;
    }
    let options = JanitorOptions::default().interval(Duration::from_millis(100));
    let janitor = joined(&fixture.other).await.janitor(options).await.unwrap();
    pass(Duration::from_secs(30)).await;
    assert_eq!(feed.topology().await.unwrap().len(), 2, "the paused consumer stands in the empty entry");
    assert_eq!((log.calls(), fixture.behind().await), (8, 8));
    let early = tokio::time::timeout(Duration::from_secs(10), consumer.caught_up()).await;
    assert!(early.is_err(), "{early:?}");
    fixture.handle().resume().await.unwrap();
    within("it catches up", consumer.caught_up()).await.unwrap();
    assert_eq!(log.calls(), 16);
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// A row that waits for a consumer moves when its database changes. Regression: a barrier from before the change treated the row as later
/// work, so it claimed that the consumer had caught up.
#[tokio::test(start_paused = true)]
async fn a_row_that_moves_holds_a_barrier_from_before() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::new();
    let consumer = fixture.member().await.start_from(Cursor::BEGINNING).run(log.handler()).await.unwrap();
    fixture.handle().pause().await.unwrap();
    fixture.create(["a"]).await;
    let version = fixture.store.begin().read_version().await.unwrap();
    let barriers = futures_util::future::try_join(consumer.caught_up(), consumer.wait_until(version));
    let mut barriers = Box::pin(barriers);
    assert!(tokio::time::timeout(Duration::from_secs(10), &mut barriers).await.is_err());
    fixture.update("a", 0).await;
    let early = tokio::time::timeout(Duration::from_secs(10), &mut barriers).await;
    assert!(early.is_err(), "nobody has worked on the creation: {early:?}");
    fixture.handle().resume().await.unwrap();
    within("it catches up", barriers).await.unwrap();
    assert_eq!(log.calls(), 1);
    consumer.shutdown().await.unwrap();
}

/// The store fails in the middle of a pass over the keys. Regression: the member forgot the due ids that the pass had found, and did not
/// look for them again, so they were never worked on.
#[tokio::test(start_paused = true)]
async fn due_ids_are_not_forgotten_when_the_store_fails() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::new();
    fixture.create(names("db", 9)).await;
    let handle = fixture.handle();
    let consumer = fixture.member().await.run(log.handler()).await.unwrap();
    pass(Duration::from_mins(1)).await;
    let failures = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&failures);
    fixture.faults.plan_reads(move |operation| match operation {
        // This read is for the page after the one with the due ids.
        Operation::GetRange { range, .. }
            if range.begin.starts_with(b"notibus\x15\x19\x15\x02")
                && range.begin.windows(3).any(|id| id == b"db7") =>
        {
            (count.fetch_add(1, Ordering::Relaxed) == 0).then_some(StoreError::IO_ERROR)
        }
        _ => None,
    });
    assert_eq!(handle.again("*", false).await.unwrap(), 9);
    pass(Duration::from_mins(30)).await;
    assert!(failures.load(Ordering::Relaxed) > 0);
    assert_eq!(log.calls(), 9);
    consumer.shutdown().await.unwrap();
}

async fn change(fixture: &ConsumerFixture, instance: u8, lanes: [u64; 4], totals: [u64; 4]) {
    record(&fixture.store, &fixture.other, &db("a", instance), lanes).await;
    row_with(&fixture.other, &db("a", instance), totals).await;
}

/// Work on a database is requested again, and the database is replaced before that work ends. Regression: the key of the request did not
/// name the database, so the work on the replaced database continued.
#[tokio::test(start_paused = true)]
async fn work_asked_for_is_cancelled_when_its_database_is_replaced() {
    let fixture = ConsumerFixture::new(1).await;
    let instances = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&instances);
    let log = Ids::doing(move |work: Work<Notification>| {
        let hangs = work.is_again() && work.row().unwrap().instance == DbInstance([1; 16]);
        notes.lock().unwrap().push(work.row().unwrap().instance);
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    });
    let options = hinted().stall_limit(Duration::from_hours(10));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    change(&fixture, 1, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    fixture.until_done().await;
    fixture.handle().again("a", false).await.unwrap();
    log.until_calls(2).await;
    let (producer, old, new) = (fixture.other.producer(), db("a", 1), db("a", 2));
    let replace = async |tx: Transaction| {
        producer.record_all(&tx, &old, &counts([0, 1, 0, 0]))?;
        producer.record_all(&tx, &new, &counts([1, 0, 0, 0]))?;
        Ok(())
    };
    fixture.store.run(replace).await.unwrap();
    log.until_calls(3).await;
    assert_eq!(instances.lock().unwrap().last(), Some(&DbInstance([2; 16])));
    drop(consumer);
}

/// Work on a database is requested again, and the database ends while other deferred ids occupy all places. Regression: the member skipped
/// the tombstone, which was then dropped, so the handler never learned of the end.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_database_asked_for_again_is_reported_however_long_it_waits() {
    let fixture = ConsumerFixture::new(1).await;
    let (goes_on, received) = watch::channel(false);
    let ends = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&ends);
    let log = Ids::doing(move |work: Work<Notification>| {
        if work.id() == b"a" {
            notes.lock().unwrap().push(work.gone());
        }
        let hangs = work.id() == b"slow" && work.is_again();
        let mut received = received.clone();
        async move {
            if hangs {
                received.wait_for(|goes_on| *goes_on).await?;
            }
            Ok(())
        }
    });
    let options = hinted().max_concurrency(2).stall_limit(Duration::from_hours(10));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    change(&fixture, 1, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    fixture.create(["slow"]).await;
    fixture.until_done().await;
    fixture.handle().again("slow", false).await.unwrap();
    log.until_calls(3).await;
    fixture.handle().again("a", false).await.unwrap();
    // By now the member knows about the key.
    pass(Duration::from_secs(10)).await;
    change(&fixture, 1, [0, 1, 0, 0], [1, 1, 0, 0]).await;
    let janitor = fixture.eager_janitor().await;
    until("the tombstone is dropped", async || {
        fixture.other.feed().newest(&"a".parse().unwrap()).await.unwrap().is_none()
    })
    .await;
    goes_on.send_replace(true);
    fixture.until_done().await;
    let seen = ends.lock().unwrap().clone();
    assert!(seen.contains(&Some(DbInstance([1; 16]))), "{seen:?}");
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// The function that returns the tenant of an id panics for one id: the other ids in its shard continue.
#[tokio::test(start_paused = true)]
async fn an_id_whose_tenant_is_not_known_holds_nobody_up() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::new();
    fixture.create(names("db", 4)).await;
    let member = fixture.member().await.start_from(Cursor::BEGINNING);
    let member = member.tenants(2, |id| {
        assert_ne!(id, b"db1", "as planned");
        bytes::Bytes::copy_from_slice(id)
    });
    let consumer = member.run(log.handler()).await.unwrap();
    pass(Duration::from_mins(10)).await;
    let got = log.names();
    assert!(got.contains(&"db3".to_owned()), "{got:?}");
    drop(consumer);
}

/// If the tenant of an id changes while the id runs, the counts of both tenants remain right.
#[tokio::test(start_paused = true)]
async fn a_tenant_may_change_while_its_id_runs() {
    let fixture = ConsumerFixture::new(1).await;
    let has_changed = Arc::new(AtomicBool::new(false));
    let (of_tenants, of_handler) = (Arc::clone(&has_changed), Arc::clone(&has_changed));
    let log = Ids::doing(move |_: Work<Notification>| {
        of_handler.store(true, Ordering::Relaxed);
        async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            Ok(())
        }
    });
    fixture.create(names("db", 4)).await;
    let member = fixture.member().await.start_from(Cursor::BEGINNING);
    let member = member.tenants(1, move |_| {
        bytes::Bytes::from_static(if of_tenants.load(Ordering::Relaxed) { b"new" } else { b"old" })
    });
    let consumer = member.run(log.handler()).await.unwrap();
    pass(Duration::from_mins(10)).await;
    assert_eq!(log.calls(), 4);
    fixture.until_done().await;
    consumer.shutdown().await.unwrap();
}

/// A panic while an error is formatted counts as a failure of the error's id, and of no other.
#[tokio::test(start_paused = true)]
async fn an_error_that_panics_holds_nobody_up() {
    #[derive(Debug)]
    struct Bad;
    impl std::fmt::Display for Bad {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("as planned")
        }
    }
    impl std::error::Error for Bad {}
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::doing(async |work: Work<Notification>| {
        if work.id() == b"db0" {
            return Err(Bad.into());
        }
        Ok(())
    });
    fixture.create(names("db", 2)).await;
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(hinted().attempts_max(1));
    let consumer = member.run(log.handler()).await.unwrap();
    pass(Duration::from_mins(10)).await;
    assert_eq!(fixture.behind().await, 0);
    assert_eq!(fixture.handle().deferred(None, 10).await.unwrap().len(), 1);
    drop(consumer);
}

/// Work is requested again on many ids that the consumer does not want. Skipping their keys does not delay rows.
#[tokio::test(start_paused = true)]
async fn keys_of_what_nobody_wants_leave_rows_their_turn() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::new();
    fixture.create(names("db", 400)).await;
    let member = fixture.member().await.start_from(Cursor::BEGINNING).filter(Filter::glob("x*").unwrap());
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.create(["x0"]).await;
    log.until_calls(1).await;
    fixture.until_done().await;
    fixture.faults.delay_reads(Duration::from_millis(20));
    fixture.handle().again("db*", false).await.unwrap();
    pass(Duration::from_secs(6)).await;
    let left = fixture.handle().deferred(None, 1_000).await.unwrap().len();
    assert!((1..400).contains(&left), "{left} are left");
    fixture.create(["x1"]).await;
    let began = tokio::time::Instant::now();
    log.until_calls(2).await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    fixture.until_done().await;
    drop(consumer);
}

/// A page of requests to work again can be written within the lifetime of a transaction, even if reads are slow.
#[tokio::test(start_paused = true)]
async fn many_requests_fit_a_transaction_in_a_slow_store() {
    let fixture = ConsumerFixture::new(4).await;
    fixture.create(names("db", 250)).await;
    fixture.handle().create(&ConsumerSettings::default()).await.unwrap();
    fixture.faults.delay_reads(Duration::from_millis(10));
    let handle = fixture.bus.consumer("c").unwrap();
    assert_eq!(within("all are asked for", handle.again("*", false)).await.unwrap(), 250);
}

/// A key moves to a successor that has already looked for keys. The id is worked on at once, although another shard is not drained.
#[tokio::test(start_paused = true)]
async fn a_key_that_moves_late_is_found_by_the_successor() {
    let fixture = ConsumerFixture::new(2).await;
    let (goes_on, received) = watch::channel(false);
    let gate = Gate::default();
    let is_mended = Arc::new(AtomicBool::new(false));
    let mended = Arc::clone(&is_mended);
    let log = Log::doing(move |batch: Batch<Notification>| {
        let (mut received, is_new) = (received.clone(), batch.rows[0].totals.updated == 0);
        let fails = batch.shard() != ShardId(2) && !is_new && !mended.load(Ordering::Relaxed);
        async move {
            if batch.shard() == ShardId(2) && !is_new {
                received.wait_for(|goes_on| *goes_on).await?;
            }
            if fails { Err("not yet".into()) } else { Ok(()) }
        }
    });
    let pause = Duration::from_secs(20);
    let options = hinted().attempts_max(1).backoff_min(pause).backoff_max(pause);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run_batches(log.handler()).await.unwrap();
    fixture.create(names("db", 8)).await;
    fixture.until_done().await;
    let feed = fixture.other.feed();
    let first_of = async |shard| {
        let page = feed.shard_page(ShardId(shard), Cursor::BEGINNING, 1).await.unwrap();
        page.rows[0].name.to_string()
    };
    let (deferred, held) = (first_of(1).await, first_of(2).await);
    fixture.update(&deferred, 0).await;
    fixture.update(&held, 0).await;
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    let closed = gate.clone();
    fixture
        .faults
        .plan_commits(move |attempt| moves_a_key(attempt).then(|| CommitFault::Hold(closed.clone())));
    feed.reshard(1, None).await.unwrap();
    within("a move is about to be committed", gate.reached()).await;
    until("it has the successor", async || consumer.shards().contains(&ShardId(3))).await;
    pass(Duration::from_secs(4)).await;
    is_mended.store(true, Ordering::Relaxed);
    fixture.faults.heal();
    gate.open();
    until("it is worked on in the successor", async || fixture.is_none_deferred().await).await;
    goes_on.send_replace(true);
    fixture.until_done().await;
    consumer.shutdown().await.unwrap();
}

/// Finished ids have keys too, until the checkpoint has passed them. They must not hide an id that failed.
#[tokio::test(start_paused = true)]
async fn a_deferred_id_is_reported_beside_many_finished_ones() {
    let fixture = ConsumerFixture::new(1).await;
    let store = fixture.store.clone();
    let log = Ids::doing(move |work: Work<Notification>| {
        let store = store.clone();
        async move {
            if work.id() == b"zz" {
                return Err("it fails".into());
            }
            store.run(async |tx: Transaction| work.commit_in(&tx).await.map(drop)).await?;
            Ok(())
        }
    });
    fixture.create(names("db", 120)).await;
    fixture.create(["zz"]).await;
    let pause = Duration::from_hours(1);
    let options = hinted().attempts_max(1).backoff_min(pause).backoff_max(pause).checkpoint_interval(pause);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    log.until_calls(121).await;
    pass(Duration::from_secs(1)).await;
    assert!(fixture.handle().status().await.unwrap().has_deferred);
    drop(consumer);
}

/// Deferred ids of a tenant that is at its limit of concurrent runs do not keep those of other tenants from their turn.
#[tokio::test(start_paused = true)]
async fn deferred_ids_of_a_busy_tenant_leave_others_their_turn() {
    let fixture = ConsumerFixture::new(1).await;
    let is_mended = Arc::new(AtomicBool::new(false));
    let mended = Arc::clone(&is_mended);
    let log = Ids::doing(move |work: Work<Notification>| {
        let (hangs, fails) = (work.id() == b"slow0", !mended.load(Ordering::Relaxed));
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            if fails { Err("not yet".into()) } else { Ok(()) }
        }
    });
    let pause = Duration::from_secs(10);
    let options = hinted().attempts_max(1).backoff_min(pause).backoff_max(pause);
    let options = options.max_concurrency(2).stall_limit(Duration::from_hours(10));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer =
        member.tenants(1, |id| bytes::Bytes::copy_from_slice(&id[..4])).run(log.handler()).await.unwrap();
    fixture.create(["slow1", "zzzz1"]).await;
    until("both are deferred", async || fixture.handle().deferred(None, 9).await.unwrap().len() == 2).await;
    fixture.create(["slow0"]).await;
    log.until_names(&["slow0".to_owned()]).await;
    is_mended.store(true, Ordering::Relaxed);
    until("the other tenant has its turn", async || {
        let left = fixture.handle().deferred(None, 9).await.unwrap();
        left.iter().all(|id| id.id.starts_with("slow"))
    })
    .await;
    drop(consumer);
}

/// Requests to work again succeed, however often the checkpoints of the shards move during the request.
#[tokio::test(start_paused = true)]
async fn requests_get_through_while_checkpoints_move() {
    let fixture = ConsumerFixture::new(2).await;
    let log = Ids::new();
    fixture.create(names("db", 20)).await;
    let options = hinted().checkpoint_interval(Duration::from_millis(5));
    let member = fixture.other_member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.until_done().await;
    let (store, bus) = (fixture.store.clone(), fixture.other.clone());
    let busy = tokio::spawn(async move {
        for n in 0.. {
            record(&store, &bus, &db(&format!("db{}", n % 20), 1), [0, 0, 1, 0]).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    pass(Duration::from_secs(1)).await;
    fixture.faults.delay_reads(Duration::from_millis(20));
    let handle = fixture.bus.consumer("c").unwrap();
    assert_eq!(within("they get through", handle.again("*", false)).await.unwrap(), 20);
    busy.abort();
    consumer.shutdown().await.unwrap();
}

/// A request to work again arrives while a run answers an earlier request: that run leaves the new request alone, and the next run answers
/// it. The effects happen once for each request, both by ids and in batches.
#[tokio::test(start_paused = true)]
async fn a_request_that_replaces_another_is_answered_by_a_run_of_its_own() {
    async fn work(run: impl Deref<Target = Run>, store: Store, gate: Arc<Notify>) -> HandlerResult {
        if run.is_again() {
            gate.notified().await;
        }
        let effect = async |tx: Transaction| {
            if !run.commit_in(&tx).await?.is_already_committed() {
                tx.atomic(AtomicOp::Add, b"effects", &1_u64.to_le_bytes());
            }
            Ok(())
        };
        Ok(store.run(effect).await?)
    }
    for is_ordered in [false, true] {
        let fixture = ConsumerFixture::new(1).await;
        let (store, goes_on) = (fixture.store.clone(), Arc::new(Notify::new()));
        let (of_store, gate) = (store.clone(), Arc::clone(&goes_on));
        let rows: Log<Batch<Notification>> =
            Log::doing(move |batch| work(batch, of_store.clone(), Arc::clone(&gate)));
        let (of_store, gate) = (store.clone(), Arc::clone(&goes_on));
        let ids = Ids::doing(move |id| work(id, of_store.clone(), Arc::clone(&gate)));
        fixture.create(["a"]).await;
        let member = fixture.member().await.start_from(Cursor::BEGINNING);
        let consumer = if is_ordered {
            member.run_batches(rows.handler()).await.unwrap()
        } else {
            member.run(ids.handler()).await.unwrap()
        };
        let calls = || rows.calls() + ids.calls();
        fixture.until_done().await;
        // Let the key of the finished work be removed: then the key of the request says that nothing is finished.
        pass(Duration::from_mins(1)).await;
        for _ in 0..2 {
            assert_eq!(fixture.handle().again("a", false).await.unwrap(), 1);
            until("the first request is answered", async || calls() == 2).await;
        }
        goes_on.notify_one();
        until("the second request is answered", async || calls() == 3).await;
        goes_on.notify_one();
        fixture.until_done().await;
        pass(Duration::from_mins(5)).await;
        assert_eq!((calls(), counter(&store, b"effects").await), (3, 3), "{is_ordered}");
        consumer.shutdown().await.unwrap();
    }
}

/// An id without a key runs in a closed shard that has no rows left. A request to work on it again must not start before that run ends.
///
/// Bug: the janitor dropped the shard, so the request found neither the shard nor a key, and made a key in the successor, where the id ran
/// at once.
#[tokio::test(start_paused = true)]
async fn an_id_that_runs_in_an_empty_shard_does_not_run_in_its_successor() {
    let fixture = ConsumerFixture::new(1).await;
    let (goes_on, received) = watch::channel(false);
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (of_running, of_most, store) = (Arc::clone(&running), Arc::clone(&most), fixture.store.clone());
    let log = Ids::doing(move |work: Work<Notification>| {
        let (running, most, mut received) = (Arc::clone(&of_running), Arc::clone(&of_most), received.clone());
        let store = store.clone();
        async move {
            most.fetch_max(running.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            if work.shard() == ShardId(1) {
                received.wait_for(|goes_on| *goes_on).await?;
            }
            let effect = async |tx: Transaction| {
                if !work.commit_in(&tx).await?.is_already_committed() {
                    tx.atomic(AtomicOp::Add, b"effects", &1_u64.to_le_bytes());
                }
                Ok(())
            };
            store.run(effect).await?;
            running.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        }
    });
    fixture.create(["a"]).await;
    let options = hinted().checkpoint_interval(Duration::from_hours(1)).stall_limit(Duration::from_hours(9));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    log.until_calls(1).await;
    let feed = fixture.other.feed();
    feed.reshard(2, None).await.unwrap();
    fixture.update("a", 0).await;
    let options = JanitorOptions::default().interval(Duration::from_millis(100));
    let janitor = joined(&fixture.other).await.janitor(options).await.unwrap();
    pass(Duration::from_secs(20)).await;
    let asked = fixture.handle().again("a", false).await;
    pass(Duration::from_secs(20)).await;
    assert_eq!(feed.topology().await.unwrap().len(), 2, "the consumer stands in the empty entry");
    goes_on.send_replace(true);
    until("the empty entry is gone", async || feed.topology().await.unwrap().len() == 1).await;
    pass(Duration::from_mins(1)).await;
    assert_eq!((log.calls(), most.load(Ordering::Relaxed)), (2, 1), "{asked:?}");
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// If the same work is requested twice, the second request does not disturb the run that answers the first one.
#[tokio::test(start_paused = true)]
async fn a_second_request_does_not_disturb_the_run_of_the_first() {
    let fixture = ConsumerFixture::new(1).await;
    let (goes_on, store) = (Arc::new(Notify::new()), fixture.store.clone());
    let opened = Arc::clone(&goes_on);
    let outcomes = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&outcomes);
    let log = Ids::doing(move |work: Work<Notification>| {
        let (store, opened, notes) = (store.clone(), Arc::clone(&opened), Arc::clone(&notes));
        async move {
            if work.is_again() {
                opened.notified().await;
            }
            let verified = work.verify(&store.begin()).await.is_ok();
            let state = store.run(async |tx: Transaction| work.commit_in(&tx).await).await?;
            notes.lock().unwrap().push((verified, state.is_already_committed()));
            Ok(())
        }
    });
    fixture.create(["a"]).await;
    let options = hinted().stall_limit(Duration::from_hours(1));
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    fixture.until_done().await;
    fixture.handle().again("a", false).await.unwrap();
    log.until_calls(2).await;
    fixture.handle().again("a", false).await.unwrap();
    pass(Duration::from_secs(10)).await;
    goes_on.notify_one();
    log.until_calls(3).await;
    goes_on.notify_one();
    fixture.until_done().await;
    assert_eq!(outcomes.lock().unwrap().clone(), [(true, false); 3]);
    consumer.shutdown().await.unwrap();
}

/// Ids that are too long for any store are refused without a panic.
#[tokio::test(start_paused = true)]
async fn ids_that_are_too_long_are_refused() {
    let fixture = ConsumerFixture::new(2).await;
    let handle = fixture.handle();
    handle.create(&ConsumerSettings::default()).await.unwrap();
    let long = "x".repeat(20_000);
    assert!(matches!(handle.discard(long.as_bytes()).await, Ok(false) | Err(Error::Invalid { .. })));
    let after = handle.deferred(Some((ShardId(1), &long)), 1).await;
    assert!(matches!(after, Ok(_) | Err(Error::Invalid { .. })), "{after:?}");
}

/// The work on the end of a database fails until its tombstone is dropped and its name is taken. Regression: the member forgot the old
/// database when the next attempt, for the new database, failed as well, so the end was never reported.
#[tokio::test(start_paused = true)]
async fn an_end_whose_work_fails_is_not_forgotten_when_the_name_is_taken() {
    let fixture = ConsumerFixture::new(1).await;
    let fails = Arc::new(AtomicBool::new(false));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (failing, notes) = (Arc::clone(&fails), Arc::clone(&seen));
    let log = Ids::doing(move |work: Work<Notification>| {
        let fails = failing.load(Ordering::Relaxed);
        notes.lock().unwrap().push((work.gone(), fails));
        async move { if fails { Err("it fails".into()) } else { Ok(()) } }
    });
    let pause = Duration::from_secs(30);
    let options = hinted().attempts_max(1).backoff_min(pause).backoff_max(pause);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    let consumer = member.run(log.handler()).await.unwrap();
    change(&fixture, 1, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    fixture.until_done().await;
    fails.store(true, Ordering::Relaxed);
    change(&fixture, 1, [0, 1, 0, 0], [1, 1, 0, 0]).await;
    let janitor = fixture.eager_janitor().await;
    until("the tombstone is dropped", async || {
        fixture.other.feed().newest(&"a".parse().unwrap()).await.unwrap().is_none()
    })
    .await;
    janitor.shutdown().await.unwrap();
    let calls = log.calls();
    change(&fixture, 2, [1, 0, 0, 0], [1, 0, 0, 0]).await;
    log.until_calls(calls + 1).await;
    assert_eq!(seen.lock().unwrap().last(), Some(&(Some(DbInstance([1; 16])), true)));
    pass(Duration::from_secs(1)).await;
    fails.store(false, Ordering::Relaxed);
    fixture.until_done().await;
    let seen = seen.lock().unwrap().clone();
    assert!(seen.contains(&(Some(DbInstance([1; 16])), false)), "{seen:?}");
    consumer.shutdown().await.unwrap();
}

/// Bug: the shard gave a deferred id a turn only if its tenant was below the tenant's limit when the keys were read, so the deferred ids of
/// a tenant that always had rows never got a turn.
#[tokio::test(start_paused = true)]
async fn a_deferred_id_of_a_tenant_that_is_always_busy_has_its_turn() {
    let fixture = ConsumerFixture::new(1).await;
    let log = Ids::doing(|work: Work<Notification>| async move {
        if work.id() == b"late" && work.attempt() == 1 {
            return Err("not yet".into());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok(())
    });
    let pause = Duration::from_secs(5);
    let options = hinted().attempts_max(1).backoff_min(pause).backoff_max(pause);
    let member = fixture.member().await.start_from(Cursor::BEGINNING).options(options);
    fixture.create(["late"]).await;
    let consumer = member.tenants(1, |_| bytes::Bytes::new()).run(log.handler()).await.unwrap();
    until("it is deferred", async || !fixture.is_none_deferred().await).await;
    for name in names("db", 60) {
        fixture.create([name]).await;
        pass(Duration::from_millis(700)).await;
    }
    assert_eq!(log.names().iter().filter(|name| *name == "late").count(), 2);
    drop(consumer);
}
