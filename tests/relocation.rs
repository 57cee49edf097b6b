//! Moving a bus to another store: nothing is lost, and old positions stay valid and sort before later ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::{counts, db, eager, joined, record, row_with, rows, set, stored, until, wide_bus};
use futures_util::{FutureExt, future::BoxFuture};
use notibus::{
    Bus, BusOptions, Cursor, Db, Error, NodeOptions, Notification, Sequence,
    changes::{Change, Changes, ChangesOptions, DocId, DocSummary, Revision},
    consumer::{ConsumerOptions, ConsumerSettings, Work},
    event::{Incarnation, Versionstamp},
    producer::ProducerOptions,
    relocation::ExportOptions,
    store::{
        AtomicOp, Env, Environment, Isolation, KeyRange, RangeRead, Store, StoreError, Transaction,
        testing::Faults,
    },
};

/// The prefix of the bus in these tests.
const PREFIX: &[u8] = b"notibus";

/// Runs `work` on a store in memory from code that is not async.
fn at_once<T>(work: impl Future<Output = T>) -> T {
    tokio::task::unconstrained(work).now_or_never().expect("the store in memory answers at once")
}

/// Edits the document `id`, whose last edit the layer stores under `last/`.
async fn edit(store: &Store, changes: &Changes, db: &Db, id: &str, position: u64) {
    let edit = async |tx: Transaction| {
        let key = format!("last/{id}");
        let previous = tx.get(key.as_bytes(), Isolation::Serializable).await?;
        let previous = previous.map(|bytes| Sequence::from_bytes(&bytes)).transpose()?;
        let revision = Revision { position, hash: [1; 16] };
        let doc = DocSummary { id: DocId::new(id)?, revision, branches: 1, is_deleted: false };
        let edited = changes.writer(&tx, db).await?.record(&doc, previous)?;
        tx.atomic(AtomicOp::SetVersionstampedValue, key.as_bytes(), &edited.operand(&[], &[]));
        Ok(())
    };
    store.run(edit).await.unwrap();
}

/// Makes a bus with a history: databases, one of them deleted, documents over several topologies, and unfolded events.
async fn history(store: &Store) -> Bus {
    let bus = wide_bus(store).await;
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    for n in 0..20 {
        let db = db(&format!("db{n}"), 1);
        record(store, &bus, &db, [1, 0, 2, 0]).await;
        row_with(&bus, &db, [1, 0, 2, 0]).await;
    }
    record(store, &bus, &db("db3", 1), [0, 1, 0, 0]).await;
    row_with(&bus, &db("db3", 1), [1, 1, 2, 0]).await;
    notifier.shutdown().await.unwrap();
    record(store, &bus, &db("db5", 1), [0, 0, 7, 1]).await;

    let (changes, db) = (bus.changes(), db("db5", 1));
    store.run(async |tx| changes.create(&tx, &db, &ChangesOptions::default()).await).await.unwrap();
    for n in 0..30 {
        edit(store, &changes, &db, &format!("doc{n}"), 1).await;
        if n % 10 == 9 {
            changes.feed(&db).reshard(n, None).await.unwrap();
        }
    }
    bus
}

async fn exported(bus: &Bus) -> Vec<u8> {
    let mut bytes = Vec::new();
    assert!(bus.export(&mut bytes, ExportOptions::default()).await.unwrap().rows > 0);
    bytes
}

/// Copies the layer's own rows.
async fn copy_layer(from: &Store, to: &Store) {
    let read = RangeRead::new(KeyRange::prefix("last/")).limit(1_000);
    let rows = from.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows;
    to.run(async |tx| {
        for (key, value) in &rows {
            tx.set(key, value);
        }
        Ok(())
    })
    .await
    .unwrap();
}

async fn changes_of(bus: &Bus, after: impl Into<Cursor>) -> Vec<Arc<Change>> {
    bus.changes().feed(&db("db5", 1)).page(after, 1_000).await.unwrap().rows
}

