//! Tests the cost of waiting feeds.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt;
use notibus::{
    Bus, Dispatcher, DispatcherOptions, Notifier,
    http::{
        Api, ApiOptions,
        axum::{Router, body::Body, http::Request},
    },
    store::{Store, testing::Trace},
};
use tokio::task::JoinSet;
use tower::ServiceExt;

use crate::{
    common::{db, joined, narrow_bus},
    fixture::quick,
    layer::Layer,
};

/// The number of waiting feeds.
const FEEDS: usize = 1_000;

/// The number of minutes for which they wait.
const MINUTES: u64 = 20;

/// The maximum number of times that the process polls the database's feed in [`MINUTES`]: once a minute.
const LOOKS_MAX: usize = MINUTES as usize;

/// Regression: each feed of documents polled the store every 10 s, so 10,000 of them made 1,000 transactions per second while nothing
/// happened. Now a single poll by the process checks their database once a minute, to find changes without a notification.
#[tokio::test(start_paused = true)]
async fn feeds_that_wait_hardly_ever_look_at_the_store() {
    let trace = Trace::new(&Store::memory());
    let store = trace.store();
    let bus = narrow_bus(&store).await;
    let _notifier = joined(&bus).await.notifier(quick()).await.unwrap();
    let dispatcher = Arc::new(bus.dispatcher(DispatcherOptions::default()).await.unwrap());
    let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
    let (layer, d) = (Layer::new(&bus), db("d", 1));
    layer.create(&d, 2).await;
    layer.write(&d, "before", 1, 1, false).await;
    let router = api.changes(&layer.changes, Arc::clone(&layer) as _);

    let cost = async || {
        tokio::time::sleep(Duration::from_secs(5)).await;
        trace.take();
        tokio::time::sleep(Duration::from_mins(MINUTES)).await;
        trace.take().len()
    };
    let without = cost().await;
    let mut feeds = JoinSet::new();
    for _ in 0..FEEDS {
        let request = Request::get("/d/_changes?feed=continuous&since=now&heartbeat=60000");
        let answer = router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let mut chunks = answer.into_body().into_data_stream();
        feeds.spawn(async move {
            let mut beats = 0;
            while let Some(chunk) = chunks.next().await {
                match &*chunk.unwrap() {
                    b"\n" => beats += 1,
                    row => return (beats, String::from_utf8(row.into()).unwrap()),
                }
            }
            panic!("the feed has ended");
        });
    }
    let with = cost().await;
    println!("{with} transactions with {FEEDS} feeds, {without} without");
    // The number of transactions that the node itself makes varies a little.
    assert!(with < without + LOOKS_MAX + 30, "{with} transactions with {FEEDS} feeds, {without} without");

    // The feeds still get new rows.
    layer.write(&d, "x", 1, 1, false).await;
    while let Some(feed) = feeds.join_next().await {
        let (beats, row) = feed.unwrap();
        assert!(beats >= MINUTES - 2 && row.contains("\"id\":\"x\""), "{beats} {row}");
    }
}

/// Starts a layer with the database `d`, and makes the router that serves its changes.
async fn served() -> (Bus, (Notifier, Dispatcher), Arc<Layer>, Router, Api) {
    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let notifier = joined(&bus).await.notifier(quick()).await.unwrap();
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
    let layer = Layer::new(&bus);
    layer.create(&db("d", 1), 2).await;
    let router = api.changes(&layer.changes, Arc::clone(&layer) as _);
    (bus, (notifier, dispatcher), layer, router, api)
}

/// Returns what a continuous feed of `d` sends, except heartbeats, while `happens` runs, until the feed ends or has sent `wanted`.
async fn sent(router: Router, target: &str, wanted: &str, happens: impl Future<Output = ()>) -> String {
    let request = Request::get(target).body(Body::empty()).unwrap();
    let mut chunks = router.oneshot(request).await.unwrap().into_body().into_data_stream();
    let read = async {
        let mut text = String::new();
        while let Some(chunk) = chunks.next().await {
            text += std::str::from_utf8(&chunk.unwrap()).unwrap().trim();
            if !wanted.is_empty() && text.contains(wanted) {
                break;
            }
        }
        text
    };
    let happens = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        happens.await;
    };
    let (text, ()) = tokio::join!(tokio::time::timeout(Duration::from_mins(10), read), happens);
    text.expect("it looks now and then")
}

/// Regression: a live feed relied on notifications alone, so it slept forever if changes were removed without an event, or if a database
/// was edited that the bus considered replaced because a client had posted `created` for its name.
#[tokio::test(start_paused = true)]
async fn live_feeds_learn_also_what_no_notification_tells_of() {
    for target in ["/d/_changes", "/d/_changes/1"] {
        let target = format!("{target}?feed=continuous&since=now&heartbeat=10000");
        let (_bus, _notifier, layer, router, _api) = served().await;
        let text = sent(router, &target, "", async { layer.remove_silently(&db("d", 1)).await }).await;
        assert!(text.starts_with("{\"last_seq\":"), "{text}");

        let (bus, _notifier, layer, router, api) = served().await;
        let invented = r#"[{"db":"d","type":"created"}]"#;
        let posted = Request::post("/_notibus/events").body(Body::from(invented)).unwrap();
        assert_eq!(api.events().oneshot(posted).await.unwrap().status(), 201);
        tokio::time::sleep(Duration::from_secs(5)).await;
        let text = sent(router, &target, "\"id\"", async {
            for id in ["x", "y", "z", "u", "v", "w"] {
                layer.write(&db("d", 1), id, 1, 1, false).await;
            }
        })
        .await;
        assert!(bus.stats().stale_events > 0, "the edits were folded as stale");
        assert!(text.contains("\"id\":"), "{text}");
    }
    // A shard that another node closes causes no notification either.
    let (_bus, _notifier, layer, router, _api) = served().await;
    let target = "/d/_changes/1?feed=continuous&since=now&heartbeat=10000";
    let text = sent(router, target, "", async {
        layer.changes.feed(&db("d", 1)).reshard(3, None).await.unwrap();
    })
    .await;
    assert!(text.contains("\"resharded_at\":"), "{text}");
}
