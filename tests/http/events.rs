//! Tests events that clients post, which refer to databases by name.

use std::collections::BTreeSet;

use notibus::{
    Bus, DbName, Dispatcher, DispatcherOptions, EventKind,
    http::{Api, ApiOptions, Server, ServerOptions},
    store::{
        Store, StoreError,
        testing::{Attempt, CommitFault, Faults, Operation, Trace},
    },
};

use crate::{
    client::{Answer, ask, get},
    common::{self, joined, narrow_bus, until},
    fixture::{HttpFixture, quick},
};

async fn fixture() -> HttpFixture {
    let options = ApiOptions::default().body_len_max(10_000);
    HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.events().merge(api.db_updates()))
        .await
}

/// Starts a server on `store` that records events, but no notifier to fold them.
async fn recorder(store: &Store) -> (Bus, Dispatcher, Server) {
    let bus = narrow_bus(store).await;
    let dispatcher = bus.dispatcher(DispatcherOptions::default()).await.unwrap();
    let api = Api::start(&bus, &dispatcher, ApiOptions::default()).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = Server::start(listener, api.events(), ServerOptions::default(), store.env()).unwrap();
    (bus, dispatcher, server)
}

async fn post(fixture: &HttpFixture, body: &str) -> Answer {
    ask(fixture.at(), "POST", "/_notibus/events", "", body).await
}

/// Returns the row of `name` after all folds.
async fn row(fixture: &HttpFixture, name: &str) -> notibus::Notification {
    until("the folds", async || fixture.bus.is_drained().await.unwrap()).await;
    fixture.bus.feed().newest(&name.parse().unwrap()).await.unwrap().unwrap()
}

