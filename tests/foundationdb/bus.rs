//! The bus in one process on a cluster: record, fold, deliver.

use std::{collections::BTreeMap, sync::Arc};

use futures_util::future::join_all;
use notibus::{
    Cursor, Db, DbInstance, DispatcherOptions, EventKind,
    event::DdocId,
    node::BalanceOptions,
    producer::ProducerOptions,
    store::{
        Isolation, KeyRange, RangeRead, Store,
        testing::{CommitFault, Faults, Gate, Operation},
    },
};

use crate::{
    common::{db, eager, joined, record, row, row_with, rows, unpolled, until, within},
    fixture::{self, PARTITIONS},
    load::Observer,
};

/// Events that many producers record at once are all folded and delivered exactly, and nothing is left to fold.
pub(crate) async fn totals_equal_what_concurrent_producers_recorded() {
    let store = fixture::open(fixture::shared()).await;
    let bus = fixture::bus(&store, &fixture::prefix("totals")).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let observer = Observer::start(&dispatcher);
    let producers = (0..8_u64).map(|number| {
        let (store, producer) = (store.clone(), bus.producer());
        tokio::spawn(async move {
            for n in 0..40 {
                let (one, other) =
                    (db(&format!("db{}", (number + n) % 12), 1), db(&format!("db{}", n % 5), 1));
                store
                    .run(async |tx| {
                        producer.updated(&tx, &one);
                        producer.updated(&tx, &other);
                        Ok(())
                    })
                    .await
                    .unwrap();
            }
        })
    });
    let mut expected = BTreeMap::new();
    for (number, n) in (0..8_u64).flat_map(|number| (0..40).map(move |n| (number, n))) {
        *expected.entry(format!("db{}", (number + n) % 12)).or_insert(0) += 1;
        *expected.entry(format!("db{}", n % 5)).or_insert(0) += 1;
    }
    for producer in join_all(producers).await {
        producer.unwrap();
    }
    observer.until_delivered(&expected).await;
    let found: BTreeMap<_, _> =
        rows(&bus).await.iter().map(|row| (row.name.to_string(), row.totals.lanes()[2])).collect();
    assert_eq!(found, expected);
    assert!(bus.is_drained().await.unwrap());
    assert_eq!(bus.stats().folded.lanes(), [0, 0, expected.values().sum(), 0]);
    notifier.shutdown().await.unwrap();
}

/// The life of a database: created, changed, deleted, and created again.
pub(crate) async fn a_row_has_the_life_of_its_database() {
    let store = fixture::open(fixture::shared()).await;
    let bus = fixture::bus(&store, &fixture::prefix("life")).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 2, 1]).await;
    let first = row_with(&bus, &db("a", 1), [1, 0, 2, 1]).await;
    assert_eq!(first.created_at, Some(first.sequence));
    record(&store, &bus, &db("a", 1), [0, 1, 0, 0]).await;
    let gone = row_with(&bus, &db("a", 1), [1, 1, 2, 1]).await;
    assert_eq!(
        (gone.created_at, gone.deleted_at, gone.kinds),
        (Some(first.sequence), Some(gone.sequence), EventKind::Deleted.into())
    );
    record(&store, &bus, &db("a", 2), [1, 0, 0, 0]).await;
    let second = row_with(&bus, &db("a", 2), [1, 0, 0, 0]).await;
    let replaced = second.replaced.expect("the old one was in the row");
    assert_eq!((replaced.instance, replaced.deleted_at), (DbInstance([1; 16]), gone.sequence));
    assert!(first.sequence < gone.sequence && gone.sequence < second.sequence);
    assert_eq!(rows(&bus).await.len(), 1);
    assert!(bus.feed().now().await.unwrap() >= second.sequence);
    let page = bus.feed().page(Cursor::BEGINNING, 10).await.unwrap();
    assert_eq!(page.rows, [Arc::new(second)]);
}