#[tokio::test(start_paused = true)]
async fn everything_comes_along_and_later_sequences_sort_after_it() {
    let old = Store::memory();
    let bus = history(&old).await;
    let (rows_before, changes_before) = (rows(&bus).await, changes_of(&bus, Cursor::BEGINNING).await);
    let cursor = rows_before[10].sequence;
    let bytes = exported(&bus).await;

    // The new store is younger: its versions are smaller.
    let new = Store::memory();
    Bus::import(&new, PREFIX, &mut &bytes[..]).await.unwrap();
    copy_layer(&old, &new).await;
    let bus = wide_bus(&new).await;
    assert_eq!(bus.incarnation(), Incarnation(1));
    assert_eq!(rows(&bus).await, rows_before);
    assert_eq!(changes_of(&bus, Cursor::BEGINNING).await, changes_before);
    assert_eq!(bus.feed().page(cursor, 100).await.unwrap().rows, rows_before[11..]);

    // Waiting events are folded, and old rows are still replaced.
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let row = row_with(&bus, &db("db5", 1), [1, 0, 39, 1]).await;
    assert!(
        row.sequence > rows_before.last().unwrap().sequence && row.sequence.incarnation() == Incarnation(1)
    );
    let last = changes_before.last().unwrap().sequence;
    edit(&new, &bus.changes(), &db("db5", 1), "doc0", 2).await;
    edit(&new, &bus.changes(), &db("db5", 1), "new", 1).await;
    let changed: Vec<_> = changes_of(&bus, last).await.iter().map(|row| row.doc.id.to_string()).collect();
    assert_eq!(changed, ["doc0", "new"]);
    assert_eq!(changes_of(&bus, Cursor::BEGINNING).await.len(), 31, "each document once");
    bus.changes().feed(&db("db5", 1)).reshard(3, None).await.unwrap();
    edit(&new, &bus.changes(), &db("db5", 1), "doc1", 2).await;
    assert_eq!(changes_of(&bus, Cursor::BEGINNING).await.len(), 31);
    assert!(bus.feed().page(cursor, 100).await.is_ok(), "a position of before stays valid");
}

/// An environment whose wall clock is far behind.
struct Behind(Env);

impl Environment for Behind {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn wall_ms(&self) -> u64 {
        1
    }

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.0.sleep(duration))
    }
}

#[tokio::test(start_paused = true)]
async fn stamps_of_producers_are_the_newest_also_after_a_move() {
    let old = Store::memory();
    let bus = wide_bus(&old).await;
    let producer =
        |bus: &Bus| bus.producer_with(ProducerOptions::default().record_versionstamps(true)).unwrap();
    let recorded = async |store: &Store, bus: &Bus| {
        let producer = producer(bus);
        let tx = store.begin();
        producer.updated(&tx, &db("db", 1));
        tx.commit().await.unwrap().unwrap().versionstamp
    };
    for n in 0..50 {
        record(&old, &bus, &db("other", n), [0, 0, 1, 0]).await;
    }
    let notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    let stamp = recorded(&old, &bus).await;
    assert_eq!(row_with(&bus, &db("db", 1), [0, 0, 1, 0]).await.versionstamp, Some(stamp));
    notifier.shutdown().await.unwrap();
    let bytes = exported(&bus).await;
    // The new store's clock is behind, and so are its versions.
    let new = Store::memory_in(Env::new(Behind(Env::system())));
    Bus::import(&new, PREFIX, &mut &bytes[..]).await.unwrap();
    let bus = wide_bus(&new).await;
    let later = recorded(&new, &bus).await;
    assert!(later < stamp, "the new store is younger");
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    assert_eq!(row_with(&bus, &db("db", 1), [0, 0, 2, 0]).await.versionstamp, Some(later));
}

/// Counts the keys under the prefix.
async fn left(store: &Store) -> usize {
    let keys = KeyRange::new([PREFIX, &[0x14]].concat(), [PREFIX, &[0x16]].concat());
    let read = RangeRead::new(keys).limit(10_000);
    store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows.len()
}

