//! Tests which callers may send which requests.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use notibus::{
    Error, EventKind,
    http::{
        ApiOptions, Authorize, Caller, Credentials, Failure, Grant, Server, ServerOptions,
        axum::{Router, http::request::Parts},
    },
    store::Store,
};
use tokio::io::AsyncWriteExt;

use crate::{
    client::{Connection, ask, get},
    common::{db, until, within},
    fixture::{HttpFixture, basic, bearer, credentials, line, secret},
};

#[tokio::test]
async fn only_admins_get_the_feed() {
    let options = ApiOptions::default().authorize(credentials(&[line("anna"), line("bob")]));
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, bus| {
        let changes = api.changes(&bus.changes(), api.recorded_databases());
        api.db_updates().merge(changes).merge(api.events()).merge(api.status())
    })
    .await;

    let none = get(fixture.at(), "/_db_updates").await;
    assert_eq!(none.head.status, 401);
    assert_eq!(none.body, "{\"error\":\"unauthorized\",\"reason\":\"You are not a server admin.\"}\n");
    // `Basic` would make a browser show its user a dialog, so CouchDB sends it only on request.
    assert!(none.head.headers["www-authenticate"].starts_with("Bearer "));
    let asks = ask(fixture.at(), "GET", "/_db_updates", "X-CouchDB-WWW-Authenticate: Basic\r\n", "").await;
    assert!(asks.head.headers["www-authenticate"].starts_with("Basic "));
    // Regression: the server sent `Basic` even for this value of the header, so clients of CouchDB that had asked for no dialog got one.
    let spared = ask(fixture.at(), "GET", "/_db_updates", "X-CouchDB-WWW-Authenticate: Cookie\r\n", "").await;
    assert!(spared.head.headers["www-authenticate"].starts_with("Bearer "));
    // Existing and unknown names get the same answer.
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
    ] {
        assert_eq!(ask(fixture.at(), method, target, "", "[]").await.head.status, 401, "{target}");
    }
    for header in [&basic("anna", &secret("anna")), &bearer("bob")] {
        assert_eq!(ask(fixture.at(), "GET", "/_db_updates", header, "").await.head.status, 200);
        assert_eq!(ask(fixture.at(), "GET", "/_notibus/status", header, "").await.head.status, 200);
        // Regression: the server ignored the second header, so a request could pass a proxy that checks only that one.
        let two = format!("{header}{header}");
        assert_eq!(ask(fixture.at(), "GET", "/_db_updates", &two, "").await.head.status, 400);
    }
    assert_eq!(get(fixture.at(), "/_notibus/health/live").await.head.status, 200);
    assert_eq!(get(fixture.at(), "/_notibus/health/ready").await.head.status, 200);
}

/// Regression: a server on a loopback address answered requests from any origin, so any web page could use it through a visitor's browser.
#[tokio::test]
async fn an_open_server_answers_no_pages_from_elsewhere() {
    let fixture = HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, _| {
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

/// Regression: a server with the options from the documentation accepted every host name, so any page whose own name pointed to 127.0.0.1
/// could read everything and reshard every database.
#[tokio::test]
async fn a_server_with_the_default_options_answers_no_rebound_page() {
    let fixture = HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, bus| {
        let changes = api.changes(&bus.changes(), api.recorded_databases());
        api.db_updates().merge(api.status()).merge(changes)
    })
    .await;
    for (method, target) in [("GET", "/_db_updates"), ("GET", "/_notibus/status")] {
        for host in ["rebound.example", "rebound.example:5985"] {
            let mut connection = Connection::open(fixture.at()).await;
            let length = "Content-Length: 12\r\n";
            connection
                .send(&format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n{length}\r\n{{\"shards\":4}}"))
                .await;
            let answer = connection.answer().await;
            assert_eq!(answer.head.status, 400, "{method} {target} of {host}: {}", answer.body);
            assert_eq!(answer.json()["reason"], "Invalid host header");
        }
    }
    assert_eq!(get(fixture.at(), "/_db_updates").await.head.status, 200);
    let foreign = ask(fixture.at(), "GET", "/_db_updates", "Origin: http://page.example\r\n", "").await;
    assert_eq!(foreign.head.status, 403);
}

async fn start(address: &str, limits: ServerOptions) -> notibus::Result<Server> {
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    Server::start(listener, Router::new(), limits, Store::memory().env())
}

/// Regression: the server listened for other machines without `is_public`, so all had its default access, which is open to everyone.
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

/// Regression: the server accepted a host name with a port, which never matched, so every client that used the name was refused.
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
        let hosts = Some(vec!["fine.example".to_owned(), name.to_owned()]);
        let refused = start("127.0.0.1:0", ServerOptions::default().hosts(hosts)).await;
        let refused = refused.expect_err(name);
        assert!(matches!(refused, Error::Invalid { what: "host", .. }), "{refused}");
        assert!(refused.to_string().contains(&format!("{name:?}")), "{refused}");
    }
    for name in ["db.example", "DB_1.example.", "192.168.0.7", "2001:db8::1", "[2001:db8::1]"] {
        let hosts = Some(vec![name.to_owned()]);
        drop(start("127.0.0.1:0", ServerOptions::default().hosts(hosts)).await.expect(name));
    }
}

