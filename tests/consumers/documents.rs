//! Consumers of the documents of a database.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, Cursor, Db, DbInstance, Error, JanitorOptions, Sequence,
    changes::{Change, ChangesOptions, DocId, DocSummary, Revision},
    consumer::{Batch, Consumer, ConsumerOptions, FailurePolicy, Work},
    store::{Isolation, KeyRange, RangeRead, Transaction},
};
use tokio::sync::{Notify, RwLock};

use crate::{
    common::{self, db, joined, record, until, within},
    fixture::{ConsumerFixture, Given, Log, hinted, names, pass},
};

impl Given for Work<Change> {
    fn names(&self) -> Vec<String> {
        vec![String::from_utf8(self.id().to_vec()).unwrap()]
    }
}

impl Given for Batch<Change> {
    fn names(&self) -> Vec<String> {
        self.rows.iter().map(|row| row.doc.id.to_string()).collect()
    }
}

/// A database with documents, and a consumer of them.
struct Documents {
    fixture: ConsumerFixture,
    docs: Db,
}

impl Documents {
    async fn new(shards: u32) -> Self {
        let fixture = ConsumerFixture::new(1).await;
        let (changes, docs) = (fixture.bus.changes(), db("docs", 9));
        let options = ChangesOptions::default().shards(shards);
        fixture.store.run(async |tx| changes.create(&tx, &docs, &options).await).await.unwrap();
        Self { fixture, docs }
    }

    /// Records edit number `position` of the document `id`, whose previous edit is at `previous`. Returns the sequence of the edit.
    async fn edit(&self, id: &str, position: u64, previous: Option<Sequence>) -> Sequence {
        let changes = self.fixture.other.changes();
        let edit = async |tx: Transaction| {
            let revision = Revision { position, hash: [position as u8; 16] };
            let doc = DocSummary { id: DocId::new(id)?, revision, branches: 1, is_deleted: false };
            changes.writer(&tx, &self.docs).await?.record(&doc, previous)
        };
        let ran = self.fixture.other.run_exactly_once(None, edit).await.unwrap();
        ran.value.of(ran.committed)
    }

    /// Notifies the consumers as an edit would, but edits nothing.
    async fn hint(&self) {
        record(&self.fixture.store, &self.fixture.other, &self.docs, [0, 0, 1, 0]).await;
    }

    async fn ids(&self, bus: &Bus, options: ConsumerOptions, log: &Log<Work<Change>>) -> Consumer {
        let member = joined(bus).await.consumer("c").unwrap().options(options);
        let member = member.documents(&bus.changes().feed(&self.docs)).start_from(Cursor::BEGINNING);
        member.run(log.handler()).await.unwrap()
    }

    async fn batches(&self, bus: &Bus, options: ConsumerOptions, log: &Log<Batch<Change>>) -> Consumer {
        let member = joined(bus).await.consumer("c").unwrap().options(options);
        let member = member.documents(&bus.changes().feed(&self.docs)).start_from(Cursor::BEGINNING);
        member.run_batches(log.handler()).await.unwrap()
    }
}