#[tokio::test(start_paused = true)]
async fn a_bad_export_is_refused_and_an_import_can_be_tried_again() {
    let old = Store::memory();
    let bytes = exported(&history(&old).await).await;
    let new = Store::memory();
    let import = async |bytes: &[u8]| Bus::import(&new, PREFIX, &mut &bytes[..]).await;
    assert!(matches!(
        import(b"something else, and of some length").await,
        Err(Error::Invalid { what: "export", .. })
    ));
    assert!(matches!(import(&bytes[..10]).await, Err(Error::Invalid { what: "export", .. })));
    let mut random = common::dice();
    for _ in 0..200 {
        let cut = random.usize(..bytes.len());
        assert!(import(&bytes[..cut]).await.is_err(), "cut at {cut}");
        let mut damaged = bytes.clone();
        damaged[cut] ^= 1 << random.u8(..8);
        assert!(import(&damaged).await.is_err(), "damaged at {cut}");
        assert!(Bus::open_existing(&new, PREFIX).await.is_err(), "what is not whole is no bus");
        assert_eq!(left(&new).await, 0, "a failed import leaves nothing");
    }
    import(&bytes).await.unwrap();
    assert!(matches!(import(&bytes).await, Err(Error::Invalid { what: "prefix", .. })), "there is a bus now");
    Bus::import(&new, b"second", &mut &bytes[..]).await.unwrap();
    let second = Bus::open_existing(&new, b"second").await.unwrap();
    assert_eq!(rows(&second).await.len(), 20);
    assert!(
        rows(&second).await.iter().all(|row| row.totals == counts([1, u64::from(row.is_deleted()), 2, 0]))
    );
}

/// Makes a bus that has adopted two rows of another layer.
async fn with_legacy(store: &Store) -> Bus {
    let bus = wide_bus(store).await;
    adopt(store, &bus).await;
    bus
}

/// Adopts two rows of another layer.
async fn adopt(store: &Store, bus: &Bus) {
    let write = async |tx: Transaction| {
        for (n, id) in [(1, b"a"), (2, b"b")] {
            let row = [&[0x15, 1, 0x02][..], id, &[0, 0x15, 1, 0x01], &[9; 16], &[0, 0x15, 1, 0x27]].concat();
            tx.set(&[&b"layer/changes"[..], &[0x14, 0x33], &[0; 7], &[n], &[0; 4]].concat(), &row);
        }
        Ok(())
    };
    store.run(write).await.unwrap();
    bus.changes().adopt(&db("db5", 1), b"layer/changes", &ChangesOptions::default()).await.unwrap();
}

/// Returns the ids of the documents, in order.
async fn ids(bus: &Bus) -> Vec<String> {
    changes_of(bus, Cursor::BEGINNING).await.iter().map(|row| row.doc.id.to_string()).collect()
}

/// Like [`ids`], but empty if there is no feed.
async fn ids_if_any(bus: &Bus) -> Vec<String> {
    if bus.changes().feed(&db("db5", 1)).topology().await.is_ok() { ids(bus).await } else { Vec::new() }
}

/// Regression: rows of a legacy range were imported to their old place, outside the prefix. So a later import read the remains of a damaged
/// one there, and an import into the store of a bus in use brought back its old rows.
#[tokio::test(start_paused = true)]
async fn rows_that_lay_unsharded_come_along_and_nothing_is_written_elsewhere() {
    let old = Store::memory();
    let bus = with_legacy(&old).await;
    let mut bytes = Vec::new();
    bus.export(&mut bytes, ExportOptions::default()).await.unwrap();
    let first = Sequence::new(Incarnation(0), Versionstamp::new(1, 0), 0);
    let revision = Revision { position: 2, hash: [1; 16] };
    let doc = DocSummary { id: DocId::new("a").unwrap(), revision, branches: 1, is_deleted: false };
    let edit = async |store: &Store, bus: &Bus| {
        let (changes, db) = (bus.changes(), db("db5", 1));
        let edit =
            async |tx: Transaction| changes.writer(&tx, &db).await?.record(&doc, Some(first)).map(|_| ());
        store.run(edit).await.unwrap();
    };
    edit(&old, &bus).await;
    // This imports into the same store as the bus in use.
    Bus::import(&old, b"copy", &mut &bytes[..]).await.unwrap();
    assert_eq!(ids(&bus).await, ["b", "a"]);
    let copy = Bus::open_existing(&old, b"copy").await.unwrap();
    assert_eq!(ids(&copy).await, ["a", "b"]);
    edit(&old, &copy).await;
    assert_eq!(ids(&copy).await, ["b", "a"], "they are found where they are now");
    // The copy is exported and imported, too.
    let mut again = Vec::new();
    copy.export(&mut again, ExportOptions::default()).await.unwrap();
    let new = Store::memory();
    assert!(Bus::import(&new, b"x", &mut &bytes[..bytes.len() - 1]).await.is_err());
    Bus::import(&new, b"x", &mut &again[..]).await.unwrap();
    assert_eq!(ids(&Bus::open_existing(&new, b"x").await.unwrap()).await, ["b", "a"]);
    let all = RangeRead::new(KeyRange::new(&b""[..], &b"\xff"[..])).limit(10_000);
    let rows = new.begin().get_range(&all, Isolation::Snapshot).await.unwrap().rows;
    let elsewhere =
        rows.iter().filter(|(key, _)| !key.starts_with(b"x") && !key.starts_with(b"notibus-trans"));
    assert_eq!(elsewhere.count(), 0);
}

