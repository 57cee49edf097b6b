//! A store in which an older state of a bus was restored. The same steps for every store: `main` runs them in memory and on a folder, and
//! `tests/foundationdb` on a cluster.

use std::time::Duration;

use axum::{body::Body, http::Request};
use futures_util::future::BoxFuture;
use notibus::{
    Bus, BusOptions, Cursor, Db, DbInstance, Error, Sequence, StartOptions,
    changes::{ChangesOptions, DocId, DocSummary},
    consumer::ConsumerSettings,
    cursor::Start,
    event::{Counters, Incarnation},
    http::{Api, ApiOptions},
    node::NodeHandle,
    relocation::ExportOptions,
    store::{Env, Environment, Isolation, KeyRange, RangeRead, Store},
};
use tower::ServiceExt;

/// How long a test waits for an expected event.
const LIMIT: Duration = Duration::from_mins(2);

/// A clock that is days ahead, so that a store in memory gives out later versions than others.
struct Ahead(Env, u64);

impl Environment for Ahead {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn wall_ms(&self) -> u64 {
        self.0.wall_ms() + self.1 * 86_400_000
    }

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        self.0.sleep(duration)
    }
}

/// Makes a store whose versions are days later than those of others.
pub(crate) fn later_store(days: u64) -> Store {
    Store::memory_in(Env::new(Ahead(Env::system(), days)))
}

pub(crate) fn db(name: &str) -> Db {
    Db::new(name.parse().unwrap(), DbInstance([1; 16]))
}

/// Commits `lanes` of a database.
pub(crate) async fn record(bus: &Bus, name: &str, lanes: [u64; 4]) {
    let (producer, counters) = (bus.producer(), Counters::from_lanes(lanes));
    let recorded = bus.store().run(async |tx| producer.record_all(&tx, &db(name), &counters).map(drop));
    recorded.await.unwrap();
}

/// Edits the document `id` of `a`, which was last edited at `previous`.
async fn edit(bus: &Bus, id: &str, previous: Option<Sequence>) -> Result<Sequence, Error> {
    let (changes, db, tx) = (bus.changes(), db("a"), bus.store().begin());
    let revision = "1-7051cbe5c8faecd085a3fa619e6e6337".parse().unwrap();
    let doc = DocSummary { id: DocId::new(id).unwrap(), revision, branches: 1, is_deleted: false };
    let edited = changes.writer(&tx, &db).await?.record(&doc, previous)?;
    Ok(edited.of(tx.commit().await?.unwrap()))
}

/// Fails unless `answer` says that an older state was restored.
pub(crate) fn assert_older<T: std::fmt::Debug>(answer: &Result<T, Error>) {
    assert!(matches!(answer, Err(Error::OlderThanRows { .. })), "{answer:?}");
}

pub(crate) async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("waited in vain for {what}"));
}

pub(crate) async fn totals(bus: &Bus, name: &str) -> Option<[u64; 4]> {
    let row = bus.feed().newest(&name.parse().unwrap()).await.unwrap();
    row.map(|row| [row.totals.created, row.totals.deleted, row.totals.updated, row.totals.ddoc_updated])
}

pub(crate) async fn open(store: &Store, prefix: &[u8]) -> Bus {
    Bus::open(store, BusOptions::default().prefix(prefix.to_vec())).await.unwrap()
}

/// Copies all keys under `prefix`, as a backup and a restore do.
pub(crate) async fn restore(from: &Store, to: &Store, prefix: &[u8]) {
    let read = RangeRead::new(KeyRange::prefix(prefix.to_vec())).limit(100_000).target_bytes(usize::MAX);
    let page = from.begin().get_range(&read, Isolation::Snapshot).await.unwrap();
    assert!(!page.more && !page.rows.is_empty());
    let write = async |tx: notibus::store::Transaction| {
        for (key, value) in &page.rows {
            tx.set(key, value);
        }
        Ok(())
    };
    to.run(write).await.unwrap();
}

/// A node that is asked over HTTP.
struct Claim {
    running: NodeHandle,
    api: Api,
}

impl Claim {
    async fn start(bus: &Bus) -> Self {
        let running = bus.start(StartOptions::default()).await.unwrap();
        let api = running.api(ApiOptions::default()).unwrap();
        Self { running, api }
    }

