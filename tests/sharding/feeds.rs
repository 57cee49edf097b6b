//! Single operations of a sharded feed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, DispatcherOptions, Error, JanitorOptions, Sequence,
    changes::{Change, ChangesOptions, ChangesQuery, DocId, DocSource, DocSummary, Leaf, Revision},
    event::{Incarnation, Versionstamp},
    feed::{Feed, HashingScheme, SchemeId, Schemes, ShardEvent, ShardId},
    store::{
        AtomicOp, Isolation, KeyRange, RangeRead, Store, StoreError, Transaction,
        testing::{CommitFault, Faults, Gate, Trace},
    },
};
use tokio::task::JoinSet;

use crate::common::{db, eager, joined, record, until, wide_bus, within};

/// The time within which a tail polls the store even without a hint.
const RARELY: Duration = Duration::from_mins(10);

/// Makes revision number `position` of the document `id`.
fn doc(id: &str, position: u64) -> DocSummary {
    let revision = Revision { position, hash: [position as u8; 16] };
    DocSummary { id: DocId::new(id).unwrap(), revision, branches: 1, is_deleted: false }
}

/// Opens a bus in `store`, and creates a database with a changes feed of `shards` shards.
async fn begun(store: &Store, shards: u32) -> (Bus, Db) {
    let bus = wide_bus(store).await;
    let db = db("docs", 1);
    let options = ChangesOptions::default().shards(shards);
    store.run(async |tx| bus.changes().create(&tx, &db, &options).await).await.unwrap();
    (bus, db)
}

/// Commits an edit; returns its sequence.
async fn edit(store: &Store, bus: &Bus, db: &Db, doc: &DocSummary, previous: Option<Sequence>) -> Sequence {
    let tx = store.begin();
    let edited = bus.changes().writer(&tx, db).await.unwrap().record(doc, previous).unwrap();
    edited.of(tx.commit().await.unwrap().unwrap())
}

/// Returns the ids of the rows, in order, each with the position of its revision.
fn ids_and_positions(rows: &[Arc<Change>]) -> Vec<(&str, u64)> {
    rows.iter().map(|row| (row.doc.id.as_str(), row.doc.revision.position)).collect()
}

async fn dump(store: &Store) -> Vec<(Bytes, Bytes)> {
    let all = RangeRead::new(KeyRange::new(&b""[..], &b"\xff"[..])).limit(100_000).target_bytes(usize::MAX);
    store.begin().get_range(&all, Isolation::Snapshot).await.unwrap().rows
}

#[tokio::test]
async fn an_insert_writes_one_row_and_counts_it_and_an_update_clears_one() {
    let faults = Faults::new(&Store::memory());
    let store = faults.store();
    let (bus, db) = begun(&store, 4).await;
    let changes = bus.changes();
    // From here on the topology is cached.
    edit(&store, &bus, &db, &doc("warm", 1), None).await;
    let mut previous = None;
    for after in ["that there is one row more", "the row of before", "the row of before"] {
        let tx = store.begin();
        changes.writer(&tx, &db).await.unwrap();
        let before = faults.counts();
        let writer = changes.writer(&tx, &db).await.unwrap();
        assert_eq!(faults.counts().reads - before.reads, 1, "the one key that says that no reshard came");
        let edited = writer.record(&doc("x", 1), previous).unwrap();
        assert_eq!(faults.counts().reads - before.reads, 1, "recording reads nothing");
        previous = Some(edited.of(tx.commit().await.unwrap().unwrap()));
        let all = faults.counts().mutations - before.mutations;
        assert_eq!(all, 4, "the row, where it stands, the event, and {after}");
    }
}

#[tokio::test]
async fn a_writer_that_a_reshard_has_overtaken_fails_and_tries_again() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 2).await;
    let changes = bus.changes();
    edit(&store, &bus, &db, &doc("warm", 1), None).await;
    let tx = store.begin();
    changes.writer(&tx, &db).await.unwrap().record(&doc("x", 1), None).unwrap();
    changes.feed(&db).reshard(3, None).await.unwrap();
    assert_eq!(tx.commit().await.unwrap_err().code(), Some(1020));

    // A writer that begins after the reshard, with a topology cached before it, finds the new one.
    let sequence = edit(&store, &bus, &db, &doc("x", 1), None).await;
    let topology = changes.feed(&db).topology().await.unwrap();
    assert!(topology[0].is_closed && sequence > topology[1].first);
    assert_eq!(topology[1].shards, [3, 4, 5].map(ShardId));
}

