//! Tests who may send which requests.

use notibus::{
    Error, EventKind,
    http::{Api, ApiOptions, Cors, Hosts, Server, ServerOptions, axum::Router},
    store::Database,
};

use crate::{
    client::{Connection, ask, get},
    common::db,
    fixture::{HttpFixture, access, basic, bearer, line, secret},
};

#[tokio::test]
async fn only_admins_get_the_feed() {
    let options = ApiOptions::default().access(access(&[line("anna"), line("bob")]));
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, bus| {
        let changes = api.changes(&bus.changes(), api.recorded_databases());
        api.db_updates().merge(changes).merge(api.events()).merge(api.status())
    })
    .await;

    let none = get(fixture.at(), "/_db_updates").await;
    assert_eq!(none.head.status, 401);
    assert_eq!(none.body, "{\"error\":\"unauthorized\",\"reason\":\"You are not a server admin.\"}\n");
    // With `Basic`, a browser would show its user a dialog; CouchDB sends it on request only.
    assert!(none.head.headers["www-authenticate"].starts_with("Bearer "));
    let asks = ask(fixture.at(), "GET", "/_db_updates", "X-CouchDB-WWW-Authenticate: Basic\r\n", "").await;
    assert!(asks.head.headers["www-authenticate"].starts_with("Basic "));
    // Regression: clients of CouchDB that ask to be spared the dialog got it.
    let spared = ask(fixture.at(), "GET", "/_db_updates", "X-CouchDB-WWW-Authenticate: Cookie\r\n", "").await;
    assert!(spared.head.headers["www-authenticate"].starts_with("Bearer "));
    // Names that exist and others get the same answer.
    for wrong in
        [basic("anna", "wrong"), basic("anna", &secret("bob")), basic("carl", "wrong"), bearer("carl")]
    {
        let wrong = ask(fixture.at(), "GET", "/_db_updates", &wrong, "").await;
        assert_eq!(wrong.head.status, 401);
        assert_eq!(
            wrong.body,
            "{\"error\":\"unauthorized\",\"reason\":\"Name or password is incorrect.\"}\n"
        );
    }
    for (method, target) in [
        ("GET", "/_db_updates/"),
        ("GET", "/_notibus/status"),
        ("GET", "/_notibus/status/"),
        ("GET", "/_notibus/metrics"),
        ("POST", "/_notibus/events"),
        ("POST", "/_notibus/events/"),
        ("GET", "/a/_changes"),
        ("GET", "/a/_changes/"),
        ("GET", "/a/_changes/_meta"),
        ("GET", "/a/_changes/1"),
        ("PUT", "/_changes_shards/a"),
    ] {
        assert_eq!(ask(fixture.at(), method, target, "", "[]").await.head.status, 401, "{target}");
    }
    for header in [&basic("anna", &secret("anna")), &bearer("bob")] {
        assert_eq!(ask(fixture.at(), "GET", "/_db_updates", header, "").await.head.status, 200);
        assert_eq!(ask(fixture.at(), "GET", "/_notibus/status", header, "").await.head.status, 200);
        // Regression: the second one was ignored, although a proxy in front may have checked that one.
        let two = format!("{header}{header}");
        assert_eq!(ask(fixture.at(), "GET", "/_db_updates", &two, "").await.head.status, 400);
    }
    assert_eq!(get(fixture.at(), "/_notibus/health/live").await.head.status, 200);
    assert_eq!(get(fixture.at(), "/_notibus/health/ready").await.head.status, 200);
}

