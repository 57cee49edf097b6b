//! Managing a bus over HTTP: nodes, feeds and consumers; which requests are refused, and which callers may do what.

use std::sync::Arc;

use notibus::{
    EventKind,
    changes::{Change, ChangesOptions},
    consumer::Work,
    http::{ApiOptions, Authorize, ServerOptions, allow_all},
};
use serde_json::{Value, json};

use crate::{
    client::{ask, get},
    common::{db, joined},
    fixture::{HttpFixture, bearer, credentials, line},
};

/// Starts a server with the management routes of a bus.
async fn fixture(authorize: Arc<dyn Authorize>) -> HttpFixture {
    let options = ApiOptions::default().authorize(authorize);
    HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.administration()).await
}

/// Sends a POST, and returns the status and the JSON of the answer.
async fn post(fixture: &HttpFixture, path: &str, body: &Value) -> (u16, Value) {
    let answer = ask(fixture.at(), "POST", path, "", &body.to_string()).await;
    (answer.head.status, answer.json())
}

/// Regression: a page had a thousand rows, however long they were, so the server held long pages for clients that did not read.
#[tokio::test]
async fn a_page_of_long_rows_is_short() {
    let fixture = fixture(allow_all()).await;
    for n in 0..150 {
        fixture.event(&db(&format!("{}{n}", "x".repeat(900)), 1), EventKind::Created).await;
    }
    let (mut since, mut pages, mut rows) = ("0".to_owned(), 0, 0);
    loop {
        let page = get(fixture.at(), &format!("/_notibus/feeds/notifications/rows?since={since}")).await;
        assert!(page.body.len() < 200_000, "{}", page.body.len());
        let page = page.json();
        since = page["next"].as_str().unwrap().to_owned();
        (pages, rows) = (pages + 1, rows + page["rows"].as_array().unwrap().len());
        if page["more"] == false {
            break;
        }
    }
    assert!(pages > 1 && rows == 150, "{pages} pages, {rows} rows");
}

#[tokio::test]
async fn rows_are_read_page_by_page_and_waited_for() {
    let fixture = fixture(allow_all()).await;
    let rows = "/_notibus/feeds/notifications/rows";
    let empty = get(fixture.at(), rows).await.json();
    assert_eq!((&empty["rows"], &empty["more"]), (&json!([]), &false.into()));
    for name in ["a", "b", "c"] {
        fixture.event(&db(name, 1), EventKind::Created).await;
    }
    let first = get(fixture.at(), &format!("{rows}?limit=2")).await.json();
    let names = |page: &Value| {
        page["rows"].as_array().unwrap().iter().map(|row| row["db"].clone()).collect::<Vec<_>>()
    };
    assert_eq!((names(&first), &first["more"]), (vec!["a".into(), "b".into()], &true.into()));
    assert!(first["rows"][0]["seq"].is_string());
    let next = first["next"].as_str().unwrap();
    let second = get(fixture.at(), &format!("{rows}?since={next}")).await.json();
    assert_eq!((names(&second), &second["more"]), (vec!["c".into()], &false.into()));

    // The route answers as soon as there is a row, or else at the end of the timeout.
    let next = second["next"].as_str().unwrap();
    let none = get(fixture.at(), &format!("{rows}?since={next}&timeout=1")).await.json();
    assert_eq!(none["rows"], json!([]));
    let (target, d) = (format!("{rows}?since={next}&timeout=60000"), db("d", 1));
    let (waited, _) = tokio::join!(get(fixture.at(), &target), fixture.event(&d, EventKind::Created));
    assert_eq!(names(&waited.json()), ["d"]);
    for bad in ["limit=0", "limit=1001", "timeout=x", "since=then", "feed=continuous"] {
        assert_eq!(get(fixture.at(), &format!("{rows}?{bad}")).await.head.status, 400, "{bad}");
    }
}