#[tokio::test]
async fn a_document_that_is_recorded_twice_in_a_transaction_has_one_row() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 4).await;
    let changes = bus.changes();
    let previous = edit(&store, &bus, &db, &doc("x", 1), None).await;
    store
        .run(async |tx| {
            for position in [2, 3] {
                changes.writer(&tx, &db).await?.record(&doc("x", position), Some(previous))?;
                changes.writer(&tx, &db).await?.record(&doc("y", position), None)?;
            }
            Ok(())
        })
        .await
        .unwrap();
    let page = changes.feed(&db).page(Cursor::BEGINNING, 10).await.unwrap();
    assert_eq!(ids_and_positions(&page.rows), [("x", 3), ("y", 3)]);
}

#[tokio::test]
async fn a_feed_begins_once_and_ends_with_its_database() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 4).await;
    let changes = bus.changes();
    let before = dump(&store).await;
    let create = async |shards| {
        let options = ChangesOptions::default().shards(shards);
        store.run(async |tx| changes.create(&tx, &db, &options).await).await
    };
    create(4).await.expect("the same again, as after an unknown result");
    assert_eq!(dump(&store).await, before);

    edit(&store, &bus, &db, &doc("x", 1), None).await;
    store
        .run(async |tx| {
            changes.remove(&tx, &db);
            Ok(())
        })
        .await
        .unwrap();
    let missing = changes.feed(&db).page(Cursor::BEGINNING, 10).await.unwrap_err();
    assert!(matches!(missing, Error::NoFeed { .. }), "{missing}");
    let tx = store.begin();
    assert!(matches!(changes.writer(&tx, &db).await, Err(Error::NoFeed { .. })));
    assert!(matches!(changes.feed(&db).reshard(2, None).await, Err(Error::NoFeed { .. })));
    let documents = b"notibus\x15\x04\x01d";
    assert!(dump(&store).await.iter().all(|(key, _)| !key.starts_with(documents)), "no row is left");
}

#[tokio::test]
async fn rows_that_lay_unsharded_are_read_as_the_first_shard() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let (changes, db) = (bus.changes(), db("old", 1));
    // Rows of another layer: a prefix, and the tuple of incarnation 0 and a versionstamp.
    let mut sequences = Vec::new();
    for name in ["a", "b", "c"] {
        let tx = store.begin();
        let key = [&b"layer/changes"[..], &[0x14, 0x33], &[0; 12], &15_u32.to_le_bytes()].concat();
        let id = [&[0x02][..], name.as_bytes(), &[0]].concat();
        let row = [&[0x15, 1][..], &id, &[0x15, 1, 0x01], &[9; 16], &[0, 0x15, 1, 0x27]].concat();
        tx.atomic(AtomicOp::SetVersionstampedKey, &key, &row);
        let stamp = tx.commit().await.unwrap().unwrap().versionstamp;
        sequences.push(Sequence::new(Incarnation(0), stamp, 0));
    }
    let options = ChangesOptions::default().shards(3);
    changes.adopt(&db, b"layer/changes", &options).await.unwrap();
    changes.adopt(&db, b"layer/changes", &options).await.expect("the same again changes nothing");
    let feed = changes.feed(&db);
    let topology = feed.topology().await.unwrap();
    assert_eq!((topology[0].scheme, &topology[0].shards[..]), (None, &[ShardId(0)][..]));
    assert_eq!(
        (topology[1].scheme, &topology[1].shards[..]),
        (Some(SchemeId::ID), &[1, 2, 3].map(ShardId)[..])
    );

    assert_eq!(
        ids_and_positions(&feed.page(Cursor::BEGINNING, 10).await.unwrap().rows),
        [("a", 1), ("b", 1), ("c", 1)]
    );
    edit(&store, &bus, &db, &doc("b", 2), Some(sequences[1])).await;
    edit(&store, &bus, &db, &doc("d", 1), None).await;
    let page = feed.page(Cursor::BEGINNING, 10).await.unwrap();
    assert_eq!(ids_and_positions(&page.rows), [("a", 1), ("c", 1), ("b", 2), ("d", 1)]);
    assert_eq!(
        ids_and_positions(&feed.page(sequences[1], 10).await.unwrap().rows),
        [("c", 1), ("b", 2), ("d", 1)]
    );
    assert_eq!(feed.pending(sequences[0]).await.unwrap(), 3);
    assert_eq!(feed.shard_rows(ShardId(0)).await.unwrap(), 2, "one has left the legacy range");
    assert_eq!(feed.pending(Cursor::BEGINNING).await.unwrap(), 4);

    let mut legacy = feed.shard_reader(ShardId(0), Sequence::MIN);
    let Some(ShardEvent::Rows(rows)) = legacy.try_next().await.unwrap() else { panic!("it has rows") };
    assert_eq!(ids_and_positions(&rows.rows), [("a", 1), ("c", 1)]);
    let Some(ShardEvent::Resharded(end)) = legacy.try_next().await.unwrap() else { panic!("it is closed") };
    assert_eq!(end.successor, topology[1]);

    for bad in [&b""[..], b"\xff", &[1; 1_025]] {
        assert!(matches!(
            changes.adopt(&self::db("other", 2), bad, &options).await,
            Err(Error::Invalid { .. })
        ));
    }
}

