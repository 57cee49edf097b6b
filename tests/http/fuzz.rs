//! No request makes the server fail: whatever its query string and headers, the status of the answer is below 500.

use notibus::http::{ApiOptions, ServerOptions};
use proptest::prelude::*;

use crate::{
    client::{Connection, LIMIT},
    common::db,
    fixture::HttpFixture,
    layer::Layer,
};

/// Makes a parameter as a client might send it, right or wrong.
fn parameter() -> impl Strategy<Value = String> {
    let key = prop_oneof![
        Just("feed".to_owned()),
        Just("since".to_owned()),
        Just("limit".to_owned()),
        Just("timeout".to_owned()),
        Just("heartbeat".to_owned()),
        Just("descending".to_owned()),
        Just("types".to_owned()),
        Just("names".to_owned()),
        Just("style".to_owned()),
        Just("include_docs".to_owned()),
        Just("filter".to_owned()),
        Just("doc_ids".to_owned()),
        Just("conflicts".to_owned()),
        Just("attachments".to_owned()),
        Just("seq_interval".to_owned()),
        Just("Last-Event-ID".to_owned()),
        "[a-zA-Z%_]{0,5}",
    ];
    let value = prop_oneof![
        Just("normal".to_owned()),
        Just("longpoll".to_owned()),
        Just("continuous".to_owned()),
        Just("eventsource".to_owned()),
        Just("now".to_owned()),
        Just("true".to_owned()),
        Just("0".to_owned()),
        Just("created,ddoc_updated".to_owned()),
        Just("_doc_ids".to_owned()),
        Just("%5B%22a%22%5D".to_owned()),
        "[0-9]{1,25}",
        "[0-9a-f]{26}(-[0-9a-f]{26}){0,2}",
        "0{20}[0-9a-f]{6}(-0{20}[0-9a-f]{6}){0,2}",
        "%22[0-9a-f]{26}%22",
        "0{20}[0-9a-f]{6}-0{20}[0-9a-f]{6}\\.[0-9a-f]{34}0{20}[0-9a-f]{6}",
        "[!$-~&&[^#&]]{0,12}",
    ];
    (key, value).prop_map(|(key, value)| format!("{key}={value}"))
}

/// Makes a header line as a client might send it, right or wrong.
fn header() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        Just("Last-Event-ID"),
        Just("If-None-Match"),
        Just("Authorization"),
        Just("Accept"),
        Just("Content-Type"),
        Just("Content-Encoding"),
        Just("Idempotency-Key"),
        Just("Sec-Fetch-Site"),
        Just("X-Forwarded-For"),
        Just("Connection"),
        Just("Host"),
        Just("Origin"),
    ];
    let value = prop_oneof![
        "[ -~]{0,30}",
        "[0-9a-f]{26}",
        "\\*",
        "gzip|identity|deflate",
        "(Basic|Bearer) [A-Za-z0-9+/=]{0,20}",
        "(http://)?(localhost|127.0.0.1|\\[::1\\]|[a-z.\\[\\]@]{0,6})(:[0-9]{0,6})?",
        "[\u{80}-\u{ff}]{1,5}"
    ];
    (name, value).prop_map(|(name, value)| format!("{name}: {value}\r\n"))
}

fn request() -> impl Strategy<Value = (String, String, Vec<String>, String)> {
    let method = prop_oneof![Just("GET"), Just("POST"), Just("HEAD"), Just("PUT"), Just("OPTIONS")];
    let path = prop_oneof![
        Just("/_db_updates".to_owned()),
        Just("/d/_changes".to_owned()),
        Just("/d/_changes/_meta".to_owned()),
        Just("/_notibus/events".to_owned()),
        "/(d|%ff|%2F|[a-z]{1,3})/_changes(/[0-9a-z_]{0,20})?/?",
        "/_notibus/(status|metrics|health|[a-z/]{0,5})/?",
    ];
    let query = prop::collection::vec(parameter(), 0..5);
    let body = prop_oneof![
        Just(String::new()),
        Just("{}".to_owned()),
        Just("[]".to_owned()),
        Just("{\"doc_ids\":[\"a\"]}".to_owned()),
        Just("[{\"db\":\"a\",\"type\":\"updated\"}]".to_owned()),
        Just("{\"shards\":2}".to_owned()),
        "[ -~]{0,30}",
    ];
    (method, path, query, prop::collection::vec(header(), 0..3), body).prop_map(
        |(method, path, query, headers, body)| {
            (method.to_owned(), format!("{path}?{}", query.join("&")), headers, body)
        },
    )
}

#[test]
fn no_question_makes_it_fail() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let fixture = runtime.block_on(async {
        let options = ApiOptions::default();
        let mut layer = None;
        let hosts = Some(vec!["there".to_owned()]);
        let limits = ServerOptions::default().hosts(hosts);
        let fixture = HttpFixture::with(options, limits, |api, _, bus| {
            let made = Layer::new(bus);
            let router =
                api.db_updates().merge(api.events()).merge(api.changes(&made.changes, made.clone() as _));
            let router = router.merge(api.status()).merge(api.welcome());
            layer = Some(made);
            router
        })
        .await;
        let (layer, d) = (layer.unwrap(), db("d", 1));
        layer.create(&d, 2).await;
        layer.write(&d, "a", 1, 2, false).await;
        fixture
    });
    let config = ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |((method, target, headers, body) in request())| {
        let status = runtime.block_on(async {
            let mut connection = Connection::open(fixture.at()).await;
            let length = body.len();
            let head = format!("{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{}\r\n{body}", headers.concat());
            connection.send(&head).await;
            tokio::time::timeout(LIMIT, connection.head()).await.expect("there is an answer").status
        });
        prop_assert!(status < 500, "{method} {target} {headers:?} {body:?}: {status}");
    });
}
