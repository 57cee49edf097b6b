//! Tests readers that are cut off at random and continue from their position.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use notibus::{
    Bus, Cursor, Db, DbInstance, EventKind, JanitorOptions, Notification, Sequence,
    http::{ApiOptions, ServerOptions},
    store::Store,
};

use crate::{
    client::{Connection, get},
    common::{db, dice, joined, until},
    fixture::HttpFixture,
    layer::Layer,
};

/// What a reader believes about a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Belief {
    Lives,
    Deleted,
}

/// A client that keeps only a position, and no other state of the protocol.
#[derive(Default)]
struct Reader {
    /// The last position that the server sent.
    since: String,
    /// The sequence of the last row.
    last: String,
    /// The database of the last row.
    name: String,
    seen: HashSet<String>,
    beliefs: HashMap<String, Belief>,
    rows: usize,
}

impl Reader {
    fn take(&mut self, line: &str) {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| row[key].as_str().unwrap().to_owned();
        let (name, seq) = (text("db_name"), text("seq"));
        assert!(seq >= self.last, "no rewind: {line} after {}", self.last);
        // A reader that was cut off between two rows of a database gets the database again.
        let is_new = self.seen.insert(line.to_owned());
        assert!(is_new || name == self.name, "no duplicate: {line} after {}", self.last);
        self.name.clone_from(&name);
        match &*text("type") {
            "created" => {
                self.beliefs.insert(name, Belief::Lives);
            }
            "deleted" => {
                self.beliefs.insert(name, Belief::Deleted);
            }
            "updated" => assert_eq!(
                self.beliefs.get(&name),
                Some(&Belief::Lives),
                "its creation was not delivered: {line} since {}",
                self.since
            ),
            other => panic!("{other} was not asked for"),
        }
        (self.since, self.last, self.rows) = (seq.clone(), seq, self.rows + 1);
    }
}

/// Creates, updates and deletes databases at random until `stop` becomes true.
async fn churn(store: Store, bus: Bus, mut dice: fastrand::Rng, stop: Arc<AtomicBool>) {
    let producer = bus.producer();
    let mut databases: HashMap<usize, Option<Db>> = HashMap::new();
    while !stop.load(Ordering::Relaxed) {
        let picks: Vec<usize> = (0..dice.usize(1..6)).map(|_| dice.usize(..60)).collect();
        let tx = store.begin();
        for pick in picks {
            let known = databases.entry(pick).or_default();
            match known {
                Some(db) if dice.u8(..10) == 0 => {
                    producer.deleted(&tx, db);
                    *known = None;
                }
                Some(db) => producer.updated(&tx, db),
                None => {
                    let db = Db::new(
                        format!("db{pick}").parse().unwrap(),
                        DbInstance(dice.u128(..).to_be_bytes()),
                    );
                    producer.created(&tx, &db);
                    *known = Some(db);
                }
            }
        }
        tx.commit().await.unwrap();
        tokio::time::sleep(Duration::from_micros(dice.u64(..2_000))).await;
    }
}

/// Returns the rows that a feed of any kind sends before the client cuts it off at random, and `last_seq` if the feed reached its end.
async fn some_rows(
    fixture: &HttpFixture,
    dice: &mut fastrand::Rng,
    path: &str,
    since: &str,
) -> (Vec<String>, Option<String>) {
    let feed = ["continuous", "eventsource", "normal", "longpoll"][dice.usize(..4)];
    let limit = dice.usize(1..40);
    let target = format!("{path}?feed={feed}&since={since}&limit={limit}&timeout=50");
    if feed == "normal" || feed == "longpoll" {
        let answer = get(fixture.at(), &target).await;
        assert_eq!(answer.head.status, 200, "{target}: {}", answer.body);
        let rows = answer.json()["results"].as_array().unwrap().iter().map(ToString::to_string).collect();
        return (rows, Some(answer.last_seq()));
    }
    // The client cuts the feed off after the rows that have arrived so far.
    let mut connection = Connection::get(fixture.at(), &target).await;
    assert_eq!(connection.head().await.status, 200, "{target}");
    let mut text = String::new();
    for _ in 0..dice.usize(1..4) {
        match connection.chunk().await {
            Some(chunk) => text += &chunk,
            None => break,
        }
    }
    let cut = dice.usize(..=text.len());
    let whole = &text[..text[..cut].rfind('\n').map_or(0, |end| end + 1)];
    let lines = whole.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
    let rows = lines.filter(|line| line.starts_with("{\"db_name\"") || line.starts_with("{\"seq\""));
    (rows.map(str::to_owned).collect(), None)
}

