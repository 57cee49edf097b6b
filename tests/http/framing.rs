//! `_db_updates` byte by byte: each feed, its beginnings, rows, heartbeats and ends.

use std::time::{Duration, Instant};

use notibus::{
    EventKind::{Created, DdocUpdated, Deleted, Updated},
    http::{ApiOptions, ServerOptions},
};

use crate::{
    client::{Connection, ask, get},
    common::db,
    world::{World, row},
};

#[tokio::test]
async fn normal_is_one_object_with_a_row_a_line() {
    let world = World::new().await;
    let empty = get(world.at(), "/_db_updates").await;
    assert_eq!(empty.body, "{\"results\":[\n\n],\n\"last_seq\":\"0\",\"pending\":0}\n");
    for (header, value) in [
        ("content-type", "application/json"),
        ("cache-control", "must-revalidate"),
        ("transfer-encoding", "chunked"),
    ] {
        assert_eq!(empty.head.headers[header], value);
    }

    let a = world.event(&db("a/\"b", 1), Created).await;
    let b = world.event(&db("ü", 1), Created).await;
    let first = format!("{{\"db_name\":\"a/\\\"b\",\"type\":\"created\",\"seq\":\"{}\"}}", a.sequence);
    let second = row(&b, "created");
    let both = get(world.at(), "/_db_updates?feed=normal&since=0").await;
    assert_eq!(
        both.body,
        format!(
            "{{\"results\":[\n{first},\r\n{second}\n],\n\"last_seq\":\"{}\",\"pending\":0}}\n",
            b.sequence
        )
    );
    let one = get(world.at(), &format!("/_db_updates?since=%22{}%22", a.sequence)).await;
    assert_eq!(
        one.body,
        format!("{{\"results\":[\n{second}\n],\n\"last_seq\":\"{}\",\"pending\":0}}\n", b.sequence)
    );
}

#[tokio::test]
async fn limits_cut_and_pending_tells_of_the_rest() {
    let world = World::new().await;
    let mut rows = Vec::new();
    for name in ["a", "b", "c"] {
        rows.push(world.event(&db(name, 1), Created).await);
    }
    let at = |place: usize| rows[place].sequence;
    for (limit, seen, last, pending) in [
        (0, 0, "0".to_owned(), 3),
        (2, 2, at(1).to_string(), 1),
        (3, 3, at(2).to_string(), 0),
        (9, 3, at(2).to_string(), 0),
    ] {
        let answer = get(world.at(), &format!("/_db_updates?limit={limit}")).await;
        assert_eq!(answer.rows().len(), seen);
        assert_eq!(
            (answer.last_seq(), &answer.json()["pending"]),
            (last.clone(), &pending.into()),
            "{limit}"
        );

        let lines =
            get(world.at(), &format!("/_db_updates?feed=continuous&timeout=0&limit={limit}")).await.body;
        let lines_of: Vec<_> = rows[..seen].iter().map(|it| row(it, "created") + "\n").collect();
        let end = format!("{{\"last_seq\":\"{last}\",\"pending\":{pending}}}\n");
        assert_eq!(lines, lines_of.concat() + &end, "{limit}");

        let events = get(world.at(), &format!("/_db_updates?feed=eventsource&timeout=0&limit={limit}")).await;
        let event =
            |it: &notibus::Notification| format!("data: {}\nid: {}\n\n", row(it, "created"), it.sequence);
        let expected: Vec<_> = rows[..seen].iter().map(event).collect();
        assert_eq!(events.body, expected.concat(), "{limit}");
        assert_eq!(events.head.headers["content-type"], "text/event-stream");

        let longpoll = get(world.at(), &format!("/_db_updates?feed=longpoll&timeout=0&limit={limit}")).await;
        assert_eq!(longpoll.body, answer.body);
    }
}