#[tokio::test]
async fn instances_follow_from_what_is_known_of_a_name() {
    let fixture = fixture().await;
    let answer = post(
        &fixture,
        r#"[{"db":"a","type":"created"},{"db":"a","type":"updated"},{"db":"a","type":"ddoc_updated","doc":"_design/x"},
            {"db":"b","type":"updated","doc":"y"}]"#,
    )
    .await;
    assert_eq!((answer.head.status, &*answer.body), (201, "{\"ok\":true,\"recorded\":4}\n"));
    let first = row(&fixture, "a").await;
    assert_eq!(first.totals, common::counts([1, 0, 1, 1]));
    let ddocs = fixture.bus.feed().ddocs(&first.db(), notibus::Sequence::MIN).await.unwrap();
    assert_eq!((ddocs.ids[0].0.as_str(), ddocs.nameless), ("_design/x", None));
    let older = row(&fixture, "b").await;
    assert_eq!((older.created_at, older.totals), (None, common::counts([0, 0, 1, 0])));

    // Both events belong to the same creation, before and after the fold.
    post(&fixture, r#"[{"db":"a","type":"updated"}]"#).await;
    post(&fixture, r#"[{"db":"a","type":"updated"}]"#).await;
    let same = row(&fixture, "a").await;
    assert_eq!((same.instance, same.totals), (first.instance, common::counts([1, 0, 3, 1])));

    // The database is deleted and created again at once. An event for the deleted instance does not bring it back.
    post(&fixture, r#"[{"db":"b","type":"deleted"},{"db":"b","type":"updated"}]"#).await;
    let deleted = row(&fixture, "b").await;
    assert!(deleted.is_deleted() && deleted.instance == older.instance);
    post(&fixture, r#"[{"db":"b","type":"updated"}]"#).await;
    assert!(row(&fixture, "b").await.is_deleted());
    post(
        &fixture,
        r#"[{"db":"b","type":"created"},{"db":"b","type":"deleted"},{"db":"b","type":"created"}]"#,
    )
    .await;
    let again = row(&fixture, "b").await;
    assert!(!again.is_deleted() && again.instance != older.instance);

    // The database is created although it exists, so the bus must have missed its deletion.
    post(&fixture, r#"[{"db":"a","type":"created"}]"#).await;
    let again = row(&fixture, "a").await;
    assert_eq!(
        (again.totals, again.replaced.unwrap().instance),
        (common::counts([1, 0, 0, 0]), first.instance)
    );
    assert_eq!(fixture.bus.stats().stale_events, 0);
}

#[tokio::test]
async fn all_or_nothing() {
    let fixture = fixture().await;
    for (body, status, named) in [
        (r#"[{"db":"a","type":"created"},{"db":"","type":"updated"}]"#.to_owned(), 400, "Event 2"),
        (r#"[{"db":"a","type":"created"},{"db":"b","type":"renamed"}]"#.to_owned(), 400, "Event 2"),
        (r#"[{"db":"a","type":"created","document":"x"}]"#.to_owned(), 400, "document"),
        (r#"{"db":"a","type":"created"}"#.to_owned(), 400, "body"),
        (r#"[{"db":"a","type":"created"}"#.to_owned(), 400, "body"),
        (String::new(), 400, "body"),
        (format!("[{}]", " ".repeat(10_000)), 413, "10000 bytes"),
        (format!(r#"[{{"db":"a","type":"ddoc_updated","doc":"{}"}}]"#, "x".repeat(2_000)), 400, "Event 1"),
        (r#"[{"db":"a","type":"created"},{"":0}]"#.to_owned(), 400, "Event 2"),
        (r#"[{"db":"a","type":"created"}"#.to_owned(), 400, "must look like"),
        (r#"[{"db":"a","type":"created"}] []"#.to_owned(), 400, "must look like"),
    ] {
        let answer = post(&fixture, &body).await;
        assert_eq!(answer.head.status, status, "{body}");
        assert!(answer.json()["reason"].as_str().unwrap().contains(named), "{body}: {answer:?}");
    }
    let from_a_page = "Origin: http://example.org\r\nContent-Type: text/plain\r\n";
    let body = r#"[{"db":"a","type":"created"}]"#;
    let page = ask(fixture.at(), "POST", "/_notibus/events", from_a_page, body).await;
    assert_eq!(page.head.status, 403, "a page of anyone in a browser on this machine");
    let get = get(fixture.at(), "/_notibus/events").await;
    assert_eq!((get.head.status, get.head.headers["allow"].as_str()), (405, "POST"));
    assert_eq!(post(&fixture, "[]").await.body, "{\"ok\":true,\"recorded\":0}\n");
    assert!(fixture.bus.is_drained().await.unwrap());
    assert_eq!(fixture.bus.stats().folded.total(), 0);
}

#[tokio::test]
async fn all_events_of_a_request_are_one_transaction() {
    let trace = Trace::new(&Store::memory());
    let (_bus, _dispatcher, server) = recorder(&trace.store()).await;
    trace.take();
    let body = r#"[{"db":"a","type":"created"},{"db":"b","type":"updated"},{"db":"c","type":"deleted"}]"#;
    assert_eq!(ask(server.local_addr(), "POST", "/_notibus/events", "", body).await.head.status, 201);
    // Each database has five lanes; a ring of the doorbell adds to fewer lanes.
    let is_event = |operation: &&Operation| matches!(operation, Operation::Atomic { operand, .. } if operand.len() == 40);
    let events = |attempt: &Attempt| attempt.operations.iter().filter(is_event).count();
    let counts: Vec<_> = trace.take().iter().map(events).filter(|&count| count > 0).collect();
    assert_eq!(counts, [3]);
}

/// Regression: two parallel requests for an unknown name did not agree on its instance, so they created two databases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_meet_agree_on_what_a_name_stands_for() {
    let fixture = fixture().await;
    let bodies = [
        r#"[{"db":"X","type":"updated"},{"db":"Y","type":"created"}]"#,
        r#"[{"db":"X","type":"updated"},{"db":"Y","type":"updated"}]"#,
    ];
    for round in 0..20 {
        let posts = (0..8).map(|n| {
            let body = bodies[n % 2].replace('X', &format!("x{round}")).replace('Y', &format!("y{round}"));
            let fixture = &fixture;
            async move { assert_eq!(post(fixture, &body).await.head.status, 201) }
        });
        futures_util::future::join_all(posts).await;
        let x = row(&fixture, &format!("x{round}")).await;
        assert_eq!(x.totals, common::counts([0, 0, 8, 0]), "all of them on one instance");
    }
    // All recorded events are folded, the last events of `y` shortly after those of `x`, and none counts as stale.
    let folded = || {
        let folded = fixture.bus.stats().folded;
        folded.total() - folded.deleted
    };
    until("the last fold", async || folded() >= 20 * 16).await;
    assert_eq!(folded(), 20 * 16);
    assert_eq!(fixture.bus.stats().stale_events, 0);
    let names: BTreeSet<DbName> = get(fixture.at(), "/_db_updates")
        .await
        .rows()
        .iter()
        .map(|(name, _)| name.parse().unwrap())
        .collect();
    assert_eq!(names.len(), 40);
}

#[tokio::test]
async fn an_unknown_result_counts_once() {
    let faults = Faults::new(&Store::memory());
    let (bus, _dispatcher, server) = recorder(&faults.store()).await;
    faults.script_commits([CommitFault::After(StoreError::COMMIT_UNKNOWN_RESULT)]);
    let body = r#"[{"db":"a","type":"updated"}]"#;
    assert_eq!(ask(server.local_addr(), "POST", "/_notibus/events", "", body).await.head.status, 201);
    let _notifier = joined(&bus).await.notifier(quick()).await.unwrap();
    until("the fold", async || bus.stats().folded.total() > 0).await;
    let row = bus.feed().newest(&"a".parse().unwrap()).await.unwrap().unwrap();
    assert_eq!((row.totals.total(), row.kinds.contains(EventKind::Updated)), (1, true));
}

/// Regression: a post that was repeated after a time-out was not recognized, so it replaced the database that the first post had created.
#[tokio::test]
async fn a_repeated_post_is_known_by_its_key() {
    let fixture = fixture().await;
    let post = async |key: &str, body: &str| {
        ask(fixture.at(), "POST", "/_notibus/events", &format!("Idempotency-Key: {key}\r\n"), body).await
    };
    let body = r#"[{"db":"a","type":"created"},{"db":"a","type":"updated"}]"#;
    let posts = futures_util::future::join_all((0..8).map(|_| post("k1", body))).await;
    assert!(
        posts
            .iter()
            .all(|answer| (answer.head.status, &*answer.body) == (201, "{\"ok\":true,\"recorded\":2}\n"))
    );
    let replayed =
        posts.iter().filter(|answer| answer.head.headers.contains_key("idempotency-replayed")).count();
    assert_eq!(replayed, 7);
    let first = row(&fixture, "a").await;
    assert_eq!((first.totals, first.replaced), (common::counts([1, 0, 1, 0]), None));
    // A different body with the same key is a mistake; a different key makes it a different request.
    let other = post("k1", r#"[{"db":"b","type":"created"}]"#).await;
    assert_eq!((other.head.status, &other.json()["error"]), (422, &"idempotency_key_reused".into()));
    // Regression: the server ignored the second of two keys, so it recognized a repeated request only by the first one.
    let two = "Idempotency-Key: x\r\nIdempotency-Key: y\r\n";
    let body = r#"[{"db":"a","type":"updated"}]"#;
    assert_eq!(ask(fixture.at(), "POST", "/_notibus/events", two, body).await.head.status, 400);
    assert_eq!(post("k2", r#"[{"db":"a","type":"updated"}]"#).await.head.status, 201);
    assert_eq!(row(&fixture, "a").await.totals, common::counts([1, 0, 2, 0]));
    assert_eq!(post(&"k".repeat(300), body).await.head.status, 400);
}

#[tokio::test]
async fn a_layer_that_knows_its_creations_says_which_one_it_means() {
    let fixture = fixture().await;
    let [one, two] = ["1", "2"].map(|digit| digit.repeat(32));
    let event =
        |kind: &str, instance: &str| format!(r#"{{"db":"a","type":"{kind}","instance":"{instance}"}}"#);
    let created = format!("[{}]", event("created", &one));
    for _ in 0..3 {
        assert_eq!(post(&fixture, &created).await.head.status, 201);
    }
    let first = row(&fixture, "a").await;
    assert_eq!(
        (first.instance.to_string(), first.totals, first.replaced),
        (one.clone(), common::counts([1, 0, 0, 0]), None)
    );
    post(&fixture, &format!("[{},{}]", event("updated", &one), event("created", &two))).await;
    // A late event of the first instance changes nothing.
    post(
        &fixture,
        &format!("[{},{},{}]", event("updated", &one), event("deleted", &one), event("updated", &two)),
    )
    .await;
    let second = row(&fixture, "a").await;
    assert_eq!((second.instance.to_string(), second.is_deleted()), (two, false));
    assert_eq!(second.totals, common::counts([1, 0, 1, 0]));
    let bad = post(&fixture, &format!("[{}]", event("updated", "xyz"))).await;
    assert_eq!(bad.head.status, 400, "{bad:?}");
}
