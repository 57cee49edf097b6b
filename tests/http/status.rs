//! Tests the routes that show the state of the node and the bus.

use notibus::{
    DispatcherOptions, EventKind,
    consumer::ConsumerSettings,
    http::{ApiOptions, ServerOptions},
};

use crate::{
    client::{ask, get},
    common::db,
    disk::{DiskFault, DiskOperation, SimulatedDisk},
    fixture::HttpFixture,
};

async fn fixture() -> HttpFixture {
    HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, _| {
        api.status().merge(api.db_updates())
    })
    .await
}

#[tokio::test]
async fn health_status_and_metrics_tell_how_it_is() {
    let fixture = fixture().await;
    fixture.bus.consumer("mailer").unwrap().create(&ConsumerSettings::default()).await.unwrap();
    fixture.event(&db("a", 1), EventKind::Created).await;
    assert_eq!(get(fixture.at(), "/_db_updates").await.rows().len(), 1);

    let status = get(fixture.at(), "/_notibus/status").await.json();
    assert_eq!(status["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(status["lag"]["is_drained"], true);
    assert_eq!(status["lag"]["undelivered_rows"], 0);
    assert_eq!(status["nodes"][0]["roles"][0], "notifier");
    assert!(status["nodes"][0]["leases"].as_object().unwrap().values().any(|held| held.as_u64() > Some(0)));
    assert_eq!(status["incarnation"], 0);
    assert_eq!(status["consumers"][0]["name"], "mailer");
    let behind: u64 = status["consumers"][0]["lag"]
        .as_array()
        .unwrap()
        .iter()
        .map(|shard| shard["rows"].as_u64().unwrap())
        .sum();
    assert_eq!(behind, 1);
    assert_eq!(status["feed"]["topology"].as_array().unwrap().len(), 1);

    let metrics = get(fixture.at(), "/_notibus/metrics").await;
    assert!(metrics.head.headers["content-type"].starts_with("application/openmetrics-text"));
    for line in [
        "notibus_events_folded_total{kind=\"created\"} 1",
        "notibus_http_answers_total{route=\"/_db_updates\",method=\"GET\",status=\"200\"} 1",
        "notibus_http_feed_rows_total 1",
        "notibus_notifications_total 1",
        "# TYPE notibus_http_feeds gauge",
        "# TYPE notibus_tasks gauge",
        "# EOF",
    ] {
        assert!(metrics.body.lines().any(|it| it == line), "{line}\n{}", metrics.body);
    }
    for target in ["/_notibus/health", "/_notibus/health/live", "/_notibus/health/ready"] {
        assert_eq!(get(fixture.at(), target).await.body, "{\"status\":\"ok\"}\n");
        assert_eq!(ask(fixture.at(), "POST", target, "", "").await.head.status, 405);
    }
}

/// Regression: the server answered work in progress on a failed store with "cannot be reached or is overloaded. Try again later.", so
/// clients retried in vain. A supervisor restarts a process that is not alive.
#[tokio::test]
async fn a_node_whose_disk_has_failed_is_not_alive_and_says_so() {
    let disk = SimulatedDisk::new(4_096);
    let fixture = HttpFixture::over(
        disk.open().unwrap(),
        DispatcherOptions::default(),
        ApiOptions::default(),
        ServerOptions::default(),
        |api, _, _| api.status().merge(api.events()).merge(api.db_updates()),
    )
    .await;
    let post =
        async || ask(fixture.at(), "POST", "/_notibus/events", "", r#"[{"db":"a","type":"created"}]"#).await;
    assert_eq!(post().await.head.status, 201);
    assert_eq!(get(fixture.at(), "/_notibus/health/live").await.head.status, 200);
    let fails = |operation: &DiskOperation| matches!(operation, DiskOperation::Sync(_));
    disk.plan(move |operation| fails(operation).then_some(DiskFault::Fails(DiskFault::IO)));
    // A commit of the node itself may hit the failure first.
    let first = post().await;
    for answer in [first, post().await] {
        assert_eq!(answer.head.status, 503, "{}", answer.body);
        assert!(answer.body.contains("\"error\":\"store_failed\""), "{}", answer.body);
        assert!(!answer.body.contains("Try again later"), "{}", answer.body);
    }
    assert!(post().await.body.contains("Nothing was changed"));
    let live = get(fixture.at(), "/_notibus/health/live").await;
    assert!(live.head.status == 503 && live.body.contains("\"cause\":\"failed\""), "{}", live.body);
    assert_eq!(get(fixture.at(), "/_notibus/health/ready").await.head.status, 503);
    assert_eq!(get(fixture.at(), "/_db_updates").await.head.status, 200, "reads go on");
}

#[tokio::test]
async fn a_node_that_is_being_shut_down_is_alive_but_not_ready() {
    let fixture = fixture().await;
    fixture.api.shutdown();
    assert_eq!(get(fixture.at(), "/_notibus/health/ready").await.head.status, 503);
    assert_eq!(get(fixture.at(), "/_notibus/health/live").await.head.status, 200);
    let longpoll = get(fixture.at(), "/_db_updates?feed=longpoll&since=now").await;
    assert_eq!(longpoll.json()["results"].as_array().unwrap().len(), 0, "it does not wait any more");
}