#[tokio::test]
async fn all_feeds_are_chunked_and_say_what_they_are() {
    let world = World::new().await;
    let a = world.event(&db("a", 1), Created).await;
    for (feed, kind, cache, body) in [
        ("normal", "application/json", "must-revalidate", "{\"results\":[\n\n],\nEND"),
        ("longpoll", "application/json", "must-revalidate", "{\"results\":[\n\n],\nEND"),
        ("continuous", "application/json", "must-revalidate", "{END"),
        ("eventsource", "text/event-stream", "no-cache", ""),
    ] {
        let answer = get(world.at(), &format!("/_db_updates?feed={feed}&since=now&timeout=0")).await;
        let headers = &answer.head.headers;
        assert_eq!((&*headers["content-type"], &*headers["cache-control"]), (kind, cache), "{feed}");
        assert_eq!(headers["transfer-encoding"], "chunked", "{feed}");
        assert_eq!(headers.contains_key("etag"), feed == "normal", "a feed that waits is never the same");
        // Now is where everything is known, so this is where the next request goes on.
        let last = answer.body.split('"').rev().nth(3).unwrap_or_default();
        assert!(feed == "eventsource" || last >= a.sequence.to_string().as_str(), "{}", answer.body);
        let end = format!("\"last_seq\":\"{last}\",\"pending\":0}}\n");
        assert_eq!(answer.body, body.replace("END", &end), "{feed}");
    }
}

#[tokio::test]
async fn a_slash_behind_a_path_changes_nothing() {
    let world = World::with(ApiOptions::default(), ServerOptions::default(), |api, _, bus| {
        let changes = api.changes(&bus.changes(), api.recorded_databases());
        api.db_updates().merge(changes).merge(api.events()).merge(api.status()).merge(api.welcome())
    })
    .await;
    world.event(&db("a", 1), Created).await;
    for (method, path, status) in [
        ("GET", "/_db_updates", 200),
        ("PUT", "/_db_updates", 405),
        ("GET", "/none/_changes", 404),
        ("PUT", "/none/_changes", 405),
        ("GET", "/none/_changes/_meta", 404),
        ("GET", "/none/_changes/1", 404),
        ("GET", "/_changes_shards/none", 404),
        ("POST", "/_notibus/events", 400),
        ("GET", "/_notibus/health", 200),
        ("GET", "/_notibus/health/live", 200),
        ("GET", "/_notibus/health/ready", 200),
        ("POST", "/_notibus/health/ready", 405),
        ("GET", "/_notibus/nothing", 404),
        ("GET", "/_nothing", 404),
    ] {
        let plain = ask(world.at(), method, path, "", "").await;
        let behind = ask(world.at(), method, &format!("{path}/"), "", "").await;
        assert_eq!((plain.head.status, behind.head.status), (status, status), "{method} {path}");
        assert_eq!(plain.body, behind.body, "{method} {path}");
        if path.ends_with("nothing") {
            assert_eq!(plain.body, "{\"error\":\"not_found\",\"reason\":\"missing\"}\n");
        }
    }
    for path in ["/_notibus/status/", "/_notibus/metrics/"] {
        assert_eq!(get(world.at(), path).await.head.status, 200);
    }
    let metrics = get(world.at(), "/_notibus/metrics").await.body;
    let both = "notibus_http_answers_total{route=\"/_db_updates\",method=\"GET\",status=\"200\"} 2";
    assert!(metrics.lines().any(|line| line == both), "{metrics}");
}

#[tokio::test]
async fn headers_go_out_at_once_when_there_is_nothing_to_send() {
    let world = World::new().await;
    world.event(&db("a", 1), Created).await;
    for feed in ["longpoll", "continuous", "eventsource"] {
        // A promise to clients that wait for them, not a measure of speed: a busy machine has three tries.
        let mut fastest = Duration::MAX;
        for _ in 0..3 {
            let began = Instant::now();
            let mut connection =
                Connection::get(world.at(), &format!("/_db_updates?feed={feed}&since=now")).await;
            assert_eq!(connection.head().await.status, 200);
            fastest = fastest.min(began.elapsed());
        }
        assert!(fastest < Duration::from_millis(100), "{feed}: {fastest:?}");
    }
}