#[tokio::test]
async fn pages_go_both_ways_across_reshards() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 3).await;
    let feed = bus.changes().feed(&db);
    let mut expected = Vec::new();
    for step in 0..60_u64 {
        if step % 13 == 12 {
            feed.reshard(step as u32 % 5 + 1, None).await.unwrap();
        }
        let id = format!("doc{step}");
        expected.push(edit(&store, &bus, &db, &doc(&id, 1), None).await);
    }
    // Pages of 12 and 13 rows end exactly where a topology does.
    for limit in [1, 7, 12, 13, 60, 100] {
        let (mut forth, mut back) = (Vec::new(), Vec::new());
        let mut cursor = Cursor::BEGINNING;
        loop {
            let page = feed.page(cursor, limit).await.unwrap();
            assert!(page.rows.len() <= limit);
            forth.extend(page.rows.iter().map(|row| row.sequence));
            cursor = page.next;
            if !page.more {
                break;
            }
        }
        let mut before = Sequence::MAX;
        loop {
            let page = feed.page_before(before, limit).await.unwrap();
            assert!(page.rows.len() <= limit);
            back.extend(page.rows.iter().map(|row| row.sequence));
            before = page.to;
            if !page.more {
                break;
            }
        }
        back.reverse();
        assert_eq!((&forth, &back), (&expected, &expected), "limit {limit}");
    }
    assert_eq!(feed.pending(expected[20]).await.unwrap(), 39);
    assert_eq!(bus.changes().last_change(&db).await.unwrap(), expected.last().copied());
    feed.reshard(9, None).await.unwrap();
    assert_eq!(feed.last_sequence().await.unwrap(), expected.last().copied(), "the new shards are empty yet");
}

#[tokio::test]
async fn a_partition_stays_in_one_shard() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let (changes, db) = (bus.changes(), db("partitioned", 1));
    let options = ChangesOptions::default().shards(50).scheme(SchemeId::PARTITION_KEY);
    store.run(async |tx| changes.create(&tx, &db, &options).await).await.unwrap();
    for n in 0..20 {
        edit(&store, &bus, &db, &doc(&format!("sensor:{n}"), 1), None).await;
        edit(&store, &bus, &db, &doc(&format!("_design/sensor:{n}"), 1), None).await;
    }
    let feed = changes.feed(&db);
    let mut with_sensors = 0;
    for shard in feed.shards().await.unwrap() {
        let rows = feed.shard_page(shard, Cursor::BEGINNING, 100).await.unwrap().rows;
        with_sensors += u32::from(rows.iter().any(|row| row.doc.id.as_str().starts_with("sensor:")));
    }
    assert_eq!(with_sensors, 1);
}

