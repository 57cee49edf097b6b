//! What waiting costs, and what it does not delay: one poll serves all waiters for rows, whatever happens to the hints. The clock is
//! paused, so nothing here is timed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use common::{NEVER, db, joined, narrow_bus, next_news, record, row_with, wide_bus, within};
use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, DispatcherOptions, Filter, NodeOptions, Notification,
    NotifierOptions, Sequence,
    changes::{ChangesOptions, DocId, DocSummary, Revision},
    consumer::{ConsumerOptions, Work},
    store::{
        Store, StoreError,
        testing::{Faults, Operation, OperationCounts, Trace, WatchFault},
    },
};
use tokio::task::JoinSet;

/// More watches than a test sets if useless ones are spaced.
const WATCHES_MAX: u32 = 20_000;

/// Counts the operations within this many seconds.
async fn counted(faults: &Faults, seconds: u64) -> OperationCounts {
    let before = faults.counts();
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    faults.counts() - before
}

/// Bug: a watch that fired for nothing was set again at once, 66,000 times a second, and a watch that could not be set was retried
/// endlessly in the transaction that read the rows. Fix: useless hints are spaced, and no reader waits for a watch.
#[tokio::test(start_paused = true)]
async fn watches_that_always_fire_or_never_can_be_set_cost_ten_transactions_a_second_and_delay_nothing() {
    for fault in [
        WatchFault::Spurious,
        WatchFault::Refuse(StoreError::TOO_MANY_WATCHES),
        WatchFault::Refuse(StoreError::PROCESS_BEHIND),
        WatchFault::Drop,
    ] {
        let store = Store::memory();
        let faults = Faults::new(&store);
        // After enough faults the store behaves, so that paused time can advance even if watches are re-armed endlessly.
        let (planned, watches) = (fault.clone(), Arc::new(AtomicU32::new(0)));
        let count = Arc::clone(&watches);
        faults.plan_watches(move |_| {
            (count.fetch_add(1, Ordering::Relaxed) < WATCHES_MAX).then(|| planned.clone())
        });
        let (producing, bus) = (wide_bus(&store).await, wide_bus(&faults.store()).await);
        let node = joined(&bus).await;
        let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let mut subscription = dispatcher.subscribe(Filter::all()).stream();
        let consumer = node.consumer("c").unwrap();
        let consumer = consumer.run(async |_: Work<Notification>| Ok(())).await.unwrap();
        tokio::time::sleep(Duration::from_mins(1)).await;
        assert_eq!(notifier.partitions().len(), 64);
        let spent = counted(&faults, 60).await;
        println!("{fault:?}: {spent:?}");
        assert!(spent.transactions <= 60 * 10, "{fault:?}: {spent:?}");

        // The poll delivers what another process records and folds.
        let poll = DispatcherOptions::default().poll_interval + NotifierOptions::default().poll_interval;
        for _ in 0..10 {
            let began = tokio::time::Instant::now();
            record(&store, &producing, &db("a", 1), [0, 0, 1, 0]).await;
            within("a delivery", next_news(&mut subscription)).await.unwrap().into_delivery().unwrap();
            assert!(began.elapsed() <= poll + Duration::from_millis(10), "{fault:?}: {:?}", began.elapsed());
            tokio::time::sleep(Duration::from_millis(1_234)).await;
        }
        consumer.shutdown().await.unwrap();
        let watches = watches.load(Ordering::Relaxed);
        assert!(watches < WATCHES_MAX, "{fault:?}: {watches} watches");
    }
}

/// Good hints are acted on at once, although the store also fires watches for nothing.
#[tokio::test(start_paused = true)]
async fn good_hints_are_not_spaced() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (folding, bus) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
    let _notifier = joined(&folding).await.notifier(common::unpolled()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default().poll_interval(NEVER)).await.unwrap();
    let mut subscription = dispatcher.subscribe(Filter::all()).stream();
    for n in 1..=100 {
        let began = tokio::time::Instant::now();
        record(&store, &folding, &db("a", 1), [0, 0, 1, 0]).await;
        within("a delivery", next_news(&mut subscription)).await.unwrap().into_delivery().unwrap();
        assert!(began.elapsed() <= Duration::from_millis(100), "number {n}: {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(n % 13)).await;
    }
}

