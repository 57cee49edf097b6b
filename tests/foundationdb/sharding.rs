//! Sharded feeds on a cluster: reshards under load, jobs, moving between stores, the janitor.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use notibus::{
    Bus, Cursor, JanitorOptions, Sequence,
    changes::{ChangesOptions, DocId, DocSummary, Revision},
    consumer::{ParallelBatch, ParallelJob},
    store::Store,
};

use crate::{
    common::{db, eager, joined, record, row, row_with, rows, until},
    fixture,
    scenario::{self, Size},
};

/// Writers, reshards and readers at once, while commits fail in all ways: the guarantees of the embedded store hold here, too.
pub(crate) async fn readers_see_every_change_once_and_in_order_through_any_reshard() {
    let store = fixture::open(fixture::shared()).await;
    let size = Size { writes: 60, reshards: 25, readers: 3, faults_percent: 10 };
    for _ in 0..3 {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let prefix = String::from_utf8(fixture::prefix("sharding")).expect("prefixes are text");
        scenario::check(&store, &prefix, seed, size).await;
    }
}

/// A job over many shards, with a reshard in the middle, ends at one consistent state of the feed.
pub(crate) async fn a_parallel_job_ends_at_one_state() {
    let store = fixture::open(fixture::shared()).await;
    let bus = fixture::bus(&store, &fixture::prefix("job")).await;
    let (changes, docs) = (bus.changes(), db("docs", 1));
    let options = ChangesOptions::default().shards(8);
    store.run(async |tx| changes.create(&tx, &docs, &options).await).await.unwrap();
    let edit = async |n: u32| {
        bus.run_exactly_once(None, async |tx| {
            let revision = Revision { position: 1, hash: [0; 16] };
            let id = DocId::new(&format!("doc{n}"))?;
            let doc = DocSummary { id, revision, branches: 1, is_deleted: false };
            changes.writer(&tx, &docs).await?.record(&doc, None).map(|_| ())
        })
        .await
        .unwrap();
    };
    for n in 0..100 {
        edit(n).await;
    }
    let feed = changes.feed(&docs);
    let seen = Arc::new(Mutex::new(BTreeMap::new()));
    let work = {
        let (seen, feed) = (Arc::clone(&seen), feed.clone());
        move |batch: ParallelBatch<notibus::changes::Change>| {
            let (seen, feed) = (Arc::clone(&seen), feed.clone());
            async move {
                if batch.rows.iter().any(|row| row.doc.id.as_str() == "doc50") {
                    feed.reshard(3, None).await?;
                }
                let rows = batch.rows.iter().map(|row| (row.doc.id.to_string(), row.sequence));
                seen.lock().unwrap().extend(rows);
                Ok(())
            }
        }
    };
    let job = ParallelJob::new(feed.clone(), Cursor::BEGINNING);
    let (to, ()) = tokio::join!(job.run(work), async {
        for n in 100..200 {
            edit(n).await;
        }
    });
    let to = to.unwrap();
    let rows = feed.page(Cursor::BEGINNING, 1_000).await.unwrap().rows;
    let expected: BTreeMap<_, _> = rows
        .iter()
        .filter(|row| row.sequence <= to.position())
        .map(|row| (row.doc.id.to_string(), row.sequence))
        .collect();
    assert_eq!(*seen.lock().unwrap(), expected);
    assert!(expected.len() >= 100);
}

/// A bus moves from memory to the cluster, and then to memory again: nothing is lost, and sequences grow.
pub(crate) async fn a_bus_moves_to_a_cluster_and_away() {
    let cluster = fixture::open(fixture::shared()).await;
    let prefix = fixture::prefix("moved");
    let mut store = Store::memory();
    let mut last = Sequence::MIN;
    for (step, next) in [cluster, Store::memory()].into_iter().enumerate() {
        let bus = fixture::bus(&store, &prefix).await;
        let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
        for n in 0..50 {
            record(&store, &bus, &db(&format!("db{n}"), 1), [0, 0, 1, 0]).await;
        }
        let row = row_with(&bus, &db("db49", 1), [0, 0, step as u64 + 1, 0]).await;
        assert!(row.sequence > last);
        until("all are folded", async || bus.is_drained().await.unwrap()).await;
        notifier.shutdown().await.unwrap();
        let before = rows(&bus).await;
        last = before.last().unwrap().sequence;
        let mut bytes = Vec::new();
        bus.export(&mut bytes, notibus::relocation::ExportOptions::default()).await.unwrap();
        Bus::import(&next, &prefix, &mut &bytes[..]).await.unwrap();
        assert_eq!(rows(&fixture::bus(&next, &prefix).await).await, before);
        store = next;
    }
}

/// The janitor deletes tombstones and empty shards, at batch priority.
pub(crate) async fn the_janitor_drops_what_is_old() {
    let store = fixture::open(fixture::shared()).await;
    let bus = fixture::bus(&store, &fixture::prefix("janitor")).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("gone", 1), [1, 1, 0, 0]).await;
    row_with(&bus, &db("gone", 1), [1, 1, 0, 0]).await;
    bus.feed().reshard(7, None).await.unwrap();
    let options =
        JanitorOptions::default().interval(Duration::from_millis(50)).tombstone_retention(Duration::ZERO);
    let janitor = joined(&bus).await.janitor(options).await.unwrap();
    until("the tombstone is dropped", async || row(&bus, &db("gone", 1)).await.is_none()).await;
    until("its shards are forgotten", async || bus.feed().topology().await.unwrap().len() == 1).await;
    janitor.shutdown().await.unwrap();
    notifier.shutdown().await.unwrap();
}
