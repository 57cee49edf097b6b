//! Producing: blind, cheap, and in the caller's own transaction.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{cell::RefCell, collections::BTreeSet, time::Duration};

use common::{NEVER, counts, db, eager, joined, narrow_bus, record, row, row_with, unpolled, until, waiting};
use notibus::{
    Bus, BusOptions, Db, DbInstance, DbName, Error, EventKind, NotifierOptions,
    event::{Counters, DdocId, Tally},
    producer::{EventTarget, ProducerOptions, Receipt},
    store::{
        AtomicOp, Isolation, KeyRange, RangeRead, Store, StoreError,
        testing::{Attempt, CommitFault, Faults, Operation, Trace},
    },
};

/// Returns the trace of the one transaction in which `produce` was called.
async fn traced(produce: impl Fn(&Bus, &notibus::store::Transaction)) -> Attempt {
    let trace = Trace::new(&Store::memory());
    let store = trace.store();
    let bus = narrow_bus(&store).await;
    trace.take();
    let tx = store.begin();
    produce(&bus, &tx);
    tx.commit().await.unwrap();
    // No other task has run since the commit, so the ring of the doorbell is not in the trace.
    let mut attempts = trace.take();
    assert_eq!(attempts.len(), 1);
    attempts.remove(0)
}

#[tokio::test]
async fn producing_reads_nothing_and_writes_once_per_database() {
    let attempt = traced(|bus, tx| {
        let producer = bus.producer();
        for name in ["a", "b"] {
            producer.created(tx, &db(name, 1));
            producer.updated(tx, &db(name, 1));
            producer.updated(tx, &db(name, 1));
            producer.ddoc_updated(tx, &db(name, 1), None);
            producer.deleted(tx, &db(name, 1));
        }
    })
    .await;
    assert_eq!(attempt.reads().count(), 0);
    assert_eq!(attempt.read_conflicts().count(), 0);
    let mutations: Vec<_> = attempt.mutations().collect();
    assert_eq!(mutations.len(), 2, "{mutations:?}");
    let operand = Tally::from(counts([1, 1, 2, 1])).to_bytes();
    for mutation in mutations {
        assert!(
            matches!(mutation, Operation::Atomic { op: AtomicOp::Add, operand: found, .. } if found[..] == operand),
            "{mutation:?}"
        );
    }
}

#[tokio::test]
async fn each_design_document_id_costs_one_more_write() {
    let attempt = traced(|bus, tx| {
        for id in ["x", "y", "z", "x"] {
            let id = DdocId::new(id).unwrap();
            bus.producer().ddoc_updated(tx, &db("a", 1), Some(&id));
        }
    })
    .await;
    assert_eq!((attempt.reads().count(), attempt.mutations().count()), (0, 1 + 3));
}

/// Regression: each event of a transaction set the same versionstamp again, so a transaction made the second mutation once per event
/// instead of once per database.
#[tokio::test]
async fn recording_versionstamps_costs_one_more_write() {
    let attempt = traced(|bus, tx| {
        let options = ProducerOptions::default().record_versionstamps(true);
        let producer = bus.producer_with(options).unwrap();
        for _ in 0..5 {
            producer.updated(tx, &db("a", 1));
        }
    })
    .await;
    assert_eq!((attempt.reads().count(), attempt.mutations().count()), (0, 1 + 1));
}

#[tokio::test(start_paused = true)]
async fn the_newest_recorded_versionstamp_is_in_the_row() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let options = ProducerOptions::default().record_versionstamps(true).slots(4);
    let producer = bus.producer_with(options).unwrap();
    let mut newest = None;
    for _ in 0..20 {
        let tx = store.begin();
        producer.updated(&tx, &db("a", 1));
        newest = tx.commit().await.unwrap().map(|done| done.versionstamp);
    }
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let row = row_with(&bus, &db("a", 1), [0, 0, 20, 0]).await;
    assert_eq!(row.versionstamp, newest);
    assert_eq!(waiting(&store).await, 0);
}

