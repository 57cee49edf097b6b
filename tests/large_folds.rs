//! Folds that exceed one transaction: bounded by rows and bytes, split where they must be, and with a turn for other tasks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{sync::Arc, time::Duration};

use common::{
    counts, db, forgetful, joined, narrow_bus, record, row, row_with, rows, unpolled, until, waiting, within,
};
use notibus::{
    Bus, BusOptions, Db, DbInstance, EventKind, NotifierOptions,
    event::{Counters, DdocId},
    producer::ProducerOptions,
    store::{
        AtomicOp, Store, Transaction,
        testing::{Attempt, CommitFault, Faults, Gate, Operation, Trace},
    },
};

/// Whether an attempt is a fold: only folds clear counters that they have subtracted.
fn is_fold(attempt: &Attempt) -> bool {
    attempt.applies(AtomicOp::CompareAndClear)
}

#[tokio::test(start_paused = true)]
async fn a_fold_is_bounded_however_many_databases_wait() {
    let store = Store::memory();
    let trace = Trace::new(&store);
    let bus = narrow_bus(&trace.store()).await;
    for n in 0..1_000 {
        record(&store, &bus, &db(&format!("db{n}"), 1), [1, 0, n % 3, 0]).await;
    }
    let options = unpolled().fold_rows_max(10);
    let _notifier = joined(&bus).await.notifier(options).await.unwrap();
    until("all are folded", async || bus.stats().folded.created == 1_000).await;
    let folds: Vec<_> = trace.take().into_iter().filter(is_fold).collect();
    assert!(folds.len() >= 100, "{}", folds.len());
    for fold in &folds {
        let drained = fold
            .mutations()
            .filter(|mutation| matches!(mutation, Operation::Atomic { op: AtomicOp::CompareAndClear, .. }));
        assert!(drained.count() <= 10);
    }
    let rows = rows(&bus).await;
    assert_eq!(rows.len(), 1_000);
    for row in rows {
        let n: u64 = row.name.as_str()[2..].parse().unwrap();
        assert_eq!(row.totals, counts([1, 0, n % 3, 0]));
    }
    assert_eq!(waiting(&store).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_database_with_more_design_documents_than_fit_a_fold_gets_through() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let producer = bus.producer();
    store
        .run(async |tx| {
            producer.created(&tx, &db("m", 1));
            for n in 0..120 {
                let id = DdocId::new(&format!("ddoc{n}")).unwrap();
                producer.ddoc_updated(&tx, &db("m", 1), Some(&id));
            }
            Ok(())
        })
        .await
        .unwrap();
    for name in ["a", "z"] {
        record(&store, &bus, &db(name, 1), [1, 0, 0, 0]).await;
    }
    let options = unpolled().fold_rows_max(10);
    let _notifier = joined(&bus).await.notifier(options).await.unwrap();
    until("nothing waits", async || waiting(&store).await == 0).await;
    row_with(&bus, &db("m", 1), [1, 0, 0, 120]).await;
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("z", 1), [1, 0, 0, 0]).await;
    assert_eq!(bus.stats().stale_events, 0);
}

/// Regression: design documents of a deleted database that did not fit into the fold of its deletion were left to the next fold. If the
/// janitor had removed the tombstone in between, they looked like changes of a database older than the bus, which then reappeared.
#[tokio::test(start_paused = true)]
async fn what_a_torn_fold_has_left_of_a_deleted_database_does_not_bring_it_back() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let bus = narrow_bus(&faults.store()).await;
    let options = unpolled().fold_rows_max(10);
    let notifier = joined(&bus).await.notifier(options.clone()).await.unwrap();
    let gate = Gate::default();
    let mut held = Some(CommitFault::Hold(gate.clone()));
    faults.plan_commits(move |attempt| is_fold(attempt).then(|| held.take()).flatten());
    let (producer, gone) = (bus.producer(), db("gone", 1));
    let live_and_go = async |tx: Transaction| {
        producer.created(&tx, &gone);
        for n in 0..50 {
            producer.ddoc_updated(&tx, &gone, Some(&DdocId::new(&format!("ddoc{n}")).unwrap()));
        }
        producer.deleted(&tx, &gone);
        Ok(())
    };
    faults.store().run(live_and_go).await.unwrap();
    within("the fold of the deletion", gate.reached()).await;
    // A notifier that is stopped finishes the current fold.
    let shutdown = tokio::spawn(notifier.shutdown());
    tokio::time::sleep(Duration::from_secs(1)).await;
    gate.open();
    within("the shutdown", shutdown).await.unwrap().unwrap();
    assert!(row(&bus, &gone).await.unwrap().is_deleted());
    assert!(waiting(&store).await > 0, "some are left to the next fold");

    let janitor = joined(&bus).await.janitor(forgetful()).await.unwrap();
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert!(row(&bus, &gone).await.unwrap().is_deleted(), "the tombstone stays until they are folded");
    let _notifier = joined(&bus).await.notifier(options).await.unwrap();
    until("nothing waits", async || waiting(&store).await == 0).await;
    until("the tombstone is dropped", async || rows(&bus).await.is_empty()).await;
    assert_eq!(bus.stats().stale_events, 0);
    janitor.shutdown().await.unwrap();
}