/// Regression: an export with producers running looked for legacy ranges first, and read the rows at a later version, so a range that was
/// adopted in between was named in the copy, but its rows were missing.
#[tokio::test(start_paused = true)]
async fn a_range_that_is_adopted_while_an_export_begins_comes_along_or_is_not_named() {
    for reads in 0..20 {
        let store = Store::memory();
        let faults = Faults::new(&store);
        let (bus, other) = (wide_bus(&faults.store()).await, wide_bus(&store).await);
        let (held, mut left) = (Arc::new(AtomicBool::new(true)), reads);
        let holds = Arc::clone(&held);
        // The export waits before the read with this number, until the range is adopted.
        faults.plan_reads(move |_| {
            let is_next = left == 0 && holds.load(Ordering::Relaxed);
            left -= i32::from(left > 0);
            is_next.then_some(StoreError::PROCESS_BEHIND)
        });
        let mut bytes = Vec::new();
        let export = bus.export(&mut bytes, ExportOptions::default().while_running(true));
        let adopted = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            adopt(&store, &other).await;
            held.store(false, Ordering::Relaxed);
        };
        tokio::join!(export, adopted).0.unwrap();
        let new = Store::memory();
        Bus::import(&new, PREFIX, &mut &bytes[..]).await.unwrap();
        let copy = Bus::open_existing(&new, PREFIX).await.unwrap();
        let is_named = copy.changes().feed(&db("db5", 1)).topology().await.is_ok();
        assert_eq!(is_named, ids_if_any(&copy).await == ["a", "b"], "{reads} reads");
    }
}

/// Regression: an import continued after another one had started over, so it made a bus of the half that it had not yet written.
#[tokio::test(start_paused = true)]
async fn an_import_that_another_has_begun_again_fails() {
    let old = Store::memory();
    let bus = wide_bus(&old).await;
    let (changes, docs) = (bus.changes(), db("db5", 1));
    old.run(async |tx| changes.create(&tx, &docs, &ChangesOptions::default()).await).await.unwrap();
    for chunk in 0..40 {
        let write = async |tx: Transaction| {
            let writer = changes.writer(&tx, &docs).await?;
            for n in 0..500 {
                let id = DocId::new(&format!("doc{chunk}-{n}-{}", "x".repeat(50)))?;
                let revision = Revision { position: 1, hash: [1; 16] };
                writer.record(&DocSummary { id, revision, branches: 1, is_deleted: false }, None)?;
            }
            Ok(())
        };
        old.run(write).await.unwrap();
    }
    let bytes = exported(&bus).await;
    let new = Store::memory();
    let act = || {
        let mut cut = &bytes[..100];
        assert!(at_once(Bus::import(&new, PREFIX, &mut cut)).is_err());
    };
    let mut input = Halfway { bytes: &bytes, act: Some(act), at: 0 };
    let imported = Bus::import(&new, PREFIX, &mut input).await;
    assert!(matches!(imported, Err(Error::Invalid { what: "export", .. })), "{imported:?}");
    assert!(Bus::open_existing(&new, PREFIX).await.is_err());
    Bus::import(&new, PREFIX, &mut &bytes[..]).await.unwrap();
    assert_eq!(wide_bus(&new).await.changes().feed(&docs).pending(Cursor::BEGINNING).await.unwrap(), 20_000);
}