#[tokio::test(start_paused = true)]
async fn producers_conflict_with_nothing_and_every_event_counts() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..40 {
        let (store, producer) = (store.clone(), bus.producer());
        tasks.spawn(async move {
            for round in 0..10 {
                let tx = store.begin();
                // With this read the transaction can conflict, should producing read or write the same key.
                tx.get(format!("{task}").as_bytes(), Isolation::Serializable).await.unwrap();
                producer.updated(&tx, &db("hot", 1));
                producer.updated(&tx, &db(&format!("cold{task}"), 1));
                for _ in 0..(task + round) % 5 {
                    tokio::task::yield_now().await;
                }
                tx.set(format!("{task}").as_bytes(), b"");
                tx.commit().await.unwrap();
                tokio::time::sleep(Duration::from_millis(round)).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    row_with(&bus, &db("hot", 1), [0, 0, 400, 0]).await;
    for task in 0..40 {
        row_with(&bus, &db(&format!("cold{task}"), 1), [0, 0, 10, 0]).await;
    }
    let stats = bus.stats();
    assert!(stats.folds > 10, "folds ran meanwhile: {stats:?}");
    assert_eq!(stats.fold_retries, 0, "producers are not in the way of folds");
}

#[tokio::test(start_paused = true)]
async fn an_aborted_transaction_records_nothing() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let producer = bus.producer();
    let failed: notibus::Result<()> = store
        .run(async |tx| {
            producer.updated(&tx, &db("a", 1));
            Err(Error::Invalid { what: "document", reason: "it has no id".to_owned() })
        })
        .await;
    assert!(matches!(failed, Err(Error::Invalid { what: "document", .. })));

    let conflicting = store.begin();
    conflicting.get(b"k", Isolation::Serializable).await.unwrap();
    producer.updated(&conflicting, &db("a", 1));
    conflicting.set(b"l", b"");
    store
        .run(async |tx| {
            tx.set(b"k", b"");
            Ok(())
        })
        .await
        .unwrap();
    assert_eq!(conflicting.commit().await.unwrap_err().code(), Some(1020));

    let cancelled = store.begin();
    producer.updated(&cancelled, &db("a", 1));
    cancelled.cancel();
    assert!(cancelled.commit().await.is_err());

    let reset = store.begin();
    producer.updated(&reset, &db("a", 1));
    reset.reset();
    reset.set(b"m", b"");
    reset.commit().await.unwrap();

    assert_eq!(waiting(&store).await, 0);
    record(&store, &bus, &db("b", 1), [1, 0, 0, 0]).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    row_with(&bus, &db("b", 1), [1, 0, 0, 0]).await;
    assert_eq!(row(&bus, &db("a", 1)).await, None);
    assert_eq!(bus.stats().folded, counts([1, 0, 0, 0]));
}

#[tokio::test(start_paused = true)]
async fn an_event_is_notified_if_and_only_if_its_transaction_committed() {
    let mut random = common::dice();
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let producer = bus.producer();
    let mut expected = [0; 20];
    for _ in 0..400 {
        let place = random.usize(..20);
        let tx = store.begin();
        tx.get(b"contended", Isolation::Serializable).await.unwrap();
        producer.updated(&tx, &db(&format!("db{place}"), 1));
        tx.set(format!("doc{place}").as_bytes(), b"");
        if random.bool() {
            let other = store.begin();
            other.set(b"contended", b"");
            other.commit().await.unwrap();
        }
        if random.u8(..4) == 0 {
            tx.cancel();
        }
        if tx.commit().await.is_ok() {
            expected[place] += 1;
        }
        tokio::time::sleep(Duration::from_millis(random.u64(..3))).await;
    }
    // One time in a hundred, a database has no event.
    for (place, &count) in expected.iter().enumerate().filter(|(_, count)| **count > 0) {
        row_with(&bus, &db(&format!("db{place}"), 1), [0, 0, count, 0]).await;
    }
    assert_eq!(bus.stats().folded.updated, expected.iter().sum::<u64>());
}

/// An operation, its key and its operand.
type Mutation = (AtomicOp, Vec<u8>, Vec<u8>);

/// A transaction of a layer that does not use this crate's store.
#[derive(Default)]
struct Foreign {
    /// The mutations that the transaction would make.
    mutations: RefCell<Vec<Mutation>>,
}

impl EventTarget for Foreign {
    type Receipt = Receipt;

    fn add(&self, key: Vec<u8>, tally: &Tally) {
        let operand = tally.to_bytes().to_vec();
        self.mutations.borrow_mut().push((AtomicOp::Add, key, operand));
    }

    fn set_versionstamped_value(&self, key: &[u8], operand: &[u8]) {
        let op = AtomicOp::SetVersionstampedValue;
        self.mutations.borrow_mut().push((op, key.to_vec(), operand.to_vec()));
    }

    fn spread(&self) -> u64 {
        0
    }

    fn receive(&self, receipt: Receipt) -> Receipt {
        receipt
    }
}

impl Foreign {
    /// Commits the mutations as the layer would.
    async fn commit(&self, store: &Store) {
        let mutations = self.mutations.borrow().clone();
        store
            .run(async |tx| {
                for (op, key, operand) in &mutations {
                    tx.atomic(*op, key, operand);
                }
                Ok(())
            })
            .await
            .unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_receipt_that_is_rung_wakes_the_notifier() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let foreign = Foreign::default();
    let id = DdocId::new("views").unwrap();
    let receipt = bus.producer().ddoc_updated(&foreign, &db("a", 1), Some(&id));
    foreign.commit(&store).await;
    receipt.notify();
    row_with(&bus, &db("a", 1), [0, 0, 0, 1]).await;
}

#[tokio::test(start_paused = true)]
async fn a_receipt_that_is_never_rung_is_made_good_by_the_poll() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let foreign = Foreign::default();
    drop(bus.producer().created(&foreign, &db("a", 1)));
    foreign.commit(&store).await;
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
}

/// A commit whose result is unknown may have happened. Regression: no doorbell was rung then, so the event waited for a poll if the caller
/// found out by itself that the work was done.
#[tokio::test(start_paused = true)]
async fn a_commit_with_an_unknown_result_wakes_the_notifier() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = narrow_bus(&faults.store()).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    faults.script_commits([CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT)]);
    let producer = bus.producer();
    faults
        .store()
        .run(async |tx| {
            if tx.get(b"done", Isolation::Serializable).await?.is_none() {
                tx.set(b"done", b"");
                producer.created(&tx, &db("a", 1));
            }
            Ok(())
        })
        .await
        .unwrap();
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
}

