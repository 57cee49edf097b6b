//! The document layer of `examples/mini_couch`, without its feeds: answers to clients, and events in the bus.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, io::Write, sync::Arc};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, Response},
};
use flate2::{Compression, write::GzEncoder};
use notibus::{
    Bus, Cursor, Db, DbName, DispatcherOptions, Notification,
    http::{Api, ApiOptions},
    store::{
        Store, StoreError,
        testing::{CommitFault, Faults},
    },
};
use serde_json::{Value, json};
use tower::ServiceExt;

mod common;
#[allow(dead_code, reason = "its `main` is the command")]
#[path = "../examples/mini_couch/main.rs"]
mod mini_couch;

use mini_couch::{couch::Couch, http};

/// A layer in a store of its own, and its bus.
struct CouchFixture {
    /// The bus, whose events are folded at once.
    bus: Bus,
    /// The routes for clients.
    router: Router,
    /// The layer behind the routes.
    couch: Arc<Couch>,
    _notifier: notibus::Notifier,
    /// Delivers to live feeds.
    _dispatcher: notibus::Dispatcher,
}

impl CouchFixture {
    async fn on(store: &Store) -> Self {
        let bus = common::narrow_bus(store).await;
        let notifier = common::joined(&bus).await.notifier(common::eager()).await.unwrap();
        let couch = Arc::new(Couch::new(store.clone(), &bus));
        let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
        let options = ApiOptions::default().body_len_max(http::BODY_LEN_MAX);
        let api = Api::start(&bus, &dispatcher, options).unwrap();
        let router = http::finished(&api, http::router(Arc::clone(&couch)));
        Self { bus, router, couch, _notifier: notifier, _dispatcher: dispatcher }
    }

    async fn new() -> Self {
        Self::on(&Store::memory()).await
    }

    async fn raw(&self, request: Request<Body>) -> Response<Body> {
        self.router.clone().oneshot(request).await.unwrap()
    }