/// Regression: behind a proxy that sends its upstream name as `Host`, an open server took every client for a local one, so it answered all.
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

/// Sends a request with these header lines, and returns the status of the answer.
async fn status_of(fixture: &HttpFixture, request: &str, lines: &[&str]) -> u16 {
    let mut connection = Connection::open(fixture.at()).await;
    connection.send(&([&[request], lines].concat().join("\r\n") + "\r\n\r\n")).await;
    connection.head().await.status
}

#[tokio::test]
async fn only_names_of_this_machine_are_answered() {
    let serve = async |hosts| {
        let limits = ServerOptions::default().hosts(hosts);
        HttpFixture::with(ApiOptions::default(), limits, |api, _, _| api.db_updates()).await
    };
    let named = serve(Some(["db.example", "2001:db8::1"].map(str::to_owned).to_vec())).await;
    let any = serve(None).await;
    let get = "GET /_db_updates HTTP/1.1";
    for (host, expected) in [
        ("localhost", 200),
        ("LocalHost:5985", 200),
        ("127.0.0.1:5985", 200),
        ("127.1.2.3", 200),
        ("[::1]:5985", 200),
        ("DB.example:80", 200),
        ("[2001:db8:0::1]:80", 200),
        ("evil.example:5985", 400),
        ("localhost.evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("192.168.0.1", 400),
        ("[::2]", 400),
        ("", 400),
        ("a b", 400),
        ("x@localhost", 400),
        ("evil.example@localhost:80", 400),
    ] {
        let line = format!("Host: {host}");
        assert_eq!(status_of(&named, get, &[&line]).await, expected, "{host}");
        let is_host = !host.is_empty() && !host.contains(['@', ' ']);
        assert_eq!(status_of(&any, get, &[&line]).await, if is_host { 200 } else { 400 }, "{host}");
    }
    assert_eq!(status_of(&named, get, &[]).await, 400, "clients of HTTP/1.1 send it");
    assert_eq!(status_of(&named, "GET /_db_updates HTTP/1.0", &[]).await, 200);
    assert_eq!(status_of(&named, get, &["Host: localhost", "Host: localhost"]).await, 400);
    assert_eq!(
        status_of(&named, "GET http://evil.example/_db_updates HTTP/1.1", &["Host: localhost"]).await,
        400
    );
}

/// Regression: the server checked only the origin, which requests for images and scripts lack, so pages from elsewhere could load these.
#[tokio::test]
async fn pages_from_elsewhere_are_not_answered() {
    for is_public in [false, true] {
        let limits = ServerOptions::default().hosts((!is_public).then(Vec::new)).is_public(is_public);
        let fixture = HttpFixture::with(ApiOptions::default(), limits, |api, _, _| api.db_updates()).await;
        let (get, host) = ("GET /_db_updates HTTP/1.1", "Host: localhost:5985");
        for (origin, expected) in [
            ("http://localhost:5985", 200),
            ("http://LOCALHOST:5985", 200),
            ("http://localhost:3000", 403),
            ("http://127.0.0.1:5985", 403),
            ("https://evil.example", 403),
            ("null", 403),
            ("", 403),
        ] {
            let line = format!("Origin: {origin}");
            assert_eq!(status_of(&fixture, get, &[host, &line]).await, expected, "{origin}");
        }
        for (site, mode, expected) in [
            ("cross-site", "no-cors", 403),
            ("same-site", "cors", 403),
            ("same-origin", "cors", 200),
            ("none", "navigate", 200),
            // The user follows a link on a page of another origin.
            ("cross-site", "navigate", 200),
        ] {
            let [site, mode] =
                [("Site", site), ("Mode", mode)].map(|(of, it)| format!("Sec-Fetch-{of}: {it}"));
            assert_eq!(status_of(&fixture, get, &[host, &site, &mode]).await, expected, "{site} {mode}");
        }
    }
}

#[tokio::test]
async fn origins_that_could_never_match_or_let_every_page_in_are_refused() {
    for (origin, credentials, is_public, is_good) in [
        ("https://app.example:8080", true, false, true),
        ("*", false, true, true),
        ("*", true, true, false),
        ("*", false, false, false),
        ("app.example", false, false, false),
        ("https://app.example/", false, false, false),
        ("https://*.example", false, false, false),
        ("https://", false, false, false),
    ] {
        let options = ServerOptions::default()
            .cors_origins(vec![origin.to_owned()])
            .cors_credentials(credentials)
            .is_public(is_public);
        let checked = options.check(([127, 0, 0, 1], 0).into());
        let is_of_origin = matches!(checked, Err(Error::Invalid { what: "origin", .. }));
        assert!(is_of_origin != is_good, "{origin}: {checked:?}");
    }
}

#[tokio::test]
async fn answers_have_an_id_and_say_who_answers() {
    let fixture = HttpFixture::new().await;
    let answer = get(fixture.at(), "/_db_updates").await;
    assert_eq!(answer.head.headers["server"], concat!("Notibus/", env!("CARGO_PKG_VERSION")));
    assert_eq!(answer.head.headers["x-couch-request-id"].len(), 10);
    // As in CouchDB, a client may choose the id of its request.
    for (id, is_kept) in [("My-request_1", true), ("", false), (&*"x".repeat(37), false)] {
        let header = format!("X-Couch-Request-ID: {id}\r\n");
        let answer = ask(fixture.at(), "GET", "/_db_updates", &header, "").await;
        assert_eq!(answer.head.headers["x-couch-request-id"] == id, is_kept, "{id}");
    }
}

/// A client that closes its sending side looks like one that is gone, and hyper treats it as such: the feed ends at once and is freed,
/// whatever its heartbeat.
#[tokio::test]
async fn a_client_that_closes_its_sending_side_leaves_nothing() {
    let fixture = HttpFixture::new().await;
    let before = fixture.dispatcher.subscribers();
    let mut halves = Vec::new();
    for feed in ["longpoll", "continuous", "eventsource"].repeat(10) {
        let target = format!("/_db_updates?feed={feed}&since=now&heartbeat=60000");
        let mut connection = Connection::get(fixture.at(), &target).await;
        assert_eq!(connection.head().await.status, 200);
        connection.socket.shutdown().await.unwrap();
        halves.push(connection);
    }
    until("the feeds to be freed", async || fixture.dispatcher.subscribers() == before).await;
    drop(halves);
}

/// Requests that a proxy and this server may parse differently: none reaches a route as two requests, or with a body that the proxy took
/// for the next request.
#[tokio::test]
async fn shapes_that_smuggle_a_request_are_refused_or_end_the_connection() {
    let fixture = HttpFixture::with(ApiOptions::default(), ServerOptions::default(), |api, _, _| {
        api.events().merge(api.status())
    })
    .await;
    let hidden = "POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 29\r\n\r\n[{\"db\":\"a\",\"type\":\"created\"}]";
    for shape in [
        format!("Content-Length: 0\r\nContent-Length: {}\r\n\r\n{hidden}", hidden.len()),
        format!("Content-Length: 0, {}\r\n\r\n{hidden}", hidden.len()),
        format!("Content-Length: +0\r\n\r\n{hidden}"),
        format!("Content-Length : 0\r\n\r\n{hidden}"),
        format!("Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{hidden}"),
        format!("Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{hidden}"),
        format!("Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{hidden}"),
        format!("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n{hidden}"),
        format!("Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n{hidden}"),
        format!("Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n{hidden}"),
        format!("Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n\r\n{hidden}"),
        format!("X: a\r\n Content-Length: 0\r\n\r\n{hidden}"),
    ] {
        let mut connection = Connection::open(fixture.at()).await;
        connection.send(&format!("POST /_notibus/events HTTP/1.1\r\nHost: localhost\r\n{shape}")).await;
        let answers = connection.everything().await;
        let refusals = ["HTTP/1.1 4", "HTTP/1.1 5"].map(|status| answers.matches(status).count());
        assert_eq!(
            answers.matches("HTTP/1.1 ").count(),
            refusals.iter().sum::<usize>(),
            "{shape:?}: {answers}"
        );
        assert!(answers.matches("HTTP/1.1 ").count() <= 1, "{shape:?}: {answers}");
    }
    assert!(fixture.bus.is_drained().await.unwrap());
    assert_eq!(fixture.bus.stats().folded.total(), 0, "nothing was recorded");
}

/// Unknown and known names cause the same work: each secret is hashed once and compared with every line, whatever the name.
#[tokio::test]
async fn nothing_distinguishes_unknown_names_from_known_ones() {
    let options = ApiOptions::default().authorize(credentials(&[line("anna"), line("bob")]));
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| {
        api.db_updates().merge(api.sessions())
    })
    .await;
    let mut answers = Vec::new();
    for (name, tried) in
        [("anna", "wrong".to_owned()), ("anna", secret("bob")), ("carl", secret("bob")), ("", secret("anna"))]
    {
        let by_header = ask(fixture.at(), "GET", "/_db_updates", &basic(name, &tried), "").await;
        let form = format!("name={name}&password={tried}");
        for mut answer in [by_header, ask(fixture.at(), "POST", "/_session", "", &form).await] {
            for changing in ["date", "x-couch-request-id"] {
                answer.head.headers.remove(changing);
            }
            let mut headers: Vec<_> = answer.head.headers.into_iter().collect();
            headers.sort();
            answers.push((answer.head.status, headers, answer.body));
        }
    }
    assert_eq!(answers[0].0, 401);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}

