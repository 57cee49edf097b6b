//! Tests the parameters of feeds: which are known, which are refused, and which may be given only once.

use notibus::{Sequence, http::ApiOptions, store::Store};

use crate::{
    client::{ask, get},
    common::db,
    fixture::HttpFixture,
    layer::{Layer, layered},
};

/// Starts a server with both kinds of feeds, and an empty database `d`.
async fn fixture() -> (HttpFixture, std::sync::Arc<Layer>) {
    let (fixture, layer) = layered(Store::memory(), ApiOptions::default()).await;
    layer.create(&db("d", 1), 1).await;
    (fixture, layer)
}

#[tokio::test]
async fn values_that_make_no_sense_are_named() {
    let (fixture, _layer) = fixture().await;
    let ahead = format!("descending=true&since={}", Sequence::MAX);
    for (path, query, named) in [
        ("/_db_updates", "feed=live", "eventsource"),
        ("/_db_updates", "limit=-1", "limit"),
        ("/_db_updates", "timeout=x", "timeout"),
        ("/_db_updates", "heartbeat=", "heartbeat"),
        ("/_db_updates", "types=", "ddoc_updated"),
        ("/_db_updates", "types=created,", "ddoc_updated"),
        ("/_db_updates", "names=a[", "glob"),
        ("/_db_updates", "since=garbage", "Malformed sequence supplied in 'since' parameter."),
        ("/_db_updates", "since=0.05", "Malformed sequence supplied in 'since' parameter."),
        ("/_db_updates", "descending=1", "true or false"),
        ("/_db_updates", &ahead, "descending"),
        // Regression: the server ignored one of these two parameters without saying so, so a client could read from the wrong position.
        ("/_db_updates", "since=now&last-event-id=0", "leave one out"),
        ("/d/_changes", "seq_interval=0", "invalid_seq_interval"),
        ("/d/_changes", "style=odd", "all_docs"),
        ("/d/_changes", "att_encoding_info=true", "att_encoding_info"),
        ("/_db_updates", "limt=1", "no parameter"),
        ("/_db_updates", "include_docs=true", "no parameter"),
        ("/_db_updates", "filter=_design", "no parameter"),
        ("/d/_changes", "types=created", "no parameter"),
        ("/d/_changes", "names=a", "no parameter"),
        ("/d/_changes", "key=1", "no parameter"),
        // Regression: feeds used the last of two values, although the management routes refused two, so a mistake went unnoticed.
        ("/_db_updates", "limit=1&limit=2", "twice"),
        ("/_db_updates", "since=now&LIMIT=1&since=0", "twice"),
        ("/_db_updates", "types=created&types=deleted", "twice"),
        ("/d/_changes", "doc_ids=[]&Doc_Ids=[]", "twice"),
    ] {
        let answer = get(fixture.at(), &format!("{path}?{query}")).await;
        assert_eq!(answer.head.status, 400, "{query}");
        assert!(answer.json()["reason"].as_str().unwrap().contains(named), "{query}: {}", answer.body);
    }
    for (path, query) in [
        ("/_db_updates", "_=1&_=2"),
        ("/_db_updates", "Descending=TRUE&since=now"),
        ("/d/_changes", "LIMIT=1&Include_Docs=True&Descending=false&seq_interval=25"),
        // A layer may accept several values.
        ("/d/_changes", "filter=app/ids&end=a&end=b"),
    ] {
        assert_eq!(get(fixture.at(), &format!("{path}?{query}")).await.head.status, 200, "{query}");
    }
    let two = "Last-Event-ID: 0\r\nLast-Event-ID: 0\r\n";
    let twice = ask(fixture.at(), "GET", "/_db_updates?feed=eventsource", two, "").await;
    assert_eq!(twice.head.status, 400);
}