/// Regression: any web page could use a server on a loopback address through the browser of a user who looked at the page.
#[tokio::test]
async fn an_open_server_answers_no_pages_from_elsewhere() {
    let limits = ServerOptions::default().hosts(Hosts::Local(Vec::new()));
    let fixture = HttpFixture::with(ApiOptions::default(), limits, |api, _, _| {
        api.db_updates().merge(api.events()).merge(api.status()).merge(api.welcome())
    })
    .await;
    let body = r#"[{"db":"a","type":"created"}]"#;
    for (target, host, origin, status, error) in [
        ("/", "rebound.example:5985", "", 400, "bad_request"),
        ("/_db_updates", "rebound.example:5985", "", 400, "bad_request"),
        ("/_notibus/events", "rebound.example", "http://rebound.example", 400, "bad_request"),
        ("/_notibus/events", "localhost", "http://page.example", 403, "forbidden"),
        ("/_db_updates", "localhost:5985", "http://page.example", 403, "forbidden"),
        ("/_db_updates", "localhost:5985", "null", 403, "forbidden"),
    ] {
        let mut connection = Connection::open(fixture.at()).await;
        let origin = if origin.is_empty() { String::new() } else { format!("Origin: {origin}\r\n") };
        let length = body.len();
        let head =
            format!("POST {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n{origin}\r\n");
        connection.send(&(head + body)).await;
        let answer = connection.answer().await;
        assert_eq!(answer.head.status, status, "{target} {host} {origin}");
        assert_eq!(answer.json()["error"], error);
    }
    assert!(fixture.bus.is_drained().await.unwrap());
    assert_eq!(fixture.bus.stats().folded.total(), 0, "nothing was recorded");
    assert_eq!(ask(fixture.at(), "POST", "/_notibus/events", "", body).await.head.status, 201);
    let same = "Origin: http://localhost\r\n";
    assert_eq!(ask(fixture.at(), "GET", "/_db_updates", same, "").await.head.status, 200);
}

/// Regression: a server with the options of the documentation answered to every name. Any page that let its own name stand for
/// 127.0.0.1 could read all of it and reshard every database.
#[tokio::test]
async fn a_server_with_the_default_options_answers_no_rebound_page() {
    let fixture = HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, bus| {
        let changes = api.changes(&bus.changes(), api.recorded_databases());
        api.db_updates().merge(api.status()).merge(changes)
    })
    .await;
    let mut refused = 0;
    for (method, target) in
        [("GET", "/_db_updates"), ("GET", "/_notibus/status"), ("PUT", "/_changes_shards/a")]
    {
        for host in ["rebound.example", "rebound.example:5985"] {
            let mut connection = Connection::open(fixture.at()).await;
            let length = "Content-Length: 12\r\n";
            connection
                .send(&format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n{length}\r\n{{\"shards\":4}}"))
                .await;
            let answer = connection.answer().await;
            assert_eq!(answer.head.status, 400, "{method} {target} of {host}: {}", answer.body);
            assert_eq!(answer.json()["reason"], "Invalid host header");
            refused += 1;
        }
    }
    assert_eq!(get(fixture.at(), "/_db_updates").await.head.status, 200);
    let foreign = ask(fixture.at(), "GET", "/_db_updates", "Origin: http://page.example\r\n", "").await;
    assert_eq!(foreign.head.status, 403);
    // Regression: no count showed that clients were refused, as happens if a name is missing in the configuration.
    let metrics = get(fixture.at(), "/_notibus/metrics").await.body;
    for (what, count) in [("host", refused), ("origin", 1)] {
        let line = format!("notibus_http_refused_total{{what=\"{what}\"}} {count}");
        assert!(metrics.lines().any(|it| it == line), "{line}\n{metrics}");
    }
}

async fn start(address: &str, limits: ServerOptions) -> notibus::Result<Server> {
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    Server::start(listener, Router::new(), limits, Database::memory().env())
}

/// Regression: the server listened for other machines although the default access is open to everyone.
#[tokio::test]
async fn it_listens_for_other_machines_only_if_that_is_asked_for() {
    for address in ["0.0.0.0:0", "[::]:0"] {
        let refused = start(address, ServerOptions::default()).await.unwrap_err();
        assert!(matches!(refused, Error::Invalid { what: "address", .. }), "{refused}");
        assert!(refused.to_string().contains("is_public"), "{refused}");
        drop(start(address, ServerOptions::default().is_public(true)).await.unwrap());
    }
    for address in ["127.0.0.1:0", "127.1.2.3:0", "[::1]:0"] {
        drop(start(address, ServerOptions::default()).await.unwrap());
    }
}

/// Regression: a name with a port was accepted, but never matched, so every client that used it was refused.
#[tokio::test]
async fn a_name_that_can_never_match_is_refused_at_start() {
    for name in [
        "db.example:5985",
        "http://db.example",
        "db.example/",
        "*.example",
        "",
        "a b",
        "[::1]:80",
        "d\u{f6}.example",
    ] {
        let hosts = Hosts::Local(vec!["fine.example".to_owned(), name.to_owned()]);
        let refused = start("127.0.0.1:0", ServerOptions::default().hosts(hosts)).await;
        let refused = refused.expect_err(name);
        assert!(matches!(refused, Error::Invalid { what: "host", .. }), "{refused}");
        assert!(refused.to_string().contains(&format!("{name:?}")), "{refused}");
    }
    for name in ["db.example", "DB_1.example.", "192.168.0.7", "2001:db8::1", "[2001:db8::1]"] {
        let hosts = Hosts::Local(vec![name.to_owned()]);
        drop(start("127.0.0.1:0", ServerOptions::default().hosts(hosts)).await.expect(name));
    }
}

