//! Tests `_db_updates` byte by byte: each feed, its beginning, rows, heartbeats and end.

use std::time::{Duration, Instant};

use notibus::{
    EventKind::{Created, DdocUpdated, Deleted, Updated},
    http::{ApiOptions, ServerOptions},
};

use crate::{
    client::{Connection, ask, get},
    common::db,
    fixture::{HttpFixture, row},
};

#[tokio::test]
async fn normal_is_one_object_with_a_row_a_line() {
    let fixture = HttpFixture::new().await;
    let empty = get(fixture.at(), "/_db_updates").await;
    assert_eq!(empty.body, "{\"results\":[\n\n],\n\"last_seq\":\"0\"}\n");
    for (header, value) in [
        ("content-type", "application/json"),
        ("cache-control", "must-revalidate"),
        ("transfer-encoding", "chunked"),
    ] {
        assert_eq!(empty.head.headers[header], value);
    }

    let a = fixture.event(&db("a/\"b", 1), Created).await;
    let b = fixture.event(&db("ü", 1), Created).await;
    let first = format!("{{\"db_name\":\"a/\\\"b\",\"type\":\"created\",\"seq\":\"{}\"}}", a.sequence);
    let second = row(&b, "created");
    let both = get(fixture.at(), "/_db_updates?feed=normal&since=0").await;
    assert_eq!(
        both.body,
        format!("{{\"results\":[\n{first},\r\n{second}\n],\n\"last_seq\":\"{}\"}}\n", b.sequence)
    );
    let one = get(fixture.at(), &format!("/_db_updates?since=%22{}%22", a.sequence)).await;
    assert_eq!(one.body, format!("{{\"results\":[\n{second}\n],\n\"last_seq\":\"{}\"}}\n", b.sequence));
}

#[tokio::test]
async fn limits_cut() {
    let fixture = HttpFixture::new().await;
    let mut rows = Vec::new();
    for name in ["a", "b", "c"] {
        rows.push(fixture.event(&db(name, 1), Created).await);
    }
    let at = |place: usize| rows[place].sequence;
    for (limit, seen, last) in [
        (0, 0, "0".to_owned()),
        (2, 2, at(1).to_string()),
        (3, 3, at(2).to_string()),
        (9, 3, at(2).to_string()),
    ] {
        let answer = get(fixture.at(), &format!("/_db_updates?limit={limit}")).await;
        assert_eq!(answer.rows().len(), seen);
        assert_eq!(answer.last_seq(), last, "{limit}");
        // Regression: the server counted `pending` for this answer, so it took 50 ms longer at 300,000 databases.
        assert!(answer.json().get("pending").is_none());

        let lines =
            get(fixture.at(), &format!("/_db_updates?feed=continuous&timeout=0&limit={limit}")).await.body;
        let lines_of: Vec<_> = rows[..seen].iter().map(|it| row(it, "created") + "\n").collect();
        let end = format!("{{\"last_seq\":\"{last}\"}}\n");
        assert_eq!(lines, lines_of.concat() + &end, "{limit}");

        let events =
            get(fixture.at(), &format!("/_db_updates?feed=eventsource&timeout=0&limit={limit}")).await;
        let event =
            |it: &notibus::Notification| format!("data: {}\nid: \"{}\"\n\n", row(it, "created"), it.sequence);
        let expected: Vec<_> = rows[..seen].iter().map(event).collect();
        let [begin, end] = ["0", &*last].map(beat);
        assert_eq!(events.body, begin + &expected.concat() + &end, "{limit}");
        assert_eq!(events.head.headers["content-type"], "text/event-stream");

        let longpoll =
            get(fixture.at(), &format!("/_db_updates?feed=longpoll&timeout=0&limit={limit}")).await;
        assert_eq!(longpoll.body, answer.body);
    }
}