/// Bug: the member looked up a document's newest row by a key that only notifications have, so a document whose work failed was forgotten.
#[tokio::test(start_paused = true)]
async fn a_document_whose_work_fails_is_tried_in_its_newest_row() {
    for is_ordered in [false, true] {
        let documents = Documents::new(2).await;
        let is_mended = Arc::new(AtomicBool::new(false));
        let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
        let (mended, notes) = (Arc::clone(&is_mended), Arc::clone(&seen));
        let fails = move |row: &Change| {
            let is_bad = row.doc.id.as_str() == "bad";
            if is_bad {
                notes.lock().unwrap().push(row.doc.revision.position);
            }
            is_bad && !mended.load(Ordering::Relaxed)
        };
        let of_batches = fails.clone();
        let ids = Log::doing(move |work: Work<Change>| {
            let fails = fails(work.row().unwrap());
            async move { if fails { Err("it is bad".into()) } else { Ok(()) } }
        });
        let rows = Log::doing(move |batch: Batch<Change>| {
            let fails = batch.rows.iter().any(&of_batches);
            async move { if fails { Err("it is bad".into()) } else { Ok(()) } }
        });
        let options = hinted().attempts_max(1).backoff_max(Duration::from_secs(1));
        let consumer = if is_ordered {
            documents.batches(&documents.fixture.bus, options, &rows).await
        } else {
            documents.ids(&documents.fixture.bus, options, &ids).await
        };
        let first = documents.edit("bad", 1, None).await;
        documents.edit("good", 1, None).await;
        until("it is deferred", async || !documents.fixture.is_none_deferred().await).await;
        pass(Duration::from_secs(10)).await;
        assert!(!documents.fixture.is_none_deferred().await, "{is_ordered}");
        documents.edit("bad", 2, Some(first)).await;
        pass(Duration::from_secs(10)).await;
        is_mended.store(true, Ordering::Relaxed);
        documents.fixture.until_done().await;
        assert_eq!(seen.lock().unwrap().last(), Some(&2), "{is_ordered}");
        consumer.shutdown().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn documents_are_worked_on_again() {
    let documents = Documents::new(3).await;
    let log = Log::new();
    let consumer = documents.ids(&documents.fixture.bus, hinted(), &log).await;
    let first = documents.edit("a1", 1, None).await;
    for id in ["a2", "b1", "b2"] {
        documents.edit(id, 1, None).await;
    }
    log.until_calls(4).await;
    documents.edit("a1", 2, Some(first)).await;
    log.until_calls(5).await;
    documents.fixture.until_done().await;
    assert_eq!(documents.fixture.handle().again("a*", false).await.unwrap(), 2);
    log.until_calls(7).await;
    documents.fixture.until_done().await;
    // The same holds across a reshard.
    documents.fixture.other.changes().feed(&documents.docs).reshard(2, None).await.unwrap();
    documents.edit("c1", 1, None).await;
    log.until_calls(8).await;
    assert_eq!(documents.fixture.handle().again("*1", false).await.unwrap(), 3);
    log.until_calls(11).await;
    documents.fixture.until_done().await;
    let times = |id: &str| log.names().iter().filter(|seen| *seen == id).count();
    assert_eq!((times("a1"), times("a2"), times("b1"), times("b2"), times("c1")), (4, 2, 2, 1, 2));
    consumer.shutdown().await.unwrap();
}

/// If a document is edited after a request to work on it again, the older row is not delivered after the edit.
#[tokio::test(start_paused = true)]
async fn a_document_asked_for_again_is_never_given_in_an_older_row() {
    let documents = Documents::new(1).await;
    let seen: Arc<Mutex<Vec<Sequence>>> = Arc::default();
    let notes = Arc::clone(&seen);
    let log = Log::doing(move |work: Work<Change>| {
        notes.lock().unwrap().push(work.row().unwrap().sequence);
        async { Ok(()) }
    });
    let consumer = documents.ids(&documents.fixture.bus, hinted(), &log).await;
    let mut last = documents.edit("doc", 1, None).await;
    documents.fixture.until_done().await;
    for position in 2..7 {
        assert_eq!(documents.fixture.handle().again("doc", false).await.unwrap(), 1);
        last = documents.edit("doc", position, Some(last)).await;
        if position % 2 == 0 {
            pass(Duration::from_secs(3)).await;
        }
    }
    documents.fixture.until_done().await;
    let rows = seen.lock().unwrap().clone();
    assert!(rows.is_sorted() && rows.last() == Some(&last), "{rows:?}");
    consumer.shutdown().await.unwrap();
}

/// When the feed of a database is removed, its consumers end, nothing remains stored for them, and no document is reported as gone.
#[tokio::test(start_paused = true)]
async fn a_consumer_ends_with_its_feed() {
    for is_ordered in [false, true] {
        let documents = Documents::new(3).await;
        let (ids, rows) = (Log::new(), Log::new());
        let options = ConsumerOptions::default();
        let consumer = if is_ordered {
            documents.batches(&documents.fixture.bus, options, &rows).await
        } else {
            documents.ids(&documents.fixture.bus, options, &ids).await
        };
        documents.edit("a", 1, None).await;
        documents.fixture.until_done().await;
        let changes = documents.fixture.other.changes();
        let remove = async |tx: Transaction| {
            changes.remove(&tx, &documents.docs);
            Ok(())
        };
        documents.fixture.store.run(remove).await.unwrap();
        documents.hint().await;
        let ended = within("it ends", consumer.ended()).await;
        assert!(matches!(ended, Error::NoFeed { .. }), "{ended}");
        assert!(matches!(documents.fixture.handle().status().await, Err(Error::NoConsumer { .. })));
        let read = RangeRead::new(KeyRange::prefix(b"notibus\x15\x19".to_vec()));
        let kept = documents.fixture.store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows;
        assert!(kept.is_empty(), "{kept:?}");
        assert_eq!(ids.calls() + rows.calls(), 1);
        consumer.shutdown().await.unwrap();
    }
}

/// The janitor keeps the topology entry that a consumer of documents is in and all later entries, and drops the entries before it.
#[tokio::test(start_paused = true)]
async fn the_entries_to_which_a_consumer_of_documents_goes_over_are_kept() {
    let documents = Documents::new(30).await;
    let feed = documents.fixture.other.changes().feed(&documents.docs);
    let (goes_on, is_closed) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(true)));
    let (opens, closed) = (Arc::clone(&goes_on), Arc::clone(&is_closed));
    let log = Log::doing(move |_: Batch<Change>| {
        let (opens, waits) = (Arc::clone(&opens), closed.load(Ordering::Relaxed));
        async move {
            if waits {
                opens.notified().await;
            }
            Ok(())
        }
    });
    let options = ConsumerOptions::default().poll_interval(Duration::from_secs(10));
    let consumer = documents.batches(&documents.fixture.bus, options, &log).await;
    until("it has all shards", async || consumer.shards().len() == 30).await;
    documents.edit("doc", 1, None).await;
    documents.hint().await;
    pass(Duration::from_secs(5)).await;
    let begun = async || documents.fixture.handle().status().await.unwrap().shards.len();
    feed.reshard(3, None).await.unwrap();
    documents.hint().await;
    // All shards but one are drained, and their checkpoints say so.
    pass(Duration::from_secs(5)).await;
    feed.reshard(1, None).await.unwrap();
    let options = JanitorOptions::default().interval(Duration::from_millis(100));
    let janitor = joined(&documents.fixture.other).await.janitor(options).await.unwrap();
    pass(Duration::from_secs(30)).await;
    assert_eq!((begun().await, feed.topology().await.unwrap().len()), (30, 3));

    is_closed.store(false, Ordering::Relaxed);
    goes_on.notify_waiters();
    until("the consumer has gone over", async || begun().await == 1).await;
    // The first entry still has a row.
    until("the empty entry is gone", async || feed.topology().await.unwrap().len() == 2).await;
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}

