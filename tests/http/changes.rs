//! Tests `/{db}/_changes` and its shards, byte by byte.

use std::sync::Arc;

use notibus::{
    Db, EventKind, Sequence,
    http::{ApiOptions, ServerOptions},
    store::Store,
};

use crate::{
    client::{Connection, ask, get},
    common::{db, until},
    fixture::{HttpFixture, bearer, credentials, line},
    layer::{Layer, layered},
};

/// Returns the text of the revision at `position` that the layer writes.
fn rev(position: u64, hash: u8) -> String {
    format!("{position}-{}", format!("{hash:02x}").repeat(16))
}

/// Returns the row of a document with one leaf.
fn row(seq: Sequence, id: &str, position: u64) -> String {
    format!("{{\"seq\":\"{seq}\",\"id\":\"{id}\",\"changes\":[{{\"rev\":\"{}\"}}]}}", rev(position, 7))
}

/// Starts a node with a layer that has one database with `shards` shards.
async fn fixture(name: &str, shards: u32) -> (HttpFixture, Arc<Layer>, Db) {
    let (fixture, layer) = layered(Store::memory(), ApiOptions::default()).await;
    let db = db(name, 1);
    layer.create(&db, shards).await;
    (fixture, layer, db)
}

#[tokio::test]
async fn each_feed_has_the_bytes_that_clients_parse() {
    let (fixture, layer, db) = fixture("a/b", 4).await;
    let a = layer.write(&db, "a\"", 1, 1, false).await;
    let b = layer.write(&db, "b", 3, 2, false).await;
    let c = layer.write(&db, "c", 2, 1, true).await;
    let rows = [
        format!("{{\"seq\":\"{a}\",\"id\":\"a\\\"\",\"changes\":[{{\"rev\":\"{}\"}}]}}", rev(1, 7)),
        row(b, "b", 3),
        format!(
            "{{\"seq\":\"{c}\",\"id\":\"c\",\"changes\":[{{\"rev\":\"{}\"}}],\"deleted\":true}}",
            rev(2, 7)
        ),
    ];
    let target = "/a%2Fb/_changes";
    let all = get(fixture.at(), target).await;
    let expected =
        format!("{{\"results\":[\n{}\n],\n\"last_seq\":\"{c}\",\"pending\":0}}\n", rows.join(",\r\n"));
    assert_eq!(all.body, expected);
    assert_eq!(ask(fixture.at(), "POST", &format!("{target}?feed=longpoll"), "", "{}").await.body, expected);

    let lines = get(fixture.at(), &format!("{target}?feed=continuous&timeout=0&since={a}&limit=1")).await;
    assert_eq!(lines.body, format!("{}\n{{\"last_seq\":\"{b}\",\"pending\":1}}\n", rows[1]));
    let events = get(fixture.at(), &format!("{target}?feed=eventsource&timeout=0&since=%22{b}%22")).await;
    let [begin, end] = [b, c].map(|at| format!("event: heartbeat\ndata: \nid: \"{at}\"\n\n"));
    assert_eq!(events.body, format!("{begin}data: {}\nid: \"{c}\"\n\n{end}", rows[2]));
    let plain = ask(fixture.at(), "GET", target, "Accept: text/plain\r\n", "").await;
    for (answer, kind) in [
        (&all, "application/json"),
        (&plain, "application/json"),
        (&lines, "application/json"),
        (&events, "text/event-stream"),
    ] {
        assert_eq!(answer.head.headers["content-type"], kind);
        assert_eq!(answer.head.headers["transfer-encoding"], "chunked");
    }
    let newest = get(fixture.at(), &format!("{target}?descending=true&limit=2")).await;
    let expected =
        format!("{{\"results\":[\n{},\r\n{}\n],\n\"last_seq\":\"{b}\",\"pending\":1}}\n", rows[2], rows[1]);
    assert_eq!(newest.body, expected);

    let leaves =
        get(fixture.at(), &format!("{target}?style=all_docs&include_docs=true&since={a}&limit=1")).await;
    let changes = format!("[{{\"rev\":\"{}\"}},{{\"rev\":\"{}\"}}]", rev(3, 7), rev(3, 6));
    let doc = format!("{{\"_id\":\"b\",   \"_rev\":\"{}\"}}", rev(3, 7));
    let expected = format!("{{\"seq\":\"{b}\",\"id\":\"b\",\"changes\":{changes},\"doc\":{doc}}}");
    assert!(leaves.body.contains(&expected), "{}", leaves.body);

    let tag = format!("If-None-Match: {}\r\n", all.head.headers["etag"]);
    assert_eq!(ask(fixture.at(), "GET", target, &tag, "").await.head.status, 304);
}

