//! Tests live feeds of `_db_updates`, chunk by chunk. These feeds read the ring of the dispatcher.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::StreamExt;
use notibus::{
    Bus, Cursor, Dispatcher, DispatcherOptions, EventKind, Filter, JanitorOptions, Notifier,
    http::{
        Api, ApiOptions,
        axum::{
            Router,
            body::{Body, BodyDataStream, Bytes},
            http::{Request, StatusCode},
        },
    },
    store::{
        Store, StoreError,
        testing::{Faults, Operation},
    },
};
use tower::ServiceExt;

use crate::{
    common::{db, joined, narrow_bus, record, until, within},
    fixture::quick,
    layer::Layer,
};

/// The maximum size of a chunk in bytes: 32 KiB, plus the row that exceeds this limit.
const CHUNK_MAX: usize = (32 << 10) + 7_000;

/// A node without a listener.
struct Node {
    store: Store,
    bus: Bus,
    _notifier: Notifier,
    dispatcher: Arc<Dispatcher>,
    _api: Api,
    layer: Arc<Layer>,
    router: Router,
}

impl Node {
    /// Starts a node on `store` whose ring holds `ring_rows_max` rows.
    async fn new(store: &Store, ring_rows_max: usize) -> Self {
        let bus = narrow_bus(store).await;
        let notifier = joined(&bus).await.notifier(quick()).await.unwrap();
        let options = DispatcherOptions::default().ring_rows_max(ring_rows_max);
        let dispatcher = Arc::new(bus.dispatcher(options).await.unwrap());
        let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
        let layer = Layer::new(&bus);
        let router = api.db_updates().merge(api.changes(&layer.changes, Arc::clone(&layer) as _));
        Self { store: store.clone(), bus, _notifier: notifier, dispatcher, _api: api, layer, router }
    }

    /// Requests a feed, and returns the body of the answer.
    async fn feed(&self, target: &str) -> BodyDataStream {
        let request = Request::get(target).body(Body::empty()).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{target}");
        answer.into_body().into_data_stream()
    }

    /// Records an event, and waits until the dispatcher has read its row.
    async fn event(&self, name: &str, kind: EventKind) {
        let before = self.bus.stats().rows_tailed;
        record(&self.store, &self.bus, &db(name, 1), kind.once().lanes()).await;
        until("the tail", async || self.bus.stats().rows_tailed > before).await;
    }

    /// Creates `count` databases in one transaction, with long names that need JSON escapes.
    async fn create_long(&self, count: usize) {
        let tx = self.store.begin();
        let before = self.bus.stats().rows_tailed;
        for n in 0..count {
            let name = format!("{}{n:04}", "\u{1}".repeat(1_000));
            self.bus.producer().created(&tx, &db(&name, 1));
        }
        tx.commit().await.unwrap();
        until("the tail", async || self.bus.stats().rows_tailed >= before + count as u64).await;
    }
}

/// Returns the next chunk that is not a heartbeat.
async fn next(feed: &mut BodyDataStream) -> Bytes {
    loop {
        let chunk = within("a chunk", feed.next()).await.expect("the feed goes on").unwrap();
        if chunk != "\n" && !chunk.starts_with(b"event: heartbeat\n") {
            return chunk;
        }
    }
}

#[tokio::test]
async fn feeds_that_look_alike_share_their_bytes() {
    let node = Node::new(&Store::memory(), 1_000).await;
    let mut feeds = Vec::new();
    for target in [
        "feed=continuous",
        "feed=continuous&limit=99",
        "feed=continuous&types=created,updated",
        "feed=eventsource",
    ] {
        feeds.push(node.feed(&format!("/_db_updates?{target}&since=now&heartbeat=60000")).await);
    }
    let mut chunks = Vec::new();
    // The feeds began at different times, so their positions differ until they have received a batch.
    for kind in [EventKind::Created, EventKind::Updated] {
        node.event("a", kind).await;
        chunks.clear();
        for feed in &mut feeds {
            chunks.push(next(feed).await);
        }
        assert!(chunks[0].starts_with(b"{\"db_name\":\"a\"") && chunks[0] == chunks[2], "{chunks:?}");
    }
    assert_eq!(chunks[0].as_ptr(), chunks[1].as_ptr(), "they are the same bytes");
    assert_ne!(chunks[0].as_ptr(), chunks[2].as_ptr(), "other kinds might look different");
    assert_ne!(chunks[0], chunks[3]);
}

/// Regression: the server kept the text of a batch only if it fitted into one chunk, so each feed rendered batches for itself just when
/// they were full.
#[tokio::test]
async fn feeds_share_the_bytes_of_a_full_batch() {
    const DATABASES: usize = 30;
    let node = Node::new(&Store::memory(), 1_000).await;
    let target = "/_db_updates?feed=continuous&since=now&heartbeat=60000";
    let mut feeds = [node.feed(target).await, node.feed(target).await];
    // The feeds began at different times. After one batch they are at the same position.
    node.event("a", EventKind::Created).await;
    for feed in &mut feeds {
        next(feed).await;
    }
    node.create_long(DATABASES).await;
    let [one, other] = feeds.each_mut().map(|feed| chunks_of(feed, DATABASES));
    let (one, other) = (one.await, other.await);
    assert!(one.len() >= DATABASES * 6_000 / CHUNK_MAX, "{} chunks", one.len());
    let places = |chunks: &[Bytes]| chunks.iter().map(|chunk| chunk.as_ptr()).collect::<Vec<_>>();
    assert_eq!(places(&one), places(&other), "they are the same bytes");
}