#[tokio::test]
async fn all_feeds_are_chunked_and_say_what_they_are() {
    let fixture = HttpFixture::new().await;
    let a = fixture.event(&db("a", 1), Created).await;
    for (feed, kind, cache, body) in [
        ("normal", "application/json", "must-revalidate", "{\"results\":[\n\n],\nEND"),
        ("longpoll", "application/json", "must-revalidate", "{\"results\":[\n\n],\nEND"),
        ("continuous", "application/json", "must-revalidate", "{END"),
        (
            "eventsource",
            "text/event-stream",
            "no-cache",
            "event: heartbeat\ndata: \nid: SEQ\n\nevent: heartbeat\ndata: \nid: SEQ\n\n",
        ),
    ] {
        let answer = get(fixture.at(), &format!("/_db_updates?feed={feed}&since=now&timeout=0")).await;
        let headers = &answer.head.headers;
        assert_eq!((&*headers["content-type"], &*headers["cache-control"]), (kind, cache), "{feed}");
        assert_eq!(headers["transfer-encoding"], "chunked", "{feed}");
        assert_eq!(headers.contains_key("etag"), feed == "normal", "a feed that waits is never the same");
        // With `since=now` no row is returned, and `last_seq` is the end of the feed, at or after the last row.
        let last = answer.body.split('"').rev().nth(1).unwrap_or_default();
        assert!(last >= a.sequence.to_string().as_str(), "{}", answer.body);
        let end = format!("\"last_seq\":\"{last}\"}}\n");
        assert_eq!(answer.body, body.replace("END", &end).replace("SEQ", &format!("\"{last}\"")), "{feed}");
    }
    let plain = ask(fixture.at(), "GET", "/_db_updates?limit=0", "Accept: text/plain\r\n", "").await;
    assert_eq!(plain.head.headers["content-type"], "application/json");
}

#[tokio::test]
async fn a_slash_behind_a_path_changes_nothing() {
    let fixture = HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, bus| {
        let changes = api.changes(&bus.changes(), api.recorded_databases());
        api.db_updates().merge(changes).merge(api.events()).merge(api.status()).merge(api.welcome())
    })
    .await;
    fixture.event(&db("a", 1), Created).await;
    for (method, path, status) in [
        ("GET", "/_db_updates", 200),
        ("PUT", "/_db_updates", 405),
        ("GET", "/none/_changes", 404),
        ("PUT", "/none/_changes", 405),
        ("GET", "/none/_changes/_meta", 404),
        ("GET", "/none/_changes/1", 404),
        ("POST", "/_notibus/events", 400),
        ("GET", "/_notibus/health", 200),
        ("GET", "/_notibus/health/live", 200),
        ("GET", "/_notibus/health/ready", 200),
        ("POST", "/_notibus/health/ready", 405),
        ("GET", "/_notibus/nothing", 404),
        ("GET", "/_nothing", 404),
    ] {
        let plain = ask(fixture.at(), method, path, "", "").await;
        let behind = ask(fixture.at(), method, &format!("{path}/"), "", "").await;
        assert_eq!((plain.head.status, behind.head.status), (status, status), "{method} {path}");
        assert_eq!(plain.body, behind.body, "{method} {path}");
        if path.ends_with("nothing") {
            assert_eq!(plain.body, "{\"error\":\"not_found\",\"reason\":\"missing\"}\n");
        }
    }
    for path in ["/_notibus/status/", "/_notibus/metrics/"] {
        assert_eq!(get(fixture.at(), path).await.head.status, 200);
    }
    let metrics = get(fixture.at(), "/_notibus/metrics").await.body;
    let both = "notibus_http_answers_total{route=\"/_db_updates\",method=\"GET\",status=\"200\"} 2";
    assert!(metrics.lines().any(|line| line == both), "{metrics}");
}

#[tokio::test]
async fn headers_go_out_at_once_when_there_is_nothing_to_send() {
    let fixture = HttpFixture::new().await;
    fixture.event(&db("a", 1), Created).await;
    for feed in ["longpoll", "continuous", "eventsource"] {
        // This checks a promise to waiting clients rather than speed, so a busy machine gets three tries.
        let mut fastest = Duration::MAX;
        for _ in 0..3 {
            let began = Instant::now();
            let mut connection =
                Connection::get(fixture.at(), &format!("/_db_updates?feed={feed}&since=now")).await;
            assert_eq!(connection.head().await.status, 200);
            fastest = fastest.min(began.elapsed());
        }
        assert!(fastest < Duration::from_millis(100), "{feed}: {fastest:?}");
    }
}