/// Routes everything to the last shard.
#[derive(Debug)]
struct Last;

impl HashingScheme for Last {
    fn place(&self, _id: &[u8], shards: u32) -> u32 {
        shards - 1
    }
}

#[tokio::test]
async fn a_scheme_that_a_process_does_not_know_is_a_typed_error() {
    let store = Store::memory();
    let schemes = Schemes::default().with(SchemeId(2_000), Last).unwrap();
    let knowing = Bus::open(&store, BusOptions::default().schemes(schemes)).await.unwrap();
    let (changes, db) = (knowing.changes(), db("docs", 1));
    let options = ChangesOptions::default().shards(5).scheme(SchemeId(2_000));
    store.run(async |tx| changes.create(&tx, &db, &options).await).await.unwrap();
    edit(&store, &knowing, &db, &doc("x", 1), None).await;
    assert_eq!(changes.feed(&db).shard_page(ShardId(5), Sequence::MIN, 10).await.unwrap().rows.len(), 1);

    let other = wide_bus(&store).await;
    let before = dump(&store).await;
    let written = store.run(async |tx| {
        other.changes().writer(&tx, &db).await?.record(&doc("y", 1), None)?;
        Ok(())
    });
    assert!(matches!(written.await, Err(Error::UnknownScheme { scheme: 2_000 })));
    assert!(matches!(
        other.changes().feed(&db).reshard(2, None).await,
        Err(Error::UnknownScheme { scheme: 2_000 })
    ));
    assert_eq!(dump(&store).await, before);
    assert_eq!(
        other.changes().feed(&db).page(Cursor::BEGINNING, 10).await.unwrap().rows.len(),
        1,
        "reading needs none"
    );
}

#[tokio::test]
async fn bad_input_is_a_typed_error_and_changes_nothing() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 2).await;
    let feed = bus.changes().feed(&db);
    edit(&store, &bus, &db, &doc("x", 1), None).await;
    let old = feed.reshard(2, None).await.unwrap();
    let before = dump(&store).await;
    let ahead = Sequence::new(Incarnation(0), Versionstamp::new(u64::MAX / 2, 0), 0);
    let of_another = Sequence::new(Incarnation(1), Versionstamp::new(1, 0), 0);
    for since in [ahead, of_another, Sequence::MAX] {
        // The store has never had the first position: it belongs to another history. The others cannot be positions of this bus.
        let is_refused = |error: Option<Error>| match error {
            Some(Error::Expired { .. }) => since == ahead,
            Some(Error::Invalid { what: "sequence", .. }) => since != ahead,
            _ => false,
        };
        assert!(is_refused(feed.page(since, 10).await.err()), "{since}");
        assert!(is_refused(feed.pending(since).await.err()), "{since}");
        assert!(is_refused(feed.shard_page(old.shards[0], since, 10).await.err()), "{since}");
        assert!(is_refused(feed.topology_at(since).await.err()), "{since}");
        let mut reader = feed.shard_reader(old.shards[0], since);
        assert!(is_refused(reader.try_next().await.err()), "{since}");
    }
    for shard in [0, 5, u64::MAX].map(ShardId) {
        let read = feed.shard_page(shard, Cursor::BEGINNING, 10).await;
        assert!(matches!(read, Err(Error::NoShard { .. })), "{read:?}");
        assert!(matches!(
            feed.shard_reader(shard, Cursor::BEGINNING).try_next().await,
            Err(Error::NoShard { .. })
        ));
    }
    for shards in [0, 10_001, u32::MAX] {
        assert!(matches!(feed.reshard(shards, None).await, Err(Error::Invalid { what: "shards", .. })));
        let options = ChangesOptions::default().shards(shards);
        let other = self::db("other", 2);
        let created = store.run(async |tx| bus.changes().create(&tx, &other, &options).await).await;
        assert!(matches!(created, Err(Error::Invalid { what: "shards", .. })));
    }
    assert!(matches!(feed.reshard(2, Some(SchemeId(3))).await, Err(Error::UnknownScheme { scheme: 3 })));
    for limit in [0, 10_001] {
        assert!(matches!(
            feed.page(Cursor::BEGINNING, limit).await,
            Err(Error::Invalid { what: "limit", .. })
        ));
        assert!(matches!(
            feed.page_before(Sequence::MAX, limit).await,
            Err(Error::Invalid { what: "limit", .. })
        ));
    }
    let tx = store.begin();
    let writer = bus.changes();
    let writer = writer.writer(&tx, &db).await.unwrap();
    for bad in [doc("y", 0), DocSummary { branches: 0, ..doc("y", 1) }] {
        assert!(matches!(writer.record(&bad, None), Err(Error::Invalid { what: "document", .. })));
    }
    tx.commit().await.unwrap();
    assert_eq!(dump(&store).await, before);
}