/// An import records many events at once. Regression: a backlog that exceeded 32 bits counted as damage, so no database of its partition
/// was ever folded again.
#[tokio::test(start_paused = true)]
async fn a_backlog_of_billions_is_folded() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    record(&store, &bus, &db("a", 1), [0, 0, 3_000_000_000, 7]).await;
    record(&store, &bus, &db("a", 1), [0, 0, 3_000_000_000, 0]).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    row_with(&bus, &db("a", 1), [0, 0, 6_000_000_000, 7]).await;
    assert_eq!(waiting(&store).await, 0);
}

#[tokio::test(start_paused = true)]
async fn slots_spread_a_hot_database_over_keys() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let options = ProducerOptions::default().slots(8);
    let producer = bus.producer_with(options).unwrap();
    for _ in 0..200 {
        store
            .run(async |tx| {
                producer.updated(&tx, &db("hot", 1));
                Ok(())
            })
            .await
            .unwrap();
    }
    assert_eq!(waiting(&store).await, 8, "200 random picks of 8 slots miss none");
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    row_with(&bus, &db("hot", 1), [0, 0, 200, 0]).await;
    assert_eq!(waiting(&store).await, 0);
}

#[tokio::test]
async fn names_ids_and_slots_out_of_their_limits_are_typed_errors() {
    for bad in [String::new(), "x".repeat(DbName::LEN_MAX + 1)] {
        assert!(matches!(DbName::new(&bad), Err(Error::Invalid { .. })));
        assert!(matches!(DdocId::new(&bad), Err(Error::Invalid { .. })));
    }
    let bus = narrow_bus(&Store::memory()).await;
    for slots in [0, 1_025] {
        let options = ProducerOptions::default().slots(slots);
        let refused = bus.producer_with(options);
        assert!(matches!(refused, Err(Error::Invalid { what: "slots", .. })));
    }
}