/// A feed that stops between two chunks of a batch does not hold the batch. When the batch has left the ring, the feed continues from
/// the store with the next row.
#[tokio::test]
async fn a_feed_whose_batch_has_left_the_ring_continues_from_the_store() {
    const DATABASES: usize = 30;
    let node = Node::new(&Store::memory(), 1).await;
    let mut feed = node.feed("/_db_updates?feed=continuous&since=now&heartbeat=60000").await;
    node.event("a", EventKind::Created).await;
    next(&mut feed).await;
    node.create_long(DATABASES).await;
    let first = next(&mut feed).await;
    for name in ["b", "c"] {
        node.event(name, EventKind::Created).await;
    }
    let rest = chunks_of(&mut feed, DATABASES + 2 - lines(&first)).await;
    let all: Vec<u8> = std::iter::once(first).chain(rest).flatten().collect();
    let names: Vec<_> = std::str::from_utf8(&all)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["db_name"].to_string())
        .collect();
    let distinct: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!((names.len(), distinct.len()), (DATABASES + 2, DATABASES + 2), "each one once");
}

fn lines(chunk: &Bytes) -> usize {
    std::str::from_utf8(chunk).unwrap().matches('\n').count()
}

/// Returns the chunks with the next `rows` rows of a continuous feed.
async fn chunks_of(feed: &mut BodyDataStream, rows: usize) -> Vec<Bytes> {
    let (mut chunks, mut left) = (Vec::new(), rows);
    while left > 0 {
        let chunk = next(feed).await;
        left -= lines(&chunk);
        chunks.push(chunk);
    }
    chunks
}

/// Regression: the server limited pages and batches only by row count, so it held 3 MB for each client that did not read if names needed
/// JSON escapes.
#[tokio::test]
async fn chunks_are_bounded_in_bytes_whatever_the_names() {
    const DATABASES: usize = 150;
    let node = Node::new(&Store::memory(), 10_000).await;
    let mut live = Vec::new();
    for feed in ["continuous", "eventsource"] {
        live.push(node.feed(&format!("/_db_updates?feed={feed}&since=now&limit={DATABASES}")).await);
    }
    node.create_long(DATABASES).await;
    for target in [
        "feed=normal".to_owned(),
        "descending=true".to_owned(),
        format!("feed=continuous&limit={DATABASES}"),
        format!("feed=eventsource&limit={DATABASES}"),
    ] {
        live.push(node.feed(&format!("/_db_updates?{target}")).await);
    }
    read_chunks(live, DATABASES).await;
    let d = db("d", 1);
    node.layer.create(&d, 2).await;
    for n in 0..DATABASES {
        node.layer.write(&d, &format!("{}{n:04}", "\u{1}".repeat(1_000)), 1, 1, false).await;
    }
    let changes = ["/d/_changes", "/d/_changes?descending=true", "/d/_changes?feed=continuous&timeout=0"];
    let mut feeds = Vec::new();
    for target in changes {
        feeds.push(node.feed(target).await);
    }
    read_chunks(feeds, DATABASES).await;
}

/// Reads each feed to its end, and checks the length of the chunks and the number of rows.
async fn read_chunks(feeds: Vec<BodyDataStream>, rows: usize) {
    for (place, mut feed) in feeds.into_iter().enumerate() {
        let (mut text, mut chunks) = (String::new(), 0);
        while let Some(chunk) = within("a chunk", feed.next()).await {
            let chunk = chunk.unwrap();
            assert!(chunk.len() <= CHUNK_MAX, "feed {place}: a chunk of {} bytes", chunk.len());
            text += std::str::from_utf8(&chunk).unwrap();
            chunks += 1;
        }
        assert_eq!(text.matches("\"seq\":").count(), rows, "feed {place}: each one once");
        assert!(chunks >= rows * 6_000 / CHUNK_MAX, "feed {place}: {chunks} chunks");
    }
}

/// Regression: the batches of a subscriber that catches up were limited only in rows, so they could have any size. Now they are limited in
/// bytes, too, like the batches of the ring.
#[tokio::test]
async fn batches_of_a_catch_up_are_bounded_in_bytes() {
    let node = Node::new(&Store::memory(), 1).await;
    node.create_long(100).await;
    let mut batches = node.dispatcher.subscribe(Filter::all()).since(Cursor::BEGINNING).batches();
    let mut names = std::collections::BTreeSet::new();
    while names.len() < 100 {
        let batch = within("a batch", batches.next()).await.unwrap().into_delivery().unwrap();
        assert!(batch.len() <= 33, "{} names of 1,004 bytes", batch.len());
        names.extend(batch.iter().map(|delivery| delivery.notification().name.clone()));
    }
}

