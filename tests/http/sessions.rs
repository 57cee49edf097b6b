//! Tests log-ins with cookies, and the requests that clients send before they follow a server.

use std::sync::Arc;

use notibus::{
    EventKind,
    http::{ApiOptions, Authorize, Credentials, ServerOptions, allow_all},
    store::{Isolation, KeyRange, RangeRead, Transaction},
};

use crate::{
    client::{Connection, ask, get},
    common::{db, record, until},
    fixture::{HttpFixture, bearer, credentials, line, secret},
};

async fn fixture(authorize: Arc<dyn Authorize>) -> HttpFixture {
    let options = ApiOptions::default().authorize(authorize);
    let limits = ServerOptions::default().is_public(true);
    HttpFixture::with(options, limits, |api, _, _| {
        let known = api.catalogue(api.recorded_databases());
        api.db_updates().merge(api.sessions()).merge(known).merge(api.welcome())
    })
    .await
}

/// Regression: the server had no `/_session`, so clients that logged in with `POST /_session` got 404.
#[tokio::test]
async fn a_session_begins_is_known_and_ends() {
    let fixture = fixture(credentials(&[line("anna")])).await;
    let form = "Content-Type: application/x-www-form-urlencoded\r\n";
    let json = "Content-Type: application/json\r\nX-Forwarded-Proto: https\r\n";
    let mut cookies = Vec::new();
    let right = format!("name=anna&password={}", secret("anna"));
    for (kind, body) in
        [(form, &right), (json, &format!(r#"{{"name":"anna","password":"{}"}}"#, secret("anna")))]
    {
        let answer = ask(fixture.at(), "POST", "/_session", kind, body).await;
        assert_eq!(answer.head.status, 200, "{answer:?}");
        assert_eq!(answer.json(), serde_json::json!({ "ok": true, "name": "anna", "roles": ["_admin"] }));
        let cookie = answer.head.headers["set-cookie"].clone();
        assert!(cookie.contains("; HttpOnly; SameSite=Strict") && cookie.contains("Path=/"), "{cookie}");
        assert_eq!(cookie.ends_with("; Secure"), kind == json, "behind TLS only");
        cookies.push(format!("Cookie: {}\r\n", cookie.split(';').next().unwrap()));
    }
    for cookie in &cookies {
        assert_eq!(ask(fixture.at(), "GET", "/_db_updates", cookie, "").await.head.status, 200);
        let who = ask(fixture.at(), "GET", "/_session", cookie, "").await;
        let who_json = who.json();
        assert_eq!(
            (&who_json["userCtx"]["name"], &who_json["info"]["authenticated"]),
            (&"anna".into(), &"cookie".into())
        );
        // Regression: a request for the current user did not renew the session, and a renewed session never ended.
        let renewed = who.head.headers["set-cookie"].split(';').next().unwrap().to_owned();
        let renewed = format!("Cookie: {renewed}\r\n");
        assert_eq!(ask(fixture.at(), "GET", "/_db_updates", &renewed, "").await.head.status, 200);
    }
    // As in CouchDB, a program may ask whether it must log in.
    assert_eq!(get(fixture.at(), "/_session?basic=true").await.head.status, 401);
    let known = ask(fixture.at(), "GET", "/_session?basic=true", &cookies[0], "").await;
    assert_eq!(known.head.status, 200);
    let redirected = ask(fixture.at(), "POST", "/_session?next=//evil.example", form, &right).await;
    assert_eq!(redirected.head.status, 400);
    let forged = cookies[0].replace("AuthSession=", "AuthSession=A");
    assert_eq!(ask(fixture.at(), "GET", "/_db_updates", &forged, "").await.head.status, 401);
    let nobody = get(fixture.at(), "/_session").await.json();
    assert_eq!((&nobody["ok"], &nobody["userCtx"]["name"]), (&true.into(), &serde_json::Value::Null));
    assert_eq!(nobody["userCtx"]["roles"], serde_json::json!([]));
    let ended = ask(fixture.at(), "DELETE", "/_session", &cookies[0], "").await;
    assert!(
        ended.head.headers["set-cookie"]
            .starts_with("AuthSession=; Version=1; Expires=Thu, 01 Jan 1970 00:00:00 GMT; Max-Age=0;")
    );
    let long = "x".repeat(17_000);
    for (body, status) in [
        ("name=anna&password=wrong", 401),
        (&right.replace("name=anna", "name=nobody"), 401),
        ("name=anna", 400),
        (&*long, 413),
    ] {
        assert_eq!(ask(fixture.at(), "POST", "/_session", form, body).await.head.status, status, "{body}");
    }
}

/// A cookie is valid only as long as the secret of its name.
#[tokio::test]
async fn a_session_ends_with_its_name_and_with_its_secret() {
    let credentials: Credentials = format!("{}\n{}", line("anna"), line("bob")).parse().unwrap();
    let fixture = fixture(Arc::new(credentials.clone())).await;
    let body = format!("name=bob&password={}", secret("bob"));
    let answer = ask(fixture.at(), "POST", "/_session", "", &body).await;
    let cookie = format!("Cookie: {}\r\n", answer.head.headers["set-cookie"].split(';').next().unwrap());
    let status = async || ask(fixture.at(), "GET", "/_db_updates", &cookie, "").await.head.status;
    assert_eq!(status().await, 200);
    for (lines, expected) in
        [(line("anna"), 401), (Credentials::line("bob", &secret("other")).unwrap(), 401), (line("bob"), 200)]
    {
        credentials.replace(&lines).unwrap();
        assert_eq!(status().await, expected, "{lines}");
    }
}

/// Regression: log-ins were accepted from any page, so a page could make its visitor work in a stranger's account.
#[tokio::test]
async fn a_page_from_elsewhere_may_not_log_in_unless_it_is_named() {
    let origins = vec!["https://app.example".to_owned()];
    let options = ApiOptions::default().authorize(credentials(&[line("anna")]));
    let limits = ServerOptions::default().hosts(None).cors_origins(origins).cors_credentials(true);
    let fixture = HttpFixture::with(options, limits, |api, _, _| api.sessions()).await;
    let body = format!("name=anna&password={}", secret("anna"));
    for (headers, status) in [
        ("", 200),
        ("Origin: http://localhost\r\n", 200),
        ("Origin: https://app.example\r\nSec-Fetch-Site: cross-site\r\n", 200),
        // A proxy may send the host without its port.
        ("Origin: https://localhost:8443\r\nSec-Fetch-Site: same-origin\r\n", 200),
        ("Origin: https://page.example\r\n", 403),
        ("Origin: null\r\n", 403),
        ("Sec-Fetch-Site: cross-site\r\n", 403),
    ] {
        let answer = ask(fixture.at(), "POST", "/_session", headers, &body).await;
        assert_eq!(answer.head.status, status, "{headers}");
        assert_eq!(answer.head.headers.contains_key("set-cookie"), status == 200, "{headers}");
    }
}

/// Regression: log-ins shared the room of all bodies, so strangers that stalled while logging in used it up, and valid tokens got 503.
#[tokio::test]
async fn log_ins_that_stall_take_nothing_from_callers_with_secrets() {
    let room = 10_000;
    let options =
        ApiOptions::default().authorize(credentials(&[line("anna")])).body_len_max(room).bodies_len_max(room);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, _| {
        api.sessions().merge(api.events()).merge(api.db_updates())
    })
    .await;
    let mut stalled = Vec::new();
    for _ in 0..219 {
        let mut connection = Connection::open(fixture.at()).await;
        let head = "POST /_session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16000\r\n\r\n";
        connection.send(&format!("{head}{}", "x".repeat(15_900))).await;
        stalled.push(connection);
    }
    // There are 64 places of 16 KiB for log-ins, each for at most 5 s. Further log-ins are refused at once.
    let body = format!("name=anna&password={}", secret("anna"));
    let full = ask(fixture.at(), "POST", "/_session", "", &body).await;
    assert_eq!((full.head.status, &*full.head.headers["retry-after"]), (503, "1"));
    let events: Vec<_> = (0..200).map(|n| format!(r#"{{"db":"d{n}","type":"created"}}"#)).collect();
    let events = format!("[{}]", events.join(","));
    assert!(events.len() > room / 2);
    let answer = ask(fixture.at(), "POST", "/_notibus/events", &bearer("anna"), &events).await;
    assert_eq!(answer.head.status, 201, "{}", answer.body);
    let log_in = async || ask(fixture.at(), "POST", "/_session", "", &body).await.head.status == 200;
    until("the end of those that stall", log_in).await;
    drop(stalled);
}

/// Regression: callers without any right to a database could send long bodies to `/{db}` and `/{db}/_changes`, and so keep others from
/// recording.
#[tokio::test]
async fn callers_who_only_read_take_nothing_from_those_who_record() {
    let room = 100_000;
    let lines = [line("scraper") + " roles=_metrics", line("writer") + " roles=_events"];
    let options =
        ApiOptions::default().authorize(credentials(&lines)).body_len_max(room).bodies_len_max(room);
    let fixture = HttpFixture::with(options, ServerOptions::default(), |api, _, bus| {
        let databases = api.recorded_databases();
        api.events()
            .merge(api.changes(&bus.changes(), Arc::clone(&databases)))
            .merge(api.catalogue(databases))
    })
    .await;
    let event = r#"[{"db":"a","type":"created"}]"#;
    let mut answers = Vec::new();
    for start in ["POST /no/_changes", "GET /no"] {
        let mut stalled = Connection::open(fixture.at()).await;
        let head = format!(
            "{start} HTTP/1.1\r\nHost: localhost\r\n{}Content-Length: {room}\r\n\r\n",
            bearer("scraper")
        );
        stalled.send(&(head + &" ".repeat(room - 1_000))).await;
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let answer = ask(fixture.at(), "POST", "/_notibus/events", &bearer("writer"), event).await;
        answers.push((start, answer.head.status));
        drop(stalled);
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    }
    assert_eq!(answers, [("POST /no/_changes", 201), ("GET /no", 201)]);
}

#[tokio::test]
async fn an_open_server_says_that_everyone_is_its_admin() {
    let fixture = fixture(allow_all()).await;
    let who = get(fixture.at(), "/_session").await.json();
    assert_eq!(who["userCtx"], serde_json::json!({ "name": null, "roles": ["_admin"] }));
    assert_eq!(ask(fixture.at(), "POST", "/_session", "", "name=a&password=b").await.head.status, 401);
    assert_eq!(ask(fixture.at(), "PUT", "/_session", "", "").await.head.status, 405);
}

/// Regression: the server had no `/_up`, `/_all_dbs` and `/{db}`, so clients that request these before they follow a feed got 404.
#[tokio::test]
async fn up_and_lists_and_infos_of_databases_have_what_the_feed_knows() {
    let fixture = fixture(allow_all()).await;
    for name in ["b", "a", "gone"] {
        fixture.event(&db(name, 1), EventKind::Created).await;
    }
    fixture.event(&db("gone", 1), EventKind::Deleted).await;
    let last = fixture.event(&db("a", 1), EventKind::Updated).await;
    assert_eq!(get(fixture.at(), "/_up").await.json()["status"], "ok");
    assert_eq!(get(fixture.at(), "/_all_dbs").await.json(), serde_json::json!(["a", "b"]));
    let info = get(fixture.at(), "/a").await.json();
    assert_eq!((&info["db_name"], &info["update_seq"]), (&"a".into(), &last.sequence.to_string().into()));
    for (target, reason) in [("/gone", "Database does not exist."), ("/none", "Database does not exist.")] {
        let answer = get(fixture.at(), target).await;
        assert_eq!((answer.head.status, &answer.json()["reason"]), (404, &reason.into()));
    }
    assert_eq!(ask(fixture.at(), "PUT", "/a", "", "").await.head.status, 405);
    // Regression: the body of this refusal was not JSON, so clients could not parse it.
    let broken = get(fixture.at(), "/%ff").await;
    assert_eq!((broken.head.status, &broken.json()["error"]), (400, &"bad_request".into()));
    // Regression: the server ignored CouchDB's parameters, so a request for one name got all names.
    assert_eq!(get(fixture.at(), "/_all_dbs?limit=1").await.head.status, 400);
}

/// Regression: the server built the list of all databases as one text in memory, so with 300,000 databases it held 9 MB for each client
/// that did not read the list.
///
/// A chunk had a limit of 256 names, but none in bytes, so with long names that need JSON escapes it took 1.5 MB.
#[tokio::test]
async fn a_long_list_of_databases_comes_in_pieces() {
    let fixture = fixture(allow_all()).await;
    assert_eq!(get(fixture.at(), "/_all_dbs").await.body, "[]\n");
    let mut names: Vec<_> = (0..700).map(|n| format!("db{n}")).collect();
    for name in &names {
        record(&fixture.store, &fixture.bus, &db(name, 1), EventKind::Created.once().lanes()).await;
    }
    until("all rows", async || fixture.bus.stats().folded.total() >= 700).await;
    fixture.event(&db("db300", 1), EventKind::Deleted).await;
    names.retain(|name| name != "db300");
    names.sort_unstable();
    let mut connection = Connection::get(fixture.at(), "/_all_dbs").await;
    assert_eq!(connection.head().await.headers["content-type"], "application/json");
    let (mut pieces, mut list) = (0, String::new());
    while let Some(piece) = connection.chunk().await {
        assert!(piece.matches(',').count() <= 256, "{piece}");
        pieces += 1;
        list.push_str(&piece);
    }
    assert!(pieces >= 3, "{pieces}");
    assert_eq!(serde_json::from_str::<Vec<String>>(&list).unwrap(), names);
    for n in 0..200 {
        let name = format!("{}{n}", "\u{1}".repeat(1_000));
        record(&fixture.store, &fixture.bus, &db(&name, 1), EventKind::Created.once().lanes()).await;
    }
    until("all rows", async || fixture.bus.stats().folded.total() >= 901).await;
    let mut connection = Connection::get(fixture.at(), "/_all_dbs").await;
    connection.head().await;
    let mut list = String::new();
    while let Some(piece) = connection.chunk().await {
        assert!(piece.len() <= 6 * (66 << 10), "{} bytes", piece.len());
        list.push_str(&piece);
    }
    assert_eq!(serde_json::from_str::<Vec<String>>(&list).unwrap().len(), 899);
}

/// Regression: lists of databases did not skip rows that cannot be decoded, so one such row made each list fail or end early, permanently.
#[tokio::test]
async fn a_broken_row_does_not_stop_the_list_of_databases() {
    let fixture = fixture(allow_all()).await;
    for name in ["a", "b", "c"] {
        fixture.event(&db(name, 1), EventKind::Created).await;
    }
    let read = RangeRead::new(KeyRange::prefix(b"notibus\x15\x04".to_vec()));
    let rows = fixture.store.begin().get_range(&read, Isolation::Snapshot).await.unwrap().rows;
    let broken = async |tx: Transaction| {
        tx.set(&rows[1].0, b"junk");
        Ok(())
    };
    fixture.store.run(broken).await.unwrap();
    let answer = get(fixture.at(), "/_all_dbs").await;
    assert_eq!(answer.json(), serde_json::json!(["a", "c"]));
}