/// An idle node makes two reads a second for everything that waits in it, one for events and one for rows, and three more to learn about
/// the other nodes; it commits every 2 s.
#[tokio::test(start_paused = true)]
async fn an_idle_node_makes_two_reads_a_second_for_all_who_wait() {
    const SECONDS: usize = 600;
    // The families of counters, of pulses, and of rows with their topology; a family's number follows the default prefix and its type byte.
    let is_waiting = |key: &[u8]| key.get(8).is_some_and(|family| [1, 4, 7, 8, 15].contains(family));
    for consumers in [0, 50] {
        let faults = Faults::new(&Store::memory());
        let trace = Trace::new(&faults.store());
        let bus = wide_bus(&trace.store()).await;
        let node = joined(&bus).await;
        let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let _subscription = dispatcher.subscribe(Filter::all()).stream();
        let mut members = Vec::new();
        for number in 0..consumers {
            let member = node.consumer(&format!("c{number}")).unwrap();
            members.push(member.run(async |_: Work<Notification>| Ok(())).await.unwrap());
        }
        tokio::time::sleep(Duration::from_mins(5)).await;
        assert_eq!(notifier.partitions().len(), 64);
        trace.take();
        let spent = counted(&faults, SECONDS as u64).await;
        let attempts = trace.take();
        let reads = attempts.iter().flat_map(|attempt| &attempt.operations).filter_map(|done| match done {
            Operation::Get { key, .. } | Operation::Watch { key } => Some(key),
            Operation::GetRange { range, .. } => Some(&range.begin),
            _ => None,
        });
        let reads: Vec<_> = reads.collect();
        let waiting = reads.iter().filter(|key| is_waiting(key)).count();
        println!("{consumers} consumers: {spent:?}, {waiting} of {} reads", reads.len());
        assert!(waiting <= 2 * SECONDS + 10, "{consumers} consumers: {waiting}");
        assert!(reads.len() <= 5 * SECONDS + 10, "{consumers} consumers: {}", reads.len());
        assert!(spent.write_commits as usize <= SECONDS * 6 / 10, "{consumers} consumers: {spent:?}");
    }
}

/// Creates a feed of documents for database number `n`.
async fn documents(bus: &Bus, store: &Store, n: u64) -> Db {
    let mut instance = [7; 16];
    instance[..8].copy_from_slice(&n.to_be_bytes());
    let db = Db::new(format!("db{n}").parse().unwrap(), DbInstance(instance));
    let changes = bus.changes();
    store.run(async |tx| changes.create(&tx, &db, &ChangesOptions::default()).await).await.unwrap();
    db
}

/// Edits a document of `db`. Nobody folds the event, so no notification reports the edit.
async fn edit(bus: &Bus, db: &Db) {
    let changes = bus.changes();
    let edit = async |tx| {
        let revision = Revision { position: 1, hash: [1; 16] };
        let doc = DocSummary { id: DocId::new("doc")?, revision, branches: 1, is_deleted: false };
        changes.writer(&tx, db).await?.record(&doc, None)
    };
    bus.run_exactly_once(None, edit).await.unwrap();
}

/// Bug: each feed of documents was polled individually, and less often the more feeds there were, so with 200 feeds an edit without a
/// notification waited for three hours. Fix: one poll checks a page of feeds at a time.
#[tokio::test(start_paused = true)]
async fn an_edit_without_a_notification_is_found_in_a_minute_whatever_the_number_of_feeds() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (editing, bus) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
    let node = joined(&bus).await;
    let (found, mut finds) = tokio::sync::mpsc::unbounded_channel();
    let (mut dbs, mut members) = (Vec::new(), Vec::new());
    for n in 0..200 {
        let db = documents(&editing, &store, n).await;
        let found = found.clone();
        let member = node.consumer(&format!("c{n}")).unwrap().start_from(Cursor::BEGINNING);
        let member = member.documents(&bus.changes().feed(&db));
        let member = member.run(move |_: Work<notibus::changes::Change>| {
            let found = found.clone();
            async move {
                found.send(n).unwrap();
                Ok(())
            }
        });
        members.push(member.await.unwrap());
        dbs.push(db);
    }
    tokio::time::sleep(Duration::from_mins(5)).await;
    let spent = counted(&faults, 600).await;
    println!("{spent:?}");
    // Two reads, of the topology and of the last row, for each feed and minute.
    assert!(spent.reads <= 600 * (12 + 2 * 200 / 60), "{spent:?}");
    for n in [3, 77, 199] {
        edit(&editing, &dbs[n as usize]).await;
        let next = tokio::time::timeout(Duration::from_secs(62), finds.recv()).await;
        assert_eq!(next.expect("it is found in a minute"), Some(n));
    }
}