#[tokio::test]
async fn heartbeats_keep_the_line_alive_in_every_mode() {
    let world = World::new().await;
    for (feed, beat, row_of) in [
        ("longpoll", "\n", "ROW"),
        ("continuous", "\n", "ROW\n"),
        ("eventsource", "event: heartbeat\ndata: \n\n", "data: ROW\nid: SEQ\n\n"),
    ] {
        let target = format!("/_db_updates?feed={feed}&since=now&heartbeat=50&timeout=1");
        let mut connection = Connection::get(world.at(), &target).await;
        connection.head().await;
        if feed == "longpoll" {
            assert_eq!(connection.chunk().await.unwrap(), "{\"results\":[\n");
        }
        let began = Instant::now();
        for _ in 0..3 {
            assert_eq!(connection.chunk().await.unwrap(), beat, "{feed}");
        }
        assert!(began.elapsed() >= Duration::from_millis(140), "{feed}: they do not come too early");
        let created = world.event(&db(feed, 1), Created).await;
        let expected =
            row_of.replace("ROW", &row(&created, "created")).replace("SEQ", &created.sequence.to_string());
        let mut chunk = connection.chunk().await.unwrap();
        while chunk == beat {
            chunk = connection.chunk().await.unwrap();
        }
        assert_eq!(chunk, expected);
    }
}

#[tokio::test]
async fn no_client_waits_longer_than_is_configured() {
    let options = ApiOptions {
        timeout_max: Duration::from_millis(60),
        heartbeat_max: Duration::from_millis(30),
        ..ApiOptions::default()
    };
    let world = World::with(options, ServerOptions::default(), |api, _, _| api.db_updates()).await;
    for feed in ["longpoll", "continuous", "eventsource"] {
        for timeout in ["", "&timeout=3600000"] {
            let began = Instant::now();
            let answer = get(world.at(), &format!("/_db_updates?feed={feed}&since=now{timeout}")).await;
            assert_eq!(answer.head.status, 200, "{feed}{timeout}: it ends by itself");
            assert!(began.elapsed() >= Duration::from_millis(55), "{feed}{timeout}: not at once");
        }
        for heartbeat in ["3600000", "true"] {
            let target = format!("/_db_updates?feed={feed}&since=now&heartbeat={heartbeat}");
            let mut connection = Connection::get(world.at(), &target).await;
            connection.head().await;
            for _ in 0..3 {
                let chunk = connection.chunk().await.unwrap();
                assert!(
                    ["\n", "event: heartbeat\ndata: \n\n", "{\"results\":[\n"].contains(&&*chunk),
                    "{chunk}"
                );
            }
        }
    }
}

#[tokio::test]
async fn a_longpoll_ends_with_what_comes_first_or_with_its_time() {
    let world = World::new().await;
    let before = world.event(&db("a", 1), Created).await;
    let since = before.sequence;
    let mut waiting = Connection::get(world.at(), &format!("/_db_updates?feed=longpoll&since={since}")).await;
    waiting.head().await;
    let updated = world.event(&db("a", 1), Updated).await;
    let line = row(&updated, "updated");
    let end = format!("\n],\n\"last_seq\":\"{}\",\"pending\":0}}\n", updated.sequence);
    assert_eq!(waiting.rest().await, format!("{{\"results\":[\n{line}{end}"));

    let since = updated.sequence;
    let none = get(world.at(), &format!("/_db_updates?feed=longpoll&since={since}&timeout=30")).await;
    assert_eq!(none.body, format!("{{\"results\":[\n\n],\n\"last_seq\":\"{since}\",\"pending\":0}}\n"));
}

