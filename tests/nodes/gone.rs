//! Everything that reads a bus ends with the bus, even without a lease.

use std::time::Duration;

use notibus::{
    Error, Filter, Notification, StartOptions,
    consumer::Work,
    dispatcher::{Item, RestartPolicy},
    store::{Store, testing::Faults},
};
use tokio_stream::StreamExt;

use super::fixture::{EXPIRY, INTERVAL};
use crate::common::{db, narrow_bus, record, stored, within};

/// Regression: only roles with leases ended, so the tail, subscribers and mirrors of a process continued with whatever was stored under the
/// prefix of its bus, although the log said that its roles end.
#[tokio::test(start_paused = true)]
async fn all_that_reads_ends_with_an_error_once_the_bus_is_gone() {
    let faults = Faults::new(&Store::memory());
    let store = faults.store();
    let bus = narrow_bus(&store).await;
    let running = bus.start(StartOptions::default()).await.unwrap();
    let dispatcher = running.dispatcher();
    let mut stream = dispatcher.subscribe(Filter::all()).stream();
    let callback = dispatcher
        .subscribe(Filter::all())
        .callback(RestartPolicy::default(), || async |_: Item| {})
        .unwrap();
    let consumer = running.consumer("c").unwrap().run(async |_: Work<Notification>| Ok(())).await.unwrap();
    let mirror = dispatcher.mirror(Filter::all()).unwrap();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    within("a delivery", stream.next()).await.unwrap().into_delivery().unwrap();
    mirror.caught_up().await.unwrap();

    // This raises the incarnation in the configuration, like an operator who has not stopped all processes.
    let raise = store.run(async |tx| {
        let config = stored(&store, b"notibus").await[0].clone();
        tx.set(&config.0, &[&config.1[..6], &[1]].concat());
        Ok(())
    });
    raise.await.unwrap();
    tokio::time::sleep(INTERVAL * 2).await;
    // The subscriber must not receive what another bus writes under the prefix from now on.
    let other = narrow_bus(&store).await;
    let second = other.start(StartOptions::default()).await.unwrap();
    record(&store, &other, &db("b", 1), [1, 0, 0, 0]).await;
    tokio::time::sleep(EXPIRY * 2).await;
    let end = within("the end", stream.next()).await;
    assert!(matches!(end, Some(Item::Failed(Error::BusGone { .. }))), "{end:?}");
    assert!(within("the end", stream.next()).await.is_none());
    within("the end", callback.finished()).await;
    assert!(matches!(mirror.get(&db("b", 1).name), Err(Error::BusGone { .. })));
    assert!(matches!(dispatcher.wait_until(1).await, Err(Error::BusGone { .. })));
    // A subscriber that starts later ends as well.
    let late = within("the end", dispatcher.subscribe(Filter::all()).stream().next()).await;
    assert!(matches!(late, Some(Item::Failed(Error::BusGone { .. }))), "{late:?}");
    let late = running.consumer("late").unwrap().run(async |_: Work<Notification>| Ok(())).await.err();
    assert!(matches!(late, Some(Error::BusGone { .. })), "{late:?}");
    assert!(consumer.shards().is_empty());
    second.shutdown().await.unwrap();
    // From now on nothing reads the store.
    tokio::time::sleep(Duration::from_mins(2)).await;
    let before = faults.counts();
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert_eq!(faults.counts(), before);
    running.shutdown().await.unwrap();
}

/// Regression: `live` still reported the process as alive although it could never work again, and `ready` reported that the node had been
/// asked to stop.
#[cfg(feature = "http")]
#[tokio::test]
async fn a_process_whose_bus_is_gone_is_not_live() {
    use axum::{body::Body, http::Request};
    use notibus::http::ApiOptions;
    use tower::ServiceExt;

    let store = Store::memory();
    let bus = narrow_bus(&store).await;
    let running = bus.start(StartOptions::default()).await.unwrap();
    let api = running.api(ApiOptions::default()).unwrap();
    let health = async |what: &str| {
        let request = Request::get(format!("/_notibus/health/{what}")).body(Body::empty()).unwrap();
        let answer = api.routes().oneshot(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), 10_000).await.unwrap();
        (status, String::from_utf8_lossy(&body).into_owned())
    };
    assert_eq!(health("live").await.0, 200);
    let wipe = store.run(async |tx| {
        tx.clear_range(&notibus::store::KeyRange::prefix(""));
        Ok(())
    });
    wipe.await.unwrap();
    crate::common::until("the node to see it", async || health("live").await.0 == 503).await;
    // By then the dispatcher is closed. Regression: `ready` took this for a request to stop, so it reported the wrong cause.
    let (status, body) = health("ready").await;
    assert!(status == 503 && body.contains("\"cause\":\"gone\""), "{body}");
    running.shutdown().await.unwrap();
}
