//! Tests request bodies that clients have compressed.

use std::{io::Write, sync::Arc, time::Duration};

use flate2::{Compression, write::GzEncoder};
use notibus::http::{ApiOptions, ServerOptions};
use tokio::io::AsyncWriteExt;

use crate::{
    client::{Answer, Connection},
    common::{db, until},
    fixture::HttpFixture,
    layer::Layer,
};

/// The maximum size of a body, in bytes.
const LEN_MAX: usize = 10_000;

fn packed(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

async fn post(fixture: &HttpFixture, target: &str, encoding: &str, body: &[u8]) -> Answer {
    let mut connection = Connection::open(fixture.at()).await;
    let length = body.len();
    connection
        .send(&format!(
            "POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nContent-Encoding: {encoding}\r\n\r\n"
        ))
        .await;
    connection.socket.write_all(body).await.unwrap();
    connection.answer().await
}

/// IBM's clients compress everything that they post, even `{}`. Regression: the server refused such bodies as invalid JSON, so followers
/// ended.
#[tokio::test]
async fn compressed_bodies_are_inflated_within_their_bound() {
    let mut layer = None;
    let options = ApiOptions::default().body_len_max(LEN_MAX);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, bus| {
        let made = Layer::new(bus);
        let changes = api.changes(&made.changes, Arc::clone(&made) as _);
        layer = Some(made);
        changes.merge(api.events()).merge(api.db_updates())
    })
    .await;
    let (layer, d) = (layer.unwrap(), db("d", 1));
    layer.create(&d, 1).await;
    for id in ["a", "b"] {
        layer.write(&d, id, 1, 1, false).await;
    }

    assert_eq!(post(&fixture, "/_db_updates", "gzip", &packed(b"{}")).await.head.status, 200);
    let ids = packed(br#"{"doc_ids":["b"]}"#);
    let chosen = post(&fixture, "/d/_changes?filter=_doc_ids", "GZIP", &ids).await;
    assert_eq!(chosen.json()["results"].as_array().unwrap().len(), 1);
    let events = br#"[{"db":"a","type":"created"}]"#;
    for (encoding, body) in
        [("gzip", packed(events)), ("x-gzip", packed(events)), ("identity", events.into())]
    {
        assert_eq!(post(&fixture, "/_notibus/events", encoding, &body).await.head.status, 201, "{encoding}");
    }

    let long = [b" ".repeat(LEN_MAX), b"[]".into()].concat();
    let fits = &long[2..];
    for (encoding, body, status) in [
        ("gzip", packed(fits), 201),
        // The body has about 30 bytes, but exceeds the limit when inflated.
        ("gzip", packed(&long), 413),
        ("gzip", packed(&b" ".repeat(1 << 24)), 413),
        ("gzip", events.into(), 400),
        ("gzip", packed(events)[..20].into(), 400),
        ("deflate", events.into(), 415),
        ("gzip, gzip", packed(&packed(events)), 415),
    ] {
        let answer = post(&fixture, "/_notibus/events", encoding, &body).await;
        assert_eq!(answer.head.status, status, "{encoding} {}", answer.body);
        assert!(status < 400 || answer.json()["reason"].is_string());
    }
}

/// Regression: the server inflated any number of gzip members, so sixteen uploads of empty members stalled the answering tasks for 2 s.
/// Each empty member of 20 bytes costs as much as a large one, so a body may have only one, and nothing after it is read.
#[tokio::test]
async fn a_body_of_many_gzip_members_is_refused_at_the_first() {
    let fixture = HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, _| {
        api.events().merge(api.status())
    })
    .await;
    for members in [2, 40_000] {
        let empty = packed(b"").repeat(members);
        let answer = post(&fixture, "/_notibus/events", "gzip", &empty).await;
        assert_eq!(answer.head.status, 400, "{answer:?}");
        assert!(answer.json()["reason"].as_str().unwrap().contains("send it as one"), "{answer:?}");
    }
}

/// Regression: the server did not limit all bodies together, so it held 317 MB for 300 bodies that clients had begun but not finished.
#[tokio::test]
async fn all_bodies_together_are_bounded() {
    let options = ApiOptions::default().body_len_max(100_000).bodies_len_max(250_000);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.events()).await;
    let begin = async || {
        let mut connection = Connection::open(fixture.at()).await;
        connection
            .send("POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
            .await;
        connection.socket.write_all(&b" ".repeat(90_000)).await.unwrap();
        connection
    };
    let [first, second] = [begin().await, begin().await];
    tokio::time::sleep(Duration::from_millis(200)).await;
    let full = begin().await.answer().await;
    assert_eq!((full.head.status, &*full.head.headers["retry-after"]), (503, "1"));
    assert_eq!(full.json()["error"], "service_unavailable");
    drop((first, second));
    until("room", async || {
        post(&fixture, "/_notibus/events", "identity", &b" ".repeat(90_000)).await.head.status == 400
    })
    .await;
}

/// Regression: a body took all its room before its first byte arrived, so a few clients that declared long bodies and sent nothing kept all
/// others from recording events. Even a client that may only read `_db_updates` could do that.
#[tokio::test]
async fn a_body_that_does_not_arrive_takes_no_room() {
    let options = ApiOptions::default().body_len_max(100_000).bodies_len_max(100_000);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| {
        api.events().merge(api.db_updates())
    })
    .await;
    let begin = async |target: &str, len: usize, body: &str| {
        let mut connection = Connection::open(fixture.at()).await;
        let head = format!("POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len}\r\n\r\n");
        connection.send(&(head + body)).await;
        connection
    };
    let _silent =
        [begin("/_notibus/events", 100_000, "").await, begin("/_notibus/events", 100_000, "[").await];
    tokio::time::sleep(Duration::from_millis(100)).await;
    let event = br#"[{"db":"a","type":"created"}]"#;
    assert_eq!(post(&fixture, "/_notibus/events", "identity", event).await.head.status, 201);
    // Those who only read need no long bodies.
    let refused = begin("/_db_updates", 2_000, &" ".repeat(2_000)).await.answer().await;
    assert_eq!(refused.head.status, 413);
}

