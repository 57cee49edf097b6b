//! An index of many databases, kept by several processes, some of which are killed.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, NodeOptions, NotifierOptions,
    changes::{Change, ChangesOptions, DocId, DocSummary, Revision},
    consumer::{
        ConsumerOptions, ConsumerSettings, HandlerResult, IndexBuild, ParallelBatch, ParallelJob, index,
    },
    cursor::Start,
    store::{AtomicOp, Isolation, KeyRange, RangeRead, Store, Transaction},
};
use tokio::sync::oneshot;

use crate::{
    child::{self, Child},
    fixture,
};

const DBS: usize = 5_000;

/// The number of databases that one transaction creates or edits.
const AT_ONCE: usize = 50;

/// The time limit for all builds, long enough for a slow machine.
const BUILT_WITHIN: Duration = Duration::from_mins(4);

async fn bus(store: &Store, prefix: &[u8]) -> Bus {
    let options = BusOptions::default().prefix(prefix.to_vec()).partitions(8).shards(6);
    Bus::open(store, options).await.unwrap()
}

/// Returns the prefix of the keys of `what`: documents, or entries of the index.
fn keys(prefix: &[u8], what: &str) -> Vec<u8> {
    [prefix, what.as_bytes(), b"/"].concat()
}

/// The part of a process: runs a node that folds and builds indexes, which have the number of the last edit of each document.
pub(crate) async fn indexer(file: &str, prefix: &[u8], end: oneshot::Receiver<()>) {
    let store = fixture::open(file).await;
    let bus = bus(&store, prefix).await;
    let times = NodeOptions::default().heartbeat(Duration::from_millis(400)).expiry(Duration::from_secs(2));
    let node = bus.node(times).await.unwrap();
    let notifier = node.notifier(NotifierOptions::default()).await.unwrap();
    let mut options = ConsumerOptions::index().debounce(Duration::from_millis(50)).max_concurrency(8);
    options.balance.interval = Duration::from_millis(500);
    let (changes, prefix) = (bus.changes(), Arc::<[u8]>::from(prefix));
    let build = move |build: IndexBuild| {
        let (store, feed, prefix) = (store.clone(), changes.feed(&build.db), Arc::clone(&prefix));
        async move {
            let job = ParallelJob::new(feed, Cursor::BEGINNING).with_work(&build.work);
            job.run(move |batch| write(store.clone(), Arc::clone(&prefix), batch)).await?;
            Ok(())
        }
    };
    let consumer = node.consumer("views").unwrap().options(options).run(index(build)).await.unwrap();
    child::report(&node.id().to_string());
    let _ = end.await;
    consumer.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
    node.shutdown().await.unwrap();
}

async fn write(store: Store, prefix: Arc<[u8]>, batch: ParallelBatch<Change>) -> HandlerResult {
    let body = async |tx: Transaction| {
        batch.verify(&tx).await?;
        for row in &batch.rows {
            let id = row.doc.id.as_str().as_bytes();
            tx.set(&[&keys(&prefix, "index"), id].concat(), &row.doc.revision.position.to_le_bytes());
        }
        Ok(())
    };
    Ok(store.run(body).await?)
}

/// Returns the keys of `what`, and their numbers.
async fn numbers(store: &Store, prefix: &[u8], what: &str) -> BTreeMap<Vec<u8>, u64> {
    let (tx, range) = (store.begin(), keys(prefix, what));
    let mut pages = tx.pages(RangeRead::new(KeyRange::prefix(range.clone())), Isolation::Snapshot);
    let mut found = BTreeMap::new();
    while let Some(rows) = pages.next().await.unwrap() {
        for (key, value) in rows {
            found.insert(key[range.len()..].to_vec(), u64::from_le_bytes(value[..].try_into().unwrap()));
        }
    }
    found
}

/// Three processes build the indexes of 5,000 databases, while processes are killed and replaced. In the end the index equals the
/// documents.
pub(crate) async fn an_index_kept_by_three_processes_equals_the_documents() {
    let (file, prefix) = (fixture::shared(), fixture::prefix("index"));
    let store = fixture::open(&file).await;
    let bus = bus(&store, &prefix).await;
    let views = bus.consumer("views").unwrap();
    views.create(&ConsumerSettings::default().start(Start::from(Cursor::BEGINNING))).await.unwrap();
    let start = async || {
        let mut child = Child::start("indexer", &file, &prefix);
        child.line().await;
        child
    };
    let mut fleet = vec![start().await, start().await, start().await];
    let dbs: Vec<_> = (0..DBS)
        .map(|n| Db::new(format!("db{n}").parse().unwrap(), DbInstance((n as u128 + 1).to_be_bytes())))
        .collect();
    let (changes, producer, options) = (bus.changes(), bus.producer(), ChangesOptions::default());
    for round in 1..=2_u64 {
        for (batch, some) in dbs.chunks(AT_ONCE).enumerate() {
            let edit = async |tx: Transaction| {
                for (n, db) in some.iter().enumerate() {
                    if round == 1 {
                        changes.create(&tx, db, &options).await?;
                        producer.created(&tx, db);
                    } else {
                        producer.updated(&tx, db);
                    }
                    // Each round edits a different document of the database.
                    let id = format!("{}/{round}", db.name);
                    let revision = Revision { position: round * 10 + n as u64 % 7, hash: [0; 16] };
                    let doc = DocSummary { id: DocId::new(&id)?, revision, branches: 1, is_deleted: false };
                    changes.writer(&tx, db).await?.record(&doc, None)?;
                    let key = [&keys(&prefix, "doc"), id.as_bytes()].concat();
                    // This must be idempotent: a transaction with an unknown result may be repeated.
                    tx.atomic(AtomicOp::Max, &key, &doc.revision.position.to_le_bytes());
                }
                Ok(())
            };
            store.run(edit).await.unwrap();
            if batch % 40 == 20 {
                fleet.remove(0).kill();
                fleet.push(start().await);
            }
        }
    }
    let until = std::time::Instant::now() + BUILT_WITHIN;
    let (docs, mut found) = (numbers(&store, &prefix, "doc").await, BTreeMap::new());
    assert_eq!(docs.len(), 2 * DBS);
    while found != docs {
        assert!(std::time::Instant::now() < until, "{} of {} documents are indexed", found.len(), docs.len());
        tokio::time::sleep(Duration::from_secs(1)).await;
        found = numbers(&store, &prefix, "index").await;
    }
    let is_done = async || {
        views.lag().await.unwrap().iter().all(|shard| shard.rows == 0)
            && views.deferred(None, 10).await.unwrap().is_empty()
    };
    crate::common::until("nothing is left to do", is_done).await;
    for child in fleet {
        child.end();
    }
}