/// A layer that knows two leaves and a body for every document.
struct Layer;

impl DocSource for Layer {
    fn leaves<'a>(
        &'a self,
        _: &'a Transaction,
        _: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, notibus::Result<Vec<Leaf>>> {
        assert!(doc.branches > 1, "the only leaf of a document of one branch is known");
        let loser = Revision { position: 1, hash: [0; 16] };
        let leaves = [doc.revision, loser].map(|revision| Leaf { revision, is_deleted: false });
        Box::pin(async move { Ok(leaves.to_vec()) })
    }

    fn body<'a>(
        &'a self,
        tx: &'a Transaction,
        db: &'a Db,
        doc: &'a DocSummary,
    ) -> BoxFuture<'a, notibus::Result<Option<Bytes>>> {
        let key = format!("{}/{}", db.name, doc.id);
        Box::pin(async move { tx.get(key.as_bytes(), Isolation::Snapshot).await })
    }
}

#[tokio::test]
async fn leaves_and_documents_come_from_the_layer() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 2).await;
    let changes = bus.changes();
    store
        .run(async |tx| {
            let writer = changes.writer(&tx, &db).await?;
            writer.record(&doc("one", 1), None)?;
            writer.record(&DocSummary { branches: 2, ..doc("two", 3) }, None)?;
            tx.set(b"docs/two", b"body");
            Ok(())
        })
        .await
        .unwrap();
    let plain = changes.rows(&db, &ChangesQuery::default(), &Layer).await.unwrap();
    assert!(plain.rows.iter().all(|row| row.leaves.len() == 1 && row.body.is_none()));
    let query = ChangesQuery::default()
        .all_leaves(true)
        .include_docs(true)
        .descending(true)
        .from(Sequence::MAX.into())
        .limit(10);
    let page = changes.rows(&db, &query, &Layer).await.unwrap();
    let rows: Vec<_> = page
        .rows
        .iter()
        .map(|row| (row.change.doc.id.as_str(), row.leaves.len(), row.body.as_deref()))
        .collect();
    assert_eq!(rows, [("two", 2, Some(&b"body"[..])), ("one", 1, None)]);
}

#[tokio::test(start_paused = true)]
async fn a_tail_of_changes_is_woken_by_the_notifications_of_its_database() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 2).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut tail = bus.changes().tail(&dispatcher, &db, Cursor::BEGINNING);
    for step in 0..20 {
        let (id, write) = (format!("doc{step}"), async {
            tokio::time::sleep(Duration::from_millis(step)).await;
            edit(&store, &bus, &db, &doc(&format!("doc{step}"), 1), None).await;
            if step % 5 == 4 {
                bus.changes().feed(&db).reshard(step as u32, None).await.unwrap();
            }
        });
        let started = tokio::time::Instant::now();
        let (page, ()) = tokio::join!(within("the change", tail.next()), write);
        assert_eq!(ids_and_positions(&page.unwrap().rows), [(id.as_str(), 1)]);
        assert!(started.elapsed() < Duration::from_secs(5), "it did not wait for the poll");
    }
}