/// Regression: behind a proxy that sends its own upstream name as `Host`, an open server took everyone for local.
#[tokio::test]
async fn an_open_server_answers_no_client_behind_a_proxy() {
    let fixture = HttpFixture::new().await;
    for header in [
        "X-Forwarded-For: 203.0.113.7",
        "Forwarded: for=203.0.113.7",
        "X-Real-IP: 203.0.113.7",
        "Via: 1.1 proxy",
    ] {
        let answer = ask(fixture.at(), "GET", "/_db_updates", &format!("{header}\r\n"), "").await;
        assert_eq!((answer.head.status, &answer.json()["error"]), (403, &"forbidden".into()), "{header}");
    }
    let public = ServerOptions::default().is_public(true);
    let fixture = HttpFixture::with(ApiOptions::default(), public, |api, _, _| api.db_updates()).await;
    let forwarded = "X-Forwarded-For: 203.0.113.7\r\n";
    assert_eq!(ask(fixture.at(), "GET", "/_db_updates", forwarded, "").await.head.status, 200);
}

#[tokio::test]
async fn a_request_names_one_host_and_a_script_from_elsewhere_is_refused() {
    let fixture = HttpFixture::new().await;
    for (head, status) in [
        ("GET /_db_updates HTTP/1.1\r\n\r\n", 400),
        ("GET /_db_updates HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        ("GET /_db_updates HTTP/1.1\r\nHost: x@localhost\r\n\r\n", 400),
        ("GET /_db_updates HTTP/1.0\r\n\r\n", 200),
        ("GET /_db_updates HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n\r\n", 403),
    ] {
        let mut connection = Connection::open(fixture.at()).await;
        connection.send(head).await;
        assert_eq!(connection.head().await.status, status, "{head}");
    }
}

/// Regression: the parser's own refusals had an empty body.
#[tokio::test]
async fn every_refusal_says_what_is_wrong() {
    let fixture = HttpFixture::new().await;
    let long = format!("GET /_db_updates HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
    for (request, status, error) in [
        ("nonsense\r\n\r\n", 400, "bad_request"),
        ("GET / HTTP/1.1\r\nbad header\r\n\r\n", 400, "bad_request"),
        (&*long, 431, "too_large"),
    ] {
        let mut connection = Connection::open(fixture.at()).await;
        connection.send(request).await;
        let answer = connection.answer().await;
        assert_eq!((answer.head.status, &answer.json()["error"]), (status, &error.into()), "{answer:?}");
        assert!(answer.json()["reason"].is_string());
    }
    let answer = get(fixture.at(), "/_db_updates").await;
    assert_eq!(answer.head.headers["server"], concat!("Notibus/", env!("CARGO_PKG_VERSION")));
    assert_eq!(answer.head.headers["x-couch-request-id"].len(), 10);
    // As in CouchDB, a client may give its request an id.
    for (id, is_kept) in [("My-request_1", true), ("a b", false), ("", false), (&*"x".repeat(37), false)] {
        let header = format!("X-Couch-Request-ID: {id}\r\n");
        let answer = ask(fixture.at(), "GET", "/_db_updates", &header, "").await;
        assert_eq!(answer.head.headers["x-couch-request-id"] == id, is_kept, "{id}");
    }
}

/// Regression: a layer's refusals with an empty body said "This is no request of HTTP.", even in answers to HEAD, where clients took
/// that body for the beginning of the next answer.
#[tokio::test]
async fn refusals_of_a_layer_stay_as_they_are() {
    let fixture =
        HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |_, _, _| Router::new()).await;
    for method in ["GET", "HEAD"] {
        let mut connection = Connection::open(fixture.at()).await;
        for _ in 0..2 {
            connection.send(&format!("{method} /none HTTP/1.1\r\nHost: localhost\r\n\r\n")).await;
            let answer = connection.answer().await;
            assert_eq!((answer.head.status, &*answer.body), (404, ""), "{method}");
            assert!(answer.head.headers.contains_key("x-couch-request-id"), "{method}");
        }
    }
}

/// Regression: a client that had closed its own side was cut off before its answer.
#[tokio::test]
async fn a_client_that_has_ended_its_side_gets_its_answer() {
    let fixture = HttpFixture::new().await;
    for n in 0..300 {
        fixture.event(&db(&format!("{}{n}", "x".repeat(500)), 1), EventKind::Created).await;
    }
    for target in
        ["/_db_updates", "/_db_updates?feed=longpoll", "/_db_updates?feed=continuous&timeout=0", "/_nothing"]
    {
        let mut connection = Connection::get(fixture.at(), target).await;
        tokio::io::AsyncWriteExt::shutdown(&mut connection.socket).await.unwrap();
        let answer = connection.answer().await;
        assert!(target == "/_nothing" || answer.body.matches("db_name").count() == 300, "{target}");
    }
}

#[tokio::test]
async fn pages_of_origins_that_are_named_may_ask() {
    let cors = Cors { origins: vec!["https://app.example".to_owned()], credentials: true, ..Cors::default() };
    let limits = ServerOptions::default().cors(Some(cors));
    let fixture =
        HttpFixture::with(ApiOptions::default(), limits, |api, _, _| api.db_updates().merge(api.events()))
            .await;
    let page = "Origin: https://app.example\r\nSec-Fetch-Site: cross-site\r\n";
    let answer = ask(fixture.at(), "GET", "/_db_updates", page, "").await;
    assert_eq!(answer.head.status, 200);
    for (header, value) in [
        ("access-control-allow-origin", "https://app.example"),
        ("access-control-allow-credentials", "true"),
        ("vary", "Origin"),
    ] {
        assert_eq!(answer.head.headers[header], value);
    }
    assert!(answer.head.headers["access-control-expose-headers"].contains("etag"));
    let asks = format!(
        "{page}Access-Control-Request-Method: GET\r\nAccess-Control-Request-Headers: authorization\r\n"
    );
    let preflight = ask(fixture.at(), "OPTIONS", "/_db_updates", &asks, "").await;
    assert_eq!((preflight.head.status, &*preflight.head.headers["access-control-max-age"]), (204, "600"));
    assert!(preflight.head.headers["access-control-allow-methods"].contains("GET"));
    assert!(preflight.head.headers["access-control-allow-headers"].contains("authorization"));
    let other = ask(fixture.at(), "GET", "/_db_updates", "Origin: https://evil.example\r\n", "").await;
    assert_eq!(other.head.status, 403);
    assert!(!other.head.headers.contains_key("access-control-allow-origin"));
    assert_eq!(other.head.headers["vary"], "Origin");
    // Regression: a shared cache gave pages the answer to a request that came from no page, without the headers that allow them
    // to read it.
    let none = get(fixture.at(), "/_db_updates").await;
    assert_eq!((none.head.status, &*none.head.headers["vary"]), (200, "Origin"));
    assert_eq!(ask(fixture.at(), "POST", "/_notibus/events", page, "[]").await.head.status, 403);
}

/// Regression: every caller with credentials could do everything, and all tokens together counted as one client.
#[tokio::test]
async fn callers_may_do_what_their_roles_say() {
    let lines = [
        line("reader") + " roles=_db_updates reads=shop/*",
        line("writer") + " roles=_events",
        line("scraper") + " roles=_metrics",
        line("admin"),
    ];
    let options = ApiOptions::default().access(access(&lines)).feeds_per_client_max(1);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, bus| {
        let databases = api.recorded_databases();
        let changes = api.changes(&bus.changes(), api.recorded_databases());
        let known = api.db_updates().merge(changes).merge(api.events()).merge(api.status());
        known.merge(api.catalogue(databases)).merge(api.sessions())
    })
    .await;
    for name in ["shop/a", "logs"] {
        fixture.event(&db(name, 1), EventKind::Created).await;
    }
    // The statuses are those of reader, writer, scraper and admin.
    for (method, target, statuses) in [
        ("GET", "/_db_updates", [200, 401, 401, 200]),
        ("GET", "/_all_dbs", [200, 401, 401, 200]),
        ("GET", "/shop%2Fa", [200, 403, 403, 200]),
        ("GET", "/logs", [403, 403, 403, 200]),
        // There are no changes of it, but only callers that may read it learn this.
        ("GET", "/shop%2Fa/_changes", [404, 403, 403, 404]),
        ("GET", "/logs/_changes", [403, 403, 403, 404]),
        ("GET", "/logs/_changes/1", [403, 403, 403, 404]),
        ("GET", "/logs/_changes/_meta", [403, 403, 403, 404]),
        ("PUT", "/_changes_shards/shop%2Fa", [401, 401, 401, 400]),
        ("POST", "/_notibus/events", [403, 201, 403, 201]),
        ("GET", "/_notibus/status", [401, 401, 200, 200]),
        ("GET", "/_notibus/metrics", [401, 401, 200, 200]),
    ] {
        for (name, status) in ["reader", "writer", "scraper", "admin"].into_iter().zip(statuses) {
            let header = bearer(name);
            let body = if method == "GET" { "" } else { "[]" };
            let answer = ask(fixture.at(), method, target, &header, body).await;
            assert_eq!(answer.head.status, status, "{name} {method} {target}: {}", answer.body);
        }
    }
    let who = ask(fixture.at(), "GET", "/_session", &bearer("reader"), "").await.json();
    assert_eq!(who["userCtx"], serde_json::json!({ "name": "reader", "roles": ["_db_updates"] }));
    // Each name counts as a client of its own.
    let ask_live = |name| {
        let header = bearer(name);
        format!("GET /_db_updates?feed=continuous&since=now HTTP/1.1\r\nHost: localhost\r\n{header}\r\n")
    };
    let mut connections = Vec::new();
    for (name, status) in [("reader", 200), ("admin", 200), ("reader", 429)] {
        let mut connection = Connection::open(fixture.at()).await;
        connection.send(&ask_live(name)).await;
        assert_eq!(connection.head().await.status, status, "{name}");
        connections.push(connection);
    }
}