/// Reads from an export, and does something halfway.
struct Halfway<'a, F> {
    bytes: &'a [u8],
    act: Option<F>,
    at: usize,
}

impl<F: FnOnce()> std::io::Read for Halfway<'_, F> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        if self.at > self.bytes.len() / 2
            && let Some(act) = self.act.take()
        {
            act();
        }
        let len = out.len().min(self.bytes.len() - self.at);
        out[..len].copy_from_slice(&self.bytes[self.at..self.at + len]);
        self.at += len;
        Ok(len)
    }
}

/// Receives an export, and does something in the middle of it.
struct Meanwhile<F>(Vec<u8>, Option<F>);

impl<F: FnOnce()> std::io::Write for Meanwhile<F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.extend_from_slice(bytes);
        if self.0.len() > 3_000
            && let Some(act) = self.1.take()
        {
            act();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn an_export_that_outlives_its_snapshot_notices_writes_meanwhile() {
    for (outlives, is_disturbed) in [(false, true), (true, false), (true, true)] {
        let store = Store::memory();
        drop(history(&store).await);
        let faults = Faults::new(&store);
        let bus = wide_bus(&faults.store()).await;
        let mut is_over = !outlives;
        let act = || {
            if is_disturbed {
                let db = db("db1", 1);
                at_once(record(&store, &bus, &db, [0, 0, 1, 0]));
            }
            faults.plan_reads(move |_| {
                (!std::mem::replace(&mut is_over, true)).then_some(StoreError::TRANSACTION_TOO_OLD)
            });
        };
        let mut out = Meanwhile(Vec::new(), Some(act));
        let exported = bus.export(&mut out, ExportOptions::default().while_running(true)).await;
        if outlives && is_disturbed {
            assert!(matches!(exported, Err(Error::Invalid { what: "export", .. })), "{exported:?}");
        } else {
            let new = Store::memory();
            Bus::import(&new, PREFIX, &mut &out.0[..]).await.unwrap();
            assert_eq!(rows(&wide_bus(&new).await).await, rows(&bus).await, "it is of one moment");
        }
    }
}

#[tokio::test]
async fn an_incarnation_is_raised_once() {
    let store = Store::memory();
    wide_bus(&store).await;
    let raise = async |from| Bus::raise_incarnation(&store, PREFIX, Incarnation(from), true).await;
    assert_eq!(raise(0).await.unwrap(), Incarnation(1));
    assert_eq!(raise(0).await.unwrap(), Incarnation(1), "the same again, as after an unknown result");
    assert!(matches!(raise(5).await, Err(Error::Invalid { what: "incarnation", .. })));
    assert_eq!(wide_bus(&store).await.incarnation(), Incarnation(1));
    assert!(matches!(
        Bus::raise_incarnation(&store, b"none", Incarnation(0), true).await,
        Err(Error::Invalid { .. })
    ));
    for from in 1..255 {
        raise(from).await.unwrap();
    }
    assert!(
        matches!(raise(255).await, Err(Error::Invalid { what: "incarnation", .. })),
        "there is none after it"
    );
    let options = BusOptions::default().partitions(3);
    assert!(Bus::open(&store, options).await.is_err(), "everything else is as it was");
}

/// Regression: a server that was started too early, while its bus was still being imported, made a bus of its own under the prefix. The
/// import continued, wrote its rows and its configuration over that, and reported success; the server folded into partitions that no other
/// process knew, so 62 of 64 events were never delivered.
#[tokio::test(start_paused = true)]
async fn nobody_opens_a_bus_while_it_is_imported() {
    let old = Store::memory();
    let bytes = exported(&history(&old).await).await;
    let new = Store::memory();
    let open = async || Bus::open(&new, BusOptions::default().partitions(2)).await;
    let act = || {
        let opened = at_once(open());
        assert!(matches!(opened, Err(Error::ImportUnderWay { .. })), "{opened:?}");
        let opened = at_once(Bus::open_existing(&new, PREFIX));
        assert!(matches!(opened, Err(Error::ImportUnderWay { .. })), "{opened:?}");
    };
    let mut input = Halfway { bytes: &bytes, act: Some(act), at: 0 };
    Bus::import(&new, PREFIX, &mut input).await.unwrap();
    assert!(input.act.is_none());
    assert!(
        matches!(open().await, Err(Error::ConfigMismatch { .. })),
        "now there is one, with its own partitions"
    );
    assert_eq!(wide_bus(&new).await.incarnation(), Incarnation(1));
}

#[tokio::test(start_paused = true)]
async fn what_an_import_leaves_whose_process_dies_keeps_others_out_and_a_repeated_import_begins_again() {
    let old = Store::memory();
    let bus = history(&old).await;
    let (expected, bytes) = (rows(&bus).await.len(), exported(&bus).await);
    let new = Store::memory();
    let dies = {
        let (new, bytes) = (new.clone(), bytes.clone());
        tokio::spawn(async move {
            let act = || panic!("as by the end of its process");
            Bus::import(&new, PREFIX, &mut Halfway { bytes: &bytes, act: Some(act), at: 0 }).await
        })
    };
    assert!(dies.await.is_err());
    let opened = Bus::open(&new, BusOptions::default()).await;
    assert!(matches!(opened, Err(Error::ImportUnderWay { .. })), "{opened:?}");
    // A row that no import has written shows whether the second import begins by removing everything.
    set(&new, &[PREFIX, b"\x15\x05left"].concat(), b"left").await;
    Bus::import(&new, PREFIX, &mut &bytes[..]).await.unwrap();
    let bus = Bus::open_existing(&new, PREFIX).await.unwrap();
    assert_eq!(rows(&bus).await.len(), expected);
    assert!(stored(&new, &[PREFIX, b"\x15\x05left"].concat()).await.is_empty());
    let refused = Bus::import(&new, PREFIX, &mut &bytes[..]).await;
    assert!(matches!(refused, Err(Error::Invalid { what: "prefix", .. })), "the bus is in use: {refused:?}");
    assert_eq!(rows(&bus).await.len(), expected);
}

/// Regression: an export succeeded while notifiers were running, so events that they folded afterwards were in both buses.
#[tokio::test(start_paused = true)]
async fn an_export_is_refused_beside_living_nodes_and_producers() {
    let store = Store::memory();
    let bus = history(&store).await;
    let node = bus.node(NodeOptions::default()).await.unwrap();
    let refused = bus.export(&mut Vec::new(), ExportOptions::default()).await;
    assert!(matches!(refused, Err(Error::BusInUse { nodes: 1 })), "{refused:?}");
    let held = bus.export(&mut Vec::new(), ExportOptions::default().while_running(true)).await.unwrap();
    let count = |what: &str| held.held.iter().find(|(held, _)| *held == what).map(|(_, count)| *count);
    assert_eq!(count("rows of feeds"), Some(20 + 30));
    assert_eq!(count("counters of events that wait to be folded"), Some(1));
    assert_eq!(held.held.iter().map(|(_, count)| count).sum::<u64>(), held.rows);

    // The export waits for a node that has died without leaving.
    drop(node);
    assert_eq!(bus.nodes().await.unwrap().len(), 1, "it is listed");
    assert_eq!(bus.export(&mut Vec::new(), ExportOptions::default()).await.unwrap(), held);
    let act = || {
        at_once(record(&store, &bus, &db("db1", 1), [0, 0, 1, 0]));
    };
    let refused = bus.export(&mut Meanwhile(Vec::new(), Some(act)), ExportOptions::default()).await;
    assert!(matches!(refused, Err(Error::Invalid { what: "export", .. })), "{refused:?}");
}

/// Regression: a new bus adopted rows of incarnation 1, from a layer whose cluster had moved once. Later rows were placed before them, so
/// readers missed the later rows, and edits left the old rows behind.
#[tokio::test(start_paused = true)]
async fn rows_of_a_later_incarnation_are_not_adopted() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let write = async |tx: Transaction| {
        let row = [&[0x15, 1, 0x02][..], b"a", &[0, 0x15, 1, 0x01], &[9; 16], &[0, 0x15, 1, 0x27]].concat();
        tx.set(&[&b"layer/changes"[..], &[0x15, 1, 0x33], &[0; 7], &[1], &[0; 4]].concat(), &row);
        Ok(())
    };
    store.run(write).await.unwrap();
    let adopt = async |bus: &Bus| {
        bus.changes().adopt(&db("db5", 1), b"layer/changes", &ChangesOptions::default()).await
    };
    let refused = adopt(&bus).await;
    assert!(matches!(refused, Err(Error::Invalid { what: "legacy range", .. })), "{refused:?}");
    let feed = bus.changes().feed(&db("db5", 1));
    assert!(
        matches!(feed.page(Cursor::BEGINNING, 10).await, Err(Error::NoFeed { .. })),
        "nothing was changed"
    );
    Bus::raise_incarnation(&store, PREFIX, Incarnation(0), true).await.unwrap();
    let bus = wide_bus(&store).await;
    adopt(&bus).await.unwrap();
    assert_eq!(ids(&bus).await, ["a"]);
}

