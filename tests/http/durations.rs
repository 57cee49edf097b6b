//! Durations that callers pass to the server: the longest one means "never", and causes no panic; zero is refused, or taken literally.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use notibus::{
    Error, EventKind,
    http::{Api, ApiOptions, ServerOptions},
};

use crate::{
    client::{Connection, get},
    common::{db, within},
    fixture::HttpFixture,
    layer::Layer,
};

const NEVER: Duration = Duration::MAX;

/// Starts a node with these options that serves all feeds.
async fn start(options: ApiOptions, limits: ServerOptions) -> (HttpFixture, Arc<Layer>) {
    let mut layer = None;
    let fixture = HttpFixture::with(options, limits, |api, _, bus| {
        let made = layer.insert(Layer::new(bus));
        api.db_updates().merge(api.changes(&made.changes, Arc::clone(made) as _))
    })
    .await;
    (fixture, layer.unwrap())
}

/// Regression: the longest `timeout_max` made the first waiting longpoll panic, and the longest `header_timeout` every connection.
#[tokio::test]
async fn servers_bear_the_longest_durations() {
    let options = ApiOptions::default().timeout_max(NEVER).heartbeat_max(NEVER).doc_reads_limit(NEVER);
    let limits = ServerOptions::default().header_timeout(NEVER).write_timeout(NEVER).drain_timeout(NEVER);
    let (fixture, layer) = start(options, limits).await;
    let (a, d, at) = (db("a", 1), db("d", 1), fixture.at());
    layer.create(&d, 2).await;
    let mut feeds = Vec::new();
    for path in ["/_db_updates", "/d/_changes"] {
        for feed in ["longpoll", "continuous", "continuous&heartbeat=true", "eventsource"] {
            let target = format!("{path}?feed={feed}&since=now");
            let mut connection = Connection::get(at, &target).await;
            assert_eq!(connection.head().await.status, 200, "{target}");
            feeds.push((target, connection));
        }
    }
    layer.write(&d, "x", 1, 1, false).await;
    fixture.event(&a, EventKind::Created).await;
    for (target, connection) in &mut feeds {
        while !within(target, connection.chunk()).await.expect("it goes on").contains("\"seq\":") {}
    }
    fixture.api.shutdown();
    within("the end", fixture.server.shutdown()).await;
}

#[tokio::test]
async fn zero_is_refused_where_it_makes_no_sense() {
    let fixture = HttpFixture::new().await;
    let (api, zero) = (ApiOptions::default, Duration::ZERO);
    for options in [api().heartbeat_max(zero), api().doc_reads_limit(zero)] {
        let refused = Api::start(&fixture.bus, &fixture.dispatcher, options);
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    }
    let (server, at) = (ServerOptions::default, SocketAddr::from(([127, 0, 0, 1], 0)));
    for options in [server().header_timeout(zero), server().write_timeout(zero)] {
        assert!(matches!(options.check(at), Err(Error::Invalid { .. })), "{options:?}");
    }
}

#[tokio::test]
async fn zero_means_at_once_elsewhere() {
    let options = ApiOptions::default().timeout_max(Duration::ZERO);
    let limits = ServerOptions::default().drain_timeout(Duration::ZERO);
    let (fixture, _) = start(options, limits).await;
    let ended = get(fixture.at(), "/_db_updates?feed=longpoll&since=now").await;
    assert!(ended.rows().is_empty());
    let mut beats = Connection::get(fixture.at(), "/_db_updates?feed=continuous&since=now&heartbeat=1").await;
    assert_eq!(beats.head().await.status, 200);
    assert_eq!(beats.chunk().await.unwrap(), "\n");
    within("the end, though a feed goes on", fixture.server.shutdown()).await;
}