#[tokio::test]
async fn heartbeats_keep_the_line_alive_in_every_mode() {
    let fixture = HttpFixture::new().await;
    for (feed, beat, row_of) in [
        ("longpoll", "\n", "ROW"),
        ("continuous", "\n", "ROW\n"),
        ("continuous&progress=true", "{\"last_seq\":\"AT\"}\n", "ROW\n"),
        // A client that has had no news for a long time still learns how far the feed has come.
        ("eventsource", "event: heartbeat\ndata: \nid: \"AT\"\n\n", "data: ROW\nid: \"SEQ\"\n\n"),
    ] {
        let target = format!("/_db_updates?feed={feed}&since=now&heartbeat=50&timeout=1");
        let mut connection = Connection::get(fixture.at(), &target).await;
        connection.head().await;
        if feed == "longpoll" {
            assert_eq!(connection.chunk().await.unwrap(), "{\"results\":[\n");
        }
        let began = Instant::now();
        let is_beat = |chunk: &str| {
            let (before, after) = beat.split_once("AT").unwrap_or((beat, ""));
            let at = chunk.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
            at.is_some_and(|at| at.len() == if beat.contains("AT") { 26 } else { 0 })
        };
        for _ in 0..3 {
            let chunk = connection.chunk().await.unwrap();
            assert!(is_beat(&chunk), "{feed}: {chunk}");
        }
        assert!(began.elapsed() >= Duration::from_millis(140), "{feed}: they do not come too early");
        let created = fixture.event(&db(&format!("db{}", feed.len()), 1), Created).await;
        let expected =
            row_of.replace("ROW", &row(&created, "created")).replace("SEQ", &created.sequence.to_string());
        let mut chunk = connection.chunk().await.unwrap();
        while is_beat(&chunk) {
            chunk = connection.chunk().await.unwrap();
        }
        assert_eq!(chunk, expected);
    }
}

#[tokio::test]
async fn no_client_waits_longer_than_is_configured() {
    let options =
        ApiOptions::default().timeout_max(Duration::from_millis(60)).heartbeat_max(Duration::from_millis(30));
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.db_updates()).await;
    for feed in ["longpoll", "continuous", "eventsource"] {
        for timeout in ["", "&timeout=3600000"] {
            let began = Instant::now();
            let answer = get(fixture.at(), &format!("/_db_updates?feed={feed}&since=now{timeout}")).await;
            assert_eq!(answer.head.status, 200, "{feed}{timeout}: it ends by itself");
            assert!(began.elapsed() >= Duration::from_millis(55), "{feed}{timeout}: not at once");
        }
        for heartbeat in ["3600000", "true"] {
            let target = format!("/_db_updates?feed={feed}&since=now&heartbeat={heartbeat}");
            let mut connection = Connection::get(fixture.at(), &target).await;
            connection.head().await;
            for _ in 0..3 {
                let chunk = connection.chunk().await.unwrap();
                assert!(
                    ["\n", "{\"results\":[\n"].contains(&&*chunk)
                        || chunk.starts_with("event: heartbeat\ndata: \nid: \""),
                    "{chunk}"
                );
            }
        }
    }
}

#[tokio::test]
async fn a_longpoll_ends_with_what_comes_first_or_with_its_time() {
    let fixture = HttpFixture::new().await;
    let before = fixture.event(&db("a", 1), Created).await;
    let since = before.sequence;
    let mut waiting =
        Connection::get(fixture.at(), &format!("/_db_updates?feed=longpoll&since={since}")).await;
    waiting.head().await;
    let updated = fixture.event(&db("a", 1), Updated).await;
    let line = row(&updated, "updated");
    let end = format!("\n],\n\"last_seq\":\"{}\"}}\n", updated.sequence);
    assert_eq!(waiting.rest().await, format!("{{\"results\":[\n{line}{end}"));

    let since = updated.sequence;
    let none = get(fixture.at(), &format!("/_db_updates?feed=longpoll&since={since}&timeout=30")).await;
    assert_eq!(none.body, format!("{{\"results\":[\n\n],\n\"last_seq\":\"{since}\"}}\n"));
}