#[tokio::test]
async fn pending_is_exact_and_reaches_zero() {
    let (fixture, layer, db) = fixture("d", 4).await;
    for n in 0..25 {
        layer.write(&db, &format!("doc{n}"), 1, 1, false).await;
    }
    let (mut since, mut seen) = ("0".to_owned(), 0);
    for pending in [15, 5, 0, 0] {
        let page = get(fixture.at(), &format!("/d/_changes?limit=10&since={since}")).await;
        seen += page.json()["results"].as_array().unwrap().len();
        assert_eq!(page.json()["pending"], pending);
        since = page.last_seq();
    }
    assert_eq!(seen, 25);
}

#[tokio::test]
async fn documents_are_chosen_by_their_ids() {
    let (fixture, layer, db) = fixture("d", 1).await;
    let mut last = Sequence::MIN;
    for id in ["a", "b", "_design/x", "c"] {
        last = layer.write(&db, id, 1, 1, false).await;
    }
    let ids = |answer: &crate::client::Answer| -> Vec<String> {
        answer.json()["results"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["id"].as_str().unwrap().into())
            .collect()
    };
    let body = r#"{"doc_ids":["a","c","none"]}"#;
    let chosen = ask(fixture.at(), "POST", "/d/_changes?filter=_doc_ids", "", body).await;
    assert_eq!(ids(&chosen), ["a", "c"]);
    assert_eq!(ids(&get(fixture.at(), "/d/_changes?filter=_doc_ids&doc_ids=%5B%22b%22%5D").await), ["b"]);
    let design = get(fixture.at(), "/d/_changes?filter=_design").await;
    assert_eq!((ids(&design), design.last_seq()), (vec!["_design/x".to_owned()], last.to_string()));
    assert_eq!(ids(&ask(fixture.at(), "POST", "/d/_changes", "", body).await).len(), 4, "as in CouchDB");
    for (query, body) in [
        ("?filter=_doc_ids", "{}"),
        ("?filter=_view", "{}"),
        ("", "["),
        ("", "[]"),
        ("?filter=_doc_ids", r#"{"doc_ids":[1]}"#),
    ] {
        let answer = ask(fixture.at(), "POST", &format!("/d/_changes{query}"), "", body).await;
        assert_eq!(answer.head.status, 400, "{query} {body}");
    }
    // Unwanted rows do not wake a waiting feed.
    let mut waiting =
        Connection::get(fixture.at(), "/d/_changes?feed=continuous&since=now&filter=_design").await;
    waiting.head().await;
    layer.write(&db, "a", 2, 1, false).await;
    let x = layer.write(&db, "_design/x", 2, 1, false).await;
    assert_eq!(waiting.chunk().await.unwrap(), row(x, "_design/x", 2) + "\n");
}

#[tokio::test]
async fn live_feeds_bring_what_comes_until_the_database_is_deleted() {
    let (fixture, layer, db) = fixture("d", 2).await;
    let mut lines = Connection::get(fixture.at(), "/d/_changes?feed=continuous&since=now").await;
    let mut poll = Connection::get(fixture.at(), "/d/_changes?feed=longpoll&since=now").await;
    lines.head().await;
    poll.head().await;
    let mut last = Sequence::MIN;
    for position in 1..4 {
        last = layer.write(&db, "x", position, 1, false).await;
        assert_eq!(lines.chunk().await.unwrap(), row(last, "x", position) + "\n");
        if position == 1 {
            let expected = format!(
                "{{\"results\":[\n{}\n],\n\"last_seq\":\"{last}\",\"pending\":0}}\n",
                row(last, "x", 1)
            );
            assert_eq!(poll.rest().await, expected);
        }
    }
    layer.delete(&fixture.bus, &db).await;
    assert_eq!(lines.rest().await, format!("{{\"last_seq\":\"{last}\",\"pending\":0}}\n"));
    let gone = get(fixture.at(), "/d/_changes").await;
    assert_eq!(gone.head.status, 404);
    assert_eq!(gone.body, "{\"error\":\"not_found\",\"reason\":\"Database does not exist.\"}\n");
}

#[tokio::test]
async fn shards_are_read_one_by_one_and_say_where_they_end() {
    let (fixture, layer, db) = fixture("d", 2).await;
    for n in 0..20 {
        layer.write(&db, &format!("doc{n}"), 1, 1, false).await;
    }
    // Regression: this route refused parameters that begin with `_`, so clients that add these to bypass caches failed.
    let meta = get(fixture.at(), "/d/_changes/_meta?_=17").await.json();
    let shards: Vec<u64> = meta["shards"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert_eq!((shards.len(), &meta["closed"], &meta["db_name"]), (2, &false.into(), &"d".into()));
    let mut live =
        Connection::get(fixture.at(), &format!("/d/_changes/{}?feed=continuous&since=now", shards[0])).await;
    live.head().await;
    let mut seen = 0;
    for shard in &shards {
        let part = get(fixture.at(), &format!("/d/_changes/{shard}?limit=3")).await.json();
        let rest =
            get(fixture.at(), &format!("/d/_changes/{shard}?since={}", part["last_seq"].as_str().unwrap()))
                .await;
        let count = |answer: &serde_json::Value| answer["results"].as_array().unwrap().len();
        assert_eq!(part["pending"], count(&rest.json()));
        seen += count(&part) + count(&rest.json());
        assert!(!rest.body.contains("resharded_at"));
    }
    assert_eq!(seen, 20);

    let written = layer.changes.feed(&db).reshard(3, None).await.unwrap();
    let at = written.first.to_string();
    let asked = std::time::Instant::now();
    let last = live.rest().await;
    // Regression: a reshard did not wake live feeds, so they learned of it only at their next poll, 10 s later.
    assert!(asked.elapsed() < std::time::Duration::from_secs(5), "it is woken, and does not have to poll");
    assert!(last.starts_with(&format!("{{\"resharded_at\":\"{at}\",\"last_seq\":\"")), "{last}");
    let whole = get(fixture.at(), &format!("/d/_changes/{}", shards[0])).await;
    assert!(
        whole.body.contains(&format!("\n],\n\"resharded_at\":\"{at}\",\"last_seq\":\"")),
        "{}",
        whole.body
    );
    let then = get(fixture.at(), "/d/_changes/_meta?since=now").await.json();
    assert_eq!(then["shards"], serde_json::to_value(&written.shards).unwrap());
    assert_eq!(then["shards"].as_array().unwrap().len(), 3);
    assert_eq!(get(fixture.at(), "/d/_changes/_meta?since=0").await.json()["shards"], meta["shards"]);

    // The feed of all shards is unchanged.
    assert_eq!(get(fixture.at(), "/d/_changes").await.json()["results"].as_array().unwrap().len(), 20);
}

#[tokio::test]
async fn what_no_shard_can_answer_is_refused_with_a_reason() {
    let (fixture, layer, db) = fixture("d", 2).await;
    layer.write(&db, "doc", 1, 1, false).await;
    for (method, target, body, status) in [
        ("GET", "/d/_changes/99", "", 404),
        ("GET", "/d/_changes/x", "", 404),
        ("GET", "/none/_changes/_meta", "", 404),
        ("GET", "/%ff/_changes", "", 400),
        ("GET", "/%ff/_changes/1", "", 400),
        ("GET", "/%ff/_changes/_meta", "", 400),
        ("PUT", "/d/_changes", "", 405),
        ("DELETE", "/d/_changes/1", "", 405),
        ("POST", "/d/_changes/_meta", "", 405),
        ("GET", "/d/_changes/_meta?limit=1", "", 400),
        ("GET", "/d/_changes?feed=odd", "", 400),
        ("GET", "/d/_changes?since=garbage", "", 400),
        ("GET", "/d/_changes/1?limit=x", "", 400),
        ("GET", "/d/_changes/1?descending=true", "", 400),
    ] {
        let answer = ask(fixture.at(), method, target, "", body).await;
        assert_eq!(answer.head.status, status, "{method} {target} {body}");
        assert!(answer.json()["error"].is_string() && answer.json()["reason"].is_string());
    }
}

#[tokio::test]
async fn feeds_of_documents_begin_at_once_and_beat() {
    let (fixture, layer, db) = fixture("d", 2).await;
    for n in 0..6 {
        layer.write(&db, &format!("doc{n}"), 1, 1, false).await;
    }
    let shard = get(fixture.at(), "/d/_changes/_meta").await.json()["shards"][0].as_u64().unwrap();
    for path in ["/d/_changes".to_owned(), format!("/d/_changes/{shard}/")] {
        for feed in ["longpoll", "continuous", "eventsource"] {
            let target = format!("{path}?feed={feed}&since=now&heartbeat=30&timeout=1");
            let mut connection = Connection::get(fixture.at(), &target).await;
            assert_eq!(connection.head().await.status, 200, "{target}");
            for _ in 0..3 {
                let chunk = connection.chunk().await.unwrap();
                assert!(
                    ["\n", "{\"results\":[\n"].contains(&&*chunk)
                        || chunk.starts_with("event: heartbeat\ndata: \nid: "),
                    "{chunk}"
                );
            }
            let none = get(fixture.at(), &format!("{path}?feed={feed}&since=now&timeout=0")).await;
            assert!(!none.body.contains("\"id\""), "{none:?}");
            for limit in [0, 1, 1_000] {
                let some = get(fixture.at(), &format!("{path}?feed={feed}&timeout=0&limit={limit}")).await;
                let all = get(fixture.at(), &format!("{path}?limit=1000")).await.json();
                let all = all["results"].as_array().unwrap().len();
                assert_eq!(some.body.matches("\"changes\"").count(), all.min(limit), "{target} {limit}");
            }
            assert_eq!(ask(fixture.at(), "HEAD", &target, "", "").await.head.status, 200);
        }
    }
}

#[tokio::test]
async fn a_closed_connection_frees_its_feed_of_documents() {
    let (fixture, layer, db) = fixture("d", 2).await;
    layer.write(&db, "a", 1, 1, false).await;
    let before = fixture.dispatcher.subscribers();
    let mut open = Vec::new();
    for n in 0..60 {
        let feed = ["continuous", "longpoll", "eventsource"][n % 3];
        let target = format!("/d/_changes?feed={feed}&since=now&heartbeat=60000");
        let mut connection = Connection::get(fixture.at(), &target).await;
        connection.head().await;
        open.push(connection);
    }
    assert_eq!(fixture.dispatcher.subscribers(), before + 60);
    drop(open);
    until("the feeds to be freed", async || fixture.dispatcher.subscribers() == before).await;
}

#[tokio::test]
async fn databases_that_only_events_tell_of_have_no_documents() {
    let fixture = HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, bus| {
        api.changes(&bus.changes(), api.recorded_databases())
    })
    .await;
    let (a, b) = (db("a", 1), db("b", 1));
    fixture.event(&a, EventKind::Created).await;
    assert_eq!(get(fixture.at(), "/a/_changes").await.head.status, 404);
    // A database to which another layer writes has changes.
    let layer = Layer::new(&fixture.bus);
    layer.create(&b, 1).await;
    let written = layer.write(&b, "x", 1, 1, false).await;
    let changes = get(fixture.at(), "/b/_changes?include_docs=true").await;
    assert_eq!(changes.last_seq(), written.to_string());
    assert!(changes.body.contains("\"doc\":null"), "{}", changes.body);
}

/// Regression: the library refused filters of a layer and ignored `conflicts` and `attachments`, so a layer could offer none of these.
#[tokio::test]
async fn a_layer_has_filters_and_bodies_of_its_own() {
    let (fixture, layer, db) = fixture("d", 2).await;
    for n in 0..60 {
        layer.write(&db, &format!("doc{n}"), 1, 1, false).await;
    }
    let ids = |answer: &crate::client::Answer| -> Vec<String> {
        assert_eq!(answer.head.status, 200, "{answer:?}");
        let rows = answer.json()["results"].as_array().unwrap().clone();
        rows.iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect()
    };
    let selector =
        ask(fixture.at(), "POST", "/d/_changes?filter=_selector", "", r#"{"selector":{"_id":"doc59"}}"#)
            .await;
    assert_eq!(ids(&selector), ["doc5", "doc59"], "the text has both");
    assert!(!selector.body.contains("\"doc\":"), "only the filter has asked for bodies");
    let custom = get(fixture.at(), "/d/_changes?filter=app/ids&end=7&limit=3&include_docs=true").await;
    assert_eq!(ids(&custom), ["doc7", "doc17", "doc27"]);
    assert!(custom.body.contains("\"doc\":{\"_id\":\"doc7\"}"), "{}", custom.body);
    let rest =
        get(fixture.at(), &format!("/d/_changes?filter=app/ids&end=7&since={}", custom.last_seq())).await;
    assert_eq!(ids(&rest), ["doc37", "doc47", "doc57"]);
    let descending = get(fixture.at(), "/d/_changes?filter=app/ids&end=7&descending=true&limit=2").await;
    assert_eq!(ids(&descending), ["doc57", "doc47"]);
    let conflicts = get(fixture.at(), "/d/_changes?include_docs=true&conflicts=true&limit=1").await;
    assert!(conflicts.body.contains("\"_conflicts\":[]"), "{}", conflicts.body);
    // Without documents, these parameters have no effect, as in CouchDB.
    assert_eq!(ids(&get(fixture.at(), "/d/_changes?conflicts=true&attachments=true").await).len(), 60);
    for (query, status) in [
        ("filter=app/broken", 404),
        ("filter=app/unknown", 400),
        ("filter=_view&view=app/v", 400),
        ("include_docs=true&attachments=true", 400),
        ("include_docs=true&att_encoding_info=true", 400),
        ("since=2026-01-31T00:00:00Z", 400),
        ("limit=-1", 400),
        ("heartbeat=0&limit=0", 200),
        ("heartbeat=false&limit=0", 200),
        ("style=odd", 400),
        ("seq_interval=0", 400),
        ("limt=1", 400),
        ("descending=true&since=00000000000000000000000001", 400),
    ] {
        let answer = get(fixture.at(), &format!("/d/_changes?{query}")).await;
        assert_eq!(answer.head.status, status, "{query}");
        assert_eq!(answer.json()["reason"].is_string(), status >= 400, "{query}");
    }
    // These are accepted, too: parameter names in any case, `live`, and the last event id as a parameter.
    assert_eq!(ids(&get(fixture.at(), "/d/_changes?LIMIT=1&Feed=normal").await), ["doc0"]);
    let live = get(fixture.at(), "/d/_changes?feed=live&timeout=0&limit=2").await;
    assert_eq!(live.body.lines().count(), 3);
    let from = format!("/d/_changes?last-event-id={}", custom.last_seq());
    assert_eq!(ids(&get(fixture.at(), &from).await).len(), 60 - 28);
    layer.create(&crate::common::db("secret", 9), 1).await;
    let secret = get(fixture.at(), "/secret/_changes").await;
    assert_eq!((secret.head.status, &secret.json()["error"]), (403, &"forbidden".into()));
}

/// A layer may show something different to each caller. Regression: the entity tag was the same for all callers, so a shared cache that had
/// the answer for one caller got 304 for another one.
#[tokio::test]
async fn what_a_layer_shows_is_known_by_caller() {
    let options = ApiOptions::default().authorize(credentials(&[line("ann"), line("bob")]));
    let (fixture, layer) = layered(Store::memory(), options).await;
    let db = db("d", 1);
    layer.create(&db, 1).await;
    layer.write(&db, "doc7", 1, 1, false).await;
    for (target, is_shared) in [("/d/_changes", true), ("/d/_changes?filter=app/ids&end=7", false)] {
        let ask = async |name: &str, headers: &str| {
            let headers = format!("{}{headers}", bearer(name));
            ask(fixture.at(), "GET", target, &headers, "").await.head
        };
        let known = format!("If-None-Match: {}\r\n", ask("ann", "").await.headers["etag"]);
        assert_eq!(ask("ann", &known).await.status, 304);
        assert_eq!(ask("bob", &known).await.status, if is_shared { 304 } else { 200 }, "{target}");
    }
}

/// The count for one page is reused for the next one until a document is edited. `pending` remains exact even if documents are edited
/// between two pages and move to the end.
#[tokio::test]
async fn pending_is_exact_on_every_page_whatever_is_edited_between_them() {
    let (fixture, layer, db) = fixture("a", 3).await;
    let mut sequences = Vec::new();
    for n in 0..40 {
        sequences.push(layer.write(&db, &format!("doc{n:02}"), 1, 1, false).await);
    }
    let reads = async |since: &str, limit: u32| {
        let target = format!("/a/_changes?limit={limit}&since={since}");
        let page = get(fixture.at(), &target).await.json();
        (page["pending"].as_u64().unwrap(), page["last_seq"].as_str().unwrap().to_owned())
    };
    let mut since = "0".to_owned();
    for page in 1..=8_u64 {
        let (pending, last) = reads(&since, 5).await;
        assert_eq!(pending, 40 - page * 5, "page {page}");
        since = last;
    }
    // `pending` is exact at any position, in any order, and for one shard.
    for place in [30, 3, 17, 3, 39] {
        let (pending, _) = reads(&sequences[place].to_string(), 1).await;
        assert_eq!(pending, (40 - place as u64).saturating_sub(2), "after row {place}");
    }
    // One document moves from before a position to after it, one stays after it, and one is new.
    reads("0", 10).await;
    layer.write(&db, "doc00", 2, 1, false).await;
    layer.write(&db, "doc35", 2, 1, false).await;
    layer.write(&db, "new", 1, 1, false).await;
    let (pending, _) = reads(&sequences[9].to_string(), 5).await;
    assert_eq!(pending, 30 + 2 - 5);
    let backwards = get(fixture.at(), "/a/_changes?descending=true&limit=4").await.json();
    assert_eq!(backwards["pending"], 41 - 4);
    let shard = layer.changes.feed(&db).shards().await.unwrap()[0];
    let rows = layer.changes.feed(&db).shard_rows(shard).await.unwrap();
    let page = get(fixture.at(), &format!("/a/_changes/{shard}?limit=1")).await.json();
    assert_eq!(page["pending"], rows - 1);
}