/// Regression: the server checked the caller of a feed only when the feed began, so the feeds of a removed name continued.
#[tokio::test]
async fn the_open_feeds_of_a_removed_name_end() {
    let known: Credentials = [line("anna"), line("bob")].join("\n").parse().unwrap();
    let options = ApiOptions::default().authorize(Arc::new(known.clone()));
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| api.db_updates()).await;
    let mut feeds = Vec::new();
    for name in ["anna", "bob"] {
        for feed in ["longpoll", "continuous", "eventsource"] {
            let target = format!("/_db_updates?feed={feed}&since=now&heartbeat=60000");
            let mut connection = Connection::open(fixture.at()).await;
            let head = format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n{}\r\n", bearer(name));
            connection.send(&head).await;
            assert_eq!(connection.head().await.status, 200);
            feeds.push((name, connection));
        }
    }
    known.replace(&line("bob")).unwrap();
    for (name, mut connection) in feeds {
        if name == "anna" {
            within("the end", connection.rest()).await;
        } else {
            fixture.event(&db(&format!("db{}", fastrand::u64(..)), 1), EventKind::Created).await;
            while !within("a row", connection.chunk()).await.unwrap().contains("db_name") {}
        }
    }
}

#[tokio::test]
async fn pages_of_origins_that_are_named_may_ask() {
    let origins = vec!["https://app.example".to_owned()];
    let limits = ServerOptions::default().cors_origins(origins).cors_credentials(true);
    let fixture =
        HttpFixture::with(ApiOptions::default(), limits, |api, _, _| api.db_updates().merge(api.events()))
            .await;
    let page = "Origin: https://app.example\r\nSec-Fetch-Site: cross-site\r\n";
    let answer = ask(fixture.at(), "GET", "/_db_updates", page, "").await;
    assert_eq!(answer.head.status, 200);
    for (header, value) in
        [("access-control-allow-origin", "https://app.example"), ("access-control-allow-credentials", "true")]
    {
        assert_eq!(answer.head.headers[header], value);
    }
    assert!(answer.head.headers["vary"].contains("origin"));
    assert!(answer.head.headers["access-control-expose-headers"].contains("etag"));
    let asks = format!(
        "{page}Access-Control-Request-Method: GET\r\nAccess-Control-Request-Headers: authorization\r\n"
    );
    let preflight = ask(fixture.at(), "OPTIONS", "/_db_updates", &asks, "").await;
    assert_eq!((preflight.head.status, &*preflight.head.headers["access-control-max-age"]), (200, "600"));
    assert!(preflight.head.headers["access-control-allow-methods"].contains("GET"));
    assert!(preflight.head.headers["access-control-allow-headers"].contains("authorization"));
    let other = ask(fixture.at(), "GET", "/_db_updates", "Origin: https://evil.example\r\n", "").await;
    assert_eq!(other.head.status, 403);
    assert!(!other.head.headers.contains_key("access-control-allow-origin"));
    assert!(other.head.headers["vary"].contains("origin"));
    // Regression: this answer had no `Vary` header, so a shared cache gave it to pages without the headers that allow them to read it.
    let none = get(fixture.at(), "/_db_updates").await;
    assert!(none.head.status == 200 && none.head.headers["vary"].contains("origin"));
    assert_eq!(ask(fixture.at(), "POST", "/_notibus/events", page, "[]").await.head.status, 403);
}