    /// Sends a request with a JSON body. Returns the status and the body of the answer.
    async fn ask(&self, method: &str, path: &str, body: impl Into<Option<Value>>) -> (u16, Value) {
        let body = body.into().map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let response = self.raw(Request::builder().method(method).uri(path).body(body).unwrap()).await;
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    /// Sends a request that must succeed. Returns the new revision.
    async fn rev(&self, method: &str, path: &str, body: impl Into<Option<Value>>) -> String {
        let (status, body) = self.ask(method, path, body).await;
        assert!((200..300).contains(&status), "{method} {path}: {status} {body}");
        body["rev"].as_str().unwrap().to_owned()
    }

    /// Returns the row of the database once the bus has folded `lanes` of it: created, deleted, updated, `ddoc_updated`.
    async fn folded(&self, name: &str, lanes: [u64; 4]) -> Notification {
        let name = DbName::new(name).unwrap();
        let newest = async || self.bus.feed().newest(&name).await.unwrap();
        let is_folded = async || newest().await.is_some_and(|row| row.totals == common::counts(lanes));
        common::until(&format!("{lanes:?} of {name}"), is_folded).await;
        newest().await.unwrap()
    }

    /// Returns the changes of the database: each document's id, revision, and whether it is deleted.
    async fn changes(&self, name: &str) -> Vec<(String, String, bool)> {
        let name = DbName::new(name).unwrap();
        let newest = async || self.bus.feed().newest(&name).await.unwrap();
        common::until("the instance", async || newest().await.is_some_and(|row| row.deleted_at.is_none()))
            .await;
        let instance = newest().await.unwrap().instance;
        let feed = self.couch.changes().feed(&Db::new(name, instance));
        let rows = feed.page(Cursor::BEGINNING, 10_000).await.unwrap().rows;
        let summary = |doc: &notibus::changes::DocSummary| {
            (doc.id.to_string(), doc.revision.to_string(), doc.is_deleted)
        };
        rows.iter().map(|row| summary(&row.doc)).collect()
    }
}

#[tokio::test]
async fn databases_are_created_listed_and_deleted() {
    let fixture = CouchFixture::new().await;
    let ok = json!({ "ok": true });
    for name in ["shop", "shop%2Forders", "a_$()+-%2F0"] {
        assert_eq!(fixture.ask("PUT", &format!("/{name}"), None).await, (201, ok.clone()));
    }
    let (status, body) = fixture.ask("PUT", "/shop/", None).await;
    assert_eq!((status, &body["error"]), (412, &json!("file_exists")));
    assert_eq!(fixture.ask("GET", "/_all_dbs", None).await.1, json!(["a_$()+-/0", "shop", "shop/orders"]));
    assert_eq!(fixture.ask("HEAD", "/shop", None).await, (200, Value::Null));

    assert_eq!(fixture.ask("DELETE", "/shop/", None).await, (200, ok));
    let gone = json!({ "error": "not_found", "reason": "Database does not exist." });
    for (method, path) in [
        ("GET", "/shop"),
        ("DELETE", "/shop"),
        ("GET", "/shop/x"),
        ("DELETE", "/shop/x?rev=1-00000000000000000000000000000000"),
        ("GET", "/shop/_all_docs"),
    ] {
        assert_eq!(fixture.ask(method, path, None).await, (404, gone.clone()), "{method} {path}");
    }
    assert_eq!(fixture.ask("PUT", "/shop/x", json!({})).await, (404, gone.clone()));
    assert_eq!(fixture.ask("POST", "/shop/_bulk_docs", json!({ "docs": [] })).await, (404, gone));
    assert_eq!(fixture.ask("GET", "/_all_dbs", None).await.1, json!(["a_$()+-/0", "shop/orders"]));

    for bad in ["Shop", "0", "_shop", "sh%20op", "%C3%A4", "a%2e"] {
        let (status, body) = fixture.ask("PUT", &format!("/{bad}"), None).await;
        assert_eq!((status, &body["error"]), (400, &json!("illegal_database_name")), "{bad}");
    }
    assert!(fixture.folded("shop", [1, 1, 0, 0]).await.deleted_at.is_some());
}

#[tokio::test]
async fn an_edit_needs_the_present_revision() {
    let fixture = CouchFixture::new().await;
    fixture.ask("PUT", "/db", None).await;
    let conflict = (409, json!({ "error": "conflict", "reason": "Document update conflict." }));
    let first = fixture.rev("PUT", "/db/x", json!({ "n": 1 })).await;
    assert!(first.starts_with("1-"));
    assert_eq!(fixture.ask("PUT", "/db/x", json!({ "n": 2 })).await, conflict);

    // The revision may be in the body, in the query, or in a header.
    let second = fixture.rev("PUT", "/db/x", json!({ "_rev": first, "n": 2 })).await;
    assert_eq!(fixture.ask("PUT", "/db/x", json!({ "_rev": first, "n": 3 })).await, conflict);
    let third = fixture.rev("PUT", &format!("/db/x?rev={second}"), json!({ "n": 3 })).await;
    let request = Request::put("/db/x").header("if-match", format!("\"{third}\""));
    let response = fixture.raw(request.body(Body::from(r#"{"n":4}"#)).unwrap()).await;
    let tag = response.headers()["etag"].to_str().unwrap().to_owned();
    let fourth = tag.trim_matches('"');
    assert!(fourth.starts_with("4-"));

    let body = json!({ "_id": "x", "_rev": fourth, "n": 4 });
    assert_eq!(fixture.ask("GET", "/db/x", None).await, (200, body.clone()));
    assert_eq!(fixture.ask("GET", &format!("/db/x?rev={fourth}"), None).await, (200, body));
    let missing = |why: &str| (404, json!({ "error": "not_found", "reason": why }));
    assert_eq!(fixture.ask("GET", &format!("/db/x?rev={first}"), None).await, missing("missing"));
    assert_eq!(fixture.ask("GET", "/db/y", None).await, missing("missing"));

    assert_eq!(fixture.ask("DELETE", &format!("/db/x?rev={third}"), None).await, conflict);
    assert_eq!(fixture.ask("DELETE", "/db/y", None).await, missing("missing"));
    let fifth = fixture.rev("DELETE", &format!("/db/x?rev={fourth}"), None).await;
    assert_eq!(fixture.ask("GET", "/db/x", None).await, missing("deleted"));
    assert_eq!(fixture.ask("DELETE", &format!("/db/x?rev={fifth}"), None).await, missing("deleted"));
    assert_eq!(fixture.changes("db").await, [("x".to_owned(), fifth, true)]);
    // The document can be written again without its revision, and the numbers continue.
    assert!(fixture.rev("PUT", "/db/x", json!({})).await.starts_with("6-"));

    // The refused edits recorded nothing.
    fixture.folded("db", [1, 0, 6, 0]).await;
}

#[tokio::test]
async fn what_is_no_document_is_refused() {
    let fixture = CouchFixture::new().await;
    fixture.ask("PUT", "/db", None).await;
    let long = "x".repeat(4_097);
    let large = json!({ "text": "x".repeat(100_000) });
    for (path, body, status, error) in [
        ("/db/_x", json!({}), 400, "doc_validation"),
        ("/db/_design/", json!({}), 404, "not_found"),
        ("/db/_design%2F", json!({}), 400, "doc_validation"),
        (&format!("/db/{long}"), json!({}), 400, "doc_validation"),
        ("/db/x", json!([]), 400, "bad_request"),
        ("/db/x", json!({ "_foo": 1 }), 400, "doc_validation"),
        ("/db/x", json!({ "_rev": "1-x" }), 400, "bad_request"),
        ("/db/x?rev=1", json!({}), 400, "bad_request"),
        ("/db/x", large, 413, "document_too_large"),
    ] {
        let (got, body) = fixture.ask("PUT", path, body).await;
        assert_eq!((got, &body["error"]), (status, &json!(error)), "{path}");
    }
    for (path, body) in [("/db", json!(7)), ("/db/_bulk_docs", json!([])), ("/db/_bulk_docs", json!({}))] {
        assert_eq!(fixture.ask("POST", path, body).await.0, 400, "{path}");
    }
    let elsewhere = json!({ "new_edits": false, "docs": [] });
    assert_eq!(fixture.ask("POST", "/db/_bulk_docs", elsewhere).await.0, 501);
    assert_eq!(fixture.ask("GET", "/db/_all_docs?limit=-1", None).await.0, 400);
    assert_eq!(fixture.ask("GET", "/db/_all_docs?startkey=x", None).await.0, 400);
    assert_eq!(fixture.ask("GET", "/", None).await.1["couchdb"], "Welcome");
    assert_eq!(fixture.ask("GET", "/nothing/of/the/kind/here", None).await.0, 404);
    let not_json = Request::put("/db/x").body(Body::from("{")).unwrap();
    assert_eq!(fixture.raw(not_json).await.status(), 400);
    fixture.folded("db", [1, 0, 0, 0]).await;
}

#[tokio::test]
async fn a_bulk_is_many_edits_of_which_each_counts_for_itself() {
    let fixture = CouchFixture::new().await;
    fixture.ask("PUT", "/db", None).await;
    let rev = fixture.rev("PUT", "/db/a", json!({ "n": 1 })).await;
    let docs = json!([
        { "_id": "a", "n": 0 },
        { "_id": "a", "_rev": rev, "n": 2 },
        { "_id": "b" },
        { "_id": "b" },
        { "name": "nobody" },
        { "_id": "a" },
        { "_id": "_design/views" },
        { "_id": "c", "_deleted": true },
    ]);
    let (status, rows) = fixture.ask("POST", "/db/_bulk_docs", json!({ "docs": docs })).await;
    assert_eq!(status, 201);
    let rows = rows.as_array().unwrap();
    let answers: Vec<_> = rows.iter().map(|row| row["error"].as_str().unwrap_or("ok")).collect();
    assert_eq!(answers, ["conflict", "ok", "ok", "conflict", "ok", "conflict", "ok", "not_found"]);
    let drawn = rows[4]["id"].as_str().unwrap();
    let ids: Vec<_> = fixture.changes("db").await.into_iter().map(|(id, _, _)| id).collect();
    assert_eq!(ids, ["a", "b", drawn, "_design/views"]);

    // More than one transaction can hold, in bytes and in documents.
    let text = "x".repeat(90_000);
    let large: Vec<_> = (0..120).map(|n| json!({ "_id": format!("large {n}"), "text": text })).collect();
    let many: Vec<_> = (0..1_500).map(|n| json!({ "_id": format!("small {n}") })).collect();
    // Long ids, whose keys and conflict ranges take most of the space. Regression: the layer did not count these.
    let long: Vec<_> = (0..500).map(|n| json!({ "_id": format!("{}{n:04}", "x".repeat(4_000)) })).collect();
    for docs in [large, many, long] {
        let (status, rows) = fixture.ask("POST", "/db/_bulk_docs", json!({ "docs": docs })).await;
        assert_eq!(status, 201);
        assert!(rows.as_array().unwrap().iter().all(|row| row["ok"] == true));
    }
    assert_eq!(fixture.changes("db").await.len(), 4 + 120 + 1_500 + 500);
    assert_eq!(fixture.ask("GET", "/db", None).await.1["doc_count"], 4 + 120 + 1_500 + 500);
    fixture.folded("db", [1, 0, 4 + 120 + 1_500 + 500, 1]).await;
}

#[tokio::test]
async fn documents_are_listed_by_id() {
    let fixture = CouchFixture::new().await;
    fixture.ask("PUT", "/db", None).await;
    let mut revs = BTreeMap::new();
    for id in ["b", "a", "ä", "c"] {
        revs.insert(id, fixture.rev("POST", "/db", json!({ "_id": id, "n": id })).await);
    }
    let gone = fixture.rev("DELETE", &format!("/db/b?rev={}", revs["b"]), None).await;
    let ids = async |query: &str| {
        let (status, body) = fixture.ask("GET", &format!("/db/_all_docs{query}"), None).await;
        assert_eq!((status, &body["total_rows"]), (200, &json!(3)));
        let ids = body["rows"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(ids("").await, ["a", "c", "ä"]);
    assert_eq!(ids("?limit=1").await, ["a"]);
    assert_eq!(ids("?limit=0").await, [""; 0]);
    assert_eq!(ids("?startkey=%22b%22").await, ["c", "ä"]);
    assert_eq!(ids("?start_key=%22a%22&end_key=%22c%22").await, ["a", "c"]);
    let (_, body) = fixture.ask("GET", "/db/_all_docs?include_docs=true&limit=1", None).await;
    let row = json!({ "id": "a", "key": "a", "value": { "rev": revs["a"] }, "doc": { "_id": "a", "_rev": revs["a"], "n": "a" } });
    assert_eq!(body["rows"], json!([row]));
    let (_, body) = fixture.ask("POST", "/db/_all_docs", json!({ "keys": ["b", "c", "_", "d"] })).await;
    let rows = json!([
        { "id": "b", "key": "b", "value": { "rev": gone, "deleted": true } },
        { "id": "c", "key": "c", "value": { "rev": revs["c"] } },
        { "key": "_", "error": "not_found" },
        { "key": "d", "error": "not_found" },
    ]);
    assert_eq!(body["rows"], rows);

    let (_, info) = fixture.ask("GET", "/db", None).await;
    assert_eq!((&info["doc_count"], &info["doc_del_count"]), (&json!(3), &json!(1)));
    let bytes: usize = {
        let mut bytes = json!({ "_id": "b", "_rev": gone, "_deleted": true }).to_string().len();
        for id in ["a", "c", "ä"] {
            bytes += json!({ "_id": id, "_rev": revs[id], "n": id }).to_string().len();
        }
        bytes
    };
    assert_eq!(info["sizes"]["external"], bytes);
}

#[tokio::test]
async fn bodies_may_be_compressed() {
    let fixture = CouchFixture::new().await;
    fixture.ask("PUT", "/db", None).await;
    let packed = |text: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    };
    let put = async |body: Vec<u8>| {
        let request =
            Request::put("/db/x").header("content-encoding", "gzip").body(Body::from(body)).unwrap();
        fixture.raw(request).await.status().as_u16()
    };
    assert_eq!(put(packed(br#"{"n":1}"#)).await, 201);
    assert_eq!(fixture.ask("GET", "/db/x", None).await.1["n"], 1);
    assert_eq!(put(b"{}".to_vec()).await, 400);
    // A small body that unpacks to a large one is not unpacked completely.
    assert_eq!(put(packed(&vec![b' '; 17 << 20])).await, 413);
    let plain = Request::put("/db/x").body(Body::from(vec![b' '; 17 << 20])).unwrap();
    assert_eq!(fixture.raw(plain).await.status(), 413);
}

/// No data of a deleted database reappears in another one with its name.
#[tokio::test]
async fn a_database_that_is_created_again_is_another_one() {
    let fixture = CouchFixture::new().await;
    fixture.ask("PUT", "/db", None).await;
    fixture.rev("PUT", "/db/x", json!({})).await;
    let old = fixture.folded("db", [1, 0, 1, 0]).await.instance;
    fixture.ask("DELETE", "/db", None).await;
    fixture.folded("db", [1, 1, 1, 0]).await;
    fixture.ask("PUT", "/db", None).await;
    let (_, info) = fixture.ask("GET", "/db", None).await;
    assert_eq!((&info["doc_count"], &info["sizes"]["external"]), (&json!(0), &json!(0)));
    assert_eq!(fixture.ask("GET", "/db/x", None).await.0, 404);
    assert!(fixture.rev("PUT", "/db/y", json!({})).await.starts_with("1-"));
    fixture.rev("PUT", "/db/z", json!({})).await;
    let row = fixture.folded("db", [1, 0, 2, 0]).await;
    assert_ne!(row.instance, old);
    assert_eq!(row.replaced.unwrap().instance, old);
    assert_eq!(fixture.changes("db").await.len(), 2);
}

/// An edit whose commit has an unknown result must not be made twice, and must not conflict with itself.
#[tokio::test]
async fn an_unknown_result_is_no_conflict() {
    let faults = Faults::new(&Store::memory());
    let fixture = CouchFixture::on(&faults.store()).await;
    fixture.ask("PUT", "/db", None).await;
    fixture.folded("db", [1, 0, 0, 0]).await;
    let mut rev = fixture.rev("PUT", "/db/x", json!({})).await;
    for n in 2..8 {
        faults.plan_commits({
            let mut left = 1;
            move |attempt| {
                let is_ours = attempt
                    .operations
                    .iter()
                    .any(|operation| format!("{operation:?}").contains("mini_couch"));
                let fault = if n % 2 == 0 { CommitFault::After } else { CommitFault::Before };
                (is_ours && std::mem::take(&mut left) == 1).then(|| fault(StoreError::COMMIT_UNKNOWN_RESULT))
            }
        });
        rev = fixture.rev("PUT", "/db/x", json!({ "_rev": rev, "n": n })).await;
        assert!(rev.starts_with(&format!("{n}-")), "{rev}");
    }
    faults.heal();
    fixture.folded("db", [1, 0, 7, 0]).await;
    assert_eq!(fixture.changes("db").await, [("x".to_owned(), rev, false)]);
}

/// If clients edit the same documents concurrently, each from what it has read, no edit is lost, neither by the layer nor by the bus.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn edits_of_many_clients_are_all_kept_and_delivered() {
    const CLIENTS: usize = 8;
    const EDITS: usize = 40;
    let fixture = Arc::new(CouchFixture::new().await);
    fixture.ask("PUT", "/db", None).await;
    for id in ["a", "b"] {
        fixture.rev("PUT", &format!("/db/{id}"), json!({ "n": 0 })).await;
    }
    let clients = (0..CLIENTS).map(|client| {
        let fixture = Arc::clone(&fixture);
        tokio::spawn(async move {
            let path = ["/db/a", "/db/b"][client % 2];
            let mut edits = 0;
            while edits < EDITS {
                let mut doc = fixture.ask("GET", path, None).await.1;
                doc["n"] = (doc["n"].as_u64().unwrap() + 1).into();
                match fixture.ask("PUT", path, doc).await.0 {
                    201 => edits += 1,
                    409 => {}
                    status => panic!("{status}"),
                }
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    let each = CLIENTS * EDITS / 2;
    for path in ["/db/a", "/db/b"] {
        assert_eq!(fixture.ask("GET", path, None).await.1["n"], each);
    }
    fixture.folded("db", [1, 0, 2 + 2 * each as u64, 0]).await;
}

/// Random edits against a model: answers, counts, lists and events agree with it.
#[tokio::test]
async fn random_edits_agree_with_a_model() {
    let mut dice = common::dice();
    let fixture = CouchFixture::new().await;
    fixture.ask("PUT", "/db", None).await;
    // Per id, the revision and whether it is deleted; and the ids in the order of their last edits.
    let mut model: BTreeMap<String, (String, bool)> = BTreeMap::new();
    let mut order: Vec<String> = Vec::new();
    let (mut updates, mut ddocs) = (0, 0);
    for _ in 0..400 {
        let id = dice.choice(["a", "b", "c", "_design/d", "_design/e"]).unwrap().to_owned();
        let known = model.get(&id).cloned();
        let rev = match &known {
            Some((rev, _)) if dice.u8(..10) < 7 => Some(rev.clone()),
            _ if dice.u8(..10) < 2 => Some(format!("1-{}", "0".repeat(32))),
            _ => None,
        };
        let deletes = dice.u8(..10) < 3;
        let is_current = rev.is_some() && rev.as_ref() == known.as_ref().map(|(rev, _)| rev);
        let expected = match &known {
            None | Some((_, true)) if deletes => 404,
            None | Some((_, true)) if rev.is_none() => 201,
            Some(_) if is_current => 201,
            _ => 409,
        };
        let query = rev.map(|rev| format!("?rev={rev}")).unwrap_or_default();
        let path = format!("/db/{id}{query}");
        let (status, body) = if deletes {
            fixture.ask("DELETE", &path, None).await
        } else {
            fixture.ask("PUT", &path, json!({ "n": dice.u8(..) })).await
        };
        assert_eq!(if status == 200 { 201 } else { status }, expected, "{path} over {known:?}");
        if expected == 201 {
            model.insert(id.clone(), (body["rev"].as_str().unwrap().to_owned(), deletes));
            order.retain(|other| *other != id);
            order.push(id.clone());
            if id.starts_with('_') { ddocs += 1 } else { updates += 1 }
        }
    }
    fixture.folded("db", [1, 0, updates, ddocs]).await;
    let expected: Vec<_> =
        order.into_iter().map(|id| (id.clone(), model[&id].0.clone(), model[&id].1)).collect();
    assert_eq!(fixture.changes("db").await, expected);
    let living = model.values().filter(|(_, is_deleted)| !is_deleted).count();
    let (_, info) = fixture.ask("GET", "/db", None).await;
    assert_eq!(info["doc_count"], living);
    assert_eq!(info["doc_del_count"], model.len() - living);
}

/// Regression: axum's own refusals were plain text, or had an empty body, so clients of CouchDB could not read them.
#[tokio::test]
async fn refusals_are_json() {
    let fixture = CouchFixture::new().await;
    fixture.ask("PUT", "/db", None).await;
    for (method, path, body, status, error, reason) in [
        ("GET", "/%ff", "", 400, "bad_request", "Invalid URL: Invalid UTF-8 in `db`"),
        ("PUT", "/%ff/x", "{}", 400, "bad_request", "Invalid URL: Invalid UTF-8 in `db`"),
        ("PATCH", "/db", "", 405, "method_not_allowed", "Only GET,HEAD,PUT,DELETE,POST allowed"),
        ("DELETE", "/_up", "", 405, "method_not_allowed", "Only GET,HEAD allowed"),
        ("GET", "/db/_bulk_docs", "", 405, "method_not_allowed", "Only POST allowed"),
        ("POST", "/db", &" ".repeat(17 << 20), 413, "too_large", "the request entity is too large"),
        ("GET", "/db/x/y", "", 404, "not_found", "missing"),
    ] {
        let request = Request::builder().method(method).uri(path).body(Body::from(body.to_owned())).unwrap();
        let response = fixture.raw(request).await;
        assert_eq!(response.status().as_u16(), status, "{method} {path}");
        let header = |name| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header("content-type").as_deref(), Some("application/json"), "{method} {path}");
        let allowed = reason.strip_prefix("Only ").and_then(|reason| reason.strip_suffix(" allowed"));
        assert_eq!(header("allow").as_deref(), allowed);
        let answers = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let answers: Value = serde_json::from_slice(&answers).unwrap();
        assert_eq!(answers, json!({ "error": error, "reason": reason }), "{method} {path}");
    }
}

/// No request makes the layer panic or answer with an internal error.
#[tokio::test]
async fn nonsense_is_answered() {
    const PATHS: [&str; 14] = [
        "/",
        "/_up",
        "/_all_dbs",
        "/db",
        "/db/",
        "/%FF",
        "/db/_all_docs",
        "/db/_bulk_docs",
        "/db/_design/x",
        "/db/x",
        "/db/%00",
        "/db/_x",
        "/db/x/y",
        "/_/x",
    ];
    const QUERIES: [&str; 12] = [
        "",
        "?",
        "?rev=",
        "?rev=1-0",
        "?rev=18446744073709551615-00000000000000000000000000000000",
        "?limit=-1",
        "?limit=0",
        "?startkey=1",
        "?startkey=%22%22",
        "?startkey=%22z%22&endkey=%22a%22",
        "?%FF=%FF",
        "?rev=1&rev=2",
    ];
    const BODIES: [&str; 16] = [
        "",
        "{",
        "null",
        "[]",
        "7",
        "{}",
        r#"{"docs":7}"#,
        r#"{"docs":[null,[],{}]}"#,
        r#"{"docs":[{"_id":7}]}"#,
        r#"{"docs":[{"_id":"x"},{"_id":"_"}]}"#,
        r#"{"keys":[null,"","x",7]}"#,
        r#"{"keys":7}"#,
        r#"{"_id":"","_rev":7,"_deleted":7}"#,
        r#"{"_rev":"18446744073709551615-00000000000000000000000000000000"}"#,
        r#"{"a":1e999}"#,
        "\u{0}",
    ];
    let mut dice = common::dice();
    let fixture = CouchFixture::new().await;
    for _ in 0..4_000 {
        let method = dice.choice(["GET", "HEAD", "PUT", "POST", "DELETE", "PATCH"]).unwrap();
        let path = format!("{}{}", dice.choice(PATHS).unwrap(), dice.choice(QUERIES).unwrap());
        let body = dice.choice(BODIES).unwrap();
        let request = Request::builder().method(method).uri(&path).body(Body::from(body)).unwrap();
        let status = fixture.raw(request).await.status().as_u16();
        assert!((200..500).contains(&status) || status == 501, "{method} {path} {body}: {status}");
    }
}