/// Regression: each tail polled every 10 s, so it polled 120 times in 20 minutes.
#[tokio::test(start_paused = true)]
async fn tails_of_changes_that_wait_hardly_ever_poll() {
    const TAILS: usize = 100;
    let trace = Trace::new(&Store::memory());
    let store = trace.store();
    let (bus, db) = begun(&store, 2).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let cost = async || {
        tokio::time::sleep(Duration::from_secs(5)).await;
        trace.take();
        tokio::time::sleep(Duration::from_mins(20)).await;
        trace.take().len()
    };
    let without = cost().await;
    let mut tails = JoinSet::new();
    for _ in 0..TAILS {
        let mut tail = bus.changes().tail(&dispatcher, &db, Cursor::BEGINNING);
        tails.spawn(async move { tail.next().await.map(|page| (tail, page)) });
    }
    let with = cost().await;
    println!("{with} transactions with {TAILS} tails, {without} without");
    // Each tail polls once or twice in 5 minutes.
    assert!(
        with < without + TAILS * 8 + TAILS / 2,
        "{with} transactions with {TAILS} tails, {without} without"
    );
    edit(&store, &bus, &db, &doc("x", 1), None).await;
    let mut last = None;
    while let Some(joined) = within("the change", tails.join_next()).await {
        let (tail, page) = joined.unwrap().unwrap();
        assert_eq!(ids_and_positions(&page.rows), [("x", 1)]);
        last = Some(tail);
    }
    // Without a dispatcher there is only the poll.
    dispatcher.shutdown().await;
    edit(&store, &bus, &db, &doc("y", 1), None).await;
    let page = within("the poll", last.unwrap().next()).await.unwrap();
    assert_eq!(ids_and_positions(&page.rows), [("y", 1)]);
}

/// Regression: a tail slept forever if the changes feed of its database was removed without an event.
#[tokio::test(start_paused = true)]
async fn a_tail_learns_that_its_changes_were_removed_without_a_word() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 2).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let mut tail = bus.changes().tail(&dispatcher, &db, Cursor::BEGINNING);
    let remove = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let changes = bus.changes();
        store
            .run(async |tx| {
                changes.remove(&tx, &db);
                Ok(())
            })
            .await
            .unwrap();
    };
    let (next, ()) = tokio::join!(tokio::time::timeout(RARELY, tail.next()), remove);
    let error = next.expect("it polls now and then").unwrap_err();
    assert!(matches!(error, Error::NoFeed { .. }), "{error}");
}

/// Edits of a database that the bus considers replaced are folded without a row. A single posted `created` for the name of a layer's
/// database is enough for that. Regression: a tail of such a database slept forever.
#[tokio::test(start_paused = true)]
async fn a_tail_finds_edits_without_a_notification() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 2).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let invented = Db::new(db.name.clone(), DbInstance([99; 16]));
    record(&store, &bus, &invented, [1, 0, 0, 0]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let mut tail = bus.changes().tail(&dispatcher, &db, Cursor::BEGINNING);
    let write = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        edit(&store, &bus, &db, &doc("x", 1), None).await;
    };
    let (page, ()) = tokio::join!(tokio::time::timeout(RARELY, tail.next()), write);
    assert!(bus.stats().stale_events > 0, "the edit was folded as stale");
    assert_eq!(ids_and_positions(&page.expect("it polls now and then").unwrap().rows), [("x", 1)]);
}

/// Regression: the token of a creation named the database, but not the options, so a creation of the same database with other options
/// counted as the same.
#[tokio::test]
async fn a_feed_that_began_otherwise_is_refused() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 4).await;
    let changes = bus.changes();
    let before = dump(&store).await;
    let other = ChangesOptions::default().shards(8);
    let created = store.run(async |tx| changes.create(&tx, &db, &other).await).await;
    assert!(matches!(created, Err(Error::Invalid { what: "feed", .. })));
    let four = ChangesOptions::default().shards(4);
    let adopted = changes.adopt(&db, b"legacy/", &four).await;
    assert!(matches!(adopted, Err(Error::Invalid { what: "feed", .. })));
    let own = changes.adopt(&self::db("other", 2), b"notibus", &four).await;
    assert!(
        matches!(own, Err(Error::Invalid { what: "legacy prefix", .. })),
        "the keys of the bus are not for it"
    );
    assert_eq!(dump(&store).await, before);
}