/// Regression: a fold of many databases wrote without a pause, so other tasks of its thread, such as a heartbeat, ran too late.
#[tokio::test(start_paused = true)]
async fn a_large_fold_gives_others_their_turn_while_it_writes() {
    let store = Store::memory();
    let faults = Arc::new(Faults::new(&store));
    let bus = narrow_bus(&faults.store()).await;
    for n in 0..1_000 {
        record(&store, &bus, &db(&format!("db{n}"), 1), [1, 0, 0, 0]).await;
    }
    // The maximum number of writes by the bus between two turns of this task.
    let counted = Arc::clone(&faults);
    let neighbour = tokio::spawn(async move {
        let (mut written, mut most) = (0, 0);
        while written < 4_000 {
            let now = counted.counts().mutations;
            (written, most) = (now, most.max(now - written));
            tokio::task::yield_now().await;
        }
        most
    });
    let _notifier = joined(&bus).await.notifier(unpolled().fold_rows_max(10_000)).await.unwrap();
    let most = within("the writes of a fold", neighbour).await.unwrap();
    until("all are folded", async || bus.stats().folded.created == 1_000).await;
    assert_eq!(bus.stats().folds, 1);
    assert!(most < 2_000, "a fold of 1,000 databases wrote {most} times in a row");
}

/// Regression: the rows of a page were limited, but not the size of its fold, so a thousand of the longest names made a transaction too
/// large for the store, and the partition was stuck for good.
#[tokio::test(start_paused = true)]
async fn a_backlog_of_the_longest_names_fits_into_folds() {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let producer = bus.producer();
    for batch in 0..10 {
        store
            .run(async |tx| {
                for n in 0..100 {
                    let name = format!("{batch:02}{n:02}{}", "x".repeat(1_020));
                    producer.created(&tx, &db(&name, 1));
                }
                Ok(())
            })
            .await
            .unwrap();
    }
    let options = unpolled().fold_rows_max(10_000);
    let _notifier = joined(&bus).await.notifier(options).await.unwrap();
    until("all are folded", async || bus.stats().folded.created == 1_000).await;
}

/// Regression: a name with more rows than one fold reads was split between the slots of an instance. An instance whose `created` was on the
/// next page seemed to have been replaced long ago, so its events were dropped as stale.
#[tokio::test]
async fn a_name_with_many_slots_and_lives_is_folded_whole() {
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let store = Store::memory();
        let bus = Bus::open(&store, BusOptions::default().partitions(1)).await.unwrap();
        let producer = bus.producer_with(ProducerOptions::default().slots(64)).unwrap();
        let mut recorded = Counters::ZERO;
        let mut last = None;
        for _ in 0..random.usize(1..6) {
            let life = Db::new("x".parse().unwrap(), DbInstance(random.u128(..).to_be_bytes()));
            let updates = random.u64(1..150);
            let is_last_life = random.bool();
            let deletes = u64::from(!is_last_life);
            for (count, kind) in
                [(1, EventKind::Created), (updates, EventKind::Updated), (deletes, EventKind::Deleted)]
            {
                for _ in 0..count {
                    let tx = store.begin();
                    producer.record_all(&tx, &life, &kind.once()).unwrap();
                    tx.commit().await.unwrap();
                    recorded += kind.once();
                }
            }
            last = Some((life, updates, !is_last_life));
            if is_last_life {
                break;
            }
        }
        let (life, updates, is_deleted) = last.unwrap();
        let options = NotifierOptions::default().fold_rows_max(10);
        let notifier = joined(&bus).await.notifier(options).await.unwrap();
        until("all is folded", async || bus.is_drained().await.unwrap()).await;
        let row = bus.feed().newest(&life.name).await.unwrap().unwrap();
        assert_eq!(row.is_deleted(), is_deleted, "seed {seed}");
        if !is_deleted {
            assert_eq!((row.instance, row.totals.updated), (life.instance, updates), "seed {seed}");
        }
        notifier.shutdown().await.unwrap();
        assert_eq!(bus.stats().folded, recorded, "seed {seed}");
    }
}