#[tokio::test]
async fn feeds_are_managed() {
    let fixture = fixture(allow_all()).await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    let feed = "/_notibus/feeds/notifications";
    let (status, entry) = post(&fixture, &format!("{feed}/reshard"), &json!({ "shards": 2 })).await;
    assert_eq!((status, &entry["open"], entry["shards"].as_array().unwrap().len()), (200, &true.into(), 2));
    let shown = get(fixture.at(), &format!("{feed}/topology?rows=true")).await.json();
    let open: Vec<_> = shown["entries"].as_array().unwrap().iter().map(|entry| &entry["open"]).collect();
    assert_eq!(open, [&Value::from(false), &Value::from(true)]);
    let rows = shown["entries"][0]["rows"].as_array().unwrap().iter().map(|rows| rows.as_u64().unwrap());
    assert_eq!(rows.sum::<u64>(), 1);

    let unknown = get(fixture.at(), "/_notibus/feeds/0123456789abcdef0123456789abcdef/topology").await;
    assert!(unknown.head.status == 404 && unknown.body.contains("0123456789abcdef"), "{}", unknown.body);
    // Regression: the server ignored the first of two parameters of one name, so a request could pass a proxy that checks only that one.
    for target in ["rows?limit=1&limit=1000", "topology?rows=false&rows=true"] {
        let twice = get(fixture.at(), &format!("{feed}/{target}")).await;
        assert!(twice.head.status == 400 && twice.body.contains("twice"), "{target}: {}", twice.body);
    }
    // Regression: this route refused parameters that begin with `_`, so clients that add these to bypass caches failed.
    assert_eq!(get(fixture.at(), &format!("{feed}/topology?_=17&_=18")).await.head.status, 200);
    // Regression: the bodies of these refusals were not JSON, so clients could not parse them.
    for target in ["consumers/%ff", "consumers/%ff/deferred", "feeds/%ff/topology"] {
        let broken = get(fixture.at(), &format!("/_notibus/{target}")).await;
        assert_eq!((broken.head.status, &broken.json()["error"]), (400, &"bad_request".into()), "{target}");
    }
    let nodes = get(fixture.at(), "/_notibus/nodes").await.json();
    assert_eq!(nodes["nodes"][0]["roles"][0], "notifier");
}

