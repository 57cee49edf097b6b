//! Who may ask for what.

use notibus::http::{Access, ApiOptions, Credentials, ServerOptions};

use crate::{
    client::{ask, get},
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
        ("GET", "/_notibus/status"),
        ("GET", "/_notibus/metrics"),
        ("POST", "/_notibus/events"),
        ("GET", "/a/_changes"),
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