/// Writes new documents, edits and deletes some of them, and changes the number of shards, until `stop` becomes true. Returns the
/// position of each document's last revision.
async fn edit(layer: Arc<Layer>, mut dice: fastrand::Rng, stop: Arc<AtomicBool>) -> HashMap<String, u64> {
    let (d, mut documents) = (db("d", 1), HashMap::new());
    while !stop.load(Ordering::Relaxed) {
        // There must be new documents, which have to appear once: with edits alone, a later edit would hide a lost one.
        let known = documents.len();
        let number = if known == 0 || dice.u8(..3) > 0 { known } else { dice.usize(..known) };
        let id = format!("doc{number}");
        let position = documents.entry(id.clone()).and_modify(|position| *position += 1).or_insert(1);
        layer.write(&d, &id, *position, 1, dice.u8(..10) == 0).await;
        if dice.u8(..100) == 0 {
            layer.changes.feed(&d).reshard(dice.u32(1..6), None).await.unwrap();
        }
        tokio::time::sleep(Duration::from_micros(dice.u64(..2_000))).await;
    }
    documents
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_cuts_of_changes_lose_and_repeat_nothing() {
    let mut dice = dice();
    let mut layer = None;
    let fixture = HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, bus| {
        let made = layer.insert(Layer::new(bus));
        api.changes(&made.changes, Arc::clone(made) as _)
    })
    .await;
    let layer = layer.unwrap();
    layer.create(&db("d", 1), 2).await;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = tokio::spawn(edit(Arc::clone(&layer), dice.fork(), Arc::clone(&stop)));
    let (mut since, mut last, mut seen) = ("0".to_owned(), String::new(), 0);
    let mut documents: HashMap<String, u64> = HashMap::new();
    let mut take = |line: &str| {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let seq = row["seq"].as_str().unwrap().to_owned();
        assert!(seq > last, "neither a duplicate nor a rewind: {line} after {last}");
        let revision = row["changes"][0]["rev"].as_str().unwrap();
        let position = revision.split_once('-').unwrap().0.parse().unwrap();
        let before = documents.insert(row["id"].as_str().unwrap().to_owned(), position);
        assert!(before < Some(position), "no revision twice: {line}");
        last.clone_from(&seq);
        seen += 1;
        seq
    };
    let (mut cuts, mut read) = (0, 0);
    // On a slow machine, two hundred cuts may happen before this many rows are written.
    while cuts < 200 || read <= 200 {
        let (rows, last_seq) = some_rows(&fixture, &mut dice, "/d/_changes", &since).await;
        for row in &rows {
            since = take(row);
        }
        (cuts, read) = (cuts + 1, read + rows.len());
        since = last_seq.unwrap_or(since);
    }
    stop.store(true, Ordering::Relaxed);
    let truth = writer.await.unwrap();
    let rest = get(fixture.at(), &format!("/d/_changes?since={since}")).await.json();
    for row in rest["results"].as_array().unwrap() {
        take(&row.to_string());
    }
    assert_eq!(documents, truth);
    assert!(seen > 200, "{seen} rows were seen");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_cuts_lose_and_repeat_nothing() {
    let mut dice = dice();
    let fixture = HttpFixture::new().await;
    let stop = Arc::new(AtomicBool::new(false));
    let writer =
        tokio::spawn(churn(fixture.store.clone(), fixture.bus.clone(), dice.fork(), Arc::clone(&stop)));
    let mut reader = Reader { since: "0".into(), ..Reader::default() };
    for _ in 0..1_000 {
        let (rows, last_seq) = some_rows(&fixture, &mut dice, "/_db_updates", &reader.since).await;
        for row in &rows {
            reader.take(row);
        }
        reader.since = last_seq.unwrap_or(reader.since);
    }
    stop.store(true, Ordering::Relaxed);
    writer.await.unwrap();
    until("the folds", async || fixture.bus.is_drained().await.unwrap()).await;
    let rest = get(fixture.at(), &format!("/_db_updates?since={}", reader.since)).await.json();
    for row in rest["results"].as_array().unwrap() {
        reader.take(&row.to_string());
    }
    let page = fixture.bus.feed().page(Cursor::BEGINNING, 1_000).await.unwrap();
    let truth = |row: &Notification| if row.is_deleted() { Belief::Deleted } else { Belief::Lives };
    let truth: HashMap<_, _> = page.rows.iter().map(|row| (row.name.to_string(), truth(row))).collect();
    assert_eq!(reader.beliefs, truth);
    assert!(reader.rows > 1_000, "{} rows were seen", reader.rows);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_come_also_under_a_load_of_what_is_not_wanted() {
    let fixture = HttpFixture::new().await;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = tokio::spawn(churn(fixture.store.clone(), fixture.bus.clone(), dice(), Arc::clone(&stop)));
    for feed in ["longpoll", "continuous", "eventsource"] {
        let target = format!("/_db_updates?feed={feed}&types=ddoc_updated&heartbeat=100");
        let mut connection = Connection::get(fixture.at(), &target).await;
        connection.head().await;
        let before = fixture.bus.stats().notifications;
        for _ in 0..10 {
            let chunk = connection.chunk().await.unwrap();
            assert!(
                ["\n", "{\"results\":[\n"].contains(&&*chunk)
                    || chunk.starts_with("event: heartbeat\ndata: \nid: "),
                "{chunk}"
            );
        }
        assert!(fixture.bus.stats().notifications > before + 10, "there was a load");
    }
    stop.store(true, Ordering::Relaxed);
    writer.await.unwrap();
}

/// Regression: a plain position lost the earlier events of a database whose row moved past the position, so a reader that read in pages got
/// an update of a database whose creation it had never seen.
#[tokio::test]
async fn a_cut_by_the_limit_does_not_lose_a_creation() {
    let fixture = HttpFixture::new().await;
    let a = db("a", 1);
    fixture.event(&a, EventKind::Created).await;
    let b = fixture.event(&db("b", 1), EventKind::Created).await;
    fixture.event(&a, EventKind::Updated).await;
    let first = get(fixture.at(), "/_db_updates?limit=1").await;
    assert_eq!(first.rows(), [("b".to_owned(), "created".to_owned())]);
    assert!(first.last_seq().starts_with(&b.sequence.to_string()));
    let second = get(fixture.at(), &format!("/_db_updates?limit=1&since={}", first.last_seq())).await;
    let both = ["created", "updated"].map(|kind| ("a".to_owned(), kind.to_owned()));
    assert_eq!(second.rows(), both, "a database is sent whole");
    assert_eq!(second.last_seq().len(), 26, "nothing is left that it would have to tell");
    let events = get(fixture.at(), "/_db_updates?limit=1&feed=eventsource&timeout=0").await.body;
    assert!(events.contains(&format!("\nid: \"{}\"\n", first.last_seq())), "{events}");
}

#[tokio::test]
async fn a_reader_that_was_away_too_long_gets_410_and_one_that_pages_from_zero_does_not() {
    let fixture = HttpFixture::new().await;
    let old = fixture.event(&db("old", 1), EventKind::Created).await;
    fixture.event(&db("older", 1), EventKind::Created).await;
    let gone = db("gone", 1);
    fixture.event(&gone, EventKind::Created).await;
    let first = get(fixture.at(), "/_db_updates?limit=1").await.last_seq();
    let tombstone = fixture.event(&gone, EventKind::Deleted).await;
    fixture.event(&db("new", 1), EventKind::Created).await;

    let options = JanitorOptions::default()
        .tombstone_retention(Duration::from_millis(1))
        .interval(Duration::from_millis(1));
    let janitor = joined(&fixture.bus).await.janitor(options).await.unwrap();
    until("the tombstone to be dropped", async || {
        fixture.bus.feed().horizon().await.unwrap() > Sequence::MIN
    })
    .await;
    janitor.shutdown().await.unwrap();

    // A reader at one of these positions may have seen the rows that were dropped.
    for since in [old.sequence.to_string(), first] {
        for feed in ["normal", "longpoll", "continuous", "eventsource"] {
            let answer = get(fixture.at(), &format!("/_db_updates?since={since}&feed={feed}")).await;
            assert_eq!(answer.head.status, 410, "{answer:?}");
            assert_eq!(answer.json()["error"], "expired");
            let horizon = fixture.bus.feed().horizon().await.unwrap().to_string();
            assert_eq!(
                (&answer.json()["horizon"], &answer.json()["restart_since"]),
                (&horizon.into(), &"0".into())
            );
            assert_eq!(answer.head.headers["retry-after"], "1");
            assert!(answer.json()["reason"].as_str().unwrap().contains("since=0"));
        }
    }
    let after = get(fixture.at(), &format!("/_db_updates?since={}", tombstone.sequence)).await;
    assert_eq!(after.rows(), [("new".to_owned(), "created".to_owned())]);
    // A reader that began with nothing also reads the rows below the horizon, one by one.
    let (mut since, mut names) = ("0".to_owned(), Vec::new());
    for _ in 0..3 {
        let answer = get(fixture.at(), &format!("/_db_updates?limit=1&since={since}")).await;
        names.extend(answer.rows().into_iter().map(|(name, _)| name));
        since = answer.last_seq();
    }
    assert_eq!(names, ["old", "older", "new"]);
    let live = get(fixture.at(), "/_db_updates?feed=continuous&timeout=0").await.body;
    assert_eq!(live.lines().count(), 4);
}

/// Regression: the server gave a reader at the end the sequence of the last row as its position, which was below the horizon once the
/// janitor had dropped a tombstone behind that row, so the reader got 410, read everything again, got the same position, and so on forever.
#[tokio::test]
async fn who_has_read_everything_has_not_expired_when_it_asks_next() {
    let fixture = HttpFixture::new().await;
    fixture.event(&db("kept", 1), EventKind::Created).await;
    fixture.event(&db("gone", 1), EventKind::Created).await;
    fixture.event(&db("gone", 1), EventKind::Deleted).await;
    let options = JanitorOptions::default()
        .tombstone_retention(Duration::from_millis(1))
        .interval(Duration::from_millis(1));
    let janitor = joined(&fixture.bus).await.janitor(options).await.unwrap();
    until("the tombstone to be dropped", async || fixture.bus.stats().tombstones_dropped == 1).await;
    janitor.shutdown().await.unwrap();
    let all = get(fixture.at(), "/_db_updates").await;
    assert_eq!(all.rows(), [("kept".to_owned(), "created".to_owned())]);
    let target = format!("/_db_updates?since={}", all.last_seq());
    assert_eq!(get(fixture.at(), &target).await.rows(), []);
    // Later news is derived from everything that the reader has read.
    let kept = fixture.event(&db("kept", 1), EventKind::Updated).await;
    let next = get(fixture.at(), &target).await;
    assert_eq!(next.rows(), [("kept".to_owned(), "updated".to_owned())]);
    assert_eq!(next.last_seq(), kept.sequence.to_string());
}