/// Regression: rows that a layer had brought from another cluster, under an earlier incarnation, were read up to the first page only: the next
/// position counted as one that the store had never given out.
#[tokio::test(start_paused = true)]
async fn adopted_rows_of_an_earlier_incarnation_are_read_page_by_page() {
    let store = Store::memory();
    wide_bus(&store).await;
    let write = async |tx: Transaction| {
        for (n, id) in [(1, b"a"), (2, b"b")] {
            let row = [&[0x15, 1, 0x02][..], id, &[0, 0x15, 1, 0x01], &[9; 16], &[0, 0x15, 1, 0x27]].concat();
            tx.set(&[&b"layer/changes"[..], &[0x14, 0x33], &[0; 7], &[n], &[0; 4]].concat(), &row);
        }
        Ok(())
    };
    store.run(write).await.unwrap();
    Bus::raise_incarnation(&store, PREFIX, Incarnation(0), true).await.unwrap();
    let bus = wide_bus(&store).await;
    bus.changes().adopt(&db("db5", 1), b"layer/changes", &ChangesOptions::default()).await.unwrap();
    assert_eq!(ids(&bus).await, ["a", "b"]);
    let feed = bus.changes().feed(&db("db5", 1));
    let first = feed.page(Cursor::BEGINNING, 1).await.unwrap();
    assert_eq!(first.rows.len(), 1);
    let rest = feed.page(first.next, 1).await;
    assert!(rest.is_ok(), "{rest:?}");
}