#[tokio::test]
async fn live_feeds_send_a_row_for_every_event_and_live_on() {
    let fixture = HttpFixture::new().await;
    let mut lines = Connection::get(fixture.at(), "/_db_updates?feed=continuous&since=now").await;
    let mut events =
        Connection::get(fixture.at(), "/_db_updates?feed=eventsource&since=now&types=created,deleted").await;
    lines.head().await;
    events.head().await;
    assert!(events.chunk().await.unwrap().starts_with("event: heartbeat\ndata: \nid: "));
    let deaf = "/_db_updates?feed=longpoll&since=now&types=ddoc_updated&heartbeat=60000";
    let mut poll = Connection::get(fixture.at(), deaf).await;
    poll.head().await;
    for (kind, name) in [(Created, "created"), (Updated, "updated"), (Deleted, "deleted")] {
        let seen = fixture.event(&db("a", 1), kind).await;
        assert_eq!(lines.chunk().await.unwrap(), row(&seen, name) + "\n");
        if kind != Updated {
            let expected = format!("data: {}\nid: \"{}\"\n\n", row(&seen, name), seen.sequence);
            assert_eq!(events.chunk().await.unwrap(), expected);
        }
    }
    // All feeds end in an orderly way.
    let HttpFixture { api, server, .. } = fixture;
    api.shutdown();
    let last = lines.rest().await;
    assert!(last.starts_with("{\"last_seq\":\"") && last.ends_with("\"}\n"), "{last:?}");
    assert!(events.rest().await.starts_with("event: heartbeat\ndata: \nid: "));
    let polled = poll.rest().await;
    assert!(polled.starts_with("{\"results\":[\n\n],\n\"last_seq\":\""), "{polled:?}");
    server.shutdown().await;
}

#[tokio::test]
async fn an_event_source_goes_on_behind_the_last_event() {
    let fixture = HttpFixture::new().await;
    let a = fixture.event(&db("a", 1), Created).await;
    let b = fixture.event(&db("b", 1), Created).await;
    for last in [a.sequence.to_string(), format!("\"{}\"", a.sequence)] {
        let header = format!("Last-Event-ID: {last}\r\n");
        let answer =
            ask(fixture.at(), "GET", "/_db_updates?feed=eventsource&since=0&timeout=0", &header, "").await;
        let [begin, end] = [a.sequence, b.sequence].map(|at| beat(&at.to_string()));
        let expected = format!("{begin}data: {}\nid: \"{}\"\n\n{end}", row(&b, "created"), b.sequence);
        assert_eq!(answer.body, expected);
    }
    // All feeds accept the last event id as a parameter that is a position.
    let rest = get(fixture.at(), &format!("/_db_updates?last-event-id={}", a.sequence)).await;
    assert_eq!(rest.rows(), [("b".to_owned(), "created".to_owned())]);
    let both = get(fixture.at(), &format!("/_db_updates?since=0&last-event-id={}", a.sequence)).await;
    assert_eq!(both.head.status, 400, "one of the two would be ignored: {both:?}");
}

/// Returns the bytes with which an event source reports its position.
fn beat(at: &str) -> String {
    format!("event: heartbeat\ndata: \nid: \"{at}\"\n\n")
}

/// Regression: an event source from `now` that was cut off before its first row had no position, so it continued at a later `now`.
#[tokio::test]
async fn an_event_source_that_is_cut_off_before_its_first_row_loses_nothing() {
    let fixture = HttpFixture::new().await;
    fixture.event(&db("a", 1), Created).await;
    let target = "/_db_updates?feed=eventsource&since=now&timeout=0";
    let mut first = Connection::get(fixture.at(), target).await;
    first.head().await;
    let begin = first.chunk().await.unwrap();
    let id = begin.lines().find_map(|line| line.strip_prefix("id: ")).unwrap().to_owned();
    drop(first);
    let b = fixture.event(&db("b", 1), Created).await;
    let again = ask(fixture.at(), "GET", target, &format!("Last-Event-ID: {id}\r\n"), "").await;
    assert!(again.body.contains(&row(&b, "created")), "{again:?}");
}