/// A live subscription can expire, like a page. The server then cuts the client off. The client tries again, and gets 410.
#[tokio::test]
async fn a_live_feed_that_has_expired_is_cut_off() {
    let node = Node::new(&Store::memory(), 1).await;
    let since = node.bus.feed().now().await.unwrap();
    let mut feed = node.feed(&format!("/_db_updates?feed=continuous&since={since}&heartbeat=10")).await;
    assert_eq!(within("a heartbeat", feed.next()).await.unwrap().unwrap(), "\n");
    for (name, kind) in [
        ("x", EventKind::Created),
        ("x", EventKind::Deleted),
        ("a", EventKind::Created),
        ("b", EventKind::Created),
    ] {
        node.event(name, kind).await;
    }
    let options = JanitorOptions::default()
        .tombstone_retention(Duration::from_millis(1))
        .interval(Duration::from_millis(1));
    let janitor = joined(&node.bus).await.janitor(options).await.unwrap();
    until("the tombstone's end", async || node.bus.stats().tombstones_dropped == 1).await;
    janitor.shutdown().await.unwrap();
    let cut = loop {
        match within("the end", feed.next()).await.unwrap() {
            Ok(chunk) => assert_eq!(chunk, "\n", "no row comes before it"),
            Err(error) => break error,
        }
    };
    assert!(cut.to_string().contains("expired"), "{cut}");
    assert!(within("the end", feed.next()).await.is_none());
    let again = Request::get(format!("/_db_updates?since={since}")).body(Body::empty()).unwrap();
    assert_eq!(node.router.clone().oneshot(again).await.unwrap().status(), StatusCode::GONE);
}

/// Regression: while the storage of a cluster was unavailable, the server refused posts after a while, but each attempt to read the first
/// page of a feed took so long that clients of feeds got no answer for minutes.
#[tokio::test(start_paused = true)]
async fn a_feed_that_cannot_begin_is_refused_within_a_minute() {
    let faults = Faults::new(&Store::memory());
    let node = Node::new(&faults.store(), 1).await;
    faults.delay_reads(Duration::from_hours(1));
    for query in ["", "?since=now&feed=continuous", "?feed=longpoll", "?descending=true"] {
        let asked = tokio::time::Instant::now();
        let request = Request::get(format!("/_db_updates{query}")).body(Body::empty()).unwrap();
        let answer = node.router.clone().oneshot(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{query}");
        assert!(asked.elapsed() < Duration::from_mins(1), "{query}: {:?}", asked.elapsed());
    }
}

/// Regression: events of the bus itself moved the end of the feed, so the entity tag changed, and a client got the same rows again after a
/// minute without any event.
#[tokio::test(start_paused = true)]
async fn an_entity_tag_holds_at_rest() {
    let node = Node::new(&Store::memory(), 100).await;
    let janitor = joined(&node.bus).await.janitor(JanitorOptions::default()).await.unwrap();
    node.event("a", EventKind::Created).await;
    let asked = async |tag: Option<&str>| {
        let request = Request::get("/_db_updates").header("if-none-match", tag.unwrap_or("none"));
        node.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    };
    let tag = asked(None).await.headers()["etag"].to_str().unwrap().to_owned();
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert_eq!(asked(Some(&tag)).await.status(), StatusCode::NOT_MODIFIED);
    node.event("a", EventKind::Updated).await;
    assert_eq!(asked(Some(&tag)).await.status(), StatusCode::OK);
    janitor.shutdown().await.unwrap();
}

/// If the dispatcher cannot read for a feed, the feed tries again after a pause, and misses nothing.
#[tokio::test(start_paused = true)]
async fn a_live_feed_waits_out_failures() {
    let faults = Faults::new(&Store::memory());
    let node = Node::new(&faults.store(), 1).await;
    let mut feed = node.feed("/_db_updates?feed=continuous&since=now&heartbeat=1000").await;
    assert_eq!(within("a heartbeat", feed.next()).await.unwrap().unwrap(), "\n");
    for name in ["a", "b", "c"] {
        node.event(name, EventKind::Created).await;
    }
    let failed = Arc::new(AtomicUsize::new(0));
    faults.plan_reads({
        let failed = Arc::clone(&failed);
        move |operation| {
            let fails = matches!(operation, Operation::GetRange { .. });
            fails.then(|| {
                failed.fetch_add(1, Ordering::Relaxed);
                StoreError::IO_ERROR
            })
        }
    });
    for _ in 0..20 {
        assert_eq!(within("a heartbeat", feed.next()).await.unwrap().unwrap(), "\n");
    }
    let failed = failed.load(Ordering::Relaxed);
    assert!((10..400).contains(&failed), "{failed} reads failed in 20 s, those of the other roles included");
    faults.heal();
    let mut text = String::new();
    while text.lines().filter(|line| !line.is_empty()).count() < 3 {
        text += std::str::from_utf8(&next(&mut feed).await).unwrap();
    }
    let names = ["a", "b", "c"].map(|name| text.contains(&format!("\"db_name\":\"{name}\"")));
    assert_eq!(names, [true; 3], "{text}");
}