    async fn ask(&self, request: Request<Body>) -> (u16, serde_json::Value) {
        let answer = self.api.routes().oneshot(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap())
    }

    async fn get(&self, path: &str) -> (u16, serde_json::Value) {
        self.ask(Request::get(path).body(Body::empty()).unwrap()).await
    }

    async fn raise(&self, from: u8) -> (u16, serde_json::Value) {
        let body = Body::from(format!("{{\"from\":{from}}}"));
        self.ask(Request::post("/_notibus/incarnation").body(body).unwrap()).await
    }
}

/// The totals of `a` in the copy.
const OF_COPY: [u64; 4] = [1, 0, 1, 0];

/// Positions in the original bus, of which a copy is restored.
pub(crate) struct Before {
    /// A reader that has seen everything in the copy.
    pub kept: Sequence,
    /// A reader that has seen a row from after the copy.
    pub lost: Sequence,
    /// The last edit of a document of `a`.
    pub edited: Sequence,
}

/// Makes a bus with databases `a` and `b`, restores a copy of it into `to`, and lets the original continue for a while.
pub(crate) async fn live_and_restore(to: &Store, prefix: &[u8]) -> Before {
    let old = later_store(1);
    let bus = open(&old, prefix).await;
    let asked = Claim::start(&bus).await;
    let (changes, documents) = (bus.changes(), ChangesOptions::default());
    bus.store().run(async |tx| changes.create(&tx, &db("a"), &documents).await).await.unwrap();
    let edited = edit(&bus, "x", None).await.unwrap();
    for name in ["a", "b"] {
        record(&bus, name, [1, 0, 0, 0]).await;
    }
    until("rows", async || totals(&bus, "a").await == Some(OF_COPY) && totals(&bus, "b").await.is_some())
        .await;
    let kept = bus.feed().page(Cursor::BEGINNING, 10).await.unwrap().rows.last().unwrap().sequence;
    asked.running.shutdown().await.unwrap();
    for id in ["y", "z"] {
        edit(&bus, id, None).await.unwrap();
    }
    restore(&old, to, prefix).await;
    let asked = Claim::start(&bus).await;
    record(&bus, "a", [0, 0, 1, 0]).await;
    until("a row", async || totals(&bus, "a").await == Some([1, 0, 4, 0])).await;
    let lost = bus.feed().newest(&"a".parse().unwrap()).await.unwrap().unwrap().sequence;
    asked.running.shutdown().await.unwrap();
    Before { kept, lost, edited }
}

/// Bug: after a restore to lower versions without raising the incarnation, the first fold wrote a row that its own decoder refused, later
/// events were lost, and `ready` reported no problem. Fix: a fold checks in the table of incarnations whether the store's versions are
/// behind those in its rows.
pub(crate) async fn an_older_state_folds_nothing_until_it_is_raised(store: &Store, prefix: &[u8]) {
    let Before { kept, lost, edited } = live_and_restore(store, prefix).await;
    let bus = open(store, prefix).await;
    let asked = Claim::start(&bus).await;
    // `a` has a row. `c` is new, and its row would be written where no reader looks for it.
    record(&bus, "a", [0, 0, 5, 0]).await;
    record(&bus, "c", [1, 0, 0, 0]).await;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(totals(&bus, "a").await, Some(OF_COPY), "the row of the copy stays");
        assert_eq!(totals(&bus, "c").await, None, "nothing is folded");
    }
    assert!(!bus.is_drained().await.unwrap());
    let (status, ready) = asked.get("/_notibus/health/ready").await;
    assert_eq!((status, &ready["cause"]), (503, &"older_than_rows".into()), "{ready}");
    let (status, live) = asked.get("/_notibus/health/live").await;
    assert_eq!((status, &live["cause"]), (200, &"older_than_rows".into()), "a restart does not help: {live}");
    let (_, stated) = asked.get("/_notibus/status").await;
    assert!(stated["unanswered"].to_string().contains("an older state was restored"), "{stated}");
    assert_older(&bus.feed().page(kept, 10).await);
    let options = ExportOptions::default().while_running(true);
    assert_older(&bus.export(&mut Vec::new(), options).await);
    nothing_is_written_before_the_rows(&bus, edited).await;

    let (status, answer) = asked.raise(3).await;
    assert_eq!(status, 400, "{answer}");
    let (status, answer) = asked.raise(0).await;
    assert_eq!((status, &answer["incarnation"]), (200, &1.into()), "{answer}");
    assert_eq!(asked.raise(0).await.0, 200, "the same again, as after an unknown result");
    tokio::time::timeout(LIMIT, bus.raised())
        .await
        .expect("the node finds that it has to open the bus again");
    drop(asked.running.shutdown().await);

    let bus = open(store, prefix).await;
    assert_eq!(bus.incarnation(), Incarnation(1));
    let asked = Claim::start(&bus).await;
    until("all events", async || {
        totals(&bus, "a").await == Some([1, 0, 8, 0]) && totals(&bus, "c").await == Some([1, 0, 0, 0])
    })
    .await;
    until("ready", async || asked.get("/_notibus/health/ready").await.0 == 200).await;
    let news = bus.feed().page(kept, 10).await.unwrap().rows;
    assert_eq!(news.len(), 2, "a reader of what was copied goes on");
    documents_that_were_not_folded_are_read(&bus, edited).await;
    let expired = bus.feed().page(lost, 10).await;
    assert!(matches!(expired, Err(Error::Expired { .. })), "a reader that saw more does not: {expired:?}");
    let (status, refused) = asked.raise(1).await;
    assert_eq!(status, 400, "nothing was restored since: {refused}");
    assert!(refused["reason"].as_str().unwrap().contains("as if nothing was restored"), "{refused}");
    asked.running.shutdown().await.unwrap();
}