/// The dispatcher matches the names for live feeds; pages from the store are matched in the same way.
#[tokio::test]
async fn names_are_chosen_by_a_glob_in_every_feed() {
    let fixture = HttpFixture::new().await;
    for name in ["shop/a", "logs", "shop/b", "z"] {
        fixture.event(&db(name, 1), Created).await;
    }
    let names =
        |answer: &crate::client::Answer| answer.rows().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    for feed in ["normal", "longpoll"] {
        let some = get(fixture.at(), &format!("/_db_updates?names=shop/*&feed={feed}")).await;
        assert_eq!(names(&some), ["shop/a", "shop/b"], "{feed}");
    }
    let newest = get(fixture.at(), "/_db_updates?names=shop/*&descending=true&limit=1").await;
    assert_eq!(names(&newest), ["shop/b"]);
    let first = get(fixture.at(), "/_db_updates?names=shop/*&limit=1").await;
    let next = get(fixture.at(), &format!("/_db_updates?names=shop/*&since={}", first.last_seq())).await;
    assert_eq!((names(&first), names(&next)), (vec!["shop/a".to_owned()], vec!["shop/b".to_owned()]));
    let target = "/_db_updates?names=shop/*&feed=continuous&since=now&heartbeat=50&progress=true";
    let mut live = Connection::get(fixture.at(), target).await;
    live.head().await;
    assert_eq!(fixture.dispatcher.subscribers_of(&"logs".parse().unwrap()), 0, "it is not woken for it");
    let unwanted = fixture.event(&db("logs", 1), Updated).await;
    let is_ahead = |chunk: &str| {
        let at: serde_json::Value = serde_json::from_str(chunk).unwrap();
        at["last_seq"].as_str().unwrap() >= unwanted.sequence.to_string().as_str()
    };
    while !is_ahead(&live.chunk().await.unwrap()) {}
    let wanted = fixture.event(&db("shop/c", 1), Created).await;
    loop {
        let chunk = live.chunk().await.unwrap();
        if chunk.contains("db_name") {
            assert_eq!(chunk, row(&wanted, "created") + "\n");
            break;
        }
    }
}

#[tokio::test]
async fn types_are_derived_for_the_reader() {
    let fixture = HttpFixture::new().await;
    let a = db("a", 1);
    let created = fixture.event(&a, Created).await;
    let updated = fixture.event(&a, Updated).await;
    fixture.event(&a, DdocUpdated).await;
    let of = async |query: String| {
        let rows = get(fixture.at(), &format!("/_db_updates?{query}")).await.rows();
        rows.into_iter().map(|(_, kind)| kind).collect::<Vec<_>>()
    };
    let (at_creation, at_update) = (created.sequence, updated.sequence);
    assert_eq!(of(String::new()).await, ["created", "updated"]);
    assert_eq!(of(format!("since={at_creation}")).await, ["updated"]);
    assert_eq!(of(format!("since={at_update}")).await, ["updated"], "CouchDB's word for it");
    assert_eq!(of(format!("since={at_update}&types=updated,ddoc_updated")).await, ["ddoc_updated"]);
    assert_eq!(of(format!("since={at_creation}&types=ddoc_updated")).await, ["ddoc_updated"]);
    assert_eq!(
        of("types=created,updated,ddoc_updated".to_owned()).await,
        ["created", "updated", "ddoc_updated"]
    );
    assert_eq!(of("descending=true".to_owned()).await, ["updated", "created"]);
    assert_eq!(of("types=deleted".to_owned()).await, [""; 0]);
    fixture.event(&a, Deleted).await;
    assert_eq!(of(String::new()).await, ["deleted"]);
    assert_eq!(of("types=created,updated".to_owned()).await, [""; 0]);
    // The database is deleted and created again between two reads. Regression: a reader got only the creation, so it got nothing with
    // `types=deleted`.
    fixture.event(&db("a", 2), Created).await;
    assert_eq!(of(format!("since={at_update}")).await, ["deleted", "created"]);
    assert_eq!(of(format!("since={at_update}&types=deleted")).await, ["deleted"]);
    assert_eq!(of(String::new()).await, ["created"], "who knows nothing has nothing to forget");
}