/// With 2,000 feeds a turn over all of them takes longer, but the rate of reads stays bounded.
#[tokio::test(start_paused = true)]
async fn two_thousand_feeds_of_documents_are_looked_at_in_turns_at_a_bounded_rate() {
    const FEEDS: u64 = 2_000;
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (editing, bus) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let (mut tails, mut dbs) = (JoinSet::new(), Vec::new());
    for n in 0..FEEDS {
        let db = documents(&editing, &store, n).await;
        let mut tail = bus.changes().tail(&dispatcher, &db, Cursor::BEGINNING);
        tails.spawn(async move {
            let page = tail.next().await.unwrap();
            (n, page.rows.len())
        });
        dbs.push(db);
    }
    let turn = Duration::from_secs(FEEDS / 16 + 2);
    tokio::time::sleep(turn * 2).await;
    let spent = counted(&faults, 600).await;
    println!("{spent:?}");
    // A page of 16 feeds a second at two reads each, and the polls of the dispatcher's tail.
    assert!((600 * 30..=600 * 38).contains(&spent.reads), "{spent:?}");
    for n in [5, 1_999] {
        edit(&editing, &dbs[n as usize]).await;
        let found = tokio::time::timeout(turn, tails.join_next()).await.expect("it is found in a turn");
        assert_eq!(found.unwrap().unwrap(), (n, 1));
    }
}

/// Regression: one task did all polls of a process. It belonged to the runtime in which the first poll began, so once that runtime had
/// ended, no waiter in another runtime was ever woken.
#[test]
fn a_tail_outlives_the_runtime_of_the_first() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let store = Store::memory();
    let (first, second) = (runtime(), runtime());
    let (bus, other) = first.block_on(async {
        let options = || BusOptions::default().partitions(1);
        (Bus::open(&store, options()).await.unwrap(), Bus::open(&store, options()).await.unwrap())
    });
    let row = |bus: &Bus, count| {
        let bus = bus.clone();
        async move {
            let node = bus.node(NodeOptions::default()).await.unwrap();
            let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
            record(bus.store(), &bus, &db("a", 1), [0, 0, 1, 0]).await;
            row_with(&bus, &db("a", 1), [0, 0, count, 0]).await;
            notifier.shutdown().await.unwrap();
        }
    };
    let mut lasting = bus.feed().tail(Sequence::MIN);
    first.block_on(async {
        // This tail starts the watcher of the process in the first runtime.
        let mut tail = bus.feed().tail(Sequence::MIN);
        row(&other, 1).await;
        assert_eq!(tail.next().await.unwrap().rows.len(), 1);
        assert!(tokio::time::timeout(Duration::from_secs(5), tail.next()).await.is_err());
        assert_eq!(lasting.next().await.unwrap().rows.len(), 1);
        assert!(tokio::time::timeout(Duration::from_secs(5), lasting.next()).await.is_err());
    });
    drop(first);
    second.block_on(async {
        for count in 2..5 {
            let woken = async { while lasting.next().await.unwrap().rows.is_empty() {} };
            // The clock of this runtime is behind that of the first.
            let woken = tokio::time::timeout(Duration::from_mins(1), woken);
            tokio::join!(woken, row(&other, count)).0.expect("it is woken");
        }
    });
}