/// Regression: a writer that survived a reset of its transaction wrote to the old shards, which a reshard had closed.
#[tokio::test]
async fn a_writer_does_not_outlive_its_transaction() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 1).await;
    let (changes, tx) = (bus.changes(), store.begin());
    let writer = changes.writer(&tx, &db).await.unwrap();
    writer.record(&doc("x", 1), None).unwrap();
    changes.feed(&db).reshard(3, None).await.unwrap();
    assert_eq!(tx.commit().await.unwrap_err().code(), Some(1020));
    tx.reset();
    let refused = writer.record(&doc("x", 1), None);
    assert!(matches!(refused, Err(Error::Invalid { what: "changes writer", .. })));
}

#[tokio::test(start_paused = true)]
async fn a_reshard_of_unknown_result_is_done_once() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 1).await;
    let faults = Faults::new(&store);
    let feed = wide_bus(&faults.store()).await.changes().feed(&db);
    for (fault, expected) in [(CommitFault::After as fn(_) -> _, 2), (CommitFault::Before, 3)] {
        faults.script_commits([fault(StoreError::COMMIT_UNKNOWN_RESULT)]);
        let entry = feed.reshard(4, None).await.unwrap();
        let topology = bus.changes().feed(&db).topology().await.unwrap();
        assert_eq!((topology.len(), topology.last()), (expected, Some(&entry)));
    }
}

/// Regression: the entry of a reshard with an unknown result was dropped before a retry of the reshard could find it, so the retry undid
/// the next reshard.
#[tokio::test(start_paused = true)]
async fn a_reshard_of_unknown_result_is_done_once_although_its_entry_is_dropped() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 1).await;
    let feed = bus.changes().feed(&db);
    let faults = Faults::new(&store);
    let slow = wide_bus(&faults.store()).await.changes().feed(&db);
    faults.script_commits([CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT)]);
    let (mut reads, goes_on) = (0, Arc::new(AtomicBool::new(false)));
    let blocked = Arc::clone(&goes_on);
    faults.plan_reads(move |_| {
        reads += 1;
        (reads > 5 && !blocked.load(Ordering::Relaxed)).then_some(StoreError::TRANSACTION_TOO_OLD)
    });
    let resharding = tokio::spawn(async move { slow.reshard(4, None).await });
    until("it is written", async || feed.topology().await.unwrap().len() == 2).await;
    feed.reshard(8, None).await.unwrap();
    let options = JanitorOptions::default().interval(Duration::from_millis(10));
    let _janitor = joined(&bus).await.janitor(options).await.unwrap();
    until("it is dropped", async || feed.topology().await.unwrap().len() == 1).await;
    goes_on.store(true, Ordering::Relaxed);
    assert_eq!(resharding.await.unwrap().unwrap().shards.len(), 4);
    assert_eq!(feed.topology().await.unwrap().last().unwrap().shards.len(), 8, "the later one holds");
}

#[tokio::test]
async fn a_stored_entry_that_cannot_be_is_refused() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 1).await;
    let rows = dump(&store).await;
    let (key, value) = rows.iter().find(|(key, _)| key.starts_with(b"notibus\x15\x07\x01d")).unwrap();
    let mut bad = value.to_vec();
    let count = bad.len() - 4;
    bad[count..].copy_from_slice(&5_000_000_u32.to_be_bytes());
    store
        .run(async |tx| {
            tx.set(key, &bad);
            Ok(())
        })
        .await
        .unwrap();
    assert!(matches!(bus.changes().feed(&db).topology().await, Err(Error::Corrupt { .. })));
}