/// Bug: only folds checked the history. An edit of a document was placed before older edits, where no reader that has passed these looks,
/// and a reshard before the rows of the feed, which could then no longer be read; a reader from nothing got no rows, as if there were none.
/// Fix: all of these check the history.
async fn nothing_is_written_before_the_rows(bus: &Bus, edited: Sequence) {
    assert_older(&edit(bus, "x", Some(edited)).await);
    assert_older(&bus.changes().feed(&db("a")).reshard(2, None).await);
    assert_older(&bus.feed().reshard(2, None).await);
    assert_older(&bus.feed().page(Cursor::BEGINNING, 10).await);
    let settings = ConsumerSettings::default().start(Start::Now);
    assert_older(&bus.consumer("mailer").unwrap().create(&settings).await);
}

/// Bug: a reader that read the documents of a database row by row got `Expired` at each document that was edited after the last fold before
/// the copy, because edits do not move the end of the incarnation. Fix: a row at or after the position of a reader proves that the copy
/// includes the position.
async fn documents_that_were_not_folded_are_read(bus: &Bus, edited: Sequence) {
    edit(bus, "x", Some(edited)).await.unwrap();
    let (feed, mut cursor, mut ids) = (bus.changes().feed(&db("a")), Cursor::BEGINNING, Vec::new());
    while ids.len() < 3 {
        let page = feed.page(cursor, 1).await.unwrap();
        ids.extend(page.rows.iter().map(|row| row.doc.id.to_string()));
        cursor = page.next;
    }
    assert_eq!(ids, ["y", "z", "x"]);
}

/// Bug: after an import, a reader that had seen more than the copy continued as if nothing had happened. Fix: an import ends the history of
/// the previous incarnation at the point where the export ended.
pub(crate) async fn an_import_ends_what_was_not_copied(store: &Store, prefix: &[u8]) {
    let old = later_store(1);
    let bus = open(&old, prefix).await;
    let asked = Claim::start(&bus).await;
    record(&bus, "a", [1, 0, 0, 0]).await;
    until("a row", async || totals(&bus, "a").await.is_some()).await;
    let kept = bus.feed().now().await.unwrap();
    let mut bytes = Vec::new();
    let options = ExportOptions::default().while_running(true);
    bus.export(&mut bytes, options).await.unwrap();
    record(&bus, "a", [0, 0, 1, 0]).await;
    until("a row", async || totals(&bus, "a").await == Some([1, 0, 1, 0])).await;
    let lost = bus.feed().now().await.unwrap();
    asked.running.shutdown().await.unwrap();

    Bus::import(store, prefix, &mut &bytes[..]).await.unwrap();
    let bus = open(store, prefix).await;
    assert!(bus.feed().page(kept, 10).await.unwrap().rows.is_empty(), "it had seen all that was copied");
    let expired = bus.feed().page(lost, 10).await;
    assert!(matches!(expired, Err(Error::Expired { .. })), "{expired:?}");
}