/// All documents are delivered in order, and none is delivered twice, both by ids and in batches.
#[tokio::test(start_paused = true)]
async fn every_document_comes_once() {
    let documents = Documents::new(4).await;
    let all = names("doc", 60);
    for id in &all {
        documents.edit(id, 1, None).await;
    }
    let log = Log::new();
    let consumer = documents.batches(&documents.fixture.bus, hinted().batch_rows_max(7), &log).await;
    consumer.caught_up().await.unwrap();
    let mut got = log.names();
    got.sort_unstable();
    let mut expected = all;
    expected.sort_unstable();
    assert_eq!(got, expected);
    consumer.shutdown().await.unwrap();
}

/// Bug: only the member that removed the consumer of a gone feed ended, so the members on other nodes waited forever.
#[tokio::test(start_paused = true)]
async fn all_members_of_a_gone_feed_end() {
    let documents = Documents::new(1).await;
    let (changes, log) = (documents.fixture.other.changes(), Log::new());
    let first = documents.ids(&documents.fixture.bus, ConsumerOptions::default(), &log).await;
    let second = documents.ids(&documents.fixture.other, ConsumerOptions::default(), &log).await;
    until("one has the shard", async || first.shards().len() + second.shards().len() == 1).await;
    let remove = async |tx: Transaction| {
        changes.remove(&tx, &documents.docs);
        Ok(())
    };
    documents.fixture.store.run(remove).await.unwrap();
    for member in [first, second] {
        let ended = within("it ends", member.ended()).await;
        assert!(matches!(ended, Error::NoFeed { .. }), "{ended}");
        member.shutdown().await.unwrap();
    }
}

/// Regression: the fold notified consumers of documents only for the new instance when a database was deleted and created again in one
/// fold, so consumers of the old instance ended only at their next poll, 39 s later. The consumers here never poll.
#[tokio::test(start_paused = true)]
async fn a_consumer_of_a_replaced_database_ends_by_the_fold() {
    let documents = Documents::new(2).await;
    let fixture = &documents.fixture;
    let (changes, producer) = (fixture.bus.changes(), fixture.bus.producer());
    let (old, new) = (documents.docs.clone(), Db::new(documents.docs.name.clone(), DbInstance([99; 16])));
    let log = Log::new();
    let consumer = documents.ids(&fixture.bus, hinted(), &log).await;
    until("it has its shards", async || !consumer.shards().is_empty()).await;
    let replace = async |tx: Transaction| {
        changes.remove(&tx, &old);
        producer.deleted(&tx, &old);
        changes.create(&tx, &new, &ChangesOptions::default()).await?;
        producer.created(&tx, &new);
        Ok(())
    };
    fixture.store.run(replace).await.unwrap();
    until("it has nothing to do", async || consumer.shards().is_empty()).await;
    consumer.shutdown().await.unwrap();
}

/// Bug: a barrier for documents treated a version ahead of the store as finished, so it passed at once.
#[tokio::test(start_paused = true)]
async fn a_version_ahead_of_the_store_is_refused() {
    let documents = Documents::new(1).await;
    let log = Log::new();
    let consumer = documents.ids(&documents.fixture.bus, hinted(), &log).await;
    let ahead = within("the refusal", consumer.wait_until(u64::MAX)).await;
    assert!(matches!(ahead, Err(Error::Invalid { what: "version", .. })), "{ahead:?}");
    let edited = documents.edit("a", 1, None).await;
    documents.hint().await;
    within("the edit", consumer.wait_until(edited.versionstamp().version())).await.unwrap();
    assert_eq!(log.names(), ["a"]);
    drop(consumer);
}