/// Regression: a position between two rows of a database recorded which rows were sent, so it had 90 digits. Now every feed sends a
/// database as a whole: a page exceeds its limit by at most three rows, and a client that is cut off within a database gets it again.
#[tokio::test]
async fn the_rows_of_a_database_are_not_split() {
    let fixture = HttpFixture::new().await;
    let start = fixture.event(&db("a", 1), Created).await;
    fixture.event(&db("a", 1), Deleted).await;
    fixture.event(&db("a", 2), Created).await;
    fixture.event(&db("a", 2), Updated).await;
    let last = fixture.event(&db("a", 2), DdocUpdated).await.sequence.to_string();
    let b = fixture.event(&db("b", 1), Created).await.sequence.to_string();
    let types = "types=created,deleted,updated,ddoc_updated";
    let since = start.sequence;
    for feed in ["normal", "longpoll"] {
        let page =
            get(fixture.at(), &format!("/_db_updates?{types}&since={since}&feed={feed}&limit=1")).await;
        let kinds: Vec<_> = page.rows().into_iter().map(|(_, kind)| kind).collect();
        assert_eq!(kinds, ["deleted", "created", "updated", "ddoc_updated"], "{feed}");
        let rows = page.json()["results"].as_array().unwrap().clone();
        let seqs: Vec<_> = rows.iter().map(|row| row["seq"].as_str().unwrap()).collect();
        assert!(seqs.is_sorted() && seqs[3] == last && page.last_seq() == last, "{seqs:?}");
        for seq in &seqs[..3] {
            let again = get(fixture.at(), &format!("/_db_updates?{types}&since={seq}&limit=4")).await;
            assert_eq!(again.json()["results"].as_array().unwrap()[..], rows[..], "since {seq}");
        }
        let rest = get(fixture.at(), &format!("/_db_updates?{types}&since={last}&limit=1")).await;
        assert_eq!((rest.rows(), rest.last_seq()), (vec![("b".to_owned(), "created".to_owned())], b.clone()));
    }
    let events =
        get(fixture.at(), &format!("/_db_updates?{types}&since={since}&feed=eventsource&limit=2")).await;
    assert_eq!(events.body.lines().filter(|line| line.starts_with("data: {")).count(), 4);
}

#[tokio::test]
async fn newest_first_gives_all_rows() {
    let fixture = HttpFixture::new().await;
    let a = fixture.event(&db("a", 1), Created).await;
    let b = fixture.event(&db("b", 1), Created).await;
    let c = fixture.event(&db("c", 1), Created).await;
    for feed in ["normal", "longpoll"] {
        let all = get(fixture.at(), &format!("/_db_updates?descending=true&feed={feed}")).await;
        let rows = [&c, &b, &a].map(|it| row(it, "created")).join(",\r\n");
        let end = format!("\n],\n\"last_seq\":\"{}\"}}\n", a.sequence);
        assert_eq!(all.body, format!("{{\"results\":[\n{rows}{end}"));
    }
    let some = get(fixture.at(), "/_db_updates?descending=true&since=now&limit=1").await;
    assert_eq!((some.rows().len(), some.last_seq()), (1, c.sequence.to_string()));
}

#[tokio::test]
async fn what_is_known_is_not_sent_again() {
    let fixture = HttpFixture::new().await;
    fixture.event(&db("a", 1), Created).await;
    let first = get(fixture.at(), "/_db_updates").await;
    let tag = &first.head.headers["etag"];
    let strong = format!("If-None-Match: {}\r\n", tag.strip_prefix("W/").unwrap());
    assert_eq!(ask(fixture.at(), "GET", "/_db_updates", &strong, "").await.head.status, 304);
    let header = format!("If-None-Match: \"x\", {tag}\r\n");
    let again = ask(fixture.at(), "GET", "/_db_updates", &header, "").await;
    assert_eq!((again.head.status, &*again.body), (304, ""));
    assert_eq!(&again.head.headers["etag"], tag);
    assert_eq!(ask(fixture.at(), "GET", "/_db_updates?limit=1", &header, "").await.head.status, 200);
    fixture.event(&db("a", 1), Updated).await;
    assert_eq!(ask(fixture.at(), "GET", "/_db_updates", &header, "").await.head.status, 200);
}