/// The server believes only known proxies about their clients.
#[tokio::test]
async fn a_proxy_that_is_known_is_believed() {
    for is_known in [true, false] {
        let options = ApiOptions::default().feeds_per_client_max(1);
        let proxies = if is_known { vec!["127.0.0.1".parse().unwrap()] } else { Vec::new() };
        let limits = ServerOptions::default().is_public(true).proxies(proxies);
        let fixture = HttpFixture::with(options, limits, |api, _, _| api.db_updates()).await;
        let mut feeds = Vec::new();
        for (forwarded, status) in [
            ("198.51.100.9, 203.0.113.1", 200),
            // What stands further to the left anybody may write.
            ("203.0.113.1", 429),
            ("203.0.113.1, 203.0.113.2, 127.0.0.1", if is_known { 200 } else { 429 }),
            ("203.0.113.2", 429),
        ] {
            let mut feed = Connection::open(fixture.at()).await;
            let target = "/_db_updates?feed=continuous&since=now";
            let header = format!("X-Forwarded-For: {forwarded}\r\n");
            feed.send(&format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n")).await;
            assert_eq!(feed.head().await.status, status, "{is_known} {forwarded}");
            feeds.push(feed);
        }
    }
}

/// A proxy may cache the answer to a longpoll at a position, and nothing else.
#[tokio::test]
async fn only_a_longpoll_at_a_position_is_for_all() {
    let options = ApiOptions::default().longpoll_max_age(Some(std::time::Duration::from_secs(2)));
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.db_updates()).await;
    let first = fixture.event(&db("a", 1), EventKind::Created).await;
    fixture.event(&db("b", 1), EventKind::Created).await;
    let seq = first.sequence;
    let at = format!("feed=longpoll&since={seq}");
    for (query, expected) in [
        (&*at, "public, max-age=2"),
        ("feed=longpoll&since=0", "must-revalidate"),
        ("feed=longpoll&since=now&timeout=0", "must-revalidate"),
        (&*format!("since={seq}"), "must-revalidate"),
    ] {
        let answer = get(fixture.at(), &format!("/_db_updates?{query}")).await;
        assert_eq!(answer.head.headers["cache-control"], expected, "{query}");
    }
    let options = ApiOptions::default()
        .access(access(&[line("anna")]))
        .longpoll_max_age(Some(std::time::Duration::from_secs(2)));
    assert!(matches!(Api::start(&fixture.bus, &fixture.dispatcher, options), Err(Error::Invalid { .. })));
}