/// Regression: a process that was forgotten when the store was restored elsewhere noticed that only with its next heartbeat, so until then
/// it wrote rows of the old incarnation, which come before rows that readers have seen.
#[tokio::test(start_paused = true)]
async fn a_forgotten_process_commits_nothing_after_the_incarnation_was_raised() {
    let store = Store::memory();
    let bus = wide_bus(&store).await;
    let forgotten = joined(&bus).await.notifier(eager()).await.unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    row_with(&bus, &db("a", 1), [1, 0, 0, 0]).await;
    let raise = async |force| Bus::raise_incarnation(&store, PREFIX, Incarnation(0), force).await;
    let refused = raise(false).await;
    assert!(
        matches!(refused, Err(Error::Invalid { what: "incarnation", .. })),
        "nothing was restored: {refused:?}"
    );
    let refused = raise(true).await;
    assert!(matches!(refused, Err(Error::BusInUse { nodes: 1 })), "{refused:?}");
    // As if rows of later versions had been restored.
    let ahead = [&[0][..], &[0x7f; 12]].concat();
    set(&store, &[PREFIX, &[0x15, 26, 0x14]].concat(), &ahead).await;
    assert_eq!(raise(false).await.unwrap(), Incarnation(1));
    assert_eq!(Bus::stored_incarnation(&store, PREFIX).await.unwrap(), Incarnation(1));
    // The forgotten process is woken at once, well before its heartbeat.
    record(&store, &bus, &db("b", 1), [1, 0, 0, 0]).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let raised = wide_bus(&store).await;
    assert!(raised.nodes().await.unwrap().is_empty(), "it is forgotten");
    assert!(!raised.is_drained().await.unwrap(), "nobody folds");
    let notifier = joined(&raised).await.notifier(eager()).await.unwrap();
    let row = row_with(&raised, &db("b", 1), [1, 0, 0, 0]).await;
    assert_eq!(row.sequence.incarnation(), Incarnation(1));
    notifier.shutdown().await.unwrap();
    // By now the forgotten process has noticed that.
    let ended = forgotten.shutdown().await;
    assert!(matches!(ended, Err(Error::BusGone { .. })), "{ended:?}");
}