#[tokio::test]
async fn methods_and_bodies_are_those_that_clients_use() {
    let fixture = HttpFixture::new().await;
    let a = fixture.event(&db("a", 1), Created).await;
    for body in ["", "{}", " { }\n"] {
        let answer = ask(fixture.at(), "POST", "/_db_updates", "", body).await;
        assert_eq!(answer.rows(), [("a".to_owned(), "created".to_owned())]);
        let answer =
            ask(fixture.at(), "POST", "/_db_updates?feed=continuous&timeout=0&limit=1", "", body).await;
        assert!(answer.body.starts_with(&row(&a, "created")));
    }
    for feed in ["normal", "longpoll", "continuous", "eventsource"] {
        let answer = ask(fixture.at(), "HEAD", &format!("/_db_updates?feed={feed}&since=now"), "", "").await;
        assert_eq!(answer.head.status, 200);
        assert!(answer.head.headers.contains_key("content-type"));
        // Regression: the server sent a `Content-Length` for HEAD, so clients concluded that GET would return no bytes.
        assert!(!answer.head.headers.contains_key("content-length"), "{feed}");
    }
    for body in ["[]", "{\"a\":1}", "x"] {
        assert_eq!(ask(fixture.at(), "POST", "/_db_updates", "", body).await.head.status, 400);
    }
    for method in ["PUT", "DELETE", "OPTIONS", "PATCH"] {
        let answer = ask(fixture.at(), method, "/_db_updates", "", "").await;
        assert_eq!(answer.head.status, 405);
        assert_eq!(answer.head.headers["allow"], "GET,HEAD,POST");
        assert_eq!(
            answer.body,
            "{\"error\":\"method_not_allowed\",\"reason\":\"Only GET,HEAD,POST allowed\"}\n"
        );
    }
}

#[tokio::test]
async fn bad_parameters_get_an_answer_that_says_what_is_allowed() {
    let fixture = HttpFixture::new().await;
    let ahead = "f".repeat(26);
    for (query, error, reason) in [
        ("limt=1", "bad_request", "This feed has no parameter `limt`."),
        ("include_docs=true", "bad_request", "This feed has no parameter `include_docs`."),
        ("feed=live", "bad_request", "Supported `feed` types: normal, continuous, longpoll, eventsource"),
        ("since=12-abc", "bad_request", "Malformed sequence supplied in 'since' parameter."),
        // Regression: these refusals had an error of their own, `invalid_integer`, and their own wordings, so they differed from CouchDB's.
        ("limit=-1", "bad_request", "The limit value should be a non-negative integer"),
        ("timeout=x", "bad_request", "The timeout parameter should be a non-negative integer"),
        (
            "heartbeat=-1000",
            "bad_request",
            "The heartbeat value should be a positive integer (in milliseconds).",
        ),
        (
            "heartbeat=a1000",
            "bad_request",
            "Invalid heartbeat value. Expecting a positive integer value (in milliseconds).",
        ),
    ] {
        let answer = get(fixture.at(), &format!("/_db_updates?{query}")).await;
        assert_eq!(answer.head.status, 400);
        assert_eq!(answer.body, format!("{{\"error\":\"{error}\",\"reason\":\"{reason}\"}}\n"));
    }
    let beside_descending = format!("descending=true&since={}1", "0".repeat(25));
    for bad in [&*format!("since={ahead}"), "since=2026-01-31T00:00:00Z", &beside_descending, "types=odd"] {
        let answer = get(fixture.at(), &format!("/_db_updates?{bad}")).await;
        assert_eq!(answer.head.status, 400, "{answer:?}");
    }
    // Parameter names are accepted in any case. Clients add parameters with `_` to bypass caches.
    for good in ["LIMIT=0&Feed=normal", "_=17&limit=0"] {
        let answer = get(fixture.at(), &format!("/_db_updates?{good}")).await;
        assert_eq!(answer.head.status, 200, "{answer:?}");
    }
}
