//! All roles behind one handle: how they start, and how they end.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::time::Duration;

use common::{LIMIT, db, narrow_bus, record, rows, until};
use notibus::{
    Cursor, DispatcherOptions, Filter, Notification, Roles,
    dispatcher::Interruption,
    group::{ConsumerOptions, GroupBatch, GroupOptions},
    store::{Database, testing::Faults},
};
use tokio_stream::StreamExt;

#[tokio::test(start_paused = true)]
async fn one_handle_delivers_and_leaves_nothing_behind() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let running = bus.start(Roles::default()).await.unwrap();
    let mut updates = running.dispatcher().subscribe(Filter::all()).stream();
    record(&store, &bus, &db("a", 1), [1, 0, 0, 0]).await;
    assert_eq!(updates.next().await.unwrap().unwrap().notification().name.as_str(), "a");

    let status = running.status().await.unwrap();
    let roles: Vec<_> = status.nodes[0].roles.iter().map(notibus::node::Role::as_str).collect();
    assert_eq!(roles, ["dispatcher", "janitor", "notifier"]);
    assert_eq!((status.backlog.rows, status.backlog.is_exact), (0, true));

    running.shutdown().await.unwrap();
    assert!(bus.nodes().await.unwrap().is_empty(), "the others need not wait until it expires");
    let rest: Vec<_> = updates.collect().await;
    assert!(rest.iter().all(|item| matches!(item, Err(Interruption::Synced { .. }))), "{rest:?}");
    // From here on events wait for a notifier.
    record(&store, &bus, &db("b", 1), [1, 0, 0, 0]).await;
    let backlog = bus.backlog().await.unwrap();
    assert_eq!((backlog.rows, backlog.partitions[0].partition, backlog.partitions[0].rows), (1, 0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_start_that_fails_leaves_no_node() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let dispatcher = DispatcherOptions::default().ring_rows_max(0);
    assert!(bus.start(Roles::default().dispatcher(dispatcher)).await.is_err());
    assert!(bus.nodes().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn dropping_it_stops_it_as_a_crash_would() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let running = bus.start(Roles::default()).await.unwrap();
    let mut updates = running.dispatcher().subscribe(Filter::all()).stream();
    drop(running);
    assert!(updates.next().await.is_none());
    assert_eq!(bus.nodes().await.unwrap().len(), 1, "it is found dead");
    let next = bus.start(Roles::default()).await.unwrap();
    until("the next one to take over", async || next.notifier().unwrap().partitions().len() == 1).await;
    next.shutdown().await.unwrap();
}

/// The canary comes back without a reader seeing it, and costs little. Regression: subscribers of everything saw its database updated, so
/// it was off unless somebody asked for it.
#[tokio::test(start_paused = true)]
async fn the_canary_costs_little_and_no_reader_sees_it() {
    let mut cost = Vec::new();
    for canary_interval in [None, Roles::default().canary_interval] {
        let faults = Faults::new(&Database::memory());
        let bus = narrow_bus(&faults.database()).await;
        let running = bus.start(Roles::default().canary_interval(canary_interval)).await.unwrap();
        let stream = running.dispatcher().subscribe(Filter::all()).since(Cursor::NOTHING).stream();
        let before = faults.counts();
        tokio::time::sleep(Duration::from_hours(1)).await;
        let after = faults.counts();
        cost.push((after.write_commits - before.write_commits, after.reads - before.reads));
        let folds = bus.stats().folds;
        assert!(if canary_interval.is_some() { (60..=81).contains(&folds) } else { folds == 0 }, "{folds}");

        let group = bus.group("g").unwrap();
        group.create(&GroupOptions::default().start_from(Cursor::NOTHING)).await.unwrap();
        let fail = |batch: GroupBatch<Notification>| async move { panic!("{:?}", batch.rows) };
        let _consumer =
            running.node().consumer(&group, move |_| fail, ConsumerOptions::default()).await.unwrap();
        tokio::time::sleep(Duration::from_mins(10)).await;
        assert!(
            rows(&bus).await.is_empty() && group.lag().await.unwrap().iter().all(|shard| shard.rows == 0)
        );
        assert_eq!(bus.stats().group_errors, 0);
        running.shutdown().await.unwrap();
        let items: Vec<_> = stream.collect().await;
        assert!(items.iter().all(|item| matches!(item, Err(Interruption::Synced { .. }))), "{items:?}");
    }
    let [(off, reads_off), (on, reads_on)] = cost[..] else { unreachable!("both were measured") };
    println!("an hour without it: {off} writes, {reads_off} reads; with it: {on} writes, {reads_on} reads");
    assert!(on - off <= 81 * 2 && reads_on - reads_off <= 81 * 40, "{cost:?}");
}

/// Regression: programs ignored the request to terminate that every process supervisor sends.
#[cfg(all(unix, any(feature = "cli", feature = "http")))]
#[tokio::test]
async fn a_request_to_terminate_ends_it_in_order() {
    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let running = bus.start(Roles::default()).await.unwrap();
    let kill = async {
        let id = std::process::id().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    };
    // The first future listens before the second one begins.
    let (ended, ()) = tokio::time::timeout(LIMIT, async { tokio::join!(running.shutdown_on_signal(), kill) })
        .await
        .unwrap();
    ended.unwrap();
    assert!(bus.nodes().await.unwrap().is_empty());
}

/// Feeds end with their last line, and connections with their answers, before the roles end.
#[cfg(feature = "http")]
#[tokio::test]
async fn feeds_end_before_the_roles_do() {
    use notibus::http::{ApiOptions, ServerOptions};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let store = Database::memory();
    let bus = narrow_bus(&store).await;
    let running = bus.start(Roles::default()).await.unwrap();
    let api = running.api(ApiOptions::default()).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = running.serve(listener, api.routes(), ServerOptions::default()).await.unwrap();
    assert!(bus.nodes().await.unwrap()[0].roles.iter().any(|role| role.as_str() == "http"));
    let mut feed = tokio::net::TcpStream::connect(address).await.unwrap();
    feed.write_all(b"GET /_db_updates?feed=continuous HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    // The feed has begun once its headers are here.
    assert_eq!(feed.read_u8().await.unwrap(), b'H');
    let (ended, read) = tokio::time::timeout(LIMIT, async {
        let mut rest = String::new();
        tokio::join!(running.shutdown(), async { feed.read_to_string(&mut rest).await.map(|_| rest) })
    })
    .await
    .unwrap();
    ended.unwrap();
    assert!(read.unwrap().contains("{\"last_seq\":"));
    assert!(bus.nodes().await.unwrap().is_empty());
}