/// Regression: a handle from before a raise could still reshard a feed. The new shards began in the old incarnation, before rows of the new
/// one, so databases were no longer folded. It also exported rows of the new incarnation as those of the old one, and a consumer that it
/// created with new rows began before all of them.
#[tokio::test(start_paused = true)]
async fn a_forgotten_process_reshards_nothing_after_the_incarnation_was_raised() {
    let store = Store::memory();
    let forgotten = wide_bus(&store).await;
    Bus::raise_incarnation(&store, PREFIX, Incarnation(0), true).await.unwrap();
    let bus = wide_bus(&store).await;
    for _ in 0..2 {
        let refused = forgotten.feed().reshard(8, None).await;
        assert!(matches!(refused, Err(Error::BusGone { .. })), "{refused:?}");
        bus.feed().reshard(2, None).await.unwrap();
    }
    bus.feed().topology().await.unwrap();
    let created = forgotten.consumer("c").unwrap().create(&ConsumerSettings::default()).await;
    assert!(matches!(created, Err(Error::BusGone { .. })), "{created:?}");
    let exported = forgotten.export(&mut Vec::new(), ExportOptions::default()).await;
    assert!(matches!(exported, Err(Error::BusGone { .. })), "{exported:?}");
}

/// Checkpoints and deferred ids are moved, too: finished work is not done again, and unfinished work is.
#[tokio::test(start_paused = true)]
async fn consumers_go_along_to_another_store() {
    let old = Store::memory();
    let bus = history(&old).await;
    let is_mended = Arc::new(AtomicBool::new(false));
    let run = async |bus: &Bus, worked: &Arc<Mutex<Vec<String>>>| {
        let (mended, worked) = (Arc::clone(&is_mended), Arc::clone(worked));
        let work = move |work: Work<Notification>| {
            let name = String::from_utf8(work.id().to_vec()).unwrap();
            let fails = name == "db7" && !mended.load(Ordering::Relaxed);
            if !fails {
                worked.lock().unwrap().push(name);
            }
            async move { if fails { Err("it is bad".into()) } else { Ok(()) } }
        };
        let options = ConsumerOptions::default().attempts_max(1);
        let member = joined(bus).await.consumer("c").unwrap().start_from(Cursor::BEGINNING).options(options);
        member.run(work).await.unwrap()
    };
    let before = Arc::default();
    let consumer = run(&bus, &before).await;
    consumer.caught_up().await.unwrap();
    consumer.shutdown().await.unwrap();
    assert_eq!(before.lock().unwrap().len(), 19, "all but the one that fails");
    let bytes = exported(&bus).await;

    let new = Store::memory();
    Bus::import(&new, PREFIX, &mut &bytes[..]).await.unwrap();
    let bus = wide_bus(&new).await;
    let deferred = bus.consumer("c").unwrap().deferred(None, 10).await.unwrap();
    assert_eq!(deferred.iter().map(|it| it.id.as_str()).collect::<Vec<_>>(), ["db7"]);
    is_mended.store(true, Ordering::Relaxed);
    let after: Arc<Mutex<Vec<String>>> = Arc::default();
    let consumer = run(&bus, &after).await;
    let _notifier = joined(&bus).await.notifier(eager()).await.unwrap();
    // The events that waited to be folded when the bus was moved.
    row_with(&bus, &db("db5", 1), [1, 0, 39, 1]).await;
    let is_done = async || after.lock().unwrap().len() == 2;
    until("the deferred id and the new row are worked on", is_done).await;
    consumer.caught_up().await.unwrap();
    let mut after = after.lock().unwrap().clone();
    after.sort_unstable();
    assert_eq!(after, ["db5", "db7"], "what was worked on does not come again");
    consumer.shutdown().await.unwrap();
}