/// Regression: the watcher of a process had ended with its runtime, while a notifier of the process appended all the time. Tails were woken
/// by these appends, so they believed that the watcher was alive, started no other one, and missed appends by other processes.
#[test]
fn appends_of_a_process_do_not_hide_that_its_watcher_has_ended() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let store = Store::memory();
    let (first, second) = (runtime(), runtime());
    let (bus, other) = first.block_on(async {
        let options = || BusOptions::default().partitions(2).shards(4);
        (Bus::open(&store, options()).await.unwrap(), Bus::open(&store, options()).await.unwrap())
    });
    let mut tail = bus.feed().tail(Sequence::MIN);
    first.block_on(async {
        // This tail starts the watcher of the process in the first runtime.
        assert!(
            tokio::time::timeout(Duration::from_secs(5), async {
                loop {
                    tail.next().await.unwrap();
                }
            })
            .await
            .is_err()
        );
    });
    second.block_on(async {
        let (own, foreign) = (joined(&bus).await, joined(&other).await);
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let _all = dispatcher.subscribe(Filter::all()).stream();
        let (found, mut finds) = tokio::sync::mpsc::unbounded_channel();
        let options = ConsumerOptions::default().poll_interval(NEVER);
        let consumer = own.consumer("c").unwrap().options(options);
        let consumer = consumer.run(move |work: Work<Notification>| {
            found.send(work.id().to_vec()).unwrap();
            async { Ok(()) }
        });
        let consumer = consumer.await.unwrap();
        let of = |name: &str| (xxhash_rust::xxh3::xxh3_64(name.as_bytes()) % 2) as u32;
        let (notifier, folds) = (
            own.notifier(common::unpolled()).await.unwrap(),
            foreign.notifier(common::unpolled()).await.unwrap(),
        );
        common::until("each has its half", async || {
            notifier.partitions().len() == 1 && folds.partitions().len() == 1
        })
        .await;
        let is_own = |name: &String| of(name) == notifier.partitions()[0];
        let names = || (0..).map(|n| format!("db{n}"));
        let mine = names().find(is_own).unwrap();
        // The names that the other process folds have rows in all shards; the one of this process has rows in one.
        let mut theirs: std::collections::BTreeSet<_> =
            names().filter(|name| !is_own(name)).take(20).collect();
        first.shutdown_background();
        let busy = async {
            loop {
                record(&store, &bus, &db(&mine, 1), [0, 0, 1, 0]).await;
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        };
        let wanted = async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            for name in &theirs {
                record(&store, &other, &db(name, 1), [0, 0, 1, 0]).await;
            }
            while !theirs.is_empty() {
                theirs.remove(&String::from_utf8(finds.recv().await.unwrap()).unwrap());
            }
        };
        tokio::select! {
            () = busy => {}
            found = tokio::time::timeout(Duration::from_secs(20), wanted) => found.expect("it is found"),
        }
        drop(consumer);
    });
}

/// No waiter polls by itself while the process polls: a hundred tails of one process cost as much as one.
#[tokio::test(start_paused = true)]
async fn many_tails_cost_one_poll() {
    let mut spent = Vec::new();
    for tails in [1, 100] {
        let store = Store::memory();
        let faults = Faults::new(&store);
        let (folding, bus) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
        let mut waiting = JoinSet::new();
        for _ in 0..tails {
            let mut tail = bus.feed().tail(Sequence::MIN);
            waiting.spawn(async move { while tail.next().await.unwrap().rows.is_empty() {} });
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
        spent.push(counted(&faults, 100).await.reads);
        let notifier = joined(&folding).await.notifier(NotifierOptions::default()).await.unwrap();
        record(&store, &folding, &db("a", 1), [0, 0, 1, 0]).await;
        while let Some(done) = within("its row", waiting.join_next()).await {
            done.unwrap();
        }
        notifier.shutdown().await.unwrap();
    }
    println!("{spent:?}");
    assert!(spent[1] <= spent[0] + 2, "{spent:?}");
}

/// A consumer that never polls by itself still gets what the poll of the process finds.
#[tokio::test(start_paused = true)]
async fn a_consumer_waits_for_the_poll_of_the_process() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    faults.plan_watches(|_| Some(WatchFault::Drop));
    let (folding, bus) = (narrow_bus(&store).await, narrow_bus(&faults.store()).await);
    let _notifier = joined(&folding).await.notifier(NotifierOptions::default()).await.unwrap();
    let (found, mut finds) = tokio::sync::mpsc::unbounded_channel();
    let options = ConsumerOptions::default().poll_interval(NEVER);
    let consumer = joined(&bus).await.consumer("c").unwrap().options(options);
    let consumer = consumer.run(move |work: Work<Notification>| {
        let found = found.clone();
        async move {
            found.send(work.id().to_vec()).unwrap();
            Ok(())
        }
    });
    let _consumer = consumer.await.unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    record(&store, &folding, &db("a", 1), [1, 0, 0, 0]).await;
    let next = tokio::time::timeout(Duration::from_secs(3), finds.recv()).await;
    assert_eq!(next.expect("the poll finds it"), Some(b"a".to_vec()));
}
