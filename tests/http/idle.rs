//! What feeds cost that wait.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt;
use notibus::{
    DispatcherOptions,
    http::{
        Api, ApiOptions,
        axum::{body::Body, http::Request},
    },
    store::{Database, testing::Trace},
};
use tokio::task::JoinSet;
use tower::ServiceExt;

use crate::{
    common::{db, narrow_bus},
    layer::Layer,
    world::quick,
};

/// How many feeds wait.
const FEEDS: usize = 1_000;

/// Each feed of documents once looked at the store every 10 s: 10,000 of them made 1,000 transactions per second at rest.
#[tokio::test(start_paused = true)]
async fn feeds_that_wait_do_not_look_at_the_store() {
    let trace = Trace::new(&Database::memory());
    let store = trace.database();
    let bus = narrow_bus(&store).await;
    let _notifier = bus.notifier(quick()).await.unwrap();
    let dispatcher = Arc::new(bus.dispatcher(DispatcherOptions::default()).await.unwrap());
    let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
    let (layer, d) = (Layer::new(&store, &bus), db("d", 1));
    layer.create(&d, 2).await;
    layer.write(&d, "before", 1, 1, false).await;
    let router = api.changes(&layer.changes, Arc::clone(&layer) as _);

    let cost = async || {
        tokio::time::sleep(Duration::from_secs(5)).await;
        trace.take();
        tokio::time::sleep(Duration::from_mins(2)).await;
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
    // What the node itself does differs a little from time to time.
    assert!(with < without + 10, "{with} transactions with {FEEDS} feeds, {without} without");

    // They are told all the same.
    layer.write(&d, "x", 1, 1, false).await;
    while let Some(feed) = feeds.join_next().await {
        let (beats, row) = feed.unwrap();
        assert!(beats >= 2 && row.contains("\"id\":\"x\""), "{beats} {row}");
    }
}
