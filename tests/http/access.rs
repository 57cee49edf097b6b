//! Who may ask for what.

use notibus::http::{Access, ApiOptions, Credentials, Hosts, ServerOptions};

use crate::{
    client::{Connection, ask, get},
    world::World,
};

#[tokio::test]
async fn only_admins_are_told() {
    let token = "0123456789abcdef0123456789abcdef";
    let lines = [Credentials::password("anna", "secret").unwrap(), Credentials::token(token).unwrap()];
    let access = Access::Credentials(lines.join("\n").parse().unwrap());
    let options = ApiOptions { access, ..ApiOptions::default() };
    let world = World::with(options, ServerOptions::default(), |api, _, bus| {
        let changes = api.changes(&bus.changes(), api.recorded_databases());
        api.db_updates().merge(changes).merge(api.events()).merge(api.status())
    })
    .await;

    let none = get(world.at(), "/_db_updates").await;
    assert_eq!(none.head.status, 401);
    assert_eq!(none.body, "{\"error\":\"unauthorized\",\"reason\":\"You are not a server admin.\"}\n");
    assert!(none.head.headers["www-authenticate"].starts_with("Basic "));
    // anna:wrong
    let wrong = ask(world.at(), "GET", "/_db_updates", "Authorization: Basic YW5uYTp3cm9uZw==\r\n", "").await;
    assert_eq!(wrong.head.status, 401);
    assert_eq!(wrong.body, "{\"error\":\"unauthorized\",\"reason\":\"Name or password is incorrect.\"}\n");
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
        assert_eq!(ask(world.at(), method, target, "", "[]").await.head.status, 401, "{target}");
    }
    // anna:secret
    for header in ["Authorization: Basic YW5uYTpzZWNyZXQ=\r\n", &format!("Authorization: Bearer {token}\r\n")]
    {
        for _ in 0..2 {
            assert_eq!(ask(world.at(), "GET", "/_db_updates", header, "").await.head.status, 200);
        }
        assert_eq!(ask(world.at(), "GET", "/_notibus/status", header, "").await.head.status, 200);
    }
    assert_eq!(get(world.at(), "/_notibus/health/live").await.head.status, 200);
    assert_eq!(get(world.at(), "/_notibus/health/ready").await.head.status, 200);
}

/// The pages of anyone could once use a server on a loopback address through the browser of whoever looks at them.
#[tokio::test]
async fn an_open_server_answers_no_pages_from_elsewhere() {
    let limits = ServerOptions { hosts: Hosts::Local(vec!["here".into()]), ..ServerOptions::default() };
    let world = World::with(ApiOptions::default(), limits, |api, _, _| {
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
        let mut connection = Connection::open(world.at()).await;
        let origin = if origin.is_empty() { String::new() } else { format!("Origin: {origin}\r\n") };
        let length = body.len();
        let head =
            format!("POST {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n{origin}\r\n");
        connection.send(&(head + body)).await;
        let answer = connection.answer().await;
        assert_eq!(answer.head.status, status, "{target} {host} {origin}");
        assert_eq!(answer.json()["error"], error);
    }
    assert!(world.bus.is_drained().await.unwrap());
    assert_eq!(world.bus.stats().folded.total(), 0, "nothing was recorded");
    assert_eq!(ask(world.at(), "POST", "/_notibus/events", "", body).await.head.status, 201);
    let same = "Origin: http://here\r\n";
    assert_eq!(ask(world.at(), "GET", "/_db_updates", same, "").await.head.status, 200);
}
