//! Groups on the documents of a database.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, Consumer, Cursor, Db, JanitorOptions, Sequence,
    changes::{Change, ChangesOptions, DocId, DocSummary, Revision},
    group::{ConsumerOptions, Group, GroupBatch, GroupOptions, ObserverResult},
    store::Transaction,
};
use tokio::sync::Notify;

use crate::{
    common::{db, joined, record, until},
    fixture::{GroupFixture, hinted, pass},
};

/// A database with documents, and a group on them that begins at nothing.
struct Documents {
    fixture: GroupFixture,
    docs: Db,
    group: Group<Change>,
}

impl Documents {
    async fn new(shards: u32) -> Self {
        let fixture = GroupFixture::new(1).await;
        let (changes, docs) = (fixture.bus.changes(), db("docs", 9));
        let options = ChangesOptions::default().shards(shards);
        fixture.store.run(async |tx| changes.create(&tx, &docs, &options).await).await.unwrap();
        let group = changes.feed(&docs).group("index").unwrap();
        group.create(&GroupOptions::default().start_from(Cursor::NOTHING)).await.unwrap();
        Self { fixture, docs, group }
    }

    /// Edits the document `id` for the time `position`, whose last edit is at `previous`. Returns where it is now.
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

    /// Informs the consumers as an edit does, without one.
    async fn hint(&self) {
        record(&self.fixture.store, &self.fixture.other, &self.docs, [0, 0, 1, 0]).await;
    }

    async fn consume<F, W>(&self, bus: &Bus, options: ConsumerOptions, work: F) -> Consumer
    where
        F: Fn(GroupBatch<Change>) -> W + Clone + Send + Sync + 'static,
        W: Future<Output = ObserverResult> + Send + 'static,
    {
        let group = bus.changes().feed(&self.docs).group("index").unwrap();
        joined(bus).await.consumer(&group, move |_| work.clone(), options).await.unwrap()
    }

    /// A consumer that notes the rows that it receives.
    async fn consume_noting(&self, options: ConsumerOptions) -> (SeenRows, Consumer) {
        let seen = SeenRows::default();
        let notes = Arc::clone(&seen);
        let observe = move |batch: GroupBatch<Change>| {
            note(&notes, &batch);
            std::future::ready(Ok(()))
        };
        let consumer = self.consume(&self.fixture.bus, options, observe).await;
        (seen, consumer)
    }

    async fn until_done(&self) {
        let behind = async || self.group.lag().await.unwrap().iter().map(|shard| shard.rows).sum::<u64>();
        until("all is done", async || behind().await == 0).await;
    }

    async fn until_none_is_parked(&self) {
        until("nothing is parked", async || self.group.parked("", 1).await.unwrap().is_empty()).await;
    }
}

/// The ids and positions of the rows that observers have received, in order.
type SeenRows = Arc<Mutex<Vec<(String, Sequence)>>>;

/// Notes the rows of `batch`.
fn note(seen: &SeenRows, batch: &GroupBatch<Change>) {
    let rows = batch.rows.iter().map(|row| (row.doc.id.to_string(), row.sequence));
    seen.lock().unwrap().extend(rows);
}

/// Regression: a replay proved that a row is the newest one of its id by a key that only notifications have. So a replay of documents
/// parked nothing: it answered "0 rows" and was a success.
#[tokio::test(start_paused = true)]
async fn documents_are_replayed() {
    let documents = Documents::new(3).await;
    let (seen, consumer) = documents.consume_noting(hinted()).await;
    let first = documents.edit("a1", 1, None).await;
    for id in ["a2", "b1", "b2"] {
        documents.edit(id, 1, None).await;
    }
    documents.until_done().await;
    let newer = documents.edit("a1", 2, Some(first)).await;
    documents.until_done().await;
    let times = |id: &str| seen.lock().unwrap().iter().filter(|(seen, _)| seen == id).count();
    assert_eq!((times("a1"), times("a2"), times("b1")), (2, 1, 1));

    let starts_with_a = |row: &Change| row.doc.id.as_str().starts_with('a');
    assert_eq!(documents.group.replay(starts_with_a).await.unwrap(), 2);
    documents.until_none_is_parked().await;
    assert_eq!((times("a1"), times("a2"), times("b1")), (3, 2, 1));
    let last = seen.lock().unwrap().iter().rfind(|(id, _)| id == "a1").unwrap().1;
    assert_eq!(last, newer, "the newest row comes again, not the one that it has replaced");

    // By ids, as the command does; and over a reshard.
    documents.fixture.other.changes().feed(&documents.docs).reshard(2, None).await.unwrap();
    documents.edit("c1", 1, None).await;
    documents.until_done().await;
    let instance = Some(documents.docs.instance);
    let untyped = documents.fixture.bus.any_group(instance, "index").unwrap();
    assert_eq!(untyped.replay_ids(|id| id != "b2").await.unwrap(), 4);
    documents.until_none_is_parked().await;
    assert_eq!((times("a1"), times("b1"), times("b2"), times("c1")), (4, 2, 1, 2));
    consumer.shutdown().await.unwrap();
}