/// A fold that began before a reshard cannot commit: its rows would be in a closed shard.
#[tokio::test(start_paused = true)]
async fn a_fold_that_a_reshard_has_overtaken_tries_again() {
    let store = Store::memory();
    let faults = Faults::new(&store);
    let (gate, mut is_held) = (Gate::default(), false);
    let bus = wide_bus(&faults.store()).await;
    let held = gate.clone();
    faults.plan_commits(move |attempt| {
        let holds = !is_held && attempt.applies(AtomicOp::SetVersionstampedKey);
        is_held |= holds;
        holds.then(|| CommitFault::Hold(held.clone()))
    });
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("db", 1), [0, 0, 1, 0]).await;
    within("the fold", gate.reached()).await;
    let feed = wide_bus(&store).await.feed();
    let entry = feed.reshard(9, None).await.unwrap();
    gate.open();
    until("it is folded", async || bus.stats().folded.updated == 1).await;
    let rows = feed.page(Cursor::BEGINNING, 10).await.unwrap().rows;
    assert_eq!(rows.len(), 1);
    assert!(rows[0].sequence > entry.first);
    let old = feed.topology().await.unwrap().swap_remove(0);
    for shard in old.shards {
        assert_eq!(feed.shard_rows(shard).await.unwrap(), 0, "no row is in a closed shard");
    }
}

#[tokio::test]
async fn concurrent_reshards_come_one_after_the_other() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 1).await;
    let feed: Feed<Change> = bus.changes().feed(&db);
    let reshards: Vec<_> = (1..=10_u32)
        .map(|shards| {
            let feed = feed.clone();
            tokio::spawn(async move { feed.reshard(shards, None).await.unwrap() })
        })
        .collect();
    let mut entries = Vec::new();
    for reshard in reshards {
        entries.push(reshard.await.unwrap());
    }
    entries.sort_by_key(|entry| entry.first);
    let topology = feed.topology().await.unwrap();
    assert_eq!(topology.len(), 11);
    let ids: Vec<_> = topology.iter().flat_map(|entry| entry.shards.iter().map(|shard| shard.0)).collect();
    assert!(ids.iter().copied().eq(1..=56), "one after the other, none twice: {ids:?}");
    let shards = |entries: &[notibus::feed::TopologyEntry]| {
        entries.iter().map(|e| e.shards.clone()).collect::<Vec<_>>()
    };
    assert_eq!(shards(&entries), shards(&topology[1..]));
}

#[test]
fn instances_have_feeds_of_their_own() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let store = Store::memory();
        let (bus, first) = begun(&store, 1).await;
        edit(&store, &bus, &first, &doc("x", 1), None).await;
        let second = Db::new(first.name.clone(), DbInstance([2; 16]));
        let page = bus.changes().feed(&second).page(Cursor::BEGINNING, 10).await;
        assert!(matches!(page, Err(Error::NoFeed { .. })), "a database of the same name begins again");
    });
}

/// Regression: a writer that was kept while its feed was removed in the same transaction left a row of a feed that did not exist.
#[tokio::test]
async fn a_writer_that_is_kept_over_the_removal_of_its_feed_writes_nothing() {
    let store = Store::memory();
    let (bus, db) = begun(&store, 2).await;
    let changes = bus.changes();
    let write = async |tx: Transaction| {
        let writer = changes.writer(&tx, &db).await?;
        changes.remove(&tx, &db);
        let refused = writer.record(&doc("x", 1), None);
        assert!(matches!(refused, Err(Error::NoFeed { .. })), "{refused:?}");
        Ok(())
    };
    store.run(write).await.unwrap();
    // If the feed is created again in the same transaction, a new writer can write to it.
    let write = async |tx: Transaction| {
        let options = ChangesOptions::default();
        changes.create(&tx, &db, &options).await?;
        changes.writer(&tx, &db).await?.record(&doc("x", 1), None)?;
        changes.remove(&tx, &db);
        changes.create(&tx, &db, &options).await?;
        changes.writer(&tx, &db).await?.record(&doc("y", 1), None)?;
        Ok(())
    };
    store.run(write).await.unwrap();
    let page = changes.feed(&db).page(Cursor::BEGINNING, 10).await.unwrap();
    let ids: Vec<_> = page.rows.iter().map(|row| row.doc.id.as_str()).collect();
    assert_eq!(ids, ["y"]);
}