/// Bug: the server reserved room for the longest possible body if a body was compressed or had no length, and twice that while inflating
/// it, so one of two concurrent compressed requests was refused, however short they were.
#[tokio::test]
async fn a_body_takes_the_room_of_its_bytes() {
    let options = ApiOptions::default().body_len_max(10_240).bodies_len_max(10_240);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.events()).await;
    let mut begun = Connection::open(fixture.at()).await;
    let head = "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n";
    begun.send(&format!("{head}\r\n5\r\n[    \r\n")).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut event = packed(br#"[{"db":"a","type":"created"}]"#);
    assert_eq!(post(&fixture, "/_notibus/events", "gzip", &event).await.head.status, 201);
    // This gzip body claims a smaller length than it has.
    let end = event.len() - 4;
    event[end] -= 1;
    assert_eq!(post(&fixture, "/_notibus/events", "gzip", &event).await.head.status, 400);
}

/// Regression: a feed of chosen documents kept their ids in a table of up to twelve times the size of the body for as long as the feed
/// lasted, and the server did not count these bytes, so their total was unlimited.
#[tokio::test]
async fn ids_that_feeds_keep_are_bounded_and_hold_up_nobody_else() {
    let mut layer = None;
    let options = ApiOptions::default().body_len_max(LEN_MAX).bodies_len_max(20_000);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, bus| {
        let made = Layer::new(bus);
        let changes = api.changes(&made.changes, Arc::clone(&made) as _);
        layer = Some(made);
        changes.merge(api.events())
    })
    .await;
    layer.unwrap().create(&db("d", 1), 1).await;
    let ids: Vec<_> = (0..500).map(|n| format!("\"id{n:06}\"")).collect();
    let body = format!("{{\"doc_ids\":[{}]}}", ids.join(","));
    let follow = async || {
        let mut connection = Connection::open(fixture.at()).await;
        let target = "/d/_changes?feed=continuous&since=now&filter=_doc_ids";
        let head =
            format!("POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
        connection.send(&(head + &body)).await;
        let status = connection.head().await.status;
        (connection, status)
    };
    let feeds = [follow().await, follow().await];
    assert!(feeds.iter().all(|(_, status)| *status == 200));
    assert_eq!(follow().await.1, 503);
    let other = post(&fixture, "/_notibus/events", "identity", &b" ".repeat(9_000)).await;
    assert_eq!(other.head.status, 400, "there is room for its body");
    drop(feeds);
    until("room", async || follow().await.1 == 200).await;
}

/// Regression: a client that asked whether to send a body got `100 Continue` although the body was too long, so the client sent it in vain.
#[tokio::test]
async fn a_body_that_will_be_refused_need_not_be_sent() {
    let options = ApiOptions::default().body_len_max(LEN_MAX);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.events()).await;
    for (length, status) in [(LEN_MAX, 100), (LEN_MAX + 1, 413)] {
        let mut connection = Connection::open(fixture.at()).await;
        let head = "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n";
        connection.send(&format!("{head}Content-Length: {length}\r\n\r\n")).await;
        assert_eq!(connection.head().await.status, status, "{length}");
    }
}

/// Regression: the server treated `gzip, chunked` as `chunked`, so it took the compressed bytes for the body.
#[tokio::test]
async fn a_coding_for_the_transfer_that_nobody_undoes_is_refused() {
    let fixture =
        HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, _| api.events()).await;
    let event = r#"[{"db":"a","type":"created"}]"#;
    for (codings, status) in [
        ("Transfer-Encoding: chunked\r\n", 201),
        ("Transfer-Encoding:  CHUNKED \r\n", 201),
        ("Transfer-Encoding: gzip, chunked\r\n", 501),
        ("Transfer-Encoding: chunked, chunked\r\n", 501),
        ("Transfer-Encoding: identity, chunked\r\n", 501),
        ("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 501),
    ] {
        let mut connection = Connection::open(fixture.at()).await;
        let body = format!("{:x}\r\n{event}\r\n0\r\n\r\n", event.len());
        let head = format!("POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\n{codings}\r\n");
        connection.send(&(head + &body)).await;
        let answer = connection.answer().await;
        assert_eq!(answer.head.status, status, "{codings} {}", answer.body);
        assert!(status < 400 || answer.json()["reason"].is_string(), "{codings} {}", answer.body);
    }
}

/// hyper may answer, or treat the client as gone. In either case the connection ends at once, and the room for its body is released.
#[tokio::test]
async fn a_client_that_ends_in_the_middle_of_a_body_leaves_nothing() {
    let options = ApiOptions::default().body_len_max(10_240).bodies_len_max(10_240);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.events()).await;
    for start in ["Content-Length: 10240\r\n\r\n[", "Transfer-Encoding: chunked\r\n\r\n5\r\n["] {
        let mut connection = Connection::open(fixture.at()).await;
        connection.send(&format!("POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\n{start}")).await;
        connection.socket.shutdown().await.unwrap();
        while connection.receive().await {}
        until("its room", async || {
            post(&fixture, "/_notibus/events", "identity", &b" ".repeat(10_240)).await.head.status == 400
        })
        .await;
    }
}