/// A consumer hears of a replay at its next poll. If the document is edited before, the edit comes first, and the replayed row must not
/// follow it. A feed of documents does not say where the newest row of a document is.
#[tokio::test(start_paused = true)]
async fn a_replayed_document_that_is_edited_does_not_come_after_its_edit() {
    let documents = Documents::new(1).await;
    let (seen, gate) = (SeenRows::default(), Arc::new(Notify::new()));
    let (notes, opens, is_closed) = (Arc::clone(&seen), Arc::clone(&gate), Arc::new(AtomicBool::new(false)));
    let closed = Arc::clone(&is_closed);
    let observe = move |batch: GroupBatch<Change>| {
        note(&notes, &batch);
        // What is replayed comes with the start of the group.
        let waits = batch.after > Sequence::MIN && closed.load(Ordering::Relaxed);
        let opens = Arc::clone(&opens);
        async move {
            if waits {
                opens.notified().await;
            }
            Ok(())
        }
    };
    let consumer = documents.consume(&documents.fixture.bus, hinted(), observe).await;
    let mut last = documents.edit("doc", 1, None).await;
    documents.until_done().await;
    for position in 2..7 {
        // The edit is delivered before the consumer hears of the replay; in every other round another one is still unread then.
        assert_eq!(documents.group.replay(|row| row.doc.id.as_str() == "doc").await.unwrap(), 1);
        is_closed.store(position % 2 == 0, Ordering::Relaxed);
        last = documents.edit("doc", 2 * position, Some(last)).await;
        if is_closed.load(Ordering::Relaxed) {
            until("the edit is delivered", async || seen.lock().unwrap().last().unwrap().1 == last).await;
            pass(Duration::from_secs(3)).await;
            last = documents.edit("doc", 2 * position + 1, Some(last)).await;
            is_closed.store(false, Ordering::Relaxed);
            gate.notify_waiters();
        }
        documents.until_done().await;
        documents.until_none_is_parked().await;
    }
    let rows: Vec<_> = seen.lock().unwrap().iter().map(|(_, at)| *at).collect();
    assert!(rows.is_sorted() && rows.last() == Some(&last), "{rows:?}");
    consumer.shutdown().await.unwrap();
}

/// Regression: a replayed document that was edited before its consumer heard of that was to be forgotten once everything up to the edit
/// was read. A feed of documents does not say where the edit is, so the end of the feed was asked for, and asked for again as soon as it
/// was reached. Wherever others commit all the time, that end is always further: the document stayed parked forever, was tried each
/// second, and took one of the places of a replay.
#[tokio::test(start_paused = true)]
async fn a_replayed_document_that_was_edited_is_forgotten_while_others_commit() {
    let documents = Documents::new(1).await;
    let (seen, consumer) = documents.consume_noting(hinted()).await;
    let first = documents.edit("doc", 1, None).await;
    documents.until_done().await;
    let store = documents.fixture.store.clone();
    let others = tokio::spawn(async move {
        loop {
            let commit = async |tx: Transaction| {
                tx.set(b"others", b"commit");
                Ok(())
            };
            store.run(commit).await.unwrap();
            pass(Duration::from_millis(10)).await;
        }
    });
    assert_eq!(documents.group.replay(|row| row.doc.id.as_str() == "doc").await.unwrap(), 1);
    let newer = documents.edit("doc", 2, Some(first)).await;
    until("the edit is delivered", async || seen.lock().unwrap().last().unwrap().1 == newer).await;
    documents.until_none_is_parked().await;
    others.abort();
    let rows: Vec<_> = seen.lock().unwrap().iter().map(|(_, at)| *at).collect();
    assert_eq!(rows, [first, newer], "the replayed row must not follow its edit");
    consumer.shutdown().await.unwrap();
}

/// Regression: a drained shard that waits for others asks again after a while, because the janitor may have dropped the shards for which
/// it has saved its end. Among documents that while was multiplied by the number of all shards of documents in the process, as only a
/// poll for rows needs it, for which hints come besides: 30 shards that poll each ten seconds stood still for five minutes.
#[tokio::test(start_paused = true)]
async fn successors_that_are_dropped_hold_up_no_group_of_documents() {
    let documents = Documents::new(30).await;
    let feed = documents.fixture.other.changes().feed(&documents.docs);
    let (goes_on, is_closed) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(true)));
    let (opens, closed) = (Arc::clone(&goes_on), Arc::clone(&is_closed));
    let observe = move |_: GroupBatch<Change>| {
        let (opens, waits) = (Arc::clone(&opens), closed.load(Ordering::Relaxed));
        async move {
            if waits {
                opens.notified().await;
            }
            Ok(())
        }
    };
    let options = ConsumerOptions::default().poll_interval(Duration::from_secs(10));
    let consumer = documents.consume(&documents.fixture.bus, options, observe).await;
    until("it has all shards", async || consumer.shards().len() == 30).await;
    documents.edit("doc", 1, None).await;
    documents.hint().await;
    pass(Duration::from_secs(5)).await;
    let begun = async || documents.group.status().await.unwrap().shards.len();
    feed.reshard(3, None).await.unwrap();
    documents.hint().await;
    // All shards but one are drained, and have saved that.
    pass(Duration::from_secs(5)).await;
    feed.reshard(1, None).await.unwrap();
    let options = JanitorOptions::default().interval(Duration::from_millis(100));
    let janitor = joined(&documents.fixture.other).await.janitor(options).await.unwrap();
    until("the empty entry is gone", async || feed.topology().await.unwrap().len() == 2).await;
    assert_eq!(begun().await, 30);

    is_closed.store(false, Ordering::Relaxed);
    goes_on.notify_waiters();
    until("the group has gone over", async || begun().await == 1).await;
    janitor.shutdown().await.unwrap();
    consumer.shutdown().await.unwrap();
}