#[tokio::test]
async fn live_feeds_send_a_row_for_every_event_and_live_on() {
    let world = World::new().await;
    let mut lines = Connection::get(world.at(), "/_db_updates?feed=continuous&since=now").await;
    let mut events =
        Connection::get(world.at(), "/_db_updates?feed=eventsource&since=now&types=created,deleted").await;
    lines.head().await;
    events.head().await;
    let deaf = "/_db_updates?feed=longpoll&since=now&types=ddoc_updated&heartbeat=60000";
    let mut poll = Connection::get(world.at(), deaf).await;
    poll.head().await;
    for (kind, name) in [(Created, "created"), (Updated, "updated"), (Deleted, "deleted")] {
        let seen = world.event(&db("a", 1), kind).await;
        assert_eq!(lines.chunk().await.unwrap(), row(&seen, name) + "\n");
        if kind != Updated {
            let expected = format!("data: {}\nid: {}\n\n", row(&seen, name), seen.sequence);
            assert_eq!(events.chunk().await.unwrap(), expected);
        }
    }
    // All feeds end in good order.
    let World { api, server, .. } = world;
    api.shutdown();
    let last = lines.rest().await;
    assert!(last.starts_with("{\"last_seq\":\"") && last.ends_with("\",\"pending\":0}\n"), "{last:?}");
    assert_eq!(events.rest().await, "");
    let polled = poll.rest().await;
    assert!(polled.starts_with("{\"results\":[\n\n],\n\"last_seq\":\""), "{polled:?}");
    server.shutdown().await;
}

#[tokio::test]
async fn an_event_source_goes_on_behind_the_last_event() {
    let world = World::new().await;
    let a = world.event(&db("a", 1), Created).await;
    let b = world.event(&db("b", 1), Created).await;
    for last in [a.sequence.to_string(), format!("\"{}\"", a.sequence)] {
        let header = format!("Last-Event-ID: {last}\r\n");
        let answer =
            ask(world.at(), "GET", "/_db_updates?feed=eventsource&since=0&timeout=0", &header, "").await;
        assert_eq!(answer.body, format!("data: {}\nid: {}\n\n", row(&b, "created"), b.sequence));
    }
}

#[tokio::test]
async fn types_are_derived_for_the_reader() {
    let world = World::new().await;
    let a = db("a", 1);
    let created = world.event(&a, Created).await;
    let updated = world.event(&a, Updated).await;
    world.event(&a, DdocUpdated).await;
    let of = async |query: String| get(world.at(), &format!("/_db_updates?{query}")).await.rows();
    let one = |kind: &str| vec![("a".to_owned(), kind.to_owned())];
    let (at_creation, at_update) = (created.sequence, updated.sequence);
    assert_eq!(of(String::new()).await, one("created"));
    assert_eq!(of(format!("since={at_creation}")).await, one("updated"));
    assert_eq!(of(format!("since={at_update}")).await, one("updated"), "CouchDB's word for it");
    assert_eq!(of(format!("since={at_update}&types=updated,ddoc_updated")).await, one("ddoc_updated"));
    assert_eq!(of(format!("since={at_creation}&types=ddoc_updated")).await, one("ddoc_updated"));
    assert_eq!(of("types=deleted".to_owned()).await, []);
    world.event(&a, Deleted).await;
    assert_eq!(of(String::new()).await, one("deleted"));
    assert_eq!(of("types=created,updated".to_owned()).await, []);
    world.event(&db("a", 2), Created).await;
    assert_eq!(of(format!("since={at_update}")).await, one("created"));
}

#[tokio::test]
async fn newest_first_ends_where_the_reader_stands() {
    let world = World::new().await;
    let a = world.event(&db("a", 1), Created).await;
    let b = world.event(&db("b", 1), Created).await;
    let c = world.event(&db("c", 1), Created).await;
    for feed in ["normal", "longpoll"] {
        let all = get(world.at(), &format!("/_db_updates?descending=true&feed={feed}")).await;
        let rows = [&c, &b, &a].map(|it| row(it, "created")).join(",\r\n");
        let end = format!("\n],\n\"last_seq\":\"{}\",\"pending\":0}}\n", a.sequence);
        assert_eq!(all.body, format!("{{\"results\":[\n{rows}{end}"));
    }
    let some = get(world.at(), &format!("/_db_updates?descending=true&since={}&limit=1", a.sequence)).await;
    assert_eq!((some.last_seq(), &some.json()["pending"]), (c.sequence.to_string(), &1.into()));
}