/// Uses every route of a consumer, with a name that must be escaped.
#[tokio::test]
async fn consumers_are_managed() {
    let fixture = fixture(allow_all()).await;
    fixture.event(&db("a", 1), EventKind::Created).await;
    let consumers = "/_notibus/consumers";
    let create = json!({ "name": "a/b c", "start": "0", "names": "*" });
    assert_eq!(post(&fixture, consumers, &create).await, (201, json!({ "ok": true, "created": true })));
    assert_eq!(post(&fixture, consumers, &create).await, (200, json!({ "ok": true, "created": false })));
    assert_eq!(get(fixture.at(), consumers).await.json()["consumers"][0]["name"], "a/b c");
    let other = json!({ "name": "a/b c", "names": "b*" });
    assert_eq!(post(&fixture, consumers, &other).await.0, 400, "it exists with another filter");
    for bad in [
        json!({}),
        json!({ "name": "" }),
        json!({ "name": "c", "group": "x" }),
        json!({ "name": "c", "names": "a[" }),
    ] {
        assert_eq!(post(&fixture, consumers, &bad).await.0, 400, "{bad}");
    }
    let consumer = format!("{consumers}/a%2Fb%20c");
    let behind = async || {
        let lag = get(fixture.at(), &consumer).await.json();
        lag["lag"].as_array().unwrap().iter().map(|shard| shard["rows"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(behind().await, 1);
    assert_eq!(post(&fixture, &format!("{consumer}/reset"), &json!({ "to": "now" })).await.0, 200);
    assert_eq!(behind().await, 0);
    let shown = get(fixture.at(), &consumer).await.json();
    assert_eq!(
        (&shown["consumer"]["generation"], &shown["consumer"]["is_paused"]),
        (&2.into(), &false.into())
    );
    assert!(shown["troubles"][0].as_str().unwrap().contains("no node works for it"), "{shown}");

    // An id that is requested again is deferred until a member works on it.
    let deferred = async || get(fixture.at(), &format!("{consumer}/deferred")).await.json();
    assert_eq!(deferred().await, json!({ "deferred": [], "next": null }));
    let asked = post(&fixture, &format!("{consumer}/again"), &json!({ "filter": "*" })).await;
    assert_eq!(asked, (202, json!({ "ok": true, "ids": 1 })));
    let listed = deferred().await;
    assert_eq!(
        (&listed["deferred"][0]["id"], &listed["deferred"][0]["is_again"]),
        (&"a".into(), &true.into())
    );
    for (path, body, status) in [
        ("reset", json!({}), 400),
        ("reset", json!({ "to": "then" }), 400),
        ("delete", json!({ "to": "now" }), 400),
        ("delete", json!({ "feed": "x" }), 400),
        ("again", json!({ "filter": "a[" }), 400),
        ("again", json!({ "id": "a" }), 400),
        ("again", json!({ "deferred": true }), 202),
        ("discard", json!({}), 400),
        ("discard", json!({ "id": "b" }), 404),
        ("discard", json!({ "id": "a", "force": true }), 400),
        ("discard", json!({ "id": "a" }), 200),
        ("pause", json!({ "deferred": true }), 400),
        ("nothing", json!({}), 404),
        ("pause", json!({}), 200),
        ("resume", json!({}), 200),
        ("delete", json!({}), 200),
        ("delete", json!({}), 404),
    ] {
        assert_eq!(post(&fixture, &format!("{consumer}/{path}"), &body).await.0, status, "{path} {body}");
    }
    for looks in ["", "/deferred"] {
        assert_eq!(get(fixture.at(), &format!("{consumer}{looks}")).await.head.status, 404, "{looks}");
    }
}

/// A consumer of documents is created, moved and deleted. While it has a member, it is moved and deleted only by force.
#[tokio::test]
async fn consumers_of_documents_are_managed() {
    let fixture = fixture(allow_all()).await;
    let (docs, changes) = (db("docs", 7), fixture.bus.changes());
    let options = ChangesOptions::default();
    fixture.store.run(async |tx| changes.create(&tx, &docs, &options).await).await.unwrap();
    let (consumers, feed) = ("/_notibus/consumers", docs.instance.to_string());
    let create = json!({ "name": "docs", "feed": feed, "start": "0", "expiry_ms": 3_600_000 });
    assert_eq!(post(&fixture, consumers, &create).await.0, 201);
    assert_eq!(post(&fixture, consumers, &create).await.0, 200);
    for (bad, status) in [
        (json!({ "name": "docs" }), 400),
        (json!({ "name": "docs", "feed": feed, "expiry_ms": 1 }), 400),
        (json!({ "name": "c", "feed": db("none", 1).instance.to_string() }), 404),
        (json!({ "name": "c", "feed": feed, "names": "a*" }), 400),
        (json!({ "name": "c", "feed": feed, "expiry_ms": 0 }), 400),
        (json!({ "name": "c", "feed": feed, "start": "then" }), 400),
    ] {
        assert_eq!(post(&fixture, consumers, &bad).await.0, status, "{bad}");
    }
    let shown = async || get(fixture.at(), "/_notibus/consumers/docs").await.json()["consumer"].clone();
    let consumer = shown().await;
    let (feed, expiry) = (&consumer["instance"], &consumer["expiry_ms"]);
    assert_eq!((feed, expiry), (&json!(docs.instance.to_string()), &json!(3_600_000)));
    assert_eq!(get(fixture.at(), consumers).await.json()["consumers"].as_array().unwrap().len(), 1);

    let member = joined(&fixture.bus).await.consumer("docs").unwrap().documents(&changes.feed(&docs));
    let member = member.run(async |_: Work<Change>| Ok(())).await.unwrap();
    let at = "/_notibus/consumers/docs";
    for (path, body) in [("reset", json!({ "to": "0" })), ("delete", json!({}))] {
        assert_eq!(post(&fixture, &format!("{at}/{path}"), &body).await.0, 409, "a node is its member");
    }
    let (status, said) =
        post(&fixture, &format!("{at}/reset"), &json!({ "to": "then", "force": true })).await;
    let said = said.to_string();
    assert!(status == 400 && said.contains("now") && said.contains("26 hexadecimal digits"), "{said}");
    assert_eq!(shown().await["generation"], 1, "nothing is changed");
    let checkpoint = shown().await["shards"][0]["checkpoint"].clone();
    for to in [json!("0"), json!("now"), checkpoint] {
        let reset = post(&fixture, &format!("{at}/reset"), &json!({ "to": to, "force": true })).await;
        assert_eq!(reset.0, 200, "{to}: {}", reset.1);
    }
    assert_eq!(shown().await["generation"], 4);
    assert_eq!(post(&fixture, &format!("{at}/delete"), &json!({ "force": true })).await.0, 200);
    assert_eq!(get(fixture.at(), at).await.head.status, 404);
    member.shutdown().await.unwrap();
}

/// A page of deferred ids says where the next page begins.
#[tokio::test]
async fn deferred_ids_are_listed_page_by_page() {
    let fixture = fixture(allow_all()).await;
    for n in 0..1_001 {
        fixture.event(&db(&format!("db{n}"), 1), EventKind::Created).await;
    }
    assert_eq!(post(&fixture, "/_notibus/consumers", &json!({ "name": "c" })).await.0, 201);
    assert_eq!(post(&fixture, "/_notibus/consumers/c/again", &json!({})).await.1["ids"], 1_001);
    let (mut target, mut ids) =
        ("/_notibus/consumers/c/deferred".to_owned(), std::collections::BTreeSet::new());
    loop {
        let page = get(fixture.at(), &target).await.json();
        ids.extend(
            page["deferred"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap().to_owned()),
        );
        let next = &page["next"];
        let (Some(shard), Some(after)) = (next["shard"].as_str(), next["after"].as_str()) else { break };
        target = format!("/_notibus/consumers/c/deferred?shard={shard}&after={after}");
    }
    assert_eq!(ids.len(), 1_001);
    assert_eq!(get(fixture.at(), "/_notibus/consumers/c/deferred?after=a").await.head.status, 400);
}

/// Regression: a list was one text in memory, so each client that did not read it held memory in proportion to the number of consumers.
#[tokio::test]
async fn lists_come_in_pages_of_some_64_kb() {
    let fixture = fixture(allow_all()).await;
    for n in 0..300 {
        let name = format!("{}{n:03}", "c".repeat(200));
        assert_eq!(post(&fixture, "/_notibus/consumers", &json!({ "name": name })).await.0, 201);
    }
    let (mut after, mut names, mut pages) = (String::new(), Vec::new(), 0);
    loop {
        let page = get(fixture.at(), &format!("/_notibus/consumers?after={after}")).await;
        assert!(page.body.len() < 70_000, "{} bytes", page.body.len());
        let page = page.json();
        names.extend(page["consumers"].as_array().unwrap().iter().map(|it| it["name"].to_string()));
        pages += 1;
        let Some(next) = page["next"].as_str() else { break };
        next.clone_into(&mut after);
    }
    assert!(pages > 1 && names.len() == 300 && names.is_sorted(), "{pages} pages, {} names", names.len());
    let status = get(fixture.at(), "/_notibus/status").await;
    assert_eq!(status.json()["truncated"], json!(["consumers"]));
    assert!(status.body.len() < 100_000, "{} bytes", status.body.len());
}

#[tokio::test]
async fn who_may_look_may_change_nothing() {
    let fixture = fixture(credentials(&[line("prometheus") + " roles=_metrics"])).await;
    let bearer = bearer("prometheus");
    for (method, path, status) in [
        ("GET", "/_notibus/nodes", 200),
        ("GET", "/_notibus/consumers", 200),
        ("GET", "/_notibus/feeds/notifications/topology", 200),
        ("GET", "/_notibus/feeds/notifications/rows", 401),
        ("GET", "/_notibus/consumers/mailer/deferred", 401),
        ("POST", "/_notibus/feeds/notifications/reshard", 401),
        ("POST", "/_notibus/consumers", 401),
        ("POST", "/_notibus/consumers/mailer/delete", 401),
    ] {
        let answer = ask(fixture.at(), method, path, &bearer, "{}").await;
        assert_eq!(answer.head.status, status, "{method} {path}: {}", answer.body);
        assert_eq!(ask(fixture.at(), method, path, "", "{}").await.head.status, 401, "{method} {path}");
    }
}

/// Any web page can make a browser send requests to a server that only this machine can reach, so requests from pages are refused.
#[tokio::test]
async fn a_page_changes_nothing() {
    let fixture = fixture(allow_all()).await;
    let at = format!("Origin: http://{}\r\n", fixture.at());
    for path in
        ["/_notibus/consumers", "/_notibus/consumers/a/delete", "/_notibus/feeds/notifications/reshard"]
    {
        assert_eq!(ask(fixture.at(), "POST", path, &at, "{}").await.head.status, 403, "{path}");
    }
}