/// Regression: the server did not distinguish callers with credentials, so each could do everything, and all tokens counted as one client.
#[tokio::test]
async fn callers_may_do_what_their_roles_say() {
    let lines = [
        line("reader") + " roles=_db_updates reads=shop/*",
        line("writer") + " roles=_events",
        line("scraper") + " roles=_metrics",
        line("admin"),
    ];
    let options = ApiOptions::default().authorize(credentials(&lines)).feeds_per_name_max(1);
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
    // The statuses are for the reader, the writer, the scraper and the admin.
    for (method, target, statuses) in [
        ("GET", "/_db_updates", [200, 401, 401, 200]),
        ("GET", "/_all_dbs", [200, 401, 401, 200]),
        ("GET", "/shop%2Fa", [200, 403, 403, 200]),
        ("GET", "/logs", [403, 403, 403, 200]),
        // These databases have no changes feed, but only callers that may read them learn this.
        ("GET", "/shop%2Fa/_changes", [404, 403, 403, 404]),
        ("GET", "/logs/_changes", [403, 403, 403, 404]),
        ("GET", "/logs/_changes/1", [403, 403, 403, 404]),
        ("GET", "/logs/_changes/_meta", [403, 403, 403, 404]),
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
    // Each name counts as a separate client.
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

/// The accounts of a layer whose proxy sets a header with the name of the caller.
#[derive(Debug)]
struct Proxy;

impl Authorize for Proxy {
    fn authorize<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Caller, Failure>> {
        Box::pin(async {
            let user = request.headers.get("x-user").and_then(|user| user.to_str().ok());
            let user = user.ok_or_else(|| Failure::bad_request("The proxy names nobody."))?;
            let grant: Grant = if user == "root" { Grant::admin() } else { "roles=_db_updates".parse()? };
            Ok(Caller::new(user, grant))
        })
    }
}

#[tokio::test]
async fn a_layer_says_who_asks_and_what_they_may() {
    let options = ApiOptions::default().authorize(Arc::new(Proxy));
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| {
        api.db_updates().merge(api.status()).merge(api.sessions())
    })
    .await;
    for (user, target, status) in [
        ("", "/_db_updates", 400),
        ("X-User: anna\r\n", "/_db_updates", 200),
        ("X-User: anna\r\n", "/_notibus/status", 401),
        ("X-User: root\r\n", "/_notibus/status", 200),
        ("", "/_notibus/health/live", 200),
    ] {
        assert_eq!(ask(fixture.at(), "GET", target, user, "").await.head.status, status, "{user} {target}");
    }
    let who = ask(fixture.at(), "GET", "/_session", "X-User: anna\r\n", "").await.json();
    assert_eq!(who["userCtx"], serde_json::json!({ "name": "anna", "roles": ["_db_updates"] }));
    assert_eq!(ask(fixture.at(), "POST", "/_session", "", "name=a&password=b").await.head.status, 401);
}