#[tokio::test(start_paused = true)]
async fn the_longest_names_and_ids_fit() {
    let store = Store::memory();
    let options = BusOptions::default().prefix(vec![b'p'; 256]);
    let bus = Bus::open(&store, options).await.unwrap();
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    // A zero byte takes two bytes in a key.
    let longest = "\0".repeat(DbName::LEN_MAX);
    let (database, id) = (db(&longest, 0), DdocId::new(&longest).unwrap());
    let producer = bus.producer();
    store
        .run(async |tx| {
            producer.created(&tx, &database);
            producer.ddoc_updated(&tx, &database, Some(&id));
            Ok(())
        })
        .await
        .unwrap();
    row_with(&bus, &database, [1, 0, 0, 1]).await;
}

#[tokio::test(start_paused = true)]
async fn rings_of_many_commits_are_few_transactions() {
    let store = Store::memory();
    let trace = Trace::new(&store);
    let bus = narrow_bus(&trace.store()).await;
    trace.take();
    for commit in 0..500 {
        record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
        if commit % 10 == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let rings = trace.take();
    assert!((1..=20).contains(&rings.len()), "{} transactions in 50 ms", rings.len());
    assert_eq!(bus.stats().doorbells, rings.len() as u64, "one partition each");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_rung_in_the_store_while_the_notifier_is_in_the_process() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(unpolled()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    for _ in 0..10 {
        record(&store, &bus, &db("a", 1), [0, 0, 1, 0]).await;
    }
    row_with(&bus, &db("a", 1), [0, 0, 10, 0]).await;
    assert_eq!(bus.stats().doorbells, 0);
}

#[tokio::test(start_paused = true)]
async fn one_transaction_records_thousands_of_databases() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.unwrap();
    let producer = bus.producer();
    let databases: Vec<Db> =
        (0..2_000).map(|n| Db::new(format!("db{n}").parse().unwrap(), DbInstance([1; 16]))).collect();
    store
        .run(async |tx| {
            for database in &databases {
                producer.record_all(&tx, database, &EventKind::Created.once())?;
            }
            Ok(())
        })
        .await
        .unwrap();
    let options = NotifierOptions::default().poll_interval(NEVER);
    let _notifier = joined(&bus).await.notifier(options).await.unwrap();
    until("all folded", async || bus.stats().folded.created == 2_000).await;
    let names: BTreeSet<_> = common::rows(&bus).await.iter().map(|row| row.name.clone()).collect();
    assert_eq!(names.len(), 2_000);
    let everything = RangeRead::new(KeyRange::prefix(&b"notibus\x15\x01"[..]));
    let left = store.begin().get_range(&everything, Isolation::Snapshot).await.unwrap();
    assert!(left.rows.is_empty());
}

/// Regression: the task that rings doorbells kept the store open until it was next scheduled, so a folder could not be opened again right
/// after everything was dropped.
#[tokio::test]
async fn a_folder_can_be_opened_again_once_the_bus_is_dropped() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    for _ in 0..3 {
        let store = Store::open_dir(folder.path()).expect("nobody else has it open");
        let bus = Bus::open(&store, BusOptions::default()).await.expect("the bus opens");
        let db = Db::new("db".parse().expect("a name"), DbInstance::new());
        let producer = bus.producer();
        let tx = store.begin();
        producer.updated(&tx, &db);
        tx.commit().await.expect("it commits");
    }
}

/// Regression: the producer stored more events at once than a lane can hold, so no fold of the partition could read them.
#[tokio::test]
async fn more_events_than_a_lane_holds_are_refused() {
    let store = Store::memory();
    let bus = Bus::open(&store, BusOptions::default()).await.expect("the bus opens");
    let db = Db::new("db".parse().expect("a name"), DbInstance::new());
    let tx = store.begin();
    let updated = Counters { updated: 1 << 32, ..Counters::ZERO };
    let ddocs = Counters { ddoc_updated: 1 << 32, ..Counters::ZERO };
    for counters in [updated, ddocs] {
        let refused = bus.producer().record_all(&tx, &db, &counters).expect_err("it does not fit");
        assert!(matches!(refused, Error::Invalid { what: "counters", .. }), "{refused}");
    }
    tx.commit().await.expect("nothing was recorded");
    assert!(bus.is_drained().await.expect("the store can be read"));
}