#[tokio::test]
async fn what_is_known_is_not_sent_again() {
    let world = World::new().await;
    world.event(&db("a", 1), Created).await;
    let first = get(world.at(), "/_db_updates").await;
    let tag = &first.head.headers["etag"];
    let header = format!("If-None-Match: \"x\", {tag}\r\n");
    let again = ask(world.at(), "GET", "/_db_updates", &header, "").await;
    assert_eq!((again.head.status, &*again.body), (304, ""));
    assert_eq!(&again.head.headers["etag"], tag);
    assert_eq!(ask(world.at(), "GET", "/_db_updates?limit=1", &header, "").await.head.status, 200);
    world.event(&db("a", 1), Updated).await;
    assert_eq!(ask(world.at(), "GET", "/_db_updates", &header, "").await.head.status, 200);
}

#[tokio::test]
async fn methods_and_bodies_are_those_that_clients_use() {
    let world = World::new().await;
    let a = world.event(&db("a", 1), Created).await;
    for body in ["", "{}", " { }\n"] {
        let answer = ask(world.at(), "POST", "/_db_updates", "", body).await;
        assert_eq!(answer.rows(), [("a".to_owned(), "created".to_owned())]);
        let answer =
            ask(world.at(), "POST", "/_db_updates?feed=continuous&timeout=0&limit=1", "", body).await;
        assert!(answer.body.starts_with(&row(&a, "created")));
    }
    for feed in ["normal", "longpoll", "continuous", "eventsource"] {
        let answer = ask(world.at(), "HEAD", &format!("/_db_updates?feed={feed}&since=now"), "", "").await;
        assert_eq!(answer.head.status, 200);
        assert!(answer.head.headers.contains_key("content-type"));
        // It once said that GET would bring no bytes.
        assert!(!answer.head.headers.contains_key("content-length"), "{feed}");
    }
    for body in ["[]", "{\"a\":1}", "x"] {
        assert_eq!(ask(world.at(), "POST", "/_db_updates", "", body).await.head.status, 400);
    }
    for method in ["PUT", "DELETE", "OPTIONS", "PATCH"] {
        let answer = ask(world.at(), method, "/_db_updates", "", "").await;
        assert_eq!(answer.head.status, 405);
        assert_eq!(answer.head.headers["allow"], "GET,HEAD,POST");
        assert_eq!(
            answer.body,
            "{\"error\":\"method_not_allowed\",\"reason\":\"Only GET,HEAD,POST allowed\"}\n"
        );
    }
}

#[tokio::test]
async fn bad_questions_are_told_what_would_be_right() {
    let world = World::new().await;
    let ahead = "f".repeat(26);
    for (query, error, reason) in [
        ("feed=live", "bad_request", "Supported `feed` types: normal, continuous, longpoll, eventsource"),
        ("since=12-abc", "bad_request", "Malformed sequence supplied in 'since' parameter."),
        ("limit=-1", "invalid_integer", "`limit` has to be a non-negative integer."),
        ("heartbeat=x", "invalid_integer", "`heartbeat` has to be a non-negative integer."),
    ] {
        let answer = get(world.at(), &format!("/_db_updates?{query}")).await;
        assert_eq!(answer.head.status, 400);
        assert_eq!(answer.body, format!("{{\"error\":\"{error}\",\"reason\":\"{reason}\"}}\n"));
    }
    let answer = get(world.at(), &format!("/_db_updates?since={ahead}")).await;
    assert_eq!(answer.head.status, 400, "{answer:?}");
}