/// A row has the versionstamp that the commit of the newest transaction with an event returned.
pub(crate) async fn rows_carry_the_stamps_of_their_transactions() {
    let store = fixture::open(fixture::shared()).await;
    let bus = fixture::bus(&store, &fixture::prefix("stamps")).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let options = ProducerOptions::default().record_versionstamps(true).slots(8);
    let producer = bus.producer_with(options).unwrap();
    let mut last = None;
    for n in 1..=20 {
        let tx = store.begin();
        producer.updated(&tx, &db("a", 1));
        let stamp = tx.commit().await.unwrap().expect("it writes").versionstamp;
        let row = row_with(&bus, &db("a", 1), [0, 0, n, 0]).await;
        assert_eq!(row.versionstamp, Some(stamp));
        assert!(last < Some(stamp));
        last = Some(stamp);
    }
    assert!(bus.is_drained().await.unwrap());
}

/// Returns the stored rows of the design documents, as keys and values.
async fn ddoc_rows(store: &Store, prefix: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    // The tuple element of the family's number, after the prefix.
    let range = KeyRange::prefix([prefix, b"\x15\x09"].concat());
    let page = store.begin().get_range(&RangeRead::new(range), Isolation::Snapshot).await.unwrap();
    page.rows.iter().map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

/// Each design document has a row with the sequence of the notification that last contained it.
pub(crate) async fn ids_of_design_documents_are_kept() {
    let store = fixture::open(fixture::shared()).await;
    let prefix = fixture::prefix("ddocs");
    let bus = fixture::bus(&store, &prefix).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let producer = bus.producer();
    for n in 1..=2 {
        store
            .run(async |tx| {
                for id in ["views", "filters"] {
                    producer.ddoc_updated(&tx, &db("a", 1), Some(&DdocId::new(id).unwrap()));
                }
                Ok(())
            })
            .await
            .unwrap();
        let row = row_with(&bus, &db("a", 1), [0, 0, 0, 2 * n]).await;
        assert_eq!(row.ddoc_updated_at, Some(row.sequence));
        let ddocs = ddoc_rows(&store, &prefix).await;
        assert_eq!(ddocs.len(), 2);
        for ((key, value), id) in ddocs.iter().zip(["filters", "views"]) {
            assert!(key.windows(id.len()).any(|part| part == id.as_bytes()), "{key:?}");
            assert_eq!(value, row.sequence.as_bytes());
        }
    }
    assert!(bus.is_drained().await.unwrap());
}

/// Notifiers in separate clients share the partitions, and none folds the partitions of another.
pub(crate) async fn notifiers_share_the_partitions() {
    let prefix = fixture::prefix("shares");
    let mut notifiers = Vec::new();
    for _ in 0..PARTITIONS {
        let store = fixture::open(fixture::shared()).await;
        let bus = fixture::bus(&store, &prefix).await;
        let balance = BalanceOptions::default().leases_max(Some(1));
        let options = eager().balance(balance);
        notifiers.push((joined(&bus).await.notifier(options).await.unwrap(), bus));
    }
    let store = fixture::open(fixture::shared()).await;
    let bus = fixture::bus(&store, &prefix).await;
    let dbs: Vec<Db> = (0..30).map(|n| db(&format!("db{n}"), 1)).collect();
    join_all(dbs.iter().map(|db| record(&store, &bus, db, [1, 0, 3, 0]))).await;
    for db in &dbs {
        row_with(&bus, db, [1, 0, 3, 0]).await;
    }
    let folded: Vec<u64> = notifiers.iter().map(|(_, bus)| bus.stats().folded.total()).collect();
    assert_eq!(folded.iter().sum::<u64>(), 30 * 4, "{folded:?}");
    assert!(folded.iter().all(|&folded| folded > 0), "{folded:?}");
    for (notifier, _) in notifiers {
        notifier.shutdown().await.unwrap();
    }
}

/// A node that hangs in all its commits is presumed dead. Its pending work can no longer be committed, and once it wakes it rejoins.
pub(crate) async fn a_zombie_is_fenced_off() {
    let prefix = fixture::prefix("zombie");
    let store_a = fixture::open(fixture::shared()).await;
    let faults = Faults::new(&store_a);
    let bus_a = fixture::bus(&faults.store(), &prefix).await;
    let a = joined(&bus_a).await.notifier(eager()).await.unwrap();
    let gate = Gate::default();
    let held = gate.clone();
    // The tuple element of the family's number, after the prefix.
    let nodes = [&prefix[..], b"\x15\x0e\x02main\x00\x15\x04"].concat();
    faults.plan_commits(move |attempt| {
        let is_beat = attempt
            .mutations()
            .any(|mutation| matches!(mutation, Operation::Set { key, .. } if key.starts_with(&nodes)));
        let is_fold = attempt.applies(notibus::store::AtomicOp::CompareAndClear);
        (is_beat || is_fold).then(|| CommitFault::Hold(held.clone()))
    });
    let store_b = fixture::open(fixture::shared()).await;
    let bus_b = fixture::bus(&store_b, &prefix).await;
    record(&store_b, &bus_b, &db("a", 1), [1, 0, 0, 0]).await;
    within("A to fold", gate.reached()).await;

    let b = joined(&bus_b).await.notifier(eager()).await.unwrap();
    row_with(&bus_b, &db("a", 1), [1, 0, 0, 0]).await;
    until("B has everything", async || b.partitions().len() == PARTITIONS as usize).await;
    assert_eq!((bus_a.stats().folds, bus_b.stats().folded.lanes()), (0, [1, 0, 0, 0]));
    faults.heal();
    gate.open();
    for n in 1..=5 {
        record(&faults.store(), &bus_a, &db("a", 1), [0, 0, 1, 0]).await;
        row_with(&bus_b, &db("a", 1), [1, 0, n, 0]).await;
    }
    until("A takes part again", async || a.partitions().len() == b.partitions().len()).await;
    a.shutdown().await.unwrap();
    record(&store_b, &bus_b, &db("a", 1), [0, 0, 1, 0]).await;
    row_with(&bus_b, &db("a", 1), [1, 0, 6, 0]).await;
    let mut folded = bus_a.stats().folded;
    folded += bus_b.stats().folded;
    assert_eq!(folded.lanes(), [1, 0, 6, 0]);
    b.shutdown().await.unwrap();
}

/// Three clients share only the cluster: one records, the doorbell wakes another, which folds, and the pulse of the feed wakes a third,
/// which delivers. No poll is due in time to help.
pub(crate) async fn watches_wake_the_roles_of_other_clients() {
    let prefix = fixture::prefix("watches");
    let mut clients = Vec::new();
    for _ in 0..3 {
        let store = fixture::open(fixture::shared()).await;
        clients.push((fixture::bus(&store, &prefix).await, store));
    }
    let [(recorder, store), (folder, _), (teller, _)] = &clients[..] else { unreachable!("there are three") };
    let notifier = joined(folder).await.notifier(unpolled()).await.unwrap();
    let options = DispatcherOptions::default().poll_interval(crate::common::NEVER);
    let dispatcher = teller.dispatcher(options).await.unwrap();
    let observer = Observer::start(&dispatcher);
    let mut expected = BTreeMap::new();
    for n in 0..30_u64 {
        let name = format!("db{}", n % 7);
        record(store, recorder, &db(&name, 1), [0, 0, 1, 0]).await;
        *expected.entry(name).or_insert(0) += 1;
        // Every third time, the other clients go back to sleep before the next event.
        if n % 3 == 0 {
            observer.until_delivered(&expected).await;
            tokio::time::sleep(std::time::Duration::from_millis(30)).await;
        }
    }
    observer.until_delivered(&expected).await;
    assert!(recorder.stats().doorbells > 0);
    assert_eq!(recorder.stats().folds, 0);
    assert_eq!(folder.stats().folded.total(), 30);
    assert!(row(teller, &db("db0", 1)).await.is_some());
    notifier.shutdown().await.unwrap();
}