/// Bug: a barrier waited for a wanted row after its version if no checkpoint was saved in between, so it never passed if that row failed
/// and held its shard.
#[tokio::test(start_paused = true)]
async fn a_barrier_does_not_wait_for_later_rows() {
    let documents = Documents::new(1).await;
    let log = Log::doing(|_: Work<Change>| async { Err("it fails".into()) });
    let version = documents.fixture.store.begin().read_version().await.unwrap();
    let options = hinted().failure(FailurePolicy::Hold);
    let consumer = documents.ids(&documents.fixture.bus, options, &log).await;
    documents.edit("a", 1, None).await;
    documents.hint().await;
    log.until_calls(2).await;
    within("the version", consumer.wait_until(version)).await.unwrap();
    drop(consumer);
}

/// A document that waits for a consumer is edited again, so its row moves past the barrier. Regression: the barrier did not wait for the
/// moved row, so it claimed that the first edit had been worked on.
#[tokio::test(start_paused = true)]
async fn a_barrier_waits_for_a_document_that_is_edited_again() {
    let documents = Documents::new(1).await;
    let log = Log::new();
    let consumer = documents.ids(&documents.fixture.bus, hinted(), &log).await;
    documents.fixture.handle().pause().await.unwrap();
    let first = documents.edit("a", 1, None).await;
    documents.edit("a", 2, Some(first)).await;
    let version = first.versionstamp().version();
    let early = tokio::time::timeout(Duration::from_secs(10), consumer.wait_until(version)).await;
    assert!(early.is_err(), "nobody has worked on it: {early:?}");
    documents.fixture.handle().resume().await.unwrap();
    documents.hint().await;
    within("the edit", consumer.wait_until(version)).await.unwrap();
    assert_eq!(log.calls(), 1);
    drop(consumer);
}

/// Bug: the member removed a fixed number of keys of finished ids at a time, so the keys of the longest ids did not fit into one
/// transaction, which was retried forever. Fix: the limit is in bytes.
#[tokio::test(start_paused = true)]
async fn keys_of_the_longest_ids_are_removed() {
    let documents = Documents::new(1).await;
    let id_of = |n: usize| format!("{n:04}{}", "x".repeat(DocId::LEN_MAX - 4));
    for n in 0..400 {
        documents.edit(&id_of(n), 1, None).await;
    }
    let store = documents.fixture.store.clone();
    let log = Log::doing(move |work: Work<Change>| {
        let store = store.clone();
        async move { Ok(store.run(async |tx| work.commit_in(&tx).await.map(drop)).await?) }
    });
    let consumer = documents.ids(&documents.fixture.bus, hinted(), &log).await;
    documents.fixture.until_done().await;
    let handle = documents.fixture.handle();
    let again = within("all are asked for again", handle.again("*", false)).await.unwrap();
    assert_eq!(again, 400);
    documents.edit("last", 1, None).await;
    documents.fixture.until_done().await;
    assert!(log.names().contains(&"last".to_owned()));
    consumer.shutdown().await.unwrap();
}

/// Bug: a barrier treated a row whose only revision is a first one as the row of a new document, on which nobody can be working yet. But
/// the document may have had an earlier row whose revision was purged, so the barrier passed while a handler was still working on that row.
#[tokio::test(start_paused = true)]
async fn a_consumer_has_not_caught_up_while_it_works_on_a_purged_revision() {
    let documents = Documents::new(1).await;
    let (works, is_working) = (Arc::new(RwLock::new(())), Arc::new(AtomicBool::new(false)));
    let (end, working) = (Arc::clone(&works), Arc::clone(&is_working));
    let log = Log::doing(move |_: Work<Change>| {
        let (end, working) = (Arc::clone(&end), Arc::clone(&working));
        async move {
            working.store(true, Ordering::Relaxed);
            drop(end.read().await);
            Ok(())
        }
    });
    let _works = works.write().await;
    // Without this the work would be deferred after a while.
    let options = hinted().checkpoint_interval(common::NEVER);
    let consumer = Arc::new(documents.ids(&documents.fixture.bus, options, &log).await);
    let first = documents.edit("a", 1, None).await;
    until("the work", async || is_working.load(Ordering::Relaxed)).await;
    let waiting = Arc::clone(&consumer);
    let caught_up = tokio::spawn(async move { waiting.caught_up().await });
    pass(Duration::from_secs(1)).await;
    documents.edit("a", 1, Some(first)).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(!caught_up.is_finished(), "the work on the first edit has not ended");
    caught_up.abort();
}
